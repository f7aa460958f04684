//! What the CPU has and the operating system has enabled, without std: CPUID and XGETBV, from an injectable source. No
//! kernel and no choice between tiers lives here.

use core::arch::x86_64::{__cpuid_count, _xgetbv};

/// Where CPUID and XCR0 come from: the CPU, or a test.
pub trait CpuidSource {
    /// EAX, EBX, ECX, EDX of a CPUID leaf.
    fn cpuid(&self, leaf: u32, subleaf: u32) -> [u32; 4];
    /// XCR0. Only called if CPUID reports OSXSAVE.
    fn xcr0(&self) -> u64;
}

/// This CPU.
#[derive(Clone, Copy, Debug)]
pub struct Cpu;

impl CpuidSource for Cpu {
    fn cpuid(&self, leaf: u32, subleaf: u32) -> [u32; 4] {
        let r = __cpuid_count(leaf, subleaf);
        [r.eax, r.ebx, r.ecx, r.edx]
    }

    fn xcr0(&self) -> u64 {
        #[target_feature(enable = "xsave")]
        fn read() -> u64 {
            // SAFETY: XCR0 exists wherever XGETBV does.
            unsafe { _xgetbv(0) }
        }
        // SAFETY: the caller has seen OSXSAVE, which implies XSAVE and an enabled XGETBV.
        unsafe { read() }
    }
}

/// A feature that a tier needs.
#[derive(Debug)]
pub(crate) struct Feature {
    /// Its name in `target_feature`, for the test that holds attributes to the probe.
    #[cfg(test)]
    pub(crate) name: &'static str,
    /// What to say where it is missing.
    missing: &'static str,
    leaf: u32,
    register: usize,
    bit: u32,
}

macro_rules! features {
    ($($ident:ident = $name:literal, CPUID $leaf:literal $register:ident[$bit:literal];)*) => {$(
        pub(crate) const $ident: Feature = Feature {
            #[cfg(test)]
            name: $name,
            missing: concat!("the CPU (or its hypervisor) does not offer ", stringify!($ident)),
            leaf: $leaf,
            register: $register,
            bit: $bit,
        };
    )*};
}

const EBX: usize = 1;
const ECX: usize = 2;

features! {
    FMA = "fma", CPUID 1 ECX[12];
    AVX = "avx", CPUID 1 ECX[28];
    F16C = "f16c", CPUID 1 ECX[29];
    AVX2 = "avx2", CPUID 7 EBX[5];
    AVX512F = "avx512f", CPUID 7 EBX[16];
    AVX512DQ = "avx512dq", CPUID 7 EBX[17];
    AVX512BW = "avx512bw", CPUID 7 EBX[30];
    AVX512VL = "avx512vl", CPUID 7 EBX[31];
}

const OSXSAVE: Feature = Feature {
    #[cfg(test)]
    name: "osxsave",
    missing: "the operating system does not save vector state (OSXSAVE is 0)",
    leaf: 1,
    register: ECX,
    bit: 27,
};
/// Registers that the operating system has to save and restore.
#[derive(Debug)]
pub(crate) struct State {
    /// Bits of XCR0, all of which must be set.
    xcr0: u64,
    /// What to say where they are not.
    missing: &'static str,
}

/// XMM and YMM.
#[cfg(feature = "avx2")]
pub(crate) const YMM: State =
    State { xcr0: 0b110, missing: "the operating system has not enabled the YMM state (XCR0)" };
/// Those, the opmasks, the upper halves of ZMM0 to 15, and ZMM16 to 31.
#[cfg(feature = "avx512")]
pub(crate) const ZMM: State =
    State { xcr0: 0b1110_0110, missing: "the operating system has not enabled the opmask and ZMM state (XCR0)" };

/// Checks every feature bit and the operating system's part; the error says what is missing.
pub(crate) fn check(source: &impl CpuidSource, features: &[Feature], state: &State) -> Result<(), &'static str> {
    let max_leaf = source.cpuid(0, 0)[0];
    for Feature { missing, leaf, register, bit, .. } in features.iter().chain([&OSXSAVE]) {
        if *leaf > max_leaf || source.cpuid(*leaf, 0)[*register] >> bit & 1 == 0 {
            return Err(missing);
        }
    }
    if source.xcr0() & state.xcr0 != state.xcr0 {
        return Err(state.missing);
    }
    Ok(())
}

/// Declares a tier's token from its table, its features and the state that it needs.
macro_rules! token {
    ($name:ident, $table:ident, $features:ident, $state:ident) => {
        /// Proof that this CPU can run the tier; only the probe makes one.
        #[derive(Clone, Copy, Debug)]
        pub struct $name(());

        impl $name {
            /// Asks `source`.
            ///
            /// # Errors
            ///
            /// What is missing.
            pub fn probe(source: &impl $crate::CpuidSource) -> Result<Self, &'static str> {
                $crate::probe::check(source, &$features, &$crate::probe::$state).map(|()| $name(()))
            }

            /// Asks this CPU.
            ///
            /// # Errors
            ///
            /// What is missing.
            pub fn detect() -> Result<Self, &'static str> {
                Self::probe(&$crate::Cpu)
            }

            /// The tier.
            pub fn tier(self) -> rotile_core::kernel::Tier {
                // SAFETY: the token proves every feature that the kernels enable, and the kernel battery holds them to the
                // contracts of the fields.
                unsafe { rotile_core::kernel::Tier::new(&$table, &$crate::FP_CONTROL) }
            }
        }
    };
}
pub(crate) use token;

/// Holds every `target_feature` attribute in a folder of `src` to a tier's list, less the features that others `imply`: code
/// may use nothing that the probe has not asked for.
#[cfg(test)]
pub(crate) fn attributes_name(folder: &str, features: &[Feature], implied: &[&str]) {
    extern crate std;
    use std::{format, string::String, vec::Vec};
    let names: Vec<&str> = features.iter().map(|f| f.name).filter(|name| !implied.contains(name)).collect();
    let attribute = format!("#[target_feature(enable = \"{}\")]", names.join(","));
    let (mut files, mut attributes) = (0, 0);
    for file in std::fs::read_dir(format!("{}/src/{folder}", env!("CARGO_MANIFEST_DIR"))).unwrap() {
        let path = file.unwrap().path();
        let source: String = std::fs::read_to_string(&path).unwrap();
        files += 1;
        for line in source.lines().map(str::trim).filter(|line| line.starts_with("#[target_feature")) {
            assert_eq!(line, attribute, "{}", path.display());
            attributes += 1;
        }
    }
    assert!(
        files >= 7 && attributes > 50,
        "{attributes} attributes in {files} files: does this test look in the right place?"
    );
}

#[cfg(all(test, feature = "avx2", feature = "avx512"))]
mod tests {
    use super::*;
    use crate::{Avx2, Avx512};

    /// A CPU with everything, minus what a test takes away.
    #[derive(Clone, Copy)]
    struct Mock {
        max_leaf: u32,
        leaf1_ecx: u32,
        leaf7_ebx: u32,
        xcr0: Option<u64>,
    }

    const ALL: Mock = Mock {
        max_leaf: 7,
        leaf1_ecx: 1 << 12 | 1 << 27 | 1 << 28 | 1 << 29,
        leaf7_ebx: 1 << 5 | 1 << 16 | 1 << 17 | 1 << 30 | 1 << 31,
        xcr0: Some(0b1110_0111),
    };

    impl CpuidSource for Mock {
        fn cpuid(&self, leaf: u32, _: u32) -> [u32; 4] {
            match leaf {
                0 => [self.max_leaf, 0, 0, 0],
                1 => [0, 0, self.leaf1_ecx, 0],
                // What a CPU says beyond its last leaf is noise.
                7 => [0, self.leaf7_ebx, 0, 0],
                _ => [!0; 4],
            }
        }
        fn xcr0(&self) -> u64 {
            self.xcr0.expect("XGETBV would fault without OSXSAVE")
        }
    }

    fn missing(mock: Mock) -> &'static str {
        Avx2::probe(&mock).expect_err("the tier must not be offered")
    }

    fn missing512(mock: Mock) -> &'static str {
        Avx512::probe(&mock).expect_err("the tier must not be offered")
    }

    #[test]
    fn everything_gives_both_tiers() {
        assert!(Avx2::probe(&ALL).is_ok() && Avx512::probe(&ALL).is_ok());
    }

    #[test]
    fn b73_os_without_ymm() {
        let no_osxsave = Mock { leaf1_ecx: ALL.leaf1_ecx & !(1 << 27), xcr0: None, ..ALL };
        assert!(missing(no_osxsave).contains("OSXSAVE"));
        for xcr0 in [0b000, 0b001, 0b011, 0b101, 0b111_0000_0011] {
            assert!(missing(Mock { xcr0: Some(xcr0), ..ALL }).contains("YMM state"), "XCR0 = {xcr0:#b}");
        }
    }

    #[test]
    fn b73_os_without_zmm() {
        let no_osxsave = Mock { leaf1_ecx: ALL.leaf1_ecx & !(1 << 27), xcr0: None, ..ALL };
        assert!(missing512(no_osxsave).contains("OSXSAVE"));
        // No state but that of AVX; each of the five parts missing; everything else.
        for xcr0 in [0b111, 0b1110_0101, 0b1110_0011, 0b1100_0111, 0b1010_0111, 0b0110_0111, !0b1110_0110] {
            let mock = Mock { xcr0: Some(xcr0), ..ALL };
            assert!(missing512(mock).contains("ZMM state"), "XCR0 = {xcr0:#b}");
            assert_eq!(Avx2::probe(&mock).is_ok(), xcr0 & 0b110 == 0b110, "XCR0 = {xcr0:#b}");
        }
    }

    #[test]
    fn b74_avx512_in_part() {
        for (bit, name) in [(5, " AVX2"), (16, " AVX512F"), (17, " AVX512DQ"), (30, " AVX512BW"), (31, " AVX512VL")] {
            assert!(missing512(Mock { leaf7_ebx: ALL.leaf7_ebx & !(1 << bit), ..ALL }).ends_with(name), "{name}");
        }
        for (bit, name) in [(12, " FMA"), (28, " AVX"), (29, " F16C")] {
            assert!(missing512(Mock { leaf1_ecx: ALL.leaf1_ecx & !(1 << bit), ..ALL }).ends_with(name), "{name}");
        }
        assert!(missing512(Mock { max_leaf: 6, ..ALL }).starts_with("the CPU"));
    }

    #[test]
    fn b74_avx2_without_fma() {
        assert!(missing(Mock { leaf1_ecx: ALL.leaf1_ecx & !(1 << 12), ..ALL }).ends_with(" FMA"));
    }

    #[test]
    fn b74_avx2_without_f16c() {
        assert!(missing(Mock { leaf1_ecx: ALL.leaf1_ecx & !(1 << 29), ..ALL }).ends_with(" F16C"));
    }

    #[test]
    fn b74_avx2_itself_missing() {
        assert!(missing(Mock { leaf1_ecx: ALL.leaf1_ecx & !(1 << 28), ..ALL }).ends_with(" AVX"));
        assert!(missing(Mock { leaf7_ebx: !(1 << 5), ..ALL }).ends_with(" AVX2"));
        // What lies beyond the last leaf is noise.
        assert!(missing(Mock { max_leaf: 6, ..ALL }).ends_with(" AVX2"));
        assert!(missing(Mock { max_leaf: 0, ..ALL }).starts_with("the CPU"));
    }

    #[test]
    fn probe_agrees_with_std() {
        extern crate std;
        let std_says = std::is_x86_feature_detected!("avx2")
            && std::is_x86_feature_detected!("fma")
            && std::is_x86_feature_detected!("f16c");
        assert_eq!(Avx2::detect().is_ok(), std_says);
        let std_says = std_says
            && std::is_x86_feature_detected!("avx512f")
            && std::is_x86_feature_detected!("avx512bw")
            && std::is_x86_feature_detected!("avx512vl")
            && std::is_x86_feature_detected!("avx512dq");
        assert_eq!(Avx512::detect().is_ok(), std_says);
    }
}

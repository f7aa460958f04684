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
}

const OSXSAVE: Feature = Feature {
    #[cfg(test)]
    name: "osxsave",
    missing: "the operating system does not save vector state (OSXSAVE is 0)",
    leaf: 1,
    register: ECX,
    bit: 27,
};
/// XCR0 bits of the XMM and YMM state.
const YMM_STATE: u64 = 0b110;

/// Checks every feature bit and the operating system's part of the YMM state; the error says what is missing.
pub(crate) fn ymm_tier(source: &impl CpuidSource, features: &[Feature]) -> Result<(), &'static str> {
    let max_leaf = source.cpuid(0, 0)[0];
    for Feature { missing, leaf, register, bit, .. } in features.iter().chain([&OSXSAVE]) {
        if *leaf > max_leaf || source.cpuid(*leaf, 0)[*register] >> bit & 1 == 0 {
            return Err(missing);
        }
    }
    if source.xcr0() & YMM_STATE != YMM_STATE {
        return Err("the operating system has not enabled the YMM state (XCR0)");
    }
    Ok(())
}

#[cfg(all(test, feature = "avx2"))]
mod tests {
    use super::*;
    use crate::Avx2;

    /// A CPU with everything, minus what a test takes away.
    #[derive(Clone, Copy)]
    struct Mock {
        max_leaf: u32,
        leaf1_ecx: u32,
        leaf7_ebx: u32,
        xcr0: Option<u64>,
    }

    const ALL: Mock =
        Mock { max_leaf: 7, leaf1_ecx: 1 << 12 | 1 << 27 | 1 << 28 | 1 << 29, leaf7_ebx: 1 << 5, xcr0: Some(0b111) };

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

    #[test]
    fn everything_gives_the_tier() {
        assert!(Avx2::probe(&ALL).is_ok());
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
    }
}

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

/// A feature bit: name, CPUID leaf, register, bit.
pub(crate) type Feature = (&'static str, u32, usize, u32);

const ECX: usize = 2;
const EBX: usize = 1;
const OSXSAVE: u32 = 27;
/// XCR0 bits of the XMM and YMM state.
const YMM_STATE: u64 = 0b110;

pub(crate) const FMA: Feature = ("FMA", 1, ECX, 12);
pub(crate) const AVX: Feature = ("AVX", 1, ECX, 28);
pub(crate) const F16C: Feature = ("F16C", 1, ECX, 29);
pub(crate) const AVX2: Feature = ("AVX2", 7, EBX, 5);

/// Checks every feature bit and the operating system's part of the YMM state; the error says what is missing.
pub(crate) fn ymm_tier(source: &impl CpuidSource, features: &[Feature]) -> Result<(), &'static str> {
    let max_leaf = source.cpuid(0, 0)[0];
    let bit = |&(_, leaf, register, bit): &Feature| leaf <= max_leaf && source.cpuid(leaf, 0)[register] >> bit & 1 == 1;
    if let Some((name, ..)) = features.iter().find(|f| !bit(f)) {
        return Err(name);
    }
    if !bit(&("OSXSAVE", 1, ECX, OSXSAVE)) {
        return Err("OSXSAVE (the operating system does not save vector state)");
    }
    if source.xcr0() & YMM_STATE != YMM_STATE {
        return Err("YMM state in XCR0 (the operating system or hypervisor has not enabled it)");
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
        assert!(missing(no_osxsave).starts_with("OSXSAVE"));
        assert!(missing(Mock { xcr0: Some(0b011), ..ALL }).starts_with("YMM"));
        assert!(missing(Mock { xcr0: Some(0b101), ..ALL }).starts_with("YMM"));
    }

    #[test]
    fn b74_each_bit_of_the_tier_is_checked() {
        for (bit, name) in [(12, "FMA"), (28, "AVX"), (29, "F16C")] {
            assert_eq!(missing(Mock { leaf1_ecx: ALL.leaf1_ecx & !(1 << bit), ..ALL }), name);
        }
        assert_eq!(missing(Mock { leaf7_ebx: 0, ..ALL }), "AVX2");
        assert_eq!(missing(Mock { max_leaf: 1, ..ALL }), "AVX2");
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

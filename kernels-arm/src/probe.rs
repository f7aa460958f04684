//! What the CPU has, without std: from the target's baseline, or from whoever knows more. No kernel and no choice
//! between tiers lives here.
//!
//! There is no CPUID to ask: the feature registers of aarch64 can be read by the operating system alone. So the source
//! is a trait from the start: the baseline is what the compiler was promised, more comes from std or from the caller.

/// A feature that a tier may need.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Feature {
    /// Advanced SIMD, in the baseline of every target that this crate builds for. On bare metal the start-up code must
    /// have enabled it (CPACR_EL1.FPEN and its like for higher exception levels).
    Neon,
}

impl Feature {
    /// The name used in messages.
    pub const fn name(self) -> &'static str {
        match self {
            Feature::Neon => "NEON",
        }
    }
}

/// Who says what the CPU has.
pub trait FeatureSource {
    /// True if code may use `feature`, on every thread that will run a task.
    fn has(&self, feature: Feature) -> bool;
}

/// This CPU, as far as the compiler was promised: the target's baseline.
#[derive(Clone, Copy, Debug)]
pub struct Cpu;

impl FeatureSource for Cpu {
    fn has(&self, feature: Feature) -> bool {
        match feature {
            Feature::Neon => cfg!(target_feature = "neon"),
        }
    }
}

/// Checks every feature; the error says what is missing.
#[cfg(feature = "neon")]
pub(crate) fn all(source: &impl FeatureSource, features: &[Feature]) -> Result<(), &'static str> {
    match features.iter().find(|f| !source.has(**f)) {
        Some(missing) => Err(missing.name()),
        None => Ok(()),
    }
}

#[cfg(all(test, feature = "neon"))]
mod tests {
    use super::*;
    use crate::Neon;

    struct Nothing;
    impl FeatureSource for Nothing {
        fn has(&self, _: Feature) -> bool {
            false
        }
    }

    #[test]
    fn the_baseline_gives_the_tier() {
        assert!(Neon::detect().is_ok());
    }

    #[test]
    fn b74_a_source_that_denies_a_feature_is_believed() {
        assert_eq!(Neon::probe(&Nothing).err(), Some("NEON"));
    }
}

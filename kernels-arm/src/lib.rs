//! Tile kernels for aarch64. `no_std`, no allocation. Only tile bodies live here: **no loop over heads, batches, masks or
//! tasks**; those are the drivers of `rotile-core`. Start reading at `neon`. Empty on other architectures.
#![no_std]
#![cfg(target_arch = "aarch64")]

#[cfg(not(target_feature = "neon"))]
compile_error!(
    "a soft-float aarch64 target (or one with NEON switched off) would compile vector intrinsics into integer code: \
     build for a hard-float target (bare metal: aarch64-unknown-none)"
);

mod fp;
#[cfg(feature = "neon")]
pub mod neon;
mod probe;

pub use fp::FP_CONTROL;
#[cfg(feature = "neon")]
pub use neon::Neon;
pub use probe::{Cpu, Feature, FeatureSource};

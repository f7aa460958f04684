//! Tile kernels for x86-64. `no_std`, no allocator. Only tile bodies live here: **no loop over heads, batches, masks or
//! tasks**; those are the drivers of `rotile-core`. Start reading at [`avx2`]; [`avx512`] says what it does otherwise.
#![no_std]
#![cfg(target_arch = "x86_64")]

// Soft-float targets (`x86_64-unknown-none`) are those without SSE2: it is part of every other x86-64 target.
#[cfg(not(target_feature = "sse2"))]
compile_error!(
    "a soft-float x86-64 target would compile vector intrinsics into integer code: build for a hard-float target \
     (bare metal: x86_64-unknown-linux-gnu with no_std, no_main, -nostartfiles, static)"
);

#[cfg(feature = "avx2")]
pub mod avx2;
#[cfg(feature = "avx512")]
pub mod avx512;
mod fp;
#[cfg_attr(
    not(all(feature = "avx2", feature = "avx512")),
    allow(dead_code, reason = "the checks of tiers that are not compiled in")
)]
mod probe;
#[cfg(any(feature = "avx2", feature = "avx512"))]
mod shared;

#[cfg(feature = "avx2")]
pub use avx2::Avx2;
#[cfg(feature = "avx512")]
pub use avx512::Avx512;
pub use fp::FP_CONTROL;
pub use probe::{Cpu, CpuidSource};

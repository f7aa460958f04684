//! Attention for CPUs with the rotary position embedding **inside the tile**: queries and keys are rotated while they
//! are loaded and packed, and stay in registers and L1 from rotation through softmax.
//!
//! This crate picks the tiers that the CPU can run and adds what needs an operating system (feature `std`: threads,
//! cache sizes, `ROTILE_TIER`). Everything else lives in [`rotile_core`], which is re-exported whole. No kernel and no
//! loop over heads, batches or tasks may live here.
//!
//! # One call
//!
//! Describe the layer, plan it once, then prepare and run each step:
//!
//! ```
//! # #[cfg(feature = "std")] {
//! use rotile::rotary::{Frequencies, PairStyle, RotarySpec, RotaryTable};
//! use rotile::*;
//!
//! # fn main() -> Result<(), Error> {
//! let (heads_q, heads_kv, dim, tokens) = (8, 2, 64, 100);
//! let spec = AttentionSpec::attend(heads_q, heads_kv, dim, RotarySpec::full(PairStyle::Half));
//! let plan = rotile::plan(&spec)?; // println!("{plan}") says what was chosen
//!
//! let mut inv_freq = [0.0; 32];
//! let amplitude = Frequencies::Default { base: 10_000.0 }.inv_freq(dim, &mut inv_freq)?;
//! let mut storage = vec![0.0; RotaryTable::storage_len(32, 4096)?];
//! let table = RotaryTable::build(&inv_freq, amplitude, 4096, &mut storage)?;
//!
//! let q = vec![0.1f32; tokens * heads_q * dim]; // [token, head, dim], not rotated
//! let (k, v) = (vec![0.2f32; tokens * heads_kv * dim], vec![0.3f32; tokens * heads_kv * dim]);
//! let mut out = vec![0.0f32; tokens * heads_q * dim];
//! let shape = |heads| Shape { batch: 1, tokens, heads, dim };
//! let operands = Operands::Attend {
//!     q: Tensor::token_major(&q[..], shape(heads_q))?,
//!     k: Tensor::token_major(&k[..], shape(heads_kv))?,
//!     v: Tensor::token_major(&v[..], shape(heads_kv))?,
//!     out: TensorMut::token_major(&mut out[..], shape(heads_q))?,
//!     lse: None,
//! };
//! let sequences = [Sequence::new(tokens, tokens).with_rotary(table)];
//! Runner::new(2).run(&plan, &mut Batch::new(operands, &sequences))?;
//! assert!((out[0] - 0.3).abs() < 1e-6);
//! # Ok(()) } main().unwrap(); }
//! ```
#![cfg_attr(not(feature = "std"), no_std)]

#[cfg(all(doctest, feature = "std"))]
#[doc = include_str!("../README.md")]
struct Readme;

pub use rotile_core::*;

#[cfg(feature = "std")]
mod host;
#[cfg(feature = "std")]
mod threads;
#[cfg(feature = "rayon")]
pub use threads::Rayon;
#[cfg(feature = "std")]
pub use threads::{Pool, Runner, Threads};

use rotile_core::kernel::FpControl;

cfg_if::cfg_if! {
    if #[cfg(all(target_arch = "x86_64", any(feature = "avx2", feature = "avx512")))] {
        static FP_CONTROL: &FpControl = &rotile_kernels_x86::FP_CONTROL;
    } else if #[cfg(all(target_arch = "aarch64", feature = "neon"))] {
        static FP_CONTROL: &FpControl = &rotile_kernels_arm::FP_CONTROL;
    } else {
        static FP_CONTROL: &FpControl = &rotile_core::kernel::FP_CONTROL_NONE;
    }
}

/// What this CPU offers to this build: its tiers and, with `std`, its cache sizes and number of threads.
///
/// With `std` this reads the system's description of its caches: ask once and keep the answer for many plans.
///
/// With `std`, the environment variable `ROTILE_TIER` lowers the choice to the tier that it names.
///
/// # Errors
///
/// [`Error::UnknownTier`] or [`Error::TierUnavailable`] if `ROTILE_TIER` names none, or one that is not there.
pub fn capabilities() -> Result<Capabilities, Error> {
    let mut tiers = [portable::tier(FP_CONTROL); 3];
    let mut count = 1;
    for tier in native_tiers().into_iter().flatten() {
        tiers[count] = tier;
        count += 1;
    }
    let capabilities = Capabilities::new(&tiers[..count]);
    #[cfg(feature = "std")]
    let capabilities = host::hints(capabilities)?;
    Ok(capabilities)
}

/// Plans `spec` for this CPU: [`Plan::new`] with [`capabilities`].
///
/// # Errors
///
/// As those two.
pub fn plan(spec: &AttentionSpec) -> Result<Plan, Error> {
    Plan::new(&capabilities()?, spec)
}

/// The tiers above portable that this build holds and this CPU can run, from least to most.
fn native_tiers() -> [Option<Tier>; 2] {
    #[cfg(all(target_arch = "x86_64", any(feature = "avx2", feature = "avx512")))]
    use rotile_kernels_x86 as kernels;
    cfg_if::cfg_if! {
        if #[cfg(all(target_arch = "x86_64", feature = "avx2"))] {
            let low = kernels::Avx2::detect().ok().map(kernels::Avx2::tier);
        } else if #[cfg(all(target_arch = "aarch64", feature = "neon"))] {
            let low = rotile_kernels_arm::Neon::detect().ok().map(rotile_kernels_arm::Neon::tier);
        } else {
            let low = None;
        }
    }
    cfg_if::cfg_if! {
        if #[cfg(all(target_arch = "x86_64", feature = "avx512"))] {
            let high = kernels::Avx512::detect().ok().map(kernels::Avx512::tier);
        } else {
            let high = None;
        }
    }
    [low, high]
}

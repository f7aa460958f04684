//! The NEON tier, for every aarch64 CPU: its table, its token and its tile sizes. The bodies are one file per kernel:
//! `score` and `weighted_sum` for prefill, `decode` for few rows, `softmax`, `pack` and `rows` for both. No loop over
//! heads, masks or tasks lives here.
//!
//! Three properties of the instruction set shape it: 32 registers allow tiles of 24 accumulators; a multiply-add takes
//! one lane of a register as a factor, so nothing is ever broadcast; and LD2, ST2 and single-lane loads take interleaved
//! pairs apart and end a row exactly, so a rotation works on whole pairs and tails need no masks.

mod decode;
mod pack;
mod rows;
mod score;
mod softmax;
mod weighted_sum;

use crate::probe::{self, Cpu, Feature, FeatureSource};
use rotile_core::kernel::{KernelNames, Kernels, Tier, TierName};

/// Query rows of a tile: two vectors, whose lanes the score tile multiplies by.
const MR: usize = 8;
/// Key columns of a score tile, three vectors: 8 x 3 accumulators, 2 vectors of queries and 3 of keys are 29 of the 32
/// registers. 24 multiply-adds hide the latency of one (4 cycles) on cores that start 4 per cycle.
const NR: usize = 12;
/// Value columns of a weighted-sum tile, two vectors: 8 x 2 accumulators, 8 vectors of weights (4 keys of each row, used
/// lane by lane) and 2 to 4 of values are 26 to 28 registers. Three vectors would leave none for the weights, and pad
/// head dims of 64 and 128.
const NV: usize = 8;
/// Rows of the few-row kernels: with 4 keys or 4 vectors of values side by side, 16 accumulators.
const DECODE_ROWS: usize = 4;

/// Elements of a run of a score: see [`Kernels::dot_run`].
const DOT_RUN: usize = 64;
/// Keys of a run of a weighted sum: see [`Kernels::sum_run`].
const SUM_RUN: usize = 128;

/// The features of the tier, as the probe checks them. `target_feature` attributes must name the same: `neon`.
const FEATURES: [Feature; 1] = [Feature::Neon];

static NEON: Kernels = Kernels {
    tier: TierName::Neon,
    mr: MR,
    nr: NR,
    nv: NV,
    decode_rows: DECODE_ROWS,
    dot_run: DOT_RUN,
    sum_run: SUM_RUN,
    names: KernelNames {
        scores: "scores_8x12_neon",
        weighted_sum: "weighted_sum_8x8_neon",
        decode_scores: "decode_scores_neon",
        decode_sum: "decode_sum_neon",
        load: "load_neon",
    },
    angles: rows::angles_neon,
    prefetch: rows::prefetch_neon,
    load: rows::load_neon,
    store: rows::store_neon,
    pack_q: pack::pack_q_neon,
    pack_k: pack::pack_k_neon,
    pack_v: pack::pack_v_neon,
    scores: score::scores_8x12_neon,
    adjust: softmax::adjust_neon,
    softmax: softmax::softmax_neon,
    weighted_sum: weighted_sum::weighted_sum_8x8_neon,
    decode_scores: decode::decode_scores_neon,
    decode_sum: decode::decode_sum_neon,
};

/// Proof that this CPU can run the tier; only the probe makes one.
#[derive(Clone, Copy, Debug)]
pub struct Neon(());

impl Neon {
    /// Asks `source`.
    ///
    /// # Errors
    ///
    /// What is missing.
    pub fn probe(source: &impl FeatureSource) -> Result<Self, &'static str> {
        probe::all(source, &FEATURES).map(|()| Neon(()))
    }

    /// Asks this CPU.
    ///
    /// # Errors
    ///
    /// What is missing.
    pub fn detect() -> Result<Self, &'static str> {
        Self::probe(&Cpu)
    }

    /// The tier.
    pub fn tier(self) -> Tier {
        // SAFETY: the token proves the only feature that the kernels enable, and the kernel battery holds them to the
        // contracts of the fields.
        unsafe { Tier::new(&NEON, &crate::FP_CONTROL) }
    }
}

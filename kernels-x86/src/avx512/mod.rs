//! The AVX-512 tier (F, BW, VL and DQ): its table, its token and its tile sizes. The bodies are one file per kernel:
//! `score` and `weighted_sum` for prefill, `decode` for few rows, `softmax`, `pack` and `rows` for both. No loop over
//! heads, masks or tasks lives here.
//!
//! Three properties of the instruction set shape it: 32 registers of 16 lanes allow tiles of 24 accumulators; any load or
//! store takes a mask, so every tail is one more step of the same code, and never reads or writes past its end; and a power
//! of two is one instruction.

mod decode;
mod pack;
mod rows;
mod score;
mod softmax;
mod weighted_sum;

use crate::probe;
use rotile_core::kernel::{KernelNames, Kernels, TierName};

/// Query rows of a tile: 12 x 2 accumulators, 2 key vectors and 1 broadcast are 27 of the 32 registers, and 14 loads feed 24
/// multiply-adds, where a core starts two of each per cycle. 12 rows are 3 tokens of a group of 4. (A prototype found 14x32,
/// 8x48 and 6x64 no faster.)
const MR: usize = 12;
/// Key columns of a score tile: two vectors, so that each broadcast feeds two multiply-adds.
const NR: usize = 32;
/// Value columns of a weighted-sum tile, for the same reason.
const NV: usize = 32;
/// Rows of the few-row kernels: 4 rows by 4 keys are 16 accumulators, whose lanes add up together to one vector of scores; the
/// other registers hold the queries, and a key that is being rotated.
const DECODE_ROWS: usize = 4;

/// Elements of a run of a score, see [`Kernels::dot_run`]; as on AVX2, so that both tiers give the same scores to the bit.
const DOT_RUN: usize = 64;
/// Keys of a run of a weighted sum: see [`Kernels::sum_run`].
const SUM_RUN: usize = 128;

/// The features of the tier: what the probe asks for, and what every `target_feature` attribute of this folder names
/// (`avx512f` implies the first four). A test holds the attributes to this list.
const FEATURES: [probe::Feature; 8] = [
    probe::AVX,
    probe::AVX2,
    probe::FMA,
    probe::F16C,
    probe::AVX512F,
    probe::AVX512BW,
    probe::AVX512VL,
    probe::AVX512DQ,
];

static AVX512: Kernels = Kernels {
    tier: TierName::Avx512,
    mr: MR,
    nr: NR,
    nv: NV,
    decode_rows: DECODE_ROWS,
    dot_run: DOT_RUN,
    sum_run: SUM_RUN,
    names: KernelNames {
        scores: "scores_12x32_avx512",
        weighted_sum: "weighted_sum_12x32_avx512",
        decode_scores: "decode_scores_avx512",
        decode_sum: "decode_sum_avx512",
        load: "load_avx512",
    },
    angles: rows::angles_avx512,
    prefetch: crate::shared::prefetch,
    load: rows::load_avx512,
    store: rows::store_avx512,
    pack_q: pack::pack_q_avx512,
    pack_k: pack::pack_k_avx512,
    pack_v: pack::pack_v_avx512,
    scores: score::scores_12x32_avx512,
    adjust: softmax::adjust_avx512,
    softmax: softmax::softmax_avx512,
    weighted_sum: weighted_sum::weighted_sum_12x32_avx512,
    decode_scores: decode::decode_scores_avx512,
    decode_sum: decode::decode_sum_avx512,
};

probe::token!(Avx512, AVX512, FEATURES, ZMM);

#[cfg(test)]
#[test]
fn b74_attributes_name_what_the_probe_checks() {
    probe::attributes_name("avx512", &FEATURES, &["avx", "avx2", "fma", "f16c"]);
}

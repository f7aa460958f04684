//! The AVX2 tier (with FMA and F16C): its table, its token and its tile sizes. The bodies are one file per kernel:
//! `score` and `weighted_sum` for prefill, `decode` for few rows, `softmax`, `pack` and `rows` for both. No loop over
//! heads, masks or tasks lives here.

mod decode;
mod pack;
mod rows;
mod score;
mod softmax;
mod weighted_sum;

use crate::probe;
use rotile_core::kernel::{KernelNames, Kernels, TierName};

/// Query rows of a tile: 6 x 2 accumulators, 2 key vectors and 1 broadcast are 15 of the 16 registers.
const MR: usize = 6;
/// Key columns of a score tile: two vectors, so that each broadcast feeds two multiply-adds.
const NR: usize = 16;
/// Value columns of a weighted-sum tile, for the same reason.
const NV: usize = 16;
/// Rows of the few-row kernels: 4 rows by 3 keys are 12 accumulators, 3 vectors of keys and 1 of a query: 16 registers.
/// More rows would leave fewer keys for each load of a query.
const DECODE_ROWS: usize = 4;

/// Elements of a run of a score: see [`Kernels::dot_run`].
const DOT_RUN: usize = 64;
/// Keys of a run of a weighted sum: see [`Kernels::sum_run`].
const SUM_RUN: usize = 128;

/// The features of the tier: what the probe asks for, and what every `target_feature` attribute of this folder names
/// (`avx2` implies `avx`). A test holds the attributes to this list.
const FEATURES: [probe::Feature; 4] = [probe::AVX, probe::AVX2, probe::FMA, probe::F16C];

static AVX2: Kernels = Kernels {
    tier: TierName::Avx2,
    mr: MR,
    nr: NR,
    nv: NV,
    decode_rows: DECODE_ROWS,
    dot_run: DOT_RUN,
    sum_run: SUM_RUN,
    names: KernelNames {
        scores: "scores_6x16_avx2",
        weighted_sum: "weighted_sum_6x16_avx2",
        decode_scores: "decode_scores_avx2",
        decode_sum: "decode_sum_avx2",
        load: "load_avx2",
    },
    angles: rows::angles_avx2,
    prefetch: crate::shared::prefetch,
    load: rows::load_avx2,
    store: rows::store_avx2,
    pack_q: pack::pack_q_avx2,
    pack_k: pack::pack_k_avx2,
    pack_v: pack::pack_v_avx2,
    scores: score::scores_6x16_avx2,
    adjust: softmax::adjust_avx2,
    softmax: softmax::softmax_avx2,
    weighted_sum: weighted_sum::weighted_sum_6x16_avx2,
    decode_scores: decode::decode_scores_avx2,
    decode_sum: decode::decode_sum_avx2,
};

probe::token!(Avx2, AVX2, FEATURES, YMM);

#[cfg(test)]
#[test]
fn b74_attributes_name_what_the_probe_checks() {
    probe::attributes_name("avx2", &FEATURES, &["avx"]);
}

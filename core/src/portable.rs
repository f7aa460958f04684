//! The portable tier: every kernel in scalar Rust. It runs everywhere and is the readable statement of what the
//! tiers with instructions of their own compute. No blocking by cache, heads or masks here: that is the drivers' part.
//!
//! It has no fused multiply-add (`core` has none without a library call per element): products are rounded. All its
//! sums run key by key and element by element, so one-shot, chunked and step-by-step calls agree bit for bit as long as
//! the keys are not split.

use crate::kernel::{
    Adjust, DecodeScores, DecodeSum, FpControl, KernelNames, Kernels, Rotation, RowState, Rows, Tier, TierName,
    WeightedSum, run_end,
};
use crate::softmax::{EXP2_COEFFICIENTS, EXP2_FLOOR, LOWEST_SCORE, Raised, ceil};
use crate::{Slice, SliceMut, softmax};
use half::{bf16, f16};

/// Rows of a tile: four chains of additions side by side hide the latency of one.
const MR: usize = 4;
/// Columns of a tile: one 32-byte line of f32, which compilers vectorise where the target has vectors.
const NR: usize = 8;

/// Elements of a run of a score, keys of a run of values: with those of a few-row tile, all paths add in the same order.
const DOT_RUN: usize = crate::plan::FEW_KEY_TILE;
/// See above.
const SUM_RUN: usize = DOT_RUN;

/// Rows of the few-row kernels.
const MAX_ROWS: usize = 4;

/// The table of the portable tier.
static PORTABLE: Kernels = Kernels {
    tier: TierName::Portable,
    mr: MR,
    nr: NR,
    nv: NR,
    decode_rows: MAX_ROWS,
    dot_run: DOT_RUN,
    sum_run: SUM_RUN,
    names: KernelNames {
        scores: "scores_4x8_portable",
        weighted_sum: "weighted_sum_4x8_portable",
        decode_scores: "decode_scores_portable",
        decode_sum: "decode_sum_portable",
        load: "load_portable",
    },
    angles: angles_portable,
    prefetch: |_, _| (),
    load: load_portable,
    store: store_portable,
    pack_q: pack_q_portable,
    pack_k: pack_k_portable,
    pack_v: pack_v_portable,
    scores: scores_4x8_portable,
    adjust: adjust_portable,
    softmax: softmax_portable,
    weighted_sum: weighted_sum_4x8_portable,
    decode_scores: decode_scores_portable,
    decode_sum: decode_sum_portable,
};

/// The portable tier. `fp` keeps the host's floating-point state out of the results; a platform crate has one.
pub const fn tier(fp: &'static FpControl) -> Tier {
    // SAFETY: the table's functions are scalar Rust that every CPU runs, and the kernel battery holds them to the
    // contracts of the fields.
    unsafe { Tier::new(&PORTABLE, fp) }
}

/// A storage type, widened exactly.
trait Widen: Copy {
    fn widen(self) -> f32;
}
impl Widen for f32 {
    fn widen(self) -> f32 {
        self
    }
}
impl Widen for f16 {
    fn widen(self) -> f32 {
        self.to_f32()
    }
}
impl Widen for bf16 {
    fn widen(self) -> f32 {
        self.to_f32()
    }
}

/// Element `i` of a row after rotation; `row` is the raw row and `r` its index in the angles' list.
fn turned<T: Widen>(row: &[T], i: usize, rotation: Option<&Rotation<'_>>, r: usize) -> f32 {
    let here = row[i].widen();
    let Some(Rotation { turn, angles }) = rotation else { return here };
    let (pair, second) = match turn.style {
        crate::PairStyle::Half => {
            let first = i.wrapping_sub(turn.offset);
            let second = first.wrapping_sub(turn.distance);
            if second < turn.pairs { (second, true) } else { (first, false) }
        }
        crate::PairStyle::Interleaved => {
            let in_slice = i.wrapping_sub(turn.offset);
            (in_slice / 2, in_slice % 2 == 1)
        }
    };
    if i < turn.offset || pair >= turn.pairs {
        return here;
    }
    let (cos, sin) = (f64::from(angles.cos[angles.at[r] + pair]), f64::from(angles.sin[angles.at[r] + pair]));
    let (x, y) = turn.pair(pair);
    let (x, y) = (f64::from(row[x].widen()), f64::from(row[y].widen()));
    // Products of f32 are exact in f64: rounded once, where a fused multiply-add would round twice.
    if second { (y * cos + x * sin) as f32 } else { (x * cos - y * sin) as f32 }
}

/// Calls `put(r, i, value)` for every element of every row, widened and rotated.
fn for_each_element(rows: Rows<'_>, rotation: Option<Rotation<'_>>, mut put: impl FnMut(usize, usize, f32)) {
    fn typed<T: Widen>(
        data: &[T],
        rows: Rows<'_>,
        rotation: Option<Rotation<'_>>,
        put: &mut impl FnMut(usize, usize, f32),
    ) {
        for (r, &at) in rows.at.iter().enumerate() {
            let row = &data[at..at + rows.dim];
            for i in 0..rows.dim {
                put(r, i, turned(row, i, rotation.as_ref(), r));
            }
        }
    }
    match rows.data {
        Slice::F32(data) => typed(data, rows, rotation, &mut put),
        Slice::F16(data) => typed(data, rows, rotation, &mut put),
        Slice::Bf16(data) => typed(data, rows, rotation, &mut put),
    }
}

fn angles_portable(bc: &[f64], bs: &[f64], fc: &[f64], fs: &[f64], cos: &mut [f32], sin: &mut [f32]) {
    for i in 0..cos.len() {
        cos[i] = (bc[i] * fc[i] - bs[i] * fs[i]) as f32;
        sin[i] = (bs[i] * fc[i] + bc[i] * fs[i]) as f32;
    }
}

fn load_portable(rows: Rows<'_>, rotation: Option<Rotation<'_>>, scale: f32, out: &mut [f32], out_stride: usize) {
    for_each_element(rows, rotation, |r, i, x| out[r * out_stride + i] = x * scale);
}

fn store_portable(src: &[f32], factor: f32, dst: SliceMut<'_>) {
    assert_eq!(src.len(), dst.len());
    match dst {
        SliceMut::F32(dst) => dst.iter_mut().zip(src).for_each(|(d, &s)| *d = s * factor),
        SliceMut::F16(dst) => dst.iter_mut().zip(src).for_each(|(d, &s)| *d = f16::from_f32(s * factor)),
        SliceMut::Bf16(dst) => dst.iter_mut().zip(src).for_each(|(d, &s)| *d = bf16::from_f32(s * factor)),
    }
}

/// Panel layout: element `i` of row `r` at `i * MR + r`.
fn pack_q_portable(rows: Rows<'_>, rotation: Option<Rotation<'_>>, scale: f32, panel: &mut [f32]) {
    panel.fill(0.0);
    for_each_element(rows, rotation, |r, i, x| panel[i * MR + r] = x * scale);
}

/// Panel layout: element `i` of key `c` at `i * NR + c`.
fn pack_k_portable(rows: Rows<'_>, rotation: Option<Rotation<'_>>, panel: &mut [f32]) {
    panel.fill(0.0);
    for_each_element(rows, rotation, |c, i, x| panel[i * NR + c] = x);
}

fn pack_v_portable(rows: Rows<'_>, first: usize, keys: usize, tile: &mut [f32]) -> bool {
    let mut finite = true;
    for panel in tile.chunks_exact_mut(keys * NR) {
        panel[first * NR..(first + rows.at.len()) * NR].fill(0.0);
    }
    for_each_element(rows, None, |r, c, x| {
        finite &= x.is_finite();
        tile[(c / NR) * keys * NR + (first + r) * NR + c % NR] = x;
    });
    finite
}

fn scores_4x8_portable(q: &[f32], k: &[f32], dim: usize, s: &mut [f32], s_stride: usize) {
    for (p, panel) in k.chunks_exact(dim * NR).enumerate() {
        let mut sum = [[0.0f32; NR]; MR];
        for (q, k) in q[..dim * MR].chunks(DOT_RUN * MR).zip(panel.chunks(DOT_RUN * NR)) {
            let mut run = [[0.0f32; NR]; MR];
            for (q, k) in q.chunks_exact(MR).zip(k.chunks_exact(NR)) {
                for r in 0..MR {
                    for c in 0..NR {
                        run[r][c] += q[r] * k[c];
                    }
                }
            }
            for (sum, run) in sum.iter_mut().flatten().zip(run.iter().flatten()) {
                *sum += run;
            }
        }
        for (r, sum) in sum.iter().enumerate() {
            s[r * s_stride + p * NR..][..NR].copy_from_slice(sum);
        }
    }
}

/// Largest integer not above `x`; beyond 2^23 every f32 is one.
fn floor(x: f32) -> f32 {
    -ceil(-x)
}

/// `2^(s - max)` for an integer `max`: see [`crate::softmax`]. NaN and +inf give NaN.
fn weight(s: f32, max: f32) -> f32 {
    let s = if s < LOWEST_SCORE { LOWEST_SCORE } else { s };
    let n = floor(s);
    let f = s - n;
    let [c0, c1, c2, c3, c4, c5] = EXP2_COEFFICIENTS;
    let p = ((((c5 * f + c4) * f + c3) * f + c2) * f + c1) * f + c0;
    let e = (n - max).max(EXP2_FLOOR);
    p * f32::from_bits(((e as i32 + 127) as u32) << 23)
}

fn adjust_portable(args: Adjust<'_>) -> bool {
    softmax::adjust(args)
}

fn softmax_portable(s: &mut [f32], scale: f32, lo: usize, hi: usize, state: &mut RowState) -> f32 {
    let top = s[lo..hi].iter().fold(f32::NEG_INFINITY, |m, &x| if x > m { x } else { m }) * scale;
    let Raised { factor, subtract } = state.raise(top);
    s[..lo].fill(0.0);
    s[hi..].fill(0.0);
    for x in &mut s[lo..hi] {
        *x = weight(*x * scale, subtract);
    }
    // In runs from the start of the row, wherever the visible keys begin: masked keys add 0.
    for run in s[..hi].chunks(SUM_RUN).skip(lo / SUM_RUN) {
        state.sum += run.iter().sum::<f32>();
    }
    factor
}

fn weighted_sum_4x8_portable(w: WeightedSum<'_>) {
    for (panel, v) in w.v.chunks_exact(w.tile_keys * NR).enumerate() {
        for r in 0..MR {
            let acc = &mut w.acc[r * w.acc_stride + panel * NR..][..NR];
            acc.iter_mut().for_each(|x| *x = if w.fresh { 0.0 } else { *x * w.factors[r] });
            let mut from = w.from;
            while from < w.to {
                let to = run_end(from, w.to, SUM_RUN);
                let mut run = [0.0f32; NR];
                for j in from..to {
                    let p = w.p[r * w.p_stride + j];
                    for c in 0..NR {
                        run[c] += p * v[j * NR + c];
                    }
                }
                acc.iter_mut().zip(run).for_each(|(x, run)| *x += run);
                from = to;
            }
        }
    }
}

fn decode_scores_portable(a: DecodeScores<'_>) {
    let (last, mut run) = (a.k.dim - 1, [0.0f32; MAX_ROWS]);
    for_each_element(a.k, a.rotation, |j, i, x| {
        for (r, run) in run[..a.rows].iter_mut().enumerate() {
            *run += a.q[r * a.q_stride + i] * x;
            if i % DOT_RUN == DOT_RUN - 1 || i == last {
                let s = &mut a.s[r * a.s_stride + j];
                *s = if i < DOT_RUN { *run } else { *s + *run };
                *run = 0.0;
            }
        }
    });
}

fn decode_sum_portable(a: DecodeSum<'_>) {
    /// The sums of some columns of one row.
    fn sum<T: Widen>(data: &[T], a: &DecodeSum<'_>, r: usize, columns: core::ops::Range<usize>) -> [f32; NR] {
        let mut sum = [0.0f32; NR];
        for (at, p) in a.v.at.iter().zip(&a.p[r * a.p_stride..]) {
            let values = &data[at + columns.start..at + columns.end];
            sum.iter_mut().zip(values).for_each(|(sum, v)| *sum += p * v.widen());
        }
        sum
    }
    for r in 0..a.rows {
        for c in (0..a.v.dim).step_by(NR) {
            let columns = c..a.v.dim.min(c + NR);
            let sums = match a.v.data {
                Slice::F32(data) => sum(data, &a, r, columns.clone()),
                Slice::F16(data) => sum(data, &a, r, columns.clone()),
                Slice::Bf16(data) => sum(data, &a, r, columns.clone()),
            };
            let acc = &mut a.acc[r * a.acc_stride..][columns];
            acc.iter_mut().zip(sums).for_each(|(x, sum)| *x = *x * a.factors[r] + sum);
        }
    }
}

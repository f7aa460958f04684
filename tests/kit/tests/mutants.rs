//! The battery has to fail: each of these tables has one fault that a real kernel might have.

use rotile_core::kernel::{
    DecodeScores, DecodeSum, FP_CONTROL_NONE, Kernels, Rotation, RowState, Rows, Tier, WeightedSum,
};
use rotile_core::{SliceMut, portable};
use rotile_testkit::battery;
use std::panic::{AssertUnwindSafe, catch_unwind};

fn right() -> &'static Kernels {
    portable::tier(&FP_CONTROL_NONE).kernels()
}

/// Calls a function of the right table.
macro_rules! right {
    ($function:ident($($arg:expr),*)) => {
        // SAFETY: every CPU runs the portable tier.
        unsafe { (right().$function)($($arg),*) }
    };
}

/// A table that differs in one function.
macro_rules! with {
    ($function:ident: $mutant:expr) => {
        Kernels { $function: $mutant, ..*right() }
    };
}

fn load_shifts_the_last(rows: Rows<'_>, rotation: Option<Rotation<'_>>, scale: f32, out: &mut [f32], stride: usize) {
    right!(load(rows, rotation, scale, out, stride));
    let last = (rows.at.len() - 1) * stride + rows.dim - 1;
    out[last] *= 1.0 + f32::EPSILON;
}

fn load_writes_the_gap(rows: Rows<'_>, rotation: Option<Rotation<'_>>, scale: f32, out: &mut [f32], stride: usize) {
    right!(load(rows, rotation, scale, out, stride));
    if stride > rows.dim && rows.at.len() > 1 {
        out[rows.dim] = 0.0;
    }
}

fn load_scales_first(rows: Rows<'_>, rotation: Option<Rotation<'_>>, scale: f32, out: &mut [f32], stride: usize) {
    right!(load(rows, None, scale, out, stride));
    if let Some(rotation) = rotation {
        let copy = out.to_vec();
        let at: Vec<usize> = (0..rows.at.len()).map(|r| r * stride).collect();
        let rows = Rows { data: copy[..].into(), at: &at, dim: rows.dim };
        right!(load(rows, Some(rotation), 1.0, out, stride));
    }
}

fn pack_k_takes_one_row_s_angles(rows: Rows<'_>, rotation: Option<Rotation<'_>>, panel: &mut [f32]) {
    let first = rotation.map(|r| vec![r.angles.at[0]; rows.at.len()]);
    let rotation = rotation.map(|mut r| {
        r.angles.at = first.as_deref().unwrap_or(&[]);
        r
    });
    right!(pack_k(rows, rotation, panel));
}

fn pack_k_leaves_missing_rows(rows: Rows<'_>, rotation: Option<Rotation<'_>>, panel: &mut [f32]) {
    right!(pack_k(rows, rotation, panel));
    if rows.at.len() < right().nr {
        *panel.last_mut().unwrap() = f32::NAN;
    }
}

fn pack_q_drops_the_scale(rows: Rows<'_>, rotation: Option<Rotation<'_>>, _: f32, panel: &mut [f32]) {
    right!(pack_q(rows, rotation, 1.0, panel));
}

fn pack_v_misses_the_last(rows: Rows<'_>, first: usize, keys: usize, tile: &mut [f32]) -> bool {
    let finite = right!(pack_v(rows, first, keys, tile));
    let (last, nv) = (rows.dim - 1, right().nv);
    let place = last / nv * keys * nv + (first + rows.at.len() - 1) * nv + last % nv;
    finite || !tile[place].is_finite()
}

fn pack_v_clears_the_rest(rows: Rows<'_>, first: usize, keys: usize, tile: &mut [f32]) -> bool {
    let nv = right().nv;
    for panel in tile.chunks_exact_mut(keys * nv) {
        panel[(first + rows.at.len()) * nv..].fill(0.0);
    }
    right!(pack_v(rows, first, keys, tile))
}

fn scores_miss_the_last_element(q: &[f32], k: &[f32], dim: usize, s: &mut [f32], stride: usize) {
    let mut q = q.to_vec();
    q[(dim - 1) * right().mr..].fill(0.0);
    right!(scores(&q, k, dim, s, stride));
}

fn scores_from_the_end(q: &[f32], k: &[f32], dim: usize, s: &mut [f32], stride: usize) {
    let Kernels { mr, nr, .. } = *right();
    for (p, panel) in k.chunks_exact(dim * nr).enumerate() {
        for (r, c) in (0..mr).flat_map(|r| (0..nr).map(move |c| (r, c))) {
            s[r * stride + p * nr + c] = (0..dim).rev().fold(0.0, |sum, i| sum + q[i * mr + r] * panel[i * nr + c]);
        }
    }
}

fn scores_mix_rows(q: &[f32], k: &[f32], dim: usize, s: &mut [f32], stride: usize) {
    right!(scores(q, k, dim, s, stride));
    s[0] = s[right().mr - 1];
}

fn softmax_leaves_what_is_masked(s: &mut [f32], scale: f32, lo: usize, hi: usize, state: &mut RowState) -> f32 {
    let tail = s[hi..].to_vec();
    let factor = right!(softmax(s, scale, lo, hi, state));
    s[hi..].copy_from_slice(&tail);
    factor
}

fn softmax_sees_one_more(s: &mut [f32], scale: f32, lo: usize, hi: usize, state: &mut RowState) -> f32 {
    right!(softmax(s, scale, lo, (hi + 1).min(s.len()), state))
}

fn softmax_sums_from_lo(s: &mut [f32], scale: f32, lo: usize, hi: usize, state: &mut RowState) -> f32 {
    let before = state.sum;
    let factor = right!(softmax(s, scale, lo, hi, state));
    let mut lanes = [0.0f32; 8];
    (lo..hi).for_each(|i| lanes[(i - lo) % 8] += s[i]);
    state.sum = before * factor + lanes.iter().sum::<f32>();
    factor
}

fn softmax_subtracts_first(s: &mut [f32], scale: f32, lo: usize, hi: usize, state: &mut RowState) -> f32 {
    let scores = s.to_vec();
    let factor = right!(softmax(s, scale, lo, hi, state));
    for i in lo..hi {
        let mut one = [scores[i] - state.max; 8];
        if one[0].is_finite() {
            right!(softmax(&mut one, scale, 0, 1, &mut RowState { max: 0.0, sum: 0.0 }));
            s[i] = one[0];
        }
    }
    factor
}

fn softmax_forgets_nan(s: &mut [f32], scale: f32, lo: usize, hi: usize, state: &mut RowState) -> f32 {
    s[lo..hi].iter_mut().filter(|x| x.is_nan()).for_each(|x| *x = f32::NEG_INFINITY);
    right!(softmax(s, scale, lo, hi, state))
}

fn softmax_starts_with_one(s: &mut [f32], scale: f32, lo: usize, hi: usize, state: &mut RowState) -> f32 {
    let first = state.max == f32::NEG_INFINITY;
    let factor = right!(softmax(s, scale, lo, hi, state));
    if first { 1.0 } else { factor }
}

fn softmax_raises_without_ceiling(s: &mut [f32], scale: f32, lo: usize, hi: usize, state: &mut RowState) -> f32 {
    let factor = right!(softmax(s, scale, lo, hi, state));
    state.max += 1.0;
    factor
}

fn weighted_sum_misses_the_last_key(mut w: WeightedSum<'_>) {
    w.to = w.to.saturating_sub(1).max(w.from);
    right!(weighted_sum(w));
}

fn weighted_sum_backwards(w: WeightedSum<'_>) {
    let (mut factors, mut fresh) = (w.factors.to_vec(), w.fresh);
    for j in (w.from..w.to).rev() {
        let (p, v, acc) = (w.p, w.v, &mut *w.acc);
        let (p_stride, tile_keys, acc_stride) = (w.p_stride, w.tile_keys, w.acc_stride);
        right!(weighted_sum(WeightedSum {
            p,
            p_stride,
            from: j,
            to: j + 1,
            v,
            tile_keys,
            factors: &factors,
            fresh,
            acc,
            acc_stride
        }));
        factors.fill(1.0);
        fresh = false;
    }
    if w.from == w.to {
        right!(weighted_sum(w));
    }
}

fn weighted_sum_takes_one_factor(w: WeightedSum<'_>) {
    let factors = vec![w.factors[0]; w.factors.len()];
    right!(weighted_sum(WeightedSum { factors: &factors, ..w }));
}

fn weighted_sum_reads_what_is_fresh(w: WeightedSum<'_>) {
    right!(weighted_sum(WeightedSum { fresh: false, ..w }));
}

fn decode_scores_miss_the_last_key(a: DecodeScores<'_>) {
    let fewer = a.k.at.len() - 1;
    let k = Rows { at: &a.k.at[..fewer], ..a.k };
    right!(decode_scores(DecodeScores { k, ..a }));
}

fn decode_scores_turn_nothing(a: DecodeScores<'_>) {
    right!(decode_scores(DecodeScores { rotation: None, ..a }));
}

fn decode_scores_repeat_row_0(a: DecodeScores<'_>) {
    right!(decode_scores(DecodeScores { q_stride: 0, ..a }));
}

fn decode_sum_touches_the_gap(a: DecodeSum<'_>) {
    let (dim, rows, acc) = (a.v.dim, a.rows, &mut *a.acc);
    if rows > 1 && a.acc_stride > dim {
        acc[dim] += 1.0;
    }
    right!(decode_sum(a));
}

fn decode_sum_drops_the_factor(a: DecodeSum<'_>) {
    let factors = vec![1.0; a.rows];
    right!(decode_sum(DecodeSum { factors: &factors, ..a }));
}

fn store_truncates(src: &[f32], factor: f32, dst: SliceMut<'_>) {
    match dst {
        SliceMut::Bf16(dst) => {
            let truncate = |x: f32| rotile_core::bf16::from_bits(((x * factor).to_bits() >> 16) as u16);
            dst.iter_mut().zip(src).for_each(|(d, s)| *d = truncate(*s));
        }
        dst => right!(store(src, factor, dst)),
    }
}

fn angles_in_f32(bc: &[f64], bs: &[f64], fc: &[f64], fs: &[f64], cos: &mut [f32], sin: &mut [f32]) {
    for i in 0..cos.len() {
        let [bc, bs, fc, fs] = [bc[i] as f32, bs[i] as f32, fc[i] as f32, fs[i] as f32];
        (cos[i], sin[i]) = (bc * fc - bs * fs, bs * fc + bc * fs);
    }
}

#[test]
fn each_planted_fault_fails_the_battery() {
    let dims = [1, 3, 17, 33];
    let run = |kernels: Kernels| {
        // SAFETY: every function is scalar Rust. The contract is broken on purpose; only the battery calls them.
        let tier = unsafe { Tier::new(Box::leak(Box::new(kernels)), &FP_CONTROL_NONE) };
        catch_unwind(AssertUnwindSafe(|| battery::run_dims(tier, &dims)))
    };
    run(Kernels { ..*right() }).expect("the right table passes");
    let faults = [
        ("angles in f32", "angles", with!(angles: angles_in_f32)),
        ("load, one ulp off in the last", "load", with!(load: load_shifts_the_last)),
        ("load writes a gap", "load", with!(load: load_writes_the_gap)),
        ("load scales before it rotates", "load", with!(load: load_scales_first)),
        ("store truncates", "store", with!(store: store_truncates)),
        ("pack_q drops the scale", "scores", with!(pack_q: pack_q_drops_the_scale)),
        ("pack_k, one row's angles for all", "scores", with!(pack_k: pack_k_takes_one_row_s_angles)),
        ("pack_k leaves missing rows", "missing", with!(pack_k: pack_k_leaves_missing_rows)),
        ("pack_v misses the last", "pack_v", with!(pack_v: pack_v_misses_the_last)),
        ("pack_v clears the rest", "weighted_sum", with!(pack_v: pack_v_clears_the_rest)),
        ("scores miss an element", "scores", with!(scores: scores_miss_the_last_element)),
        ("scores from the end", "scores", with!(scores: scores_from_the_end)),
        ("scores, one of another row", "scores", with!(scores: scores_mix_rows)),
        ("softmax leaves what is masked", "softmax", with!(softmax: softmax_leaves_what_is_masked)),
        ("softmax sees one more", "softmax", with!(softmax: softmax_sees_one_more)),
        ("softmax sums from lo", "softmax", with!(softmax: softmax_sums_from_lo)),
        ("softmax subtracts first", "softmax", with!(softmax: softmax_subtracts_first)),
        ("softmax forgets NaN", "softmax", with!(softmax: softmax_forgets_nan)),
        ("softmax starts with factor 1", "softmax", with!(softmax: softmax_starts_with_one)),
        ("softmax, maximum one too high", "softmax", with!(softmax: softmax_raises_without_ceiling)),
        ("weighted_sum misses a key", "weighted_sum", with!(weighted_sum: weighted_sum_misses_the_last_key)),
        ("weighted_sum backwards", "weighted_sum", with!(weighted_sum: weighted_sum_backwards)),
        ("weighted_sum, one factor", "weighted_sum", with!(weighted_sum: weighted_sum_takes_one_factor)),
        ("weighted_sum reads what is fresh", "weighted_sum", with!(weighted_sum: weighted_sum_reads_what_is_fresh)),
        ("decode_scores miss a key", "decode_scores", with!(decode_scores: decode_scores_miss_the_last_key)),
        ("decode_scores turn nothing", "decode_scores", with!(decode_scores: decode_scores_turn_nothing)),
        ("decode_scores repeat row 0", "decode_scores", with!(decode_scores: decode_scores_repeat_row_0)),
        ("decode_sum touches the gap", "decode_sum", with!(decode_sum: decode_sum_touches_the_gap)),
        ("decode_sum drops the factor", "decode_sum", with!(decode_sum: decode_sum_drops_the_factor)),
    ];
    for (fault, names, kernels) in faults {
        let panic = run(kernels).expect_err(fault);
        let message = panic.downcast_ref::<String>().map_or("", String::as_str);
        assert!(message.contains(names), "\"{fault}\" was found as: {message}");
    }
}

//! Packing: rows of Q, K and V, widened and rotated in registers, on their way into the panels that the prefill tiles
//! read. The panel layouts are known to this file, [`super::score`] and `weighted_sum` alone.

use super::rows::{Element, LANES, Row, Runs, by_type, checked_row, for_each_vector, load};
use super::{MR, NR, NV};
use core::arch::aarch64::*;
use rotile_core::kernel::{Rotation, Rows};

/// Query panel: element `i` of row `r` at `i * 8 + r`. Transposed, other than on x86: the score tile multiplies by the
/// lanes of a vector of rows.
#[target_feature(enable = "neon")]
pub(super) fn pack_q_neon(rows: Rows<'_>, rotation: Option<Rotation<'_>>, scale: f32, panel: &mut [f32]) {
    by_type!(rows.data, pack_queries, rows, rotation.as_ref(), scale, panel)
}

#[target_feature(enable = "neon")]
fn pack_queries<T: Element>(
    data: &[T],
    rows: Rows<'_>,
    rotation: Option<&Rotation<'_>>,
    scale: f32,
    panel: &mut [f32],
) {
    pack_transposed::<T, MR, true>(data, rows, rotation, scale, panel);
}

/// Key panel: element `i` of key `c` at `i * 12 + c`.
#[target_feature(enable = "neon")]
pub(super) fn pack_k_neon(rows: Rows<'_>, rotation: Option<Rotation<'_>>, panel: &mut [f32]) {
    by_type!(rows.data, pack_keys, rows, rotation.as_ref(), panel)
}

#[target_feature(enable = "neon")]
fn pack_keys<T: Element>(data: &[T], rows: Rows<'_>, rotation: Option<&Rotation<'_>>, panel: &mut [f32]) {
    pack_transposed::<T, NR, false>(data, rows, rotation, 1.0, panel);
}

/// Element `i` of row `r`, rotated and, if `SCALED`, multiplied by `scale`, to `panel[i * W + r]`; zeros where there is no
/// row.
#[target_feature(enable = "neon")]
fn pack_transposed<T: Element, const W: usize, const SCALED: bool>(
    data: &[T],
    rows: Rows<'_>,
    rotation: Option<&Rotation<'_>>,
    scale: f32,
    panel: &mut [f32],
) {
    assert!(rows.at.len() <= W && panel.len() == W * rows.dim);
    let runs = Runs::new(rotation, rows.dim);
    for first in (0..W).step_by(LANES) {
        let count = rows.at.len().saturating_sub(first).min(LANES);
        if count > 0 {
            // Missing rows repeat the last one and are blanked below: no branch in the loop.
            let row = |r: usize| checked_row(data, &rows, rotation, first + r.min(count - 1));
            let four = [row(0), row(1), row(2), row(3)];
            let out = panel[first..].as_mut_ptr();
            // SAFETY: `checked_row` checked rows and angles; the panel has `dim` rows of W, of which 4 elements from
            // `first` on are written.
            unsafe {
                if runs.pairs.interleaved {
                    pack_four::<T, W, SCALED, true>(&four, &runs, scale, out);
                } else {
                    pack_four::<T, W, SCALED, false>(&four, &runs, scale, out);
                }
            }
        }
        if count < LANES {
            panel.chunks_exact_mut(W).for_each(|elements| elements[first + count..first + LANES].fill(0.0));
        }
    }
}

/// Four rows, rotated and transposed.
///
/// # Safety
///
/// - `rows` come from [`checked_row`] with the rotation that `runs` come from; `INTERLEAVED` is what its pairs are.
/// - 4 elements are writable at each of `out + i * W` for the elements `i` of a row.
#[inline(never)]
#[target_feature(enable = "neon")]
unsafe fn pack_four<T: Element, const W: usize, const SCALED: bool, const INTERLEAVED: bool>(
    rows: &[Row<T>; 4],
    runs: &Runs,
    scale: f32,
    out: *mut f32,
) {
    let zero = vdupq_n_f32(0.0);
    for (from, to) in runs.plain {
        for_each_vector!(from, to, |at, n| {
            let mut block = [zero; 4];
            for (x, row) in block.iter_mut().zip(rows) {
                // SAFETY: runs lie within the row.
                *x = unsafe { load(row.data.add(at), n) };
            }
            // SAFETY: elements of a row lie within the panel.
            unsafe { put::<SCALED>(block, scale, n, out.add(at * W), W) };
        });
    }
    let pairs = runs.pairs;
    let step = if INTERLEAVED { 2 * W } else { W };
    for_each_vector!(0, pairs.count, |i, n| {
        let (mut firsts, mut seconds) = ([zero; 4], [zero; 4]);
        for ((x, y), row) in firsts.iter_mut().zip(&mut seconds).zip(rows) {
            // SAFETY: the caller's duty.
            let turned = unsafe { pairs.turned::<T, INTERLEAVED>(*row, i, n) };
            (*x, *y) = (turned[0], turned[1]);
        }
        let (first, second) = pairs.at::<INTERLEAVED>(i);
        // SAFETY: elements of a row lie within the panel.
        unsafe {
            put::<SCALED>(firsts, scale, n, out.add(first * W), step);
            put::<SCALED>(seconds, scale, n, out.add(second * W), step);
        }
    });
}

/// Lane `i` of four rows, scaled if that is asked for, to `out + i * step`, for `n` lanes.
///
/// # Safety
///
/// 4 elements are writable at each.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn put<const SCALED: bool>(block: [float32x4_t; 4], scale: f32, n: usize, out: *mut f32, step: usize) {
    for (i, column) in transpose(block).into_iter().enumerate().take(n) {
        let column = if SCALED { vmulq_n_f32(column, scale) } else { column };
        // SAFETY: the caller's duty.
        unsafe { vst1q_f32(out.add(i * step), column) };
    }
}

/// Transposes 4 x 4: by TRN on elements, then on halves. (ST4 would do it on the way to memory, but as a sequence of
/// micro-operations that takes longer than these 8 on every core looked at.)
#[inline]
#[target_feature(enable = "neon")]
fn transpose([a, b, c, d]: [float32x4_t; 4]) -> [float32x4_t; 4] {
    let (ab0, ab1) = (vreinterpretq_f64_f32(vtrn1q_f32(a, b)), vreinterpretq_f64_f32(vtrn2q_f32(a, b)));
    let (cd0, cd1) = (vreinterpretq_f64_f32(vtrn1q_f32(c, d)), vreinterpretq_f64_f32(vtrn2q_f32(c, d)));
    [
        vreinterpretq_f32_f64(vtrn1q_f64(ab0, cd0)),
        vreinterpretq_f32_f64(vtrn1q_f64(ab1, cd1)),
        vreinterpretq_f32_f64(vtrn2q_f64(ab0, cd0)),
        vreinterpretq_f32_f64(vtrn2q_f64(ab1, cd1)),
    ]
}

/// Value tile: column panels of 8.
#[target_feature(enable = "neon")]
pub(super) fn pack_v_neon(rows: Rows<'_>, first: usize, keys: usize, tile: &mut [f32]) -> bool {
    by_type!(rows.data, pack_values, rows, first, keys, tile)
}

#[target_feature(enable = "neon")]
fn pack_values<T: Element>(data: &[T], rows: Rows<'_>, first: usize, keys: usize, tile: &mut [f32]) -> bool {
    let panels = rows.dim.div_ceil(NV);
    assert!(first + rows.at.len() <= keys && tile.len() >= panels * keys * NV);
    // 0 times an element is NaN exactly if the element is infinite or NaN: one multiply-add keeps watch. Two sums, to
    // hide its latency.
    let zero = vdupq_n_f32(0.0);
    let mut watch = [zero; 2];
    for r in 0..rows.at.len() {
        let row = checked_row(data, &rows, None, r).data;
        let out = tile[(first + r) * NV..].as_mut_ptr();
        for c in 0..panels {
            let left = rows.dim - c * NV;
            // SAFETY: the row has `left` elements from `c * NV` on; panel `c` has `keys` rows of 8, of which this is row
            // `first + r`.
            unsafe {
                let (from, to) = (row.add(c * NV), out.add(c * keys * NV));
                let x0 = load(from, left);
                // The columns that fill the last panel up are 0.
                let x1 = if left > LANES { load(from.add(LANES), left - LANES) } else { zero };
                vst1q_f32(to, x0);
                vst1q_f32(to.add(LANES), x1);
                watch = [vfmaq_f32(watch[0], x0, zero), vfmaq_f32(watch[1], x1, zero)];
            }
        }
    }
    let sum = vaddq_f32(watch[0], watch[1]);
    vminvq_u32(vceqq_f32(sum, sum)) != 0
}

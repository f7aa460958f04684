//! Packing: rows of Q, K and V, widened and rotated in registers, on their way into the panels that the prefill tiles
//! read. The panel layouts are known to this file, [`super::score`] and `weighted_sum` alone.

#![allow(
    clippy::needless_range_loop,
    reason = "an index that runs over several arrays of vectors; iterator adapters with closures become calls here"
)]

use super::rows::{Element, LANES, half, interleaved, load, sixteen_pairs};
use super::{MR, NR, NV};
use crate::shared::{CheckedRows, Kind, Row, Segment, by_type, each_vector, segments};
use core::arch::x86_64::*;
use rotile_core::kernel::{Rotation, Rows};

/// Query panel: element `i` of row `r` at `i * 12 + r`. Row by row, as on AVX2, twelve pointers would not fit the general
/// registers; transposed, the broadcasts of a step are one pointer and constants.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
pub(super) fn pack_q_avx512(rows: Rows<'_>, rotation: Option<Rotation<'_>>, scale: f32, panel: &mut [f32]) {
    by_type!(rows.data, pack_columns::<_, MR>, rows, rotation.as_ref(), scale, panel)
}

/// Key panel: element `i` of key `c` at `i * 32 + c`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
pub(super) fn pack_k_avx512(rows: Rows<'_>, rotation: Option<Rotation<'_>>, panel: &mut [f32]) {
    by_type!(rows.data, pack_columns::<_, NR>, rows, rotation.as_ref(), 1.0, panel)
}

/// Rows that are transposed together. With 4, half a transposition is enough and 128-bit stores do the rest: 8 shuffles for
/// 4 x 16 elements, where 16 x 16 takes 64 for four times as many; and x and y of 4 rotated rows fit in registers.
const QUAD: usize = 4;

/// Up to WIDTH rows as the columns of a panel.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
fn pack_columns<T: Element, const WIDTH: usize>(
    data: &[T],
    rows: Rows<'_>,
    rotation: Option<&Rotation<'_>>,
    scale: f32,
    panel: &mut [f32],
) {
    const { assert!(WIDTH.is_multiple_of(QUAD)) };
    assert!(rows.at.len() <= WIDTH && panel.len() == WIDTH * rows.dim);
    let segments = segments(rotation, rows.dim);
    let checked = CheckedRows::new(data, &rows, rotation);
    for first in (0..WIDTH).step_by(QUAD) {
        let count = rows.at.len().saturating_sub(first).min(QUAD);
        if count == 0 {
            panel.chunks_exact_mut(WIDTH).for_each(|columns| columns[first..first + QUAD].fill(0.0));
            continue;
        }
        // Missing rows repeat the last one and are blanked after the transposition.
        let row = |c: usize| checked.row(first + c.min(count - 1));
        let quad = [row(0), row(1), row(2), row(3)];
        // SAFETY: rows and angles are checked, and the panel has `dim` rows of WIDTH.
        unsafe { pack_quad::<T, WIDTH>(&quad, &segments, scale, count, panel.as_mut_ptr().add(first)) };
    }
}

/// Four rows, rotated and scaled, as columns WIDTH apart; those from `count` on are zeros.
///
/// # Safety
///
/// - `rows` are as [`CheckedRows`] gives them, `segments` the runs of their elements.
/// - 4 elements are writable at each of `out + i * WIDTH`, for every element `i` of a row.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
#[inline(never)]
unsafe fn pack_quad<T: Element, const WIDTH: usize>(
    rows: &[Row<T>; QUAD],
    segments: &[Segment; 5],
    scale: f32,
    count: usize,
    out: *mut f32,
) {
    // The four rows in every 128 bits of a transposed vector.
    let keep = ((1u32 << count) - 1) * 0x1111;
    let (scale, keep) = (_mm512_set1_ps(scale), keep as __mmask16);
    let [a, b, c, d] = *rows;
    for &Segment { kind, start, end } in segments {
        // SAFETY: elements `at..at + n` and their partners are in every row and in the panel.
        unsafe {
            match kind {
                Kind::Copy => each_vector!(start..end, |at, n| {
                    let (a, b) = (load(a.data.add(at), n), load(b.data.add(at), n));
                    let (c, d) = (load(c.data.add(at), n), load(d.data.add(at), n));
                    put_n::<WIDTH>(transpose([a, b, c, d], scale, keep), out.add(at * WIDTH), n);
                }),
                Kind::First { distance } => each_vector!(start..end, |at, n| {
                    let i = at - start;
                    let [a, a2] = half(a, at, distance, i, n);
                    let [b, b2] = half(b, at, distance, i, n);
                    let [c, c2] = half(c, at, distance, i, n);
                    let [d, d2] = half(d, at, distance, i, n);
                    put_n::<WIDTH>(transpose([a, b, c, d], scale, keep), out.add(at * WIDTH), n);
                    put_n::<WIDTH>(transpose([a2, b2, c2, d2], scale, keep), out.add((at + distance) * WIDTH), n);
                }),
                Kind::Second => (),
                Kind::Interleaved => {
                    let mut from = start;
                    while from + 2 * LANES <= end {
                        let i = (from - start) / 2;
                        let [a, a2] = sixteen_pairs(a, from, i);
                        let [b, b2] = sixteen_pairs(b, from, i);
                        let [c, c2] = sixteen_pairs(c, from, i);
                        let [d, d2] = sixteen_pairs(d, from, i);
                        put::<WIDTH, 2>(transpose([a, b, c, d], scale, keep), out.add(from * WIDTH));
                        put::<WIDTH, 2>(transpose([a2, b2, c2, d2], scale, keep), out.add((from + 1) * WIDTH));
                        from += 2 * LANES;
                    }
                    each_vector!(from..end, |at, n| {
                        let i = (at - start) / 2;
                        let (a, b) = (interleaved(a, at, i, n), interleaved(b, at, i, n));
                        let (c, d) = (interleaved(c, at, i, n), interleaved(d, at, i, n));
                        put_n::<WIDTH>(transpose([a, b, c, d], scale, keep), out.add(at * WIDTH), n);
                    });
                }
            }
        }
    }
}

/// Four rows, scaled, as columns: elements i, i + 4, i + 8 and i + 12 in the quarters of vector i. Lanes outside `keep` are 0.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
fn transpose([a, b, c, d]: [__m512; QUAD], scale: __m512, keep: __mmask16) -> [__m512; QUAD] {
    let (a, b) = (_mm512_mul_ps(a, scale), _mm512_mul_ps(b, scale));
    let (c, d) = (_mm512_mul_ps(c, scale), _mm512_mul_ps(d, scale));
    let (ab, cd) = (_mm512_unpacklo_ps(a, b), _mm512_unpacklo_ps(c, d));
    let (ab2, cd2) = (_mm512_unpackhi_ps(a, b), _mm512_unpackhi_ps(c, d));
    [
        _mm512_maskz_shuffle_ps::<0b01_00_01_00>(keep, ab, cd),
        _mm512_maskz_shuffle_ps::<0b11_10_11_10>(keep, ab, cd),
        _mm512_maskz_shuffle_ps::<0b01_00_01_00>(keep, ab2, cd2),
        _mm512_maskz_shuffle_ps::<0b11_10_11_10>(keep, ab2, cd2),
    ]
}

/// Stores 16 columns, EVERY rows of WIDTH apart.
///
/// # Safety
///
/// 4 elements are writable at each of `out + i * EVERY * WIDTH`, `i < 16`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
unsafe fn put<const WIDTH: usize, const EVERY: usize>(columns: [__m512; QUAD], out: *mut f32) {
    let stride = EVERY * WIDTH;
    for i in 0..QUAD {
        // SAFETY: the caller's duty.
        unsafe {
            let out = out.add(i * stride);
            _mm_storeu_ps(out, _mm512_castps512_ps128(columns[i]));
            _mm_storeu_ps(out.add(4 * stride), _mm512_extractf32x4_ps::<1>(columns[i]));
            _mm_storeu_ps(out.add(8 * stride), _mm512_extractf32x4_ps::<2>(columns[i]));
            _mm_storeu_ps(out.add(12 * stride), _mm512_extractf32x4_ps::<3>(columns[i]));
        }
    }
}

/// As [`put`] with EVERY = 1, the first `n` columns.
///
/// # Safety
///
/// As there, for those.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
unsafe fn put_n<const WIDTH: usize>(columns: [__m512; QUAD], out: *mut f32, n: usize) {
    // SAFETY: the caller's duty.
    unsafe { if n >= LANES { put::<WIDTH, 1>(columns, out) } else { put_some(&columns, out, WIDTH, n) } }
}

/// As [`put_n`], with a tail. Out of line: it ends a run.
///
/// # Safety
///
/// 4 elements are writable at each of `out + i * stride`, `i < n`, and `n <= 16`.
#[inline(never)]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
unsafe fn put_some(columns: &[__m512; QUAD], out: *mut f32, stride: usize, n: usize) {
    let elements: *const f32 = columns.as_ptr().cast();
    for i in 0..n {
        // SAFETY: column `i` is quarter `i / 4` of vector `i % 4`; the rest is the caller's duty.
        unsafe { _mm_storeu_ps(out.add(i * stride), _mm_loadu_ps(elements.add(i % QUAD * LANES + i / QUAD * 4))) };
    }
}

/// Value tile: column panels of 32.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
pub(super) fn pack_v_avx512(rows: Rows<'_>, first: usize, keys: usize, tile: &mut [f32]) -> bool {
    by_type!(rows.data, pack_values, rows, first, keys, tile)
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
fn pack_values<T: Element>(data: &[T], rows: Rows<'_>, first: usize, keys: usize, tile: &mut [f32]) -> bool {
    /// Quiet NaN, +inf, -inf, signalling NaN, as `vfpclassps` numbers them.
    const NOT_FINITE: i32 = 0x01 | 0x08 | 0x10 | 0x80;
    let (dim, count) = (rows.dim, rows.at.len());
    let need = dim.div_ceil(NV).checked_mul(NV).and_then(|columns| columns.checked_mul(keys));
    assert!(first <= keys && count <= keys - first && need.is_some_and(|need| need <= tile.len()));
    let mut wrong: __mmask16 = 0;
    let checked = CheckedRows::new(data, &rows, None);
    // Panel by panel, so that what is written is one run of memory.
    for c in (0..dim).step_by(NV) {
        for r in 0..count {
            let row = checked.row(r);
            // SAFETY: the elements are in the row, of which no padding is read; the panel of column `c` has `keys` rows
            // of 32.
            unsafe {
                let from = row.data.add(c);
                let (x, y) = if c + NV <= dim {
                    (T::load16(from), T::load16(from.add(LANES)))
                } else {
                    let left = dim - c;
                    (load(from, left), load(from.add(left.min(LANES)), left.saturating_sub(LANES)))
                };
                let out = tile.as_mut_ptr().add(c * keys + (first + r) * NV);
                _mm512_storeu_ps(out, x);
                _mm512_storeu_ps(out.add(LANES), y);
                wrong |= _mm512_fpclass_ps_mask::<NOT_FINITE>(x) | _mm512_fpclass_ps_mask::<NOT_FINITE>(y);
            }
        }
    }
    wrong == 0
}

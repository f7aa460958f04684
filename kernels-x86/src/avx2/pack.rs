//! Packing: rows of Q, K and V, widened and rotated in registers, on their way into the panels that the prefill tiles
//! read. The panel layouts are known to this file, [`super::score`] and `weighted_sum` alone.

#![allow(
    clippy::needless_range_loop,
    reason = "an index that runs over several arrays of vectors; iterator adapters with closures become calls here"
)]

use super::rows::{Element, LANES, PAIR_ORDER, load_avx2};
use super::{MR, NR, NV};
use crate::shared::{CheckedRows, Kind, Row, Segment, by_type, each_vector, segments};
use core::arch::x86_64::*;
use rotile_core::kernel::{Rotation, Rows};

/// Query panel: rows one after the other. The score tile broadcasts single elements, so nothing needs transposing.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn pack_q_avx2(rows: Rows<'_>, rotation: Option<Rotation<'_>>, scale: f32, panel: &mut [f32]) {
    let (dim, count) = (rows.dim, rows.at.len());
    assert!(count <= MR && panel.len() == MR * dim);
    panel[count * dim..].fill(0.0);
    load_avx2(rows, rotation, scale, panel, dim);
}

/// Key panel: element `i` of key `c` at `i * 16 + c`.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn pack_k_avx2(rows: Rows<'_>, rotation: Option<Rotation<'_>>, panel: &mut [f32]) {
    assert!(rows.at.len() <= NR && panel.len() == NR * rows.dim);
    by_type!(rows.data, pack_keys, rows, rotation.as_ref(), panel)
}

/// Keys that are transposed together. With 4, half a transposition is enough and 128-bit stores do the rest: 8 shuffles
/// for 4 x 8 elements, where 8 x 8 takes 24 for twice as many; and x and y of 4 rotated keys fit in registers.
const QUAD: usize = 4;

#[target_feature(enable = "avx2,fma,f16c")]
fn pack_keys<T: Element>(data: &[T], rows: Rows<'_>, rotation: Option<&Rotation<'_>>, panel: &mut [f32]) {
    let segments = segments(rotation, rows.dim);
    let checked = CheckedRows::new(data, &rows, rotation);
    for first in (0..NR).step_by(QUAD) {
        let count = rows.at.len().saturating_sub(first).min(QUAD);
        if count == 0 {
            panel.chunks_exact_mut(NR).for_each(|keys| keys[first..first + QUAD].fill(0.0));
            continue;
        }
        // Missing keys repeat the last one and are blanked after the transposition.
        let key = |c: usize| checked.row(first + c.min(count - 1));
        let keys = [key(0), key(1), key(2), key(3)];
        // SAFETY: rows and angles are checked, and the panel has `dim` rows of 16.
        unsafe {
            let out = panel.as_mut_ptr().add(first);
            if count == QUAD {
                pack_quad::<T, false>(&keys, &segments, count, out);
            } else {
                pack_quad::<T, true>(&keys, &segments, count, out);
            }
        }
    }
}

/// Four keys, rotated; those from `count` on are zeros if some are `MISSING`.
///
/// # Safety
///
/// - `keys` are as [`CheckedRows`] gives them, `segments` the runs of their elements.
/// - 4 elements are writable at each of `out + i * 16`, for every element `i` of a key.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn pack_quad<T: Element, const MISSING: bool>(
    keys: &[Row<T>; QUAD],
    segments: &[Segment; 5],
    count: usize,
    out: *mut f32,
) {
    let keep = _mm_castsi128_ps(_mm_cmpgt_epi32(_mm_set1_epi32(count as i32), _mm_setr_epi32(0, 1, 2, 3)));
    for &Segment { kind, start, end } in segments {
        // SAFETY: elements `at..at + n` and their partners are in every row and in the panel.
        unsafe {
            match kind {
                Kind::Copy => each_vector!(start..end, |at, n| {
                    let block =
                        [keys[0].plain(at, n), keys[1].plain(at, n), keys[2].plain(at, n), keys[3].plain(at, n)];
                    put::<MISSING>(block, keep, out.add(at * NR), n);
                }),
                Kind::First { distance } => each_vector!(start..end, |at, n| {
                    let i = at - start;
                    let [x0, y0] = keys[0].half(at, distance, i, n);
                    let [x1, y1] = keys[1].half(at, distance, i, n);
                    let [x2, y2] = keys[2].half(at, distance, i, n);
                    let [x3, y3] = keys[3].half(at, distance, i, n);
                    put::<MISSING>([x0, x1, x2, x3], keep, out.add(at * NR), n);
                    put::<MISSING>([y0, y1, y2, y3], keep, out.add((at + distance) * NR), n);
                }),
                Kind::Second => (),
                Kind::Interleaved => {
                    let mut from = start;
                    while from + 2 * LANES <= end {
                        let i = (from - start) / 2;
                        let [x0, y0] = keys[0].eight_pairs(from, i);
                        let [x1, y1] = keys[1].eight_pairs(from, i);
                        let [x2, y2] = keys[2].eight_pairs(from, i);
                        let [x3, y3] = keys[3].eight_pairs(from, i);
                        put_pairs::<MISSING>([x0, x1, x2, x3], keep, out.add(from * NR));
                        put_pairs::<MISSING>([y0, y1, y2, y3], keep, out.add((from + 1) * NR));
                        from += 2 * LANES;
                    }
                    each_vector!(from..end, |at, n| {
                        let i = (at - start) / 2;
                        let (a, b) = (keys[0].interleaved(at, i, n), keys[1].interleaved(at, i, n));
                        let (c, d) = (keys[2].interleaved(at, i, n), keys[3].interleaved(at, i, n));
                        put::<MISSING>([a, b, c, d], keep, out.add(at * NR), n);
                    });
                }
            }
        }
    }
}

/// Stores the first `n` elements of 4 keys as columns, with lanes outside `keep` as 0 if some are `MISSING`.
///
/// # Safety
///
/// 4 elements are writable at each of `out + i * 16`, `i < n`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn put<const MISSING: bool>(keys: [__m256; QUAD], keep: __m128, out: *mut f32, n: usize) {
    let columns = transpose::<MISSING>(keys, keep);
    for i in 0..LANES {
        if i < n {
            // SAFETY: the caller's duty.
            unsafe { _mm_storeu_ps(out.add(i * NR), columns[i]) };
        }
    }
}

/// As [`put`], for every second element, in the order of [`PAIR_ORDER`].
///
/// # Safety
///
/// 4 elements are writable at each of `out + 2 * i * 16`, `i < 8`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn put_pairs<const MISSING: bool>(keys: [__m256; QUAD], keep: __m128, out: *mut f32) {
    let columns = transpose::<MISSING>(keys, keep);
    for i in 0..LANES {
        // SAFETY: the caller's duty.
        unsafe { _mm_storeu_ps(out.add(2 * PAIR_ORDER[i] * NR), columns[i]) };
    }
}

/// Transposes 4 x 8.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn transpose<const MISSING: bool>([a, b, c, d]: [__m256; QUAD], keep: __m128) -> [__m128; LANES] {
    let (ab, cd) = (_mm256_unpacklo_ps(a, b), _mm256_unpacklo_ps(c, d));
    let (ab2, cd2) = (_mm256_unpackhi_ps(a, b), _mm256_unpackhi_ps(c, d));
    // Elements i and i + 4 of the four keys in the halves of vector i.
    let both = [
        _mm256_shuffle_ps::<0b01_00_01_00>(ab, cd),
        _mm256_shuffle_ps::<0b11_10_11_10>(ab, cd),
        _mm256_shuffle_ps::<0b01_00_01_00>(ab2, cd2),
        _mm256_shuffle_ps::<0b11_10_11_10>(ab2, cd2),
    ];
    let mut columns = [_mm_setzero_ps(); LANES];
    for i in 0..QUAD {
        columns[i] = _mm256_castps256_ps128(both[i]);
        columns[i + QUAD] = _mm256_extractf128_ps::<1>(both[i]);
    }
    if MISSING {
        for column in &mut columns {
            *column = _mm_and_ps(*column, keep);
        }
    }
    columns
}

/// Value tile: column panels of 16.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn pack_v_avx2(rows: Rows<'_>, first: usize, keys: usize, tile: &mut [f32]) -> bool {
    by_type!(rows.data, pack_values, rows, first, keys, tile)
}

#[target_feature(enable = "avx2,fma,f16c")]
fn pack_values<T: Element>(data: &[T], rows: Rows<'_>, first: usize, keys: usize, tile: &mut [f32]) -> bool {
    let (dim, count) = (rows.dim, rows.at.len());
    let need = dim.div_ceil(NV).checked_mul(NV).and_then(|columns| columns.checked_mul(keys));
    assert!(first <= keys && count <= keys - first && need.is_some_and(|need| need <= tile.len()));
    // The largest magnitude seen, as bits: infinities and NaN lie above every finite number.
    let mut largest = _mm256_setzero_si256();
    let magnitude = _mm256_set1_epi32(0x7FFF_FFFF);
    let checked = CheckedRows::new(data, &rows, None);
    // Panel by panel, so that what is written is one run of memory.
    for c in (0..dim).step_by(NV) {
        for r in 0..count {
            let row = checked.row(r);
            // SAFETY: the elements are in the row, of which no padding is read; the panel of column `c` has `keys` rows
            // of 16.
            unsafe {
                let (x, y) = if c + NV <= dim {
                    (row.plain(c, LANES), row.plain(c + LANES, LANES))
                } else {
                    let left = dim - c;
                    (row.plain(c, left.min(LANES)), row.plain(c + left.min(LANES), left.saturating_sub(LANES)))
                };
                let out = tile.as_mut_ptr().add(c * keys + (first + r) * NV);
                _mm256_storeu_ps(out, x);
                _mm256_storeu_ps(out.add(LANES), y);
                largest = _mm256_max_epi32(largest, _mm256_and_si256(_mm256_castps_si256(x), magnitude));
                largest = _mm256_max_epi32(largest, _mm256_and_si256(_mm256_castps_si256(y), magnitude));
            }
        }
    }
    let infinite = _mm256_cmpgt_epi32(largest, _mm256_set1_epi32(0x7F7F_FFFF));
    _mm256_testz_si256(infinite, infinite) == 1
}

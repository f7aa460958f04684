//! Packing: rows of Q, K and V, widened and rotated in registers, on their way into the panels that the prefill tiles
//! read. The panel layouts are known to this file, [`super::score`] and `weighted_sum` alone.

use super::rows::{Element, LANES, Segment, by_type, checked_row, load, load_avx2, segments, turned};
use super::{MR, NR, NV};
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

#[target_feature(enable = "avx2,fma,f16c")]
fn pack_keys<T: Element>(data: &[T], rows: Rows<'_>, rotation: Option<&Rotation<'_>>, panel: &mut [f32]) {
    let segments = segments(rotation, rows.dim);
    for half in 0..NR / LANES {
        let first = half * LANES;
        let count = rows.at.len().saturating_sub(first).min(LANES);
        if count == 0 {
            panel.chunks_exact_mut(NR).for_each(|keys| keys[first..first + LANES].fill(0.0));
            continue;
        }
        // Missing keys repeat the last one and are blanked after the transposition: no branch in the loop.
        let keys = core::array::from_fn(|c| checked_row(data, &rows, rotation, first + c.min(count - 1)));
        let keep = super::rows::lanes_below(count);
        for segment in segments {
            let end = segment.start + segment.len;
            let mut at = segment.start;
            while at + LANES <= end {
                // SAFETY: `checked_row` checked rows and angles; the panel has `dim` rows of 16.
                unsafe { pack_block(&keys, segment, at, LANES, keep, panel.as_mut_ptr().add(at * NR + first)) };
                at += LANES;
            }
            if at < end {
                // SAFETY: as above.
                unsafe { pack_block(&keys, segment, at, end - at, keep, panel.as_mut_ptr().add(at * NR + first)) };
            }
        }
    }
}

/// Elements `at..at + n` of 8 keys, rotated, transposed and stored to `n` rows of a panel.
///
/// # Safety
///
/// - Rows and angles as for [`turned`].
/// - 8 elements are writable at each of `out + i * 16`, `i < n`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn pack_block<T: Element>(
    keys: &[(*const T, *const f32, *const f32); LANES],
    segment: Segment,
    at: usize,
    n: usize,
    keep: __m256i,
    out: *mut f32,
) {
    // SAFETY: the caller's duty.
    let block = keys.map(|(row, cos, sin)| unsafe { turned(row, segment, at, n, cos, sin) });
    let columns = transpose(block);
    for (i, column) in columns.into_iter().enumerate().take(n) {
        // SAFETY: the caller's duty.
        unsafe { _mm256_storeu_ps(out.add(i * NR), _mm256_and_ps(column, _mm256_castsi256_ps(keep))) };
    }
}

/// Transposes 8 x 8.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn transpose(r: [__m256; 8]) -> [__m256; 8] {
    let lo = |a, b| _mm256_unpacklo_ps(a, b);
    let hi = |a, b| _mm256_unpackhi_ps(a, b);
    let t = [
        lo(r[0], r[1]),
        hi(r[0], r[1]),
        lo(r[2], r[3]),
        hi(r[2], r[3]),
        lo(r[4], r[5]),
        hi(r[4], r[5]),
        lo(r[6], r[7]),
        hi(r[6], r[7]),
    ];
    let even = |a, b| _mm256_shuffle_ps::<0b01_00_01_00>(a, b);
    let odd = |a, b| _mm256_shuffle_ps::<0b11_10_11_10>(a, b);
    let q = [
        even(t[0], t[2]),
        odd(t[0], t[2]),
        even(t[1], t[3]),
        odd(t[1], t[3]),
        even(t[4], t[6]),
        odd(t[4], t[6]),
        even(t[5], t[7]),
        odd(t[5], t[7]),
    ];
    let low = |a, b| _mm256_permute2f128_ps::<0x20>(a, b);
    let high = |a, b| _mm256_permute2f128_ps::<0x31>(a, b);
    [
        low(q[0], q[4]),
        low(q[1], q[5]),
        low(q[2], q[6]),
        low(q[3], q[7]),
        high(q[0], q[4]),
        high(q[1], q[5]),
        high(q[2], q[6]),
        high(q[3], q[7]),
    ]
}

/// Value tile: column panels of 16.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn pack_v_avx2(rows: Rows<'_>, first: usize, keys: usize, tile: &mut [f32]) -> bool {
    by_type!(rows.data, pack_values, rows, first, keys, tile)
}

#[target_feature(enable = "avx2,fma,f16c")]
fn pack_values<T: Element>(data: &[T], rows: Rows<'_>, first: usize, keys: usize, tile: &mut [f32]) -> bool {
    let panels = rows.dim.div_ceil(NV);
    assert!(first + rows.at.len() <= keys && tile.len() >= panels * keys * NV);
    // The largest magnitude seen, as bits: infinities and NaN lie above every finite number.
    let mut largest = _mm256_setzero_si256();
    let magnitude = _mm256_set1_epi32(0x7FFF_FFFF);
    for r in 0..rows.at.len() {
        let (row, ..) = checked_row(data, &rows, None, r);
        for c in 0..panels {
            for half in 0..NV / LANES {
                let at = c * NV + half * LANES;
                let n = rows.dim.saturating_sub(at).min(LANES);
                // SAFETY: `n` elements from `at` on are in the row (`at` is clamped for the padding); the panel has
                // `keys` rows of 16.
                unsafe {
                    let x = load(row.add(at.min(rows.dim)), n);
                    let out = tile.as_mut_ptr().add(c * keys * NV + (first + r) * NV + half * LANES);
                    _mm256_storeu_ps(out, x);
                    largest = _mm256_max_epi32(largest, _mm256_and_si256(_mm256_castps_si256(x), magnitude));
                }
            }
        }
    }
    let infinite = _mm256_cmpgt_epi32(largest, _mm256_set1_epi32(0x7F7F_FFFF));
    _mm256_testz_si256(infinite, infinite) == 1
}

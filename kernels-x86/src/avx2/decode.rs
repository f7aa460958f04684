//! Few query rows over keys and values in place: each key and value is read from memory once for all rows, nothing is
//! packed. Key tiles, splits and softmax live elsewhere.

use super::DECODE_ROWS;
use super::rows::{
    Element, Kind, LANES, Segment, by_type, checked_row, load, prefetch, segments, store_n, turn_first, turn_second,
    turned,
};
use core::arch::x86_64::*;
use rotile_core::kernel::{DecodeScores, DecodeSum, Rows};

/// Keys that are multiplied side by side: with 4 rows, 8 chains.
const KEYS: usize = 2;
/// Vectors of values that are summed side by side: with 4 rows, 8 chains.
const COLUMNS: usize = 2;

/// Calls the kernel for a number of rows known at compile time, so that its accumulators are registers.
macro_rules! by_rows {
    ($rows:expr, $kernel:ident, $t:ident, $($arg:expr),*) => {
        match $rows {
            1 => $kernel::<$t, 1>($($arg),*),
            2 => $kernel::<$t, 2>($($arg),*),
            3 => $kernel::<$t, 3>($($arg),*),
            DECODE_ROWS => $kernel::<$t, DECODE_ROWS>($($arg),*),
            rows => panic!("{rows} rows, 1 to {DECODE_ROWS} allowed"),
        }
    };
}

/// See [`rotile_core::kernel::Kernels::decode_scores`].
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn decode_scores_avx2(a: DecodeScores<'_>) {
    by_type!(a.k.data, decode_scores, a)
}

#[target_feature(enable = "avx2,fma,f16c")]
fn decode_scores<T: Element>(data: &[T], a: DecodeScores<'_>) {
    by_rows!(a.rows, score_rows, T, data, a)
}

#[target_feature(enable = "avx2,fma,f16c")]
fn score_rows<T: Element, const R: usize>(data: &[T], a: DecodeScores<'_>) {
    let (keys, dim) = (a.k.at.len(), a.k.dim);
    assert!(a.q.len() >= (R - 1) * a.q_stride + dim && a.s.len() >= (R - 1) * a.s_stride + keys);
    let rotation = a.rotation;
    let rotation = rotation.as_ref();
    let segments = segments(rotation, dim);
    let s = a.s.as_mut_ptr();
    let mut j = 0;
    while j < keys {
        let n = KEYS.min(keys - j);
        prefetch(a.ahead.as_ref(), j, 0, dim);
        if n == KEYS {
            prefetch(a.ahead.as_ref(), j + 1, 0, dim);
            let rows = core::array::from_fn(|i| checked_row(data, &a.k, rotation, j + i));
            // SAFETY: rows and angles are checked, `q` has R rows of `dim`, row `r` of `s` has `keys` columns.
            unsafe { score_keys::<T, R, KEYS>(rows, &segments, &a, s.add(j)) };
        } else {
            // SAFETY: as above.
            unsafe { score_keys::<T, R, 1>([checked_row(data, &a.k, rotation, j)], &segments, &a, s.add(j)) };
        }
        j += n;
    }
}

/// Scores of N keys. The order of operations for a (row, key) is the same whatever R and N.
///
/// # Safety
///
/// - `rows` are keys as [`checked_row`] gives them; `a.q` has R rows of `dim` elements.
/// - N elements are writable at each of `s + r * a.s_stride`, `r < R`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn score_keys<T: Element, const R: usize, const N: usize>(
    rows: [(*const T, *const f32, *const f32); N],
    segments: &[Segment; 5],
    a: &DecodeScores<'_>,
    s: *mut f32,
) {
    let q = a.q.as_ptr();
    let mut acc = [[_mm256_setzero_ps(); R]; N];
    for segment in segments {
        let end = segment.start + segment.len;
        let mut at = segment.start;
        while at < end {
            let n = LANES.min(end - at);
            // SAFETY: elements `at..at + n` are in the row of every key and query, and so are their partners.
            unsafe {
                match segment.kind {
                    // Both elements of a pair are turned at once, where the first is.
                    Kind::Second { .. } => break,
                    Kind::First { distance } => {
                        let (q0, q1) = (at, at + distance);
                        let mut pairs = [[_mm256_setzero_ps(); 2]; N];
                        for (pair, (row, cos, sin)) in pairs.iter_mut().zip(rows) {
                            let (x, y) = (load(row.add(q0), n), load(row.add(q1), n));
                            let i = at - segment.start;
                            let (cos, sin) = (_mm256_loadu_ps(cos.add(i)), _mm256_loadu_ps(sin.add(i)));
                            *pair = [turn_first(x, y, cos, sin), turn_second(x, y, cos, sin)];
                        }
                        for r in 0..R {
                            let (x, y) = (load(q.add(r * a.q_stride + q0), n), load(q.add(r * a.q_stride + q1), n));
                            for k in 0..N {
                                acc[k][r] = _mm256_fmadd_ps(x, pairs[k][0], acc[k][r]);
                                acc[k][r] = _mm256_fmadd_ps(y, pairs[k][1], acc[k][r]);
                            }
                        }
                    }
                    _ => {
                        let keys = rows.map(|(row, cos, sin)| turned(row, *segment, at, n, cos, sin));
                        for r in 0..R {
                            let x = load(q.add(r * a.q_stride + at), n);
                            for k in 0..N {
                                acc[k][r] = _mm256_fmadd_ps(x, keys[k], acc[k][r]);
                            }
                        }
                    }
                }
            }
            at += n;
        }
    }
    for (k, acc) in acc.into_iter().enumerate() {
        let mut four = [_mm256_setzero_ps(); DECODE_ROWS];
        four[..R].copy_from_slice(&acc);
        let mut sums = [0.0f32; DECODE_ROWS];
        // SAFETY: `sums` has 4 elements.
        unsafe { _mm_storeu_ps(sums.as_mut_ptr(), sum_each(four)) };
        for (r, sum) in sums.into_iter().enumerate().take(R) {
            // SAFETY: the caller's duty.
            unsafe { s.add(r * a.s_stride + k).write(sum) };
        }
    }
}

/// The sums of the lanes of four vectors.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn sum_each([a, b, c, d]: [__m256; 4]) -> __m128 {
    let x = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
    _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x))
}

/// See [`rotile_core::kernel::Kernels::decode_sum`].
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn decode_sum_avx2(a: DecodeSum<'_>) {
    by_type!(a.v.data, decode_sum, a)
}

#[target_feature(enable = "avx2,fma,f16c")]
fn decode_sum<T: Element>(data: &[T], a: DecodeSum<'_>) {
    by_rows!(a.rows, sum_rows, T, data, a)
}

#[target_feature(enable = "avx2,fma,f16c")]
fn sum_rows<T: Element, const R: usize>(data: &[T], a: DecodeSum<'_>) {
    let (keys, dim) = (a.v.at.len(), a.v.dim);
    assert!(a.factors.len() >= R && a.acc.len() >= (R - 1) * a.acc_stride + dim);
    assert!(keys == 0 || a.p.len() >= (R - 1) * a.p_stride + keys);
    assert!(a.v.at.iter().all(|&at| at <= data.len() && data.len() - at >= dim));
    const WIDE: usize = COLUMNS * LANES;
    let acc = a.acc.as_mut_ptr();
    let mut c = 0;
    while c + WIDE <= dim {
        // SAFETY: every value row has `dim` elements, `p` R rows of `keys`, `acc` R rows of `dim`.
        unsafe { sum_columns::<T, R, COLUMNS>(data.as_ptr(), &a, acc, c, LANES) };
        c += WIDE;
    }
    while c < dim {
        let n = LANES.min(dim - c);
        // SAFETY: as above.
        unsafe { sum_columns::<T, R, 1>(data.as_ptr(), &a, acc, c, n) };
        c += n;
    }
}

/// N vectors of columns from `c` on, `n` lanes in the last.
///
/// # Safety
///
/// - `data + v.at[j] + c` has the columns readable for every key `j`, `a.p` R rows of keys, `a.factors` R factors.
/// - `acc` has the columns, readable and writable, in R rows.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn sum_columns<T: Element, const R: usize, const N: usize>(
    data: *const T,
    a: &DecodeSum<'_>,
    acc: *mut f32,
    c: usize,
    n: usize,
) {
    let Rows { at, .. } = a.v;
    // SAFETY: the caller's duty, for every access below.
    let mut sum: [[__m256; N]; R] = core::array::from_fn(|r| unsafe {
        let factor = _mm256_set1_ps(a.factors[r]);
        core::array::from_fn(|i| _mm256_mul_ps(load(acc.add(r * a.acc_stride + c + i * LANES), n), factor))
    });
    for (j, &at) in at.iter().enumerate() {
        prefetch(a.ahead.as_ref(), j, c, N * LANES);
        // SAFETY: as above.
        unsafe {
            let v: [__m256; N] = core::array::from_fn(|i| load(data.add(at + c + i * LANES), n));
            for (r, sum) in sum.iter_mut().enumerate() {
                let p = _mm256_broadcast_ss(&*a.p.as_ptr().add(r * a.p_stride + j));
                for i in 0..N {
                    sum[i] = _mm256_fmadd_ps(p, v[i], sum[i]);
                }
            }
        }
    }
    for (r, sum) in sum.into_iter().enumerate() {
        for (i, sum) in sum.into_iter().enumerate() {
            // SAFETY: as above.
            unsafe { store_n(acc.add(r * a.acc_stride + c + i * LANES), sum, n) };
        }
    }
}

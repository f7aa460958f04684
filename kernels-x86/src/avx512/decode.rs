//! Few query rows over keys and values in place: each key and value is read from memory once for all rows, nothing is
//! packed. Key tiles, splits and softmax live elsewhere.
//!
//! Keys (or vectors of columns) are taken several at a time: 8 chains of multiply-adds hide the latency (4 cycles, 2 a cycle),
//! 16 leave registers for the queries and for a key that is being rotated, and add up their lanes together.

#![allow(
    clippy::needless_range_loop,
    reason = "an index that runs over several arrays of vectors; iterator adapters with closures become calls here"
)]

use super::DECODE_ROWS;
use super::rows::{Element, LANES, apart, half, interleaved, lanes_below, load, sixteen_pairs};
use crate::shared::{Ahead, CheckedRows, HALF, INTERLEAVED, Kind, PLAIN, Row, Segment, by_type, each_vector, segments};
use core::arch::x86_64::*;
use rotile_core::PairStyle;
use rotile_core::kernel::{DecodeScores, DecodeSum, Rotation};

/// See [`rotile_core::kernel::Kernels::decode_scores`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
pub(super) fn decode_scores_avx512(a: DecodeScores<'_>) {
    by_type!(a.k.data, decode_scores, a)
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
fn decode_scores<T: Element>(data: &[T], a: DecodeScores<'_>) {
    match a.rotation.map(|rotation| rotation.turn.style) {
        None => score_plain_keys(data, a),
        Some(PairStyle::Interleaved) => score_turned_keys::<T, INTERLEAVED>(data, a),
        Some(_) => score_turned_keys::<T, HALF>(data, a),
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
fn score_plain_keys<T: Element>(data: &[T], a: DecodeScores<'_>) {
    match a.rows {
        1 => score_rows::<T, PLAIN, 1, 8>(data, a),
        2 => score_rows::<T, PLAIN, 2, 8>(data, a),
        3 => score_rows::<T, PLAIN, 3, 4>(data, a),
        DECODE_ROWS => score_rows::<T, PLAIN, DECODE_ROWS, 4>(data, a),
        rows => panic!("{rows} rows, 1 to {DECODE_ROWS} allowed"),
    }
}

/// With fewer keys at a time: a rotation has enough operations of its own to hide the latency of one row's sums.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
fn score_turned_keys<T: Element, const TURN: u8>(data: &[T], a: DecodeScores<'_>) {
    match a.rows {
        1 => score_rows::<T, TURN, 1, 4>(data, a),
        2 => score_rows::<T, TURN, 2, 4>(data, a),
        3 => score_rows::<T, TURN, 3, 4>(data, a),
        DECODE_ROWS => score_rows::<T, TURN, DECODE_ROWS, 4>(data, a),
        rows => panic!("{rows} rows, 1 to {DECODE_ROWS} allowed"),
    }
}

/// The runs of a row's elements.
struct Runs {
    /// What does not turn: the first `plain_len` of these.
    plain: [Segment; 3],
    plain_len: usize,
    /// What turns, if anything does.
    turned: Segment,
}

impl Runs {
    fn new(rotation: Option<&Rotation<'_>>, dim: usize) -> Self {
        let all = segments(rotation, dim);
        // What turns comes at odd places.
        let (mut plain, mut plain_len) = ([all[0]; 3], 0);
        for run in [all[0], all[2], all[4]] {
            if run.start < run.end {
                plain[plain_len] = run;
                plain_len += 1;
            }
        }
        Runs { plain, plain_len, turned: all[1] }
    }
}

/// Scores of all keys, N at a time. The order of operations for a (row, key) is the same whatever R and N.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
fn score_rows<T: Element, const TURN: u8, const R: usize, const N: usize>(data: &[T], a: DecodeScores<'_>) {
    a.check(R);
    let (keys, dim) = (a.k.at.len(), a.k.dim);
    let rotation = a.rotation.as_ref();
    let runs = Runs::new(rotation, dim);
    let rows = CheckedRows::new(data, &a.k, rotation);
    let ahead = Ahead::new(a.ahead);
    let mut some = [[0.0f32; N]; R];
    let mut j = 0;
    while j < keys {
        ahead.ask_each(j..j + N);
        let (first, group) = rows.group::<N>(j);
        let (s, s_stride) =
            if keys >= N { (a.s.as_mut_ptr().wrapping_add(first), a.s_stride) } else { (some.as_mut_ptr().cast(), N) };
        // SAFETY: rows and angles are checked, and the runs are theirs; `q` has R rows of `dim`, row `r` of `s` has room
        // for N scores: `keys >= N`, or it is `some`.
        unsafe { score_group::<T, TURN, R, N>(&group, &runs, a.q.as_ptr(), a.q_stride, s, s_stride) };
        if keys < N {
            for (r, some) in some.iter().enumerate() {
                a.s[r * a.s_stride..][..keys].copy_from_slice(&some[..keys]);
            }
        }
        j += N;
    }
}

/// Scores of N keys. Out of line, so that the accumulators have the registers to themselves.
///
/// # Safety
///
/// - `keys` are as [`CheckedRows`] gives them, `runs` the runs of their elements.
/// - `q` has R rows, `q_stride` apart, of as many elements as a key.
/// - N elements are writable at each of `s + r * s_stride`, `r < R`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
#[inline(never)]
unsafe fn score_group<T: Element, const TURN: u8, const R: usize, const N: usize>(
    keys: &[Row<T>; N],
    runs: &Runs,
    q: *const f32,
    q_stride: usize,
    s: *mut f32,
    s_stride: usize,
) {
    let mut sums = [[_mm512_setzero_ps(); R]; N];
    // (As many as there are: a loop over all three would be unrolled into three copies.)
    for &Segment { start, end, .. } in runs.plain.iter().take(runs.plain_len) {
        // SAFETY: runs lie within the rows of keys and queries.
        unsafe {
            each_vector!(start..end, |at, n| {
                let mut x = [_mm512_setzero_ps(); R];
                for r in 0..R {
                    x[r] = load(q.add(r * q_stride + at), n);
                }
                for k in 0..N {
                    let y = load(keys[k].data.add(at), n);
                    for r in 0..R {
                        sums[k][r] = _mm512_fmadd_ps(x[r], y, sums[k][r]);
                    }
                }
            });
        }
    }
    let Segment { kind, start, end } = runs.turned;
    if TURN == HALF
        && let Kind::First { distance } = kind
    {
        // SAFETY: as above, the partners of these elements included.
        unsafe {
            each_vector!(start..end, |at, n| {
                let mut x = [[_mm512_setzero_ps(); 2]; R];
                for r in 0..R {
                    let q = q.add(r * q_stride + at);
                    x[r] = [load(q, n), load(q.add(distance), n)];
                }
                for k in 0..N {
                    let y = half(keys[k], at, distance, at - start, n);
                    for r in 0..R {
                        sums[k][r] = _mm512_fmadd_ps(x[r][0], y[0], sums[k][r]);
                        sums[k][r] = _mm512_fmadd_ps(x[r][1], y[1], sums[k][r]);
                    }
                }
            });
        }
    }
    if TURN == INTERLEAVED {
        let mut from = start;
        // SAFETY: as above.
        unsafe {
            while from + 2 * LANES <= end {
                // Queries are taken apart like keys: the order of the elements of a sum is free.
                let mut x = [[_mm512_setzero_ps(); 2]; R];
                for r in 0..R {
                    let q = q.add(r * q_stride + from);
                    x[r] = apart(_mm512_loadu_ps(q), _mm512_loadu_ps(q.add(LANES)));
                }
                for k in 0..N {
                    let y = sixteen_pairs(keys[k], from, (from - start) / 2);
                    for r in 0..R {
                        sums[k][r] = _mm512_fmadd_ps(x[r][0], y[0], sums[k][r]);
                        sums[k][r] = _mm512_fmadd_ps(x[r][1], y[1], sums[k][r]);
                    }
                }
                from += 2 * LANES;
            }
            each_vector!(from..end, |at, n| {
                let mut x = [_mm512_setzero_ps(); R];
                for r in 0..R {
                    x[r] = load(q.add(r * q_stride + at), n);
                }
                for k in 0..N {
                    let y = interleaved(keys[k], at, (at - start) / 2, n);
                    for r in 0..R {
                        sums[k][r] = _mm512_fmadd_ps(x[r], y, sums[k][r]);
                    }
                }
            });
        }
    }
    // SAFETY: the caller's duty.
    unsafe { store_sums(&sums, s, s_stride) };
}

/// Adds up the lanes of each sum, in the same order for all, and stores the scores.
///
/// # Safety
///
/// N elements are writable at each of `s + r * s_stride`, `r < R`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
unsafe fn store_sums<const R: usize, const N: usize>(sums: &[[__m512; R]; N], s: *mut f32, s_stride: usize) {
    const { assert!(N == 4 || (N == 8 && R <= 2)) };
    // Four keys of one row in each; those that there are none of repeat others.
    let mut quads = [_mm512_setzero_ps(); 4];
    for i in 0..4 {
        let (r, k) = if N == 4 { (i % R, 0) } else { (i / 2 % R, i % 2 * 4) };
        quads[i] = sum_in_quarters(sums[k][r], sums[k + 1][r], sums[k + 2][r], sums[k + 3][r]);
    }
    let scores = sum_quarters(quads);
    // SAFETY: the caller's duty.
    unsafe {
        if N == 4 {
            _mm_storeu_ps(s, _mm512_castps512_ps128(scores));
            if R > 1 {
                _mm_storeu_ps(s.add(s_stride), _mm512_extractf32x4_ps::<1>(scores));
            }
            if R > 2 {
                _mm_storeu_ps(s.add(2 * s_stride), _mm512_extractf32x4_ps::<2>(scores));
            }
            if R > 3 {
                _mm_storeu_ps(s.add(3 * s_stride), _mm512_extractf32x4_ps::<3>(scores));
            }
        } else {
            _mm256_storeu_ps(s, _mm512_castps512_ps256(scores));
            if R > 1 {
                _mm256_storeu_ps(s.add(s_stride), _mm512_extractf32x8_ps::<1>(scores));
            }
        }
    }
}

/// In every quarter (128 bits): its sum of `a`, of `b`, of `c` and of `d`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
fn sum_in_quarters(a: __m512, b: __m512, c: __m512, d: __m512) -> __m512 {
    let ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    let cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    _mm512_add_ps(_mm512_shuffle_ps::<0b01_00_01_00>(ab, cd), _mm512_shuffle_ps::<0b11_10_11_10>(ab, cd))
}

/// In quarter `i`: the sum of the quarters of vector `i`. With [`sum_in_quarters`], 30 shuffles and 15 additions for 16 sums.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
fn sum_quarters([a, b, c, d]: [__m512; 4]) -> __m512 {
    let ab = _mm512_add_ps(_mm512_shuffle_f32x4::<0b01_00_01_00>(a, b), _mm512_shuffle_f32x4::<0b11_10_11_10>(a, b));
    let cd = _mm512_add_ps(_mm512_shuffle_f32x4::<0b01_00_01_00>(c, d), _mm512_shuffle_f32x4::<0b11_10_11_10>(c, d));
    _mm512_add_ps(_mm512_shuffle_f32x4::<0b10_00_10_00>(ab, cd), _mm512_shuffle_f32x4::<0b11_01_11_01>(ab, cd))
}

/// See [`rotile_core::kernel::Kernels::decode_sum`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
pub(super) fn decode_sum_avx512(a: DecodeSum<'_>) {
    by_type!(a.v.data, decode_sum, a)
}

/// Chooses the number of vectors that are summed together for a number of rows: as many of the 8 of head_dim 128 as
/// registers allow beside the weights.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
fn decode_sum<T: Element>(data: &[T], a: DecodeSum<'_>) {
    match a.rows {
        1 => sum_rows::<T, 1, 8>(data, a),
        2 => sum_rows::<T, 2, 8>(data, a),
        3 => sum_rows::<T, 3, 8>(data, a),
        DECODE_ROWS => sum_rows::<T, DECODE_ROWS, 4>(data, a),
        rows => panic!("{rows} rows, 1 to {DECODE_ROWS} allowed"),
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
fn sum_rows<T: Element, const R: usize, const N: usize>(data: &[T], a: DecodeSum<'_>) {
    a.check(R);
    let (keys, dim) = (a.v.at.len(), a.v.dim);
    let ahead = Ahead::new(a.ahead);
    let (data, acc) = (data.as_ptr(), a.acc.as_mut_ptr());
    // With every pass over the keys goes its share of the rows ahead.
    let passes = dim.div_ceil(N * LANES);
    let (mut c, mut asked) = (0, 0);
    while c < dim {
        ahead.ask_each(asked..asked + keys.div_ceil(passes));
        asked += keys.div_ceil(passes);
        let left = dim - c;
        let vectors = left.div_ceil(LANES);
        // SAFETY: every value row has `dim` elements, `p` R rows of `keys`, `acc` R rows of `dim`.
        unsafe {
            if vectors >= N {
                sum_columns::<T, R, N>(data, &a, acc, c, left);
                c += N * LANES;
            } else if N > 4 && vectors >= 4 {
                sum_columns::<T, R, 4>(data, &a, acc, c, left);
                c += 4 * LANES;
            } else if vectors >= 2 {
                sum_columns::<T, R, 2>(data, &a, acc, c, left);
                c += 2 * LANES;
            } else {
                sum_columns::<T, R, 1>(data, &a, acc, c, left);
                c += LANES;
            }
        }
    }
}

/// N vectors of columns from `c` on, or as many columns as are `left`, which end in the last of them. Out of line, so that the
/// accumulators have the registers to themselves.
///
/// # Safety
///
/// - `data + v.at[j] + c` has the columns readable for every key `j`, `a.p` R rows of keys, `a.factors` R factors.
/// - `acc` has the columns, readable and writable, in R rows.
/// - `left > (N - 1) * 16`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
#[inline(never)]
unsafe fn sum_columns<T: Element, const R: usize, const N: usize>(
    data: *const T,
    a: &DecodeSum<'_>,
    acc: *mut f32,
    c: usize,
    left: usize,
) {
    let last = lanes_below(left - (N - 1) * LANES);
    let mut sums = [[_mm512_setzero_ps(); R]; N];
    let (mut p, p_stride) = (a.p.as_ptr(), a.p_stride);
    for &at in a.v.at {
        // SAFETY: the caller's duty. (The pointer past the last weight is not read.)
        unsafe {
            let row = data.add(at + c);
            let mut x = [_mm512_setzero_ps(); R];
            for r in 0..R {
                x[r] = _mm512_set1_ps(*p.add(r * p_stride));
            }
            for i in 0..N {
                let v =
                    if i + 1 < N { T::load16(row.add(i * LANES)) } else { T::load_masked(row.add(i * LANES), last) };
                for r in 0..R {
                    sums[i][r] = _mm512_fmadd_ps(x[r], v, sums[i][r]);
                }
            }
        }
        p = p.wrapping_add(1);
    }
    for r in 0..R {
        for i in 0..N {
            // SAFETY: the caller's duty; masked lanes are neither read nor written.
            unsafe {
                let mask = if i + 1 < N { !0 } else { last };
                let factor = _mm512_set1_ps(*a.factors.as_ptr().add(r));
                let to = acc.add(r * a.acc_stride + c + i * LANES);
                let before = _mm512_maskz_loadu_ps(mask, to);
                _mm512_mask_storeu_ps(to, mask, _mm512_fmadd_ps(before, factor, sums[i][r]));
            }
        }
    }
}

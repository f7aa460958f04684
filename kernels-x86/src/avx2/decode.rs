//! Few query rows over keys and values in place: each key and value is read from memory once for all rows, nothing is
//! packed. Key tiles, splits and softmax live elsewhere.
//!
//! Keys (or columns of values) are taken several at a time, so many that 8 to 12 chains of multiply-adds run side by side:
//! 8 hide the latency (4 cycles, 2 a cycle), 12 and what they multiply fill the 16 registers.

#![allow(
    clippy::needless_range_loop,
    reason = "an index that runs over several arrays of vectors; iterator adapters with closures become calls here"
)]

use super::DECODE_ROWS;
use super::rows::{Element, LANES, load, store_n};
use crate::shared::{Ahead, CheckedRows, HALF, INTERLEAVED, Kind, PLAIN, Row, Segment, by_type, each_vector, segments};
use core::arch::x86_64::*;
use rotile_core::PairStyle;
use rotile_core::kernel::{DecodeScores, DecodeSum};

/// Sums of rows by keys (or rows by vectors of columns).
type Sums<const R: usize, const N: usize> = [[__m256; R]; N];

/// See [`rotile_core::kernel::Kernels::decode_scores`].
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn decode_scores_avx2(a: DecodeScores<'_>) {
    by_type!(a.k.data, decode_scores, a)
}

#[target_feature(enable = "avx2,fma,f16c")]
fn decode_scores<T: Element>(data: &[T], a: DecodeScores<'_>) {
    match a.rotation.map(|rotation| rotation.turn.style) {
        None => score_plain_keys(data, a),
        Some(PairStyle::Interleaved) => score_turned_keys::<T, INTERLEAVED>(data, a),
        Some(_) => score_turned_keys::<T, HALF>(data, a),
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
fn score_plain_keys<T: Element>(data: &[T], a: DecodeScores<'_>) {
    match a.rows {
        1 => score_rows::<T, PLAIN, 1, 8>(data, a),
        2 => score_rows::<T, PLAIN, 2, 4>(data, a),
        3 => score_rows::<T, PLAIN, 3, 3>(data, a),
        DECODE_ROWS => score_rows::<T, PLAIN, DECODE_ROWS, 3>(data, a),
        rows => panic!("{rows} rows, 1 to {DECODE_ROWS} allowed"),
    }
}

/// With fewer keys at a time: a rotation needs registers of its own, x and y of each key.
#[target_feature(enable = "avx2,fma,f16c")]
fn score_turned_keys<T: Element, const TURN: u8>(data: &[T], a: DecodeScores<'_>) {
    match a.rows {
        1 => score_rows::<T, TURN, 1, 4>(data, a),
        2 => score_rows::<T, TURN, 2, 2>(data, a),
        3 => score_rows::<T, TURN, 3, 2>(data, a),
        DECODE_ROWS => score_rows::<T, TURN, DECODE_ROWS, 2>(data, a),
        rows => panic!("{rows} rows, 1 to {DECODE_ROWS} allowed"),
    }
}

/// Scores of all keys, N at a time. The order of operations for a (row, key) is the same whatever R and N.
#[target_feature(enable = "avx2,fma,f16c")]
fn score_rows<T: Element, const TURN: u8, const R: usize, const N: usize>(data: &[T], a: DecodeScores<'_>) {
    a.check(R);
    let (keys, dim) = (a.k.at.len(), a.k.dim);
    let rotation = a.rotation.as_ref();
    let runs = segments(rotation, dim);
    let rows = CheckedRows::new(data, &a.k, rotation);
    let mut q = [a.q.as_ptr(); R];
    for (r, q) in q.iter_mut().enumerate() {
        *q = q.wrapping_add(r * a.q_stride);
    }
    let ahead = Ahead::new(a.ahead);
    let mut some = [[0.0f32; N]; R];
    let mut j = 0;
    while j < keys {
        // (In line: a call for each group of keys costs 2 % of the instructions of a decode step.)
        for k in 0..N {
            ahead.ask(j + k);
        }
        let (first, group) = rows.group::<N>(j);
        let (s, s_stride) =
            if keys >= N { (a.s.as_mut_ptr().wrapping_add(first), a.s_stride) } else { (some.as_mut_ptr().cast(), N) };
        let mut sums = [[_mm256_setzero_ps(); R]; N];
        // SAFETY: rows and angles are checked, and the runs are theirs; `q` has R rows of `dim`, row `r` of `s` has room
        // for N scores: `keys >= N`, or it is `some`.
        unsafe {
            if TURN == PLAIN {
                sums = score_plain(sums, &group, &q, 0, dim);
            } else {
                for run in [0, 2, 4] {
                    let Segment { start, end, .. } = runs[run];
                    if start < end {
                        sums = score_between(sums, &group, &q, start, end);
                    }
                }
                let Segment { kind, start, end } = runs[1];
                match kind {
                    Kind::First { distance } if TURN == HALF => {
                        sums = score_half(sums, &group, &q, distance, start, end);
                    }
                    _ if TURN == INTERLEAVED => sums = score_interleaved(sums, &group, &q, start, end),
                    _ => (),
                }
            }
            store_sums(sums, s, s_stride);
        }
        if keys < N {
            for (r, some) in some.iter().enumerate() {
                a.s[r * a.s_stride..][..keys].copy_from_slice(&some[..keys]);
            }
        }
        j += N;
    }
}

/// Elements `start..end` of N keys as they are.
///
/// # Safety
///
/// The elements are in `keys` and at each `q`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn score_plain<T: Element, const R: usize, const N: usize>(
    mut sums: Sums<R, N>,
    keys: &[Row<T>; N],
    q: &[*const f32; R],
    start: usize,
    end: usize,
) -> Sums<R, N> {
    let mut at = start;
    // SAFETY: `at` and the elements from it on are below `end`.
    unsafe {
        while at + 2 * LANES <= end {
            sums = multiply_add(sums, q, at, LANES, |k| keys[k].plain(at, LANES));
            sums = multiply_add(sums, q, at + LANES, LANES, |k| keys[k].plain(at + LANES, LANES));
            at += 2 * LANES;
        }
        while at < end {
            let n = LANES.min(end - at);
            sums = multiply_add(sums, q, at, n, |k| keys[k].plain(at, n));
            at += n;
        }
    }
    sums
}

/// [`score_plain`] for what a partial rotation leaves as it is: out of line, because three copies in each of 24 kernels were
/// a good part of the tier's code.
///
/// # Safety
///
/// As there.
#[inline(never)]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn score_between<T: Element, const R: usize, const N: usize>(
    sums: Sums<R, N>,
    keys: &[Row<T>; N],
    q: &[*const f32; R],
    start: usize,
    end: usize,
) -> Sums<R, N> {
    // SAFETY: the caller's duty.
    unsafe { score_plain(sums, keys, q, start, end) }
}

/// Interleaved pairs `start..end` of N keys, rotated.
///
/// # Safety
///
/// The elements are in `keys`, in their rotation, and at each `q`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn score_interleaved<T: Element, const R: usize, const N: usize>(
    mut sums: Sums<R, N>,
    keys: &[Row<T>; N],
    q: &[*const f32; R],
    start: usize,
    end: usize,
) -> Sums<R, N> {
    let mut at = start;
    // SAFETY: `at` and the elements from it on are below `end`.
    unsafe {
        while at + 2 * LANES <= end {
            let mut pairs = [[_mm256_setzero_ps(); 2]; N];
            for k in 0..N {
                pairs[k] = keys[k].interleaved16(at, (at - start) / 2);
            }
            sums = multiply_add(sums, q, at, LANES, |k| pairs[k][0]);
            sums = multiply_add(sums, q, at + LANES, LANES, |k| pairs[k][1]);
            at += 2 * LANES;
        }
        while at < end {
            let n = LANES.min(end - at);
            sums = multiply_add(sums, q, at, n, |k| keys[k].interleaved(at, (at - start) / 2, n));
            at += n;
        }
    }
    sums
}

/// Half-style pairs of N keys, rotated; the first elements are `start..end`.
///
/// # Safety
///
/// The elements and their partners are in `keys`, in their rotation, and at each `q`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn score_half<T: Element, const R: usize, const N: usize>(
    mut sums: Sums<R, N>,
    keys: &[Row<T>; N],
    q: &[*const f32; R],
    distance: usize,
    start: usize,
    end: usize,
) -> Sums<R, N> {
    // SAFETY: the caller's duty.
    unsafe {
        each_vector!(start..end, |at, n| {
            let i = at - start;
            if N <= R {
                let mut pairs = [[_mm256_setzero_ps(); 2]; N];
                for k in 0..N {
                    pairs[k] = keys[k].half(at, distance, i, n);
                }
                for r in 0..R {
                    let (x, y) = (load(q[r].add(at), n), load(q[r].add(at + distance), n));
                    for k in 0..N {
                        sums[k][r] = _mm256_fmadd_ps(x, pairs[k][0], sums[k][r]);
                        sums[k][r] = _mm256_fmadd_ps(y, pairs[k][1], sums[k][r]);
                    }
                }
            } else {
                let mut rows = [[_mm256_setzero_ps(); 2]; R];
                for r in 0..R {
                    rows[r] = [load(q[r].add(at), n), load(q[r].add(at + distance), n)];
                }
                for k in 0..N {
                    let pair = keys[k].half(at, distance, i, n);
                    for r in 0..R {
                        sums[k][r] = _mm256_fmadd_ps(rows[r][0], pair[0], sums[k][r]);
                        sums[k][r] = _mm256_fmadd_ps(rows[r][1], pair[1], sums[k][r]);
                    }
                }
            }
        });
    }
    sums
}

/// `sums[k][r] += q[r][at..at + n] * key(k)`. What there is fewer of, keys or rows, stays in registers.
///
/// # Safety
///
/// The elements at each `q` are readable.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn multiply_add<const R: usize, const N: usize>(
    mut sums: Sums<R, N>,
    q: &[*const f32; R],
    at: usize,
    n: usize,
    key: impl Fn(usize) -> __m256,
) -> Sums<R, N> {
    // SAFETY: the caller's duty.
    unsafe {
        if N <= R {
            let mut keys = [_mm256_setzero_ps(); N];
            for k in 0..N {
                keys[k] = key(k);
            }
            for r in 0..R {
                let x = load(q[r].add(at), n);
                for k in 0..N {
                    sums[k][r] = _mm256_fmadd_ps(x, keys[k], sums[k][r]);
                }
            }
        } else {
            let mut rows = [_mm256_setzero_ps(); R];
            for r in 0..R {
                rows[r] = load(q[r].add(at), n);
            }
            for k in 0..N {
                let y = key(k);
                for r in 0..R {
                    sums[k][r] = _mm256_fmadd_ps(rows[r], y, sums[k][r]);
                }
            }
        }
    }
    sums
}

/// Adds up the lanes of each sum, in the same order for all, and stores the scores.
///
/// # Safety
///
/// N elements are writable at each of `s + r * s_stride`, `r < R`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn store_sums<const R: usize, const N: usize>(sums: Sums<R, N>, s: *mut f32, s_stride: usize) {
    const { assert!(N == 2 || N == 3 || N == 4 || N == 8) };
    let quad = |r: usize, k: [usize; 4]| sum_each([sums[k[0]][r], sums[k[1]][r], sums[k[2]][r], sums[k[3]][r]]);
    for r in 0..R {
        // SAFETY: the caller's duty.
        unsafe {
            let s = s.add(r * s_stride);
            match N {
                2 => _mm_storeu_si64(s.cast(), _mm_castps_si128(quad(r, [0, 1, 0, 1]))),
                3 => {
                    let three = quad(r, [0, 1, 2, 2]);
                    _mm_storeu_si64(s.cast(), _mm_castps_si128(three));
                    s.add(2).cast::<i32>().write(_mm_extract_ps::<2>(three));
                }
                4 => _mm_storeu_ps(s, quad(r, [0, 1, 2, 3])),
                _ => {
                    _mm_storeu_ps(s, quad(r, [0, 1, 2, 3]));
                    _mm_storeu_ps(s.add(4), quad(r, [4, 5, 6, 7]));
                }
            }
        }
    }
}

/// The sums of the lanes of four vectors. (Shuffles and additions; `vhaddps` is the same in more operations.)
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn sum_each([a, b, c, d]: [__m256; 4]) -> __m128 {
    let ab = _mm256_add_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
    let cd = _mm256_add_ps(_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
    let (x, y) = (_mm256_shuffle_ps::<0b01_00_01_00>(ab, cd), _mm256_shuffle_ps::<0b11_10_11_10>(ab, cd));
    let sum = _mm256_add_ps(x, y);
    _mm_add_ps(_mm256_castps256_ps128(sum), _mm256_extractf128_ps::<1>(sum))
}

/// See [`rotile_core::kernel::Kernels::decode_sum`].
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn decode_sum_avx2(a: DecodeSum<'_>) {
    by_type!(a.v.data, decode_sum, a)
}

/// Chooses the number of vectors that are summed together for a number of rows. (4 rows by 3 vectors would fit the 16
/// registers, but the compiler spills accumulators there: 44 GF/s, against 60 to 70 with 2.)
#[target_feature(enable = "avx2,fma,f16c")]
fn decode_sum<T: Element>(data: &[T], a: DecodeSum<'_>) {
    match a.rows {
        1 => sum_rows::<T, 1, 8>(data, a),
        2 => sum_rows::<T, 2, 4>(data, a),
        3 => sum_rows::<T, 3, 3>(data, a),
        DECODE_ROWS => sum_rows::<T, DECODE_ROWS, 2>(data, a),
        rows => panic!("{rows} rows, 1 to {DECODE_ROWS} allowed"),
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
fn sum_rows<T: Element, const R: usize, const N: usize>(data: &[T], a: DecodeSum<'_>) {
    a.check(R);
    let (keys, dim) = (a.v.at.len(), a.v.dim);
    let ahead = Ahead::new(a.ahead);
    let (data, acc) = (data.as_ptr(), a.acc.as_mut_ptr());
    // With every pass over the keys goes its share of the rows ahead. (Their lines one by one, from inside the loop over
    // the keys, cost registers and branches there: accumulators were spilled.)
    let passes = dim.div_ceil(N * LANES);
    let (mut c, mut asked) = (0, 0);
    while c < dim {
        let left = dim - c;
        let vectors = left / LANES;
        for _ in 0..keys.div_ceil(passes) {
            ahead.ask(asked);
            asked += 1;
        }
        // SAFETY: every value row has `dim` elements, `p` R rows of `keys`, `acc` R rows of `dim`.
        unsafe {
            // One vector alone would leave most of the multiply-adds waiting: N + 1 are taken as two halves.
            if vectors >= N && vectors != N + 1 {
                sum_columns::<T, R, N>(data, &a, acc, c, LANES);
                c += N * LANES;
            } else if vectors >= 2 {
                sum_columns::<T, R, 2>(data, &a, acc, c, LANES);
                c += 2 * LANES;
            } else {
                sum_columns::<T, R, 1>(data, &a, acc, c, LANES.min(left));
                c += LANES.min(left);
            }
        }
    }
}

/// N vectors of columns from `c` on; `n` lanes if it is one.
///
/// # Safety
///
/// - `data + v.at[j] + c` has the columns readable for every key `j`, `a.p` R rows of keys, `a.factors` R factors.
/// - `acc` has the columns, readable and writable, in R rows.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline(never)]
unsafe fn sum_columns<T: Element, const R: usize, const N: usize>(
    data: *const T,
    a: &DecodeSum<'_>,
    acc: *mut f32,
    c: usize,
    n: usize,
) {
    let n = if N > 1 { LANES } else { n };
    let mut sums: Sums<R, N> = [[_mm256_setzero_ps(); R]; N];
    let mut p = [a.p.as_ptr(); R];
    for r in 0..R {
        p[r] = p[r].wrapping_add(r * a.p_stride);
    }
    for (j, &at) in a.v.at.iter().enumerate() {
        // SAFETY: the caller's duty.
        unsafe {
            let row = data.add(at + c);
            if N <= R {
                let mut v = [_mm256_setzero_ps(); N];
                for i in 0..N {
                    v[i] = load(row.add(i * LANES), n);
                }
                for r in 0..R {
                    let x = _mm256_broadcast_ss(&*p[r].add(j));
                    for i in 0..N {
                        sums[i][r] = _mm256_fmadd_ps(x, v[i], sums[i][r]);
                    }
                }
            } else {
                let mut x = [_mm256_setzero_ps(); R];
                for r in 0..R {
                    x[r] = _mm256_broadcast_ss(&*p[r].add(j));
                }
                for i in 0..N {
                    let v = load(row.add(i * LANES), n);
                    for r in 0..R {
                        sums[i][r] = _mm256_fmadd_ps(x[r], v, sums[i][r]);
                    }
                }
            }
        }
    }
    for r in 0..R {
        for i in 0..N {
            // SAFETY: the caller's duty.
            unsafe {
                let factor = _mm256_broadcast_ss(&*a.factors.as_ptr().add(r));
                let to = acc.add(r * a.acc_stride + c + i * LANES);
                store_n(to, _mm256_fmadd_ps(load(to, n), factor, sums[i][r]), n);
            }
        }
    }
}

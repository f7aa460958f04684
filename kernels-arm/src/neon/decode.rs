//! Few query rows over keys and values in place: each key and value is read from memory once for all rows, nothing is
//! packed. Key tiles, splits and softmax live elsewhere.

use super::DECODE_ROWS;
use super::rows::{Element, LANES, Row, Runs, by_type, checked_row, for_each_vector, load, prefetch, store_n};
use core::arch::aarch64::*;
use rotile_core::kernel::{DecodeScores, DecodeSum};

/// Keys that are multiplied side by side: with 4 rows 16 accumulators, 8 vectors of query pairs and 8 for a key, its angles
/// and what comes of them. The sums over the lanes of 4 keys make one vector of scores with three pairwise additions.
const KEYS: usize = 4;

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
#[target_feature(enable = "neon")]
pub(super) fn decode_scores_neon(a: DecodeScores<'_>) {
    by_type!(a.k.data, decode_scores, a)
}

#[target_feature(enable = "neon")]
fn decode_scores<T: Element>(data: &[T], a: DecodeScores<'_>) {
    by_rows!(a.rows, score_rows, T, data, a)
}

#[target_feature(enable = "neon")]
fn score_rows<T: Element, const R: usize>(data: &[T], a: DecodeScores<'_>) {
    a.check(R);
    let (keys, dim) = (a.k.at.len(), a.k.dim);
    let rotation = a.rotation.as_ref();
    let runs = Runs::new(rotation, dim);
    for_each_vector!(0, keys, |j, n| {
        for ahead in j..j + n {
            prefetch(a.ahead.as_ref(), ahead, 0, dim);
        }
        // Missing keys repeat the last one; their scores are dropped.
        let row = |k: usize| checked_row(data, &a.k, rotation, j + k.min(n - 1));
        let four = [row(0), row(1), row(2), row(3)];
        let q = a.q.as_ptr();
        // SAFETY: rows and angles are checked, `q` has R rows of `dim`.
        let scores = unsafe {
            if runs.pairs.interleaved {
                score_keys::<T, R, true>(&four, &runs, q, a.q_stride)
            } else {
                score_keys::<T, R, false>(&four, &runs, q, a.q_stride)
            }
        };
        let s = a.s.as_mut_ptr();
        for (r, scores) in scores.into_iter().enumerate() {
            // SAFETY: row `r` of `s` has `keys` columns.
            unsafe { store_n(s.add(r * a.s_stride + j), scores, n) };
        }
    });
}

/// Scores of 4 keys, a vector for each row. The order of operations for a (row, key) is the same whatever R and the
/// key's place.
///
/// # Safety
///
/// - `keys` come from [`checked_row`] with the rotation that `runs` come from.
/// - `q` has R rows, `q_stride` apart, of as many elements as a key.
#[inline(never)]
#[target_feature(enable = "neon")]
unsafe fn score_keys<T: Element, const R: usize, const INTERLEAVED: bool>(
    keys: &[Row<T>; KEYS],
    runs: &Runs,
    q: *const f32,
    q_stride: usize,
) -> [float32x4_t; R] {
    let zero = vdupq_n_f32(0.0);
    let mut acc = [[zero; KEYS]; R];
    for (from, to) in runs.plain {
        for_each_vector!(from, to, |at, n| {
            let mut k = [zero; KEYS];
            for (k, key) in k.iter_mut().zip(keys) {
                // SAFETY: runs lie within the rows of keys and queries.
                *k = unsafe { load(key.data.add(at), n) };
            }
            for (r, acc) in acc.iter_mut().enumerate() {
                // SAFETY: as above.
                let x = unsafe { load(q.add(r * q_stride + at), n) };
                for (acc, k) in acc.iter_mut().zip(k) {
                    *acc = vfmaq_f32(*acc, x, k);
                }
            }
        });
    }
    let pairs = runs.pairs;
    for_each_vector!(0, pairs.count, |i, n| {
        // Queries first and keys one by one: the vectors of 4 rotated keys at once would not fit beside the accumulators.
        let mut x = [[zero; 2]; R];
        for (r, x) in x.iter_mut().enumerate() {
            // SAFETY: the caller's duty.
            *x = unsafe { pairs.load::<f32, INTERLEAVED>(q.add(r * q_stride), i, n) };
        }
        for (k, key) in keys.iter().enumerate() {
            // SAFETY: as above.
            let [first, second] = unsafe { pairs.turned::<T, INTERLEAVED>(*key, i, n) };
            for (acc, x) in acc.iter_mut().zip(x) {
                acc[k] = vfmaq_f32(vfmaq_f32(acc[k], x[0], first), x[1], second);
            }
        }
    });
    let mut scores = [zero; R];
    for (scores, [a, b, c, d]) in scores.iter_mut().zip(acc) {
        *scores = vpaddq_f32(vpaddq_f32(a, b), vpaddq_f32(c, d));
    }
    scores
}

/// See [`rotile_core::kernel::Kernels::decode_sum`].
#[target_feature(enable = "neon")]
pub(super) fn decode_sum_neon(a: DecodeSum<'_>) {
    by_type!(a.v.data, decode_sum, a)
}

#[target_feature(enable = "neon")]
fn decode_sum<T: Element>(data: &[T], a: DecodeSum<'_>) {
    by_rows!(a.rows, sum_rows, T, data, a)
}

#[target_feature(enable = "neon")]
fn sum_rows<T: Element, const R: usize>(data: &[T], a: DecodeSum<'_>) {
    a.check(R);
    let dim = a.v.dim;
    let acc = a.acc.as_mut_ptr();
    let mut c = 0;
    // Enough vectors of columns side by side to hide the latency of a multiply-add also with one row, and few enough
    // to leave registers for 4 keys of weights per row: 16 accumulators at most.
    // SAFETY: every value row has `dim` elements, `p` R rows of `keys`, `acc` R rows of `dim`, for all three calls.
    unsafe {
        while R <= 2 && c + 8 * LANES <= dim {
            sum_columns::<T, R, 8>(data.as_ptr(), &a, acc, c, LANES);
            c += 8 * LANES;
        }
        while c + 4 * LANES <= dim {
            sum_columns::<T, R, 4>(data.as_ptr(), &a, acc, c, LANES);
            c += 4 * LANES;
        }
        for_each_vector!(c, dim, |c, n| { sum_columns::<T, R, 1>(data.as_ptr(), &a, acc, c, n) });
    }
}

/// N vectors of columns from `c` on, `n` lanes in the last.
///
/// # Safety
///
/// - `data + v.at[j] + c` has the columns readable for every key `j`, `a.p` R rows of keys, `a.factors` R factors.
/// - `acc` has the columns, readable and writable, in R rows.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn sum_columns<T: Element, const R: usize, const N: usize>(
    data: *const T,
    a: &DecodeSum<'_>,
    acc: *mut f32,
    c: usize,
    n: usize,
) {
    let zero = vdupq_n_f32(0.0);
    let mut sum = [[zero; N]; R];
    let p = a.p.as_ptr();
    let (fours, rest) = a.v.at.as_chunks::<KEYS>();
    let mut j = 0;
    for four in fours {
        for ahead in j..j + KEYS {
            prefetch(a.ahead.as_ref(), ahead, c, N * LANES);
        }
        let mut weights = [zero; R];
        for (r, weights) in weights.iter_mut().enumerate() {
            // SAFETY: keys `j..j + 4` have weights in every row.
            *weights = unsafe { vld1q_f32(p.add(r * a.p_stride + j)) };
        }
        // SAFETY: the caller's duty.
        unsafe {
            add_key::<T, R, N, 0>(&mut sum, &weights, data.add(four[0] + c), n);
            add_key::<T, R, N, 1>(&mut sum, &weights, data.add(four[1] + c), n);
            add_key::<T, R, N, 2>(&mut sum, &weights, data.add(four[2] + c), n);
            add_key::<T, R, N, 3>(&mut sum, &weights, data.add(four[3] + c), n);
        }
        j += KEYS;
    }
    for at in rest {
        prefetch(a.ahead.as_ref(), j, c, N * LANES);
        let mut weights = [zero; R];
        for (r, weights) in weights.iter_mut().enumerate() {
            // SAFETY: key `j` has a weight in every row.
            *weights = unsafe { vld1q_dup_f32(p.add(r * a.p_stride + j)) };
        }
        // SAFETY: the caller's duty.
        unsafe { add_key::<T, R, N, 0>(&mut sum, &weights, data.add(at + c), n) };
        j += 1;
    }
    for (r, sum) in sum.into_iter().enumerate() {
        for (i, sum) in sum.into_iter().enumerate() {
            // SAFETY: the caller's duty.
            unsafe {
                let to = acc.add(r * a.acc_stride + c + i * LANES);
                store_n(to, vfmaq_n_f32(sum, load(to, n), a.factors[r]), n);
            }
        }
    }
}

/// The key in lane `J` of the weights times its columns of values, at `v`.
///
/// # Safety
///
/// N vectors, of `n` elements the last, are readable at `v`.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn add_key<T: Element, const R: usize, const N: usize, const J: i32>(
    sum: &mut [[float32x4_t; N]; R],
    weights: &[float32x4_t; R],
    v: *const T,
    n: usize,
) {
    for i in 0..N {
        // SAFETY: the caller's duty.
        let x = unsafe { load(v.add(i * LANES), n) };
        for (sum, weights) in sum.iter_mut().zip(weights) {
            sum[i] = vfmaq_laneq_f32::<J>(sum[i], x, *weights);
        }
    }
}

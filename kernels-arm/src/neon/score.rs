//! The NEON score tile, 8 query rows by 12 keys: S = Q K^T by outer products. Masks and softmax live elsewhere.

use super::{DOT_RUN, MR, NR};
use core::arch::aarch64::*;
use rotile_core::kernel::check_scores;

/// Elements of a row per unrolled step: in-order cores need the next loads among the multiply-adds.
const UNROLL: usize = 4;

/// See [`rotile_core::kernel::Kernels::scores`]. Queries lie transposed (`q[i * 8 + r]`) and so do keys
/// (`k[i * 12 + c]`): the lanes of two vectors of queries multiply three vectors of keys. Where AVX2 has to broadcast each
/// query element from memory, here 5 loads feed 24 multiply-adds.
#[target_feature(enable = "neon")]
pub(super) fn scores_8x12_neon(q: &[f32], k: &[f32], dim: usize, s: &mut [f32], s_stride: usize) {
    let panels = check_scores(q, k, dim, s, s_stride, [MR, NR]);
    for p in 0..panels {
        // SAFETY: the panel has `NR * dim` elements, `q` `MR * dim`, and row `r` of `s` has room for 12 columns from
        // `p * NR` on.
        unsafe { tile(q.as_ptr(), k.as_ptr().add(p * NR * dim), dim, s.as_mut_ptr().add(p * NR), s_stride) };
    }
}

/// One tile.
///
/// # Safety
///
/// - `q` has `dim` rows of 8 elements, `k` `dim` rows of 12.
/// - 12 elements are readable and writable at each of `s + r * s_stride`, `r < 8`.
#[inline(never)]
#[target_feature(enable = "neon")]
unsafe fn tile(mut q: *const f32, mut k: *const f32, dim: usize, s: *mut f32, s_stride: usize) {
    let mut left = dim;
    while left > 0 {
        let mut run = left.min(DOT_RUN);
        let first = left == dim;
        left -= run;
        let mut acc = [[vdupq_n_f32(0.0); 3]; MR];
        while run >= UNROLL {
            for u in 0..UNROLL {
                // SAFETY: `u < run`, the rows of this run that are left in both.
                unsafe { step(&mut acc, q.add(u * MR), k.add(u * NR)) };
            }
            // SAFETY: at most one past the end of either.
            unsafe {
                q = q.add(UNROLL * MR);
                k = k.add(UNROLL * NR);
            }
            run -= UNROLL;
        }
        for u in 0..run {
            // SAFETY: as above; only the last run has such a rest.
            unsafe { step(&mut acc, q.add(u * MR), k.add(u * NR)) };
        }
        for (r, acc) in acc.into_iter().enumerate() {
            for (c, acc) in acc.into_iter().enumerate() {
                // SAFETY: the caller's duty; after the first run the sums so far are there.
                unsafe {
                    let s = s.add(r * s_stride + 4 * c);
                    let sum = if first { acc } else { vaddq_f32(vld1q_f32(s), acc) };
                    vst1q_f32(s, sum);
                }
            }
        }
    }
}

/// One element of every query row times one of every key.
///
/// # Safety
///
/// 8 elements are readable at `q`, 12 at `k`.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn step(acc: &mut [[float32x4_t; 3]; MR], q: *const f32, k: *const f32) {
    // SAFETY: the caller's duty.
    let (q0, q1, k) =
        unsafe { (vld1q_f32(q), vld1q_f32(q.add(4)), [vld1q_f32(k), vld1q_f32(k.add(4)), vld1q_f32(k.add(8))]) };
    for (c, k) in k.into_iter().enumerate() {
        acc[0][c] = vfmaq_laneq_f32::<0>(acc[0][c], k, q0);
        acc[1][c] = vfmaq_laneq_f32::<1>(acc[1][c], k, q0);
        acc[2][c] = vfmaq_laneq_f32::<2>(acc[2][c], k, q0);
        acc[3][c] = vfmaq_laneq_f32::<3>(acc[3][c], k, q0);
        acc[4][c] = vfmaq_laneq_f32::<0>(acc[4][c], k, q1);
        acc[5][c] = vfmaq_laneq_f32::<1>(acc[5][c], k, q1);
        acc[6][c] = vfmaq_laneq_f32::<2>(acc[6][c], k, q1);
        acc[7][c] = vfmaq_laneq_f32::<3>(acc[7][c], k, q1);
    }
}

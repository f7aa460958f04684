//! The AVX2 score tile, 6 query rows by 16 keys: S = Q K^T by outer products. Masks and softmax live elsewhere.

use super::{DOT_RUN, MR, NR};
use core::arch::x86_64::*;
use rotile_core::kernel::{check_scores, run_end};

/// Elements of a row per unrolled step: with fewer, loop counters compete with the multiply-adds for issue slots. (On Zen 3
/// 4 and 8 measure the same; a prototype on a Xeon went from 87 to 99 % of peak.)
const UNROLL: usize = 8;

/// See [`rotile_core::kernel::Kernels::scores`]. Query rows lie one after the other (`q[r * dim + i]`), keys transposed
/// (`k[i * 16 + c]`): each element of a query row is broadcast against two vectors of keys.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn scores_6x16_avx2(q: &[f32], k: &[f32], dim: usize, s: &mut [f32], s_stride: usize) {
    let panels = check_scores(q, k, dim, s, s_stride, [MR, NR]);
    for p in 0..panels {
        // SAFETY: the panel has `NR * dim` elements, `q` `MR * dim`, and row `r` of `s` has room for 16 columns from
        // `p * NR` on.
        unsafe { tile(q.as_ptr(), k.as_ptr().add(p * NR * dim), dim, s.as_mut_ptr().add(p * NR), s_stride) };
    }
}

/// One tile.
///
/// # Safety
///
/// - `q` has 6 rows of `dim` elements, `k` `dim` rows of 16.
/// - 16 elements are readable and writable at each of `s + r * s_stride`, `r < 6`.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline(never)]
unsafe fn tile(q: *const f32, k: *const f32, dim: usize, s: *mut f32, s_stride: usize) {
    let mut i = 0;
    while i < dim {
        let end = run_end(i, dim, DOT_RUN);
        let before = i;
        let mut acc = [[_mm256_setzero_ps(); 2]; MR];
        while i + UNROLL <= end {
            for u in 0..UNROLL {
                // SAFETY: `i + u < dim`.
                unsafe { step(&mut acc, q.add(i + u), dim, k.add((i + u) * NR)) };
            }
            i += UNROLL;
        }
        while i < end {
            // SAFETY: `i < dim`.
            unsafe { step(&mut acc, q.add(i), dim, k.add(i * NR)) };
            i += 1;
        }
        for (r, acc) in acc.into_iter().enumerate() {
            for (c, acc) in acc.into_iter().enumerate() {
                // SAFETY: the caller's duty; after the first run the sums so far are there.
                unsafe {
                    let s = s.add(r * s_stride + 8 * c);
                    let sum = if before == 0 { acc } else { _mm256_add_ps(_mm256_loadu_ps(s), acc) };
                    _mm256_storeu_ps(s, sum);
                }
            }
        }
    }
}

/// One element of every query row times one of every key.
///
/// # Safety
///
/// An element is readable at each of `q + r * dim`, `r < 6`, and 16 at `k`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn step(acc: &mut [[__m256; 2]; MR], q: *const f32, dim: usize, k: *const f32) {
    // SAFETY: the caller's duty.
    unsafe {
        let (k0, k1) = (_mm256_loadu_ps(k), _mm256_loadu_ps(k.add(8)));
        for (r, acc) in acc.iter_mut().enumerate() {
            let x = _mm256_broadcast_ss(&*q.add(r * dim));
            acc[0] = _mm256_fmadd_ps(x, k0, acc[0]);
            acc[1] = _mm256_fmadd_ps(x, k1, acc[1]);
        }
    }
}

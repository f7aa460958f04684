//! The AVX-512 score tile, 12 query rows by 32 keys: S = Q K^T by outer products. Masks and softmax live elsewhere.

use super::{DOT_RUN, MR, NR};
use core::arch::x86_64::*;
use rotile_core::kernel::{check_scores, run_end};

/// Elements of a row per unrolled step: 96 multiply-adds for one turn of the loop.
const UNROLL: usize = 4;

/// See [`rotile_core::kernel::Kernels::scores`]. Queries and keys lie transposed (`q[i * 12 + r]`, `k[i * 32 + c]`): each
/// element of a query row is broadcast against two vectors of keys.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
pub(super) fn scores_12x32_avx512(q: &[f32], k: &[f32], dim: usize, s: &mut [f32], s_stride: usize) {
    let panels = check_scores(q, k, dim, s, s_stride, [MR, NR]);
    for p in 0..panels {
        // SAFETY: the panel has `NR * dim` elements, `q` `MR * dim`, and row `r` of `s` has room for 32 columns from
        // `p * NR` on.
        unsafe { tile(q.as_ptr(), k.as_ptr().add(p * NR * dim), dim, s.as_mut_ptr().add(p * NR), s_stride) };
    }
}

/// One tile.
///
/// # Safety
///
/// - `q` has `dim` rows of 12 elements, `k` `dim` rows of 32.
/// - 32 elements are readable and writable at each of `s + r * s_stride`, `r < 12`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
#[inline(never)]
unsafe fn tile(q: *const f32, k: *const f32, dim: usize, s: *mut f32, s_stride: usize) {
    let mut i = 0;
    while i < dim {
        let end = run_end(i, dim, DOT_RUN);
        let before = i;
        let mut acc = [[_mm512_setzero_ps(); 2]; MR];
        while i + UNROLL <= end {
            for u in 0..UNROLL {
                // SAFETY: `i + u < dim`.
                unsafe { step(&mut acc, q.add((i + u) * MR), k.add((i + u) * NR)) };
            }
            i += UNROLL;
        }
        while i < end {
            // SAFETY: `i < dim`.
            unsafe { step(&mut acc, q.add(i * MR), k.add(i * NR)) };
            i += 1;
        }
        for (r, acc) in acc.into_iter().enumerate() {
            for (c, acc) in acc.into_iter().enumerate() {
                // SAFETY: the caller's duty; after the first run the sums so far are there.
                unsafe {
                    let s = s.add(r * s_stride + 16 * c);
                    let sum = if before == 0 { acc } else { _mm512_add_ps(_mm512_loadu_ps(s), acc) };
                    _mm512_storeu_ps(s, sum);
                }
            }
        }
    }
}

/// One element of every query row times one of every key.
///
/// # Safety
///
/// 12 elements are readable at `q`, and 32 at `k`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
unsafe fn step(acc: &mut [[__m512; 2]; MR], q: *const f32, k: *const f32) {
    // SAFETY: the caller's duty.
    unsafe {
        let (k0, k1) = (_mm512_loadu_ps(k), _mm512_loadu_ps(k.add(16)));
        for (r, acc) in acc.iter_mut().enumerate() {
            let x = _mm512_set1_ps(*q.add(r));
            acc[0] = _mm512_fmadd_ps(x, k0, acc[0]);
            acc[1] = _mm512_fmadd_ps(x, k1, acc[1]);
        }
    }
}

//! The AVX2 weighted sum, 6 rows by 16 value columns: acc = acc * factor + P V, values in column panels.

use super::{MR, NV, SUM_RUN};
use core::arch::x86_64::*;
use rotile_core::kernel::{WeightedSum, run_end};

/// Keys per unrolled step.
const UNROLL: usize = 4;

/// The factors of every run but the first.
static ONES: [f32; MR] = [1.0; MR];

/// See [`rotile_core::kernel::Kernels::weighted_sum`].
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn weighted_sum_6x16_avx2(w: WeightedSum<'_>) {
    let panels = w.check(MR, NV);
    for c in 0..panels {
        // SAFETY: row `r` of `p` has `to` elements, the panel `tile_keys` rows of 16, and row `r` of `acc` 16 columns from
        // `c * NV` on; there are MR factors.
        unsafe {
            let v = w.v.as_ptr().add(c * w.tile_keys * NV);
            let acc = w.acc.as_mut_ptr().add(c * NV);
            tile(w.p.as_ptr(), w.p_stride, v, w.from, w.to, w.factors.as_ptr(), w.fresh, acc, w.acc_stride);
        }
    }
}

/// One tile: keys `from..to`, run by run.
///
/// # Safety
///
/// - `to` elements are readable at each of `p + r * p_stride`, `to` rows of 16 at `v`, 6 at `factors`.
/// - 16 elements are readable and writable at each of `acc + r * acc_stride`, `r < 6`.
#[allow(clippy::too_many_arguments)]
#[target_feature(enable = "avx2,fma,f16c")]
#[inline(never)]
unsafe fn tile(
    p: *const f32,
    p_stride: usize,
    v: *const f32,
    from: usize,
    to: usize,
    factors: *const f32,
    mut fresh: bool,
    acc: *mut f32,
    acc_stride: usize,
) {
    let (mut j, mut factors) = (from, factors);
    loop {
        let end = run_end(j, to, SUM_RUN);
        let mut sum = [[_mm256_setzero_ps(); 2]; MR];
        while j + UNROLL <= end {
            for u in 0..UNROLL {
                // SAFETY: `j + u < to`.
                unsafe { step(&mut sum, p.add(j + u), p_stride, v.add((j + u) * NV)) };
            }
            j += UNROLL;
        }
        while j < end {
            // SAFETY: `j < to`.
            unsafe { step(&mut sum, p.add(j), p_stride, v.add(j * NV)) };
            j += 1;
        }
        for (r, sum) in sum.into_iter().enumerate() {
            // SAFETY: the caller's duty.
            unsafe {
                let (row, factor) = (acc.add(r * acc_stride), _mm256_broadcast_ss(&*factors.add(r)));
                if fresh {
                    _mm256_storeu_ps(row, sum[0]);
                    _mm256_storeu_ps(row.add(8), sum[1]);
                } else {
                    _mm256_storeu_ps(row, _mm256_fmadd_ps(_mm256_loadu_ps(row), factor, sum[0]));
                    _mm256_storeu_ps(row.add(8), _mm256_fmadd_ps(_mm256_loadu_ps(row.add(8)), factor, sum[1]));
                }
            }
        }
        fresh = false;
        if j >= to {
            break;
        }
        factors = ONES.as_ptr();
    }
}

/// A key of every row times its values.
///
/// # Safety
///
/// An element is readable at each of `p + r * p_stride`, `r < 6`, and 16 at `v`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn step(sum: &mut [[__m256; 2]; MR], p: *const f32, p_stride: usize, v: *const f32) {
    // SAFETY: the caller's duty.
    unsafe {
        let (v0, v1) = (_mm256_loadu_ps(v), _mm256_loadu_ps(v.add(8)));
        for (r, sum) in sum.iter_mut().enumerate() {
            let x = _mm256_broadcast_ss(&*p.add(r * p_stride));
            sum[0] = _mm256_fmadd_ps(x, v0, sum[0]);
            sum[1] = _mm256_fmadd_ps(x, v1, sum[1]);
        }
    }
}

//! The AVX2 weighted sum, 6 rows by 16 value columns: acc = acc * factor + P V, values in column panels.

use super::{MR, NV};
use crate::shared::span;
use core::arch::x86_64::*;
use rotile_core::kernel::{WeightedSum, run_end};

/// Keys per unrolled step.
const UNROLL: usize = 4;

/// See [`rotile_core::kernel::Kernels::weighted_sum`].
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn weighted_sum_6x16_avx2(w: WeightedSum<'_>) {
    let panel = w.tile_keys.checked_mul(NV).expect("the tile reaches beyond the address space");
    let panels = w.v.len() / panel;
    assert!(w.from <= w.to && w.to <= w.tile_keys && w.factors.len() >= MR);
    assert!(w.p.len() >= span(MR, w.p_stride, w.to) && w.acc.len() >= span(MR, w.acc_stride, panels * NV));
    for c in 0..panels {
        let (mut from, mut factors) = (w.from, w.factors);
        loop {
            let to = run_end(from, w.to);
            // SAFETY: row `r` of `p` has `to` elements, the panel `tile_keys` rows of 16, and row `r` of `acc` 16
            // columns from `c * NV` on; there are MR factors.
            unsafe {
                let p = w.p.as_ptr().add(from);
                let v = w.v.as_ptr().add(c * panel + from * NV);
                let acc = w.acc.as_mut_ptr().add(c * NV);
                tile(p, w.p_stride, v, to - from, factors.as_ptr(), acc, w.acc_stride);
            }
            (from, factors) = (to, &[1.0; MR]);
            if from >= w.to {
                break;
            }
        }
    }
}

/// One run of keys of a tile.
///
/// # Safety
///
/// - `keys` elements are readable at each of `p + r * p_stride`, `keys` rows of 16 at `v`, 6 at `factors`.
/// - 16 elements are readable and writable at each of `acc + r * acc_stride`, `r < 6`.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline(never)]
unsafe fn tile(
    p: *const f32,
    p_stride: usize,
    v: *const f32,
    keys: usize,
    factors: *const f32,
    acc: *mut f32,
    acc_stride: usize,
) {
    let mut sum = [[_mm256_setzero_ps(); 2]; MR];
    // SAFETY: `j < keys` in every step.
    let mut step = |p: *const f32, v: *const f32| unsafe {
        let (v0, v1) = (_mm256_loadu_ps(v), _mm256_loadu_ps(v.add(8)));
        for (r, sum) in sum.iter_mut().enumerate() {
            let x = _mm256_broadcast_ss(&*p.add(r * p_stride));
            sum[0] = _mm256_fmadd_ps(x, v0, sum[0]);
            sum[1] = _mm256_fmadd_ps(x, v1, sum[1]);
        }
    };
    let mut j = 0;
    while j + UNROLL <= keys {
        for u in 0..UNROLL {
            // SAFETY: as above.
            unsafe { step(p.add(j + u), v.add((j + u) * NV)) };
        }
        j += UNROLL;
    }
    while j < keys {
        // SAFETY: as above.
        unsafe { step(p.add(j), v.add(j * NV)) };
        j += 1;
    }
    for (r, sum) in sum.into_iter().enumerate() {
        // SAFETY: the caller's duty.
        unsafe {
            let (row, factor) = (acc.add(r * acc_stride), _mm256_broadcast_ss(&*factors.add(r)));
            _mm256_storeu_ps(row, _mm256_fmadd_ps(_mm256_loadu_ps(row), factor, sum[0]));
            _mm256_storeu_ps(row.add(8), _mm256_fmadd_ps(_mm256_loadu_ps(row.add(8)), factor, sum[1]));
        }
    }
}

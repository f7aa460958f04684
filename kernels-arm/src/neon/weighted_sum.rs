//! The NEON weighted sum, 8 rows by 8 value columns: acc = acc * factor + P V, values in column panels.

use super::{MR, NV, SUM_RUN};
use core::arch::aarch64::*;
use rotile_core::kernel::{WeightedSum, run_end};

/// Keys of a step: the lanes of a vector of weights.
const KEYS: usize = 4;

/// See [`rotile_core::kernel::Kernels::weighted_sum`]. The weights stay row-major, as softmax leaves them: a vector holds
/// 4 keys of one row and multiplies lane by lane, so per 4 keys 16 vector loads feed 64 multiply-adds.
#[target_feature(enable = "neon")]
pub(super) fn weighted_sum_8x8_neon(w: WeightedSum<'_>) {
    let panels = w.check(MR, NV);
    for c in 0..panels {
        let (mut from, mut factors, mut fresh) = (w.from, w.factors, w.fresh);
        loop {
            let to = run_end(from, w.to, SUM_RUN);
            // SAFETY: row `r` of `p` has `to` elements, the panel `tile_keys` rows of 8, and row `r` of `acc` 8
            // columns from `c * NV` on; there are MR factors.
            unsafe {
                let p = w.p.as_ptr().add(from);
                let v = w.v.as_ptr().add((c * w.tile_keys + from) * NV);
                let acc = w.acc.as_mut_ptr().add(c * NV);
                tile(p, w.p_stride, v, to - from, factors.as_ptr(), fresh, acc, w.acc_stride);
            }
            (from, factors, fresh) = (to, &[1.0; MR], false);
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
/// - `keys` elements are readable at each of `p + r * p_stride`, `keys` rows of 8 at `v`, 8 at `factors`.
/// - 8 elements are readable and writable at each of `acc + r * acc_stride`, `r < 8`.
#[allow(clippy::too_many_arguments)]
#[inline(never)]
#[target_feature(enable = "neon")]
unsafe fn tile(
    mut p: *const f32,
    p_stride: usize,
    mut v: *const f32,
    keys: usize,
    factors: *const f32,
    fresh: bool,
    acc: *mut f32,
    acc_stride: usize,
) {
    let mut sum = [[vdupq_n_f32(0.0); 2]; MR];
    let mut left = keys;
    while left >= KEYS {
        // SAFETY: 4 keys are left: weights in every row, rows of values.
        unsafe {
            let weights: [float32x4_t; MR] = core::array::from_fn(|r| vld1q_f32(p.add(r * p_stride)));
            key::<0>(&mut sum, &weights, v);
            key::<1>(&mut sum, &weights, v.add(NV));
            key::<2>(&mut sum, &weights, v.add(2 * NV));
            key::<3>(&mut sum, &weights, v.add(3 * NV));
            (p, v) = (p.add(KEYS), v.add(KEYS * NV));
        }
        left -= KEYS;
    }
    for j in 0..left {
        // SAFETY: `j < left`, the keys that are left.
        unsafe {
            let weights: [float32x4_t; MR] = core::array::from_fn(|r| vld1q_dup_f32(p.add(r * p_stride + j)));
            key::<0>(&mut sum, &weights, v.add(j * NV));
        }
    }
    for (r, sum) in sum.into_iter().enumerate() {
        // SAFETY: the caller's duty.
        unsafe {
            let (row, factor) = (acc.add(r * acc_stride), *factors.add(r));
            if fresh {
                vst1q_f32(row, sum[0]);
                vst1q_f32(row.add(4), sum[1]);
            } else {
                vst1q_f32(row, vfmaq_n_f32(sum[0], vld1q_f32(row), factor));
                vst1q_f32(row.add(4), vfmaq_n_f32(sum[1], vld1q_f32(row.add(4)), factor));
            }
        }
    }
}

/// The key in lane `J` of the weights times its row of values.
///
/// # Safety
///
/// 8 elements are readable at `v`.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn key<const J: i32>(sum: &mut [[float32x4_t; 2]; MR], weights: &[float32x4_t; MR], v: *const f32) {
    // SAFETY: the caller's duty.
    let (v0, v1) = unsafe { (vld1q_f32(v), vld1q_f32(v.add(4))) };
    for (sum, weights) in sum.iter_mut().zip(weights) {
        sum[0] = vfmaq_laneq_f32::<J>(sum[0], v0, *weights);
        sum[1] = vfmaq_laneq_f32::<J>(sum[1], v1, *weights);
    }
}

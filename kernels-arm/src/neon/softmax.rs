//! One row of the online softmax: maximum, then weights and their sum. Rules and constants are `rotile_core::softmax`'s.

use super::rows::LANES;
use core::arch::aarch64::*;
use rotile_core::kernel::{Adjust, RowState};
use rotile_core::softmax::{self, EXP2_COEFFICIENTS, EXP2_FLOOR, LOWEST_SCORE, Raised};

/// Vectors of a step: the polynomials of 4 are under way at once, which an in-order core can't arrange by itself.
const WIDE: usize = 4;

/// See [`rotile_core::kernel::Kernels::adjust`].
#[target_feature(enable = "neon")]
pub(super) fn adjust_neon(args: Adjust<'_>) -> bool {
    softmax::adjust(args)
}

/// See [`rotile_core::kernel::Kernels::softmax`].
#[target_feature(enable = "neon")]
pub(super) fn softmax_neon(s: &mut [f32], scale: f32, lo: usize, hi: usize, state: &mut RowState) -> f32 {
    assert!(lo < hi && hi <= s.len() && s.len().is_multiple_of(LANES));
    // Whole vectors that hold visible keys. Their few other lanes become -inf, which weighs exactly 0 whatever the
    // maximum: no masks below.
    let (first, end) = (lo / LANES * LANES, hi.next_multiple_of(LANES));
    s[..first].fill(0.0);
    s[end..].fill(0.0);
    s[first..lo].fill(f32::NEG_INFINITY);
    s[hi..end].fill(f32::NEG_INFINITY);
    let seen = &mut s[first..end];

    // The largest product gives the largest score: rounding keeps order.
    let Raised { factor, subtract } = state.raise(maximum(seen) * scale);
    state.sum += weigh(seen, scale, subtract);
    factor
}

/// The largest score that is not NaN; -inf if there is none. Whole vectors.
#[inline]
#[target_feature(enable = "neon")]
fn maximum(s: &[f32]) -> f32 {
    let (blocks, rest) = s.as_chunks::<{ WIDE * LANES }>();
    // FMAXNM gives the number where one operand is NaN.
    let mut tops = [vdupq_n_f32(f32::NEG_INFINITY); WIDE];
    for block in blocks {
        for (top, x) in tops.iter_mut().zip(block.as_chunks::<LANES>().0) {
            *top = vmaxnmq_f32(*top, load(x));
        }
    }
    for x in rest.as_chunks::<LANES>().0 {
        tops[0] = vmaxnmq_f32(tops[0], load(x));
    }
    vmaxnmvq_f32(vmaxnmq_f32(vmaxnmq_f32(tops[0], tops[1]), vmaxnmq_f32(tops[2], tops[3])))
}

/// Replaces scores by weights and returns their sum. Whole vectors.
#[inline]
#[target_feature(enable = "neon")]
fn weigh(s: &mut [f32], scale: f32, max: f32) -> f32 {
    let max = vdupq_n_f32(max);
    // One chain of additions, lane by lane: which lane and which turn depend on the index alone, and what is not seen
    // adds 0.
    let mut sum = vdupq_n_f32(0.0);
    let (blocks, rest) = s.as_chunks_mut::<{ WIDE * LANES }>();
    for block in blocks {
        let block = block.as_chunks_mut::<LANES>().0;
        let x: [float32x4_t; WIDE] = weights(core::array::from_fn(|i| vmulq_n_f32(load(&block[i]), scale)), max);
        for (to, x) in block.iter_mut().zip(x) {
            store(to, x);
            sum = vaddq_f32(sum, x);
        }
    }
    for to in rest.as_chunks_mut::<LANES>().0 {
        let [x] = weights([vmulq_n_f32(load(to), scale)], max);
        store(to, x);
        sum = vaddq_f32(sum, x);
    }
    let pairs = vpaddq_f32(sum, sum);
    vgetq_lane_f32::<0>(vpaddq_f32(pairs, pairs))
}

/// `2^(s - max)` for an integer `max`; NaN and +inf give NaN.
#[inline]
#[target_feature(enable = "neon")]
fn weights<const N: usize>(s: [float32x4_t; N], max: float32x4_t) -> [float32x4_t; N] {
    // FMAX, other than FMAXNM, gives NaN where one operand is.
    let s = s.map(|s| vmaxq_f32(s, vdupq_n_f32(LOWEST_SCORE)));
    let n = s.map(|s| vrndmq_f32(s));
    let f: [float32x4_t; N] = core::array::from_fn(|i| vsubq_f32(s[i], n[i]));
    let [c0, c1, c2, c3, c4, c5] = EXP2_COEFFICIENTS.map(|c| vdupq_n_f32(c));
    let mut p = [c5; N];
    for c in [c4, c3, c2, c1, c0] {
        p = core::array::from_fn(|i| vfmaq_f32(c, p[i], f[i]));
    }
    core::array::from_fn(|i| {
        let e = vmaxq_f32(vsubq_f32(n[i], max), vdupq_n_f32(EXP2_FLOOR));
        let exponent = vaddq_s32(vcvtq_s32_f32(e), vdupq_n_s32(127));
        vmulq_f32(p[i], vreinterpretq_f32_s32(vshlq_n_s32::<23>(exponent)))
    })
}

#[inline]
#[target_feature(enable = "neon")]
fn load(x: &[f32; LANES]) -> float32x4_t {
    // SAFETY: a reference to 4 elements.
    unsafe { vld1q_f32(x.as_ptr()) }
}

#[inline]
#[target_feature(enable = "neon")]
fn store(to: &mut [f32; LANES], x: float32x4_t) {
    // SAFETY: a reference to 4 elements.
    unsafe { vst1q_f32(to.as_mut_ptr(), x) }
}

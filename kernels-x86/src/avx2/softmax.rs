//! One row of the online softmax: maximum, then weights and their sum. Rules and constants are `rotile_core::softmax`'s.

use super::rows::{LANES, lanes_below};
use core::arch::x86_64::*;
use rotile_core::kernel::{Adjust, RowState};
use rotile_core::softmax::{self, EXP2_COEFFICIENTS, EXP2_FLOOR, LOWEST_SCORE, Raised};

/// See [`rotile_core::kernel::Kernels::adjust`].
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn adjust_avx2(args: Adjust<'_>) -> bool {
    softmax::adjust(args)
}

/// See [`rotile_core::kernel::Kernels::softmax`].
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn softmax_avx2(s: &mut [f32], scale: f32, lo: usize, hi: usize, state: &mut RowState) -> f32 {
    assert!(lo < hi && hi <= s.len() && s.len().is_multiple_of(LANES));
    // The vectors that hold visible keys; all others become 0.
    let (first, end) = (lo / LANES, hi.div_ceil(LANES));
    s[..first * LANES].fill(0.0);
    s[end * LANES..].fill(0.0);
    let vectors = &mut s[first * LANES..end * LANES];
    let (lo, hi) = (lo - first * LANES, hi - first * LANES);
    let last = vectors.len() - LANES;
    // The edge vectors, masked; both may be the same one.
    let head = _mm256_andnot_si256(lanes_below(lo), lanes_below(hi.min(LANES)));
    let tail = _mm256_andnot_si256(lanes_below(if last == 0 { lo } else { 0 }), lanes_below(hi - last));
    let hide =
        |x: __m256, mask: __m256i| _mm256_blendv_ps(_mm256_set1_ps(f32::NEG_INFINITY), x, _mm256_castsi256_ps(mask));

    let p = vectors.as_mut_ptr();
    // SAFETY: `at` is a multiple of 8 below the length, which is one too.
    let load = |at: usize| unsafe { _mm256_loadu_ps(p.add(at)) };
    // `max_ps` gives its second operand where one is NaN: the running maximum survives.
    let mut tops = [_mm256_max_ps(hide(load(0), head), _mm256_set1_ps(f32::NEG_INFINITY)); 4];
    tops[1] = _mm256_max_ps(hide(load(last), tail), tops[1]);
    let mut at = LANES;
    while at + 4 * LANES <= last {
        for (i, top) in tops.iter_mut().enumerate() {
            *top = _mm256_max_ps(load(at + i * LANES), *top);
        }
        at += 4 * LANES;
    }
    while at < last {
        tops[0] = _mm256_max_ps(load(at), tops[0]);
        at += LANES;
    }
    let top = horizontal_max(_mm256_max_ps(_mm256_max_ps(tops[0], tops[1]), _mm256_max_ps(tops[2], tops[3])));

    // The largest product gives the largest score: rounding keeps order.
    let Raised { factor, subtract } = state.raise(top * scale);
    let (scale, subtract) = (_mm256_set1_ps(scale), _mm256_set1_ps(subtract));

    // One chain of additions, lane by lane: which lane and which turn depend on the index alone, and masked lanes add 0.
    let mut sum = _mm256_setzero_ps();
    let mut weigh = |at: usize, mask: Option<__m256i>| {
        let mut x = weight(_mm256_mul_ps(load(at), scale), subtract);
        if let Some(mask) = mask {
            x = _mm256_and_ps(x, _mm256_castsi256_ps(mask));
        }
        // SAFETY: as for loads.
        unsafe { _mm256_storeu_ps(p.add(at), x) };
        sum = _mm256_add_ps(sum, x);
    };
    weigh(0, Some(head));
    let mut at = LANES;
    while at < last {
        weigh(at, None);
        at += LANES;
    }
    if last > 0 {
        weigh(last, Some(tail));
    }
    state.sum += horizontal_sum(sum);
    factor
}

/// `2^(s - max)` for an integer `max`; NaN and +inf give NaN.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn weight(s: __m256, max: __m256) -> __m256 {
    // `max_ps` gives its second operand where one is NaN.
    let s = _mm256_max_ps(_mm256_set1_ps(LOWEST_SCORE), s);
    let n = _mm256_floor_ps(s);
    let f = _mm256_sub_ps(s, n);
    let e = _mm256_max_ps(_mm256_sub_ps(n, max), _mm256_set1_ps(EXP2_FLOOR));
    let [c0, c1, c2, c3, c4, c5] = EXP2_COEFFICIENTS.map(|c| _mm256_set1_ps(c));
    let p = _mm256_fmadd_ps(c5, f, c4);
    let p = _mm256_fmadd_ps(p, f, c3);
    let p = _mm256_fmadd_ps(p, f, c2);
    let p = _mm256_fmadd_ps(p, f, c1);
    let p = _mm256_fmadd_ps(p, f, c0);
    let exponent = _mm256_add_epi32(_mm256_cvtps_epi32(e), _mm256_set1_epi32(127));
    _mm256_mul_ps(p, _mm256_castsi256_ps(_mm256_slli_epi32::<23>(exponent)))
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn horizontal_max(x: __m256) -> f32 {
    let x = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
    let x = _mm_max_ps(x, _mm_movehl_ps(x, x));
    _mm_cvtss_f32(_mm_max_ss(x, _mm_shuffle_ps::<1>(x, x)))
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn horizontal_sum(x: __m256) -> f32 {
    let x = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
    let x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    _mm_cvtss_f32(_mm_add_ss(x, _mm_shuffle_ps::<1>(x, x)))
}

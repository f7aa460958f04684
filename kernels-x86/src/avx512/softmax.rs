//! One row of the online softmax: maximum, then weights and their sum. Rules and constants are `rotile_core::softmax`'s.

use super::rows::{LANES, lanes_below, load, store_n};
use core::arch::x86_64::*;
use rotile_core::kernel::{Adjust, RowState};
use rotile_core::softmax::{self, EXP2_COEFFICIENTS, EXP2_FLOOR, Raised};

/// See [`rotile_core::kernel::Kernels::adjust`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
pub(super) fn adjust_avx512(args: Adjust<'_>) -> bool {
    softmax::adjust(args)
}

/// See [`rotile_core::kernel::Kernels::softmax`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
pub(super) fn softmax_avx512(s: &mut [f32], scale: f32, lo: usize, hi: usize, state: &mut RowState) -> f32 {
    assert!(lo < hi && hi <= s.len());
    // The vectors that hold visible keys; all others become 0. In the decode path the last one may be cut short.
    let (first, end) = (lo / LANES, hi.div_ceil(LANES));
    s[..first * LANES].fill(0.0);
    let stop = s.len().min(end * LANES);
    s[stop..].fill(0.0);
    let vectors = &mut s[first * LANES..stop];
    let (lo, hi) = (lo - first * LANES, hi - first * LANES);
    let last = (end - first - 1) * LANES;
    let last_lanes = vectors.len() - last;
    // The edge vectors' visible lanes; both may be the same vector.
    let head = lanes_below(hi) & !lanes_below(lo);
    let tail = lanes_below(hi - last) & !lanes_below(if last == 0 { lo } else { 0 });

    let p = vectors.as_mut_ptr();
    // `max_ps` gives its second operand where one is NaN: the running maximum survives. Lanes outside a mask keep theirs.
    let mut tops = [_mm512_set1_ps(f32::NEG_INFINITY); 4];
    let mut at = LANES;
    // SAFETY: whole vectors lie before `last`, and `last_lanes` from there on.
    unsafe {
        let x = load(p, vectors.len());
        tops[0] = _mm512_mask_max_ps(tops[0], head, x, tops[0]);
        let x = load(p.add(last), last_lanes);
        tops[1] = _mm512_mask_max_ps(tops[1], tail, x, tops[1]);
        while at + 4 * LANES <= last {
            for (i, top) in tops.iter_mut().enumerate() {
                *top = _mm512_max_ps(_mm512_loadu_ps(p.add(at + i * LANES)), *top);
            }
            at += 4 * LANES;
        }
        while at < last {
            tops[0] = _mm512_max_ps(_mm512_loadu_ps(p.add(at)), tops[0]);
            at += LANES;
        }
    }
    let top = horizontal_max(_mm512_max_ps(_mm512_max_ps(tops[0], tops[1]), _mm512_max_ps(tops[2], tops[3])));

    // The largest product gives the largest score: rounding keeps order.
    let Raised { factor, subtract } = state.raise(top * scale);
    let (scale, subtract) = (_mm512_set1_ps(scale), _mm512_set1_ps(subtract));

    // One chain of additions, lane by lane: which lane and which turn depend on the index alone, and masked lanes add 0.
    let mut at = LANES;
    // SAFETY: as above.
    let sum = unsafe {
        let mut sum = weights(load(p, vectors.len()), scale, subtract, head);
        store_n(p, sum, vectors.len());
        while at < last {
            let x = weights(_mm512_loadu_ps(p.add(at)), scale, subtract, !0);
            _mm512_storeu_ps(p.add(at), x);
            sum = _mm512_add_ps(sum, x);
            at += LANES;
        }
        if last > 0 {
            let x = weights(load(p.add(last), last_lanes), scale, subtract, tail);
            store_n(p.add(last), x, last_lanes);
            sum = _mm512_add_ps(sum, x);
        }
        sum
    };
    state.sum += horizontal_sum(sum);
    factor
}

/// `2^(x * scale - max)` for an integer `max`, and 0 in lanes outside `seen`; NaN and +inf give NaN.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
fn weights(x: __m512, scale: __m512, max: __m512, seen: __mmask16) -> __m512 {
    let s = _mm512_mul_ps(x, scale);
    // s - floor(s), and from it the floor: subtracting is cheaper than rounding a second time. The fraction is 0 for -inf,
    // whose exponent is far below the limit, and for +inf, whose exponent is inf - inf.
    let f = _mm512_reduce_ps::<{ _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC }>(s);
    let e = _mm512_sub_ps(_mm512_sub_ps(s, f), max);
    // Of a weight below 2^-126 not even a denormal is left. "Not less": NaN stays.
    let seen = _mm512_mask_cmp_ps_mask::<_CMP_NLT_UQ>(seen, e, _mm512_set1_ps(EXP2_FLOOR + 1.0));
    let [c0, c1, c2, c3, c4, c5] = EXP2_COEFFICIENTS.map(|c| _mm512_set1_ps(c));
    let p = _mm512_fmadd_ps(c5, f, c4);
    let p = _mm512_fmadd_ps(p, f, c3);
    let p = _mm512_fmadd_ps(p, f, c2);
    let p = _mm512_fmadd_ps(p, f, c1);
    let p = _mm512_fmadd_ps(p, f, c0);
    _mm512_maskz_scalef_ps(seen, p, e)
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
fn horizontal_max(x: __m512) -> f32 {
    let x = _mm256_max_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps::<1>(x));
    let x = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
    let x = _mm_max_ps(x, _mm_movehl_ps(x, x));
    _mm_cvtss_f32(_mm_max_ss(x, _mm_shuffle_ps::<1>(x, x)))
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
fn horizontal_sum(x: __m512) -> f32 {
    let x = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps::<1>(x));
    let x = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
    let x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    _mm_cvtss_f32(_mm_add_ss(x, _mm_shuffle_ps::<1>(x, x)))
}

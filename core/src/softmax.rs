//! Constants and rules of the online softmax, shared by every tier.
//!
//! Scores are in base 2: dot products times `scale * log2(e)`. With `m` an integer at least the largest score seen,
//! `n = floor(s)` and `f = s - n` in [0, 1), both exact, `2^(s - m) = p(f) * 2^(n - m)`. (`s - m` itself would round where `s`
//! is small beside `m`.) A change of `m` by an integer changes the power of two alone, so rescaling changes no bits, and
//! neither does the order in which maxima are met.

use crate::kernel::{Adjust, RowState};

/// Coefficients, constant term first, of the degree 5 polynomial for `2^f` on `[0, 1)`: relative minimax error 1.5e-7.
#[allow(clippy::excessive_precision)] // the digits of the fit
pub const EXP2_COEFFICIENTS: [f32; 6] = [0.99999994, 0.693153083, 0.240153611, 0.055826318, 0.008989340, 0.001877577];

/// `n - m` is clamped to this from below: the exponent field 0, read as 0. Far-off keys weigh exactly 0 and no denormal
/// weight is ever made.
pub const EXP2_FLOOR: f32 = -127.0;

/// Scores are clamped to this from below, so that -inf has a floor and a fraction.
pub const LOWEST_SCORE: f32 = f32::MIN;

/// `log2(e)`.
pub const LOG2_E: f64 = core::f64::consts::LOG2_E;

/// `2^x` for an integer `x <= 0`, exactly; 0 below -126. NaN (a maximum of +inf against itself) stays NaN.
pub fn exact_exp2(x: f32) -> f32 {
    if x.is_nan() {
        x
    } else if x < -126.0 {
        0.0
    } else {
        f32::from_bits(((x as i32 + 127) as u32) << 23)
    }
}

/// Smallest integer not below `x`; beyond 2^23 every f32 is one. NaN stays NaN.
#[inline]
pub(crate) fn ceil(x: f32) -> f32 {
    if x.abs() < 8_388_608.0 {
        let t = x as i32 as f32;
        if t < x { t + 1.0 } else { t }
    } else {
        x
    }
}

/// `tanh(x) = x + x^3 p(x^2)` below [`TANH_SPLIT`], constant term first: relative error 2e-8.
#[allow(clippy::excessive_precision)] // the digits of the fit
const TANH_COEFFICIENTS: [f32; 5] = [-0.333333284, 0.133327693, -0.0538509078, 0.0209971797, -0.00609671418];
/// From here on, `tanh(x) = 1 - 2 / (e^2x + 1)` is as exact.
const TANH_SPLIT: f32 = 0.625;
/// From here on, tanh is 1 in f32.
const TANH_ONE: f32 = 10.0;

/// tanh to 2 units in the last place, without a branch: compilers vectorise it. NaN stays NaN.
#[inline(always)]
fn tanh(x: f32) -> f32 {
    let a = x.abs();
    let [c0, c1, c2, c3, c4] = TANH_COEFFICIENTS;
    let z = x * x;
    let near = x + x * z * ((((c4 * z + c3) * z + c2) * z + c1) * z + c0);
    // 2^y for y from 0 to 29; the sum with 2^23 has the integer in its lowest bits.
    let y = if a > TANH_ONE { TANH_ONE } else { a } * (2.0 * LOG2_E as f32);
    let round = y + 8_388_608.0 - 8_388_608.0;
    let n = if round > y { round - 1.0 } else { round };
    let f = y - n;
    let [c0, c1, c2, c3, c4, c5] = EXP2_COEFFICIENTS;
    let p = ((((c5 * f + c4) * f + c3) * f + c2) * f + c1) * f + c0;
    let power = p * f32::from_bits((n + 127.0 + 8_388_608.0).to_bits() << 23);
    let far = (1.0 - 2.0 / (power + 1.0)).copysign(x);
    if a < TANH_SPLIT { near } else { far }
}

/// The body of [`crate::kernel::Kernels::adjust`] for every tier, to be compiled with the tier's instructions. No multiply-add
/// is fused, so that every tier has the same bits.
#[inline(always)]
pub fn adjust(args: Adjust<'_>) -> bool {
    let Adjust { s, scale, cap, alibi, bias } = args;
    match cap {
        Some(cap) => {
            let inner = scale / cap;
            s.iter_mut().for_each(|s| *s = cap * tanh(*s * inner));
        }
        None => s.iter_mut().for_each(|s| *s *= scale),
    }
    if let Some((slope, distance)) = alibi {
        let (slope, distance) = (slope * LOG2_E as f32, distance as f32);
        for (i, s) in s.iter_mut().enumerate() {
            *s -= slope * (distance + i as i32 as f32).abs();
        }
    }
    let mut hidden = false;
    if let Some(bias) = bias {
        for (s, &bias) in s.iter_mut().zip(bias) {
            // Finite numbers stay finite: only -inf hides.
            let raised = (bias * LOG2_E as f32).clamp(f32::MIN, f32::MAX);
            let sum = *s + if bias == f32::INFINITY { bias } else { raised };
            let sum = if sum == f32::NEG_INFINITY && *s != f32::NEG_INFINITY { f32::MIN } else { sum };
            *s = if bias == f32::NEG_INFINITY { bias } else { sum };
            hidden |= bias == f32::NEG_INFINITY;
        }
    }
    hidden
}

/// What a tile's largest score means for a row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Raised {
    /// What the row's accumulated values, and its sum, are multiplied by: an exact power of two, 0 for the first visible key.
    pub factor: f32,
    /// The maximum to subtract from scores.
    pub subtract: f32,
}

impl RowState {
    /// Raises the maximum to the ceiling of `top`, if that is greater, and rescales the sum.
    #[inline]
    pub fn raise(&mut self, top: f32) -> Raised {
        let old = self.max;
        let new = if top > old { ceil(top) } else { old };
        let factor = if new == f32::NEG_INFINITY || (new == old && new.is_finite()) {
            1.0
        } else if old == f32::NEG_INFINITY {
            0.0
        } else {
            exact_exp2(old - new)
        };
        self.max = new;
        self.sum *= factor;
        // Nothing but -inf so far: subtract 0, so that -inf weighs 0 and NaN stays NaN.
        Raised { factor, subtract: if new == f32::NEG_INFINITY { 0.0 } else { new } }
    }
}

/// A finished row with an attention sink, a logit in natural units: what its accumulated values are multiplied by, and its
/// lse. Once per row, so in f64.
pub(crate) fn with_sink(state: RowState, sink: f32) -> (f32, f32) {
    let sink = f64::from(sink) * LOG2_E;
    let own = if state.sum == 0.0 { f64::NEG_INFINITY } else { f64::from(state.max) };
    let max = if sink > own { sink } else { own };
    if max == f64::NEG_INFINITY {
        return (1.0, f32::NEG_INFINITY);
    }
    // NaN, in the sum of a row, stays NaN.
    let raised = if own == f64::NEG_INFINITY { 0.0 } else { libm::exp2(own - max) };
    let sum = f64::from(state.sum) * raised + libm::exp2(sink - max);
    ((raised / sum) as f32, ((max + libm::log2(sum)) * core::f64::consts::LN_2) as f32)
}

/// Natural-log sum of exponentials of a finished row; -inf if it saw no key.
pub(crate) fn lse(state: RowState) -> f32 {
    if state.sum == 0.0 {
        f32::NEG_INFINITY
    } else {
        ((f64::from(state.max) + libm::log2(f64::from(state.sum))) * core::f64::consts::LN_2) as f32
    }
}

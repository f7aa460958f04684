//! Constants and rules of the online softmax, shared by every tier.
//!
//! Scores are in base 2: dot products times `scale * log2(e)`. With `m` an integer at least the largest score seen,
//! `n = floor(s)` and `f = s - n` in [0, 1), both exact, `2^(s - m) = p(f) * 2^(n - m)`. (`s - m` itself would round where `s`
//! is small beside `m`.) A change of `m` by an integer changes the power of two alone, so rescaling changes no bits, and
//! neither does the order in which maxima are met.

use crate::kernel::RowState;

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

/// Natural-log sum of exponentials of a finished row; -inf if it saw no key.
pub(crate) fn lse(state: RowState) -> f32 {
    if state.sum == 0.0 {
        f32::NEG_INFINITY
    } else {
        ((f64::from(state.max) + libm::log2(f64::from(state.sum))) * core::f64::consts::LN_2) as f32
    }
}

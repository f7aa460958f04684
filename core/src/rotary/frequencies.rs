//! Frequency sets: how far each pair turns per position, for the scalings that published models use.
//!
//! Everything is f64. Parameter names are those of Hugging Face `rope_parameters`; a formula's paper is named where one
//! exists. `base^(-2 i / rotary_dim)` is from Su et al., "RoFormer", 2021.

use crate::{Error, MAX_HEAD_DIM};

/// A published way to choose the frequencies. Lengths are in positions.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum Frequencies<'a> {
    /// `base^(-2 i / rotary_dim)`.
    Default {
        /// rope_theta.
        base: f64,
    },
    /// The default over `factor`: position interpolation (Chen et al., 2023).
    Linear {
        /// rope_theta.
        base: f64,
        /// How much longer than trained.
        factor: f64,
    },
    /// NTK-aware scaling (bloc97, 2023; Hugging Face `dynamic`), whose base grows with the sequence once it is longer than
    /// the trained length. The length is fixed per sequence: all keys of a sequence must share one base.
    DynamicNtk {
        /// rope_theta.
        base: f64,
        /// The scaling factor.
        factor: f64,
        /// max_position_embeddings, the trained length.
        trained: u32,
        /// The sequence's length.
        seq_len: u32,
    },
    /// YaRN (Peng et al., 2023).
    Yarn(Yarn),
    /// LongRoPE (Ding et al., 2024): a divisor for each pair.
    LongRope {
        /// rope_theta.
        base: f64,
        /// The divisors: the short or the long set, fixed per sequence; see [`LongRopeFactors::pick`].
        factors: &'a [f64],
        /// original_max_position_embeddings.
        original: u32,
        /// max_position_embeddings; with `original` it gives the default attention factor.
        max_positions: u32,
        /// The attention factor, if the settings name one.
        attention_factor: Option<f64>,
    },
    /// Llama 3.1 (Hugging Face `llama3`): low frequencies are divided, high ones kept, those between blended.
    Llama3 {
        /// rope_theta.
        base: f64,
        /// The divisor of low frequencies.
        factor: f64,
        /// low_freq_factor.
        low: f64,
        /// high_freq_factor.
        high: f64,
        /// original_max_position_embeddings.
        original: u32,
    },
    /// Pairs over the whole head with the exponent `2 i / head_dim` (Hugging Face `proportional`); only the first
    /// `partial * head_dim / 2` turn.
    Proportional {
        /// rope_theta.
        base: f64,
        /// partial_rotary_factor, in (0, 1].
        partial: f64,
    },
}

/// Settings of YaRN.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Yarn {
    /// rope_theta.
    pub base: f64,
    /// How much longer than trained.
    pub factor: f64,
    /// original_max_position_embeddings.
    pub original: u32,
    /// Pairs that turn more often than this over the trained length are kept.
    pub beta_fast: f64,
    /// Pairs that turn less often are divided by `factor`.
    pub beta_slow: f64,
    /// Round the ends of the ramp between the two outward to whole pairs.
    pub truncate: bool,
    /// The attention factor, if the settings name one.
    pub attention_factor: Option<f64>,
    /// `mscale` and `mscale_all_dim`, if the settings name both and neither is 0: the attention factor is then a quotient.
    pub mscale: Option<(f64, f64)>,
}

impl Yarn {
    /// The published defaults: betas 32 and 1, truncated, attention factor `0.1 ln(factor) + 1`.
    pub const fn new(base: f64, factor: f64, original: u32) -> Self {
        Yarn {
            base,
            factor,
            original,
            beta_fast: 32.0,
            beta_slow: 1.0,
            truncate: true,
            attention_factor: None,
            mscale: None,
        }
    }
}

/// The two factor sets of a LongRoPE model.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LongRopeFactors<'a> {
    /// For sequences up to the original length.
    pub short: &'a [f64],
    /// For longer ones.
    pub long: &'a [f64],
}

impl<'a> LongRopeFactors<'a> {
    /// The set for a sequence that will grow to `seq_len`. Choose once per sequence: keys rotated by one set do not match
    /// queries rotated by the other.
    pub const fn pick(&self, seq_len: u32, original: u32) -> &'a [f64] {
        if seq_len > original { self.long } else { self.short }
    }
}

/// `0.1 m ln(factor) + 1`, or 1 up to factor 1.
fn yarn_mscale(factor: f64, m: f64) -> f64 {
    if factor <= 1.0 { 1.0 } else { 0.1 * m * libm::log(factor) + 1.0 }
}

/// What DeepSeek-V2 and V3 multiply the softmax scale by besides the attention factor:
/// `(0.1 mscale_all_dim ln(factor) + 1)^2`, which is 1 for an `mscale_all_dim` of 0.
///
/// # Errors
///
/// [`Error::BadNumber`] for a `factor` that is not finite and positive, or an `mscale_all_dim` not finite or negative.
pub fn yarn_softmax_multiplier(factor: f64, mscale_all_dim: f64) -> Result<f64, Error> {
    positive("rope factor", factor)?;
    if !(mscale_all_dim.is_finite() && mscale_all_dim >= 0.0) {
        let what = "mscale_all_dim".into();
        return Err(Error::BadNumber { what, value: mscale_all_dim, need: "finite and not negative" });
    }
    let m = yarn_mscale(factor, mscale_all_dim);
    Ok(m * m)
}

fn positive(what: &'static str, value: f64) -> Result<(), Error> {
    if value.is_finite() && value > 0.0 {
        Ok(())
    } else {
        Err(Error::BadNumber { what: what.into(), value, need: "finite and positive" })
    }
}

fn length(what: &'static str, value: u32) -> Result<f64, Error> {
    if value == 0 {
        return Err(Error::OutOfRange { what: what.into(), value: 0, min: 1, max: i128::from(u32::MAX) });
    }
    Ok(f64::from(value))
}

impl Frequencies<'_> {
    /// Writes inv_freq of each pair of a slice of `rotary_dim` elements (for [`Frequencies::Proportional`], of the whole
    /// head) and returns the attention factor, the amplitude of cos and sin.
    ///
    /// # Errors
    ///
    /// [`Error::OutOfRange`] or [`Error::BadNumber`] for an odd, empty or too wide `rotary_dim` or a parameter outside its range;
    /// [`Error::Mismatch`] if `out` (or a factor set) does not have `rotary_dim / 2` entries.
    pub fn inv_freq(&self, rotary_dim: usize, out: &mut [f64]) -> Result<f64, Error> {
        if rotary_dim == 0 || rotary_dim > MAX_HEAD_DIM {
            return Err(Error::OutOfRange {
                what: "rotary_dim".into(),
                value: rotary_dim as i128,
                min: 2,
                max: MAX_HEAD_DIM as i128,
            });
        }
        if !rotary_dim.is_multiple_of(2) {
            return Err(Error::BadNumber { what: "rotary_dim".into(), value: rotary_dim as f64, need: "even" });
        }
        let pairs = rotary_dim / 2;
        if out.len() != pairs {
            return Err(Error::Mismatch { what: "inv_freq".into(), expected: pairs, found: out.len() });
        }
        let dim = rotary_dim as f64;
        let base = self.base();
        positive("rope base", base)?;
        let plain = |base: f64, i: usize| libm::pow(base, -2.0 * i as f64 / dim);
        let mut set = |f: &dyn Fn(usize) -> f64| out.iter_mut().enumerate().for_each(|(i, out)| *out = f(i));
        match *self {
            Frequencies::Default { .. } => set(&|i| plain(base, i)),
            Frequencies::Linear { factor, .. } => {
                positive("rope factor", factor)?;
                set(&|i| plain(base, i) / factor);
            }
            Frequencies::DynamicNtk { factor, trained, seq_len, .. } => {
                positive("rope factor", factor)?;
                let trained = length("trained length", trained)?;
                let seq_len = f64::from(seq_len);
                // Up to the trained length the base stays: the term below would shrink it, or turn negative.
                let base = if seq_len > trained && rotary_dim > 2 {
                    let grown = factor * seq_len / trained - (factor - 1.0);
                    base * libm::pow(grown, dim / (dim - 2.0))
                } else {
                    base
                };
                set(&|i| plain(base, i));
            }
            Frequencies::Yarn(yarn) => return yarn.inv_freq(rotary_dim, out),
            Frequencies::LongRope { factors, original, max_positions, attention_factor, .. } => {
                if factors.len() != pairs {
                    return Err(Error::Mismatch {
                        what: "LongRoPE factors".into(),
                        expected: pairs,
                        found: factors.len(),
                    });
                }
                factors.iter().try_for_each(|&f| positive("LongRoPE factor", f))?;
                let original = length("original length", original)?;
                let ratio = length("max_positions", max_positions)? / original;
                let amplitude = match attention_factor {
                    Some(factor) => positive("attention_factor", factor).map(|()| factor)?,
                    None if ratio <= 1.0 => 1.0,
                    None if original <= 1.0 => {
                        return Err(Error::OutOfRange {
                            what: "original length".into(),
                            value: 1,
                            min: 2,
                            max: i128::from(u32::MAX),
                        });
                    }
                    None => libm::sqrt(1.0 + libm::log(ratio) / libm::log(original)),
                };
                set(&|i| plain(base, i) / factors[i]);
                return Ok(amplitude);
            }
            Frequencies::Llama3 { factor, low, high, original, .. } => {
                positive("rope factor", factor)?;
                positive("low_freq_factor", low)?;
                positive("high_freq_factor", high)?;
                if high <= low {
                    let what = "high_freq_factor".into();
                    return Err(Error::BadNumber { what, value: high, need: "above low_freq_factor" });
                }
                let original = length("original length", original)?;
                set(&|i| {
                    let f = plain(base, i);
                    // Turns over the original length.
                    let turns = original * f / (2.0 * core::f64::consts::PI);
                    let kept = ((turns - low) / (high - low)).clamp(0.0, 1.0);
                    f * kept + f / factor * (1.0 - kept)
                });
            }
            Frequencies::Proportional { partial, .. } => {
                if !(partial > 0.0 && partial <= 1.0) {
                    let what = "partial_rotary_factor".into();
                    return Err(Error::BadNumber { what, value: partial, need: "in (0, 1]" });
                }
                let turned = (partial * dim) as usize / 2;
                set(&|i| if i < turned { plain(base, i) } else { 0.0 });
            }
        }
        Ok(1.0)
    }

    const fn base(&self) -> f64 {
        match *self {
            Frequencies::Default { base }
            | Frequencies::Linear { base, .. }
            | Frequencies::DynamicNtk { base, .. }
            | Frequencies::Yarn(Yarn { base, .. })
            | Frequencies::LongRope { base, .. }
            | Frequencies::Llama3 { base, .. }
            | Frequencies::Proportional { base, .. } => base,
        }
    }
}

impl Yarn {
    fn inv_freq(&self, rotary_dim: usize, out: &mut [f64]) -> Result<f64, Error> {
        let Yarn { base, factor, beta_fast, beta_slow, .. } = *self;
        positive("rope factor", factor)?;
        positive("beta_fast", beta_fast)?;
        positive("beta_slow", beta_slow)?;
        if beta_fast < beta_slow {
            return Err(Error::BadNumber { what: "beta_fast".into(), value: beta_fast, need: "at least beta_slow" });
        }
        // From 1 down there is no pair from which on others turn more slowly.
        if base <= 1.0 {
            return Err(Error::BadNumber { what: "rope base".into(), value: base, need: "above 1 for YaRN" });
        }
        let original = length("original length", self.original)?;
        let amplitude = match (self.attention_factor, self.mscale) {
            (Some(factor), _) => positive("attention_factor", factor).map(|()| factor)?,
            (None, Some((mscale, all_dim))) => {
                positive("mscale", mscale)?;
                positive("mscale_all_dim", all_dim)?;
                yarn_mscale(factor, mscale) / yarn_mscale(factor, all_dim)
            }
            (None, None) => yarn_mscale(factor, 1.0),
        };
        let dim = rotary_dim as f64;
        // The pair that turns `turns` times over the original length.
        let pair_of =
            |turns: f64| dim * libm::log(original / (turns * 2.0 * core::f64::consts::PI)) / (2.0 * libm::log(base));
        let (mut low, mut high) = (pair_of(beta_fast), pair_of(beta_slow));
        if self.truncate {
            (low, high) = (libm::floor(low), libm::ceil(high));
        }
        // Published code bounds `low` from below and `high` from above alone: where all pairs turn too fast or too slowly
        // for the ramp, its ends then change places and divide the wrong pairs.
        (low, high) = (low.clamp(0.0, dim - 1.0), high.clamp(0.0, dim - 1.0));
        if low == high {
            high += 0.001;
        }
        for (i, out) in out.iter_mut().enumerate() {
            let f = libm::pow(base, -2.0 * i as f64 / dim);
            let divided = ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
            *out = f / factor * divided + f * (1.0 - divided);
        }
        Ok(amplitude)
    }
}

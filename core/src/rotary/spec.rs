//! Which elements of a head turn.

use super::PairStyle;
use crate::Error;
use crate::kernel::Turn;

/// Which slice of each query and key head turns, and how its elements pair up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RotarySpec {
    style: PairStyle,
    part: Part,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    Full,
    Slice { offset: usize, rotary_dim: usize },
    Proportional { turned: usize },
}

impl RotarySpec {
    /// The whole head turns; head_dim must be even.
    pub const fn full(style: PairStyle) -> Self {
        RotarySpec { style, part: Part::Full }
    }

    /// The first `rotary_dim` elements turn (GPT-NeoX, Phi: `partial_rotary_factor`). 0 turns nothing.
    pub const fn leading(style: PairStyle, rotary_dim: usize) -> Self {
        RotarySpec { style, part: Part::Slice { offset: 0, rotary_dim } }
    }

    /// The `rotary_dim` elements from `offset` on turn (multi-head latent attention: the end of the head).
    pub const fn at_offset(style: PairStyle, offset: usize, rotary_dim: usize) -> Self {
        RotarySpec { style, part: Part::Slice { offset, rotary_dim } }
    }

    /// Pairs span the whole head and only the first `turned` of them turn; for the frequencies see
    /// [`super::Frequencies::Proportional`].
    pub const fn proportional(style: PairStyle, turned: usize) -> Self {
        RotarySpec { style, part: Part::Proportional { turned } }
    }

    /// Nothing turns.
    pub const fn none() -> Self {
        Self::leading(PairStyle::Half, 0)
    }

    /// How elements pair up.
    pub const fn style(&self) -> PairStyle {
        self.style
    }

    /// The geometry in a head of `head_dim` elements, or `None` if nothing turns.
    ///
    /// # Errors
    ///
    /// [`Error::OutOfRange`] for a slice or an offset that leaves the head, or more turned pairs than it has;
    /// [`Error::BadNumber`] for an odd number of elements.
    pub fn turn(&self, head_dim: usize) -> Result<Option<Turn>, Error> {
        let at_most = |what: &'static str, value: usize, max: usize| {
            if value <= max {
                Ok(value)
            } else {
                Err(Error::OutOfRange { what: what.into(), value: value as i128, min: 0, max: max as i128 })
            }
        };
        let pairs_of = |what: &'static str, dim: usize| {
            if at_most(what, dim, head_dim)?.is_multiple_of(2) {
                Ok(dim / 2)
            } else {
                Err(Error::BadNumber { what: what.into(), value: dim as f64, need: "even" })
            }
        };
        let (offset, pairs, distance) = match self.part {
            Part::Full => (0, pairs_of("head_dim that turns whole", head_dim)?, head_dim / 2),
            Part::Slice { offset, rotary_dim } => {
                let pairs = pairs_of("rotary_dim", rotary_dim)?;
                (at_most("rotary offset", offset, head_dim - rotary_dim)?, pairs, pairs)
            }
            Part::Proportional { turned } => {
                let pairs = pairs_of("head_dim that turns in proportion", head_dim)?;
                (0, at_most("turned pairs", turned, pairs)?, pairs)
            }
        };
        let distance = match self.style {
            PairStyle::Half => distance,
            PairStyle::Interleaved => 1,
        };
        Ok((pairs > 0).then_some(Turn { style: self.style, offset, pairs, distance }))
    }

    /// Pairs of the whole head, where rows of cos and sin may be that wide although fewer turn.
    pub(crate) fn all_pairs(&self, head_dim: usize) -> Option<usize> {
        matches!(self.part, Part::Proportional { .. }).then_some(head_dim / 2)
    }
}

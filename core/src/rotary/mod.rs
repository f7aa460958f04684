//! Rotary position embedding: frequencies, the geometry of a rotated head, and where cos and sin come from.
//!
//! Positions are integers and angles f64 until their cos and sin are taken; these are f32 whatever the type of Q and K.

mod frequencies;
mod given;
mod spec;
mod table;

pub use frequencies::{Frequencies, LongRopeFactors, Yarn, yarn_softmax_multiplier};
pub use given::CosSin;
pub use spec::RotarySpec;
pub use table::RotaryTable;

use crate::kernel::ANGLE_PAD;
use crate::{Error, MAX_HEAD_DIM, Place};

/// Elements of a row of cos or sin for `pairs` pairs, as kernels read it: a multiple of [`ANGLE_PAD`].
pub const fn padded(pairs: usize) -> usize {
    pairs.next_multiple_of(ANGLE_PAD)
}

/// How the elements of a head pair up for rotation. There is no default.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum PairStyle {
    /// Element `i` turns with element `i + distance` (GPT-NeoX, Llama in Hugging Face layout: `rotate_half`).
    Half,
    /// Element `2 i` turns with element `2 i + 1` (GPT-J, Llama in Meta layout).
    Interleaved,
}

/// Where the rotation of a sequence comes from.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum Rotary<'a> {
    /// The small table.
    Table(RotaryTable<'a>),
    /// The caller's own cos and sin.
    CosSin(CosSin<'a>),
}

impl<'a> From<RotaryTable<'a>> for Rotary<'a> {
    fn from(table: RotaryTable<'a>) -> Self {
        Rotary::Table(table)
    }
}

impl<'a> From<CosSin<'a>> for Rotary<'a> {
    fn from(given: CosSin<'a>) -> Self {
        Rotary::CosSin(given)
    }
}

impl Rotary<'_> {
    /// Pairs of a row.
    pub const fn pairs(&self) -> usize {
        match self {
            Rotary::Table(table) => table.pairs(),
            Rotary::CosSin(given) => given.pairs(),
        }
    }

    /// Pairs up to the last that turns, as far as that is known.
    pub(crate) const fn turned_pairs(&self) -> usize {
        match self {
            Rotary::Table(table) => table.turned_pairs(),
            Rotary::CosSin(given) => given.pairs(),
        }
    }

    pub(crate) const fn by_token(&self) -> bool {
        match self {
            Rotary::Table(_) => false,
            Rotary::CosSin(given) => given.is_by_token(),
        }
    }

    /// Checks that rows are as wide as the rotation; a proportional one may come with all pairs of the head.
    pub(crate) fn check_pairs(&self, pairs: usize, all_pairs: Option<usize>, what: Place) -> Result<(), Error> {
        let found = self.pairs();
        if found == pairs || Some(found) == all_pairs {
            Ok(())
        } else {
            Err(Error::Mismatch { what, expected: pairs, found })
        }
    }

    /// Checks that there are cos and sin for a position (a token, if rows are by token).
    pub(crate) fn check_position(&self, position: i64, what: Place) -> Result<(), Error> {
        let limit = match self {
            Rotary::Table(table) => i64::from(table.max_positions()),
            Rotary::CosSin(given) => (given.rows() as i64).min(1 << 32),
        };
        if (0..limit).contains(&position) {
            Ok(())
        } else {
            Err(Error::OutOfRange { what, value: i128::from(position), min: 0, max: i128::from(limit) - 1 })
        }
    }
}

/// Positions of a run of tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Positions<'a> {
    /// A token's position is its key index.
    Index,
    /// Consecutive positions from this one on.
    Start(u32),
    /// A position for each token.
    Explicit(&'a [u32]),
}

fn check_pairs_nonzero(pairs: usize) -> Result<(), Error> {
    let max = MAX_HEAD_DIM / 2;
    if pairs == 0 || pairs > max {
        return Err(Error::OutOfRange { what: "rotary pairs".into(), value: pairs as i128, min: 1, max: max as i128 });
    }
    Ok(())
}

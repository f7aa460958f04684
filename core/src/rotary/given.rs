//! Cos and sin arrays of the caller's.

use super::check_pairs_nonzero;
use crate::{Error, Slice};

/// What the rows of a [`CosSin`] stand for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum By {
    Position,
    Token,
}

/// Caller-supplied cos and sin, `[row, pair]`, any storage type, amplitude applied.
#[derive(Clone, Copy, Debug)]
pub struct CosSin<'a> {
    cos: Slice<'a>,
    sin: Slice<'a>,
    pairs: usize,
    rows: usize,
    by: By,
}

impl<'a> CosSin<'a> {
    /// Contiguous rows of `pairs` elements; row `p` belongs to position `p`.
    ///
    /// # Errors
    ///
    /// [`Error::OutOfRange`] for 0 or too many pairs, [`Error::Mismatch`] if `cos` and `sin` differ in length or that length
    /// is no whole number of rows, [`Error::DType`] if they differ in type.
    pub fn by_position(cos: impl Into<Slice<'a>>, sin: impl Into<Slice<'a>>, pairs: usize) -> Result<Self, Error> {
        let (cos, sin) = (cos.into(), sin.into());
        check_pairs_nonzero(pairs)?;
        if cos.dtype() != sin.dtype() {
            return Err(Error::DType { what: "sin".into(), expected: cos.dtype(), found: sin.dtype() });
        }
        if cos.len() != sin.len() {
            return Err(Error::Mismatch { what: "sin".into(), expected: cos.len(), found: sin.len() });
        }
        let rows = cos.len() / pairs;
        if rows * pairs != cos.len() {
            return Err(Error::Mismatch { what: "cos".into(), expected: rows * pairs, found: cos.len() });
        }
        Ok(CosSin { cos, sin, pairs, rows, by: By::Position })
    }

    /// As [`CosSin::by_position`], but row `t` belongs to key index `t` (and to the query of that index), whatever its
    /// position: 2-D rotation of image patches, for one.
    ///
    /// # Errors
    ///
    /// As [`CosSin::by_position`].
    pub fn by_token(cos: impl Into<Slice<'a>>, sin: impl Into<Slice<'a>>, pairs: usize) -> Result<Self, Error> {
        Ok(CosSin { by: By::Token, ..Self::by_position(cos, sin, pairs)? })
    }

    /// Pairs of a row.
    pub const fn pairs(&self) -> usize {
        self.pairs
    }

    /// Number of rows.
    pub const fn rows(&self) -> usize {
        self.rows
    }

    /// True if rows belong to tokens, not to positions.
    pub const fn is_by_token(&self) -> bool {
        matches!(self.by, By::Token)
    }

    /// Widens the start of a row into `cos` and `sin`, with zeros behind its end.
    ///
    /// # Panics
    ///
    /// If there is no such row.
    pub fn copy_row(&self, row: usize, cos: &mut [f32], sin: &mut [f32]) {
        assert!(row < self.rows);
        for (from, to) in [(self.cos, cos), (self.sin, sin)] {
            let at = row * self.pairs..(row + 1) * self.pairs;
            let n = self.pairs.min(to.len());
            let (head, tail) = to.split_at_mut(n);
            tail.fill(0.0);
            match from {
                Slice::F32(s) => head.copy_from_slice(&s[at][..n]),
                Slice::F16(s) => head.iter_mut().zip(&s[at]).for_each(|(to, from)| *to = from.to_f32()),
                Slice::Bf16(s) => head.iter_mut().zip(&s[at]).for_each(|(to, from)| *to = from.to_f32()),
            }
        }
    }
}

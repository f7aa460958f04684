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
    row_stride: usize,
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
        Self::by_position_strided(cos, sin, pairs, pairs)
    }

    /// As [`CosSin::by_position`], with `row_stride` elements from one row to the next: rows that hold each value
    /// twice, say, of which the first half is read. The last row may end with its pairs.
    ///
    /// # Errors
    ///
    /// As [`CosSin::by_position`], and [`Error::OutOfRange`] for a stride shorter than a row.
    pub fn by_position_strided(
        cos: impl Into<Slice<'a>>,
        sin: impl Into<Slice<'a>>,
        pairs: usize,
        row_stride: usize,
    ) -> Result<Self, Error> {
        let (cos, sin) = (cos.into(), sin.into());
        check_pairs_nonzero(pairs)?;
        if row_stride < pairs {
            return Err(Error::OutOfRange {
                what: "row stride".into(),
                value: row_stride as i128,
                min: pairs as i128,
                max: usize::MAX as i128,
            });
        }
        if cos.dtype() != sin.dtype() {
            return Err(Error::DType { what: "sin".into(), expected: cos.dtype(), found: sin.dtype() });
        }
        if cos.len() != sin.len() {
            return Err(Error::Mismatch { what: "sin".into(), expected: cos.len(), found: sin.len() });
        }
        let (whole, rest) = (cos.len() / row_stride, cos.len() % row_stride);
        if rest != 0 && rest < pairs {
            return Err(Error::Mismatch { what: "cos".into(), expected: whole * row_stride, found: cos.len() });
        }
        let rows = whole + usize::from(rest != 0);
        Ok(CosSin { cos, sin, pairs, row_stride, rows, by: By::Position })
    }

    /// As [`CosSin::by_position`], but row `t` belongs to key index `t` (and to the query of that index), whatever its
    /// position: 2-D rotation of image patches, for one.
    ///
    /// # Errors
    ///
    /// As [`CosSin::by_position`].
    pub fn by_token(cos: impl Into<Slice<'a>>, sin: impl Into<Slice<'a>>, pairs: usize) -> Result<Self, Error> {
        Self::by_token_strided(cos, sin, pairs, pairs)
    }

    /// As [`CosSin::by_token`], with `row_stride` elements from one row to the next.
    ///
    /// # Errors
    ///
    /// As [`CosSin::by_position_strided`].
    pub fn by_token_strided(
        cos: impl Into<Slice<'a>>,
        sin: impl Into<Slice<'a>>,
        pairs: usize,
        row_stride: usize,
    ) -> Result<Self, Error> {
        Ok(CosSin { by: By::Token, ..Self::by_position_strided(cos, sin, pairs, row_stride)? })
    }

    /// Pairs of a row.
    pub const fn pairs(&self) -> usize {
        self.pairs
    }

    /// Elements from one row to the next.
    pub const fn row_stride(&self) -> usize {
        self.row_stride
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
            let at = row * self.row_stride..row * self.row_stride + self.pairs;
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

//! What can be wrong with a description or a call. Every fault is found before anything is written.

use core::fmt;

/// Names the argument that an [`Error`] is about, and the sequence of the batch where one is to blame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// The argument or field, as the public API spells it.
    pub name: &'static str,
    /// Index of the sequence in the batch, or `None` for what belongs to the whole call.
    pub sequence: Option<usize>,
}

impl Place {
    /// `name` inside sequence `index` of a batch.
    pub const fn in_sequence(name: &'static str, index: usize) -> Self {
        Place { name, sequence: Some(index) }
    }
}

impl From<&'static str> for Place {
    fn from(name: &'static str) -> Self {
        Place { name, sequence: None }
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.sequence {
            Some(index) => write!(f, "sequence {index}: {}", self.name),
            None => f.write_str(self.name),
        }
    }
}

/// Why a description can't be planned or a call can't be prepared.
///
/// The message of each variant carries the offending values and says what would be right.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum Error {
    /// A number lies outside its range.
    OutOfRange {
        /// What the number is.
        what: Place,
        /// Its value.
        value: i128,
        /// Smallest value allowed.
        min: i128,
        /// Largest value allowed.
        max: i128,
    },
    /// A real number that has to be finite (and, where said, positive) is not.
    BadNumber {
        /// What the number is.
        what: Place,
        /// Its value.
        value: f64,
        /// What is required of it.
        need: &'static str,
    },
    /// Two sizes that must agree do not.
    Mismatch {
        /// Which size is wrong.
        what: Place,
        /// What it has to be.
        expected: usize,
        /// What it is.
        found: usize,
    },
    /// `heads_q` is no multiple of `heads_kv`.
    Heads {
        /// Query heads.
        heads_q: usize,
        /// Key and value heads.
        heads_kv: usize,
    },
    /// A buffer ends before the last element that the call would touch.
    TooShort {
        /// Which buffer.
        what: Place,
        /// Elements (bytes for scratch and workspace) needed.
        need: usize,
        /// Elements there.
        have: usize,
    },
    /// A size, offset or stride computation does not fit in `usize`.
    Overflow {
        /// Which computation.
        what: Place,
    },
    /// Rows that are written share memory.
    Overlap {
        /// Which buffer.
        what: Place,
        /// Stride between tokens, in elements.
        token_stride: usize,
        /// Stride between heads, in elements.
        head_stride: usize,
        /// Elements in a row.
        dim: usize,
    },
    /// Two sequences of a batch write the same rows.
    SequencesOverlap {
        /// Which tensor.
        what: Place,
        /// The other sequence.
        other: usize,
    },
    /// The innermost stride of a view is not 1.
    InnerStride {
        /// Which view.
        what: Place,
        /// Its innermost stride.
        stride: usize,
    },
    /// A view's element type differs from the described one.
    DType {
        /// Which view.
        what: Place,
        /// The described type.
        expected: crate::DType,
        /// The view's type.
        found: crate::DType,
    },
    /// An argument that the described operation needs is absent.
    Missing {
        /// Which argument.
        what: Place,
    },
    /// An argument was given that the described operation would ignore.
    Unexpected {
        /// Which argument.
        what: Place,
    },
    /// The combination is not implemented. Nothing else is run in its place.
    Unsupported {
        /// The feature or combination.
        what: &'static str,
    },
    /// A name that is no tier's.
    UnknownTier {
        /// The name, or its first 16 bytes.
        name: [u8; 16],
    },
    /// A tier was required that this build or this CPU does not have.
    TierUnavailable {
        /// The required tier.
        tier: crate::TierName,
        /// Why it can't be had.
        why: &'static str,
    },
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Error::OutOfRange { what, value, min, max } => {
                write!(f, "{what} is {value}, but must be in {min}..={max}")
            }
            Error::BadNumber { what, value, need } => write!(f, "{what} is {value}, but must be {need}"),
            Error::Mismatch { what, expected, found } => write!(f, "{what} is {found}, but must be {expected}"),
            Error::Heads { heads_q, heads_kv } => {
                write!(f, "heads_q {heads_q} is not a multiple of heads_kv {heads_kv}")
            }
            Error::TooShort { what, need, have } => write!(f, "{what} needs a length of {need}, but has {have}"),
            Error::Overflow { what } => write!(f, "{what}: the size does not fit in usize"),
            Error::Overlap { what, token_stride, head_stride, dim } => write!(
                f,
                "{what}: rows of {dim} overlap with token stride {token_stride} and head stride {head_stride}"
            ),
            Error::SequencesOverlap { what, other } => write!(f, "{what}: writes the same rows as sequence {other}"),
            Error::InnerStride { what, stride } => {
                write!(f, "{what}: the innermost stride is {stride}, but must be 1; copy the view first")
            }
            Error::DType { what, expected, found } => {
                write!(f, "{what} holds {found}, but was described as {expected}")
            }
            Error::Missing { what } => write!(f, "{what} is missing"),
            Error::Unexpected { what } => write!(f, "{what} was given, but this operation does not use it"),
            Error::Unsupported { what } => write!(f, "unsupported: {what}"),
            Error::UnknownTier { name } => {
                let len = name.iter().position(|&b| b == 0).unwrap_or(name.len());
                let name = core::str::from_utf8(&name[..len]).unwrap_or("?");
                write!(f, "\"{name}\" is not a tier; tiers are portable, avx2, avx512, neon")
            }
            Error::TierUnavailable { tier, why } => write!(f, "tier {tier} is unavailable: {why}"),
        }
    }
}

impl core::error::Error for Error {}

impl Error {
    /// [`Error::UnknownTier`] for `name`.
    pub fn unknown_tier(name: &str) -> Self {
        let mut bytes = [0; 16];
        bytes.iter_mut().zip(name.bytes()).for_each(|(to, from)| *to = from);
        Error::UnknownTier { name: bytes }
    }
}

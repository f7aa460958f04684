//! The small angle-addition table of cos and sin.

use super::check_pairs_nonzero;
use crate::Error;
use crate::kernel::ANGLE_PAD;

/// Positions that share a base row and differ in the fine level alone.
const FINE: usize = 128;
/// Rows of the middle level: a coarse row stands for `FINE * MIDDLE` positions.
const MIDDLE: usize = 128;

/// Cos and sin of every position from a few rows, by angle addition: `position = (a * 128 + b) * 128 + c`.
///
/// For 64 pairs (rotary_dim 128) and 1,048,576 positions it takes 256 KiB, where a row per position would take 512 MiB.
/// Fine rows (`c`) are f32. Middle and coarse rows (`b`, `a`) are kept as a float and its remainder and are combined in
/// f64, so a base row is rounded once and |error| stays below 2e-7 at amplitude 1. The storage is plain f32: built once
/// into a buffer of the caller's, or kept in flash. The table itself is a borrowed view, shared by batches, heads and layers.
#[derive(Clone, Copy, Debug)]
pub struct RotaryTable<'a> {
    fine: &'a [f32],
    middle: &'a [f32],
    coarse: &'a [f32],
    pairs: usize,
    turned: usize,
    max_positions: u32,
    attention_factor: f64,
}

/// Rows of the fine, middle and coarse level.
const fn rows(max_positions: u32) -> [usize; 3] {
    const fn at_most(n: usize, limit: usize) -> usize {
        if n < limit { n } else { limit }
    }
    let n = max_positions as usize;
    let blocks = n.div_ceil(FINE);
    [at_most(n, FINE), at_most(blocks, MIDDLE), blocks.div_ceil(MIDDLE)]
}

/// Floats of the three levels.
fn lens(pairs: usize, max_positions: u32) -> Option<[usize; 3]> {
    let [fine, middle, coarse] = rows(max_positions);
    let padded = pairs.checked_next_multiple_of(ANGLE_PAD)?;
    Some([
        fine.checked_mul(2)?.checked_mul(padded)?,
        middle.checked_mul(4)?.checked_mul(pairs)?,
        coarse.checked_mul(4)?.checked_mul(pairs)?,
    ])
}

impl<'a> RotaryTable<'a> {
    /// Floats of storage for `pairs` pairs and positions `0..max_positions`.
    ///
    /// # Errors
    ///
    /// [`Error::OutOfRange`] if either is 0 or `pairs` exceeds half the largest head_dim; [`Error::Overflow`].
    pub fn storage_len(pairs: usize, max_positions: u32) -> Result<usize, Error> {
        check_pairs_nonzero(pairs)?;
        if max_positions == 0 {
            return Err(Error::OutOfRange {
                what: "max_positions".into(),
                value: 0,
                min: 1,
                max: i128::from(u32::MAX),
            });
        }
        let sum = || lens(pairs, max_positions)?.into_iter().try_fold(0usize, usize::checked_add);
        sum().ok_or(Error::Overflow { what: "rotary table".into() })
    }

    /// Builds the table in `storage`. Pair `i` of position `p` turns by `p * inv_freq[i]`, computed in f64;
    /// `attention_factor` multiplies cos and sin.
    ///
    /// # Errors
    ///
    /// As [`RotaryTable::storage_len`], [`Error::TooShort`] for a shorter storage, [`Error::BadNumber`] for a frequency or
    /// factor that is not finite.
    pub fn build(
        inv_freq: &[f64],
        attention_factor: f64,
        max_positions: u32,
        storage: &'a mut [f32],
    ) -> Result<Self, Error> {
        let pairs = inv_freq.len();
        let need = Self::storage_len(pairs, max_positions)?;
        if storage.len() < need {
            return Err(Error::TooShort { what: "rotary table storage".into(), need, have: storage.len() });
        }
        if let Some(&value) = inv_freq.iter().find(|f| !f.is_finite()) {
            return Err(Error::BadNumber { what: "inv_freq".into(), value, need: "finite" });
        }
        let [fine_len, middle_len, coarse_len] = lens(pairs, max_positions).expect("storage_len checked it");
        let (fine, rest) = storage.split_at_mut(fine_len);
        let (middle, rest) = rest.split_at_mut(middle_len);
        let coarse = &mut rest[..coarse_len];
        let padded = pairs.next_multiple_of(ANGLE_PAD);
        fine.fill(0.0);
        for (c, row) in fine.chunks_exact_mut(2 * padded).enumerate() {
            for (i, f) in inv_freq.iter().enumerate() {
                let (sin, cos) = libm::sincos(c as f64 * f);
                row[i] = cos as f32;
                row[padded + i] = sin as f32;
            }
        }
        for (level, step) in [(middle, FINE), (coarse, FINE * MIDDLE)] {
            for (n, row) in level.chunks_exact_mut(4 * pairs).enumerate() {
                for (i, f) in inv_freq.iter().enumerate() {
                    let (sin, cos) = libm::sincos((n * step) as f64 * f);
                    for (part, x) in [(0, cos), (2, sin)] {
                        row[part * pairs + i] = x as f32;
                        row[(part + 1) * pairs + i] = (x - f64::from(x as f32)) as f32;
                    }
                }
            }
        }
        Self::from_storage(storage, pairs, max_positions, attention_factor)
    }

    /// The table that [`RotaryTable::build`] left in `storage`, with the same `pairs` and `max_positions`.
    ///
    /// # Errors
    ///
    /// As [`RotaryTable::build`].
    pub fn from_storage(
        storage: &'a [f32],
        pairs: usize,
        max_positions: u32,
        attention_factor: f64,
    ) -> Result<Self, Error> {
        let need = Self::storage_len(pairs, max_positions)?;
        if storage.len() < need {
            return Err(Error::TooShort { what: "rotary table storage".into(), need, have: storage.len() });
        }
        if !attention_factor.is_finite() {
            let what = "attention_factor".into();
            return Err(Error::BadNumber { what, value: attention_factor, need: "finite" });
        }
        let [fine_len, middle_len, coarse_len] = lens(pairs, max_positions).expect("storage_len checked it");
        let (fine, rest) = storage.split_at(fine_len);
        let (middle, rest) = rest.split_at(middle_len);
        let padded = pairs.next_multiple_of(ANGLE_PAD);
        // A pair with frequency 0 and amplitude 1 does not turn; at the end of the head that saves work, and keeps what
        // lies there from meeting a product with sin = 0.
        let turned = if attention_factor == 1.0 {
            let turns = |i: &usize| max_positions == 1 || fine[2 * padded..][padded + i] != 0.0;
            (0..pairs).rev().find(turns).map_or(0, |last| last + 1)
        } else {
            pairs
        };
        Ok(RotaryTable { fine, middle, coarse: &rest[..coarse_len], pairs, turned, max_positions, attention_factor })
    }

    /// Pairs of a row.
    pub const fn pairs(&self) -> usize {
        self.pairs
    }

    /// Pairs up to the last that turns at all.
    pub const fn turned_pairs(&self) -> usize {
        self.turned
    }

    /// Positions are `0..max_positions`.
    pub const fn max_positions(&self) -> u32 {
        self.max_positions
    }

    /// The first of the positions that share a base row with `position`.
    pub const fn base_of(position: u32) -> u32 {
        position - position % FINE as u32
    }

    /// Writes amplitude times cos and sin of `base_of(position)` for as many pairs as fit in `cos` and `sin`, and zeros
    /// behind them.
    ///
    /// # Panics
    ///
    /// If `position` is not below [`RotaryTable::max_positions`].
    pub fn base_row(&self, position: u32, cos: &mut [f32], sin: &mut [f32]) {
        assert!(position < self.max_positions);
        let (a, b) = (position as usize / (FINE * MIDDLE), position as usize / FINE % MIDDLE);
        let n = self.pairs;
        let (a, b) = (&self.coarse[4 * n * a..][..4 * n], &self.middle[4 * n * b..][..4 * n]);
        let whole =
            |row: &[f32], part: usize, i: usize| f64::from(row[part * n + i]) + f64::from(row[(part + 1) * n + i]);
        for (i, (cos, sin)) in cos.iter_mut().zip(sin.iter_mut()).enumerate() {
            (*cos, *sin) = if i < n {
                let (ca, sa, cb, sb) = (whole(a, 0, i), whole(a, 2, i), whole(b, 0, i), whole(b, 2, i));
                let factor = self.attention_factor;
                ((factor * (ca * cb - sa * sb)) as f32, (factor * (sa * cb + ca * sb)) as f32)
            } else {
                (0.0, 0.0)
            };
        }
    }

    /// Cos and sin of `position - base_of(position)`, padded with zeros to a multiple of [`ANGLE_PAD`].
    pub fn fine_row(&self, position: u32) -> (&'a [f32], &'a [f32]) {
        let padded = self.pairs.next_multiple_of(ANGLE_PAD);
        self.fine[position as usize % FINE * 2 * padded..][..2 * padded].split_at(padded)
    }

    /// Cos and sin of one pair, put together as the portable tier does it.
    ///
    /// # Panics
    ///
    /// If `position` or `pair` is out of range.
    pub fn cos_sin(&self, position: u32, pair: usize) -> (f32, f32) {
        assert!(pair < self.pairs);
        let (mut cos, mut sin) = ([0.0; crate::MAX_HEAD_DIM / 2], [0.0; crate::MAX_HEAD_DIM / 2]);
        self.base_row(position, &mut cos[..self.pairs], &mut sin[..self.pairs]);
        let (fine_cos, fine_sin) = self.fine_row(position);
        let (bc, bs, fc, fs) = (cos[pair], sin[pair], fine_cos[pair], fine_sin[pair]);
        (bc * fc - bs * fs, bs * fc + bc * fs)
    }
}

//! The small angle-addition table of cos and sin.

use super::{check_pairs_nonzero, padded};
use crate::{Error, MAX_HEAD_DIM};

/// Bits of a position that each level but the last stands for.
const BITS: u32 = 5;
/// Rows of such a level.
const ROWS: usize = 1 << BITS;
/// Levels, from single positions up.
const LEVELS: usize = 4;

/// Cos and sin of every position from a few rows, by angle addition: a position is `a * 32^3 + b * 32^2 + c * 32 + d`, and
/// there is a row for each `a`, `b`, `c` and `d`.
///
/// For 64 pairs (rotary_dim 128) and 1,048,576 positions it takes 128 KiB, where an f32 row per position would take 512 MiB.
/// Rows are f64 and so are the additions: cos and sin are rounded once, to the nearest f32 but for some ties, whatever the
/// position. (Rows in f32 were measured to break the accuracy of scores where a query and a key are aligned and large.) The storage is built once into a buffer of the caller's or kept in
/// flash. The table itself is a borrowed view, shared by batches, heads and layers.
#[derive(Clone, Copy, Debug)]
pub struct RotaryTable<'a> {
    levels: [&'a [f64]; LEVELS],
    pairs: usize,
    turned: usize,
    max_positions: u32,
    attention_factor: f64,
}

/// Elements of a row: cosines, then sines, each padded.
const fn row_len(pairs: usize) -> usize {
    2 * padded(pairs)
}

/// Rows of each level for `max_positions` positions.
fn rows(max_positions: u32) -> [usize; LEVELS] {
    core::array::from_fn(|level| {
        let used = (max_positions as usize).div_ceil(1 << (BITS * level as u32));
        if level + 1 < LEVELS { used.min(ROWS) } else { used }
    })
}

fn check_factor(value: f64) -> Result<(), Error> {
    if value.is_finite() {
        Ok(())
    } else {
        Err(Error::BadNumber { what: "attention_factor".into(), value, need: "finite" })
    }
}

impl<'a> RotaryTable<'a> {
    /// Elements of storage for `pairs` pairs and positions `0..max_positions`.
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
        rows(max_positions)
            .iter()
            .sum::<usize>()
            .checked_mul(row_len(pairs))
            .ok_or(Error::Overflow { what: "rotary table".into() })
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
        storage: &'a mut [f64],
    ) -> Result<Self, Error> {
        let pairs = inv_freq.len();
        let need = Self::storage_len(pairs, max_positions)?;
        if storage.len() < need {
            return Err(Error::TooShort { what: "rotary table storage".into(), need, have: storage.len() });
        }
        if let Some(&value) = inv_freq.iter().find(|f| !f.is_finite()) {
            return Err(Error::BadNumber { what: "inv_freq".into(), value, need: "finite" });
        }
        check_factor(attention_factor)?;
        let mut all = storage[..need].chunks_exact_mut(row_len(pairs));
        for (level, count) in rows(max_positions).into_iter().enumerate() {
            for (n, row) in all.by_ref().take(count).enumerate() {
                row.fill(0.0);
                let (cos, sin) = row.split_at_mut(row_len(pairs) / 2);
                let position = (n << (BITS * level as u32)) as f64;
                for ((f, cos), sin) in inv_freq.iter().zip(cos).zip(sin) {
                    (*sin, *cos) = libm::sincos(position * f);
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
        storage: &'a [f64],
        pairs: usize,
        max_positions: u32,
        attention_factor: f64,
    ) -> Result<Self, Error> {
        let need = Self::storage_len(pairs, max_positions)?;
        if storage.len() < need {
            return Err(Error::TooShort { what: "rotary table storage".into(), need, have: storage.len() });
        }
        check_factor(attention_factor)?;
        let mut rest = storage;
        let levels = rows(max_positions).map(|count| {
            let (level, others) = rest.split_at(count * row_len(pairs));
            rest = others;
            level
        });
        // A pair with frequency 0 and amplitude 1 does not turn; at the end of the head that saves work, and keeps what
        // lies there from meeting a product with sin = 0. Position 1 shows which pairs turn.
        let turned = if attention_factor == 1.0 && max_positions > 1 {
            let sines = &levels[0][row_len(pairs) + row_len(pairs) / 2..][..pairs];
            sines.iter().rposition(|sin| *sin != 0.0).map_or(0, |last| last + 1)
        } else {
            pairs
        };
        Ok(RotaryTable { levels, pairs, turned, max_positions, attention_factor })
    }

    /// The same table with another amplitude.
    pub(crate) const fn with_attention_factor(mut self, attention_factor: f64) -> Self {
        self.attention_factor = attention_factor;
        self
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
        position - position % ROWS as u32
    }

    /// Writes amplitude times cos and sin of `base_of(position)` for as many pairs as fit in `cos` and `sin` (at most a padded
    /// row).
    ///
    /// # Panics
    ///
    /// If `position` is not below [`RotaryTable::max_positions`].
    pub fn base_row(&self, position: u32, cos: &mut [f64], sin: &mut [f64]) {
        assert!(position < self.max_positions);
        let [(cc, sc), (cb, sb), (ca, sa)] = [1, 2, 3].map(|level| self.row(level, position));
        for i in 0..cos.len() {
            let (c, s) = (cc[i] * cb[i] - sc[i] * sb[i], sc[i] * cb[i] + cc[i] * sb[i]);
            cos[i] = self.attention_factor * (c * ca[i] - s * sa[i]);
            sin[i] = self.attention_factor * (s * ca[i] + c * sa[i]);
        }
    }

    /// Cos and sin of `position - base_of(position)`, [`padded`] with zeros.
    pub fn fine_row(&self, position: u32) -> (&'a [f64], &'a [f64]) {
        self.row(0, position)
    }

    fn row(&self, level: usize, position: u32) -> (&'a [f64], &'a [f64]) {
        let n = position as usize >> (BITS * level as u32);
        let n = if level + 1 < LEVELS { n % ROWS } else { n };
        let len = row_len(self.pairs);
        self.levels[level][n * len..][..len].split_at(len / 2)
    }

    /// Cos and sin of one pair, amplitude applied.
    ///
    /// # Panics
    ///
    /// If `position` or `pair` is out of range.
    pub fn cos_sin(&self, position: u32, pair: usize) -> (f32, f32) {
        assert!(pair < self.pairs);
        let (mut cos, mut sin) = ([0.0; MAX_HEAD_DIM / 2], [0.0; MAX_HEAD_DIM / 2]);
        self.base_row(position, &mut cos[..=pair], &mut sin[..=pair]);
        let (fine_cos, fine_sin) = self.fine_row(position);
        let (bc, bs, fc, fs) = (cos[pair], sin[pair], fine_cos[pair], fine_sin[pair]);
        ((bc * fc - bs * fs) as f32, (bs * fc + bc * fs) as f32)
    }
}

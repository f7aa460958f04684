//! Produces the cos and sin rows of a run of tokens in a caller's workspace, whatever they come from.

use crate::arena;
use crate::attend::FlatRows;
use crate::kernel::{Angles, Kernels, MAX_TILE, Rotation, Turn};
use crate::rotary::{Positions, Rotary, RotaryTable};
use core::ops::Range;

/// Angle rows of one sequence's queries or keys.
pub(crate) struct AngleRows<'a> {
    kernels: &'static Kernels,
    turn: Turn,
    rotary: Rotary<'a>,
    positions: Positions<'a>,
    /// Key index of the first token.
    index: i64,
    /// Elements of a padded row.
    padded: usize,
    cos: &'a mut [f32],
    sin: &'a mut [f32],
    base_cos: &'a mut [f64],
    base_sin: &'a mut [f64],
    /// The position whose base row is held.
    base: Option<u32>,
    /// The token last filled, and its row.
    last: Option<(usize, usize)>,
    /// Row lists of the last fill.
    at: [usize; MAX_TILE],
    rows: usize,
}

impl<'a> AngleRows<'a> {
    /// `floats`, a run of an arena, has room for cos and sin of some rows and, in f64, of one base row, `padded` each.
    pub(crate) fn new(
        kernels: &'static Kernels,
        turn: Turn,
        rotary: Rotary<'a>,
        (positions, index): (Positions<'a>, i64),
        padded: usize,
        floats: &'a mut [f32],
    ) -> Self {
        let (base, rest) = floats.split_at_mut(4 * padded);
        let (base_cos, base_sin) = arena::as_f64(base).split_at_mut(padded);
        let (cos, sin) = rest.split_at_mut(rest.len() / 2);
        let turn = Turn { pairs: turn.pairs.min(rotary.turned_pairs()), ..turn };
        AngleRows {
            kernels,
            turn,
            rotary,
            positions,
            index,
            padded,
            cos,
            sin,
            base_cos,
            base_sin,
            base: None,
            last: None,
            at: [0; MAX_TILE],
            rows: 0,
        }
    }

    /// The angles of tokens `tokens`, one row each.
    pub(crate) fn fill(&mut self, tokens: Range<usize>) {
        self.fill_grouped(tokens, 1);
    }

    /// The angles of flattened rows `rows`: `group` rows share a token.
    pub(crate) fn fill_grouped(&mut self, rows: Range<usize>, group: usize) {
        self.rows = rows.len();
        for (i, (token, _)) in FlatRows::new(rows, group).enumerate() {
            let row = match self.last {
                Some((last, row)) if last == token => {
                    if i == 0 && row > 0 {
                        // The last token of the fill before goes on: no new angles.
                        let from = row * self.padded..(row + 1) * self.padded;
                        self.cos.copy_within(from.clone(), 0);
                        self.sin.copy_within(from, 0);
                    }
                    if i == 0 { 0 } else { row }
                }
                last => {
                    let row = if i == 0 { 0 } else { last.map_or(0, |(_, row)| row + 1) };
                    self.fill_row(row, token);
                    row
                }
            };
            self.last = Some((token, row));
            self.at[i] = row * self.padded;
        }
    }

    /// True if consecutive tokens have consecutive positions, whose angles add up.
    pub(crate) fn is_consecutive(&self) -> bool {
        matches!(self.rotary, Rotary::Table(_)) && !matches!(self.positions, Positions::Explicit(_))
    }

    /// The angles by which tokens differ from the one `0..rows` before them.
    pub(crate) fn fill_differences(&mut self, rows: usize) {
        self.rows = rows;
        for row in 0..rows {
            self.at[row] = row * self.padded;
            self.fill_position(row, 0, row as u32);
        }
    }

    /// The same angles with amplitude 1, if they come from a table.
    pub(crate) fn unscaled(mut self) -> Self {
        if let Rotary::Table(table) = &mut self.rotary {
            *table = table.with_attention_factor(1.0);
        }
        self
    }

    /// The angles that turn `rows` rows back from `token` to position 0.
    pub(crate) fn fill_back(&mut self, token: usize, rows: usize) {
        self.rows = rows;
        self.at[..rows].fill(0);
        self.fill_row(0, token);
        self.sin[..self.padded].iter_mut().for_each(|sin| *sin = -*sin);
    }

    fn fill_row(&mut self, row: usize, token: usize) {
        let index = self.index + token as i64;
        let position = match self.positions {
            // In a prepared call, only rows that see no key can have a position out of range.
            Positions::Index => u32::try_from(index).unwrap_or(0),
            Positions::Start(start) => start.saturating_add(token as u32),
            Positions::Explicit(list) => list[token],
        };
        self.fill_position(row, index, position);
    }

    fn fill_position(&mut self, row: usize, index: i64, position: u32) {
        if self.turn.pairs == 0 {
            return;
        }
        let at = row * self.padded..(row + 1) * self.padded;
        let (cos, sin) = (&mut self.cos[at.clone()], &mut self.sin[at]);
        match self.rotary {
            Rotary::CosSin(given) => {
                let row = if given.is_by_token() { usize::try_from(index).unwrap_or(0) } else { position as usize };
                if row < given.rows() {
                    given.copy_row(row, cos, sin);
                } else {
                    cos.fill(0.0);
                    sin.fill(0.0);
                }
            }
            Rotary::Table(table) => {
                let position = position.min(table.max_positions() - 1);
                let base = RotaryTable::base_of(position);
                if self.base != Some(base) {
                    table.base_row(position, self.base_cos, self.base_sin);
                    self.base = Some(base);
                }
                let (fine_cos, fine_sin) = table.fine_row(position);
                let (fine_cos, fine_sin) = (&fine_cos[..self.padded], &fine_sin[..self.padded]);
                // SAFETY: the plan holds the tier of these kernels, so the CPU can run them.
                unsafe { (self.kernels.angles)(self.base_cos, self.base_sin, fine_cos, fine_sin, cos, sin) };
            }
        }
    }

    /// The rotation of the rows last filled; `None` if the frequencies turn nothing.
    pub(crate) fn rotation(&self) -> Option<Rotation<'_>> {
        let angles = Angles { cos: self.cos, sin: self.sin, at: &self.at[..self.rows] };
        (self.turn.pairs > 0).then_some(Rotation { turn: self.turn, angles })
    }
}

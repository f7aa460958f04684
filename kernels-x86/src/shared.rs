//! What the tiers share because it names no vector: which elements of a row turn, rows and angles checked against their
//! slices, rows to be asked for. Loads, arithmetic and layouts are each tier's own.

use core::arch::x86_64::{_MM_HINT_T0, _MM_HINT_T1, _mm_prefetch};
use rotile_core::PairStyle;
use rotile_core::kernel::{Rotation, Rows};

/// What happens to a run of elements of a row.
#[derive(Clone, Copy)]
pub(crate) enum Kind {
    /// They pass through.
    Copy,
    /// They are the first elements of half-style pairs; the second ones are `distance` on, and turn with them.
    First { distance: usize },
    /// They are the second elements of half-style pairs: done where the first ones are.
    Second,
    /// They are interleaved pairs.
    Interleaved,
}

/// A run of elements that are treated alike.
#[derive(Clone, Copy)]
pub(crate) struct Segment {
    pub(crate) kind: Kind,
    pub(crate) start: usize,
    pub(crate) end: usize,
}

/// The runs of a row of `dim` elements, in order; empty ones included.
#[inline]
pub(crate) fn segments(rotation: Option<&Rotation<'_>>, dim: usize) -> [Segment; 5] {
    let cut = |at: [usize; 6], kinds: [Kind; 5]| {
        // Sorted up to `dim`, all runs lie in the row and do not overlap, whatever overflowed on the way here.
        assert!(at.is_sorted(), "rotated elements overlap or leave the row");
        core::array::from_fn(|i| Segment { kind: kinds[i], start: at[i], end: at[i + 1] })
    };
    let none = Kind::Copy;
    let Some(turn) = rotation.map(|r| r.turn) else {
        return cut([0, dim, dim, dim, dim, dim], [none; 5]);
    };
    let (a, distance) = (turn.offset, turn.distance);
    match turn.style {
        PairStyle::Interleaved => {
            let b = a + 2 * turn.pairs;
            cut([0, a, b, dim, dim, dim], [none, Kind::Interleaved, none, none, none])
        }
        _ => {
            let (b, c, d) = (a + turn.pairs, a + distance, a + distance + turn.pairs);
            cut([0, a, b, c, d, dim], [none, Kind::First { distance }, none, Kind::Second, none])
        }
    }
}

/// A row and its angles (dangling without a rotation), as [`CheckedRows`] gives them.
#[derive(Clone, Copy)]
pub(crate) struct Row<T> {
    pub(crate) data: *const T,
    pub(crate) cos: *const f32,
    pub(crate) sin: *const f32,
}

/// Rows that have been checked against their slices.
pub(crate) struct CheckedRows<'a, T> {
    data: *const T,
    at: &'a [usize],
    cos: *const f32,
    sin: *const f32,
    angles_at: &'a [usize],
}

impl<'a, T: Copy> CheckedRows<'a, T> {
    /// Checks that every row has `dim` readable elements, and angles for all pairs up to a multiple of `ANGLE_PAD`.
    #[inline]
    pub(crate) fn new(data: &'a [T], rows: &Rows<'a>, rotation: Option<&Rotation<'a>>) -> Self {
        // `data` is what `rows` lie in, its type known.
        assert_eq!(data.len(), rows.data.len());
        rows.check();
        let (mut cos, mut sin, mut angles_at) = (core::ptr::dangling(), core::ptr::dangling(), &[][..]);
        if let Some(Rotation { turn, angles }) = rotation {
            let len = angles.cos.len().min(angles.sin.len());
            let padded = rotile_core::rotary::padded(turn.pairs);
            (cos, sin, angles_at) = (angles.cos.as_ptr(), angles.sin.as_ptr(), &angles.at[..rows.at.len()]);
            for &at in angles_at {
                assert!(at <= len && len - at >= padded, "angles leave their slices");
            }
        }
        CheckedRows { data: data.as_ptr(), at: rows.at, cos, sin, angles_at }
    }

    /// N rows from `j` on, and the index of their first. The last group overlaps the one before; fewer than N rows repeat the
    /// last one. Either way a row has the same result, and there is one body for all.
    #[inline(always)]
    pub(crate) fn group<const N: usize>(&self, j: usize) -> (usize, [Row<T>; N]) {
        let rows = self.at.len();
        let first = j.min(rows.saturating_sub(N));
        let mut group = [self.row(first); N];
        let mut k = 1;
        while k < N {
            group[k] = self.row((first + k).min(rows - 1));
            k += 1;
        }
        (first, group)
    }

    /// Row `r`.
    #[inline]
    pub(crate) fn row(&self, r: usize) -> Row<T> {
        let angles = if self.angles_at.is_empty() { 0 } else { self.angles_at[r] };
        Row {
            data: self.data.wrapping_add(self.at[r]),
            cos: self.cos.wrapping_add(angles),
            sin: self.sin.wrapping_add(angles),
        }
    }
}

// How keys turn on the way through the few-row scores: compiled in, because choosing anew for every few keys costs as much as
// they do.

/// Not at all.
pub(crate) const PLAIN: u8 = 0;
/// Half-style pairs.
pub(crate) const HALF: u8 = 1;
/// Interleaved pairs.
pub(crate) const INTERLEAVED: u8 = 2;

/// Runs a block for each vector of a range of elements: `at` is its first element, `n` the number of lanes, all `LANES` (of
/// the module that calls) and known at compile time in all but a last one. (A closure would be compiled once for both, and called.)
macro_rules! each_vector {
    ($start:ident..$end:ident, |$at:ident, $n:ident| $body:block) => {{
        let mut $at = $start;
        while $at + LANES <= $end {
            let $n = LANES;
            $body
            $at += LANES;
        }
        if $at < $end {
            let $n = $end - $at;
            $body
        }
    }};
}
pub(crate) use each_vector;

/// Calls `$kernel(data, ...)` with the elements of a slice, whatever their type.
macro_rules! by_type {
    ($slice:expr, $kernel:path, $($arg:expr),*) => {
        match $slice {
            rotile_core::Slice::F32(data) => $kernel(data, $($arg),*),
            rotile_core::Slice::F16(data) => $kernel(data, $($arg),*),
            rotile_core::Slice::Bf16(data) => $kernel(data, $($arg),*),
            other => unreachable!("no kernel for {}", other.dtype()),
        }
    };
}
pub(crate) use by_type;

/// See [`rotile_core::kernel::Kernels::prefetch`]. Into L2: a line on its way to L1 holds one of the few buffers that the
/// tiles' own loads need.
pub(crate) fn prefetch(start: *const u8, bytes: usize) {
    ask::<_MM_HINT_T1>(start, bytes);
}

#[inline]
fn ask<const HINT: i32>(start: *const u8, bytes: usize) {
    const LINE: usize = 64;
    let end = start.wrapping_add(bytes);
    let mut line = start.wrapping_sub(start.addr() % LINE);
    while line < end {
        // SAFETY: SSE is part of every x86-64 CPU, and a hint never faults.
        unsafe { _mm_prefetch::<HINT>(line.cast()) };
        line = line.wrapping_add(LINE);
    }
}

/// Rows to be asked for ahead of use. Hints only: nothing is read through it.
pub(crate) struct Ahead<'a> {
    base: *const u8,
    at: &'a [usize],
    /// Bytes of an element.
    size: usize,
    /// Bytes of a row.
    bytes: usize,
}

impl<'a> Ahead<'a> {
    /// `rows`, or none.
    pub(crate) fn new(rows: Option<Rows<'a>>) -> Self {
        let Some(rows) = rows else { return Ahead { base: core::ptr::null(), at: &[], size: 0, bytes: 0 } };
        let size = rows.data.dtype().size();
        Ahead { base: rows.data.address(0), at: rows.at, size, bytes: rows.dim * size }
    }

    /// Asks for the cache lines of these rows, as far as there are such rows.
    #[cfg(feature = "avx512")]
    #[inline(never)]
    pub(crate) fn ask_each(&self, rows: core::ops::Range<usize>) {
        for r in rows {
            self.ask(r);
        }
    }

    /// Asks for the cache lines of row `r`, if there is such a row.
    #[inline]
    pub(crate) fn ask(&self, r: usize) {
        if r < self.at.len() {
            // Into L1: used within a thousand cycles.
            ask::<_MM_HINT_T0>(self.base.wrapping_add(self.at[r].wrapping_mul(self.size)), self.bytes);
        }
    }
}

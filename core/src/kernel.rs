//! The seam between the drivers and the tiers: what a tile kernel gets and what it owes.
//!
//! A tier is one static [`Kernels`] table of functions over slices. No SIMD type crosses it, and no function in it
//! knows of heads, batches, masks or tasks: those are the drivers' business. Packing layouts marked *private* belong
//! to the tier and are only ever read back by functions of the same table.

use crate::{PairStyle, Slice, SliceMut};
use core::fmt;

/// Upper bound of [`Kernels::mr`] and [`Kernels::nr`], so that drivers can keep row lists on the stack.
pub const MAX_TILE: usize = 64;

/// Upper bound of [`Kernels::sum_run`], for the same reason.
pub const MAX_RUN: usize = 128;

/// Angle rows are padded to a multiple of this many pairs, so that kernels may load cos and sin in whole vectors.
pub const ANGLE_PAD: usize = 16;

/// Where the run of length `run` that holds `from` ends, at most `to`: see [`Kernels::sum_run`].
#[inline]
pub const fn run_end(from: usize, to: usize, run: usize) -> usize {
    let end = (from / run + 1) * run;
    if end < to { end } else { to }
}

/// Rows of one matrix, wherever they lie: row `r` is `data[at[r]..at[r] + dim]`.
///
/// The list of offsets is what makes strided, grouped and paged storage the same thing to a kernel.
#[derive(Clone, Copy, Debug)]
pub struct Rows<'a> {
    /// The elements.
    pub data: Slice<'a>,
    /// Offset of each row in `data`.
    pub at: &'a [usize],
    /// Elements in a row, at least 1.
    pub dim: usize,
}

impl Rows<'_> {
    /// True if no element is infinite or NaN.
    pub(crate) fn is_finite(&self) -> bool {
        self.at.iter().all(|&at| match self.data {
            Slice::F32(x) => x[at..][..self.dim].iter().all(|x| x.is_finite()),
            Slice::F16(x) => x[at..][..self.dim].iter().all(|x| x.is_finite()),
            Slice::Bf16(x) => x[at..][..self.dim].iter().all(|x| x.is_finite()),
        })
    }

    /// Checks that every row lies in `data`.
    ///
    /// # Panics
    ///
    /// If one does not.
    #[inline]
    pub fn check(&self) {
        let len = self.data.len();
        for &at in self.at {
            assert!(at <= len && len - at >= self.dim, "a row leaves its slice");
        }
    }
}

/// Elements from the start of the first of `rows` rows of `len`, at least one, to the end of the last.
///
/// # Panics
///
/// If they reach beyond the address space.
#[inline]
pub fn span(rows: usize, stride: usize, len: usize) -> usize {
    let before = (rows - 1).checked_mul(stride);
    before.and_then(|n| n.checked_add(len)).expect("rows reach beyond the address space")
}

/// Checks the lengths of [`Kernels::angles`], and returns the common one.
///
/// # Panics
///
/// If they differ, or are no multiple of [`ANGLE_PAD`].
#[inline]
pub fn check_angles(base: [&[f64]; 2], fine: [&[f64]; 2], cos: &[f32], sin: &[f32]) -> usize {
    let len = cos.len();
    // One by one: compared as an array, they are stored and read back as vectors, which waits for the stores.
    for other in [base[0].len(), base[1].len(), fine[0].len(), fine[1].len(), sin.len()] {
        assert!(other == len, "angles of {len} and {other} elements");
    }
    assert!(len.is_multiple_of(ANGLE_PAD), "angles of {len} elements");
    len
}

/// Checks the lengths of [`Kernels::scores`] for tiles of `mr` by `nr`, and returns the number of panels of keys.
///
/// # Panics
///
/// If the panel of queries or the scores are too short.
#[inline]
pub fn check_scores(q: &[f32], k: &[f32], dim: usize, s: &[f32], s_stride: usize, [mr, nr]: [usize; 2]) -> usize {
    let panels = k.len() / (nr * dim);
    assert!(q.len() / mr >= dim && s.len() >= span(mr, s_stride, panels * nr), "queries or scores are too short");
    panels
}

/// Which elements of a row turn together.
///
/// Pair `i` is `(offset + i, offset + i + distance)` for [`PairStyle::Half`] and
/// `(offset + 2 i, offset + 2 i + 1)` for [`PairStyle::Interleaved`] (then `distance` is 1). For `Half`,
/// `pairs <= distance`: the two runs never overlap. Elements in no pair pass through unchanged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Turn {
    /// How elements pair up.
    pub style: PairStyle,
    /// First element of the first pair.
    pub offset: usize,
    /// Number of pairs, at least 1.
    pub pairs: usize,
    /// Distance between the two elements of a pair.
    pub distance: usize,
}

impl Turn {
    /// Indices of the two elements of pair `i`.
    pub const fn pair(&self, i: usize) -> (usize, usize) {
        match self.style {
            PairStyle::Half => (self.offset + i, self.offset + i + self.distance),
            PairStyle::Interleaved => (self.offset + 2 * i, self.offset + 2 * i + 1),
        }
    }

    /// One past the last element that turns.
    pub const fn end(&self) -> usize {
        self.pair(self.pairs - 1).1 + 1
    }
}

/// Cos and sin of the rotation of each row: row `r` starts at `cos[at[r]]` and `sin[at[r]]`.
///
/// From every start there are at least `pairs` rounded up to [`ANGLE_PAD`] elements in both, all of them finite.
#[derive(Clone, Copy, Debug)]
pub struct Angles<'a> {
    /// Cosines, amplitude applied.
    pub cos: &'a [f32],
    /// Sines, amplitude applied.
    pub sin: &'a [f32],
    /// Where each row's angles start.
    pub at: &'a [usize],
}

/// A rotation of rows: `x' = fma(x, cos, -(y * sin))`, `y' = fma(y, cos, x * sin)`.
///
/// Every kernel of a tier must use exactly these operations (a tier without fused multiply-add may be more exact, never
/// less), so that by the same angles a key has the same bits whether it is rotated into a cache, into a panel or on the fly.
#[derive(Clone, Copy, Debug)]
pub struct Rotation<'a> {
    /// Which elements.
    pub turn: Turn,
    /// By which angles.
    pub angles: Angles<'a>,
}

/// Running maximum and sum of one row's softmax, in base 2.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RowState {
    /// The running maximum, rounded up to an integer, so that every rescale is an exact power of two; -inf before the
    /// first visible key.
    pub max: f32,
    /// Sum of `2^(s - max)`.
    pub sum: f32,
}

impl RowState {
    /// No key seen yet.
    pub const EMPTY: RowState = RowState { max: f32::NEG_INFINITY, sum: 0.0 };
}

/// Names of the kernels that a plan can print; each follows `<op>[_<dtypes>][_<MR>x<NR>]_<tier>`.
#[derive(Clone, Copy, Debug)]
pub struct KernelNames {
    /// The prefill score tile.
    pub scores: &'static str,
    /// The prefill weighted sum.
    pub weighted_sum: &'static str,
    /// The few-row score pass.
    pub decode_scores: &'static str,
    /// The few-row weighted sum.
    pub decode_sum: &'static str,
    /// The row rotation.
    pub load: &'static str,
}

/// The functions of one tier.
///
/// Each is `unsafe` for one reason: it may use every instruction of the tier, so **the CPU must have the tier's
/// features** (which holding a [`Tier`] proves). None ever leaves its slices: where lengths do not fit it panics, if it
/// notices at all; drivers never let that happen. Row lists may be shorter than a tile: functions say what they do with the rest.
#[derive(Debug)]
#[allow(clippy::type_complexity)] // the signatures are the contract
pub struct Kernels {
    /// Which tier this is.
    pub tier: TierName,
    /// Query rows of a tile.
    pub mr: usize,
    /// Key columns of a score tile. Key tiles are multiples of it.
    pub nr: usize,
    /// Value columns of a weighted-sum tile; value rows are padded to a multiple of it.
    pub nv: usize,
    /// Most query rows that the `decode` functions take in one call.
    pub decode_rows: usize,
    /// The products of a score are summed in runs of this many, at multiples of it: a run is one chain of multiply-adds from
    /// 0, and is then added to the sum of the runs before. In one long chain, like terms round alike: in `r` of `n` the error
    /// grows to `r / 3` roundings.
    pub dot_run: usize,
    /// The same for weighted values. `n` equal terms in runs of `r` are off by up to `(r + n / r) / 3` roundings, which is
    /// least about `r = sqrt(n)`: 128 suits thousands of keys. (In one chain, 8,192 equal weights over rising values were off
    /// by 1.4e-4 of the largest. AVX2's tiles reach 84 to 90 % of FMA peak in runs of 32, 91 to 94 % in runs of 64, 96 % in
    /// runs of 128 and in one chain.)
    pub sum_run: usize,
    /// For messages.
    pub names: KernelNames,

    /// `angles(base_cos, base_sin, fine_cos, fine_sin, cos, sin)`: the sums of two angles, element by element, in f64 and
    /// rounded once: `cos = bc * fc - bs * fs`, `sin = bs * fc + bc * fs`. All six have the same length, a multiple of
    /// [`ANGLE_PAD`].
    pub angles: unsafe fn(&[f64], &[f64], &[f64], &[f64], &mut [f32], &mut [f32]),

    /// `prefetch(start, bytes)`: asks for the cache lines of memory that will soon be read or written: a hint, nothing is
    /// accessed, and any address will do.
    pub prefetch: fn(*const u8, usize),

    /// `load(rows, rotation, scale, out, out_stride)`: widens, rotates and multiplies by `scale` (1 leaves the bits
    /// alone), and writes row `r` to `out[r * out_stride..][..dim]`. Writes nothing else.
    pub load: unsafe fn(Rows<'_>, Option<Rotation<'_>>, f32, &mut [f32], usize),

    /// `store(src, factor, dst)`: `dst[i] = src[i] * factor`, rounded to f32 and then to `dst`'s type (to nearest, ties to even);
    /// equal lengths. A factor of 1 leaves f32 bits alone.
    pub store: unsafe fn(&[f32], f32, SliceMut<'_>),

    /// `pack_q(rows, rotation, scale, panel)`: up to `mr` query rows, rotated and scaled, into one *private* panel of
    /// `mr * dim` elements. Missing rows become zeros.
    pub pack_q: unsafe fn(Rows<'_>, Option<Rotation<'_>>, f32, &mut [f32]),

    /// `pack_k(rows, rotation, panel)`: up to `nr` key rows, rotated, into one *private* panel of `nr * dim` elements.
    /// Missing rows become zeros.
    pub pack_k: unsafe fn(Rows<'_>, Option<Rotation<'_>>, &mut [f32]),

    /// `pack_v(rows, first, keys, tile) -> finite`: widens value rows into a tile of column panels: element `c` of the
    /// key at index `first + r` goes to `tile[(c / nv) * keys * nv + (first + r) * nv + c % nv]`. Columns from `dim`
    /// up to the next multiple of `nv` become zeros. Returns false if any element is infinite or NaN.
    pub pack_v: unsafe fn(Rows<'_>, usize, usize, &mut [f32]) -> bool,

    /// `scores(q_panel, k_panels, dim, s, s_stride)`: for each of the `k_panels.len() / (nr * dim)` panels `p`,
    /// `s[r * s_stride + p * nr + c] = q_r . k_(p, c)` for all `mr` rows, summed in runs of `dot_run` elements.
    pub scores: unsafe fn(&[f32], &[f32], usize, &mut [f32], usize),

    /// `adjust(...) -> hidden`: turns a row of dot products into scores in base 2 where there is more to do than to scale
    /// them: softcap, ALiBi, bias, in this order; softmax's own scale is then 1. True if the bias hides a key. It is
    /// [`crate::softmax::adjust`], compiled for the tier, with the same bits on every tier.
    pub adjust: unsafe fn(Adjust<'_>) -> bool,

    /// `softmax(s, scale, lo, hi, state) -> factor`: one row of dot products, which are first multiplied by `scale` (positive;
    /// one rounding) to scores. Keys `lo..hi` of `s` are visible (`lo < hi <= s.len()`, and
    /// `s.len()` is a multiple of `nr`, or of 8 in the decode path). Raises `state.max` to the ceiling of the largest
    /// visible score where that is greater, replaces visible scores by `2^(s - max)` and all others by 0, whatever
    /// they were, adds the visible weights to `state.sum` (rescaled first), and returns `2^(old max - new max)`, by
    /// which the caller's accumulated row must be multiplied (0 for the first visible key). A weight below 2^-126 is 0.
    ///
    /// A visible NaN or +inf makes the sum NaN. Visible -inf weighs 0; while a row has seen nothing else its maximum
    /// stays -inf and its sum 0, the weights are 0 and the factor is 1.
    ///
    /// The sum's order depends on the indices in `s` alone, so `lo` and `hi` may differ between calls that see the
    /// same keys without changing bits. Use [`crate::softmax`]'s constants.
    pub softmax: unsafe fn(&mut [f32], f32, usize, usize, &mut RowState) -> f32,

    /// `weighted_sum(p, p_stride, keys_from, keys_to, v_tile, tile_keys, factors, acc, acc_stride)`: for all `mr` rows and
    /// all `v_tile.len() / tile_keys` padded columns: `acc[r * acc_stride + c] = acc * factors[r] + sum`, where the sum of
    /// `p[r * p_stride + j] * v_j[c]` over keys `j` in `keys_from..keys_to` goes in runs at multiples of `sum_run` keys of the
    /// tile. (The first run is added together with the factor by one fused multiply-add.)
    pub weighted_sum: unsafe fn(WeightedSum<'_>),

    /// `decode_scores(q, q_stride, rows, k, rotation, ahead, s, s_stride)`: few-row scores against keys in place:
    /// `s[r * s_stride + j] = q_r . k_j` for `rows <= decode_rows` and every key `j` of `k`, keys rotated in registers if a
    /// rotation is given. Each key is read from memory once for all rows. `ahead` names rows that will be read next:
    /// a prefetch hint, never read.
    pub decode_scores: unsafe fn(DecodeScores<'_>),

    /// `decode_sum(...)`: few-row weighted sum of values in place, one run of keys: `acc[r * acc_stride + c] = acc * factors[r] +
    /// sum` by one fused multiply-add, where the sum is one chain over the keys from 0. Each value row is read from memory
    /// once for all rows.
    pub decode_sum: unsafe fn(DecodeSum<'_>),
}

/// Arguments of [`Kernels::weighted_sum`].
#[derive(Debug)]
pub struct WeightedSum<'a> {
    /// Weights, `mr` rows.
    pub p: &'a [f32],
    /// Elements between rows of `p`.
    pub p_stride: usize,
    /// First key.
    pub from: usize,
    /// One past the last key; at most `tile_keys`.
    pub to: usize,
    /// Values as [`Kernels::pack_v`] wrote them: column panels of `tile_keys * nv`.
    pub v: &'a [f32],
    /// Keys that a tile has room for.
    pub tile_keys: usize,
    /// A factor for each of the `mr` accumulated rows.
    pub factors: &'a [f32],
    /// True if `acc` holds nothing yet: it is written, not read, as if it were 0.
    pub fresh: bool,
    /// Accumulated rows, `mr` of them, padded to a multiple of `nv` columns.
    pub acc: &'a mut [f32],
    /// Elements between rows of `acc`.
    pub acc_stride: usize,
}

impl WeightedSum<'_> {
    /// Checks every length for tiles of `mr` rows by `nv` columns, and returns the number of column panels.
    ///
    /// # Panics
    ///
    /// If a slice is too short.
    #[inline]
    pub fn check(&self, mr: usize, nv: usize) -> usize {
        let panel = self.tile_keys.checked_mul(nv).expect("the tile reaches beyond the address space");
        let panels = self.v.len() / panel;
        assert!(self.from <= self.to && self.to <= self.tile_keys && self.factors.len() >= mr, "keys or factors");
        assert!(self.p.len() >= span(mr, self.p_stride, self.to), "weights are too short");
        assert!(self.acc.len() >= span(mr, self.acc_stride, panels * nv), "accumulated rows are too short");
        panels
    }
}

/// Arguments of [`Kernels::adjust`].
#[derive(Debug)]
pub struct Adjust<'a> {
    /// Dot products with consecutive keys, replaced by scores.
    pub s: &'a mut [f32],
    /// `|scale| log2(e)`.
    pub scale: f32,
    /// The softcap, in base 2: `softcap log2(e)`.
    pub cap: Option<f32>,
    /// ALiBi: slope, and key index less query index of the first key.
    pub alibi: Option<(f32, i64)>,
    /// A bias for each key, in natural units; -inf hides the key, whatever its score.
    pub bias: Option<&'a [f32]>,
}

/// Arguments of [`Kernels::decode_scores`].
#[derive(Debug)]
pub struct DecodeScores<'a> {
    /// Query rows, rotated and scaled, f32.
    pub q: &'a [f32],
    /// Elements between query rows, at least `k.dim`.
    pub q_stride: usize,
    /// Query rows, `1..=decode_rows`.
    pub rows: usize,
    /// Keys in place.
    pub k: Rows<'a>,
    /// Rotation of the keys, if they are raw.
    pub rotation: Option<Rotation<'a>>,
    /// Rows that will be read next.
    pub ahead: Option<Rows<'a>>,
    /// Scores.
    pub s: &'a mut [f32],
    /// Elements between rows of `s`.
    pub s_stride: usize,
}

impl DecodeScores<'_> {
    /// Checks queries and scores for `rows` rows; keys and their rotation are the kernel's to check.
    ///
    /// # Panics
    ///
    /// If a slice is too short.
    #[inline]
    pub fn check(&self, rows: usize) {
        assert!(self.q.len() >= span(rows, self.q_stride, self.k.dim), "queries are too short");
        assert!(self.s.len() >= span(rows, self.s_stride, self.k.at.len()), "scores are too short");
    }
}

/// Arguments of [`Kernels::decode_sum`].
#[derive(Debug)]
pub struct DecodeSum<'a> {
    /// Weights: row `r`, key `j` at `p[r * p_stride + j]`.
    pub p: &'a [f32],
    /// Elements between rows of `p`.
    pub p_stride: usize,
    /// Rows, `1..=decode_rows`.
    pub rows: usize,
    /// Values in place.
    pub v: Rows<'a>,
    /// Rows that will be read next: a prefetch hint, never read.
    pub ahead: Option<Rows<'a>>,
    /// A factor for each accumulated row.
    pub factors: &'a [f32],
    /// Accumulated rows of at least `v.dim` elements; nothing past `v.dim` is touched.
    pub acc: &'a mut [f32],
    /// Elements between rows of `acc`.
    pub acc_stride: usize,
}

impl DecodeSum<'_> {
    /// Checks every length for `rows` rows, and every row of values.
    ///
    /// # Panics
    ///
    /// If a slice is too short.
    #[inline]
    pub fn check(&self, rows: usize) {
        let keys = self.v.at.len();
        assert!(keys == 0 || self.p.len() >= span(rows, self.p_stride, keys), "weights are too short");
        assert!(self.factors.len() >= rows, "factors are too short");
        assert!(self.acc.len() >= span(rows, self.acc_stride, self.v.dim), "accumulated rows are too short");
        self.v.check();
    }
}

/// Saves, sets and restores the floating-point control state around a task.
///
/// A host may run with flush-to-zero or another rounding mode; results must not depend on it, and the host must find
/// its state unchanged.
#[derive(Debug)]
pub struct FpControl {
    /// Sets the default state (round to nearest even, no flushing, exceptions masked) and returns the state before.
    pub enter: fn() -> u64,
    /// Restores what `enter` returned.
    pub leave: fn(u64),
}

/// For platforms whose floating-point state can't be changed, or is nobody's to change.
pub static FP_CONTROL_NONE: FpControl = FpControl { enter: || 0, leave: |_| () };

/// The name of an ISA level, from least to most.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum TierName {
    /// Scalar Rust; always there.
    Portable,
    /// x86-64 with AVX2, FMA and F16C.
    Avx2,
    /// x86-64 with AVX-512 F, BW, VL and DQ.
    Avx512,
    /// Baseline aarch64.
    Neon,
}

impl TierName {
    /// The name used in messages, kernel names and environment variables.
    pub const fn name(self) -> &'static str {
        match self {
            TierName::Portable => "portable",
            TierName::Avx2 => "avx2",
            TierName::Avx512 => "avx512",
            TierName::Neon => "neon",
        }
    }

    /// The tier of that name.
    pub fn from_name(name: &str) -> Option<Self> {
        [TierName::Portable, TierName::Avx2, TierName::Avx512, TierName::Neon].into_iter().find(|t| t.name() == name)
    }
}

impl fmt::Display for TierName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A tier that this CPU can run: the proof that lets drivers call its [`Kernels`].
#[derive(Clone, Copy, Debug)]
pub struct Tier {
    kernels: &'static Kernels,
    fp: &'static FpControl,
}

impl Tier {
    /// Declares that this CPU can run `kernels`.
    ///
    /// # Safety
    ///
    /// - The CPU, and the operating system's saved state, support every instruction that `kernels` may use, on every
    ///   thread that will run a task.
    /// - Every function of `kernels` keeps the contract that its field documents.
    pub const unsafe fn new(kernels: &'static Kernels, fp: &'static FpControl) -> Self {
        Tier { kernels, fp }
    }

    /// Which tier.
    pub const fn name(&self) -> TierName {
        self.kernels.tier
    }

    /// The functions.
    pub const fn kernels(&self) -> &'static Kernels {
        self.kernels
    }

    pub(crate) const fn fp(&self) -> &'static FpControl {
        self.fp
    }
}

impl PartialEq for Tier {
    fn eq(&self, other: &Self) -> bool {
        core::ptr::eq(self.kernels, other.kernels)
    }
}

//! The one battery that every tier has to pass: each function of its table against a plain statement of its contract in
//! f64, over shapes that follow from its tile, with inputs and outputs against guard pages.
//!
//! `ROTILE_BATTERY=small` takes fewer head dims, for emulators; `ROTILE_BATTERY=16,24` takes these.

mod bits;

use crate::compare;
use crate::data::{Data, Rng};
use crate::guard::{Guarded, Side};
use half::{bf16, f16};
use rotile_core::kernel::{
    Angles, DecodeScores, DecodeSum, Kernels, Rotation, RowState, Rows, Tier, Turn, WeightedSum,
};
use rotile_core::{DType, PairStyle, Slice, SliceMut};

const DTYPES: [DType; 3] = [DType::F32, DType::F16, DType::Bf16];
const SIDES: [Side; 2] = [Side::START, Side::END];

/// Runs everything.
///
/// # Panics
///
/// At the first thing that is wrong, naming the function and the shape.
pub fn run(tier: Tier) {
    let asked = std::env::var("ROTILE_BATTERY").unwrap_or_default();
    let dims = match asked.as_str() {
        "small" => vec![1, 3, 8, 17, 33, 80, 128],
        "" | "full" => {
            vec![1, 2, 3, 4, 5, 7, 8, 9, 12, 15, 16, 17, 24, 31, 32, 33, 40, 63, 64, 65, 80, 96, 128, 192, 576]
        }
        list => list.split(',').map(|dim| dim.parse().expect("ROTILE_BATTERY: small, full or head dims")).collect(),
    };
    eprintln!("kernel battery, tier {}: head dims {dims:?}", tier.name());
    run_dims(tier, &dims);
}

/// Runs everything for these head dims.
///
/// # Panics
///
/// As [`run`].
pub fn run_dims(tier: Tier, dims: &[usize]) {
    let b = Battery { k: tier.kernels(), name: tier.name().name() };
    b.table();
    b.angles();
    b.conversions();
    for &dim in dims {
        for dtype in DTYPES {
            b.load(dim, dtype);
            b.scores(dim, dtype);
            b.decode_scores(dim, dtype);
            b.decode_sum(dim, dtype);
            b.weighted_sum(dim, dtype);
            b.bits(dim, dtype);
        }
    }
    b.pack_v_finds_what_is_not_finite();
    b.softmax();
    b.softmax_rules();
    b.softmax_bits();
    b.softmax_embedding();
}

struct Battery {
    k: &'static Kernels,
    name: &'static str,
}

/// Rows in a guarded buffer, in no order, with gaps, the last one ending at the buffer's end.
struct Scattered {
    buffer: Typed,
    at: Vec<usize>,
    dim: usize,
    values: Vec<Vec<f64>>,
}

enum Typed {
    F32(Guarded<f32>),
    F16(Guarded<f16>),
    Bf16(Guarded<bf16>),
}

impl Scattered {
    fn new(rng: &mut Rng, count: usize, dim: usize, dtype: DType, side: Side) -> Self {
        Self::from_values(&Data::round(&rng.normal(count * dim), dtype), dim, rng.size(0, 3), side)
    }

    fn from_values(data: &Data, dim: usize, gap: usize, side: Side) -> Self {
        let count = data.len() / dim;
        let stride = dim + gap;
        // A fixed scattering; row 0 is never first in memory if there are several.
        let at: Vec<usize> = (0..count).map(|r| (r * 7 + 3) % count.max(1) * stride).collect();
        let at = if count.is_multiple_of(7) { (0..count).rev().map(|r| r * stride).collect() } else { at };
        let len = if count == 0 { 0 } else { count * stride - gap };
        macro_rules! scatter {
            ($variant:ident, $x:expr, $nan:expr) => {{
                let mut buffer = Guarded::filled(len, $nan, side);
                at.iter().zip($x.chunks_exact(dim)).for_each(|(&at, row)| buffer[at..at + dim].copy_from_slice(row));
                Typed::$variant(buffer)
            }};
        }
        let buffer = match data {
            Data::F32(x) => scatter!(F32, x, f32::NAN),
            Data::F16(x) => scatter!(F16, x, f16::NAN),
            Data::Bf16(x) => scatter!(Bf16, x, bf16::NAN),
        };
        let values = data.to_f64().chunks_exact(dim).map(<[f64]>::to_vec).collect();
        Scattered { buffer, at, dim, values }
    }

    fn rows(&self) -> Rows<'_> {
        let data = match &self.buffer {
            Typed::F32(b) => Slice::F32(b),
            Typed::F16(b) => Slice::F16(b),
            Typed::Bf16(b) => Slice::Bf16(b),
        };
        Rows { data, at: &self.at, dim: self.dim }
    }

    fn some(&self, count: usize) -> Rows<'_> {
        Rows { at: &self.at[..count], ..self.rows() }
    }
}

/// A rotation of some rows, and its plain counterpart.
struct Turned {
    turn: Turn,
    cos: Guarded<f32>,
    sin: Guarded<f32>,
    at: Vec<usize>,
}

impl Turned {
    fn new(rng: &mut Rng, turn: Turn, rows: usize, side: Side) -> Self {
        let padded = rotile_core::rotary::padded(turn.pairs);
        // Starts that no vector is aligned to, and a padding whose values must not matter.
        let at: Vec<usize> = (0..rows).rev().map(|r| 1 + r * padded).collect();
        let len = 1 + rows * padded;
        let (mut cos, mut sin) = (Guarded::filled(len, 3e7f32, side), Guarded::filled(len, -5e7f32, side));
        for i in at.iter().flat_map(|at| *at..at + turn.pairs) {
            let angle = rng.uniform(-3.0, 3.0);
            (cos[i], sin[i]) = (1.25 * angle.cos(), 1.25 * angle.sin());
        }
        Turned { turn, cos, sin, at }
    }

    fn rotation(&self, first: usize, rows: usize) -> Rotation<'_> {
        Rotation {
            turn: self.turn,
            angles: Angles { cos: &self.cos, sin: &self.sin, at: &self.at[first..first + rows] },
        }
    }

    fn apply(&self, r: usize, row: &[f64]) -> Vec<f64> {
        let mut out = row.to_vec();
        for i in 0..self.turn.pairs {
            let (a, b) = self.turn.pair(i);
            let (cos, sin) = (f64::from(self.cos[self.at[r] + i]), f64::from(self.sin[self.at[r] + i]));
            (out[a], out[b]) = (row[a] * cos - row[b] * sin, row[b] * cos + row[a] * sin);
        }
        out
    }
}

/// Geometries for a head: whole, partial at odd offsets, proportional, in both styles.
fn turns(dim: usize) -> Vec<Option<Turn>> {
    let mut turns = vec![None];
    let mut add = |style, offset: usize, pairs: usize, distance: usize| {
        let turn = Turn { style, offset, pairs, distance };
        if pairs > 0 && turn.end() <= dim && (distance >= pairs || style == PairStyle::Interleaved) {
            turns.push(Some(turn));
        }
    };
    add(PairStyle::Half, 0, dim / 2, dim / 2);
    add(PairStyle::Interleaved, 0, dim / 2, 1);
    add(PairStyle::Half, dim / 3, dim / 3, dim / 3);
    add(PairStyle::Interleaved, dim / 3 + 1, dim / 5, 1);
    add(PairStyle::Half, 0, dim / 8, dim / 2);
    add(PairStyle::Half, 1, 1, dim.saturating_sub(2));
    turns
}

/// Where a value is not what the contract says.
fn expect<T: Copy + Into<f64>>(got: &[T], want: &[f64], atol: f64, what: &dyn Fn() -> String) {
    if let Err(fault) = compare::close(got, want, atol, 0.0) {
        panic!("{}: {fault}", what());
    }
}

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

impl Battery {
    fn what(&self, function: &str, shape: String) -> String {
        format!("{} {function} {shape}", self.name)
    }

    fn table(&self) {
        let k = self.k;
        assert!((1..=rotile_core::kernel::MAX_TILE).contains(&k.mr) && (1..=64).contains(&k.nr));
        assert!(k.nv >= 1 && (1..=16).contains(&k.decode_rows));
        for name in [k.names.scores, k.names.weighted_sum, k.names.decode_scores, k.names.decode_sum, k.names.load] {
            assert!(name.ends_with(self.name), "{name} is not named after tier {}", self.name);
        }
    }

    fn angles(&self) {
        let mut rng = Rng::new(1);
        for len in [16, 32, 48, 288] {
            for side in SIDES {
                let mut input = || {
                    let x: Vec<f64> = rng.normal(len).into_iter().map(|x| f64::from(x) / 3.0).collect();
                    Guarded::from_slice(&x, side)
                };
                let input: [Guarded<f64>; 4] = std::array::from_fn(|_| input());
                let mut out: [Guarded<f32>; 2] = std::array::from_fn(|_| Guarded::filled(len, f32::NAN, side));
                let [bc, bs, fc, fs] = &input;
                let [cos, sin] = &mut out;
                // SAFETY: the caller's tier proves that the CPU has the features.
                unsafe { (self.k.angles)(bc, bs, fc, fs, cos, sin) };
                for i in 0..len {
                    let [bc, bs, fc, fs] = [bc, bs, fc, fs].map(|x| x[i]);
                    for (got, want) in [(cos[i], bc * fc - bs * fs), (sin[i], bs * fc + bc * fs)] {
                        // One rounding to f32, and the noise of f64.
                        let atol = want.abs() * 2f64.powi(-24) + 1e-15;
                        expect(&[got], &[want], atol, &|| self.what("angles", format!("{len}, element {i}")));
                    }
                }
            }
        }
    }

    /// Loads rows into a buffer with a stride, checks that the rest stays as it was, and gives the rows.
    fn loaded(&self, rows: Rows<'_>, rotation: Option<Rotation<'_>>, scale: f32, gap: usize) -> Vec<f32> {
        let (count, stride) = (rows.at.len(), rows.dim + gap);
        let len = (count * stride).saturating_sub(gap);
        let mut out = Guarded::filled(len, -77.0f32, Side::END);
        // SAFETY: the caller's tier proves that the CPU has the features.
        unsafe { (self.k.load)(rows, rotation, scale, &mut out, stride) };
        for row in out.chunks(stride) {
            assert!(row[rows.dim..].iter().all(|x| *x == -77.0), "{}", self.what("load", "wrote into a gap".into()));
        }
        out.chunks(stride).flat_map(|row| row[..rows.dim].to_vec()).collect()
    }

    fn load(&self, dim: usize, dtype: DType) {
        let mut rng = Rng::new(dim as u64);
        for (i, turn) in turns(dim).into_iter().enumerate() {
            let side = SIDES[i % 2];
            for count in [1, 3, 6] {
                let what = || self.what("load", format!("{count} rows of {dim} {dtype}, {turn:?}"));
                let rows = Scattered::new(&mut rng, count, dim, dtype, side);
                let turned = turn.map(|turn| Turned::new(&mut rng, turn, count, side));
                let rotation = turned.as_ref().map(|t| t.rotation(0, count));
                let plain = self.loaded(rows.rows(), rotation, 1.0, i % 3);
                for (r, row) in rows.values.iter().enumerate() {
                    let got = &plain[r * dim..][..dim];
                    match &turned {
                        None => assert!(got.iter().zip(row).all(|(a, b)| f64::from(*a) == *b), "{}", what()),
                        Some(t) => expect(got, &t.apply(r, row), 1e-6, &what),
                    }
                    if let Some(t) = &turned {
                        for i in 0..dim {
                            let turns = (0..t.turn.pairs).any(|p| t.turn.pair(p).0 == i || t.turn.pair(p).1 == i);
                            assert!(turns || f64::from(got[i]) == row[i], "{}: element {i} passes through", what());
                        }
                    }
                }
                // The scale comes last, with one rounding.
                let scaled = self.loaded(rows.rows(), rotation, 0.3, 0);
                let want: Vec<f32> = plain.iter().map(|x| x * 0.3).collect();
                assert_eq!(bits(&scaled), bits(&want), "{}: scaled", what());
            }
        }
    }

    /// Scores of packed rows: `mr` rows by whole panels.
    fn packed_scores(
        &self,
        q: (Rows<'_>, Option<Rotation<'_>>, f32),
        k: &Scattered,
        k_turned: Option<&Turned>,
    ) -> Vec<Vec<f32>> {
        let Kernels { mr, nr, .. } = *self.k;
        let (dim, keys) = (k.dim, k.at.len());
        let panels = keys.div_ceil(nr);
        let mut q_panel = Guarded::filled(mr * dim, f32::NAN, Side::END);
        let mut k_panels = Guarded::filled(panels * nr * dim, f32::NAN, Side::END);
        let stride = panels * nr + 5;
        let mut s = Guarded::filled((mr - 1) * stride + panels * nr, f32::NAN, Side::END);
        // SAFETY: the caller's tier proves that the CPU has the features.
        unsafe {
            (self.k.pack_q)(q.0, q.1, q.2, &mut q_panel);
            for p in 0..panels {
                let (first, count) = (p * nr, nr.min(keys - p * nr));
                let rows = Rows { at: &k.at[first..first + count], ..k.rows() };
                let rotation = k_turned.map(|t| t.rotation(first, count));
                (self.k.pack_k)(rows, rotation, &mut k_panels[p * nr * dim..][..nr * dim]);
            }
            (self.k.scores)(&q_panel, &k_panels, dim, &mut s, stride);
        }
        let rows: Vec<Vec<f32>> = (0..mr).map(|r| s[r * stride..][..panels * nr].to_vec()).collect();
        for row in rows.iter().skip(q.0.at.len()) {
            assert!(row.iter().all(|x| *x == 0.0), "{}", self.what("pack_q", "missing rows are not zeros".into()));
        }
        for row in &rows {
            assert!(
                row[keys..].iter().all(|x| *x == 0.0),
                "{}",
                self.what("pack_k", "missing keys are not zeros".into())
            );
        }
        rows
    }

    fn scores(&self, dim: usize, dtype: DType) {
        let Kernels { mr, nr, .. } = *self.k;
        let mut rng = Rng::new(100 + dim as u64);
        let all = [1, nr - 1, nr, nr + 1, 2 * nr - 1, 2 * nr, 3 * nr + 1];
        for (i, turn) in turns(dim).into_iter().enumerate() {
            let side = SIDES[i % 2];
            let some = [all[i % all.len()], all[(i + 3) % all.len()]];
            for keys in if i == 0 { &all[..] } else { &some[..] }.iter().copied().filter(|&n| n > 0) {
                let rows = 1 + (keys + i) % mr;
                let what = || self.what("scores", format!("{rows} x {keys}, dim {dim}, {dtype}, {turn:?}"));
                let q = Scattered::new(&mut rng, rows, dim, dtype, side);
                let k = Scattered::new(&mut rng, keys, dim, dtype, side);
                let q_turned = turn.map(|turn| Turned::new(&mut rng, turn, rows, side));
                let k_turned = turn.map(|turn| Turned::new(&mut rng, turn, keys, side));
                let q_rotation = q_turned.as_ref().map(|t| t.rotation(0, rows));
                let s = self.packed_scores((q.rows(), q_rotation, 0.7), &k, k_turned.as_ref());
                let plain = |turned: Option<&Turned>, r: usize, row: &[f64]| match turned {
                    Some(t) => t.apply(r, row),
                    None => row.to_vec(),
                };
                for (r, row) in q.values.iter().enumerate() {
                    let row = plain(q_turned.as_ref(), r, row);
                    for (j, key) in k.values.iter().enumerate() {
                        let key = plain(k_turned.as_ref(), j, key);
                        let terms = || row.iter().zip(&key).map(|(a, b)| a * b * 0.7);
                        let (want, size): (f64, f64) = (terms().sum(), terms().map(f64::abs).sum());
                        expect(&[s[r][j]], &[want], 1e-6 * size + 1e-6, &|| format!("{} ({r}, {j})", what()));
                    }
                }
                // Rotating while packing gives the bits of rotating first.
                if let (Some(q_turned), Some(k_turned)) = (&q_turned, &k_turned) {
                    let q2 = self.loaded(q.rows(), Some(q_turned.rotation(0, rows)), 0.7, 0);
                    let k2 = self.loaded(k.rows(), Some(k_turned.rotation(0, keys)), 1.0, 0);
                    let q2 = Scattered::from_values(&Data::F32(q2), dim, 1, side);
                    let k2 = Scattered::from_values(&Data::F32(k2), dim, 2, side);
                    let s2 = self.packed_scores((q2.rows(), None, 1.0), &k2, None);
                    for (a, b) in s.iter().zip(&s2) {
                        assert_eq!(bits(a), bits(b), "{}: packing rotates as loading does", what());
                    }
                }
            }
        }
    }

    fn decode_scores(&self, dim: usize, dtype: DType) {
        let mut rng = Rng::new(200 + dim as u64);
        for (i, turn) in turns(dim).into_iter().enumerate() {
            let side = SIDES[i % 2];
            for (rows, keys) in (1..=self.k.decode_rows).flat_map(|r| [1, 2, 3, 4, 5, 7, 8, 9, 32].map(|n| (r, n))) {
                if i > 0 && (rows + keys + i) % 4 != 0 {
                    continue;
                }
                let what = || self.what("decode_scores", format!("{rows} x {keys}, dim {dim}, {dtype}, {turn:?}"));
                let (q_stride, s_stride) = (dim + i % 2, keys + 3);
                let q = Guarded::from_slice(&rng.normal((rows - 1) * q_stride + dim), side);
                let k = Scattered::new(&mut rng, keys, dim, dtype, side);
                let ahead = Scattered::new(&mut rng, keys + 1, dim, dtype, side);
                let turned = turn.map(|turn| Turned::new(&mut rng, turn, keys, side));
                let run = |rows: usize, first: usize, count: usize, ahead| -> Vec<Vec<f32>> {
                    let mut s = Guarded::filled((rows - 1) * s_stride + count, f32::NAN, side);
                    let args = DecodeScores {
                        q: &q,
                        q_stride,
                        rows,
                        k: Rows { at: &k.at[first..first + count], ..k.rows() },
                        rotation: turned.as_ref().map(|t| t.rotation(first, count)),
                        ahead,
                        s: &mut s,
                        s_stride,
                    };
                    // SAFETY: the caller's tier proves that the CPU has the features.
                    unsafe { (self.k.decode_scores)(args) };
                    (0..rows).map(|r| s[r * s_stride..][..count].to_vec()).collect()
                };
                let s = run(rows, 0, keys, Some(ahead.rows()));
                for r in 0..rows {
                    for (j, key) in k.values.iter().enumerate() {
                        let key = turned.as_ref().map_or_else(|| key.clone(), |t| t.apply(j, key));
                        let terms = || (0..dim).map(|d| f64::from(q[r * q_stride + d]) * key[d]);
                        let (want, size): (f64, f64) = (terms().sum(), terms().map(f64::abs).sum());
                        expect(&[s[r][j]], &[want], 1e-6 * size + 1e-6, &|| format!("{} ({r}, {j})", what()));
                    }
                }
                // A score is the same wherever its key stands and however many rows there are.
                for (j, together) in s[0].iter().enumerate() {
                    let one = run(1, j, 1, None)[0][0];
                    assert_eq!(one.to_bits(), together.to_bits(), "{}: key {j} by itself", what());
                }
            }
        }
    }

    fn decode_sum(&self, dim: usize, dtype: DType) {
        let mut rng = Rng::new(300 + dim as u64);
        for (rows, keys) in (1..=self.k.decode_rows).flat_map(|r| [0, 1, 2, 5, 32].map(|n| (r, n))) {
            for side in SIDES {
                let what = || self.what("decode_sum", format!("{rows} x {keys}, dim {dim}, {dtype}"));
                let (p_stride, acc_stride) = (keys + 2, dim + 3);
                // Whole numbers: every sum is exact, in any order.
                let v = Scattered::from_values(&Data::round(&rng.whole(keys * dim, 8), dtype), dim, 1, side);
                let p = Guarded::from_slice(&rng.whole((rows - 1) * p_stride + keys, 8), side);
                let factors = rng.whole(rows, 2);
                let before = rng.whole((rows - 1) * acc_stride + dim, 8);
                let mut acc = Guarded::from_slice(&before, side);
                let args = DecodeSum {
                    p: &p,
                    p_stride,
                    rows,
                    v: v.rows(),
                    ahead: None,
                    factors: &factors,
                    acc: &mut acc,
                    acc_stride,
                };
                // SAFETY: the caller's tier proves that the CPU has the features.
                unsafe { (self.k.decode_sum)(args) };
                let mut want: Vec<f64> = before.iter().map(|x| f64::from(*x)).collect();
                for r in 0..rows {
                    for c in 0..dim {
                        let sum: f64 = (0..keys).map(|j| f64::from(p[r * p_stride + j]) * v.values[j][c]).sum();
                        want[r * acc_stride + c] = f64::from(before[r * acc_stride + c] * factors[r]) + sum;
                    }
                }
                expect(&acc, &want, 0.0, &what);
            }
        }
    }

    fn weighted_sum(&self, dim: usize, dtype: DType) {
        let Kernels { mr, nv, .. } = *self.k;
        let mut rng = Rng::new(400 + dim as u64);
        let padded = dim.next_multiple_of(nv);
        for (tile_keys, from, to) in [(8, 0, 8), (8, 3, 7), (64, 0, 64), (64, 5, 63), (64, 1, 2), (64, 4, 4)] {
            for side in SIDES {
                let what = || self.what("weighted_sum", format!("{from}..{to} of {tile_keys}, dim {dim}, {dtype}"));
                let v = Scattered::from_values(&Data::round(&rng.whole(tile_keys * dim, 8), dtype), dim, 1, side);
                let mut tile = Guarded::filled(tile_keys * padded, f32::NAN, side);
                let half = tile_keys / 2;
                // SAFETY: the caller's tier proves that the CPU has the features.
                let finite = unsafe {
                    let late = Rows { at: &v.at[half..], ..v.rows() };
                    (self.k.pack_v)(v.some(half), 0, tile_keys, &mut tile)
                        & (self.k.pack_v)(late, half, tile_keys, &mut tile)
                };
                assert!(finite, "{}: all values are finite", what());
                for (j, row) in v.values.iter().enumerate() {
                    for c in 0..padded {
                        let got = tile[c / nv * tile_keys * nv + j * nv + c % nv];
                        let want = row.get(c).copied().unwrap_or(0.0);
                        assert_eq!(f64::from(got), want, "{}: packed value ({j}, {c})", what());
                    }
                }
                let p_stride = tile_keys + 1;
                let p = Guarded::from_slice(&rng.whole((mr - 1) * p_stride + tile_keys, 8), side);
                let factors = Guarded::from_slice(&rng.whole(mr, 2), side);
                let acc_stride = padded + nv;
                let before = rng.whole((mr - 1) * acc_stride + padded, 8);
                let mut acc = Guarded::from_slice(&before, side);
                let args = WeightedSum {
                    p: &p,
                    p_stride,
                    from,
                    to,
                    v: &tile,
                    tile_keys,
                    factors: &factors,
                    fresh: false,
                    acc: &mut acc,
                    acc_stride,
                };
                // SAFETY: as above.
                unsafe { (self.k.weighted_sum)(args) };
                let mut want: Vec<f64> = before.iter().map(|x| f64::from(*x)).collect();
                for r in 0..mr {
                    for c in 0..padded {
                        let sum: f64 = (from..to)
                            .map(|j| f64::from(p[r * p_stride + j]) * v.values[j].get(c).copied().unwrap_or(0.0))
                            .sum();
                        want[r * acc_stride + c] = f64::from(before[r * acc_stride + c] * factors[r]) + sum;
                    }
                }
                expect(&acc, &want, 0.0, &what);
            }
        }
    }

    fn pack_v_finds_what_is_not_finite(&self) {
        let nv = self.k.nv;
        for dtype in DTYPES {
            for dim in [1, nv - 1, nv, nv + 1, 3 * nv + 5] {
                for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                    for place in [0, dim - 1, 2 * dim, 5 * dim - 1] {
                        let mut values = vec![1.0; 5 * dim];
                        values[place] = bad;
                        let v = Scattered::from_values(&Data::round(&values, dtype), dim, 1, Side::END);
                        let mut tile = Guarded::filled(8 * dim.next_multiple_of(nv), 0.0f32, Side::END);
                        // SAFETY: the caller's tier proves that the CPU has the features.
                        let finite = unsafe { (self.k.pack_v)(v.rows(), 2, 8, &mut tile) };
                        assert!(
                            !finite,
                            "{}",
                            self.what("pack_v", format!("misses {bad} at {place} of {dim}, {dtype}"))
                        );
                    }
                }
            }
        }
        // The largest finite numbers are finite.
        let v = Scattered::from_values(&Data::F32(vec![f32::MAX, f32::MIN, 0.0, -0.0]), 4, 0, Side::END);
        let mut tile = vec![0.0; 8 * 4usize.next_multiple_of(nv)];
        // SAFETY: as above.
        assert!(unsafe { (self.k.pack_v)(v.rows(), 0, 8, &mut tile) }, "{}: f32::MAX is finite", self.name);
    }

    fn row(&self, s: &[f32], lo: usize, hi: usize, state: &mut RowState) -> (Vec<f32>, f32) {
        self.scaled_row(s, 1.0, lo, hi, state)
    }

    fn scaled_row(&self, s: &[f32], scale: f32, lo: usize, hi: usize, state: &mut RowState) -> (Vec<f32>, f32) {
        let mut row = Guarded::from_slice(s, Side::END);
        // SAFETY: the caller's tier proves that the CPU has the features.
        let factor = unsafe { (self.k.softmax)(&mut row, scale, lo, hi, state) };
        (row.to_vec(), factor)
    }

    fn softmax(&self) {
        let mut rng = Rng::new(5);
        for len in [8, 16, 24, 32, 40, 256].into_iter().chain([self.k.nr, 2 * self.k.nr, 20 * self.k.nr]) {
            for (lo, hi) in [(0, len), (0, 1), (len - 1, len), (3, len - 2), (1, 7), (len / 2, len), (0, len / 2 + 1)] {
                for scale in [1.0, 30.0, 1e4] {
                    let what = || self.what("softmax", format!("{lo}..{hi} of {len}, scores to {scale}"));
                    let mut s: Vec<f32> = rng.normal(len).iter().map(|x| x * scale).collect();
                    // What is masked must not matter.
                    s[..lo].fill(f32::NAN);
                    s[hi..].fill(f32::INFINITY);
                    let mut state = RowState::EMPTY;
                    let (p, factor) = self.row(&s, lo, hi, &mut state);
                    let max = s[lo..hi].iter().fold(f32::MIN, |m, x| m.max(*x));
                    assert_eq!((state.max, factor), (max.ceil(), 0.0), "{}", what());
                    let want: Vec<f64> = (0..len)
                        .map(|j| match (lo..hi).contains(&j) {
                            true => (f64::from(s[j]) - f64::from(state.max)).exp2(),
                            false => 0.0,
                        })
                        .collect();
                    if let Err(fault) = compare::close(&p, &want, 2f64.powi(-126), 3.5e-7) {
                        panic!("{}: {fault}", what());
                    }
                    let sum: f64 = want.iter().sum();
                    expect(&[state.sum], &[sum], sum * 2e-6, &what);

                    // The scale is one rounded multiplication beforehand.
                    let (mut one, mut other) = (RowState::EMPTY, RowState::EMPTY);
                    let product: Vec<f32> = s.iter().map(|x| x * 0.18033688).collect();
                    let scaled = self.scaled_row(&s, 0.18033688, lo, hi, &mut one).0;
                    assert_eq!(bits(&scaled), bits(&self.row(&product, lo, hi, &mut other).0), "{}: scaled", what());
                    assert_eq!(one, other, "{}: scaled", what());

                    // A second tile with a higher maximum.
                    let second: Vec<f32> = s.iter().map(|x| x + 3.0 * scale).collect();
                    let before = state;
                    let (_, factor) = self.row(&second, lo, hi, &mut state);
                    let shift = f64::from(before.max) - f64::from(state.max);
                    let want = if shift < -126.0 { 0.0 } else { shift.exp2() };
                    assert_eq!(f64::from(factor), want, "{}: the factor is an exact power of two", what());
                    // And one that changes nothing.
                    let (p, factor) = self.row(&vec![-1e30; len], lo, hi, &mut state);
                    assert!(factor == 1.0 && p.iter().all(|x| *x == 0.0), "{}: far-off keys weigh 0", what());
                }
            }
        }
    }

    fn softmax_rules(&self) {
        let len = 2 * self.k.nr;
        let what = |rule: &str| self.what("softmax", rule.into());
        for place in 0..len {
            for bad in [f32::NAN, f32::INFINITY] {
                let mut s = vec![0.5; len];
                s[place] = bad;
                let mut state = RowState::EMPTY;
                let (p, _) = self.row(&s, 0, len, &mut state);
                assert!(
                    state.sum.is_nan() && p[place].is_nan(),
                    "{}",
                    what(&format!("a visible {bad} makes the sum NaN"))
                );
                self.row(&vec![1.0; len], 0, len, &mut state);
                assert!(state.sum.is_nan(), "{}", what("a NaN sum stays NaN"));
            }
        }
        let mut state = RowState::EMPTY;
        self.row(&vec![f32::NAN; len], 0, len, &mut state);
        self.row(&vec![1.0; len], 0, len, &mut state);
        assert!(state.sum.is_nan(), "{}", what("NaN alone makes the sum NaN"));

        let mut state = RowState::EMPTY;
        let (p, factor) = self.row(&vec![f32::NEG_INFINITY; len], 1, len - 1, &mut state);
        assert_eq!((state, factor), (RowState::EMPTY, 1.0), "{}", what("-inf alone is as nothing seen"));
        assert!(p.iter().all(|x| *x == 0.0), "{}", what("-inf weighs 0"));
        let mut s = vec![f32::NEG_INFINITY; len];
        s[1] = 2.0;
        let (p, _) = self.row(&s, 0, len, &mut state);
        assert!((state.max, state.sum) == (2.0, p[1]) && (p[1] - 1.0).abs() < 1e-6, "{}", what("-inf beside a number"));

        for (big, small) in [(1e30f32, -1e30f32), (741_455.0, 741_000.0), (f32::MAX, f32::MIN), (-3e38, f32::MIN)] {
            let mut s = vec![small; len];
            s[len / 2] = big;
            let mut state = RowState::EMPTY;
            let (p, _) = self.row(&s, 0, len, &mut state);
            assert!((p[len / 2] - 1.0).abs() < 1e-6 && state.max == big, "{}", what(&format!("all on {big}")));
            assert!((state.sum - 1.0).abs() < 1e-6, "{}", what(&format!("nothing on {small}")));
        }
    }

    /// Neither where a row is cut nor how far masked keys reach changes bits.
    fn softmax_bits(&self) {
        let unit = self.k.nr * 8;
        let mut rng = Rng::new(6);
        let s: Vec<f32> = rng.normal(2 * unit).iter().map(|x| x * 4.0).collect();
        for hi in [1, 7, 8, 9, unit / 2 + 3, unit] {
            let mut state = RowState::EMPTY;
            let (p, _) = self.row(&s[..unit], 0, hi, &mut state);
            let mut longer = RowState::EMPTY;
            let (q, _) = self.row(&s, 0, hi, &mut longer);
            assert_eq!(
                (state, bits(&p)),
                (longer, bits(&q[..unit])),
                "{}",
                self.what("softmax", format!("tail after {hi}"))
            );
        }
        // Against a maximum that is 5 higher, every weight is the same times 2^-5.
        let mut low = RowState { max: 40.0, sum: 0.0 };
        let mut high = RowState { max: 45.0, sum: 0.0 };
        let (p, _) = self.row(&s, 0, s.len(), &mut low);
        let (q, _) = self.row(&s, 0, s.len(), &mut high);
        let shifted: Vec<f32> = p.iter().map(|x| x / 32.0).collect();
        assert_eq!(bits(&shifted), bits(&q), "{}", self.what("softmax", "weights scale exactly".into()));
        assert_eq!(
            (low.sum / 32.0).to_bits(),
            high.sum.to_bits(),
            "{}",
            self.what("softmax", "sums scale exactly".into())
        );
        // Scores half way between integers must not round by the parity of the maximum.
        let ties: Vec<f32> = (0..unit).map(|i| i as f32 * 0.5 - 20.0).collect();
        let (mut even, mut odd) = (RowState { max: 64.0, sum: 0.0 }, RowState { max: 65.0, sum: 0.0 });
        let even = self.row(&ties, 0, 100.min(unit), &mut even).0;
        let odd = self.row(&ties, 0, 100.min(unit), &mut odd).0;
        let shifted: Vec<f32> = even.iter().map(|x| x / 2.0).collect();
        assert_eq!(bits(&shifted), bits(&odd), "{}", self.what("softmax", "ties scale exactly".into()));
    }

    fn conversions(&self) {
        // Every 16-bit pattern widens exactly.
        let all: Vec<u16> = (0..=u16::MAX).collect();
        let f16s: Vec<f16> = all.iter().map(|&b| f16::from_bits(b)).collect();
        let bf16s: Vec<bf16> = all.iter().map(|&b| bf16::from_bits(b)).collect();
        for data in [Data::F16(f16s), Data::Bf16(bf16s)] {
            let want = data.to_f32();
            for (i, want) in want.chunks(512).enumerate() {
                let rows = Rows { data: data.as_slice(), at: &[i * 512], dim: 512 };
                let got = self.loaded(rows, None, 1.0, 0);
                for (j, (a, b)) in got.iter().zip(want).enumerate() {
                    let same = a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan());
                    assert!(same, "{}", self.what("load", format!("{} pattern {:#06x}", data.dtype(), i * 512 + j)));
                }
            }
        }
        // Narrowing rounds once, to nearest even: every pattern, the numbers half way between neighbours, and beside them.
        let mut rng = Rng::new(7);
        let mut values: Vec<f32> = Vec::new();
        for bits in (0..=u16::MAX).step_by(3) {
            for x in [f16::from_bits(bits).to_f32(), bf16::from_bits(bits).to_f32()] {
                let step = |n: i32| f32::from_bits(x.to_bits().wrapping_add_signed(n));
                values.extend([
                    x,
                    step(1),
                    step(-1),
                    step(0x1000),
                    step(0x0FFF),
                    step(0x1001),
                    step(0x8000),
                    step(0x7FFF),
                ]);
            }
        }
        values.extend([65504.0, 65519.99, 65520.0, -65520.0, f32::MAX, f32::MIN, 1e-45, 6e-8, 2.98e-8, 2.99e-8]);
        values.extend((0..1000).map(|_| rng.uniform(-1e5, 1e5)));
        for len in [1, 7, 8, 9, 31, 33] {
            self.stored(&values[values.len() - len..], 0.37);
        }
        for chunk in values.chunks(501) {
            self.stored(chunk, 1.0);
        }
    }

    fn stored(&self, src: &[f32], factor: f32) {
        let n = src.len();
        let product: Vec<f32> = src.iter().map(|x| x * factor).collect();
        let src = Guarded::from_slice(src, Side::END);
        let mut f32s = Guarded::filled(n, 0.0f32, Side::END);
        let mut f16s = Guarded::filled(n, f16::ZERO, Side::END);
        let mut bf16s = Guarded::filled(n, bf16::ZERO, Side::START);
        // SAFETY: the caller's tier proves that the CPU has the features.
        unsafe {
            (self.k.store)(&src, factor, SliceMut::F32(&mut f32s));
            (self.k.store)(&src, factor, SliceMut::F16(&mut f16s));
            (self.k.store)(&src, factor, SliceMut::Bf16(&mut bf16s));
        }
        for (i, &x) in product.iter().enumerate() {
            let what = |t: &str| self.what("store", format!("{x:e} ({:#010x}) to {t}", x.to_bits()));
            if x.is_nan() {
                assert!(f32s[i].is_nan() && f16s[i].is_nan() && bf16s[i].is_nan(), "{}", what("NaN"));
            } else {
                assert_eq!(f32s[i].to_bits(), x.to_bits(), "{}", what("f32"));
                assert_eq!(f16s[i].to_bits(), f16::from_f32(x).to_bits(), "{}", what("f16"));
                assert_eq!(bf16s[i].to_bits(), bf16::from_f32(x).to_bits(), "{}", what("bf16"));
            }
        }
    }
}

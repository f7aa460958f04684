//! What the contract fixes to the bit: the operations of a rotation, and the order of every chain of multiply-adds.
//!
//! A tier that keeps to it gives the same bits whichever path a key takes and wherever a tile ends, and two tiers with
//! fused multiply-adds give the same scores. Zeros of both signs count as the same, and so do all NaNs.

use super::*;
use rotile_core::TierName;

/// A NaN that no kernel makes.
const UNTOUCHED: u32 = 0x7fc0_dead;

fn same(a: f32, b: f32) -> bool {
    a == b || (a.is_nan() && b.is_nan())
}

fn expect_same(got: &[f32], want: &[f32], what: &dyn Fn() -> String) {
    assert_eq!(got.len(), want.len(), "{}", what());
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        assert!(same(*got, *want), "{}: element {i} is {got:e}, not {want:e} to the bit", what());
    }
}

impl Scattered {
    fn f32s(&self) -> Vec<Vec<f32>> {
        self.values.iter().map(|row| row.iter().map(|x| *x as f32).collect()).collect()
    }
}

impl Battery {
    /// One multiply-add as this tier does it: the portable one has none that is fused.
    fn multiply_add(&self, a: f32, b: f32, c: f32) -> f32 {
        if self.k.tier == TierName::Portable { a * b + c } else { a.mul_add(b, c) }
    }

    /// One run of products.
    fn chain(&self, a: &[f32], b: &[f32]) -> f32 {
        a.iter().zip(b).fold(0.0, |sum, (a, b)| self.multiply_add(*a, *b, sum))
    }

    /// `before * factor` and products in runs of `run`; the first of the products has index `from`.
    fn runs(&self, run: usize, before: f32, factor: f32, from: usize, a: &[f32], b: &[f32]) -> f32 {
        let first = a.len().min(run - from % run);
        let start = self.multiply_add(before, factor, self.chain(&a[..first], &b[..first]));
        let rest = a[first..].chunks(run).zip(b[first..].chunks(run));
        rest.fold(start, |sum, (a, b)| sum + self.chain(a, b))
    }

    /// Rows as they are after rotation and scaling.
    fn turned_bits(&self, rows: &Scattered, turned: Option<&Turned>, scale: f32) -> Vec<Vec<f32>> {
        let mut rows = rows.f32s();
        for (r, row) in rows.iter_mut().enumerate() {
            if let Some(t) = turned {
                for i in 0..t.turn.pairs {
                    let (a, b) = t.turn.pair(i);
                    let (x, y, cos, sin) = (row[a], row[b], t.cos[t.at[r] + i], t.sin[t.at[r] + i]);
                    (row[a], row[b]) = if self.k.tier == TierName::Portable {
                        let [x, y, cos, sin] = [x, y, cos, sin].map(f64::from);
                        ((x * cos - y * sin) as f32, (y * cos + x * sin) as f32)
                    } else {
                        (x.mul_add(cos, -(y * sin)), y.mul_add(cos, x * sin))
                    };
                }
            }
            row.iter_mut().for_each(|x| *x *= scale);
        }
        rows
    }

    pub(super) fn bits(&self, dim: usize, dtype: DType) {
        let mut rng = Rng::new(500 + dim as u64);
        for (i, turn) in turns(dim).into_iter().enumerate() {
            let side = SIDES[(i + 1) % 2];
            let what = format!("dim {dim}, {dtype}, {turn:?}");
            self.score_bits(&mut rng, dim, dtype, turn, side, &what);
            self.decode_score_bits(&mut rng, dim, dtype, turn, side, &what);
        }
        for rows in 1..=self.k.decode_rows {
            self.decode_sum_bits(&mut rng, rows, dim, dtype);
        }
        self.weighted_sum_bits(&mut rng, dim, dtype);
    }

    /// Loading, packing and the score tile.
    fn score_bits(&self, rng: &mut Rng, dim: usize, dtype: DType, turn: Option<Turn>, side: Side, shape: &str) {
        let Kernels { mr, nr, .. } = *self.k;
        let (rows, keys) = (rng.size(1, mr), rng.size(1, 3 * nr));
        let (q, k) = (Scattered::new(rng, rows, dim, dtype, side), Scattered::new(rng, keys, dim, dtype, side));
        let [q_turned, k_turned] = [rows, keys].map(|n| turn.map(|turn| Turned::new(rng, turn, n, side)));
        let q_bits = self.turned_bits(&q, q_turned.as_ref(), 0.37);
        let k_bits = self.turned_bits(&k, k_turned.as_ref(), 1.0);
        let q_rotation = q_turned.as_ref().map(|t| t.rotation(0, rows));
        let loaded = self.loaded(q.rows(), q_rotation, 0.37, 1);
        expect_same(&loaded, &q_bits.concat(), &|| self.what("load", format!("{rows} rows, {shape}")));
        let s = self.packed_scores((q.rows(), q_rotation, 0.37), &k, k_turned.as_ref());
        for (s, q) in s.iter().zip(&q_bits) {
            let want: Vec<f32> = k_bits.iter().map(|k| self.runs(self.k.dot_run, 0.0, 1.0, 0, q, k)).collect();
            expect_same(&s[..keys], &want, &|| self.what("scores", format!("{rows} x {keys}, {shape}: in runs")));
        }
    }

    /// Keys that are rotated on the fly have the bits of loaded ones; no row depends on the others.
    fn decode_score_bits(&self, rng: &mut Rng, dim: usize, dtype: DType, turn: Option<Turn>, side: Side, shape: &str) {
        let (rows, keys) = (self.k.decode_rows, rng.size(1, 9));
        let k = Scattered::new(rng, keys, dim, dtype, side);
        let turned = turn.map(|turn| Turned::new(rng, turn, keys, side));
        let run = |q: &[f32], rows: usize| -> Vec<Vec<f32>> {
            let mut s = vec![f32::NAN; rows * keys];
            let rotation = turned.as_ref().map(|t| t.rotation(0, keys));
            let (k, s_ref) = (k.rows(), &mut s);
            let args = DecodeScores { q, q_stride: dim, rows, k, rotation, ahead: None, s: s_ref, s_stride: keys };
            // SAFETY: the caller's tier proves that the CPU has the features.
            unsafe { (self.k.decode_scores)(args) };
            s.chunks(keys).map(<[f32]>::to_vec).collect()
        };
        let q = Guarded::from_slice(&rng.normal(rows * dim), side);
        let all = run(&q, rows);
        for (r, q) in q.chunks(dim).enumerate() {
            expect_same(&run(q, 1)[0], &all[r], &|| self.what("decode_scores", format!("{shape}: row {r} alone")));
        }
        // A query of one 1 shows one element of every key.
        let k_bits = self.turned_bits(&k, turned.as_ref(), 1.0);
        for d in (0..dim).step_by(1 + dim / 12) {
            let mut q = vec![0.0; dim];
            q[d] = 1.0;
            let want: Vec<f32> = k_bits.iter().map(|k| k[d]).collect();
            expect_same(&run(&q, 1)[0], &want, &|| self.what("decode_scores", format!("{shape}: element {d} of keys")));
        }
    }

    fn decode_sum_bits(&self, rng: &mut Rng, rows: usize, dim: usize, dtype: DType) {
        let keys = rng.size(1, 21);
        let (v, ahead) =
            (Scattered::new(rng, keys, dim, dtype, Side::END), Scattered::new(rng, 5, dim, dtype, Side::END));
        let p = Guarded::from_slice(&rng.normal(rows * keys), Side::END);
        let factors = Guarded::from_slice(&rng.normal(rows), Side::END);
        let stride = dim + 3;
        let before = rng.normal((rows - 1) * stride + dim);
        let mut acc = Guarded::from_slice(&before, Side::END);
        let args = DecodeSum {
            p: &p,
            p_stride: keys,
            rows,
            v: v.rows(),
            ahead: Some(ahead.rows()),
            factors: &factors,
            acc: &mut acc,
            acc_stride: stride,
        };
        // SAFETY: the caller's tier proves that the CPU has the features.
        unsafe { (self.k.decode_sum)(args) };
        let mut want = before;
        let values = v.f32s();
        for (r, row) in want.chunks_mut(stride).enumerate() {
            for (c, x) in row[..dim].iter_mut().enumerate() {
                let column: Vec<f32> = values.iter().map(|v| v[c]).collect();
                *x = self.multiply_add(*x, factors[r], self.chain(&p[r * keys..][..keys], &column));
            }
        }
        expect_same(&acc, &want, &|| {
            self.what("decode_sum", format!("{rows} x {keys}, dim {dim}, {dtype}: one chain"))
        });
    }

    fn weighted_sum_bits(&self, rng: &mut Rng, dim: usize, dtype: DType) {
        let Kernels { mr, nv, .. } = *self.k;
        let padded = dim.next_multiple_of(nv);
        let tiles = [(8, 0, 8), (24, 3, 17), (33, 1, 33), (16, 5, 6), (100, 7, 97), (64, 32, 64), (300, 60, 290)];
        for (i, (tile_keys, from, to)) in tiles.into_iter().enumerate() {
            let fresh = i % 2 == 1;
            let what = || self.what("weighted_sum", format!("{from}..{to} of {tile_keys}, dim {dim}, {dtype}"));
            let v = Scattered::new(rng, to - from, dim, dtype, Side::END);
            let mut tile = Guarded::filled(tile_keys * padded, f32::from_bits(UNTOUCHED), Side::END);
            // SAFETY: the caller's tier proves that the CPU has the features.
            unsafe { (self.k.pack_v)(v.rows(), from, tile_keys, &mut tile) };
            let outside = tile.iter().enumerate().filter(|(i, _)| !(from..to).contains(&(i / nv % tile_keys)));
            assert!(outside.map(|(_, x)| x.to_bits()).all(|x| x == UNTOUCHED), "{}: packed beside its rows", what());
            // Weights and values outside `from..to` are NaN: they must not be read.
            let p_stride = tile_keys + 1;
            let mut p = Guarded::filled((mr - 1) * p_stride + to, f32::NAN, Side::END);
            p.chunks_mut(p_stride).for_each(|row| row[from..to].copy_from_slice(&rng.normal(to - from)));
            let factors = Guarded::from_slice(&rng.normal(mr), Side::END);
            let acc_stride = padded + 1;
            let before = rng.normal((mr - 1) * acc_stride + padded);
            // What is fresh must not be read: it is NaN.
            let mut acc = Guarded::from_slice(&before, Side::END);
            if fresh {
                acc.chunks_mut(acc_stride).for_each(|row| row[..padded].fill(f32::NAN));
            }
            let args = WeightedSum {
                p: &p,
                p_stride,
                from,
                to,
                v: &tile,
                tile_keys,
                factors: &factors,
                fresh,
                acc: &mut acc,
                acc_stride,
            };
            // SAFETY: as above.
            unsafe { (self.k.weighted_sum)(args) };
            let mut want = before;
            let values = v.f32s();
            for (r, row) in want.chunks_mut(acc_stride).enumerate() {
                for (c, x) in row[..padded].iter_mut().enumerate() {
                    let column: Vec<f32> = values.iter().map(|v| v.get(c).copied().unwrap_or(0.0)).collect();
                    let start = if fresh { 0.0 } else { *x };
                    *x = self.runs(
                        self.k.sum_run,
                        start,
                        factors[r],
                        from,
                        &p[r * p_stride + from..][..to - from],
                        &column,
                    );
                }
            }
            expect_same(&acc, &want, &|| format!("{}: in runs", what()));
        }
    }

    /// The same visible keys give the same bits, whatever is masked beside them and however: outside `lo..hi`, or by a
    /// score of -inf.
    pub(super) fn softmax_embedding(&self) {
        let mut rng = Rng::new(9);
        for len in (1..=6).map(|n| n * 8).chain((1..=4).map(|n| n * self.k.nr)).chain([256]) {
            for round in 0..40 {
                let scale = [1.0, 12.0, 300.0][round % 3];
                let (lo, hi) = (rng.size(0, len / 2), rng.size(len / 2 + 1, len));
                let start =
                    [RowState::EMPTY, RowState { max: 3.0, sum: 1.5 }, RowState { max: -40.0, sum: 0.25 }][round % 3];
                let mut s: Vec<f32> = rng.normal(len).iter().map(|x| x * scale).collect();
                let what = || self.what("softmax", format!("{lo}..{hi} of {len}, from {start:?}"));
                let masked = [f32::NAN, f32::INFINITY, 1e30, f32::NEG_INFINITY];
                (0..len).filter(|i| !(lo..hi).contains(i)).for_each(|i| s[i] = masked[i % 4]);
                let mut state = start;
                let (p, factor) = self.row(&s, lo, hi, &mut state);

                let mut open = s.clone();
                open[..lo].fill(f32::NEG_INFINITY);
                open[hi..].fill(f32::NEG_INFINITY);
                let (mut wide, lo, hi) = (start, rng.size(0, lo), rng.size(hi, len));
                let (q, wide_factor) = self.row(&open, lo, hi, &mut wide);
                let same = (wide, wide_factor, bits(&q)) == (state, factor, bits(&p));
                assert!(same, "{}: masked by -inf up to {lo}..{hi} changes bits", what());
            }
        }
        // NaN and +inf among nothing but -inf, and nothing but -inf after numbers.
        for (place, bad) in (0..16).flat_map(|place| [(place, f32::NAN), (place, f32::INFINITY)]) {
            let mut s = vec![f32::NEG_INFINITY; 16.max(self.k.nr)];
            s[place] = bad;
            for start in [RowState::EMPTY, RowState { max: 4.0, sum: 2.0 }] {
                let mut state = start;
                let len = s.len().next_multiple_of(self.k.nr);
                s.resize(len, f32::NEG_INFINITY);
                self.row(&s, 0, len, &mut state);
                assert!(state.sum.is_nan(), "{}", self.what("softmax", format!("{bad} at {place} among -inf is lost")));
                self.row(&vec![f32::NEG_INFINITY; len], 0, len, &mut state);
                assert!(state.sum.is_nan(), "{}", self.what("softmax", format!("{bad} is lost to a later tile")));
            }
        }
        let mut state = RowState::EMPTY;
        self.row(&vec![2.5; self.k.nr * 2], 0, self.k.nr, &mut state);
        let before = state;
        let (p, factor) = self.row(&vec![f32::NEG_INFINITY; self.k.nr * 2], 1, self.k.nr, &mut state);
        let kept = state == before && factor == 1.0 && p.iter().all(|x| *x == 0.0);
        assert!(kept, "{}", self.what("softmax", "a tile of -inf changes a row".into()));
        // The last weight that is not 0, and the first that is: no denormal between them.
        for (s, zero) in
            [(-125.5, false), (-126.0, false), (-126.5, true), (-127.0, true), (-128.0, true), (-1e9, true)]
        {
            let mut state = RowState { max: 0.0, sum: 1.0 };
            let (p, _) = self.row(&vec![s; self.k.nr], 0, self.k.nr, &mut state);
            let right = p.iter().all(|x| if zero { *x == 0.0 } else { x.is_normal() });
            assert!(right, "{}", self.what("softmax", format!("a weight of 2^{s} is {:e}", p[0])));
        }
    }
}

//! Attention in f64 from the conventions alone: slow, and as plain as can be. Nothing of the library is used but its
//! vocabulary.

use crate::data::Data;
use rotile_core::rotary::PairStyle;

/// A rotation of heads: which pairs, how fast, how large.
#[derive(Clone, Debug)]
pub struct Rotation {
    /// How elements pair up.
    pub style: PairStyle,
    /// First element that turns.
    pub offset: usize,
    /// Distance between the elements of a half-style pair.
    pub distance: usize,
    /// Turn per position of each pair.
    pub inv_freq: Vec<f64>,
    /// Factor on cos and sin.
    pub amplitude: f64,
}

impl Rotation {
    /// Rotates a head to a position.
    pub fn apply(&self, row: &[f64], position: f64) -> Vec<f64> {
        let mut out = row.to_vec();
        for (i, f) in self.inv_freq.iter().enumerate() {
            let (a, b) = match self.style {
                PairStyle::Interleaved => (self.offset + 2 * i, self.offset + 2 * i + 1),
                _ => (self.offset + i, self.offset + i + self.distance),
            };
            if *f == 0.0 && self.amplitude == 1.0 {
                continue;
            }
            let (sin, cos) = (position * f).sin_cos();
            out[a] = self.amplitude * (row[a] * cos - row[b] * sin);
            out[b] = self.amplitude * (row[b] * cos + row[a] * sin);
        }
        out
    }
}

/// Heads of a problem.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Heads {
    /// Query heads.
    pub q: usize,
    /// Key and value heads.
    pub kv: usize,
    /// Elements of query and key heads.
    pub dim_qk: usize,
    /// Elements of value and output heads.
    pub dim_v: usize,
}

/// One sequence, in `[token, head, dim]` order.
#[derive(Clone, Debug)]
pub struct Seq {
    /// Queries.
    pub q_len: usize,
    /// Keys.
    pub kv_len: usize,
    /// Key index of the first query.
    pub q_start: i64,
    /// Queries, not rotated.
    pub q: Data,
    /// Keys.
    pub k: Data,
    /// Values.
    pub v: Data,
    /// Position of each query.
    pub q_positions: Vec<u32>,
    /// Position of each key.
    pub k_positions: Vec<u32>,
    /// Keys from index 0 on that every query sees, window permitting.
    pub prefix_len: usize,
    /// Additive bias, `[head, query, key]`.
    pub bias: Option<Data>,
    /// Boolean mask of all heads, `[query, key]`; true = attend.
    pub mask: Option<Vec<bool>>,
}

/// A batch of sequences and what is done with them.
#[derive(Clone, Debug)]
pub struct Problem {
    /// Heads.
    pub heads: Heads,
    /// The rotation, if any.
    pub rotation: Option<Rotation>,
    /// Whether queries are to be rotated.
    pub rotate_q: bool,
    /// Whether the keys given are rotated already.
    pub keys_rotated: bool,
    /// Factor on the scores.
    pub scale: f64,
    /// Key `j` is visible to query `i` only if `j <= q_start + i`.
    pub causal: bool,
    /// Keys before the query's own index that are visible.
    pub left: Option<u64>,
    /// Keys after it.
    pub right: Option<u64>,
    /// Cap on the scores.
    pub softcap: Option<f64>,
    /// ALiBi slopes, one per query head.
    pub alibi: Option<Vec<f32>>,
    /// Attention sinks, one per query head.
    pub sinks: Option<Vec<f32>>,
    /// The sequences.
    pub sequences: Vec<Seq>,
}

/// What attention should give for one sequence, and how far from it a kernel may be.
#[derive(Clone, Debug)]
pub struct Expected {
    /// Output, `[token, head, dim]`.
    pub out: Vec<f64>,
    /// Natural-log sums of exponentials, `[token, head]`.
    pub lse: Vec<f64>,
    /// For each row, `|scale| |q| max |k|` over the keys it sees.
    pub s: Vec<f64>,
    /// For each row, the largest `|v|` it sees.
    pub v_max: Vec<f64>,
}

impl Expected {
    /// Error allowed in each row of an f32 output: `(4e-6 + 2^-23 S) max |V|`.
    pub fn out_bounds(&self) -> Vec<f64> {
        self.lse_bounds().iter().zip(&self.v_max).map(|(b, v)| b * v).collect()
    }

    /// Error allowed in each lse: `4e-6 + 2^-23 S`.
    pub fn lse_bounds(&self) -> Vec<f64> {
        let eps = f64::from(f32::EPSILON);
        self.s.iter().map(|s| 4e-6 + eps * s).collect()
    }
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn norm(a: &[f64]) -> f64 {
    dot(a, a).sqrt()
}

/// Rows of `dim`, rotated to the position of their token; `heads` rows share a token.
fn rotated(rows: &[f64], dim: usize, heads: usize, rotation: Option<&Rotation>, positions: &[u32]) -> Vec<Vec<f64>> {
    rows.chunks_exact(dim)
        .enumerate()
        .map(|(r, row)| match rotation {
            Some(rotation) => rotation.apply(row, f64::from(positions[r / heads])),
            None => row.to_vec(),
        })
        .collect()
}

impl Problem {
    /// Attends one of the sequences.
    pub fn expected(&self, index: usize) -> Expected {
        let Heads { q: heads_q, kv: heads_kv, dim_qk, dim_v } = self.heads;
        let s = &self.sequences[index];
        let q_rotation = self.rotation.as_ref().filter(|_| self.rotate_q);
        let k_rotation = self.rotation.as_ref().filter(|_| !self.keys_rotated);
        let q = rotated(&s.q.to_f64(), dim_qk, heads_q, q_rotation, &s.q_positions);
        let k = rotated(&s.k.to_f64(), dim_qk, heads_kv, k_rotation, &s.k_positions);
        let v = s.v.to_f64();
        let bias = s.bias.as_ref().map(Data::to_f64);
        let rows = s.q_len * heads_q;
        let mut e =
            Expected { out: vec![0.0; rows * dim_v], lse: vec![0.0; rows], s: vec![0.0; rows], v_max: vec![0.0; rows] };
        for (row, q) in q.iter().enumerate() {
            let (i, head) = (row / heads_q, row % heads_q / (heads_q / heads_kv));
            let (own, q_head) = (s.q_start + i as i64, row % heads_q);
            let visible = |j: usize| {
                let distance = i128::from(j as i64 - own);
                let bias = bias.as_ref().map_or(0.0, |b| b[(q_head * s.q_len + i) * s.kv_len + j]);
                (!self.causal || distance <= 0 || j < s.prefix_len)
                    && self.left.is_none_or(|left| -distance <= i128::from(left))
                    && self.right.is_none_or(|right| distance <= i128::from(right))
                    && s.mask.as_ref().is_none_or(|mask| mask[i * s.kv_len + j])
                    && bias != f64::NEG_INFINITY
            };
            let score = |j: usize, dot: f64| {
                let scaled = self.scale * dot;
                let capped = self.softcap.map_or(scaled, |cap| cap * (scaled / cap).tanh());
                let slope = self.alibi.as_ref().map_or(0.0, |slopes| f64::from(slopes[q_head]));
                let bias = bias.as_ref().map_or(0.0, |b| b[(q_head * s.q_len + i) * s.kv_len + j]);
                capped - slope * (j as i64 - own).abs() as f64 + bias
            };
            let mut scores = Vec::new();
            for j in (0..s.kv_len).filter(|&j| visible(j)) {
                let (key, value) = (&k[j * heads_kv + head], &v[(j * heads_kv + head) * dim_v..][..dim_v]);
                scores.push((j, score(j, dot(q, key))));
                // What is not finite has no bound: it shows as NaN or infinity, and those are compared exactly.
                let finite = |x: &f64| x.is_finite();
                e.s[row] =
                    Some(self.scale.abs() * norm(q) * norm(key)).filter(finite).map_or(e.s[row], |s| s.max(e.s[row]));
                e.v_max[row] = value.iter().filter(|x| finite(x)).fold(e.v_max[row], |m, x| m.max(x.abs()));
            }
            // A score of -inf is a masked key.
            scores.retain(|(_, score)| *score != f64::NEG_INFINITY);
            // A sink is one more key, of value 0.
            let sink = self.sinks.as_ref().map_or(f64::NEG_INFINITY, |sinks| f64::from(sinks[q_head]));
            let max = scores.iter().fold(sink, |m, (_, score)| m.max(*score));
            if max == f64::NEG_INFINITY && scores.is_empty() {
                e.lse[row] = f64::NEG_INFINITY;
                continue;
            }
            let sum = scores.iter().map(|(_, score)| (score - max).exp()).sum::<f64>() + (sink - max).exp();
            e.lse[row] = max + sum.ln();
            let out = &mut e.out[row * dim_v..][..dim_v];
            for (j, score) in scores {
                let weight = (score - max).exp() / sum;
                let value = &v[(j * heads_kv + head) * dim_v..][..dim_v];
                out.iter_mut().zip(value).for_each(|(out, v)| *out += weight * v);
            }
        }
        e
    }
}

//! Makes problems: from a short description, or at random over everything that the planner accepts.

use crate::data::{Data, Rng};
use crate::guard::Side;
use crate::reference::{Heads, Problem, Rotation, Seq};
use crate::trial::{How, Tail, Via};
use crate::vectors::Part;
use rotile_core::rotary::PairStyle;
use rotile_core::{DType, Keys};

/// The storage types.
pub const DTYPES: [DType; 3] = [DType::F32, DType::F16, DType::Bf16];

impl Rotation {
    /// A slice of `rotary_dim` elements at `offset`, base 10,000.
    pub fn slice(style: PairStyle, offset: usize, rotary_dim: usize) -> Self {
        let pairs = rotary_dim / 2;
        let inv_freq = (0..pairs).map(|i| 1e4f64.powf(-2.0 * i as f64 / rotary_dim as f64)).collect();
        Rotation { style, offset, distance: pairs, inv_freq, amplitude: 1.0 }
    }
}

/// A short description of a problem.
#[derive(Clone, Debug)]
pub struct Want {
    /// Heads.
    pub heads: Heads,
    /// q_len, kv_len and q_start of each sequence.
    pub sequences: Vec<(usize, usize, i64)>,
    /// Types of Q, K and V.
    pub dtypes: [DType; 3],
    /// Rotation.
    pub rotation: Option<Rotation>,
    /// Causal mask.
    pub causal: bool,
}

impl Want {
    /// `heads_q`/`heads_kv` heads of `dim`, rotated whole (its even part), f32, causal; no sequences yet.
    pub fn new(q: usize, kv: usize, dim: usize) -> Self {
        Want {
            heads: Heads { q, kv, dim_qk: dim, dim_v: dim },
            sequences: Vec::new(),
            dtypes: [DType::F32; 3],
            rotation: Some(Rotation::slice(PairStyle::Half, 0, dim / 2 * 2)).filter(|r| !r.inv_freq.is_empty()),
            causal: true,
        }
    }

    /// One more sequence, its last query on its last key.
    #[must_use]
    pub fn with(self, q_len: usize, kv_len: usize) -> Self {
        self.with_start(q_len, kv_len, kv_len as i64 - q_len as i64)
    }

    /// One more sequence, its first query on key `q_start`.
    #[must_use]
    pub fn with_start(mut self, q_len: usize, kv_len: usize, q_start: i64) -> Self {
        self.sequences.push((q_len, kv_len, q_start));
        self
    }

    /// All of Q, K, V in `dtype`.
    #[must_use]
    pub fn of(mut self, dtype: DType) -> Self {
        self.dtypes = [dtype; 3];
        self
    }

    /// The problem, with seeded data; positions are key indices.
    pub fn build(&self, seed: u64) -> Problem {
        let mut rng = Rng::new(seed);
        let Heads { q: hq, kv: hkv, dim_qk, dim_v } = self.heads;
        let mut sequence = |&(q_len, kv_len, q_start): &(usize, usize, i64)| Seq {
            q_len,
            kv_len,
            q_start,
            q: Data::round(&rng.normal(q_len * hq * dim_qk), self.dtypes[0]),
            k: Data::round(&rng.normal(kv_len * hkv * dim_qk), self.dtypes[1]),
            v: Data::round(&rng.normal(kv_len * hkv * dim_v), self.dtypes[2]),
            q_positions: (0..q_len as i64).map(|i| (q_start + i).max(0) as u32).collect(),
            k_positions: (0..kv_len as u32).collect(),
            prefix_len: 0,
            bias: None,
            mask: None,
        };
        Problem {
            heads: self.heads,
            rotation: self.rotation.clone(),
            rotate_q: true,
            keys_rotated: false,
            scale: 1.0 / (dim_qk as f64).sqrt(),
            causal: self.causal,
            left: None,
            right: None,
            softcap: None,
            alibi: None,
            sinks: None,
            sequences: self.sequences.iter().map(&mut sequence).collect(),
        }
    }
}

/// Masks and what else happens to scores, at random.
fn draw_scores(rng: &mut Rng, problem: &mut Problem) {
    let heads = problem.heads.q;
    if rng.one_in(3) {
        problem.left = rng.one_in(2).then(|| rng.size(0, 40) as u64);
        problem.right = rng.one_in(2).then(|| rng.size(0, 20) as u64);
    }
    if rng.one_in(5) {
        problem.softcap = Some(f64::from(rng.uniform(0.5, 50.0)));
    }
    if rng.one_in(5) {
        problem.alibi = Some((0..heads).map(|_| rng.uniform(0.0, 0.5)).collect());
    }
    if rng.one_in(5) {
        problem.sinks = Some((0..heads).map(|_| rng.uniform(-3.0, 6.0)).collect());
    }
    let (prefix, bias, mask) = (rng.one_in(6), rng.one_in(6), rng.one_in(6));
    let dtype = DTYPES[rng.size(0, 2)];
    for s in &mut problem.sequences {
        // A query of a negative index has no position by index, so a prefix must not show it keys.
        if prefix && problem.causal && s.q_start >= 0 {
            s.prefix_len = rng.size(0, s.kv_len + 2);
        }
        if bias {
            let hide = rng.one_in(2);
            let mut values = rng.normal(heads * s.q_len * s.kv_len);
            values.iter_mut().filter(|_| hide && rng.one_in(4)).for_each(|x| *x = f32::NEG_INFINITY);
            s.bias = Some(Data::round(&values, dtype));
        }
        if mask {
            // In runs, so that whole tiles are hidden.
            let mut seen = true;
            let mut next = || {
                seen ^= rng.one_in(12);
                seen
            };
            s.mask = Some((0..s.q_len * s.kv_len).map(|_| next()).collect());
        }
    }
}

/// A whole problem at random, and a way to run it. Small enough for the f64 attention.
pub fn random(rng: &mut Rng) -> (Problem, Part, How) {
    let kv = rng.size(1, 3);
    let group = [1, 1, 2, 3, 4, 7, 8][rng.size(0, 6)];
    let dims = [1, 2, 3, 8, 16, 24, 33, 40, 64, 72, 80, 96, 128];
    let dim_qk = dims[rng.size(0, dims.len() - 1)];
    let dim_v = if rng.one_in(3) { dims[rng.size(0, dims.len() - 1)] } else { dim_qk };
    let mut want = Want::new(kv * group, kv, dim_qk);
    want.heads.dim_v = dim_v;
    want.dtypes = std::array::from_fn(|_| DTYPES[rng.size(0, 2)]);
    if rng.one_in(2) {
        want.dtypes = [DTYPES[rng.size(0, 2)]; 3];
    }
    want.causal = !rng.one_in(4);

    let style = [PairStyle::Half, PairStyle::Interleaved][rng.size(0, 1)];
    let mut part = Part::Slice;
    let pairs = rng.size(0, dim_qk / 2);
    want.rotation = match rng.size(0, 4) {
        0 => None,
        1 if dim_qk % 2 == 0 => {
            let mut rotation = Rotation::slice(style, 0, dim_qk);
            rotation.inv_freq[pairs..].fill(0.0);
            part = Part::Proportional(pairs);
            Some(rotation)
        }
        2 => Some(Rotation::slice(style, rng.size(0, dim_qk - 2 * pairs), 2 * pairs)),
        _ => Some(Rotation::slice(style, 0, dim_qk / 2 * 2)),
    }
    .filter(|r| !r.inv_freq.is_empty());
    if let Some(rotation) = &mut want.rotation
        && part == Part::Slice
        && rng.one_in(4)
    {
        rotation.amplitude = 1.19;
    }

    for _ in 0..rng.size(1, 3) {
        let (q_len, kv_len) = match rng.size(0, 5) {
            0 => (1, rng.size(0, 300)),
            1 => (rng.size(0, 6), rng.size(0, 80)),
            2 => (rng.size(1, 3), rng.size(1000, 1100)),
            _ => (rng.size(1, 70), rng.size(0, 90)),
        };
        let start = kv_len as i64 - q_len as i64;
        // A query of a negative index has no position, so it must see nothing.
        let shift = if want.causal { rng.int(-3, 3) } else { 0 };
        let start = if want.causal { start + shift } else { start.max(0) };
        want = want.with_start(q_len, kv_len, start);
    }
    let mut problem = want.build(rng.int(0, i64::MAX) as u64);
    if rng.one_in(4) {
        problem.scale *= f64::from(rng.uniform(-2.0, 6.0));
    }
    draw_scores(rng, &mut problem);
    problem.rotate_q = !rng.one_in(8);
    problem.keys_rotated = rng.one_in(8);
    let by_index = rng.one_in(3);
    if !by_index {
        for s in &mut problem.sequences {
            let base = rng.int(0, 100_000) as u32;
            s.q_positions.iter_mut().chain(&mut s.k_positions).for_each(|p| *p += base);
            if rng.one_in(3) {
                s.k_positions.iter_mut().for_each(|p| *p = *p / 2 + 5);
            }
        }
    }

    let keys = if problem.keys_rotated || rng.one_in(2) { Keys::Rotated } else { Keys::Raw };
    let mut how = How {
        via: match rng.size(0, 4) {
            0 => Via::Attend,
            1 => Via::Cached,
            2 => Via::AppendThenCached,
            3 => Via::AppendAttend(1),
            _ => Via::AppendAttend(rng.size(0, 40)),
        },
        keys,
        cache_dtype: DTYPES[rng.size(0, 2)],
        out_dtype: if rng.one_in(2) { want.dtypes[0] } else { DType::F32 },
        head_major: rng.one_in(2),
        gap: rng.size(0, 3),
        side: [Side::START, Side::END, Side::Start(1), Side::End(3)][rng.size(0, 3)],
        shuffle: rng.one_in(2).then(|| rng.int(0, 1 << 40) as u64),
        by_index,
        threads: [1, 2, 64][rng.size(0, 2)],
        l1_bytes: [0, 4 << 10, 48 << 10][rng.size(0, 2)],
        l2_bytes: [0, 128 << 10, 2 << 20][rng.size(0, 2)],
        tail: [Tail::Nan, Tail::Infinity, Tail::Zero][rng.size(0, 2)],
        bit_masks: rng.one_in(2),
    };
    // Keys that are raw in memory can be attended to as rotated only if the problem says so.
    if matches!(how.via, Via::Attend | Via::Cached) && !problem.keys_rotated {
        how.keys = Keys::Raw;
    }
    // Keys that are rotated already must not be rotated again when stored.
    if problem.keys_rotated && matches!(how.via, Via::AppendThenCached | Via::AppendAttend(_)) {
        how.via = Via::Cached;
    }
    (problem, part, how)
}

//! Model shapes and the two ways through one attention call: rotation in the tile, or as a pass of its own before it.

use rotile::rotary::{PairStyle, RotarySpec, RotaryTable};
use rotile::{
    AttentionSpec, Batch, Capabilities, DType, Error, Keys, Operands, Operation, Plan, Runner, Sequence, Tensor,
    TensorMut, TierName,
};
use rotile_testkit::data::{Data, Rng};

/// The capabilities of this machine, or of the tier that a feature of this crate pins.
///
/// # Errors
///
/// A message that says which pin can't be honoured.
pub fn pinned() -> Result<Capabilities, String> {
    let pins = [
        (cfg!(feature = "avx2"), TierName::Avx2),
        (cfg!(feature = "avx512"), TierName::Avx512),
        (cfg!(feature = "neon"), TierName::Neon),
    ];
    let pins: Vec<TierName> = pins.into_iter().filter_map(|(on, tier)| on.then_some(tier)).collect();
    let capabilities = rotile::capabilities().map_err(|e| e.to_string())?;
    let capabilities = match pins[..] {
        [] => capabilities,
        [tier] => capabilities.require(tier),
        _ => {
            return Err(format!("two tiers are pinned at once ({pins:?}): give one of avx2, avx512, neon"));
        }
    };
    match capabilities.tier() {
        Ok(_) => Ok(capabilities),
        Err(error) => Err(format!("{error}; run without that feature to bench the best tier here")),
    }
}

/// A layer of a model at one step.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Model and numbers, for the table.
    pub name: &'static str,
    /// Query heads.
    pub heads_q: usize,
    /// Key heads.
    pub heads_kv: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Prompt tokens, or cached positions.
    pub tokens: usize,
}

impl Shape {
    const fn new(name: &'static str, heads_q: usize, heads_kv: usize, head_dim: usize, tokens: usize) -> Self {
        Shape { name, heads_q, heads_kv, head_dim, tokens }
    }

    /// Useful FLOPs: 4 head_dim for each visible (query, key) pair and query head.
    pub fn flops(&self, step: Step) -> f64 {
        let pairs = match step {
            Step::Prefill => self.tokens as f64 * (self.tokens as f64 + 1.0) / 2.0,
            Step::Decode(_) => self.tokens as f64,
        };
        4.0 * self.head_dim as f64 * self.heads_q as f64 * pairs
    }
}

/// Prompts: causal attention over all tokens, f32.
pub const PREFILL: [Shape; 5] = [
    Shape::new("Llama-3-8B 32/8x128, 128 tokens", 32, 8, 128, 128),
    Shape::new("Llama-3-8B 32/8x128, 512 tokens", 32, 8, 128, 512),
    Shape::new("Llama-3-8B 32/8x128, 2048 tokens", 32, 8, 128, 2048),
    Shape::new("Llama-2-7B 32/32x128, 512 tokens", 32, 32, 128, 512),
    Shape::new("Qwen2.5-0.5B 14/2x64, 512 tokens", 14, 2, 64, 512),
];

/// One token over a cache.
pub const DECODE: [Shape; 3] = [
    Shape::new("Llama-3-8B 32/8x128, 4096 cached", 32, 8, 128, 4096),
    Shape::new("Llama-2-7B 32/32x128, 4096 cached", 32, 32, 128, 4096),
    Shape::new("Qwen2.5-0.5B 14/2x64, 2048 cached", 14, 2, 64, 2048),
];

/// Which step of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// All tokens of a prompt at once.
    Prefill,
    /// One token over a cache whose keys are as said.
    Decode(Keys),
}

/// One way through a call, with all its data: nothing is allocated while it is timed.
pub struct Lane {
    shape: Shape,
    attend: Plan,
    /// The separate rotary passes over Q and over K.
    rotate: Option<(Plan, Plan)>,
    decode: bool,
    q: Data,
    k: Data,
    v: Data,
    q_rotated: Vec<f32>,
    k_rotated: Vec<f32>,
    out: Vec<f32>,
    table: Vec<f64>,
    runner: Runner,
}

impl Lane {
    /// A lane over seeded data. `fused` rotates in the tile; otherwise a pass of its own rotates Q (and, in prefill, K)
    /// into memory first, and the same attention kernels take them as they are.
    ///
    /// # Errors
    ///
    /// What planning reports.
    pub fn new(
        capabilities: &Capabilities,
        shape: Shape,
        step: Step,
        dtype: DType,
        fused: bool,
    ) -> Result<Lane, Error> {
        let Shape { heads_q, heads_kv, head_dim, tokens, .. } = shape;
        let rotary = RotarySpec::full(PairStyle::Half);
        let mut spec = AttentionSpec::attend(heads_q, heads_kv, head_dim, rotary).with_kv_dtype(dtype);
        spec.keys = match step {
            Step::Prefill => Keys::Raw,
            Step::Decode(keys) => keys,
        };
        if !fused {
            spec.rotate_q = false;
            spec.keys = Keys::Rotated;
        }
        let decode = step != Step::Prefill;
        if decode {
            spec.operation = Operation::AttendCached;
        }
        let rotate = match fused {
            true => None,
            false => Some((
                Plan::new(capabilities, &AttentionSpec::rotate(heads_q, head_dim, rotary))?,
                Plan::new(capabilities, &AttentionSpec::rotate(heads_kv, head_dim, rotary))?,
            )),
        };
        let inv_freq: Vec<f64> =
            (0..head_dim / 2).map(|i| 500_000f64.powf(-2.0 * i as f64 / head_dim as f64)).collect();
        let positions = tokens as u32 + 1;
        let mut table = vec![0.0; RotaryTable::storage_len(inv_freq.len(), positions)?];
        RotaryTable::build(&inv_freq, 1.0, positions, &mut table)?;
        let q_len = if decode { 1 } else { tokens };
        let q_size = q_len * heads_q * head_dim;
        let kv_size = tokens * heads_kv * head_dim;
        Ok(Lane {
            shape,
            attend: Plan::new(capabilities, &spec)?,
            rotate,
            decode,
            q: data(DType::F32, q_size, 1),
            k: data(dtype, kv_size, 2),
            v: data(dtype, kv_size, 3),
            q_rotated: vec![0.0; if fused { 0 } else { q_size }],
            k_rotated: vec![0.0; if fused || decode { 0 } else { kv_size }],
            out: vec![0.0; q_size],
            table,
            runner: Runner::new(1),
        })
    }

    /// The plan of the attention.
    pub fn plan(&self) -> &Plan {
        &self.attend
    }

    /// Runs the lane once, on one thread.
    pub fn run(&mut self) {
        let Shape { heads_q, heads_kv, head_dim, tokens, .. } = self.shape;
        let q_len = if self.decode { 1 } else { tokens };
        let table = RotaryTable::from_storage(&self.table, head_dim / 2, tokens as u32 + 1, 1.0).expect("as built");
        let shape = |tokens, heads| rotile::Shape { batch: 1, tokens, heads, dim: head_dim };
        let fits = "shapes of a lane fit its data";
        let sequence = Sequence::new(q_len, tokens).with_rotary(table);
        if let Some((rotate_q, rotate_k)) = &self.rotate {
            let mut pass = |plan: &Plan, x: &Data, out: &mut Vec<f32>, len: usize, heads: usize, start: usize| {
                let mut sequence = Sequence::new(len, 0).with_rotary(table);
                sequence.q_start = start as i64;
                let operands = Operands::Rotate {
                    x: Tensor::token_major(x.as_slice(), shape(len, heads)).expect(fits),
                    out: TensorMut::token_major(&mut out[..], shape(len, heads)).expect(fits),
                };
                self.runner.run(plan, &mut Batch { operands, sequences: &[sequence] }).expect(fits);
            };
            pass(rotate_q, &self.q, &mut self.q_rotated, q_len, heads_q, tokens - q_len);
            if !self.decode {
                pass(rotate_k, &self.k, &mut self.k_rotated, tokens, heads_kv, 0);
            }
        }
        let separate = self.rotate.is_some();
        let q = if separate { (&self.q_rotated[..]).into() } else { self.q.as_slice() };
        let k = if separate && !self.decode { (&self.k_rotated[..]).into() } else { self.k.as_slice() };
        let q = Tensor::token_major(q, shape(q_len, heads_q)).expect(fits);
        // A cache is [head, token, dim]; a projection's output is [token, head, dim].
        let out = TensorMut::token_major(&mut self.out[..], shape(q_len, heads_q)).expect(fits);
        let operands = if self.decode {
            let k_cache = Tensor::head_major(k, shape(tokens, heads_kv)).expect(fits);
            let v_cache = Tensor::head_major(self.v.as_slice(), shape(tokens, heads_kv)).expect(fits);
            Operands::AttendCached { q, k_cache, v_cache, out, lse: None }
        } else {
            let k = Tensor::token_major(k, shape(tokens, heads_kv)).expect(fits);
            let v = Tensor::token_major(self.v.as_slice(), shape(tokens, heads_kv)).expect(fits);
            Operands::Attend { q, k, v, out, lse: None }
        };
        let sequence = if separate { Sequence::new(q_len, tokens) } else { sequence };
        self.runner.run(&self.attend, &mut Batch { operands, sequences: &[sequence] }).expect(fits);
    }
}

/// Seeded values near normal: a kernel over zeros would be timed on denormals or on luck.
fn data(dtype: DType, len: usize, seed: u64) -> Data {
    Data::round(&Rng::new(seed).normal(len), dtype)
}

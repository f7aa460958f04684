//! Runs one problem through the public API in one of many ways (operation, layout, buffers against guard pages, order of
//! tasks) and gives back what came out. All outputs and unwritten cache slots hold NaN before, and everything around
//! them must be as it was after.

use crate::compare::{self, MaxError};
use crate::data::{Data, Rng};
use crate::guard::{Guarded, Side};
use crate::reference::{Expected, Problem};
use crate::vectors::Part;
use half::{bf16, f16};
use rotile_core::rotary::{Positions, RotarySpec, RotaryTable};
use rotile_core::{
    At, AttentionSpec, Batch, Bias, BoolMask, Capabilities, DType, Error, Keys, Mask, MaskData, Operands, Operation,
    Plan, Scale, Sequence, Shape, Slice, SliceMut, Strides, Tensor, TensorMut, Weights, Window,
};

/// Which operation reads the keys, and from where.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Via {
    /// `attend`.
    Attend,
    /// `attend_cached` over a cache that holds the problem's keys as they are.
    Cached,
    /// `append` of all keys to an empty cache, then `attend_cached`.
    AppendThenCached,
    /// `append` of all keys but the last so many, then `append_attend` of those.
    AppendAttend(usize),
}

/// One way to run a problem.
#[derive(Clone, Debug)]
pub struct How {
    /// The operation.
    pub via: Via,
    /// Whether a cache holds raw or rotated keys; for `attend`, whether memory does.
    pub keys: Keys,
    /// Storage of the cache.
    pub cache_dtype: DType,
    /// Storage of the output.
    pub out_dtype: DType,
    /// Tensors as `[batch, head, token, dim]`, not `[batch, token, head, dim]`.
    pub head_major: bool,
    /// Unused elements between rows.
    pub gap: usize,
    /// Which guard page the buffers touch, and how far off.
    pub side: Side,
    /// Seed of the order in which tasks run; `None` is the natural one.
    pub shuffle: Option<u64>,
    /// Positions as key indices (the problem's must be those) instead of explicit.
    pub by_index: bool,
    /// Threads that plans are told of.
    pub threads: usize,
    /// L1 size that plans are told of.
    pub l1_bytes: usize,
    /// L2 size that plans are told of.
    pub l2_bytes: usize,
    /// What cache slots hold that nobody has written.
    pub tail: Tail,
    /// Boolean masks as bits, not as bytes.
    pub bit_masks: bool,
}

/// What unwritten cache slots hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tail {
    /// A signalling NaN.
    Nan,
    /// Infinity.
    Infinity,
    /// Zeros.
    Zero,
}

impl Default for How {
    fn default() -> Self {
        How {
            via: Via::Attend,
            keys: Keys::Raw,
            cache_dtype: DType::F32,
            out_dtype: DType::F32,
            head_major: false,
            gap: 0,
            side: Side::END,
            shuffle: None,
            by_index: false,
            threads: 1,
            l1_bytes: 0,
            l2_bytes: 0,
            tail: Tail::Nan,
            bit_masks: false,
        }
    }
}

/// What came out, `[token, head, dim]` and `[token, head]` for each sequence.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    /// Outputs.
    pub out: Vec<Data>,
    /// lse.
    pub lse: Vec<Vec<f32>>,
    /// The cached keys, `[token, head, dim]`, where there is a cache.
    pub k_cache: Vec<Data>,
    /// The cached values.
    pub v_cache: Vec<Data>,
    /// The kernel that the plan names for the first sequence.
    pub kernel: &'static str,
}

/// The plan's description of a problem.
pub fn spec(problem: &Problem, part: Part, how: &How) -> AttentionSpec {
    let heads = problem.heads;
    let rotary = match (&problem.rotation, part) {
        (None, _) => RotarySpec::none(),
        (Some(r), Part::Slice) => RotarySpec::at_offset(r.style, r.offset, 2 * r.inv_freq.len()),
        (Some(r), Part::Proportional(turned)) => RotarySpec::proportional(r.style, turned),
    };
    let s = problem.sequences.first();
    let mut spec = AttentionSpec::attend(heads.q, heads.kv, heads.dim_qk, rotary);
    spec.head_dim_v = heads.dim_v;
    spec.q_dtype = s.map_or(DType::F32, |s| s.q.dtype());
    spec.k_dtype = s.map_or(DType::F32, |s| s.k.dtype());
    spec.v_dtype = s.map_or(DType::F32, |s| s.v.dtype());
    (spec.k_cache_dtype, spec.v_cache_dtype) = match how.via {
        Via::Cached => (spec.k_dtype, spec.v_dtype),
        _ => (how.cache_dtype, how.cache_dtype),
    };
    spec.out_dtype = how.out_dtype;
    spec.rotate_q = problem.rotate_q;
    spec.keys = if problem.keys_rotated { Keys::Rotated } else { how.keys };
    spec.mask = if problem.causal { Mask::CAUSAL } else { Mask::NONE };
    if problem.left.is_some() || problem.right.is_some() {
        spec.mask = spec.mask.with_window(Window { left: problem.left, right: problem.right });
    }
    spec.mask.boolean = s.is_some_and(|s| s.mask.is_some());
    spec.bias = s.is_some_and(|s| s.bias.is_some());
    (spec.softcap, spec.alibi, spec.sinks) = (problem.softcap, problem.alibi.is_some(), problem.sinks.is_some());
    spec.scale = Scale::Value(problem.scale);
    spec
}

/// A buffer of any type between guard pages.
enum Buffer {
    F32(Guarded<f32>),
    F16(Guarded<f16>),
    Bf16(Guarded<bf16>),
}

/// The bits of unwritten elements in each type. The NaNs are signalling, of a payload that no arithmetic makes.
const fn fill_bits(tail: Tail) -> (u32, u16, u16) {
    match tail {
        Tail::Nan => (0x7FA5_5A5A, 0x7D5A, 0x7FA5),
        Tail::Infinity => (0x7F80_0000, 0x7C00, 0x7F80),
        Tail::Zero => (0, 0, 0),
    }
}

impl Buffer {
    fn unwritten(len: usize, dtype: DType, side: Side, tail: Tail) -> Self {
        let fill = fill_bits(tail);
        match dtype {
            DType::F32 => Buffer::F32(Guarded::filled(len, f32::from_bits(fill.0), side)),
            DType::F16 => Buffer::F16(Guarded::filled(len, f16::from_bits(fill.1), side)),
            DType::Bf16 => Buffer::Bf16(Guarded::filled(len, bf16::from_bits(fill.2), side)),
            other => panic!("the kit has no buffer of type {other}"),
        }
    }

    fn slice(&self) -> Slice<'_> {
        match self {
            Buffer::F32(b) => Slice::F32(b),
            Buffer::F16(b) => Slice::F16(b),
            Buffer::Bf16(b) => Slice::Bf16(b),
        }
    }

    fn slice_mut(&mut self) -> SliceMut<'_> {
        match self {
            Buffer::F32(b) => SliceMut::F32(b),
            Buffer::F16(b) => SliceMut::F16(b),
            Buffer::Bf16(b) => SliceMut::Bf16(b),
        }
    }

    fn is_fill(&self, i: usize, tail: Tail) -> bool {
        let fill = fill_bits(tail);
        match self {
            Buffer::F32(b) => b[i].to_bits() == fill.0,
            Buffer::F16(b) => b[i].to_bits() == fill.1,
            Buffer::Bf16(b) => b[i].to_bits() == fill.2,
        }
    }
}

/// A tensor in a guarded buffer.
struct Placed {
    buffer: Buffer,
    shape: Shape,
    strides: Strides,
    tail: Tail,
}

impl Placed {
    fn new(dtype: DType, shape: Shape, how: &How, tail: Tail) -> Self {
        let dim = shape.dim + how.gap;
        let padded = Shape { dim, ..shape };
        let strides = if how.head_major { padded.head_major() } else { padded.token_major() };
        let len = if shape.batch * shape.tokens * shape.heads == 0 {
            0
        } else {
            // The gap after the last row is not part of the buffer.
            shape.batch * shape.tokens * shape.heads * dim - how.gap
        };
        Placed { buffer: Buffer::unwritten(len, dtype, how.side, tail), shape, strides, tail }
    }

    fn row(&self, batch: usize, token: usize, head: usize) -> usize {
        batch * self.strides.batch + token * self.strides.token + head * self.strides.head
    }

    /// Writes `[token, head, dim]` rows.
    fn put(&mut self, at: At, data: &Data) {
        let (heads, dim) = (self.shape.heads, self.shape.dim);
        for r in 0..data.len() / dim {
            let row = self.row(at.batch, at.token + r / heads, r % heads);
            match (&mut self.buffer, data) {
                (Buffer::F32(b), Data::F32(x)) => b[row..row + dim].copy_from_slice(&x[r * dim..][..dim]),
                (Buffer::F16(b), Data::F16(x)) => b[row..row + dim].copy_from_slice(&x[r * dim..][..dim]),
                (Buffer::Bf16(b), Data::Bf16(x)) => b[row..row + dim].copy_from_slice(&x[r * dim..][..dim]),
                _ => panic!("data and buffer differ in type"),
            }
        }
    }

    /// Reads `[token, head, dim]` rows.
    fn get(&self, at: At, tokens: usize) -> Data {
        let (heads, dim) = (self.shape.heads, self.shape.dim);
        let rows = (0..tokens * heads).map(|r| self.row(at.batch, at.token + r / heads, r % heads));
        match &self.buffer {
            Buffer::F32(b) => Data::F32(rows.flat_map(|row| b[row..row + dim].to_vec()).collect()),
            Buffer::F16(b) => Data::F16(rows.flat_map(|row| b[row..row + dim].to_vec()).collect()),
            Buffer::Bf16(b) => Data::Bf16(rows.flat_map(|row| b[row..row + dim].to_vec()).collect()),
        }
    }

    /// Panics unless everything but the rows of these token runs is as it was.
    fn check_untouched(&self, runs: &[(At, usize)], what: &str) {
        let mut written = vec![false; self.buffer.slice().len()];
        for &(at, tokens) in runs {
            for r in 0..tokens * self.shape.heads {
                let row = self.row(at.batch, at.token + r / self.shape.heads, r % self.shape.heads);
                written[row..row + self.shape.dim].fill(true);
            }
        }
        if let Some(i) = (0..written.len()).find(|&i| !written[i] && !self.buffer.is_fill(i, self.tail)) {
            panic!("{what}: element {i} was written and should not be");
        }
    }

    fn tensor(&self) -> Tensor<'_> {
        Tensor::new(self.buffer.slice(), self.shape, self.strides).expect("the kit places tensors right")
    }

    fn tensor_mut(&mut self) -> TensorMut<'_> {
        TensorMut::new(self.buffer.slice_mut(), self.shape, self.strides).expect("the kit places tensors right")
    }
}

/// A mask as bytes, of which any but 0 is true, or as bits.
fn guarded_mask(mask: &[bool], how: &How) -> Guarded<u8> {
    let len = if how.bit_masks { mask.len().div_ceil(8) } else { mask.len() };
    let mut bytes = Guarded::filled(len, 0u8, how.side);
    for (i, _) in mask.iter().enumerate().filter(|(_, seen)| **seen) {
        if how.bit_masks {
            bytes[i / 8] |= 1 << (i % 8);
        } else {
            bytes[i] = [1, 0xFF][i % 2];
        }
    }
    bytes
}

/// Runs every task of a call in a guarded workspace and scratch of exactly the queried size.
fn run_call(plan: &Plan, batch: &mut Batch<'_>, how: &How) -> Result<(), Error> {
    let mut scratch = Guarded::filled(plan.scratch_len(batch.sequences), 0xFFu8, how.side);
    let mut call = plan.prepare(batch, &mut scratch)?;
    assert!(call.workspace_len() <= plan.workspace_len(), "a call needs more workspace than its plan says");
    // Odd starts: the library aligns inside what it is given. 0xFF bytes are NaN.
    let mut workspace = Guarded::filled(call.workspace_len(), 0xFFu8, how.side);
    for phase in 0..call.phases() {
        let mut tasks: Vec<_> = call.split(phase).collect();
        if let Some(seed) = how.shuffle {
            let mut rng = Rng::new(seed);
            for i in (1..tasks.len()).rev() {
                tasks.swap(i, rng.size(0, i));
            }
        }
        for task in tasks {
            workspace.fill(0xFF);
            task.run(&mut workspace)?;
        }
    }
    Ok(())
}

/// Runs `problem` as `how` says on the tier that `capabilities` give.
///
/// # Errors
///
/// What planning or preparing reports.
///
/// # Panics
///
/// If anything outside the rows to write is touched.
pub fn run(problem: &Problem, part: Part, capabilities: &Capabilities, how: &How) -> Result<Outcome, Error> {
    run_spec(problem, &spec(problem, part, how), capabilities, how)
}

/// As [`run`], with a description of the caller's.
///
/// # Errors
///
/// As [`run`].
///
/// # Panics
///
/// As [`run`].
pub fn run_spec(
    problem: &Problem,
    spec: &AttentionSpec,
    capabilities: &Capabilities,
    how: &How,
) -> Result<Outcome, Error> {
    let mut capabilities = *capabilities;
    capabilities.threads = how.threads;
    capabilities.l1_bytes = how.l1_bytes;
    capabilities.l2_bytes = how.l2_bytes;
    let heads = problem.heads;
    let cached = how.via != Via::Attend;
    let operation = match how.via {
        Via::Attend => Operation::Attend,
        Via::Cached | Via::AppendThenCached => Operation::AttendCached,
        Via::AppendAttend(_) => Operation::AppendAttend,
    };
    let plan = Plan::new(&capabilities, &spec.with_operation(operation))?;

    // The small table, or none.
    let mut storage = Vec::new();
    let table = match &problem.rotation {
        None => None,
        Some(r) if r.inv_freq.is_empty() => None,
        Some(r) => {
            let positions = problem.sequences.iter().flat_map(|s| s.q_positions.iter().chain(&s.k_positions));
            let limit = positions.max().map_or(1, |p| p + 1);
            storage.resize(RotaryTable::storage_len(r.inv_freq.len(), limit)?, 0.0);
            Some(RotaryTable::build(&r.inv_freq, r.amplitude, limit, &mut storage)?)
        }
    };

    // Q and outputs packed along tokens, K and V as well; a cache entry for each sequence, larger than it needs.
    let q_tokens: usize = problem.sequences.iter().map(|s| s.q_len).sum();
    let kv_tokens: usize = problem.sequences.iter().map(|s| s.kv_len).sum();
    let capacity = problem.sequences.iter().map(|s| s.kv_len).max().unwrap_or(0) + 3;
    let shape = |tokens, heads, dim| Shape { batch: 1, tokens, heads, dim };
    let cache = |dim| Shape { batch: problem.sequences.len(), tokens: capacity, heads: heads.kv, dim };
    let mut q = Placed::new(spec.q_dtype, shape(q_tokens, heads.q, heads.dim_qk), how, Tail::Nan);
    let mut k = Placed::new(spec.k_dtype, shape(kv_tokens, heads.kv, heads.dim_qk), how, Tail::Nan);
    let mut v = Placed::new(spec.v_dtype, shape(kv_tokens, heads.kv, heads.dim_v), how, Tail::Nan);
    let mut k_cache = Placed::new(spec.k_cache_dtype, cache(heads.dim_qk), how, how.tail);
    let mut v_cache = Placed::new(spec.v_cache_dtype, cache(heads.dim_v), how, how.tail);
    let mut out = Placed::new(spec.out_dtype, shape(q_tokens, heads.q, heads.dim_v), how, Tail::Nan);
    let mut lse = Placed::new(DType::F32, shape(q_tokens, heads.q, 1), how, Tail::Nan);

    let mut biases = Vec::new();
    for (s, bias) in problem.sequences.iter().filter_map(|s| Some((s, s.bias.as_ref()?))) {
        let shape = Shape { batch: 1, tokens: heads.q * s.q_len, heads: 1, dim: s.kv_len };
        let mut placed = Placed::new(bias.dtype(), shape, &How { gap: 0, ..how.clone() }, Tail::Nan);
        if s.kv_len > 0 {
            placed.put(At { batch: 0, token: 0 }, bias);
        }
        biases.push(placed);
    }
    let mut biases = biases.iter();
    let masks = problem.sequences.iter().filter_map(|s| s.mask.as_ref());
    let masks: Vec<Guarded<u8>> = masks.map(|mask| guarded_mask(mask, how)).collect();
    let mut masks = masks.iter();
    let (mut q_at, mut kv_at) = (0, 0);
    let mut sequences = Vec::new();
    for (i, s) in problem.sequences.iter().enumerate() {
        let mut sequence = Sequence::new(s.q_len, s.kv_len);
        sequence.q_start = s.q_start;
        sequence.q = At { batch: 0, token: q_at };
        sequence.kv = At { batch: 0, token: kv_at };
        sequence.cache = At { batch: i, token: 0 };
        sequence.prefix_len = s.prefix_len;
        if s.bias.is_some() {
            let data = biases.next().expect("one each").buffer.slice();
            sequence = sequence.with_bias(Bias { data, head_stride: s.q_len * s.kv_len, query_stride: s.kv_len });
        }
        if s.mask.is_some() {
            let bytes = masks.next().expect("one each");
            let data = if how.bit_masks { MaskData::Bits(bytes) } else { MaskData::Bytes(bytes) };
            sequence = sequence.with_mask(BoolMask { data, head_stride: 0, query_stride: s.kv_len, first_key: 0 });
        }
        if let Some(table) = table
            && spec.rotary.turn(heads.dim_qk)?.is_some()
        {
            sequence = sequence.with_rotary(table);
            if !how.by_index {
                if spec.rotate_q {
                    sequence.q_positions = Positions::Explicit(&s.q_positions);
                }
                if spec.keys == Keys::Raw {
                    sequence.k_positions = Positions::Explicit(&s.k_positions);
                }
            }
            if !spec.rotate_q && spec.keys == Keys::Rotated && operation != Operation::AppendAttend {
                sequence.rotary = None;
            }
        }
        q.put(sequence.q, &s.q);
        k.put(sequence.kv, &s.k);
        v.put(sequence.kv, &s.v);
        if how.via == Via::Cached {
            k_cache.put(sequence.cache, &s.k);
            v_cache.put(sequence.cache, &s.v);
        }
        sequences.push(sequence);
        q_at += s.q_len;
        kv_at += s.kv_len;
    }

    // Keys that go to the cache beforehand.
    let last = match how.via {
        Via::Attend | Via::Cached => None,
        Via::AppendThenCached => Some(0),
        Via::AppendAttend(last) => Some(last),
    };
    if let Some(last) = last {
        let append = Plan::new(&capabilities, &spec.with_operation(Operation::Append))?;
        let stores_rotated = spec.keys == Keys::Rotated && append.turn().is_some();
        let mut first = sequences.clone();
        for (sequence, s) in first.iter_mut().zip(&problem.sequences) {
            let new = s.kv_len - last.min(s.kv_len);
            (sequence.q_len, sequence.kv_len, sequence.new_len) = (0, new, new);
            (sequence.bias, sequence.mask) = (None, None);
            sequence.q_positions = Positions::Index;
            sequence.k_positions = match stores_rotated && !how.by_index {
                true => Positions::Explicit(&s.k_positions[..new]),
                false => Positions::Index,
            };
            sequence.rotary = table.map(Into::into).filter(|_| stores_rotated);
        }
        let operands = Operands::Append {
            k: k.tensor(),
            v: v.tensor(),
            k_cache: k_cache.tensor_mut(),
            v_cache: v_cache.tensor_mut(),
        };
        run_call(&append, &mut Batch::new(operands, &first), how)?;
        if let Via::AppendAttend(_) = how.via {
            for (sequence, s) in sequences.iter_mut().zip(&problem.sequences) {
                let new = last.min(s.kv_len);
                sequence.new_len = new;
                sequence.kv.token += s.kv_len - new;
                if stores_rotated && !how.by_index {
                    sequence.k_positions = Positions::Explicit(&s.k_positions[s.kv_len - new..]);
                }
            }
        }
    }

    let lse_out = Some(lse.tensor_mut());
    let operands = match operation {
        Operation::Attend => {
            Operands::Attend { q: q.tensor(), k: k.tensor(), v: v.tensor(), out: out.tensor_mut(), lse: lse_out }
        }
        Operation::AttendCached => Operands::AttendCached {
            q: q.tensor(),
            k_cache: k_cache.tensor(),
            v_cache: v_cache.tensor(),
            out: out.tensor_mut(),
            lse: lse_out,
        },
        _ => Operands::AppendAttend {
            q: q.tensor(),
            k: k.tensor(),
            v: v.tensor(),
            k_cache: k_cache.tensor_mut(),
            v_cache: v_cache.tensor_mut(),
            out: out.tensor_mut(),
            lse: lse_out,
        },
    };
    let weights = Weights { alibi: problem.alibi.as_deref(), sinks: problem.sinks.as_deref() };
    run_call(&plan, &mut Batch::new(operands, &sequences).with_weights(weights), how)?;

    let runs: Vec<(At, usize)> = sequences.iter().map(|s| (s.q, s.q_len)).collect();
    out.check_untouched(&runs, "output");
    lse.check_untouched(&runs, "lse");
    if cached {
        let runs: Vec<(At, usize)> = sequences.iter().map(|s| (s.cache, s.kv_len)).collect();
        k_cache.check_untouched(&runs, "k_cache");
        v_cache.check_untouched(&runs, "v_cache");
    }
    let lse = runs.iter().map(|&(at, len)| lse.get(at, len).to_f32()).collect();
    let held = |cache: &Placed| match cached {
        true => sequences.iter().map(|s| cache.get(s.cache, s.kv_len)).collect(),
        false => Vec::new(),
    };
    let (k_cache, v_cache) = (held(&k_cache), held(&v_cache));
    let out = runs.iter().map(|&(at, len)| out.get(at, len)).collect();
    let kernel = plan.kernel(problem.sequences.first().map_or(0, |s| s.q_len));
    Ok(Outcome { out, lse, k_cache, v_cache, kernel })
}

/// Error allowed in each element: the bound of its row, and one rounding of the output type.
pub fn bounds(expected: &Expected, dim_v: usize, dtype: DType) -> Vec<f64> {
    let rows = expected.out_bounds();
    // The computed value may round at the next binade up.
    expected.out.iter().enumerate().map(|(i, x)| rows[i / dim_v] + rounding(x.abs() + rows[i / dim_v], dtype)).collect()
}

/// Checks what a cache holds against the rotated and rounded keys and values, and gives the problem whose keys and values
/// are the cached ones as stored: what attention over that cache is held to.
///
/// # Errors
///
/// Which sequence, which element, how far off.
pub fn as_stored(problem: &Problem, outcome: &Outcome, how: &How) -> Result<Problem, String> {
    let mut stored = problem.clone();
    let rotates = how.keys == Keys::Rotated && !problem.keys_rotated;
    for (i, s) in stored.sequences.iter_mut().enumerate() {
        let Some((k, v)) = outcome.k_cache.get(i).zip(outcome.v_cache.get(i)) else { return Ok(stored) };
        if how.via != Via::Cached {
            let (heads, dim) = (problem.heads.kv, problem.heads.dim_qk);
            let given = s.k.to_f64();
            let rows = given.chunks_exact(dim).enumerate().flat_map(|(r, row)| match &problem.rotation {
                Some(rotation) if rotates => rotation.apply(row, f64::from(s.k_positions[r / heads])),
                _ => row.to_vec(),
            });
            let rows: Vec<f64> = rows.collect();
            // A few roundings of the rotation, then one of the storage.
            let largest = rows.iter().fold(0.0f64, |m, x| m.max(x.abs()));
            let slack = if rotates { 1e-6 * largest } else { 0.0 };
            let bounds: Vec<f64> = rows.iter().map(|x| slack + rounding(x.abs() + slack, k.dtype())).collect();
            compare::within(&k.to_f32(), &rows, 1, &bounds).map_err(|e| format!("sequence {i}, cached keys: {e}"))?;
            let given = s.v.to_f32();
            let want = Data::round(&given, v.dtype());
            if want != *v {
                return Err(format!("sequence {i}: cached values are not the given ones, rounded"));
            }
        }
        (s.k, s.v) = (k.clone(), v.clone());
    }
    stored.keys_rotated |= rotates;
    Ok(stored)
}

/// Half a unit in the last place of `x` in a 16-bit type; nothing for f32.
fn rounding(x: f64, dtype: DType) -> f64 {
    // Subnormal numbers have a fixed unit.
    let (digits, smallest) = match dtype {
        DType::F16 => (10, -14),
        DType::Bf16 => (7, -126),
        _ => return 0.0,
    };
    let exponent = if x == 0.0 { smallest } else { (x.log2().floor() as i32).max(smallest) };
    0.5 * 2f64.powi(exponent - digits)
}

/// Compares an outcome with the f64 attention (over a cache, with that of [`as_stored`]); gives the largest error over its
/// bound.
///
/// # Errors
///
/// Which sequence, which element, how far off.
pub fn check(problem: &Problem, outcome: &Outcome, how: &How) -> Result<MaxError, String> {
    let problem = &as_stored(problem, outcome, how)?;
    let mut worst = MaxError { error: 0.0, of_bound: 0.0, index: 0 };
    let mut keep = |e: MaxError| {
        if e.of_bound >= worst.of_bound {
            worst = e;
        }
    };
    for i in 0..problem.sequences.len() {
        let expected = problem.expected(i);
        let bounds = bounds(&expected, problem.heads.dim_v, outcome.out[i].dtype());
        let out = compare::within(&outcome.out[i].to_f32(), &expected.out, 1, &bounds);
        keep(out.map_err(|e| format!("sequence {i}, output: {e}"))?);
        let lse = compare::within(&outcome.lse[i], &expected.lse, 1, &expected.lse_bounds());
        keep(lse.map_err(|e| format!("sequence {i}, lse: {e}"))?);
    }
    Ok(worst)
}

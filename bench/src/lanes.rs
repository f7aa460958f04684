//! One way through one step, with all its data: nothing is allocated while it runs.

use crate::buffer::{Aligned, Buffer};
use crate::cases::{Case, Shape, Step, Way};
use crate::plain::{PlainC, Sizes};
use rotile::rotary::{PairStyle, RotarySpec, RotaryTable};
use rotile::{
    AttentionSpec, Batch, Capabilities, DType, Keys, Operands, Operation, Plan, Runner, Sequence, Tensor, TensorMut,
    TierName,
};

/// The capabilities of this machine, or of the tier that `--tier` or a feature of this crate pins.
///
/// # Errors
///
/// A message that says which pin can't be honoured.
pub fn pinned(wanted: Option<TierName>) -> Result<Capabilities, String> {
    let features = [
        (cfg!(feature = "avx2"), TierName::Avx2),
        (cfg!(feature = "avx512"), TierName::Avx512),
        (cfg!(feature = "neon"), TierName::Neon),
    ];
    let mut pins: Vec<TierName> = features.into_iter().filter_map(|(on, tier)| on.then_some(tier)).collect();
    if let Some(tier) = wanted
        && !pins.contains(&tier)
    {
        pins.push(tier);
    }
    let capabilities = rotile::capabilities().map_err(|e| e.to_string())?;
    let capabilities = match pins[..] {
        [] => capabilities,
        [tier] => capabilities.require(tier),
        _ => {
            return Err(format!("two tiers are pinned at once ({pins:?}): give one feature of rotile-bench or --tier"));
        }
    };
    match capabilities.tier() {
        Ok(_) => Ok(capabilities),
        Err(error) => Err(format!("{error}; run without that pin to bench the best tier here")),
    }
}

/// A prepared way through a step.
#[derive(Debug)]
pub struct Lane {
    case: Case,
    work: Work,
    q: Buffer,
    k: Buffer,
    v: Buffer,
    q_rotated: Buffer,
    k_rotated: Buffer,
    /// The output of an attention, or the cached keys.
    out: Buffer,
    v_cache: Buffer,
    table: Aligned<f64>,
    threads: Threads,
}

/// What runs the tasks. A serial lane has all its memory from the start, so that its first run is like the others.
#[derive(Debug)]
enum Threads {
    Serial { scratch: Aligned<u8>, workspace: Aligned<u8> },
    Many(Runner),
}

impl Threads {
    fn run(&mut self, plan: &Plan, mut batch: Batch<'_>) {
        let result = match self {
            Threads::Many(runner) => runner.run(plan, &mut batch),
            Threads::Serial { scratch, workspace } => {
                plan.prepare(&mut batch, scratch.get_mut()).and_then(|call| call.run(workspace.get_mut()))
            }
        };
        result.expect("a lane's data fits its plan");
    }

    /// For all of `plans`, in calls over `sequence`.
    fn new(threads: usize, plans: &Plans, sequence: &Sequence<'_>) -> Threads {
        if threads > 1 {
            return Threads::Many(Runner::new(threads));
        }
        let plans = || [&plans.main, &plans.rotate_q, &plans.rotate_k].into_iter().flatten();
        let scratch = plans().map(|plan| plan.scratch_len(&[*sequence])).max().unwrap_or(0);
        let workspace = plans().map(Plan::workspace_len).max().unwrap_or(0);
        Threads::Serial { scratch: Aligned::new(scratch), workspace: Aligned::new(workspace) }
    }
}

/// The plans of a lane of this library.
#[derive(Clone, Copy, Debug, Default)]
struct Plans {
    /// The main one; none where the step is the rotary pass itself.
    main: Option<Plan>,
    /// Passes over Q and over K before it.
    rotate_q: Option<Plan>,
    rotate_k: Option<Plan>,
}

#[derive(Debug)]
enum Work {
    Rotile(Box<Plans>),
    Plain { code: PlainC, cos: Vec<f32>, sin: Vec<f32>, work: Buffer },
}

/// Of Llama 3.
const BASE: f64 = 500_000.0;

impl Lane {
    /// A lane over seeded data.
    ///
    /// # Errors
    ///
    /// What planning reports, and a way that the step does not have.
    pub fn new(capabilities: &Capabilities, case: &Case, threads: usize) -> Result<Lane, String> {
        let Case { shape: Shape { heads_q, heads_kv, head_dim, tokens, .. }, step, dtype, way } = *case;
        let mut capabilities = *capabilities;
        capabilities.threads = threads;
        let storage = RotaryTable::storage_len(head_dim / 2, tokens as u32).map_err(|e| format!("{case}: {e}"))?;
        let mut table = Aligned::new(storage);
        let inv_freq: Vec<f64> = (0..head_dim / 2).map(|i| BASE.powf(-2.0 * i as f64 / head_dim as f64)).collect();
        RotaryTable::build(&inv_freq, 1.0, tokens as u32, table.get_mut()).map_err(|e| format!("{case}: {e}"))?;
        let (q_size, kv_size) = (case.q_len() * heads_q * head_dim, tokens * heads_kv * head_dim);
        // New keys and values are f32 whatever the cache holds.
        let kv_dtype = if matches!(step, Step::Append | Step::Rotate) { DType::F32 } else { dtype };
        let copies = way == Way::Separate || step == Step::Rotate || way == Way::PlainC;
        let (out_dtype, out_len) = match step {
            Step::Append => (dtype, kv_size),
            Step::Rotate => (DType::F32, 0),
            _ => (DType::F32, q_size),
        };
        let work = if way == Way::PlainC { plain(&capabilities, case)? } else { rotile(&capabilities, case)? };
        let exec = match &work {
            Work::Rotile(plans) => Threads::new(threads, plans, &Sequence::new(case.q_len(), tokens)),
            Work::Plain { .. } => Threads::new(1, &Plans::default(), &Sequence::new(0, 0)),
        };
        let copied_keys = copies && matches!(step, Step::Prefill | Step::Append | Step::Rotate);
        Ok(Lane {
            case: *case,
            work,
            q: Buffer::normal(DType::F32, q_size, 1),
            k: Buffer::normal(kv_dtype, kv_size, 2),
            v: Buffer::normal(kv_dtype, if step == Step::Rotate { 0 } else { kv_size }, 3),
            q_rotated: Buffer::zeros(DType::F32, if copies { q_size } else { 0 }),
            k_rotated: Buffer::zeros(DType::F32, if copied_keys { kv_size } else { 0 }),
            out: Buffer::zeros(out_dtype, out_len),
            v_cache: Buffer::zeros(dtype, if step == Step::Append { kv_size } else { 0 }),
            table,
            threads: exec,
        })
    }

    /// What is measured.
    pub fn case(&self) -> &Case {
        &self.case
    }

    /// The plan of the attention or append, or of the rotation of Q; none in plain C.
    pub fn plan(&self) -> Option<&Plan> {
        match &self.work {
            Work::Rotile(plans) => plans.main.as_ref().or(plans.rotate_q.as_ref()),
            Work::Plain { .. } => None,
        }
    }

    /// What the last run left: the output, or the cache (keys, then values), or Q and K rotated.
    pub fn result(&self) -> Vec<f32> {
        match self.case.step {
            Step::Append => [self.out.to_f32(), self.v_cache.to_f32()].concat(),
            Step::Rotate => [self.q_rotated.to_f32(), self.k_rotated.to_f32()].concat(),
            _ => self.out.to_f32(),
        }
    }

    /// Runs once.
    pub fn run(&mut self) {
        match &self.work {
            Work::Rotile(plans) => {
                let plans = **plans;
                self.run_rotile(&plans);
            }
            Work::Plain { .. } => self.run_plain(),
        }
    }

    fn run_rotile(&mut self, plans: &Plans) {
        let Plans { main, rotate_q, rotate_k } = plans;
        let Case { shape: Shape { heads_q, heads_kv, head_dim, tokens, .. }, step, .. } = self.case;
        let q_len = self.case.q_len();
        let fits = "shapes of a lane fit its data";
        let shape = |tokens, heads| rotile::Shape { batch: 1, tokens, heads, dim: head_dim };
        let table = RotaryTable::from_storage(self.table.get(), head_dim / 2, tokens as u32, 1.0).expect("as built");
        let threads = &mut self.threads;
        let mut pass = |plan: &Option<Plan>, x: &Buffer, out: &mut Buffer, len: usize, heads: usize| {
            let Some(plan) = plan else { return };
            // The last positions, as the queries of a decode step have them.
            let sequence = Sequence::new(len, tokens).with_rotary(table);
            let operands = Operands::Rotate {
                x: Tensor::token_major(x.as_slice(), shape(len, heads)).expect(fits),
                out: TensorMut::token_major(out.as_slice_mut(), shape(len, heads)).expect(fits),
            };
            threads.run(plan, Batch::new(operands, &[sequence]));
        };
        pass(rotate_q, &self.q, &mut self.q_rotated, q_len, heads_q);
        pass(rotate_k, &self.k, &mut self.k_rotated, tokens, heads_kv);
        let Some(main) = main else { return };
        let q = if rotate_q.is_some() { &self.q_rotated } else { &self.q };
        let k = if rotate_k.is_some() { &self.k_rotated } else { &self.k };
        fn packed(x: &Buffer, shape: rotile::Shape) -> Tensor<'_> {
            Tensor::token_major(x.as_slice(), shape).expect("shapes of a lane fit its data")
        }
        let q = packed(q, shape(q_len, heads_q));
        let (new_k, new_v) = (|| packed(k, shape(tokens, heads_kv)), || packed(&self.v, shape(tokens, heads_kv)));
        let mut sequence = Sequence::new(q_len, tokens).with_rotary(table);
        // A cache is [head, token, dim]; a projection's output is [token, head, dim].
        let operands = match step {
            Step::Append => {
                sequence = Sequence::step(tokens, tokens).with_rotary(table);
                let cache = shape(tokens, heads_kv);
                let k_cache = TensorMut::head_major(self.out.as_slice_mut(), cache).expect(fits);
                let v_cache = TensorMut::head_major(self.v_cache.as_slice_mut(), cache).expect(fits);
                Operands::Append { k: new_k(), v: new_v(), k_cache, v_cache }
            }
            Step::Decode | Step::DecodeRaw => {
                let k_cache = Tensor::head_major(k.as_slice(), shape(tokens, heads_kv)).expect(fits);
                let v_cache = Tensor::head_major(self.v.as_slice(), shape(tokens, heads_kv)).expect(fits);
                let out = TensorMut::token_major(self.out.as_slice_mut(), shape(1, heads_q)).expect(fits);
                Operands::AttendCached { q, k_cache, v_cache, out, lse: None }
            }
            Step::Prefill | Step::Rotate => {
                let out = TensorMut::token_major(self.out.as_slice_mut(), shape(q_len, heads_q)).expect(fits);
                Operands::Attend { q, k: new_k(), v: new_v(), out, lse: None }
            }
        };
        // A table that nothing would use is an error.
        if self.case.way != Way::Fused {
            sequence.rotary = None;
        }
        self.threads.run(main, Batch::new(operands, &[sequence]));
    }

    fn run_plain(&mut self) {
        let Work::Plain { code, cos, sin, work } = &mut self.work else { unreachable!("asked before") };
        let Case { shape: Shape { heads_q, heads_kv, head_dim: dim, tokens, .. }, step, .. } = self.case;
        let sizes = Sizes { tokens, heads_q, heads_kv, dim };
        let packed = |heads: usize| (heads * dim, dim);
        let cache = (dim, tokens * dim);
        let (q, k, v) = (&self.q, self.k.f32(), &self.v);
        match step {
            Step::Append => {
                code.rope(k, self.out.f32_mut(), (cos, sin), heads_kv, dim, cache);
                code.store(v.f32(), self.v_cache.f32_mut(), heads_kv, dim, cache);
            }
            Step::Decode | Step::DecodeRaw => {
                code.rope(q.f32(), self.q_rotated.f32_mut(), (cos, sin), heads_q, dim, packed(heads_q));
                code.decode(&sizes, self.q_rotated.f32(), k, v.f32(), self.out.f32_mut());
            }
            Step::Prefill | Step::Rotate => {
                code.rope(q.f32(), self.q_rotated.f32_mut(), (cos, sin), heads_q, dim, packed(heads_q));
                code.rope(k, self.k_rotated.f32_mut(), (cos, sin), heads_kv, dim, packed(heads_kv));
                if step == Step::Prefill {
                    let (q, k) = (self.q_rotated.f32(), self.k_rotated.f32());
                    code.prefill(&sizes, q, k, v.f32(), self.out.f32_mut(), work.f32_mut());
                }
            }
        }
    }
}

/// The plans of a lane of this library.
fn rotile(capabilities: &Capabilities, case: &Case) -> Result<Work, String> {
    let Case { shape: Shape { heads_q, heads_kv, head_dim, .. }, step, dtype, way } = *case;
    let rotary = RotarySpec::full(PairStyle::Half);
    let plan = |spec: &AttentionSpec| Plan::new(capabilities, spec).map_err(|e| format!("{case}: {e}"));
    let pass = |heads: usize| plan(&AttentionSpec::rotate(heads, head_dim, rotary)).map(Some);
    let mut spec = AttentionSpec::attend(heads_q, heads_kv, head_dim, rotary).with_kv_dtype(dtype);
    match (step, way) {
        (Step::Rotate, Way::Separate) => {
            let plans = Plans { main: None, rotate_q: pass(heads_q)?, rotate_k: pass(heads_kv)? };
            return Ok(Work::Rotile(Box::new(plans)));
        }
        (Step::Rotate, _) | (Step::DecodeRaw, Way::Separate | Way::PreRotated) => {
            return Err(format!("{case}: this step has no such way"));
        }
        _ => {}
    }
    spec.operation = match step {
        Step::Append => Operation::Append,
        Step::Decode | Step::DecodeRaw => Operation::AttendCached,
        Step::Prefill | Step::Rotate => Operation::Attend,
    };
    // "Raw" keys are rotated by the attention, but not by an append.
    let fused = way == Way::Fused;
    spec.keys = match step {
        Step::Prefill if fused => Keys::Raw,
        Step::Append if !fused => Keys::Raw,
        Step::DecodeRaw => Keys::Raw,
        _ => Keys::Rotated,
    };
    spec.rotate_q = fused;
    if step == Step::Append {
        (spec.k_dtype, spec.v_dtype) = (DType::F32, DType::F32);
    }
    let separate = way == Way::Separate;
    Ok(Work::Rotile(Box::new(Plans {
        main: Some(plan(&spec)?),
        rotate_q: if separate && step != Step::Append { pass(heads_q)? } else { None },
        rotate_k: if separate && step != Step::Decode { pass(heads_kv)? } else { None },
    })))
}

/// The plain C of a lane, with a table of every cos and sin that it needs.
fn plain(capabilities: &Capabilities, case: &Case) -> Result<Work, String> {
    let Case { shape: Shape { heads_q, heads_kv, head_dim: dim, tokens, .. }, step, dtype, .. } = *case;
    if dtype != DType::F32 || step == Step::DecodeRaw {
        return Err(format!("{case}: the plain C is f32 only, over rotated keys"));
    }
    let sizes = Sizes { tokens, heads_q, heads_kv, dim };
    PlainC::check(&sizes).map_err(|e| format!("{case}: {e}"))?;
    let positions = if step == Step::Decode { tokens - 1..tokens } else { 0..tokens };
    let angle = |i: usize| {
        let (position, pair) = (positions.start + i / (dim / 2), i % (dim / 2));
        position as f64 * BASE.powf(-2.0 * pair as f64 / dim as f64)
    };
    let entries = positions.len() * dim / 2;
    Ok(Work::Plain {
        code: PlainC::of(capabilities.tier().map_err(|e| e.to_string())?.name()),
        cos: (0..entries).map(|i| angle(i).cos() as f32).collect(),
        sin: (0..entries).map(|i| angle(i).sin() as f32).collect(),
        work: Buffer::zeros(DType::F32, if step == Step::Prefill { PlainC::work_len(&sizes) } else { 0 }),
    })
}

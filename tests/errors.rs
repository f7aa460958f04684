//! Bad input: an error before anything is written, whose message carries the offending values; never a panic.

use rotile::rotary::{CosSin, Frequencies, PairStyle, Positions, RotarySpec, RotaryTable};
use rotile::{
    At, AttentionSpec, Batch, CacheLayout, Capabilities, DType, Error, Keys, Mask, Operands, Operation, Plan, Runner,
    Scale, Sections, Sequence, Shape, Strides, Tensor, TensorMut, TierName, Window,
};
use rotile_testkit::data::Rng;

const DIM: usize = 8;

fn capabilities() -> Capabilities {
    rotile::capabilities().unwrap()
}

fn spec() -> AttentionSpec {
    AttentionSpec::attend(2, 1, DIM, RotarySpec::full(PairStyle::Half))
}

fn shape(batch: usize, tokens: usize, heads: usize, dim: usize) -> Shape {
    Shape { batch, tokens, heads, dim }
}

/// The message of an error holds all of these.
fn says(error: Error, parts: &[&str]) {
    let text = error.to_string();
    assert!(parts.iter().all(|p| text.contains(p)), "{text:?} should name {parts:?}");
}

#[test]
fn descriptions() {
    let plan = |change: &dyn Fn(&mut AttentionSpec)| {
        let mut spec = spec();
        change(&mut spec);
        Plan::new(&capabilities(), &spec).unwrap_err()
    };
    says(plan(&|s| s.heads_q = 0), &["heads_q", "0"]);
    says(plan(&|s| s.heads_kv = 0), &["heads_kv", "0"]);
    says(plan(&|s| s.head_dim_qk = 0), &["head_dim_qk", "0", "576"]);
    says(plan(&|s| s.head_dim_qk = 578), &["head_dim_qk", "578"]);
    says(plan(&|s| s.head_dim_v = 577), &["head_dim_v", "577"]);
    says(plan(&|s| (s.heads_q, s.heads_kv) = (7, 2)), &["7", "2"]);
    says(plan(&|s| s.scale = Scale::Value(f64::NAN)), &["scale", "NaN"]);
    says(plan(&|s| s.scale = Scale::Value(f64::INFINITY)), &["scale", "inf"]);
    says(plan(&|s| s.scale = Scale::Value(1e300)), &["scale", "f32"]);
    says(plan(&|s| s.softcap = Some(0.0)), &["softcap", "0"]);
    says(plan(&|s| s.softcap = Some(-1.5)), &["softcap", "-1.5"]);
    says(plan(&|s| s.out_dtype = DType::F16), &["out_dtype", "f16", "f32"]);
    says(plan(&|s| s.cache = CacheLayout::Paged { block_size: 0 }), &["block_size", "0"]);
    for (dim, what) in [(33, "33"), (80, "80"), (66, "66")] {
        says(
            plan(&|s| {
                s.head_dim_qk = 64;
                s.rotary = RotarySpec::leading(PairStyle::Half, dim);
            }),
            &["rotary_dim", what],
        );
    }
    says(plan(&|s| s.rotary = RotarySpec::at_offset(PairStyle::Half, 6, 4)), &["offset", "6", "4"]);
}

#[test]
fn what_is_not_built_is_named() {
    let plan = |change: &dyn Fn(&mut AttentionSpec)| {
        let mut spec = spec();
        change(&mut spec);
        let error = Plan::new(&capabilities(), &spec).unwrap_err();
        assert!(matches!(error, Error::Unsupported { .. }), "{error}");
        error
    };
    says(plan(&|s| s.qk_norm = Some(1e-6)), &["QK-norm"]);
    says(plan(&|s| s.sections = Sections::Blocked([1, 1, 2, 0])), &["M-RoPE"]);
    says(plan(&|s| s.cache = CacheLayout::Paged { block_size: 16 }), &["paged"]);
    says(Window::total(0).unwrap_err(), &["0"]);
}

#[test]
fn b74_tiers_can_only_be_lowered() {
    let missing = if cfg!(target_arch = "x86_64") { TierName::Neon } else { TierName::Avx2 };
    says(Plan::new(&capabilities().require(missing), &spec()).unwrap_err(), &[missing.name()]);
    says(capabilities().up_to(missing).unwrap_err(), &[missing.name()]);
    let lowered = capabilities().up_to(TierName::Portable).unwrap();
    assert_eq!(Plan::new(&lowered, &spec()).unwrap().tier(), TierName::Portable);
    says(Error::unknown_tier("sse9"), &["sse9", "portable", "avx2"]);
}

#[test]
fn views() {
    let data = [0.0f32; 64];
    says(Tensor::token_major(&data[..], shape(1, 9, 1, 8)).unwrap_err(), &["72", "64"]);
    let strides = Strides { batch: 0, token: 8, head: 8, dim: 2 };
    says(Tensor::new(&data[..], shape(1, 2, 1, 8), strides).unwrap_err(), &["2", "1"]);
    let huge = Strides { batch: usize::MAX, token: usize::MAX, head: 1, dim: 1 };
    says(Tensor::new(&data[..], shape(3, 3, 1, 8), huge).unwrap_err(), &["usize"]);
    assert!(Tensor::token_major(&data[..], shape(usize::MAX, usize::MAX, 2, 8)).is_err());
    let mut data = data;
    for (token, head) in [(4, 8), (0, 8), (8, 4), (8, 0), (8, 8)] {
        let strides = Strides { batch: 0, token, head, dim: 1 };
        let error = TensorMut::new(&mut data[..], shape(1, 2, 2, 8), strides).unwrap_err();
        says(error, &[&token.to_string(), &head.to_string(), "overlap"]);
    }
    // Reading may broadcast.
    assert!(Tensor::new(&data[..], shape(1, 2, 2, 8), Strides { batch: 0, token: 0, head: 0, dim: 1 }).is_ok());
}

/// Buffers of a cached call over one cache entry of 128 slots.
struct Bench {
    q: Vec<f32>,
    k: Vec<f32>,
    k_cache: Vec<f32>,
    v_cache: Vec<f32>,
    out: Vec<f32>,
    table: Vec<f64>,
}

const CAPACITY: usize = 128;

impl Bench {
    fn new() -> Self {
        let inv_freq = [1.0, 0.1, 0.01, 0.001];
        let mut table = vec![0.0; RotaryTable::storage_len(4, 4096).unwrap()];
        RotaryTable::build(&inv_freq, 1.0, 4096, &mut table).unwrap();
        Bench {
            q: vec![1.0; 8 * 2 * DIM],
            k: vec![1.0; 8 * DIM],
            k_cache: vec![-7.0; CAPACITY * DIM],
            v_cache: vec![-7.0; CAPACITY * DIM],
            out: vec![-7.0; 8 * 2 * DIM],
            table,
        }
    }

    /// Runs `append_attend` with these sequences; nothing may be written if that fails.
    fn run(&mut self, keys: Keys, change: &dyn Fn(&mut Sequence<'_>)) -> Result<(), Error> {
        let storage = self.table.clone();
        let table = RotaryTable::from_storage(&storage, 4, 4096, 1.0)?;
        let mut sequence = Sequence::step(1, 1).with_rotary(table);
        change(&mut sequence);
        self.run_all(keys, &[sequence])
    }

    fn run_all(&mut self, keys: Keys, sequences: &[Sequence<'_>]) -> Result<(), Error> {
        let mut spec = spec().with_operation(Operation::AppendAttend);
        spec.keys = keys;
        let plan = Plan::new(&capabilities(), &spec)?;
        let cache = shape(1, CAPACITY, 1, DIM);
        let operands = Operands::AppendAttend {
            q: Tensor::token_major(&self.q[..], shape(1, 8, 2, DIM))?,
            k: Tensor::token_major(&self.k[..], shape(1, 8, 1, DIM))?,
            v: Tensor::token_major(&self.k[..], shape(1, 8, 1, DIM))?,
            k_cache: TensorMut::token_major(&mut self.k_cache[..], cache)?,
            v_cache: TensorMut::token_major(&mut self.v_cache[..], cache)?,
            out: TensorMut::token_major(&mut self.out[..], shape(1, 8, 2, DIM))?,
            lse: None,
        };
        let result = Runner::new(1).run(&plan, &mut Batch::new(operands, sequences));
        if result.is_err() {
            let all = [&self.k_cache, &self.v_cache, &self.out];
            assert!(all.iter().all(|b| b.iter().all(|x| *x == -7.0)), "written in spite of an error");
        }
        result
    }

    fn fails(keys: Keys, change: impl Fn(&mut Sequence<'_>), parts: &[&str]) {
        says(Bench::new().run(keys, &change).unwrap_err(), parts);
    }
}

#[test]
fn b07_last_slot_of_a_cache() {
    let step = |start: usize, len: usize| {
        Bench::new().run(Keys::Rotated, &|s| {
            let table = s.rotary;
            *s = Sequence::step(len, start + len);
            s.rotary = table;
        })
    };
    assert_eq!(step(127, 1), Ok(()));
    says(step(128, 1).unwrap_err(), &["cache", "129", "128"]);
    assert_eq!(step(126, 2), Ok(()));
    says(step(127, 2).unwrap_err(), &["cache", "129", "128"]);
}

#[test]
fn b61_lengths_are_not_trusted() {
    use Keys::Rotated;
    Bench::fails(Rotated, |s| s.q_len = 9, &["sequence 0", "q", "9", "8"]);
    Bench::fails(Rotated, |s| s.q = At { batch: 0, token: 8 }, &["q", "9", "8"]);
    Bench::fails(Rotated, |s| s.q = At { batch: 1, token: 0 }, &["q", "1"]);
    Bench::fails(Rotated, |s| (s.kv_len, s.new_len) = (1, 2), &["new_len", "2", "1"]);
    Bench::fails(Rotated, |s| (s.kv_len, s.new_len) = (20, 9), &["k", "9", "8"]);
    Bench::fails(Rotated, |s| s.cache = At { batch: 0, token: 128 }, &["k_cache", "129", "128"]);
    Bench::fails(Rotated, |s| s.kv_len = usize::MAX, &["kv_len"]);
    Bench::fails(Rotated, |s| s.q_len = usize::MAX, &["q_len"]);
    Bench::fails(Rotated, |s| s.q_start = i64::MIN, &["q_start"]);
    Bench::fails(Rotated, |s| s.kv_start = i64::MAX, &["kv_start"]);
    Bench::fails(Rotated, |s| s.q.token = usize::MAX, &["q"]);
}

#[test]
fn b41_positions_past_the_table() {
    for position in [4096, 40_959, u32::MAX] {
        let text = position.to_string();
        Bench::fails(Keys::Rotated, |s| s.q_positions = Positions::Start(position), &["q_positions", &text, "4095"]);
        Bench::fails(Keys::Rotated, |s| s.k_positions = Positions::Start(position), &["k_positions", &text, "4095"]);
    }
    assert_eq!(Bench::new().run(Keys::Rotated, &|s| s.q_positions = Positions::Start(4095)), Ok(()));
    Bench::fails(Keys::Rotated, |s| s.q_positions = Positions::Explicit(&[4096]), &["4096"]);
    Bench::fails(Keys::Rotated, |s| s.q_positions = Positions::Explicit(&[1, 2]), &["q_positions", "2", "1"]);
    // The last key of a decode that crosses the end.
    Bench::fails(Keys::Raw, |s| s.k_positions = Positions::Start(4096), &["k_positions", "4096"]);
    Bench::fails(Keys::Raw, |s| s.kv_start = -1, &["k_positions", "-1"]);
}

#[test]
fn what_is_missing_or_would_be_ignored() {
    Bench::fails(Keys::Rotated, |s| s.rotary = None, &["rotary", "missing"]);
    let plan = Plan::new(&capabilities(), &spec()).unwrap();
    let (q, mut out) = (vec![0.0f32; 2 * DIM], vec![0.0f32; 2 * DIM]);
    let rotate = Operands::Rotate {
        x: Tensor::token_major(&q[..], shape(1, 1, 2, DIM)).unwrap(),
        out: TensorMut::token_major(&mut out[..], shape(1, 1, 2, DIM)).unwrap(),
    };
    let error = Runner::new(1).run(&plan, &mut Batch::new(rotate, &[])).unwrap_err();
    says(error, &["operands"]);
    let attend = |sequence: Sequence<'_>, spec: &AttentionSpec| {
        let mut out = [0.0f32; 2 * DIM];
        let operands = Operands::Attend {
            q: Tensor::token_major(&q[..], shape(1, 1, 2, DIM)).unwrap(),
            k: Tensor::token_major(&q[..], shape(1, 1, 1, DIM)).unwrap(),
            v: Tensor::token_major(&q[..], shape(1, 1, 1, DIM)).unwrap(),
            out: TensorMut::token_major(&mut out[..], shape(1, 1, 2, DIM)).unwrap(),
            lse: None,
        };
        let plan = Plan::new(&capabilities(), spec)?;
        Runner::new(1).run(&plan, &mut Batch::new(operands, &[sequence]))
    };
    let mut plain = spec();
    plain.rotary = RotarySpec::none();
    says(attend(Sequence::step(1, 1), &plain).unwrap_err(), &["new_len"]);
    let mut positions = Sequence::new(1, 1);
    positions.q_positions = Positions::Start(3);
    says(attend(positions, &plain).unwrap_err(), &["q_positions"]);
    let storage = vec![0.0; RotaryTable::storage_len(20, 64).unwrap()];
    let wide = RotaryTable::from_storage(&storage, 20, 64, 1.0).unwrap();
    says(attend(Sequence::new(1, 1).with_rotary(wide), &plain).unwrap_err(), &["rotary"]);
    says(attend(Sequence::new(1, 1).with_rotary(wide), &spec()).unwrap_err(), &["rotary", "20", "4"]);
    let mut halves = plain;
    halves.k_dtype = DType::F16;
    says(attend(Sequence::new(1, 1), &halves).unwrap_err(), &["k", "f16", "f32"]);
    let mut more = plain;
    (more.heads_q, more.heads_kv) = (4, 1);
    says(attend(Sequence::new(1, 1), &more).unwrap_err(), &["q", "4", "2"]);
}

#[test]
fn sequences_that_write_the_same_rows() {
    let mut bench = Bench::new();
    let table = bench.table.clone();
    let table = RotaryTable::from_storage(&table, 4, 4096, 1.0).unwrap();
    let a = Sequence::step(1, 5).with_rotary(table);
    let mut b = a;
    says(bench.run_all(Keys::Rotated, &[a, b]).unwrap_err(), &["sequence 1", "sequence 0", "output"]);
    b.q.token = 1;
    b.kv.token = 1;
    says(bench.run_all(Keys::Rotated, &[a, b]).unwrap_err(), &["sequence 1", "cache"]);
    // A shared prefix is read by both and written by neither.
    b.kv_len = 6;
    assert_eq!(bench.run_all(Keys::Rotated, &[a, b]), Ok(()));
}

#[test]
fn scratch_and_workspace_too_small() {
    let plan = Plan::new(&capabilities(), &AttentionSpec::attend(2, 1, DIM, RotarySpec::none())).unwrap();
    let (q, mut out) = (vec![0.0f32; 2 * DIM], vec![-7.0f32; 2 * DIM]);
    let sequences = [Sequence::new(1, 1)];
    let mut batch = |scratch: usize, workspace: usize| {
        let operands = Operands::Attend {
            q: Tensor::token_major(&q[..], shape(1, 1, 2, DIM)).unwrap(),
            k: Tensor::token_major(&q[..], shape(1, 1, 1, DIM)).unwrap(),
            v: Tensor::token_major(&q[..], shape(1, 1, 1, DIM)).unwrap(),
            out: TensorMut::token_major(&mut out[..], shape(1, 1, 2, DIM)).unwrap(),
            lse: None,
        };
        let mut batch = Batch::new(operands, &sequences);
        let mut scratch = vec![0; scratch];
        let call = plan.prepare(&mut batch, &mut scratch)?;
        let need = call.workspace_len();
        call.run(&mut vec![0; workspace.min(need)])?;
        Ok::<_, Error>(need)
    };
    let scratch = plan.scratch_len(&sequences);
    says(batch(scratch - 1, usize::MAX).unwrap_err(), &["scratch", &(scratch - 1).to_string()]);
    says(batch(scratch, 100).unwrap_err(), &["workspace", "100"]);
    assert!(batch(scratch, usize::MAX).unwrap() <= plan.workspace_len());
}

/// Arbitrary descriptions and sequences over small buffers: an error or a result, never a panic.
#[test]
fn arbitrary_calls_never_panic() {
    let mut rng = Rng::new(99);
    let odd = [0usize, 1, 2, 3, 7, 8, 64, 127, 576, 577, 1 << 20, 1 << 40, usize::MAX / 2, usize::MAX];
    let (mut planned, mut ran) = (0, 0);
    for _ in 0..20_000 {
        let size = |rng: &mut Rng| {
            if rng.one_in(4) { odd[rng.size(0, odd.len() - 1)] } else { rng.size(0, 9) }
        };
        let style = [PairStyle::Half, PairStyle::Interleaved][rng.size(0, 1)];
        let rotary = match rng.size(0, 4) {
            0 => RotarySpec::none(),
            1 => RotarySpec::full(style),
            2 => RotarySpec::at_offset(style, size(&mut rng), size(&mut rng)),
            3 => RotarySpec::proportional(style, size(&mut rng)),
            _ => RotarySpec::leading(style, size(&mut rng)),
        };
        let mut spec = AttentionSpec::attend(size(&mut rng), size(&mut rng), size(&mut rng), rotary);
        if rng.one_in(2) {
            (spec.heads_q, spec.heads_kv) = (2, 1);
        }
        spec.head_dim_v = size(&mut rng);
        spec.operation =
            [Operation::Attend, Operation::AttendCached, Operation::Rotate, Operation::AppendAttend][rng.size(0, 3)];
        spec.scale = [Scale::Default, Scale::Value(0.0), Scale::Value(-1e30)][rng.size(0, 2)];
        spec.keys = [Keys::Raw, Keys::Rotated][rng.size(0, 1)];
        if rng.one_in(3) {
            spec.mask = Mask::NONE;
        }
        let Ok(plan) = Plan::new(&capabilities(), &spec) else { continue };
        planned += 1;
        let _ = plan.to_string();

        let read = vec![0.5f32; 4096];
        let (mut a, mut b, mut c) = (vec![0.0f32; 4096], vec![0.0f32; 4096], vec![0.0f32; 4096]);
        let view = |rng: &mut Rng, heads: usize, dim: usize| shape(rng.size(0, 2), rng.size(0, 9), heads, dim);
        let (hq, hkv, d, dv) = (spec.heads_q, spec.heads_kv, spec.head_dim_qk, spec.head_dim_v);
        let (q_shape, k_shape) = (view(&mut rng, hq, d), view(&mut rng, hkv, d));
        let (out_shape, v_shape) = (Shape { dim: dv, ..q_shape }, Shape { dim: dv, ..k_shape });
        let q = Tensor::token_major(&read[..], q_shape);
        let (k, v) = (Tensor::token_major(&read[..], k_shape), Tensor::head_major(&read[..], v_shape));
        let (Ok(q), Ok(k), Ok(v)) = (q, k, v) else { continue };
        let Ok(out) = TensorMut::token_major(&mut a[..], out_shape) else { continue };
        let (k_cache, v_cache) =
            (TensorMut::head_major(&mut b[..], k_shape), TensorMut::head_major(&mut c[..], v_shape));
        let (Ok(k_cache), Ok(v_cache)) = (k_cache, v_cache) else { continue };
        let operands = match spec.operation {
            Operation::Attend => Operands::Attend { q, k, v, out, lse: None },
            Operation::AttendCached => Operands::AttendCached { q, k_cache: k, v_cache: v, out, lse: None },
            Operation::Rotate => Operands::Rotate { x: q, out },
            _ => Operands::AppendAttend { q, k, v, k_cache, v_cache, out, lse: None },
        };
        let pairs = plan.turn().map_or(1, |t| t.pairs);
        let mut table = vec![0.0; RotaryTable::storage_len(pairs, 64).unwrap()];
        let table = RotaryTable::build(&vec![0.3; pairs], 1.0, 64, &mut table).unwrap();
        let mut sequences = Vec::new();
        for _ in 0..rng.size(0, 3) {
            let mut s = Sequence::new(0, 0);
            (s.q_len, s.kv_len) = (size(&mut rng), size(&mut rng));
            s.new_len = if spec.operation == Operation::AppendAttend { size(&mut rng) } else { 0 };
            s.q_start = [0, 1, -3, 40, i64::MAX, i64::MIN, rng.int(-9, 9)][rng.size(0, 6)];
            s.kv_start = [0, 0, 0, 2, i64::MIN][rng.size(0, 4)];
            (s.q.token, s.kv.token, s.cache.batch) = (rng.size(0, 2), rng.size(0, 2), rng.size(0, 2));
            s.rotary = plan.turn().map(|_| table.into());
            if rng.one_in(8) {
                s.q_positions = Positions::Start(rng.size(0, 70) as u32);
            }
            sequences.push(s);
        }
        let _ = plan.scratch_len(&sequences);
        if plan.scratch_len(&sequences) < 1 << 24 {
            ran += usize::from(Runner::new(1).run(&plan, &mut Batch::new(operands, &sequences)).is_ok());
        }
    }
    eprintln!("{planned} planned, {ran} ran");
    assert!(planned > 1000 && ran > 100, "{planned} planned, {ran} ran: the test has gone blind");
}

/// A sequence that sees no key reaches for the angles of its queries all the same.
#[test]
fn cos_and_sin_without_a_row() {
    let (q, mut out) = (vec![1.0f32; 2 * DIM], vec![f32::NAN; 2 * DIM]);
    let plan = Plan::new(&capabilities(), &spec()).unwrap();
    let operands = Operands::Attend {
        q: Tensor::token_major(&q[..], shape(1, 1, 2, DIM)).unwrap(),
        k: Tensor::token_major(&q[..0], shape(1, 0, 1, DIM)).unwrap(),
        v: Tensor::token_major(&q[..0], shape(1, 0, 1, DIM)).unwrap(),
        out: TensorMut::token_major(&mut out[..], shape(1, 1, 2, DIM)).unwrap(),
        lse: None,
    };
    let sequences = [Sequence::new(1, 0).with_rotary(CosSin::by_position(&q[..0], &q[..0], 4).unwrap())];
    Runner::new(1).run(&plan, &mut Batch::new(operands, &sequences)).unwrap();
    assert!(out.iter().all(|x| *x == 0.0));
}

#[test]
fn frequencies_refuse_bad_settings() {
    let mut out = [0.0; 4];
    says(Frequencies::Default { base: -1.0 }.inv_freq(8, &mut out).unwrap_err(), &["base", "-1"]);
    says(Frequencies::Default { base: 1e4 }.inv_freq(7, &mut out).unwrap_err(), &["rotary_dim", "7"]);
    says(Frequencies::Default { base: 1e4 }.inv_freq(10, &mut out).unwrap_err(), &["5", "4"]);
}

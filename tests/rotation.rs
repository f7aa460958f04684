//! Where rotations come from and where they happen: the stand-alone operator, cos and sin of the caller's, frequency sets per
//! sequence, and a host whose floating-point state is its own.

use rotile::rotary::{CosSin, Frequencies, LongRopeFactors, PairStyle, Positions, Rotary, RotarySpec, RotaryTable};
use rotile::{
    AttentionSpec, Batch, Capabilities, DType, Error, Keys, Operands, Operation, Plan, Runner, Sequence, Shape, Tensor,
    TensorMut, bf16, f16,
};
use rotile_testkit::data::{Data, Rng};
use rotile_testkit::draw::Want;
use rotile_testkit::reference::Rotation;
use rotile_testkit::tiers;
use rotile_testkit::trial::{self, How, Via};
use rotile_testkit::vectors::Part;

const DIM: usize = 32;
const TOKENS: usize = 40;

fn shape(heads: usize) -> Shape {
    Shape { batch: 1, tokens: TOKENS, heads, dim: DIM }
}

fn table(storage: &mut Vec<f64>, inv_freq: &[f64], amplitude: f64) -> Result<(), Error> {
    storage.resize(RotaryTable::storage_len(inv_freq.len(), 9000)?, 0.0);
    RotaryTable::build(inv_freq, amplitude, 9000, storage).map(|_| ())
}

fn inv_freq() -> Vec<f64> {
    let mut out = vec![0.0; DIM / 2];
    Frequencies::Default { base: 1e4 }.inv_freq(DIM, &mut out).unwrap();
    out
}

/// `attend` of one seeded sequence of 2 query heads and 1 key head.
fn attend(tier: &Capabilities, rotary: Rotary<'_>) -> Vec<f32> {
    let mut rng = Rng::new(1);
    let (q, k, v) = (rng.normal(TOKENS * 2 * DIM), rng.normal(TOKENS * DIM), rng.normal(TOKENS * DIM));
    let mut out = vec![f32::NAN; q.len()];
    let plan = Plan::new(tier, &AttentionSpec::attend(2, 1, DIM, RotarySpec::full(PairStyle::Half))).unwrap();
    let operands = Operands::Attend {
        q: Tensor::token_major(&q[..], shape(2)).unwrap(),
        k: Tensor::token_major(&k[..], shape(1)).unwrap(),
        v: Tensor::token_major(&v[..], shape(1)).unwrap(),
        out: TensorMut::token_major(&mut out[..], shape(2)).unwrap(),
        lse: None,
    };
    let sequences = [Sequence::new(TOKENS, TOKENS).with_rotary(rotary)];
    Runner::new(1).run(&plan, &mut Batch::new(operands, &sequences)).unwrap();
    out
}

#[test]
fn the_callers_own_cos_and_sin() {
    let inv_freq = inv_freq();
    let mut storage = Vec::new();
    table(&mut storage, &inv_freq, 1.0).unwrap();
    let small = RotaryTable::from_storage(&storage, DIM / 2, 9000, 1.0).unwrap();
    let angles = (0..TOKENS).flat_map(|p| inv_freq.iter().map(move |f| p as f64 * f));
    let (cos, sin): (Vec<f32>, Vec<f32>) = angles.map(|a| (a.cos() as f32, a.sin() as f32)).unzip();
    for tier in tiers::each(rotile::capabilities().unwrap()) {
        let want = attend(&tier, small.into());
        let by_position = CosSin::by_position(&cos[..], &sin[..], DIM / 2).unwrap();
        let by_token = CosSin::by_token(&cos[..], &sin[..], DIM / 2).unwrap();
        let near = |got: Vec<f32>, bound: f32| got.iter().zip(&want).all(|(a, b)| (a - b).abs() < bound);
        assert!(near(attend(&tier, by_position.into()), 1e-6));
        assert!(near(attend(&tier, by_token.into()), 1e-6));
        // 16-bit arrays are rounded by their owner, and only then.
        let halves = |x: &[f32]| -> Vec<f16> { x.iter().map(|x| f16::from_f32(*x)).collect() };
        let (c, s) = (halves(&cos), halves(&sin));
        let wide = |x: &[f16]| -> Vec<f32> { x.iter().map(|x| x.to_f32()).collect() };
        let (cw, sw) = (wide(&c), wide(&s));
        let got = attend(&tier, CosSin::by_position(&c[..], &s[..], DIM / 2).unwrap().into());
        assert_eq!(got, attend(&tier, CosSin::by_position(&cw[..], &sw[..], DIM / 2).unwrap().into()));
        assert!(near(got, 5e-3));
        let brains: Vec<bf16> = cos.iter().map(|x| bf16::from_f32(*x)).collect();
        attend(&tier, CosSin::by_position(&brains[..], &brains[..], DIM / 2).unwrap().into());
    }
}

#[test]
fn rotate_gives_the_bits_that_append_stores() {
    for tier in tiers::each(rotile::capabilities().unwrap()) {
        for style in [PairStyle::Half, PairStyle::Interleaved] {
            for dtype in [DType::F32, DType::F16, DType::Bf16] {
                let rotation = Rotation::slice(style, 3, 20);
                let want = Want { rotation: Some(rotation.clone()), ..Want::new(1, 1, DIM) }.of(dtype);
                let problem = want.with(TOKENS, TOKENS).build(2);
                let how = How { via: Via::AppendThenCached, keys: Keys::Rotated, cache_dtype: dtype, ..How::default() };
                let stored = trial::run(&problem, Part::Slice, &tier, &how).unwrap().k_cache.remove(0);

                let mut storage = Vec::new();
                table(&mut storage, &rotation.inv_freq, 1.0).unwrap();
                let small = RotaryTable::from_storage(&storage, 10, 9000, 1.0).unwrap();
                let mut spec = AttentionSpec::rotate(1, DIM, RotarySpec::at_offset(style, 3, 20));
                (spec.q_dtype, spec.out_dtype) = (dtype, dtype);
                let plan = Plan::new(&tier, &spec).unwrap();
                assert_eq!(plan.spec().operation, Operation::Rotate);
                let sequences = [Sequence::new(TOKENS, TOKENS).with_rotary(small)];
                let x = problem.sequences[0].k.clone();
                let mut out = Data::zeros(x.len(), dtype);
                let operands = Operands::Rotate {
                    x: Tensor::token_major(x.as_slice(), shape(1)).unwrap(),
                    out: TensorMut::token_major(out.as_slice_mut(), shape(1)).unwrap(),
                };
                Runner::new(2).run(&plan, &mut Batch::new(operands, &sequences)).unwrap();
                assert_eq!(out, stored, "{style:?} {dtype}");
                let mut in_place = x;
                let x = TensorMut::token_major(in_place.as_slice_mut(), shape(1)).unwrap();
                let operands = Operands::RotateInPlace { x };
                Runner::new(1).run(&plan, &mut Batch::new(operands, &sequences)).unwrap();
                assert_eq!(in_place, stored, "{style:?} {dtype}, in place");
            }
        }
    }
}

#[test]
fn b34_each_sequence_has_its_own_factors() {
    let (short, long) = (vec![1.0; DIM / 2], (0..DIM / 2).map(|i| 1.0 + i as f64).collect::<Vec<_>>());
    let factors = LongRopeFactors { short: &short, long: &long };
    let of = |seq_len: u32| {
        let mut out = vec![0.0; DIM / 2];
        let set = Frequencies::LongRope {
            base: 1e4,
            factors: factors.pick(seq_len, 4096),
            original: 4096,
            max_positions: 131_072,
            attention_factor: None,
        };
        let amplitude = set.inv_freq(DIM, &mut out).unwrap();
        assert!((amplitude - 1.19024).abs() < 1e-5);
        let mut storage = Vec::new();
        table(&mut storage, &out, amplitude).unwrap();
        (storage, amplitude)
    };
    let tables = [of(3000), of(5000)];
    for tier in tiers::each(rotile::capabilities().unwrap()) {
        let plan = Plan::new(&tier, &AttentionSpec::rotate(1, DIM, RotarySpec::full(PairStyle::Half))).unwrap();
        let x = Rng::new(3).normal(2 * TOKENS * DIM);
        let run = |which: &[usize]| {
            let mut out = vec![0.0; x.len()];
            let both = Shape { batch: 2, ..shape(1) };
            let sequences: Vec<Sequence<'_>> = which
                .iter()
                .map(|&i| {
                    let (storage, amplitude) = &tables[i];
                    let small = RotaryTable::from_storage(storage, DIM / 2, 9000, *amplitude).unwrap();
                    let mut s = Sequence::new(TOKENS, TOKENS).with_rotary(small).in_batch(i);
                    // Chunks before and after the limit take one set: the sequence's.
                    s.q_positions = Positions::Start(if i == 0 { 2900 } else { 4080 });
                    s
                })
                .collect();
            let operands = Operands::Rotate {
                x: Tensor::token_major(&x[..], both).unwrap(),
                out: TensorMut::token_major(&mut out[..], both).unwrap(),
            };
            Runner::new(1).run(&plan, &mut Batch::new(operands, &sequences)).unwrap();
            out
        };
        let (both, first, second) = (run(&[0, 1]), run(&[0]), run(&[1]));
        let half = TOKENS * DIM;
        assert!(both[..half] == first[..half] && both[half..] == second[half..] && first[..half] != both[half..]);
    }
}

/// Flush-to-zero, denormals-are-zero and another rounding mode change no bits, and are there afterwards.
#[cfg(target_arch = "x86_64")]
#[test]
fn the_hosts_floating_point_state_changes_nothing() {
    use std::arch::asm;
    fn set(value: u32) {
        // SAFETY: the values below set no reserved bit.
        unsafe { asm!("ldmxcsr [{}]", in(reg) &value, options(nostack, readonly)) };
    }
    fn get() -> u32 {
        let mut value = 0u32;
        // SAFETY: stores to a local.
        unsafe { asm!("stmxcsr [{}]", in(reg) &mut value, options(nostack)) };
        value
    }
    let inv_freq = inv_freq();
    let mut storage = Vec::new();
    table(&mut storage, &inv_freq, 1.0).unwrap();
    let (k, v) = (Rng::new(4).normal(TOKENS * DIM), vec![1e-40f32; TOKENS * DIM]);
    for tier in tiers::each(rotile::capabilities().unwrap()) {
        let plan = Plan::new(&tier, &AttentionSpec::attend(1, 1, DIM, RotarySpec::full(PairStyle::Half))).unwrap();
        let mut results = Vec::new();
        for state in [0x1F80u32, 0x1F80 | 1 << 15 | 1 << 6, 0x1F80 | 2 << 13, 0x1F80 | 3 << 13 | 1 << 15] {
            let small = RotaryTable::from_storage(&storage, DIM / 2, 9000, 1.0).unwrap();
            let sequences = [Sequence::new(TOKENS, TOKENS).with_rotary(small)];
            let mut out = vec![f32::NAN; TOKENS * DIM];
            let operands = Operands::Attend {
                q: Tensor::token_major(&k[..], shape(1)).unwrap(),
                k: Tensor::token_major(&k[..], shape(1)).unwrap(),
                v: Tensor::token_major(&v[..], shape(1)).unwrap(),
                out: TensorMut::token_major(&mut out[..], shape(1)).unwrap(),
                lse: None,
            };
            let mut batch = Batch::new(operands, &sequences);
            let mut scratch = vec![0; plan.scratch_len(&sequences)];
            let call = plan.prepare(&mut batch, &mut scratch).unwrap();
            let mut workspace = vec![0; call.workspace_len()];
            set(state);
            let result = call.run(&mut workspace);
            let after = get();
            set(0x1F80);
            result.unwrap();
            // Sticky exception flags are the low six bits; the rest is control.
            assert_eq!(after & !0x3F, state & !0x3F);
            results.push(out.iter().map(|x| x.to_bits()).collect::<Vec<_>>());
        }
        assert!(results[0].iter().any(|b| *b != 0), "denormal values survive");
        assert!(results.iter().all(|r| *r == results[0]));
    }
}

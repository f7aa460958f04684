//! Kinds of fault that broke comparable code, each reduced to its smallest trigger, on every tier.

use rotile::{DType, Error, Keys, Tile, bf16, f16};
use rotile_testkit::data::Data;
use rotile_testkit::draw::{DTYPES, Want};
use rotile_testkit::reference::{Heads, Problem, Rotation};
use rotile_testkit::tiers;
use rotile_testkit::trial::{self, How, Outcome, Tail, Via};
use rotile_testkit::vectors::Part;

/// Runs on every tier, checks against the f64 attention, and hands the outcome on.
fn each(problem: &Problem, how: &How, check: impl Fn(&Outcome)) {
    for tier in tiers::each(rotile::capabilities().unwrap()) {
        let name = tier.tier().unwrap().name();
        let outcome = trial::run(problem, Part::Slice, &tier, how).unwrap_or_else(|e| panic!("{name}: {e}"));
        trial::check(problem, &outcome, how).unwrap_or_else(|e| panic!("{name} {how:?}: {e}"));
        check(&outcome);
    }
}

fn filled(data: &Data, f: impl Fn(usize) -> f32) -> Data {
    let values: Vec<f32> = (0..data.len()).map(f).collect();
    Data::round(&values, data.dtype())
}

fn no_rope(want: Want) -> Want {
    Want { rotation: None, ..want }
}

/// V of one-hot rows: the output shows which keys were seen.
fn one_hot(mut problem: Problem) -> Problem {
    let dim = problem.heads.dim_v;
    for s in &mut problem.sequences {
        s.k = filled(&s.k, |_| 0.0);
        s.v = filled(&s.v, |i| if i % dim == i / dim { 1.0 } else { 0.0 });
    }
    problem
}

fn seen(outcome: &Outcome, dim: usize) -> Vec<usize> {
    outcome.out[0].to_f32().chunks(dim).map(|row| row.iter().filter(|x| **x != 0.0).count()).collect()
}

#[test]
fn b01_row_without_keys_is_zero() {
    for dtype in DTYPES {
        let problem = Want::new(2, 2, 8).of(dtype).with_start(3, 4, -2).build(1);
        let how = How { out_dtype: dtype, ..How::default() };
        each(&problem, &how, |o| {
            let out = o.out[0].to_f32();
            assert!(out[..2 * 2 * 8].iter().all(|x| *x == 0.0), "rows 0 and 1 see nothing");
            assert!(o.lse[0][..4].iter().all(|x| *x == f32::NEG_INFINITY));
            assert!(out[32..].iter().all(|x| x.is_finite()));
        });
    }
}

#[test]
fn b05_causal_with_a_cache() {
    for (q, k, want) in [(2, 5, &[4, 5][..]), (1, 9, &[9]), (5, 2, &[0, 0, 0, 1, 2])] {
        for via in [Via::Attend, Via::AppendThenCached] {
            let problem = one_hot(Want::new(1, 1, 16).with(q, k).build(2));
            each(&problem, &How { via, ..How::default() }, |o| assert_eq!(seen(o, 16), want));
        }
    }
}

#[test]
fn b17_nan_in_unwritten_slots() {
    for dtype in DTYPES {
        for kv_len in [1, 13, 32, 63] {
            for (q_len, keys) in [(1, Keys::Raw), (1, Keys::Rotated), (kv_len, Keys::Raw)] {
                let problem = Want::new(4, 2, 40).of(dtype).with(q_len, kv_len).with(1, 128).build(3);
                let run = |tail| {
                    let how = How { via: Via::AppendThenCached, keys, cache_dtype: dtype, tail, ..How::default() };
                    let mut bits = Vec::new();
                    for tier in tiers::each(rotile::capabilities().unwrap()) {
                        let o = trial::run(&problem, Part::Slice, &tier, &how).unwrap();
                        assert!(o.out[0].to_f32().iter().all(|x| x.is_finite()));
                        bits.extend(o.out[0].to_f32().iter().map(|x| x.to_bits()));
                    }
                    bits
                };
                let zero = run(Tail::Zero);
                assert!(run(Tail::Nan) == zero && run(Tail::Infinity) == zero, "{dtype} {kv_len} {keys:?}");
            }
        }
    }
}

#[test]
fn b19_sequence_without_keys_in_a_batch() {
    let problem = Want::new(2, 1, 16).with(1, 5).with(1, 0).with(1, 7).build(4);
    each(&problem, &How::default(), |o| {
        assert!(o.out[1].to_f32().iter().all(|x| *x == 0.0));
        assert!(o.lse[1].iter().all(|x| *x == f32::NEG_INFINITY));
    });
}

#[test]
fn b20_nothing_to_do() {
    let how = How::default();
    each(&Want::new(9, 3, 64).with(0, 0).with(1, 3).with(0, 0).with(1, 5).build(5), &how, |_| ());
    each(&Want::new(9, 3, 64).with(0, 7).build(5), &how, |_| ());
    each(&Want::new(9, 3, 64).build(5), &how, |o| assert!(o.out.is_empty()));
    each(&Want::new(9, 3, 64).with(40, 0).build(5), &how, |_| ());
}

#[test]
fn b22_scores_beyond_f16() {
    for dtype in [DType::F16, DType::Bf16, DType::F32] {
        for (q_len, kv_len) in [(1, 2), (40, 40)] {
            let mut problem = no_rope(Want::new(1, 1, 64)).of(dtype).with(q_len, kv_len).build(6);
            let s = &mut problem.sequences[0];
            (s.q, s.k) = (filled(&s.q, |_| 32.0), filled(&s.k, |_| 32.0));
            each(&problem, &How::default(), |o| assert!(o.out[0].to_f32().iter().all(|x| x.is_finite())));

            let mut problem = no_rope(Want::new(1, 1, 128)).of(dtype).with(q_len, kv_len).build(7);
            let s = &mut problem.sequences[0];
            s.q = filled(&s.q, |_| 256.0);
            s.k = filled(&s.k, |i| if i < 128 { 256.0 } else { 255.0 });
            let first: Vec<f32> = s.v.to_f32()[..128].to_vec();
            each(&problem, &How::default(), |o| {
                let out = o.out[0].to_f32();
                assert!(out.iter().zip(&first).all(|(a, b)| (a - b).abs() <= 3e-7 * b.abs()), "all on key 0");
            });
        }
    }
}

#[test]
fn b23_sums_do_not_saturate() {
    for (n, dtype) in [(8192, DType::F16), (8192, DType::Bf16), (65_536, DType::F16)] {
        for q_len in [1, 20] {
            let mut problem = no_rope(Want::new(1, 1, 8)).of(dtype).with_start(q_len, n, n as i64).build(8);
            let s = &mut problem.sequences[0];
            s.k = filled(&s.k, |_| 0.0);
            s.v = filled(&s.v, |i| (i / 8) as f32 / n as f32);
            each(&problem, &How::default(), |o| assert!((o.out[0].to_f32()[0] - 0.49994).abs() < 4.9e-4));
            let s = &mut problem.sequences[0];
            s.v = filled(&s.v, |i| if i / 8 % 2 == 0 { 30_000.0 } else { -30_000.0 });
            each(&problem, &How::default(), |o| assert!(o.out[0].to_f32()[0].abs() < 1e-2));
        }
    }
}

#[test]
fn b29_positions_do_not_collide() {
    for dtype in DTYPES {
        for base in [255, 2049, 4097, 65_520] {
            let mut problem = Want::new(1, 1, 64).of(dtype).with(5, 5).build(9);
            let s = &mut problem.sequences[0];
            s.q_positions = (base..base + 5).collect();
            s.k_positions = s.q_positions.clone();
            each(&problem, &How::default(), |_| ());
            let how = How { via: Via::AppendThenCached, keys: Keys::Rotated, cache_dtype: dtype, ..How::default() };
            each(&problem, &how, |_| ());
        }
    }
}

#[test]
fn b31_prefill_and_decode_write_the_same_keys() {
    let problem = Want::new(2, 1, 64).with(100, 742).build(10);
    for dtype in DTYPES {
        let how = |via| How { via, keys: Keys::Rotated, cache_dtype: dtype, by_index: true, ..How::default() };
        for tier in tiers::each(rotile::capabilities().unwrap()) {
            let run = |last| trial::run(&problem, Part::Slice, &tier, &how(Via::AppendAttend(last))).unwrap().k_cache;
            assert!(run(0) == run(1) && run(0) == run(100) && run(0) == run(742), "{dtype}");
        }
    }
}

#[test]
fn b31_only_the_distance_of_positions_counts() {
    for tier in tiers::each(rotile::capabilities().unwrap()) {
        let run = |shift: u32| {
            let mut problem = Want::new(2, 1, 64).with(20, 40).build(11);
            let s = &mut problem.sequences[0];
            s.q_positions.iter_mut().chain(&mut s.k_positions).for_each(|p| *p += shift);
            let o = trial::run(&problem, Part::Slice, &tier, &How::default()).unwrap();
            trial::check(&problem, &o, &How::default()).unwrap();
            o.out[0].to_f32()
        };
        let at_zero = run(0);
        for shift in [1000, 100_000] {
            assert!(run(shift).iter().zip(&at_zero).all(|(a, b)| (a - b).abs() < 2e-5), "shift {shift}");
        }
    }
}

#[test]
fn b38_slice_at_the_end_of_the_head() {
    use rotile::rotary::PairStyle::{Half, Interleaved};
    for (dim, offset, rotary_dim) in [(576, 512, 64), (192, 128, 64)] {
        for style in [Half, Interleaved] {
            let mut rotation = Rotation::slice(style, offset, rotary_dim);
            rotation.amplitude = 0.5;
            let want = Want { rotation: Some(rotation), ..Want::new(2, 1, dim) }.with(9, 9);
            let problem = want.build(12);
            let how = How { via: Via::AppendThenCached, keys: Keys::Rotated, ..How::default() };
            let given = problem.sequences[0].k.to_f32();
            each(&problem, &how, |o| {
                for (stored, given) in o.k_cache[0].to_f32().chunks(dim).zip(given.chunks(dim)) {
                    assert_eq!(stored[..offset], given[..offset], "what does not turn keeps its bits");
                }
            });
        }
    }
}

#[test]
fn b46_padded_rows_equal_unpadded_ones() {
    // Two sequences of different length in one call, each as if alone; positions of one shifted.
    let problem = Want::new(4, 4, 32).with(3, 3).with(7, 7).build(13);
    let mut shifted = problem.clone();
    let s = &mut shifted.sequences[0];
    s.q_positions.iter_mut().chain(&mut s.k_positions).for_each(|p| *p += 1000);
    for tier in tiers::each(rotile::capabilities().unwrap()) {
        let run = |p: &Problem| trial::run(p, Part::Slice, &tier, &How::default()).unwrap();
        let (a, b) = (run(&problem), run(&shifted));
        assert_eq!(a.out[1], b.out[1]);
        let (a, b) = (a.out[0].to_f32(), b.out[0].to_f32());
        assert!(a.iter().zip(&b).all(|(a, b)| (a - b).abs() < 1e-5));
    }
}

#[test]
fn b49_query_head_reads_its_own_group() {
    for (hq, hkv) in [(6, 2), (28, 4), (12, 12), (8, 1), (32, 8)] {
        for (q_len, kv_len) in [(20, 20), (1, 20), (1, 1)] {
            let mut problem = Want::new(hq, hkv, 16).with(q_len, kv_len).build(14);
            let s = &mut problem.sequences[0];
            s.v = filled(&s.v, |i| (i / 16 % hkv) as f32);
            each(&problem, &How::default(), |o| {
                for (r, row) in o.out[0].to_f32().chunks(16).enumerate() {
                    let want = (r % hq / (hq / hkv)) as f32;
                    assert!(row.iter().all(|x| (x - want).abs() < 1e-5), "query head {} of {hq}/{hkv}", r % hq);
                }
            });
        }
    }
}

#[test]
fn b50_every_head_dim() {
    for dim in [1, 3, 33, 40, 64, 72, 80, 88, 96, 112, 120, 160, 192, 224, 256, 320, 512, 576] {
        for (q_len, kv_len) in [(9, 9), (1, 40)] {
            let mut want = Want::new(3, 1, dim).with(q_len, kv_len);
            if dim % 2 == 1 {
                want.rotation = None;
            }
            each(&want.build(dim as u64), &How::default(), |_| ());
            want.heads.dim_v = dim % 100 + 1;
            each(&want.build(dim as u64), &How { gap: 1, ..How::default() }, |_| ());
        }
    }
}

#[test]
fn b52_strided_views_equal_their_packed_copies() {
    let problem = Want::new(4, 2, 24).with(30, 30).with(1, 12).build(15);
    for tier in tiers::each(rotile::capabilities().unwrap()) {
        let run = |how: How| trial::run(&problem, Part::Slice, &tier, &how).unwrap().out;
        let packed = run(How::default());
        for (head_major, gap) in [(false, 5), (true, 0), (true, 7)] {
            assert_eq!(run(How { head_major, gap, ..How::default() }), packed);
        }
    }
    let shape = rotile::Shape { batch: 1, tokens: 2, heads: 1, dim: 4 };
    let strides = rotile::Strides { batch: 0, token: 12, head: 12, dim: 3 };
    let error = rotile::Tensor::new(&[0.0f32; 64][..], shape, strides).unwrap_err();
    assert!(matches!(error, Error::InnerStride { stride: 3, .. }) && error.to_string().contains('3'));
}

#[test]
fn b53_one_key_head_shown_as_eight() {
    use rotile::{AttentionSpec, Batch, Operands, Plan, Runner, Sequence, Shape, Strides, Tensor, TensorMut};
    for kv_len in [33, 65] {
        let (heads, dim) = (8, 512);
        let mut problem = no_rope(Want::new(heads, heads, dim)).of(DType::Bf16).with(kv_len, kv_len).build(16);
        // The expanded copy: all heads alike.
        let s = &mut problem.sequences[0];
        let spread = |x: &Data| {
            let first = x.to_f32();
            filled(x, |i| first[i / (heads * dim) * heads * dim + i % dim])
        };
        (s.k, s.v) = (spread(&s.k), spread(&s.v));
        let how = How { out_dtype: DType::F32, ..How::default() };
        let one = |x: &Data| -> Vec<bf16> {
            x.to_f32().chunks(heads * dim).flat_map(|t| t[..dim].to_vec()).map(bf16::from_f32).collect()
        };
        let (k, v) = (one(&s.k), one(&s.v));
        for tier in tiers::each(rotile::capabilities().unwrap()) {
            let want = trial::run(&problem, Part::Slice, &tier, &how).unwrap();
            let s = &problem.sequences[0];
            let mut spec = AttentionSpec::attend(heads, heads, dim, rotile::rotary::RotarySpec::none());
            spec = spec.with_dtype(DType::Bf16);
            spec.out_dtype = DType::F32;
            let plan = Plan::new(&tier, &spec).unwrap();
            let shape = Shape { batch: 1, tokens: kv_len, heads, dim };
            let broadcast = Strides { batch: 0, token: dim, head: 0, dim: 1 };
            let mut out = vec![f32::NAN; kv_len * heads * dim];
            let operands = Operands::Attend {
                q: Tensor::token_major(s.q.as_slice(), shape).unwrap(),
                k: Tensor::new(&k[..], shape, broadcast).unwrap(),
                v: Tensor::new(&v[..], shape, broadcast).unwrap(),
                out: TensorMut::token_major(&mut out[..], shape).unwrap(),
                lse: None,
            };
            let sequences = [Sequence::new(kv_len, kv_len)];
            Runner::new(1).run(&plan, &mut Batch::new(operands, &sequences)).unwrap();
            let same = out.iter().zip(want.out[0].to_f32()).all(|(a, b)| (a - b).abs() < 1e-6);
            assert!(same, "{kv_len} keys");
        }
    }
}

#[test]
fn b62_workspace_exactly_as_queried() {
    // Trials give scratch and workspace of the queried size between guard pages; a small call first.
    for threads in [1, 8, 16, 24, 32, 40, 48, 64, 96] {
        let how = How { threads, ..How::default() };
        each(&Want::new(8, 2, 32).with(1, 1).build(17), &how, |_| ());
        each(&Want::new(8, 2, 32).with(1, 4096).build(17), &how, |_| ());
    }
}

#[test]
fn b64_unknown_cache_sizes_give_default_tiles() {
    for tier in tiers::each(rotile::capabilities().unwrap()) {
        for (l1, l2) in [(0, 0), (32 << 10, 512 << 10)] {
            let mut tier = tier;
            (tier.l1_bytes, tier.l2_bytes) = (l1, l2);
            let spec = rotile::AttentionSpec::attend(16, 16, 128, rotile::rotary::RotarySpec::none());
            let plan = rotile::Plan::new(&tier, &spec).unwrap();
            assert!(plan.workspace_len() <= 3 << 19, "{} bytes for 8192 tokens", plan.workspace_len());
            assert!(plan.scratch_len(&[rotile::Sequence::new(8192, 8192)]) < 4096);
            // Unknown sizes are taken for usual ones: as many whole panels as 256 keys give, or as a quarter of L1 holds.
            let Tile { mr, nr, key_tile, .. } = *plan.tile();
            let more = key_tile + nr;
            assert!(key_tile.is_multiple_of(nr) && (more > 256 || 4 * mr * more > 8 << 10), "{:?}", plan.tile());
            // A small L1 is heeded: scores of a tile take a quarter of it at most.
            (tier.l1_bytes, tier.l2_bytes) = (8 << 10, 128 << 10);
            let small = rotile::Plan::new(&tier, &spec).unwrap();
            let Tile { mr, nr, key_tile, .. } = *small.tile();
            assert!(key_tile >= nr && key_tile.is_multiple_of(nr) && 4 * mr * key_tile <= 2 << 10);
            assert!(small.workspace_len() < plan.workspace_len());
        }
    }
}

#[test]
fn b65_large_heads_and_narrow_rotations_take_the_same_kernels() {
    for (hq, hkv, dim, rotary_dim, dtype) in [(16, 8, 512, 512, DType::F32), (2, 2, 192, 64, DType::Bf16)] {
        let rotation = Rotation::slice(rotile::rotary::PairStyle::Half, 0, rotary_dim);
        let want = Want { rotation: Some(rotation), ..Want::new(hq, hkv, dim) }.of(dtype).with(20, 20);
        let plain = Want::new(2, 2, 64).with(20, 20).build(1);
        for tier in tiers::each(rotile::capabilities().unwrap()) {
            let run = |p: &Problem| trial::run(p, Part::Slice, &tier, &How::default()).unwrap().kernel;
            assert_eq!(run(&want.build(18)), run(&plain));
        }
        each(&want.build(18), &How::default(), |_| ());
    }
}

#[test]
fn b70_whole_vectors_and_one_more_or_less() {
    for n in [4usize, 8, 16, 32, 64] {
        for kv_len in [n - 1, n, n + 1] {
            for dim in [n - 1, n, n + 1] {
                let mut want = Want::new(2, 1, dim).with(kv_len, kv_len).with(1, kv_len);
                if dim % 2 == 1 {
                    want.rotation = None;
                }
                each(&want.build((n + kv_len) as u64), &How::default(), |_| ());
            }
        }
    }
}

#[test]
fn b71_permuted_layouts_repeat() {
    let problem = Want::new(4, 2, 48).with(50, 50).build(19);
    for tier in tiers::each(rotile::capabilities().unwrap()) {
        let run = |head_major| trial::run(&problem, Part::Slice, &tier, &How { head_major, ..How::default() }).unwrap();
        let first = run(false);
        assert!((0..5).all(|i| run(i % 2 == 0) == first));
    }
}

#[test]
fn b79_mixed_types() {
    for q in DTYPES {
        for k in DTYPES {
            for v in DTYPES {
                let want = Want { dtypes: [q, k, v], ..Want::new(4, 2, 40) }.with(20, 25).with(1, 25);
                for out_dtype in [DType::F32, q] {
                    each(&want.build(20), &How { out_dtype, ..How::default() }, |_| ());
                    let how = How { via: Via::AppendAttend(1), cache_dtype: v, out_dtype, ..How::default() };
                    each(&want.build(20), &how, |_| ());
                }
            }
        }
    }
}

/// NaN and infinity stay where they belong, in both paths.
#[test]
fn what_is_not_finite_stays_where_it_is_seen() {
    let heads = Heads { q: 2, kv: 2, dim_qk: 24, dim_v: 20 };
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        for (q_len, kv_len) in [(40, 40), (3, 40)] {
            for key in [0, 17, 38, 39] {
                let poison = |data: &Data, element: usize| {
                    let x = data.to_f32();
                    filled(data, |i| if i == element { bad } else { x[i] })
                };
                let want = no_rope(Want { heads, ..Want::new(2, 2, 24) }).with(q_len, kv_len);
                // A key, a value, a query: the f64 attention says which outputs are NaN, and no others may be.
                let mut k = want.build(21);
                k.sequences[0].k = poison(&k.sequences[0].k, (key * 2 + 1) * 24 + 5);
                each(&k, &How::default(), |_| ());
                let mut v = want.build(21);
                v.sequences[0].v = poison(&v.sequences[0].v, (key * 2 + 1) * 20 + 5);
                each(&v, &How::default(), |_| ());
                let mut q = want.build(21);
                q.sequences[0].q = poison(&q.sequences[0].q, ((q_len - 1) * 2 + 1) * 24 + 5);
                each(&q, &How::default(), |_| ());
            }
        }
    }
}

#[test]
fn f16_rounds_once_in_the_cache() {
    let problem = Want::new(1, 1, 16).with(1, 30).build(22);
    let how = How { via: Via::AppendThenCached, keys: Keys::Raw, cache_dtype: DType::F16, ..How::default() };
    let given: Vec<f16> = problem.sequences[0].k.to_f32().iter().map(|x| f16::from_f32(*x)).collect();
    each(&problem, &how, |o| assert_eq!(o.k_cache[0], Data::F16(given.clone())));
}

#[test]
fn b04_softcap_on_tails_of_tiles() {
    for kv_len in [1, 7, 8, 31, 32, 33, 63, 64, 65, 129, 255, 256, 257] {
        for q_len in [1, 24] {
            let mut want = no_rope(Want::new(2, 1, 16)).with_start(q_len, kv_len, 0);
            want.causal = false;
            let mut problem = want.build(20);
            problem.softcap = Some(2.0);
            problem.sequences[0].k = filled(&problem.sequences[0].k, |_| 0.0);
            problem.sequences[0].v = filled(&problem.sequences[0].v, |_| 1.0);
            each(&problem, &How::default(), |o| {
                assert!(o.out[0].to_f32().iter().all(|x| (x - 1.0).abs() < 1e-6), "{kv_len} keys");
            });
        }
    }
}

#[test]
fn b08_window_counts_the_own_key() {
    for (total, want) in [(4, [1, 2, 3, 4, 4, 4, 4, 4, 4, 4]), (1, [1; 10]), (99, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10])] {
        let mut problem = one_hot(Want::new(1, 1, 16).with(10, 10).build(21));
        problem.left = rotile::Window::total(total).unwrap().left;
        each(&problem, &How::default(), |o| assert_eq!(seen(o, 16), want));
    }
}

#[test]
fn b10_two_sided_window() {
    let mut want = no_rope(Want::new(1, 1, 40)).with_start(40, 40, 0);
    want.causal = false;
    let mut problem = one_hot(want.build(22));
    (problem.left, problem.right) = (Some(16), Some(4));
    each(&problem, &How::default(), |o| {
        let row: Vec<usize> = (0..40).filter(|&c| o.out[0].to_f32()[10 * 40 + c] != 0.0).collect();
        assert_eq!(row, (0..15).collect::<Vec<_>>());
    });
}

#[test]
fn b13_sinks_alone_and_huge() {
    for (kv_len, sink, lse) in
        [(0, 0.5, 0.5), (5, 100.0, 100.0), (5, f32::NEG_INFINITY, 5f32.ln()), (5, -100.0, 5f32.ln())]
    {
        for q_len in [1, 30] {
            let mut want = no_rope(Want::new(1, 1, 8)).with_start(q_len, kv_len, 0);
            want.causal = false;
            let mut problem = want.build(23);
            problem.sequences[0].k = filled(&problem.sequences[0].k, |_| 0.0);
            problem.sinks = Some(vec![sink]);
            each(&problem, &How::default(), |o| {
                assert!(o.lse[0].iter().all(|x| (x - lse).abs() < 1e-5), "{kv_len} keys, sink {sink}: {:?}", o.lse[0]);
            });
        }
    }
}

#[test]
fn b14_sink_enters_once_however_keys_are_split() {
    for kv_len in [900, 1024, 4096] {
        let mut problem = Want::new(4, 2, 64).with(1, kv_len).build(24);
        (problem.softcap, problem.sinks) = (Some(5.0), Some(vec![20.0, 3.0, -2.0, 0.0]));
        each(&problem, &How::default(), |_| ());
        problem.left = Some(700);
        each(&problem, &How { via: Via::AppendThenCached, ..How::default() }, |_| ());
    }
}

#[test]
fn b26_tiles_that_are_wholly_masked() {
    for q_len in [1, 40] {
        let mut problem = Want::new(2, 1, 16).with(q_len, 200 + q_len).build(25);
        problem.left = Some(15);
        each(&problem, &How::default(), |_| ());
        problem.left = None;
        let keys = problem.sequences[0].kv_len;
        problem.sequences[0].mask = Some((0..q_len * keys).map(|i| i % keys / 64 % 2 == 1).collect());
        each(&problem, &How::default(), |_| ());
    }
}

#[test]
fn b26_hidden_keys_that_are_no_numbers_change_no_bits() {
    for (q_len, bit_masks) in [(1, false), (2, true), (40, false)] {
        let mut problem = no_rope(Want::new(2, 1, 16)).with(q_len, 300).build(26);
        // Every query but the last sees all keys but 70..80; the last but 75..80 more.
        let see = |query: usize, key: usize| !(70..if query + 1 == q_len { 85 } else { 80 }).contains(&key);
        problem.sequences[0].mask = Some((0..q_len * 300).map(|i| see(i / 300, i % 300)).collect());
        let how = How { bit_masks, ..How::default() };
        for tier in tiers::each(rotile::capabilities().unwrap()) {
            let clean = trial::run(&problem, Part::Slice, &tier, &how).unwrap();
            let mut spoilt = problem.clone();
            let poison = |x: &Data| {
                let x = x.to_f32();
                Data::F32(
                    x.iter()
                        .enumerate()
                        .map(|(i, x)| if (70..80).contains(&(i / 16)) { f32::NAN } else { *x })
                        .collect(),
                )
            };
            (spoilt.sequences[0].k, spoilt.sequences[0].v) =
                (poison(&problem.sequences[0].k), poison(&problem.sequences[0].v));
            assert!(trial::run(&spoilt, Part::Slice, &tier, &how).unwrap() == clean, "{q_len} queries");
        }
    }
}

//! What may not change bits: threads, task order, batch-mates, layout; and, in the tile path, chunking.

use rotile::Keys;
use rotile_testkit::data::Data;
use rotile_testkit::draw::Want;
use rotile_testkit::guard::Side;
use rotile_testkit::reference::Problem;
use rotile_testkit::tiers;
use rotile_testkit::trial::{self, How, Outcome, Via};
use rotile_testkit::vectors::Part;

fn bits(data: &Data) -> Vec<u32> {
    data.to_f32().iter().map(|x| x.to_bits()).collect()
}

fn all_bits(outcome: &Outcome) -> Vec<Vec<u32>> {
    let lse = outcome.lse.iter().map(|l| l.iter().map(|x| x.to_bits()).collect());
    outcome.out.iter().map(bits).chain(lse).collect()
}

fn run(problem: &Problem, tier: &rotile::Capabilities, how: &How) -> Outcome {
    trial::run(problem, Part::Slice, tier, how).unwrap()
}

#[test]
fn order_threads_and_layout_change_no_bits() {
    let problem = Want::new(6, 2, 40).with(70, 90).with(1, 2500).with(3, 1100).with(0, 5).with(150, 150).build(1);
    for tier in tiers::each(rotile::capabilities().unwrap()) {
        let plain = all_bits(&run(&problem, &tier, &How::default()));
        for seed in 0..5 {
            for threads in [1, 2, 64] {
                let how = How {
                    shuffle: Some(seed),
                    threads,
                    head_major: seed % 2 == 0,
                    gap: seed as usize,
                    side: if seed % 2 == 0 { Side::START } else { Side::End(1) },
                    ..How::default()
                };
                assert_eq!(all_bits(&run(&problem, &tier, &how)), plain, "{how:?}");
            }
        }
    }
}

#[test]
fn batch_mates_change_no_bits() {
    let problem = Want::new(4, 2, 33).with(1, 2100).with(64, 80).with(5, 40).with(2, 3).build(2);
    for tier in tiers::each(rotile::capabilities().unwrap()) {
        for via in [Via::Attend, Via::AppendThenCached, Via::AppendAttend(2)] {
            let how = How { via, keys: Keys::Raw, ..How::default() };
            let together = run(&problem, &tier, &how);
            for i in 0..problem.sequences.len() {
                let alone = Problem { sequences: vec![problem.sequences[i].clone()], ..problem.clone() };
                let alone = run(&alone, &tier, &how);
                assert_eq!(bits(&together.out[i]), bits(&alone.out[0]), "{via:?}, sequence {i}");
            }
        }
    }
}

/// Rows `range` of a one-sequence problem as a chunk over the keys that a cache would hold by then.
fn chunk(problem: &Problem, range: std::ops::Range<usize>) -> Problem {
    let mut chunk = problem.clone();
    let s = &mut chunk.sequences[0];
    let keys = range.end;
    let take = |data: &Data, row: usize, rows: std::ops::Range<usize>| {
        Data::round(&data.to_f32()[rows.start * row..rows.end * row], data.dtype())
    };
    let heads = problem.heads;
    s.q = take(&s.q, heads.q * heads.dim_qk, range.clone());
    s.k = take(&s.k, heads.kv * heads.dim_qk, 0..keys);
    s.v = take(&s.v, heads.kv * heads.dim_v, 0..keys);
    s.q_positions = s.q_positions[range.clone()].to_vec();
    s.k_positions.truncate(keys);
    (s.q_len, s.kv_len, s.q_start) = (range.len(), keys, range.start as i64);
    chunk
}

#[test]
fn chunks_of_the_tile_path_change_no_bits() {
    for tier in tiers::each(rotile::capabilities().unwrap()) {
        let problem = Want::new(4, 2, 48).with(600, 600).build(3);
        let how = How { via: Via::AppendThenCached, keys: Keys::Rotated, ..How::default() };
        let whole = bits(&run(&problem, &tier, &how).out[0]);
        // 9 tokens of a group of 2 are more than the few-row path takes.
        for cuts in [&[0, 300, 600][..], &[0, 9, 100, 101 + 9, 511, 600]] {
            let mut parts = Vec::new();
            for cut in cuts.windows(2) {
                parts.extend(bits(&run(&chunk(&problem, cut[0]..cut[1]), &tier, &how).out[0]));
            }
            assert_eq!(parts, whole, "tier {}, cuts {cuts:?}", tier.tier().unwrap().name());
        }
    }
}

#[test]
fn single_steps_of_the_portable_tier_change_no_bits() {
    let tier = rotile::capabilities().unwrap().require(rotile::TierName::Portable);
    let problem = Want::new(4, 2, 24).with(300, 300).build(4);
    let how = How { via: Via::AppendThenCached, keys: Keys::Rotated, ..How::default() };
    let whole = bits(&run(&problem, &tier, &how).out[0]);
    let steps: Vec<u32> = (0..300).flat_map(|i| bits(&run(&chunk(&problem, i..i + 1), &tier, &how).out[0])).collect();
    assert_eq!(steps, whole);
}

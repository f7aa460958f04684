//! Whole problems at random, on every tier, against the f64 attention.
//!
//! `ROTILE_PROBLEMS=N` runs N of them, `ROTILE_SEED=S` starts at another seed; a failure names the seed that repeats it.

use rotile_testkit::data::Rng;
use rotile_testkit::{draw, tiers, trial};

#[test]
fn random_problems_on_every_tier() {
    let number = |name: &str, default| std::env::var(name).map_or(default, |v| v.parse().expect(name));
    let (first, count) = (number("ROTILE_SEED", 1), number("ROTILE_PROBLEMS", 400));
    let tiers = tiers::each(rotile::capabilities().unwrap());
    let (mut worst, mut faults) = (0.0f64, Vec::new());
    for seed in first..first + count {
        let (problem, part, how) = draw::random(&mut Rng::new(seed));
        for tier in &tiers {
            let result = trial::run(&problem, part, tier, &how).map_err(|e| e.to_string());
            match result.and_then(|outcome| trial::check(&problem, &outcome, &how)) {
                Ok(max) => worst = worst.max(max.of_bound),
                Err(fault) => faults.push(format!(
                    "ROTILE_SEED={seed} ROTILE_PROBLEMS=1, tier {}: {fault}\n  {:?} scale {} {:?} {part:?}\n  {how:?}\n  {:?}",
                    tier.tier().unwrap().name(),
                    problem.heads,
                    problem.scale,
                    problem.rotation.as_ref().map(|r| (r.style, r.offset, r.inv_freq.len(), r.amplitude)),
                    problem.sequences.iter().map(|s| (s.q_len, s.kv_len, s.q_start)).collect::<Vec<_>>()
                )),
            }
        }
    }
    eprintln!("{count} problems from seed {first}: largest error {worst:.2} of its bound");
    assert!(
        faults.is_empty(),
        "{} faults, the first of them:\n{}",
        faults.len(),
        faults[..faults.len().min(5)].join("\n")
    );
}

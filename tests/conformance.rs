//! The repository's vectors on every tier, and in every way that one problem can be run.

use rotile::{DType, Keys};
use rotile_testkit::conform::{self, Verdict};
use rotile_testkit::trial::{self, How, Via};
use rotile_testkit::{tiers, vectors};

fn cases() -> Vec<vectors::Case> {
    let files = vectors::list(&vectors::repository()).unwrap();
    let attention = files.into_iter().filter(|f| !f.ends_with("rotary_tables.safetensors"));
    attention.map(|f| vectors::load(&f).unwrap_or_else(|e| panic!("{}: {e}", f.display()))).collect()
}

#[test]
fn vectors_on_every_tier() {
    let mut passed = 0;
    for tier in tiers::each(rotile::capabilities().unwrap()) {
        let name = tier.tier().unwrap().name();
        for case in cases() {
            match conform::run(&case, &tier) {
                Verdict::Pass { .. } => passed += 1,
                Verdict::Fail(reason) => panic!("{}, tier {name}: {reason}", case.name),
                Verdict::Unsupported(reason) => eprintln!("{}, tier {name}: {reason}", case.name),
            }
        }
    }
    // So many vectors need no feature that is still missing.
    let tiers = tiers::each(rotile::capabilities().unwrap()).len();
    assert!(passed >= 24 * tiers, "{passed} passed: the planner refuses what it used to accept");
}

#[test]
fn vectors_through_every_operation() {
    let ways = [
        (Via::Cached, Keys::Raw),
        (Via::AppendThenCached, Keys::Raw),
        (Via::AppendThenCached, Keys::Rotated),
        (Via::AppendAttend(1), Keys::Rotated),
        (Via::AppendAttend(7), Keys::Raw),
    ];
    for tier in tiers::each(rotile::capabilities().unwrap()) {
        for case in cases().iter().filter(|c| !matches!(conform::run(c, &tier), Verdict::Unsupported(_))) {
            for (via, keys) in ways {
                // Half of it under emulation, where it would take minutes.
                let small = std::env::var("ROTILE_BATTERY").is_ok_and(|v| v == "small");
                for cache_dtype in if small { &[DType::F16][..] } else { &[DType::F32, DType::F16] } {
                    let how = How { via, keys, cache_dtype: *cache_dtype, ..How::default() };
                    let outcome = trial::run(&case.problem, case.part, &tier, &how).unwrap();
                    let checked = trial::check(&case.problem, &outcome, &how);
                    checked.unwrap_or_else(|e| panic!("{} {:?} {how:?}: {e}", case.name, tier.tier().unwrap().name()));
                }
            }
        }
    }
}

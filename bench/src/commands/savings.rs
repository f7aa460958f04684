//! `savings`: misses and bytes of rotation in the tile against a pass of its own, in three independent views, and time.

use super::Context;
use crate::cachegrind::{self, Counts, Job, count_all};
use crate::cases::{Case, Shape, Step, Way};
use crate::counters;
use crate::lanes::Lane;
use crate::measure::{CacheState, Flush, Repeats, paired};
use crate::model::Model;
use crate::profiles::Profile;
use crate::results::{Results, number};
use serde_json::{Value, json};

/// Small: valgrind takes some 40 ns for each useful FLOP, as it emulates every lane of a fused multiply-add.
const SHAPES: [(Step, Shape); 6] = [
    (Step::Prefill, Shape::new(32, 8, 128, 128)),
    (Step::Prefill, Shape::new(32, 32, 128, 128)),
    (Step::Prefill, Shape::new(14, 2, 64, 256)),
    (Step::Prefill, Shape::new(4, 1, 256, 256)),
    (Step::Decode, Shape::new(14, 2, 64, 2048)),
    (Step::Append, Shape::new(32, 8, 128, 512)),
];
const QUICK: [(Step, Shape); 3] = [
    (Step::Prefill, Shape::new(32, 8, 128, 128)),
    (Step::Decode, Shape::new(14, 2, 64, 2048)),
    (Step::Append, Shape::new(32, 8, 128, 512)),
];

/// Ways that are counted. The last one's share is what explains a difference: its inputs need no rotation.
const COUNTED: [Way; 3] = [Way::Fused, Way::Separate, Way::PreRotated];

/// Views that differ by at most this factor agree.
const ROUGHLY: f64 = 2.0;
/// Bytes of a cache line, everywhere here.
const LINE: f64 = 64.0;

/// Runs the command.
///
/// # Errors
///
/// What planning or valgrind reports.
pub fn savings(context: &mut Context<'_>) -> Result<Results, String> {
    let quick = context.args.quick;
    let profiles = match &context.args.profiles[..] {
        [] if quick => vec![Profile::named("raspberry-pi-5")?],
        [] => ["raspberry-pi-5", "skylake", "host"].into_iter().filter_map(|name| Profile::named(name).ok()).collect(),
        given => given.to_vec(),
    };
    let shapes = if quick { &QUICK[..] } else { &SHAPES };
    let cases: Vec<Case> = shapes.iter().map(|&(step, shape)| Case::new(step, shape, Way::Fused)).collect();
    let mut results = context.results("savings");
    results.note(
        "Separate runs this library's own vectorised rotary pass over Q and K into memory, then the same kernels. Saved is \
         separate less fused. MB are 10^6 bytes; bytes of misses are lines of 64.",
    );
    let hardware = hardware(context, &mut results, &cases)?;
    simulated(context, &mut results, &cases, &profiles, &hardware)?;
    model(&mut results, &cases);
    time(context, &mut results, &cases)?;
    results.table(
        "profiles",
        "Simulated devices",
        &[
            ("profile", &["name"]),
            ("caches", &["sizes"]),
            ("plan for L1, L2", &["plan"]),
            ("source of the figures", &["source"]),
        ],
    );
    for p in &profiles {
        let plan = format!("{} KiB, {} KiB", p.d1.bytes >> 10, p.l2_bytes >> 10);
        results.row("profiles", json!({"name": p.name, "sizes": p.sizes(), "plan": plan, "source": p.source}));
    }
    Ok(results)
}

/// Bytes that loads missed in L1, saved by fusing; or why there is no such number.
type Hardware = Result<Vec<f64>, String>;

/// View 1: this machine's own counters.
fn hardware(context: &mut Context<'_>, results: &mut Results, cases: &[Case]) -> Result<Hardware, String> {
    context.progress("hardware counters");
    let mut saved = Vec::new();
    let mut rows = Vec::new();
    for case in cases {
        let count = |way: Way| -> Result<_, String> {
            let mut lane = Lane::new(&context.capabilities, &case.by(way), 1)?;
            lane.run();
            Ok(counters::count(9, &mut || lane.run()))
        };
        match (count(Way::Fused)?, count(Way::Separate)?) {
            (Ok(fused), Ok(separate)) => {
                saved.push((separate.l1_loads as f64 - fused.l1_loads as f64) * LINE);
                rows.push(json!({
                    "call": case.title(), "l1_fused": fused.l1_loads, "l1_separate": separate.l1_loads,
                    "ll_fused": fused.ll_loads, "ll_separate": separate.ll_loads, "saved": saved.last().map(|s| s / 1e6),
                }));
            }
            (Err(why), _) | (_, Err(why)) => {
                results.note(&format!("Hardware counters are not offered here: {why}."));
                return Ok(Err(why));
            }
        }
    }
    results.table(
        "hardware",
        "View 1: hardware counters of this machine, loads only, warm caches, least of nine",
        &[
            ("call", &["call"]),
            ("L1 misses, fused", &["l1_fused"]),
            ("separate", &["l1_separate"]),
            ("saved, MB", &["saved"]),
            ("LL misses, fused", &["ll_fused"]),
            ("separate", &["ll_separate"]),
        ],
    );
    rows.into_iter().for_each(|row| results.row("hardware", row));
    Ok(Ok(saved))
}

/// View 2, beside the others: the simulator, per device.
fn simulated(
    context: &mut Context<'_>,
    results: &mut Results,
    cases: &[Case],
    profiles: &[Profile],
    hardware: &Hardware,
) -> Result<(), String> {
    if let Some(why) = cachegrind::missing() {
        results.note(&format!("Simulated caches are not offered here: {why}."));
        return Ok(());
    }
    let mut jobs = Vec::new();
    for profile in profiles {
        for case in cases {
            for way in COUNTED {
                jobs.push(Job { case: case.by(way), profile: profile.clone(), state: CacheState::Cold });
            }
        }
    }
    let of = jobs.len();
    let found = count_all(&jobs, |done| context.progress(&format!("simulated {done} of {of} runs")))?;
    let title = "Three views side by side: bytes saved by fusing (counts of the AVX2 tier under valgrind's cache model, \
                 caches empty at the start of the call)";
    results.table(
        "savings",
        title,
        &[
            ("profile", &["profile"]),
            ("call", &["call"]),
            ("D1 misses fused", &["d1_fused"]),
            ("separate", &["d1_separate"]),
            ("D1 saved, MB", &["d1_saved"]),
            ("model", &["d1_model"]),
            ("LL misses fused", &["ll_fused"]),
            ("separate", &["ll_separate"]),
            ("LL saved, MB", &["ll_saved"]),
            ("model", &["ll_model"]),
            ("counters, L1 loads, MB", &["hardware"]),
            ("rotating in the tile, % of instructions", &["instructions_cost"]),
            ("D1 agrees", &["agree_d1"]),
            ("LL agrees", &["agree_ll"]),
            ("why not, or note", &["why"]),
        ],
    );
    for (i, (job, counts)) in jobs.chunks(COUNTED.len()).zip(found.chunks(COUNTED.len())).enumerate() {
        let hardware = hardware.as_ref().map(|saved| saved[i % cases.len()]);
        results.row("savings", side_by_side(&job[0], counts, hardware.ok()));
    }
    for profile in profiles {
        let series = json!([["D1 misses, MB", "d1_saved"], ["LL misses, MB", "ll_saved"], ["model, MB", "d1_model"]]);
        results.plot(
            "savings",
            json!({
                "style": "bars", "title": format!("Bytes saved by fusing, {}", profile.name), "x": "call",
                "y_label": "MB per call", "where": ["profile", profile.name], "series": series,
            }),
        );
    }
    Ok(())
}

/// The row of a device and a call.
fn side_by_side(job: &Job, counts: &[Counts], hardware: Option<f64>) -> Value {
    let [fused, separate, plain] = counts else { unreachable!("one for each way") };
    let (with, without) = (Model::of(&job.case.by(Way::Separate)), Model::of(&job.case.by(Way::Fused)));
    let d1_model = with.past(job.profile.d1.bytes) - without.past(job.profile.d1.bytes);
    let ll_model = with.past(job.profile.ll.bytes) - without.past(job.profile.ll.bytes);
    let bytes = |count: u64| count as f64 * LINE;
    let (d1_saved, ll_saved) = (bytes(separate.d1()) - bytes(fused.d1()), bytes(separate.ll()) - bytes(fused.ll()));
    let seen = Seen {
        d1: (d1_saved, d1_model),
        ll: (ll_saved, ll_model),
        d1_of_pass: bytes(separate.d1()) - bytes(plain.d1()),
        d1_of_tile: bytes(fused.d1()) - bytes(plain.d1()),
        fused: bytes(fused.d1()),
        copies: with.copies(),
        table: table_bytes(&job.case),
    };
    let verdict = verdict(&seen, &job.profile);
    let yes = |agree: bool| if agree { "yes" } else { "no" };
    json!({
        "profile": job.profile.name, "call": job.case.title(),
        "d1_fused": fused.d1(), "d1_separate": separate.d1(), "d1_saved": d1_saved / 1e6, "d1_model": d1_model / 1e6,
        "ll_fused": fused.ll(), "ll_separate": separate.ll(), "ll_saved": ll_saved / 1e6, "ll_model": ll_model / 1e6,
        "instructions_fused": fused.instructions, "instructions_separate": separate.instructions,
        "instructions_pre_rotated": plain.instructions, "d1_pre_rotated": plain.d1(), "ll_pre_rotated": plain.ll(),
        "instructions_cost": 100.0 * (fused.instructions as f64 / plain.instructions as f64 - 1.0),
        "hardware": hardware.map_or(json!("not offered"), |bytes| json!(bytes / 1e6)),
        "agree_d1": yes(verdict.0[0]), "agree_ll": yes(verdict.0[1]), "why": verdict.1,
    })
}

/// Bytes that say whether the views agree, and why not.
#[derive(Clone, Copy, Debug)]
struct Seen {
    /// Saved in D1: counted, modelled.
    d1: (f64, f64),
    /// Saved in the LL: counted, modelled.
    ll: (f64, f64),
    /// D1 misses of the separate passes alone.
    d1_of_pass: f64,
    /// D1 misses of rotating in the tile alone.
    d1_of_tile: f64,
    /// D1 misses of the whole fused call.
    fused: f64,
    /// Rotated copies.
    copies: f64,
    /// Cos and sin that the call uses.
    table: f64,
}

/// Rows of the angle table that a call uses: two levels of f64.
fn table_bytes(case: &Case) -> f64 {
    Model::of(&case.by(Way::Fused)).passes.iter().filter(|p| p.tensor == "table").map(|p| p.bytes).sum()
}

/// Whether counted and modelled bytes agree in sign and roughly in size, for D1 and for LL; and the sentence beside it.
fn verdict(seen: &Seen, profile: &Profile) -> ([bool; 2], String) {
    let near = |(counted, modelled): (f64, f64)| {
        counted > 0.0 && modelled > 0.0 && (1.0 / ROUGHLY..=ROUGHLY).contains(&(counted / modelled))
    };
    let mb = |bytes: f64| format!("{} MB", number(bytes / 1e6));
    let copies = mb(seen.copies);
    let agree = [near(seen.d1), near(seen.ll)];
    let ((d1, d1_model), (ll, ll_model)) = (seen.d1, seen.ll);
    if agree != [true, true] && d1_model < 0.01 * seen.fused {
        let lost =
            format!("what fusing can save ({}) is lost in the {} that the call moves", mb(d1_model), mb(seen.fused));
        return (agree, lost);
    }
    let mut why = Vec::new();
    if !agree[0] {
        if seen.d1_of_tile > 0.25 * d1_model {
            why.push(format!(
                "D1: the separate passes cost {} (modelled {}), but rotating in the tile has misses of its own, {}: angle \
                 rows and their table ({} KB) compete with the tile for {} KiB",
                mb(seen.d1_of_pass),
                mb(d1_model),
                mb(seen.d1_of_tile),
                number((seen.table / 1e3).round()),
                profile.d1.bytes >> 10
            ));
        } else if d1 < d1_model {
            why.push("D1: rows of the copies are still there when they are read".into());
        } else {
            why.push("D1: rows of originals and copies that fall into the same sets evict one another".into());
        }
    }
    if !agree[1] && ll < ll_model {
        why.push(format!(
            "LL: part of the copies ({copies}) is still there when attention reads them; the model has them gone"
        ));
    } else if !agree[1] {
        why.push("LL: the copies push other operands out, which the model has as kept".into());
    } else if 2.0 * seen.copies <= profile.ll.bytes as f64 {
        why.push(format!(
            "LL: the copies ({copies}) are still there when attention reads them, so it sees one of two moves"
        ));
    }
    (agree, why.join("; "))
}

/// View 3: bytes that must move.
fn model(results: &mut Results, cases: &[Case]) {
    results.table(
        "model",
        "View 3: bytes that each lane must read and write, MB",
        &[
            ("call", &["call"]),
            ("lane", &["lane"]),
            ("Q", &["Q"]),
            ("K", &["K"]),
            ("V", &["V"]),
            ("O", &["O"]),
            ("table", &["table"]),
            ("Q' written and read", &["Q'"]),
            ("K' written and read", &["K'"]),
            ("cached K, V", &["cached"]),
            ("all", &["all"]),
        ],
    );
    for case in cases {
        for way in [Way::Fused, Way::Separate] {
            let model = Model::of(&case.by(way));
            let mut row = json!({"call": case.title(), "lane": way.name(), "all": model.total() / 1e6});
            for pass in &model.passes {
                let key = if pass.tensor.starts_with("cached") { "cached" } else { pass.tensor };
                row[key] = json!(row[key].as_f64().unwrap_or(0.0) + pass.bytes / 1e6);
            }
            results.row("model", row);
        }
    }
}

/// And the time of the same calls on this machine.
fn time(context: &mut Context<'_>, results: &mut Results, cases: &[Case]) -> Result<(), String> {
    results.table(
        "time",
        "Time on this machine, one thread, ms, best (median)",
        &[
            ("call", &["call"]),
            ("caches", &["caches"]),
            ("fused", &["fused", "fused_median"]),
            ("separate", &["separate", "separate_median"]),
            ("pre-rotated inputs", &["pre", "pre_median"]),
            ("rotary pass alone", &["pass", "pass_median"]),
            ("saved, % of separate", &["saved", "saved_median"]),
            ("rotating in the tile costs, %", &["cost", "cost_median"]),
            ("of the pass saved, %", &["share", "share_median"]),
        ],
    );
    let flush = Flush::new();
    let repeats = if context.args.quick { Repeats::QUICK } else { Repeats::CLAIM };
    for case in cases {
        for state in [CacheState::Warm, CacheState::Cold] {
            context.progress(&format!("time of {}, {} caches", case.title(), state.name()));
            let lane = |way| Lane::new(&context.capabilities, &case.by(way), 1);
            let [mut fused, mut separate, mut pre] = [lane(Way::Fused)?, lane(Way::Separate)?, lane(Way::PreRotated)?];
            let pass = Case { step: Step::Rotate, way: Way::Separate, ..*case };
            // A decode step rotates one query, an append the new keys: no pass over Q and K of this shape.
            let mut pass =
                if case.step == Step::Prefill { Some(Lane::new(&context.capabilities, &pass, 1)?) } else { None };
            let mut run_pass = || pass.as_mut().map_or((), Lane::run);
            let flush = (state == CacheState::Cold).then_some(&flush);
            let lanes: &mut [&mut dyn FnMut()] =
                &mut [&mut || fused.run(), &mut || separate.run(), &mut || pre.run(), &mut run_pass];
            let count = if case.step == Step::Prefill { 4 } else { 3 };
            let times = paired(repeats, flush, &mut context.state, &mut lanes[..count]);
            let best: Vec<f64> = times.iter().map(|t| t.best() * 1e3).collect();
            let median: Vec<f64> = times.iter().map(|t| t.median() * 1e3).collect();
            let saved = |t: &[f64]| 100.0 * (1.0 - t[0] / t[1]);
            let cost = |t: &[f64]| 100.0 * (t[0] / t[2] - 1.0);
            let share = |t: &[f64]| t.get(3).map(|pass| 100.0 * (t[1] - t[0]) / pass);
            results.row(
                "time",
                json!({
                    "call": case.title(), "caches": state.name(), "repeats": times[0].repeats(),
                    "fused": best[0], "fused_median": median[0], "separate": best[1], "separate_median": median[1],
                    "pre": best[2], "pre_median": median[2], "pass": best.get(3), "pass_median": median.get(3),
                    "saved": saved(&best), "saved_median": saved(&median), "cost": cost(&best), "cost_median": cost(&median),
                    "share": share(&best), "share_median": share(&median),
                }),
            );
        }
    }
    results.plot(
        "time",
        json!({
            "style": "bars", "title": "Time saved by fusing, cold caches", "x": "call", "y_label": "% of separate",
            "where": ["caches", "cold"], "series": [["best", "saved"], ["median", "saved_median"]],
        }),
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn verdicts() {
        let profile = Profile::named("raspberry-pi-5").unwrap();
        let as_modelled = Seen {
            d1: (5e6, 5e6),
            ll: (5e6, 5e6),
            d1_of_pass: 5e6,
            d1_of_tile: 0.0,
            fused: 1e7,
            copies: 2.5e6,
            table: 1e5,
        };
        let verdict = |seen| verdict(&seen, &profile);
        assert_eq!(verdict(as_modelled), ([true, true], String::new()));
        assert!(verdict(Seen { copies: 1e6, ..as_modelled }).1.contains("one of two moves"));
        assert_eq!(verdict(Seen { ll: (-5e6, 5e6), ..as_modelled }).0, [true, false], "signs differ");
        assert!(verdict(Seen { ll: (1e6, 5e6), ..as_modelled }).1.contains("has them gone"));
        assert!(verdict(Seen { ll: (9e6, 3e6), ..as_modelled }).1.contains("as kept"));
        assert!(verdict(Seen { d1: (1.0, 1e3), ..as_modelled }).1.contains("is lost in"));
        let angles = verdict(Seen { d1: (1e6, 5e6), d1_of_tile: 4e6, ..as_modelled });
        assert!(angles.0 == [false, true] && angles.1.contains("misses of its own, 4 MB"), "{}", angles.1);
        assert_eq!(verdict(Seen { d1: (2e7, 5e6), d1_of_pass: 2e7, ..as_modelled }).0, [false, true]);
    }
}

//! `cargo bench`: Criterion groups `prefill`, `decode` and `rotary`, each shape in the lanes fused, separate and plain-c, with
//! warm and with cold caches; then one table of runs in turn, against the limits measured beside them.
//!
//! Warm: the same call ran just before. Cold: a buffer of twice the outermost cache was read in between, outside the time.

use criterion::measurement::WallTime;
use criterion::{BenchmarkGroup, BenchmarkId, Criterion, SamplingMode, Throughput};
use rotile::Capabilities;
use rotile_bench::measure::{CacheState, Flush, Repeats, State, paired};
use rotile_bench::model::Model;
use rotile_bench::peak::{Rate, bandwidths, fma_peak};
use rotile_bench::results::{Results, number};
use rotile_bench::{Case, DECODE, Lane, PREFILL, ROTARY, Shape, Step, Way, pinned, report};
use serde_json::json;
use std::time::{Duration, Instant};

/// Above so many FLOPs the first misses are lost in a call's time: cold caches are not measured on their own.
const COLD_FLOPS: f64 = 5e9;
/// Above so many, plain C would take minutes.
const PLAIN_FLOPS: f64 = 5e10;

fn main() {
    let capabilities = pinned(None).unwrap_or_else(|message| {
        eprintln!("error: {message}");
        std::process::exit(1);
    });
    let mut criterion = Criterion::default()
        .sample_size(10)
        .warm_up_time(Duration::from_millis(200))
        .measurement_time(Duration::from_millis(600))
        .configure_from_args();
    let flush = Flush::new();
    group(&mut criterion, &capabilities, &flush, "prefill", &PREFILL, &[Step::Prefill]);
    group(&mut criterion, &capabilities, &flush, "decode", &DECODE, &[Step::Decode]);
    group(&mut criterion, &capabilities, &flush, "rotary", &ROTARY, &[Step::Append, Step::Rotate]);
    criterion.final_summary();
    // With --test and --list nothing is timed; a filter asks for less than the whole table.
    if !std::env::args().skip(1).any(|arg| arg != "--bench") {
        table(&capabilities, &flush);
    }
}

/// The lanes that a step has on a shape.
fn ways(case: &Case) -> Vec<Way> {
    // The rotary pass by itself has nothing to be fused into; the group's appends have.
    let fused = (case.step != Step::Rotate).then_some(Way::Fused);
    let plain = (case.flops() <= PLAIN_FLOPS).then_some(Way::PlainC);
    fused.into_iter().chain([Way::Separate]).chain(plain).collect()
}

fn states(case: &Case) -> &'static [CacheState] {
    match case.flops() <= COLD_FLOPS {
        true => &[CacheState::Warm, CacheState::Cold],
        false => &[CacheState::Warm],
    }
}

fn group(criterion: &mut Criterion, on: &Capabilities, flush: &Flush, name: &str, shapes: &[Shape], steps: &[Step]) {
    let mut group = criterion.benchmark_group(name);
    // As many runs in each sample: with long calls, growing numbers would take minutes.
    group.sampling_mode(SamplingMode::Flat);
    for &step in steps {
        for &shape in shapes {
            let case = Case::new(step, shape, Way::Fused);
            // Elements are tokens: rates read as tokens per second. The table has GFLOP/s.
            group.throughput(Throughput::Elements(case.new_tokens() as u64));
            for way in ways(&case) {
                bench(&mut group, on, flush, &case.by(way));
            }
        }
    }
    group.finish();
}

fn bench(group: &mut BenchmarkGroup<'_, WallTime>, on: &Capabilities, flush: &Flush, case: &Case) {
    for &state in states(case) {
        let id = BenchmarkId::new(format!("{}-{}", case.way.name(), state.name()), case.title());
        // Made only if Criterion's filter takes it: some take hundreds of megabytes.
        let mut lane = None;
        group.bench_function(id, |bencher| {
            let lane = lane.get_or_insert_with(|| Lane::new(on, case, 1).expect("a shape of the bench"));
            bencher.iter_custom(|iterations| {
                lane.run();
                let mut spent = Duration::ZERO;
                for _ in 0..iterations {
                    if state == CacheState::Cold {
                        flush.run();
                    }
                    let start = Instant::now();
                    lane.run();
                    spent += start.elapsed();
                }
                spent
            });
        });
    }
}

fn table(capabilities: &Capabilities, flush: &Flush) {
    let tier = capabilities.tier().expect("checked").name();
    let mut state = State::new(tier);
    let peak = fma_peak(tier);
    let dram =
        bandwidths(tier, Repeats { seconds: 0.5, ..Repeats::CLAIM }, &mut state).pop().expect("DRAM is there").rate;
    let mut results = Results::new("bench", "cargo bench", tier.name());
    let limit = |name: &str, rate: Rate| format!("{name} {} ({})", number(rate.best / 1e9), number(rate.median / 1e9));
    let fma = peak.map_or("FMA peak: not measured on this tier".into(), |peak| limit("FMA peak, GFLOP/s:", peak));
    results.note(&format!("Limits of one core, best (median). {fma}; {}.", limit("reading DRAM, GB/s:", dram)));
    results.table(
        "bench",
        "One thread, f32, lanes in turn, best (median)",
        &[
            ("call", &["call"]),
            ("caches", &["caches"]),
            ("fused, ms", &["fused", "fused_median"]),
            ("separate, ms", &["separate", "separate_median"]),
            ("plain C, ms", &["plain-c", "plain-c_median"]),
            ("fused/separate", &["ratio", "ratio_median"]),
            ("tokens/s", &["tokens", "tokens_median"]),
            ("GFLOP/s", &["rate", "rate_median"]),
            ("% of FMA peak", &["of_peak", "of_peak_median"]),
            ("% of DRAM reading", &["of_dram", "of_dram_median"]),
        ],
    );
    let prefill = PREFILL.map(|shape| Case::new(Step::Prefill, shape, Way::Fused));
    let decode = DECODE.map(|shape| Case::new(Step::Decode, shape, Way::Fused));
    let append = ROTARY.map(|shape| Case::new(Step::Append, shape, Way::Fused));
    for case in prefill.into_iter().chain(decode).chain(append) {
        for &caches in states(&case) {
            eprintln!("{}, {} caches", case.title(), caches.name());
            let make = |way: &Way| Lane::new(capabilities, &case.by(*way), 1).expect("a shape of the bench");
            let mut lanes: Vec<Lane> = ways(&case).iter().map(make).collect();
            let mut runs: Vec<Box<dyn FnMut() + '_>> =
                lanes.iter_mut().map(|lane| Box::new(|| lane.run()) as Box<dyn FnMut()>).collect();
            let mut runs: Vec<&mut dyn FnMut()> = runs.iter_mut().map(|run| &mut **run as &mut dyn FnMut()).collect();
            let repeats = Repeats { seconds: 1.0, ..Repeats::CLAIM };
            let cold = (caches == CacheState::Cold).then_some(flush);
            let times = paired(repeats, cold, &mut state, &mut runs);
            let fused = &times[0];
            let (rate, bytes) = (Rate::of(case.flops(), fused), Rate::of(Model::of(&case).total(), fused));
            let tokens = Rate::of(case.new_tokens() as f64, fused);
            let mut row = json!({
                "call": case.title(), "caches": caches.name(), "repeats": fused.repeats(),
                "ratio": fused.best() / times[1].best(), "ratio_median": fused.median() / times[1].median(),
                "tokens": tokens.best, "tokens_median": tokens.median, "rate": rate.best / 1e9, "rate_median": rate.median / 1e9,
                "of_peak": peak.map(|p| 100.0 * rate.best / p.best), "of_peak_median": peak.map(|p| 100.0 * rate.median / p.median),
                "of_dram": 100.0 * bytes.best / dram.best, "of_dram_median": 100.0 * bytes.median / dram.median,
            });
            for (way, times) in ways(&case).iter().zip(&times) {
                row[way.name()] = json!(times.best() * 1e3);
                row[format!("{}_median", way.name())] = json!(times.median() * 1e3);
            }
            results.row("bench", row);
        }
    }
    let series = json!([["fused", "fused"], ["separate", "separate"], ["plain C", "plain-c"]]);
    results.plot(
        "bench",
        json!({"style": "bars", "title": "Time with cold caches", "x": "call", "y_label": "ms", "where": ["caches", "cold"], "series": series}),
    );
    results.state(state.summary());
    println!("\n{}", results.text());
    let folder = report::folder();
    match results.write(&folder).and_then(|()| report::rebuild(&folder)) {
        Ok(page) => println!("report: {}", page.display()),
        Err(error) => eprintln!("error: {error}"),
    }
}

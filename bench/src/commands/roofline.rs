//! `roofline`: peak arithmetic, bandwidth of each level, and where each kernel stands under them.

use super::Context;
use crate::cases::{Case, DECODE, PREFILL, ROTARY, Step, Way};
use crate::lanes::Lane;
use crate::measure::{CacheState, Flush, Repeats, Times, paired};
use crate::model::{Model, intensity};
use crate::peak::{Rate, bandwidths, fma_peak};
use crate::results::Results;
use rotile::DType;
use serde_json::json;

/// Runs the command.
///
/// # Errors
///
/// What planning reports.
pub fn roofline(context: &mut Context<'_>) -> Result<Results, String> {
    let quick = context.args.quick;
    let repeats = if quick { Repeats::QUICK } else { Repeats::CLAIM };
    let mut results = context.results("roofline");
    context.progress("peak of fused multiply-adds");
    let peak = fma_peak(context.tier);
    context.progress("bandwidth of each level");
    let levels = bandwidths(
        context.tier,
        if quick { Repeats::QUICK } else { Repeats { seconds: 0.8, ..repeats } },
        &mut context.state,
    );
    results.table(
        "limits",
        "Limits of one core, best (median)",
        &[("limit", &["name"]), ("buffer, KiB", &["kib"]), ("rate", &["best", "median"]), ("unit", &["unit"])],
    );
    if let Some(peak) = peak {
        results.row(
            "limits",
            json!({"name": "FMA peak", "best": peak.best / 1e9, "median": peak.median / 1e9, "unit": "GFLOP/s"}),
        );
    } else {
        results.note(&format!("No FMA peak is measured on tier {}: it has no vectors of its own.", context.tier));
    }
    for level in &levels {
        results.row(
            "limits",
            json!({
                "name": format!("read from {}", level.level), "kib": level.bytes >> 10,
                "best": level.rate.best / 1e9, "median": level.rate.median / 1e9, "unit": "GB/s",
            }),
        );
    }
    let dram = levels.last().expect("DRAM is always there").rate;
    results.table(
        "kernels",
        "Kernels, one thread, caches warm (the same call just before), best (median)",
        &[
            ("call", &["call"]),
            ("kernel", &["kernel"]),
            ("FLOP per byte", &["intensity"]),
            ("ms", &["ms", "ms_median"]),
            ("tokens/s", &["tokens"]),
            ("GFLOP/s", &["rate", "rate_median"]),
            ("% of FMA peak", &["of_peak", "of_peak_median"]),
            ("GB/s", &["bytes", "bytes_median"]),
            ("% of DRAM reading", &["of_dram", "of_dram_median"]),
        ],
    );
    let mut cases = cases(quick);
    // The rotary pass is no fused one.
    cases.extend(
        ROTARY.iter().take(if quick { 1 } else { 2 }).map(|&shape| Case::new(Step::Rotate, shape, Way::Separate)),
    );
    for case in &cases {
        context.progress(&case.title());
        let mut lane = Lane::new(&context.capabilities, case, 1)?;
        let kernel = lane.plan().map_or("-", |plan| plan.kernel(case.q_len()));
        let times = paired(repeats, None, &mut context.state, &mut [&mut || lane.run()]);
        results.row("kernels", row(case, kernel, &times[0], peak, dram));
    }
    let cold = Case::new(Step::Decode, DECODE[1], Way::Fused);
    if !quick {
        // The middle cache lies in the outermost cache when warm.
        context.progress(&format!("{}, cold", cold.title()));
        let mut lane = Lane::new(&context.capabilities, &cold, 1)?;
        let kernel = lane.plan().map_or("-", |plan| plan.kernel(1));
        let times = paired(repeats, Some(&Flush::new()), &mut context.state, &mut [&mut || lane.run()]);
        let mut row = row(&cold, kernel, &times[0], peak, dram);
        row["call"] = json!(format!("{}, {} caches", cold.title(), CacheState::Cold.name()));
        results.row("kernels", row);
    }
    roofs(&mut results, peak, &levels.iter().map(|l| (l.level.clone(), l.rate.best)).collect::<Vec<_>>());
    let series = json!([["best", "of_peak"], ["median", "of_peak_median"]]);
    results.plot("kernels", json!({"style": "bars", "title": "Share of the FMA peak", "x": "call", "y_label": "% of peak", "series": series}));
    Ok(results)
}

fn cases(quick: bool) -> Vec<Case> {
    let f32_only = |step, shape| Case::new(step, shape, Way::Fused);
    if quick {
        let prefill = [PREFILL[0], PREFILL[1], PREFILL[5]].map(|shape| f32_only(Step::Prefill, shape));
        let decode = [DECODE[1], DECODE[3]].map(|shape| f32_only(Step::Decode, shape));
        return prefill.into_iter().chain(decode).collect();
    }
    let mut cases: Vec<Case> = PREFILL.map(|shape| f32_only(Step::Prefill, shape)).to_vec();
    cases.extend([DType::F16, DType::Bf16].map(|dtype| f32_only(Step::Prefill, PREFILL[1]).with_dtype(dtype)));
    for shape in DECODE {
        cases.extend([DType::F32, DType::F16].map(|dtype| f32_only(Step::Decode, shape).with_dtype(dtype)));
    }
    cases.extend([DECODE[0], DECODE[1]].map(|shape| f32_only(Step::DecodeRaw, shape)));
    cases.extend([DType::F32, DType::F16].map(|dtype| f32_only(Step::Append, ROTARY[0]).with_dtype(dtype)));
    cases
}

fn row(case: &Case, kernel: &str, times: &Times, peak: Option<Rate>, dram: Rate) -> serde_json::Value {
    let (rate, bytes) = (Rate::of(case.flops(), times), Rate::of(Model::of(case).total(), times));
    json!({
        "call": case.title(), "kernel": kernel, "intensity": intensity(case), "repeats": times.repeats(),
        "ms": times.best() * 1e3, "ms_median": times.median() * 1e3, "tokens": case.new_tokens() as f64 / times.best(),
        "rate": rate.best / 1e9, "rate_median": rate.median / 1e9,
        "of_peak": peak.map(|p| 100.0 * rate.best / p.best), "of_peak_median": peak.map(|p| 100.0 * rate.median / p.median),
        "bytes": bytes.best / 1e9, "bytes_median": bytes.median / 1e9,
        "of_dram": 100.0 * bytes.best / dram.best, "of_dram_median": 100.0 * bytes.median / dram.median,
    })
}

/// The plot: a roof for each level, and the kernels under it.
fn roofs(results: &mut Results, peak: Option<Rate>, levels: &[(String, f64)]) {
    let Some(peak) = peak else { return };
    let (from, to) = (0.25, 4096.0);
    let curves: Vec<_> = levels
        .iter()
        .map(|(name, bandwidth)| {
            let ridge = peak.best / bandwidth;
            let points = [(from, bandwidth * from), (ridge, peak.best), (to, peak.best)].map(|(x, y)| [x, y / 1e9]);
            json!([name, points])
        })
        .collect();
    results.plot(
        "kernels",
        json!({
            "style": "points", "title": "Roofline of one core", "x": "intensity", "x_label": "useful FLOP per byte that must move",
            "y_label": "GFLOP/s", "label": "call", "log": true, "series": [["kernels", "rate"]], "curves": curves,
        }),
    );
}

//! `scaling`: time against prompt length, fused and separate, and against threads.

use super::Context;
use crate::cases::{Case, Shape, Step, Way};
use crate::lanes::Lane;
use crate::machine;
use crate::measure::{Repeats, exponent, paired};
use crate::results::{Results, number};
use serde_json::json;

/// A few heads, so that long prompts stay affordable.
const SHAPE: Shape = Shape::new(8, 2, 128, 0);
const TOKENS: [usize; 8] = [128, 256, 512, 1024, 2048, 4096, 8192, 16384];
/// The exponent is fitted from here on: before, packing and masks are a larger part.
const FIT_FROM: usize = 1024;

/// Runs the command.
///
/// # Errors
///
/// What planning reports.
pub fn scaling(context: &mut Context<'_>) -> Result<Results, String> {
    let quick = context.args.quick;
    let tokens = &TOKENS[..if quick { 6 } else { TOKENS.len() }];
    let mut results = context.results("scaling");
    results.table(
        "tokens",
        &format!(
            "Time against tokens, prefill {}/{}x{} f32, one thread, caches warm, ms, best (median) of at least three",
            SHAPE.heads_q, SHAPE.heads_kv, SHAPE.head_dim
        ),
        &[
            ("tokens", &["tokens"]),
            ("repeats", &["repeats"]),
            ("fused", &["fused", "fused_median"]),
            ("separate", &["separate", "separate_median"]),
            ("fused/separate", &["ratio", "ratio_median"]),
            ("fused, GFLOP/s", &["rate", "rate_median"]),
            ("time per token^2 over that of 2048", &["square"]),
        ],
    );
    let mut rows = Vec::new();
    for &tokens in tokens {
        context.progress(&format!("{tokens} tokens"));
        let case = Case::new(Step::Prefill, SHAPE.with_tokens(tokens), Way::Fused);
        let mut fused = Lane::new(&context.capabilities, &case, 1)?;
        let mut separate = Lane::new(&context.capabilities, &case.by(Way::Separate), 1)?;
        let repeats = Repeats { least: 3, most: 31, seconds: if quick { 0.2 } else { 1.0 } };
        let times = paired(repeats, None, &mut context.state, &mut [&mut || fused.run(), &mut || separate.run()]);
        rows.push((tokens, case.flops(), times));
    }
    let base = rows.iter().find(|row| row.0 == 2048).map(|row| row.2[0].best() / (2048.0 * 2048.0));
    for (tokens, flops, times) in &rows {
        let (fused, separate) = (&times[0], &times[1]);
        let square = base.map(|base| fused.best() / (*tokens as f64).powi(2) / base);
        results.row(
            "tokens",
            json!({
                "tokens": tokens, "repeats": fused.repeats(), "square": square,
                "fused": fused.best() * 1e3, "fused_median": fused.median() * 1e3,
                "separate": separate.best() * 1e3, "separate_median": separate.median() * 1e3,
                "ratio": fused.best() / separate.best(), "ratio_median": fused.median() / separate.median(),
                "rate": flops / fused.best() / 1e9, "rate_median": flops / fused.median() / 1e9,
            }),
        );
    }
    for (lane, name) in ["fused", "separate"].into_iter().enumerate() {
        let points = |from: usize| -> Vec<(f64, f64)> {
            rows.iter().filter(|row| row.0 >= from).map(|row| (row.0 as f64, row.2[lane].best())).collect()
        };
        let at = |tokens: usize| rows.iter().find(|row| row.0 == tokens).map(|row| row.2[lane].best());
        let (long, short) = if quick { (4096, 512) } else { (16384, 2048) };
        let ratio = match (at(long), at(short)) {
            (Some(a), Some(b)) => number(a / b / 64.0),
            _ => "-".into(),
        };
        results.note(&format!(
            "{name}: time grows as tokens^{:.3} from {FIT_FROM} on (^{:.3} from 128 on; least squares of logarithms of best \
             times); time({long}) / time({short}) / 64 = {ratio}",
            exponent(&points(FIT_FROM)),
            exponent(&points(0)),
        ));
    }
    let series = json!([["fused", "fused"], ["separate", "separate"]]);
    results.plot("tokens", json!({"style": "lines", "title": "Time against tokens", "x": "tokens", "x_label": "tokens", "y_label": "ms", "log": true, "series": series}));
    threads(context, &mut results)?;
    Ok(results)
}

/// Time against threads.
fn threads(context: &mut Context<'_>, results: &mut Results) -> Result<(), String> {
    let quick = context.args.quick;
    results.table(
        "threads",
        "Time against threads, ms, best (median)",
        &[
            ("call", &["call"]),
            ("threads", &["threads"]),
            ("repeats", &["repeats"]),
            ("fused", &["fused", "fused_median"]),
            ("times as fast as one", &["speedup", "speedup_median"]),
        ],
    );
    let shape = |heads_q, heads_kv, tokens| Shape::new(heads_q, heads_kv, 128, tokens);
    let cases = [
        Case::new(Step::Prefill, shape(8, 2, if quick { 1024 } else { 2048 }), Way::Fused),
        Case::new(Step::Prefill, shape(32, 8, 512), Way::Fused),
        Case::new(Step::Decode, shape(32, 8, 4096), Way::Fused),
    ];
    for case in cases {
        context.progress(&format!("{}, 1 to {} threads", case.title(), machine::threads()));
        let lane = |threads| Lane::new(&context.capabilities, &case, threads);
        let mut lanes: Vec<Lane> = (1..=machine::threads()).map(lane).collect::<Result<_, _>>()?;
        let repeats = if quick { Repeats::QUICK } else { Repeats::CLAIM };
        let mut runs: Vec<Box<dyn FnMut() + '_>> =
            lanes.iter_mut().map(|lane| Box::new(|| lane.run()) as Box<dyn FnMut()>).collect();
        let mut runs: Vec<&mut dyn FnMut()> = runs.iter_mut().map(|run| &mut **run as &mut dyn FnMut()).collect();
        let times = paired(repeats, None, &mut context.state, &mut runs);
        for (i, t) in times.iter().enumerate() {
            results.row(
                "threads",
                json!({
                    "call": case.title(), "threads": i + 1, "repeats": t.repeats(),
                    "fused": t.best() * 1e3, "fused_median": t.median() * 1e3,
                    "speedup": times[0].best() / t.best(), "speedup_median": times[0].median() / t.median(),
                }),
            );
        }
    }
    if machine::threads() == 1 {
        results.note("This machine has one thread: nothing to say about more.");
    }
    Ok(())
}

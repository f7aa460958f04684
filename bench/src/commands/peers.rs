//! `peers`: the same calls in other runtimes, one thread each, in turn with ours. What is not installed is left out, and
//! said so.

use super::Context;
use crate::cases::{Case, Shape, Step, Way};
use crate::lanes::Lane;
use crate::measure::Times;
use crate::results::Results;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Instant;

const SHAPES: [(Step, Shape); 7] = [
    (Step::Prefill, Shape::new(32, 8, 128, 128)),
    (Step::Prefill, Shape::new(32, 8, 128, 512)),
    (Step::Prefill, Shape::new(32, 32, 128, 512)),
    (Step::Prefill, Shape::new(14, 2, 64, 512)),
    (Step::Prefill, Shape::new(4, 1, 256, 512)),
    (Step::Decode, Shape::new(32, 8, 128, 4096)),
    (Step::Decode, Shape::new(14, 2, 64, 2048)),
];
const REPEATS: usize = 9;
/// A peer that takes so many times as long as ours is run less often.
const SLOW_SECONDS: f64 = 1.0;

/// Something else that can run a case.
trait Peer {
    /// Its name and version.
    fn name(&self) -> &str;
    /// Seconds of one run of the case with that index, or why not.
    fn time(&mut self, index: usize) -> Result<f64, String>;
}

/// True if libraries here will run on one thread. They read the environment when they start, so otherwise this program runs
/// itself again with the environment set, and all is done then.
///
/// # Errors
///
/// If that run fails.
pub fn one_thread() -> Result<bool, String> {
    const THREADS: &str = "RAYON_NUM_THREADS";
    if std::env::var_os(THREADS).is_some_and(|n| n == "1") {
        return Ok(true);
    }
    let exe = std::env::current_exe().map_err(|e| format!("this program can't find itself: {e}"))?;
    let status = Command::new(exe).args(std::env::args_os().skip(1)).env(THREADS, "1").status();
    match status.map_err(|e| format!("this program can't run itself: {e}"))? {
        status if status.success() => Ok(false),
        status => Err(format!("the run with {THREADS}=1 ended with {status}")),
    }
}

/// Runs the command.
///
/// # Errors
///
/// What planning reports, or that there is no peer at all.
pub fn peers(context: &mut Context<'_>) -> Result<Results, String> {
    let cases: Vec<Case> = SHAPES.iter().map(|&(step, shape)| Case::new(step, shape, Way::Fused)).collect();
    let cases = if context.args.quick { vec![cases[0], cases[6]] } else { cases };
    let mut results = context.results("peers");
    let mut found: Vec<Box<dyn Peer>> = Vec::new();
    context.progress("starting the peers");
    match Python::start(&cases) {
        Ok(peers) => found.extend(peers.into_iter().map(|peer| Box::new(peer) as Box<dyn Peer>)),
        Err(why) => results.note(&format!("No Python peers: {why}.")),
    }
    #[cfg(feature = "peers")]
    found.push(Box::new(candle::Candle::new(&cases)?));
    #[cfg(not(feature = "peers"))]
    results.note("candle was left out: build with --features peers.");
    if found.is_empty() {
        return Err(
            "there is no peer: pip install -r bench/peers/requirements.txt, or --features peers for candle".into()
        );
    }
    results.table(
        "peers",
        "One thread, f32, rotation and causal attention, runs in turn, ms, best (median); ratio: theirs over ours",
        &[
            ("call", &["call"]),
            ("peer", &["peer"]),
            ("repeats", &["repeats"]),
            ("peer, ms", &["theirs", "theirs_median"]),
            ("rotile fused, ms", &["ours", "ours_median"]),
            ("ratio", &["ratio", "ratio_median"]),
        ],
    );
    for (index, case) in cases.iter().enumerate() {
        context.progress(&case.title());
        let mut lane = Lane::new(&context.capabilities, case, 1)?;
        for row in one(context, case, index, &mut lane, &mut found) {
            results.row("peers", row);
        }
    }
    for peer in &found {
        let series = json!([["best", "ratio"], ["median", "ratio_median"]]);
        let title = format!("{}: time over ours", peer.name());
        let which = json!(["peer", peer.name()]);
        results.plot("peers", json!({"style": "bars", "title": title, "x": "call", "y_label": "times ours", "where": which, "series": series}));
    }
    Ok(results)
}

/// All peers on one case.
fn one(
    context: &mut Context<'_>,
    case: &Case,
    index: usize,
    lane: &mut Lane,
    peers: &mut [Box<dyn Peer>],
) -> Vec<Value> {
    let mut ours = Vec::new();
    let mut theirs: Vec<Result<Vec<f64>, String>> = vec![Ok(Vec::new()); peers.len()];
    lane.run();
    for turn in 0..=REPEATS {
        context.state.sample();
        let start = Instant::now();
        lane.run();
        let took = start.elapsed().as_secs_f64();
        // The first turn warms everybody up.
        if turn > 0 {
            ours.push(took);
        }
        for (peer, times) in peers.iter_mut().zip(&mut theirs) {
            let Ok(seen) = times else { continue };
            if seen.iter().sum::<f64>() > SLOW_SECONDS && seen.len() >= 3 {
                continue;
            }
            match peer.time(index) {
                Ok(took) if turn > 0 => seen.push(took),
                Ok(_) => {}
                Err(why) => *times = Err(why),
            }
        }
    }
    let ours = Times::new(ours);
    let row = |(peer, times): (&dyn Peer, Result<Vec<f64>, String>)| match times {
        Ok(times) => {
            let times = Times::new(times);
            json!({
                "call": case.title(), "peer": peer.name(), "repeats": times.repeats(),
                "theirs": times.best() * 1e3, "theirs_median": times.median() * 1e3,
                "ours": ours.best() * 1e3, "ours_median": ours.median() * 1e3,
                "ratio": times.best() / ours.best(), "ratio_median": times.median() / ours.median(),
            })
        }
        Err(why) => json!({"call": case.title(), "peer": format!("{}: {why}", peer.name())}),
    };
    peers.iter().map(|peer| &**peer).zip(theirs).map(row).collect()
}

/// The Python child, shared by its peers: one line in, one line out.
struct Pipe {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Pipe {
    fn ask(&mut self, question: &Value) -> Result<Value, String> {
        writeln!(self.input, "{question}")
            .and_then(|()| self.input.flush())
            .map_err(|e| format!("the script is gone: {e}"))?;
        let mut line = String::new();
        self.output.read_line(&mut line).map_err(|e| format!("the script's answer can't be read: {e}"))?;
        serde_json::from_str(&line).map_err(|e| format!("the script answered {:?}: {e}", line.trim()))
    }
}

impl Drop for Pipe {
    fn drop(&mut self) {
        // It ends at the end of its input; no answer is waited for.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// One library in the Python child.
struct Python {
    name: String,
    key: String,
    pipe: std::rc::Rc<std::cell::RefCell<Pipe>>,
}

impl Python {
    fn start(cases: &[Case]) -> Result<Vec<Python>, String> {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("peers/peers.py");
        let python = std::env::var("ROTILE_PYTHON").unwrap_or_else(|_| "python3".into());
        let mut child = Command::new(&python)
            .arg(&script)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|e| format!("{python} can't be started ({e}); ROTILE_PYTHON names another"))?;
        let pipes = (child.stdin.take(), child.stdout.take());
        let (Some(input), Some(output)) = pipes else { return Err("the script has no pipes".into()) };
        let mut pipe = Pipe { child, input, output: BufReader::new(output) };
        let describe = |case: &Case| {
            let Shape { heads_q, heads_kv, head_dim, tokens, .. } = case.shape;
            json!({"step": case.step.name(), "heads_q": heads_q, "heads_kv": heads_kv, "head_dim": head_dim, "tokens": tokens})
        };
        let answer = pipe.ask(&json!({"cases": cases.iter().map(describe).collect::<Vec<_>>()}))?;
        let none = Vec::new();
        let names = answer["peers"].as_array().unwrap_or(&none);
        if names.is_empty() {
            return Err(format!(
                "{python} has none of them ({}); pip install -r bench/peers/requirements.txt",
                answer["missing"]
            ));
        }
        let pipe = std::rc::Rc::new(std::cell::RefCell::new(pipe));
        let peer = |pair: &Value| Python {
            key: pair[0].as_str().unwrap_or("?").into(),
            name: pair[1].as_str().unwrap_or("?").into(),
            pipe: pipe.clone(),
        };
        Ok(names.iter().map(peer).collect())
    }
}

impl Peer for Python {
    fn name(&self) -> &str {
        &self.name
    }

    fn time(&mut self, index: usize) -> Result<f64, String> {
        let answer = self.pipe.borrow_mut().ask(&json!({"peer": self.key, "case": index}))?;
        answer["seconds"]
            .as_f64()
            .ok_or_else(|| answer["error"].as_str().unwrap_or("no time in its answer").to_string())
    }
}

#[cfg(feature = "peers")]
mod candle {
    use super::{Case, Instant, Peer, Shape, Step};
    use candle_core::{Device, Result, Tensor};
    use candle_nn::attention::{AttnMask, flash_attn};
    use candle_nn::rotary_emb::rope_thd;

    /// Operands of a case.
    struct Inputs {
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cos: Tensor,
        sin: Tensor,
        decode: bool,
        scale: f32,
    }

    /// candle's own rotation and CPU flash attention.
    pub(super) struct Candle(Vec<Inputs>);

    impl Candle {
        pub(super) fn new(cases: &[Case]) -> std::result::Result<Self, String> {
            cases.iter().map(inputs).collect::<Result<_>>().map(Candle).map_err(|e| format!("candle: {e}"))
        }
    }

    fn inputs(case: &Case) -> Result<Inputs> {
        let Shape { heads_q, heads_kv, head_dim, tokens, .. } = case.shape;
        let decode = case.step == Step::Decode;
        let q_len = if decode { 1 } else { tokens };
        let random = |tokens, heads| Tensor::randn(0f32, 1f32, (1, tokens, heads, head_dim), &Device::Cpu);
        let first = tokens - q_len;
        let angle = |i: usize| {
            let pair = (i % (head_dim / 2)) as f64;
            (first + i / (head_dim / 2)) as f64 * 500_000f64.powf(-2.0 * pair / head_dim as f64)
        };
        let table = |f: fn(f64) -> f64| {
            let values: Vec<f32> = (0..q_len * head_dim / 2).map(|i| f(angle(i)) as f32).collect();
            Tensor::from_vec(values, (q_len, head_dim / 2), &Device::Cpu)
        };
        Ok(Inputs {
            q: random(q_len, heads_q)?,
            k: random(tokens, heads_kv)?,
            v: random(tokens, heads_kv)?,
            cos: table(f64::cos)?,
            sin: table(f64::sin)?,
            decode,
            scale: 1.0 / (head_dim as f32).sqrt(),
        })
    }

    impl Peer for Candle {
        fn name(&self) -> &str {
            "candle 0.11"
        }

        fn time(&mut self, index: usize) -> std::result::Result<f64, String> {
            let Inputs { q, k, v, cos, sin, decode, scale } = &self.0[index];
            let run = || -> Result<Tensor> {
                let q = rope_thd(q, cos, sin)?;
                // Cached keys have been rotated before.
                let k = if *decode { k.clone() } else { rope_thd(k, cos, sin)? };
                let past = if *decode { k.dims()[1] - 1 } else { 0 };
                flash_attn::<f32>(&q, &k, v, *scale, AttnMask::causal_with_offset(past), None, None)
            };
            let start = Instant::now();
            let out = run().map_err(|e| e.to_string())?;
            let seconds = start.elapsed().as_secs_f64();
            drop(out);
            Ok(seconds)
        }
    }
}

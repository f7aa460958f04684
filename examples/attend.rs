//! The main job on real input: attention over the activations of one layer of Gemma 3 270M, with the rotation in the
//! tile and with a rotary pass of its own, both against the model's own output.
//!
//! `cargo run --release --example attend`

use rotile::rotary::{PairStyle, RotarySpec, RotaryTable};
use rotile::{AttentionSpec, Batch, Keys, Operands, Plan, Runner, Scale, Sequence, Shape, Tensor, TensorMut};
use rotile_testkit::vectors::{self, Case};
use std::time::Instant;

/// Runs of each path; fewer where one takes long, as under an emulator.
const REPEATS: usize = 15;
const LONG: f64 = 0.5;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    // Layer 5 attends globally; the others have a sliding window.
    let path = vectors::repository().join("real/gemma3-270m-layer5.safetensors");
    let case = vectors::load(&path).map_err(|e| format!("{}: {e}", path.display()))?;
    let (heads, tokens) = (case.problem.heads, case.problem.sequences[0].q_len);
    let dim = heads.dim_qk;
    let (q, k, v) = normalised(&case);
    let rotation = case.problem.rotation.as_ref().expect("the model has one");

    let mut storage = vec![0.0; RotaryTable::storage_len(dim / 2, tokens as u32)?];
    let table = RotaryTable::build(&rotation.inv_freq, rotation.amplitude, tokens as u32, &mut storage)?;
    let rotary = RotarySpec::full(PairStyle::Half);
    let mut fused = AttentionSpec::attend(heads.q, heads.kv, dim, rotary);
    fused.scale = Scale::Value(case.problem.scale);
    // The same attention over queries and keys that a pass of its own has rotated in memory.
    let mut separate = fused;
    (separate.rotate_q, separate.keys) = (false, Keys::Rotated);
    let fused = rotile::plan(&fused)?;
    let separate = rotile::plan(&separate)?;
    let rotate_q = rotile::plan(&AttentionSpec::rotate(heads.q, dim, rotary))?;
    let rotate_k = rotile::plan(&AttentionSpec::rotate(heads.kv, dim, rotary))?;

    println!("{}: {tokens} tokens, {} query heads, {} key head, head_dim {dim}, f32\n", case.name, heads.q, heads.kv);
    println!("{fused}\n");

    let shape = |heads| Shape { batch: 1, tokens, heads, dim };
    let mut runner = Runner::new(1);
    let plain = Sequence::new(tokens, tokens);
    let turned = plain.with_rotary(table);
    let mut attend = |plan: &Plan, sequence: Sequence<'_>, q: &[f32], k: &[f32], out: &mut [f32]| {
        let operands = Operands::Attend {
            q: Tensor::token_major(q, shape(heads.q))?,
            k: Tensor::token_major(k, shape(heads.kv))?,
            v: Tensor::token_major(&v[..], shape(heads.kv))?,
            out: TensorMut::token_major(out, shape(heads.q))?,
            lse: None,
        };
        runner.run(plan, &mut Batch::new(operands, &[sequence]))
    };
    let mut rotator = Runner::new(1);
    let mut rotate = |plan: &Plan, heads: usize, x: &[f32], out: &mut [f32]| {
        let x = Tensor::token_major(x, shape(heads))?;
        let operands = Operands::Rotate { x, out: TensorMut::token_major(out, shape(heads))? };
        rotator.run(plan, &mut Batch::new(operands, &[turned]))
    };

    let mut out = vec![f32::NAN; q.len()];
    let mut out_separate = vec![f32::NAN; q.len()];
    let (mut q_turned, mut k_turned) = (vec![0.0; q.len()], vec![0.0; k.len()]);
    let mut seconds = [const { Vec::new() }; 2];
    // In turn, so that both meet the same machine.
    for run in 0..REPEATS {
        if run >= 3 && seconds[0][0] > LONG {
            break;
        }
        let start = Instant::now();
        attend(&fused, turned, &q, &k, &mut out)?;
        seconds[0].push(start.elapsed().as_secs_f64());
        let start = Instant::now();
        rotate(&rotate_q, heads.q, &q, &mut q_turned)?;
        rotate(&rotate_k, heads.kv, &k, &mut k_turned)?;
        attend(&separate, plain, &q_turned, &k_turned, &mut out_separate)?;
        seconds[1].push(start.elapsed().as_secs_f64());
    }
    seconds.iter_mut().for_each(|s| s.sort_by(f64::total_cmp));
    let (best, median) =
        (|lane: usize| seconds[lane][0] * 1e3, |lane: usize| seconds[lane][seconds[lane].len() / 2] * 1e3);

    let largest = case.out.iter().fold(0.0f64, |m, x| m.max(x.abs()));
    let error = |out: &[f32]| -> f64 {
        let errors = out.iter().zip(&case.out).map(|(a, b)| (f64::from(*a) - b).abs());
        // A NaN anywhere must show.
        errors.fold(0.0, |m, e| if e > m || e.is_nan() { e } else { m }) / largest
    };
    // Fused reads Q and K once; the pass reads and writes both, and attention reads them again.
    let bytes = ((q.len() + k.len()) * 4) as f64 / 1e6;
    println!("{:<34} {:>12} {:>12} {:>10}", "", "fused", "separate", "saving");
    println!("{:<34} {:>12.1e} {:>12.1e}", "largest error / largest output", error(&out), error(&out_separate));
    let row = |name: &str, a: f64, b: f64| println!("{name:<34} {a:>12.3} {b:>12.3} {:>9.1}%", 100.0 * (1.0 - a / b));
    row(&format!("time, best of {}, ms", seconds[0].len()), best(0), best(1));
    row("time, median, ms", median(0), median(1));
    row("Q and K moved, MB", bytes, 3.0 * bytes);
    let worst = error(&out).max(error(&out_separate));
    if worst.is_nan() || worst > 2e-5 {
        return Err(format!("the error exceeds 2e-5 of the largest output {largest}").into());
    }
    Ok(())
}

/// Q and K after the model's RMS norm of each head, and V: the file holds the projections before it.
fn normalised(case: &Case) -> (Vec<f32>, Vec<f32>, Vec<f32>) {
    let s = &case.problem.sequences[0];
    let (eps, q_weight, k_weight) = case.qk_norm.as_ref().expect("the model has one");
    let norm = |x: Vec<f32>, weight: &[f32]| -> Vec<f32> {
        let head = |row: &[f32]| -> Vec<f32> {
            let mean = row.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / row.len() as f64;
            let factor = 1.0 / (mean + eps).sqrt();
            row.iter().zip(weight).map(|(x, w)| (f64::from(*x) * factor * f64::from(*w)) as f32).collect()
        };
        x.chunks_exact(weight.len()).flat_map(head).collect()
    };
    (norm(s.q.to_f32(), q_weight), norm(s.k.to_f32(), k_weight), s.v.to_f32())
}

//! `cargo bench`: what fusing the rotation saves. Criterion groups `prefill` and `decode`, then one table of paired runs.

use criterion::{BenchmarkId, Criterion, Throughput};
use rotile::{Capabilities, DType, Keys};
use rotile_bench::{DECODE, Lane, PREFILL, Shape, Step, fma_peak, paired, pinned};
use std::time::Duration;

fn main() {
    let capabilities = pinned().unwrap_or_else(|message| {
        eprintln!("error: {message}");
        std::process::exit(1);
    });
    let mut criterion = Criterion::default()
        .sample_size(10)
        .warm_up_time(Duration::from_millis(300))
        .measurement_time(Duration::from_secs(1))
        .configure_from_args();
    group(&mut criterion, &capabilities, "prefill", &PREFILL, Step::Prefill);
    group(&mut criterion, &capabilities, "decode", &DECODE, Step::Decode(Keys::Rotated));
    criterion.final_summary();
    // `cargo test --benches` only checks that the benches run.
    if !std::env::args().any(|arg| arg == "--test" || arg == "--list") {
        table(&capabilities);
    }
}

/// Both lanes of a shape, over the data of a warm cache.
fn lanes(capabilities: &Capabilities, shape: Shape, step: Step) -> [Lane; 2] {
    [true, false].map(|fused| Lane::new(capabilities, shape, step, DType::F32, fused).expect("a shape of the bench"))
}

fn group(criterion: &mut Criterion, capabilities: &Capabilities, name: &str, shapes: &[Shape], step: Step) {
    let mut group = criterion.benchmark_group(name);
    for &shape in shapes {
        let [mut fused, mut separate] = lanes(capabilities, shape, step);
        group.throughput(Throughput::Elements(shape.flops(step) as u64));
        group.bench_function(BenchmarkId::new("fused", shape.name), |b| b.iter(|| fused.run()));
        group.bench_function(BenchmarkId::new("separate", shape.name), |b| b.iter(|| separate.run()));
    }
    group.finish();
}

fn table(capabilities: &Capabilities) {
    let tier = capabilities.tier().expect("checked").name();
    let peak = fma_peak(tier);
    println!("\ntier {tier}, one thread, f32, warm cache; fused and separate in turn, best (median) milliseconds");
    match peak {
        Some((best, median)) => println!("FMA peak {:.1} ({:.1}) GFLOP/s", best / 1e9, median / 1e9),
        None => println!("FMA peak: not measured on this tier"),
    }
    println!("\n{:<36} {:>17} {:>17} {:>16} {:>16}", "shape", "fused", "separate", "fused/separate", "% of FMA peak");
    let prefill = PREFILL.map(|shape| (shape, Step::Prefill));
    let decode = DECODE.map(|shape| (shape, Step::Decode(Keys::Rotated)));
    for (shape, step) in prefill.into_iter().chain(decode) {
        let [mut fused, mut separate] = lanes(capabilities, shape, step);
        let repeats = if shape.flops(step) > 1e10 { 9 } else { 31 };
        let times = paired(repeats, &mut [&mut || fused.run(), &mut || separate.run()]);
        let ms = |lane| format!("{:.3} ({:.3})", times.best(lane) * 1e3, times.median(lane) * 1e3);
        let ratio = format!("{:.3} ({:.3})", times.best(0) / times.best(1), times.median(0) / times.median(1));
        let share = |seconds: f64, peak: f64| 100.0 * shape.flops(step) / seconds / peak;
        let of_peak = peak.map_or("-".into(), |(best, median)| {
            format!("{:.0} ({:.0})", share(times.best(0), best), share(times.median(0), median))
        });
        println!("{:<36} {:>17} {:>17} {:>16} {:>16}", shape.name, ms(0), ms(1), ratio, of_peak);
    }
}

//! Rotary maths against vectors of published models, against f64, and the named cases of rotary faults.

use std::f64::consts::TAU;
use std::panic::{AssertUnwindSafe, catch_unwind};

use rotile_core::rotary::{
    CosSin, Frequencies, LongRopeFactors, PairStyle, Positions, Rotary, RotarySpec, RotaryTable, Yarn, padded,
    yarn_softmax_multiplier,
};
use rotile_core::{
    AttentionSpec, Batch, Capabilities, Error, MAX_HEAD_DIM, Operands, Plan, Sequence, Shape, Tensor, TensorMut, bf16,
    f16, kernel, portable,
};
use safetensors::SafeTensors;
use serde_json::Value;

const TABLES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/vectors/rotary_tables.safetensors");

// ---- helpers ----

fn inv_freq(set: Frequencies, rotary_dim: usize) -> (Vec<f64>, f64) {
    let mut out = vec![f64::NAN; rotary_dim / 2];
    let factor = set.inv_freq(rotary_dim, &mut out).unwrap();
    assert!(out.iter().all(|f| f.is_finite()), "{set:?}: {out:?}");
    (out, factor)
}

fn default_inv_freq(base: f64, rotary_dim: usize) -> Vec<f64> {
    inv_freq(Frequencies::Default { base }, rotary_dim).0
}

/// Builds a table for `f`, whatever the storage's element type.
macro_rules! table {
    ($name:ident, $storage:ident, $inv_freq:expr, $factor:expr, $max:expr) => {
        let mut $storage = vec![Default::default(); RotaryTable::storage_len($inv_freq.len(), $max).unwrap()];
        let $name = RotaryTable::build(&$inv_freq, $factor, $max, &mut $storage).unwrap();
    };
}

/// The larger of the two errors of one entry, over the amplitude.
fn error_of((cos, sin): (f32, f32), amplitude: f64, (want_cos, want_sin): (f64, f64)) -> f64 {
    let (c, s) = ((f64::from(cos) / amplitude - want_cos).abs(), (f64::from(sin) / amplitude - want_sin).abs());
    assert!(c.is_finite() && s.is_finite(), "{cos} {sin}");
    c.max(s)
}

/// Largest error of `table` at `positions` against f64.
fn table_error(table: &RotaryTable, inv_freq: &[f64], amplitude: f64, positions: impl Iterator<Item = u32>) -> f64 {
    let mut worst = 0.0f64;
    for position in positions {
        for (i, f) in inv_freq.iter().enumerate() {
            let (sin, cos) = (f64::from(position) * f).sin_cos();
            worst = worst.max(error_of(table.cos_sin(position, i), amplitude, (cos, sin)));
        }
    }
    worst
}

#[track_caller]
fn says<T: std::fmt::Debug>(result: Result<T, Error>, parts: &[&str]) {
    let text = result.expect_err("must be refused").to_string();
    for part in parts {
        assert!(text.contains(part), "\"{text}\" does not say \"{part}\"");
    }
}

// ---- the vectors ----

struct Setting {
    name: String,
    case: Value,
    inv_freq: Vec<f64>,
    cos: Vec<f64>,
    sin: Vec<f64>,
}

fn load() -> (Vec<u32>, Vec<Setting>) {
    let bytes = std::fs::read(TABLES).unwrap();
    let (_, header) = SafeTensors::read_metadata(&bytes).unwrap();
    let cases: Value = serde_json::from_str(&header.metadata().as_ref().unwrap()["case"]).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let words = |name: &str| -> Vec<[u8; 8]> {
        file.tensor(name).unwrap().data().chunks_exact(8).map(|b| b.try_into().unwrap()).collect()
    };
    let reals = |name: String| words(&name).into_iter().map(f64::from_le_bytes).collect();
    let positions = words("positions").into_iter().map(|b| u32::try_from(i64::from_le_bytes(b)).unwrap()).collect();
    let settings = cases.as_object().unwrap().iter().map(|(name, case)| Setting {
        name: name.clone(),
        case: case.clone(),
        inv_freq: reals(format!("{name}.inv_freq")),
        cos: reals(format!("{name}.cos")),
        sin: reals(format!("{name}.sin")),
    });
    (positions, settings.collect())
}

impl Setting {
    fn attention_factor(&self) -> f64 {
        self.case["attention_factor"].as_f64().unwrap()
    }

    /// inv_freq and attention factor, computed by the library from the published settings.
    fn computed(&self) -> (Vec<f64>, f64) {
        let rope = &self.case["rope_parameters"];
        let real = |key: &str| rope[key].as_f64().unwrap_or_else(|| panic!("{}: {key}", self.name));
        let count = |value: &Value| u32::try_from(value.as_u64().unwrap()).unwrap();
        let list = |key: &str| -> Vec<f64> {
            rope[key].as_array().into_iter().flatten().map(|f| f.as_f64().unwrap()).collect()
        };
        let original = || count(&rope["original_max_position_embeddings"]);
        let head_dim = self.case["head_dim"].as_u64().unwrap() as usize;
        let partial = rope["partial_rotary_factor"].as_f64().unwrap_or(1.0);
        let leading = (head_dim as f64 * partial) as usize;
        let (short, long) = (list("short_factor"), list("long_factor"));
        let base = real("rope_theta");
        let (dim, set) = match rope["rope_type"].as_str().unwrap() {
            "default" => (leading, Frequencies::Default { base }),
            "linear" => (leading, Frequencies::Linear { base, factor: real("factor") }),
            "dynamic" => {
                let (trained, seq_len) = (count(&self.case["max_pos"]), count(&self.case["seq_len"]));
                (leading, Frequencies::DynamicNtk { base, factor: real("factor"), trained, seq_len })
            }
            "yarn" => {
                let mut yarn = Yarn::new(base, real("factor"), original());
                yarn.beta_fast = rope["beta_fast"].as_f64().unwrap_or(yarn.beta_fast);
                yarn.beta_slow = rope["beta_slow"].as_f64().unwrap_or(yarn.beta_slow);
                yarn.truncate = rope["truncate"].as_bool().unwrap_or(yarn.truncate);
                yarn.mscale = rope["mscale"].as_f64().zip(rope["mscale_all_dim"].as_f64());
                (leading, Frequencies::Yarn(yarn))
            }
            "longrope" => {
                let sets = LongRopeFactors { short: &short, long: &long };
                let set = Frequencies::LongRope {
                    base,
                    factors: sets.pick(count(&self.case["seq_len"]), original()),
                    original: original(),
                    max_positions: count(&self.case["max_pos"]),
                    attention_factor: None,
                };
                (leading, set)
            }
            "llama3" => {
                let (factor, low, high) = (real("factor"), real("low_freq_factor"), real("high_freq_factor"));
                (leading, Frequencies::Llama3 { base, factor, low, high, original: original() })
            }
            "proportional" => (head_dim, Frequencies::Proportional { base, partial }),
            other => panic!("rope_type {other}"),
        };
        inv_freq(set, dim)
    }
}

#[test]
fn frequencies_match_published_settings() {
    let (_, settings) = load();
    assert_eq!(settings.len(), 15);
    let mut worst = (0.0f64, String::new());
    for s in &settings {
        let (got, factor) = s.computed();
        assert!((factor - s.attention_factor()).abs() <= 1e-9, "{}: attention_factor {factor}", s.name);
        assert_eq!(got.len(), s.inv_freq.len(), "{}", s.name);
        for (i, (&got, &want)) in got.iter().zip(&s.inv_freq).enumerate() {
            let error =
                if want == 0.0 { if got == 0.0 { 0.0 } else { f64::INFINITY } } else { (got / want - 1.0).abs() };
            assert!(error <= 3e-6, "{}: pair {i}: {got} for {want}", s.name);
            if error > worst.0 {
                worst = (error, format!("{} pair {i}", s.name));
            }
        }
    }
    println!("inv_freq: largest relative error {:e} ({})", worst.0, worst.1);
}

#[test]
fn tables_match_published_settings() {
    let (positions, settings) = load();
    let max = positions.iter().max().unwrap() + 1;
    let mut worst = (0.0f64, String::new());
    for s in &settings {
        let (pairs, amplitude) = (s.inv_freq.len(), s.attention_factor());
        assert_eq!((s.cos.len(), s.sin.len()), (positions.len() * pairs, positions.len() * pairs), "{}", s.name);
        table!(table, storage, s.inv_freq, amplitude, max);
        for (row, &position) in positions.iter().enumerate() {
            for i in 0..pairs {
                let want = (s.cos[row * pairs + i] / amplitude, s.sin[row * pairs + i] / amplitude);
                let error = error_of(table.cos_sin(position, i), amplitude, want);
                assert!(error <= 5e-7, "{}: position {position} pair {i}: {error:e}", s.name);
                if error > worst.0 {
                    worst = (error, format!("{} position {position} pair {i}", s.name));
                }
            }
        }
    }
    println!("cos and sin of the vectors: largest error {:e} ({})", worst.0, worst.1);
}

#[test]
fn yarn_softmax_multiplier_is_the_square_of_mscale() {
    let m = 0.1 * 0.707 * 40f64.ln() + 1.0;
    assert!((yarn_softmax_multiplier(40.0, 0.707).unwrap() - m * m).abs() <= 1e-12);
    for (factor, mscale_all_dim) in [(0.5, 0.707), (1.0, 0.707), (40.0, 0.0)] {
        assert_eq!(yarn_softmax_multiplier(factor, mscale_all_dim), Ok(1.0));
    }
    for (v, is) in [(0.0, "is 0,"), (-2.5, "is -2.5,"), (f64::NAN, "is NaN,"), (f64::INFINITY, "is inf,")] {
        says(yarn_softmax_multiplier(v, 1.0), &["rope factor", is, "finite and positive"]);
        if v != 0.0 {
            says(yarn_softmax_multiplier(40.0, v), &["mscale_all_dim", is, "finite and not negative"]);
        }
    }
}

#[test]
fn yarn_ramp_beyond_the_pairs() {
    let plain = default_inv_freq(1e4, 64);
    for truncate in [true, false] {
        let ratios = |original| {
            let set = Frequencies::Yarn(Yarn { truncate, ..Yarn::new(1e4, 4.0, original) });
            inv_freq(set, 64).0.iter().zip(&plain).map(|(f, plain)| f / plain).collect::<Vec<_>>()
        };
        // Two positions: not even pair 0 turns once, so no pair past the ramp's end is kept.
        assert!(ratios(2)[1..].iter().all(|r| (r * 4.0 - 1.0).abs() < 1e-12), "{:?}", ratios(2));
        // Every pair turns more than 32 times.
        assert!(ratios(u32::MAX).iter().all(|r| (r - 1.0).abs() < 1e-12), "{:?}", ratios(u32::MAX));
    }
    // A base so low that the ramp begins past the last pair.
    let set = Frequencies::Yarn(Yarn::new(1.001, 4.0, 4096));
    for (f, plain) in inv_freq(set, 64).0.iter().zip(default_inv_freq(1.001, 64)) {
        assert!((f / plain - 1.0).abs() < 1e-12, "{f} for {plain}");
    }
}

#[test]
fn yarn_attention_factor_overrides() {
    let yarn = Yarn { mscale: Some((1.0, 0.707)), ..Yarn::new(1e4, 40.0, 4096) };
    let ratio = (0.1 * 40f64.ln() + 1.0) / (0.1 * 0.707 * 40f64.ln() + 1.0);
    assert!((inv_freq(Frequencies::Yarn(yarn), 64).1 - ratio).abs() <= 1e-12);
    let yarn = Yarn { attention_factor: Some(1.25), ..yarn };
    assert_eq!(inv_freq(Frequencies::Yarn(yarn), 64).1, 1.25);
}

// ---- the table ----

#[test]
fn rows_are_padded() {
    for (pairs, want) in [(1, 16), (16, 16), (17, 32), (64, 64), (288, 288)] {
        assert_eq!(padded(pairs), want);
        let f = vec![0.5; pairs];
        table!(table, storage, f, 2.0, 40);
        let (cos, sin) = table.fine_row(39);
        assert_eq!((cos.len(), sin.len()), (want, want));
        let (mut base_cos, mut base_sin) = (vec![f64::NAN; want], vec![f64::NAN; want]);
        table.base_row(39, &mut base_cos, &mut base_sin);
        // Kernels read the padding, so it must be finite.
        for row in [cos, sin, &base_cos, &base_sin] {
            assert!(row[pairs..].iter().all(|&v| v == 0.0), "{row:?}");
        }
        // The amplitude goes in once, with the base row.
        let base = f64::from(RotaryTable::base_of(39));
        assert!((base_cos[0] - 2.0 * (0.5 * base).cos()).abs() <= 1e-12);
        assert!((cos[0] - (0.5 * (39.0 - base)).cos()).abs() <= 1e-12);
    }
}

#[test]
fn table_of_a_million_positions_is_small_and_accurate() {
    const MAX: u32 = 1 << 20;
    for base in [1e4, 1e6] {
        let f = default_inv_freq(base, 128);
        let mut storage = vec![Default::default(); RotaryTable::storage_len(f.len(), MAX).unwrap()];
        let bytes = size_of_val(&storage[..]);
        let table = RotaryTable::build(&f, 1.0, MAX, &mut storage).unwrap();
        assert!(bytes <= 256 * 1024, "{bytes} bytes");
        // Coprime to the rows of every level, so that each row is met with many others; and all of both ends.
        let positions = (0..MAX).step_by(61).chain(0..2048).chain(MAX - 2048..MAX);
        let worst = table_error(&table, &f, 1.0, positions);
        println!("table of {MAX} positions in {bytes} bytes, base {base}: largest error {worst:e}");
        assert!(worst <= 2e-7, "{worst:e}");
    }
}

#[test]
fn table_beyond_a_million_positions() {
    // The top level alone grows: its rows must not wrap as those of the others do.
    const MAX: u32 = 3 << 20;
    let f = default_inv_freq(1e4, 8);
    table!(table, storage, f, 1.0, MAX);
    let worst = table_error(&table, &f, 1.0, (0..MAX).step_by(1009).chain([(1 << 20) - 1, 1 << 20, MAX - 1]));
    assert!(worst <= 2e-7, "{worst:e}");
}

#[test]
fn table_of_few_positions() {
    let f = default_inv_freq(1e4, 6);
    for max in [1, 2, 127, 128, 129, 16384, 16385] {
        table!(table, storage, f, 1.0, max);
        assert_eq!((table.max_positions(), table.pairs()), (max, 3));
        let worst = table_error(&table, &f, 1.0, 0..max);
        assert!(worst <= 2e-7, "{max} positions: {worst:e}");
        assert!(catch_unwind(AssertUnwindSafe(|| table.cos_sin(max, 0))).is_err(), "{max}: no such position");
        assert!(catch_unwind(AssertUnwindSafe(|| table.cos_sin(0, 3))).is_err(), "no such pair");
    }
}

#[test]
fn table_from_storage_is_the_built_one() {
    for (rotary_dim, factor, max) in [(128, 1.0, 40_000), (96, 1.19, 4097), (2, 1.0, 1), (MAX_HEAD_DIM, 0.5, 129)] {
        let f = default_inv_freq(1e4, rotary_dim);
        let need = RotaryTable::storage_len(f.len(), max).unwrap();
        // Storage may be longer than needed, and what it held before does not matter.
        let mut storage = vec![Default::default(); need + 5];
        let mut dirty = vec![777.0; need];
        let built = RotaryTable::build(&f, factor, max, &mut storage).unwrap();
        let rebuilt = RotaryTable::build(&f, factor, max, &mut dirty).unwrap();
        let bits = |table: &RotaryTable| -> Vec<(u32, u32)> {
            let entries = (0..max).step_by(7).flat_map(|p| (0..f.len()).map(move |i| (p, i)));
            entries.map(|(p, i)| table.cos_sin(p, i)).map(|(c, s)| (c.to_bits(), s.to_bits())).collect()
        };
        let (want, turned) = (bits(&built), built.turned_pairs());
        assert_eq!(bits(&rebuilt), want);
        let kept = RotaryTable::from_storage(&storage, f.len(), max, factor).unwrap();
        assert_eq!((kept.pairs(), kept.max_positions(), kept.turned_pairs()), (f.len(), max, turned));
        assert_eq!(bits(&kept), want);
        assert_eq!(storage[..need], dirty[..]);
    }
}

#[test]
fn turned_pairs_end_at_the_last_that_turns() {
    let turned = |f: &[f64], factor: f64, max: u32| {
        table!(table, storage, f, factor, max);
        table.turned_pairs()
    };
    assert_eq!(turned(&[1.0, 0.5, 0.25], 1.0, 100), 3);
    assert_eq!(turned(&[1.0, 0.5, 0.0, 0.0], 1.0, 100), 2);
    assert_eq!(turned(&[0.0, 0.5, 0.0, 0.0], 1.0, 2), 2);
    assert_eq!(turned(&[0.0, 0.0], 1.0, 100), 0);
    // An amplitude changes even what does not turn.
    assert_eq!(turned(&[1.0, 0.0], 1.5, 100), 2);
    // Slow pairs turn too.
    assert_eq!(turned(&[1.0, 1e-12], 1.0, 100), 2);
    // One position shows nothing: all count.
    assert_eq!(turned(&[1.0, 0.0], 1.0, 1), 2);
}

// ---- named cases ----

#[test]
fn b29_positions_are_integers() {
    let f = default_inv_freq(1e4, 64);
    table!(table, storage, f, 1.0, 65_536);
    let worst = table_error(&table, &f, 1.0, 255..=259);
    println!("positions 255..=259: largest error {worst:e}");
    assert!(worst <= 1e-7, "{worst:e}");
    // These are the neighbours that bf16 and f16 positions run together.
    let worst = table_error(&table, &f, 1.0, [2049, 4097, 65_520].into_iter());
    assert!(worst <= 1e-7, "{worst:e}");
    for (position, cos) in [(256, -0.0398), (257, 0.8193)] {
        let got = table.cos_sin(position, 0).0;
        assert!((got - cos).abs() < 1e-4, "position {position}: {got}");
    }
    for (a, b) in [(256, 257), (2048, 2049), (4096, 4097), (65_504, 65_520)] {
        for i in 0..32 {
            assert_ne!(table.cos_sin(a, i), table.cos_sin(b, i), "positions {a} and {b}, pair {i}");
        }
    }
}

#[test]
fn b31_rotation_is_relative() {
    // One table serves prefill and decode; the product of two rotations by it depends on their distance alone.
    let f = inv_freq(Frequencies::Llama3 { base: 5e5, factor: 32.0, low: 1.0, high: 4.0, original: 8192 }, 64).0;
    table!(table, storage, f, 1.0, 101_000);
    for offset in [0, 1000, 100_000] {
        for (m, n) in [(0, 0), (741, 0), (741, 740), (742, 31)] {
            for (i, f) in f.iter().enumerate() {
                let [(cm, sm), (cn, sn)] =
                    [m, n].map(|p| table.cos_sin(p + offset, i)).map(|(c, s)| (f64::from(c), f64::from(s)));
                let (sin, cos) = (f64::from(m - n) * f).sin_cos();
                let error = (cm * cn + sm * sn - cos).abs().max((sm * cn - cm * sn - sin).abs());
                assert!(error <= 2e-7, "offset {offset}, {m} and {n}, pair {i}: {error:e}");
            }
        }
    }
}

#[test]
fn b32_llama3_pair_classes() {
    for (dim, factor, kept, blended, divided) in [(64, 32.0, 15, 3, 14), (128, 8.0, 29, 6, 29)] {
        let base = 5e5;
        let set = Frequencies::Llama3 { base, factor, low: 1.0, high: 4.0, original: 8192 };
        let (got, amplitude) = inv_freq(set, dim);
        assert_eq!(amplitude, 1.0);
        let mut counts = [0; 3];
        for (i, (got, plain)) in got.iter().zip(default_inv_freq(base, dim)).enumerate() {
            // The published formula, written by wavelength.
            let wavelength = TAU / plain;
            let (class, want) = if wavelength < 8192.0 / 4.0 {
                (0, plain)
            } else if wavelength > 8192.0 {
                (2, plain / factor)
            } else {
                let smooth = (8192.0 / wavelength - 1.0) / 3.0;
                (1, (1.0 - smooth) * plain / factor + smooth * plain)
            };
            assert!((got / want - 1.0).abs() < 1e-12, "D={dim} pair {i}: {got} for {want}");
            let place = if i < kept { 0 } else { 1 + usize::from(i >= kept + blended) };
            assert_eq!(class, place, "D={dim} pair {i}");
            counts[class] += 1;
            let ratio = got / plain;
            match class {
                0 => assert!((ratio - 1.0).abs() < 1e-12),
                1 => assert!(ratio < 1.0 - 1e-3 && ratio > 1.0 / factor + 1e-3, "D={dim} pair {i}: {ratio}"),
                _ => assert!((ratio * factor - 1.0).abs() < 1e-12),
            }
        }
        assert_eq!(counts, [kept, blended, divided]);
    }
}

#[test]
fn b34_longrope_factor_sets() {
    let (short, long) = ([1.0; 48], core::array::from_fn::<f64, 48, _>(|i| 1.0 + i as f64));
    let sets = LongRopeFactors { short: &short, long: &long };
    for (seq_len, want) in
        [(0, &short), (3000, &short), (4090, &short), (4096, &short), (4097, &long), (5000, &long), (5511, &long)]
    {
        assert_eq!(sets.pick(seq_len, 4096), want, "{seq_len}");
    }
    let set = |seq_len, max_positions, attention_factor| Frequencies::LongRope {
        base: 1e4,
        factors: sets.pick(seq_len, 4096),
        original: 4096,
        max_positions,
        attention_factor,
    };
    let plain = default_inv_freq(1e4, 96);
    for (seq_len, factors) in [(4096, &short), (4097, &long)] {
        let (got, amplitude) = inv_freq(set(seq_len, 32 * 4096, None), 96);
        // The amplitude comes from the model's lengths, not from the sequence's.
        assert!((amplitude - 1.19024).abs() < 5e-6, "{amplitude}");
        for i in 0..48 {
            assert!((got[i] * factors[i] / plain[i] - 1.0).abs() < 1e-12, "pair {i}");
        }
    }
    assert_eq!(inv_freq(set(100, 4096, None), 96).1, 1.0);
    assert_eq!(inv_freq(set(100, 2048, None), 96).1, 1.0);
    assert_eq!(inv_freq(set(100, 32 * 4096, Some(1.5)), 96).1, 1.5);
}

#[test]
fn b35_dynamic_ntk() {
    let at = |seq_len| inv_freq(Frequencies::DynamicNtk { base: 1e4, factor: 2.0, trained: 2048, seq_len }, 64).0;
    let plain = default_inv_freq(1e4, 64);
    let grown = at(4096);
    // base^(-2/64) is the frequency of pair 1.
    let base = grown[1].powf(-32.0);
    assert!((base - 31082.2).abs() < 0.05, "{base}");
    for (i, f) in grown.iter().enumerate() {
        assert!((f / base.powf(-2.0 * i as f64 / 64.0) - 1.0).abs() < 1e-11, "pair {i}");
    }
    assert!(at(2049)[1] < plain[1]);
    // The inner term would be -0.5 at 512; and nothing stays behind from the longer sequence.
    for seq_len in [0, 1, 100, 512, 2048] {
        assert_eq!(at(seq_len), plain, "{seq_len}");
    }
    // One pair: the exponent rotary_dim / (rotary_dim - 2) has no value, and the only frequency is 1.
    let one = Frequencies::DynamicNtk { base: 1e4, factor: 2.0, trained: 2048, seq_len: 4096 };
    assert_eq!(inv_freq(one, 2).0, [1.0]);
}

#[test]
fn b37_proportional_pairs() {
    let (f, amplitude) = inv_freq(Frequencies::Proportional { base: 1e6, partial: 0.25 }, 512);
    assert_eq!(amplitude, 1.0);
    for (i, &f) in f.iter().enumerate() {
        let want = if i < 64 { 1e6f64.powf(-2.0 * i as f64 / 512.0) } else { 0.0 };
        assert!((f - want).abs() <= 1e-12 * want, "pair {i}: {f} for {want}");
    }
    table!(table, storage, f, amplitude, 4096);
    assert_eq!((table.pairs(), table.turned_pairs()), (256, 64));
    for (position, i) in [(1, 64), (4095, 64), (4095, 255)] {
        assert_eq!(table.cos_sin(position, i), (1.0, 0.0));
    }

    let turn = RotarySpec::proportional(PairStyle::Half, 64).turn(512).unwrap().unwrap();
    assert_eq!((turn.offset, turn.pairs, turn.distance), (0, 64, 256));
    assert!((0..64).all(|i| turn.pair(i) == (i, i + 256)));
    let turn = RotarySpec::proportional(PairStyle::Interleaved, 64).turn(512).unwrap().unwrap();
    assert_eq!((turn.pairs, turn.distance, turn.pair(63)), (64, 1, (126, 127)));
    // The contiguous prefix of as many elements is another thing, in pairs and in exponent.
    let prefix = RotarySpec::leading(PairStyle::Half, 128).turn(512).unwrap().unwrap();
    assert_eq!((prefix.pairs, prefix.pair(1)), (64, (1, 65)));
    assert!((default_inv_freq(1e6, 128)[1] / f[1] - 1.0).abs() > 0.1);
    assert_eq!(RotarySpec::proportional(PairStyle::Half, 0).turn(512), Ok(None));
}

#[test]
fn b38_slice_at_offset() {
    for (head_dim, offset) in [(576, 512), (192, 128)] {
        for style in [PairStyle::Half, PairStyle::Interleaved] {
            let spec = RotarySpec::at_offset(style, offset, 64);
            assert_eq!(spec.style(), style);
            let turn = spec.turn(head_dim).unwrap().unwrap();
            assert_eq!((turn.style, turn.offset, turn.pairs), (style, offset, 32));
            let mut touched: Vec<usize> = (0..32).flat_map(|i| <[usize; 2]>::from(turn.pair(i))).collect();
            let first = if style == PairStyle::Half { (offset, offset + 32) } else { (offset, offset + 1) };
            assert_eq!(turn.pair(0), first);
            touched.sort_unstable();
            assert!(touched.into_iter().eq(offset..head_dim), "each element of the slice once, no other");
            says(
                RotarySpec::at_offset(style, offset + 1, 64).turn(head_dim),
                &["rotary offset", &format!("is {}", offset + 1), &format!("0..={offset}")],
            );
        }
    }
    // The amplitude goes on cos and sin, so only on what turns.
    let f = default_inv_freq(1e4, 64);
    table!(table, storage, f, 0.5, 4096);
    assert_eq!(table.cos_sin(0, 0), (0.5, 0.0));
    let worst = table_error(&table, &f, 0.5, (0..4096).step_by(5));
    assert!(worst <= 2e-7, "{worst:e}");
}

#[test]
fn b40_partial_widths() {
    for style in [PairStyle::Half, PairStyle::Interleaved] {
        let at = |rotary_dim, head_dim| RotarySpec::leading(style, rotary_dim).turn(head_dim);
        says(at(33, 64), &["rotary_dim is 33", "even"]);
        says(at(80, 64), &["rotary_dim is 80", "0..=64"]);
        says(at(66, 64), &["rotary_dim is 66", "0..=64"]);
        says(at(usize::MAX, 64), &[&format!("rotary_dim is {}", usize::MAX), "0..=64"]);
        assert_eq!(at(0, 64), Ok(None));
        let turn = at(64, 65).unwrap().unwrap();
        assert_eq!((turn.offset, turn.pairs), (0, 32));
        assert_eq!(turn.pair(31), if style == PairStyle::Half { (31, 63) } else { (62, 63) });
        says(RotarySpec::full(style).turn(65), &["head_dim", "is 65", "even"]);
        says(RotarySpec::proportional(style, 16).turn(65), &["head_dim", "is 65", "even"]);
        says(RotarySpec::proportional(style, 33).turn(64), &["turned pairs is 33", "0..=32"]);
        says(
            RotarySpec::at_offset(style, usize::MAX, 32).turn(64),
            &[&format!("rotary offset is {}", usize::MAX), "0..=32"],
        );
        let turn = RotarySpec::full(style).turn(64).unwrap().unwrap();
        assert_eq!(
            (turn.offset, turn.pairs, turn.pair(0)),
            (0, 32, (0, if style == PairStyle::Half { 32 } else { 1 }))
        );
    }
    assert_eq!(RotarySpec::none().turn(64), Ok(None));
}

/// Rotates `tokens` tokens of one head, all ones, and returns them; checks that a refused call writes nothing.
fn rotate(spec: RotarySpec, head_dim: usize, tokens: usize, sequence: Sequence<'_>) -> Result<Vec<f32>, Error> {
    let capabilities = Capabilities::new(&[portable::tier(&kernel::FP_CONTROL_NONE)]);
    let plan = Plan::new(&capabilities, &AttentionSpec::rotate(1, head_dim, spec))?;
    let shape = Shape { batch: 1, tokens, heads: 1, dim: head_dim };
    let (x, mut out) = (vec![1f32; tokens * head_dim], vec![-7f32; tokens * head_dim]);
    let operands =
        Operands::Rotate { x: Tensor::token_major(&x[..], shape)?, out: TensorMut::token_major(&mut out[..], shape)? };
    let mut scratch = vec![0; plan.scratch_len(&[sequence])];
    let mut workspace = vec![0; plan.workspace_len()];
    let sequences = [sequence];
    let mut batch = Batch::new(operands, &sequences);
    let result = plan.prepare(&mut batch, &mut scratch).and_then(|call| call.run(&mut workspace));
    if result.is_err() {
        assert!(out.iter().all(|&v| v == -7.0), "written although refused");
    }
    result.map(|()| out)
}

#[test]
fn b40_table_width() {
    let spec = RotarySpec::full(PairStyle::Half);
    for (pairs, fits) in [(31, false), (32, true), (40, false)] {
        let (cos, sin) = (vec![1f32; 4 * pairs], vec![0f32; 4 * pairs]);
        let f = vec![0.5; pairs];
        table!(table, storage, f, 1.0, 4);
        for rotary in [table.into(), CosSin::by_position(&cos[..], &sin[..], pairs).unwrap().into()] {
            let rotary: Rotary = rotary;
            assert_eq!(rotary.pairs(), pairs);
            let got = rotate(spec, 64, 4, Sequence::new(4, 4).with_rotary(rotary));
            if fits {
                got.unwrap();
            } else {
                says(got, &["rotary", &format!("is {pairs}"), "must be 32"]);
            }
        }
    }
}

#[test]
fn b41_position_limits() {
    const ROWS: usize = 4096;
    let f = default_inv_freq(1e4, 64);
    table!(table, storage, f, 1.0, ROWS as u32);
    let rows = |part: fn((f32, f32)) -> f32| -> Vec<f32> {
        (0..ROWS as u32).flat_map(|p| (0..32).map(move |i| (p, i))).map(|(p, i)| part(table.cos_sin(p, i))).collect()
    };
    let (cos, sin) = (rows(|(cos, _)| cos), rows(|(_, sin)| sin));
    let spec = RotarySpec::full(PairStyle::Interleaved);
    let want = |position: u32| -> Vec<f32> {
        (0..32).map(|i| table.cos_sin(position, i)).flat_map(|(c, s)| [c - s, c + s]).collect()
    };
    let near = |got: &[f32], want: &[f32]| got.iter().zip(want).all(|(a, b)| (a - b).abs() <= 2e-7);
    fn at<'a>(spec: RotarySpec, rotary: Rotary<'a>, positions: Positions<'a>) -> Result<Vec<f32>, Error> {
        let mut sequence = Sequence::new(1, 1).with_rotary(rotary);
        sequence.q_positions = positions;
        rotate(spec, 64, 1, sequence)
    }
    let given = CosSin::by_position(&cos[..], &sin[..], 32).unwrap();
    for rotary in [Rotary::Table(table), Rotary::CosSin(given)] {
        for position in [0, 4095] {
            assert!(near(&at(spec, rotary, Positions::Start(position)).unwrap(), &want(position)), "{position}");
            assert!(near(&at(spec, rotary, Positions::Explicit(&[position])).unwrap(), &want(position)), "{position}");
        }
        for position in [4096, 40_959, u32::MAX] {
            let parts = ["q_positions", &format!("is {position}"), "0..=4095"];
            says(at(spec, rotary, Positions::Start(position)), &parts);
            says(at(spec, rotary, Positions::Explicit(&[position])), &parts);
        }
        // Key indices are positions unless others are given; the boundary is crossed in mid-sequence.
        for (q_start, tokens, refused) in [(4094, 2, None), (4094, 3, Some("4096")), (-1, 1, Some("-1"))] {
            let mut sequence = Sequence::new(tokens, tokens).with_rotary(rotary);
            sequence.q_start = q_start;
            match (rotate(spec, 64, tokens, sequence), refused) {
                (got, None) => assert!(near(&got.unwrap()[64..], &want(4095))),
                (got, Some(value)) => says(got, &["q_positions", &format!("is {value}"), "0..=4095"]),
            }
        }
    }
}

#[test]
fn b41_cos_sin_shapes() {
    let (cos, sin) = (vec![1f32; 4096 * 8], vec![0f32; 4000 * 8]);
    says(CosSin::by_position(&cos[..], &sin[..], 8), &["sin is 32000", "must be 32768"]);
    says(CosSin::by_token(&cos[..], &sin[..], 8), &["sin is 32000", "must be 32768"]);
    says(CosSin::by_position(&sin[..], &cos[..], 8), &["sin is 32768", "must be 32000"]);
    says(CosSin::by_position(&cos[..], &cos[..], 0), &["rotary pairs is 0", "1..=288"]);
    says(CosSin::by_position(&cos[..], &cos[..], 289), &["rotary pairs is 289", "1..=288"]);
    // No whole number of rows.
    says(CosSin::by_position(&cos[..21], &cos[..21], 8), &["cos is 21", "must be 16"]);
    let half = vec![f16::ONE; 4096 * 8];
    says(CosSin::by_position(&cos[..], &half[..], 8), &["sin holds f16", "as f32"]);
    let brain = vec![bf16::ONE; 4096 * 8];
    says(CosSin::by_position(&half[..], &brain[..], 8), &["sin holds bf16", "as f16"]);

    let given = CosSin::by_position(&cos[..], &cos[..], 8).unwrap();
    assert_eq!((given.rows(), given.pairs(), given.is_by_token()), (4096, 8, false));
    let given = CosSin::by_token(&cos[..], &cos[..], 8).unwrap();
    assert_eq!((given.rows(), given.pairs(), given.is_by_token()), (4096, 8, true));
    let mut row = [0.0; 8];
    given.copy_row(4095, &mut row, &mut [0.0; 8]);
    assert_eq!(row, [1.0; 8]);
    for beyond in [4096, 40_959, usize::MAX] {
        let read = || given.copy_row(beyond, &mut [0.0; 8], &mut [0.0; 8]);
        assert!(catch_unwind(AssertUnwindSafe(read)).is_err(), "row {beyond}");
    }
    assert_eq!(CosSin::by_position(&cos[..0], &cos[..0], 8).unwrap().rows(), 0);
}

#[test]
fn cos_sin_rows_may_lie_apart() {
    let cos: Vec<f32> = (0..34).map(|i| i as f32).collect();
    let sin: Vec<f32> = cos.iter().map(|v| -v).collect();
    for (len, stride, rows) in [(32, 8, 4), (28, 10, 3), (30, 10, 3), (30, 11, 3), (8, 100, 1), (0, 9, 0)] {
        let by_position = CosSin::by_position_strided(&cos[..len], &sin[..len], 8, stride).unwrap();
        let by_token = CosSin::by_token_strided(&cos[..len], &sin[..len], 8, stride).unwrap();
        assert_eq!((by_position.is_by_token(), by_token.is_by_token()), (false, true));
        for given in [by_position, by_token] {
            assert_eq!((given.rows(), given.pairs(), given.row_stride()), (rows, 8, stride));
            for row in 0..rows {
                let (mut c, mut s) = ([9.0; 16], [9.0; 16]);
                given.copy_row(row, &mut c, &mut s);
                let at = row * stride..row * stride + 8;
                assert!(c[..8] == cos[at.clone()] && s[..8] == sin[at], "stride {stride} row {row}");
                assert!(c[8..] == [0.0; 8] && s[8..] == [0.0; 8], "padding");
            }
        }
    }
    says(CosSin::by_position_strided(&cos[..], &sin[..], 8, 7), &["row stride is 7", "8..="]);
    says(CosSin::by_token_strided(&cos[..], &sin[..], 8, 0), &["row stride is 0", "8..="]);
    // The last row must hold its pairs.
    says(CosSin::by_position_strided(&cos[..27], &sin[..27], 8, 10), &["cos is 27", "must be 20"]);
    says(CosSin::by_token_strided(&cos[..7], &sin[..7], 8, 10), &["cos is 7", "must be 0"]);
}

#[test]
fn cos_sin_rows_widen_exactly() {
    const PAIRS: usize = 257;
    // Every bit pattern but NaN: rows of 257 divide the 65,535 first ones.
    let words: Vec<u16> = (0..65_535).collect();
    let halves: Vec<f16> =
        words.iter().map(|&w| f16::from_bits(w)).map(|v| if v.is_nan() { f16::ONE } else { v }).collect();
    let brains: Vec<bf16> =
        words.iter().map(|&w| bf16::from_bits(w)).map(|v| if v.is_nan() { bf16::ONE } else { v }).collect();
    let singles: Vec<f32> = brains.iter().rev().map(|v| v.to_f32() * 1.000_000_1).collect();
    // What the formats say, not what the conversion under test says.
    let half = |v: &f16| -> f32 {
        let bits = v.to_bits();
        let (exponent, fraction) = (i32::from(bits >> 10 & 31), f64::from(bits & 1023));
        let size = match exponent {
            0 => fraction * 2f64.powi(-24),
            31 => f64::INFINITY,
            _ => (1024.0 + fraction) * 2f64.powi(exponent - 25),
        };
        (if bits >> 15 == 0 { size } else { -size }) as f32
    };
    let brain = |v: &bf16| f32::from_bits(u32::from(v.to_bits()) << 16);
    let (wide_halves, wide_brains): (Vec<f32>, Vec<f32>) =
        (halves.iter().map(half).collect(), brains.iter().map(brain).collect());
    let backwards = |v: &[f32]| -> Vec<f32> { v.iter().rev().copied().collect() };
    let (rev_halves, rev_brains): (Vec<f16>, Vec<bf16>) =
        (halves.iter().rev().copied().collect(), brains.iter().rev().copied().collect());
    let cases = [
        (CosSin::by_position(&halves[..], &rev_halves[..], PAIRS), &wide_halves),
        (CosSin::by_token(&brains[..], &rev_brains[..], PAIRS), &wide_brains),
        (CosSin::by_position(&singles[..], &singles[..], PAIRS), &singles),
    ];
    for (n, (given, want_cos)) in cases.into_iter().enumerate() {
        let given = given.unwrap();
        let want_sin = if n == 2 { want_cos.clone() } else { backwards(want_cos) };
        assert_eq!(given.rows(), 255);
        for row in 0..given.rows() {
            // Shorter than a row, a row, and longer: zeros follow.
            for len in [100, PAIRS, 272] {
                let (mut cos, mut sin) = (vec![f32::NAN; len], vec![f32::NAN; len]);
                given.copy_row(row, &mut cos, &mut sin);
                for (got, want) in [(&cos, want_cos), (&sin, &want_sin)] {
                    let want = want[row * PAIRS..][..PAIRS].iter().chain(std::iter::repeat(&0.0));
                    let same = got.iter().zip(want).all(|(got, want)| got.to_bits() == want.to_bits());
                    assert!(same, "case {n} row {row} len {len}");
                }
            }
        }
    }
}

// ---- validation ----

#[test]
fn frequency_faults_are_refused() {
    /// Refused with these words, and before anything is written.
    #[track_caller]
    fn refused(set: Frequencies, rotary_dim: usize, len: usize, parts: &[&str]) {
        let mut out = vec![-7.0; len];
        says(set.inv_freq(rotary_dim, &mut out), parts);
        assert!(out.iter().all(|&f| f == -7.0), "{set:?}: written although refused");
    }
    let base = 1e4;
    let plain = Frequencies::Default { base };
    refused(plain, 0, 0, &["rotary_dim is 0", "2..=576"]);
    refused(plain, 578, 289, &["rotary_dim is 578", "2..=576"]);
    refused(plain, 577, 288, &["rotary_dim is 577", "2..=576"]);
    refused(plain, 33, 16, &["rotary_dim is 33", "even"]);
    refused(plain, 64, 31, &["inv_freq is 31", "must be 32"]);
    refused(plain, 64, 64, &["inv_freq is 64", "must be 32"]);

    let good = |set: Frequencies| inv_freq(set, 64);
    let bad = |set: Frequencies, parts: &[&str]| refused(set, 64, 32, parts);
    let not_positive = [(0.0, "is 0,"), (-2.5, "is -2.5,"), (f64::NAN, "is NaN,"), (f64::INFINITY, "is inf,")];
    let factors = [2.0; 32];
    fn longrope(base: f64, factors: &[f64], original: u32, max_positions: u32, factor: Option<f64>) -> Frequencies<'_> {
        Frequencies::LongRope { base, factors, original, max_positions, attention_factor: factor }
    }
    let dynamic = |base, factor, trained| Frequencies::DynamicNtk { base, factor, trained, seq_len: 4096 };
    let llama3 = |base, factor, low, high, original| Frequencies::Llama3 { base, factor, low, high, original };
    let yarn = Yarn::new(base, 4.0, 4096);
    // What is varied below is right to begin with.
    good(longrope(base, &factors, 4096, 8192, None));
    good(dynamic(base, 2.0, 2048));
    good(llama3(base, 8.0, 1.0, 4.0, 8192));
    good(Frequencies::Yarn(yarn));

    for (v, says) in not_positive {
        for set in [
            Frequencies::Default { base: v },
            Frequencies::Linear { base: v, factor: 2.0 },
            dynamic(v, 2.0, 2048),
            Frequencies::Yarn(Yarn { base: v, ..yarn }),
            longrope(v, &factors, 4096, 8192, None),
            llama3(v, 8.0, 1.0, 4.0, 8192),
            Frequencies::Proportional { base: v, partial: 0.5 },
        ] {
            bad(set, &["rope base", says, "finite and positive"]);
        }
        for set in [
            Frequencies::Linear { base, factor: v },
            dynamic(base, v, 2048),
            llama3(base, v, 1.0, 4.0, 8192),
            Frequencies::Yarn(Yarn { factor: v, ..yarn }),
        ] {
            bad(set, &["rope factor", says, "finite and positive"]);
        }
        let mut one_bad = factors;
        one_bad[31] = v;
        bad(longrope(base, &one_bad, 4096, 8192, None), &["LongRoPE factor", says, "finite and positive"]);
        bad(longrope(base, &factors, 4096, 8192, Some(v)), &["attention_factor", says, "finite and positive"]);
        bad(llama3(base, 8.0, v, 4.0, 8192), &["low_freq_factor", says, "finite and positive"]);
        bad(llama3(base, 8.0, 1.0, v, 8192), &["high_freq_factor", says, "finite and positive"]);
        for (set, what) in [
            (Yarn { beta_fast: v, ..yarn }, "beta_fast"),
            (Yarn { beta_slow: v, ..yarn }, "beta_slow"),
            (Yarn { attention_factor: Some(v), ..yarn }, "attention_factor"),
            (Yarn { mscale: Some((v, 1.0)), ..yarn }, "mscale "),
            (Yarn { mscale: Some((1.0, v)), ..yarn }, "mscale_all_dim"),
        ] {
            bad(Frequencies::Yarn(set), &[what, says, "finite and positive"]);
        }
        if v != f64::INFINITY {
            bad(Frequencies::Proportional { base, partial: v }, &["partial_rotary_factor", says, "in (0, 1]"]);
        }
    }
    bad(Frequencies::Proportional { base, partial: 1.5 }, &["partial_rotary_factor is 1.5", "in (0, 1]"]);

    bad(dynamic(base, 2.0, 0), &["trained length is 0", "1..=4294967295"]);
    bad(longrope(base, &factors[..31], 4096, 8192, None), &["LongRoPE factors is 31", "must be 32"]);
    bad(longrope(base, &factors, 0, 8192, None), &["original length is 0", "1..=4294967295"]);
    bad(longrope(base, &factors, 4096, 0, None), &["max_positions is 0", "1..=4294967295"]);
    bad(longrope(base, &factors, 1, 8192, None), &["original length is 1", "2..=4294967295"]);
    bad(llama3(base, 8.0, 4.0, 4.0, 8192), &["high_freq_factor is 4", "above low_freq_factor"]);
    bad(llama3(base, 8.0, 4.0, 1.0, 8192), &["high_freq_factor is 1", "above low_freq_factor"]);
    bad(llama3(base, 8.0, 1.0, 4.0, 0), &["original length is 0", "1..=4294967295"]);
    bad(Frequencies::Yarn(Yarn { original: 0, ..yarn }), &["original length is 0", "1..=4294967295"]);
    bad(Frequencies::Yarn(Yarn { base: 1.0, ..yarn }), &["rope base is 1,", "above 1"]);
    bad(Frequencies::Yarn(Yarn { base: 0.5, ..yarn }), &["rope base is 0.5,", "above 1"]);
    bad(Frequencies::Yarn(Yarn { beta_fast: 0.5, ..yarn }), &["beta_fast is 0.5", "at least beta_slow"]);
}

#[test]
fn table_faults_are_refused() {
    says(RotaryTable::storage_len(0, 4096), &["rotary pairs is 0", "1..=288"]);
    says(RotaryTable::storage_len(289, 4096), &["rotary pairs is 289", "1..=288"]);
    says(RotaryTable::storage_len(64, 0), &["max_positions is 0", "1..=4294967295"]);
    // usize::MAX elements can't be reached with 64 bits; the widest table still has a size.
    let widest = RotaryTable::storage_len(288, u32::MAX);
    assert!(widest.is_ok() || usize::BITS < 64, "{widest:?}");

    let need = RotaryTable::storage_len(2, 4096).unwrap();
    let mut storage = vec![-7.0; need];
    says(RotaryTable::build(&[], 1.0, 4096, &mut storage), &["rotary pairs is 0"]);
    says(RotaryTable::build(&[1.0; 289], 1.0, 4096, &mut storage), &["rotary pairs is 289"]);
    says(RotaryTable::build(&[1.0; 2], 1.0, 0, &mut storage), &["max_positions is 0"]);
    let (needs, has) = (format!("a length of {need}"), format!("has {}", need - 1));
    let short = ["rotary table storage", &needs, &has];
    says(RotaryTable::build(&[1.0; 2], 1.0, 4096, &mut storage[1..]), &short);
    says(RotaryTable::from_storage(&storage[1..], 2, 4096, 1.0), &short);
    for (v, is) in [(f64::NAN, "is NaN,"), (f64::INFINITY, "is inf,"), (f64::NEG_INFINITY, "is -inf,")] {
        says(RotaryTable::build(&[1.0, v], 1.0, 4096, &mut storage), &["inv_freq", is, "finite"]);
        says(RotaryTable::build(&[1.0; 2], v, 4096, &mut storage), &["attention_factor", is, "finite"]);
        says(RotaryTable::from_storage(&storage, 2, 4096, v), &["attention_factor", is, "finite"]);
    }
    assert!(storage.iter().all(|&v| v == -7.0), "written although refused");
    says(RotaryTable::from_storage(&storage, 0, 4096, 1.0), &["rotary pairs is 0"]);
    says(RotaryTable::from_storage(&storage, 2, 0, 1.0), &["max_positions is 0"]);
}

//! Every lane of a step computes the same thing.

use rotile::DType;
use rotile_bench::{Case, Lane, Shape, Step, Way, pinned};

fn result(case: &Case, threads: usize) -> Vec<f32> {
    let mut lane = Lane::new(&pinned(None).unwrap(), case, threads).unwrap();
    lane.run();
    lane.result()
}

/// The largest difference, over the largest value.
fn difference(a: &[f32], b: &[f32]) -> f32 {
    assert!(a.len() == b.len() && !a.is_empty());
    let largest = b.iter().fold(0f32, |m, x| m.max(x.abs()));
    // A NaN anywhere must show.
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0f32, |m, e| if e > m || e.is_nan() { e } else { m }) / largest
}

#[test]
fn lanes_agree() {
    let shapes = [
        Shape::new(8, 2, 128, 1),
        Shape::new(8, 2, 128, 70),
        Shape::new(7, 1, 64, 131),
        Shape::new(2, 2, 256, 64),
        Shape::new(10, 2, 64, 200),
    ];
    for shape in shapes {
        for step in [Step::Prefill, Step::Decode, Step::Append] {
            let fused = Case::new(step, shape, Way::Fused);
            let want = result(&fused, 1);
            for (way, limit) in [(Way::Separate, 2e-6), (Way::PlainC, 2e-5)] {
                let found = difference(&result(&fused.by(way), 1), &want);
                assert!(found <= limit, "{}: {found:e} from fused, more than {limit:e}", fused.by(way));
            }
            assert_eq!(result(&fused, 2), want, "{fused}: two threads change bits");
        }
        let rotate = Case::new(Step::Rotate, shape, Way::Separate);
        let found = difference(&result(&rotate.by(Way::PlainC), 1), &result(&rotate, 1));
        assert!(found <= 2e-6, "{rotate}: plain C is {found:e} away");
    }
}

#[test]
fn lanes_differ_where_they_should() {
    // Guards against a comparison of a lane with itself, or of rotations that do nothing.
    let fused = Case::new(Step::Prefill, Shape::new(8, 2, 128, 70), Way::Fused);
    assert!(difference(&result(&fused.by(Way::PreRotated), 1), &result(&fused, 1)) > 1e-2);
    let append = Case::new(Step::Append, Shape::new(8, 2, 128, 70), Way::Fused);
    assert!(difference(&result(&append.by(Way::PreRotated), 1), &result(&append, 1)) > 1e-2);
}

#[test]
fn lanes_of_16_bit_caches_run() {
    for step in [Step::Prefill, Step::Decode, Step::DecodeRaw, Step::Append] {
        let case = Case::new(step, Shape::new(8, 2, 128, 70), Way::Fused);
        let want = result(&case, 1);
        for dtype in [DType::F16, DType::Bf16] {
            let found = difference(&result(&case.with_dtype(dtype), 1), &want);
            assert!(found > 0.0 && found < 3e-2, "{} {dtype}: {found:e}", step.name());
        }
    }
}

#[test]
fn ways_that_do_not_exist_say_so() {
    let raw = Case::new(Step::DecodeRaw, Shape::new(8, 2, 128, 70), Way::Separate);
    let capabilities = pinned(None).unwrap();
    assert!(Lane::new(&capabilities, &raw, 1).unwrap_err().contains("no such way"));
    let odd = Case::new(Step::Prefill, Shape::new(8, 2, 40, 70), Way::PlainC);
    assert!(Lane::new(&capabilities, &odd, 1).unwrap_err().contains("multiple of 16"));
}

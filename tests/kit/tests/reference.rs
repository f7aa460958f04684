//! The f64 attention against the vectors, which were computed elsewhere.

use rotile_testkit::{compare, vectors};

#[test]
fn the_reference_agrees_with_the_vectors() {
    let mut compared = Vec::new();
    for path in vectors::list(&vectors::repository()).unwrap() {
        let Ok(case) = vectors::load(&path) else { continue };
        // Norms and M-RoPE are checked on the library's side, against the vector alone.
        let plain = case.qk_norm.is_none() && case.mrope.is_none();
        if !plain {
            continue;
        }
        let expected = case.problem.expected(0);
        let largest = case.out.iter().fold(0.0f64, |m, x| m.max(x.abs()));
        compare::close(&expected.out, &case.out, 1e-9 * largest, 0.0).unwrap_or_else(|e| panic!("{}: {e}", case.name));
        if let Some(lse) = &case.lse {
            compare::close(&expected.lse, lse, 1e-9, 1e-9).unwrap_or_else(|e| panic!("{}: {e}", case.name));
        }
        compared.push(case.name);
    }
    assert!(compared.len() >= 22, "only {compared:?}");
}

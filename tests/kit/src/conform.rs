//! One conformance vector on one tier.

use crate::trial::{self, How};
use crate::vectors::Case;
use crate::{compare, reference::Expected};
use rotile_core::{Capabilities, DType, Error, Sections};

/// How a case ended.
#[derive(Clone, Debug)]
pub enum Verdict {
    /// Within its bounds.
    Pass {
        /// Kernel that the plan named.
        kernel: &'static str,
        /// Largest absolute error of the output.
        error: f64,
        /// The bound of the element that came closest to its own.
        bound: f64,
    },
    /// Not.
    Fail(String),
    /// The planner refuses it.
    Unsupported(String),
}

/// Runs `case` on the tier that `capabilities` give.
pub fn run(case: &Case, capabilities: &Capabilities) -> Verdict {
    let problem = &case.problem;
    let s = &problem.sequences[0];
    let q_dtype = s.q.dtype();
    let mut verdict = None;
    // Output in f32, and in the queries' own type.
    for out_dtype in [DType::F32, q_dtype] {
        let how = How { out_dtype, ..How::default() };
        let mut spec = trial::spec(problem, case.part, &how);
        spec.qk_norm = case.qk_norm.as_ref().map(|(eps, ..)| *eps);
        if let Some((kind, sections)) = &case.mrope {
            let section = |i: usize| sections.get(i).copied().unwrap_or(0);
            spec.sections = match kind.as_str() {
                "blocked" => Sections::Blocked([section(0), section(1), section(2), section(3)]),
                _ => Sections::Interleaved([section(0), section(1), section(2)]),
            };
        }
        let outcome = match trial::run_spec(problem, &spec, capabilities, &how) {
            Ok(outcome) => outcome,
            Err(error @ Error::Unsupported { .. }) => return Verdict::Unsupported(error.to_string()),
            Err(error) => return Verdict::Fail(error.to_string()),
        };
        // The bounds come from the inputs; the values from the vector.
        let computed = problem.expected(0);
        let largest = case.out.iter().fold(0.0f64, |m, x| m.max(x.abs()));
        let expected = Expected { out: case.out.clone(), ..computed };
        let bounds = match case.of_largest {
            Some(fraction) => vec![fraction * largest; case.out.len()],
            None => trial::bounds(&expected, problem.heads.dim_v, out_dtype),
        };
        let out = match compare::within(&outcome.out[0].to_f32(), &case.out, 1, &bounds) {
            Ok(max) => max,
            Err(fault) => return Verdict::Fail(format!("{out_dtype} output: {fault}")),
        };
        if let Some(lse) = &case.lse
            && let Err(fault) = compare::within(&outcome.lse[0], lse, 1, &expected.lse_bounds())
        {
            return Verdict::Fail(format!("lse: {fault}"));
        }
        let bound = bounds.get(out.index).copied().unwrap_or(0.0);
        verdict.get_or_insert(Verdict::Pass { kernel: outcome.kernel, error: out.error, bound });
    }
    verdict.expect("two runs")
}

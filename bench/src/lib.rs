//! What the benches share: model shapes, the lanes that are compared, the FMA peak of this core, paired timing, tables.
//! No kernel lives here.

mod lanes;
mod measure;

pub use lanes::{DECODE, Lane, PREFILL, Shape, Step, pinned};
pub use measure::{Paired, fma_peak, paired};

//! What the benches and the command `rotile-bench` share: model shapes, the lanes that are compared, timing, the peaks
//! that they are held against, cache counts, the report. No kernel lives here.

pub mod args;
mod buffer;
pub mod cachegrind;
mod cases;
pub mod commands;
pub mod counters;
mod lanes;
pub mod machine;
pub mod measure;
pub mod model;
pub mod peak;
mod plain;
pub mod profiles;
pub mod report;
pub mod results;
mod svg;

pub use cases::{Case, DECODE, PREFILL, ROTARY, Shape, Step, Way};
pub use lanes::{Lane, pinned};

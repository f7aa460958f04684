//! What the tests, benches and examples of Rotile share: conformance vectors, a plain f64 attention to compare with, a
//! comparator whose own faults are tested, buffers between guard pages, seeded data, trials that run one problem through
//! the API in many ways, and the battery that every tier has to pass. Not published.

pub mod battery;
pub mod compare;
pub mod conform;
pub mod data;
pub mod draw;
pub mod guard;
pub mod reference;
pub mod tiers;
pub mod trial;
pub mod vectors;

//! `peers`: the same calls in other runtimes.

use super::Context;
use crate::results::Results;

/// Runs the command.
///
/// # Errors
///
/// Not written yet.
pub fn peers(_context: &mut Context<'_>) -> Result<Results, String> {
    Err("not written yet".into())
}

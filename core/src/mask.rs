//! Which keys a query sees: the one place that knows. Everything is by key index, never by slot or position.

use crate::spec::Mask;
use core::ops::Range;

impl Mask {
    /// Slots (`0..kv_len`, the first holding key index `kv_start`) visible to the query of key index `index`.
    ///
    /// For queries in order, starts and ends never fall: the keys that a run of queries sees lie between the first
    /// query's start and the last query's end.
    pub(crate) fn visible(&self, index: i64, kv_start: i64, kv_len: usize) -> Range<usize> {
        let end = if self.causal {
            let keys = index.saturating_sub(kv_start).saturating_add(1);
            usize::try_from(keys).unwrap_or(0).min(kv_len)
        } else {
            kv_len
        };
        0..end
    }
}

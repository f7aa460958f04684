//! Which keys a query sees: the one place that knows. Everything is by key index, never by slot or position.

use crate::spec::{Mask, Window};
use core::ops::Range;

impl Mask {
    /// Slots (`0..kv_len`, the first holding key index `kv_start`) visible to the query of key index `index`. Of a causal
    /// sequence, the first `prefix_len` keys (by index) are visible to every query that its window lets see them.
    ///
    /// For queries in order, starts and ends never fall: the keys that a run of queries sees lie between the first
    /// query's start and the last query's end.
    #[inline]
    pub(crate) fn visible(&self, index: i64, kv_start: i64, kv_len: usize, prefix_len: usize) -> Range<usize> {
        // The slot of a key, as near as there is one.
        let slot = |key: i64| usize::try_from(key.saturating_sub(kv_start)).unwrap_or(0).min(kv_len);
        let mut end = kv_len;
        if self.causal {
            end = slot(index.saturating_add(1));
            if prefix_len > 0 {
                end = end.max(slot(prefix_len as i64));
            }
        }
        let Some(Window { left, right }) = self.window else { return 0..end };
        if let Some(right) = right {
            end = end.min(slot(index.saturating_add_unsigned(right).saturating_add(1)));
        }
        let start = left.map_or(0, |left| slot(index.saturating_sub_unsigned(left)));
        start..end.max(start)
    }
}

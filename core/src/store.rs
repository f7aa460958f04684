//! The drivers of `append` and `rotate`: rows on their way from one tensor to another, rotated or not.

use crate::angles::AngleRows;
use crate::arena::Arena;
use crate::call::{Call, Sequence};
use crate::kernel::Rows;
use crate::plan::STORE_TOKENS;
use crate::rotary::Positions;
use crate::tensor::{At, RawTensor};
use core::ops::Range;

impl Call<'_> {
    /// Appends up to [`STORE_TOKENS`] new keys and values of one head.
    ///
    /// # Safety
    ///
    /// As [`Call::run_task`].
    pub(crate) unsafe fn store_task(&self, sequence: usize, task: usize, workspace: &mut [u8]) {
        let s = &self.sequences[sequence];
        let per_head = s.new_len.div_ceil(STORE_TOKENS);
        let first = task % per_head * STORE_TOKENS;
        // SAFETY: the caller's duty; these tokens of this head are this task's own.
        unsafe { self.store_rows(s, task / per_head, first..s.new_len.min(first + STORE_TOKENS), workspace) };
    }

    /// Appends the new keys and values `tokens` of one head.
    ///
    /// # Safety
    ///
    /// Nothing else touches those cache rows meanwhile.
    pub(crate) unsafe fn store_rows(&self, s: &Sequence<'_>, head: usize, tokens: Range<usize>, workspace: &mut [u8]) {
        let checked = |t: Option<RawTensor>| t.expect("checked by prepare");
        let (k, v) = (checked(self.views.k), checked(self.views.v));
        let (k_cache, v_cache) = (checked(self.views.k_cache), checked(self.views.v_cache));
        let to = At { token: s.cache.token + s.kv_len - s.new_len, ..s.cache };
        let positions = self.plan.rotates_on_store().then_some((s.k_positions, self.plan.new_index(s)));
        // SAFETY: `prepare` checked these tokens and heads of all four views; exclusion is the caller's.
        unsafe {
            self.move_rows(s, positions, (k, s.kv), (k_cache, to), head, tokens.clone(), workspace);
            self.move_rows(s, None, (v, s.kv), (v_cache, to), head, tokens, workspace);
        }
    }

    /// Rotates up to [`STORE_TOKENS`] tokens of one head.
    ///
    /// # Safety
    ///
    /// As [`Call::run_task`].
    pub(crate) unsafe fn rotate_task(&self, sequence: usize, task: usize, workspace: &mut [u8]) {
        let s = &self.sequences[sequence];
        let per_head = s.q_len.div_ceil(STORE_TOKENS);
        let first = task % per_head * STORE_TOKENS;
        let tokens = first..s.q_len.min(first + STORE_TOKENS);
        let (x, out) = (self.views.q.expect("checked by prepare"), self.views.out.expect("checked by prepare"));
        let positions = Some((s.q_positions, s.q_start));
        // SAFETY: `prepare` checked the tokens and heads of both views; these rows are this task's own.
        unsafe { self.move_rows(s, positions, (x, s.q), (out, s.q), task / per_head, tokens, workspace) };
    }

    /// Moves rows `tokens` of one head, one at a time (source and destination may be the same row), rotated if
    /// `positions` says by what.
    ///
    /// # Safety
    ///
    /// - `prepare` checked those tokens and heads of both views, and `to` is a view to write.
    /// - Nothing else touches those rows of `to` meanwhile, or writes those of `from`.
    #[allow(clippy::too_many_arguments)]
    unsafe fn move_rows(
        &self,
        s: &Sequence<'_>,
        positions: Option<(Positions<'_>, i64)>,
        (from, from_at): (RawTensor, At),
        (to, to_at): (RawTensor, At),
        head: usize,
        tokens: Range<usize>,
        workspace: &mut [u8],
    ) {
        let plan = &self.plan;
        let kernels = plan.kernels();
        let mut arena = Arena::new(workspace);
        let row = arena.take(from.shape.dim);
        let angle_floats = arena.take(plan.angle_floats(1));
        let mut angles = match (plan.turn, s.rotary, positions) {
            (Some(turn), Some(rotary), Some(tokens)) => {
                Some(AngleRows::new(kernels, turn, rotary, tokens, plan.padded_pairs(), angle_floats))
            }
            _ => None,
        };
        for token in tokens {
            if let Some(angles) = &mut angles {
                angles.fill(token..token + 1);
            }
            let rotation = angles.as_ref().and_then(AngleRows::rotation);
            // SAFETY: the caller's duties. The source is done with before the destination, which may be the same, is
            // written; the plan holds the tier of these kernels, so the CPU can run them.
            unsafe {
                let data = from.slice(from.row(from_at.batch, from_at.token + token, head), from.shape.dim);
                (kernels.load)(Rows { data, at: &[0], dim: from.shape.dim }, rotation, 1.0, row, from.shape.dim);
                let dst = to.slice_mut(to.row(to_at.batch, to_at.token + token, head), to.shape.dim);
                (kernels.store)(row, 1.0, dst);
            }
        }
    }
}

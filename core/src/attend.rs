//! The attention drivers: which keys meet which queries, in which order, through the functions of a tier. One driver
//! for many query rows (pack, score tile, softmax, weighted sum), one for few (stream keys and values in place).
//! No arithmetic on elements happens here, and no instruction set is named.

use crate::angles::AngleRows;
use crate::arena::Arena;
use crate::call::{Call, Sequence};
use crate::kernel::{
    Adjust, DecodeScores, DecodeSum, Kernels, MAX_RUN, MAX_TILE, RowState, Rows, WeightedSum, run_end,
};
use crate::softmax::{self, exact_exp2};
use crate::tensor::RawTensor;
use crate::{Slice, SliceMut};
use core::ops::Range;

/// Keys or values of one head of one sequence.
#[derive(Clone, Copy)]
struct Stored<'a> {
    data: Slice<'a>,
    token_stride: usize,
    dim: usize,
}

impl<'a> Stored<'a> {
    /// Where the row of a slot starts.
    fn offset(&self, slot: usize) -> usize {
        slot * self.token_stride
    }

    /// Writes the offsets of `slots` to `at` and makes rows of them.
    fn rows<'r>(&self, slots: Range<usize>, at: &'r mut [usize; MAX_TILE]) -> Rows<'r>
    where
        'a: 'r,
    {
        let count = slots.len();
        for (at, slot) in at.iter_mut().zip(slots) {
            *at = self.offset(slot);
        }
        Rows { data: self.data, at: &at[..count], dim: self.dim }
    }
}

/// The (token, query head of the group) of flattened rows: one division for all of them.
#[derive(Clone)]
pub(crate) struct FlatRows {
    token: usize,
    member: usize,
    group: usize,
    left: usize,
}

impl FlatRows {
    pub(crate) fn new(rows: Range<usize>, group: usize) -> Self {
        FlatRows { token: rows.start / group, member: rows.start % group, group, left: rows.len() }
    }
}

impl Iterator for FlatRows {
    type Item = (usize, usize);

    #[inline]
    fn next(&mut self) -> Option<(usize, usize)> {
        self.left = self.left.checked_sub(1)?;
        let now = (self.token, self.member);
        self.member += 1;
        if self.member == self.group {
            (self.token, self.member) = (self.token + 1, 0);
        }
        Some(now)
    }
}

/// What a task knows of its (sequence, key head).
struct Head<'a> {
    call: &'a Call<'a>,
    s: &'a Sequence<'a>,
    head: usize,
    group: usize,
    k: Stored<'a>,
    v: Stored<'a>,
}

impl<'a> Call<'a> {
    /// # Safety
    ///
    /// As [`Call::run_task`].
    pub(crate) unsafe fn attend_task(&self, sequence: usize, task: usize, workspace: &mut [u8]) {
        let s = &self.sequences[sequence];
        let per_head = self.blocks(s);
        let (head, part) = self.head_and_part(per_head, task);
        if self.stores_in_attend && s.new_len > 0 {
            // SAFETY: no other task touches this head's span of the cache (`Plan::can_store_in_attend`).
            unsafe { self.store_rows(s, head, 0..s.new_len, workspace) };
        }
        let group = self.plan.spec.group();
        let cached = self.views.k_cache.is_some();
        let (k, v, at) =
            if cached { (self.views.k_cache, self.views.v_cache, s.cache) } else { (self.views.k, self.views.v, s.kv) };
        let stored = |t: Option<RawTensor>| {
            let t = t.expect("checked by prepare");
            let len = t.head_extent(s.kv_len);
            let start = if len == 0 { 0 } else { t.row(at.batch, at.token, head) };
            // SAFETY: `prepare` checked the tokens and heads against the view. Nothing writes this span now: K and V are
            // borrowed, and a cache is written in an earlier phase, or by this task alone, which is done with it.
            let data = unsafe { t.slice(start, len) };
            Stored { data, token_stride: t.strides.token, dim: t.shape.dim }
        };
        let this = Head { call: self, s, head, group, k: stored(k), v: stored(v) };
        // SAFETY: passed on; `part` is this task's own.
        unsafe {
            if self.plan.is_few(s.q_len) {
                this.few(sequence, part, per_head, workspace)
            } else {
                this.tile(part, workspace)
            }
        }
    }

    /// Merges the partial results of one (sequence, key head).
    ///
    /// # Safety
    ///
    /// As [`Call::run_task`].
    pub(crate) unsafe fn merge_task(&self, sequence: usize, head: usize) {
        let s = &self.sequences[sequence];
        let (group, dv) = (self.plan.spec.group(), self.plan.spec.head_dim_v);
        let splits = self.blocks(s);
        let rows = s.q_len * group;
        // The first partial becomes the result. SAFETY: the partials of this (sequence, head) are this task's alone.
        let partial = |split| unsafe { self.partial(sequence, head * splits + split) };
        let (acc, state) = partial(0).split_at_mut(rows * dv);
        for split in 1..splits {
            let (other_acc, other_state) = partial(split).split_at_mut(rows * dv);
            for r in 0..rows {
                let (a, b) = (
                    RowState { max: state[2 * r], sum: state[2 * r + 1] },
                    RowState { max: other_state[2 * r], sum: other_state[2 * r + 1] },
                );
                let max = if b.max > a.max { b.max } else { a.max };
                // A side that saw nothing but -inf has maximum -inf and sum 0 (or NaN, which must survive).
                let factor =
                    |side: RowState| if side.max == f32::NEG_INFINITY { 1.0 } else { exact_exp2(side.max - max) };
                let (fa, fb) = (factor(a), factor(b));
                state[2 * r] = max;
                state[2 * r + 1] = a.sum * fa + b.sum * fb;
                let (row, other) = (&mut acc[r * dv..][..dv], &other_acc[r * dv..][..dv]);
                for (x, &y) in row.iter_mut().zip(other) {
                    *x = *x * fa + y * fb;
                }
            }
        }
        for (r, (token, member)) in FlatRows::new(0..rows, group).enumerate() {
            let row_state = RowState { max: state[2 * r], sum: state[2 * r + 1] };
            // SAFETY: this task writes the rows of its own (sequence, head).
            unsafe { self.finish_row(s, token, head * group + member, &mut acc[r * dv..][..dv], row_state) };
        }
    }

    /// Writes the row of a token and query head: the accumulated values over the sum, and lse.
    ///
    /// # Safety
    ///
    /// Nothing else touches that row of the output and of lse meanwhile.
    unsafe fn finish_row(&self, s: &Sequence<'_>, token: usize, head: usize, acc: &mut [f32], state: RowState) {
        let token = s.q.token + token;
        let out = self.views.out.expect("checked by prepare");
        // SAFETY: `prepare` checked the row against the view; exclusion is the caller's.
        let dst = unsafe { out.slice_mut(out.row(s.q.batch, token, head), acc.len()) };
        if state.sum == 0.0 {
            acc.fill(0.0);
        }
        let (factor, row_lse) = match self.weights.sinks.filter(|_| self.plan.spec.sinks) {
            Some(sinks) => softmax::with_sink(state, sinks[head]),
            None => (if state.sum == 0.0 { 1.0 } else { 1.0 / state.sum }, softmax::lse(state)),
        };
        // SAFETY: the plan holds the tier of these kernels, so the CPU can run them.
        unsafe { (self.plan.kernels().store)(acc, factor, dst) };
        if let Some(lse) = self.views.lse {
            // SAFETY: as for the output.
            if let SliceMut::F32(dst) = unsafe { lse.slice_mut(lse.row(s.q.batch, token, head), 1) } {
                dst[0] = row_lse;
            }
        }
    }
}

/// Keys whose scores are computed between two looks ahead: some thousand cycles.
const KEYS_OF_A_TURN: usize = 32;
/// Tiles of a superblock at most; see [`crate::plan::Tile`].
const MAX_KEY_TILES: usize = 4;

impl<'a> Head<'a> {
    fn visible(&self, row: usize) -> Range<usize> {
        self.call.plan.visible(self.s, row / self.group)
    }

    /// Slots that any of these flattened rows sees.
    fn block_visible(&self, rows: &Range<usize>) -> Range<usize> {
        self.call.plan.block_visible(self.s, rows.start / self.group..(rows.end - 1) / self.group + 1)
    }

    fn key_angles<'w>(&self, floats: &'w mut [f32]) -> Option<AngleRows<'w>>
    where
        'a: 'w,
    {
        let plan = &self.call.plan;
        let (turn, rotary) = (plan.turn?, self.s.rotary.filter(|_| plan.rotates_on_read())?);
        let tokens = (self.s.k_positions, self.s.kv_start);
        Some(AngleRows::new(plan.kernels(), turn, rotary, tokens, plan.padded_pairs(), floats))
    }

    fn query_angles<'w>(&self, floats: &'w mut [f32]) -> Option<AngleRows<'w>>
    where
        'a: 'w,
    {
        let plan = &self.call.plan;
        let (turn, rotary) = (plan.turn?, self.s.rotary.filter(|_| plan.spec.rotate_q)?);
        let tokens = (self.s.q_positions, self.s.q_start);
        Some(AngleRows::new(plan.kernels(), turn, rotary, tokens, plan.padded_pairs(), floats))
    }

    /// Flattened query rows `rows` of this head, at most [`MAX_TILE`] of them.
    fn query_rows<'r>(&self, rows: Range<usize>, at: &'r mut [usize; MAX_TILE]) -> Rows<'r>
    where
        'a: 'r,
    {
        let q = self.call.views.q.expect("checked by prepare");
        let offset = |token, head| q.row(self.s.q.batch, self.s.q.token + token, self.head * self.group + head);
        let start = offset(0, 0);
        let len = (self.group - 1) * q.strides.head + q.head_extent(self.s.q_len);
        let count = rows.len();
        for (at, (token, head)) in at.iter_mut().zip(FlatRows::new(rows, self.group)) {
            *at = offset(token, head) - start;
        }
        // SAFETY: `prepare` checked the tokens and heads against the view, and Q is only read while the call lives.
        let data = unsafe { q.slice(start, len) };
        Rows { data, at: &at[..count], dim: q.shape.dim }
    }

    /// Writes flattened rows, whose accumulated values are `stride` apart.
    ///
    /// # Safety
    ///
    /// Nothing else touches those rows of the output and of lse meanwhile.
    unsafe fn finish(&self, rows: Range<usize>, acc: &mut [f32], stride: usize, max: &[f32], sum: &[f32]) {
        let dv = self.v.dim;
        for (r, (token, member)) in FlatRows::new(rows, self.group).enumerate() {
            let state = RowState { max: max[r], sum: sum[r] };
            let (head, acc) = (self.head * self.group + member, &mut acc[r * stride..][..dv]);
            // SAFETY: the caller's duty.
            unsafe { self.call.finish_row(self.s, token, head, acc, state) };
        }
    }

    /// Many rows: the keys and values of a superblock are rotated and packed once, then every strip of `mr` rows passes
    /// over them with its scores in L1.
    ///
    /// # Safety
    ///
    /// Nothing else touches the output rows of this block meanwhile.
    unsafe fn tile(&self, block: usize, workspace: &mut [u8]) {
        let plan = &self.call.plan;
        let (kernels, tile, d, padded_v) = (plan.kernels(), plan.tile, plan.spec.head_dim_qk, plan.padded_v());
        let mr = tile.mr;
        let rows = self.call.block(self.s, block);
        let strips = rows.len().div_ceil(mr);
        let strip_rows = |strip: usize| {
            let first = rows.start + strip * mr;
            first.min(rows.end)..rows.end.min(first + mr)
        };

        let seen = self.block_visible(&rows);
        let first_base = seen.start / tile.superblock * tile.superblock;
        // With a single superblock, strips need not be kept: all use the same memory, in L1.
        let single = seen.end <= first_base + tile.superblock;
        let kept_strips = if single { 1 } else { strips };
        let mut arena = Arena::new(workspace);
        let acc = arena.take(kept_strips * mr * padded_v);
        let max = arena.take(kept_strips * mr);
        let sum = arena.take(kept_strips * mr);
        let q_panel = arena.take(mr * d);
        let mut packed = Packed {
            k_panels: arena.take(tile.superblock * d),
            v_tiles: arena.take(tile.superblock * padded_v),
            finite: [true; MAX_KEY_TILES],
        };
        let mut scratch = StripScratch {
            scores: arena.take(mr * tile.key_tile),
            factors: arena.take(mr),
            bias: arena.take(plan.bias_floats(tile.key_tile)),
            seen: [const { 0..0 }; MAX_TILE],
        };
        let mut q_angles = self.query_angles(arena.take(plan.angle_floats(mr)));
        let mut k_angles = self.key_angles(arena.take(plan.angle_floats(tile.nr)));

        let mut base = first_base;
        self.prefetch_keys(seen.start..seen.end.min(base + tile.superblock));
        // Once more than there are superblocks if no row sees a key: each row is written.
        loop {
            let keys = base.max(seen.start)..(base + tile.superblock).min(seen.end);
            self.pack(&mut packed, &rows, base, keys.clone(), k_angles.as_mut());
            let next_keys = keys.end..seen.end.min(keys.end + tile.superblock);
            for strip in 0..strips {
                let rows = strip_rows(strip);
                let strip_seen = self.block_visible(&rows);
                let now = strip_seen.start.max(keys.start)..strip_seen.end.min(keys.end);
                let (first, last) = (strip_seen.start >= base, strip_seen.end <= keys.end);
                let kept = if single { 0 } else { strip * mr };
                let (max, sum) = (&mut max[kept..][..mr], &mut sum[kept..][..mr]);
                let acc = &mut acc[kept * padded_v..][..mr * padded_v];
                if first || base == first_base {
                    max.fill(RowState::EMPTY.max);
                    sum.fill(RowState::EMPTY.sum);
                }
                if !now.is_empty() {
                    let mut at = [0; MAX_TILE];
                    if let Some(angles) = &mut q_angles {
                        angles.fill_grouped(rows.clone(), self.group);
                    }
                    let rotation = q_angles.as_ref().and_then(AngleRows::rotation);
                    let q_rows = self.query_rows(rows.clone(), &mut at);
                    // SAFETY: the plan holds the tier of these kernels, so the CPU can run them.
                    unsafe { (kernels.pack_q)(q_rows, rotation, plan.q_factor, q_panel) };
                    // What comes from far off is asked for while this strip is at work.
                    let share = |i: usize| next_keys.start + next_keys.len() * i / strips;
                    let flat = |rows| FlatRows::new(rows, self.group);
                    let mut ahead = Ahead {
                        keys: share(strip)..share(strip + 1),
                        queries: flat(strip_rows(if strip + 1 < strips { strip + 1 } else { 0 })),
                        output: flat(if last { rows.clone() } else { 0..0 }),
                        each: (2 * mr + next_keys.len().div_ceil(strips)).div_ceil(mr + now.len() / tile.nr),
                    };
                    let acc = (&mut *acc, first);
                    self.strip(&packed, base, now, rows.clone(), q_panel, (max, sum), acc, &mut ahead, &mut scratch);
                }
                if strip_seen.is_empty() && base == first_base {
                    acc.fill(0.0);
                } else if !last || strip_seen.end <= base {
                    continue;
                }
                // Later superblocks hold nothing for this strip: write it while it is in L1.
                // SAFETY: the caller's duty.
                unsafe { self.finish(rows, acc, padded_v, max, sum) };
            }
            base += tile.superblock;
            if base >= seen.end {
                break;
            }
        }
    }

    /// Asks for keys and values that will be packed soon.
    fn prefetch_keys(&self, slots: Range<usize>) {
        for stored in [&self.k, &self.v] {
            for slot in slots.clone() {
                let at = stored.offset(slot);
                (self.call.plan.kernels().prefetch)(stored.data.address(at), stored.dim * stored.data.dtype().size());
            }
        }
    }

    /// Asks for some of what is ahead: little at a time, because a core waits when too many lines are under way.
    fn prefetch_some(&self, ahead: &mut Ahead) {
        for _ in 0..ahead.each {
            if let Some(slot) = ahead.keys.next() {
                self.prefetch_keys(slot..slot + 1);
            } else if let Some(row) = ahead.output.next() {
                self.prefetch_row(self.call.views.out, row);
            } else if let Some(row) = ahead.queries.next() {
                self.prefetch_row(self.call.views.q, row);
            }
        }
    }

    /// Asks for a row of the queries or of the output.
    fn prefetch_row(&self, tensor: Option<RawTensor>, (token, member): (usize, usize)) {
        let t = tensor.expect("checked by prepare");
        let at = t.row(self.s.q.batch, self.s.q.token + token, self.head * self.group + member);
        (self.call.plan.kernels().prefetch)(t.address(at), t.shape.dim * t.dtype.size());
    }

    /// Rotates and packs the keys and values in slots `keys` of the superblock at `base`, in whole panels.
    /// Keys that a mask hides from all of the block's `rows` are not read: zeros stand for them.
    fn pack(
        &self,
        packed: &mut Packed<'_>,
        rows: &Range<usize>,
        base: usize,
        keys: Range<usize>,
        mut angles: Option<&mut AngleRows<'_>>,
    ) {
        let plan = &self.call.plan;
        let (kernels, tile, d, padded_v) = (plan.kernels(), plan.tile, plan.spec.head_dim_qk, plan.padded_v());
        let nr = tile.nr;
        let mut at = [0; MAX_TILE];
        packed.finite = [true; MAX_KEY_TILES];
        for panel in (keys.start - base) / nr..(keys.end - base).div_ceil(nr) {
            let slots = base + panel * nr..(base + (panel + 1) * nr).min(keys.end);
            let seen = self.sees_any(rows.clone(), &slots);
            if let Some(angles) = angles.as_mut().filter(|_| seen) {
                angles.fill(slots.clone());
            }
            let rotation = angles.as_ref().and_then(|angles| angles.rotation());
            let slots = if seen { slots } else { slots.start..slots.start };
            let k_panel = &mut packed.k_panels[panel * nr * d..][..nr * d];
            let k_rows = self.k.rows(slots.clone(), &mut at);
            // SAFETY: the plan holds the tier of these kernels, so the CPU can run them.
            unsafe { (kernels.pack_k)(k_rows, rotation, k_panel) };
            let (t, first) = (panel * nr / tile.key_tile, panel * nr % tile.key_tile);
            let v_tile = &mut packed.v_tiles[t * tile.key_tile * padded_v..][..tile.key_tile * padded_v];
            if !seen {
                let nv = kernels.nv;
                v_tile.chunks_exact_mut(tile.key_tile * nv).for_each(|panel| panel[first * nv..][..nr * nv].fill(0.0));
                continue;
            }
            let v_rows = self.v.rows(slots, &mut at);
            // SAFETY: as above.
            packed.finite[t] &= unsafe { (kernels.pack_v)(v_rows, first, tile.key_tile, v_tile) };
        }
    }

    /// One strip of query rows against the slots `keys` of the packed superblock at `base`, key tile by key tile.
    #[allow(clippy::too_many_arguments)]
    fn strip(
        &self,
        packed: &Packed<'_>,
        base: usize,
        keys: Range<usize>,
        rows: Range<usize>,
        q_panel: &[f32],
        (max, sum): (&mut [f32], &mut [f32]),
        (acc, mut fresh): (&mut [f32], bool),
        ahead: &mut Ahead,
        scratch: &mut StripScratch<'_>,
    ) {
        let plan = &self.call.plan;
        let (kernels, tile, d, padded_v) = (plan.kernels(), plan.tile, plan.spec.head_dim_qk, plan.padded_v());
        let (mr, nr, key_tile) = (tile.mr, tile.nr, tile.key_tile);
        let turn = (KEYS_OF_A_TURN / nr).max(1) * nr;
        let StripScratch { scores, factors, bias, seen } = scratch;
        let (count, first_row) = (rows.len(), rows.start);
        let adjusts = plan.adjusts();
        let softmax_scale = if adjusts { 1.0 } else { plan.softmax_scale };
        for (seen, (token, _)) in seen.iter_mut().zip(FlatRows::new(rows.clone(), self.group)) {
            *seen = plan.visible(self.s, token);
        }
        for t in (keys.start - base) / key_tile..(keys.end - base).div_ceil(key_tile) {
            let tile_base = base + t * key_tile;
            // Slots relative to the tile, and whole panels around them.
            let local = |slots: &Range<usize>| {
                slots.start.clamp(tile_base, tile_base + key_tile) - tile_base
                    ..slots.end.clamp(tile_base, tile_base + key_tile) - tile_base
            };
            let now = local(&keys);
            if !self.sees_any(rows.clone(), &(tile_base + now.start..tile_base + now.end)) {
                continue;
            }
            let columns = now.start / nr * nr..now.end.next_multiple_of(nr);
            for from in columns.clone().step_by(turn) {
                self.prefetch_some(ahead);
                let k_panels = &packed.k_panels[(t * key_tile + from) * d..][..turn.min(columns.end - from) * d];
                // SAFETY: the plan holds the tier of these kernels, so the CPU can run them.
                unsafe { (kernels.scores)(q_panel, k_panels, d, &mut scores[from..], key_tile) };
            }

            let row_seen = |r: usize| {
                let seen = if r < count { local(&seen[r]) } else { 0..0 };
                seen.start.max(now.start)..seen.end.min(now.end)
            };
            let mut same = true;
            for r in 0..mr {
                self.prefetch_some(ahead);
                let s = &mut scores[r * key_tile..][columns.clone()];
                let seen = row_seen(r);
                same &= seen == now || r >= count;
                if seen.is_empty() {
                    s.fill(0.0);
                    factors[r] = 1.0;
                    continue;
                }
                let mut state = RowState { max: max[r], sum: sum[r] };
                let (lo, hi) = (seen.start - columns.start, seen.end - columns.start);
                if adjusts {
                    let slots = tile_base + seen.start..tile_base + seen.end;
                    same &= !self.adjust(first_row + r, slots, &mut s[lo..hi], bias);
                }
                // SAFETY: as above.
                factors[r] = unsafe { (kernels.softmax)(s, softmax_scale, lo, hi, &mut state) };
                (max[r], sum[r]) = (state.max, state.sum);
            }

            let v_tile = &packed.v_tiles[t * key_tile * padded_v..][..key_tile * padded_v];
            if same || packed.finite[t] {
                let args = WeightedSum {
                    p: &scores[..],
                    p_stride: key_tile,
                    from: now.start,
                    to: now.end,
                    v: v_tile,
                    tile_keys: key_tile,
                    factors,
                    fresh,
                    acc,
                    acc_stride: padded_v,
                };
                // SAFETY: as above.
                unsafe { (kernels.weighted_sum)(args) };
                fresh = false;
                continue;
            }
            if fresh {
                acc.fill(0.0);
                fresh = false;
            }
            // Some value here is infinite or NaN, and some row must not meet it, not even with weight 0.
            for r in 0..count {
                let (seen, acc) = (row_seen(r), &mut acc[r * padded_v..][..self.v.dim]);
                self.sum_apart(first_row + r, tile_base, seen, &scores[r * key_tile..], factors[r], bias, acc);
            }
        }
        // All of it was hidden, but there may be more.
        if fresh {
            acc.fill(0.0);
        }
    }

    /// The weighted sum of one row over those keys of a tile that it sees, and no others, with the bits that they would give
    /// among others of weight 0. `seen` is relative to the tile at `base`.
    #[allow(clippy::too_many_arguments)]
    fn sum_apart(
        &self,
        row: usize,
        base: usize,
        seen: Range<usize>,
        weights: &[f32],
        mut factor: f32,
        bias: &mut [f32],
        acc: &mut [f32],
    ) {
        let kernels = self.call.plan.kernels();
        let hides = self.bias(row, base + seen.start..base + seen.end.max(seen.start), bias);
        let (mut at, mut p) = ([0; MAX_RUN], [0.0; MAX_RUN]);
        let mut from = seen.start;
        while from < seen.end {
            let to = run_end(from, seen.end, kernels.sum_run);
            let mut count = 0;
            for key in (from..to).filter(|key| !hides || bias[key - seen.start] != f32::NEG_INFINITY) {
                (at[count], p[count]) = (self.v.offset(base + key), weights[key]);
                count += 1;
            }
            let v = Rows { data: self.v.data, at: &at[..count], dim: self.v.dim };
            let args = DecodeSum {
                p: &p[..count],
                p_stride: count,
                rows: 1,
                v,
                ahead: None,
                factors: &[factor],
                acc,
                acc_stride: self.v.dim,
            };
            // SAFETY: the plan holds the tier of these kernels, so the CPU can run them.
            unsafe { (kernels.decode_sum)(args) };
            (factor, from) = (1.0, to);
        }
    }

    /// False if a boolean mask hides all of these slots from all of these flattened rows.
    fn sees_any(&self, rows: Range<usize>, slots: &Range<usize>) -> bool {
        let Some(mask) = &self.s.mask else { return true };
        let sees = |(token, member)| mask.sees_any(self.query_head(member), token, slots.start, slots.len());
        if mask.head_stride == 0 && !rows.is_empty() {
            return (rows.start / self.group..(rows.end - 1) / self.group + 1).any(|token| sees((token, 0)));
        }
        FlatRows::new(rows, self.group).any(sees)
    }

    fn query_head(&self, member: usize) -> usize {
        self.head * self.group + member
    }

    /// Writes what is added to the scores of a flattened row for keys `slots`: the bias, and -inf where the boolean mask hides
    /// a key. False, and nothing written, if the plan has neither.
    fn bias(&self, row: usize, slots: Range<usize>, out: &mut [f32]) -> bool {
        let plan = &self.call.plan;
        if !plan.hides() || slots.is_empty() {
            return false;
        }
        let (token, head) = (row / self.group, self.query_head(row % self.group));
        let out = &mut out[..slots.len()];
        match &self.s.bias {
            None => out.fill(0.0),
            Some(bias) => {
                let rows = Rows { data: bias.data, at: &[bias.row(head, token) + slots.start], dim: slots.len() };
                // SAFETY: the plan holds the tier of these kernels, so the CPU can run them.
                unsafe { (plan.kernels().load)(rows, None, 1.0, out, slots.len()) };
            }
        }
        if let Some(mask) = &self.s.mask {
            mask.hidden(head, token, slots.start, slots.len(), |i| out[i] = f32::NEG_INFINITY);
        }
        true
    }

    /// Turns the dot products of a flattened row with keys `slots` into scores. True if one of them is hidden.
    fn adjust(&self, row: usize, slots: Range<usize>, s: &mut [f32], bias: &mut [f32]) -> bool {
        let plan = &self.call.plan;
        let (token, head) = (row / self.group, self.query_head(row % self.group));
        let distance = self.s.kv_start + slots.start as i64 - self.s.q_start - token as i64;
        let count = slots.len();
        let biased = self.bias(row, slots, bias);
        let args = Adjust {
            s,
            scale: plan.softmax_scale,
            cap: plan.spec.softcap.map(|cap| (cap * softmax::LOG2_E) as f32),
            alibi: self.call.weights.alibi.filter(|_| plan.spec.alibi).map(|slopes| (slopes[head], distance)),
            bias: biased.then(|| &bias[..count]),
        };
        // SAFETY: the plan holds the tier of these kernels, so the CPU can run them.
        unsafe { (plan.kernels().adjust)(args) }
    }

    /// Few rows: keys and values are streamed once, in place, for the whole group.
    ///
    /// # Safety
    ///
    /// Nothing else touches the output rows of this (sequence, head) meanwhile, or, if it is split, partial `split`.
    unsafe fn few(&self, sequence: usize, split: usize, splits: usize, workspace: &mut [u8]) {
        let plan = &self.call.plan;
        let (kernels, tile) = (plan.kernels(), plan.tile);
        let (d, dv) = (plan.spec.head_dim_qk, plan.spec.head_dim_v);
        let (key_tile, chunk) = (tile.few_key_tile, kernels.decode_rows);
        let rows = self.s.q_len * self.group;

        let mut arena = Arena::new(workspace);
        let q = arena.take(rows * d);
        let own_acc = arena.take(rows * dv);
        let max = arena.take(rows);
        let sum = arena.take(rows);
        let factors = arena.take(rows);
        let scores = arena.take(rows * key_tile);
        let bias = arena.take(plan.bias_floats(key_tile));
        let angle_floats = arena.take(plan.angle_floats(key_tile));
        let back_floats = arena.take(plan.angle_floats(1));
        let turned = arena.take(if plan.rotates_on_read() { rows * d } else { 0 });
        max.fill(RowState::EMPTY.max);
        sum.fill(RowState::EMPTY.sum);

        let mut at = [0; MAX_TILE];
        let mut angles = self.query_angles(angle_floats);
        for first in (0..rows).step_by(chunk) {
            let now = first..rows.min(first + chunk);
            if let Some(angles) = &mut angles {
                angles.fill_grouped(now.clone(), self.group);
            }
            let rotation = angles.as_ref().and_then(AngleRows::rotation);
            let q_rows = self.query_rows(now.clone(), &mut at);
            // SAFETY: the plan holds the tier of these kernels, so the CPU can run them.
            unsafe { (kernels.load)(q_rows, rotation, plan.q_factor, &mut q[now.start * d..now.end * d], d) };
        }

        let acc = if splits > 1 {
            let head_task = self.head * splits + split;
            // SAFETY: the caller's duty.
            let partial = unsafe { self.call.partial(sequence, head_task) };
            &mut partial[..rows * dv]
        } else {
            own_acc
        };
        acc.fill(0.0);

        let seen = plan.split(self.s, split);
        let adjusts = plan.adjusts();
        let softmax_scale = if adjusts { 1.0 } else { plan.softmax_scale };
        let end = seen.end;
        let mut base = seen.start / key_tile * key_tile;
        let mut angles = self.key_angles(angle_floats);
        // A key at position p + j is turned by j, and the queries are turned back by p, once per tile: that is 32 rows of
        // angles for all keys, where a row for each took as long as its scores.
        let mut back = self.key_angles(back_floats).filter(|_| end > base).filter(AngleRows::is_consecutive);
        back = back.map(AngleRows::unscaled);
        if let (Some(angles), Some(_)) = (&mut angles, &back) {
            angles.fill_differences(key_tile.min(end - base));
        }
        let (mut k_at, mut v_at) = ([0; MAX_TILE], [0; MAX_TILE]);
        while base < end {
            let slots = base.max(seen.start)..end.min(base + key_tile);
            let next = slots.end..end.min(slots.end + key_tile);
            if !self.sees_any(0..rows, &slots) {
                base += key_tile;
                continue;
            }
            if let Some(back) = &mut back {
                back.fill_back(slots.start, chunk);
                for first in (0..rows).step_by(chunk) {
                    let now = first..rows.min(first + chunk);
                    for (at, r) in k_at.iter_mut().zip(now.clone()) {
                        *at = r * d;
                    }
                    let q_rows = Rows { data: Slice::F32(q), at: &k_at[..now.len()], dim: d };
                    // SAFETY: the plan holds the tier of these kernels, so the CPU can run them.
                    unsafe { (kernels.load)(q_rows, back.rotation(), 1.0, &mut turned[now.start * d..now.end * d], d) };
                }
            } else if let Some(angles) = &mut angles {
                angles.fill(slots.clone());
            }
            let q = if back.is_some() { &turned[..] } else { &q[..] };
            let v_rows = self.v.rows(slots.clone(), &mut v_at);
            let k_rows = self.k.rows(slots.clone(), &mut k_at);
            let stride = key_tile;
            for first in (0..rows).step_by(chunk) {
                let args = DecodeScores {
                    q: &q[first * d..],
                    q_stride: d,
                    rows: chunk.min(rows - first),
                    k: k_rows,
                    rotation: angles.as_ref().and_then(AngleRows::rotation),
                    ahead: (first == 0).then_some(v_rows),
                    s: &mut scores[first * stride..],
                    s_stride: stride,
                };
                // SAFETY: the plan holds the tier of these kernels, so the CPU can run them.
                unsafe { (kernels.decode_scores)(args) };
            }
            let local = |r: usize| {
                let seen = self.visible(r);
                let (lo, hi) = (seen.start.clamp(slots.start, slots.end), seen.end.min(slots.end));
                lo - slots.start..hi.max(lo) - slots.start
            };
            let mut hidden = false;
            for r in 0..rows {
                let seen = local(r);
                factors[r] = 1.0;
                if !seen.is_empty() {
                    let s = &mut scores[r * stride..][..slots.len().next_multiple_of(8)];
                    let mut state = RowState { max: max[r], sum: sum[r] };
                    if adjusts {
                        let slots = slots.start + seen.start..slots.start + seen.end;
                        hidden |= self.adjust(r, slots, &mut s[seen.clone()], bias);
                    }
                    // SAFETY: as above.
                    factors[r] = unsafe { (kernels.softmax)(s, softmax_scale, seen.start, seen.end, &mut state) };
                    (max[r], sum[r]) = (state.max, state.sum);
                }
            }
            let next_k = self.k.rows(next, &mut k_at);
            // A hidden value may be NaN: then each row meets its own keys.
            if hidden && !v_rows.is_finite() {
                for r in 0..rows {
                    let acc = &mut acc[r * dv..][..dv];
                    self.sum_apart(r, slots.start, local(r), &scores[r * stride..], factors[r], bias, acc);
                }
                base += key_tile;
                continue;
            }
            for first in (0..rows).step_by(chunk) {
                let now = first..rows.min(first + chunk);
                let ahead = (first == 0).then_some(next_k);
                sum_values(kernels, now, local, v_rows, ahead, (scores, stride), factors, (acc, dv));
            }
            base += key_tile;
        }

        if splits > 1 {
            let head_task = self.head * splits + split;
            // SAFETY: the caller's duty; the borrow above has ended.
            let partial = unsafe { self.call.partial(sequence, head_task) };
            for (r, state) in partial[rows * dv..].chunks_exact_mut(2).enumerate() {
                state.copy_from_slice(&[max[r], sum[r]]);
            }
        } else {
            // SAFETY: the caller's duty.
            unsafe { self.finish(0..rows, acc, dv, max, sum) };
        }
    }
}

/// The weighted sum of a key tile for a chunk of rows in place. Where only some of the rows see a key, each row meets its
/// own keys by itself: a masked value may be NaN.
#[allow(clippy::too_many_arguments)]
fn sum_values(
    kernels: &Kernels,
    rows: Range<usize>,
    seen: impl Fn(usize) -> Range<usize>,
    v: Rows<'_>,
    ahead: Option<Rows<'_>>,
    (p, p_stride): (&[f32], usize),
    factors: &[f32],
    (acc, acc_stride): (&mut [f32], usize),
) {
    let mut run = |rows: Range<usize>, keys: Range<usize>| {
        let args = DecodeSum {
            p: &p[rows.start * p_stride + keys.start..],
            p_stride,
            rows: rows.len(),
            v: Rows { at: &v.at[keys], ..v },
            ahead,
            factors: &factors[rows.clone()],
            acc: &mut acc[rows.start * acc_stride..],
            acc_stride,
        };
        // SAFETY: the plan holds the tier of these kernels, so the CPU can run them.
        unsafe { (kernels.decode_sum)(args) };
    };
    // Visible ranges neither start nor end earlier in later rows.
    let first = seen(rows.start);
    if first == seen(rows.end - 1) {
        run(rows, first);
    } else {
        rows.for_each(|r| run(r..r + 1, seen(r)));
    }
}

/// The packed keys and values of a superblock.
struct Packed<'w> {
    k_panels: &'w mut [f32],
    v_tiles: &'w mut [f32],
    /// Which key tiles hold finite values only.
    finite: [bool; MAX_KEY_TILES],
}

/// What will be read or written soon: slots of keys, rows of queries and of the output. `each` of them are asked for at a
/// time.
struct Ahead {
    keys: Range<usize>,
    queries: FlatRows,
    output: FlatRows,
    each: usize,
}

/// What a strip needs besides its own rows.
struct StripScratch<'w> {
    scores: &'w mut [f32],
    factors: &'w mut [f32],
    /// What is added to the scores of a row.
    bias: &'w mut [f32],
    /// Slots that each row sees.
    seen: [Range<usize>; MAX_TILE],
}

//! Preparing one step's batch: every length, stride, position and offset is checked here, before anything is read or
//! written; then the work is counted as tasks in phases. Running a task is infallible.

use crate::arena;
use crate::bias::{Bias, BoolMask, Weights};
use crate::kernel::FpControl;
use crate::plan::{LEAST_ROWS, Plan, STORE_TOKENS};
use crate::rotary::{Positions, Rotary};
use crate::spec::{Keys, Operation};
use crate::tensor::{At, RawTensor, Tensor, TensorMut};
use crate::{DType, Error, Place};
use core::marker::PhantomData;
use core::ops::Range;

/// The tensors of one call. The variant must match the plan's [`Operation`].
#[derive(Debug)]
#[non_exhaustive]
pub enum Operands<'a> {
    /// For [`Operation::Attend`].
    Attend {
        /// Queries: `heads_q` heads of `head_dim_qk`, un-rotated (unless `rotate_q` is off).
        q: Tensor<'a>,
        /// Keys: `heads_kv` heads of `head_dim_qk`.
        k: Tensor<'a>,
        /// Values: `heads_kv` heads of `head_dim_v`.
        v: Tensor<'a>,
        /// Output: `heads_q` heads of `head_dim_v`.
        out: TensorMut<'a>,
        /// Natural-log sums of exponentials: f32, `heads_q` heads of 1 element.
        lse: Option<TensorMut<'a>>,
    },
    /// For [`Operation::Append`].
    Append {
        /// New keys.
        k: Tensor<'a>,
        /// New values.
        v: Tensor<'a>,
        /// Cached keys; the tokens of the shape are the capacity.
        k_cache: TensorMut<'a>,
        /// Cached values.
        v_cache: TensorMut<'a>,
    },
    /// For [`Operation::AttendCached`].
    AttendCached {
        /// Queries.
        q: Tensor<'a>,
        /// Cached keys.
        k_cache: Tensor<'a>,
        /// Cached values.
        v_cache: Tensor<'a>,
        /// Output.
        out: TensorMut<'a>,
        /// Log sums of exponentials.
        lse: Option<TensorMut<'a>>,
    },
    /// For [`Operation::AppendAttend`].
    AppendAttend {
        /// Queries.
        q: Tensor<'a>,
        /// New keys.
        k: Tensor<'a>,
        /// New values.
        v: Tensor<'a>,
        /// Cached keys.
        k_cache: TensorMut<'a>,
        /// Cached values.
        v_cache: TensorMut<'a>,
        /// Output.
        out: TensorMut<'a>,
        /// Log sums of exponentials.
        lse: Option<TensorMut<'a>>,
    },
    /// For [`Operation::Rotate`].
    Rotate {
        /// The tensor to rotate: `heads_q` heads of `head_dim_qk`.
        x: Tensor<'a>,
        /// The rotated tensor, of the same shape.
        out: TensorMut<'a>,
    },
    /// For [`Operation::Rotate`] in place; `q_dtype` and `out_dtype` are then the same.
    RotateInPlace {
        /// The tensor to rotate.
        x: TensorMut<'a>,
    },
}

/// One sequence of a batch.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Sequence<'a> {
    /// Queries (tokens to rotate, for [`Operation::Rotate`]). May be 0.
    pub q_len: usize,
    /// Keys that attention reads, or that the cache holds after an append. May be 0.
    pub kv_len: usize,
    /// How many of those keys, the last ones, this call appends to the cache; 0 where nothing is appended.
    pub new_len: usize,
    /// Key index of the first query. Query `i` has index `q_start + i`. May be negative.
    pub q_start: i64,
    /// Key index of the first key held.
    pub kv_start: i64,
    /// Positions of the queries.
    pub q_positions: Positions<'a>,
    /// Positions of the keys that this call rotates: all `kv_len` where keys are rotated on read, the `new_len` new
    /// ones where they are rotated when stored.
    pub k_positions: Positions<'a>,
    /// Prefix-LM: so many keys from index 0 on are visible to every query, causal or not (a window still applies). Only
    /// for causal masks.
    pub prefix_len: usize,
    /// The additive bias; required if the plan has one.
    pub bias: Option<Bias<'a>>,
    /// The boolean mask; required if the plan has one.
    pub mask: Option<BoolMask<'a>>,
    /// Where cos and sin come from; required if the plan rotates.
    pub rotary: Option<Rotary<'a>>,
    /// Where the sequence starts in Q, output and lse.
    pub q: At,
    /// Where it starts in K and V (the new ones, where there is a cache).
    pub kv: At,
    /// Where it starts in the cache.
    pub cache: At,
}

impl<'a> Sequence<'a> {
    /// `q_len` queries over `kv_len` keys, the last query on the last key: `q_start = kv_len - q_len`. Nothing is
    /// appended, positions are key indices, and the sequence is the first entry of every tensor.
    pub const fn new(q_len: usize, kv_len: usize) -> Self {
        Sequence {
            q_len,
            kv_len,
            new_len: 0,
            q_start: kv_len as i64 - q_len as i64,
            kv_start: 0,
            q_positions: Positions::Index,
            k_positions: Positions::Index,
            prefix_len: 0,
            bias: None,
            mask: None,
            rotary: None,
            q: At { batch: 0, token: 0 },
            kv: At { batch: 0, token: 0 },
            cache: At { batch: 0, token: 0 },
        }
    }

    /// As [`Sequence::new`] with `q_len` new keys appended by this call: a prefill chunk or a decode step.
    pub const fn step(q_len: usize, kv_len: usize) -> Self {
        let mut sequence = Self::new(q_len, kv_len);
        sequence.new_len = q_len;
        sequence
    }

    /// This sequence with a source of cos and sin.
    #[must_use]
    pub fn with_rotary(mut self, rotary: impl Into<Rotary<'a>>) -> Self {
        self.rotary = Some(rotary.into());
        self
    }

    /// This sequence with an additive bias.
    #[must_use]
    pub const fn with_bias(mut self, bias: Bias<'a>) -> Self {
        self.bias = Some(bias);
        self
    }

    /// This sequence with a boolean mask.
    #[must_use]
    pub const fn with_mask(mut self, mask: BoolMask<'a>) -> Self {
        self.mask = Some(mask);
        self
    }

    /// This sequence as entry `batch` of the batch axis of every tensor.
    #[must_use]
    pub const fn in_batch(mut self, batch: usize) -> Self {
        self.q.batch = batch;
        self.kv.batch = batch;
        self.cache.batch = batch;
        self
    }
}

/// One step's batch.
#[derive(Debug)]
pub struct Batch<'a> {
    /// The tensors.
    pub operands: Operands<'a>,
    /// The sequences in them.
    pub sequences: &'a [Sequence<'a>],
    /// Numbers for each head.
    pub weights: Weights<'a>,
}

impl<'a> Batch<'a> {
    /// A batch without numbers for each head.
    pub fn new(operands: Operands<'a>, sequences: &'a [Sequence<'a>]) -> Self {
        Batch { operands, sequences, weights: Weights::default() }
    }

    /// This batch with numbers for each head.
    #[must_use]
    pub fn with_weights(mut self, weights: Weights<'a>) -> Self {
        self.weights = weights;
        self
    }
}

/// The operands by role.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Views {
    pub(crate) q: Option<RawTensor>,
    pub(crate) k: Option<RawTensor>,
    pub(crate) v: Option<RawTensor>,
    pub(crate) k_cache: Option<RawTensor>,
    pub(crate) v_cache: Option<RawTensor>,
    pub(crate) out: Option<RawTensor>,
    pub(crate) lse: Option<RawTensor>,
}

/// What the tasks of a phase do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Work {
    Rotate,
    Store,
    Attend,
    Merge,
}

/// A checked batch, ready to run: its tasks, phase by phase, from any threads in any order.
#[derive(Debug)]
pub struct Call<'a> {
    pub(crate) plan: Plan,
    pub(crate) views: Views,
    pub(crate) sequences: &'a [Sequence<'a>],
    pub(crate) weights: Weights<'a>,
    /// Most rows of a block in this call.
    block_rows: usize,
    /// New keys are stored by the task that attends to them.
    pub(crate) stores_in_attend: bool,
    phases: [(Work, usize); 3],
    phase_count: usize,
    /// For each phase, the number of tasks before each sequence, and the number of all.
    starts: [&'a [u64]; 3],
    /// Floats of partial results before each sequence.
    partial_starts: &'a [u64],
    partials: *mut f32,
    workspace_len: usize,
    /// Every tensor and the scratch stay borrowed.
    borrow: PhantomData<&'a mut [f32]>,
}

// SAFETY: the pointers in a call stand for borrows of `Sync` data that it holds for `'a`; what tasks write through them
// is disjoint (see `Call::run_task`), which is the duty of whoever runs tasks.
unsafe impl Send for Call<'_> {}
// SAFETY: as above; `&Call` alone writes nothing outside the unsafe `run_task`.
unsafe impl Sync for Call<'_> {}

impl Plan {
    /// Bytes of shared scratch that [`Plan::prepare`] needs for these sequences.
    pub fn scratch_len(&self, sequences: &[Sequence<'_>]) -> usize {
        let tables = 4 * 8 * (sequences.len() + 1);
        let partials: usize = sequences.iter().map(|s| self.partial_floats(s)).fold(0, usize::saturating_add);
        (tables + arena::ALIGN).saturating_add(partials.saturating_mul(4))
    }

    fn partial_floats(&self, s: &Sequence<'_>) -> usize {
        let splits = self.splits(s);
        if !self.attends() || splits < 2 {
            return 0;
        }
        let tasks = self.spec.heads_kv.saturating_mul(splits);
        tasks.saturating_mul(self.partial_len(s))
    }

    /// Floats of one partial result: rows of accumulated values, maxima and sums.
    pub(crate) fn partial_len(&self, s: &Sequence<'_>) -> usize {
        s.q_len.saturating_mul(self.spec.group()).saturating_mul(self.spec.head_dim_v + 2)
    }

    fn attends(&self) -> bool {
        matches!(self.spec.operation, Operation::Attend | Operation::AttendCached | Operation::AppendAttend)
    }

    /// How many key ranges the few-row path cuts a sequence into: at multiples of `split_keys`, whoever else is in the
    /// batch and however many threads there are.
    pub(crate) fn splits(&self, s: &Sequence<'_>) -> usize {
        if !self.is_few(s.q_len) {
            return 1;
        }
        let seen = self.block_visible(s, 0..s.q_len);
        (seen.end.div_ceil(self.tile.split_keys).saturating_sub(seen.start / self.tile.split_keys)).max(1)
    }

    /// The slots of one of them that some query sees.
    pub(crate) fn split(&self, s: &Sequence<'_>, split: usize) -> Range<usize> {
        let (seen, keys) = (self.block_visible(s, 0..s.q_len), self.tile.split_keys);
        let start = (seen.start / keys + split) * keys;
        seen.start.max(start)..seen.end.min(start + keys).max(seen.start)
    }

    /// Slots that any of these queries of `s` sees.
    pub(crate) fn block_visible(&self, s: &Sequence<'_>, queries: Range<usize>) -> Range<usize> {
        if queries.is_empty() {
            return 0..0;
        }
        self.visible(s, queries.start).start..self.visible(s, queries.end - 1).end
    }

    /// Slots that query `i` of `s` sees.
    pub(crate) fn visible(&self, s: &Sequence<'_>, i: usize) -> Range<usize> {
        self.spec.mask.visible(s.q_start.saturating_add(i as i64), s.kv_start, s.kv_len, s.prefix_len)
    }

    /// Checks `batch` and counts its tasks.
    ///
    /// The batch stays mutably borrowed while the call lives: two calls never write the same output.
    ///
    /// # Errors
    ///
    /// Every operand, length, offset or position that does not fit the description or the memory behind it, and a
    /// scratch of fewer than [`Plan::scratch_len`] bytes. Nothing has been read or written then.
    pub fn prepare<'a>(&self, batch: &'a mut Batch<'_>, scratch: &'a mut [u8]) -> Result<Call<'a>, Error> {
        let views = self.check_operands(&batch.operands)?;
        self.check_weights(&batch.weights)?;
        let sequences = batch.sequences;
        for (index, s) in sequences.iter().enumerate() {
            self.check_sequence(&views, s, index)?;
        }
        let stores = matches!(self.spec.operation, Operation::Append | Operation::AppendAttend);
        if self.attends() || self.spec.operation == Operation::Rotate {
            check_disjoint(sequences, "output", |s| (s.q, s.q_len))?;
        }
        if stores {
            check_disjoint(sequences, "cache", |s| {
                (At { token: s.cache.token + s.kv_len - s.new_len, ..s.cache }, s.new_len)
            })?;
        }
        let need = self.scratch_len(sequences);
        if scratch.len() < need {
            return Err(Error::TooShort { what: "scratch".into(), need, have: scratch.len() });
        }

        let block_rows = self.call_block_rows(sequences);
        let stores_in_attend =
            self.spec.operation == Operation::AppendAttend && self.can_store_in_attend(&views, sequences, block_rows);
        let mut phases = [(Work::Merge, 0); 3];
        let mut phase_count = 0;
        let (tables, partials) = carve(scratch, sequences.len());
        let mut starts: [&'a [u64]; 3] = [&[]; 3];
        let [table_a, table_b, table_c, partial_starts] = tables;
        let mut tables = [table_a, table_b, table_c].into_iter();
        let mut add = |work: Work, tasks_of: &dyn Fn(&Sequence<'_>) -> usize| {
            let table = tables.next().expect("three phases at most");
            prefix_sums(table, sequences, tasks_of);
            let count = table[sequences.len()] as usize;
            if count > 0 {
                phases[phase_count] = (work, count);
                starts[phase_count] = table;
                phase_count += 1;
            }
        };
        let spec = &self.spec;
        let store_tasks = |s: &Sequence<'_>| spec.heads_kv * s.new_len.div_ceil(STORE_TOKENS);
        match spec.operation {
            Operation::Rotate => add(Work::Rotate, &|s| spec.heads_q * s.q_len.div_ceil(STORE_TOKENS)),
            Operation::Append => add(Work::Store, &store_tasks),
            Operation::Attend | Operation::AttendCached | Operation::AppendAttend => {
                if spec.operation == Operation::AppendAttend && !stores_in_attend {
                    add(Work::Store, &store_tasks);
                }
                add(Work::Attend, &|s| spec.heads_kv * self.tasks_per_head(s, block_rows));
                add(Work::Merge, &|s| if s.q_len > 0 && self.splits(s) > 1 { spec.heads_kv } else { 0 });
            }
        }
        prefix_sums(partial_starts, sequences, &|s| self.partial_floats(s));

        let workspace_len = sequences.iter().map(|s| self.workspace_for(s, block_rows)).max().unwrap_or(0);
        Ok(Call {
            plan: *self,
            views,
            sequences,
            weights: batch.weights,
            block_rows,
            stores_in_attend,
            phases,
            phase_count,
            starts,
            partial_starts,
            partials,
            workspace_len,
            borrow: PhantomData,
        })
    }

    fn workspace_for(&self, s: &Sequence<'_>, block_rows: usize) -> usize {
        let rows = s.q_len * self.spec.group();
        if !self.attends() {
            self.store_workspace()
        } else if self.is_few(s.q_len) {
            self.few_workspace(rows)
        } else {
            let kept = if self.is_one_superblock(s) { self.tile.mr } else { rows.min(self.block_rows(s, block_rows)) };
            self.tile_workspace(kept).max(self.store_workspace())
        }
    }

    /// True if a superblock holds every key that some query of `s` sees: then no block keeps its rows.
    fn is_one_superblock(&self, s: &Sequence<'_>) -> bool {
        let seen = self.block_visible(s, 0..s.q_len);
        seen.end <= (seen.start / self.tile.superblock + 1) * self.tile.superblock
    }

    /// Most rows of a block of `s` in a call whose threads suggest `wanted`.
    fn block_rows(&self, s: &Sequence<'_>, wanted: usize) -> usize {
        if self.is_one_superblock(s) { wanted } else { wanted.min(self.tile.block_rows) }
    }

    /// Tasks of each key head of a sequence in the attend phase.
    fn tasks_per_head(&self, s: &Sequence<'_>, block_rows: usize) -> usize {
        match s.q_len {
            0 => 0,
            n if self.is_few(n) => self.splits(s),
            n => (n * self.spec.group()).div_ceil(self.block_rows(s, block_rows)),
        }
    }

    /// As large blocks as leave the threads four tasks each: a key is packed once for each block. Rows are independent, so
    /// this changes no bits.
    fn call_block_rows(&self, sequences: &[Sequence<'_>]) -> usize {
        let mr = self.tile.mr;
        if self.threads < 2 {
            return usize::MAX / mr * mr;
        }
        let rows = |s: &Sequence<'_>| s.q_len.saturating_mul(self.spec.heads_q);
        let all = sequences.iter().map(rows).fold(0, usize::saturating_add);
        (all / (4 * self.threads)).max(LEAST_ROWS) / mr * mr
    }

    /// True if each new key is attended to by one task alone, and no other task reads near it.
    fn can_store_in_attend(&self, views: &Views, sequences: &[Sequence<'_>], block_rows: usize) -> bool {
        let apart = |t: &RawTensor| {
            let head = t.head_extent(t.shape.tokens);
            let entry = (t.shape.heads - 1) * t.strides.head + head;
            (t.shape.heads == 1 || t.strides.head >= head) && (t.shape.batch == 1 || t.strides.batch >= entry)
        };
        [views.k_cache, views.v_cache].into_iter().flatten().all(|t| t.shape.tokens > 0 && apart(&t))
            && sequences.iter().all(|s| s.new_len == 0 || self.tasks_per_head(s, block_rows) == 1)
            && check_disjoint(sequences, "cache", |s| (s.cache, s.kv_len)).is_ok()
    }

    fn check_operands(&self, operands: &Operands<'_>) -> Result<Views, Error> {
        let spec = &self.spec;
        let mut views = Views::default();
        let named = match (spec.operation, operands) {
            (Operation::Attend, Operands::Attend { q, k, v, out, lse }) => {
                views.lse = lse.as_ref().map(|t| t.raw);
                [Some(q.raw), Some(k.raw), Some(v.raw), None, None, Some(out.raw)]
            }
            (Operation::Append, Operands::Append { k, v, k_cache, v_cache }) => {
                [None, Some(k.raw), Some(v.raw), Some(k_cache.raw), Some(v_cache.raw), None]
            }
            (Operation::AttendCached, Operands::AttendCached { q, k_cache, v_cache, out, lse }) => {
                views.lse = lse.as_ref().map(|t| t.raw);
                [Some(q.raw), None, None, Some(k_cache.raw), Some(v_cache.raw), Some(out.raw)]
            }
            (Operation::AppendAttend, Operands::AppendAttend { q, k, v, k_cache, v_cache, out, lse }) => {
                views.lse = lse.as_ref().map(|t| t.raw);
                [Some(q.raw), Some(k.raw), Some(v.raw), Some(k_cache.raw), Some(v_cache.raw), Some(out.raw)]
            }
            (Operation::Rotate, Operands::Rotate { x, out }) => [Some(x.raw), None, None, None, None, Some(out.raw)],
            (Operation::Rotate, Operands::RotateInPlace { x }) => [Some(x.raw), None, None, None, None, Some(x.raw)],
            _ => return Err(Error::Missing { what: "the operands of the planned operation".into() }),
        };
        [views.q, views.k, views.v, views.k_cache, views.v_cache, views.out] = named;
        let (d, dv) = (spec.head_dim_qk, spec.head_dim_v);
        let out_dim = if spec.operation == Operation::Rotate { d } else { dv };
        let expected = [
            ("q", views.q, spec.q_dtype, spec.heads_q, d),
            ("k", views.k, spec.k_dtype, spec.heads_kv, d),
            ("v", views.v, spec.v_dtype, spec.heads_kv, dv),
            ("k_cache", views.k_cache, spec.k_cache_dtype, spec.heads_kv, d),
            ("v_cache", views.v_cache, spec.v_cache_dtype, spec.heads_kv, dv),
            ("output", views.out, spec.out_dtype, spec.heads_q, out_dim),
            ("lse", views.lse, DType::F32, spec.heads_q, 1),
        ];
        for (name, view, dtype, heads, dim) in expected {
            if let Some(view) = view {
                view.check(name, dtype, heads, dim)?;
            }
        }
        Ok(views)
    }

    fn check_sequence(&self, views: &Views, s: &Sequence<'_>, index: usize) -> Result<(), Error> {
        let spec = &self.spec;
        let place = |name| Place::in_sequence(name, index);
        // First, so that no sum below overflows: views with strides of 0 do not bound lengths.
        for (name, len) in [("q_len", s.q_len), ("kv_len", s.kv_len)] {
            if len > MAX_LEN {
                return Err(Error::OutOfRange { what: place(name), value: len as i128, min: 0, max: MAX_LEN as i128 });
            }
        }
        for (name, start) in [("q_start", s.q_start), ("kv_start", s.kv_start)] {
            if start.unsigned_abs() > MAX_START {
                return Err(Error::OutOfRange {
                    what: place(name),
                    value: i128::from(start),
                    min: -i128::from(MAX_START),
                    max: i128::from(MAX_START),
                });
            }
        }
        let tokens = [
            ("q", views.q, s.q, s.q_len),
            ("output", views.out, s.q, s.q_len),
            ("lse", views.lse, s.q, s.q_len),
            ("k_cache", views.k_cache, s.cache, s.kv_len),
            ("v_cache", views.v_cache, s.cache, s.kv_len),
        ];
        for (name, view, at, len) in tokens {
            if let Some(view) = view {
                view.check_tokens(place(name), at, len)?;
            }
        }
        let stores = matches!(spec.operation, Operation::Append | Operation::AppendAttend);
        let new_len = if stores { s.new_len } else { s.kv_len };
        for (name, view) in [("k", views.k), ("v", views.v)] {
            if let Some(view) = view {
                view.check_tokens(place(name), s.kv, new_len)?;
            }
        }
        if !stores && s.new_len > 0 {
            return Err(Error::Unexpected { what: place("new_len") });
        }
        if s.new_len > s.kv_len {
            return Err(Error::OutOfRange {
                what: place("new_len"),
                value: s.new_len as i128,
                min: 0,
                max: s.kv_len as i128,
            });
        }
        self.check_masks(s, index)?;
        self.check_rotation(s, index)
    }

    fn check_weights(&self, weights: &Weights<'_>) -> Result<(), Error> {
        let (spec, attends) = (&self.spec, self.attends());
        for (name, wanted, given) in [("alibi", spec.alibi, weights.alibi), ("sinks", spec.sinks, weights.sinks)] {
            match given {
                None if wanted && attends => return Err(Error::Missing { what: name.into() }),
                Some(_) if !wanted => return Err(Error::Unexpected { what: name.into() }),
                Some(given) if given.len() != spec.heads_q => {
                    return Err(Error::Mismatch { what: name.into(), expected: spec.heads_q, found: given.len() });
                }
                _ => (),
            }
        }
        let bad = |what: &'static str, value: f32, need| {
            Err(Error::BadNumber { what: what.into(), value: value.into(), need })
        };
        if let Some(&slope) = weights.alibi.unwrap_or_default().iter().find(|x| !x.is_finite()) {
            return bad("alibi", slope, "finite");
        }
        match weights.sinks.unwrap_or_default().iter().find(|x| x.is_nan() || **x == f32::INFINITY) {
            Some(&sink) => bad("sinks", sink, "finite or -inf"),
            None => Ok(()),
        }
    }

    fn check_masks(&self, s: &Sequence<'_>, index: usize) -> Result<(), Error> {
        let (spec, attends) = (&self.spec, self.attends());
        let place = |name| Place::in_sequence(name, index);
        for (name, wanted, given) in
            [("bias", spec.bias, s.bias.is_some()), ("mask", spec.mask.boolean, s.mask.is_some())]
        {
            if wanted && attends && !given {
                return Err(Error::Missing { what: place(name) });
            }
            if given && !wanted {
                return Err(Error::Unexpected { what: place(name) });
            }
        }
        if s.prefix_len > 0 && !spec.mask.causal {
            return Err(Error::Unexpected { what: place("prefix_len") });
        }
        if s.prefix_len > MAX_LEN {
            let (value, max) = (s.prefix_len as i128, MAX_LEN as i128);
            return Err(Error::OutOfRange { what: place("prefix_len"), value, min: 0, max });
        }
        if let Some(bias) = &s.bias {
            bias.check(place("bias"), spec.heads_q, s.q_len, s.kv_len)?;
        }
        s.mask.map_or(Ok(()), |mask| mask.check(place("mask"), spec.heads_q, s.q_len, s.kv_len))
    }

    fn check_rotation(&self, s: &Sequence<'_>, index: usize) -> Result<(), Error> {
        let spec = &self.spec;
        let place = |name| Place::in_sequence(name, index);
        let rotate_op = spec.operation == Operation::Rotate;
        let turns = self.turn.is_some();
        let turns_q = turns && (rotate_op || (self.attends() && spec.rotate_q));
        let stores = matches!(spec.operation, Operation::Append | Operation::AppendAttend);
        // Keys that this call rotates: their key index and number.
        let (k_first, k_count) = match (turns && !rotate_op, spec.keys) {
            (true, Keys::Raw) if self.attends() => (s.kv_start, s.kv_len),
            (true, Keys::Rotated) if stores => (self.new_index(s), s.new_len),
            _ => (0, 0),
        };
        let turns_k = turns
            && !rotate_op
            && match spec.keys {
                Keys::Raw => self.attends(),
                Keys::Rotated => stores,
            };
        for (name, used, positions) in
            [("q_positions", turns_q, &s.q_positions), ("k_positions", turns_k, &s.k_positions)]
        {
            if !used && !matches!(positions, Positions::Index) {
                return Err(Error::Unexpected { what: place(name) });
            }
        }
        let Some(turn) = self.turn.filter(|_| turns_q || turns_k) else {
            return match s.rotary {
                Some(_) => Err(Error::Unexpected { what: place("rotary") }),
                None => Ok(()),
            };
        };
        // A sequence without work needs no angles.
        if s.q_len == 0 && k_count == 0 {
            return Ok(());
        }
        let rotary = s.rotary.ok_or(Error::Missing { what: place("rotary") })?;
        rotary.check_pairs(turn.pairs, spec.rotary.all_pairs(spec.head_dim_qk), place("rotary"))?;
        if turns_q {
            // Queries that see no key are never rotated, so their positions do not matter.
            let sees = |&i: &usize| rotate_op || !self.visible(s, i).is_empty();
            let first = (0..s.q_len).find(sees).unwrap_or(s.q_len);
            let end = (first..s.q_len).rfind(sees).map_or(first, |last| last + 1);
            check_positions(&rotary, s.q_positions, s.q_start, first..end, s.q_len, place("q_positions"))?;
        }
        check_positions(&rotary, s.k_positions, k_first, 0..k_count, k_count, place("k_positions"))
    }

    /// Key index of the first new key.
    pub(crate) fn new_index(&self, s: &Sequence<'_>) -> i64 {
        s.kv_start + (s.kv_len - s.new_len) as i64
    }
}

/// Longest sequence: far above any memory, far below overflow.
const MAX_LEN: usize = 1 << 40;
/// Largest key index.
const MAX_START: u64 = 1 << 48;

/// Checks the positions of tokens `used` of `len`, the first of which has key index `index`.
fn check_positions(
    rotary: &Rotary<'_>,
    positions: Positions<'_>,
    index: i64,
    used: Range<usize>,
    len: usize,
    place: Place,
) -> Result<(), Error> {
    if let Positions::Explicit(list) = positions
        && list.len() != len
    {
        return Err(Error::Mismatch { what: place, expected: len, found: list.len() });
    }
    if used.is_empty() {
        return Ok(());
    }
    let indices = [index + used.start as i64, index + used.end as i64 - 1];
    if rotary.by_token() {
        if !matches!(positions, Positions::Index) {
            return Err(Error::Unexpected { what: place });
        }
        return indices.into_iter().try_for_each(|i| rotary.check_position(i, place));
    }
    match positions {
        Positions::Index => indices.into_iter().try_for_each(|i| rotary.check_position(i, place)),
        Positions::Start(start) => [used.start, used.end - 1]
            .into_iter()
            .try_for_each(|i| rotary.check_position(i64::from(start) + i as i64, place)),
        Positions::Explicit(list) => list[used].iter().try_for_each(|&p| rotary.check_position(i64::from(p), place)),
    }
}

/// Checks that no two sequences write the same tokens.
fn check_disjoint(
    sequences: &[Sequence<'_>],
    what: &'static str,
    tokens: impl Fn(&Sequence<'_>) -> (At, usize),
) -> Result<(), Error> {
    let span = |i: usize| {
        let (at, len) = tokens(&sequences[i]);
        (at.batch, at.token, at.token + len)
    };
    // In order is the usual case, and linear.
    let mut last = None;
    let ordered = (0..sequences.len()).map(span).filter(|s| s.1 < s.2).all(|s| {
        let ok = last.is_none_or(|(batch, end)| (batch, end) <= (s.0, s.1));
        last = Some((s.0, s.2));
        ok
    });
    if ordered {
        return Ok(());
    }
    for i in 0..sequences.len() {
        for other in 0..i {
            let (a, b) = (span(i), span(other));
            if a.0 == b.0 && a.1.max(b.1) < a.2.min(b.2) {
                return Err(Error::SequencesOverlap { what: Place::in_sequence(what, i), other });
            }
        }
    }
    Ok(())
}

/// Fills `table` with the running sums of `count` over the sequences.
fn prefix_sums(table: &mut [u64], sequences: &[Sequence<'_>], count: &dyn Fn(&Sequence<'_>) -> usize) {
    let mut sum = 0;
    for (slot, s) in table.iter_mut().zip(sequences) {
        *slot = sum;
        sum += count(s) as u64;
    }
    table[sequences.len()] = sum;
}

/// Cuts the scratch into four tables of `n + 1` and the partial results.
fn carve(scratch: &mut [u8], n: usize) -> ([&mut [u64]; 4], *mut f32) {
    let skip = scratch.as_ptr().align_offset(arena::ALIGN).min(scratch.len());
    let (tables, rest) = scratch[skip..].split_at_mut(4 * 8 * (n + 1));
    // SAFETY: every bit pattern is a u64, and the start is aligned.
    let (_, tables, _) = unsafe { tables.align_to_mut::<u64>() };
    let (a, tables) = tables.split_at_mut(n + 1);
    let (b, tables) = tables.split_at_mut(n + 1);
    let (c, d) = tables.split_at_mut(n + 1);
    ([a, b, c, d], rest.as_mut_ptr().cast())
}

/// Reading an element of a cache takes as long as this many multiply-adds with it (one row at 16 GB/s and 50 GFLOP/s).
const STREAMED: u64 = 6;
/// Rotating and packing an element of a key takes as long as this many.
pub(crate) const PACKED: u64 = 16;

/// Restores the floating-point state when a task ends, however it ends.
struct FpGuard(&'static FpControl, u64);

impl FpGuard {
    fn enter(control: &'static FpControl) -> Self {
        FpGuard(control, (control.enter)())
    }
}

impl Drop for FpGuard {
    fn drop(&mut self) {
        (self.0.leave)(self.1);
    }
}

impl<'a> Call<'a> {
    /// Number of phases. All tasks of a phase must have ended before the first of the next begins.
    pub const fn phases(&self) -> usize {
        self.phase_count
    }

    /// Number of tasks in `phase`, independent of each other.
    pub const fn tasks(&self, phase: usize) -> usize {
        self.phases[phase].1
    }

    /// Bytes of workspace that each thread needs.
    pub const fn workspace_len(&self) -> usize {
        self.workspace_len
    }

    /// Runs one task. The floating-point state is set for its duration and restored.
    ///
    /// # Safety
    ///
    /// - Each task of a phase runs at most once in the life of the call, and no two threads run the same one.
    /// - Phases run in order, with everything a task of one phase did visible to the tasks of the next.
    ///
    /// # Panics
    ///
    /// If `phase` or `task` do not exist, or `workspace` has fewer than [`Call::workspace_len`] bytes.
    pub unsafe fn run_task(&self, phase: usize, task: usize, workspace: &mut [u8]) {
        assert!(phase < self.phase_count && task < self.tasks(phase), "no task {task} in phase {phase}");
        assert!(
            workspace.len() >= self.workspace_len,
            "workspace of {} bytes, {} needed",
            workspace.len(),
            self.workspace_len
        );
        let _fp = FpGuard::enter(self.plan.tier.fp());
        let (sequence, task) = self.locate(phase, task);
        // SAFETY: the caller runs each task once and the phases in order, so what this task writes (rows of its own
        // head and tokens, or its own partial result) nobody else touches meanwhile.
        unsafe {
            match self.phases[phase].0 {
                Work::Rotate => self.rotate_task(sequence, task, workspace),
                Work::Store => self.store_task(sequence, task, workspace),
                Work::Attend => self.attend_task(sequence, task, workspace),
                Work::Merge => self.merge_task(sequence, task),
            }
        }
    }

    /// About how long a task takes, in multiply-adds: for schedulers, which should start long ones first.
    ///
    /// # Panics
    ///
    /// If `phase` or `task` do not exist.
    pub fn task_cost(&self, phase: usize, task: usize) -> u64 {
        assert!(phase < self.phase_count && task < self.tasks(phase), "no task {task} in phase {phase}");
        let spec = &self.plan.spec;
        let (sequence, task) = self.locate(phase, task);
        let s = &self.sequences[sequence];
        let (elements, rows) = ((spec.head_dim_qk + spec.head_dim_v) as u64, (s.q_len * spec.group()) as u64);
        match self.phases[phase].0 {
            Work::Rotate => STORE_TOKENS.min(s.q_len) as u64 * spec.head_dim_qk as u64,
            Work::Store => STORE_TOKENS.min(s.new_len) as u64 * elements,
            Work::Merge => self.blocks(s) as u64 * rows * elements,
            Work::Attend if self.plan.is_few(s.q_len) => {
                let keys = self.plan.split(s, self.head_and_part(self.blocks(s), task).1).len();
                (rows + STREAMED) * elements * keys as u64
            }
            Work::Attend => {
                let rows = self.block(s, self.head_and_part(self.blocks(s), task).1);
                let group = spec.group();
                let tokens = rows.start / group..(rows.end - 1) / group + 1;
                let seen = |token| self.plan.visible(s, token).len() as u64;
                let mean = (seen(tokens.start) + seen(tokens.end - 1)) / 2;
                let packed = self.plan.block_visible(s, tokens).len() as u64;
                elements * (rows.len() as u64 * mean + PACKED * packed)
            }
        }
    }

    /// The key head of an attention task, and which of its `per_head` parts. One thread stays with the keys of a head; many
    /// begin with the longest parts of all heads, so that short ones fill the end.
    pub(crate) fn head_and_part(&self, per_head: usize, task: usize) -> (usize, usize) {
        let heads = self.plan.spec.heads_kv;
        if self.plan.threads > 1 { (task % heads, task / heads) } else { (task / per_head, task % per_head) }
    }

    /// The sequence of a task, and its number there.
    fn locate(&self, phase: usize, task: usize) -> (usize, usize) {
        let starts = self.starts[phase];
        let sequence = starts.partition_point(|&start| start <= task as u64) - 1;
        (sequence, task - starts[sequence] as usize)
    }

    /// Flattened query rows of block `block` of a sequence, the last block first: in causal attention it is the
    /// longest, and a long task should not start last.
    pub(crate) fn block(&self, s: &Sequence<'_>, block: usize) -> Range<usize> {
        let rows = s.q_len * self.plan.spec.group();
        let most = self.plan.block_rows(s, self.block_rows);
        let start = (rows.div_ceil(most) - 1 - block) * most;
        start..rows.min(start.saturating_add(most))
    }

    pub(crate) fn blocks(&self, s: &Sequence<'_>) -> usize {
        self.plan.tasks_per_head(s, self.block_rows)
    }

    /// The partial result of (sequence, task).
    ///
    /// # Safety
    ///
    /// Nothing else uses that partial during `'p`.
    pub(crate) unsafe fn partial<'p>(&self, sequence: usize, task: usize) -> &'p mut [f32] {
        let len = self.plan.partial_len(&self.sequences[sequence]);
        let start = self.partial_starts[sequence] as usize + task * len;
        // SAFETY: `prepare` checked the scratch for the sum of all partials; exclusion is the caller's.
        unsafe { core::slice::from_raw_parts_mut(self.partials.add(start), len) }
    }

    /// Runs every task on this thread.
    ///
    /// # Errors
    ///
    /// [`Error::TooShort`] if `workspace` has fewer than [`Call::workspace_len`] bytes; nothing has run then.
    pub fn run(self, workspace: &mut [u8]) -> Result<(), Error> {
        self.check_workspace(workspace.len())?;
        for phase in 0..self.phase_count {
            for task in 0..self.tasks(phase) {
                // SAFETY: every task once, in order, on one thread.
                unsafe { self.run_task(phase, task, workspace) };
            }
        }
        Ok(())
    }

    /// Runs every task on an executor's threads.
    ///
    /// # Errors
    ///
    /// What the executor reports, before anything has run.
    pub fn run_on(self, executor: &mut impl Executor) -> Result<(), Error> {
        executor.prepare(self.workspace_len)?;
        for phase in 0..self.phase_count {
            // SAFETY: an executor calls the body once per task and returns when all are done; phases are in order.
            executor.for_each(self.tasks(phase), &|task, workspace| unsafe { self.run_task(phase, task, workspace) });
        }
        Ok(())
    }

    /// The tasks of one phase as values, each to be run once from any thread. All must be done (or dropped) before the
    /// next phase can be split. Phases that are left out, or split twice, leave the output unspecified, never unsound.
    pub fn split(&mut self, phase: usize) -> impl ExactSizeIterator<Item = Task<'_, 'a>> {
        let call: &Self = self;
        (0..call.tasks(phase)).map(move |index| Task { call, phase, index })
    }

    pub(crate) fn check_workspace(&self, have: usize) -> Result<(), Error> {
        if have < self.workspace_len {
            return Err(Error::TooShort { what: "workspace".into(), need: self.workspace_len, have });
        }
        Ok(())
    }
}

/// One task of a phase; see [`Call::split`].
#[derive(Debug)]
pub struct Task<'c, 'a> {
    call: &'c Call<'a>,
    phase: usize,
    index: usize,
}

impl Task<'_, '_> {
    /// Runs it.
    ///
    /// # Errors
    ///
    /// [`Error::TooShort`] if `workspace` has fewer than [`Call::workspace_len`] bytes; the task has not run then.
    pub fn run(self, workspace: &mut [u8]) -> Result<(), Error> {
        self.call.check_workspace(workspace.len())?;
        // SAFETY: `split` makes one value per task, `run` consumes it, and the call is mutably borrowed until every
        // value of the phase is gone, so phases do not overlap.
        unsafe { self.call.run_task(self.phase, self.index, workspace) };
        Ok(())
    }
}

/// Runs tasks on threads of its own.
///
/// # Safety
///
/// `for_each` calls the body exactly once for each index, and returns only when all calls have returned, with their
/// effects visible to the caller. Each call gets a workspace of at least the prepared size that no other call uses
/// meanwhile.
pub unsafe trait Executor {
    /// Makes sure that every thread has a workspace of `workspace_len` bytes.
    ///
    /// # Errors
    ///
    /// [`Error::TooShort`] if it can't.
    fn prepare(&mut self, workspace_len: usize) -> Result<(), Error>;

    /// Calls `body(index, workspace)` for every index in `0..tasks`.
    fn for_each(&mut self, tasks: usize, body: &(dyn Fn(usize, &mut [u8]) + Sync));
}

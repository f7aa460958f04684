//! Describing an attention: what is the same for every call of a layer. Sizes of single sequences are not known here.

use crate::kernel::Turn;
use crate::rotary::RotarySpec;
use crate::{DType, Error};

/// Largest head_dim, for Q and K and for V.
pub const MAX_HEAD_DIM: usize = 576;

/// What a plan does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Operation {
    /// Q, K, V in memory -> output: prefill without a cache.
    Attend,
    /// New K and V -> cache. Keys are rotated on the way if the cache holds rotated keys.
    Append,
    /// Q and a cache -> output.
    AttendCached,
    /// [`Operation::Append`], then [`Operation::AttendCached`], in one call. Attention sees K and V as stored.
    AppendAttend,
    /// The stand-alone rotation of one tensor (Q or K): `heads_q` heads of `head_dim_qk`, from `q_dtype` to `out_dtype`.
    Rotate,
}

/// Whether keys in the memory that attention reads have been rotated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Keys {
    /// Un-rotated: rotated in the tile each time they are read. A cache of raw keys can be shifted or re-based freely.
    Raw,
    /// Rotated: by `append`, or by the caller. `attend` then rotates queries only.
    Rotated,
}

/// The factor on `q . k`.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum Scale {
    /// `1 / sqrt(head_dim_qk)`.
    Default,
    /// This number; 0 means 0.
    Value(f64),
}

/// A sliding window, by key index: inclusive counts of keys besides the query's own. `None` is unlimited.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Window {
    /// Keys before the query's own index.
    pub left: Option<u64>,
    /// Keys after it.
    pub right: Option<u64>,
}

impl Window {
    /// The window of `total` keys that ends with the query's own key: `left = total - 1`.
    ///
    /// # Errors
    ///
    /// [`Error::OutOfRange`] if `total` is 0.
    pub fn total(total: u64) -> Result<Self, Error> {
        match total.checked_sub(1) {
            Some(left) => Ok(Window { left: Some(left), right: None }),
            None => Err(Error::OutOfRange { what: "window total".into(), value: 0, min: 1, max: i128::from(u64::MAX) }),
        }
    }
}

/// Which keys a query sees. Masks go by key *index*; rotation goes by *position*. All parts apply together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Mask {
    /// Key `j` is visible to query `i` only if `j <= q_start + i`.
    pub causal: bool,
    /// A sliding window.
    pub window: Option<Window>,
    /// A boolean mask is given with each call.
    pub boolean: bool,
}

impl Mask {
    /// Every key is visible.
    pub const NONE: Mask = Mask { causal: false, window: None, boolean: false };
    /// Keys up to the query's own index are visible.
    pub const CAUSAL: Mask = Mask { causal: true, window: None, boolean: false };

    /// This mask and a sliding window.
    #[must_use]
    pub const fn with_window(mut self, window: Window) -> Self {
        self.window = Some(window);
        self
    }

    /// This mask and a boolean mask given with each call.
    #[must_use]
    pub const fn with_boolean(mut self) -> Self {
        self.boolean = true;
        self
    }
}

/// How a cache lies in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum CacheLayout {
    /// A run of slots for each sequence.
    Contiguous,
    /// Blocks of this many slots, found through a block table.
    Paged {
        /// Slots in a block.
        block_size: usize,
    },
}

/// How several position rows of one token share the pairs (M-RoPE).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Sections {
    /// One position for all pairs.
    One,
    /// Runs of pairs, each with its own position row.
    Blocked([usize; 4]),
    /// Position rows in turn.
    Interleaved([usize; 3]),
}

/// The description that [`crate::Plan::new`] takes. Start from a constructor and set what differs.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct AttentionSpec {
    /// What to do.
    pub operation: Operation,
    /// Query heads: a multiple of `heads_kv`. Query head `h` reads key and value head `h / group`.
    pub heads_q: usize,
    /// Key and value heads.
    pub heads_kv: usize,
    /// Elements of a query or key head, 1..=576.
    pub head_dim_qk: usize,
    /// Elements of a value or output head, 1..=576.
    pub head_dim_v: usize,
    /// Storage of Q.
    pub q_dtype: DType,
    /// Storage of K (of new keys, where there is a cache).
    pub k_dtype: DType,
    /// Storage of V (of new values, where there is a cache).
    pub v_dtype: DType,
    /// Storage of cached keys.
    pub k_cache_dtype: DType,
    /// Storage of cached values.
    pub v_cache_dtype: DType,
    /// Storage of the output: f32 or `q_dtype`.
    pub out_dtype: DType,
    /// Which elements of a query and key head turn, and how they pair up.
    pub rotary: RotarySpec,
    /// How position rows share the pairs.
    pub sections: Sections,
    /// Rotate the queries (default), or take them as they are.
    pub rotate_q: bool,
    /// Whether the keys that attention reads are rotated in memory.
    pub keys: Keys,
    /// RMS-normalise each head of Q and K before the rotation, with this epsilon and weights given with each call.
    pub qk_norm: Option<f64>,
    /// Which keys a query sees.
    pub mask: Mask,
    /// Factor on the scores.
    pub scale: Scale,
    /// `s -> cap * tanh(s / cap)`, after the scale. `None` is off.
    pub softcap: Option<f64>,
    /// An additive bias is given with each call.
    pub bias: bool,
    /// ALiBi slopes are given with each call.
    pub alibi: bool,
    /// Attention sinks, one per query head, are given with each call.
    pub sinks: bool,
    /// How the cache lies in memory.
    pub cache: CacheLayout,
}

impl AttentionSpec {
    /// `attend` with one head_dim for Q, K and V, all f32, causal, scale `1 / sqrt(head_dim)`, everything else off.
    pub const fn attend(heads_q: usize, heads_kv: usize, head_dim: usize, rotary: RotarySpec) -> Self {
        AttentionSpec {
            operation: Operation::Attend,
            heads_q,
            heads_kv,
            head_dim_qk: head_dim,
            head_dim_v: head_dim,
            q_dtype: DType::F32,
            k_dtype: DType::F32,
            v_dtype: DType::F32,
            k_cache_dtype: DType::F32,
            v_cache_dtype: DType::F32,
            out_dtype: DType::F32,
            rotary,
            sections: Sections::One,
            rotate_q: true,
            keys: Keys::Raw,
            qk_norm: None,
            mask: Mask::CAUSAL,
            scale: Scale::Default,
            softcap: None,
            bias: false,
            alibi: false,
            sinks: false,
            cache: CacheLayout::Contiguous,
        }
    }

    /// `attend_cached` over a cache whose keys are as `keys` says; otherwise as [`AttentionSpec::attend`].
    pub const fn attend_cached(
        heads_q: usize,
        heads_kv: usize,
        head_dim: usize,
        rotary: RotarySpec,
        keys: Keys,
    ) -> Self {
        let mut spec = Self::attend(heads_q, heads_kv, head_dim, rotary);
        spec.operation = Operation::AttendCached;
        spec.keys = keys;
        spec
    }

    /// This description with another operation: the same layer's `append` or `append_attend`, say.
    #[must_use]
    pub const fn with_operation(mut self, operation: Operation) -> Self {
        self.operation = operation;
        self
    }

    /// This description with all storage (Q, K, V, cache, output) of one type.
    #[must_use]
    pub const fn with_dtype(mut self, dtype: DType) -> Self {
        self.q_dtype = dtype;
        self.out_dtype = dtype;
        self.with_kv_dtype(dtype)
    }

    /// This description with K, V and the cache of one type.
    #[must_use]
    pub const fn with_kv_dtype(mut self, dtype: DType) -> Self {
        self.k_dtype = dtype;
        self.v_dtype = dtype;
        self.k_cache_dtype = dtype;
        self.v_cache_dtype = dtype;
        self
    }

    /// The stand-alone rotation of a tensor of `heads` heads, f32 to f32.
    pub const fn rotate(heads: usize, head_dim: usize, rotary: RotarySpec) -> Self {
        Self::attend(heads, heads, head_dim, rotary).with_operation(Operation::Rotate)
    }

    /// Query heads per key head.
    pub const fn group(&self) -> usize {
        self.heads_q / self.heads_kv
    }

    /// The softmax scale as a number.
    pub fn scale_value(&self) -> f64 {
        match self.scale {
            Scale::Default => 1.0 / libm::sqrt(self.head_dim_qk as f64),
            Scale::Value(value) => value,
        }
    }

    /// Everything that is wrong with the description whatever the tier; the rotation's geometry if it is right.
    pub(crate) fn check(&self) -> Result<Option<Turn>, Error> {
        let sizes = [
            ("heads_q", self.heads_q, 1 << 20),
            ("heads_kv", self.heads_kv, 1 << 20),
            ("head_dim_qk", self.head_dim_qk, MAX_HEAD_DIM),
            ("head_dim_v", self.head_dim_v, MAX_HEAD_DIM),
        ];
        for (name, value, max) in sizes {
            if value == 0 || value > max {
                return Err(Error::OutOfRange { what: name.into(), value: value as i128, min: 1, max: max as i128 });
            }
        }
        if !self.heads_q.is_multiple_of(self.heads_kv) {
            return Err(Error::Heads { heads_q: self.heads_q, heads_kv: self.heads_kv });
        }
        if self.operation != Operation::Rotate && self.out_dtype != DType::F32 && self.out_dtype != self.q_dtype {
            return Err(Error::DType { what: "out_dtype".into(), expected: self.q_dtype, found: self.out_dtype });
        }
        let scale = self.scale_value();
        if !scale.is_finite() {
            return Err(Error::BadNumber { what: "scale".into(), value: scale, need: "finite" });
        }
        if let Some(cap) = self.softcap
            && !(1e-30..=1e30).contains(&cap)
        {
            return Err(Error::BadNumber { what: "softcap".into(), value: cap, need: "positive, from 1e-30 to 1e30" });
        }
        if let Some(eps) = self.qk_norm
            && !(eps.is_finite() && eps >= 0.0)
        {
            return Err(Error::BadNumber { what: "qk_norm".into(), value: eps, need: "finite and not negative" });
        }
        if let CacheLayout::Paged { block_size: 0 } = self.cache {
            return Err(Error::OutOfRange { what: "block_size".into(), value: 0, min: 1, max: i128::from(u32::MAX) });
        }
        self.check_supported()?;
        self.rotary.turn(self.head_dim_qk)
    }

    /// What the types have room for and the drivers do not do yet.
    fn check_supported(&self) -> Result<(), Error> {
        let missing = [
            (self.qk_norm.is_some(), "QK-norm"),
            (self.sections != Sections::One, "M-RoPE sections"),
            (self.cache != CacheLayout::Contiguous, "paged cache"),
        ];
        match missing.into_iter().find(|(wanted, _)| *wanted) {
            Some((_, what)) => Err(Error::Unsupported { what }),
            None => Ok(()),
        }
    }
}

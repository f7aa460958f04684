//! Planning: a pure function of (capabilities, description) that picks the tier, the tile and the loop sizes, and says
//! so. Nothing is decided later, so nothing can fall back in silence. No memory of the caller's is seen here.

use crate::kernel::{Kernels, MAX_TILE, Tier, TierName, Turn};
use crate::rotary::padded;
use crate::spec::{AttentionSpec, Keys, Operation};
use crate::{Error, softmax};
use core::fmt;

/// What the CPU offers: the tiers it can run, and hints.
#[derive(Clone, Copy, Debug)]
pub struct Capabilities {
    tiers: [Option<Tier>; 4],
    required: Option<TierName>,
    /// Bytes of L1 data cache; 0 = unknown = 32 KiB.
    pub l1_bytes: usize,
    /// Bytes of L2 cache per core; 0 = unknown = 512 KiB.
    pub l2_bytes: usize,
    /// Threads that will run tasks; 0 = unknown = 1. Changes how work is cut into tasks, never a bit of the result.
    pub threads: usize,
}

impl Capabilities {
    /// Tiers from least to most; the last is preferred.
    ///
    /// # Panics
    ///
    /// If there are none, or more than four.
    pub fn new(tiers: &[Tier]) -> Self {
        assert!(!tiers.is_empty() && tiers.len() <= 4, "1..=4 tiers, not {}", tiers.len());
        let mut list = [None; 4];
        list.iter_mut().zip(tiers).for_each(|(slot, tier)| *slot = Some(*tier));
        Capabilities { tiers: list, required: None, l1_bytes: 0, l2_bytes: 0, threads: 0 }
    }

    /// The tiers, from least to most.
    pub fn tiers(&self) -> impl DoubleEndedIterator<Item = Tier> + '_ {
        self.tiers.iter().filter_map(|t| *t)
    }

    /// These capabilities with one tier required: planning fails where it can't be had.
    #[must_use]
    pub const fn require(mut self, tier: TierName) -> Self {
        self.required = Some(tier);
        self
    }

    /// These capabilities without the tiers above `tier`.
    ///
    /// # Errors
    ///
    /// [`Error::TierUnavailable`] if `tier` is not among them: the choice can only be lowered.
    pub fn up_to(mut self, tier: TierName) -> Result<Self, Error> {
        let keep = self
            .tiers()
            .position(|t| t.name() == tier)
            .ok_or(Error::TierUnavailable { tier, why: "this CPU, operating system or build does not offer it" })?;
        self.tiers[keep + 1..].fill(None);
        Ok(self)
    }

    /// The tier that plans will use.
    ///
    /// # Errors
    ///
    /// [`Error::TierUnavailable`] if a tier is required and absent.
    pub fn tier(&self) -> Result<Tier, Error> {
        match self.required {
            None => Ok(self.tiers().next_back().expect("never empty")),
            Some(name) => self.tiers().find(|t| t.name() == name).ok_or(Error::TierUnavailable {
                tier: name,
                why: "this CPU, operating system or build does not offer it",
            }),
        }
    }
}

/// Loop sizes. All follow from the tier, the head dims and the cache sizes; none depends on a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Tile {
    /// Query rows of a score tile.
    pub mr: usize,
    /// Key columns of a score tile.
    pub nr: usize,
    /// Keys whose scores are held in L1 at a time.
    pub key_tile: usize,
    /// Keys rotated and packed at a time, to serve all rows of a block; a multiple of `key_tile`.
    pub superblock: usize,
    /// Most flattened query rows (tokens x group) of a task; a multiple of `mr`.
    pub block_rows: usize,
    /// Sequences of at most this many flattened query rows, or of one token, take the few-row path.
    pub few_rows: usize,
    /// Keys of a tile of the few-row path.
    pub few_key_tile: usize,
    /// Keys of a task of the few-row path; longer caches are split at multiples of it and merged.
    pub split_keys: usize,
}

/// Most keys of a score tile held in L1: `mr` rows of it take 4 to 8 KiB.
const KEY_TILE: usize = 256;
/// Most bytes that a block is made for, whatever L2 holds.
const MOST_WORKSPACE: usize = 3 << 19;
/// Least rows of a block: packing a key costs about as much as using it in [`crate::call::PACKED`] of them.
pub(crate) const LEAST_ROWS: usize = 96;
/// Up to this many flattened rows, packing keys costs more than it saves.
const FEW_ROWS: usize = 16;
/// Least keys of a few-row tile.
pub(crate) const FEW_KEY_TILE: usize = 32;
/// Elements of the keys of a few-row tile, where that is more: half of a 32 KiB L1 in f32. (Twice as many keys of half the
/// head_dim share the fixed cost of a softmax row.)
const FEW_KEY_ELEMENTS: usize = 4096;
/// Keys of a few-row task: short enough to occupy many cores, long enough that merging is noise.
const SPLIT_KEYS: usize = 1024;
/// Tokens of an `append` or `rotate` task.
pub(crate) const STORE_TOKENS: usize = 64;

/// A validated description with everything chosen. Copy it freely; it borrows nothing.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    pub(crate) spec: AttentionSpec,
    pub(crate) tier: Tier,
    pub(crate) turn: Option<Turn>,
    pub(crate) tile: Tile,
    /// The sign of the scale (or 0), which rides on the queries.
    pub(crate) q_factor: f32,
    /// `|scale| log2(e)`, by which softmax multiplies the dot products. On the queries it would be rounded with every
    /// element, and where these are alike the error would add up.
    pub(crate) softmax_scale: f32,
    pub(crate) threads: usize,
}

impl Plan {
    /// Plans `spec` for `capabilities`.
    ///
    /// # Errors
    ///
    /// Every invalid size or number of the description, [`Error::Unsupported`] for a combination that is not
    /// implemented, [`Error::TierUnavailable`] for a required tier that is not there.
    pub fn new(capabilities: &Capabilities, spec: &AttentionSpec) -> Result<Plan, Error> {
        let turn = spec.check()?;
        let tier = capabilities.tier()?;
        let scale = (spec.scale_value() * softmax::LOG2_E) as f32;
        if !scale.is_finite() {
            return Err(Error::BadNumber {
                what: "scale".into(),
                value: spec.scale_value(),
                need: "finite in f32 after multiplication by log2(e)",
            });
        }
        let l2 = if capabilities.l2_bytes == 0 { 512 << 10 } else { capabilities.l2_bytes };
        let l1 = if capabilities.l1_bytes == 0 { 32 << 10 } else { capabilities.l1_bytes };
        let tile = Tile::choose(tier.kernels(), spec, l1, l2);
        let (q_factor, softmax_scale) = if scale == 0.0 { (0.0, 1.0) } else { (1f32.copysign(scale), scale.abs()) };
        let threads = capabilities.threads.max(1);
        Ok(Plan { spec: *spec, tier, turn, tile, q_factor, softmax_scale, threads })
    }

    /// The description.
    pub const fn spec(&self) -> &AttentionSpec {
        &self.spec
    }

    /// The tier that every task will run on.
    pub const fn tier(&self) -> TierName {
        self.tier.name()
    }

    /// The loop sizes.
    pub const fn tile(&self) -> &Tile {
        &self.tile
    }

    /// Which elements turn; `None` if the description has no rotation.
    pub const fn turn(&self) -> Option<&Turn> {
        self.turn.as_ref()
    }

    /// The kernel that does most of the work for a sequence of `q_len` queries.
    pub fn kernel(&self, q_len: usize) -> &'static str {
        let names = &self.kernels().names;
        match self.spec.operation {
            Operation::Append | Operation::Rotate => names.load,
            _ if self.is_few(q_len) => names.decode_scores,
            _ => names.scores,
        }
    }

    /// Bytes of workspace that suffice for every task of every call of this plan, one workspace per thread. A prepared
    /// call may need less: see [`crate::Call::workspace_len`].
    pub fn workspace_len(&self) -> usize {
        let rows = self.tile.few_rows.max(self.spec.group());
        self.tile_workspace(self.tile.block_rows).max(self.few_workspace(rows)).max(self.store_workspace())
    }

    pub(crate) fn kernels(&self) -> &'static Kernels {
        self.tier.kernels()
    }

    /// Value columns, padded to whole panels.
    pub(crate) fn padded_v(&self) -> usize {
        self.spec.head_dim_v.next_multiple_of(self.kernels().nv)
    }

    /// Pairs of an angle row, padded.
    pub(crate) fn padded_pairs(&self) -> usize {
        self.turn.map_or(0, |turn| padded(turn.pairs))
    }

    /// True if keys are rotated when attention reads them.
    pub(crate) fn rotates_on_read(&self) -> bool {
        self.turn.is_some() && self.spec.keys == Keys::Raw
    }

    /// True if new keys are rotated on their way into the cache.
    pub(crate) fn rotates_on_store(&self) -> bool {
        self.turn.is_some() && self.spec.keys == Keys::Rotated
    }

    /// Bytes for a block of the tile path that keeps `rows` flattened query rows.
    pub(crate) fn tile_workspace(&self, rows: usize) -> usize {
        let (tile, d, dv) = (&self.tile, self.spec.head_dim_qk, self.padded_v());
        let rows = rows.next_multiple_of(tile.mr);
        arena_bytes(&[
            rows * dv,
            rows,
            rows,
            tile.mr * d,
            tile.superblock * d,
            tile.superblock * dv,
            tile.mr * tile.key_tile,
            tile.mr,
            self.bias_floats(tile.key_tile),
            self.angle_floats(tile.mr),
            self.angle_floats(tile.nr),
        ])
    }

    /// Bytes for `rows` flattened query rows in the few-row path.
    pub(crate) fn few_workspace(&self, rows: usize) -> usize {
        let (tile, d) = (&self.tile, self.spec.head_dim_qk);
        arena_bytes(&[
            rows * d,
            rows * self.spec.head_dim_v,
            rows,
            rows,
            rows,
            rows * tile.few_key_tile,
            self.bias_floats(tile.few_key_tile),
            self.angle_floats(tile.few_key_tile),
            self.angle_floats(1),
            if self.rotates_on_read() { rows * d } else { 0 },
        ])
        .max(self.store_workspace())
    }

    /// Bytes for `append` and `rotate` tasks.
    pub(crate) fn store_workspace(&self) -> usize {
        let dim = self.spec.head_dim_qk.max(self.spec.head_dim_v);
        arena_bytes(&[dim, self.angle_floats(1)])
    }

    /// Floats for the angles of `rows` rows: cos and sin of each, and of the base in f64.
    pub(crate) fn angle_floats(&self, rows: usize) -> usize {
        2 * (rows + 2) * self.padded_pairs()
    }

    /// Floats for the bias of `keys` keys of one row.
    pub(crate) fn bias_floats(&self, keys: usize) -> usize {
        if self.hides() { keys } else { 0 }
    }

    /// True if a bias or a boolean mask can hide keys that are in sight of a row.
    pub(crate) fn hides(&self) -> bool {
        self.spec.bias || self.spec.mask.boolean
    }

    /// True if scores are more than scaled dot products.
    pub(crate) fn adjusts(&self) -> bool {
        self.hides() || self.spec.alibi || self.spec.softcap.is_some()
    }

    /// True if a sequence of `q_len` queries takes the few-row path.
    pub(crate) fn is_few(&self, q_len: usize) -> bool {
        q_len == 1 || q_len.saturating_mul(self.spec.group()) <= self.tile.few_rows
    }
}

/// Bytes of an [`crate::arena::Arena`] that holds these runs of floats.
fn arena_bytes(floats: &[usize]) -> usize {
    crate::arena::ALIGN + floats.iter().map(|n| crate::arena::padded(*n) * 4).sum::<usize>()
}

impl Tile {
    fn choose(kernels: &Kernels, spec: &AttentionSpec, l1: usize, l2: usize) -> Tile {
        let (mr, nr) = (kernels.mr, kernels.nr);
        assert!(mr <= MAX_TILE && nr <= MAX_TILE);
        // The scores of a tile take at most a quarter of L1, up to the size beyond which nothing is gained.
        let key_tile = (l1 / 4 / (4 * mr)).clamp(nr, KEY_TILE) / nr * nr;
        // Packed K and V of a superblock take at most half of L2, and whole key tiles; one tile at the least.
        let key_bytes = 4 * (spec.head_dim_qk + spec.head_dim_v);
        let superblock = (l2 / 2 / key_bytes / key_tile).clamp(1, 4) * key_tile;
        // With the accumulated rows of a block, at most three quarters.
        let fixed = superblock * key_bytes + 4 * mr * (key_tile + key_bytes / 4) + 4 * (mr + nr) * spec.head_dim_qk;
        let row_bytes = 4 * (spec.head_dim_v.next_multiple_of(kernels.nv) + 2);
        let rows = (l2 / 4 * 3).min(MOST_WORKSPACE).saturating_sub(fixed) / row_bytes;
        let block_rows = rows.max(LEAST_ROWS) / mr * mr;
        Tile {
            mr,
            nr,
            key_tile,
            superblock,
            block_rows,
            few_rows: FEW_ROWS,
            few_key_tile: (FEW_KEY_ELEMENTS / spec.head_dim_qk.max(spec.head_dim_v) / FEW_KEY_TILE * FEW_KEY_TILE)
                .clamp(FEW_KEY_TILE, MAX_TILE.min(kernels.sum_run)),
            split_keys: SPLIT_KEYS,
        }
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (spec, tile, names) = (&self.spec, &self.tile, &self.kernels().names);
        writeln!(f, "tier        {}", self.tier())?;
        match spec.operation {
            Operation::Append | Operation::Rotate => writeln!(f, "kernel      {}", names.load)?,
            _ => {
                writeln!(f, "kernels     prefill {}, {}", names.scores, names.weighted_sum)?;
                writeln!(
                    f,
                    "            one token, or up to {} query rows: {}, {}",
                    tile.few_rows, names.decode_scores, names.decode_sum
                )?;
                writeln!(
                    f,
                    "tile        {} query rows x {} keys; {} keys in L1, {} packed at a time, up to {} rows per task",
                    tile.mr, tile.nr, tile.key_tile, tile.superblock, tile.block_rows
                )?;
            }
        }
        match (self.turn, spec.operation) {
            (None, _) => writeln!(f, "rotation    none")?,
            (Some(turn), Operation::Rotate) => writeln!(f, "rotation    {} pairs, {:?}", turn.pairs, turn.style)?,
            (Some(turn), _) => writeln!(
                f,
                "rotation    {} pairs, {:?}; queries {}, keys {}",
                turn.pairs,
                turn.style,
                if spec.rotate_q { "in the tile" } else { "as they are" },
                match (spec.operation, spec.keys) {
                    (Operation::Attend | Operation::AttendCached, Keys::Raw) => "in the tile",
                    (Operation::Attend | Operation::AttendCached, Keys::Rotated) => "as they are",
                    (Operation::Append, Keys::Raw) => "stored as they are",
                    (_, Keys::Raw) => "stored as they are, rotated in the tile",
                    (_, Keys::Rotated) => "rotated when stored",
                }
            )?,
        }
        write!(f, "workspace   {} KiB per thread", self.workspace_len().div_ceil(1024))
    }
}

//! The plain C lane, one compilation for each instruction set.

use rotile::TierName;

type Rope = unsafe extern "C" fn(*const f32, *mut f32, *const f32, *const f32, usize, usize, usize, usize, usize);
type Store = unsafe extern "C" fn(*const f32, *mut f32, usize, usize, usize, usize, usize);
type Prefill =
    unsafe extern "C" fn(*const f32, *const f32, *const f32, *mut f32, *mut f32, usize, usize, usize, usize, f32);
type Decode = unsafe extern "C" fn(*const f32, *const f32, *const f32, *mut f32, usize, usize, usize, usize, f32);

/// Sizes of an attention.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sizes {
    pub(crate) tokens: usize,
    pub(crate) heads_q: usize,
    pub(crate) heads_kv: usize,
    pub(crate) dim: usize,
}

/// Keys of a block of the C code; its work area is padded to whole blocks.
const BLOCK: usize = 64;
/// As in the C code.
const MAX_DIM: usize = 256;
/// As in the C code.
const MAX_GROUP: usize = 16;

/// C functions compiled for one instruction set.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PlainC {
    rope: Rope,
    store: Store,
    prefill: Prefill,
    decode: Decode,
}

macro_rules! compiled {
    ($rope:ident, $store:ident, $prefill:ident, $decode:ident) => {{
        unsafe extern "C" {
            fn $rope(
                x: *const f32,
                y: *mut f32,
                cos: *const f32,
                sin: *const f32,
                t: usize,
                h: usize,
                d: usize,
                yt: usize,
                yh: usize,
            );
            fn $store(x: *const f32, y: *mut f32, t: usize, h: usize, d: usize, yt: usize, yh: usize);
            fn $prefill(
                q: *const f32,
                k: *const f32,
                v: *const f32,
                o: *mut f32,
                w: *mut f32,
                t: usize,
                hq: usize,
                hkv: usize,
                d: usize,
                s: f32,
            );
            fn $decode(
                q: *const f32,
                k: *const f32,
                v: *const f32,
                o: *mut f32,
                t: usize,
                hq: usize,
                hkv: usize,
                d: usize,
                s: f32,
            );
        }
        PlainC { rope: $rope, store: $store, prefill: $prefill, decode: $decode }
    }};
}

impl PlainC {
    /// The functions compiled for what `tier` may use, of a tier that this CPU has.
    pub(crate) fn of(tier: TierName) -> PlainC {
        match tier {
            #[cfg(target_arch = "x86_64")]
            TierName::Avx2 => compiled!(
                rotile_plain_rope_avx2,
                rotile_plain_store_avx2,
                rotile_plain_prefill_avx2,
                rotile_plain_decode_avx2
            ),
            #[cfg(plain_avx512)]
            TierName::Avx512 => compiled!(
                rotile_plain_rope_avx512,
                rotile_plain_store_avx512,
                rotile_plain_prefill_avx512,
                rotile_plain_decode_avx512
            ),
            _ => compiled!(
                rotile_plain_rope_base,
                rotile_plain_store_base,
                rotile_plain_prefill_base,
                rotile_plain_decode_base
            ),
        }
    }

    /// Fails where the C code's fixed arrays or block lengths do not fit.
    pub(crate) fn check(sizes: &Sizes) -> Result<(), String> {
        let Sizes { heads_q, heads_kv, dim, .. } = *sizes;
        if !dim.is_multiple_of(16)
            || dim > MAX_DIM
            || !heads_q.is_multiple_of(heads_kv)
            || heads_q / heads_kv > MAX_GROUP
        {
            return Err(format!(
                "plain C takes a head_dim that is a multiple of 16 up to {MAX_DIM} and groups of up to {MAX_GROUP} query \
                 heads, not {heads_q}/{heads_kv}x{dim}"
            ));
        }
        Ok(())
    }

    /// Floats of work area for `prefill`.
    pub(crate) fn work_len(sizes: &Sizes) -> usize {
        sizes.tokens.next_multiple_of(BLOCK) * sizes.dim
    }

    /// Rotates contiguous `[token, head, dim]` into strides of (token, head).
    pub(crate) fn rope(
        &self,
        x: &[f32],
        y: &mut [f32],
        (cos, sin): (&[f32], &[f32]),
        heads: usize,
        dim: usize,
        (token, head): (usize, usize),
    ) {
        let tokens = x.len() / (heads * dim);
        assert!(x.len() == tokens * heads * dim && dim.is_multiple_of(2) && tokens > 0);
        assert!(cos.len() >= tokens * dim / 2 && sin.len() >= tokens * dim / 2);
        assert!(y.len() >= (tokens - 1) * token + (heads - 1) * head + dim);
        // SAFETY: every row lies in its slice, as just checked; `y` is borrowed alone, so it overlaps nothing.
        unsafe {
            (self.rope)(x.as_ptr(), y.as_mut_ptr(), cos.as_ptr(), sin.as_ptr(), tokens, heads, dim, token, head);
        }
    }

    /// Copies contiguous `[token, head, dim]` into strides of (token, head).
    pub(crate) fn store(&self, x: &[f32], y: &mut [f32], heads: usize, dim: usize, (token, head): (usize, usize)) {
        let tokens = x.len() / (heads * dim);
        assert!(tokens > 0 && y.len() >= (tokens - 1) * token + (heads - 1) * head + dim);
        // SAFETY: every row lies in its slice, as just checked; `y` is borrowed alone, so it overlaps nothing.
        unsafe { (self.store)(x.as_ptr(), y.as_mut_ptr(), tokens, heads, dim, token, head) }
    }

    /// Causal attention over contiguous `[token, head, dim]`.
    pub(crate) fn prefill(&self, sizes: &Sizes, q: &[f32], k: &[f32], v: &[f32], out: &mut [f32], work: &mut [f32]) {
        let Sizes { tokens, heads_q, heads_kv, dim } = *sizes;
        assert!(Self::check(sizes).is_ok() && work.len() >= Self::work_len(sizes));
        assert!(q.len() == tokens * heads_q * dim && out.len() == q.len());
        assert!(k.len() == tokens * heads_kv * dim && v.len() == k.len());
        let scale = 1.0 / (dim as f32).sqrt();
        let (q, k, v, out, work) = (q.as_ptr(), k.as_ptr(), v.as_ptr(), out.as_mut_ptr(), work.as_mut_ptr());
        // SAFETY: lengths are as just checked and the mutable borrows overlap nothing; the instruction set is a tier's
        // that this CPU has.
        unsafe { (self.prefill)(q, k, v, out, work, tokens, heads_q, heads_kv, dim, scale) }
    }

    /// One query token over a cache `[head, token, dim]`.
    pub(crate) fn decode(&self, sizes: &Sizes, q: &[f32], k: &[f32], v: &[f32], out: &mut [f32]) {
        let Sizes { tokens, heads_q, heads_kv, dim } = *sizes;
        assert!(Self::check(sizes).is_ok() && q.len() == heads_q * dim && out.len() == q.len());
        assert!(k.len() == tokens * heads_kv * dim && v.len() == k.len());
        let scale = 1.0 / (dim as f32).sqrt();
        let (q, k, v, out) = (q.as_ptr(), k.as_ptr(), v.as_ptr(), out.as_mut_ptr());
        // SAFETY: as in `prefill`.
        unsafe { (self.decode)(q, k, v, out, tokens, heads_q, heads_kv, dim, scale) }
    }
}

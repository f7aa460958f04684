//! The analytic view: which tensors a lane must read and write, and how many bytes that is. It knows no cache but one:
//! whether what was just written is still there when it is read again.

use crate::cases::{Case, Shape, Step, Way};
use rotile::rotary::RotaryTable;

/// One pass over one tensor.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Pass {
    /// `Q`, `K`, `V`, `O`, `table`, or `Q'` and `K'` for rotated copies.
    pub tensor: &'static str,
    /// Written, or else read.
    pub written: bool,
    /// Bytes.
    pub bytes: f64,
}

/// Every pass of a lane, in order.
#[derive(Clone, Debug, PartialEq)]
pub struct Model {
    /// The passes.
    pub passes: Vec<Pass>,
}

impl Model {
    /// Of a case.
    pub fn of(case: &Case) -> Model {
        let Case { shape: Shape { heads_q, heads_kv, head_dim, tokens, .. }, step, dtype, way } = *case;
        let q = (case.q_len() * heads_q * head_dim * 4) as f64;
        let kv = (tokens * heads_kv * head_dim) as f64;
        let (f32_kv, stored_kv) = (kv * 4.0, kv * dtype.size() as f64);
        let table = match way {
            Way::PreRotated => 0.0,
            // Every cos and sin of the positions that turn.
            Way::PlainC => (if step == Step::Decode { 1 } else { tokens } * head_dim * 4) as f64,
            _ => RotaryTable::storage_len(head_dim / 2, tokens as u32).map_or(0.0, |n| (n * 8) as f64),
        };
        let mut passes = Vec::new();
        let mut pass = |tensor, written, bytes| passes.push(Pass { tensor, written, bytes });
        let copies_q = matches!(way, Way::Separate | Way::PlainC) && step != Step::Append || step == Step::Rotate;
        // Plain C rotates a new key straight into the cache.
        let copies_k =
            copies_q && !matches!(step, Step::Decode | Step::DecodeRaw) || way == Way::Separate && step == Step::Append;
        if copies_q {
            pass("Q", false, q);
            pass("table", false, table);
            pass("Q'", true, q);
        }
        if copies_k {
            pass("K", false, f32_kv);
            pass("table", false, table);
            pass("K'", true, f32_kv);
        }
        if !copies_q && !copies_k && way != Way::PreRotated {
            pass("table", false, table);
        }
        let (q_name, k_name) = (if copies_q { "Q'" } else { "Q" }, if copies_k { "K'" } else { "K" });
        match step {
            Step::Rotate => {}
            Step::Append => {
                pass(k_name, false, f32_kv);
                pass("V", false, f32_kv);
                pass("cached K", true, stored_kv);
                pass("cached V", true, stored_kv);
            }
            Step::Prefill | Step::Decode | Step::DecodeRaw => {
                pass(q_name, false, q);
                pass(k_name, false, stored_kv);
                pass("V", false, stored_kv);
                pass("O", true, q);
            }
        }
        Model { passes }
    }

    /// Bytes read.
    pub fn read(&self) -> f64 {
        self.sum(|pass| !pass.written)
    }

    /// Bytes written.
    pub fn written(&self) -> f64 {
        self.sum(|pass| pass.written)
    }

    /// All bytes.
    pub fn total(&self) -> f64 {
        self.sum(|_| true)
    }

    /// Bytes of the rotated copies.
    pub fn copies(&self) -> f64 {
        self.sum(|pass| pass.written && pass.tensor.ends_with('\''))
    }

    /// Bytes that a cache of `capacity` has to fetch: what it still holds of the rotated copies, it need not. Between the
    /// writing of a copy and its reading, the rest of the originals and of the copies goes through the cache.
    pub fn past(&self, capacity: usize) -> f64 {
        let fits = 2.0 * self.copies() <= capacity as f64;
        self.total() - if fits { self.copies() } else { 0.0 }
    }

    fn sum(&self, which: impl Fn(&Pass) -> bool) -> f64 {
        self.passes.iter().filter(|pass| which(pass)).map(|pass| pass.bytes).sum()
    }
}

/// Useful FLOPs per byte that must move.
pub fn intensity(case: &Case) -> f64 {
    case.flops() / Model::of(case).total()
}

#[cfg(test)]
mod tests {
    use super::*;
    use rotile::DType;

    /// 2/1x64, 3 tokens: Q and O take 1536 bytes, K and V 768 each.
    fn model(step: Step, way: Way, dtype: DType) -> Model {
        Model::of(&Case::new(step, Shape::new(2, 1, 64, 3), way).with_dtype(dtype))
    }

    #[test]
    fn prefill_by_hand() {
        let table = RotaryTable::storage_len(32, 3).unwrap() as f64 * 8.0;
        let fused = model(Step::Prefill, Way::Fused, DType::F32);
        assert_eq!((fused.read(), fused.written(), fused.copies()), (1536.0 + 2.0 * 768.0 + table, 1536.0, 0.0));
        let separate = model(Step::Prefill, Way::Separate, DType::F32);
        // Q, K read; Q', K' written and read; V read; O written; the table read twice.
        assert_eq!(separate.read(), 2.0 * (1536.0 + 768.0) + 768.0 + 2.0 * table);
        assert_eq!(separate.written(), 1536.0 + 768.0 + 1536.0);
        assert_eq!(separate.copies(), 2304.0);
        // 4608 bytes hold originals and copies: the second reading is free.
        assert_eq!(separate.past(4608), separate.total() - 2304.0);
        assert_eq!(separate.past(4607), separate.total());
        let pre_rotated = model(Step::Prefill, Way::PreRotated, DType::F32);
        assert_eq!(fused.total() - pre_rotated.total(), table);
        // Plain C reads an f32 cos and sin for each position and pair, twice.
        let plain = model(Step::Prefill, Way::PlainC, DType::F32);
        assert_eq!(separate.total() - plain.total(), 2.0 * (table - 768.0));
    }

    #[test]
    fn caches_by_hand() {
        let decode = model(Step::Decode, Way::PreRotated, DType::F16);
        assert_eq!((decode.read(), decode.written()), (512.0 + 2.0 * 384.0, 512.0));
        let append = model(Step::Append, Way::PreRotated, DType::F16);
        assert_eq!((append.read(), append.written()), (2.0 * 768.0, 2.0 * 384.0));
        let fused = model(Step::Append, Way::Fused, DType::F32);
        let separate = model(Step::Append, Way::Separate, DType::F32);
        assert_eq!(separate.total() - fused.total(), 2.0 * 768.0);
        let rotate = model(Step::Rotate, Way::Separate, DType::F32);
        assert_eq!(rotate.written(), 2304.0);
    }
}

//! Conformance vectors: safetensors files whose metadata holds a `case` in JSON. The formats are described in
//! `tests/vectors/README.md`. Anything that does not read as such is an error with its reason, never a panic.

use crate::data::Data;
use crate::reference::{Heads, Problem, Rotation, Seq};
use half::{bf16, f16};
use rotile_core::rotary::PairStyle;
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;
use std::path::{Path, PathBuf};

/// The folder of vectors that ships with the repository.
pub fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../vectors")
}

/// The vectors in a folder, sorted by name.
///
/// # Errors
///
/// If the folder can't be read, or holds none.
pub fn list(dir: &Path) -> Result<Vec<PathBuf>, String> {
    let entries = std::fs::read_dir(dir).map_err(|e| format!("{}: {e}", dir.display()))?;
    let mut files: Vec<PathBuf> = entries
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| path.extension().is_some_and(|e| e == "safetensors"))
        .collect();
    files.sort();
    if files.is_empty() {
        return Err(format!("{}: no *.safetensors here", dir.display()));
    }
    Ok(files)
}

/// An attention and what it should give.
#[derive(Clone, Debug)]
pub struct Case {
    /// Its name.
    pub name: String,
    /// Inputs as one sequence; positions are explicit.
    pub problem: Problem,
    /// How the rotated pairs are laid out.
    pub part: Part,
    /// Output, `[token, head, dim]`.
    pub out: Vec<f64>,
    /// Natural-log sums of exponentials, `[token, head]`, where the vector has them.
    pub lse: Option<Vec<f64>>,
    /// Largest error allowed, as a fraction of the largest output, where the vector is a model's own output.
    pub of_largest: Option<f64>,
    /// Epsilon and the weights of Q and K of the RMS norm.
    pub qk_norm: Option<(f64, Vec<f32>, Vec<f32>)>,
    /// M-RoPE: kind and sections.
    pub mrope: Option<(String, Vec<usize>)>,
}

/// Which form of partial rotation a case has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// A slice at `offset` of the rotation.
    Slice,
    /// Pairs over the whole head, of which the first so many turn.
    Proportional(usize),
}

/// Reads one vector.
///
/// # Errors
///
/// What is wrong with the file.
pub fn load(path: &Path) -> Result<Case, String> {
    let bytes = std::fs::read(path).map_err(|e| e.to_string())?;
    let file = File::new(&bytes)?;
    if file.case.get("tokens").is_some() { real(&file) } else { attention(&file) }
}

struct File<'a> {
    tensors: SafeTensors<'a>,
    case: Value,
}

impl<'a> File<'a> {
    fn new(bytes: &'a [u8]) -> Result<Self, String> {
        let (_, metadata) = SafeTensors::read_metadata(bytes).map_err(|e| format!("no safetensors file: {e}"))?;
        let tensors = SafeTensors::deserialize(bytes).map_err(|e| format!("no safetensors file: {e}"))?;
        let text = metadata.metadata().as_ref().and_then(|m| m.get("case")).ok_or("no `case` in the metadata")?;
        let case = serde_json::from_str(text).map_err(|e| format!("`case` is no JSON: {e}"))?;
        Ok(File { tensors, case })
    }

    fn size(&self, name: &str) -> Result<usize, String> {
        let size = self.case.get(name).and_then(Value::as_u64).ok_or(format!("`case` has no size `{name}`"))?;
        if size > 1 << 24 { Err(format!("`{name}` is {size}")) } else { Ok(size as usize) }
    }

    fn number(&self, name: &str) -> Result<f64, String> {
        self.case.get(name).and_then(Value::as_f64).ok_or(format!("`case` has no number `{name}`"))
    }

    /// The elements of a tensor of that shape, as bytes.
    fn bytes(&self, name: &str, dtype: Dtype, shape: &[usize]) -> Result<&'a [u8], String> {
        let tensor = self.tensors.tensor(name).map_err(|_| format!("no tensor `{name}`"))?;
        if tensor.dtype() != dtype || tensor.shape() != shape {
            let (found, of) = (tensor.dtype(), tensor.shape());
            return Err(format!("`{name}` is {found:?} {of:?}, not {dtype:?} {shape:?}"));
        }
        Ok(tensor.data())
    }

    fn has(&self, name: &str) -> bool {
        self.tensors.tensor(name).is_ok()
    }

    fn f64s(&self, name: &str, shape: &[usize]) -> Result<Vec<f64>, String> {
        let bytes = self.bytes(name, Dtype::F64, shape)?;
        Ok(bytes.chunks_exact(8).map(|b| f64::from_le_bytes(b.try_into().expect("8 bytes"))).collect())
    }

    fn f32s(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>, String> {
        let bytes = self.bytes(name, Dtype::F32, shape)?;
        Ok(bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().expect("4 bytes"))).collect())
    }

    fn optional_f32s(&self, name: &str, shape: &[usize]) -> Result<Option<Vec<f32>>, String> {
        if self.has(name) { self.f32s(name, shape).map(Some) } else { Ok(None) }
    }

    fn data(&self, name: &str, dtype: &str, shape: &[usize]) -> Result<Data, String> {
        let bits = |bytes: &[u8]| -> Vec<u16> {
            bytes.chunks_exact(2).map(|b| u16::from_le_bytes(b.try_into().expect("2 bytes"))).collect()
        };
        match dtype {
            "f32" => Ok(Data::F32(self.f32s(name, shape)?)),
            "f16" => {
                let bits = bits(self.bytes(name, Dtype::F16, shape)?);
                Ok(Data::F16(bits.into_iter().map(f16::from_bits).collect()))
            }
            "bf16" => {
                let bits = bits(self.bytes(name, Dtype::BF16, shape)?);
                Ok(Data::Bf16(bits.into_iter().map(bf16::from_bits).collect()))
            }
            other => Err(format!("unknown dtype `{other}`")),
        }
    }

    fn positions(&self, name: &str, rows: usize, n: usize) -> Result<Vec<u32>, String> {
        let shape: &[usize] = if rows == 1 { &[n] } else { &[rows, n] };
        let bytes = self.bytes(name, Dtype::I64, shape)?;
        bytes
            .chunks_exact(8)
            .map(|b| i64::from_le_bytes(b.try_into().expect("8 bytes")))
            .map(|p| u32::try_from(p).map_err(|_| format!("position {p}")))
            .collect()
    }
}

/// `[head, token, dim]` to `[token, head, dim]`.
fn token_major<T: Copy>(x: &[T], heads: usize, tokens: usize, dim: usize) -> Vec<T> {
    let mut out = Vec::with_capacity(x.len());
    for token in 0..tokens {
        for head in 0..heads {
            out.extend_from_slice(&x[(head * tokens + token) * dim..][..dim]);
        }
    }
    out
}

fn token_major_data(x: &Data, heads: usize, tokens: usize, dim: usize) -> Data {
    match x {
        Data::F32(x) => Data::F32(token_major(x, heads, tokens, dim)),
        Data::F16(x) => Data::F16(token_major(x, heads, tokens, dim)),
        Data::Bf16(x) => Data::Bf16(token_major(x, heads, tokens, dim)),
    }
}

fn style(value: &Value) -> Result<PairStyle, String> {
    match value.get("style").and_then(Value::as_str) {
        Some("half") => Ok(PairStyle::Half),
        Some("interleaved") => Ok(PairStyle::Interleaved),
        other => Err(format!("pair style {other:?}")),
    }
}

/// An `attn_*` file.
fn attention(file: &File<'_>) -> Result<Case, String> {
    let case = &file.case;
    let heads = Heads {
        q: file.size("heads_q")?,
        kv: file.size("heads_kv")?,
        dim_qk: file.size("dim_qk")?,
        dim_v: file.size("dim_v")?,
    };
    let (nq, nk) = (file.size("nq")?, file.size("nk")?);
    let text = |value: &Value, name: &str| value.get(name).and_then(Value::as_str).map(str::to_owned);
    let name = text(case, "name").ok_or("`case` has no name")?;
    let dtype = text(case, "dtype").ok_or("`case` has no dtype")?;
    let q_start = case.get("q_start").and_then(Value::as_i64).ok_or("`case` has no q_start")?;
    let optional = |name: &str| case.get(name).filter(|v| !v.is_null());
    let window = |name: &str| match optional(name) {
        None => Ok(None),
        Some(v) => v.as_u64().map(Some).ok_or(format!("`{name}` is {v}")),
    };

    let mut part = Part::Slice;
    let mut mrope = None;
    let rotation = match optional("rotary") {
        None => None,
        Some(rotary) => {
            let size = |name: &str| {
                rotary.get(name).and_then(Value::as_u64).map(|n| n as usize).ok_or(format!("rotary has no `{name}`"))
            };
            let pairs = size("pairs")?;
            let inv_freq = file.f64s("inv_freq", &[pairs])?;
            let parameters = rotary.get("rope_parameters").ok_or("rotary has no rope_parameters")?;
            if text(parameters, "rope_type").as_deref() == Some("proportional") {
                let turned = inv_freq.iter().rposition(|f| *f != 0.0).map_or(0, |last| last + 1);
                part = Part::Proportional(turned);
            }
            if let Some(m) = rotary.get("mrope").filter(|m| !m.is_null()) {
                let sections = m.get("sections").and_then(Value::as_array).ok_or("mrope has no sections")?;
                let sections = sections.iter().filter_map(Value::as_u64).map(|n| n as usize).collect();
                mrope = Some((text(m, "kind").ok_or("mrope has no kind")?, sections));
            }
            let offset = size("offset")?;
            if offset.saturating_add(2 * pairs) > heads.dim_qk {
                return Err(format!("{pairs} pairs from {offset} on leave the head of {}", heads.dim_qk));
            }
            Some(Rotation {
                style: style(rotary)?,
                offset,
                distance: pairs,
                inv_freq,
                amplitude: rotary.get("attention_factor").and_then(Value::as_f64).ok_or("no attention_factor")?,
            })
        }
    };
    let positions = if file.has("positions") {
        file.positions("positions", 1, nk)?
    } else if file.has("mrope_positions") {
        file.positions("mrope_positions", 3, nk)?[..nk].to_vec()
    } else {
        (0..nk as u32).collect()
    };
    let q_positions = (0..nq as i64)
        .map(|i| usize::try_from(q_start.saturating_add(i)).ok().and_then(|j| positions.get(j).copied()).unwrap_or(0))
        .collect();
    let read = |name: &str, heads: usize, tokens: usize, dim: usize| {
        let data = file.data(name, &dtype, &[heads, tokens, dim])?;
        Ok::<_, String>(token_major_data(&data, heads, tokens, dim))
    };
    let mask = match file.has("mask") {
        false => None,
        true => Some(file.bytes("mask", Dtype::BOOL, &[1, nq, nk])?.iter().map(|&b| b != 0).collect()),
    };
    let seq = Seq {
        q_len: nq,
        kv_len: nk,
        q_start,
        q: read("q", heads.q, nq, heads.dim_qk)?,
        k: read("k", heads.kv, nk, heads.dim_qk)?,
        v: read("v", heads.kv, nk, heads.dim_v)?,
        q_positions,
        k_positions: positions,
        prefix_len: 0,
        bias: file.optional_f32s("bias", &[heads.q, nq, nk])?.map(Data::F32),
        mask,
    };
    let qk_norm = match optional("qk_norm") {
        None => None,
        Some(norm) => Some((
            norm.get("eps").and_then(Value::as_f64).ok_or("qk_norm has no eps")?,
            file.f32s("q_norm", &[heads.dim_qk])?,
            file.f32s("k_norm", &[heads.dim_qk])?,
        )),
    };
    Ok(Case {
        name,
        problem: Problem {
            heads,
            rotation,
            rotate_q: true,
            keys_rotated: false,
            scale: file.number("scale")?,
            causal: case.get("causal").and_then(Value::as_bool).ok_or("`case` has no causal")?,
            left: window("left")?,
            right: window("right")?,
            softcap: optional("softcap").and_then(Value::as_f64),
            alibi: file.optional_f32s("alibi_slopes", &[heads.q])?,
            sinks: file.optional_f32s("sinks", &[heads.q])?,
            sequences: vec![seq],
        },
        part,
        out: token_major(&file.f64s("out", &[heads.q, nq, heads.dim_v])?, heads.q, nq, heads.dim_v),
        lse: match file.has("lse") {
            true => Some(token_major(&file.f64s("lse", &[heads.q, nq])?, heads.q, nq, 1)),
            false => None,
        },
        of_largest: None,
        qk_norm,
        mrope,
    })
}

/// Activations of a model with its own output.
fn real(file: &File<'_>) -> Result<Case, String> {
    let case = &file.case;
    let (tokens, dim) = (file.size("tokens")?, file.size("dim")?);
    let heads = Heads { q: file.size("heads_q")?, kv: file.size("heads_kv")?, dim_qk: dim, dim_v: dim };
    let rotary = case.get("rotary").ok_or("`case` has no rotary")?;
    let base = rotary.get("base").and_then(Value::as_f64).ok_or("rotary has no base")?;
    let rotary_dim = rotary.get("dim").and_then(Value::as_u64).ok_or("rotary has no dim")?;
    let rotary_dim = usize::try_from(rotary_dim).ok().filter(|&n| n <= dim).ok_or("rotary is wider than the head")?;
    if rotary.get("scaling").is_some_and(|s| !s.is_null()) {
        return Err("rotary scaling is not known for this format".into());
    }
    let mask = case.get("mask").ok_or("`case` has no mask")?;
    let norm = case.get("qk_norm").ok_or("`case` has no qk_norm")?;
    let positions: Vec<u32> = (0..tokens as u32).collect();
    let out = file.f32s("out", &[tokens, heads.q, dim])?;
    Ok(Case {
        name: case.get("name").and_then(Value::as_str).ok_or("`case` has no name")?.to_owned(),
        problem: Problem {
            heads,
            rotation: Some(Rotation {
                style: style(rotary)?,
                offset: 0,
                distance: rotary_dim / 2,
                inv_freq: (0..rotary_dim / 2).map(|i| base.powf(-2.0 * i as f64 / rotary_dim as f64)).collect(),
                amplitude: 1.0,
            }),
            rotate_q: true,
            keys_rotated: false,
            scale: file.number("scale")?,
            causal: mask.get("causal").and_then(Value::as_bool).ok_or("mask has no causal")?,
            left: match mask.get("window_total").and_then(Value::as_u64) {
                Some(total) => Some(total.checked_sub(1).ok_or("window_total is 0")?),
                None => None,
            },
            right: None,
            softcap: None,
            alibi: None,
            sinks: None,
            sequences: vec![Seq {
                q_len: tokens,
                kv_len: tokens,
                q_start: 0,
                q: Data::F32(file.f32s("q", &[tokens, heads.q, dim])?),
                k: Data::F32(file.f32s("k", &[tokens, heads.kv, dim])?),
                v: Data::F32(file.f32s("v", &[tokens, heads.kv, dim])?),
                q_positions: positions.clone(),
                k_positions: positions,
                prefix_len: 0,
                bias: None,
                mask: None,
            }],
        },
        part: Part::Slice,
        out: out.into_iter().map(f64::from).collect(),
        lse: None,
        of_largest: Some(2e-5),
        qk_norm: Some((
            norm.get("eps").and_then(Value::as_f64).ok_or("qk_norm has no eps")?,
            file.f32s("q_norm", &[dim])?,
            file.f32s("k_norm", &[dim])?,
        )),
        mrope: None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::Rng;

    #[test]
    fn every_vector_of_the_repository_is_read() {
        let mut cases = 0;
        for path in list(&repository()).unwrap() {
            match load(&path) {
                Ok(case) => {
                    cases += 1;
                    let s = &case.problem.sequences[0];
                    let heads = case.problem.heads;
                    assert_eq!(s.q.len(), s.q_len * heads.q * heads.dim_qk, "{}", case.name);
                    assert_eq!(case.out.len(), s.q_len * heads.q * heads.dim_v, "{}", case.name);
                    assert!(path.file_stem().is_some_and(|stem| stem.to_string_lossy().ends_with(&case.name)));
                }
                // The one file of tables is no attention, and says so.
                Err(why) => assert!(path.ends_with("rotary_tables.safetensors"), "{}: {why}", path.display()),
            }
        }
        assert!(cases >= 27, "{cases} cases");
    }

    /// A spoilt file, whose header is `edit` of the true one's text.
    fn spoilt(bytes: &[u8], edit: impl Fn(String) -> String) -> Vec<u8> {
        let header = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let text = edit(String::from_utf8(bytes[8..header].to_vec()).unwrap());
        let mut out = (text.len() as u64).to_le_bytes().to_vec();
        out.extend_from_slice(text.as_bytes());
        out.extend_from_slice(&bytes[header..]);
        out
    }

    #[test]
    fn what_is_no_vector_is_an_error_and_never_a_panic() {
        let bytes = std::fs::read(repository().join("attn_bool-mask-empty-row.safetensors")).unwrap();
        let read = |bytes: &[u8]| File::new(bytes).and_then(|file| attention(&file));
        read(&bytes).unwrap();
        for end in [0, 7, 8, 100, bytes.len() - 1] {
            read(&bytes[..end]).unwrap_err();
        }
        let quoted = |name: &str, value: &str| format!("\\\"{name}\\\": {value}");
        for (name, from, to) in [
            ("pairs", "32", "33"),
            ("pairs", "32", "18446744073709551615"),
            ("offset", "0", "18446744073709551615"),
            ("offset", "0", "1"),
            ("nq", "31", "30"),
            ("nk", "67", "16777217"),
            ("heads_kv", "2", "0"),
            ("heads_q", "4", "-4"),
            ("dim_v", "64", "1e3"),
            ("scale", "0.125", "null"),
            ("causal", "false", "0"),
        ] {
            let (from, to) = (quoted(name, from), quoted(name, to));
            let changed = spoilt(&bytes, |text| text.replacen(&from, &to, 1));
            assert_ne!(changed, bytes, "{from} is not in the header");
            assert!(read(&changed).is_err(), "{to} was read");
        }
        // No query of these has a key, but they are as good as others.
        for start in ["9223372036854775807", "-9223372036854775808"] {
            let changed = spoilt(&bytes, |text| text.replacen(&quoted("q_start", "36"), &quoted("q_start", start), 1));
            assert_eq!(read(&changed).unwrap().problem.sequences[0].q_start.to_string(), start);
        }
        // Whatever is written over a byte of the header.
        let header = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let mut rng = Rng::new(1);
        let mut spoilt = bytes;
        for _ in 0..2000 {
            let at = rng.size(0, header - 1);
            let was = spoilt[at];
            spoilt[at] = if rng.one_in(2) { b'0' + rng.size(0, 9) as u8 } else { rng.size(0, 255) as u8 };
            let _ = read(&spoilt);
            spoilt[at] = was;
        }
    }
}

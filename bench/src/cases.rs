//! What is measured: model shapes, steps of a model and the ways through a step; each with a name that can be parsed.

use rotile::DType;
use std::fmt;
use std::str::FromStr;

/// Heads and tokens of a layer at one step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// A model that has such layers.
    pub model: &'static str,
    /// Query heads.
    pub heads_q: usize,
    /// Key heads.
    pub heads_kv: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Prompt tokens, cached positions, or new tokens.
    pub tokens: usize,
}

impl Shape {
    /// A shape of no model in particular.
    pub const fn new(heads_q: usize, heads_kv: usize, head_dim: usize, tokens: usize) -> Self {
        Shape::of("", heads_q, heads_kv, head_dim, tokens)
    }

    const fn of(model: &'static str, heads_q: usize, heads_kv: usize, head_dim: usize, tokens: usize) -> Self {
        Shape { model, heads_q, heads_kv, head_dim, tokens }
    }

    /// This shape with another number of tokens.
    #[must_use]
    pub const fn with_tokens(mut self, tokens: usize) -> Self {
        self.tokens = tokens;
        self
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.model.is_empty() {
            write!(f, "{} ", self.model)?;
        }
        write!(f, "{}/{}x{}, {}", self.heads_q, self.heads_kv, self.head_dim, self.tokens)
    }
}

/// Prompts.
pub const PREFILL: [Shape; 7] = [
    Shape::of("Llama-3-8B", 32, 8, 128, 128),
    Shape::of("Llama-3-8B", 32, 8, 128, 512),
    Shape::of("Llama-3-8B", 32, 8, 128, 2048),
    Shape::of("Llama-2-7B", 32, 32, 128, 512),
    Shape::of("long", 8, 2, 128, 8192),
    Shape::of("Qwen2.5-0.5B", 14, 2, 64, 512),
    Shape::of("Gemma-3-270M", 4, 1, 256, 512),
];

/// One token over a cache.
pub const DECODE: [Shape; 4] = [
    Shape::of("Llama-2-7B", 32, 32, 128, 4096),
    Shape::of("Llama-3-8B", 32, 8, 128, 4096),
    Shape::of("Llama-3-8B", 32, 8, 128, 32768),
    Shape::of("Qwen2.5-0.5B", 14, 2, 64, 2048),
];

/// New tokens whose queries and keys are rotated.
pub const ROTARY: [Shape; 3] = [
    Shape::of("Llama-3-8B", 32, 8, 128, 512),
    Shape::of("Llama-2-7B", 32, 32, 128, 512),
    Shape::of("Qwen2.5-0.5B", 14, 2, 64, 512),
];

/// Which step of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Causal attention over all tokens of a prompt at once.
    Prefill,
    /// One token over a cache of rotated keys.
    Decode,
    /// One token over a cache of raw keys, which are rotated as they are read.
    DecodeRaw,
    /// New keys and values into a cache of rotated keys.
    Append,
    /// Q and K rotated from memory to memory.
    Rotate,
}

/// A way through a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// Rotation in the tile, or on the way into the cache.
    Fused,
    /// This library's own rotary pass writes Q and K to memory, then the same kernels take them as they are.
    Separate,
    /// The same kernels over inputs that need no rotation: what is left is the cost of rotating.
    PreRotated,
    /// What a compiler makes of plain C.
    PlainC,
}

/// One thing to measure: a step of a shape, a storage type, a way. `prefill:32/8x128:512:f32:fused` as text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Case {
    /// Heads and tokens.
    pub shape: Shape,
    /// The step.
    pub step: Step,
    /// Storage of K and V, and of the cache.
    pub dtype: DType,
    /// The way.
    pub way: Way,
}

impl Case {
    /// An f32 case.
    pub const fn new(step: Step, shape: Shape, way: Way) -> Self {
        Case { shape, step, dtype: DType::F32, way }
    }

    /// This case with K, V and cache of `dtype`.
    #[must_use]
    pub const fn with_dtype(mut self, dtype: DType) -> Self {
        self.dtype = dtype;
        self
    }

    /// This case another way.
    #[must_use]
    pub const fn by(mut self, way: Way) -> Self {
        self.way = way;
        self
    }

    /// Query tokens of the step.
    pub const fn q_len(&self) -> usize {
        match self.step {
            Step::Decode | Step::DecodeRaw => 1,
            Step::Append => 0,
            Step::Prefill | Step::Rotate => self.shape.tokens,
        }
    }

    /// Tokens that the step brings forward, for tokens per second.
    pub const fn new_tokens(&self) -> usize {
        match self.step {
            Step::Decode | Step::DecodeRaw => 1,
            Step::Prefill | Step::Append | Step::Rotate => self.shape.tokens,
        }
    }

    /// Useful FLOPs: 4 head_dim for each visible (query, key) pair and query head; where nothing attends, the six of
    /// each rotated pair. The rotation that comes with an attention is not counted: it is a cost.
    pub fn flops(&self) -> f64 {
        let Shape { heads_q, heads_kv, head_dim, tokens, .. } = self.shape;
        let tokens = tokens as f64;
        let attend = |pairs: f64| 4.0 * (head_dim * heads_q) as f64 * pairs;
        let rotate = |heads: usize| 3.0 * (head_dim * heads) as f64 * tokens;
        match self.step {
            Step::Prefill => attend(tokens * (tokens + 1.0) / 2.0),
            Step::Decode | Step::DecodeRaw => attend(tokens),
            Step::Append => rotate(heads_kv),
            Step::Rotate => rotate(heads_q + heads_kv),
        }
    }

    /// Step, shape and storage, without the way: for a row of a table.
    pub fn title(&self) -> String {
        format!("{} {} {}", self.step.name(), self.shape, self.dtype)
    }
}

impl Step {
    const ALL: [Step; 5] = [Step::Prefill, Step::Decode, Step::DecodeRaw, Step::Append, Step::Rotate];

    /// Its name.
    pub const fn name(self) -> &'static str {
        match self {
            Step::Prefill => "prefill",
            Step::Decode => "decode",
            Step::DecodeRaw => "decode-raw",
            Step::Append => "append",
            Step::Rotate => "rotate",
        }
    }
}

impl Way {
    const ALL: [Way; 4] = [Way::Fused, Way::Separate, Way::PreRotated, Way::PlainC];

    /// Its name.
    pub const fn name(self) -> &'static str {
        match self {
            Way::Fused => "fused",
            Way::Separate => "separate",
            Way::PreRotated => "pre-rotated",
            Way::PlainC => "plain-c",
        }
    }
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Shape { heads_q, heads_kv, head_dim, tokens, .. } = self.shape;
        let (step, way) = (self.step.name(), self.way.name());
        write!(f, "{step}:{heads_q}/{heads_kv}x{head_dim}:{tokens}:{}:{way}", self.dtype)
    }
}

impl FromStr for Case {
    type Err = String;

    fn from_str(text: &str) -> Result<Case, String> {
        let bad = |what: &str| format!("{what} in case {text:?}; a case looks like prefill:32/8x128:512:f32:fused");
        let parts: Vec<&str> = text.split(':').collect();
        let [step, heads, tokens, dtype, way] = parts[..] else {
            return Err(bad(&format!("{} parts, not 5,", parts.len())));
        };
        let number = |n: &str| n.parse::<usize>().ok().filter(|n| *n > 0).ok_or_else(|| bad(&format!("number {n:?}")));
        let split = heads.split_once('/').and_then(|(q, rest)| Some((q, rest.split_once('x')?)));
        let (heads_q, (heads_kv, dim)) = split.ok_or_else(|| bad(&format!("heads {heads:?}")))?;
        Ok(Case {
            shape: Shape::new(number(heads_q)?, number(heads_kv)?, number(dim)?, number(tokens)?),
            step: Step::ALL.into_iter().find(|s| s.name() == step).ok_or_else(|| bad(&format!("step {step:?}")))?,
            dtype: [DType::F32, DType::F16, DType::Bf16]
                .into_iter()
                .find(|d| d.name() == dtype)
                .ok_or_else(|| bad(&format!("dtype {dtype:?}")))?,
            way: Way::ALL.into_iter().find(|w| w.name() == way).ok_or_else(|| bad(&format!("way {way:?}")))?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_case_reads_back_from_its_text() {
        for text in
            ["prefill:32/8x128:512:f32:fused", "decode-raw:4/1x256:9:f16:pre-rotated", "append:2/2x64:1:bf16:plain-c"]
        {
            assert_eq!(text.parse::<Case>().unwrap().to_string(), text);
        }
        for (text, want) in [
            ("prefill:32/8x128:512:f32", "4 parts"),
            ("prefill:32-8x128:512:f32:fused", "heads \"32-8x128\""),
            ("prefill:32/8x0:512:f32:fused", "number \"0\""),
            ("fly:32/8x128:512:f32:fused", "step \"fly\""),
            ("prefill:32/8x128:512:f8:fused", "dtype \"f8\""),
            ("prefill:32/8x128:512:f32:fast", "way \"fast\""),
        ] {
            let error = text.parse::<Case>().unwrap_err();
            assert!(error.contains(want), "{error}");
        }
    }

    #[test]
    fn useful_flops_count_visible_pairs() {
        let shape = Shape::new(4, 2, 64, 3);
        assert_eq!(Case::new(Step::Prefill, shape, Way::Fused).flops(), (4 * 64 * 4 * 6) as f64);
        assert_eq!(Case::new(Step::Decode, shape, Way::Fused).flops(), (4 * 64 * 4 * 3) as f64);
        assert_eq!(Case::new(Step::Rotate, shape, Way::Separate).flops(), (6 * 32 * 6 * 3) as f64);
    }
}

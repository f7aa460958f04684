//! The platform-free part of Rotile: shapes, views, rotary maths, masks, online softmax, plans, tile drivers, the
//! kernel table and the portable tier. `no_std`, no allocator. **Never names an instruction set**: what depends on one
//! lives in a kernel crate and comes in as a [`Tier`].
#![no_std]

mod angles;
mod arena;
mod attend;
mod bias;
mod call;
mod dtype;
mod error;
pub mod kernel;
mod mask;
mod plan;
pub mod portable;
pub mod rotary;
pub mod softmax;
mod spec;
mod store;
mod tensor;

pub use bias::{Bias, BoolMask, MaskData, Weights, alibi_slopes};
pub use call::{Batch, Call, Executor, Operands, Sequence, Task};
pub use dtype::{DType, Slice, SliceMut};
pub use error::{Error, Place};
pub use half::{bf16, f16};
pub use kernel::{Tier, TierName};
pub use plan::{Capabilities, Plan, Tile};
pub use rotary::PairStyle;
pub use spec::{AttentionSpec, CacheLayout, Keys, MAX_HEAD_DIM, Mask, Operation, Scale, Sections, Window};
pub use tensor::{At, Shape, Strides, Tensor, TensorMut};

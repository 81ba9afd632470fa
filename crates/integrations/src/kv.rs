//! What engines say about their KV cache, and how they see a pool that was laid out for it.
//!
//! The parts common to all engines: element types, kinds of attention, and the arithmetic from a
//! [`Geometry`] to strided views. Sizes come from the type in which elements are *stored*, which
//! for 8-bit floats is often a plain byte type.

use std::fmt;
use std::str::FromStr;

use kvcached_mapper::{Geometry, KvBuffers, Layout, LayoutError, PageSize, PoolSpec};
use thiserror::Error;

#[cfg(test)]
mod tests;
mod views;

pub(crate) use views::{Block, LayerPlace, dense_strides, lay_out};

/// Type of one element, as an engine names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DType {
    /// 32-bit float.
    F32,
    /// IEEE half.
    F16,
    /// Brain float.
    Bf16,
    /// 8-bit float, whatever its exponent.
    F8,
    /// Unsigned byte: also how engines store 8-bit floats.
    U8,
    /// Signed byte.
    I8,
}

/// What an element means, and what it is stored as.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Elements {
    /// The type that the model computes with.
    pub logical: DType,
    /// The type of the tensor; `None` where it is the same.
    pub storage: Option<DType>,
}

/// What one token, or one sequence, leaves behind in one layer on one rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Attention {
    /// K and V for every head.
    Mha {
        /// Heads on this rank.
        heads: u32,
        /// Elements of one head.
        head_size: u32,
    },
    /// K and V for groups of heads.
    Gqa {
        /// KV heads on this rank (see [`kv_heads_per_rank`]).
        kv_heads: u32,
        /// Elements of one head.
        head_size: u32,
    },
    /// One compressed latent for K and V together.
    Mla {
        /// Elements of a token's latent, rotary part included.
        latent_size: u32,
    },
    /// A recurrent state per sequence, as in the linear layers of hybrid models: a block is a
    /// state, and has no tokens.
    Linear {
        /// Bytes of one state in one layer.
        state_bytes: u64,
    },
}

/// How to lay a pool out: from the configuration and the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayoutChoice {
    /// How layers, and K and V, share tensors.
    pub layout: Layout,
    /// Bytes of a page in one extent.
    pub page_size: PageSize,
    /// Granularity of the device, in bytes.
    pub granularity: u64,
}

/// A pool laid out for an engine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EnginePool {
    /// What a scheduler and its workers are given; its capacity is rounded up to whole pages, so
    /// that there are at least as many blocks as the engine counts on.
    pub spec: PoolSpec,
    /// The spec, resolved for the device's granularity.
    pub geometry: Geometry,
    /// The engine's tensors as strided views, layer by layer.
    pub views: Vec<KvView>,
}

/// One tensor of an engine, as a strided view of one tensor of the pool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KvView {
    /// Layer of the pool.
    pub layer: u32,
    /// Tensor of the pool.
    pub tensor: u32,
    /// First byte, from the start of the pool's tensor.
    pub offset_bytes: u64,
    /// Bytes of one element.
    pub element_bytes: u64,
    /// Elements per dimension, in the engine's order.
    pub shape: Vec<u64>,
    /// Bytes from one index to the next, per dimension.
    pub strides_bytes: Vec<u64>,
}

/// What an engine says about its KV cache that cannot be.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum KvError {
    /// Something of which there must be at least one.
    #[error("the engine reports {what} of 0")]
    Zero {
        /// What is zero.
        what: &'static str,
    },
    /// A size that must divide, and does not.
    #[error("{what} of {value} is no multiple of {of}")]
    NotMultiple {
        /// What was given.
        what: &'static str,
        /// Its value.
        value: u64,
        /// What it must be a multiple of.
        of: u64,
    },
    /// No dimension of the shape counts blocks.
    #[error("no dimension of the shape {shape:?} can be the one of {blocks} blocks")]
    NoBlockDimension {
        /// As the engine reports it.
        shape: Vec<u64>,
        /// Blocks of the pool, as the kernel counts them.
        blocks: u64,
    },
    /// With two blocks, the block dimension looks like the one of K and V.
    #[error("the shape {shape:?} does not tell blocks from K and V: use another number of blocks")]
    AmbiguousShape {
        /// As the engine reports it.
        shape: Vec<u64>,
    },
    /// The shape holds other bytes than the rest of the report.
    #[error("a block of the shape {shape:?} is {shape_bytes} bytes, but should be {block_bytes}")]
    ShapeDisagrees {
        /// As the engine reports it.
        shape: Vec<u64>,
        /// Bytes of one block and buffer by the shape.
        shape_bytes: u64,
        /// Bytes of one block and buffer by tokens, heads and type.
        block_bytes: u64,
    },
    /// Padding that takes away.
    #[error("a block of {block_bytes} bytes cannot be padded to {padded_bytes}")]
    PaddedTooSmall {
        /// Padded bytes as reported.
        padded_bytes: u64,
        /// Bytes of a block without padding.
        block_bytes: u64,
    },
    /// Parts of padded blocks lie at no common stride.
    #[error("blocks padded from {block_bytes} to {stride_bytes} bytes cannot be split in {parts}")]
    PaddedSplit {
        /// Bytes of a block without padding, in one extent.
        block_bytes: u64,
        /// Bytes from one block to the next.
        stride_bytes: u64,
        /// Parts that the kernel splits a block into.
        parts: u64,
    },
    /// A stride or an offset that no whole number of elements makes.
    #[error("{bytes} bytes are no whole number of elements of {element_bytes} bytes")]
    NotWholeElements {
        /// The stride or offset.
        bytes: u64,
        /// Bytes of one element.
        element_bytes: u64,
    },
    /// A number beyond 64 bits.
    #[error("the {what} overflows 64 bits")]
    Overflow {
        /// What was being computed.
        what: &'static str,
    },
    /// The pool cannot be laid out.
    #[error(transparent)]
    Layout(#[from] LayoutError),
}

/// A word that names no element type.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("unknown element type {word:?}")]
pub struct UnknownDType {
    /// The word.
    pub word: String,
}

/// KV heads that each of `tp` ranks holds out of `kv_heads` in all: a share of them, or a copy
/// of one where there are more ranks than heads.
///
/// # Errors
/// [`KvError::Zero`], or [`KvError::NotMultiple`] if neither divides the other.
pub fn kv_heads_per_rank(kv_heads: u32, tp: u32) -> Result<u32, KvError> {
    nonzero(u64::from(kv_heads), "KV heads")?;
    nonzero(u64::from(tp), "tensor-parallel size")?;
    if kv_heads.is_multiple_of(tp) {
        Ok(kv_heads / tp)
    } else if tp.is_multiple_of(kv_heads) {
        Ok(1)
    } else {
        Err(KvError::NotMultiple {
            what: "KV heads",
            value: u64::from(kv_heads),
            of: u64::from(tp),
        })
    }
}

impl Attention {
    /// One buffer, or K and V.
    #[must_use]
    pub const fn kv_buffers(self) -> KvBuffers {
        match self {
            Self::Mha { .. } | Self::Gqa { .. } => KvBuffers::Two,
            Self::Mla { .. } | Self::Linear { .. } => KvBuffers::One,
        }
    }

    /// Bytes of one block of `tokens` tokens in one buffer of one layer.
    ///
    /// # Errors
    /// [`KvError::Zero`] or [`KvError::Overflow`]; [`KvError::NotMultiple`] for a state that is no
    /// whole number of elements.
    pub fn block_bytes(self, tokens: u32, elements: Elements) -> Result<u64, KvError> {
        let per_token = |heads: u32, head_size: u32| {
            nonzero(u64::from(heads), "heads")?;
            nonzero(u64::from(head_size), "head size")?;
            nonzero(u64::from(tokens), "tokens per block")?;
            multiply(
                &[
                    u64::from(tokens),
                    u64::from(heads),
                    u64::from(head_size),
                    elements.bytes(),
                ],
                "block size",
            )
        };
        match self {
            Self::Mha { heads, head_size } => per_token(heads, head_size),
            Self::Gqa {
                kv_heads,
                head_size,
            } => per_token(kv_heads, head_size),
            Self::Mla { latent_size } => per_token(1, latent_size),
            Self::Linear { state_bytes } => {
                nonzero(state_bytes, "state bytes")?;
                multiple(state_bytes, elements.bytes(), "state bytes")
            }
        }
    }
}

impl Elements {
    /// Elements that are stored as what they are.
    #[must_use]
    pub const fn plain(dtype: DType) -> Self {
        Self {
            logical: dtype,
            storage: None,
        }
    }

    /// Bytes of one stored element.
    #[must_use]
    pub const fn bytes(self) -> u64 {
        match self.storage {
            Some(storage) => storage.bytes(),
            None => self.logical.bytes(),
        }
    }
}

impl DType {
    /// Bytes of one element.
    #[must_use]
    pub const fn bytes(self) -> u64 {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
            Self::F8 | Self::U8 | Self::I8 => 1,
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::F32 => "float32",
            Self::F16 => "float16",
            Self::Bf16 => "bfloat16",
            Self::F8 => "float8",
            Self::U8 => "uint8",
            Self::I8 => "int8",
        })
    }
}

impl FromStr for DType {
    type Err = UnknownDType;

    /// Reads the names that engines, frameworks and people use.
    fn from_str(word: &str) -> Result<Self, Self::Err> {
        match word.strip_prefix("torch.").unwrap_or(word) {
            "float32" | "float" | "fp32" | "f32" => Ok(Self::F32),
            "float16" | "half" | "fp16" | "f16" => Ok(Self::F16),
            "bfloat16" | "bf16" => Ok(Self::Bf16),
            "float8" | "fp8" | "f8" | "fp8_e4m3" | "fp8_e5m2" | "float8_e4m3fn" | "float8_e5m2"
            | "float8_e4m3fnuz" | "float8_e5m2fnuz" => Ok(Self::F8),
            "uint8" | "u8" => Ok(Self::U8),
            "int8" | "i8" => Ok(Self::I8),
            _ => Err(UnknownDType {
                word: word.to_owned(),
            }),
        }
    }
}

pub(crate) fn nonzero(value: u64, what: &'static str) -> Result<u64, KvError> {
    if value == 0 {
        Err(KvError::Zero { what })
    } else {
        Ok(value)
    }
}

pub(crate) fn multiple(value: u64, of: u64, what: &'static str) -> Result<u64, KvError> {
    if value.is_multiple_of(of) {
        Ok(value)
    } else {
        Err(KvError::NotMultiple { what, value, of })
    }
}

pub(crate) fn multiply(factors: &[u64], what: &'static str) -> Result<u64, KvError> {
    factors
        .iter()
        .try_fold(1u64, |product, &factor| product.checked_mul(factor))
        .ok_or(KvError::Overflow { what })
}

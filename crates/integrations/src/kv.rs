//! What engines say about their KV cache, and how they see a pool that was laid out for it.
//!
//! The parts common to all engines: element types, kinds of attention, and the arithmetic from a
//! [`Geometry`] to strided views. Sizes come from the type in which elements are *stored*, which
//! for 8-bit floats is often a plain byte type.

use std::fmt;
use std::str::FromStr;

use kvcached_mapper::{Geometry, KvBuffers, Layout, LayoutError, PageSize, PoolSpec};
use thiserror::Error;

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
pub struct Arrange {
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

/// A block of one layer, as an engine module works it out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Block {
    /// K and V apart, or one buffer.
    pub(crate) buffers: KvBuffers,
    /// Bytes in one buffer, without padding.
    pub(crate) bytes: u64,
    /// Bytes over all buffers with padding, if the engine pads.
    pub(crate) padded_bytes: Option<u64>,
    /// Equal parts in which the engine addresses a block.
    pub(crate) parts: u64,
}

/// Where the engine finds the parts of blocks in one layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LayerPlace {
    pub(crate) layer: u32,
    pub(crate) tensor: u32,
    pub(crate) offset_bytes: u64,
    /// From one part to the next.
    pub(crate) part_stride_bytes: u64,
    /// From K to V of one part, where there are two.
    pub(crate) value_stride_bytes: Option<u64>,
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

impl KvView {
    pub(crate) fn new(
        place: LayerPlace,
        element_bytes: u64,
        shape: Vec<u64>,
        strides_bytes: Vec<u64>,
    ) -> Result<Self, KvError> {
        let whole = |bytes: u64| match bytes.is_multiple_of(element_bytes) {
            true => Ok(()),
            false => Err(KvError::NotWholeElements {
                bytes,
                element_bytes,
            }),
        };
        whole(place.offset_bytes)?;
        strides_bytes.iter().copied().try_for_each(whole)?;
        let LayerPlace {
            layer,
            tensor,
            offset_bytes,
            ..
        } = place;
        Ok(Self {
            layer,
            tensor,
            offset_bytes,
            element_bytes,
            shape,
            strides_bytes,
        })
    }

    /// Elements from one index to the next, per dimension: what tensor libraries call strides.
    #[must_use]
    pub fn strides_elements(&self) -> Vec<u64> {
        self.strides_bytes
            .iter()
            .map(|bytes| bytes / self.element_bytes)
            .collect()
    }

    /// The byte of the pool's tensor at which the element of that index begins; `None` outside
    /// the view.
    #[must_use]
    pub fn byte_at(&self, index: &[u64]) -> Option<u64> {
        let inside = index.len() == self.shape.len()
            && index
                .iter()
                .zip(&self.shape)
                .all(|(index, len)| index < len);
        let steps = index
            .iter()
            .zip(&self.strides_bytes)
            .map(|(index, stride)| index * stride);
        inside.then(|| self.offset_bytes + steps.sum::<u64>())
    }
}

/// Lays `blocks` blocks of `layers` layers out, and finds them again for the engine.
pub(crate) fn lay_out(
    arrange: &Arrange,
    layers: u32,
    block: Block,
    blocks: u64,
) -> Result<(PoolSpec, Geometry, Vec<LayerPlace>), KvError> {
    nonzero(u64::from(layers), "layers")?;
    nonzero(blocks, "blocks")?;
    let joint_bytes = multiply(
        &[block.bytes, u64::from(block.buffers.count())],
        "block size",
    )?;
    // A padded block is one piece for the pool: the padding follows K and V, not each of them.
    let (kv_buffers, block_bytes) = match block.padded_bytes {
        None => (block.buffers, block.bytes),
        Some(padded_bytes) if padded_bytes < joint_bytes => {
            return Err(KvError::PaddedTooSmall {
                padded_bytes,
                block_bytes: joint_bytes,
            });
        }
        Some(padded_bytes) => (KvBuffers::One, padded_bytes),
    };
    let pieces = u64::from(kv_buffers.count()) * u64::from(layers);
    let mut spec = PoolSpec {
        layout: arrange.layout,
        layers,
        kv_buffers,
        block_bytes,
        page_size: arrange.page_size,
        capacity_bytes: multiply(&[blocks, block_bytes, pieces], "capacity")?,
    };
    let geometry = resolve_whole(&mut spec, arrange.granularity, blocks)?;
    let padded_tail = block
        .padded_bytes
        .is_some_and(|padded| padded != joint_bytes);
    let places = places(&geometry, block, padded_tail)?;
    Ok((spec, geometry, places))
}

/// Rounds the capacity of `spec` up to the pages that `blocks` blocks take, and resolves it.
fn resolve_whole(spec: &mut PoolSpec, granularity: u64, blocks: u64) -> Result<Geometry, KvError> {
    let first = match spec.resolve(granularity) {
        Err(LayoutError::CapacityTooSmall { bundle_bytes, .. }) => {
            spec.capacity_bytes = bundle_bytes;
            spec.resolve(granularity)?
        }
        other => other?,
    };
    let bytes = multiply(&[blocks, first.block_stride_bytes()], "capacity")?;
    let pages = bytes.div_ceil(first.page_bytes());
    spec.capacity_bytes = multiply(&[pages, first.bundle_bytes()], "capacity")?;
    Ok(spec.resolve(granularity)?)
}

/// Where each layer's parts lie.
///
/// Parts of a block take the place of whole blocks at a fraction of every distance, except from
/// K to V where these are regions apart. That works only while blocks touch each other.
fn places(
    geometry: &Geometry,
    block: Block,
    padded_tail: bool,
) -> Result<Vec<LayerPlace>, KvError> {
    let stride_bytes = geometry.block_stride_bytes();
    let pieces = match geometry.layout() {
        Layout::Contiguous => u64::from(geometry.kv_buffers().count() * geometry.layers()),
        Layout::Unified => u64::from(geometry.kv_buffers().count()),
        Layout::PerLayer => 1,
    };
    let unit_bytes = geometry.block_bytes() * pieces;
    if block.parts > 1 {
        multiple(block.bytes, block.parts, "block size")?;
        if padded_tail || stride_bytes != unit_bytes {
            return Err(KvError::PaddedSplit {
                block_bytes: block.bytes,
                stride_bytes,
                parts: block.parts,
            });
        }
    }
    let part_bytes = block.bytes / block.parts;
    let apart = geometry.layout() == Layout::PerLayer && geometry.kv_buffers() == KvBuffers::Two;
    let views: Vec<_> = geometry.views().collect();
    let per_layer = usize::try_from(geometry.kv_buffers().count()).expect("one or two buffers");
    Ok(views
        .chunks(per_layer)
        .map(|buffers| LayerPlace {
            layer: buffers[0].layer,
            tensor: buffers[0].tensor,
            offset_bytes: match geometry.layout() {
                Layout::Contiguous => buffers[0].offset / block.parts,
                Layout::Unified | Layout::PerLayer => buffers[0].offset,
            },
            part_stride_bytes: stride_bytes / block.parts,
            value_stride_bytes: (block.buffers == KvBuffers::Two).then(|| match buffers {
                [key, value] if apart => value.offset - key.offset,
                _ => part_bytes,
            }),
        })
        .collect())
}

/// Byte strides of densely packed dimensions, the last one first in memory.
pub(crate) fn dense_strides(dimensions: &[u64], element_bytes: u64) -> Vec<u64> {
    let mut strides = vec![element_bytes; dimensions.len()];
    for i in (1..dimensions.len()).rev() {
        strides[i - 1] = strides[i] * dimensions[i];
    }
    strides
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_element_types_are_known() {
        for (word, dtype) in [
            ("torch.bfloat16", DType::Bf16),
            ("half", DType::F16),
            ("float32", DType::F32),
            ("fp8_e4m3", DType::F8),
            ("torch.float8_e5m2", DType::F8),
            ("uint8", DType::U8),
            ("int8", DType::I8),
        ] {
            assert_eq!(word.parse(), Ok(dtype), "{word}");
            assert_eq!(dtype.to_string().parse(), Ok(dtype));
        }
        for word in ["", "auto", "torch.", "int4", "BFLOAT16"] {
            assert_eq!(
                word.parse::<DType>(),
                Err(UnknownDType {
                    word: word.to_owned()
                })
            );
        }
    }

    #[test]
    fn heads_are_shared_or_copied() {
        assert_eq!(kv_heads_per_rank(8, 1), Ok(8));
        assert_eq!(kv_heads_per_rank(8, 4), Ok(2));
        assert_eq!(kv_heads_per_rank(8, 16), Ok(1));
        assert_eq!(
            kv_heads_per_rank(8, 3),
            Err(KvError::NotMultiple {
                what: "KV heads",
                value: 8,
                of: 3
            })
        );
        assert_eq!(
            kv_heads_per_rank(0, 3),
            Err(KvError::Zero { what: "KV heads" })
        );
        assert_eq!(
            kv_heads_per_rank(8, 0),
            Err(KvError::Zero {
                what: "tensor-parallel size"
            })
        );
    }

    #[test]
    fn an_index_outside_the_view_has_no_byte() {
        let place = LayerPlace {
            layer: 0,
            tensor: 0,
            offset_bytes: 64,
            part_stride_bytes: 128,
            value_stride_bytes: None,
        };
        let view = KvView::new(place, 2, vec![3, 8], vec![128, 2]).unwrap();
        assert_eq!(view.byte_at(&[2, 7]), Some(64 + 256 + 14));
        assert_eq!(view.byte_at(&[3, 0]), None);
        assert_eq!(view.byte_at(&[0]), None);
        assert_eq!(
            KvView::new(place, 2, vec![3, 8], vec![129, 2]),
            Err(KvError::NotWholeElements {
                bytes: 129,
                element_bytes: 2
            })
        );
    }

    #[test]
    fn every_block_that_the_engine_counts_on_is_there() {
        let block = Block {
            buffers: KvBuffers::Two,
            bytes: 3 << 10,
            padded_bytes: None,
            parts: 1,
        };
        for layout in Layout::ALL {
            for blocks in [1, 5, 683, 10_000] {
                let arrange = Arrange {
                    layout,
                    page_size: PageSize::Auto,
                    granularity: 2 << 20,
                };
                let (spec, geometry, _) = lay_out(&arrange, 3, block, blocks).unwrap();
                assert!(
                    u64::from(geometry.blocks()) >= blocks,
                    "{layout}, {blocks} blocks"
                );
                assert_eq!(spec.resolve(2 << 20), Ok(geometry.clone()));
                assert_eq!(spec.capacity_bytes, geometry.virtual_bytes());
            }
        }
    }
}

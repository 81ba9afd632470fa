//! From a laid out pool to the engine's strided views of it.

use kvcached_mapper::{Geometry, KvBuffers, Layout, LayoutError, PoolSpec};

use super::{KvError, KvView, LayoutChoice, multiple, multiply, nonzero};

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
    choice: &LayoutChoice,
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
        layout: choice.layout,
        layers,
        kv_buffers,
        block_bytes,
        page_size: choice.page_size,
        capacity_bytes: multiply(&[blocks, block_bytes, pieces], "capacity")?,
    };
    let geometry = resolve_whole(&mut spec, choice.granularity, blocks)?;
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

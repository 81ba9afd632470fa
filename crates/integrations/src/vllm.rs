//! vLLM: one engine core schedules for all ranks, usually from a process of its own.
//!
//! With a separate core every rank is remote, rank 0 as well, and even a single one. With the
//! in-process executor the core and rank 0 are one process, which initialises twice: as the
//! coordinator and then as a worker ([`EngineProcess`](crate::EngineProcess) puts the two
//! together). Under an external launcher every rank has an engine of its own.

use crate::detect::{
    DetectError, Detected, Nature, RankReport, TopologyMode, World, assign, check,
};
use crate::kv::{
    Attention, Block, Elements, EnginePool, KvError, KvView, LayoutChoice, dense_strides, lay_out,
    multiple, multiply, nonzero,
};

/// What a vLLM process reports about itself.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct VllmReport {
    /// Sizes and ranks.
    pub ranks: RankReport,
    /// Is the process that schedules another one than rank 0's? So it is with the executors that
    /// start processes, whatever the number of ranks; not with the in-process one.
    pub coordinator_separate: Option<bool>,
    /// Did a launcher outside the engine start every rank, each with an engine of its own?
    pub external_launcher: Option<bool>,
}

/// What vLLM says about one KV-cache group on one rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VllmPool {
    /// Layers of the group on this rank.
    pub layers: u32,
    /// What a token, or a sequence, leaves behind on this rank.
    pub attention: Attention,
    /// Type of the cache: the tensor's own, where it differs from the logical one.
    pub elements: Elements,
    /// Tokens of a block; 1 for recurrent states.
    pub block_tokens: u32,
    /// Tokens of a block as the attention kernel counts them, where that is less: such a kernel
    /// sees each block as several.
    pub kernel_block_tokens: Option<u32>,
    /// Bytes of a layer's tensor.
    pub tensor_bytes: u64,
    /// Bytes of a block over K and V, if the engine pads it to the size of another group's.
    pub padded_block_bytes: Option<u64>,
    /// Shape of a layer's tensor as the attention backend wants it, for the number of blocks that
    /// the tensor holds: the dimension of blocks is the first one or, behind K and V, the second.
    pub shape: Vec<u64>,
}

/// The part that a vLLM process plays; `asked` is what an operator wants instead.
///
/// # Errors
/// [`DetectError`] for a report that contradicts itself or what was asked for.
pub fn detect(report: &VllmReport, asked: Option<TopologyMode>) -> Result<Detected, DetectError> {
    let checked = check(&report.ranks)?;
    let own_scheduler = report.external_launcher == Some(true);
    if own_scheduler && report.coordinator_separate == Some(true) {
        return Err(DetectError::Excluded {
            one: "an external launcher",
            other: "a separate coordinator",
        });
    }
    let nature = Nature {
        engine: "vllm",
        own_scheduler,
        coordinator_separate: report.coordinator_separate,
    };
    let one = checked.world == World { tp: 1, stages: 1 };
    let own = match report.coordinator_separate {
        _ if own_scheduler => TopologyMode::Autonomous,
        Some(true) => TopologyMode::Separate,
        Some(false) if one => TopologyMode::Single,
        Some(false) => TopologyMode::Rank0,
        // Nothing tells one process from two: a single GPU, as far as anyone can see.
        None if one && (checked.fell_back || checked.is_worker.is_none()) => TopologyMode::Single,
        // The coordinator's own initialisation comes first. Should rank 0 live there too, its
        // initialisation follows and makes it local; to assume so at once would leave rank 0
        // without memory where it does not.
        None => TopologyMode::Separate,
    };
    assign(&checked, nature, asked.unwrap_or(own))
}

/// Lays a pool out for vLLM: one view per layer, in the shape of the attention backend.
///
/// # Errors
/// [`KvError`] for sizes that are zero, do not divide, disagree, or cannot be laid out.
pub fn pool_spec(pool: &VllmPool, choice: &LayoutChoice) -> Result<EnginePool, KvError> {
    let block_tokens = nonzero(u64::from(pool.block_tokens), "tokens per block")?;
    let kernel_tokens = u64::from(pool.kernel_block_tokens.unwrap_or(pool.block_tokens));
    let kernel_tokens = nonzero(kernel_tokens, "tokens per kernel block")?;
    let block = Block {
        buffers: pool.attention.kv_buffers(),
        bytes: pool
            .attention
            .block_bytes(pool.block_tokens, pool.elements)?,
        padded_bytes: pool.padded_block_bytes,
        parts: multiple(block_tokens, kernel_tokens, "tokens per block")? / kernel_tokens,
    };
    let joint_bytes = match block.padded_bytes {
        Some(padded_bytes) => nonzero(padded_bytes, "padded block size")?,
        None => multiply(
            &[block.bytes, u64::from(block.buffers.count())],
            "block size",
        )?,
    };
    let tensor_bytes = nonzero(pool.tensor_bytes, "tensor size")?;
    let blocks = multiple(tensor_bytes, joint_bytes, "tensor size")? / joint_bytes;
    let kernel_blocks = multiply(&[blocks, block.parts], "number of blocks")?;
    let dimension = block_dimension(pool, block, kernel_blocks)?;
    let (spec, geometry, places) = lay_out(choice, pool.layers, block, blocks)?;

    let element_bytes = pool.elements.bytes();
    let lead = dimension.lead();
    let inner = &pool.shape[lead..];
    let available = u64::from(geometry.blocks()) * block.parts;
    let views = places
        .into_iter()
        .map(|place| {
            let mut shape = pool.shape.clone();
            shape[dimension.index()] = available;
            let value_stride = place.value_stride_bytes.unwrap_or_default();
            let mut strides = match dimension {
                BlockDimension::Only => vec![place.part_stride_bytes],
                BlockDimension::BeforeKv => vec![place.part_stride_bytes, value_stride],
                BlockDimension::BehindKv => vec![value_stride, place.part_stride_bytes],
            };
            strides.extend(dense_strides(inner, element_bytes));
            KvView::new(place, element_bytes, shape, strides)
        })
        .collect::<Result<_, _>>()?;
    Ok(EnginePool {
        spec,
        geometry,
        views,
    })
}

/// Where a backend's shape counts blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum BlockDimension {
    /// `[blocks, …]`, one buffer.
    Only,
    /// `[blocks, 2, …]`.
    BeforeKv,
    /// `[2, blocks, …]`.
    BehindKv,
}

impl BlockDimension {
    const fn index(self) -> usize {
        match self {
            Self::Only | Self::BeforeKv => 0,
            Self::BehindKv => 1,
        }
    }

    /// Dimensions that are not inside a block.
    const fn lead(self) -> usize {
        match self {
            Self::Only => 1,
            Self::BeforeKv | Self::BehindKv => 2,
        }
    }
}

/// Finds the dimension of blocks, and checks that the rest of the shape is one block's.
fn block_dimension(pool: &VllmPool, block: Block, blocks: u64) -> Result<BlockDimension, KvError> {
    let shape = || pool.shape.clone();
    let two = block.buffers.count() == 2;
    let dimension = match pool.shape.as_slice() {
        [2, 2, ..] if two && blocks == 2 => return Err(KvError::AmbiguousShape { shape: shape() }),
        [count, 2, ..] if two && *count == blocks => BlockDimension::BeforeKv,
        [2, count, ..] if two && *count == blocks => BlockDimension::BehindKv,
        [count, ..] if !two && *count == blocks => BlockDimension::Only,
        _ => {
            return Err(KvError::NoBlockDimension {
                shape: shape(),
                blocks,
            });
        }
    };
    let inner = &pool.shape[dimension.lead()..];
    let elements = multiply(inner, "block size")?;
    let shape_bytes = multiply(&[elements, pool.elements.bytes()], "block size")?;
    let block_bytes = block.bytes / block.parts;
    if shape_bytes != block_bytes {
        return Err(KvError::ShapeDisagrees {
            shape: shape(),
            shape_bytes,
            block_bytes,
        });
    }
    Ok(dimension)
}

#[cfg(test)]
mod tests;

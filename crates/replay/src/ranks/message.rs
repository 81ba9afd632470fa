//! What the replaying process and a rank process say to each other.

use std::num::NonZeroU32;
use std::path::PathBuf;
use std::time::Duration;

use kvcached_integrations::{RunChoice, RunLength};
use kvcached_mapper::{KvBuffers, Layout, PageSize, PoolId, PoolSpec, Rank};
use serde::{Deserialize, Serialize};

use super::meters::Timed;
use super::oracle::{Checked, Stamp};
use crate::{BlockId, Device, Holder, Owner, Return, Want};

/// Stamps of one message: far below the longest frame.
pub(crate) const STAMPS_PER_MESSAGE: usize = 8192;

/// What a rank process is to do.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Order {
    /// The first order, and the only one of its kind.
    Setup(Box<Setup>),
    /// Write these stamps. Not answered.
    Stamp { pool: u16, stamps: Vec<Stamp> },
    /// Look whether these stamps are there: [`Answer::Checked`].
    Check { pool: u16, stamps: Vec<Stamp> },
    /// Say what is mapped: [`Answer::Mapped`].
    Mapped,
    /// An autonomous rank's own cache: [`Answer::Allocated`] or [`Answer::Full`].
    Alloc(Vec<WantMessage>),
    /// [`Answer::Done`].
    Free(Vec<ReturnMessage>),
    /// [`Answer::Done`].
    Trim,
    /// [`Answer::Done`].
    StepEnd,
    /// Give everything back and say how it went: [`Answer::Finished`].
    Finish,
}

/// What a rank process answers.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Answer {
    /// It is set up.
    Ready,
    /// It cannot go on.
    Failed(String),
    Checked(Checked),
    Mapped(Vec<MappedSet>),
    Allocated {
        blocks: Vec<u32>,
        state: State,
    },
    Full(State),
    Done(State),
    Finished(Finished),
}

/// How a rank process is set up.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Setup {
    pub(crate) instance: String,
    pub(crate) runtime_dir: PathBuf,
    pub(crate) rank: u16,
    /// Tells the stamps of one model from those of another.
    pub(crate) model: u16,
    /// Does the rank run a scheduler of its own, or serve one?
    pub(crate) autonomous: bool,
    pub(crate) device: Device,
    /// File of the budget that all ranks of this number share.
    pub(crate) budget: PathBuf,
    pub(crate) memory_bytes: u64,
    pub(crate) pools: Vec<PoolMessage>,
    pub(crate) runs: RunsMessage,
    pub(crate) zero_cold: bool,
    pub(crate) verify: bool,
    pub(crate) ipc_timeout: Duration,
}

/// A [`RunChoice`].
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(crate) struct RunsMessage {
    longest: RunLengthMessage,
    bulk: RunLengthMessage,
    bulk_from_bytes: u64,
    growth_chunks: NonZeroU32,
    short_runs: NonZeroU32,
    calm_bytes: u64,
}

/// A [`RunLength`].
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
enum RunLengthMessage {
    Pages(NonZeroU32),
    Bytes(u64),
}

/// A pool of the rank.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(crate) struct PoolMessage {
    layout: u8,
    layers: u32,
    two_buffers: bool,
    block_bytes: u64,
    page_bytes: Option<u64>,
    capacity_bytes: u64,
    pub(crate) reserve: (u32, u32),
}

/// The runs mapped in one pool, as two numbers that differ when the runs do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct MappedSet {
    pub(crate) pages: u64,
    pub(crate) digest: u64,
}

/// What an autonomous rank did in all.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct Finished {
    pub(crate) pages: PageTotals,
    pub(crate) checked: Checked,
    /// Did it ever have other pages mapped than its scheduler believes?
    pub(crate) divergent: bool,
}

/// How an autonomous rank's cache is after an order.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct State {
    pub(crate) mapped_bytes: u64,
    /// What took how long since the last answer.
    pub(crate) calls: Vec<Timed>,
}

/// Pages and runs since the start, on one rank.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PageTotals {
    /// Pages that memory was put behind.
    pub mapped: u64,
    /// Pages whose memory was taken away.
    pub unmapped: u64,
    /// Runs in which pages were mapped.
    pub runs: u64,
}

impl PageTotals {
    /// Adds another pool's.
    pub(crate) fn add(&mut self, other: Self) {
        self.mapped += other.mapped;
        self.unmapped += other.unmapped;
        self.runs += other.runs;
    }
}

/// A [`Want`].
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct WantMessage {
    pool: u16,
    owner: OwnerMessage,
    blocks: u32,
}

/// A [`Return`].
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct ReturnMessage {
    pool: u16,
    owner: OwnerMessage,
    pub(crate) blocks: Vec<u32>,
}

#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
struct OwnerMessage {
    is_prefix: bool,
    id: u64,
    generation: u32,
}

impl Setup {
    pub(crate) const fn rank(&self) -> Rank {
        Rank(self.rank)
    }

    /// See [`pool_tag`].
    pub(crate) fn tag(&self, pool: PoolId) -> u64 {
        pool_tag(self.model, self.rank(), pool)
    }
}

impl From<RunChoice> for RunsMessage {
    fn from(runs: RunChoice) -> Self {
        let RunChoice {
            longest,
            bulk,
            bulk_from_bytes,
            growth_chunks,
            short_runs,
            calm_bytes,
        } = runs;
        Self {
            longest: longest.into(),
            bulk: bulk.into(),
            bulk_from_bytes,
            growth_chunks,
            short_runs,
            calm_bytes,
        }
    }
}

impl From<RunsMessage> for RunChoice {
    fn from(message: RunsMessage) -> Self {
        let RunsMessage {
            longest,
            bulk,
            bulk_from_bytes,
            growth_chunks,
            short_runs,
            calm_bytes,
        } = message;
        Self {
            longest: longest.into(),
            bulk: bulk.into(),
            bulk_from_bytes,
            growth_chunks,
            short_runs,
            calm_bytes,
        }
    }
}

impl From<RunLength> for RunLengthMessage {
    fn from(length: RunLength) -> Self {
        match length {
            RunLength::Pages(pages) => Self::Pages(pages),
            RunLength::Bytes(bytes) => Self::Bytes(bytes),
        }
    }
}

impl From<RunLengthMessage> for RunLength {
    fn from(message: RunLengthMessage) -> Self {
        match message {
            RunLengthMessage::Pages(pages) => Self::Pages(pages),
            RunLengthMessage::Bytes(bytes) => Self::Bytes(bytes),
        }
    }
}

/// A number that no other pool of any rank of any model has: stamps carry it.
pub(crate) fn pool_tag(model: u16, rank: Rank, pool: PoolId) -> u64 {
    u64::from(model) << 32 | u64::from(rank.0) << 16 | u64::from(pool.0)
}

impl PoolMessage {
    pub(crate) fn new(spec: &PoolSpec, reserve: (u32, u32)) -> Self {
        Self {
            layout: match spec.layout {
                Layout::Contiguous => 0,
                Layout::Unified => 1,
                Layout::PerLayer => 2,
            },
            layers: spec.layers,
            two_buffers: spec.kv_buffers == KvBuffers::Two,
            block_bytes: spec.block_bytes,
            page_bytes: match spec.page_size {
                PageSize::Auto => None,
                PageSize::Bytes(bytes) => Some(bytes),
            },
            capacity_bytes: spec.capacity_bytes,
            reserve,
        }
    }

    pub(crate) const fn spec(&self) -> PoolSpec {
        PoolSpec {
            layout: match self.layout {
                0 => Layout::Contiguous,
                1 => Layout::Unified,
                _ => Layout::PerLayer,
            },
            layers: self.layers,
            kv_buffers: if self.two_buffers {
                KvBuffers::Two
            } else {
                KvBuffers::One
            },
            block_bytes: self.block_bytes,
            page_size: match self.page_bytes {
                None => PageSize::Auto,
                Some(bytes) => PageSize::Bytes(bytes),
            },
            capacity_bytes: self.capacity_bytes,
        }
    }
}

impl From<Owner> for OwnerMessage {
    fn from(owner: Owner) -> Self {
        let (is_prefix, id) = match owner.holder {
            Holder::Request(request) => (false, u64::from(request)),
            Holder::Prefix(hash) => (true, hash),
        };
        Self {
            is_prefix,
            id,
            generation: owner.generation,
        }
    }
}

impl OwnerMessage {
    fn owner(self) -> Owner {
        let holder = if self.is_prefix {
            Holder::Prefix(self.id)
        } else {
            Holder::Request(u32::try_from(self.id).unwrap_or(u32::MAX))
        };
        Owner {
            holder,
            generation: self.generation,
        }
    }
}

impl From<&Want> for WantMessage {
    fn from(want: &Want) -> Self {
        Self {
            pool: want.pool.0,
            owner: want.owner.into(),
            blocks: want.blocks,
        }
    }
}

impl WantMessage {
    pub(crate) fn want(&self) -> Want {
        Want {
            pool: PoolId(self.pool),
            owner: self.owner.owner(),
            blocks: self.blocks,
        }
    }
}

impl From<&Return<'_>> for ReturnMessage {
    fn from(returned: &Return<'_>) -> Self {
        Self {
            pool: returned.pool.0,
            owner: returned.owner.into(),
            blocks: returned.blocks.iter().map(|block| block.0).collect(),
        }
    }
}

impl ReturnMessage {
    pub(crate) fn returned<'a>(&self, blocks: &'a [BlockId]) -> Return<'a> {
        Return {
            pool: PoolId(self.pool),
            owner: self.owner.owner(),
            blocks,
        }
    }
}

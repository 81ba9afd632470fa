//! A pool to test: manager, page allocator and recording mapper, all within reach.

use std::num::NonZeroU32;
use std::sync::Arc;

use kvcached_manager::{
    BlockId, BlockManager, BlockSpace, Limit, LimitStatus, PageOccupancy, PoolUsage,
};
use kvcached_mapper::testing::RecordingMapper;
use kvcached_page_alloc::{PageAllocator, PageAllocatorConfig, Reserve, RunPolicy};

/// Bytes of a page in tests that do not care.
pub(crate) const PAGE: u64 = 1 << 20;

/// What a pool looks like.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Shape {
    pub(crate) pages: u32,
    pub(crate) page_bytes: u64,
    pub(crate) unit_bytes: u64,
    pub(crate) max_run: u32,
    pub(crate) reserve: Reserve,
}

impl Shape {
    /// `pages` pages of `per_page` blocks, mapped one by one.
    pub(crate) const fn uniform(pages: u32, per_page: u64) -> Self {
        Self {
            unit_bytes: PAGE / per_page,
            ..Self::of_bytes(pages, PAGE, 1)
        }
    }

    pub(crate) const fn of_bytes(pages: u32, page_bytes: u64, unit_bytes: u64) -> Self {
        Self {
            pages,
            page_bytes,
            unit_bytes,
            max_run: 1,
            reserve: Reserve { min: 0, max: 0 },
        }
    }
}

/// A manager and what it stands on.
pub(crate) struct Pool {
    pub(crate) blocks: BlockManager,
    pub(crate) pages: Arc<PageAllocator>,
    pub(crate) mapper: Arc<RecordingMapper>,
    pub(crate) page_bytes: u64,
    revision: u64,
}

/// Everything about a pool that can be seen without changing it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Seen {
    pub(crate) usage: PoolUsage,
    occupancy: Vec<PageOccupancy>,
    holds: Vec<u32>,
}

impl Pool {
    pub(crate) fn new(shape: Shape) -> Self {
        let (pages, mapper) = beneath(shape);
        Self {
            blocks: BlockManager::new(space(shape), Arc::clone(&pages)).unwrap(),
            pages,
            mapper,
            page_bytes: shape.page_bytes,
            revision: 0,
        }
    }

    pub(crate) fn limit_pages(&mut self, pages: u32) -> LimitStatus {
        self.revision += 1;
        let bytes = u64::from(pages) * self.page_bytes;
        self.blocks
            .set_limit(Limit {
                bytes,
                revision: self.revision,
            })
            .unwrap()
    }

    pub(crate) fn look(&self) -> Seen {
        Seen {
            usage: self.blocks.usage(),
            occupancy: self.blocks.occupancy().collect(),
            holds: self.blocks.holds().map(|(_, blocks)| blocks).collect(),
        }
    }
}

pub(crate) fn space(shape: Shape) -> BlockSpace {
    BlockSpace::new(shape.pages, shape.page_bytes, shape.unit_bytes).unwrap()
}

/// What a manager of that shape is made on.
pub(crate) fn beneath(shape: Shape) -> (Arc<PageAllocator>, Arc<RecordingMapper>) {
    let mapper = Arc::new(RecordingMapper::new(shape.pages));
    let config = PageAllocatorConfig {
        void: space(shape).void_pages().collect(),
        runs: RunPolicy::up_to(NonZeroU32::new(shape.max_run).unwrap()),
        reserve: shape.reserve,
        ..PageAllocatorConfig::new(shape.pages, shape.page_bytes)
    };
    let pages = PageAllocator::new(config, Arc::clone(&mapper) as _).unwrap();
    (Arc::new(pages), mapper)
}

pub(crate) fn blocks(numbers: impl IntoIterator<Item = u32>) -> Vec<BlockId> {
    numbers.into_iter().map(BlockId).collect()
}

impl Seen {
    /// The part that does not tell cold, warm and quarantined pages apart: an attempt to get memory
    /// that fails may leave its mark there.
    pub(crate) fn of_blocks(&self) -> (u32, u32, u32, &[PageOccupancy], &[u32]) {
        let PoolUsage {
            blocks_used,
            blocks_held,
            pages,
            ..
        } = &self.usage;
        (
            *blocks_used,
            *blocks_held,
            pages.used,
            &self.occupancy,
            &self.holds,
        )
    }
}

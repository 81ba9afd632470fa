//! A model's cache in bookkeeping: the blocks and pages of the project over a [`Counted`] device.

use std::error::Error;
use std::sync::{Arc, Mutex};

use kvcached_integrations::RunChoice;
use kvcached_manager::{AllocError, BlockManager, BlockSpace};
use kvcached_mapper::PoolSpec;
use kvcached_page_alloc::{PageAllocator, PageAllocatorConfig, Reserve};
use kvcached_replay::{BlockId, Broken, CacheError, KvCache, Return, Want, bytes_per_block};

use crate::cost::{Counted, Device};

/// Granularity of the device.
const GRANULARITY: u64 = 2 << 20;

/// Idle memory that a pool keeps, as replays have it.
const RESERVE_BYTES: u64 = 32 << 20;

/// One pool, and what is on loan from it.
#[derive(Debug)]
pub(crate) struct Cache {
    blocks: BlockManager,
    pages: Arc<PageAllocator>,
    bundle_bytes: u64,
    blocks_per_page: u32,
    block_bytes: u64,
    held_bytes: u64,
    memory_bytes: u64,
}

impl Cache {
    pub(crate) fn new(
        spec: &PoolSpec,
        memory_bytes: u64,
        device: &Arc<Mutex<Device>>,
        runs: RunChoice,
        reserve: bool,
    ) -> Result<Self, Box<dyn Error>> {
        let geometry = spec.resolve(GRANULARITY)?;
        let bundle_bytes = geometry.bundle_bytes();
        let max = match reserve {
            true => u32::try_from(RESERVE_BYTES / bundle_bytes)?,
            false => 0,
        };
        let space = BlockSpace::from(&geometry);
        let config = PageAllocatorConfig {
            void: space.void_pages().collect(),
            runs: runs.policy(&geometry),
            reserve: Reserve { min: max / 4, max },
            ..PageAllocatorConfig::new(geometry.pages(), bundle_bytes)
        };
        let mapper = Arc::new(Counted::new(device, &geometry));
        let pages = Arc::new(PageAllocator::new(config, mapper)?);
        Ok(Self {
            blocks: BlockManager::new(space, Arc::clone(&pages))?,
            pages,
            bundle_bytes,
            blocks_per_page: geometry.max_blocks_per_page(),
            block_bytes: bytes_per_block(spec),
            held_bytes: 0,
            memory_bytes,
        })
    }

    pub(crate) fn take(&mut self, blocks: u32) -> Result<Vec<BlockId>, AllocError> {
        let mine = self.blocks.alloc(blocks)?;
        self.held_bytes += u64::from(blocks) * self.block_bytes;
        Ok(mine)
    }

    pub(crate) fn give(&mut self, blocks: &[BlockId]) -> Result<(), Broken> {
        self.blocks.free(blocks).map_err(Broken::new)?;
        self.held_bytes -= blocks.len() as u64 * self.block_bytes;
        Ok(())
    }
}

impl KvCache for Cache {
    fn alloc(&mut self, wants: &[Want], out: &mut Vec<BlockId>) -> Result<(), CacheError> {
        let blocks = wants.iter().map(|want| want.blocks).sum();
        match self.take(blocks) {
            Ok(mine) => out.extend(mine),
            Err(AllocError::Full { .. }) => return Err(CacheError::Full),
            Err(error) => return Err(Broken::new(error).into()),
        }
        Ok(())
    }

    fn free(&mut self, returns: &[Return<'_>]) -> Result<(), Broken> {
        returns
            .iter()
            .try_for_each(|returned| self.give(returned.blocks))
    }

    fn fits(&self, blocks: &[u32]) -> bool {
        let blocks: u32 = blocks.iter().sum();
        let pages = u64::from((blocks + 1).div_ceil(self.blocks_per_page));
        pages * self.bundle_bytes <= self.memory_bytes
    }

    fn trim(&mut self) -> Result<(), Broken> {
        self.pages.trim().map(drop).map_err(Broken::new)
    }

    fn step_end(&mut self) -> Result<(), Broken> {
        self.pages.tick();
        while self.pages.replenish().map_err(Broken::new)?.more {}
        Ok(())
    }

    /// Without what is idle as a whole, which goes back when somebody asks.
    fn mapped_bytes(&self) -> u64 {
        let usage = self.pages.usage();
        u64::from(usage.used + usage.pinned) * self.bundle_bytes
    }

    fn held_bytes(&self) -> u64 {
        self.held_bytes
    }
}

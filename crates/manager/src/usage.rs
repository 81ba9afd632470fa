//! What a pool is used for: page by page for eviction, and summed up for whoever watches.

use kvcached_mapper::PageId;
use kvcached_page_alloc::PageUsage;

/// How full a page is. Evicting the last used block of a page gives its memory back; evicting one
/// of many gives nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageOccupancy {
    /// The page.
    pub page: PageId,
    /// Blocks that keep the page: handed out, held, and the null block.
    pub used: u32,
    /// Blocks that lie on the page.
    pub total: u32,
}

/// A pool's blocks and pages at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct PoolUsage {
    /// The pages under the blocks.
    pub pages: PageUsage,
    /// Blocks that can ever be handed out: neither straddlers nor the null block.
    pub blocks_total: u32,
    /// Blocks handed out.
    pub blocks_used: u32,
    /// Blocks set aside in holds; not among the used ones.
    pub blocks_held: u32,
    /// [`BlockManager::available`](crate::BlockManager::available).
    pub blocks_available: u32,
    /// Bytes of the used blocks, on one rank.
    pub used_bytes: u64,
    /// Bytes of the held blocks, on one rank.
    pub held_bytes: u64,
}

//! What a block manager answers instead of doing what was asked, one small enum per operation.

use kvcached_mapper::{MapError, PageId, Suspect};
use kvcached_page_alloc::FullReason;
use thiserror::Error;

use crate::BlockId;

/// Why no block was handed out. Nothing changed.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum AllocError {
    /// A normal answer: not so many blocks right now. Ask again when something was freed.
    #[error("{requested} blocks were asked for and at most {available} can be had now: {reason}")]
    Full {
        /// Blocks asked for.
        requested: u32,
        /// [`BlockManager::available`](crate::BlockManager::available) at that moment. As much as
        /// was asked for, or more, if it is the device that has no memory for it.
        available: u32,
        /// What is in the way.
        reason: FullReason,
    },
    /// Pages could not be mapped for another reason than want of memory: something must be mended
    /// before asking again makes sense.
    #[error("the pool cannot grow")]
    Broken(#[from] MapError),
    /// Of some ranks it is not known what they have: no block is handed out, not even of pages in
    /// use, until a [`repair`](crate::BlockManager::repair) has mended them.
    #[error("no block is handed out until every rank is known again{}", describe_all(.ranks))]
    Fenced {
        /// These ranks, and why.
        ranks: Vec<Suspect>,
    },
}

/// Why no block was taken back. Nothing changed.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum FreeError {
    /// The null block is nobody's to free.
    #[error("{} is the null block", crate::NULL_BLOCK)]
    Null,
    /// The pool has no such block.
    #[error("{block} is outside the pool of {blocks} blocks")]
    OutOfRange {
        /// As given.
        block: BlockId,
        /// Block numbers of the pool.
        blocks: u32,
    },
    /// The block lies on two pages, so it was never handed out.
    #[error("{block} straddles two pages and is never handed out")]
    Straddles {
        /// As given.
        block: BlockId,
    },
    /// The block is free already, or never was handed out.
    #[error("{block} is not handed out")]
    NotTaken {
        /// As given.
        block: BlockId,
    },
    /// The call names the block more than once.
    #[error("{block} is named twice")]
    NamedTwice {
        /// As given.
        block: BlockId,
    },
    /// The block is set aside, and only its holder disposes of it.
    #[error("{block} is held")]
    Held {
        /// As given.
        block: BlockId,
    },
    /// Broken: somebody else gave pages of this manager back.
    #[error("emptied pages were not taken back")]
    Pages(#[from] kvcached_page_alloc::FreeError),
}

/// Why there is no manager.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum NewError {
    /// The blocks and the page allocator are of different pools.
    #[error("the blocks lie on {blocks} pages, the page allocator has {pages}")]
    PageCount {
        /// Pages that the blocks lie on.
        blocks: u32,
        /// Pages of the allocator.
        pages: u32,
    },
    /// The page allocator would hand out a page without a block, or never one that has some.
    #[error("blocks and page allocator do not agree on whether {page} is void")]
    Void {
        /// The first such page.
        page: PageId,
    },
    /// The page of the null block cannot be had.
    #[error("no null block")]
    NullBlock(#[from] kvcached_page_alloc::AllocError),
}

fn describe_all(ranks: &[Suspect]) -> String {
    ranks.iter().map(|suspect| format!("; {suspect}")).collect()
}

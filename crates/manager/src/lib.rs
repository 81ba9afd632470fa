//! Blocks inside pages: which block is whose in one pool, packed so that memory can go back.
//!
//! ```text
//! engine ──alloc(n)──▶ BlockManager ──pages──▶ PageAllocator ──runs──▶ Mapper
//!
//!   page 0  [N x x .]   fullest first: the next block comes from here
//!   page 1  [x . . .]
//!   page 2  [. . . .]   nothing taken: given back to the page allocator
//!
//!   N null block   x taken (handed out or held)   . free
//! ```
//!
//! [`BlockManager`] hands out numbers and does all or nothing. Block 0 is the null block, taken for
//! good when the manager is made. Running out is [`AllocError::Full`], a normal answer; a mistake
//! of the caller, such as a block freed twice, is a [`FreeError`] after which nothing has changed.
//! Blocks can be set aside in a [hold](BlockManager::hold) for a request that is to come. Which
//! bytes a block means is `kvcached-mapper`'s business, when a page gets memory
//! `kvcached-page-alloc`'s.
//!
//! # Example
//!
//! ```
//! use std::sync::Arc;
//!
//! use kvcached_manager::{
//!     AllocError, BlockId, BlockManager, BlockSpace, FreeError, FullReason, Limit, LimitStatus,
//! };
//! use kvcached_mapper::{After, MapError, Mapper, PageRun, Readiness};
//! use kvcached_page_alloc::{PageAllocator, PageAllocatorConfig};
//!
//! /// Backs nothing, and says that it did.
//! #[derive(Debug)]
//! struct Nothing;
//!
//! impl Mapper for Nothing {
//!     fn map(&self, _: &[PageRun]) -> Result<(), MapError> {
//!         Ok(())
//!     }
//!     fn unmap_after(&self, _: &[PageRun], _: After) -> Result<(), MapError> {
//!         Ok(())
//!     }
//!     fn headroom(&self) -> Option<u32> {
//!         None
//!     }
//!     fn ready(&self) -> Result<Readiness, MapError> {
//!         Ok(Readiness::Ready)
//!     }
//! }
//!
//! // Ten pages of four blocks. Where there is a `Geometry`, `BlockSpace::from` takes it.
//! const PAGE: u64 = 2 << 20;
//! let pages = PageAllocator::new(PageAllocatorConfig::new(10, PAGE), Arc::new(Nothing))?;
//! let mut pool = BlockManager::new(BlockSpace::new(10, PAGE, PAGE / 4)?, Arc::new(pages))?;
//! assert_eq!(pool.available(), 39, "all but the null block");
//!
//! let prompt = pool.alloc(6)?;
//! assert_eq!(prompt, [1, 2, 3, 4, 5, 6].map(BlockId));
//! assert_eq!(pool.occupancy().map(|page| page.used).collect::<Vec<_>>(), [4, 3]);
//!
//! // Full is an answer, not a failure, and nothing was taken.
//! let full = pool.alloc(34);
//! let (requested, available) = (34, 33);
//! let reason = FullReason::Capacity;
//! assert_eq!(full, Err(AllocError::Full { requested, available, reason }));
//!
//! // What is set aside is for its holder only.
//! let hold = pool.hold(2)?;
//! assert_eq!(pool.free(&[BlockId(7)]), Err(FreeError::Held { block: BlockId(7) }));
//! assert_eq!(pool.take_held(hold, 1)?, [BlockId(7)]);
//! assert_eq!(pool.release_hold(hold)?, 1);
//!
//! // Two pages are in use: a limit of one is in force, and kept to once a page is empty.
//! let status = pool.set_limit(Limit { bytes: PAGE, revision: 1 })?;
//! assert_eq!(status, LimitStatus::Deferred { excess_bytes: PAGE });
//! assert_eq!(pool.free(&[BlockId(4), BlockId(4)]), Err(FreeError::NamedTwice { block: BlockId(4) }));
//! pool.free(&[4, 5, 6, 7].map(BlockId))?;
//! assert_eq!(pool.limit_status(), LimitStatus::Applied);
//! assert_eq!(pool.usage().pages.mapped_bytes, PAGE);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod bits;
mod blocks;
mod error;
mod eviction;
mod hold;
mod page;
mod space;
mod usage;

use std::fmt;

pub use blocks::BlockManager;
pub use error::{AllocError, FreeError, NewError};
pub use eviction::EvictionQueue;
pub use hold::{HoldError, HoldId};
pub use kvcached_page_alloc::{FullReason, Limit, LimitError, LimitStatus, PageUsage, Repaired};
pub use space::{BlockSpace, SpaceError};
pub use usage::{PageOccupancy, PoolUsage};

/// A block of one pool: the unit an engine addresses. Its bytes follow from the number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockId(pub u32);

/// The block that engines take for "none": never handed out, never freed.
pub const NULL_BLOCK: BlockId = BlockId(0);

impl fmt::Display for BlockId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "block {}", self.0)
    }
}

/// A number of this crate as an index.
const fn index(at: u32) -> usize {
    // A u32 always fits: the workspace does not build for 16-bit targets.
    at as usize
}

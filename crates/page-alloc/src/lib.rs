//! Whose page is it: the bookkeeping of one pool's pages, and when they get memory and lose it.
//!
//! ```text
//! cold ──map──▶ used ──free──▶ warm ──alloc──▶ used          warm ──unmap──▶ cold
//!      (busy)                                                     (busy)
//! withheld: above the limit      quarantined: unknown after a failure      void: holds no block
//! ```
//!
//! A page is in exactly one [`PageState`]. [`PageAllocator`] hands pages out, asks a
//! [`Mapper`](kvcached_mapper::Mapper) for memory in runs of adjacent pages, keeps freed pages warm
//! for the next request, and gives the memory of whole runs back when told to: by
//! [`trim`](PageAllocator::trim), by a [`Limit`], or when its [`Reserve`] is more than the recent
//! demand asks for. What a block is, or where a page lies in memory, is not known here.
//!
//! Running out of pages or memory is [`AllocError::Full`], a normal answer after which nothing has
//! changed. Whatever the mapper leaves in doubt is quarantined until a
//! [`repair`](PageAllocator::repair) settles it, and while the mapper fences a rank, nothing is
//! handed out at all.
//!
//! Pages that were freed may still be read by what the device was told to do before:
//! [`free_after`](PageAllocator::free_after) says by what, [`retire`](PageAllocator::retire) that it
//! has ended, and memory goes back afterwards.
//!
//! # Example
//!
//! ```
//! use std::sync::Arc;
//!
//! use kvcached_mapper::{After, MapError, Mapper, PageRun, Readiness};
//! use kvcached_page_alloc::{
//!     AllocError, FullReason, Limit, LimitStatus, PageAllocator, PageAllocatorConfig,
//! };
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
//! const MIB: u64 = 1 << 20;
//! let pages = PageAllocator::new(PageAllocatorConfig::new(100, 2 * MIB), Arc::new(Nothing))?;
//!
//! // Sixty adjacent pages cost one call with one run.
//! let mut mine = Vec::new();
//! pages.alloc(60, &mut mine)?;
//! assert_eq!((pages.usage().used, pages.usage().runs), (60, 1));
//!
//! // Full is an answer, not a failure, and nothing was taken.
//! let full = pages.alloc(41, &mut mine);
//! assert_eq!(full, Err(AllocError::Full(FullReason::Capacity)));
//! assert_eq!(mine.len(), 60);
//!
//! // A limit below what is in use waits until its owner gives it back.
//! let status = pages.set_limit(Limit { bytes: 20 * MIB, revision: 1 })?;
//! assert_eq!(status, LimitStatus::Deferred { excess_bytes: 100 * MIB });
//! pages.free(&mine)?;
//! assert_eq!(pages.limit_status(), LimitStatus::Applied);
//! assert_eq!((pages.usage().mapped_bytes, pages.available()), (0, 10));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod allocator;
mod config;
mod demand;
mod error;
mod limit;
mod run_policy;
mod runs;
mod spans;
mod sync;
mod table;
mod turns;
mod usage;

pub use allocator::{PageAllocator, Repaired, Replenished};
pub use config::{PageAllocatorConfig, Reserve, Unmapping};
pub use error::{AllocError, ConfigError, FreeError, FullReason};
pub use limit::{Limit, LimitError, LimitStatus};
pub use run_policy::{Room, RunPolicy};
pub use table::PageState;
pub use turns::Turns;
pub use usage::PageUsage;

/// Pages of the longest run: the idle pages of a run are the bits of one word.
pub const MAX_RUN: u32 = 64;

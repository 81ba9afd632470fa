//! What an allocator answers instead of doing what was asked, one small enum per operation.

use kvcached_mapper::{MapError, PageId, Suspect};
use thiserror::Error;

use crate::PageState;

/// Why pages were not handed out. Nothing was, and nothing changed hands.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum AllocError {
    /// A normal answer: not so many pages right now.
    #[error("full right now: {0}")]
    Full(FullReason),
    /// The mapper failed otherwise: something must be mended before asking again makes sense.
    #[error("pages cannot be mapped")]
    Broken(#[from] MapError),
    /// Of some ranks it is not known what they have: nothing is handed out, warm pages neither,
    /// until a [`repair`](crate::PageAllocator::repair) has mended them.
    #[error("nothing is handed out until every rank is known again{}", describe_all(.ranks))]
    Fenced {
        /// These ranks, and why.
        ranks: Vec<Suspect>,
    },
    /// The first page was asked for, but is not to be had, now or later.
    #[error("the first page is not free but {state:?}")]
    FirstTaken {
        /// What it is instead.
        state: PageState,
    },
}

/// What is in the way of more pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Error)]
#[non_exhaustive]
pub enum FullReason {
    /// The limit.
    #[error("the limit is reached")]
    Limit,
    /// The pool has no more pages.
    #[error("the pool has no more pages")]
    Capacity,
    /// The device has no more memory.
    #[error("the device has no more memory")]
    DeviceMemory,
    /// Pages would do that a call under way holds; once it ends, asking again may succeed.
    #[error("a call about the remaining pages is under way")]
    Busy,
}

/// Why pages were not taken back. None of the call was.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum FreeError {
    /// The page is not handed out.
    #[error("{page} is not in use but {}", describe(.found))]
    NotUsed {
        /// The page.
        page: PageId,
        /// What it is instead; `None` if the pool has no such page.
        found: Option<PageState>,
    },
    /// The call names the page more than once.
    #[error("{page} is named twice")]
    NamedTwice {
        /// The page.
        page: PageId,
    },
}

/// Why a configuration makes no allocator.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// No page can ever be backed.
    #[error("the pool has no page that holds a block")]
    NoPages,
    /// More pages than ids, or more bytes than a 64-bit number holds.
    #[error("{pages} pages of {bundle_bytes} bytes are too many")]
    TooLarge {
        /// Pages of the pool.
        pages: u32,
        /// Bytes of each.
        bundle_bytes: u64,
    },
    /// A page without bytes.
    #[error("a page has no bytes")]
    NoBytes,
    /// A void page that the pool does not have.
    #[error("{page} is said to be void, but the pool has only {pages} pages")]
    VoidOutOfRange {
        /// The page.
        page: PageId,
        /// Pages of the pool.
        pages: u32,
    },
    /// Runs longer than the table can keep.
    #[error("runs of {max_run} pages are too long: at most {most}")]
    RunTooLong {
        /// Pages asked for.
        max_run: u32,
        /// [`MAX_RUN`](crate::MAX_RUN).
        most: u32,
    },
    /// Bulk runs that are shorter than the others.
    #[error("bulk runs of {bulk} pages are shorter than other runs, which may have {longest}")]
    BulkRunTooShort {
        /// Pages of a run of bulk growth.
        bulk: u32,
        /// Pages of the longest other run.
        longest: u32,
    },
    /// A reserve whose lower bound is above its upper one.
    #[error("the reserve is at least {min} pages and at most {max}: no number is both")]
    Reserve {
        /// The lower bound.
        min: u32,
        /// The upper bound.
        max: u32,
    },
    /// A floor above the capacity.
    #[error("a floor of {floor_bytes} bytes is above the capacity of {capacity_bytes} bytes")]
    Floor {
        /// Bytes promised.
        floor_bytes: u64,
        /// Bytes there are.
        capacity_bytes: u64,
    },
}

fn describe_all(ranks: &[Suspect]) -> String {
    ranks.iter().map(|suspect| format!("; {suspect}")).collect()
}

fn describe(found: &Option<PageState>) -> String {
    found.map_or_else(
        || "outside the pool".to_owned(),
        |state| format!("{state:?}").to_lowercase(),
    )
}

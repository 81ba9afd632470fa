//! One consistent snapshot of a pool's pages.

use crate::{Limit, LimitStatus};

/// The pages of a pool at one moment. The seven states add up to `total`, whatever calls are under
/// way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct PageUsage {
    /// Pages of the pool.
    pub total: u32,
    /// Hold no whole block; never backed.
    pub void: u32,
    /// No memory, and may be backed.
    pub cold: u32,
    /// Memory, but idle.
    pub warm: u32,
    /// Of the warm pages, those whose memory cannot go back now, since a page of the same run is in
    /// use.
    pub pinned: u32,
    /// Handed out.
    pub used: u32,
    /// A call about them is under way.
    pub busy: u32,
    /// No memory, and above the limit.
    pub withheld: u32,
    /// State unknown after a failure.
    pub quarantined: u32,
    /// Backed runs, those included that a call under way is about to unmap.
    pub runs: u32,
    /// Warm pages that the recent demand asks for, within the bounds of the reserve.
    pub reserve_target: u32,
    /// Bytes of one rank that have memory or may have: warm, used, busy and quarantined pages.
    pub mapped_bytes: u64,
    /// Pages mapped since the start.
    pub mapped_total: u64,
    /// Pages unmapped since the start.
    pub unmapped_total: u64,
    /// Runs mapped since the start.
    pub runs_mapped_total: u64,
    /// Calls that mapped nothing because memory was full.
    pub map_full_total: u64,
    /// Calls that failed to map otherwise.
    pub map_failed_total: u64,
    /// Calls that failed to unmap, other than because work was in flight.
    pub unmap_failed_total: u64,
    /// Quarantined pages that a repair has brought back since the start.
    pub repaired_total: u64,
    /// Repairs since the start that found that some rank had lost what its pages held.
    pub contents_lost_total: u64,
    /// The limit in force.
    pub limit: Limit,
    /// [`LimitStatus::Applied`] or [`LimitStatus::Deferred`].
    pub limit_status: LimitStatus,
}

//! How long runs are to be, as an operator says it: in bytes, so that one setting suits pools of any
//! geometry. What it comes to in the pages of a pool is a [`RunPolicy`].

use std::fmt;
use std::num::NonZeroU32;

use kvcached_mapper::Geometry;
use kvcached_page_alloc::{MAX_RUN, RunPolicy};

use crate::size::ByteSize;

/// Pages that are backed together, at most.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RunLength {
    /// That many pages, 1 to 64.
    Pages(NonZeroU32),
    /// As many as that many bytes of one extent hold, if that is 1 to 64.
    Bytes(u64),
}

/// What decides how long runs are; `docs/run-policy.md` of the project has the measurements behind
/// the defaults.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RunChoice {
    /// The longest run of ordinary growth.
    pub longest: RunLength,
    /// The longest run of bulk growth; in a pool where that is less than `longest`, as long as that.
    pub bulk: RunLength,
    /// Growth by so many bytes of one rank at once is bulk.
    pub bulk_from_bytes: u64,
    /// Growth takes at least so many chunks, if it is by so many pages: memory that comes in more
    /// pieces is pinned less by what survives. Where a single run takes as many chunks, since the
    /// layout has many tensors, it may be all of the growth.
    pub growth_chunks: NonZeroU32,
    /// While memory is short, growth takes at least so many runs, if it is by so many pages.
    pub short_runs: NonZeroU32,
    /// After a pool found the device full, memory is short for it until it has mapped so many bytes
    /// of one rank without finding it full again.
    pub calm_bytes: u64,
}

impl RunLength {
    /// Pages of a run in a pool of that geometry: 1 to 64.
    #[must_use]
    pub fn pages(self, geometry: &Geometry) -> NonZeroU32 {
        let pages = match self {
            Self::Pages(pages) => pages.get(),
            Self::Bytes(bytes) => whole(bytes / geometry.page_bytes()),
        };
        at_least_one(pages.min(MAX_RUN))
    }
}

impl RunChoice {
    /// Runs as long as the demand, up to that length, however much memory is left.
    #[must_use]
    pub const fn up_to(longest: RunLength) -> Self {
        Self {
            longest,
            bulk: longest,
            bulk_from_bytes: 0,
            growth_chunks: NonZeroU32::MIN,
            short_runs: NonZeroU32::MIN,
            calm_bytes: 0,
        }
    }

    /// The policy of a pool of that geometry.
    #[must_use]
    pub fn policy(self, geometry: &Geometry) -> RunPolicy {
        let bundle_bytes = geometry.bundle_bytes();
        let longest = self.longest.pages(geometry);
        RunPolicy {
            longest,
            bulk: self.bulk.pages(geometry).max(longest),
            bulk_from: at_least_one(whole(self.bulk_from_bytes.div_ceil(bundle_bytes))),
            share: at_least_one(self.growth_chunks.get() / geometry.extents_per_page()),
            share_when_short: self.short_runs,
            calm: whole(self.calm_bytes.div_ceil(bundle_bytes)),
        }
    }
}

/// 32 MiB of an extent, which read as fast as any; 128 MiB from 1 GiB on, which map three times as
/// fast; eighths of smaller growth where a run is one chunk; and sixteenths, mostly single pages, for
/// the next 4 GiB once the device was full.
impl Default for RunChoice {
    fn default() -> Self {
        Self {
            longest: RunLength::Bytes(32 << 20),
            bulk: RunLength::Bytes(128 << 20),
            bulk_from_bytes: 1 << 30,
            growth_chunks: NonZeroU32::new(8).expect("eight"),
            short_runs: NonZeroU32::new(16).expect("sixteen"),
            calm_bytes: 4 << 30,
        }
    }
}

impl fmt::Display for RunLength {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Pages(pages) => write!(f, "{pages} pages"),
            Self::Bytes(bytes) => write!(f, "{}", ByteSize(bytes)),
        }
    }
}

/// A number of pages; more than there can be is as good as all.
pub(super) fn whole(pages: u64) -> u32 {
    u32::try_from(pages).unwrap_or(u32::MAX)
}

fn at_least_one(pages: u32) -> NonZeroU32 {
    NonZeroU32::new(pages).unwrap_or(NonZeroU32::MIN)
}

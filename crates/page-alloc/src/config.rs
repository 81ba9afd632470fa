//! What an allocator is made from.

use std::num::NonZeroU32;

use kvcached_mapper::PageId;

use crate::{ConfigError, MAX_RUN, RunPolicy, Turns};

/// What an allocator is made from; `Geometry` of the mapper's crate has most of the numbers.
#[derive(Debug, Clone)]
pub struct PageAllocatorConfig {
    /// Pages of the pool, void ones included.
    pub pages: u32,
    /// Bytes that backing one page takes on one rank, over all tensors.
    pub bundle_bytes: u64,
    /// Pages that hold no whole block; they are never backed.
    pub void: Vec<PageId>,
    /// How many adjacent pages are backed together. A long run costs as little to map as a short
    /// one, but its memory goes back only when all its pages are idle.
    pub runs: RunPolicy,
    /// Warm pages to keep ready. Bounds beyond the capacity are as good as the capacity.
    pub reserve: Reserve,
    /// Bytes that the pool was promised: a limit below is refused.
    pub floor_bytes: u64,
    /// Chunks that back one run on one rank, that is the extents of a page: the cost of mapping a
    /// run goes by them, so they bound how much one step of [`PageAllocator::replenish`] does.
    ///
    /// [`PageAllocator::replenish`]: crate::PageAllocator::replenish
    pub run_chunks: NonZeroU32,
    /// Who gives back what is above the limit once it is free.
    pub unmapping: Unmapping,
    /// Whose turn it is at the device; [shared](Turns::shared) by all pools that one thread looks
    /// after, or else [off](Turns::off).
    pub turns: Turns,
}

/// Bounds of the warm pages that [`replenish`](crate::PageAllocator::replenish) keeps ready, so that
/// an allocation need not wait for the driver. Both zero: none.
///
/// In between, their number follows the demand: how far the pages in use have risen within one of
/// the last 16 [ticks](crate::PageAllocator::tick). It grows at once, and is back at `min` at most 17
/// ticks and as many more as `max` has binary digits after the last demand.
///
/// Pages above `min` are mapped ahead only while the device has as much left for others as is warm. They
/// are given up when another pool, with which the [`Turns`] are shared, is refused a demand for want of
/// memory, and not mapped again for two ticks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Reserve {
    /// Below this, pages are mapped, whatever the demand.
    pub min: u32,
    /// Above this, wholly idle runs are unmapped, whatever the demand. What comes and goes all the
    /// time costs no call as long as half as much again is within this.
    pub max: u32,
}

/// Who gives back what is above the limit once its pages are free.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Unmapping {
    /// The call that freed them: nobody else need look after the pool.
    #[default]
    InCall,
    /// Whoever calls [`keep_to_limit`](crate::PageAllocator::keep_to_limit) or
    /// [`replenish`](crate::PageAllocator::replenish), so that no free and no allocation waits for
    /// memory to go. Somebody has to, whenever the pool is [due](crate::PageAllocator::is_due).
    Behind,
}

impl PageAllocatorConfig {
    /// `pages` pages of `bundle_bytes` bytes each, in runs as long as they can be, without void
    /// pages, reserve or floor, of one chunk a run; set the fields for more.
    #[must_use]
    pub fn new(pages: u32, bundle_bytes: u64) -> Self {
        Self {
            pages,
            bundle_bytes,
            void: Vec::new(),
            runs: RunPolicy::up_to(NonZeroU32::new(MAX_RUN).expect("a run has pages")),
            reserve: Reserve { min: 0, max: 0 },
            floor_bytes: 0,
            run_chunks: NonZeroU32::MIN,
            unmapping: Unmapping::InCall,
            turns: Turns::off(),
        }
    }

    pub(crate) fn check(&self) -> Result<(), ConfigError> {
        let Self {
            pages,
            bundle_bytes,
            ..
        } = *self;
        if bundle_bytes == 0 {
            return Err(ConfigError::NoBytes);
        }
        if pages == u32::MAX || u64::from(pages).checked_mul(bundle_bytes).is_none() {
            return Err(ConfigError::TooLarge {
                pages,
                bundle_bytes,
            });
        }
        if let Some(&page) = self.void.iter().find(|page| page.0 >= pages) {
            return Err(ConfigError::VoidOutOfRange { page, pages });
        }
        self.runs.check()?;
        let Reserve { min, max } = self.reserve;
        if min > max {
            return Err(ConfigError::Reserve { min, max });
        }
        Ok(())
    }
}

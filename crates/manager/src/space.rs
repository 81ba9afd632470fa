//! Which blocks lie on which page: pure arithmetic, and all that this crate knows of a geometry.
//!
//! ```text
//! uniform, 4 a page        |0 1 2 3|4 5 6 7|8 ...
//! 1.5 MiB in 2 MiB pages   |0..1|1..2|2.3.|4..5|5...    blocks 1, 2, 5 straddle two pages
//! ```

use std::ops::Range;

use kvcached_mapper::{Geometry, PageId};
use thiserror::Error;

/// The blocks of a pool and the pages they lie on.
///
/// Every page of a pool holds the same number of blocks, or, where an explicit page size is no
/// multiple of the block size, as many whole ones as fit between its two ends. A block that would
/// lie on two pages keeps its number, so that addresses stay a multiplication, but is never handed
/// out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlockSpace {
    pages: u32,
    blocks: u32,
    /// Blocks on the page that holds most.
    most: u32,
    /// Bytes of a block over all extents.
    block_bytes: u64,
    shape: Shape,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Shape {
    Uniform(Divisor),
    Uneven { unit_bytes: u64, page_bytes: u64 },
}

/// Why there is no such [`BlockSpace`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum SpaceError {
    /// Block 0 of page 0 is the null block: a pool has at least one of each.
    #[error("{pages} pages of {page_bytes} bytes hold no block of {unit_bytes} bytes")]
    NoBlock {
        /// Pages of the pool.
        pages: u32,
        /// Bytes of a page inside one extent.
        page_bytes: u64,
        /// Bytes of a block inside one extent.
        unit_bytes: u64,
    },
    /// More blocks than have numbers.
    #[error("{pages} pages of {page_bytes} bytes hold too many blocks of {unit_bytes} bytes")]
    TooMany {
        /// Pages of the pool.
        pages: u32,
        /// Bytes of a page inside one extent.
        page_bytes: u64,
        /// Bytes of a block inside one extent.
        unit_bytes: u64,
    },
}

impl BlockSpace {
    /// A pool of one extent: blocks at multiples of `unit_bytes`, on pages of `page_bytes`.
    ///
    /// # Errors
    /// No block at all, or more than have numbers.
    pub fn new(pages: u32, page_bytes: u64, unit_bytes: u64) -> Result<Self, SpaceError> {
        let most = page_bytes.checked_div(unit_bytes).unwrap_or(0);
        if pages == 0 || most == 0 {
            return Err(SpaceError::NoBlock {
                pages,
                page_bytes,
                unit_bytes,
            });
        }
        let too_many = SpaceError::TooMany {
            pages,
            page_bytes,
            unit_bytes,
        };
        let total_bytes = u64::from(pages).checked_mul(page_bytes).ok_or(too_many)?;
        let blocks = u32::try_from(total_bytes / unit_bytes).map_err(|_| too_many)?;
        if blocks == u32::MAX {
            return Err(too_many);
        }
        let most = u32::try_from(most).map_err(|_| too_many)?;
        let shape = if page_bytes.is_multiple_of(unit_bytes) {
            Shape::Uniform(Divisor::new(most))
        } else {
            Shape::Uneven {
                unit_bytes,
                page_bytes,
            }
        };
        Ok(Self {
            pages,
            blocks,
            most,
            block_bytes: unit_bytes,
            shape,
        })
    }

    /// Pages of the pool.
    #[must_use]
    pub const fn pages(&self) -> u32 {
        self.pages
    }

    /// Block numbers of the pool, those that straddle two pages among them.
    #[must_use]
    pub const fn blocks(&self) -> u32 {
        self.blocks
    }

    /// Blocks on the page that holds most.
    #[must_use]
    pub const fn max_blocks_per_page(&self) -> u32 {
        self.most
    }

    /// Bytes of a block over all extents, its padding included.
    #[must_use]
    pub const fn block_bytes(&self) -> u64 {
        self.block_bytes
    }

    /// The blocks that lie wholly on `page`; empty for a page that the pool does not have.
    #[must_use]
    #[inline]
    pub fn blocks_in(&self, page: PageId) -> Range<u32> {
        if page.0 >= self.pages {
            return 0..0;
        }
        match self.shape {
            Shape::Uniform(_) => page.0 * self.most..(page.0 + 1) * self.most,
            Shape::Uneven {
                unit_bytes,
                page_bytes,
            } => whole_blocks(page, unit_bytes, page_bytes),
        }
    }

    /// How many blocks lie wholly on `page`.
    #[must_use]
    pub fn count_in(&self, page: PageId) -> u32 {
        let blocks = self.blocks_in(page);
        blocks.end - blocks.start
    }

    /// How many blocks lie wholly on one of `pages`.
    pub(crate) fn count_on(&self, pages: &[PageId]) -> u32 {
        match self.shape {
            Shape::Uniform(_) => {
                let pages = u32::try_from(pages.len()).expect("distinct pages of the pool");
                pages * self.most
            }
            Shape::Uneven { .. } => pages.iter().map(|&page| self.count_in(page)).sum(),
        }
    }

    /// Is every page one block, with the same number?
    pub(crate) const fn pages_are_blocks(&self) -> bool {
        self.most == 1 && matches!(self.shape, Shape::Uniform(_))
    }

    /// How many blocks lie wholly on a page: all but the straddlers.
    #[must_use]
    pub fn whole_blocks(&self) -> u32 {
        match self.shape {
            Shape::Uniform(_) => self.blocks,
            Shape::Uneven { .. } => (0..self.pages)
                .map(|page| self.count_in(PageId(page)))
                .sum(),
        }
    }

    /// The page that `block` lies on; `None` if it straddles two or the pool does not have it.
    #[must_use]
    #[inline]
    pub fn page_of(&self, block: u32) -> Option<PageId> {
        if block >= self.blocks {
            return None;
        }
        match &self.shape {
            Shape::Uniform(per_page) => Some(PageId(per_page.quotient(block))),
            &Shape::Uneven {
                unit_bytes,
                page_bytes,
            } => whole_page(block, unit_bytes, page_bytes),
        }
    }

    /// Pages that hold no whole block, ascending: they are never mapped.
    pub fn void_pages(&self) -> impl Iterator<Item = PageId> {
        // A page holds as many blocks as fit, or one fewer: none only where one fits.
        let any = self.most == 1 && matches!(self.shape, Shape::Uneven { .. });
        let pages = if any { self.pages } else { 0 };
        (0..pages)
            .map(PageId)
            .filter(|&page| self.blocks_in(page).is_empty())
    }
}

impl From<&Geometry> for BlockSpace {
    fn from(geometry: &Geometry) -> Self {
        let unit_bytes = geometry.block_stride_bytes();
        let space = Self::new(geometry.pages(), geometry.page_bytes(), unit_bytes)
            .expect("a geometry has a page, a block on it, and numbers for all its blocks");
        // No overflow: a block is no larger than a page, whose bytes over all extents are known.
        Self {
            block_bytes: unit_bytes * u64::from(geometry.extents_per_page()),
            ..space
        }
    }
}

/// The blocks of `unit_bytes` that lie between the ends of `page`.
#[inline(never)]
fn whole_blocks(page: PageId, unit_bytes: u64, page_bytes: u64) -> Range<u32> {
    let start_bytes = u64::from(page.0) * page_bytes;
    let number = |units| u32::try_from(units).expect("no page starts past the last block number");
    number(start_bytes.div_ceil(unit_bytes))..number((start_bytes + page_bytes) / unit_bytes)
}

/// The page that the first and the last byte of `block` lie on, if that is one page.
#[inline(never)]
fn whole_page(block: u32, unit_bytes: u64, page_bytes: u64) -> Option<PageId> {
    let first_byte = u64::from(block) * unit_bytes;
    let page = first_byte / page_bytes;
    let last_byte = first_byte + (unit_bytes - 1);
    (last_byte / page_bytes == page)
        .then(|| PageId(u32::try_from(page).expect("a block lies on one of the pages")))
}

/// Divides by a number that is fixed once: with a shift, or with a multiplication by its
/// reciprocal, a third of what the division costs.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Divisor {
    Shift(u32),
    Reciprocal(u64),
}

impl Divisor {
    const fn new(by: u32) -> Self {
        if by.is_power_of_two() {
            return Self::Shift(by.trailing_zeros());
        }
        // 2^64 / by, rounded up: exact for every u32, since the error stays below 2^32 * by / 2^64.
        Self::Reciprocal(u64::MAX / by as u64 + 1)
    }

    #[inline]
    fn quotient(&self, of: u32) -> u32 {
        match *self {
            Self::Shift(places) => of >> places,
            Self::Reciprocal(reciprocal) => {
                u32::try_from((u128::from(reciprocal) * u128::from(of)) >> 64)
                    .expect("a quotient is at most what is divided")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use kvcached_mapper::{KvBuffers, Layout, PageSize, PoolSpec};
    use proptest::prelude::*;

    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn blocks_of_one_and_a_half_mib_leave_every_third_page_void() {
        let space = BlockSpace::new(6, 2 * MIB, 3 * MIB / 2).unwrap();
        let per_page: Vec<usize> = (0..6)
            .map(|page| space.blocks_in(PageId(page)).len())
            .collect();
        assert_eq!(per_page, [1, 0, 1, 1, 0, 1]);
        assert_eq!(
            space.void_pages().collect::<Vec<_>>(),
            [PageId(1), PageId(4)]
        );
        assert_eq!(space.page_of(1), None);
    }

    #[test]
    fn a_space_without_a_block_or_with_too_many_is_refused() {
        for (pages, page_bytes, unit_bytes) in
            [(4, 2 * MIB, 3 * MIB), (0, 4, 1), (4, 0, 1), (4, 4, 0)]
        {
            let refused = BlockSpace::new(pages, page_bytes, unit_bytes);
            assert_eq!(
                refused,
                Err(SpaceError::NoBlock {
                    pages,
                    page_bytes,
                    unit_bytes
                })
            );
        }
        for (pages, page_bytes, unit_bytes) in
            [(u32::MAX, 2, 1), (2, u64::MAX, 3), (1, u64::MAX, 1)]
        {
            let refused = BlockSpace::new(pages, page_bytes, unit_bytes);
            assert_eq!(
                refused,
                Err(SpaceError::TooMany {
                    pages,
                    page_bytes,
                    unit_bytes
                })
            );
        }
    }

    #[test]
    fn a_geometry_gives_the_same_pages_to_the_same_blocks() {
        for (block_bytes, page_size) in [
            (32 << 10, PageSize::Auto),
            (3 * MIB / 4, PageSize::Bytes(2 * MIB)),
            (3 * MIB / 2, PageSize::Bytes(2 * MIB)),
            (36 << 10, PageSize::Auto),
        ] {
            let spec = PoolSpec {
                layout: Layout::PerLayer,
                layers: 2,
                kv_buffers: KvBuffers::Two,
                block_bytes,
                page_size,
                capacity_bytes: 256 * MIB,
            };
            let geometry = spec.resolve(2 * MIB).unwrap();
            let space = BlockSpace::from(&geometry);
            assert_eq!(
                (space.pages(), space.blocks()),
                (geometry.pages(), geometry.blocks())
            );
            assert_eq!(space.max_blocks_per_page(), geometry.max_blocks_per_page());
            assert_eq!(space.block_bytes(), 4 * geometry.block_stride_bytes());
            for page in (0..=geometry.pages()).map(PageId) {
                assert_eq!(space.blocks_in(page), geometry.blocks_in(page));
            }
            for block in 0..=geometry.blocks() {
                assert_eq!(space.page_of(block), geometry.page_of(block));
            }
        }
    }

    proptest! {
        #[test]
        fn every_block_lies_on_the_page_that_lists_it_or_straddles(
            pages in 1_u32..40,
            unit_bytes in 1_u64..200,
            more_bytes in 0_u64..200,
        ) {
            let page_bytes = unit_bytes + more_bytes;
            let space = BlockSpace::new(pages, page_bytes, unit_bytes).unwrap();
            let mut owner = vec![None; usize::try_from(space.blocks()).unwrap()];
            for page in (0..pages).map(PageId) {
                let blocks = space.blocks_in(page);
                prop_assert!(blocks.len() <= usize::try_from(space.max_blocks_per_page()).unwrap());
                prop_assert_eq!(
                    blocks.is_empty(),
                    space.void_pages().any(|void| void == page)
                );
                for block in blocks {
                    let start = u64::from(block) * unit_bytes;
                    prop_assert!(start >= u64::from(page.0) * page_bytes);
                    prop_assert!(start + unit_bytes <= u64::from(page.0 + 1) * page_bytes);
                    prop_assert_eq!(owner[usize::try_from(block).unwrap()].replace(page), None);
                }
            }
            for (block, owner) in (0..).zip(owner) {
                prop_assert_eq!(space.page_of(block), owner);
            }
            prop_assert_eq!(space.page_of(space.blocks()), None);
            prop_assert!(space.blocks_in(PageId(pages)).is_empty());
        }

        #[test]
        fn reciprocal_divides_exactly(by in 1_u32.., of in any::<u32>()) {
            prop_assert_eq!(Divisor::new(by).quotient(of), of / by);
        }

        #[test]
        fn reciprocal_divides_exactly_next_to_multiples(by in 1_u32.., times in any::<u32>()) {
            let multiple = (by * (times % (u32::MAX / by)).max(1)).max(1);
            for of in [multiple - 1, multiple, multiple.saturating_add(1)] {
                prop_assert_eq!(Divisor::new(by).quotient(of), of / by);
            }
        }
    }
}

//! What a pool should look like, in the words of an engine, and the page size that fits it.
//!
//! [`PoolSpec::resolve`] turns the wish into a [`Geometry`], which knows every byte. Both are pure
//! arithmetic: no device is asked, no memory is touched, and a number that does not fit is an
//! error value.

use std::{fmt, str::FromStr};

use thiserror::Error;

use crate::Geometry;

/// An automatic page is at most this many granules long.
const MAX_AUTO_GRANULES: u64 = 1024;

/// A padded block begins at a multiple of this, so that every element type and every vector load
/// of an attention kernel stays aligned.
const PADDED_BLOCK_ALIGN: u64 = 256;

/// An automatic page size pads each block by at most this part of its stride.
const MAX_PADDING_DIVISOR: u64 = 16;

/// How layers, and K and V, share tensors.
///
/// ```text
/// contiguous   one tensor:            [b0: L0 K V, L1 K V, …][b1: L0 K V, L1 K V, …] …
/// unified      one tensor a layer:    [b0: K V][b1: K V] …
/// per-layer    one tensor a layer:    [b0: K][b1: K] …   [b0: V][b1: V] …
/// ```
///
/// The price of mapping is per extent: a run of pages has one extent in a contiguous pool, one
/// per layer in a unified one, one per layer and buffer in a per-layer one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Layout {
    /// All layers of one block lie together, K then V within each layer.
    Contiguous,
    /// One tensor per layer; K and V of one block lie together.
    Unified,
    /// One tensor per layer; all K first, then all V.
    PerLayer,
}

/// What a token leaves behind in each layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum KvBuffers {
    /// One buffer: a compressed latent (MLA) or a recurrent state.
    One,
    /// K and V.
    Two,
}

/// Bytes of one page in one extent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PageSize {
    /// The smallest multiple of the granularity that whole blocks fill, padded by at most a
    /// sixteenth. No block straddles a page.
    Auto,
    /// This many. Blocks that straddle two pages are left out.
    Bytes(u64),
}

/// What one pool should look like on one rank.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct PoolSpec {
    /// How layers, and K and V, share tensors.
    pub layout: Layout,
    /// Layers of the pool on this rank.
    pub layers: u32,
    /// One buffer per layer, or K and V.
    pub kv_buffers: KvBuffers,
    /// Bytes of one block in one buffer of one layer, on this rank.
    pub block_bytes: u64,
    /// Bytes of one page in one extent.
    pub page_size: PageSize,
    /// Addresses of this rank over all tensors, in bytes; rounded down to whole pages.
    pub capacity_bytes: u64,
}

/// Why a pool cannot look like that.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum LayoutError {
    /// Something there must be at least one of.
    #[error("a pool without {what}")]
    Zero {
        /// What there is none of.
        what: &'static str,
    },
    /// A device cannot have that granularity.
    #[error("the granularity {granularity} is not a power of two")]
    Granularity {
        /// As given, in bytes.
        granularity: u64,
    },
    /// An explicit page size that cannot be mapped.
    #[error("page size {page_bytes} is not a positive multiple of the granularity {granularity}")]
    PageMisaligned {
        /// As given, in bytes.
        page_bytes: u64,
        /// The device's granularity, in bytes.
        granularity: u64,
    },
    /// An explicit page size that no block fits into.
    #[error(
        "a block takes {unit_bytes} bytes of one extent, more than the page of {page_bytes}: \
         the smallest page size that works is {smallest_page_bytes}"
    )]
    BlockLargerThanPage {
        /// Bytes of a block inside one extent.
        unit_bytes: u64,
        /// Page size as given.
        page_bytes: u64,
        /// A page size that works.
        smallest_page_bytes: u64,
    },
    /// No page of reasonable size is filled by whole blocks.
    #[error(
        "no page of up to {max_page_bytes} bytes is filled by blocks of {unit_bytes} bytes \
         without padding each by more than a sixteenth"
    )]
    NoPageSize {
        /// Bytes of a block inside one extent.
        unit_bytes: u64,
        /// The largest page tried.
        max_page_bytes: u64,
    },
    /// The capacity holds no page.
    #[error("a capacity of {capacity_bytes} bytes is less than one page of {bundle_bytes} bytes")]
    CapacityTooSmall {
        /// As given.
        capacity_bytes: u64,
        /// Bytes of one page over all extents.
        bundle_bytes: u64,
    },
    /// More pages than there are page ids.
    #[error("{pages} pages are more than can be numbered: use larger pages")]
    TooManyPages {
        /// What the capacity holds.
        pages: u64,
    },
    /// More blocks than there are block ids.
    #[error("{blocks} blocks are more than can be numbered: use larger blocks")]
    TooManyBlocks {
        /// What the capacity holds.
        blocks: u64,
    },
    /// A number of bytes beyond 64 bits.
    #[error("the {what} overflows 64 bits")]
    Overflow {
        /// What was being computed.
        what: &'static str,
    },
}

/// A word that names no layout.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("unknown layout {word:?}: use contiguous, unified or per-layer")]
pub struct ParseLayoutError {
    /// As given.
    pub word: String,
}

/// The page that was chosen, in one extent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Page {
    pub(crate) page_bytes: u64,
    pub(crate) block_stride_bytes: u64,
}

impl Layout {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Contiguous, Self::Unified, Self::PerLayer];
}

impl fmt::Display for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Contiguous => "contiguous",
            Self::Unified => "unified",
            Self::PerLayer => "per-layer",
        })
    }
}

impl FromStr for Layout {
    type Err = ParseLayoutError;

    fn from_str(word: &str) -> Result<Self, Self::Err> {
        Self::ALL
            .into_iter()
            .find(|layout| layout.to_string() == word)
            .ok_or_else(|| ParseLayoutError {
                word: word.to_owned(),
            })
    }
}

impl KvBuffers {
    /// How many, as a number: 1 or 2.
    #[must_use]
    pub const fn count(self) -> u32 {
        match self {
            Self::One => 1,
            Self::Two => 2,
        }
    }
}

impl PoolSpec {
    /// Works out the page size and where every page and block lies, on a device of `granularity`
    /// bytes.
    ///
    /// # Errors
    /// [`LayoutError`] names the number that does not work, and one that does where there is one.
    pub fn resolve(&self, granularity: u64) -> Result<Geometry, LayoutError> {
        Geometry::lay_out(self, self.page(granularity)?)
    }

    /// Bytes of one block inside one extent.
    fn unit_bytes(&self) -> Result<u64, LayoutError> {
        for (count, what) in [
            (u64::from(self.layers), "layers"),
            (self.block_bytes, "block bytes"),
        ] {
            if count == 0 {
                return Err(LayoutError::Zero { what });
            }
        }
        let buffers = u64::from(self.kv_buffers.count());
        let pieces = match self.layout {
            Layout::Contiguous => buffers * u64::from(self.layers),
            Layout::Unified => buffers,
            Layout::PerLayer => 1,
        };
        self.block_bytes
            .checked_mul(pieces)
            .ok_or(LayoutError::Overflow { what: "block size" })
    }

    pub(crate) fn page(&self, granularity: u64) -> Result<Page, LayoutError> {
        if !granularity.is_power_of_two() {
            return Err(LayoutError::Granularity { granularity });
        }
        let unit_bytes = self.unit_bytes()?;
        match self.page_size {
            PageSize::Auto => automatic_page(unit_bytes, granularity),
            PageSize::Bytes(page_bytes) => explicit_page(unit_bytes, page_bytes, granularity),
        }
    }
}

/// The smallest page that whole blocks fill.
///
/// A page of `k` granules is filled by `n` blocks of stride `k × granularity ÷ n`. If `k` and `n`
/// share a factor, a smaller page has the same stride; so in the smallest one `n` divides the
/// granularity, is a power of two, and the stride is `k` doubled some times. For each `k` only the
/// smallest such stride that holds a block can be within the padding: the next is twice as long.
fn automatic_page(unit_bytes: u64, granularity: u64) -> Result<Page, LayoutError> {
    for granules in 1..=MAX_AUTO_GRANULES {
        let Some(page_bytes) = granularity.checked_mul(granules) else {
            break;
        };
        if page_bytes < unit_bytes {
            continue;
        }
        let mut block_stride_bytes = page_bytes;
        let mut blocks = 1;
        while blocks < granularity && block_stride_bytes / 2 >= unit_bytes {
            block_stride_bytes /= 2;
            blocks *= 2;
        }
        let padding = block_stride_bytes - unit_bytes;
        let aligned = padding == 0 || block_stride_bytes.is_multiple_of(PADDED_BLOCK_ALIGN);
        if aligned && padding <= block_stride_bytes / MAX_PADDING_DIVISOR {
            return Ok(Page {
                page_bytes,
                block_stride_bytes,
            });
        }
    }
    let max_page_bytes = granularity.saturating_mul(MAX_AUTO_GRANULES);
    Err(LayoutError::NoPageSize {
        unit_bytes,
        max_page_bytes,
    })
}

fn explicit_page(unit_bytes: u64, page_bytes: u64, granularity: u64) -> Result<Page, LayoutError> {
    if page_bytes == 0 || !page_bytes.is_multiple_of(granularity) {
        return Err(LayoutError::PageMisaligned {
            page_bytes,
            granularity,
        });
    }
    if unit_bytes > page_bytes {
        let smallest_page_bytes = unit_bytes
            .checked_next_multiple_of(granularity)
            .ok_or(LayoutError::Overflow { what: "page size" })?;
        return Err(LayoutError::BlockLargerThanPage {
            unit_bytes,
            page_bytes,
            smallest_page_bytes,
        });
    }
    Ok(Page {
        page_bytes,
        block_stride_bytes: unit_bytes,
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const KIB: u64 = 1 << 10;
    const MIB: u64 = 1 << 20;

    fn spec(layout: Layout, block_bytes: u64) -> PoolSpec {
        PoolSpec {
            layout,
            layers: 32,
            kv_buffers: KvBuffers::Two,
            block_bytes,
            page_size: PageSize::Auto,
            capacity_bytes: 1 << 40,
        }
    }

    #[test]
    fn a_layout_reads_what_it_prints() {
        for layout in Layout::ALL {
            assert_eq!(layout.to_string().parse(), Ok(layout));
        }
        let error = "perlayer".parse::<Layout>().unwrap_err();
        assert_eq!(
            error.to_string(),
            "unknown layout \"perlayer\": use contiguous, unified or per-layer"
        );
    }

    #[test]
    fn power_of_two_blocks_get_one_granule_without_padding() {
        for log2 in 0..=21 {
            let page = automatic_page(1 << log2, 2 * MIB).unwrap();
            assert_eq!(
                page,
                Page {
                    page_bytes: 2 * MIB,
                    block_stride_bytes: 1 << log2
                }
            );
        }
        // A block longer than a granule: as long as itself.
        let page = spec(Layout::Contiguous, 128 * KIB).page(2 * MIB).unwrap();
        assert_eq!(
            page,
            Page {
                page_bytes: 8 * MIB,
                block_stride_bytes: 8 * MIB
            }
        );
    }

    #[test]
    fn an_awkward_block_gets_a_small_page_instead_of_the_common_multiple() {
        // 61 layers of a 576-wide latent in 16-bit, 64 tokens a block: 4.29 MiB. Whole blocks
        // without padding would need pages of 1.07 GiB.
        let latent = PoolSpec {
            layers: 61,
            kv_buffers: KvBuffers::One,
            ..spec(Layout::Contiguous, 64 * 576 * 2)
        };
        let unit = latent.unit_bytes().unwrap();
        let page = latent.page(2 * MIB).unwrap();
        assert_eq!(
            page,
            Page {
                page_bytes: 18 * MIB,
                block_stride_bytes: 18 * MIB / 4
            }
        );
        assert!((page.block_stride_bytes - unit) * 16 <= page.block_stride_bytes);
    }

    #[test]
    fn a_block_that_no_page_fits_is_an_error() {
        let error = automatic_page(1025, 2 * MIB).unwrap_err();
        assert_eq!(
            error,
            LayoutError::NoPageSize {
                unit_bytes: 1025,
                max_page_bytes: 2048 * MIB
            }
        );
        assert!(automatic_page(2048 * MIB, 2 * MIB).is_ok());
        assert!(automatic_page(2048 * MIB + 1, 2 * MIB).is_err());
        assert!(automatic_page(u64::MAX, 1 << 63).is_err());
    }

    #[test]
    fn a_block_larger_than_the_page_names_the_smallest_page_that_works() {
        let mut spec = spec(Layout::Unified, 3 * MIB);
        spec.page_size = PageSize::Bytes(4 * MIB);
        let error = spec.resolve(2 * MIB).unwrap_err();
        let LayoutError::BlockLargerThanPage {
            smallest_page_bytes,
            ..
        } = error
        else {
            panic!("{error}")
        };
        assert_eq!(smallest_page_bytes, 6 * MIB);
        spec.page_size = PageSize::Bytes(smallest_page_bytes);
        assert!(spec.resolve(2 * MIB).is_ok());
        spec.page_size = PageSize::Bytes(smallest_page_bytes - 2 * MIB);
        assert!(spec.resolve(2 * MIB).is_err());
    }

    #[test]
    fn numbers_that_make_no_pool_are_errors() {
        let good = spec(Layout::PerLayer, 64 * KIB);
        assert!(good.resolve(2 * MIB).is_ok());
        let refused = |spec: PoolSpec, granularity| spec.resolve(granularity).unwrap_err();

        let none = PoolSpec {
            layers: 0,
            ..good.clone()
        };
        assert_eq!(refused(none, MIB), LayoutError::Zero { what: "layers" });
        let empty = PoolSpec {
            block_bytes: 0,
            ..good.clone()
        };
        assert_eq!(
            refused(empty, MIB),
            LayoutError::Zero {
                what: "block bytes"
            }
        );
        for granularity in [0, 3 * MIB] {
            assert_eq!(
                refused(good.clone(), granularity),
                LayoutError::Granularity { granularity }
            );
        }
        for page_bytes in [0, 3 * MIB] {
            let spec = PoolSpec {
                page_size: PageSize::Bytes(page_bytes),
                ..good.clone()
            };
            let error = LayoutError::PageMisaligned {
                page_bytes,
                granularity: 2 * MIB,
            };
            assert_eq!(refused(spec, 2 * MIB), error);
        }
        let small = PoolSpec {
            capacity_bytes: 64 * 2 * MIB - 1,
            ..good.clone()
        };
        let error = LayoutError::CapacityTooSmall {
            capacity_bytes: 128 * MIB - 1,
            bundle_bytes: 128 * MIB,
        };
        assert_eq!(refused(small, 2 * MIB), error);
        let layers = PoolSpec {
            layers: u32::MAX,
            ..good.clone()
        };
        assert!(matches!(
            refused(layers, 2 * MIB),
            LayoutError::Overflow { .. }
        ));
        let long = PoolSpec {
            layout: Layout::Contiguous,
            block_bytes: 1 << 60,
            ..good.clone()
        };
        assert!(matches!(
            refused(long, 2 * MIB),
            LayoutError::Overflow { .. }
        ));
        let many = PoolSpec {
            capacity_bytes: u64::MAX,
            block_bytes: 4 * KIB,
            ..good.clone()
        };
        assert!(matches!(
            refused(many.clone(), 4 * KIB),
            LayoutError::TooManyPages { .. }
        ));
        assert!(matches!(
            refused(many, 1 << 30),
            LayoutError::TooManyBlocks { .. }
        ));
    }

    proptest! {
        #[test]
        fn automatic_page_pads_at_most_a_sixteenth_and_is_the_smallest(
            unit in prop_oneof![1u64..1 << 24, (1u64..4096).prop_map(|n| n * 576)],
            log2 in 9u32..=21,
        ) {
            let granularity = 1 << log2;
            // By the definition: which pages do some whole number of blocks fill?
            let fits = |page: u64, blocks: u64| {
                let stride = page / blocks;
                page.is_multiple_of(blocks)
                    && (stride == unit || stride.is_multiple_of(256))
                    && stride >= unit
                    && (stride - unit) * 16 <= stride
            };
            match automatic_page(unit, granularity) {
                Ok(page) => {
                    prop_assert!(page.page_bytes.is_multiple_of(granularity));
                    let blocks = page.page_bytes / page.block_stride_bytes;
                    prop_assert_eq!(blocks * page.block_stride_bytes, page.page_bytes);
                    prop_assert!(fits(page.page_bytes, blocks));
                    // Nothing smaller fits; looking at a few hundred pages below will do.
                    let granules = page.page_bytes / granularity;
                    for smaller in granules.saturating_sub(200).max(1)..granules {
                        let page = smaller * granularity;
                        let most = page / unit;
                        for blocks in (most * 15 / 16).max(1)..=most.min(most * 15 / 16 + 2000) {
                            prop_assert!(!fits(page, blocks), "{page} bytes hold {blocks}");
                        }
                    }
                }
                Err(error) => {
                    let no_page = matches!(error, LayoutError::NoPageSize { .. });
                    prop_assert!(no_page, "{error}");
                    // Padding to the alignment alone is then more than a sixteenth, or the
                    // block is longer than the longest page.
                    prop_assert!(unit < 256 * 16 || unit > 1024 * granularity, "{error}");
                }
            }
        }

        #[test]
        fn overflow_is_an_error_and_never_a_panic(
            layout in proptest::sample::select(Layout::ALL.to_vec()),
            layers: u32,
            two: bool,
            block_bytes: u64,
            explicit: Option<u64>,
            capacity_bytes: u64,
            log2 in 0u32..64,
        ) {
            let spec = PoolSpec {
                layout,
                layers,
                kv_buffers: if two { KvBuffers::Two } else { KvBuffers::One },
                block_bytes,
                page_size: explicit.map_or(PageSize::Auto, PageSize::Bytes),
                capacity_bytes,
            };
            if let Ok(geometry) = spec.resolve(1 << log2) {
                prop_assert!(geometry.virtual_bytes() <= capacity_bytes);
            }
        }
    }
}

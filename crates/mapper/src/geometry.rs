//! Where every page and every block of one pool lies, to the byte.
//!
//! A *region* is a stretch of a tensor that holds every page once, in order: the whole tensor of a
//! contiguous or unified pool, one half of it in a per-layer pool of K and V. Page `p` of a region
//! begins at `p × page_bytes`, block `b` at `b × block_stride_bytes`; which region a layer and a
//! buffer live in is all that tells the layouts apart.

use std::ops::Range;

use crate::{KvBuffers, Layout, LayoutError, PageId, PageRun, PoolSpec, layout::Page};

#[cfg(test)]
mod tests;

/// A resolved pool: made by [`PoolSpec::resolve`], read by everyone, changed by no one.
///
/// ```
/// use kvcached_mapper::{KvBuffers, Layout, PageId, PageRun, PageSize, PoolSpec};
///
/// let spec = PoolSpec {
///     layout: Layout::PerLayer,
///     layers: 32,
///     kv_buffers: KvBuffers::Two,
///     block_bytes: 32 << 10,
///     page_size: PageSize::Auto,
///     capacity_bytes: 8 << 30,
/// };
/// let geometry = spec.resolve(2 << 20)?;
/// assert_eq!(geometry.page_bytes(), 2 << 20);
/// assert_eq!(geometry.uniform_blocks_per_page(), Some(64));
/// // K and V of each layer: 64 chunks back one page, or one run of pages.
/// let run = PageRun::new(PageId(3), 2).expect("two pages");
/// assert_eq!(geometry.extents(run).len(), 64);
/// assert!(geometry.extents(run).all(|extent| extent.len == 4 << 20));
/// # Ok::<(), kvcached_mapper::LayoutError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Geometry {
    layout: Layout,
    layers: u32,
    kv_buffers: KvBuffers,
    block_bytes: u64,
    page_bytes: u64,
    block_stride_bytes: u64,
    regions: u32,
    bundle_bytes: u64,
    pages: u32,
    blocks: u32,
}

/// Bytes of one tensor of a pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Extent {
    /// Which tensor.
    pub tensor: u32,
    /// Offset of the first byte from the start of the tensor.
    pub offset: u64,
    /// Length in bytes.
    pub len: u64,
}

/// How an engine sees one buffer of one layer: block `b` begins `offset + b × block_stride` bytes
/// into the tensor, and is [`Geometry::block_bytes`] long.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct View {
    /// Layer of the pool.
    pub layer: u32,
    /// 0 is K or the only buffer, 1 is V.
    pub buffer: u32,
    /// Which tensor.
    pub tensor: u32,
    /// Offset of block 0 from the start of the tensor, in bytes.
    pub offset: u64,
    /// From one block to the next, in bytes.
    pub block_stride: u64,
}

impl Geometry {
    /// Lays `spec` out over pages of the chosen size.
    pub(crate) fn lay_out(spec: &PoolSpec, page: Page) -> Result<Self, LayoutError> {
        let Page {
            page_bytes,
            block_stride_bytes,
        } = page;
        let pieces =
            spec.layers
                .checked_mul(spec.kv_buffers.count())
                .ok_or(LayoutError::Overflow {
                    what: "number of layers and buffers",
                })?;
        let regions = match spec.layout {
            Layout::Contiguous => 1,
            Layout::Unified => spec.layers,
            Layout::PerLayer => pieces,
        };
        let bundle_bytes =
            page_bytes
                .checked_mul(u64::from(regions))
                .ok_or(LayoutError::Overflow {
                    what: "size of a page over all layers",
                })?;

        let pages = spec.capacity_bytes / bundle_bytes;
        if pages == 0 {
            let capacity_bytes = spec.capacity_bytes;
            return Err(LayoutError::CapacityTooSmall {
                capacity_bytes,
                bundle_bytes,
            });
        }
        // The largest id is left free in both spaces: it is the end of the last run.
        let numbered = |count: u64| u32::try_from(count).ok().filter(|&count| count < u32::MAX);
        let blocks = pages * page_bytes / block_stride_bytes;
        Ok(Self {
            layout: spec.layout,
            layers: spec.layers,
            kv_buffers: spec.kv_buffers,
            block_bytes: spec.block_bytes,
            page_bytes,
            block_stride_bytes,
            regions,
            bundle_bytes,
            pages: numbered(pages).ok_or(LayoutError::TooManyPages { pages })?,
            blocks: numbered(blocks).ok_or(LayoutError::TooManyBlocks { blocks })?,
        })
    }

    /// How layers, and K and V, share tensors.
    #[must_use]
    pub const fn layout(&self) -> Layout {
        self.layout
    }

    /// Layers of the pool.
    #[must_use]
    pub const fn layers(&self) -> u32 {
        self.layers
    }

    /// One buffer per layer, or K and V.
    #[must_use]
    pub const fn kv_buffers(&self) -> KvBuffers {
        self.kv_buffers
    }

    /// Bytes of one block in one buffer of one layer.
    #[must_use]
    pub const fn block_bytes(&self) -> u64 {
        self.block_bytes
    }

    /// Bytes of one page in one extent.
    #[must_use]
    pub const fn page_bytes(&self) -> u64 {
        self.page_bytes
    }

    /// Bytes of one page over all its extents: what backing it costs.
    #[must_use]
    pub const fn bundle_bytes(&self) -> u64 {
        self.bundle_bytes
    }

    /// How many extents one page, or one run, has.
    #[must_use]
    pub const fn extents_per_page(&self) -> u32 {
        self.regions
    }

    /// How many pages.
    #[must_use]
    pub const fn pages(&self) -> u32 {
        self.pages
    }

    /// How many block ids, those of straddling blocks included.
    #[must_use]
    pub const fn blocks(&self) -> u32 {
        self.blocks
    }

    /// From one block to the next in one region, in bytes.
    #[must_use]
    pub const fn block_stride_bytes(&self) -> u64 {
        self.block_stride_bytes
    }

    /// How many blocks a page holds at most.
    #[must_use]
    pub fn max_blocks_per_page(&self) -> u32 {
        u32::try_from(self.page_bytes / self.block_stride_bytes)
            .expect("page 0 holds that many, and blocks are numbered in 32 bits")
    }

    /// `Some(n)` if page `p` holds exactly the blocks `p × n .. (p + 1) × n`: always so with an
    /// automatic page size.
    #[must_use]
    pub fn uniform_blocks_per_page(&self) -> Option<u32> {
        self.page_bytes
            .is_multiple_of(self.block_stride_bytes)
            .then(|| self.max_blocks_per_page())
    }

    /// The blocks that lie wholly inside `page`; empty where none does, or outside the pool.
    #[must_use]
    pub fn blocks_in(&self, page: PageId) -> Range<u32> {
        if page.0 >= self.pages {
            return 0..0;
        }
        let start = u64::from(page.0) * self.page_bytes;
        let first = start.div_ceil(self.block_stride_bytes);
        let end = (start + self.page_bytes) / self.block_stride_bytes;
        let block =
            |id: u64| u32::try_from(id).expect("blocks of the pool are numbered in 32 bits");
        // A page is no shorter than a block, so `first` is never past `end`.
        block(first)..block(end)
    }

    /// The page that `block` lies in; `None` for one that straddles two pages, or is outside the
    /// pool.
    #[must_use]
    pub fn page_of(&self, block: u32) -> Option<PageId> {
        if block >= self.blocks {
            return None;
        }
        let start = u64::from(block) * self.block_stride_bytes;
        let page = start / self.page_bytes;
        let inside = start + self.block_stride_bytes <= (page + 1) * self.page_bytes;
        inside.then(|| PageId(u32::try_from(page).expect("blocks lie inside the pool's pages")))
    }

    /// How many tensors.
    #[must_use]
    pub const fn tensors(&self) -> u32 {
        match self.layout {
            Layout::Contiguous => 1,
            Layout::Unified | Layout::PerLayer => self.layers,
        }
    }

    /// Addresses of one tensor, in bytes.
    #[must_use]
    pub fn tensor_bytes(&self) -> u64 {
        self.region_bytes() * u64::from(self.regions / self.tensors())
    }

    /// Addresses of all tensors, in bytes.
    #[must_use]
    pub fn virtual_bytes(&self) -> u64 {
        self.bundle_bytes * u64::from(self.pages)
    }

    /// Does `run` lie inside the pool?
    #[must_use]
    pub const fn contains(&self, run: PageRun) -> bool {
        run.end().0 <= self.pages
    }

    /// The bytes that `run` occupies, one extent per region; none for a run outside the pool.
    pub fn extents(&self, run: PageRun) -> impl ExactSizeIterator<Item = Extent> {
        let regions = if self.contains(run) { self.regions } else { 0 };
        (0..regions).map(move |region| {
            let (tensor, base) = self.region(region);
            let offset = base + u64::from(run.first().0) * self.page_bytes;
            Extent {
                tensor,
                offset,
                len: u64::from(run.count()) * self.page_bytes,
            }
        })
    }

    /// The bytes of `block`, one piece of [`block_bytes`](Self::block_bytes) per layer and buffer;
    /// `None` for a block that straddles two pages, or is outside the pool.
    #[must_use]
    pub fn block_pieces(&self, block: u32) -> Option<impl ExactSizeIterator<Item = Extent>> {
        self.page_of(block)?;
        let len = self.block_bytes;
        Some(self.views().map(move |view| Extent {
            tensor: view.tensor,
            offset: view.offset + u64::from(block) * view.block_stride,
            len,
        }))
    }

    /// What an engine needs to see each buffer of each layer as a strided array of blocks, layer
    /// by layer.
    pub fn views(&self) -> impl ExactSizeIterator<Item = View> {
        let buffers = self.kv_buffers.count();
        (0..self.layers * buffers).map(move |piece| {
            let (layer, buffer) = (piece / buffers, piece % buffers);
            let (tensor, offset) = match self.layout {
                Layout::Contiguous => (0, u64::from(piece) * self.block_bytes),
                Layout::Unified => (layer, u64::from(buffer) * self.block_bytes),
                Layout::PerLayer => self.region(piece),
            };
            View {
                layer,
                buffer,
                tensor,
                offset,
                block_stride: self.block_stride_bytes,
            }
        })
    }

    /// Bytes of one region.
    fn region_bytes(&self) -> u64 {
        self.page_bytes * u64::from(self.pages)
    }

    /// The tensor that a region lies in, and where it begins there.
    fn region(&self, region: u32) -> (u32, u64) {
        let per_tensor = self.regions / self.tensors();
        (
            region / per_tensor,
            u64::from(region % per_tensor) * self.region_bytes(),
        )
    }
}

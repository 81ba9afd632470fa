//! The content oracle: what was put into a block when it was handed out must be there when it is
//! freed, on every rank.
//!
//! Bookkeeping that says the right thing proves little: a rank that was skipped, a page mapped
//! into the wrong pool, or memory taken away too early shows only in the bytes. So each block gets
//! a stamp of its owner and generation, in a piece that changes from block to block, at its start
//! or at its end, so that the blocks of a page reach all its tensors and both ends of each. More
//! stamps a block would find little more, and each costs the machine a page of memory.

use std::fmt;
use std::sync::Arc;

use kvcached_mapper::{Extent, Geometry, LocalMapper, PageRun, Rank};
use kvcached_vmm::{Bytes, Driver, VmmError};
use serde::{Deserialize, Serialize};

/// A block in the hands of an owner.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Stamp {
    /// Block id in its pool.
    pub(crate) block: u32,
    /// Who holds it, and which time: see [`Owner::stamp`](crate::Owner::stamp).
    pub(crate) owner: [u64; 2],
}

/// What one check found.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Checked {
    /// Blocks looked at.
    pub blocks: u64,
    /// Blocks with another content than was stamped, or none at all.
    pub corrupted: u64,
    /// The first of them, in words.
    pub first: Option<String>,
}

impl Checked {
    /// The same, with the rank named in what was found.
    #[must_use]
    pub(crate) fn at(self, rank: Rank) -> Self {
        Self {
            first: self.first.map(|first| format!("{rank}: {first}")),
            ..self
        }
    }

    /// Adds what another rank or another check found.
    pub fn merge(&mut self, other: Self) {
        self.blocks += other.blocks;
        self.corrupted += other.corrupted;
        if self.first.is_none() {
            self.first = other.first;
        }
    }
}

/// Memory of one pool on one rank of this process, whichever driver is behind it.
pub(crate) trait RankPool: fmt::Debug + Send + Sync {
    /// The runs mapped now, sorted.
    fn mapped(&self) -> Vec<PageRun>;

    /// Stamps blocks. A driver without memory does nothing.
    fn stamp(&self, stamps: &[Stamp]) -> Result<(), VmmError>;

    /// Looks whether the stamps are still there.
    fn check(&self, stamps: &[Stamp]) -> Checked;
}

/// A pool whose contents can be read and written.
#[derive(Debug)]
pub(crate) struct Readable<D: Driver> {
    /// The pool's memory.
    pub(crate) mapper: Arc<LocalMapper<D>>,
    /// Tells the stamps of one pool from those of another.
    pub(crate) pool: u64,
}

/// A pool whose driver has no memory: only its bookkeeping can be looked at.
#[derive(Debug)]
pub(crate) struct Blank<D: Driver>(pub(crate) Arc<LocalMapper<D>>);

/// One stamp on its way into memory.
const STAMP_BYTES: usize = 32;

impl<D: Bytes> RankPool for Readable<D> {
    fn mapped(&self) -> Vec<PageRun> {
        self.mapper.mapped()
    }

    fn stamp(&self, stamps: &[Stamp]) -> Result<(), VmmError> {
        for stamp in stamps {
            // A block on no page is found by the check.
            if let Some((place, piece)) = place(self.mapper.geometry(), *stamp) {
                let len = usize::try_from(place.len).unwrap_or(STAMP_BYTES);
                self.mapper
                    .write(place, &self.content(*stamp, piece)[..len])?;
            }
        }
        Ok(())
    }

    fn check(&self, stamps: &[Stamp]) -> Checked {
        let mut checked = Checked::default();
        for stamp in stamps {
            checked.blocks += 1;
            if let Err(found) = self.check_one(*stamp) {
                checked.corrupted += 1;
                checked.first.get_or_insert(found);
            }
        }
        checked
    }
}

impl<D: Bytes> Readable<D> {
    fn check_one(&self, stamp: Stamp) -> Result<(), String> {
        let (place, piece) = place(self.mapper.geometry(), stamp)
            .ok_or_else(|| format!("block {} lies on no page", stamp.block))?;
        let at = || {
            format!(
                "block {} (tensor {}, offset {})",
                stamp.block, place.tensor, place.offset
            )
        };
        let len = usize::try_from(place.len).unwrap_or(STAMP_BYTES);
        let mut found = [0; STAMP_BYTES];
        self.mapper
            .read(place, &mut found[..len])
            .map_err(|error| format!("{}: {error}", at()))?;
        if found[..len] != self.content(stamp, piece)[..len] {
            return Err(format!(
                "{}: {} instead of {stamp:?}",
                at(),
                describe(&found)
            ));
        }
        Ok(())
    }

    fn content(&self, stamp: Stamp, piece: u32) -> [u8; STAMP_BYTES] {
        let words = [
            stamp.owner[0],
            stamp.owner[1],
            u64::from(stamp.block) << 32 | u64::from(piece),
            self.pool,
        ];
        let mut bytes = [0; STAMP_BYTES];
        for (chunk, word) in bytes.chunks_exact_mut(8).zip(words) {
            chunk.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }
}

impl<D: Driver> RankPool for Blank<D> {
    fn mapped(&self) -> Vec<PageRun> {
        self.0.mapped()
    }

    fn stamp(&self, _stamps: &[Stamp]) -> Result<(), VmmError> {
        Ok(())
    }

    fn check(&self, _stamps: &[Stamp]) -> Checked {
        Checked::default()
    }
}

/// Where the stamp of a block stands, and in which of its pieces; `None` for a block that lies on
/// no page.
fn place(geometry: &Geometry, stamp: Stamp) -> Option<(Extent, u32)> {
    let count = geometry.layers() * geometry.kv_buffers().count();
    let turn = u64::from(stamp.block).wrapping_add(stamp.owner[0]);
    let index = u32::try_from(turn % u64::from(count)).expect("less than a 32-bit count");
    let piece = geometry
        .block_pieces(stamp.block)?
        .nth(usize::try_from(index).ok()?)?;
    let len = piece.len.min(STAMP_BYTES as u64);
    let at_end = (turn / u64::from(count)) % 2 == 1;
    let skipped = if at_end { piece.len - len } else { 0 };
    Some((
        Extent {
            offset: piece.offset + skipped,
            len,
            ..piece
        },
        index,
    ))
}

fn describe(found: &[u8; STAMP_BYTES]) -> String {
    if found.iter().all(|byte| *byte == 0) {
        return "zeros".to_owned();
    }
    let word = |index: usize| {
        let bytes = found[index * 8..][..8].try_into().expect("eight bytes");
        u64::from_le_bytes(bytes)
    };
    format!(
        "owner {:?}, block {}, pool {}",
        [word(0), word(1)],
        word(2) >> 32,
        word(3)
    )
}

#[cfg(test)]
mod tests {
    use kvcached_mapper::{Cold, KvBuffers, Layout, Mapper, PageId, PageSize, PoolSpec};
    use kvcached_vmm::{Host, HostConfig};

    use super::*;

    const OWNER: [u64; 2] = [7, 1 << 32];

    /// A pool with its first three pages mapped.
    fn pool(device: &Arc<Host>, layout: Layout, number: u64) -> Readable<Host> {
        let spec = PoolSpec {
            layout,
            layers: 3,
            kv_buffers: KvBuffers::Two,
            block_bytes: 64 << 10,
            page_size: PageSize::Auto,
            capacity_bytes: 256 << 20,
        };
        let geometry = spec.resolve(2 << 20).expect("a layout");
        let mapper = LocalMapper::new(Arc::clone(device), geometry, Cold::Unbacked);
        let mapper = Arc::new(mapper.expect("addresses"));
        let run = PageRun::new(PageId(0), 3).expect("pages");
        mapper.map(&[run]).expect("room");
        Readable {
            mapper,
            pool: number,
        }
    }

    fn stamps(pool: &Readable<Host>, owner: [u64; 2]) -> Vec<Stamp> {
        let pages = (0..3).map(PageId);
        let blocks = pages.flat_map(|page| pool.mapper.geometry().blocks_in(page));
        blocks.map(|block| Stamp { block, owner }).collect()
    }

    #[test]
    fn content_that_is_not_what_was_stamped_is_found_in_every_layout() {
        for layout in [Layout::Contiguous, Layout::Unified, Layout::PerLayer] {
            let device = Arc::new(Host::new(HostConfig::new(1 << 30)).expect("a device"));
            let pool = pool(&device, layout, 1);
            let mine = stamps(&pool, OWNER);
            let all = mine.len() as u64;
            assert_eq!(
                pool.check(&mine).corrupted,
                all,
                "fresh memory holds no stamp"
            );
            pool.stamp(&mine).expect("mapped");
            let Checked {
                blocks,
                corrupted,
                first,
            } = pool.check(&mine);
            assert_eq!((blocks, corrupted, first), (all, 0, None));

            // What a block that is handed out twice looks like, and one of another time.
            assert_eq!(pool.check(&stamps(&pool, [8, 1 << 32])).corrupted, all);
            assert_eq!(pool.check(&stamps(&pool, [7, 1 << 32 | 1])).corrupted, all);
            let (at, _) = place(pool.mapper.geometry(), mine[4]).expect("on a page");
            pool.mapper.write(at, &[0xff]).expect("mapped");
            let found = pool.check(&mine);
            assert_eq!(found.corrupted, 1, "one byte of one block");
            let first = found.first.expect("one was found");
            assert!(
                first.contains(&format!("block {}", mine[4].block)),
                "{first}"
            );

            // A page that is taken away and given anew is another page.
            let run = PageRun::new(PageId(0), 3).expect("pages");
            pool.mapper.unmap(&[run]).expect("mapped");
            assert_eq!(pool.check(&mine).corrupted, all, "nothing is there");
            pool.mapper.map(&[run]).expect("room");
            assert_eq!(pool.check(&mine).corrupted, all, "nothing of it is left");
        }
    }

    #[test]
    fn stamps_of_another_pool_are_not_taken_for_ones_own() {
        let device = Arc::new(Host::new(HostConfig::new(1 << 30)).expect("a device"));
        let mine = pool(&device, Layout::Contiguous, 1);
        mine.stamp(&stamps(&mine, OWNER)).expect("mapped");
        let taken_for_another = Readable {
            mapper: Arc::clone(&mine.mapper),
            pool: 2,
        };
        let found = taken_for_another.check(&stamps(&mine, OWNER));
        assert_eq!(found.corrupted, found.blocks);
    }

    #[test]
    fn a_block_that_lies_on_no_page_is_corrupted() {
        let device = Arc::new(Host::new(HostConfig::new(1 << 30)).expect("a device"));
        let pool = pool(&device, Layout::Contiguous, 1);
        let nowhere = Stamp {
            block: u32::MAX,
            owner: OWNER,
        };
        pool.stamp(&[nowhere]).expect("left to the check");
        assert_eq!(pool.check(&[nowhere]).corrupted, 1);
    }

    #[test]
    fn the_blocks_of_a_page_reach_both_ends_of_all_its_pieces() {
        let device = Arc::new(Host::new(HostConfig::new(1 << 30)).expect("a device"));
        let pool = pool(&device, Layout::PerLayer, 1);
        let geometry = pool.mapper.geometry();
        let mut pieces: Vec<(u32, bool)> = geometry
            .blocks_in(PageId(0))
            .filter_map(|block| {
                let (at, piece) = place(
                    geometry,
                    Stamp {
                        block,
                        owner: [0, 0],
                    },
                )?;
                let start = geometry.block_pieces(block)?.nth(piece as usize)?;
                Some((piece, at.offset == start.offset))
            })
            .collect();
        pieces.sort_unstable();
        pieces.dedup();
        assert_eq!(pieces.len(), 3 * 2 * 2, "{pieces:?}");
    }
}

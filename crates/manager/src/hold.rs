//! Holds: blocks set aside for a later request, each hold with an owner and an order.
//!
//! A held block is taken as far as its page is concerned; that it is held as well is one more bit.
//! Who has the [`HoldId`] is the owner: nobody else is handed a block of it, and nobody can free
//! one by its number.

use std::collections::{BTreeMap, VecDeque};

use thiserror::Error;

use crate::bits::Bits;
use crate::{BlockId, FreeError, index};

/// Names one hold of one pool, for ever: a number is not used again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HoldId(u64);

/// Why a hold was not touched.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum HoldError {
    /// There is no such hold, or no longer.
    #[error("hold {} does not exist", .hold.0)]
    Unknown {
        /// As given.
        hold: HoldId,
    },
    /// More was asked for than is set aside.
    #[error("hold {} has {held} blocks, {requested} were asked for", .hold.0)]
    TooFew {
        /// As given.
        hold: HoldId,
        /// Blocks asked for.
        requested: u32,
        /// Blocks set aside.
        held: u32,
    },
    /// The blocks could not be given back.
    #[error(transparent)]
    Free(#[from] FreeError),
}

/// All holds of a pool.
#[derive(Debug)]
pub(crate) struct Holds {
    next: u64,
    blocks: BTreeMap<HoldId, VecDeque<BlockId>>,
    marks: Bits,
    count: u32,
}

impl Holds {
    /// No hold yet, in a pool with block numbers below `blocks`.
    pub(crate) fn new(blocks: u32) -> Self {
        Self {
            next: 0,
            blocks: BTreeMap::new(),
            marks: Bits::new(blocks),
            count: 0,
        }
    }

    /// Blocks in all holds.
    pub(crate) const fn count(&self) -> u32 {
        self.count
    }

    pub(crate) fn contains(&self, block: BlockId) -> bool {
        self.count > 0 && self.marks.test(block.0)
    }

    pub(crate) fn len(&self, hold: HoldId) -> Option<u32> {
        self.blocks.get(&hold).map(count_of)
    }

    /// Every hold and how many blocks it has, oldest first.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (HoldId, u32)> {
        self.blocks
            .iter()
            .map(|(&hold, blocks)| (hold, count_of(blocks)))
    }

    /// Sets `blocks`, which nobody else has, aside.
    pub(crate) fn open(&mut self, blocks: Vec<BlockId>) -> HoldId {
        let hold = HoldId(self.next);
        self.next += 1;
        self.reopen(hold, blocks.into());
        hold
    }

    /// Hands out the `n` oldest blocks of the hold, or nothing.
    pub(crate) fn take(&mut self, hold: HoldId, n: u32) -> Result<Vec<BlockId>, HoldError> {
        let blocks = self
            .blocks
            .get_mut(&hold)
            .ok_or(HoldError::Unknown { hold })?;
        let held = count_of(blocks);
        if n > held {
            return Err(HoldError::TooFew {
                hold,
                requested: n,
                held,
            });
        }
        let taken: Vec<BlockId> = blocks.drain(..index(n)).collect();
        for block in &taken {
            self.marks.clear(block.0);
        }
        self.count -= n;
        Ok(taken)
    }

    /// Ends the hold; its blocks are held no longer.
    pub(crate) fn close(&mut self, hold: HoldId) -> Result<VecDeque<BlockId>, HoldError> {
        let blocks = self
            .blocks
            .remove(&hold)
            .ok_or(HoldError::Unknown { hold })?;
        for block in &blocks {
            self.marks.clear(block.0);
        }
        self.count -= count_of(&blocks);
        Ok(blocks)
    }

    /// Sets `blocks` aside under a number that was given out before: undoes [`close`](Self::close).
    pub(crate) fn reopen(&mut self, hold: HoldId, blocks: VecDeque<BlockId>) {
        for block in &blocks {
            self.marks.set(block.0);
        }
        self.count += count_of(&blocks);
        self.blocks.insert(hold, blocks);
    }
}

fn count_of(blocks: &VecDeque<BlockId>) -> u32 {
    u32::try_from(blocks.len()).expect("distinct blocks have distinct 32-bit numbers")
}

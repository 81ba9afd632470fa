//! One pool of a scheduler, safe to use from any thread.
//!
//! Blocks are behind one mutex, at this boundary and nowhere below; it serialises the pool's own
//! allocations. Pages guard themselves, so limits, trimming and the reserve get on without it
//! while an allocation waits for memory.

use std::num::NonZeroU32;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use kvcached_manager::{
    AllocError, BlockId, BlockManager, BlockSpace, FreeError, HoldError, HoldId, Limit, LimitError,
    LimitStatus, PageOccupancy, PoolUsage,
};
use kvcached_mapper::{Epoch, Geometry, Health, MapError, Mapper, PageId, PoolId};
use kvcached_page_alloc::{
    FullReason, PageAllocator, PageAllocatorConfig, Repaired, Replenished, Reserve, Turns,
    Unmapping,
};

use crate::config::RunChoice;
use crate::keeper::Wake;
use crate::scheduler::{MappedPool, PoolPolicy, StartError};

/// A pool with its pages, its blocks and its mapper.
#[derive(Debug)]
pub struct Pool {
    id: PoolId,
    geometry: Geometry,
    tensor_bases: Vec<u64>,
    reserve: Reserve,
    blocks: Mutex<BlockManager>,
    pages: Arc<PageAllocator>,
    mapper: Arc<dyn Mapper>,
    /// Wakes who maps ahead, unmaps behind, and brings ranks back, if anybody does.
    wake: Option<Wake>,
}

impl Pool {
    /// A pool over a mapper that is ready; takes the null block.
    pub(crate) fn new(
        pool: MappedPool,
        runs: RunChoice,
        unmapping: Unmapping,
        turns: &Turns,
    ) -> Result<Self, StartError> {
        let MappedPool {
            id: pool,
            geometry,
            policy,
            mapper,
            tensor_bases,
        } = pool;
        let PoolPolicy {
            reserve,
            limit,
            floor_bytes,
        } = policy;
        let reserve = reserve.pages(&geometry);
        let space = BlockSpace::from(&geometry);
        let config = PageAllocatorConfig {
            void: space.void_pages().collect(),
            runs: runs.policy(&geometry),
            reserve,
            floor_bytes,
            run_chunks: NonZeroU32::new(geometry.extents_per_page()).unwrap_or(NonZeroU32::MIN),
            unmapping,
            turns: turns.clone(),
            ..PageAllocatorConfig::new(geometry.pages(), geometry.bundle_bytes())
        };
        let pages = PageAllocator::new(config, Arc::clone(&mapper))
            .map_err(|source| StartError::Pages { pool, source })?;
        if let Some(limit) = limit {
            pages
                .set_limit(limit)
                .map_err(|source| StartError::Limit { pool, source })?;
        }
        let pages = Arc::new(pages);
        let blocks = BlockManager::new(space, Arc::clone(&pages))
            .map_err(|source| StartError::Blocks { pool, source })?;
        Ok(Self {
            id: pool,
            geometry,
            tensor_bases,
            reserve,
            blocks: Mutex::new(blocks),
            pages,
            mapper,
            wake: None,
        })
    }

    pub(crate) fn wake_by(&mut self, wake: Wake) {
        self.wake = Some(wake);
    }

    pub(crate) const fn reserve(&self) -> Reserve {
        self.reserve
    }

    pub(crate) const fn pages(&self) -> &Arc<PageAllocator> {
        &self.pages
    }

    /// Which pool.
    #[must_use]
    pub const fn id(&self) -> PoolId {
        self.id
    }

    /// Where every page and block lies.
    #[must_use]
    pub const fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// First address of each tensor on this process's own rank; empty if it has none.
    #[must_use]
    pub fn tensor_bases(&self) -> &[u64] {
        &self.tensor_bases
    }

    /// What maps this pool's pages, on every rank.
    #[must_use]
    pub const fn mapper(&self) -> &Arc<dyn Mapper> {
        &self.mapper
    }

    /// Hands out `n` blocks, or none. See [`BlockManager::alloc`].
    ///
    /// # Errors
    /// [`AllocError::Full`], a normal answer, or [`AllocError::Broken`]; nothing changed.
    pub fn alloc(&self, n: u32) -> Result<Vec<BlockId>, AllocError> {
        let mut blocks = Vec::new();
        self.alloc_into(n, &mut blocks)?;
        Ok(blocks)
    }

    /// Hands out `n` blocks, appended to `out`. See [`BlockManager::alloc_into`].
    ///
    /// # Errors
    /// As [`alloc`](Self::alloc).
    pub fn alloc_into(&self, n: u32, out: &mut Vec<BlockId>) -> Result<(), AllocError> {
        let result = self.blocks().alloc_into(n, out);
        self.consider_failure(&result);
        self.consider_work();
        result
    }

    /// Takes blocks back. See [`BlockManager::free`].
    ///
    /// # Errors
    /// The first block that cannot be freed; nothing changed.
    pub fn free(&self, blocks: &[BlockId]) -> Result<(), FreeError> {
        let result = self.blocks().free(blocks);
        self.consider_work();
        result
    }

    /// Takes blocks back that work of this epoch, or of an earlier one, may still read. They may be
    /// handed out again at once, but their memory stays until the epoch has retired. See
    /// [`BlockManager::free_in`].
    ///
    /// # Errors
    /// As [`free`](Self::free).
    pub fn free_in(&self, blocks: &[BlockId], epoch: Epoch) -> Result<(), FreeError> {
        let result = self.blocks().free_in(blocks, epoch);
        self.consider_work();
        result
    }

    /// Tells that the work of this epoch, and of all before it, has ended on every rank. Where each
    /// rank's process says so itself, nobody need say it here.
    pub fn retire(&self, epoch: Epoch) {
        self.pages.retire(epoch);
        self.consider_work();
    }

    /// Takes everything back that is handed out, except what is held. See [`BlockManager::clear`].
    ///
    /// # Errors
    /// [`FreeError::Pages`] only; nothing changed.
    pub fn clear(&self) -> Result<u32, FreeError> {
        let result = self.blocks().clear();
        self.consider_work();
        result
    }

    /// Sets `n` blocks aside. See [`BlockManager::hold`].
    ///
    /// # Errors
    /// As [`alloc`](Self::alloc).
    pub fn hold(&self, n: u32) -> Result<HoldId, AllocError> {
        let result = self.blocks().hold(n);
        self.consider_failure(&result);
        self.consider_work();
        result
    }

    /// Hands out the `n` oldest blocks of a hold. See [`BlockManager::take_held`].
    ///
    /// # Errors
    /// No such hold, or not so many in it; nothing changed.
    pub fn take_held(&self, hold: HoldId, n: u32) -> Result<Vec<BlockId>, HoldError> {
        self.blocks().take_held(hold, n)
    }

    /// Ends a hold; what is left in it is free again. See [`BlockManager::release_hold`].
    ///
    /// # Errors
    /// No such hold; nothing changed.
    pub fn release_hold(&self, hold: HoldId) -> Result<u32, HoldError> {
        let result = self.blocks().release_hold(hold);
        self.consider_work();
        result
    }

    /// Blocks left in a hold; `None` if there is no such hold.
    #[must_use]
    pub fn held(&self, hold: HoldId) -> Option<u32> {
        self.blocks().held(hold)
    }

    /// The most that [`alloc`](Self::alloc) can give now, if the device has the memory.
    #[must_use]
    pub fn available(&self) -> u32 {
        self.blocks().available()
    }

    /// How full each page in use is.
    #[must_use]
    pub fn occupancy(&self) -> Vec<PageOccupancy> {
        self.blocks().occupancy().collect()
    }

    /// The page that a block lies on; `None` if it straddles two or the pool does not have it.
    #[must_use]
    pub fn page_of(&self, block: BlockId) -> Option<PageId> {
        self.geometry.page_of(block.0)
    }

    /// The first page of the run whose memory goes back with a block's. See
    /// [`BlockManager::run_of`].
    #[must_use]
    pub fn run_of(&self, block: BlockId) -> Option<PageId> {
        self.blocks().run_of(block)
    }

    /// Puts a limit in force. Does not wait for an allocation that is under way, except that one at the
    /// device may go first, for 20 ms at most.
    ///
    /// # Errors
    /// Below the floor; the limit in force stays.
    pub fn set_limit(&self, limit: Limit) -> Result<LimitStatus, LimitError> {
        let result = self.pages.set_limit(limit);
        // It may have to go on although the device is full.
        if let Some(wake) = &self.wake {
            wake.hasten();
        }
        result
    }

    /// The limit in force.
    #[must_use]
    pub fn limit(&self) -> Limit {
        self.pages.limit()
    }

    /// Does the pool keep to its limit?
    #[must_use]
    pub fn limit_status(&self) -> LimitStatus {
        self.pages.limit_status()
    }

    /// Gives the memory of idle pages back, the reserve's too; answers how many. What ranks only keep
    /// to use again goes with it. A reserve comes back with the next use of the pool.
    ///
    /// # Errors
    /// What the mapper answered.
    pub fn trim(&self) -> Result<u32, MapError> {
        self.pages.trim()
    }

    /// One step towards the reserve, for schedulers without a thread that does it. See
    /// [`PageAllocator::replenish`].
    ///
    /// # Errors
    /// What the mapper answered, except that it is full.
    pub fn replenish(&self) -> Result<Replenished, MapError> {
        self.pages.replenish()
    }

    /// Tells that some time has passed, always about as much, for schedulers without a thread that
    /// does: demand of long ago then asks for no reserve any more. See [`PageAllocator::tick`].
    pub fn tick(&self) {
        self.pages.tick();
    }

    /// Lets go of memory that the rank in this process has kept too long to use it again; answers when
    /// to ask again, if any is left. For schedulers without a thread that does it.
    pub fn tend(&self, now: Instant) -> Option<Instant> {
        self.pages.tend(now)
    }

    /// How far every rank is known to have the pages that it should. A fenced pool hands out no
    /// block until it is repaired.
    #[must_use]
    pub fn health(&self) -> Health {
        self.pages.health()
    }

    /// One attempt to bring ranks back that do not count, and pages whose state is unknown; for
    /// schedulers without a thread that does it. Costs little while all is well. See
    /// [`PageAllocator::repair`].
    ///
    /// # Errors
    /// What stood in the way; the attempt may be repeated.
    pub fn repair(&self) -> Result<Repaired, MapError> {
        let result = self.pages.repair();
        self.consider_work();
        result
    }

    /// How often a rank has lost what the pool's pages held: the process was replaced, or released
    /// everything while it was away. Whoever sees this grow has to compute again what it keeps in
    /// blocks handed out before.
    #[must_use]
    pub fn contents_lost(&self) -> u64 {
        self.pages.contents_lost()
    }

    /// Blocks and pages at this moment.
    #[must_use]
    pub fn usage(&self) -> PoolUsage {
        self.blocks().usage()
    }

    /// Wakes who brings ranks back if one was met that is lost, and who gives up what other pools only
    /// keep ready if there was no memory.
    fn consider_failure<T>(&self, result: &Result<T, AllocError>) {
        let (Some(wake), Err(error)) = (&self.wake, result) else {
            return;
        };
        match error {
            AllocError::Broken(_) | AllocError::Fenced { .. } => wake.alarm(),
            AllocError::Full {
                reason: FullReason::DeviceMemory,
                ..
            } => wake.hasten(),
            _ => {}
        }
    }

    /// Wakes who works behind the callers if there is something to do.
    #[inline]
    fn consider_work(&self) {
        if let Some(wake) = &self.wake
            && self.pages.is_due()
        {
            wake.nudge();
        }
    }

    fn blocks(&self) -> MutexGuard<'_, BlockManager> {
        self.blocks
            .lock()
            .expect("nobody panics amid a change of blocks")
    }
}

impl Drop for Pool {
    /// Gives every page back on every rank, so that the next scheduler finds the workers as this
    /// one did.
    fn drop(&mut self) {
        let blocks = self
            .blocks
            .get_mut()
            .unwrap_or_else(PoisonError::into_inner);
        let used: Vec<PageId> = blocks.occupancy().map(|page| page.page).collect();
        let pool = self.id;
        if let Err(error) = self.pages.free(&used) {
            tracing::warn!(%pool, %error, "pages in use were not given back");
        }
        if let Err(error) = self.pages.trim() {
            tracing::warn!(%pool, %error, "pages were not given back");
        }
    }
}

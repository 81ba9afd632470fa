//! [`PageAllocator`]: the page table behind a lock, and the calls to the mapper beside it.
//!
//! Every operation that needs the mapper is lock, decide, unlock, call, lock, record. While the
//! call lasts its pages are busy and everybody else goes on, frees and snapshots included. Nobody
//! ever waits for a busy page: an allocation that finds no other is told that the pool is full.

mod repair;
mod reserve;
mod under_way;
mod unmap;

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Instant;

use kvcached_mapper::{After, Epoch, MapError, Mapper, PageId, PageRun, Suspect};

pub use self::repair::Repaired;
pub use self::reserve::Replenished;
use crate::demand::Demand;
use crate::limit::{LimitBook, Request};
use crate::run_policy::{Pressure, Room};
use crate::runs::Idle;
use crate::sync::{AtomicBool, AtomicU32, AtomicU64, Mutex, MutexGuard, Ordering};
use crate::table::{PageTable, Purpose, Wanted};
use crate::{
    AllocError, ConfigError, FreeError, FullReason, Limit, LimitError, LimitStatus,
    PageAllocatorConfig, PageState, PageUsage, Reserve, RunPolicy, Turns, Unmapping,
};

/// Chunks of one mapper call that nobody waits for, or those of one run if that has more. Their
/// pages are out of reach meanwhile, and so is the device: mapping one took 50 µs on the GPU that
/// was measured. So big changes are made in several calls.
const STEP_CHUNKS: u32 = 16;

/// Chunks of the second attempt of an allocation, at most. Smaller pieces are more of them, and each
/// costs time: in vain, if the last does not fit.
const SECOND_CHUNKS: u32 = 1024;

/// Hands out the pages of one pool, and has them backed and unbacked by a [`Mapper`].
///
/// All methods take `&self` and may be called from any thread. Only those that may map or unmap
/// call the mapper, and none holds the lock meanwhile:
///
/// | method | calls the mapper |
/// | --- | --- |
/// | [`alloc`](Self::alloc), [`alloc_first`](Self::alloc_first) | when warm pages do not suffice |
/// | [`free`](Self::free), [`free_after`](Self::free_after) | when more is backed than the limit allows, and only with [`Unmapping::InCall`] |
/// | [`set_limit`](Self::set_limit) | when more is backed than the limit allows |
/// | [`replenish`](Self::replenish), [`keep_to_limit`](Self::keep_to_limit), [`trim`](Self::trim) | when there is something to do, a trim in any case |
/// | [`repair`](Self::repair), [`tend`](Self::tend) | always |
/// | [`health`](Self::health) | to look, which waits for nobody |
/// | all others | never |
///
/// How much memory the device has left is asked only as a hint, since it costs a question to every
/// rank: at most once by a [`replenish`](Self::replenish) that maps, and at most once by an allocation
/// that was refused, before it tries again in smaller pieces.
///
/// # The fence
///
/// While the mapper's [`Health`](kvcached_mapper::Health) is fenced, no page is handed out, not even
/// a warm one, and nothing is mapped or unmapped: of some rank it is not known what it has, so work
/// must not be launched on it. Whether it is so is looked up after every error of the mapper, by
/// [`health`](Self::health) and by [`repair`](Self::repair), which somebody has to call to end it.
#[derive(Debug)]
pub struct PageAllocator {
    books: Mutex<Books>,
    /// What [`Books::available`] was when the lock was last let go.
    available: AtomicU32,
    /// Was there a [`Books::fence`] then?
    fenced: AtomicBool,
    /// Was the pool [`Books::due`] then?
    due: AtomicBool,
    /// Repairs that found contents lost.
    contents_lost: AtomicU64,
    mapper: Arc<dyn Mapper>,
    bundle_bytes: u64,
    /// Runs of one mapper call that nobody waits for.
    step_runs: usize,
    /// Runs of a second attempt of an allocation.
    second_runs: u32,
    unmapping: Unmapping,
    turns: Turns,
}

/// Everything the lock protects.
#[derive(Debug)]
struct Books {
    table: PageTable,
    limit: LimitBook,
    demand: Demand,
    runs: RunPolicy,
    pressure: Pressure,
    totals: Totals,
    /// The ranks that the mapper fences, as of the last look at its health.
    fence: Option<Vec<Suspect>>,
    /// How often its health was looked at.
    looks: u64,
    /// Repairs under way, which may be about to count a loss.
    repairs: u32,
    /// The mapper refused to unmap what is in flight, and no epoch has retired since.
    in_flight: bool,
    /// Demands of this pool that were refused for want of memory.
    refused: u64,
    /// Those of others who share the turns, as far as they were heeded.
    heeded: u64,
    /// Ticks for which only the lower bound is mapped ahead, on account of that.
    yields: u32,
}

/// What happened since the start.
#[derive(Debug, Default)]
struct Totals {
    mapped: u64,
    unmapped: u64,
    runs_mapped: u64,
    map_full: u64,
    map_failed: u64,
    unmap_failed: u64,
    repaired: u64,
}

impl PageAllocator {
    /// An allocator of cold pages, without a limit, over the mapper of the same pool.
    ///
    /// The mapper is not called: nothing is backed until somebody asks.
    ///
    /// # Errors
    /// A configuration that makes no sense, with the numbers that contradict each other.
    pub fn new(config: PageAllocatorConfig, mapper: Arc<dyn Mapper>) -> Result<Self, ConfigError> {
        config.check()?;
        let PageAllocatorConfig {
            pages,
            bundle_bytes,
            void,
            runs,
            reserve,
            floor_bytes,
            run_chunks,
            unmapping,
            turns,
        } = config;
        let table = PageTable::new(pages, &void);
        let capacity_bytes = u64::from(table.capacity()) * bundle_bytes;
        if table.capacity() == 0 {
            return Err(ConfigError::NoPages);
        }
        if floor_bytes > capacity_bytes {
            return Err(ConfigError::Floor {
                floor_bytes,
                capacity_bytes,
            });
        }
        // Beyond that there is nothing to keep, and numbers stay far from the largest.
        let reserve = Reserve {
            min: reserve.min.min(table.capacity()),
            max: reserve.max.min(table.capacity()),
        };
        Ok(Self {
            available: AtomicU32::new(table.available()),
            books: Mutex::new(Books {
                table,
                limit: LimitBook::new(capacity_bytes, floor_bytes, bundle_bytes),
                demand: Demand::new(reserve),
                runs,
                pressure: Pressure::default(),
                totals: Totals::default(),
                fence: None,
                looks: 0,
                repairs: 0,
                in_flight: false,
                refused: 0,
                heeded: 0,
                yields: 0,
            }),
            fenced: AtomicBool::new(false),
            due: AtomicBool::new(reserve.min > 0),
            contents_lost: AtomicU64::new(0),
            mapper,
            bundle_bytes,
            step_runs: PageId((STEP_CHUNKS / run_chunks).max(1)).index(),
            second_runs: SECOND_CHUNKS / run_chunks,
            unmapping,
            turns,
        })
    }

    /// Hands out `n` pages, appended to `out`: warm ones first, then cold ones in runs of adjacent
    /// pages, as long as the [`RunPolicy`] and the neighbourhood allow. If the device is full for
    /// them but may not be for shorter ones, these are tried too, unless they are many.
    ///
    /// # Errors
    /// No page is handed out and `out` is as before. [`AllocError::Full`] is a normal answer;
    /// [`AllocError::Broken`] is not, and its uncertain pages are quarantined. After it, or without
    /// any call of the mapper, it may be [`AllocError::Fenced`].
    pub fn alloc(&self, n: u32, out: &mut Vec<PageId>) -> Result<(), AllocError> {
        if n <= self.available() {
            // Beside the lock, since it may take long; for nothing if the pool turns out to be full.
            out.reserve(PageId(n).index());
        }
        let before = out.len();
        let runs = self.with_books(|books| {
            books.pass_fence()?;
            let table = &mut books.table;
            if n > table.available() {
                return Err(AllocError::Full(table.full_reason(n)));
            }
            let missing = n - table.take(n, out);
            let mut runs = Vec::new();
            let found = books.begin_map(missing, usize::MAX, &mut runs);
            assert_eq!(found, missing, "warm and cold pages are what is available");
            Ok(runs)
        })?;
        if runs.is_empty() {
            return Ok(());
        }
        match self.map_demand(runs) {
            Ok(runs) => {
                out.extend(runs.iter().flat_map(|run| run.pages()));
                Ok(())
            }
            Err(error) => {
                let taken = &out[before..];
                // Nobody has seen them, so nothing can touch them.
                self.free_after(taken, After::NOTHING)
                    .expect("pages taken a moment ago are in use");
                out.truncate(before);
                Err(error)
            }
        }
    }

    /// Hands out page 0, which engines treat as the null page, and no other, whether it is cold
    /// or warm already.
    ///
    /// # Errors
    /// As for [`alloc`](Self::alloc), and [`AllocError::FirstTaken`] if it is handed out already
    /// or can never be.
    pub fn alloc_first(&self) -> Result<PageId, AllocError> {
        let first = PageId(0);
        let run = self.with_books(|books| {
            books.pass_fence()?;
            let table = &mut books.table;
            match table.state(first).expect("a pool has pages") {
                PageState::Warm if table.available() == 0 => {
                    Err(AllocError::Full(FullReason::Limit))
                }
                PageState::Warm => {
                    table.take_page(first);
                    Ok(None)
                }
                PageState::Cold => Ok(Some(table.begin_map_page(first))),
                PageState::Busy => Err(AllocError::Full(FullReason::Busy)),
                PageState::Withheld => Err(AllocError::Full(FullReason::Limit)),
                state => Err(AllocError::FirstTaken { state }),
            }
        })?;
        if let Some(run) = run {
            self.map_demand(vec![run])?;
        }
        // It is taken once and for all, so it says nothing about the demand to come.
        self.with_books(|Books { demand, table, .. }| demand.forget(table.count(PageState::Used)));
        Ok(first)
    }

    /// Takes pages back that whatever was launched so far may still touch: the device is
    /// synchronised before their memory goes.
    ///
    /// # Errors
    /// See [`free_after`](Self::free_after).
    pub fn free(&self, pages: &[PageId]) -> Result<(), FreeError> {
        self.free_after(pages, After::DEVICE)
    }

    /// Takes pages back. Their memory stays, ready for the next allocation, and goes no sooner than
    /// what `after` names has ended, and what each of its pages was freed after since it got it.
    ///
    /// If more is backed than the limit allows, wholly idle runs whose epoch has retired are unmapped
    /// right here with [`Unmapping::InCall`]. A failure of that is logged and shows in
    /// [`usage`](Self::usage); the pages are free all the same. Runs in flight are left to
    /// [`keep_to_limit`](Self::keep_to_limit): who frees is mostly who launches work, and is not to
    /// wait for it. With [`Unmapping::Behind`], all are.
    ///
    /// # Errors
    /// A page that is not in use, or is named twice; then no page of the call was taken back.
    pub fn free_after(&self, pages: &[PageId], after: After) -> Result<(), FreeError> {
        let excess = self.with_books(|books| {
            books.table.put_back(pages, after)?;
            Ok(books.table.excess())
        })?;
        self.shrink_in_call(excess);
        Ok(())
    }

    /// This epoch and all before it have ended on every rank: memory that was freed after them may
    /// go. Going back does nothing.
    pub fn retire(&self, epoch: Epoch) {
        self.mapper.retire(epoch);
        self.with_books(|books| {
            if books.table.retire(epoch) {
                books.in_flight = false;
            }
        });
    }

    /// Gives the memory of every wholly idle run back, the reserve's too; answers how many pages. The
    /// reserve begins anew, with the demand that comes.
    /// Runs whose epoch has not retired come last, and stay warm if that does not happen within the
    /// mapper's bound. Demands of others go first between its steps. Memory that the mapper only keeps
    /// for later goes with it, whatever came of the runs.
    ///
    /// # Errors
    /// What the mapper answered; runs before that are unmapped, and show in
    /// [`usage`](Self::usage).
    pub fn trim(&self) -> Result<u32, MapError> {
        let unmapped = self.unmap_idle();
        self.mapper.trim();
        unmapped
    }

    /// Lets go, in this process, of memory behind no page that was kept too long at `now`; answers
    /// when to ask again. See [`Mapper::tend`].
    pub fn tend(&self, now: Instant) -> Option<Instant> {
        self.mapper.tend(now)
    }

    fn unmap_idle(&self) -> Result<u32, MapError> {
        // Pages freed by others meanwhile are not waited for, so this ends.
        let mut left = self.with_books(|Books { demand, table, .. }| {
            demand.forget(table.count(PageState::Used));
            table.count(PageState::Warm)
        });
        let mut unmapped = 0;
        for which in [Idle::Retired, Idle::InFlight] {
            loop {
                let step = self.unmap_step(which, |_| Wanted::at_least(left))?;
                unmapped += step.pages;
                left = left.saturating_sub(step.pages);
                if step.pages == 0 || !step.more {
                    break;
                }
                self.turns.give_way();
            }
        }
        Ok(unmapped)
    }

    /// Puts a limit in force, if its revision is newer, and unmaps wholly idle runs above it.
    /// Growth beyond it ends at once; what is in use above it stays until it is freed.
    ///
    /// A limit beyond the capacity is as good as the capacity. A limit of 0 lets nothing grow and
    /// takes nothing away from anybody. What cannot be unmapped now, since work is in flight, is left
    /// for a later [`free`](Self::free) or [`keep_to_limit`](Self::keep_to_limit). Demands of others
    /// go first between the steps of that, for 20 ms each at most.
    ///
    /// # Errors
    /// [`LimitError::BelowFloor`]; the limit in force stays.
    pub fn set_limit(&self, limit: Limit) -> Result<LimitStatus, LimitError> {
        let request = self.with_books(|books| {
            let request = books.limit.request(limit)?;
            if request == Request::InForce {
                books.table.set_limit(books.limit.pages());
            }
            Ok(request)
        })?;
        match request {
            Request::Refused(status) => Ok(status),
            Request::InForce => {
                self.shrink_by_turns(&[Idle::Retired, Idle::InFlight]);
                Ok(self.limit_status())
            }
        }
    }

    /// Does the pool keep to its limit? [`LimitStatus::Applied`] or [`LimitStatus::Deferred`].
    pub fn limit_status(&self) -> LimitStatus {
        self.with_books(|books| books.limit.status(books.table.backed()))
    }

    /// The limit in force, as it was asked for.
    pub fn limit(&self) -> Limit {
        self.with_books(|books| books.limit.current())
    }

    /// How many pages [`alloc`](Self::alloc) could give now, if the device has the memory: none
    /// while a rank is fenced. Reads one number, without a lock.
    #[inline]
    pub fn available(&self) -> u32 {
        self.available.load(Ordering::Relaxed)
    }

    /// One consistent snapshot.
    pub fn usage(&self) -> PageUsage {
        self.with_books(
            |Books {
                 table,
                 limit,
                 totals,
                 demand,
                 ..
             }| PageUsage {
                total: table.total(),
                void: table.count(PageState::Void),
                cold: table.count(PageState::Cold),
                warm: table.count(PageState::Warm),
                pinned: table.pinned(),
                used: table.count(PageState::Used),
                busy: table.count(PageState::Busy),
                withheld: table.count(PageState::Withheld),
                quarantined: table.count(PageState::Quarantined),
                runs: table.runs(),
                reserve_target: demand.band().target,
                mapped_bytes: u64::from(table.backed()) * self.bundle_bytes,
                mapped_total: totals.mapped,
                unmapped_total: totals.unmapped,
                runs_mapped_total: totals.runs_mapped,
                map_full_total: totals.map_full,
                map_failed_total: totals.map_failed,
                unmap_failed_total: totals.unmap_failed,
                repaired_total: totals.repaired,
                contents_lost_total: self.contents_lost(),
                limit: limit.current(),
                limit_status: limit.status(table.backed()),
            },
        )
    }

    /// What is the case with a page; `None` if the pool has no such page.
    pub fn state(&self, page: PageId) -> Option<PageState> {
        self.with_books(|books| books.table.state(page))
    }

    /// The run that a used or warm page was mapped in, whose memory goes back together; `None` for
    /// any other page.
    pub fn run_of(&self, page: PageId) -> Option<PageRun> {
        self.with_books(|books| books.table.run_of(page))
    }

    /// The runs whose state is unknown after a failure, in order, exactly as they were to be mapped
    /// or unmapped.
    pub fn quarantined(&self) -> Vec<PageRun> {
        self.with_books(|books| books.table.quarantined().map(|doubt| doubt.run).collect())
    }

    /// Maps busy runs for somebody who waits for them, or others of as many pages; answers which.
    fn map_demand(&self, runs: Vec<PageRun>) -> Result<Vec<PageRun>, AllocError> {
        let result = {
            // One turn, so that nobody who gives way comes in between the two attempts.
            let _turn = self.turns.demand();
            match self.map(&runs, Purpose::Demand) {
                Ok(()) => Ok(runs),
                Err(error) => self.map_shorter(&runs, error),
            }
        };
        if let Err(AllocError::Full(FullReason::DeviceMemory)) = result {
            self.with_books(|books| {
                books.refused += 1;
                self.turns.refuse();
            });
        }
        result
    }

    /// Maps shorter runs of as many pages, after `runs` failed to be mapped with `error`: if the device
    /// was full for them, and says that it has memory for so many pages all the same.
    ///
    /// # Errors
    /// The same error if that is not so, else what came of the second attempt.
    fn map_shorter(&self, runs: &[PageRun], error: AllocError) -> Result<Vec<PageRun>, AllocError> {
        let full = AllocError::Full(FullReason::DeviceMemory);
        let longest = runs.iter().map(|run| run.count()).max().unwrap_or(0);
        let Some(half) = NonZeroU32::new(longest / 2).filter(|_| error == full) else {
            return Err(error);
        };
        let pages = pages_in(runs);
        let length = |books: &Books| books.run_length(pages, true).min(half);
        if pages.div_ceil(self.with_books(|books| length(books)).get()) > self.second_runs {
            return Err(error);
        }
        // Where nothing can be told, another attempt would mostly cost much and fail again.
        if self.mapper.headroom().is_none_or(|room| room < pages) {
            return Err(error);
        }
        let mut shorter = Vec::new();
        self.with_books(|books| {
            books.pass_fence()?;
            let length = length(books);
            let table = &mut books.table;
            // Others may have taken them meanwhile, or a limit.
            if pages > table.count(PageState::Cold).min(table.available()) {
                return Err(error);
            }
            let most_runs = PageId(self.second_runs).index();
            if table.begin_map(pages, length, most_runs, &mut shorter) < pages {
                table.fail_map(&shorter, &[]);
                return Err(error);
            }
            Ok(())
        })?;
        self.map(&shorter, Purpose::Demand)?;
        Ok(shorter)
    }

    /// Maps busy runs and records what came of it.
    fn map(&self, runs: &[PageRun], purpose: Purpose) -> Result<(), AllocError> {
        let result = self.call(runs, PageTable::fail_map, || {
            let result = self.mapper.map(runs);
            if result.is_err() {
                self.look();
            }
            result
        });
        let excess = self.with_books(|books| {
            let Books { table, totals, .. } = books;
            match &result {
                Ok(()) => {
                    table.finish_map(runs, purpose);
                    let pages = pages_in(runs);
                    books.pressure.mapped(pages);
                    totals.mapped += u64::from(pages);
                    totals.runs_mapped += runs.len() as u64;
                }
                Err(error) => {
                    table.fail_map(runs, &error.uncertain);
                    match error.is_full() {
                        true => {
                            books.pressure.met_full(&books.runs);
                            totals.map_full += 1;
                        }
                        false => totals.map_failed += 1,
                    }
                }
            }
            table.excess()
        });
        // A limit may have come while the call was under way. Pages on demand go to their owner
        // all the same, but a reserve beyond it goes back.
        self.shrink_in_call(excess);
        result.map_err(|error| match error.is_full() {
            true => AllocError::Full(FullReason::DeviceMemory),
            false => AllocError::Broken(error),
        })
    }

    /// Runs `change` under the lock; never call the mapper in it.
    #[inline]
    fn with_books<R>(&self, change: impl FnOnce(&mut Books) -> R) -> R {
        let mut guard = self.lock();
        let books = &mut *guard;
        let result = change(books);
        self.publish(books);
        result
    }

    /// What is read without the lock follows from the books.
    #[inline]
    fn publish(&self, books: &mut Books) {
        books.demand.observe(books.table.count(PageState::Used));
        self.available.store(books.available(), Ordering::Relaxed);
        self.due.store(books.due(), Ordering::Relaxed);
    }

    #[inline]
    fn lock(&self) -> MutexGuard<'_, Books> {
        self.books
            .lock()
            .expect("nobody panics while changing the books")
    }
}

impl Books {
    /// Makes `n` cold pages busy in runs as long as the policy says, `most_runs` of them; answers how
    /// many pages.
    fn begin_map(&mut self, n: u32, most_runs: usize, runs: &mut Vec<PageRun>) -> u32 {
        let longest = self.run_length(n, self.pressure.is_on());
        self.table.begin_map(n, longest, most_runs, runs)
    }

    /// Pages of the longest run for a demand of so many.
    fn run_length(&self, n: u32, is_short: bool) -> NonZeroU32 {
        let room = Room {
            limited_to: self.table.limited_to(),
            is_short,
        };
        self.runs.length(n, room)
    }

    fn available(&self) -> u32 {
        match self.fence {
            None => self.table.available(),
            Some(_) => 0,
        }
    }

    /// Nothing is handed out while a rank is fenced.
    fn pass_fence(&self) -> Result<(), AllocError> {
        match &self.fence {
            None => Ok(()),
            Some(ranks) => Err(AllocError::Fenced {
                ranks: ranks.clone(),
            }),
        }
    }
}

/// Pages of runs of one pool, which share none.
fn pages_in(runs: &[PageRun]) -> u32 {
    runs.iter().map(|run| run.count()).sum()
}

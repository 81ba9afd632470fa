//! The engine around the coordinator: requests that take blocks, work on them and give them back,
//! as one life of the coordinator knows them.
//!
//! It keeps the duties of an engine. It launches nothing while a rank is fenced, or while a rank's
//! process is a new one that no repair has seen yet; once it is told that contents were lost, it
//! writes everything anew before it reads; its epochs go on counting when it is restarted.

use std::collections::BTreeMap;
use std::fmt;
use std::num::NonZeroU32;
use std::sync::{Arc, Mutex, Weak};

use kvcached_manager::{BlockId, BlockManager, BlockSpace, HoldId, Limit, NULL_BLOCK};
use kvcached_mapper::{
    After, Epoch, Geometry, Health, MapError, Mapper, PageId, PageRun, Readiness, Reconciled,
};
use kvcached_page_alloc::{PageAllocator, PageAllocatorConfig, Reserve, RunPolicy};
use kvcached_tp_ipc::{Answer, Operation};

use crate::events::Event;
use crate::fan::Fan;
use crate::rank::geometry;
use crate::report::Guarantee;
use crate::script::{EpochsKept, Step};
use crate::world::{World, lock};

/// The background repairs at the latest after so long, and after a failure soon and then later.
const REPAIR_NS: (u64, u64) = (5_000_000, 250_000_000);

/// One life of the coordinator.
#[derive(Debug)]
pub(crate) struct Life {
    pub(crate) number: u64,
    pub(crate) pools: Vec<Pool>,
}

/// What the coordinator has of one pool.
#[derive(Debug)]
pub(crate) struct Pool {
    pub(crate) fan: Arc<Mutex<Fan>>,
    pub(crate) pages: Arc<PageAllocator>,
    /// Not before all ranks are there. Locked while one of its operations is on the stack.
    pub(crate) manager: Mutex<Option<BlockManager>>,
    pub(crate) books: Mutex<Books>,
    pub(crate) geometry: Geometry,
}

/// What the engine knows of a pool.
#[derive(Debug, Default)]
pub(crate) struct Books {
    pub(crate) requests: BTreeMap<u32, Request>,
    pub(crate) holds: BTreeMap<u32, HoldId>,
    /// Which life of each rank the engine has joined: the last repair that went well saw it.
    pub(crate) known: Vec<u64>,
    /// Is the null block taken, so that others may take pages?
    begun: bool,
    /// The request that worked last by itself.
    at_work: u32,
    revision: u64,
    repair_after_ns: u64,
    repair_due_ns: u64,
    repairing: bool,
}

/// A request, or whoever took whole pages.
#[derive(Debug, Default)]
pub(crate) struct Request {
    pub(crate) serial: u64,
    /// Its blocks, each with the number of the write that it holds, if it was written.
    pub(crate) blocks: Vec<(BlockId, Option<u64>)>,
    /// Its pages, if it took whole ones.
    pub(crate) pages: Vec<PageId>,
    pub(crate) writes: u64,
    /// The losses that its writes have survived.
    pub(crate) losses: u64,
}

/// An operation of the engine that waits for its turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Op {
    Step(Step),
    /// The beginning of a pool.
    Boot(usize),
    /// The background's repair.
    Repair(usize),
}

/// The mapper of a pool over all ranks, in one life of the coordinator.
struct SimBroadcast {
    world: Weak<World>,
    life: u64,
    fan: Arc<Mutex<Fan>>,
}

impl Life {
    pub(crate) fn new(world: &World, number: u64) -> Self {
        let config = &world.config;
        let geometry = geometry(config);
        let pools = (0..config.pools).map(|pool| {
            let fan = Fan::new(config, &world.topology, &world.places, pool, number);
            let fan = Arc::new(Mutex::new(fan));
            let mapper = SimBroadcast {
                world: Weak::clone(&world.me),
                life: number,
                fan: Arc::clone(&fan),
            };
            let (min, max) = config.reserve;
            let longest = NonZeroU32::new(config.max_run.clamp(1, 64)).unwrap_or(NonZeroU32::MIN);
            let page_config = PageAllocatorConfig {
                runs: RunPolicy::up_to(longest),
                reserve: Reserve {
                    min,
                    max: max.max(min),
                },
                ..PageAllocatorConfig::new(geometry.pages(), geometry.bundle_bytes())
            };
            let pages = PageAllocator::new(page_config, Arc::new(mapper));
            let books = Books {
                known: vec![0; world.places.len()],
                repair_after_ns: REPAIR_NS.0,
                ..Books::default()
            };
            Pool {
                fan,
                pages: Arc::new(pages.expect("a script's pool makes an allocator")),
                manager: Mutex::new(None),
                books: Mutex::new(books),
                geometry: geometry.clone(),
            }
        });
        Self {
            number,
            pools: pools.collect(),
        }
    }

    /// Are the locks free that this operation takes?
    pub(crate) fn can_begin(&self, op: &Op) -> bool {
        let (pool, managed) = match *op {
            Op::Boot(pool) => (pool, true),
            Op::Repair(pool) => (pool, false),
            Op::Step(step) => match step {
                Step::Alloc { pool, .. }
                | Step::Free { pool, .. }
                | Step::FreeSome { pool, .. }
                | Step::Hold { pool, .. }
                | Step::TakeHeld { pool, .. }
                | Step::ReleaseHold { pool, .. } => (usize::from(pool), true),
                Step::Touch { pool, .. }
                | Step::TakePages { pool, .. }
                | Step::FreePages { pool, .. }
                | Step::Limit { pool, .. }
                | Step::Trim { pool }
                | Step::Replenish { pool }
                | Step::Repair { pool } => (usize::from(pool), false),
                _ => return true,
            },
        };
        let pool = self.pools.get(pool);
        pool.is_none_or(|pool| !managed || pool.manager.try_lock().is_ok())
    }
}

impl World {
    pub(crate) fn perform_op(&self, life: &Life, op: Op) {
        match op {
            Op::Boot(pool) => self.boot(life, pool),
            Op::Repair(pool) => self.repair(life, pool, true),
            Op::Step(step) => self.perform_step(life, step),
        }
    }

    /// Joins all ranks, and takes the null block.
    fn boot(&self, life: &Life, index: usize) {
        let pool = &life.pools[index];
        let mut manager = lock(&pool.manager);
        let seen = lock(&self.state).generations.clone();
        let answer = self.over_ranks(life.number, &pool.fan, Operation::Ready);
        let ready = matches!(answer, Answer::Ready(Ok(Readiness::Ready)));
        let made = ready.then(|| {
            // The allocator has seen ranks that were not there yet.
            let _ = pool.pages.health();
            BlockManager::new(BlockSpace::from(&pool.geometry), Arc::clone(&pool.pages))
        });
        if let Some(Ok(made)) = made {
            *manager = Some(made);
            let mut books = lock(&pool.books);
            books.known = seen;
            books.begun = true;
        } else {
            let at_ns = self.clock.now_ns() + 2_000_000;
            self.schedule(at_ns, Event::Due(life.number, Op::Boot(index)));
        }
    }

    fn repair(&self, life: &Life, index: usize, background: bool) {
        let pool = &life.pools[index];
        let seen = lock(&self.state).generations.clone();
        let before = pool.pages.contents_lost();
        let result = pool.pages.repair();
        if !self.is_current(life.number) {
            return;
        }
        let mended = result.is_ok_and(|done| !done.left_to_another);
        let mut books = lock(&pool.books);
        if mended {
            // A later repair may have ended before this one.
            let known = books.known.iter_mut().zip(seen);
            known.for_each(|(known, seen)| *known = seen.max(*known));
        }
        if background {
            books.repairing = false;
            books.repair_after_ns = match mended {
                true => REPAIR_NS.0,
                false => (books.repair_after_ns * 2).min(REPAIR_NS.1),
            };
            books.repair_due_ns = self.clock.now_ns() + books.repair_after_ns;
        }
        drop(books);
        let mut state = lock(&self.state);
        state.counts.losses += pool.pages.contents_lost() - before;
    }

    /// The background of a pool: now and then, and when something is wrong.
    pub(crate) fn tick(&self, number: u64, index: usize) {
        let Some(life) = self.current().filter(|life| life.number == number) else {
            return;
        };
        let now_ns = self.clock.now_ns();
        self.schedule(
            now_ns + REPAIR_NS.0,
            Event::Tick {
                life: number,
                pool: index,
            },
        );
        if self.is_stalled() {
            return;
        }
        let pool = &life.pools[index];
        if self.config.epochs == EpochsKept::ByCoordinator {
            pool.pages.retire(Epoch(self.retired()));
        }
        if let Some(memory) = self.local.and_then(|rank| self.memory(rank)) {
            memory.mappers[index].tend(self.clock.now());
        }
        // A request that goes on: the engine works all the time.
        let mut books = lock(&pool.books);
        let next = books.requests.range(books.at_work + 1..).next();
        let next = next
            .or_else(|| books.requests.first_key_value())
            .map(|(label, _)| *label);
        books.at_work = next.unwrap_or_default();
        drop(books);
        if let Some(label) = next {
            self.launch(pool, label);
        }
        let ill = pool.pages.health() != Health::Healthy || !self.is_known(pool);
        let mut books = lock(&pool.books);
        if ill && !books.repairing && books.repair_due_ns <= now_ns {
            books.repairing = true;
            drop(books);
            lock(&self.state).waiting.push_back(Op::Repair(index));
        }
    }

    /// The last epoch whose work has ended on every rank.
    fn retired(&self) -> u64 {
        let launched = lock(&self.state).epoch;
        let ranks = 0..self.places.len();
        let done = ranks.filter_map(|rank| {
            // Work of a rank that is no more has ended.
            let memory = self.memory(rank)?;
            memory.driver.catch_up();
            Some(memory.driver.done())
        });
        done.min().unwrap_or(launched)
    }

    /// Has the engine joined every rank as it is now?
    pub(crate) fn is_known(&self, pool: &Pool) -> bool {
        let known = lock(&pool.books).known.clone();
        known.iter().enumerate().all(|(rank, known)| {
            self.memory(rank)
                .is_some_and(|memory| memory.generation == *known)
        })
    }

    #[expect(clippy::too_many_lines, reason = "one arm for each step of a script")]
    fn perform_step(&self, life: &Life, step: Step) {
        let at = |pool: u16| life.pools.get(usize::from(pool));
        match step {
            Step::Alloc {
                pool,
                label,
                blocks,
            } => {
                let Some(pool) = at(pool) else { return };
                let mut guard = lock(&pool.manager);
                let Some(manager) = guard.as_mut() else {
                    return;
                };
                if lock(&pool.books).requests.contains_key(&label) {
                    return;
                }
                let answer = manager.alloc(blocks.max(1));
                if !self.is_current(life.number) {
                    return;
                }
                if let Ok(blocks) = answer {
                    self.own(pool, label, &blocks, &[]);
                    self.launch(pool, label);
                }
            }
            Step::Free { pool, label } => self.free(life, at(pool), label, u32::MAX),
            Step::FreeSome {
                pool,
                label,
                blocks,
            } => self.free(life, at(pool), label, blocks),
            Step::Touch { pool, label } => {
                if let Some(pool) = at(pool) {
                    self.launch(pool, label);
                }
            }
            Step::Hold {
                pool,
                label,
                blocks,
            } => {
                let Some(pool) = at(pool) else { return };
                let mut guard = lock(&pool.manager);
                let Some(manager) = guard.as_mut() else {
                    return;
                };
                if lock(&pool.books).holds.contains_key(&label) {
                    return;
                }
                let answer = manager.hold(blocks.max(1));
                if self.is_current(life.number)
                    && let Ok(hold) = answer
                {
                    lock(&pool.books).holds.insert(label, hold);
                }
            }
            Step::TakeHeld {
                pool,
                label,
                blocks,
            } => {
                let Some(pool) = at(pool) else { return };
                let mut guard = lock(&pool.manager);
                let Some(manager) = guard.as_mut() else {
                    return;
                };
                let hold = lock(&pool.books).holds.get(&label).copied();
                if let Some(Ok(blocks)) = hold.map(|hold| manager.take_held(hold, blocks)) {
                    self.own(pool, label, &blocks, &[]);
                    self.launch(pool, label);
                }
            }
            Step::ReleaseHold { pool, label } => {
                let Some(pool) = at(pool) else { return };
                let mut guard = lock(&pool.manager);
                let Some(manager) = guard.as_mut() else {
                    return;
                };
                let hold = lock(&pool.books).holds.remove(&label);
                if let Some(Err(error)) = hold.map(|hold| manager.release_hold(hold)) {
                    let what = format!("a hold cannot be released: {error}");
                    self.violate(Guarantee::OneOwner, what);
                }
            }
            Step::TakePages { pool, label, pages } => {
                let Some(pool) = at(pool) else { return };
                // Whole pages are numbered apart from blocks.
                let label = label | PAGES;
                let books = lock(&pool.books);
                if !books.begun || books.requests.contains_key(&label) {
                    return;
                }
                drop(books);
                let mut taken = Vec::new();
                let answer = pool.pages.alloc(pages.max(1), &mut taken);
                if self.is_current(life.number) && answer.is_ok() {
                    self.own(pool, label, &[], &taken);
                    self.launch(pool, label);
                }
            }
            Step::FreePages { pool, label } => {
                let Some(pool) = at(pool) else { return };
                let Some(request) = lock(&pool.books).requests.remove(&(label | PAGES)) else {
                    return;
                };
                let after = match self.freed_in() {
                    Some(epoch) => After::epoch(epoch),
                    None => After::DEVICE,
                };
                if let Err(error) = pool.pages.free_after(&request.pages, after) {
                    let what = format!("pages of their owner cannot be freed: {error}");
                    self.violate(Guarantee::OneOwner, what);
                }
            }
            Step::Limit { pool, pages } => {
                let Some(pool) = at(pool) else { return };
                let mut books = lock(&pool.books);
                books.revision += 1;
                let revision = books.revision;
                drop(books);
                let bytes = u64::from(pages) * pool.geometry.bundle_bytes();
                let _ = pool.pages.set_limit(Limit { bytes, revision });
            }
            Step::Trim { pool } => {
                if let Some(pool) = at(pool) {
                    let _ = pool.pages.trim();
                }
            }
            Step::Replenish { pool } => {
                if let Some(pool) = at(pool) {
                    let _ = pool.pages.replenish();
                }
            }
            Step::Repair { pool } if at(pool).is_some() => {
                self.repair(life, usize::from(pool), false);
            }
            // Faults have struck already, and there is no such pool.
            _ => {}
        }
    }

    /// Blocks, or pages, have a new owner.
    fn own(&self, pool: &Pool, label: u32, blocks: &[BlockId], pages: &[PageId]) {
        self.check_new(pool, blocks, pages);
        let losses = pool.pages.contents_lost();
        let mut state = lock(&self.state);
        state.serial += 1;
        let serial = state.serial;
        drop(state);
        let mut books = lock(&pool.books);
        let request = books.requests.entry(label).or_insert_with(|| Request {
            serial,
            losses,
            ..Request::default()
        });
        let on_pages = pages
            .iter()
            .flat_map(|page| pool.geometry.blocks_in(*page))
            .map(BlockId);
        let all = blocks.iter().copied().chain(on_pages);
        // The null block is nobody's to write to.
        request.blocks.extend(
            all.filter(|block| *block != NULL_BLOCK)
                .map(|block| (block, None)),
        );
        request.pages.extend(pages);
    }

    fn free(&self, life: &Life, pool: Option<&Pool>, label: u32, most: u32) {
        let Some(pool) = pool else { return };
        let mut guard = lock(&pool.manager);
        let Some(manager) = guard.as_mut() else {
            return;
        };
        let mut books = lock(&pool.books);
        let Some(request) = books.requests.get_mut(&label) else {
            return;
        };
        let most = usize::try_from(most).unwrap_or(usize::MAX);
        let kept = request.blocks.len().saturating_sub(most);
        let freed: Vec<BlockId> = request
            .blocks
            .drain(kept..)
            .map(|(block, _)| block)
            .collect();
        if kept == 0 {
            books.requests.remove(&label);
        }
        drop(books);
        let result = match self.freed_in() {
            Some(epoch) => manager.free_in(&freed, epoch),
            None => manager.free(&freed),
        };
        if self.is_current(life.number)
            && let Err(error) = result
        {
            let what = format!("blocks of their owner cannot be freed: {error}");
            self.violate(Guarantee::OneOwner, what);
        }
    }

    /// The epoch that what is freed now is freed in, if epochs are counted.
    fn freed_in(&self) -> Option<Epoch> {
        let epoch = Epoch(lock(&self.state).epoch);
        (self.config.epochs != EpochsKept::ByNobody).then_some(epoch)
    }
}

/// Marks the labels of those who took whole pages.
const PAGES: u32 = 1 << 31;

impl SimBroadcast {
    fn perform(&self, operation: Operation<'_>) -> Answer {
        let world = self
            .world
            .upgrade()
            .expect("a coordinator lives in its world");
        world.over_ranks(self.life, &self.fan, operation)
    }

    fn batch(&self, operation: Operation<'_>) -> Result<(), MapError> {
        match self.perform(operation) {
            Answer::Batch(result) => result,
            other => unreachable!("{other:?} is no answer to a batch"),
        }
    }
}

impl fmt::Debug for SimBroadcast {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SimBroadcast")
            .field("life", &self.life)
            .finish_non_exhaustive()
    }
}

impl Mapper for SimBroadcast {
    fn map(&self, runs: &[PageRun]) -> Result<(), MapError> {
        self.batch(Operation::Map(runs))
    }

    fn unmap_after(&self, runs: &[PageRun], after: After) -> Result<(), MapError> {
        self.batch(Operation::Unmap(runs, after))
    }

    fn headroom(&self) -> Option<u32> {
        match self.perform(Operation::Headroom) {
            Answer::Headroom(pages) => pages,
            other => unreachable!("{other:?} is no headroom"),
        }
    }

    fn trim(&self) {
        match self.perform(Operation::Trim) {
            Answer::Trimmed => {}
            other => unreachable!("{other:?} is no answer to a trim"),
        }
    }

    fn ready(&self) -> Result<Readiness, MapError> {
        match self.perform(Operation::Ready) {
            Answer::Ready(readiness) => readiness,
            other => unreachable!("{other:?} is no answer about readiness"),
        }
    }

    fn health(&self) -> Health {
        lock(&self.fan).fanout.health()
    }

    fn reconcile(&self, doubtful: &[PageRun]) -> Result<Reconciled, MapError> {
        match self.perform(Operation::Reconcile(doubtful)) {
            Answer::Reconciled(result) => result,
            other => unreachable!("{other:?} is no answer about doubts"),
        }
    }
}

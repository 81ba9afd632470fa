//! The allocator under a scheduler that tries interleavings: at every lock, atomic and mapper call
//! another thread may go on. Run with
//! `cargo test -p kvcached-page-alloc --features shuttle --test interleavings`.
//!
//! Schedules are random, or few preemptions at random places, which finds what needs a thread to be
//! slow just once. One that fails is printed, and `shuttle::replay` runs it again.

mod board;

use std::num::NonZeroU32;
use std::sync::Arc;

use kvcached_mapper::{After, Epoch, Mapper, PageId};
use kvcached_page_alloc::{
    AllocError, Limit, LimitStatus, PageAllocator, PageAllocatorConfig, PageState, PageUsage,
    Reserve, RunPolicy, Turns, Unmapping,
};
use shuttle::rand::{Rng, thread_rng};
use shuttle::thread;

use crate::board::{Board, Faults};

const BUNDLE: u64 = 2 << 20;

#[derive(Clone)]
struct Pool {
    pages: Arc<PageAllocator>,
    board: Arc<Board>,
    turns: Turns,
}

fn below(bound: u32) -> u32 {
    thread_rng().gen_range(0..bound)
}

impl Pool {
    fn new(pages: u32, max_run: u32, faults: Faults) -> Self {
        Self::with(pages, max_run, faults, Unmapping::InCall)
    }

    fn with(pages: u32, max_run: u32, faults: Faults, unmapping: Unmapping) -> Self {
        let turns = Turns::shared();
        let board = Arc::new(Board::new(pages, faults));
        let config = PageAllocatorConfig {
            runs: RunPolicy::up_to(NonZeroU32::new(max_run).expect("a run has pages")),
            reserve: Reserve { min: 1, max: 2 },
            unmapping,
            turns: turns.clone(),
            ..PageAllocatorConfig::new(pages, BUNDLE)
        };
        let mapper = Arc::clone(&board) as Arc<dyn Mapper>;
        Self {
            pages: Arc::new(PageAllocator::new(config, mapper).expect("a good config")),
            board,
            turns,
        }
    }

    /// Some pages, if they can be had.
    fn take(&self, n: u32) -> Vec<PageId> {
        let mut mine = Vec::new();
        let fence = self.board.fence();
        let result = self.pages.alloc(n, &mut mine);
        self.board.own(&mine);
        match result {
            Ok(()) => {
                assert_eq!(mine.len(), PageId(n).index());
                let throughout = fence.0 && self.board.fence() == fence;
                assert!(!throughout, "pages were handed out behind a fence");
            }
            Err(_) => assert_eq!(mine, [], "all or nothing"),
        }
        mine
    }

    fn give(&self, pages: &[PageId], after: After) {
        self.board.disown(pages, after);
        self.pages.free_after(pages, after).expect("pages in use");
    }

    fn retire(&self, epoch: Epoch) {
        self.board.has_retired(epoch);
        self.pages.retire(epoch);
    }

    fn limit(&self, pages: u32, revision: u64) {
        let bytes = u64::from(pages) * BUNDLE;
        self.pages
            .set_limit(Limit { bytes, revision })
            .expect("there is no floor");
    }

    fn usage(&self) -> PageUsage {
        let usage = self.pages.usage();
        let PageUsage {
            void,
            cold,
            warm,
            used,
            busy,
            withheld,
            quarantined,
            ..
        } = usage;
        let all = [void, cold, warm, used, busy, withheld, quarantined];
        assert_eq!(all.iter().sum::<u32>(), usage.total, "{usage:?}");
        usage
    }

    /// At rest, once nothing fails any more: nothing is lost, and the board says the same.
    fn settle(&self) {
        self.board.end_faults();
        self.board.mended();
        self.pages.repair().expect("nothing is in its way");
        assert_eq!(self.pages.quarantined(), []);
        let usage = self.usage();
        assert_eq!((usage.busy, usage.used), (0, 0), "{usage:?}");
        for page in (0..usage.total).map(PageId) {
            let agreed = match self.pages.state(page) {
                Some(PageState::Warm) => self.board.is_mapped(page),
                Some(PageState::Cold | PageState::Withheld) => self.board.is_cold(page),
                _ => false,
            };
            assert!(agreed, "{page} is {:?}", self.pages.state(page));
        }
        // Of the pages without memory, those within the limit are cold.
        let within = u64::from(usage.total).min(usage.limit.bytes / BUNDLE);
        let room = within.saturating_sub(u64::from(usage.warm));
        assert_eq!(u64::from(usage.cold), room, "{usage:?}");
        self.limit(usage.total, u64::MAX);
        let all = self.take(usage.total);
        assert_eq!(all.len(), PageId(usage.total).index(), "no page is lost");
        self.give(&all, After::NOTHING);
        self.retire(Epoch(u64::MAX));
        self.pages.trim().expect("nothing is in its way");
        assert_eq!(self.usage().warm, 0);
    }
}

/// Takes pages and gives them back, some of them in the order of epochs.
fn work(pool: &Pool, turns: u32) {
    let mut kept = Vec::new();
    for turn in 0..turns {
        let mine = pool.take(1 + below(4));
        let after = match below(3) {
            0 => After::DEVICE,
            epoch => After::epoch(Epoch(u64::from(turn + epoch))),
        };
        pool.give(&mine, after);
        if kept.is_empty() {
            kept = pool.take(1);
        }
    }
    pool.give(&kept, After::DEVICE);
}

/// What a background thread and an operator do.
fn keep(pool: &Pool, turns: u32) {
    for turn in 0..turns {
        // Errors are the mapper's, and the books hold them.
        match below(5) {
            0 => drop(pool.pages.replenish()),
            1 => drop(pool.pages.trim()),
            2 => pool.limit(below(8), u64::from(turn)),
            3 => pool.retire(Epoch(u64::from(below(4)))),
            _ => drop(pool.usage()),
        }
    }
}

/// A background thread alone.
fn replenish(pool: &Pool, turns: u32) {
    for _ in 0..turns {
        pool.pages.replenish().expect("nothing fails");
    }
}

/// A background thread that lets demands go first, as one does that looks after several pools.
fn keep_behind(pool: &Pool, turns: u32) {
    for _ in 0..turns {
        pool.turns.give_way();
        drop(pool.pages.replenish());
        pool.pages.tick();
    }
}

/// An operator alone.
fn limit_twice(pool: &Pool, revisions: [u64; 2]) {
    for revision in revisions {
        pool.limit(below(4), revision);
    }
}

/// What somebody does who sees to it that ranks come back.
fn mend(pool: &Pool, turns: u32) {
    for _ in 0..turns {
        match below(3) {
            0 => drop(pool.pages.repair()),
            1 => drop(pool.pages.health()),
            _ => drop(pool.pages.quarantined()),
        }
    }
}

fn repair(pool: &Pool, turns: u32) {
    for _ in 0..turns {
        pool.pages.repair().expect("nothing is in its way");
    }
}

/// Takes pages that nothing touches, and gives them back.
fn serve(pool: &Pool, turns: u32) {
    for _ in 0..turns {
        let mine = pool.take(1 + below(3));
        pool.give(&mine, After::NOTHING);
    }
}

/// Has memory come and go all the time.
fn come_and_go(pool: &Pool, turns: u32) {
    for _ in 0..turns {
        let mine = pool.take(2);
        pool.give(&mine, After::NOTHING);
        drop(pool.pages.trim());
    }
}

/// Once a fence is up, nothing is handed out until it falls; and once it fell, it stays so.
fn fence(pool: &Pool) {
    pool.board.suspect();
    assert!(pool.pages.health().is_fenced());
    pool.board.raised();
    assert_eq!(pool.pages.available(), 0);
    let mut none = Vec::new();
    let answer = pool.pages.alloc(1, &mut none);
    assert!(
        matches!(answer, Err(AllocError::Fenced { .. })),
        "{answer:?}"
    );
    pool.board.mended();
    pool.pages.repair().expect("nothing is in its way");
}

type Part = fn(&Pool);

/// All parts at once, each in a thread of its own, until all have ended.
fn at_once(pool: &Pool, parts: &[Part]) {
    let threads: Vec<_> = parts
        .iter()
        .map(|&part| {
            let pool = pool.clone();
            thread::spawn(move || part(&pool))
        })
        .collect();
    for thread in threads {
        thread.join().expect("no part fails");
    }
}

fn check(scenario: impl Fn() + Clone + Send + Sync + 'static) {
    shuttle::check_random(scenario.clone(), 6000);
    shuttle::check_pct(scenario, 3000, 3);
}

#[test]
fn a_page_has_one_owner_and_none_is_lost() {
    check(|| {
        let pool = Pool::new(6, 2, Some(12));
        at_once(
            &pool,
            &[
                |pool| work(pool, 3),
                |pool| work(pool, 3),
                |pool| keep(pool, 4),
                |pool| mend(pool, 3),
            ],
        );
        pool.settle();
    });
}

#[test]
fn nothing_is_handed_out_behind_a_fence_and_it_falls_for_good() {
    check(|| {
        let pool = Pool::new(6, 2, Some(8));
        at_once(
            &pool,
            &[
                |pool| work(pool, 2),
                |pool| keep(pool, 2),
                |pool| mend(pool, 2),
                fence,
            ],
        );
        // Whoever looked before it fell, and reports only then, does not raise it again.
        assert!(!pool.pages.is_fenced());
        pool.settle();
    });
}

#[test]
fn a_repair_lifts_what_it_asked_about_and_not_what_came_after() {
    check(|| {
        let pool = Pool::new(2, 2, Some(4));
        at_once(
            &pool,
            &[
                |pool| repair(pool, 2),
                |pool| repair(pool, 2),
                |pool| come_and_go(pool, 3),
            ],
        );
        pool.settle();
    });
}

#[test]
fn no_memory_goes_before_the_work_that_may_touch_it() {
    check(|| {
        let pool = Pool::new(4, 2, None);
        at_once(
            &pool,
            &[
                |pool| work(pool, 3),
                |pool| work(pool, 3),
                |pool| {
                    for epoch in 1..5 {
                        pool.retire(Epoch(epoch));
                        drop(pool.pages.replenish());
                    }
                },
                |pool| {
                    for revision in 1..4 {
                        pool.limit(below(4), revision);
                    }
                },
            ],
        );
        pool.settle();
    });
}

#[test]
fn the_newest_limit_is_kept_to_whoever_was_slow() {
    check(|| {
        let pool = Pool::new(4, 2, None);
        at_once(
            &pool,
            &[
                |pool| limit_twice(pool, [1, 4]),
                |pool| limit_twice(pool, [2, 3]),
                |pool| serve(pool, 2),
                |pool| replenish(pool, 2),
            ],
        );
        assert_eq!(pool.pages.limit().revision, 4);
        // Nothing fails, and nothing is in flight: what is idle above it went, whoever had it when
        // the limit came.
        assert_eq!(pool.pages.limit_status(), LimitStatus::Applied);
        pool.settle();
    });
}

/// Whoever gives way is woken, and what others left behind is done in the end.
#[test]
fn nobody_gives_way_for_ever_and_nothing_is_left_behind() {
    check(|| {
        let pool = Pool::with(6, 2, Some(12), Unmapping::Behind);
        at_once(
            &pool,
            &[
                |pool| work(pool, 2),
                |pool| work(pool, 2),
                |pool| keep_behind(pool, 3),
                |pool| limit_twice(pool, [1, 2]),
            ],
        );
        // A demand that was not counted back would hold this up for ever.
        pool.turns.give_way();
        pool.board.end_faults();
        pool.board.mended();
        pool.pages.repair().expect("nothing is in its way");
        pool.retire(Epoch(u64::MAX));
        while pool.pages.keep_to_limit().expect("nothing fails").unmapped > 0 {}
        assert_eq!(pool.pages.limit_status(), LimitStatus::Applied);
        while pool.pages.replenish().expect("nothing fails").more {}
        assert!(!pool.pages.is_due(), "{:?}", pool.usage());
        pool.settle();
    });
}

//! Several threads at once: while a call of the mapper is under way everybody else goes on.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use kvcached_mapper::testing::{Call, RecordingMapper};
use kvcached_mapper::{After, Epoch, Health, MapError, Mapper, PageId, PageRun, Readiness};
use kvcached_page_alloc::{
    AllocError, FullReason, Limit, LimitStatus, PageAllocator, PageAllocatorConfig, PageState,
    Reserve,
};

use crate::support::{BUNDLE, Pool, assert_adds_up, doubtful, full, ids, refused};

/// A call that waits until a test lets it go on.
struct Gate {
    entered: Receiver<()>,
    go: Sender<()>,
}

/// The other side of a [`Gate`].
struct Stop {
    entered: Sender<()>,
    go: Mutex<Receiver<()>>,
}

fn gate() -> (Gate, Stop) {
    let ((entered_tx, entered), (go, go_rx)) = (channel(), channel());
    (
        Gate { entered, go },
        Stop {
            entered: entered_tx,
            go: Mutex::new(go_rx),
        },
    )
}

/// Far beyond anything that happens here: a bound for the day it fails.
const BOUND: Duration = Duration::from_secs(20);

impl Gate {
    fn wait(&self) {
        self.entered
            .recv_timeout(BOUND)
            .expect("somebody stops at the gate");
    }

    fn open(&self) {
        self.go.send(()).expect("somebody waits at the gate");
    }
}

impl Stop {
    fn wait(&self) {
        self.entered.send(()).expect("the test is there");
        self.go
            .lock()
            .expect("one at a time")
            .recv_timeout(BOUND)
            .expect("the gate is opened");
    }
}

/// Stops the next call of that kind, and no other.
fn stop_next(pool: &Pool, which: Call) -> Gate {
    let (gate, stop) = gate();
    let armed = AtomicBool::new(true);
    pool.during_calls(move |_, call, _| {
        if call == which && armed.swap(false, Ordering::Relaxed) {
            stop.wait();
        }
        Ok(())
    });
    gate
}

#[test]
fn pages_that_are_being_mapped_are_never_handed_out_and_nobody_waits_for_them() {
    let pool = Pool::new(8);
    let early = pool.take(2);
    let gate = stop_next(&pool, Call::Map);
    thread::scope(|scope| {
        let slow = scope.spawn(|| pool.take(4));
        gate.wait();
        assert_eq!((pool.usage().busy, pool.pages.available()), (4, 2));
        assert_eq!(pool.pages.state(PageId(2)), Some(PageState::Busy));
        // Everything goes on beside the call.
        let others = pool.take(2);
        assert_eq!(others, ids([6, 7]));
        assert_eq!(pool.alloc(1), Err(AllocError::Full(FullReason::Busy)));
        assert!(pool.pages.free(&ids([2])).is_err());
        pool.free(&early);
        assert_eq!(pool.pages.trim(), Ok(2));
        pool.pages.replenish().expect("no faults");
        pool.limit(7, 1);
        assert_eq!(pool.take(1), ids([0]));
        assert_eq!(pool.pages.available(), 0);
        gate.open();
        assert_eq!(slow.join().expect("it succeeds"), ids(2..6));
    });
    assert_eq!((pool.usage().used, pool.usage().withheld), (7, 1));
    pool.assert_books_agree();
}

#[test]
fn pages_that_are_being_unmapped_are_never_handed_out_and_nobody_waits_for_them() {
    let pool = Pool::new(8);
    let (idle, kept) = (pool.take(4), pool.take(2));
    pool.free(&idle);
    let gate = stop_next(&pool, Call::Unmap);
    thread::scope(|scope| {
        let slow = scope.spawn(|| pool.pages.trim());
        gate.wait();
        assert_eq!((pool.usage().busy, pool.usage().runs), (4, 2));
        assert_eq!(pool.take(2), ids([6, 7]));
        assert_eq!(pool.alloc(1), Err(AllocError::Full(FullReason::Busy)));
        assert_eq!(pool.pages.trim(), Ok(0), "a run is taken away once");
        pool.free(&kept);
        gate.open();
        assert_eq!(slow.join().expect("it does not panic"), Ok(4));
    });
    assert_eq!((pool.usage().cold, pool.usage().warm), (4, 2));
    pool.assert_books_agree();
}

#[test]
fn a_limit_during_a_shrink_unmaps_no_more_than_both_ask_for() {
    let pool = Pool::new(12);
    let pages: Vec<_> = (0..12).flat_map(|_| pool.take(1)).collect();
    pool.free(&pages);
    let gate = stop_next(&pool, Call::Unmap);
    thread::scope(|scope| {
        let slow = scope.spawn(|| pool.limit(8, 1));
        gate.wait();
        // Four pages are on their way already; one more is to go.
        let status = pool.pages.set_limit(Limit {
            bytes: 7 * BUNDLE,
            revision: 2,
        });
        let excess_bytes = 4 * BUNDLE;
        assert_eq!(
            status,
            Ok(LimitStatus::Deferred { excess_bytes }),
            "they are still there"
        );
        assert_eq!(pool.usage().warm, 7);
        gate.open();
        slow.join().expect("it does not panic");
    });
    assert_eq!(pool.pages.limit_status(), LimitStatus::Applied);
    assert_eq!(pool.mapped(), 7);
    pool.assert_books_agree();
}

#[test]
fn a_limit_that_comes_while_pages_are_mapped_is_deferred_and_they_go_to_their_owner() {
    let pool = Pool::new(8);
    let gate = stop_next(&pool, Call::Map);
    thread::scope(|scope| {
        let slow = scope.spawn(|| pool.take(6));
        gate.wait();
        let status = pool.pages.set_limit(Limit {
            bytes: 2 * BUNDLE,
            revision: 1,
        });
        assert_eq!(
            status,
            Ok(LimitStatus::Deferred {
                excess_bytes: 4 * BUNDLE
            })
        );
        gate.open();
        let pages = slow.join().expect("it does not panic");
        assert_eq!(
            pool.pages.limit_status(),
            LimitStatus::Deferred {
                excess_bytes: 4 * BUNDLE
            }
        );
        pool.free(&pages);
    });
    assert_eq!(
        (pool.pages.limit_status(), pool.mapped()),
        (LimitStatus::Applied, 0)
    );
    pool.assert_books_agree();
}

/// A mapper that takes its time to tell its headroom.
#[derive(Debug)]
struct SlowHeadroom {
    inner: RecordingMapper,
    stop: Mutex<Stop>,
}

impl Mapper for SlowHeadroom {
    fn map(&self, runs: &[PageRun]) -> Result<(), MapError> {
        self.inner.map(runs)
    }
    fn unmap_after(&self, runs: &[PageRun], _: After) -> Result<(), MapError> {
        self.inner.unmap(runs)
    }
    fn headroom(&self) -> Option<u32> {
        self.stop.lock().expect("one at a time").wait();
        None
    }
    fn ready(&self) -> Result<Readiness, MapError> {
        self.inner.ready()
    }
}

impl std::fmt::Debug for Stop {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Stop")
    }
}

#[test]
fn a_slow_driver_query_does_not_delay_the_frees_of_others() {
    let (gate, stop) = gate();
    let mapper = SlowHeadroom {
        inner: RecordingMapper::new(20),
        stop: Mutex::new(stop),
    };
    let config = PageAllocatorConfig {
        reserve: Reserve { min: 4, max: 8 },
        ..PageAllocatorConfig::new(20, BUNDLE)
    };
    let pages = PageAllocator::new(config, Arc::new(mapper)).expect("a good config");
    thread::scope(|scope| {
        let mut mine = Vec::new();
        pages.alloc(6, &mut mine).expect("there are pages");
        let slow = scope.spawn(|| pages.replenish().expect("no faults"));
        gate.wait();
        pages.free(&mine[..3]).expect("pages in use");
        pages.alloc(10, &mut mine).expect("there are pages");
        pages.free(&mine[3..6]).expect("pages in use");
        assert_eq!(pages.usage().busy, 0);
        gate.open();
        // What was freed meanwhile is counted: only two pages are missing from a target of five.
        assert_eq!(slow.join().expect("it does not panic").mapped, 2);
    });
    let usage = pages.usage();
    assert_eq!((usage.warm, usage.reserve_target), (5, 5));
}

#[test]
fn the_lock_is_never_held_across_a_mapper_call() {
    // Every method from inside every kind of call: a held lock would be a deadlock.
    let pool = Pool::with_reserve(400, 10, 20);
    let calls = Arc::new(Mutex::new(Vec::new()));
    let inside = AtomicBool::new(false);
    let seen = Arc::clone(&calls);
    pool.during_calls(move |pages, call, runs| {
        seen.lock().expect("no test panicked").push(call);
        assert_adds_up(&pages.usage());
        assert!(
            runs.iter()
                .flat_map(|run| run.pages())
                .all(|page| { pages.state(page) == Some(PageState::Busy) })
        );
        if !inside.swap(true, Ordering::Relaxed) {
            let mut mine = Vec::new();
            assert!(pages.available() > 0);
            pages.alloc(30, &mut mine).expect("there are pages");
            pages.free(&mine).expect("pages in use");
            pages.replenish().expect("no faults");
            pages.trim().expect("no faults");
            let limit = Limit {
                bytes: 390 * BUNDLE,
                revision: pages.limit().revision + 1,
            };
            pages.set_limit(limit).expect("there is no floor");
            pages.limit_status();
            pages.quarantined();
            pages.retire(Epoch(1));
            pages.health();
            pages.repair().expect("no faults");
            inside.store(false, Ordering::Relaxed);
        }
        Ok(())
    });
    let mine = pool.take(20);
    pool.pages.replenish().expect("no faults");
    pool.free(&mine);
    pool.pages.trim().expect("no faults");
    let kinds = calls.lock().expect("no test panicked").clone();
    assert!(kinds.contains(&Call::Map) && kinds.contains(&Call::Unmap));
    pool.assert_books_agree();
}

/// Random numbers of one thread.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u32) -> u32 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        u32::try_from(self.0 >> 33).expect("31 bits") % bound
    }
}

#[test]
fn threads_that_hammer_a_failing_pool_leave_books_that_agree() {
    const PAGES: u32 = 500;
    const WORKERS: u64 = 4;
    let pool = Pool::with_reserve(PAGES, 20, 60);
    let calls = AtomicU64::new(0);
    let well = Arc::new(AtomicBool::new(false));
    let healed = Arc::clone(&well);
    pool.during_calls(move |pages, _, runs| {
        assert_adds_up(&pages.usage());
        if healed.load(Ordering::Relaxed) {
            return Ok(());
        }
        match Random(calls.fetch_add(1, Ordering::Relaxed)).below(200) {
            0..20 => Err(full()),
            20..40 => Err(refused()),
            40 => Err(doubtful(vec![runs[0]])),
            _ => Ok(()),
        }
    });
    let epoch = AtomicU64::new(0);
    let owned: Vec<AtomicBool> = (0..PAGES).map(|_| AtomicBool::new(false)).collect();
    let work = |seed: u64| {
        let mut random = Random(seed);
        let mut mine: Vec<PageId> = Vec::new();
        for _ in 0..4000 {
            if random.below(2) == 0 {
                let before = mine.len();
                if pool.pages.alloc(random.below(40), &mut mine).is_err() {
                    assert_eq!(mine.len(), before, "all or nothing");
                }
                for page in &mine[before..] {
                    let taken = owned[page.index()].swap(true, Ordering::Relaxed);
                    assert!(!taken, "{page} has two owners");
                }
            } else if !mine.is_empty() {
                let n = usize::try_from(random.below(80))
                    .expect("small")
                    .min(mine.len());
                let back: Vec<PageId> = (0..n)
                    .map(|_| {
                        let left = u32::try_from(mine.len()).expect("small");
                        mine.swap_remove(PageId(random.below(left)).index())
                    })
                    .collect();
                for page in &back {
                    owned[page.index()].store(false, Ordering::Relaxed);
                }
                // What is launched after the last free of a page is not about it.
                let after = After::epoch(Epoch(epoch.load(Ordering::Relaxed)));
                pool.pages.free_after(&back, after).expect("pages in use");
            }
        }
        mine
    };
    let kept: Vec<PageId> = thread::scope(|scope| {
        let workers: Vec<_> = (0..WORKERS)
            .map(|seed| scope.spawn(move || work(seed)))
            .collect();
        scope.spawn(|| {
            let mut random = Random(77);
            for revision in 1..2000 {
                pool.limit(random.below(PAGES + 50), revision);
            }
        });
        scope.spawn(|| {
            for turn in 0..2000 {
                // Errors are the mapper's, and the books hold them.
                let _ = pool.pages.replenish();
                if turn % 10 == 0 {
                    let _ = pool.pages.trim();
                }
                if turn % 30 == 0 {
                    pool.pages
                        .retire(Epoch(epoch.fetch_add(1, Ordering::Relaxed)));
                    let ranks = pool.fence();
                    assert!(pool.pages.health().is_fenced());
                    // Nobody else repairs, so it stays so, whoever looks meanwhile.
                    let fenced = AllocError::Fenced { ranks };
                    assert_eq!(pool.alloc(1), Err(fenced.clone()));
                    assert_eq!(pool.pages.alloc_first(), Err(fenced));
                    pool.mapper.set_health(Health::Healthy);
                    pool.pages.repair().expect("nothing is in its way");
                }
                pool.usage();
                assert!(pool.pages.available() <= PAGES);
            }
        });
        workers
            .into_iter()
            .flat_map(|worker| worker.join().expect("no panic"))
            .collect()
    });
    well.store(true, Ordering::Relaxed);
    pool.pages.repair().expect("nothing is in its way");
    assert_eq!(pool.pages.quarantined(), []);
    pool.assert_books_agree();
    assert_eq!(pool.usage().used as usize, kept.len());
    pool.free(&kept);
    pool.limit(PAGES, u64::MAX);
    assert_eq!(
        pool.pages.available(),
        PAGES,
        "the whole pool survives: {:?}",
        pool.usage()
    );
    let all = pool.take(PAGES);
    pool.free(&all);
    pool.pages.trim().expect("the mapper is well again");
    assert_eq!(pool.mapped(), 0);
    pool.assert_books_agree();
}

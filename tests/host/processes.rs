//! A scheduler and its ranks, each in a process of its own, through the faults a machine has.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use kvcached_integrations::{Pool, Scheduler};
use kvcached_manager::{AllocError, BlockId, Limit};
use kvcached_mapper::{Layout, Rank, Stage};
use kvcached_tp_ipc::Deadline;
use kvcached_vmm::{Host, HostConfig};

use crate::ranks::{POOL, Place, WorkerProcess, folder, scheduler};

const DEVICE: &str = "host:268435456";

/// An engine with a scheduler of its own, and its ranks.
fn separate(folder: &Path, name: &str, tp: u16, stages: u16) -> (Scheduler, Vec<WorkerProcess>) {
    let layout = Layout::Contiguous;
    let places = (0..stages).flat_map(|stage| (0..tp).map(move |rank| (stage, rank)));
    let workers: Vec<_> = places
        .map(|place| WorkerProcess::start(folder, name, place, DEVICE, layout))
        .collect();
    let scheduler = scheduler::<Host>(folder, name, Place::Separate(tp, stages), layout, None);
    (scheduler.expect("all ranks listen"), workers)
}

fn pool(scheduler: &Scheduler) -> &Pool {
    scheduler.pool(POOL).expect("the one pool")
}

/// Mixed hand-outs and returns, in an order that a seed decides.
fn churn(pool: &Pool, mut seed: u64, mut after_each: impl FnMut()) {
    let mut held: Vec<Vec<BlockId>> = Vec::new();
    for _ in 0..60 {
        seed = seed
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        let roll = (seed >> 33) % 30;
        if roll < 12 && !held.is_empty() {
            let at = usize::try_from(roll).expect("small") % held.len();
            pool.free(&held.swap_remove(at)).expect("handed out before");
        } else if let Ok(blocks) = pool.alloc(u32::try_from(roll).expect("small")) {
            held.push(blocks);
        }
        if roll == 29 {
            pool.trim().expect("every rank is there");
        }
        after_each();
    }
}

#[test]
fn every_rank_of_every_stage_has_the_same_pages_after_each_step() {
    for (tp, stages) in [(1, 1), (2, 1), (2, 2), (4, 1)] {
        let folder = folder();
        let (scheduler, mut workers) = separate(folder.path(), "engine", tp, stages);
        churn(pool(&scheduler), u64::from(tp * 16 + stages), || {
            let first = workers[0].mapped();
            assert!(
                first.starts_with("0+"),
                "the null page is always there: {first}"
            );
            for worker in &mut workers[1..] {
                assert_eq!(worker.mapped(), first, "{}, {}", worker.stage, worker.rank);
            }
        });
        drop(scheduler);
        for worker in &mut workers {
            assert_eq!(worker.mapped(), "", "everything went back");
        }
    }
}

#[test]
fn rank_0_coordinates_without_a_listener_and_all_layouts_agree() {
    for layout in [Layout::Contiguous, Layout::Unified, Layout::PerLayer] {
        let folder = folder();
        let mut workers: Vec<_> = (1..3)
            .map(|rank| WorkerProcess::start(folder.path(), "engine", (0, rank), DEVICE, layout))
            .collect();
        let device = Arc::new(Host::new(HostConfig::new(256 << 20)).expect("a device"));
        let scheduler = scheduler(
            folder.path(),
            "engine",
            Place::Rank0(3),
            layout,
            Some(device),
        )
        .expect("ready");
        assert!(
            !folder.path().join("engine/s0-r0.sock").exists(),
            "rank 0 listens to nobody"
        );
        churn(pool(&scheduler), 7, || {
            let first = workers[0].mapped();
            assert_eq!(workers[1].mapped(), first);
            let pages: u64 = first
                .split_whitespace()
                .map(|run| {
                    run.split_once('+')
                        .expect("first+count")
                        .1
                        .parse::<u64>()
                        .expect("count")
                })
                .sum();
            let usage = pool(&scheduler).usage().pages;
            assert_eq!(
                pages * pool(&scheduler).geometry().bundle_bytes(),
                usage.mapped_bytes
            );
        });
    }
}

#[test]
fn a_rank_that_is_full_makes_the_pool_full_and_nothing_else() {
    let folder = folder();
    // Rank 1 has room for ten pages; rank 0 for all.
    let layout = Layout::Contiguous;
    let devices = [DEVICE, "host:20971520"];
    let mut workers: Vec<_> = (0..2)
        .zip(devices)
        .map(|(rank, device)| WorkerProcess::start(folder.path(), "e", (0, rank), device, layout))
        .collect();
    let scheduler =
        scheduler::<Host>(folder.path(), "e", Place::Separate(2, 1), layout, None).expect("ready");
    let pool = pool(&scheduler);
    let first = pool.alloc(6).expect("seven pages with the null page");
    let before = [workers[0].mapped(), workers[1].mapped()];
    let free_before = workers[0].free_bytes();
    for _ in 0..5 {
        assert!(
            matches!(pool.alloc(8), Err(AllocError::Full { .. })),
            "rank 1 has three pages left"
        );
        assert_eq!(
            [workers[0].mapped(), workers[1].mapped()],
            before,
            "undone everywhere"
        );
        pool.trim().expect("all are there");
        assert_eq!(
            workers[0].free_bytes(),
            free_before,
            "nothing is left on the rank that did it"
        );
    }
    assert_eq!(pool.usage().pages.quarantined, 0);
    pool.free(&first).expect("handed out before");
    pool.alloc(9).expect("as many as rank 1 has room for");
}

#[test]
fn what_ranks_keep_to_use_again_goes_back_by_itself_and_at_once_on_a_trim() {
    let folder = folder();
    let (scheduler, mut workers) = separate(folder.path(), "e", 2, 1);
    let pool = pool(&scheduler);
    let mut free = || {
        workers
            .iter_mut()
            .map(WorkerProcess::free_bytes)
            .sum::<u64>()
    };
    let at_rest = free();
    let mut revision = 0;
    let mut limit = |bytes| {
        revision += 1;
        let status = pool.set_limit(Limit { bytes, revision });
        status.expect("there is no floor");
    };

    // Memory of idle pages above the limit goes, and nobody says another word to the ranks.
    let blocks = pool.alloc(8).expect("there is room");
    pool.free(&blocks).expect("handed out before");
    limit(pool.geometry().bundle_bytes());
    assert_eq!(pool.usage().pages.warm, 0);
    let end = Deadline::after(Duration::from_secs(60));
    while free() != at_rest {
        assert!(!end.is_over(), "it is kept for ever");
    }

    limit(u64::MAX);
    let blocks = pool.alloc(8).expect("there is room");
    pool.free(&blocks).expect("handed out before");
    assert!(free() < at_rest);
    pool.trim().expect("all are there");
    assert_eq!(free(), at_rest);
}

#[test]
fn a_killed_rank_is_named_and_its_pages_are_not_used_again() {
    let folder = folder();
    let (scheduler, mut workers) = separate(folder.path(), "engine", 3, 1);
    let pool = pool(&scheduler);
    let held = pool.alloc(4).expect("ready");
    workers[2].kill();
    let error = pool.alloc(4).expect_err("one rank is gone");
    let AllocError::Broken(error) = error else {
        panic!("broken, not full: {error}")
    };
    assert!(error.to_string().contains("stage 0, rank 2"), "{error}");
    // The ranks that are left agree, whatever was in doubt.
    assert_eq!(workers[0].mapped(), workers[1].mapped());
    // What is in use stays in use, and freeing it is not lost.
    pool.free(&held).expect("handed out before");
    assert!(
        matches!(pool.alloc(64), Err(AllocError::Fenced { .. })),
        "nothing is begun any more"
    );
    // A process of the same name finds the dead one's socket and replaces it.
    drop(scheduler);
    drop(workers.pop());
    let layout = Layout::Contiguous;
    workers.push(WorkerProcess::start(
        folder.path(),
        "engine",
        (0, 2),
        DEVICE,
        layout,
    ));
}

#[test]
fn ranks_that_do_not_come_are_named_all_at_once() {
    let folder = folder();
    let layout = Layout::Contiguous;
    let _worker = WorkerProcess::start(folder.path(), "engine", (0, 1), DEVICE, layout);
    let error = scheduler::<Host>(folder.path(), "engine", Place::Separate(3, 1), layout, None)
        .expect_err("two ranks are missing")
        .to_string();
    for part in ["rank 0", "rank 2", "s0-r0.sock", "s0-r2.sock"] {
        assert!(error.contains(part), "{part} is not in: {error}");
    }
    assert!(!error.contains("rank 1"), "rank 1 is there: {error}");
}

#[test]
fn a_rank_with_another_geometry_is_refused_at_once() {
    let folder = folder();
    let _worker = WorkerProcess::start(folder.path(), "engine", (0, 0), DEVICE, Layout::PerLayer);
    let layout = Layout::Contiguous;
    let error = scheduler::<Host>(folder.path(), "engine", Place::Separate(1, 1), layout, None)
        .expect_err("pages would not mean the same");
    assert!(error.to_string().contains("rank 0"), "{error}");
}

#[test]
fn two_engines_on_one_machine_do_not_meet() {
    let folder = folder();
    let (one, mut one_workers) = separate(folder.path(), "a-b", 2, 1);
    let (two, mut two_workers) = separate(folder.path(), "a_b", 2, 1);
    let blocks = pool(&one).alloc(20).expect("ready");
    assert_eq!(two_workers[0].mapped(), "0+1", "only its own null page");
    pool(&two).alloc(3).expect("ready");
    pool(&one).free(&blocks).expect("handed out before");
    pool(&one).trim().expect("every rank is there");
    assert_eq!(one_workers[1].mapped(), "0+1");
    assert_eq!(two_workers[1].mapped(), two_workers[0].mapped());
}

#[test]
fn workers_take_their_sockets_away() {
    let folder = folder();
    let (scheduler, workers) = separate(folder.path(), "engine", 2, 2);
    assert_eq!((workers[3].stage, workers[3].rank), (Stage(1), Rank(1)));
    drop(scheduler);
    drop(workers);
    assert!(
        !folder.path().join("engine").exists(),
        "the last one takes the directory too"
    );
}

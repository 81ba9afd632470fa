//! What outlives a process: nothing that it held, and what it had mapped elsewhere only so long.

use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::time::Duration;

use kvcached_tp_ipc::Deadline;
use nix::sys::signal::Signal;

use crate::crew::{DEVICE_BYTES, Engine, PAGE_BYTES, Process, RECOVERY, order, pass, within};
use crate::strike::{Call, Point, Stroke};

const ORPHAN_TIMEOUT: Duration = Duration::from_millis(400);

fn orphaned_soon() -> Engine {
    Engine {
        orphan_timeout: ORPHAN_TIMEOUT,
        ..Engine::new()
    }
}

#[test]
fn what_a_dead_coordinator_had_mapped_is_released_after_its_time_and_the_next_one_is_served() {
    let engine = orphaned_soon();
    let mut ranks = engine.ranks();
    for _ in 0..3 {
        let mut coordinator = engine.coordinator();
        coordinator.alloc(30);
        let mapped = ranks[0].told("mapped");
        let not_yet = Deadline::after(ORPHAN_TIMEOUT);
        coordinator.kill();
        for rank in &mut ranks {
            within(
                ORPHAN_TIMEOUT + RECOVERY,
                "an orphan releases everything",
                || {
                    let free = rank.memory();
                    let has = rank.told("mapped");
                    if free == DEVICE_BYTES && has.is_empty() {
                        return Some(());
                    }
                    assert!(not_yet.is_over() || has == mapped, "{has} of {mapped}");
                    None
                },
            );
            assert!(not_yet.is_over(), "it comes back, perhaps");
        }
    }
    let mut coordinator = engine.coordinator();
    let held = coordinator.alloc(30);
    assert_eq!(ranks[1].told("mapped"), ranks[0].told("mapped"));
    assert_eq!(coordinator.told(&order("free", &held)), "freed");
    coordinator.end();
    ranks.into_iter().for_each(Process::end);
}

#[test]
fn a_rank_struck_while_it_releases_what_nobody_came_for_is_served_all_the_same() {
    for point in [Point::Before(Call::Resync), Point::After(Call::Resync)] {
        for stroke in [Stroke::Die, Stroke::Stop] {
            let row = format!("{point}, {stroke}");
            let engine = orphaned_soon();
            let mut ranks = engine.ranks();
            let mut coordinator = engine.coordinator();
            coordinator.alloc(30);
            ranks[0].told(&format!("strike {point} {stroke}"));
            coordinator.kill();
            let mut next = engine.gated_coordinator();
            match stroke {
                Stroke::Die => {
                    assert_eq!(ranks[0].ended().signal(), Some(9), "{row}");
                    ranks[0] = engine.rank(0);
                    next.tell("begin");
                }
                _ => {
                    ranks[0].stopped();
                    next.tell("begin");
                    ranks[0].signal(Signal::SIGCONT);
                }
            }
            let mut next = next.ready().expect(&row);
            for rank in &mut ranks {
                assert_eq!(rank.told("mapped"), "0+1", "{row}");
            }
            assert_eq!(next.alloc(30).len(), 30, "{row}");
            assert_eq!(ranks[1].told("mapped"), ranks[0].told("mapped"), "{row}");
            next.end();
            assert_eq!(ranks[0].memory(), DEVICE_BYTES, "{row}");
            ranks.into_iter().for_each(Process::end);
        }
    }
}

/// Its connections are there, however long it says nothing.
#[test]
fn a_coordinator_that_is_only_stopped_finds_everything_as_it_was() {
    let engine = orphaned_soon();
    let mut ranks = engine.ranks();
    let mut coordinator = engine.coordinator();
    let held = coordinator.alloc(9);
    for rank in &mut ranks {
        rank.told(&order("write", &held));
    }
    let mapped = ranks[0].told("mapped");
    coordinator.signal(Signal::SIGSTOP);
    coordinator.stopped();
    pass(ORPHAN_TIMEOUT * 2);
    assert_eq!(ranks[0].told("mapped"), mapped);
    coordinator.signal(Signal::SIGCONT);
    assert_eq!(coordinator.alloc(6).len(), 6);
    assert_eq!(coordinator.told("health"), "healthy");
    assert_eq!(coordinator.told("lost"), "0");
    for rank in &mut ranks {
        assert_eq!(rank.told(&order("holds", &held)), "true", "{}", rank.name);
    }
    coordinator.end();
    ranks.into_iter().for_each(Process::end);
}

#[test]
fn after_everything_was_killed_an_engine_starts_again_as_if_nothing_had_been() {
    let engine = Engine::new();
    let mut ranks = engine.ranks();
    let mut coordinator = engine.coordinator();
    for life in 0..20 {
        // In every order, at rest and amid a map.
        let held = coordinator.alloc(9);
        if life % 2 == 0 {
            coordinator.tell("alloc 40");
        } else {
            coordinator.tell(&order("free", &held));
        }
        if life % 4 < 2 {
            coordinator.murder();
            ranks.iter_mut().for_each(Process::murder);
        } else {
            ranks.iter_mut().for_each(Process::murder);
            coordinator.murder();
        }
        assert!(engine.endpoint(0).exists(), "nobody could take it away");
        let bound = Deadline::after(RECOVERY);
        ranks = engine.ranks();
        coordinator = engine.coordinator();
        assert!(!bound.is_over(), "life {life}");
        for rank in &mut ranks {
            assert_eq!(rank.told("mapped"), "0+1", "life {life}: {}", rank.name);
        }
        let left = fs::read_dir(engine.directory()).expect("the sockets are there");
        assert_eq!(left.count(), ranks.len(), "life {life}");
    }
    coordinator.end();
    ranks.into_iter().for_each(Process::end);
    let left = fs::read_dir(engine.folder.path()).expect("a folder of this test");
    assert_eq!(left.count(), 0, "not even the directory");
}

#[test]
fn memory_goes_back_while_a_rank_is_away_and_the_rank_comes_back_without_it() {
    let engine = Engine::new();
    let mut ranks = engine.ranks();
    let mut coordinator = engine.coordinator();
    let kept = coordinator.alloc(9);
    let given_back = coordinator.alloc(40);
    ranks[1].told(&order("write", &kept));
    let all = ranks[1].memory();
    ranks[0].kill();
    within(RECOVERY, "the rank is missed", || {
        let health = coordinator.told("health");
        health.starts_with("fenced").then_some(())
    });
    assert_eq!(coordinator.told(&order("free", &given_back)), "freed");
    let trimmed = coordinator.told("trim");
    assert_eq!(trimmed, "10", "nothing else is on these pages");
    assert_eq!(ranks[1].memory(), all + 10 * PAGE_BYTES);
    assert!(coordinator.told("health").starts_with("fenced"));
    ranks[0] = engine.rank(0);
    within(RECOVERY, "every rank is known again", || {
        let known = coordinator.told("health") == "healthy";
        (known && coordinator.told("lost") != "0").then_some(())
    });
    assert_eq!(coordinator.told("lost"), "1");
    assert_eq!(ranks[0].told("mapped"), ranks[1].told("mapped"));
    assert_eq!(ranks[1].told(&order("holds", &kept)), "true");
    coordinator.end();
    ranks.into_iter().for_each(Process::end);
}

#[test]
fn a_rank_that_dies_again_and_again_before_it_is_known_is_one_loss() {
    let engine = Engine::new();
    let mut ranks = engine.ranks();
    let mut coordinator = engine.coordinator();
    let held = coordinator.alloc(9);
    ranks[1].told(&order("write", &held));
    ranks[0].kill();
    for life in 0..6 {
        let point = match life % 2 {
            0 => Point::Before(Call::Resync),
            _ => Point::After(Call::Resync),
        };
        let words = [point.to_string(), Stroke::Die.to_string()];
        ranks[0] = engine.rank_that_strikes(0, &words);
        assert_eq!(ranks[0].ended().signal(), Some(9), "life {life}");
        // Not at once: it may still be amid the attempt that brought this one's end.
        within(RECOVERY, "the rank is missed", || {
            let health = coordinator.told("health");
            health.starts_with("fenced").then_some(())
        });
    }
    ranks[0] = engine.rank(0);
    within(RECOVERY, "every rank is known again", || {
        let known = coordinator.told("health") == "healthy";
        (known && coordinator.told("lost") != "0").then_some(())
    });
    assert_eq!(coordinator.told("lost"), "1");
    assert_eq!(ranks[0].told("mapped"), ranks[1].told("mapped"));
    assert_eq!(ranks[1].told(&order("holds", &held)), "true");
    coordinator.end();
    ranks.into_iter().for_each(Process::end);
}

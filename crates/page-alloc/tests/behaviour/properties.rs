//! What holds after any operation, whatever failed on the way.

use std::collections::BTreeSet;

use kvcached_mapper::{After, PageId, PageRun};
use kvcached_page_alloc::{
    AllocError, FreeError, FullReason, Limit, LimitStatus, PageState, Reserve,
};
use proptest::prelude::*;

use crate::drive::{Drive, Mend, Op, Outcome, config, steps, steps_without_faults};
use crate::ranks::Found;
use crate::support::BUNDLE;

proptest! {
    #[test]
    fn no_page_is_lost_or_shared(config in config(), steps in steps()) {
        let mut drive = Drive::new(config.clone());
        for step in &steps {
            let owned = drive.owned.clone();
            let seen = drive.step(step);
            if let Outcome::Alloc(Ok(pages)) = &seen.outcome {
                let fresh: BTreeSet<PageId> = pages.iter().copied().collect();
                prop_assert_eq!(fresh.len(), pages.len(), "a page is given once in a call");
                prop_assert!(fresh.is_disjoint(&owned), "a page has one owner");
                prop_assert!(fresh.iter().all(|page| !config.void.contains(page)));
            }
            drive.pool.assert_books_agree();
            for page in (0..config.pages).map(PageId) {
                let used = drive.pool.pages.state(page) == Some(PageState::Used);
                prop_assert_eq!(used, drive.owned.contains(&page), "{}", page);
            }
        }
        // Nothing is lost: all that is not void can be had, once the ranks are well again and all is
        // given back.
        let found = |_| Found::Cold;
        drive.repair(Mend::Works { found, lost: false }).expect("it works");
        prop_assert_eq!(drive.pool.pages.quarantined(), []);
        prop_assert!(!drive.pool.pages.is_fenced());
        drive.pool.mapper.set_in_flight(false);
        let owned: Vec<PageId> = drive.owned.iter().copied().collect();
        drive.pool.free(&owned);
        drive.pool.limit(config.pages, u64::MAX);
        let usage = drive.pool.usage();
        prop_assert_eq!(drive.pool.pages.available(), usage.total - usage.void);
        let all = drive.pool.take(drive.pool.pages.available());
        let distinct: BTreeSet<PageId> = all.iter().copied().collect();
        prop_assert_eq!(distinct.len(), all.len());
        drive.pool.free(&all);
        drive.pool.pages.trim().expect("no more faults");
        prop_assert_eq!(drive.pool.mapped(), 0);
    }

    #[test]
    fn no_page_id_is_handed_out_twice(
        limits in prop::collection::vec((0u32..40, 0u32..40, 0usize..40), 1..30),
    ) {
        // Grow and shrink in any sequence, taking what can be had and giving some back.
        let mut drive = Drive::new(kvcached_page_alloc::PageAllocatorConfig::new(30, BUNDLE));
        for (revision, (pages, want, give)) in (1..).zip(limits) {
            drive.pool.limit(pages, revision);
            let n = want.min(drive.pool.pages.available());
            for page in drive.pool.take(n) {
                prop_assert!(drive.owned.insert(page), "{} has an owner already", page);
            }
            let back: Vec<PageId> = drive.owned.iter().copied().take(give).collect();
            drive.pool.free(&back);
            drive.owned.retain(|page| !back.contains(page));
        }
    }

    #[test]
    fn counts_add_up_in_every_snapshot(config in config(), steps in steps()) {
        // The drive looks from inside every call of the mapper as well.
        let mut drive = Drive::new(config);
        for step in &steps {
            let seen = drive.step(step);
            let (before, after) = (seen.before, seen.after);
            prop_assert_eq!(after.busy, 0);
            prop_assert_eq!((after.total, after.void), (before.total, before.void));
            let repaired = after.repaired_total - before.repaired_total;
            let doubted = u64::from(after.quarantined) + repaired - u64::from(before.quarantined);
            let warmed = match &seen.outcome {
                Outcome::Repair(Ok(repaired)) => u64::from(repaired.warm),
                _ => 0,
            };
            let mapped = after.mapped_total - before.mapped_total;
            let unmapped = after.unmapped_total - before.unmapped_total;
            let backed = |usage: &kvcached_page_alloc::PageUsage| u64::from(usage.warm + usage.used);
            if !seen.faulty {
                prop_assert_eq!(doubted, 0);
                prop_assert_eq!(backed(&before) + mapped + warmed - unmapped, backed(&after));
            }
            prop_assert_eq!(after.runs_mapped_total, drive.pool.mapper.runs_mapped());
        }
    }

    #[test]
    fn a_limit_is_never_exceeded_by_growth(config in config(), steps in steps()) {
        let mut drive = Drive::new(config);
        for step in &steps {
            let seen = drive.step(step);
            let after = seen.after;
            let held = after.used + after.quarantined;
            if seen.mapped {
                prop_assert!(held + after.warm <= drive.limit_pages(), "{:?}", seen);
            }
            if after.used > seen.before.used {
                prop_assert!(held <= drive.limit_pages(), "{:?}", seen);
            }
        }
    }

    #[test]
    fn deferred_is_reported_until_applied(config in config(), steps in steps()) {
        let mut drive = Drive::new(config);
        for step in &steps {
            let seen = drive.step(step);
            let after = seen.after;
            // What the mapper knows, not what the allocator says.
            let in_doubt: u32 = drive.pool.mapper.in_doubt().iter().map(|run| run.count()).sum();
            let backed = u64::from(drive.pool.mapped() + in_doubt) * BUNDLE;
            let expected = match backed.checked_sub(drive.limit.bytes) {
                None | Some(0) => LimitStatus::Applied,
                Some(excess_bytes) => LimitStatus::Deferred { excess_bytes },
            };
            prop_assert_eq!(after.limit_status, expected);
            prop_assert_eq!(drive.pool.pages.limit_status(), expected);
            prop_assert_eq!(after.limit, drive.limit);
            match seen.outcome {
                Outcome::Limit(LimitStatus::Stale { current } | LimitStatus::Conflict { current }) => {
                    prop_assert_eq!(current, drive.limit);
                    prop_assert_eq!(after, seen.before, "a refused limit changes nothing");
                }
                Outcome::Limit(status) => prop_assert_eq!(status, expected),
                _ => {}
            }
            // Nothing idle stays above the limit, unless taking it away failed or had to wait.
            if !seen.faulty && !seen.fenced && matches!(step.op, Op::Free(..) | Op::Limit { .. })
                && !matches!(seen.outcome, Outcome::Limit(LimitStatus::Stale { .. } | LimitStatus::Conflict { .. }))
                && expected != LimitStatus::Applied
            {
                let used = |page| drive.owned.contains(&page);
                let waits = |&run: &_| drive.after(run).epoch.is_some();
                let mapped = drive.pool.mapper.mapped();
                prop_assert!(mapped.iter().all(|run| run.pages().any(used) || waits(run)));
            }
        }
    }

    #[test]
    fn available_is_what_alloc_can_give(config in config(), steps in steps()) {
        let mut drive = Drive::new(config);
        for step in &steps {
            let available = drive.pool.pages.available();
            let seen = drive.step(step);
            if let (Op::Alloc(n), Outcome::Alloc(result)) = (&step.op, &seen.outcome) {
                let met = match result {
                    Err(AllocError::Fenced { .. }) => seen.fenced && available == 0,
                    _ if seen.fenced => false,
                    Ok(_) => *n <= available && !seen.faulty,
                    Err(AllocError::Full(FullReason::Limit | FullReason::Capacity)) => {
                        *n > available && !seen.mapped
                    }
                    Err(AllocError::Full(FullReason::DeviceMemory) | AllocError::Broken(_)) => {
                        *n <= available && seen.faulty
                    }
                    _ => false,
                };
                prop_assert!(met, "{} of {}: {:?}", n, available, seen);
                if result.is_err() {
                    prop_assert_eq!(seen.after.used, seen.before.used, "all or nothing");
                }
            }
        }
    }

    #[test]
    fn a_refused_free_changes_nothing(config in config(), steps in steps()) {
        let mut drive = Drive::new(config);
        for step in &steps {
            let seen = drive.step(step);
            match (&step.op, &seen.outcome) {
                (Op::Free(..), Outcome::Free(result)) => prop_assert_eq!(*result, Ok(())),
                (Op::FreeWrongly(..), Outcome::Free(result)) => {
                    let refused = matches!(
                        result, Err(FreeError::NotUsed { .. } | FreeError::NamedTwice { .. })
                    );
                    prop_assert!(refused, "{:?}", result);
                    prop_assert_eq!(seen.after, seen.before);
                    drive.pool.assert_books_agree();
                }
                _ => {}
            }
        }
    }

    #[test]
    fn trim_leaves_exactly_the_partly_used_runs(
        config in config(), steps in steps_without_faults(),
    ) {
        let mut drive = Drive::new(config);
        for step in &steps {
            let runs = drive.pool.mapper.mapped();
            let seen = drive.step(step);
            if let Outcome::Trim(result) = seen.outcome {
                let used = |page| drive.owned.contains(&page);
                let waits = |run| step.in_flight && drive.after(run).epoch.is_some();
                let stays = |&run: &PageRun| run.pages().any(used) || waits(run);
                let expected: Vec<_> = runs.iter().copied().filter(stays).collect();
                let before: u32 = runs.iter().map(|run| run.count()).sum();
                prop_assert_eq!(drive.pool.mapper.mapped(), expected);
                prop_assert_eq!(result, Ok(before - drive.pool.mapped()));
            }
        }
    }

    #[test]
    fn replenish_brings_the_reserve_between_its_bounds(
        config in config(), steps in steps_without_faults(),
    ) {
        let Reserve { min, max } = config.reserve;
        let mut drive = Drive::new(config);
        for step in &steps {
            let Outcome::Replenish(result) = drive.step(step).outcome else { continue };
            let mut last = result.expect("no faults");
            let mut turns = 0;
            while last.more || last.unmapped > 0 {
                last = drive.pool.pages.replenish().expect("no faults");
                turns += 1;
                prop_assert!(turns < 50, "it comes to rest");
            }
            let usage = drive.pool.usage();
            let min = min.min(usage.total - usage.void);
            let used = |page| drive.owned.contains(&page);
            let waits = |run| drive.after(run).epoch.is_some();
            let idle = |run: &PageRun| !run.pages().any(used) && !waits(*run);
            let idle_runs = drive.pool.mapper.mapped().iter().any(idle);
            prop_assert!(usage.warm >= min || last.full.is_some() && usage.cold == 0);
            prop_assert!(usage.warm <= max || !idle_runs);
        }
    }

    #[test]
    fn no_run_is_unmapped_before_what_its_pages_were_freed_after(config in config(), steps in steps()) {
        let mut drive = Drive::new(config);
        for step in &steps {
            let seen = drive.step(step);
            let in_flight = |after: &After| after.epoch.is_some();
            for (unmap, afters) in &seen.unmaps {
                // Exactly so: less would be wrong, and more a wait for nothing.
                let joined = afters.iter().copied().fold(After::NOTHING, After::join);
                prop_assert_eq!(unmap.after, joined);
                prop_assert!(
                    afters.iter().all(in_flight) || !afters.iter().any(in_flight),
                    "a retired run does not wait with others: {:?}", afters
                );
            }
            // Retired runs go first; others only above the limit, and never because of a free.
            let waited = seen.unmaps.iter().position(|(unmap, _)| in_flight(&unmap.after));
            if let Some(first) = waited {
                prop_assert!(seen.unmaps[first..].iter().all(|(unmap, _)| in_flight(&unmap.after)));
                let deferred = matches!(seen.before.limit_status, LimitStatus::Deferred { .. });
                prop_assert!(deferred || !matches!(step.op, Op::Replenish));
                prop_assert!(!matches!(seen.outcome, Outcome::Free(_)));
                let used = |page| drive.owned.contains(&page);
                let retired = |run: &PageRun| !run.pages().any(used) && !in_flight(&drive.after(*run));
                prop_assert!(seen.faulty || !drive.pool.mapper.mapped().iter().any(retired));
            }
        }
    }

    #[test]
    fn nothing_is_handed_out_or_mapped_while_a_rank_is_fenced(config in config(), steps in steps()) {
        let mut drive = Drive::new(config);
        for step in &steps {
            let seen = drive.step(step);
            prop_assert_eq!(seen.after.contents_lost_total, drive.pool.pages.contents_lost());
            if let (Op::Repair(Mend::Works { lost, .. }), Outcome::Repair(result)) =
                (&step.op, &seen.outcome)
            {
                let repaired = result.as_ref().expect("it works");
                prop_assert_eq!(repaired.lost.is_empty(), !lost);
                let losses = seen.after.contents_lost_total - seen.before.contents_lost_total;
                prop_assert_eq!(losses, u64::from(*lost));
                continue;
            }
            if !seen.fenced {
                continue;
            }
            prop_assert!(drive.pool.pages.is_fenced(), "only a repair ends it: {:?}", seen);
            prop_assert_eq!(drive.pool.pages.available(), 0);
            prop_assert!(!seen.mapped);
            prop_assert!(seen.after.used <= seen.before.used);
            if let Outcome::Alloc(result) = seen.outcome {
                let fenced = matches!(result, Err(AllocError::Fenced { .. }));
                prop_assert!(fenced, "{:?}", result);
            }
        }
    }

    #[test]
    fn a_page_in_doubt_is_out_of_reach_until_a_repair_lifts_it(config in config(), steps in steps()) {
        let mut drive = Drive::new(config);
        for step in &steps {
            let doubtful = drive.pool.pages.quarantined();
            let seen = drive.step(step);
            match (&step.op, &seen.outcome) {
                (Op::Repair(Mend::Works { found, .. }), Outcome::Repair(result)) => {
                    let repaired = result.as_ref().expect("it works");
                    let count = |what| {
                        let runs = doubtful.iter().filter(|&&run| found(run) == what);
                        runs.map(|run| run.count()).sum::<u32>()
                    };
                    prop_assert_eq!(repaired.cold, count(Found::Cold));
                    prop_assert_eq!(repaired.warm, count(Found::Mapped));
                }
                _ => {
                    let still = drive.pool.pages.quarantined();
                    prop_assert!(doubtful.iter().all(|run| still.contains(run)));
                }
            }
        }
    }

    #[test]
    fn a_run_is_unmapped_exactly_as_it_was_mapped(config in config(), steps in steps()) {
        // The recording mapper refuses anything else, and remembers that it had to.
        let longest = config.runs.bulk.get();
        let mut drive = Drive::new(config);
        for step in &steps {
            drive.step(step);
            prop_assert!(drive.pool.mapper.mapped().iter().all(|run| run.count() <= longest));
        }
        prop_assert_eq!(drive.pool.mapper.violations(), []);
    }
}

#[test]
fn ten_then_six_then_twelve_pages_have_twelve_ids() {
    let mut drive = Drive::new(kvcached_page_alloc::PageAllocatorConfig::new(12, BUNDLE));
    let limit = |drive: &Drive, pages, revision| drive.pool.limit(pages, revision);
    let take = |drive: &mut Drive, n| {
        let pages = drive.pool.take(n);
        assert!(pages.into_iter().all(|page| drive.owned.insert(page)));
    };
    limit(&drive, 10, 1);
    take(&mut drive, 10);
    let back: Vec<PageId> = drive.owned.iter().copied().take(4).collect();
    drive.pool.free(&back);
    drive.owned.retain(|page| !back.contains(page));
    limit(&drive, 6, 2);
    limit(&drive, 12, 3);
    take(&mut drive, 6);
    assert_eq!(drive.owned.len(), 12);
    let last: Limit = drive.pool.pages.limit();
    assert_eq!(last.revision, 3);
    assert_eq!(
        drive.pool.alloc(1),
        Err(AllocError::Full(FullReason::Capacity))
    );
}

//! A rank's part of transactions: whatever fails at whatever driver call, in whatever order the
//! two halves of an unmap, resyncs and reconciliations come. Here the books; the bytes are in
//! `rank_content`.

use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;

pub(super) const PAGES: u32 = 8;

/// One call of the mapper, and the driver calls that fail while it lasts.
#[derive(Debug, Clone)]
pub(super) struct Op {
    pub(super) what: What,
    pub(super) faults: Vec<Fault>,
}

/// The `nth` driver call of a kind fails, or that and all after it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Fault {
    pub(super) call: Call,
    pub(super) nth: u32,
    pub(super) for_good: bool,
    pub(super) full: bool,
}

/// Runs are given as numbers of pages, or as places in the list of those that are mapped or
/// prepared when the operation comes.
#[derive(Debug, Clone)]
pub(super) enum What {
    /// Those of these runs that are cold.
    Map(Vec<(u32, u32)>),
    Unmap(Vec<usize>),
    Prepare(Vec<usize>),
    Commit(Vec<usize>),
    Abort(Vec<usize>),
    /// These of the mapped and prepared runs, and those of the others that fit beside them.
    Resync(Vec<usize>, Vec<(u32, u32)>),
    Reconcile,
}

pub(super) fn ops(calls: &[Call], len: usize) -> impl Strategy<Value = Vec<Op>> + use<> {
    let some = || proptest::collection::vec(0usize..6, 1..4);
    let runs = |at_least| proptest::collection::vec((0..PAGES, 1u32..4), at_least..4);
    let what = prop_oneof![
        4 => runs(1).prop_map(What::Map),
        1 => some().prop_map(What::Unmap),
        3 => some().prop_map(What::Prepare),
        1 => some().prop_map(What::Commit),
        2 => some().prop_map(What::Abort),
        2 => (some(), runs(0)).prop_map(|(kept, new)| What::Resync(kept, new)),
        1 => Just(What::Reconcile),
    ];
    let call = proptest::sample::select(calls.to_vec());
    let fault = (call, 0u32..10, any::<bool>(), any::<bool>());
    let fault = fault.prop_map(|(call, nth, for_good, full)| Fault {
        call,
        nth,
        for_good,
        full,
    });
    let faults = proptest::collection::vec(fault, 0..4);
    let op = (what, faults).prop_map(|(what, faults)| Op { what, faults });
    proptest::collection::vec(op, 1..len)
}

pub(super) fn pools() -> impl Strategy<Value = (Geometry, Cold)> {
    (
        proptest::sample::select(all_geometries(PAGES).collect::<Vec<_>>()),
        proptest::sample::select(BOTH.to_vec()),
    )
}

/// Every run that the mapper knows of, by what it is.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Runs {
    pub(super) mapped: BTreeSet<PageRun>,
    pub(super) prepared: BTreeSet<PageRun>,
    pub(super) in_doubt: BTreeSet<PageRun>,
}

impl Runs {
    /// As the mapper has them; no page is in two of them.
    #[track_caller]
    pub(super) fn of<D: Driver>(mapper: &LocalMapper<D>) -> Self {
        let pool = mapper.pool();
        let runs = Self {
            mapped: pool.record.mapped.iter().collect(),
            prepared: pool.record.prepared.iter().collect(),
            in_doubt: pool.record.in_doubt.iter().collect(),
        };
        let kept: BTreeSet<PageRun> = pool.prepared.keys().copied().collect();
        assert_eq!(
            kept, runs.prepared,
            "prepared is exactly what can be restored"
        );
        let pages: Vec<PageId> = runs.all().flat_map(PageRun::pages).collect();
        let distinct: BTreeSet<PageId> = pages.iter().copied().collect();
        assert_eq!(
            pages.len(),
            distinct.len(),
            "a page is in one state: {runs:?}"
        );
        runs
    }

    fn all(&self) -> impl Iterator<Item = PageRun> {
        let sets = [&self.mapped, &self.prepared, &self.in_doubt];
        sets.into_iter().flatten().copied()
    }

    /// Those of `wanted` that share no page with `taken` nor with each other.
    fn beside(taken: impl Iterator<Item = PageRun>, wanted: &[(u32, u32)]) -> Vec<PageRun> {
        let mut taken: Vec<PageRun> = taken.collect();
        let mut runs = Vec::new();
        for &(first, count) in wanted {
            let run = run(first, count.min(PAGES - first));
            if !taken.iter().any(|other| other.overlaps(run)) {
                taken.push(run);
                runs.push(run);
            }
        }
        runs
    }

    fn pick(from: &BTreeSet<PageRun>, places: &[usize]) -> Vec<PageRun> {
        let places: BTreeSet<usize> = places.iter().copied().collect();
        let all = from.iter().enumerate();
        all.filter(|(place, _)| places.contains(place))
            .map(|(_, &run)| run)
            .collect()
    }

    /// The runs that an operation names in this state.
    pub(super) fn named(&self, what: &What) -> Vec<PageRun> {
        match what {
            What::Map(wanted) => Self::beside(self.all(), wanted),
            What::Unmap(places) | What::Prepare(places) => Self::pick(&self.mapped, places),
            // With one that is not prepared among them, which is to be passed over.
            What::Commit(places) | What::Abort(places) => {
                let mut runs = Self::pick(&self.prepared, places);
                runs.extend(self.mapped.first());
                runs
            }
            What::Resync(kept, new) => {
                let known: BTreeSet<PageRun> = self.mapped.union(&self.prepared).copied().collect();
                let mut runs = Self::pick(&known, kept);
                // Over the bounds of those that go, and of those in doubt.
                runs.extend(Self::beside(runs.clone().into_iter(), new));
                runs
            }
            What::Reconcile => self.in_doubt.iter().copied().collect(),
        }
    }

    /// What is true after all of `what` was done to `runs`.
    fn done(mut self, what: &What, runs: &[PageRun]) -> Self {
        let runs: BTreeSet<PageRun> = runs.iter().copied().collect();
        match what {
            What::Map(_) => self.mapped.extend(runs),
            What::Unmap(_) => self.mapped.retain(|run| !runs.contains(run)),
            What::Prepare(_) => {
                self.mapped.retain(|run| !runs.contains(run));
                self.prepared.extend(runs);
            }
            What::Commit(_) => self.prepared.retain(|run| !runs.contains(run)),
            What::Abort(_) => {
                self.mapped.extend(runs.intersection(&self.prepared));
                self.prepared.retain(|run| !runs.contains(run));
            }
            What::Resync(..) => {
                self = Self {
                    mapped: runs,
                    ..Self::default()
                }
            }
            What::Reconcile => self.in_doubt.clear(),
        }
        self
    }

    /// The same with `runs` in doubt.
    fn doubting(mut self, runs: &[PageRun]) -> Self {
        for &run in runs {
            self.mapped.remove(&run);
            self.prepared.remove(&run);
            self.in_doubt.insert(run);
        }
        self
    }
}

/// What a call answered: which runs it names in doubt, and which it remade.
#[derive(Debug)]
pub(super) struct Answer {
    pub(super) outcome: Result<(), MapError>,
    pub(super) remade: Vec<PageRun>,
    /// Of a resync or a reconciliation that succeeded.
    pub(super) in_doubt: Vec<PageRun>,
}

pub(super) fn ask<D: Driver>(mapper: &LocalMapper<D>, what: &What, runs: &[PageRun]) -> Answer {
    let (mut remade, mut in_doubt) = (Vec::new(), Vec::new());
    let outcome = match what {
        What::Map(_) => mapper.map(runs),
        What::Unmap(_) => mapper.unmap(runs),
        What::Prepare(_) => mapper.prepare_unmap(runs, After::DEVICE),
        What::Commit(_) => {
            mapper.commit_unmap(runs);
            Ok(())
        }
        What::Abort(_) => mapper.abort_unmap(runs),
        What::Resync(..) => mapper.resync(runs).map(|told| {
            remade = told.remade;
            in_doubt = told.in_doubt;
        }),
        What::Reconcile => mapper.reconcile(runs).map(|told| {
            let (cold, mapped) = (told.cold, told.mapped);
            assert_eq!(
                mapped,
                [],
                "what was in doubt is never mapped again by itself"
            );
            in_doubt = runs.to_vec();
            in_doubt.retain(|run| !cold.contains(run));
        }),
    };
    Answer {
        outcome,
        remade,
        in_doubt,
    }
}

/// What is true after `what` was asked of `runs` and this was the answer; `None` where a failure
/// leaves a choice, which only a resync does.
fn expected(before: Runs, what: &What, runs: &[PageRun], answer: &Answer) -> Option<Runs> {
    match (&answer.outcome, what) {
        (Ok(()), What::Resync(..)) => {
            let doubt = &answer.in_doubt;
            let mut after = before.clone().done(what, runs).doubting(doubt);
            // A wanted run that meets one in doubt is no run of its own yet.
            after
                .in_doubt
                .retain(|run| before.in_doubt.contains(run) || !overlaps_other(doubt, *run));
            Some(after)
        }
        (Ok(()), What::Reconcile) => Some(before.done(what, runs).doubting(&answer.in_doubt)),
        (Ok(()), _) => Some(before.done(what, runs)),
        (Err(_), What::Resync(..)) => None,
        (Err(error), What::Abort(_)) => Some(before.done(what, runs).doubting(&error.uncertain)),
        (Err(error), _) => Some(before.doubting(&error.uncertain)),
    }
}

fn overlaps_other(runs: &[PageRun], run: PageRun) -> bool {
    runs.iter()
        .any(|&other| other != run && other.overlaps(run))
}

/// Every chunk is behind an extent, of a prepared run, kept for later, the zeros, or lost to a destroy
/// that failed.
#[track_caller]
fn assert_no_memory_leaks(mock: &Mock, mapper: &LocalMapper<Mock>, cold: Cold, runs: &Runs) {
    let geometry = mapper.geometry();
    let behind = seen(mock, mapper);
    let own = behind.iter().flatten();
    let own = own.filter(|map| map.2 == Access::ReadWrite).count();
    let prepared = runs.prepared.len() * geometry.extents_per_page() as usize;
    let zero = usize::from(cold == Cold::Zero);
    if mapper.kept_bytes() == 0 {
        assert_eq!(
            mock.live_chunks(),
            own + prepared + zero + mock.lost_chunks()
        );
    }
    if runs.in_doubt.is_empty() && mock.lost_chunks() == 0 {
        let pages: u32 = runs.all().map(PageRun::count).sum();
        assert_eq!(
            mock.used_bytes(),
            u64::from(pages) * geometry.bundle_bytes() + zero as u64 * G + mapper.kept_bytes()
        );
    }
}

fn script(mock: &Mock, faults: &[Fault]) {
    for &fault in faults {
        let error = if fault.full {
            VmmError::OutOfMemory { requested: 1 }
        } else {
            broken()
        };
        if fault.for_good {
            let mut left = fault.nth;
            mock.fail_with(move |call| {
                if call != fault.call {
                    return None;
                }
                let due = left == 0;
                left = left.saturating_sub(1);
                due.then(|| error.clone())
            });
        } else {
            mock.fail(fault.call, fault.nth, error);
        }
    }
}

const FALLIBLE: [Call; 7] = [
    Call::Create,
    Call::Map,
    Call::Map,
    Call::Unmap,
    Call::Unmap,
    Call::Destroy,
    Call::Synchronize,
];

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn through_any_failures_each_page_is_in_one_state_and_no_memory_is_lost(
        (geometry, cold) in pools(),
        recycles in any::<bool>(),
        ops in ops(&FALLIBLE, 25),
        last in (proptest::collection::vec(0usize..6, 0..4),
                 proptest::collection::vec((0..PAGES, 1u32..4), 0..4)),
    ) {
        let mock = mock(1 << 30);
        let mut mapper = local(&mock, &geometry, cold);
        if recycles {
            mapper = mapper.with_recycler(&recycler(&mock));
        }
        for Op { what, faults } in ops {
            let before = Runs::of(&mapper);
            let runs = before.named(&what);
            script(&mock, &faults);
            let answer = ask(&mapper, &what, &runs);
            mock.heal();

            let after = Runs::of(&mapper);
            if let Some(expected) = expected(before, &what, &runs, &answer) {
                prop_assert_eq!(&after, &expected, "{:?} of {:?}: {:?}", what, runs, answer);
            }
            prop_assert_eq!(mock.violations(), []);
            let mapped: Vec<PageRun> = after.mapped.iter().copied().collect();
            faults::assert_seen_is(&mock, &mapper, cold, &mapped);
            assert_no_memory_leaks(&mock, &mapper, cold, &after);
        }

        // Nothing fails any more: one attempt mends everything.
        let doubtful = mapper.in_doubt();
        let told = mapper.reconcile(&doubtful).unwrap();
        prop_assert_eq!((told.cold, told.mapped), (doubtful, vec![]));
        prop_assert_eq!((mapper.in_doubt(), mapper.health()), (vec![], Health::Healthy));
        let wanted = Runs::of(&mapper).named(&What::Resync(last.0, last.1));
        let told = mapper.resync(&wanted).unwrap();
        prop_assert_eq!(told.in_doubt, vec![]);
        let expected = Runs { mapped: wanted.into_iter().collect(), ..Runs::default() };
        let after = Runs::of(&mapper);
        prop_assert_eq!(&after, &expected);
        let mapped: Vec<PageRun> = after.mapped.iter().copied().collect();
        faults::assert_seen_is(&mock, &mapper, cold, &mapped);
        assert_no_memory_leaks(&mock, &mapper, cold, &after);

        drop(mapper);
        assert_nothing_left(&mock);
    }

    #[test]
    fn one_resync_mends_everything_without_a_reconciliation(
        (geometry, cold) in pools(),
        ops in ops(&FALLIBLE, 15),
        wanted in proptest::collection::vec((0..PAGES, 1u32..4), 0..5),
    ) {
        let mock = mock(1 << 30);
        let mapper = local(&mock, &geometry, cold);
        for Op { what, faults } in ops {
            let runs = Runs::of(&mapper).named(&what);
            script(&mock, &faults);
            ask(&mapper, &what, &runs);
            mock.heal();
        }
        let wanted = Runs::beside(std::iter::empty(), &wanted);
        let told = mapper.resync(&wanted).unwrap();
        prop_assert_eq!(told.in_doubt, vec![]);
        let expected = Runs { mapped: wanted.into_iter().collect(), ..Runs::default() };
        prop_assert_eq!(Runs::of(&mapper), expected);
    }
}

#[test]
fn a_mapper_dropped_between_the_two_halves_of_an_unmap_gives_everything_back() {
    for geometry in all_geometries(8) {
        for cold in BOTH {
            let mock = mock(1 << 30);
            let mapper = local(&mock, &geometry, cold);
            mapper.map(&[run(0, 2), run(3, 1)]).unwrap();
            mapper.prepare_unmap(&[run(0, 2)], After::NOTHING).unwrap();
            drop(mapper);
            assert_nothing_left(&mock);
        }
    }
}

#[test]
fn a_full_device_fails_a_resync_that_tells_later_of_all_it_remade() {
    let geometry = simple(8);
    let mock = mock(3 * geometry.bundle_bytes());
    let mapper = local(&mock, &geometry, Cold::Unbacked);
    mapper.map(&[run(6, 1)]).unwrap();
    let wanted = [run(0, 2), run(4, 1), run(6, 1)];
    assert!(mapper.resync(&wanted).unwrap_err().is_full());
    assert_eq!(mapper.mapped(), [run(0, 2), run(6, 1)]);

    let told = mapper.resync(&[run(0, 2), run(6, 1)]).unwrap();
    assert_eq!(told.remade, [run(0, 2)], "its content was never there");
    let told = mapper.resync(&[run(0, 2), run(6, 1)]).unwrap();
    assert_eq!(told.remade, [], "each is told once");
}

#[test]
fn what_is_prepared_or_mapped_otherwise_is_not_told_to_be_cold() {
    let mapper = local(&mock(1 << 30), &simple(8), Cold::Unbacked);
    mapper.map(&[run(0, 2), run(4, 2)]).unwrap();
    mapper.prepare_unmap(&[run(4, 2)], After::NOTHING).unwrap();
    let asked = [run(0, 1), run(0, 2), run(2, 2), run(4, 2), run(5, 2)];
    let told = mapper.reconcile(&asked).unwrap();
    assert_eq!((told.cold, told.mapped), (vec![run(2, 2)], vec![run(0, 2)]));
}

//! Random operations with faults, one after another, and what was observed around each.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::num::NonZeroU32;
use std::sync::{Arc, Mutex};

use kvcached_mapper::{After, Epoch, Health, MapError, PageId, PageRun, Rank, Stage};
use kvcached_page_alloc::{
    AllocError, FreeError, Limit, LimitStatus, MAX_RUN, PageAllocatorConfig, PageState, PageUsage,
    Repaired, Replenished, Reserve, RunPolicy,
};
use proptest::prelude::*;
use proptest::sample::Index;

use crate::ranks::{Found, Unmap};
use crate::support::{BUNDLE, Pool, assert_adds_up, doubtful, full, refused, suspect};

#[derive(Debug, Clone)]
pub(crate) enum Op {
    Alloc(u32),
    AllocFirst,
    /// Some of the pages in use, in any order.
    Free(Vec<Index>, After),
    /// Some of the pages in use, and one more that makes the call wrong.
    FreeWrongly(Vec<Index>, Wrong),
    Replenish,
    Trim,
    Limit {
        pages: u32,
        part: u64,
        revision: Revision,
    },
    Retire(Epoch),
    /// A rank becomes suspect, and somebody looks.
    Fence,
    Repair(Mend),
}

/// How a repair goes.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Mend {
    Fails,
    /// The rank is known again; runs are found so, and it may have lost what it held.
    Works {
        found: fn(PageRun) -> Found,
        lost: bool,
    },
}

#[derive(Debug, Clone)]
pub(crate) enum Wrong {
    /// A page that is not in use, if there is one.
    NotUsed(Index),
    /// A page outside the pool.
    Outside(u32),
    /// The first page of the call.
    Twice,
}

#[derive(Debug, Clone, Copy)]
pub(crate) enum Revision {
    Newer,
    Same,
    Older,
}

/// What happens to a call of the mapper.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Fault {
    None,
    Full,
    Refused,
    /// And of a rank it is not known what it has.
    Suspect,
    /// The runs whose bit is set, and the first one in any case, are in doubt.
    Doubt(u8),
}

#[derive(Debug, Clone)]
pub(crate) struct Step {
    pub(crate) op: Op,
    /// For the first, second, … call of the mapper during the operation; later ones succeed.
    faults: Vec<Fault>,
    /// No epoch that an unmap waits for retires in time.
    pub(crate) in_flight: bool,
}

/// What an operation answered.
#[derive(Debug)]
pub(crate) enum Outcome {
    Alloc(Result<Vec<PageId>, AllocError>),
    Free(Result<(), FreeError>),
    Replenish(Result<Replenished, MapError>),
    Trim(Result<u32, MapError>),
    Limit(LimitStatus),
    Repair(Result<Repaired, MapError>),
    /// Nothing that could fail.
    Done,
}

#[derive(Debug)]
pub(crate) struct Observed {
    pub(crate) before: PageUsage,
    pub(crate) after: PageUsage,
    pub(crate) outcome: Outcome,
    /// Did a fault meet the operation?
    pub(crate) faulty: bool,
    /// Did the operation call [`Mapper::map`](kvcached_mapper::Mapper::map)?
    pub(crate) mapped: bool,
    /// Was a rank fenced when it began?
    pub(crate) fenced: bool,
    /// What the operation had unmapped, or tried to, and what the memory of each run had to wait
    /// for.
    pub(crate) unmaps: Vec<(Unmap, Vec<After>)>,
}

/// A pool under random operations, and the model beside it: who was given what.
pub(crate) struct Drive {
    pub(crate) pool: Pool,
    pub(crate) owned: BTreeSet<PageId>,
    pub(crate) limit: Limit,
    /// What each page was freed after since it has memory.
    freed: BTreeMap<PageId, After>,
    retired: Option<Epoch>,
    script: Arc<Mutex<Script>>,
}

#[derive(Debug, Default)]
struct Script {
    faults: VecDeque<Fault>,
    met: bool,
    suspect: bool,
}

pub(crate) fn config() -> impl Strategy<Value = PageAllocatorConfig> {
    let reserve = (0u32..20, 0u32..20).prop_map(|(min, more)| Reserve {
        min,
        max: min + more,
    });
    let void = prop_oneof![
        2 => Just(Vec::new()),
        1 => prop::collection::vec(1u32..150, 0..40),
    ];
    (1u32..150, runs(), reserve, void).prop_map(|(pages, runs, reserve, void)| {
        PageAllocatorConfig {
            void: void
                .into_iter()
                .filter(|&page| page < pages)
                .map(PageId)
                .collect(),
            runs,
            reserve,
            ..PageAllocatorConfig::new(pages, BUNDLE)
        }
    })
}

fn runs() -> impl Strategy<Value = RunPolicy> {
    let number = |pages| NonZeroU32::new(pages).expect("at least one");
    let lengths = (1u32..=MAX_RUN, 1u32..=MAX_RUN);
    (lengths, 1u32..60, (1u32..4, 1u32..20), 0u32..30).prop_map(
        move |((one, other), bulk_from, (share, short), calm)| RunPolicy {
            longest: number(one.min(other)),
            bulk: number(one.max(other)),
            bulk_from: number(bulk_from),
            share: number(share),
            share_when_short: number(short),
            calm,
        },
    )
}

fn op() -> impl Strategy<Value = Op> {
    let some = || prop::collection::vec(any::<Index>(), 0..80);
    prop_oneof![
        6 => (0u32..40).prop_map(Op::Alloc),
        1 => (0u32..200).prop_map(Op::Alloc),
        1 => Just(Op::AllocFirst),
        6 => (some(), after()).prop_map(|(pages, after)| Op::Free(pages, after)),
        1 => (some(), wrong()).prop_map(|(pages, wrong)| Op::FreeWrongly(pages, wrong)),
        3 => Just(Op::Replenish),
        1 => Just(Op::Trim),
        3 => limit(),
        2 => (0u64..12).prop_map(|epoch| Op::Retire(Epoch(epoch))),
    ]
}

fn after() -> impl Strategy<Value = After> {
    prop_oneof![
        1 => Just(After::DEVICE),
        2 => (0u64..12).prop_map(|epoch| After::epoch(Epoch(epoch))),
    ]
}

/// What has to do with ranks in doubt.
fn doubt_op() -> impl Strategy<Value = Op> {
    prop_oneof![
        1 => Just(Op::Fence),
        3 => mend().prop_map(Op::Repair),
    ]
}

fn mend() -> impl Strategy<Value = Mend> {
    let found: Vec<fn(PageRun) -> Found> = vec![
        |_| Found::Cold,
        |_| Found::Mapped,
        |run| match run.first().0 % 3 {
            0 => Found::Cold,
            1 => Found::Mapped,
            _ => Found::Nothing,
        },
    ];
    prop_oneof![
        1 => Just(Mend::Fails),
        3 => (prop::sample::select(found), any::<bool>())
            .prop_map(|(found, lost)| Mend::Works { found, lost }),
    ]
}

fn wrong() -> impl Strategy<Value = Wrong> {
    prop_oneof![
        any::<Index>().prop_map(Wrong::NotUsed),
        (0u32..10).prop_map(Wrong::Outside),
        Just(Wrong::Twice),
    ]
}

fn limit() -> impl Strategy<Value = Op> {
    let pages = prop_oneof![1 => Just(0u32), 6 => 0u32..170];
    let revision = prop_oneof![
        6 => Just(Revision::Newer),
        1 => Just(Revision::Same),
        1 => Just(Revision::Older),
    ];
    (pages, prop_oneof![Just(0), 0..BUNDLE], revision).prop_map(|(pages, part, revision)| {
        Op::Limit {
            pages,
            part,
            revision,
        }
    })
}

fn fault() -> impl Strategy<Value = Fault> {
    prop_oneof![
        3 => Just(Fault::None),
        1 => Just(Fault::Full),
        1 => Just(Fault::Refused),
        1 => Just(Fault::Suspect),
        1 => any::<u8>().prop_map(Fault::Doubt),
    ]
}

/// Operations, most of which meet no fault.
pub(crate) fn steps() -> impl Strategy<Value = Vec<Step>> {
    let faults = prop_oneof![4 => Just(Vec::new()), 1 => prop::collection::vec(fault(), 1..4)];
    let op = prop_oneof![6 => op(), 1 => doubt_op()];
    let step = (op, faults, any::<bool>()).prop_map(|(op, faults, in_flight)| Step {
        op,
        faults,
        in_flight,
    });
    prop::collection::vec(step, 1..80)
}

/// The same without any fault.
pub(crate) fn steps_without_faults() -> impl Strategy<Value = Vec<Step>> {
    let step = (op(), any::<bool>()).prop_map(|(op, in_flight)| Step {
        op,
        faults: Vec::new(),
        in_flight,
    });
    prop::collection::vec(step, 1..80)
}

impl Script {
    fn next(&mut self, runs: &[PageRun]) -> Result<(), MapError> {
        let error = match self.faults.pop_front() {
            None | Some(Fault::None) => return Ok(()),
            Some(Fault::Full) => full(),
            Some(Fault::Refused) => refused(),
            Some(Fault::Suspect) => {
                self.suspect = true;
                refused()
            }
            Some(Fault::Doubt(which)) => {
                let in_doubt =
                    |&(index, _): &(usize, &PageRun)| index == 0 || which & (1 << (index % 8)) != 0;
                doubtful(
                    runs.iter()
                        .enumerate()
                        .filter(in_doubt)
                        .map(|(_, &run)| run)
                        .collect(),
                )
            }
        };
        self.met = true;
        Err(error)
    }
}

impl Drive {
    pub(crate) fn new(config: PageAllocatorConfig) -> Self {
        let pool = Pool::with(config);
        let script = Arc::new(Mutex::new(Script::default()));
        let faults = Arc::clone(&script);
        let ranks = Arc::downgrade(&pool.mapper);
        pool.during_calls(move |pages, _, runs| {
            // From inside the call: nobody holds a lock, and the snapshot is whole.
            let usage = pages.usage();
            assert_adds_up(&usage);
            assert!(runs.iter().all(|run| {
                run.pages()
                    .all(|page| pages.state(page) == Some(PageState::Busy))
            }));
            let mut script = faults.lock().expect("no test panicked");
            let allowed = script.next(runs);
            if std::mem::take(&mut script.suspect) {
                ranks.upgrade().expect("it is called").set_health(fenced());
            }
            allowed
        });
        let limit = pool.pages.limit();
        Self {
            pool,
            owned: BTreeSet::new(),
            limit,
            freed: BTreeMap::new(),
            retired: None,
            script,
        }
    }

    pub(crate) fn limit_pages(&self) -> u32 {
        u32::try_from(self.limit.bytes / BUNDLE).expect("limits of tests are small")
    }

    pub(crate) fn step(&mut self, step: &Step) -> Observed {
        *self.script.lock().expect("no test panicked") = Script {
            faults: step.faults.iter().copied().collect(),
            ..Script::default()
        };
        self.pool.mapper.set_in_flight(step.in_flight);
        let fenced = self.pool.pages.is_fenced();
        let before = self.pool.usage();
        let maps_before = self.pool.mapper.runs_mapped();
        let outcome = self.apply(&step.op);
        let script = std::mem::take(&mut *self.script.lock().expect("no test panicked"));
        let unmaps = self.forget_unmapped();
        Observed {
            before,
            after: self.pool.usage(),
            outcome,
            faulty: script.met,
            mapped: self.pool.mapper.runs_mapped() > maps_before,
            fenced,
            unmaps,
        }
    }

    fn apply(&mut self, op: &Op) -> Outcome {
        match op {
            Op::Alloc(n) => {
                let result = self.pool.alloc(*n);
                self.owned.extend(result.iter().flatten());
                Outcome::Alloc(result)
            }
            Op::AllocFirst => {
                let result = self.pool.pages.alloc_first();
                self.owned.extend(&result);
                Outcome::Alloc(result.map(|page| vec![page]))
            }
            Op::Free(which, after) => {
                let pages = self.pick(which);
                for &page in &pages {
                    let freed = self.freed.entry(page).or_insert(After::NOTHING);
                    *freed = freed.join(*after);
                }
                let result = self.pool.pages.free_after(&pages, *after);
                self.owned.retain(|page| !pages.contains(page));
                Outcome::Free(result)
            }
            Op::FreeWrongly(which, wrong) => {
                let mut pages = self.pick(which);
                let total = self.pool.usage().total;
                let not_used: Vec<PageId> = (0..total)
                    .map(PageId)
                    .filter(|page| !self.owned.contains(page))
                    .collect();
                let (page, at) = match wrong {
                    Wrong::NotUsed(which) if !not_used.is_empty() => {
                        (*which.get(&not_used), which.index(pages.len() + 1))
                    }
                    Wrong::Twice if !pages.is_empty() => (pages[0], pages.len()),
                    Wrong::Outside(beyond) => (PageId(total + beyond), pages.len()),
                    _ => (PageId(u32::MAX), 0),
                };
                pages.insert(at, page);
                Outcome::Free(self.pool.pages.free(&pages))
            }
            Op::Replenish => Outcome::Replenish(self.pool.pages.replenish()),
            Op::Trim => Outcome::Trim(self.pool.pages.trim()),
            Op::Limit {
                pages,
                part,
                revision,
            } => {
                let revision = match revision {
                    Revision::Newer => self.limit.revision + 1,
                    Revision::Same => self.limit.revision,
                    Revision::Older => self.limit.revision.saturating_sub(1),
                };
                let limit = Limit {
                    bytes: u64::from(*pages) * BUNDLE + part,
                    revision,
                };
                if limit.revision > self.limit.revision {
                    self.limit = limit;
                }
                Outcome::Limit(self.pool.pages.set_limit(limit).expect("there is no floor"))
            }
            Op::Retire(epoch) => {
                self.pool.pages.retire(*epoch);
                self.retired = self.retired.max(Some(*epoch));
                Outcome::Done
            }
            Op::Fence => {
                self.pool.mapper.set_health(fenced());
                assert!(self.pool.pages.health().is_fenced());
                Outcome::Done
            }
            Op::Repair(mend) => Outcome::Repair(self.repair(*mend)),
        }
    }

    pub(crate) fn repair(&mut self, mend: Mend) -> Result<Repaired, MapError> {
        let mapper = &self.pool.mapper;
        match mend {
            Mend::Fails => mapper.fail_reconcile(Some(refused())),
            Mend::Works { found, lost } => {
                mapper.fail_reconcile(None);
                mapper.set_found(found);
                mapper.set_health(Health::Healthy);
                if lost {
                    mapper.lose_content(Stage(0), Rank(1));
                }
            }
        }
        self.pool.pages.repair()
    }

    /// What the memory of a run has to wait for.
    pub(crate) fn after(&self, run: PageRun) -> After {
        let of_page = |page| self.freed.get(&page).copied().unwrap_or(After::NOTHING);
        let joined = run.pages().map(of_page).fold(After::NOTHING, After::join);
        joined.since(self.retired)
    }

    /// The unmaps since the last time. What pages without memory were freed after is no matter any
    /// more.
    fn forget_unmapped(&mut self) -> Vec<(Unmap, Vec<After>)> {
        let mut unmaps = Vec::new();
        for unmap in self.pool.mapper.unmaps() {
            let afters = unmap.runs.iter().map(|&run| self.after(run)).collect();
            if unmap.done {
                let pages = unmap.runs.iter().flat_map(|run| run.pages());
                pages.for_each(|page| {
                    self.freed.remove(&page);
                });
            }
            unmaps.push((unmap, afters));
        }
        let pages = &self.pool.pages;
        let is_cold = |page: &PageId| {
            matches!(
                pages.state(*page),
                Some(PageState::Cold | PageState::Withheld)
            )
        };
        self.freed.retain(|page, _| !is_cold(page));
        unmaps
    }

    /// Distinct pages in use.
    fn pick(&self, which: &[Index]) -> Vec<PageId> {
        let mut left: Vec<PageId> = self.owned.iter().copied().collect();
        let mut picked = Vec::new();
        for index in which {
            if left.is_empty() {
                break;
            }
            picked.push(left.swap_remove(index.index(left.len())));
        }
        picked
    }
}

fn fenced() -> Health {
    Health::Fenced {
        ranks: vec![suspect()],
        pages: 0,
    }
}

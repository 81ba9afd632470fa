//! What must hold after every operation.

use std::collections::{BTreeMap, BTreeSet};

use kvcached_manager::{BlockId, NULL_BLOCK};
use kvcached_mapper::{Health, PageId, PageRun, Rank, Stage};
use kvcached_page_alloc::PageState;
use kvcached_tp_ipc::Answer;

use crate::engine::{Life, Pool};
use crate::fan::{Active, ActiveKind};
use crate::report::Guarantee;
use crate::world::{World, lock};

impl World {
    /// An operation over the ranks of a pool is over.
    pub(crate) fn check_operation(
        &self,
        life: &Life,
        index: usize,
        active: &Active,
        answer: &Answer,
    ) {
        self.count(active, answer);
        self.check_bound(active);
        let pool = &life.pools[index];
        let fan = lock(&pool.fan);
        let health = fan.fanout.health();
        let named: BTreeSet<(Stage, Rank)> = health
            .ranks()
            .iter()
            .map(|suspect| (suspect.stage, suspect.rank))
            .collect();
        let left_open = match answer {
            Answer::Batch(Err(error)) => !error.uncertain.is_empty(),
            _ => false,
        };
        // With nobody to differ from, the runs that the error names are enough.
        if left_open && health == Health::Healthy {
            let what = format!("pool {index}: {answer:?}, and nobody is named for it");
            drop(fan);
            return self.violate(Guarantee::AllOrNone, what);
        }
        let agreed = fan.agreed.clone();
        let stated: BTreeSet<PageRun> = fan.fanout.agreed().collect();
        if agreed != stated {
            let what = format!("pool {index}: agreed are {stated:?}, by the answers {agreed:?}");
            drop(fan);
            return self.violate(Guarantee::AllOrNone, what);
        }
        let network = lock(&self.network);
        let counts = |rank: usize| {
            if matches!(health, Health::Fenced { .. }) && named.contains(&self.places[rank]) {
                return false;
            }
            let mut links = fan.links.iter();
            match links.find(|link| link.rank == rank) {
                // Who hears in a moment that the connection has ended does not count either.
                Some(link) => link.conn.is_some_and(|conn| network.is_open(conn)),
                None => true,
            }
        };
        let counting: Vec<usize> = (0..self.places.len())
            .filter(|rank| counts(*rank))
            .collect();
        let doubtful = fan.doubtful.clone();
        let known_doubts: Vec<Vec<PageRun>> = self
            .places
            .iter()
            .map(|at| fan.fanout.in_doubt(at.0, at.1).collect())
            .collect();
        drop(network);
        drop(fan);
        for rank in counting {
            let Some(memory) = self.memory(rank) else {
                continue;
            };
            let mapper = &memory.mappers[index];
            let mut mapped: BTreeSet<PageRun> = mapper.mapped().into_iter().collect();
            let mut agreed_here = agreed.clone();
            if health.is_fenced() || named.contains(&self.places[rank]) {
                // It may differ in what is in doubt, since it says so. While another rank is
                // fenced, only that one is named.
                let open: Vec<PageRun> = mapper
                    .in_doubt()
                    .into_iter()
                    .chain(doubtful.iter().copied())
                    // Such as what is still in flight there.
                    .chain(known_doubts[rank].iter().copied())
                    .collect();
                let known = |run: &PageRun| !open.iter().any(|other| other.overlaps(*run));
                mapped.retain(known);
                agreed_here.retain(known);
            }
            if mapped != agreed_here {
                let at = self.places[rank];
                let what = format!(
                    "pool {index}, {}, {}: it has {}, agreed are {}, after {:?} of {} that ended in {answer:?}; {health}",
                    at.0,
                    at.1,
                    words(&mapped),
                    words(&agreed_here),
                    active.kind,
                    words(&active.runs.iter().copied().collect()),
                );
                return self.violate(Guarantee::AllOrNone, what);
            }
        }
    }

    fn count(&self, active: &Active, answer: &Answer) {
        let troubled = self.trouble() != active.trouble
            || matches!(answer, Answer::Batch(Err(error)) if !error.is_full());
        let mut state = lock(&self.state);
        let counts = &mut state.counts;
        let counted = active.worked
            && matches!(
                active.kind,
                ActiveKind::Map | ActiveKind::Unmap | ActiveKind::Reconcile
            );
        if counted {
            counts.transactions += 1;
            counts.troubled += u64::from(troubled);
        }
        if active.worked && active.kind == ActiveKind::Reconcile {
            counts.resyncs += 1;
        }
    }

    /// Twice the time-out of waiting for other ranks, and what the local rank took; the time that
    /// the coordinator itself was stalled is not waiting.
    fn check_bound(&self, active: &Active) {
        let took_ns = self.clock.now_ns() - active.began_ns;
        let state = lock(&self.state);
        let stalled_ns = state.stalled_ns - active.stalled_ns;
        drop(state);
        let bound_ns = 2 * self.config.timeout_us * 1_000 + active.local_ns + stalled_ns;
        if took_ns > bound_ns {
            let what = format!(
                "{:?} took {took_ns} ns, its bound was {bound_ns} ns",
                active.kind
            );
            self.violate(Guarantee::Bounded, what);
        }
    }

    /// Nobody else has what is handed out just now.
    pub(crate) fn check_new(&self, pool: &Pool, blocks: &[BlockId], pages: &[PageId]) {
        let books = lock(&pool.books);
        let mut owners: BTreeMap<BlockId, u32> = BTreeMap::new();
        let mut page_owners: BTreeMap<PageId, u32> = BTreeMap::new();
        for (label, request) in &books.requests {
            owners.extend(request.blocks.iter().map(|(block, _)| (*block, *label)));
            page_owners.extend(request.pages.iter().map(|page| (*page, *label)));
        }
        drop(books);
        for block in blocks {
            let page = pool.geometry.page_of(block.0);
            let owner = owners.get(block).or_else(|| page_owners.get(&page?));
            if let Some(owner) = owner {
                let what = format!("{block:?} is handed out, and {owner} has it");
                return self.violate(Guarantee::OneOwner, what);
            }
            let state = page.and_then(|page| pool.pages.state(page));
            if state != Some(PageState::Used) {
                let what = format!("{block:?} is handed out, its page is {state:?}");
                return self.violate(Guarantee::OneOwner, what);
            }
        }
        for page in pages {
            let other = owners
                .iter()
                .find(|(block, _)| pool.geometry.page_of(block.0) == Some(*page));
            if let Some(owner) = page_owners.get(page).or_else(|| Some(other?.1)) {
                let what = format!("{page} is handed out, and {owner} has it");
                return self.violate(Guarantee::NoPageTwice, what);
            }
            if *page == PageId(0) {
                let what = format!("{page}, that of {NULL_BLOCK:?}, is handed out");
                return self.violate(Guarantee::NoPageTwice, what);
            }
        }
    }

    /// After each operation of the engine: every snapshot adds up, and ranks have met nothing that
    /// must not be.
    pub(crate) fn check_engine(&self, life: &Life) {
        for rank in 0..self.places.len() {
            if let Some(memory) = self.memory(rank) {
                memory.driver.catch_up();
            }
            self.look_at(rank);
        }
        if !self.is_current(life.number) {
            return;
        }
        for (index, pool) in life.pools.iter().enumerate() {
            let usage = pool.pages.usage();
            let sum = usage.void
                + usage.cold
                + usage.warm
                + usage.used
                + usage.busy
                + usage.withheld
                + usage.quarantined;
            if sum != usage.total {
                let what = format!("pool {index}: {sum} pages in all states: {usage:?}");
                self.violate(Guarantee::StatesAddUp, what);
            }
            if self.depth() > 0 {
                continue;
            }
            let books = lock(&pool.books);
            let taken: usize = books
                .requests
                .values()
                .map(|request| request.pages.len())
                .sum();
            drop(books);
            let manager = lock(&pool.manager);
            if let Some(manager) = &*manager {
                let used = manager.occupancy().count() + taken;
                if usage.busy > 0 || used as u64 != u64::from(usage.used) {
                    let what = format!("pool {index}: {used} pages have owners: {usage:?}");
                    self.violate(Guarantee::StatesAddUp, what);
                }
            }
        }
    }
}

fn words(runs: &BTreeSet<PageRun>) -> String {
    let named: Vec<String> = runs
        .iter()
        .map(|run| format!("{}..{}", run.first().0, run.end().0))
        .collect();
    format!("[{}]", named.join(" "))
}

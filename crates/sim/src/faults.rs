//! What a script's steps do: faults strike at once, everything else is the engine's to do when it
//! can.

use std::sync::Arc;

use crate::engine::{Life, Op};
use crate::events::Event;
use crate::rank::{Memory, Served};
use crate::script::{Process, Step};
use crate::world::{World, lock};

/// How soon a process that could not begin is begun again.
const START_AGAIN_NS: u64 = 2_000_000;

impl World {
    pub(crate) fn happen(&self, step: Step) {
        let now_ns = self.clock.now_ns();
        let pools = self.config.pools;
        match step {
            Step::Frame {
                rank,
                pool,
                way,
                skip,
                fault,
            } if self.has(rank) && pool < pools => {
                lock(&self.network).plan(rank, usize::from(pool), way, skip, fault);
            }
            Step::Partition { rank, for_us } if self.has(rank) => {
                lock(&self.network).close_way(rank, now_ns + for_us * 1_000);
            }
            Step::Reset { rank, pool } if self.has(rank) => {
                let open = lock(&self.network).open_between(rank, Some(usize::from(pool)));
                self.count_trouble();
                open.into_iter().for_each(|conn| self.end(conn));
            }
            Step::Stall { who, for_us } => self.stall(who, for_us * 1_000),
            // Long enough for everybody to hear of the end before the beginning.
            Step::Die { who, for_us } => self.die(who, for_us.max(1_000) * 1_000),
            Step::Driver {
                rank,
                call,
                skip,
                times,
            } => {
                if let Some(memory) = self.rank_memory(rank) {
                    memory.driver.plan(call, skip, times.max(1));
                }
            }
            Step::Full { rank, for_us } if self.has(rank) => {
                self.devices[rank].fill();
                self.schedule(now_ns + for_us * 1_000, Event::Unfull(rank));
            }
            Step::Slow {
                rank,
                factor,
                for_us,
            } => {
                if let Some(memory) = self.rank_memory(rank) {
                    memory.driver.set_slow(factor.clamp(1, 1_000));
                    let generation = memory.generation;
                    let at_ns = now_ns + for_us * 1_000;
                    self.schedule(at_ns, Event::Unslow { rank, generation });
                }
            }
            // A rank that a shrunk or hand-written script does not have.
            Step::Frame { .. }
            | Step::Partition { .. }
            | Step::Reset { .. }
            | Step::Full { .. } => {}
            work => self.submit(Op::Step(work)),
        }
    }

    fn has(&self, rank: usize) -> bool {
        rank < self.places.len()
    }

    fn rank_memory(&self, rank: usize) -> Option<Arc<Memory>> {
        self.has(rank).then(|| self.memory(rank)).flatten()
    }

    fn count_trouble(&self) {
        lock(&self.state).trouble += 1;
    }

    /// The rank in the coordinator is stalled, and dies, with it.
    fn is_coordinator(&self, who: Process) -> bool {
        match who {
            Process::Coordinator => true,
            Process::Rank(rank) => Some(rank) == self.local,
        }
    }

    fn stall(&self, who: Process, for_ns: u64) {
        let until_ns = self.clock.now_ns() + for_ns;
        self.count_trouble();
        if self.is_coordinator(who) {
            let mut state = lock(&self.state);
            let before_ns = state.stalled_until_ns.max(self.clock.now_ns());
            state.stalled_until_ns = until_ns.max(before_ns);
            state.stalled_ns += state.stalled_until_ns - before_ns;
            drop(state);
            self.schedule(until_ns, Event::CoordinatorWakes);
        } else if let Process::Rank(rank) = who
            && self.has(rank)
            && let Some(served) = &mut *lock(&self.served[rank])
        {
            served.busy_until_ns = served.busy_until_ns.max(until_ns);
            self.schedule(until_ns, Event::Wakes(rank));
        }
    }

    fn die(&self, who: Process, for_ns: u64) {
        let back_ns = self.clock.now_ns() + for_ns;
        if self.is_coordinator(who) {
            let Some(life) = lock(&self.life).take() else {
                return;
            };
            let mut state = lock(&self.state);
            state.counts.crashes += 1;
            state.trouble += 1;
            state.waiting.clear();
            state.inbox.clear();
            // Whoever counts stalls gets this one back.
            let now_ns = self.clock.now_ns();
            state.stalled_ns -= state.stalled_until_ns.saturating_sub(now_ns);
            state.stalled_until_ns = 0;
            drop(state);
            for rank in 0..self.places.len() {
                let open = lock(&self.network).open_between(rank, None);
                open.into_iter().for_each(|conn| self.end(conn));
                // What it had launched and nobody has heard of dies with it.
                if let Some(memory) = self.memory(rank) {
                    memory.driver.catch_up();
                    memory.driver.forget_arriving();
                }
            }
            if let Some(rank) = self.local {
                self.forget_memory(rank);
            }
            // Operations on the stack may still hold it; they end without doing anything.
            drop(life);
            self.schedule(back_ns, Event::CoordinatorStarts);
        } else if let Process::Rank(rank) = who
            && self.has(rank)
            && self.memory(rank).is_some()
        {
            let mut state = lock(&self.state);
            state.counts.crashes += 1;
            state.trouble += 1;
            drop(state);
            let open = lock(&self.network).open_between(rank, None);
            open.into_iter().for_each(|conn| self.end(conn));
            self.forget_memory(rank);
            self.schedule(back_ns, Event::RankStarts(rank));
        }
    }

    fn forget_memory(&self, rank: usize) {
        let memory = lock(&self.memories)[rank].take();
        if let Some(memory) = memory {
            memory.driver.catch_up();
            memory.driver.die();
        }
        let served = lock(&self.served[rank]).take();
        drop(served);
    }

    pub(crate) fn start_rank(&self, rank: usize) {
        let Some(memory) = self.fresh_memory(rank) else {
            let at_ns = self.clock.now_ns() + START_AGAIN_NS;
            return self.schedule(at_ns, Event::RankStarts(rank));
        };
        let served = Served::new(&self.config, self.places[rank], &memory, self.sabotage);
        lock(&self.memories)[rank] = Some(memory);
        *lock(&self.served[rank]) = Some(served);
        self.count_start();
    }

    fn fresh_memory(&self, rank: usize) -> Option<Arc<Memory>> {
        let mut state = lock(&self.state);
        state.generations[rank] += 1;
        let (generation, epoch) = (state.generations[rank], state.epoch);
        drop(state);
        let device = &self.devices[rank];
        Memory::new(&self.config, device, &self.clock, generation, epoch).map(Arc::new)
    }

    pub(crate) fn start_coordinator(&self) {
        if let Some(rank) = self.local {
            let Some(memory) = self.fresh_memory(rank) else {
                let at_ns = self.clock.now_ns() + START_AGAIN_NS;
                return self.schedule(at_ns, Event::CoordinatorStarts);
            };
            lock(&self.memories)[rank] = Some(memory);
        }
        let mut state = lock(&self.state);
        state.lives += 1;
        let number = state.lives;
        drop(state);
        let life = Arc::new(Life::new(self, number));
        *lock(&self.life) = Some(life);
        for pool in 0..usize::from(self.config.pools) {
            self.submit(Op::Boot(pool));
            self.schedule(
                self.clock.now_ns() + 5_000_000,
                Event::Tick { life: number, pool },
            );
        }
        self.count_start();
    }

    fn count_start(&self) {
        let mut state = lock(&self.state);
        // The first start of each process is none again.
        if self.clock.now_ns() > 0 {
            state.counts.restarts += 1;
        }
    }
}

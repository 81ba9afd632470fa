//! The loop: virtual time, what happens next, and the calls that wait in the middle of it.
//!
//! There is one thread, and the allocator calls its mapper as a function. So a call of the mapper
//! goes on with the loop until its own answer is there: [`World::advance`] does the next thing,
//! whatever that is, and other operations of the coordinator may begin and end in between, as they
//! would in other threads. What waits is on the stack, the answers are not: an operation is over
//! when the ranks say so, however long its caller takes to come back to it.

use std::collections::{BTreeMap, VecDeque};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError, Weak};

use kvcached_mapper::{Cause, MapError, Rank, Stage};
use kvcached_tp_ipc::{Answer, Endpoint, Operation, Place, RankAnswer, Topology};

use crate::Sabotage;
use crate::clock::Clock;
use crate::device::{Device, GRANULE};
use crate::engine::{Life, Op};
use crate::events::Event;
use crate::fan::{Active, ActiveKind, Fan};
use crate::network::{Arrival, ConnId, Network};
use crate::rank::{Memory, Served, geometry};
use crate::report::{Counts, Guarantee, Violation};
use crate::script::{Config, Script, Timed};

/// Operations on the stack at once.
const MAX_DEPTH: usize = 4;

/// Operations that wait for their turn; an engine with more is too busy for another.
const MAX_WAITING: usize = 40;

/// All of a run.
#[derive(Debug)]
pub(crate) struct World {
    pub(crate) me: Weak<Self>,
    pub(crate) config: Config,
    pub(crate) sabotage: Option<Sabotage>,
    pub(crate) clock: Arc<Clock>,
    pub(crate) topology: Topology,
    /// Every rank, in the order of the topology.
    pub(crate) places: Vec<(Stage, Rank)>,
    /// The one in the coordinator.
    pub(crate) local: Option<usize>,
    pub(crate) devices: Vec<Arc<Device>>,
    pub(crate) memories: Mutex<Vec<Option<Arc<Memory>>>>,
    pub(crate) served: Vec<Mutex<Option<Served>>>,
    pub(crate) network: Mutex<Network>,
    pub(crate) life: Mutex<Option<Arc<Life>>>,
    events: Mutex<BTreeMap<(u64, u64), Event>>,
    steps: Mutex<Steps>,
    pub(crate) state: Mutex<State>,
}

#[derive(Debug)]
struct Steps {
    steps: VecDeque<Timed>,
    /// When the first of them is due.
    due_ns: u64,
}

#[derive(Debug, Default)]
pub(crate) struct State {
    next_event: u64,
    /// Lives of the coordinator so far.
    pub(crate) lives: u64,
    /// Lives of each rank so far.
    pub(crate) generations: Vec<u64>,
    pub(crate) stalled_until_ns: u64,
    pub(crate) stalled_ns: u64,
    /// What reached the coordinator while it was stalled.
    pub(crate) inbox: VecDeque<(ConnId, Arrival)>,
    pub(crate) waiting: VecDeque<Op>,
    depth: usize,
    /// The last epoch that was launched, in any life.
    pub(crate) epoch: u64,
    /// The last request, in any life.
    pub(crate) serial: u64,
    /// Processes that died, stalls, and the like: faults that neither network nor drivers count.
    pub(crate) trouble: u64,
    pub(crate) counts: Counts,
    pub(crate) violation: Option<Violation>,
}

/// Locks what one thread alone uses; a second lock of the same is a mistake in the simulation.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    match mutex.try_lock() {
        Ok(guard) => guard,
        Err(TryLockError::Poisoned(poisoned)) => PoisonError::into_inner(poisoned),
        Err(TryLockError::WouldBlock) => unreachable!("a lock of the simulation is held twice"),
    }
}

/// Does what the script says, checks what must hold, and at the end mends everything and checks
/// that it comes to rest.
#[must_use]
pub fn run(script: &Script, sabotage: Option<Sabotage>) -> (Counts, Option<Violation>) {
    let world = World::new(script, sabotage);
    let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        world.play();
        world.settle();
    }));
    let mut state = lock(&world.state);
    if let Err(panic) = outcome {
        let words = panic.downcast_ref::<String>().cloned();
        let words = words.or_else(|| {
            panic
                .downcast_ref::<&str>()
                .map(|words| (*words).to_owned())
        });
        state.violation.get_or_insert_with(|| Violation {
            guarantee: Guarantee::NoPanic,
            at_us: world.clock.now_ns() / 1_000,
            what: words.unwrap_or_else(|| "a panic without words".to_owned()),
        });
    }
    state.counts.steps = script.steps.len() as u64;
    state.counts.virtual_us = world.clock.now_ns() / 1_000;
    let result = (state.counts, state.violation.take());
    drop(state);
    world.take_down();
    result
}

impl World {
    fn new(script: &Script, sabotage: Option<Sabotage>) -> Arc<Self> {
        let config = script.config.clone();
        let topology = topology(&config);
        let places: Vec<_> = topology
            .places()
            .map(|(stage, rank, _)| (stage, rank))
            .collect();
        let local = topology
            .local()
            .and_then(|local| places.iter().position(|place| *place == local));
        let bundle = geometry(&config).bundle_bytes();
        let zeros = u64::from(config.pools) * u64::from(config.zero) * GRANULE;
        let memory = u64::from(config.memory) * bundle + zeros;
        let ranks = places.len();
        let world = Arc::new_cyclic(|me| Self {
            me: Weak::clone(me),
            sabotage,
            clock: Arc::new(Clock::new()),
            topology,
            local,
            devices: places.iter().map(|_| Device::new(memory)).collect(),
            memories: Mutex::new(vec![None; ranks]),
            served: places.iter().map(|_| Mutex::new(None)).collect(),
            network: Mutex::new(Network::new(ranks, config.delays)),
            life: Mutex::new(None),
            events: Mutex::default(),
            steps: Mutex::new(Steps {
                due_ns: script.steps.first().map_or(0, |(after, _)| after * 1_000),
                steps: script.steps.iter().copied().collect(),
            }),
            state: Mutex::new(State {
                generations: vec![0; ranks],
                ..State::default()
            }),
            places,
            config,
        });
        for rank in 0..ranks {
            if Some(rank) != local {
                world.start_rank(rank);
            }
        }
        world.start_coordinator();
        world
    }

    /// Goes on until the script is at its end and nothing waits.
    fn play(&self) {
        while !self.is_over() {
            let idle = lock(&self.state).waiting.is_empty();
            if idle && lock(&self.steps).steps.is_empty() {
                return;
            }
            self.advance();
        }
    }

    /// Does the next thing that happens.
    pub(crate) fn advance(&self) {
        if self.is_over() {
            return;
        }
        if self.drive_fans() || self.begin_waiting() {
            return;
        }
        let Some((at_ns, what)) = self.next() else {
            self.violate(
                Guarantee::Bounded,
                "nothing will ever happen again".to_owned(),
            );
            return;
        };
        self.clock.advance_to(at_ns);
        match what {
            Next::Event(key) => {
                let event = lock(&self.events).remove(&key);
                if let Some(event) = event {
                    self.handle(event);
                }
            }
            Next::Fan(pool) => self.time_out(pool),
            Next::Orphan(rank) => self.orphan(rank),
            Next::Tend(rank) => self.tend(rank),
            Next::Step => {
                let mut steps = lock(&self.steps);
                let Some((_, step)) = steps.steps.pop_front() else {
                    return;
                };
                let next = steps.steps.front().map_or(0, |(after, _)| *after);
                steps.due_ns += next * 1_000;
                drop(steps);
                self.happen(step);
            }
        }
    }

    fn next(&self) -> Option<(u64, Next)> {
        let mut next: Option<(u64, Next)> = None;
        let mut offer = |at_ns: u64, what: Next| {
            if next.as_ref().is_none_or(|(known, _)| at_ns < *known) {
                next = Some((at_ns, what));
            }
        };
        if let Some((key, _)) = lock(&self.events).first_key_value() {
            offer(key.0, Next::Event(*key));
        }
        let stalled_until_ns = lock(&self.state).stalled_until_ns;
        if let Some(life) = self.current() {
            for (index, pool) in life.pools.iter().enumerate() {
                let fan = lock(&pool.fan);
                if let (Some(_), Some(until_ns)) = (&fan.active, fan.wait_until_ns) {
                    offer(until_ns.max(stalled_until_ns), Next::Fan(index));
                }
            }
        }
        for (index, served) in self.served.iter().enumerate() {
            if let Some(served) = &*lock(served)
                && let Some(at) = served.rank.poll_timeout()
            {
                let at_ns = self.clock.ns_of(at).max(served.busy_until_ns);
                offer(at_ns, Next::Orphan(index));
            }
            if let Some(served) = &*lock(served)
                && let Some(at) = served.tend_at
            {
                let at_ns = self.clock.ns_of(at).max(served.busy_until_ns);
                offer(at_ns, Next::Tend(index));
            }
        }
        let steps = lock(&self.steps);
        if !steps.steps.is_empty() {
            offer(steps.due_ns, Next::Step);
        }
        next
    }

    /// Lets `event` happen at its time.
    pub(crate) fn schedule(&self, at_ns: u64, event: Event) {
        let mut state = lock(&self.state);
        state.next_event += 1;
        let number = state.next_event;
        drop(state);
        lock(&self.events).insert((at_ns.max(self.clock.now_ns()), number), event);
    }

    /// Puts an operation of the engine behind those that wait.
    pub(crate) fn submit(&self, op: Op) {
        let mut state = lock(&self.state);
        if state.waiting.len() < MAX_WAITING || !matches!(op, Op::Step(_)) {
            state.waiting.push_back(op);
        }
    }

    /// Begins the first operation that can begin.
    fn begin_waiting(&self) -> bool {
        if self.is_stalled() {
            return false;
        }
        let Some(life) = self.current() else {
            lock(&self.state).waiting.clear();
            return false;
        };
        let mut state = lock(&self.state);
        if state.depth >= MAX_DEPTH {
            return false;
        }
        let Some(index) = state.waiting.iter().position(|op| life.can_begin(op)) else {
            return false;
        };
        let Some(op) = state.waiting.remove(index) else {
            return false;
        };
        state.depth += 1;
        drop(state);
        self.perform_op(&life, op);
        lock(&self.state).depth -= 1;
        self.check_engine(&life);
        true
    }

    /// An operation over all ranks of a pool, as the coordinator's mapper does it.
    pub(crate) fn over_ranks(
        &self,
        life: u64,
        fan: &Mutex<Fan>,
        operation: Operation<'_>,
    ) -> Answer {
        loop {
            if !self.is_current(life) {
                return refused(operation);
            }
            if !self.is_stalled() && lock(fan).active.is_none() {
                break;
            }
            self.advance();
        }
        let ticket = self.begin(fan, operation);
        loop {
            if !self.is_current(life) {
                return refused(operation);
            }
            if !self.is_stalled()
                && let Some(answer) = lock(fan).answers.remove(&ticket)
            {
                return answer;
            }
            self.advance();
        }
    }

    fn begin(&self, fan: &Mutex<Fan>, operation: Operation<'_>) -> u64 {
        let trouble = self.trouble() - u64::from(self.has_trouble_now());
        let stalled_ns = lock(&self.state).stalled_ns;
        let mut fan = lock(fan);
        let ticket = fan.ticket();
        fan.active = Some(Active {
            began_ns: self.clock.now_ns(),
            stalled_ns,
            trouble,
            ..Active::new(ticket, operation)
        });
        let timeout = std::time::Duration::from_micros(self.config.timeout_us);
        fan.fanout.begin(operation, self.clock.now(), timeout);
        ticket
    }

    /// How many faults there were so far, of all kinds.
    pub(crate) fn trouble(&self) -> u64 {
        let drivers: u64 = lock(&self.memories)
            .iter()
            .flatten()
            .map(|memory| memory.driver.faults_met())
            .sum();
        lock(&self.state).trouble + lock(&self.network).faults_met() + drivers + 1
    }

    /// Is a process away, or a way closed?
    fn has_trouble_now(&self) -> bool {
        let now_ns = self.clock.now_ns();
        let dead = lock(&self.memories).iter().any(Option::is_none);
        let network = lock(&self.network);
        let closed = (0..self.places.len()).any(|rank| network.is_closed(rank, now_ns));
        dead || closed
    }

    pub(crate) fn current(&self) -> Option<Arc<Life>> {
        lock(&self.life).clone()
    }

    /// Does this life go on?
    pub(crate) fn is_current(&self, life: u64) -> bool {
        let alive = lock(&self.life)
            .as_ref()
            .is_some_and(|it| it.number == life);
        alive && !self.is_over()
    }

    pub(crate) fn is_stalled(&self) -> bool {
        lock(&self.state).stalled_until_ns > self.clock.now_ns()
    }

    pub(crate) fn is_over(&self) -> bool {
        lock(&self.state).violation.is_some()
    }

    pub(crate) fn depth(&self) -> usize {
        lock(&self.state).depth
    }

    /// The first violation counts; nothing happens after it.
    pub(crate) fn violate(&self, guarantee: Guarantee, what: String) {
        let at_us = self.clock.now_ns() / 1_000;
        lock(&self.state).violation.get_or_insert(Violation {
            guarantee,
            at_us,
            what,
        });
    }

    pub(crate) fn memory(&self, rank: usize) -> Option<Arc<Memory>> {
        lock(&self.memories)[rank].clone()
    }

    /// Ends all processes, so that nothing is left behind.
    fn take_down(&self) {
        let life = lock(&self.life).take();
        drop(life);
        for memory in std::mem::take(&mut *lock(&self.memories))
            .into_iter()
            .flatten()
        {
            memory.driver.die();
        }
        for served in &self.served {
            drop(lock(served).take());
        }
    }
}

#[derive(Debug, Clone, Copy)]
enum Next {
    Event((u64, u64)),
    Fan(usize),
    Orphan(usize),
    Tend(usize),
    Step,
}

/// What a mapper answers that is no more.
fn refused(operation: Operation<'_>) -> Answer {
    let error = MapError::clean(Cause::Diverged {
        stage: Stage(0),
        rank: Rank(0),
    });
    match Active::new(0, operation).kind {
        ActiveKind::Map | ActiveKind::Unmap => Answer::Batch(Err(error)),
        ActiveKind::Ready => Answer::Ready(Err(error)),
        ActiveKind::Headroom => Answer::Headroom(None),
        ActiveKind::Trim => Answer::Trimmed,
        ActiveKind::Reconcile => Answer::Reconciled(Err(error)),
    }
}

/// The answer of the local mapper, and what it is for.
#[derive(Debug)]
pub(crate) struct LocalDone {
    pub(crate) life: u64,
    pub(crate) pool: usize,
    pub(crate) answer: RankAnswer,
}

fn topology(config: &Config) -> Topology {
    let stages = (0..config.stages.max(1)).map(Stage);
    let places = stages.flat_map(|stage| {
        (0..config.ranks.max(1)).map(move |rank| {
            let place = if config.local && (stage, rank) == (Stage(0), 0) {
                Place::Local
            } else {
                let path = format!("/sim/s{}-r{rank}.sock", stage.0);
                Place::Remote(Endpoint::new(Path::new(&path)).expect("a short path"))
            };
            ((stage, Rank(rank)), place)
        })
    });
    Topology::from_places(places).expect("every rank has one place of its own")
}

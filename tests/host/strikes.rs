//! What kills a process, or stops it, at any moment of a map, an unmap or a resynchronisation. A
//! new process takes the dead one's place; after that nothing is wrong, lost untold, or leaked.

use std::os::unix::process::ExitStatusExt;
use std::time::Duration;

use kvcached_tp_ipc::Deadline;
use nix::sys::signal::Signal;

use crate::crew::{DEVICE_BYTES, Engine, PAGE_BYTES, Process, RECOVERY};
use crate::crew::{blocks, order, pages, pass, within};
use crate::strike::{Call, Point, Stroke};

const CALLS: [Call; 6] = [
    Call::Map,
    Call::Undo,
    Call::Prepare,
    Call::Commit,
    Call::Abort,
    Call::Resync,
];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Victim {
    Rank,
    Coordinator,
    Both,
    /// The rank and its neighbour.
    Ranks,
    /// The rank, which goes on once the coordinator has given it up.
    StoppedRank,
    /// The coordinator, and the rank is stopped: it goes on beside the next one.
    CoordinatorAndStoppedRank,
}

impl Victim {
    /// What rank 0 does.
    fn stroke(self, coordinator: &Process, neighbour: &Process) -> Stroke {
        match self {
            Self::Rank => Stroke::Die,
            Self::Coordinator => Stroke::Kill(coordinator.id()),
            Self::Both => Stroke::Both(coordinator.id()),
            Self::Ranks => Stroke::Both(neighbour.id()),
            Self::StoppedRank => Stroke::Stop,
            Self::CoordinatorAndStoppedRank => Stroke::KillAndStop(coordinator.id()),
        }
    }

    const fn is_coordinator(self) -> bool {
        matches!(
            self,
            Self::Coordinator | Self::Both | Self::CoordinatorAndStoppedRank
        )
    }

    /// Long enough that nobody is given up, or short if somebody is to be.
    const fn ipc_timeout(self) -> Duration {
        match self {
            Self::StoppedRank => Duration::from_millis(150),
            _ => Duration::from_secs(20),
        }
    }
}

/// The processes of a row, and the blocks that its coordinator has handed out.
struct Row {
    name: String,
    engine: Engine,
    ranks: Vec<Process>,
    coordinator: Process,
    held: Vec<u32>,
}

fn points() -> impl Iterator<Item = Point> {
    CALLS
        .into_iter()
        .flat_map(|call| [Point::Before(call), Point::After(call)])
}

const fn call(point: Point) -> Call {
    match point {
        Point::Before(call) | Point::After(call) => call,
    }
}

impl Row {
    /// A row whose ranks have something mapped and written.
    fn new(name: String, engine: Engine) -> Self {
        let ranks = engine.ranks();
        let mut coordinator = engine.coordinator();
        let held = coordinator.alloc(9);
        let mut row = Self {
            name,
            engine,
            ranks,
            coordinator,
            held,
        };
        for rank in &mut row.ranks {
            rank.told(&order("write", &row.held));
        }
        row
    }

    /// Has the coordinator do what gets `who` to the point, and notes what came of it. Without an
    /// answer it has ended.
    fn provoke(&mut self, call: Call, arm: impl FnOnce(&mut Self)) {
        let refuses = |point| format!("strike {point} {}", Stroke::Refuse);
        match call {
            Call::Resync => arm(self),
            Call::Map | Call::Undo => {
                arm(self);
                if call == Call::Undo {
                    let last = self.ranks.last_mut().expect("a rank");
                    last.told(&refuses(Point::Before(Call::Map)));
                }
                if let Some(answer) = self.coordinator.ask("alloc 6") {
                    self.held.extend(blocks(&answer).unwrap_or_default());
                }
            }
            Call::Prepare | Call::Commit | Call::Abort => {
                let spare = self.coordinator.alloc(8);
                arm(self);
                if call == Call::Abort {
                    let last = self.ranks.last_mut().expect("a rank");
                    last.told(&refuses(Point::Before(Call::Prepare)));
                }
                if let Some(answer) = self.coordinator.ask(&order("free", &spare)) {
                    assert_eq!(answer, "freed", "{}", self.name);
                    self.coordinator.ask("trim");
                }
            }
        }
    }

    /// Waits for what befalls the ranks, and puts others in the place of the dead.
    fn replace_ranks(&mut self, victim: Victim) {
        let dead = match victim {
            Victim::Rank | Victim::Both => 1,
            Victim::Ranks => 2,
            Victim::Coordinator => 0,
            Victim::StoppedRank | Victim::CoordinatorAndStoppedRank => {
                self.ranks[0].stopped();
                0
            }
        };
        for (number, rank) in (0..).zip(&mut self.ranks[..dead]) {
            assert_eq!(rank.ended().signal(), Some(9), "{}", self.name);
            *rank = self.engine.rank(number);
        }
    }

    /// Waits until the coordinator has given rank 0 up, and looks whether it says so.
    fn is_fenced(&mut self) {
        let given_up = format!("{}: the rank is given up", self.name);
        within(RECOVERY, &given_up, || {
            let health = self.coordinator.told("health");
            health.starts_with("fenced").then_some(())
        });
        let refused = self.coordinator.told("alloc 1");
        let named = refused.contains("stage 0, rank 0");
        assert!(named, "{}: {refused}", self.name);
    }

    /// Another coordinator: it finds the ranks that live, and they are empty but for its null
    /// block's page.
    fn replace_coordinator(&mut self) {
        let Self {
            name,
            engine,
            ranks,
            coordinator,
            held,
        } = self;
        assert_eq!(coordinator.ended().signal(), Some(9), "{name}");
        let bound = Deadline::after(RECOVERY);
        let mut next = engine.gated_coordinator();
        next.tell("begin");
        // Whoever is stopped finds the words of both coordinators.
        ranks.iter().for_each(|rank| rank.signal(Signal::SIGCONT));
        *coordinator = next.ready().expect(name);
        assert!(!bound.is_over(), "{name}");
        held.clear();
        for rank in ranks {
            assert_eq!(rank.told("mapped"), "0+1", "{name}: {}", rank.name);
        }
    }

    /// Waits until all is well again: what a coordinator says is as of its last look, so that says
    /// nothing about a rank that has died since. Losses are told as often as the bounds say.
    fn recovers(&mut self, (least, most): (u64, u64)) {
        let whole = format!("{}: every rank is known again, and loss told", self.name);
        let lost = within(RECOVERY, &whole, || {
            let lost = self.coordinator.told("lost");
            let lost = lost.parse::<u64>().expect("a number");
            let known = self.coordinator.told("health") == "healthy"
                && self.coordinator.told("quarantined") == "0";
            (known && lost >= least && self.disagreement().is_none()).then_some(lost)
        });
        assert!(lost <= most, "{}: {lost}", self.name);
        let more = self.coordinator.alloc(6);
        assert!(
            more.iter().all(|block| !self.held.contains(block)),
            "{}",
            self.name
        );
        self.held.extend(more);
        assert_eq!(self.disagreement(), None, "{}", self.name);
    }

    /// What the ranks have, unless every one has exactly the pages that the coordinator believes in.
    fn disagreement(&mut self) -> Option<Vec<String>> {
        let believed: u64 = self.coordinator.told("pages").parse().expect("a number");
        let ranks = self.ranks.iter_mut().map(|rank| rank.told("mapped"));
        let mut all: Vec<String> = ranks.collect();
        if self.engine.rank0 {
            all.push(self.coordinator.told("mapped"));
        }
        let same = all.iter().all(|one| *one == all[0]);
        (!same || pages(&all[0]) != believed).then_some(all)
    }

    /// Frees everything: no rank is left with anything, and no process leaves anything behind.
    fn leaves_nothing(mut self) {
        let freed = self.coordinator.told(&order("free", &self.held));
        assert_eq!(freed, "freed", "{}", self.name);
        let trimmed = self.coordinator.told("trim");
        assert!(!trimmed.starts_with("refused"), "{}: {trimmed}", self.name);
        for rank in &mut self.ranks {
            assert_eq!(rank.memory(), DEVICE_BYTES - PAGE_BYTES, "{}", self.name);
        }
        self.coordinator.end();
        for rank in &mut self.ranks {
            assert_eq!(rank.told("mapped"), "", "{}", self.name);
            assert_eq!(rank.memory(), DEVICE_BYTES, "{}", self.name);
        }
        self.ranks.into_iter().for_each(Process::end);
        assert!(!self.engine.directory().exists(), "{}", self.name);
    }
}

/// One row of the table: rank 0 strikes at the point.
fn strike(point: Point, victim: Victim) {
    let engine = Engine {
        ipc_timeout: victim.ipc_timeout(),
        ..Engine::new()
    };
    let mut row = Row::new(format!("{point}, {victim:?}"), engine);
    let held = row.held.clone();
    let stroke = victim.stroke(&row.coordinator, &row.ranks[1]);
    row.provoke(call(point), |row| {
        if call(point) == Call::Resync {
            // What there is to remake was lost with another process.
            row.ranks[0].kill();
            let words = [point.to_string(), stroke.to_string()];
            row.ranks[0] = row.engine.rank_that_strikes(0, &words);
        } else {
            row.ranks[0].told(&format!("strike {point} {stroke}"));
        }
    });
    row.replace_ranks(victim);
    if victim == Victim::StoppedRank {
        row.is_fenced();
        row.ranks[0].signal(Signal::SIGCONT);
    }
    if victim.is_coordinator() {
        row.replace_coordinator();
        row.recovers((0, 0));
    } else {
        let second = victim == Victim::Ranks;
        let first = second || victim == Victim::Rank || call(point) == Call::Resync;
        let lost = [first, second];
        // Both are told at once, or one after the other, as they were found.
        row.recovers(match lost {
            [true, true] => (1, 2),
            [true, false] => (1, 1),
            _ => (0, 0),
        });
        for (rank, lost) in row.ranks.iter_mut().zip(lost) {
            let holds = rank.told(&order("holds", &held));
            assert_eq!(holds, (!lost).to_string(), "{}: {}", row.name, rank.name);
        }
    }
    assert_eq!(row.ranks[0].told("armed"), "false", "{}", row.name);
    row.leaves_nothing();
}

/// The same amid the start of a coordinator: a rank that has what an earlier one had mapped is told
/// to have nothing.
fn strike_a_start(point: Point, victim: Victim) {
    let engine = Engine {
        ipc_timeout: victim.ipc_timeout(),
        ..Engine::new()
    };
    let mut row = Row::new(format!("a start, {point}, {victim:?}"), engine);
    row.coordinator.kill();
    row.held.clear();
    let mut next = row.engine.gated_coordinator();
    let stroke = victim.stroke(&next, &row.ranks[1]);
    row.ranks[0].told(&format!("strike {point} {stroke}"));
    next.tell("begin");
    row.replace_ranks(victim);
    if victim.is_coordinator() {
        row.coordinator = next;
        row.replace_coordinator();
    } else {
        if victim == Victim::StoppedRank {
            pass(row.engine.ipc_timeout * 2);
            row.ranks[0].signal(Signal::SIGCONT);
        }
        row.coordinator = next.ready().expect(&row.name);
    }
    row.recovers((0, 0));
    assert_eq!(row.ranks[0].told("armed"), "false", "{}", row.name);
    row.leaves_nothing();
}

#[test]
fn a_rank_killed_at_any_point_is_replaced_and_its_loss_is_told() {
    points().for_each(|point| strike(point, Victim::Rank));
}

#[test]
fn a_coordinator_killed_at_any_point_is_followed_by_one_that_starts_over() {
    points().for_each(|point| strike(point, Victim::Coordinator));
}

#[test]
fn a_rank_and_its_coordinator_killed_at_any_point_are_both_replaced() {
    points().for_each(|point| strike(point, Victim::Both));
}

#[test]
fn two_ranks_killed_at_any_point_are_both_replaced_and_their_loss_is_told() {
    points().for_each(|point| strike(point, Victim::Ranks));
}

#[test]
fn a_rank_stopped_at_any_point_is_fenced_and_comes_back_with_its_content() {
    points().for_each(|point| strike(point, Victim::StoppedRank));
}

#[test]
fn a_rank_stopped_at_any_point_starts_over_with_the_coordinator_that_comes_meanwhile() {
    points().for_each(|point| strike(point, Victim::CoordinatorAndStoppedRank));
}

#[test]
fn a_start_survives_whatever_befalls_its_ranks_and_makes_way_for_another() {
    for point in points().filter(|point| call(*point) == Call::Resync) {
        strike_a_start(point, Victim::Rank);
        strike_a_start(point, Victim::Coordinator);
        strike_a_start(point, Victim::Both);
        strike_a_start(point, Victim::Ranks);
        strike_a_start(point, Victim::StoppedRank);
        strike_a_start(point, Victim::CoordinatorAndStoppedRank);
    }
}

/// The coordinator is struck where it does its own part, before or after the other ranks theirs.
#[test]
fn a_coordinator_killed_in_its_own_part_is_followed_by_one_that_starts_over() {
    for point in points().filter(|point| call(*point) != Call::Resync) {
        let engine = Engine {
            rank0: true,
            ..Engine::new()
        };
        let mut row = Row::new(format!("{point}, rank 0 coordinates"), engine);
        row.provoke(call(point), |row| {
            row.coordinator
                .told(&format!("strike {point} {}", Stroke::Die));
        });
        row.replace_coordinator();
        row.recovers((0, 0));
        row.leaves_nothing();
    }
}

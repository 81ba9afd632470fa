//! What kills a process, or stops it, at any moment of a map, an unmap or a resynchronisation. A
//! new process takes the dead one's place; after that nothing is wrong, lost untold, or leaked.

use std::os::unix::process::ExitStatusExt;
use std::time::Duration;

use nix::sys::signal::Signal;

use crate::crew::{DEVICE_BYTES, Engine, PAGE_BYTES, Process, RECOVERY};
use crate::crew::{blocks, order, pages, within};
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
    /// The rank, which goes on once the coordinator has given it up.
    StoppedRank,
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
        let next = within(RECOVERY, name, || engine.try_coordinator().ok());
        *coordinator = next;
        held.clear();
        for rank in ranks {
            assert_eq!(rank.told("mapped"), "0+1", "{name}: {}", rank.name);
        }
    }

    /// Waits until all is well, and looks whether it is.
    fn recovers(&mut self, lost: &str) {
        let Self {
            name, coordinator, ..
        } = self;
        let whole = format!("{name}: every rank is known again");
        within(RECOVERY, &whole, || {
            let well = coordinator.told("health") == "healthy";
            (well && coordinator.told("quarantined") == "0").then_some(())
        });
        assert_eq!(coordinator.told("lost"), lost, "{name}");
        self.agree();
        let more = self.coordinator.alloc(6);
        assert!(
            more.iter().all(|block| !self.held.contains(block)),
            "{}",
            self.name
        );
        self.held.extend(more);
        self.agree();
    }

    /// Every rank has exactly the pages that the coordinator believes in.
    fn agree(&mut self) {
        let believed: u64 = self.coordinator.told("pages").parse().expect("a number");
        let mut all: Vec<String> = self
            .ranks
            .iter_mut()
            .map(|rank| rank.told("mapped"))
            .collect();
        if self.engine.rank0 {
            all.push(self.coordinator.told("mapped"));
        }
        assert_eq!(pages(&all[0]), believed, "{}", self.name);
        assert!(
            all.iter().all(|one| *one == all[0]),
            "{}: {all:?}",
            self.name
        );
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
        ipc_timeout: match victim {
            Victim::StoppedRank => Duration::from_millis(150),
            _ => Engine::new().ipc_timeout,
        },
        ..Engine::new()
    };
    let mut row = Row::new(format!("{point}, {victim:?}"), engine);
    let held = row.held.clone();
    let coordinator = i32::try_from(row.coordinator.id()).expect("a process number");
    let stroke = match victim {
        Victim::Rank => Stroke::Die,
        Victim::Coordinator => Stroke::Kill(coordinator),
        Victim::Both => Stroke::Both(coordinator),
        Victim::StoppedRank => Stroke::Stop,
    };
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
    match victim {
        Victim::Rank | Victim::Both => {
            assert_eq!(row.ranks[0].ended().signal(), Some(9), "{}", row.name);
            row.ranks[0] = row.engine.rank(0);
        }
        Victim::Coordinator => {}
        Victim::StoppedRank => {
            row.ranks[0].stopped();
            let given_up = format!("{}: the rank is given up", row.name);
            within(RECOVERY, &given_up, || {
                row.coordinator
                    .told("health")
                    .starts_with("fenced")
                    .then_some(())
            });
            let refused = row.coordinator.told("alloc 1");
            assert!(
                refused.contains("stage 0, rank 0"),
                "{}: {refused}",
                row.name
            );
            row.ranks[0].signal(Signal::SIGCONT);
        }
    }
    let starts_over = matches!(victim, Victim::Coordinator | Victim::Both);
    if starts_over {
        row.replace_coordinator();
    }
    let loses = !starts_over && (victim == Victim::Rank || call(point) == Call::Resync);
    row.recovers(if loses { "1" } else { "0" });
    assert_eq!(row.ranks[0].told("armed"), "false", "{}", row.name);
    if !starts_over {
        for (rank, lost) in row.ranks.iter_mut().zip([loses, false]) {
            let holds = rank.told(&order("holds", &held));
            assert_eq!(holds, (!lost).to_string(), "{}: {}", row.name, rank.name);
        }
    }
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
fn a_rank_stopped_at_any_point_is_fenced_and_comes_back_with_its_content() {
    points().for_each(|point| strike(point, Victim::StoppedRank));
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
        row.recovers("0");
        row.leaves_nothing();
    }
}

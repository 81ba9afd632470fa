//! What a process of an engine is, over its life: a pure state machine.
//!
//! Engines initialise a process more than once. A coordinator that later turns out to hold rank 0
//! as well becomes *local* for that rank; saying the same thing again changes nothing; saying
//! something else is an error that changes nothing either. Shutting down forgets everything, so
//! that another engine can start in the same process.

use kvcached_mapper::{Rank, Stage};
use thiserror::Error;

use crate::detect::{Arrangement, Detected, Role, World};

/// The state of one process: nothing yet, or the parts it has taken so far.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct EngineProcess {
    taken: Option<Taken>,
}

/// What a process has to run now.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Mode {
    /// A scheduler over this arrangement, and no listener.
    Coordinator(Arrangement),
    /// A worker that listens as this rank, and no scheduler.
    Worker {
        /// Own stage.
        stage: Stage,
        /// Own rank.
        rank: Rank,
    },
}

/// What an initialisation did.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Change {
    /// The first one: run this.
    Started(Mode),
    /// Rank 0 lives in this coordinator's process: run this instead of what ran so far.
    BecameLocal(Mode),
    /// It said what was known: go on with this.
    Unchanged(Mode),
}

/// An initialisation that does not go with an earlier one, or a question before the first.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum RoleError {
    /// Asked before anything was initialised. The answer is never "one rank": a coordinator that
    /// believes so leaves all others without memory.
    #[error("nothing is initialised in this process")]
    NotInitialised,
    /// Another size than the one in use.
    #[error(
        "this process is initialised for {} ranks in {} stages, not {} in {}",
        .current.tp, .current.stages, .asked.tp, .asked.stages
    )]
    OtherWorld {
        /// In use.
        current: World,
        /// Asked for.
        asked: World,
    },
    /// Another arrangement than the one in use.
    #[error("this process coordinates {current:?}, not {asked:?}")]
    OtherArrangement {
        /// In use.
        current: Arrangement,
        /// Asked for.
        asked: Arrangement,
    },
    /// Another rank than the own one.
    #[error("this process is {}, {}, not {}, {}", .current.0, .current.1, .asked.0, .asked.1)]
    OtherRank {
        /// In use.
        current: (Stage, Rank),
        /// Asked for.
        asked: (Stage, Rank),
    },
    /// Only rank 0 can live in the process of a coordinator, and only of a single stage.
    #[error("{}, {} cannot live in the process that coordinates {arrangement:?}", .asked.0, .asked.1)]
    NotBesideCoordinator {
        /// The coordinator's arrangement.
        arrangement: Arrangement,
        /// The rank asked for.
        asked: (Stage, Rank),
    },
    /// A worker that listens already does not turn into a coordinator.
    #[error("this process listens as {}, {}: it cannot coordinate as well", .current.0, .current.1)]
    CoordinatorAfterWorker {
        /// The rank it listens as.
        current: (Stage, Rank),
    },
}

/// The parts taken; a worker beside a coordinator is the coordinator's local rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Taken {
    world: World,
    parts: Parts,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Parts {
    Coordinator(Arrangement),
    Worker(Stage, Rank),
    /// A coordinator whose process turned out to hold a rank: the arrangement as it was said and
    /// as it now is.
    Both {
        said: Arrangement,
        local: Arrangement,
        at: (Stage, Rank),
    },
}

impl EngineProcess {
    /// A process in which nothing is initialised.
    #[must_use]
    pub const fn new() -> Self {
        Self { taken: None }
    }

    /// Takes the part that was detected.
    ///
    /// # Errors
    /// If it does not go with what was taken before; nothing has changed then.
    pub fn init(&mut self, detected: &Detected) -> Result<Change, RoleError> {
        let Some(taken) = self.taken else {
            let parts = match detected.role {
                Role::Coordinator(arrangement) => Parts::Coordinator(arrangement),
                Role::Worker { stage, rank } => Parts::Worker(stage, rank),
            };
            self.taken = Some(Taken {
                world: detected.world,
                parts,
            });
            return Ok(Change::Started(parts.mode()));
        };
        if taken.world != detected.world {
            return Err(RoleError::OtherWorld {
                current: taken.world,
                asked: detected.world,
            });
        }
        let parts = match detected.role {
            Role::Coordinator(asked) => taken.parts.with_coordinator(asked)?,
            Role::Worker { stage, rank } => taken.parts.with_worker(stage, rank)?,
        };
        self.taken = Some(Taken { parts, ..taken });
        if parts.mode() == taken.parts.mode() {
            Ok(Change::Unchanged(parts.mode()))
        } else {
            Ok(Change::BecameLocal(parts.mode()))
        }
    }

    /// What the process has to run; `None` before the first initialisation and after a shutdown.
    #[must_use]
    pub fn mode(&self) -> Option<Mode> {
        self.taken.map(|taken| taken.parts.mode())
    }

    /// Ranks and stages of the instance.
    ///
    /// # Errors
    /// [`RoleError::NotInitialised`] before the first initialisation and after a shutdown.
    pub fn world(&self) -> Result<World, RoleError> {
        self.taken
            .map(|taken| taken.world)
            .ok_or(RoleError::NotInitialised)
    }

    /// Forgets the part and the world, and tells what ran so far.
    pub fn shutdown(&mut self) -> Option<Mode> {
        self.taken.take().map(|taken| taken.parts.mode())
    }
}

impl Parts {
    const fn mode(self) -> Mode {
        match self {
            Self::Coordinator(arrangement)
            | Self::Both {
                local: arrangement, ..
            } => Mode::Coordinator(arrangement),
            Self::Worker(stage, rank) => Mode::Worker { stage, rank },
        }
    }

    fn with_coordinator(self, asked: Arrangement) -> Result<Self, RoleError> {
        match self {
            Self::Coordinator(current) if current == asked => Ok(self),
            // Both the arrangement as first said and as it turned out are the same thing again.
            Self::Both { said, local, .. } if asked == said || asked == local => Ok(self),
            Self::Coordinator(current) | Self::Both { local: current, .. } => {
                Err(RoleError::OtherArrangement { current, asked })
            }
            Self::Worker(stage, rank) => Err(RoleError::CoordinatorAfterWorker {
                current: (stage, rank),
            }),
        }
    }

    fn with_worker(self, stage: Stage, rank: Rank) -> Result<Self, RoleError> {
        let asked = (stage, rank);
        match self {
            Self::Worker(own_stage, own_rank) if (own_stage, own_rank) == asked => Ok(self),
            Self::Worker(own_stage, own_rank) => Err(RoleError::OtherRank {
                current: (own_stage, own_rank),
                asked,
            }),
            Self::Both { at, .. } if at == asked => Ok(self),
            Self::Both { at, .. } => Err(RoleError::OtherRank { current: at, asked }),
            Self::Coordinator(said) => match said.with_local(stage, rank) {
                Some(local) => Ok(Self::Both {
                    said,
                    local,
                    at: asked,
                }),
                None => Err(RoleError::NotBesideCoordinator {
                    arrangement: said,
                    asked,
                }),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn coordinator(tp: u16, stages: u16) -> Detected {
        detected(
            tp,
            stages,
            Role::Coordinator(Arrangement::Separate { tp, stages }),
        )
    }

    fn worker(tp: u16, stages: u16, stage: u16, rank: u16) -> Detected {
        detected(
            tp,
            stages,
            Role::Worker {
                stage: Stage(stage),
                rank: Rank(rank),
            },
        )
    }

    fn detected(tp: u16, stages: u16, role: Role) -> Detected {
        Detected {
            role,
            world: World { tp, stages },
            replica: None,
            fell_back: false,
        }
    }

    #[test]
    fn coordinator_then_worker_of_rank0_becomes_local() {
        let mut process = EngineProcess::new();
        let separate = Mode::Coordinator(Arrangement::Separate { tp: 1, stages: 1 });
        assert_eq!(
            process.init(&coordinator(1, 1)),
            Ok(Change::Started(separate))
        );
        let local = Mode::Coordinator(Arrangement::Single);
        assert_eq!(
            process.init(&worker(1, 1, 0, 0)),
            Ok(Change::BecameLocal(local))
        );
        assert_eq!(process.mode(), Some(local));
    }

    #[test]
    fn coordinator_then_worker_of_rank0_keeps_the_other_ranks_remote() {
        let mut process = EngineProcess::new();
        process.init(&coordinator(4, 1)).unwrap();
        let local = Mode::Coordinator(Arrangement::Rank0 { tp: 4 });
        assert_eq!(
            process.init(&worker(4, 1, 0, 0)),
            Ok(Change::BecameLocal(local))
        );
        assert_eq!(process.world(), Ok(World { tp: 4, stages: 1 }));
    }

    #[test]
    fn a_worker_alone_listens() {
        let mut process = EngineProcess::new();
        let mode = Mode::Worker {
            stage: Stage(1),
            rank: Rank(2),
        };
        assert_eq!(process.init(&worker(4, 2, 1, 2)), Ok(Change::Started(mode)));
    }

    #[test]
    fn repeating_any_initialisation_changes_nothing() {
        let mut process = EngineProcess::new();
        process.init(&coordinator(2, 1)).unwrap();
        let before = process.clone();
        let mode = before.mode().unwrap();
        assert_eq!(
            process.init(&coordinator(2, 1)),
            Ok(Change::Unchanged(mode))
        );
        assert_eq!(process, before);

        process.init(&worker(2, 1, 0, 0)).unwrap();
        let before = process.clone();
        let mode = before.mode().unwrap();
        for again in [
            worker(2, 1, 0, 0),
            coordinator(2, 1),
            detected(2, 1, Role::Coordinator(Arrangement::Rank0 { tp: 2 })),
        ] {
            assert_eq!(
                process.init(&again),
                Ok(Change::Unchanged(mode)),
                "{again:?}"
            );
            assert_eq!(process, before);
        }

        let mut process = EngineProcess::new();
        process.init(&worker(2, 1, 0, 1)).unwrap();
        let mode = process.mode().unwrap();
        assert_eq!(
            process.init(&worker(2, 1, 0, 1)),
            Ok(Change::Unchanged(mode))
        );
    }

    /// A second initialisation once overwrote the stage with 0.
    #[test]
    fn an_initialisation_with_other_parameters_is_an_error_and_changes_nothing() {
        let at = |stage, rank| (Stage(stage), Rank(rank));
        let separate = |tp, stages| Arrangement::Separate { tp, stages };
        let cases = [
            (
                vec![worker(2, 2, 1, 1)],
                worker(2, 2, 0, 1),
                RoleError::OtherRank {
                    current: at(1, 1),
                    asked: at(0, 1),
                },
            ),
            (
                vec![coordinator(2, 1)],
                coordinator(4, 1),
                RoleError::OtherWorld {
                    current: World { tp: 2, stages: 1 },
                    asked: World { tp: 4, stages: 1 },
                },
            ),
            (
                vec![coordinator(2, 1)],
                detected(2, 1, Role::Coordinator(Arrangement::Rank0 { tp: 2 })),
                RoleError::OtherArrangement {
                    current: separate(2, 1),
                    asked: Arrangement::Rank0 { tp: 2 },
                },
            ),
            (
                vec![coordinator(2, 1)],
                worker(2, 1, 0, 1),
                RoleError::NotBesideCoordinator {
                    arrangement: separate(2, 1),
                    asked: at(0, 1),
                },
            ),
            (
                vec![coordinator(2, 2)],
                worker(2, 2, 0, 0),
                RoleError::NotBesideCoordinator {
                    arrangement: separate(2, 2),
                    asked: at(0, 0),
                },
            ),
            (
                vec![coordinator(2, 1), worker(2, 1, 0, 0)],
                worker(2, 1, 0, 1),
                RoleError::OtherRank {
                    current: at(0, 0),
                    asked: at(0, 1),
                },
            ),
            (
                vec![worker(2, 1, 0, 0)],
                coordinator(2, 1),
                RoleError::CoordinatorAfterWorker { current: at(0, 0) },
            ),
        ];
        for (first, second, expected) in cases {
            let mut process = EngineProcess::new();
            for step in first {
                process.init(&step).unwrap();
            }
            let before = process.clone();
            assert_eq!(process.init(&second), Err(expected));
            assert_eq!(process, before);
        }
    }

    #[test]
    fn rank_0_beside_its_coordinator_is_where_it_was_said_to_be() {
        for arrangement in [Arrangement::Single, Arrangement::Rank0 { tp: 2 }] {
            let tp = if arrangement == Arrangement::Single {
                1
            } else {
                2
            };
            let mut process = EngineProcess::new();
            process
                .init(&detected(tp, 1, Role::Coordinator(arrangement)))
                .unwrap();
            let mode = Mode::Coordinator(arrangement);
            assert_eq!(
                process.init(&worker(tp, 1, 0, 0)),
                Ok(Change::Unchanged(mode))
            );
            assert!(process.init(&worker(tp, 1, 0, 1)).is_err());
        }
    }

    #[test]
    fn autonomous_rank_beside_its_own_scheduler_stays_autonomous() {
        let own = Arrangement::Autonomous {
            stage: Stage(1),
            rank: Rank(3),
        };
        let mut process = EngineProcess::new();
        process
            .init(&detected(4, 2, Role::Coordinator(own)))
            .unwrap();
        let mode = Mode::Coordinator(own);
        assert_eq!(
            process.init(&worker(4, 2, 1, 3)),
            Ok(Change::Unchanged(mode))
        );
        assert!(process.init(&worker(4, 2, 1, 2)).is_err());
    }

    /// A coordinator built before the first initialisation once believed in one rank.
    #[test]
    fn the_world_is_unknown_before_init_and_after_shutdown() {
        let mut process = EngineProcess::new();
        assert_eq!(process.world(), Err(RoleError::NotInitialised));
        assert_eq!(process.shutdown(), None);
        process.init(&coordinator(4, 1)).unwrap();
        assert_eq!(process.world(), Ok(World { tp: 4, stages: 1 }));
        process.shutdown();
        assert_eq!(process.world(), Err(RoleError::NotInitialised));
        assert_eq!(process.mode(), None);
    }

    #[test]
    fn after_shutdown_another_layout_starts_with_nothing_left_over() {
        let firsts: [&[Detected]; 3] = [
            &[coordinator(1, 1), worker(1, 1, 0, 0)],
            &[worker(2, 2, 1, 1)],
            &[coordinator(4, 1)],
        ];
        for first in firsts {
            let mut process = EngineProcess::new();
            for step in first {
                process.init(step).unwrap();
            }
            assert!(process.shutdown().is_some());
            assert_eq!(process, EngineProcess::new());
            let mode = Mode::Worker {
                stage: Stage(0),
                rank: Rank(1),
            };
            assert_eq!(process.init(&worker(2, 1, 0, 1)), Ok(Change::Started(mode)));
            assert_eq!(process.world(), Ok(World { tp: 2, stages: 1 }));
        }
    }
}

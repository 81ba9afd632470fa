//! From what an engine reports about its ranks to the part that this process plays.
//!
//! Pure functions over values that an engine may or may not know. The rules common to all engines
//! are here; [`crate::vllm`] and [`crate::sglang`] say which arrangement an engine has of itself.
//! What contradicts itself is an error; what is missing altogether is one GPU, and a debug line
//! says so.

use std::fmt;
use std::str::FromStr;

use kvcached_mapper::{Rank, Stage};
use thiserror::Error;

mod rules;

pub(crate) use rules::{Nature, assign, check};

/// What an engine reports about parallelism. `None` is *the engine cannot say*, never *no*.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RankReport {
    /// Tensor-parallel ranks of one stage.
    pub tp_size: Option<u32>,
    /// Tensor-parallel rank of this process.
    pub tp_rank: Option<u32>,
    /// Pipeline stages.
    pub pp_size: Option<u32>,
    /// Pipeline stage of this process.
    pub pp_rank: Option<u32>,
    /// Ranks of all stages together, where the engine states it apart from the two sizes.
    pub world_size: Option<u32>,
    /// Does this process hold KV tensors and take orders, rather than give them?
    pub is_worker: Option<bool>,
    /// Replicas of the whole engine (data parallelism).
    pub dp_size: Option<u32>,
    /// The replica that this process belongs to.
    pub dp_rank: Option<u32>,
    /// Hosts that the ranks are spread over.
    pub hosts: Option<u32>,
}

/// The arrangement an operator asks for (`KVCACHED_TOPOLOGY`), whatever the engine would have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum TopologyMode {
    /// One process, one rank.
    Single,
    /// The coordinator lives inside rank 0 and drives the others.
    Rank0,
    /// The coordinator is a process of its own, without a rank.
    Separate,
    /// Every rank runs a scheduler of its own.
    Autonomous,
}

/// Where the ranks of an instance are, as seen by the process that coordinates.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Arrangement {
    /// One rank, in this process.
    Single,
    /// Rank 0 in this process, ranks `1..tp` in others.
    Rank0 {
        /// Ranks in all; at least one.
        tp: u16,
    },
    /// Every rank of every stage in another process.
    Separate {
        /// Ranks of one stage; at least one.
        tp: u16,
        /// Stages; at least one.
        stages: u16,
    },
    /// This rank alone, which schedules for itself.
    Autonomous {
        /// Own stage.
        stage: Stage,
        /// Own rank.
        rank: Rank,
    },
}

/// Ranks and stages of an instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct World {
    /// Tensor-parallel ranks of one stage; at least one.
    pub tp: u16,
    /// Pipeline stages; at least one.
    pub stages: u16,
}

/// The part that a process plays in its instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Role {
    /// Runs a [`Scheduler`](crate::Scheduler) over this arrangement.
    Coordinator(Arrangement),
    /// Runs a [`Worker`](crate::Worker) that takes orders as this rank.
    Worker {
        /// Own stage.
        stage: Stage,
        /// Own rank.
        rank: Rank,
    },
}

/// What came of a report.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Detected {
    /// The part this process plays.
    pub role: Role,
    /// Ranks and stages of its instance.
    pub world: World,
    /// Which replica of the engine this is, if there are several: each is an instance with a name
    /// of its own ([`Config::replica_instance`](crate::Config::replica_instance)).
    pub replica: Option<u16>,
    /// The engine reported no size at all, so one GPU was assumed.
    pub fell_back: bool,
}

/// A report that contradicts itself, or the topology asked for.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum DetectError {
    /// A size of nothing.
    #[error("the engine reports a {size} of 0")]
    ZeroSize {
        /// Which size.
        size: Dimension,
    },
    /// More ranks than an instance can number.
    #[error("the engine reports a {size} of {value}, more than {max}")]
    SizeTooLarge {
        /// Which size.
        size: Dimension,
        /// What was reported.
        value: u32,
        /// The most that is possible.
        max: u16,
    },
    /// A rank that no group of that size has.
    #[error("the engine reports rank {rank} in a {size} of {value}")]
    RankOutsideSize {
        /// Which size.
        size: Dimension,
        /// The rank reported for it.
        rank: u32,
        /// The size reported.
        value: u32,
    },
    /// A rank that is not the first, without the size of its group.
    #[error("the engine reports rank {rank}, but no {size}")]
    RankWithoutSize {
        /// Which size is missing.
        size: Dimension,
        /// The rank reported for it.
        rank: u32,
    },
    /// A process that must know its place, and does not.
    #[error("a {who} does not know its rank in a {size} of {value}")]
    RankUnknown {
        /// The part that needs the rank.
        who: &'static str,
        /// Which size the rank belongs to.
        size: Dimension,
        /// The size reported.
        value: u16,
    },
    /// Whoever orders other ranks about must know how many there are; to take that for one would
    /// leave the rest without memory.
    #[error("topology {mode} needs the tensor-parallel size, which the engine does not report")]
    SizeUnknown {
        /// The topology that needs it.
        mode: TopologyMode,
    },
    /// The sizes do not fit together.
    #[error("a world size of {world} is not {tp} tensor-parallel ranks in {stages} stages")]
    SizesDisagree {
        /// The size of the world reported.
        world: u32,
        /// Ranks of one stage.
        tp: u32,
        /// Stages.
        stages: u32,
    },
    /// A coordinator in a process of its own is no rank.
    #[error("a separate coordinator reports rank {rank} as its own")]
    CoordinatorWithRank {
        /// The rank it reports.
        rank: u32,
    },
    /// Two things were reported of which one excludes the other.
    #[error("{one} and {other} exclude each other")]
    Excluded {
        /// One of them.
        one: &'static str,
        /// The other.
        other: &'static str,
    },
    /// Rank 0 can coordinate the ranks of one stage only.
    #[error("a coordinator inside rank 0 drives one stage, not {stages}")]
    StagesUnderRank0 {
        /// Stages reported.
        stages: u16,
    },
    /// The topology asked for does not fit what the engine reports of itself.
    #[error("topology {mode} does not fit: {found}")]
    ModeContradicted {
        /// What was asked for.
        mode: TopologyMode,
        /// What the engine reports instead.
        found: String,
    },
    /// Ranks on other hosts cannot be reached through a socket of this one.
    #[error("the ranks are spread over {hosts} hosts, but a coordinator reaches its own host only")]
    OtherHosts {
        /// Hosts reported.
        hosts: u32,
    },
}

/// A size that an engine reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Dimension {
    /// Tensor parallelism.
    TensorParallel,
    /// Pipeline parallelism.
    PipelineParallel,
    /// All ranks together.
    World,
    /// Replicas of the engine.
    DataParallel,
    /// Machines.
    Hosts,
}

impl Arrangement {
    /// The arrangement after that rank turned out to live in the coordinator's own process; `None`
    /// if it cannot live there.
    #[must_use]
    pub fn with_local(self, stage: Stage, rank: Rank) -> Option<Self> {
        let first = (stage, rank) == (Stage(0), Rank(0));
        match self {
            Self::Single | Self::Rank0 { .. } if first => Some(self),
            Self::Separate { tp: 1, stages: 1 } if first => Some(Self::Single),
            Self::Separate { tp, stages: 1 } if first => Some(Self::Rank0 { tp }),
            Self::Autonomous {
                stage: own,
                rank: own_rank,
            } if (own, own_rank) == (stage, rank) => Some(self),
            _ => None,
        }
    }
}

impl fmt::Display for Dimension {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::TensorParallel => "tensor-parallel size",
            Self::PipelineParallel => "pipeline-parallel size",
            Self::World => "world size",
            Self::DataParallel => "data-parallel size",
            Self::Hosts => "number of hosts",
        })
    }
}

/// A word that names no topology.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("no topology is called {word:?}")]
pub struct UnknownTopology {
    /// The word.
    pub word: String,
}

impl TopologyMode {
    /// Every mode, in the order in which help texts list them.
    pub const ALL: [Self; 4] = [Self::Rank0, Self::Separate, Self::Autonomous, Self::Single];

    /// The word that selects it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Single => "single",
            Self::Rank0 => "rank0",
            Self::Separate => "separate",
            Self::Autonomous => "autonomous",
        }
    }
}

impl fmt::Display for TopologyMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for TopologyMode {
    type Err = UnknownTopology;

    fn from_str(word: &str) -> Result<Self, Self::Err> {
        Self::ALL
            .into_iter()
            .find(|mode| mode.name() == word)
            .ok_or_else(|| UnknownTopology {
                word: word.to_owned(),
            })
    }
}

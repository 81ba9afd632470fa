//! The rules common to all engines: what a report must agree on, and which part each arrangement
//! gives to a process.

use kvcached_mapper::{Rank, Stage};

use super::{Arrangement, DetectError, Detected, Dimension, RankReport, Role, TopologyMode, World};

/// A report that was found to agree with itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Checked {
    pub(crate) world: World,
    pub(crate) rank: Option<Rank>,
    pub(crate) stage: Option<Stage>,
    pub(crate) is_worker: Option<bool>,
    pub(crate) fell_back: bool,
    hosts: Option<u32>,
    replica: Option<u16>,
}

/// What the engine at hand is, beyond its sizes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Nature {
    /// The engine's name, for log lines.
    pub(crate) engine: &'static str,
    /// Every rank runs a scheduler of its own.
    pub(crate) own_scheduler: bool,
    /// The coordinator is known to be in another process than rank 0 (`true`) or in the same one.
    pub(crate) coordinator_separate: Option<bool>,
}

/// Checks that a report agrees with itself, and fills in what follows from the rest.
pub(crate) fn check(report: &RankReport) -> Result<Checked, DetectError> {
    let tp_known = size(report.tp_size, Dimension::TensorParallel)?;
    let stages_known = size(report.pp_size, Dimension::PipelineParallel)?;
    let world_known = size(report.world_size, Dimension::World)?;
    let (tp, stages) = complete(tp_known, stages_known, world_known)?;
    let rank = place(
        report.tp_rank,
        tp,
        tp_known.is_some(),
        Dimension::TensorParallel,
    )?;
    let stage = place(
        report.pp_rank,
        stages,
        stages_known.is_some(),
        Dimension::PipelineParallel,
    )?;

    let replicas = size(report.dp_size, Dimension::DataParallel)?;
    let replica = place(
        report.dp_rank,
        replicas.unwrap_or(1),
        replicas.is_some(),
        Dimension::DataParallel,
    )?;
    let replica = match replicas {
        None | Some(1) => None,
        Some(value) => Some(replica.ok_or(DetectError::RankUnknown {
            who: "replica",
            size: Dimension::DataParallel,
            value,
        })?),
    };
    size(report.hosts, Dimension::Hosts)?;

    Ok(Checked {
        world: World { tp, stages },
        rank: rank.map(Rank),
        stage: stage.map(Stage),
        is_worker: report.is_worker,
        hosts: report.hosts,
        replica,
        fell_back: tp_known.is_none() && world_known.is_none(),
    })
}

/// Gives the process its part in an arrangement of that mode.
pub(crate) fn assign(
    checked: &Checked,
    nature: Nature,
    mode: TopologyMode,
) -> Result<Detected, DetectError> {
    if checked.fell_back {
        if matches!(mode, TopologyMode::Rank0 | TopologyMode::Separate) {
            return Err(DetectError::SizeUnknown { mode });
        }
        tracing::debug!(
            engine = nature.engine,
            "the engine reports no tensor-parallel size: taking it for a single GPU"
        );
    }
    let role = match mode {
        TopologyMode::Single => single(checked, nature)?,
        TopologyMode::Rank0 => rank0(checked, nature)?,
        TopologyMode::Separate => separate(checked, nature)?,
        TopologyMode::Autonomous => autonomous(checked, nature)?,
    };
    // Whoever gives or takes orders does so through a socket file, which ends at the host.
    let alone = matches!(
        role,
        Role::Coordinator(Arrangement::Single | Arrangement::Autonomous { .. })
    );
    if let Some(hosts) = checked.hosts.filter(|&hosts| hosts > 1 && !alone) {
        return Err(DetectError::OtherHosts { hosts });
    }
    Ok(Detected {
        role,
        world: checked.world,
        replica: checked.replica,
        fell_back: checked.fell_back,
    })
}

fn single(checked: &Checked, nature: Nature) -> Result<Role, DetectError> {
    let World { tp, stages } = checked.world;
    if (tp, stages) != (1, 1) {
        return Err(contradicted(
            TopologyMode::Single,
            format!("the engine has {tp} ranks in each of {stages} stages"),
        ));
    }
    if nature.coordinator_separate == Some(true) {
        return Err(contradicted(
            TopologyMode::Single,
            "the coordinator is in another process than rank 0",
        ));
    }
    Ok(Role::Coordinator(Arrangement::Single))
}

fn rank0(checked: &Checked, nature: Nature) -> Result<Role, DetectError> {
    let World { tp, stages } = checked.world;
    if stages != 1 {
        return Err(DetectError::StagesUnderRank0 { stages });
    }
    if nature.coordinator_separate == Some(true) {
        return Err(contradicted(
            TopologyMode::Rank0,
            "the coordinator is in another process than rank 0",
        ));
    }
    match (checked.rank, checked.is_worker) {
        (Some(Rank(0)), _) | (None, Some(false)) => {
            Ok(Role::Coordinator(Arrangement::Rank0 { tp }))
        }
        // Where every rank has a scheduler, the ones above rank 0 take orders all the same.
        (Some(rank), Some(false)) if !nature.own_scheduler => Err(contradicted(
            TopologyMode::Rank0,
            format!("{rank} reports that it coordinates"),
        )),
        (Some(rank), _) => Ok(Role::Worker {
            stage: Stage(0),
            rank,
        }),
        (None, Some(true) | None) => Err(DetectError::RankUnknown {
            who: if checked.is_worker.is_some() {
                "worker"
            } else {
                "process"
            },
            size: Dimension::TensorParallel,
            value: tp,
        }),
    }
}

fn separate(checked: &Checked, nature: Nature) -> Result<Role, DetectError> {
    let World { tp, stages } = checked.world;
    if nature.coordinator_separate == Some(false) {
        return Err(contradicted(
            TopologyMode::Separate,
            "the coordinator is in the process of rank 0",
        ));
    }
    if nature.own_scheduler {
        return Err(contradicted(
            TopologyMode::Separate,
            "every rank runs a scheduler of its own",
        ));
    }
    if checked.is_worker == Some(true) || (checked.is_worker.is_none() && checked.rank.is_some()) {
        let rank = known(checked.rank, tp, "worker", Dimension::TensorParallel)?;
        let stage = known(checked.stage, stages, "worker", Dimension::PipelineParallel)?;
        return Ok(Role::Worker {
            stage: stage.unwrap_or(Stage(0)),
            rank: rank.unwrap_or(Rank(0)),
        });
    }
    if let Some(rank) = checked.rank {
        return Err(DetectError::CoordinatorWithRank {
            rank: u32::from(rank.0),
        });
    }
    Ok(Role::Coordinator(Arrangement::Separate { tp, stages }))
}

fn autonomous(checked: &Checked, nature: Nature) -> Result<Role, DetectError> {
    let World { tp, stages } = checked.world;
    if nature.coordinator_separate == Some(true) {
        return Err(contradicted(
            TopologyMode::Autonomous,
            "the coordinator is in another process than rank 0",
        ));
    }
    let rank = known(
        checked.rank,
        tp,
        "rank with a scheduler",
        Dimension::TensorParallel,
    )?;
    let stage = known(
        checked.stage,
        stages,
        "rank with a scheduler",
        Dimension::PipelineParallel,
    )?;
    Ok(Role::Coordinator(Arrangement::Autonomous {
        stage: stage.unwrap_or(Stage(0)),
        rank: rank.unwrap_or(Rank(0)),
    }))
}

/// The place in a group, which only a group of one may leave unsaid.
fn known<T>(
    place: Option<T>,
    size: u16,
    who: &'static str,
    dimension: Dimension,
) -> Result<Option<T>, DetectError> {
    if place.is_none() && size > 1 {
        return Err(DetectError::RankUnknown {
            who,
            size: dimension,
            value: size,
        });
    }
    Ok(place)
}

fn contradicted(mode: TopologyMode, found: impl Into<String>) -> DetectError {
    DetectError::ModeContradicted {
        mode,
        found: found.into(),
    }
}

/// A reported size as the number of ranks that it is.
fn size(reported: Option<u32>, size: Dimension) -> Result<Option<u16>, DetectError> {
    match reported {
        None => Ok(None),
        Some(0) => Err(DetectError::ZeroSize { size }),
        Some(value) => u16::try_from(value)
            .map(Some)
            .map_err(|_| DetectError::SizeTooLarge {
                size,
                value,
                max: u16::MAX,
            }),
    }
}

/// The two sizes, of which one may follow from the other and the world's.
fn complete(
    tp: Option<u16>,
    stages: Option<u16>,
    world: Option<u16>,
) -> Result<(u16, u16), DetectError> {
    let Some(world) = world else {
        return Ok((tp.unwrap_or(1), stages.unwrap_or(1)));
    };
    let disagree = |tp: u16, stages: u16| DetectError::SizesDisagree {
        world: u32::from(world),
        tp: u32::from(tp),
        stages: u32::from(stages),
    };
    match (tp, stages) {
        (Some(tp), Some(stages)) if u32::from(tp) * u32::from(stages) == u32::from(world) => {
            Ok((tp, stages))
        }
        (Some(tp), Some(stages)) => Err(disagree(tp, stages)),
        (Some(tp), None) if world.is_multiple_of(tp) => Ok((tp, world / tp)),
        (Some(tp), None) => Err(disagree(tp, 1)),
        (None, Some(stages)) if world.is_multiple_of(stages) => Ok((world / stages, stages)),
        (None, Some(stages)) => Err(disagree(1, stages)),
        (None, None) => Ok((world, 1)),
    }
}

/// A reported rank, if it is one of the `value` that there are.
fn place(
    reported: Option<u32>,
    value: u16,
    size_known: bool,
    size: Dimension,
) -> Result<Option<u16>, DetectError> {
    let Some(rank) = reported else {
        return Ok(None);
    };
    match u16::try_from(rank) {
        Ok(rank) if rank < value => Ok(Some(rank)),
        _ if !size_known && value == 1 => Err(DetectError::RankWithoutSize { size, rank }),
        _ => Err(DetectError::RankOutsideSize {
            size,
            rank,
            value: u32::from(value),
        }),
    }
}

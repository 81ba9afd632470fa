//! One mapper per pool, put together from where the ranks are.
//!
//! | topology | mapper |
//! | --- | --- |
//! | a rank in this process and no other | its [`LocalMapper`]: nothing is ever sent |
//! | a rank in this process and others | a [`Broadcast`] that does the local part first |
//! | other processes only | a [`Broadcast`]: this process needs no device |

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use kvcached_mapper::{
    Cold, Epochs, Geometry, LocalMapper, MapError, Mapper, NotReady, PoolId, Rank, RankMapper,
    Stage,
};
use kvcached_tp_ipc::{
    Broadcast, BroadcastConfig, ConnectError, Deadline, GeometryDigest, InstanceName, RuntimeDir,
    RuntimeDirError, Topology,
};
use kvcached_vmm::{Driver, Recycler, RecyclerConfig};
use thiserror::Error;

use crate::config::Config;
use crate::detect::Arrangement;

/// What the mappers of all pools of a scheduler have in common.
#[derive(Debug, Clone)]
pub struct MapperConfig {
    /// The engine.
    pub instance: InstanceName,
    /// Where its ranks are.
    pub topology: Topology,
    /// What lies behind a page without memory, on the rank in this process.
    pub cold: Cold,
    /// How much memory that came free the rank in this process keeps to use it again, over all of
    /// its pools, and for how long.
    pub recycler: RecyclerConfig,
    /// How long to wait for another rank's answer.
    pub ipc_timeout: Duration,
    /// Which epochs have retired on the rank in this process.
    pub epochs: Arc<Epochs>,
}

/// A pool's mapper, and the part of it that is in this process.
#[derive(Debug)]
pub struct Composed<D: Driver> {
    /// Maps on every rank.
    pub mapper: Arc<dyn Mapper>,
    /// The rank in this process, if there is one: it knows the addresses of the tensors.
    pub local: Option<Arc<LocalMapper<D>>>,
}

/// Why a pool has no mapper.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ComposeError {
    /// A rank in this process needs memory.
    #[error("{stage}, {rank} is in this process, but no driver was given")]
    NoDriver {
        /// Stage of the rank.
        stage: Stage,
        /// The rank.
        rank: Rank,
    },
    /// The rank in this process cannot map.
    #[error("the rank in this process cannot map: {0}")]
    Local(#[source] MapError),
    /// These ranks did not come, or could not map, in time.
    #[error("not every rank is ready: {}", list(.missing))]
    NotReady {
        /// All of them, each with its endpoint and reason.
        missing: Vec<NotReady>,
    },
    /// What waiting does not mend.
    #[error(transparent)]
    Connect(ConnectError),
}

impl MapperConfig {
    /// A coordinator's part of the configuration, in a new life of it.
    #[must_use]
    pub fn new(config: &Config, instance: InstanceName, topology: Topology) -> Self {
        Self {
            instance,
            topology,
            cold: config.cold,
            recycler: config.recycler,
            ipc_timeout: config.ipc_timeout,
            epochs: Arc::new(Epochs::new(config.retire_timeout)),
        }
    }
}

impl Arrangement {
    /// The topology with its endpoints. The directory of the sockets is made, or checked, if there
    /// are any.
    ///
    /// # Errors
    /// [`RuntimeDirError`] if somebody else could reach into the directory, or it cannot be made.
    pub fn topology(
        self,
        runtime_dir: &Path,
        instance: &InstanceName,
    ) -> Result<Topology, RuntimeDirError> {
        let endpoints = || RuntimeDir::open(runtime_dir)?.instance(instance);
        Ok(match self {
            Self::Single | Self::Rank0 { tp: 0 | 1 } => Topology::single(),
            Self::Rank0 { tp } => Topology::rank0_coordinates(tp, &endpoints()?),
            Self::Separate { tp, stages } => {
                Topology::separate_coordinator(tp, stages, &endpoints()?)
            }
            Self::Autonomous { stage, rank } => Topology::autonomous(stage, rank),
        })
    }
}

/// Puts the mapper of one pool together, and waits until every rank can map.
///
/// `memory` is that of the rank in this process, the same for all of its pools; without such a rank
/// it is not used, so that a coordinator on its own opens no device.
///
/// # Errors
/// [`ComposeError`]; everything begun is undone.
pub fn compose<D: Driver>(
    config: &MapperConfig,
    pool: PoolId,
    geometry: &Geometry,
    memory: Option<&Arc<Recycler<D>>>,
    ready_by: Deadline,
) -> Result<Composed<D>, ComposeError> {
    let local = match (config.topology.local(), memory) {
        (Some((stage, rank)), None) => return Err(ComposeError::NoDriver { stage, rank }),
        (Some(_), Some(memory)) => {
            let mapper = LocalMapper::over(memory, geometry, config.cold);
            let mapper = mapper.map_err(ComposeError::Local)?;
            Some(Arc::new(mapper.with_epochs(Arc::clone(&config.epochs))))
        }
        (None, _) => None,
    };
    let part = local
        .as_ref()
        .map(|local| Arc::clone(local) as Arc<dyn RankMapper>);
    let mapper = compose_over(config, pool, geometry, part, ready_by)?;
    Ok(Composed { mapper, local })
}

/// The same over a mapper of this process's rank that exists already, such as one that measures.
///
/// # Errors
/// [`ComposeError`]; [`ComposeError::NoDriver`] if the topology has a rank here and none is given.
pub fn compose_over(
    config: &MapperConfig,
    pool: PoolId,
    geometry: &Geometry,
    local: Option<Arc<dyn RankMapper>>,
    ready_by: Deadline,
) -> Result<Arc<dyn Mapper>, ComposeError> {
    if let (Some((stage, rank)), None) = (config.topology.local(), &local) {
        return Err(ComposeError::NoDriver { stage, rank });
    }
    if let Some(local) = &local
        && config.topology.remotes().next().is_none()
    {
        return Ok(Arc::<dyn RankMapper>::clone(local));
    }
    let broadcast = BroadcastConfig {
        instance: config.instance.clone(),
        pool,
        geometry: digest(geometry),
        topology: config.topology.clone(),
        timeout: config.ipc_timeout,
    };
    Ok(Arc::new(Broadcast::connect(broadcast, local, ready_by)?))
}

/// What a coordinator and its workers must agree about.
pub(crate) fn digest(geometry: &Geometry) -> GeometryDigest {
    GeometryDigest::new(
        geometry.pages(),
        geometry.page_bytes(),
        geometry.block_stride_bytes(),
    )
}

impl From<ConnectError> for ComposeError {
    fn from(error: ConnectError) -> Self {
        match error {
            ConnectError::NotReady { missing } => Self::NotReady { missing },
            other => Self::Connect(other),
        }
    }
}

pub(crate) fn list(missing: &[NotReady]) -> String {
    let missing: Vec<String> = missing.iter().map(ToString::to_string).collect();
    missing.join("; ")
}

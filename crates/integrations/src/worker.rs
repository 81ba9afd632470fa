//! The process of one rank: its tensors, and a thread that does what the coordinator tells it.
//!
//! The thread serves until the worker is dropped; it never decides anything. Which device it maps
//! on is in the driver value, not in the thread.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use kvcached_mapper::{
    Cold, Epochs, LayoutError, LocalMapper, MapError, PoolId, PoolSpec, Rank, RankMapper, Stage,
};
use kvcached_tp_ipc::{
    BindError, Deadline, Endpoint, EndpointDir, InstanceName, RuntimeDir, RuntimeDirError,
    ServedPool, Server, ServerConfig, StopHandle,
};
use kvcached_vmm::{Driver, Recycler, RecyclerConfig};
use thiserror::Error;

use crate::compose::digest;
use crate::config::Config;

/// One rank that listens: dropped, it takes its socket away and gives its memory back.
#[derive(Debug)]
pub struct Worker<D: Driver> {
    serving: Serving,
    endpoint: Endpoint,
    mappers: Mappers<D>,
    epochs: Arc<Epochs>,
}

/// The part of each pool that is on this rank.
type Mappers<D> = Vec<(PoolId, Arc<LocalMapper<D>>)>;

/// What a [`Worker`] is made from.
#[derive(Debug, Clone)]
pub struct WorkerConfig {
    /// The engine.
    pub instance: InstanceName,
    /// Directory of the sockets.
    pub runtime_dir: PathBuf,
    /// Own stage.
    pub stage: Stage,
    /// Own rank.
    pub rank: Rank,
    /// The pools, as the coordinator numbers them; at least one.
    pub pools: Vec<(PoolId, PoolSpec)>,
    /// What lies behind a page without memory.
    pub cold: Cold,
    /// How much memory that came free is kept to be used again, over all pools, and for how long.
    pub recycler: RecyclerConfig,
    /// How long the coordinator may take to finish what it began to say.
    pub ipc_timeout: Duration,
    /// How long what is mapped outlives the coordinator's connection.
    pub orphan_timeout: Duration,
    /// How long to wait for an epoch to retire before an unmap is refused.
    pub retire_timeout: Duration,
    /// How long a worker that cannot begin waits for its coordinator, to tell it why.
    pub ready_timeout: Duration,
}

/// Why there is no worker. Whatever was begun is undone.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum WorkerError {
    /// Nothing to serve.
    #[error("a worker without a pool")]
    NoPools,
    /// Two pools of one number.
    #[error("{pool} is there twice")]
    PoolTwice {
        /// The number.
        pool: PoolId,
    },
    /// A pool that cannot be laid out.
    #[error("{pool} cannot be laid out: {source}")]
    Layout {
        /// The pool.
        pool: PoolId,
        /// Why.
        source: LayoutError,
    },
    /// A pool for which the device has no addresses, or no memory.
    #[error("{pool} cannot be mapped: {source}")]
    Mapper {
        /// The pool.
        pool: PoolId,
        /// Why.
        source: MapError,
    },
    /// No place for the socket.
    #[error(transparent)]
    Directory(#[from] RuntimeDirError),
    /// No socket.
    #[error(transparent)]
    Bind(#[from] BindError),
    /// The system does not let it serve.
    #[error("cannot serve: {0}")]
    Serve(#[source] io::Error),
    /// The system gives no thread.
    #[error("cannot start the thread that serves: {0}")]
    Thread(#[source] io::Error),
}

/// The thread; dropping it stops and joins it, which takes the socket away.
#[derive(Debug)]
struct Serving {
    stop: StopHandle,
    thread: Option<JoinHandle<()>>,
    directory: EndpointDir,
}

impl WorkerConfig {
    /// What the configuration says, for one rank and its pools.
    #[must_use]
    pub fn new(
        config: &Config,
        instance: InstanceName,
        (stage, rank): (Stage, Rank),
        pools: Vec<(PoolId, PoolSpec)>,
    ) -> Self {
        Self {
            instance,
            runtime_dir: config.runtime_dir.clone(),
            stage,
            rank,
            pools,
            cold: config.cold,
            recycler: config.recycler,
            ipc_timeout: config.ipc_timeout,
            orphan_timeout: config.orphan_timeout,
            retire_timeout: config.retire_timeout,
            ready_timeout: config.ready_timeout,
        }
    }
}

impl<D: Driver> Worker<D> {
    /// Reserves the tensors' addresses and starts to listen.
    ///
    /// A worker that cannot begin first tells its coordinator why, so that the start of the whole
    /// instance ends with that reason; it waits for it no longer than the ready time-out.
    ///
    /// # Errors
    /// [`WorkerError`]; nothing is left running or listening.
    pub fn start(config: WorkerConfig, driver: &Arc<D>) -> Result<Self, WorkerError> {
        let epochs = Arc::new(Epochs::new(config.retire_timeout));
        let mappers = match make_mappers(&config, driver, &epochs) {
            Ok(mappers) => mappers,
            Err(error) => {
                announce_failure(&config, &error.to_string());
                return Err(error);
            }
        };
        let served = mappers.iter().map(|(pool, mapper)| ServedPool {
            pool: *pool,
            geometry: digest(mapper.geometry()),
            mapper: Arc::clone(mapper) as Arc<dyn RankMapper>,
        });
        let (serving, endpoint) = Serving::start(&config, served.collect(), &epochs)?;
        Ok(Self {
            serving,
            endpoint,
            mappers,
            epochs,
        })
    }

    /// Which epochs have retired on this rank: whoever launches its work says so there.
    #[must_use]
    pub const fn epochs(&self) -> &Arc<Epochs> {
        &self.epochs
    }

    /// Where it listens.
    #[must_use]
    pub const fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    /// The pool's part on this rank: it knows the addresses of the tensors.
    #[must_use]
    pub fn mapper(&self, pool: PoolId) -> Option<&Arc<LocalMapper<D>>> {
        self.mappers
            .iter()
            .find(|(id, _)| *id == pool)
            .map(|(_, mapper)| mapper)
    }

    /// Does the thread serve? It ends before the worker is dropped only if the system fails it;
    /// that was logged.
    #[must_use]
    pub fn is_serving(&self) -> bool {
        self.serving
            .thread
            .as_ref()
            .is_some_and(|thread| !thread.is_finished())
    }
}

/// Tells the coordinator that this rank cannot begin, so that it need not wait for it; waits for
/// that no longer than the ready time-out. For processes that fail before they have a driver;
/// [`Worker::start`] does it by itself.
pub fn announce_failure(config: &WorkerConfig, reason: &str) {
    let announce = || -> Result<bool, WorkerError> {
        let directory = RuntimeDir::open(&config.runtime_dir)?.instance(&config.instance)?;
        let place = (config.stage, config.rank);
        let mut server = Server::bind_unable(
            &directory.endpoint(config.stage, config.rank),
            config.instance.clone(),
            place,
            reason.to_owned(),
            config.ipc_timeout,
        )?;
        let told = server.run_until_told(Deadline::after(config.ready_timeout));
        drop(server);
        leave(&directory);
        told.map_err(WorkerError::Serve)
    };
    match announce() {
        Ok(true) => {}
        Ok(false) => tracing::warn!("no coordinator came to be told that this rank cannot begin"),
        Err(error) => tracing::warn!(%error, "cannot tell the coordinator"),
    }
}

/// A mapper for every pool.
fn make_mappers<D: Driver>(
    config: &WorkerConfig,
    driver: &Arc<D>,
    epochs: &Arc<Epochs>,
) -> Result<Mappers<D>, WorkerError> {
    let granularity = driver.properties().granularity;
    let memory = Arc::new(Recycler::new(Arc::clone(driver), config.recycler));
    let mut mappers: Mappers<D> = Vec::new();
    for (pool, spec) in &config.pools {
        let pool = *pool;
        if mappers.iter().any(|(known, _)| *known == pool) {
            return Err(WorkerError::PoolTwice { pool });
        }
        let geometry = spec
            .resolve(granularity)
            .map_err(|source| WorkerError::Layout { pool, source })?;
        let mapper = LocalMapper::over(&memory, &geometry, config.cold)
            .map_err(|source| WorkerError::Mapper { pool, source })?;
        mappers.push((pool, Arc::new(mapper.with_epochs(Arc::clone(epochs)))));
    }
    match mappers.is_empty() {
        true => Err(WorkerError::NoPools),
        false => Ok(mappers),
    }
}

impl Serving {
    #[expect(
        clippy::disallowed_methods,
        reason = "the composition root starts the threads"
    )]
    fn start(
        config: &WorkerConfig,
        pools: Vec<ServedPool>,
        epochs: &Arc<Epochs>,
    ) -> Result<(Self, Endpoint), WorkerError> {
        let runtime_dir = RuntimeDir::open(&config.runtime_dir)?;
        let server_config = ServerConfig {
            instance: config.instance.clone(),
            stage: config.stage,
            rank: config.rank,
            pools,
            timeout: config.ipc_timeout,
            orphan_timeout: config.orphan_timeout,
            epochs: Some(Arc::clone(epochs)),
        };
        let directory = runtime_dir.instance(&config.instance)?;
        let endpoint = directory.endpoint(config.stage, config.rank);
        let bound = match Server::bind(&endpoint, server_config.clone()) {
            // The last rank of an earlier life may have taken the directory away since it was
            // opened.
            Err(BindError::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
                runtime_dir.instance(&config.instance)?;
                Server::bind(&endpoint, server_config)
            }
            other => other,
        };
        let mut server = bound.inspect_err(|_| leave(&directory))?;
        let stop = server.stop_handle();
        let thread = std::thread::Builder::new()
            .name(format!("kvcached-s{}-r{}", config.stage.0, config.rank.0))
            .spawn(move || {
                if let Err(error) = server.run() {
                    tracing::error!(endpoint = %server.endpoint(), %error, "stopped serving");
                }
            })
            .map_err(WorkerError::Thread)?;
        Ok((
            Self {
                stop,
                thread: Some(thread),
                directory,
            },
            endpoint,
        ))
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        self.stop.stop();
        if self
            .thread
            .take()
            .is_some_and(|thread| thread.join().is_err())
        {
            tracing::error!("the thread that serves panicked");
        }
        leave(&self.directory);
    }
}

/// Takes the directory of the sockets away if this is the last one out; it does not matter which
/// that is.
fn leave(directory: &EndpointDir) {
    if let Err(error) = directory.remove_if_empty() {
        tracing::debug!(%error, "the directory of the sockets stays");
    }
}

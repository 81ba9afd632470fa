//! The memory of one rank, on whichever driver was asked for.

use std::fmt;
use std::path::Path;
use std::str::FromStr;
use std::sync::Arc;

use kvcached_integrations::{Worker, WorkerConfig};
use kvcached_mapper::{Cold, Geometry, LocalMapper, PoolId, RankMapper};
use kvcached_vmm::{Budget, Bytes, Capped, Driver, Host, HostConfig, Mock, MockConfig};
use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::oracle::{Blank, RankPool, Readable};
use super::process::RankError;

/// Where the memory of a replay is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Device {
    /// Memory of this machine: real bytes.
    Host,
    /// No memory: bookkeeping only, contents cannot be verified.
    Mock,
    /// A GPU, by its number among those that can be seen.
    Cuda(u32),
}

/// Not a device.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{0:?} is no driver: host, mock, cuda or cuda:N")]
pub struct ParseDeviceError(String);

/// A pool of a rank in this process.
#[derive(Debug, Clone)]
pub(crate) struct OwnPool {
    pub(crate) mapper: Arc<dyn RankMapper>,
    pub(crate) memory: Arc<dyn RankPool>,
}

/// A rank that serves a coordinator for as long as this is held.
#[derive(Debug)]
pub(crate) struct ServedRank {
    /// Its pools, for the oracle.
    pub(crate) pools: Vec<Arc<dyn RankPool>>,
    _serving: Box<dyn Serving>,
}

/// A worker on whichever driver.
trait Serving: fmt::Debug {}

impl<D: Driver> Serving for Worker<D> {}

/// What is to be done on a driver whose type is known only here.
trait OnDriver {
    type Output;

    fn run<D: Driver>(
        self,
        driver: &Arc<D>,
        look: fn(Arc<LocalMapper<D>>, u64) -> Arc<dyn RankPool>,
    ) -> Result<Self::Output, RankError>;
}

/// Lays out pools that this process itself maps.
pub(crate) fn open_pools(
    device: Device,
    memory_bytes: u64,
    budget: &Path,
    cold: Cold,
    pools: Vec<(u64, Geometry)>,
) -> Result<Vec<OwnPool>, RankError> {
    on_driver(device, memory_bytes, budget, Open { cold, pools })
}

/// Starts a rank that serves a coordinator elsewhere.
pub(crate) fn serve_pools(
    device: Device,
    memory_bytes: u64,
    budget: &Path,
    config: WorkerConfig,
    tags: Vec<u64>,
) -> Result<ServedRank, RankError> {
    on_driver(device, memory_bytes, budget, Serve { config, tags })
}

fn on_driver<T: OnDriver>(
    device: Device,
    memory_bytes: u64,
    budget: &Path,
    task: T,
) -> Result<T::Output, RankError> {
    let budget = Budget::open(budget)?;
    match device {
        Device::Host => {
            let host = Host::new(HostConfig::new(memory_bytes))?;
            task.run(&Arc::new(Capped::new(host, budget)), readable)
        }
        Device::Mock => {
            let mock = Mock::new(MockConfig::new(memory_bytes));
            task.run(&Arc::new(Capped::new(mock, budget)), |mapper, _| {
                Arc::new(Blank(mapper))
            })
        }
        #[cfg(feature = "cuda")]
        Device::Cuda(ordinal) => {
            let cuda = kvcached_vmm::Cuda::new(ordinal)?;
            task.run(&Arc::new(Capped::new(cuda, budget)), readable)
        }
        #[cfg(not(feature = "cuda"))]
        Device::Cuda(_) => Err(RankError::NoCuda),
    }
}

fn readable<D: Bytes>(mapper: Arc<LocalMapper<D>>, tag: u64) -> Arc<dyn RankPool> {
    Arc::new(Readable { mapper, pool: tag })
}

struct Open {
    cold: Cold,
    pools: Vec<(u64, Geometry)>,
}

impl OnDriver for Open {
    type Output = Vec<OwnPool>;

    fn run<D: Driver>(
        self,
        driver: &Arc<D>,
        look: fn(Arc<LocalMapper<D>>, u64) -> Arc<dyn RankPool>,
    ) -> Result<Vec<OwnPool>, RankError> {
        let open = |(tag, geometry)| {
            let mapper = Arc::new(LocalMapper::new(Arc::clone(driver), geometry, self.cold)?);
            let memory = look(Arc::clone(&mapper), tag);
            Ok(OwnPool { mapper, memory })
        };
        self.pools.into_iter().map(open).collect()
    }
}

struct Serve {
    config: WorkerConfig,
    tags: Vec<u64>,
}

impl OnDriver for Serve {
    type Output = ServedRank;

    fn run<D: Driver>(
        self,
        driver: &Arc<D>,
        look: fn(Arc<LocalMapper<D>>, u64) -> Arc<dyn RankPool>,
    ) -> Result<Self::Output, RankError> {
        let ids: Vec<PoolId> = self.config.pools.iter().map(|(id, _)| *id).collect();
        let worker = Worker::start(self.config, driver)?;
        let pools = ids.into_iter().zip(self.tags).map(|(id, tag)| {
            let mapper = worker
                .mapper(id)
                .expect("the worker was started with this pool");
            look(Arc::clone(mapper), tag)
        });
        Ok(ServedRank {
            pools: pools.collect(),
            _serving: Box::new(worker),
        })
    }
}

impl FromStr for Device {
    type Err = ParseDeviceError;

    fn from_str(text: &str) -> Result<Self, ParseDeviceError> {
        match text.split_once(':') {
            None if text == "host" => Ok(Self::Host),
            None if text == "mock" => Ok(Self::Mock),
            None if text == "cuda" => Ok(Self::Cuda(0)),
            Some(("cuda", ordinal)) if ordinal.parse::<u32>().is_ok() => {
                Ok(Self::Cuda(ordinal.parse().unwrap_or_default()))
            }
            _ => Err(ParseDeviceError(text.to_owned())),
        }
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host => f.write_str("host"),
            Self::Mock => f.write_str("mock"),
            Self::Cuda(ordinal) => write!(f, "cuda:{ordinal}"),
        }
    }
}

//! The processes of the ranks: the real worker side of the protocol and the real mapper, over a
//! simulated device. The rank inside the coordinator has memory too, but serves nobody.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvcached_mapper::{
    After, Cold, Epoch, Epochs, Geometry, Health, KvBuffers, Layout, LocalMapper, MapError, Mapper,
    PageRun, PageSize, PoolId, PoolSpec, Rank, RankMapper, Readiness, Reconciled, Resynced, Stage,
};
use kvcached_tp_ipc::{
    Conversation, FrameDecoder, GeometryDigest, InstanceName, ServedPool, ServedRank,
};
use kvcached_vmm::{Recycler, RecyclerConfig};

use crate::Sabotage;
use crate::clock::Clock;
use crate::device::{Device, GRANULE, SimDriver};
use crate::network::{Arrival, ConnId};
use crate::script::Config;

/// What one process of a rank has on its device.
#[derive(Debug)]
pub(crate) struct Memory {
    /// Which life of the rank it is.
    pub(crate) generation: u64,
    pub(crate) driver: Arc<SimDriver>,
    /// One per pool.
    pub(crate) mappers: Vec<Arc<LocalMapper<SimDriver>>>,
    /// Addresses of the tensors of each pool.
    pub(crate) bases: Vec<Vec<u64>>,
}

/// How long a rank keeps chunks that nobody asks for.
pub(crate) const KEPT_FOR: Duration = Duration::from_millis(30);

/// A rank that listens.
#[derive(Debug)]
pub(crate) struct Served {
    pub(crate) rank: ServedRank,
    pub(crate) links: BTreeMap<ConnId, Link>,
    pub(crate) inbox: VecDeque<(ConnId, Arrival)>,
    /// Until when it is at work, or stalled.
    pub(crate) busy_until_ns: u64,
    /// When chunks have been kept for too long.
    pub(crate) tend_at: Option<Instant>,
}

#[derive(Debug, Default)]
pub(crate) struct Link {
    pub(crate) decoder: FrameDecoder,
    pub(crate) conversation: Conversation,
}

/// Hands a rank's mapper on, but waits for nothing that is still at work.
#[derive(Debug)]
struct Hasty(Arc<LocalMapper<SimDriver>>);

/// The geometry of every pool on every rank.
pub(crate) fn geometry(config: &Config) -> Geometry {
    let (layout, layers, kv_buffers) = match config.extents {
        0 | 1 => (Layout::Contiguous, 1, KvBuffers::One),
        2 => (Layout::PerLayer, 1, KvBuffers::Two),
        layers => (Layout::Unified, layers, KvBuffers::One),
    };
    let blocks = u64::from(config.blocks.clamp(1, 4));
    let spec = PoolSpec {
        layout,
        layers,
        kv_buffers,
        block_bytes: GRANULE / blocks,
        page_size: PageSize::Bytes(GRANULE),
        capacity_bytes: u64::from(config.pages) * GRANULE * u64::from(config.extents.max(1)),
    };
    spec.resolve(GRANULE)
        .expect("a script's pool has pages and blocks")
}

pub(crate) fn digest(geometry: &Geometry) -> GeometryDigest {
    GeometryDigest::new(
        geometry.pages(),
        geometry.page_bytes(),
        geometry.block_stride_bytes(),
    )
}

impl Memory {
    /// A fresh process, unless the device has no memory for the zeros behind its cold pages. All
    /// that was launched up to `epoch` has ended with the one before it.
    pub(crate) fn new(
        config: &Config,
        device: &Arc<Device>,
        clock: &Arc<Clock>,
        generation: u64,
        epoch: u64,
    ) -> Option<Self> {
        let epochs = Arc::new(Epochs::new(Duration::ZERO));
        let driver = SimDriver::new(device, clock, &epochs, config.zero);
        driver.assume_done(epoch);
        if config.epochs == crate::script::EpochsKept::ByRanks {
            epochs.retire(Epoch(epoch));
        }
        let geometry = geometry(config);
        let cold = match config.zero {
            true => Cold::Zero,
            false => Cold::Unbacked,
        };
        let recycler = Arc::new(Recycler::new(
            Arc::clone(&driver),
            RecyclerConfig {
                limit_bytes: u64::from(config.kept) * geometry.bundle_bytes(),
                idle: KEPT_FOR,
            },
        ));
        let mut mappers = Vec::new();
        for _ in 0..config.pools {
            let mapper = LocalMapper::new(Arc::clone(&driver), geometry.clone(), cold).ok()?;
            let mapper = mapper.with_recycler(&recycler);
            mappers.push(Arc::new(mapper.with_epochs(Arc::clone(&epochs))));
        }
        let bases = mappers.iter().map(|mapper| mapper.tensor_bases()).collect();
        Some(Self {
            generation,
            driver,
            mappers,
            bases,
        })
    }

    /// Bytes that are kept for later.
    pub(crate) fn kept_bytes(&self) -> u64 {
        self.mappers.iter().map(|mapper| mapper.kept_bytes()).sum()
    }

    /// The mapper of a pool, as whoever drives it is given it.
    pub(crate) fn rank_mapper(
        &self,
        pool: usize,
        sabotage: Option<Sabotage>,
    ) -> Arc<dyn RankMapper> {
        let mapper = Arc::clone(&self.mappers[pool]);
        match sabotage {
            Some(Sabotage::ReuseBeforeRetired) => Arc::new(Hasty(mapper)),
            _ => mapper,
        }
    }
}

impl Served {
    pub(crate) fn new(
        config: &Config,
        place: (Stage, Rank),
        memory: &Memory,
        sabotage: Option<Sabotage>,
    ) -> Self {
        let geometry = digest(&geometry(config));
        let pools = (0..config.pools).map(|pool| ServedPool {
            pool: PoolId(pool),
            geometry,
            mapper: memory.rank_mapper(usize::from(pool), sabotage),
        });
        let rank = ServedRank::new(instance(), place.0, place.1, pools)
            .with_orphan_timeout(Duration::from_micros(config.orphan_us));
        Self {
            rank,
            links: BTreeMap::new(),
            inbox: VecDeque::new(),
            busy_until_ns: 0,
            tend_at: None,
        }
    }
}

pub(crate) fn instance() -> InstanceName {
    "simulated".parse().expect("a name of an instance")
}

impl Mapper for Hasty {
    fn map(&self, runs: &[PageRun]) -> Result<(), MapError> {
        self.0.map(runs)
    }

    fn unmap_after(&self, runs: &[PageRun], _: After) -> Result<(), MapError> {
        self.0.unmap_after(runs, After::NOTHING)
    }

    fn headroom(&self) -> Option<u32> {
        self.0.headroom()
    }

    fn trim(&self) {
        self.0.trim();
    }

    fn tend(&self, now: Instant) -> Option<Instant> {
        self.0.tend(now)
    }

    fn kept_bytes(&self) -> u64 {
        self.0.kept_bytes()
    }

    fn ready(&self) -> Result<Readiness, MapError> {
        self.0.ready()
    }

    fn health(&self) -> Health {
        self.0.health()
    }

    fn reconcile(&self, doubtful: &[PageRun]) -> Result<Reconciled, MapError> {
        self.0.reconcile(doubtful)
    }
}

impl RankMapper for Hasty {
    fn prepare_unmap(&self, runs: &[PageRun], _: After) -> Result<(), MapError> {
        self.0.prepare_unmap(runs, After::NOTHING)
    }

    fn commit_unmap(&self, runs: &[PageRun]) {
        self.0.commit_unmap(runs);
    }

    fn abort_unmap(&self, runs: &[PageRun]) -> Result<(), MapError> {
        self.0.abort_unmap(runs)
    }

    fn resync_after(&self, wanted: &[PageRun], after: After) -> Result<Resynced, MapError> {
        self.0.resync_after(wanted, after)
    }

    fn mapped(&self) -> Vec<PageRun> {
        RankMapper::mapped(&*self.0)
    }
}

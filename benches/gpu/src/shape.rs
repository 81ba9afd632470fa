//! What is measured: the pools of an 8B model, and engines that keep them as the settings say.

use std::ffi::OsString;
use std::sync::Arc;

use kvcached_integrations::{
    Background, Config, PoolPolicy, PoolSetup, ProcessIds, Scheduler, SchedulerConfig,
};
use kvcached_mapper::{KvBuffers, Layout, PageSize, PoolId, PoolSpec};
use kvcached_tp_ipc::Topology;
use kvcached_vmm::Driver;

use crate::Outcome;

/// Bytes of one block in one buffer of one layer: 16 tokens, 8 heads, 128 values of 16 bits.
pub(crate) const BLOCK_BYTES: u64 = 32 << 10;
/// Layers of the model.
pub(crate) const LAYERS: u32 = 32;
/// Bytes of one block over all layers, K and V.
pub(crate) const BUNDLE_BYTES: u64 = BLOCK_BYTES * 2 * LAYERS as u64;
/// Addresses of a pool: 65536 blocks.
pub(crate) const CAPACITY_BYTES: u64 = 65536 * BUNDLE_BYTES;
/// The pool of every row.
pub(crate) const POOL: PoolId = PoolId(0);
/// Settings under which nothing is mapped ahead and nothing kept: what grows, the driver makes.
pub(crate) const NOTHING_READY: Settings<'_> = &[
    ("KVCACHED_MIN_RESERVED_PAGES", "0"),
    ("KVCACHED_MAX_RESERVED_PAGES", "0"),
    ("KVCACHED_CHUNK_POOL_BYTES", "0"),
];
/// Settings under which nothing is mapped ahead, but chunks that came free are kept as by default.
pub(crate) const NO_RESERVE: Settings<'_> = &[
    ("KVCACHED_MIN_RESERVED_PAGES", "0"),
    ("KVCACHED_MAX_RESERVED_PAGES", "0"),
];

/// Variables that differ from their defaults, by name.
pub(crate) type Settings<'a> = &'a [(&'a str, &'a str)];

/// A pool of the model, of so many bytes of addresses.
pub(crate) const fn spec(layout: Layout, page_size: PageSize, capacity_bytes: u64) -> PoolSpec {
    PoolSpec {
        layout,
        layers: LAYERS,
        kv_buffers: KvBuffers::Two,
        block_bytes: BLOCK_BYTES,
        page_size,
        capacity_bytes,
    }
}

/// What an engine with these variables set would run with.
pub(crate) fn config(settings: Settings<'_>) -> Outcome<Config> {
    let ids = ProcessIds {
        uid: 0,
        process_group: 1,
    };
    let value = |name: &str| -> Option<OsString> {
        let (_, value) = settings.iter().find(|(known, _)| *known == name)?;
        Some(value.into())
    };
    Ok(Config::from_lookup(value, ids)?)
}

/// An engine of one process with one pool.
pub(crate) fn engine<D: Driver>(
    driver: &Arc<D>,
    spec: PoolSpec,
    settings: Settings<'_>,
    background: Background,
) -> Outcome<Scheduler> {
    let config = config(settings)?;
    let policy = PoolPolicy {
        reserve: config.reserve,
        ..PoolPolicy::default()
    };
    let setup = PoolSetup {
        id: POOL,
        spec,
        policy,
    };
    let (instance, topology) = (config.instance.clone(), Topology::single());
    let config = SchedulerConfig {
        background,
        ..SchedulerConfig::new(&config, instance, topology, vec![setup])
    };
    Ok(Scheduler::start(config, Some(Arc::clone(driver)))?)
}

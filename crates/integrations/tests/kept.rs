//! Memory that came free and stays with its rank for a while: how much, for whom, and how long.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvcached_integrations::{
    Background, Config, Pool, PoolPolicy, PoolSetup, ProcessIds, Scheduler, SchedulerConfig,
};
use kvcached_manager::Limit;
use kvcached_mapper::{KvBuffers, Layout, PageSize, PoolId, PoolSpec};
use kvcached_tp_ipc::Topology;
use kvcached_vmm::{Call, Mock, MockConfig, RecyclerConfig};

const GRANULE: u64 = 64 << 10;
const PAGES: u64 = 16;

/// Two pools of one tensor each on a device with room for both, whose rank keeps three pages.
fn start(idle: Duration, background: Background) -> (Arc<Mock>, Scheduler) {
    let device = Arc::new(Mock::new(MockConfig {
        granularity: GRANULE,
        ..MockConfig::new(2 * PAGES * GRANULE)
    }));
    let ids = ProcessIds {
        uid: 1,
        process_group: 1,
    };
    let lookup = |name: &str| (name == "KVCACHED_MAX_RUN_PAGES").then(|| "1".into());
    let config = Config::from_lookup(lookup, ids).expect("defaults");
    let pools = [0, 1].map(|pool| PoolSetup {
        id: PoolId(pool),
        spec: PoolSpec {
            layout: Layout::Contiguous,
            layers: 1,
            kv_buffers: KvBuffers::One,
            block_bytes: GRANULE,
            page_size: PageSize::Bytes(GRANULE),
            capacity_bytes: PAGES * GRANULE,
        },
        policy: PoolPolicy::default(),
    });
    let instance = config.instance.clone();
    let mut config = SchedulerConfig::new(&config, instance, Topology::single(), pools.into());
    config.background = background;
    config.mapper.recycler = RecyclerConfig {
        limit_bytes: 3 * GRANULE,
        idle,
    };
    let scheduler = Scheduler::start(config, Some(Arc::clone(&device))).expect("there is room");
    (device, scheduler)
}

/// Takes that many pages and has their memory taken away again, but for the null page's.
fn pass(pool: &Pool, revision: u64, pages: u32) {
    let blocks = pool.alloc(pages).expect("there is room");
    pool.free(&blocks).expect("handed out before");
    for (bytes, revision) in [(GRANULE, 2 * revision), (u64::MAX, 2 * revision + 1)] {
        let status = pool.set_limit(Limit { bytes, revision });
        status.expect("there is no floor");
    }
}

fn used_pages(device: &Mock) -> u64 {
    device.used_bytes() / GRANULE
}

#[test]
fn a_rank_keeps_no_more_than_its_bound_over_all_its_pools() {
    let (device, scheduler) = start(Duration::from_secs(3600), Background::Off);
    let [one, other] = [0, 1].map(|pool| scheduler.pool(PoolId(pool)).unwrap());
    assert_eq!(used_pages(&device), 2, "the null pages");
    pass(one, 1, 2);
    pass(other, 1, 5);
    assert_eq!(used_pages(&device), 2 + 3);
    let kept = [one, other].map(|pool| pool.mapper().kept_bytes());
    assert_eq!(kept, [2 * GRANULE, GRANULE], "beside what is mapped");
    let mapped = [one, other].map(|pool| pool.usage().pages.mapped_bytes);
    assert_eq!(mapped, [GRANULE; 2]);

    // Each pool needs no new memory for what it has kept, and no more than that.
    let created = device.calls(Call::Create);
    let blocks = [one.alloc(2).unwrap(), other.alloc(1).unwrap()];
    assert_eq!(device.calls(Call::Create), created);
    other.alloc(1).unwrap();
    assert_eq!(device.calls(Call::Create), created + 1);

    one.free(&blocks[0]).unwrap();
    assert_eq!(one.trim(), Ok(2));
    assert_eq!(used_pages(&device), 2 + 2);
    drop(scheduler);
    assert_eq!((device.live_chunks(), device.live_ranges()), (0, 0));
    assert_eq!(device.violations(), []);
}

#[test]
#[expect(
    clippy::disallowed_methods,
    reason = "some moment, from which a test counts"
)]
fn with_no_thread_what_is_kept_goes_as_the_caller_tends() {
    let idle = Duration::from_secs(3600);
    let (device, scheduler) = start(idle, Background::Off);
    for (revision, pool) in (1..).zip(scheduler.pools()) {
        pass(pool, revision, 2);
    }
    // Nothing else that a caller does in the thread's place lets go of it.
    for pool in scheduler.pools() {
        pool.tick();
        pool.replenish().expect("nothing fails");
        pool.repair().expect("nothing fails");
    }
    assert_eq!(
        used_pages(&device),
        2 + 3,
        "the bound, beside the null pages"
    );

    let begin = Instant::now();
    for pool in scheduler.pools() {
        assert_eq!(pool.tend(begin), Some(begin + idle));
    }
    assert_eq!(used_pages(&device), 2 + 3, "it is not kept for long enough");
    for pool in scheduler.pools() {
        assert_eq!(pool.tend(begin + idle), None);
    }
    assert_eq!(used_pages(&device), 2);
}

#[test]
#[expect(clippy::disallowed_methods, reason = "a test that hangs must end")]
fn a_scheduler_lets_go_of_what_its_own_rank_keeps() {
    let every = Duration::from_millis(10);
    let (device, scheduler) = start(Duration::from_millis(5), Background::On { every });
    let end = Instant::now() + Duration::from_secs(60);
    for (revision, pool) in (1..).zip(scheduler.pools()) {
        pass(pool, revision, 3);
    }
    // Nobody calls the pools any more.
    while used_pages(&device) > 2 {
        assert!(Instant::now() < end, "it is kept for ever");
        std::thread::yield_now();
    }
}

//! A rank process for tests. It serves until its standard input ends; each line `mapped` on it is
//! answered by the runs mapped now, each line `memory` by the free bytes of its device.
//!
//! Arguments: runtime directory, instance, stage, rank, device (`host:BYTES` or `cuda`), layout,
//! capacity in bytes.
#![expect(clippy::print_stdout, reason = "standard output is how it answers")]

use std::error::Error;
use std::io::BufRead;
use std::sync::Arc;
use std::time::Duration;

use kvcached_integrations::{Worker, WorkerConfig};
use kvcached_mapper::{Cold, KvBuffers, Layout, PageSize, PoolId, PoolSpec, Rank, Stage};
use kvcached_vmm::{Cuda, Driver, Host, HostConfig, RecyclerConfig};

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [runtime_dir, instance, stage, rank, device, layout, capacity] = arguments.as_slice()
    else {
        return Err("seven arguments are expected".into());
    };
    let spec = PoolSpec {
        layout: layout.parse::<Layout>()?,
        layers: 4,
        kv_buffers: KvBuffers::Two,
        block_bytes: 256 << 10,
        page_size: PageSize::Auto,
        capacity_bytes: capacity.parse()?,
    };
    let config = WorkerConfig {
        instance: instance.parse()?,
        runtime_dir: runtime_dir.into(),
        stage: Stage(stage.parse()?),
        rank: Rank(rank.parse()?),
        pools: vec![(PoolId(0), spec)],
        cold: Cold::Unbacked,
        recycler: RecyclerConfig::default(),
        ipc_timeout: Duration::from_secs(20),
        orphan_timeout: Duration::from_secs(20),
        retire_timeout: Duration::from_secs(1),
        ready_timeout: Duration::from_secs(20),
    };
    match device.split_once(':') {
        Some(("host", bytes)) => serve(
            config,
            &Arc::new(Host::new(HostConfig::new(bytes.parse()?))?),
        ),
        _ => serve(config, &Arc::new(Cuda::new(0)?)),
    }
}

fn serve<D: Driver>(config: WorkerConfig, driver: &Arc<D>) -> Result<(), Box<dyn Error>> {
    let worker = Worker::start(config, driver)?;
    println!("ready");
    for line in std::io::stdin().lock().lines() {
        match line?.as_str() {
            "mapped" => {
                let mapper = worker.mapper(PoolId(0)).ok_or("the pool is there")?;
                let runs = mapper.mapped().into_iter();
                let runs = runs.map(|run| format!("{}+{}", run.first().0, run.count()));
                println!("{}", runs.collect::<Vec<_>>().join(" "));
            }
            "memory" => println!("{}", driver.memory()?.free),
            other => return Err(format!("{other:?} is no order").into()),
        }
    }
    Ok(())
}

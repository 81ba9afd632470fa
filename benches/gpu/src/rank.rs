//! A rank of a broadcast, in a process of its own: maps on the device as a worker of an engine
//! does, or does nothing at all. At the end it tells how long the driver took for each map.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use clap::{Args, ValueEnum};
use kvcached_integrations::{Config, Worker, WorkerConfig};
use kvcached_mapper::{Geometry, Rank, Stage};
use kvcached_tp_ipc::{EndpointDir, GeometryDigest, RuntimeDir, ServedPool, Server, ServerConfig};
use kvcached_vmm::Driver;

use crate::Outcome;
use crate::metered::{Asked, Calls, Metered};
use crate::nothing::Nothing;
use crate::shape::{self, POOL};

/// How long ranks wait for each other.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(20);

/// What a rank is told on its command line.
#[derive(Debug, Args)]
pub(crate) struct RankArguments {
    /// Directory of the sockets
    directory: PathBuf,
    /// Its number
    rank: u16,
    /// What it does when it is told to map
    #[arg(value_enum)]
    does: Does,
}

/// What a rank does when it is told to map.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Does {
    /// Maps, as a worker of an engine.
    Map,
    /// Answers.
    Nothing,
}

/// The configuration of all ranks of a broadcast and of their coordinator.
pub(crate) fn config(directory: &Path) -> Outcome<Config> {
    let directory = directory.to_str().ok_or("a directory with an odd name")?;
    shape::config(&[("KVCACHED_RUNTIME_DIR", directory)])
}

/// Where the ranks of a broadcast listen.
pub(crate) fn endpoints(config: &Config) -> Outcome<EndpointDir> {
    Ok(RuntimeDir::open(&config.runtime_dir)?.instance(&config.instance)?)
}

/// The whole life of a rank, which ends with its standard input.
pub(crate) fn serve<D: Driver>(arguments: &RankArguments, driver: D) -> Outcome {
    let config = config(&arguments.directory)?;
    let place = (Stage(0), Rank(arguments.rank));
    let spec = crate::rows::broadcast_spec();
    match arguments.does {
        Does::Map => {
            let driver = Arc::new(Metered::new(driver));
            let pools = vec![(POOL, spec)];
            let worker = WorkerConfig::new(&config, config.instance.clone(), place, pools);
            let worker = Worker::start(worker, &driver)?;
            await_end_of_input();
            println!("{}", serde_json::to_string(&per_map(&driver.take()))?);
            drop(worker);
        }
        Does::Nothing => {
            let geometry = spec.resolve(driver.properties().granularity)?;
            drop(driver);
            serve_nothing(&config, place, &geometry)?;
        }
    }
    Ok(())
}

/// Microseconds in the driver for each map of one chunk, its creation included.
fn per_map(calls: &Calls) -> Vec<f64> {
    let (mut maps, mut created) = (Vec::new(), 0.0);
    for call in &calls.0 {
        match call.asked {
            Asked::Create => created += call.micros,
            Asked::Map => maps.push(std::mem::take(&mut created) + call.micros),
            Asked::Unmap | Asked::Destroy => {}
        }
    }
    maps
}

#[expect(
    clippy::disallowed_methods,
    reason = "a program with a server of its own needs a thread to end it"
)]
fn serve_nothing(config: &Config, (stage, rank): (Stage, Rank), geometry: &Geometry) -> Outcome {
    let endpoints = endpoints(config)?;
    let served = ServedPool {
        pool: POOL,
        geometry: digest(geometry),
        mapper: Arc::new(Nothing),
    };
    let server = ServerConfig {
        instance: config.instance.clone(),
        stage,
        rank,
        pools: vec![served],
        timeout: TIMEOUT,
        orphan_timeout: TIMEOUT,
        epochs: None,
    };
    let mut server = Server::bind(&endpoints.endpoint(stage, rank), server)?;
    let stop = server.stop_handle();
    let waiting = thread::spawn(move || {
        await_end_of_input();
        stop.stop();
    });
    server.run()?;
    drop(waiting.join());
    println!("[]");
    Ok(())
}

fn digest(geometry: &Geometry) -> GeometryDigest {
    GeometryDigest::new(
        geometry.pages(),
        geometry.page_bytes(),
        geometry.block_stride_bytes(),
    )
}

fn await_end_of_input() {
    // An error ends it as well.
    drop(std::io::stdin().read_to_end(&mut Vec::new()));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metered::Call;

    #[test]
    fn a_map_counts_the_creation_before_it_and_nothing_that_takes_memory_away() {
        let call = |asked, micros| Call {
            asked,
            base: 0,
            offset: 0,
            len: 1,
            micros,
        };
        let calls = Calls(vec![
            call(Asked::Create, 1.0),
            call(Asked::Map, 2.0),
            call(Asked::Unmap, 4.0),
            call(Asked::Destroy, 8.0),
            call(Asked::Map, 16.0),
        ]);
        assert_eq!(per_map(&calls), [3.0, 16.0]);
    }
}

//! One run mapped on several ranks, each a process of its own on the one device, beside the same
//! exchange with ranks that only answer.

use std::io::Read;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;

use kvcached_integrations::{MapperConfig, compose};
use kvcached_mapper::{Layout, Mapper, PageId, PageRun, PageSize, PoolSpec};
use kvcached_tp_ipc::{Deadline, Topology};
use kvcached_vmm::{Driver, Recycler};

use crate::Outcome;
use crate::clock::timed;
use crate::rank::{self, Does, TIMEOUT};
use crate::report::{Row, Summary};
use crate::rows::{Bench, Rows};
use crate::shape::{self, CAPACITY_BYTES, POOL};

/// Maps that are not counted.
const BEFORE: usize = 10;
/// Pages of a run: ours, and as many bytes as a page of the earlier system has.
const RUNS: [(u32, &str); 2] = [(1, ""), (64, "-128mib")];

/// The pool of the broadcast rows.
pub(crate) const fn spec() -> PoolSpec {
    shape::spec(Layout::Contiguous, PageSize::Auto, CAPACITY_BYTES)
}

/// Maps run after run on `count` ranks, and unmaps each again.
pub(crate) fn map<D: Driver>(bench: &Bench<D>, count: u16, rows: Rows<'_>) -> Outcome {
    for (pages, suffix) in RUNS {
        let name = format!("broadcast-{count}{suffix}");
        let ours = Crew::start(bench, Does::Map, count)?;
        let socket = Crew::start(bench, Does::Nothing, count)?;
        let mut total = Row::micros(
            &name,
            format!(
                "one run of {pages} pages of 2 MiB, mapped on {count} ranks on one device; floor: \
                 the slowest rank's own driver calls, and the median of the exchange alone"
            ),
        )
        .beside(format!("broadcast-{count}"));
        let mut unmap = Row::micros(format!("{name}:unmap"), "the unmap after each")
            .beside(format!("broadcast-{count}:unmap"));
        let mut exchange = Row::micros(
            format!("{name}:exchange"),
            "the same with ranks that do nothing but answer",
        );
        let samples = bench.samples(150);
        for sample in 0..samples + BEFORE {
            let first = PageId(pages * u32::try_from(sample + 1)?);
            let run = [PageRun::new(first, pages).ok_or("no run")?];
            let (mapped, map_micros) = timed(|| ours.mapper.map(&run));
            mapped?;
            let (unmapped, unmap_micros) = timed(|| ours.mapper.unmap(&run));
            unmapped?;
            let (mapped, exchange_micros) = timed(|| socket.mapper.map(&run));
            mapped?;
            socket.mapper.unmap(&run)?;
            if sample >= BEFORE {
                total.push(map_micros);
                unmap.push(unmap_micros);
                exchange.push(exchange_micros);
            }
        }
        drop(socket);
        let mut driver = Row::micros(
            format!("{name}:driver"),
            "the driver calls of the slowest rank",
        );
        for micros in slowest(&ours.finish()?, samples)? {
            driver.push(micros);
        }
        let exchange_median = Summary::of(&exchange.samples).map_or(0.0, |s| s.median);
        total.floor = driver
            .samples
            .iter()
            .map(|micros| micros + exchange_median)
            .collect();
        rows.extend([total, unmap, exchange, driver]);
    }
    Ok(())
}

/// Of each of the last `samples` maps, the longest time that a rank took.
fn slowest(ranks: &[Vec<f64>], samples: usize) -> Outcome<Vec<f64>> {
    let mut longest = vec![0.0; samples];
    for maps in ranks {
        let from = maps
            .len()
            .checked_sub(samples)
            .ok_or("a rank mapped less than it was told")?;
        for (longest, &micros) in longest.iter_mut().zip(&maps[from..]) {
            *longest = f64::max(*longest, micros);
        }
    }
    Ok(longest)
}

/// Rank processes and the mapper over them.
struct Crew {
    mapper: Arc<dyn Mapper>,
    ranks: Vec<RankProcess>,
    /// Last, since the sockets are in it.
    _directory: tempfile::TempDir,
}

struct RankProcess(Child);

impl Crew {
    fn start<D: Driver>(bench: &Bench<D>, does: Does, count: u16) -> Outcome<Self> {
        let directory = tempfile::tempdir()?;
        let runtime = directory.path().join("run");
        let config = rank::config(&runtime)?;
        let endpoints = rank::endpoints(&config)?;
        let ranks = (0..count)
            .map(|rank| RankProcess::start(bench, &runtime, rank, does))
            .collect::<Outcome<Vec<_>>>()?;
        let topology = Topology::separate_coordinator(count, 1, &endpoints);
        let geometry = spec().resolve(bench.driver.properties().granularity)?;
        let mapper = MapperConfig::new(&config, config.instance.clone(), topology);
        let ready_by = Deadline::after(TIMEOUT);
        let composed = compose(
            &mapper,
            POOL,
            &geometry,
            None::<&Arc<Recycler<D>>>,
            ready_by,
        )?;
        Ok(Self {
            mapper: composed.mapper,
            ranks,
            _directory: directory,
        })
    }

    /// Ends the ranks; what each tells of its maps.
    fn finish(mut self) -> Outcome<Vec<Vec<f64>>> {
        self.ranks.iter_mut().map(RankProcess::finish).collect()
    }
}

impl RankProcess {
    fn start<D: Driver>(
        bench: &Bench<D>,
        directory: &Path,
        rank: u16,
        does: Does,
    ) -> Outcome<Self> {
        let does = match does {
            Does::Map => "map",
            Does::Nothing => "nothing",
        };
        let child = Command::new(std::env::current_exe()?)
            .args(&bench.rank)
            .arg(directory)
            .arg(rank.to_string())
            .arg(does)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        Ok(Self(child))
    }

    fn finish(&mut self) -> Outcome<Vec<f64>> {
        drop(self.0.stdin.take());
        let mut told = String::new();
        let mut output = self.0.stdout.take().ok_or("it was piped")?;
        output.read_to_string(&mut told)?;
        Ok(serde_json::from_str(&told)?)
    }
}

impl Drop for RankProcess {
    fn drop(&mut self) {
        // It ends by itself once its input is closed; this is for when it does not.
        drop(self.0.stdin.take());
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_slowest_rank_is_looked_for_map_by_map() {
        let ranks = [vec![9.0, 1.0, 4.0], vec![2.0, 3.0]];
        assert_eq!(slowest(&ranks, 2).unwrap(), [2.0, 4.0]);
        assert!(slowest(&ranks, 3).is_err());
    }
}

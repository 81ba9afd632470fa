//! The result of a replay, as JSON and as a table for people. `docs/replay-json.md` describes the
//! fields; [`SCHEMA`] changes when one of them changes its meaning or goes away.

use std::time::Duration;

use comfy_table::{CellAlignment, Table, presets::NOTHING};
use serde::{Deserialize, Serialize};

use crate::{
    Chaos, Comparison, Faults, Growth, IdleUse, Latency, MemoryUse, Outcome, PageTotals, Plan,
    ProcessFigures, Served, Stats,
};

/// Version of the JSON's meaning.
pub const SCHEMA: u32 = 1;

/// What a replay came to. Bytes are those of one rank.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// [`SCHEMA`].
    pub schema: u32,
    /// What was replayed, on what.
    pub config: ConfigReport,
    /// Requests of the trace.
    pub requests: u32,
    /// Requests that the elastic pool served to their end.
    pub completed: u32,
    /// Requests that the elastic pool could never hold.
    pub rejected: u32,
    /// Ranks of each model.
    pub ranks: u16,
    /// The elastic pool.
    pub elastic: SideReport,
    /// The same memory split evenly among the models.
    #[serde(rename = "static")]
    pub fixed: SideReport,
    /// Each model, in the order of the command line.
    pub models: Vec<ModelReport>,
    /// Pages and runs of all models, on one rank.
    pub pages: PageTotals,
    /// What calls took.
    pub latency_us: LatencyReport,
    /// What the content oracle found, on all ranks.
    pub verify: VerifyReport,
    /// How many ranks ever had other pages mapped than they should.
    pub ranks_divergent: u32,
    /// What was done to the ranks on the way, if anything was.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub chaos: Option<ChaosReport>,
    /// What was left when the last request was done, if prefixes are kept for later requests.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub idle: Option<IdleReport>,
    /// How the processes of the elastic side grew, after a replay by the clock.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub growth: Option<Growth>,
}

/// What was replayed, on what.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ConfigReport {
    /// Format of the trace, `built-in` for none.
    pub trace: String,
    /// Rule by which models share the requests.
    pub assign: String,
    /// Seed of that rule, and of the built-in workload.
    pub seed: u64,
    /// Where the schedulers are.
    pub topology: String,
    /// Layout of the tensors.
    pub layout: String,
    /// Tokens of a block.
    pub block_tokens: u32,
    /// What each rank's device has for all models.
    pub memory_bytes: u64,
    /// What each model has of it in the static split.
    pub share_bytes: u64,
    /// Where the memory is.
    pub driver: String,
    /// How time passed.
    pub time: String,
}

/// One side of the comparison.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SideReport {
    /// Time from arrival to first token.
    pub ttft_ms: TtftReport,
    /// Requests held back for lack of memory before they were first admitted.
    pub waited: u32,
    /// Requests served to their end.
    pub completed: u32,
    /// Requests that could never be held.
    pub rejected: u32,
    /// How often a running request lost its blocks and was computed again.
    pub preemptions: u64,
    /// Prompt tokens processed.
    pub prefilled_tokens: u64,
    /// Prompt tokens found in shared prefixes.
    pub reused_tokens: u64,
    /// Most bytes mapped at once.
    pub peak_mapped_bytes: u64,
    /// Bytes mapped, on average over time.
    pub mean_mapped_bytes: u64,
    /// Most bytes in blocks handed out at once.
    pub peak_held_bytes: u64,
    /// Bytes in blocks handed out, on average over time.
    pub mean_held_bytes: u64,
    /// Virtual seconds from the first arrival to the last token.
    pub duration_s: f64,
}

/// Time to first token, in milliseconds. A request that never had one counts to the end.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct TtftReport {
    /// Arithmetic mean.
    pub mean: f64,
    /// Median.
    pub p50: f64,
    /// 99 % are at most this.
    pub p99: f64,
    /// The longest.
    pub max: f64,
}

/// One model on both sides.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ModelReport {
    /// Name and number.
    pub model: String,
    /// Requests it was given.
    pub requests: u32,
    /// In the elastic pool.
    pub elastic: SideReport,
    /// With its static share.
    #[serde(rename = "static")]
    pub fixed: SideReport,
}

/// What calls took, by kind.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct LatencyReport {
    /// An allocation of blocks, whatever it caused.
    pub alloc: Latency,
    /// Of these, those that waited for pages to be mapped.
    #[serde(default)]
    pub alloc_mapped: Latency,
    /// Backing pages, on every rank.
    pub map: Latency,
    /// Taking memory away, on every rank.
    pub unmap: Latency,
    /// The part of a map or unmap that was spent on ranks in other processes.
    pub broadcast: Latency,
}

/// What the content oracle found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct VerifyReport {
    /// Blocks looked at, on all ranks.
    pub blocks_checked: u64,
    /// Blocks without the content they should have.
    pub corrupted: u64,
}

/// Memory that is backed while nothing runs, after a trim; all models together.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct IdleReport {
    /// Backed.
    pub backed_bytes: u64,
    /// What would do for the kept blocks and the null blocks, if they were packed.
    pub packed_bytes: u64,
    /// In blocks that are kept.
    pub cached_bytes: u64,
    /// Backed over packed.
    pub over_packed: f64,
}

/// What was done to the ranks, and how the elastic pool got over it.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct ChaosReport {
    /// Seed of the faults.
    pub seed: u64,
    /// Virtual seconds from one fault to the next, on average.
    pub every_s: f64,
    /// Rank processes killed.
    pub kills: u32,
    /// Rank processes stopped for longer than a coordinator waits, and continued.
    pub stalls: u32,
    /// Rank processes started in the place of others.
    pub restarts: u32,
    /// How often a pool was fenced.
    pub fenced: u32,
    /// How often the content of a model was lost: by kills, and never by stalls.
    pub losses: u32,
    /// Requests that were begun anew, once or more, because their content was lost.
    pub requests_retried: u32,
    /// How often requests were begun anew.
    pub retries: u64,
    /// Blocks whose content was lost.
    pub blocks_lost: u64,
    /// Real time from the moment a rank was back until every rank was known to have what it should.
    pub recovery_ms: RecoveryReport,
}

/// Times of recovery, in milliseconds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct RecoveryReport {
    /// How many: one for each fault that fenced a pool or lost content.
    pub count: u32,
    /// Median.
    pub p50: f64,
    /// 99 % are at most this.
    pub p99: f64,
    /// The longest.
    pub max: f64,
}

impl Report {
    /// The report of a comparison.
    #[must_use]
    pub fn new(plan: &Plan, comparison: &Comparison) -> Self {
        let Comparison {
            elastic,
            fixed,
            share_bytes,
            pages,
            calls,
            checked,
            ranks_divergent,
            faults,
            idle,
            growth,
        } = comparison;
        let models =
            elastic
                .models
                .iter()
                .zip(&fixed.models)
                .map(|(elastic_model, fixed_model)| ModelReport {
                    model: elastic_model.label.clone(),
                    requests: elastic_model.served.requests,
                    elastic: side(&elastic_model.served, elastic_model.memory, elastic.end),
                    fixed: side(&fixed_model.served, fixed_model.memory, fixed.end),
                });
        Self {
            schema: SCHEMA,
            config: ConfigReport {
                trace: plan.trace.format.to_string(),
                assign: plan.assign.to_string(),
                seed: plan.seed,
                topology: plan.topology.to_string(),
                layout: plan.layout.to_string(),
                block_tokens: plan.block_tokens.get(),
                memory_bytes: plan.memory_bytes,
                share_bytes: *share_bytes,
                driver: plan.device.to_string(),
                time: plan.pace.to_string(),
            },
            requests: elastic.total.requests,
            completed: elastic.total.completed,
            rejected: elastic.total.rejected,
            ranks: plan.tp,
            elastic: total(elastic),
            fixed: total(fixed),
            models: models.collect(),
            pages: *pages,
            latency_us: LatencyReport {
                alloc: calls.alloc.summary(),
                alloc_mapped: calls.alloc_mapped.summary(),
                map: calls.map.summary(),
                unmap: calls.unmap.summary(),
                broadcast: calls.broadcast.summary(),
            },
            verify: VerifyReport {
                blocks_checked: checked.blocks,
                corrupted: checked.corrupted,
            },
            ranks_divergent: *ranks_divergent,
            chaos: plan
                .chaos
                .zip(faults.as_ref())
                .map(|(chaos, faults)| ChaosReport::new(chaos, faults, &elastic.total)),
            idle: idle.map(IdleReport::new),
            growth: growth.clone(),
        }
    }

    /// As JSON, with a line for each field.
    #[must_use]
    pub fn json(&self) -> String {
        let mut text = serde_json::to_string_pretty(self).expect("a report has only plain fields");
        text.push('\n');
        text
    }

    /// As a table.
    #[must_use]
    pub fn table(&self) -> String {
        let config = &self.config;
        let mut sides = Table::new();
        sides.load_preset(NOTHING);
        sides.set_header(["", "static", "elastic"]);
        let mut row = |name: &str, value: &dyn Fn(&SideReport) -> String| {
            sides.add_row([name.to_owned(), value(&self.fixed), value(&self.elastic)]);
        };
        row("completed", &|side| side.completed.to_string());
        row("rejected", &|side| side.rejected.to_string());
        row("waited for memory", &|side| side.waited.to_string());
        row("preempted", &|side| side.preemptions.to_string());
        row("TTFT mean", &|side| milliseconds(side.ttft_ms.mean));
        row("TTFT p50", &|side| milliseconds(side.ttft_ms.p50));
        row("TTFT p99", &|side| milliseconds(side.ttft_ms.p99));
        row("mapped, peak", &|side| bytes(side.peak_mapped_bytes));
        row("mapped, mean", &|side| bytes(side.mean_mapped_bytes));
        row("held, mean", &|side| bytes(side.mean_held_bytes));
        row("prefix tokens reused", &|side| {
            side.reused_tokens.to_string()
        });

        let mut calls = Table::new();
        calls.load_preset(NOTHING);
        calls.set_header(["call", "count", "p50", "p99", "max"]);
        let LatencyReport {
            alloc,
            alloc_mapped,
            map,
            unmap,
            broadcast,
        } = self.latency_us;
        for (name, latency) in [
            ("alloc", alloc),
            ("alloc that mapped", alloc_mapped),
            ("map", map),
            ("unmap", unmap),
            ("broadcast", broadcast),
        ] {
            calls.add_row([
                name.to_owned(),
                latency.count.to_string(),
                microseconds(latency.p50),
                microseconds(latency.p99),
                microseconds(latency.max),
            ]);
        }
        for table in [&mut sides, &mut calls] {
            for column in table.column_iter_mut().skip(1) {
                column.set_cell_alignment(CellAlignment::Right);
            }
        }
        let models: Vec<&str> = self
            .models
            .iter()
            .map(|model| model.model.as_str())
            .collect();
        format!(
            "{} requests ({}) on {}\n{} ranks each, {}, {}, {} per rank ({} each if split), {}\n\
             {sides}\n{calls}\n\
             pages: {} mapped in {} runs, {} unmapped; blocks checked: {}, corrupted: {}; \
             ranks divergent: {}{}{}{}",
            self.requests,
            config.trace,
            models.join(", "),
            self.ranks,
            config.topology,
            config.layout,
            bytes(config.memory_bytes),
            bytes(config.share_bytes),
            config.driver,
            self.pages.mapped,
            self.pages.runs,
            self.pages.unmapped,
            self.verify.blocks_checked,
            self.verify.corrupted,
            self.ranks_divergent,
            self.chaos.map(|chaos| chaos.summary()).unwrap_or_default(),
            self.idle.map(|idle| idle.summary()).unwrap_or_default(),
            self.growth.as_ref().map(growth_table).unwrap_or_default(),
        )
    }
}

impl IdleReport {
    #[expect(clippy::cast_precision_loss, reason = "a ratio for people")]
    fn new(idle: IdleUse) -> Self {
        Self {
            backed_bytes: idle.backed_bytes,
            packed_bytes: idle.packed_bytes,
            cached_bytes: idle.cached_bytes,
            over_packed: idle.backed_bytes as f64 / idle.packed_bytes.max(1) as f64,
        }
    }

    /// A line for people, after what stands before it.
    fn summary(&self) -> String {
        format!(
            "\nidle at the end: {} backed for {} of kept prefixes, {:.2} times what would do",
            mebibytes(self.backed_bytes),
            mebibytes(self.cached_bytes),
            self.over_packed,
        )
    }
}

impl ChaosReport {
    fn new(chaos: Chaos, faults: &Faults, served: &Served) -> Self {
        let recovery = Stats::of(faults.recoveries.clone());
        Self {
            seed: chaos.seed,
            every_s: chaos.every.as_secs_f64(),
            kills: faults.kills,
            stalls: faults.stalls,
            restarts: faults.restarts,
            fenced: faults.fenced,
            losses: faults.losses,
            requests_retried: served.retried,
            retries: served.retries,
            blocks_lost: faults.blocks_lost,
            recovery_ms: RecoveryReport {
                count: recovery.count,
                p50: ms(recovery.p50),
                p99: ms(recovery.p99),
                max: ms(recovery.max),
            },
        }
    }

    /// A line for people, after what stands before it.
    fn summary(&self) -> String {
        let recovery = &self.recovery_ms;
        format!(
            "\nranks killed: {}, stalled: {}, restarted: {}; pools fenced: {}; contents lost: {} times, \
             {} blocks; requests retried: {} ({} times); recovered within p50 {}, p99 {}, max {}",
            self.kills,
            self.stalls,
            self.restarts,
            self.fenced,
            self.losses,
            self.blocks_lost,
            self.requests_retried,
            self.retries,
            milliseconds(recovery.p50),
            milliseconds(recovery.p99),
            milliseconds(recovery.max),
        )
    }
}

/// A line for each process, after what stands before it.
fn growth_table(growth: &Growth) -> String {
    let mut table = Table::new();
    table.load_preset(NOTHING);
    table.set_header([
        "first and last quarter",
        "own memory",
        "descriptors",
        "mappings",
        "of pools",
    ]);
    let pair = |first: String, last: String| format!("{first} - {last}");
    for process in &growth.processes {
        let (first, last) = (&process.first, &process.last);
        let count =
            |of: fn(&ProcessFigures) -> u64| pair(of(first).to_string(), of(last).to_string());
        table.add_row([
            process.process.clone(),
            pair(
                mebibytes(first.anonymous_bytes),
                mebibytes(last.anonymous_bytes),
            ),
            count(|figures| figures.descriptors),
            count(|figures| figures.mappings),
            count(|figures| figures.pool_mappings),
        ]);
    }
    let [first, last] = growth.mapped_bytes;
    table.add_row([
        "mapped on a rank".to_owned(),
        pair(mebibytes(first), mebibytes(last)),
    ]);
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    format!("\n{table}")
}

fn mebibytes(count: u64) -> String {
    let tenths = (u128::from(count) * 10 + (1 << 19)) >> 20;
    format!("{}.{} MiB", tenths / 10, tenths % 10)
}

/// In whole microseconds, so that no digits appear that mean nothing.
fn ms(time: Duration) -> f64 {
    (time.as_secs_f64() * 1e6).round() / 1e3
}

fn total(outcome: &Outcome) -> SideReport {
    side(&outcome.total, outcome.memory, outcome.end)
}

fn side(served: &Served, memory: MemoryUse, end: Duration) -> SideReport {
    SideReport {
        ttft_ms: TtftReport {
            mean: ms(served.ttft.mean),
            p50: ms(served.ttft.p50),
            p99: ms(served.ttft.p99),
            max: ms(served.ttft.max),
        },
        waited: served.waited,
        completed: served.completed,
        rejected: served.rejected,
        preemptions: served.preemptions,
        prefilled_tokens: served.prefilled_tokens,
        reused_tokens: served.reused_tokens,
        peak_mapped_bytes: memory.peak_mapped_bytes,
        mean_mapped_bytes: memory.mean_mapped_bytes,
        peak_held_bytes: memory.peak_held_bytes,
        mean_held_bytes: memory.mean_held_bytes,
        duration_s: end.as_secs_f64(),
    }
}

fn bytes(count: u64) -> String {
    // Two decimals of a GiB, in whole numbers.
    let hundredths = (u128::from(count) * 100 + (1 << 29)) >> 30;
    format!("{}.{:02} GiB", hundredths / 100, hundredths % 100)
}

fn milliseconds(ms: f64) -> String {
    if ms < 10_000.0 {
        format!("{ms:.0} ms")
    } else {
        format!("{:.1} s", ms / 1e3)
    }
}

fn microseconds(us: f64) -> String {
    if us < 10_000.0 {
        format!("{us:.1} µs")
    } else {
        format!("{:.1} ms", us / 1e3)
    }
}

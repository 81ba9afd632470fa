//! What a replay measured, on one side of the comparison.

use std::time::Duration;

use crate::{Sample, Series};

/// What the engine measured with one kind of cache. Bytes are those of one rank; all ranks have
/// the same.
#[derive(Debug, Clone, PartialEq)]
pub struct Outcome {
    /// When the last request was done: virtual time since the first arrived.
    pub end: Duration,
    /// All models together.
    pub total: Served,
    /// All models together; peaks are peaks of the sum.
    pub memory: MemoryUse,
    /// Each model.
    pub models: Vec<ModelOutcome>,
    /// Each model over time.
    pub series: Series,
    /// Each request, in the order of the trace.
    pub requests: Vec<RequestOutcome>,
}

/// One model of an [`Outcome`].
#[derive(Debug, Clone, PartialEq)]
pub struct ModelOutcome {
    /// Its name and number.
    pub label: String,
    /// How its requests fared.
    pub served: Served,
    /// Its memory.
    pub memory: MemoryUse,
}

/// How requests fared.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Served {
    /// Requests in the trace.
    pub requests: u32,
    /// Requests whose last token was generated.
    pub completed: u32,
    /// Requests that were refused, because not even the whole cache could hold them.
    pub rejected: u32,
    /// Requests that were held back for lack of memory before they were first admitted: their own
    /// blocks did not fit, or those of a request ahead of them did not.
    pub waited: u32,
    /// How often a running request lost its blocks and had to be computed again.
    pub preemptions: u64,
    /// Requests that were begun anew, once or more, because their content was lost.
    pub retried: u32,
    /// How often requests were begun anew for that reason.
    pub retries: u64,
    /// Prompt tokens that were processed, those of recomputation included.
    pub prefilled_tokens: u64,
    /// Prompt tokens that were there already, in the blocks of a shared prefix.
    pub reused_tokens: u64,
    /// Time from arrival to first token. A request without a first token, rejected ones above
    /// all, counts as waiting to the end of the run, or to a later end: see
    /// [`Outcome::observe_until`]. Refusing requests makes nothing look better.
    pub ttft: Stats,
    /// Mean time from one token of a request to the next.
    pub mean_time_per_token: Duration,
}

/// One request of an [`Outcome`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RequestOutcome {
    /// The model that served it.
    pub model: usize,
    /// Time from arrival to first token; `None` if there was none.
    pub ttft: Option<Duration>,
    /// When its last token was generated.
    pub completed_at: Option<Duration>,
    /// Was it held back for lack of memory before it was first admitted?
    pub waited: bool,
    /// How often it lost its blocks to others.
    pub preemptions: u32,
    /// How often it was begun anew because its content was lost.
    pub retries: u32,
}

/// Memory over the whole run, weighted by time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct MemoryUse {
    /// Most bytes mapped at once.
    pub peak_mapped_bytes: u64,
    /// Bytes mapped on average.
    pub mean_mapped_bytes: u64,
    /// Most bytes in blocks handed out at once.
    pub peak_held_bytes: u64,
    /// Bytes in blocks handed out, on average.
    pub mean_held_bytes: u64,
}

/// Mean and quantiles of times. Quantiles are by nearest rank: values that occurred.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Stats {
    /// How many.
    pub count: u32,
    /// Arithmetic mean.
    pub mean: Duration,
    /// Half are at most this.
    pub p50: Duration,
    /// 99 % are at most this.
    pub p99: Duration,
    /// The greatest.
    pub max: Duration,
}

impl Outcome {
    /// Has every request that never had a first token wait until `end`, if that is later than the
    /// run's own end. Two runs of one trace can only be compared over the same time: one that
    /// refuses what it cannot hold is done sooner, and those it refused still have no answer.
    ///
    /// `arrivals` are those of all requests, in the order of the trace.
    pub fn observe_until(&mut self, end: Duration, arrivals: impl Iterator<Item = Duration>) {
        let end = end.max(self.end);
        let mut total = Vec::with_capacity(self.requests.len());
        let mut by_model = vec![Vec::new(); self.models.len()];
        for (request, arrival) in self.requests.iter().zip(arrivals) {
            let ttft = request.ttft.unwrap_or_else(|| end.saturating_sub(arrival));
            total.push(ttft);
            by_model[request.model].push(ttft);
        }
        self.total.ttft = Stats::of(total);
        for (model, ttft) in self.models.iter_mut().zip(by_model) {
            model.served.ttft = Stats::of(ttft);
        }
    }
}

impl Stats {
    /// Of `times`, in any order; all zero if there are none.
    #[must_use]
    pub fn of(mut times: Vec<Duration>) -> Self {
        times.sort_unstable();
        let Some(&max) = times.last() else {
            return Self::default();
        };
        let sum: u128 = times.iter().map(Duration::as_nanos).sum();
        let nearest_rank = |percent: usize| times[(times.len() * percent).div_ceil(100) - 1];
        Self {
            count: u32::try_from(times.len()).unwrap_or(u32::MAX),
            mean: duration(sum / times.len() as u128),
            p50: nearest_rank(50),
            p99: nearest_rank(99),
            max,
        }
    }
}

/// Integrates the memory of each model over time.
#[derive(Debug)]
pub(crate) struct Meter {
    /// As it is since `since`.
    now: Vec<Sample>,
    since: Duration,
    models: Vec<Integral>,
    total: Integral,
    series: Series,
}

#[derive(Debug, Clone, Default)]
struct Integral {
    peak_mapped_bytes: u64,
    peak_held_bytes: u64,
    /// Bytes times nanoseconds.
    mapped: u128,
    held: u128,
}

impl Meter {
    pub(crate) fn new(models: usize) -> Self {
        Self {
            now: vec![Sample::default(); models],
            since: Duration::ZERO,
            models: vec![Integral::default(); models],
            total: Integral::default(),
            series: Series::new(models),
        }
    }

    /// From now, which is `at`, on everything is as `samples` says, until the next call.
    pub(crate) fn observe(&mut self, at: Duration, samples: impl Iterator<Item = Sample>) {
        self.close(at);
        self.now.clear();
        self.now.extend(samples);
        for (integral, sample) in self.models.iter_mut().zip(&self.now) {
            integral.peak(sample.mapped_bytes, sample.held_bytes);
        }
        let (mapped, held) = self.sums();
        self.total.peak(mapped, held);
        self.series.record(at, at, &self.now);
    }

    pub(crate) fn finish(mut self, end: Duration) -> (MemoryUse, Vec<MemoryUse>, Series) {
        self.close(end);
        let models = self
            .models
            .iter()
            .map(|integral| integral.over(end))
            .collect();
        (self.total.over(end), models, self.series)
    }

    fn close(&mut self, at: Duration) {
        let span = at.saturating_sub(self.since).as_nanos();
        if span > 0 {
            for (integral, sample) in self.models.iter_mut().zip(&self.now) {
                integral.add(sample.mapped_bytes, sample.held_bytes, span);
            }
            let (mapped, held) = self.sums();
            self.total.add(mapped, held, span);
            self.series.record(self.since, at, &self.now);
        }
        self.since = at;
    }

    fn sums(&self) -> (u64, u64) {
        self.now.iter().fold((0, 0), |(mapped, held), sample| {
            (mapped + sample.mapped_bytes, held + sample.held_bytes)
        })
    }
}

impl Integral {
    fn peak(&mut self, mapped_bytes: u64, held_bytes: u64) {
        self.peak_mapped_bytes = self.peak_mapped_bytes.max(mapped_bytes);
        self.peak_held_bytes = self.peak_held_bytes.max(held_bytes);
    }

    fn add(&mut self, mapped_bytes: u64, held_bytes: u64, span_ns: u128) {
        self.mapped += u128::from(mapped_bytes) * span_ns;
        self.held += u128::from(held_bytes) * span_ns;
    }

    /// A run that took no time has means equal to its peaks.
    fn over(&self, end: Duration) -> MemoryUse {
        let mean = |integral: u128, peak: u64| {
            let mean = integral.checked_div(end.as_nanos());
            mean.map_or(peak, |mean| u64::try_from(mean).unwrap_or(u64::MAX))
        };
        MemoryUse {
            peak_mapped_bytes: self.peak_mapped_bytes,
            mean_mapped_bytes: mean(self.mapped, self.peak_mapped_bytes),
            peak_held_bytes: self.peak_held_bytes,
            mean_held_bytes: mean(self.held, self.peak_held_bytes),
        }
    }
}

/// Nanoseconds as a duration; more than 584 years are 584 years.
pub(crate) fn duration(nanos: u128) -> Duration {
    Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: fn(u64) -> Duration = Duration::from_millis;

    #[test]
    fn quantiles_are_values_that_occurred() {
        let stats = Stats::of((1..=200).rev().map(MS).collect());
        assert_eq!(
            (stats.p50, stats.p99, stats.max),
            (MS(100), MS(198), MS(200))
        );
        assert_eq!(
            (stats.count, stats.mean),
            (200, Duration::from_micros(100_500))
        );
        let one = Stats::of(vec![MS(7)]);
        assert_eq!(
            (one.mean, one.p50, one.p99, one.max),
            (MS(7), MS(7), MS(7), MS(7))
        );
        assert_eq!(Stats::of(Vec::new()), Stats::default());
    }

    #[test]
    fn means_are_weighted_by_time() {
        let sample = |mapped_bytes, held_bytes| Sample {
            mapped_bytes,
            held_bytes,
            waiting: 0,
        };
        let mut meter = Meter::new(2);
        meter.observe(MS(0), [sample(100, 50), sample(0, 0)].into_iter());
        meter.observe(MS(30), [sample(20, 10), sample(60, 60)].into_iter());
        meter.observe(MS(30), [sample(20, 10), sample(90, 60)].into_iter());
        let (total, models, series) = meter.finish(MS(40));
        assert_eq!(
            (total.peak_mapped_bytes, total.mean_mapped_bytes),
            (110, (3_000 + 1_100) / 40)
        );
        assert_eq!(
            (total.peak_held_bytes, total.mean_held_bytes),
            (70, (1_500 + 700) / 40)
        );
        assert_eq!(
            (models[1].peak_mapped_bytes, models[1].mean_mapped_bytes),
            (90, 900 / 40)
        );
        assert_eq!(series.points().count(), 41);
    }

    #[test]
    fn a_run_without_duration_has_means() {
        let mut meter = Meter::new(1);
        let sample = Sample {
            mapped_bytes: 5,
            held_bytes: 3,
            waiting: 0,
        };
        meter.observe(Duration::ZERO, std::iter::once(sample));
        assert_eq!(meter.finish(Duration::ZERO).0.mean_mapped_bytes, 5);
    }

    #[test]
    fn a_request_that_was_refused_waits_as_long_as_the_other_side_runs() {
        let second = Duration::from_secs(1);
        let request = |ttft| RequestOutcome {
            model: 0,
            ttft,
            completed_at: ttft,
            waited: false,
            preemptions: 0,
            retries: 0,
        };
        let mut outcome = Outcome {
            end: second * 10,
            total: Served::default(),
            memory: MemoryUse::default(),
            models: vec![ModelOutcome {
                label: "only".to_owned(),
                served: Served::default(),
                memory: MemoryUse::default(),
            }],
            series: Series::new(1),
            requests: vec![request(Some(second * 2)), request(None)],
        };
        let arrivals = [Duration::ZERO, second * 4];
        outcome.observe_until(second * 30, arrivals.into_iter());
        assert_eq!(outcome.total.ttft.max, second * 26);
        assert_eq!(outcome.models[0].served.ttft.p50, second * 2);
        outcome.observe_until(Duration::ZERO, arrivals.into_iter());
        assert_eq!(
            outcome.total.ttft.max,
            second * 6,
            "never before its own end"
        );
    }
}

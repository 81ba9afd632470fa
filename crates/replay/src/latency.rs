//! Latencies as percentiles, over any number of calls in constant memory.

use std::time::Duration;

use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};

/// Three digits: a percentile is off by a thousandth at most.
const DIGITS: u8 = 3;
/// The longest time that is told from longer ones: an hour.
const LONGEST_NS: u64 = 3_600_000_000_000;

/// Times of calls of one kind.
#[derive(Debug, Clone)]
pub struct Latencies(Histogram<u64>);

/// What the calls of one kind took, in microseconds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Latency {
    /// Half of the calls took at most this.
    pub p50: f64,
    /// 99 % of the calls took at most this.
    pub p99: f64,
    /// The longest.
    pub max: f64,
    /// How many calls; without any, the others are zero.
    pub count: u64,
}

impl Latencies {
    /// Adds one call. Anything longer than an hour counts as one.
    pub fn record(&mut self, time: Duration) {
        let ns = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        self.0.saturating_record(ns);
    }

    /// The percentiles.
    #[must_use]
    pub fn summary(&self) -> Latency {
        if self.0.is_empty() {
            return Latency::default();
        }
        #[expect(clippy::cast_precision_loss, reason = "an hour has less than 2^53 ns")]
        let us = |ns: u64| ns as f64 / 1e3;
        Latency {
            p50: us(self.0.value_at_quantile(0.5)),
            p99: us(self.0.value_at_quantile(0.99)),
            max: us(self.0.max()),
            count: self.0.len(),
        }
    }
}

impl Default for Latencies {
    fn default() -> Self {
        Self(Histogram::new_with_max(LONGEST_NS, DIGITS).expect("a range and three digits"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_right_to_a_thousandth() {
        let mut latencies = Latencies::default();
        for us in 1..=1_000 {
            latencies.record(Duration::from_micros(us));
        }
        let Latency {
            p50,
            p99,
            max,
            count,
        } = latencies.summary();
        let near = |found: f64, right: f64| (found - right).abs() <= right / 1_000.0;
        assert!(
            near(p50, 500.0) && near(p99, 990.0) && near(max, 1_000.0),
            "{p50} {p99} {max}"
        );
        assert_eq!(count, 1_000);
    }

    #[test]
    fn no_call_is_no_time() {
        assert_eq!(Latencies::default().summary(), Latency::default());
    }

    #[test]
    fn a_call_of_no_time_and_one_of_a_day_are_recorded() {
        let mut latencies = Latencies::default();
        latencies.record(Duration::ZERO);
        latencies.record(Duration::from_secs(86_400));
        assert_eq!(latencies.summary().count, 2);
        assert!(latencies.summary().max >= 3_590e6);
    }
}

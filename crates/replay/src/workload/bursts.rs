//! Prefill bursts: many long prompts at once, then silence.

use std::time::Duration;

use super::{Draws, LogNormal};
use crate::{Format, Request, Trace};

/// How prefill bursts are drawn.
///
/// What documents that are summarised in batches, or the first minute after a restart, look like to
/// a KV cache: it grows by many blocks at once, stays for some seconds, and lies empty until the next
/// burst.
///
/// | quantity | distribution |
/// | --- | --- |
/// | bursts | one every [`period`](Self::period), of [`at_once`](Self::at_once) requests |
/// | gaps within a burst | even, 10 to 30 ms |
/// | prompt tokens | log-normal, median 4096, σ = 0.5, at most 32 768 |
/// | generated tokens | log-normal, median 64, σ = 0.5, at most 1024 |
///
/// A burst of 16 prompts has about 74 000 tokens: 9 GiB of an 8B model's cache, on one rank.
#[derive(Debug, Clone, PartialEq)]
pub struct Bursts {
    /// How many requests.
    pub requests: u32,
    /// The same seed gives the same workload.
    pub seed: u64,
    /// From the beginning of a burst to that of the next.
    pub period: Duration,
    /// Requests of a burst; 0 is taken for 1. The last burst has what is left.
    pub at_once: u32,
    /// Prompt tokens.
    pub input: LogNormal,
    /// Generated tokens.
    pub output: LogNormal,
}

/// Mean time from one prompt of a burst to the next.
const GAP: Duration = Duration::from_millis(20);

/// No prompt is longer, as the context window of a model has it.
const MAX_INPUT_TOKENS: u32 = 32_768;

/// No answer is longer.
const MAX_OUTPUT_TOKENS: u32 = 1_024;

impl Bursts {
    /// `requests` requests, 16 of them every 30 s.
    #[must_use]
    pub const fn new(requests: u32, seed: u64) -> Self {
        Self {
            requests,
            seed,
            period: Duration::from_secs(30),
            at_once: 16,
            input: LogNormal {
                median: 4096.0,
                sigma: 0.5,
            },
            output: LogNormal {
                median: 64.0,
                sigma: 0.5,
            },
        }
    }

    /// Draws it.
    #[must_use]
    pub fn trace(&self) -> Trace {
        let mut arrivals = Draws::new(self.seed, 0);
        let mut lengths = Draws::new(self.seed, 1);
        let at_once = self.at_once.max(1);
        let mut at = Duration::ZERO;
        let mut requests = Vec::new();
        for index in 0..self.requests {
            let begin = self.period.saturating_mul(index / at_once);
            let gap = arrivals.around(GAP);
            // A burst that is longer than the period goes over into the next.
            at = match index % at_once {
                0 => at.max(begin),
                _ => at.saturating_add(gap),
            };
            requests.push(Request {
                arrival: at,
                input_tokens: self.input.tokens(lengths.normal(), MAX_INPUT_TOKENS),
                output_tokens: self.output.tokens(lengths.normal(), MAX_OUTPUT_TOKENS),
                prefix: Vec::new(),
                model: None,
            });
        }
        Trace {
            format: Format::Bursts,
            requests,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::digest;
    use super::*;

    #[test]
    fn a_seed_means_the_same_workload_for_ever() {
        assert_eq!(digest(&Bursts::new(2_000, 7).trace()), PINNED);
    }

    const PINNED: u64 = 14_958_747_840_280_676_055;

    #[test]
    fn a_burst_is_short_and_silence_follows() {
        let trace = Bursts::new(160, 3).trace();
        for (nth, burst) in (0..).zip(trace.requests.chunks(16)) {
            let begin = Duration::from_secs(30) * nth;
            assert_eq!(burst[0].arrival, begin);
            assert!(burst[15].arrival - begin <= GAP * 15 * 3 / 2);
            let tokens: u32 = burst.iter().map(|r| r.input_tokens).sum();
            assert!((45_000..115_000).contains(&tokens), "{tokens}");
        }
    }

    #[test]
    fn prompts_are_long_and_answers_short() {
        let trace = Bursts::new(4_000, 4).trace();
        let mean = |of: fn(&Request) -> u32| {
            let sum: u64 = trace.requests.iter().map(|r| u64::from(of(r))).sum();
            sum / 4_000
        };
        assert!((4_500..4_800).contains(&mean(|r| r.input_tokens)));
        assert!((68..78).contains(&mean(|r| r.output_tokens)));
        assert!(trace.requests.iter().all(|r| r.prefix.is_empty()));
    }

    #[test]
    fn bursts_longer_than_the_period_stay_in_order() {
        let trace = Bursts {
            period: Duration::from_millis(50),
            ..Bursts::new(200, 1)
        }
        .trace();
        assert!(trace.requests.is_sorted_by_key(|r| r.arrival));
    }
}

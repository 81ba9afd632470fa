//! The built-in workloads: what is replayed when no trace is given.
//!
//! [`Workload`] is drawn as public traces are distributed, [`Staggered`] and [`Bursts`] are the two
//! ways in which a KV cache grows: block by block, and all at once.
//!
//! Lengths of the drawn one follow the conversation service of the Azure LLM inference trace of 2023, arrivals the
//! burstiness that BurstGPT reports. Numbers are drawn and computed with nothing but integer and
//! IEEE additions, multiplications and divisions, so a seed means the same workload on every
//! machine, for ever.

mod bursts;
mod staggered;

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use rand_chacha::{
    ChaCha8Rng,
    rand_core::{RngCore, SeedableRng},
};

use crate::{Format, Request, Trace};

pub use bursts::Bursts;
pub use staggered::Staggered;

/// A built-in workload, by its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum BuiltIn {
    /// Lengths and arrivals distributed as in public traces: [`Workload`].
    #[default]
    Drawn,
    /// Sequences that start one after the other and grow token by token: [`Staggered`].
    Staggered,
    /// Many long prompts at once, then silence: [`Bursts`].
    Bursts,
}

/// No built-in workload.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no built-in workload: drawn, staggered or bursts")]
pub struct ParseBuiltInError(String);

/// Staggered decode as [`Staggered`] draws it: `requests` requests, the same for the same seed.
#[must_use]
pub fn staggered(requests: u32, seed: u64) -> Trace {
    Staggered::new(requests, seed).trace()
}

/// Prefill bursts as [`Bursts`] draws them: `requests` requests, the same for the same seed.
#[must_use]
pub fn bursts(requests: u32, seed: u64) -> Trace {
    Bursts::new(requests, seed).trace()
}

/// How the drawn workload is drawn.
///
/// | quantity | distribution | from |
/// | --- | --- | --- |
/// | prompt tokens | log-normal, median 1020, mean 1155 (σ = 0.499) | Azure Public Dataset, LLM inference trace 2023, conversation; medians also in Patel et al., *Splitwise*, arXiv 2311.18677 |
/// | generated tokens | log-normal, median 129, mean 211 (σ = 0.993) | the same |
/// | gaps between arrivals | Gamma, shape 1/2, mean 0.181 s (5.53 requests/s) | mean of the same trace; the Gamma family and its burstiness (coefficient of variation above 1; here √2) from Wang et al., *BurstGPT*, arXiv 2401.17644 |
///
/// A log-normal of median `m` and mean `a` has σ² = 2 ln(a / m). Lengths are cut at
/// [`max_tokens`](Self::max_tokens), as the context window of a model would.
#[derive(Debug, Clone, PartialEq)]
pub struct Workload {
    /// How many requests.
    pub requests: u32,
    /// The same seed gives the same workload.
    pub seed: u64,
    /// Mean time between two arrivals.
    pub mean_gap: Duration,
    /// Prompt tokens.
    pub input: LogNormal,
    /// Generated tokens.
    pub output: LogNormal,
    /// No prompt and no answer is longer.
    pub max_tokens: u32,
}

/// A log-normal distribution of lengths.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LogNormal {
    /// Half of the values lie below.
    pub median: f64,
    /// Standard deviation of the logarithm.
    pub sigma: f64,
}

impl Workload {
    /// `requests` requests with the published distributions: about an hour for 19 900.
    #[must_use]
    pub const fn new(requests: u32, seed: u64) -> Self {
        Self {
            requests,
            seed,
            mean_gap: Duration::from_micros(180_800),
            input: LogNormal {
                median: 1020.0,
                sigma: 0.4986,
            },
            output: LogNormal {
                median: 129.0,
                sigma: 0.9926,
            },
            max_tokens: 16_384,
        }
    }

    /// Draws it.
    #[must_use]
    pub fn trace(&self) -> Trace {
        let mut arrivals = Draws::new(self.seed, 0);
        let mut lengths = Draws::new(self.seed, 1);
        let mut at = Duration::ZERO;
        let mut requests = Vec::new();
        for index in 0..self.requests {
            if index > 0 {
                at = at.saturating_add(arrivals.normal().squared_times(self.mean_gap));
            }
            requests.push(Request {
                arrival: at,
                input_tokens: self.input.tokens(lengths.normal(), self.max_tokens),
                output_tokens: self.output.tokens(lengths.normal(), self.max_tokens),
                prefix: Vec::new(),
                model: None,
            });
        }
        Trace {
            format: Format::BuiltIn,
            requests,
        }
    }
}

impl BuiltIn {
    /// Draws `requests` requests of it.
    #[must_use]
    pub fn trace(self, requests: u32, seed: u64) -> Trace {
        match self {
            Self::Drawn => Workload::new(requests, seed).trace(),
            Self::Staggered => staggered(requests, seed),
            Self::Bursts => bursts(requests, seed),
        }
    }
}

impl FromStr for BuiltIn {
    type Err = ParseBuiltInError;

    fn from_str(text: &str) -> Result<Self, ParseBuiltInError> {
        match text {
            "drawn" => Ok(Self::Drawn),
            "staggered" => Ok(Self::Staggered),
            "bursts" => Ok(Self::Bursts),
            _ => Err(ParseBuiltInError(text.to_owned())),
        }
    }
}

impl fmt::Display for BuiltIn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Drawn => "drawn",
            Self::Staggered => "staggered",
            Self::Bursts => "bursts",
        })
    }
}

impl LogNormal {
    /// The length at `normal` standard deviations, from 1 to `max_tokens`.
    fn tokens(self, normal: Normal, max_tokens: u32) -> u32 {
        let value = self.median * exp(self.sigma * normal.value());
        // Bisection instead of a float-to-integer cast: exact, and no lint to silence.
        let (mut low, mut high) = (1, max_tokens.max(1));
        while low < high {
            let middle = low + (high - low).div_ceil(2);
            if f64::from(middle) <= value {
                low = middle;
            } else {
                high = middle - 1;
            }
        }
        low
    }
}

/// Random numbers of one stream of one seed.
#[derive(Debug)]
pub(crate) struct Draws {
    rng: ChaCha8Rng,
}

impl Draws {
    pub(crate) fn new(seed: u64, stream: u64) -> Self {
        // Spelt out instead of `seed_from_u64`, whose expansion is another crate's to change.
        let mut key = [0; 32];
        key[..8].copy_from_slice(&seed.to_le_bytes());
        let mut rng = ChaCha8Rng::from_seed(key);
        rng.set_stream(stream);
        Self { rng }
    }

    /// From 0 to `bound - 1`, each as likely as the others within 2^-32. 0 if there is no other.
    pub(crate) fn below(&mut self, bound: u32) -> u32 {
        let high = (u64::from(self.rng.next_u32()) * u64::from(bound)) >> 32;
        u32::try_from(high).expect("less than the bound")
    }

    /// From half to one and a half times `mean`, evenly.
    fn around(&mut self, mean: Duration) -> Duration {
        let part = u128::from(self.rng.next_u32()) + (1 << 31);
        let nanos = mean.as_nanos().saturating_mul(part) >> 32;
        Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
    }

    fn normal(&mut self) -> Normal {
        let sum: i64 = (0..12).map(|_| i64::from(self.rng.next_u32())).sum();
        Normal {
            scaled: sum - 6 * Normal::ONE,
        }
    }
}

/// A variate of mean 0 and variance 1: the sum of twelve uniform ones less 6, which needs no
/// logarithm. Its tails end at six standard deviations, which lengths and gaps never notice.
#[derive(Debug, Clone, Copy)]
struct Normal {
    scaled: i64,
}

impl Normal {
    const ONE: i64 = 1 << 32;

    /// Exact: the integers are far below 2^53.
    fn value(self) -> f64 {
        self.scaled as f64 / Self::ONE as f64
    }

    /// `mean` times the square, which is Gamma-distributed with shape 1/2 and mean 1.
    fn squared_times(self, mean: Duration) -> Duration {
        let scaled = u128::from(self.scaled.unsigned_abs());
        let nanos = ((scaled * scaled) >> 32).saturating_mul(mean.as_nanos()) >> 32;
        Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
    }
}

/// e to the power of `x`, within 1e-12, out of basic arithmetic: the library's `exp` may round
/// differently from one platform to the next.
fn exp(x: f64) -> f64 {
    // e^x = (e^(x / 64))^64, and at |x / 64| ≤ 1/4 ten terms of the series are plenty.
    let small = x.clamp(-16.0, 16.0) / 64.0;
    let mut power = 1.0;
    for term in (1..=12).rev() {
        power = 1.0 + small * power / f64::from(term);
    }
    for _ in 0..6 {
        power *= power;
    }
    power
}

/// All that a trace says, in one number: that workloads do not change.
#[cfg(test)]
fn digest(trace: &Trace) -> u64 {
    let mut digest = 0_u64;
    for r in &trace.requests {
        let arrival = u64::try_from(r.arrival.as_nanos()).expect("an hour");
        let lengths = [
            arrival,
            u64::from(r.input_tokens),
            u64::from(r.output_tokens),
        ];
        for word in lengths.into_iter().chain(r.prefix.iter().copied()) {
            digest = (digest ^ word)
                .wrapping_mul(0x0100_0000_01b3)
                .rotate_left(23);
        }
    }
    digest
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn median(mut values: Vec<u32>) -> u32 {
        values.sort_unstable();
        values[values.len() / 2]
    }

    fn mean(values: &[u32]) -> f64 {
        let sum: u64 = values.iter().map(|&v| u64::from(v)).sum();
        f64::from(u32::try_from(sum).expect("small")) / 20_000.0
    }

    /// Published results were obtained with these workloads: they must not change.
    #[test]
    fn a_seed_means_the_same_workload_for_ever() {
        let trace = Workload::new(2_000, 7).trace();
        let first: Vec<_> = trace.requests[..4]
            .iter()
            .map(|r| (r.arrival.as_micros(), r.input_tokens, r.output_tokens))
            .collect();
        assert_eq!(first, PINNED_FIRST);
        assert_eq!(digest(&trace), PINNED_DIGEST);
    }

    const PINNED_FIRST: [(u128, u32, u32); 4] = [
        (0, 1597, 238),
        (37_101, 1617, 122),
        (291_236, 625, 219),
        (303_335, 848, 304),
    ];
    const PINNED_DIGEST: u64 = 8_435_645_187_458_057_943;

    #[test]
    fn a_workload_is_what_its_name_says() {
        for workload in [BuiltIn::Drawn, BuiltIn::Staggered, BuiltIn::Bursts] {
            assert_eq!(workload.to_string().parse(), Ok(workload));
            let trace = workload.trace(30, 5);
            assert_eq!(
                trace.format.to_string() == "built-in",
                workload == BuiltIn::Drawn
            );
            assert_eq!(trace.requests.len(), 30);
            assert!(trace.requests.is_sorted_by_key(|r| r.arrival));
            assert_ne!(trace, workload.trace(30, 6), "{workload}: another seed");
            assert_eq!(trace.requests[..20], workload.trace(20, 5).requests[..]);
        }
        assert!("bursty".parse::<BuiltIn>().is_err());
    }

    #[test]
    fn another_seed_means_another_workload() {
        assert_ne!(Workload::new(50, 1).trace(), Workload::new(50, 2).trace());
    }

    #[test]
    fn a_longer_workload_begins_like_a_shorter_one() {
        let long = Workload::new(100, 3).trace();
        let short = Workload::new(40, 3).trace();
        assert_eq!(long.requests[..40], short.requests[..]);
    }

    #[test]
    fn lengths_and_rate_are_the_published_ones() {
        let trace = Workload::new(20_000, 42).trace();
        let inputs: Vec<u32> = trace.requests.iter().map(|r| r.input_tokens).collect();
        let outputs: Vec<u32> = trace.requests.iter().map(|r| r.output_tokens).collect();
        assert!((mean(&inputs) - 1155.0).abs() < 15.0, "{}", mean(&inputs));
        assert!((mean(&outputs) - 211.0).abs() < 5.0, "{}", mean(&outputs));
        assert!(median(inputs).abs_diff(1020) < 15);
        assert!(median(outputs).abs_diff(129) < 4);

        let gaps: Vec<f64> = trace
            .requests
            .windows(2)
            .map(|pair| (pair[1].arrival - pair[0].arrival).as_secs_f64() / 0.1808)
            .collect();
        let count = f64::from(u32::try_from(gaps.len()).expect("small"));
        let mean = gaps.iter().sum::<f64>() / count;
        let variance = gaps.iter().map(|gap| (gap - mean).powi(2)).sum::<f64>() / count;
        assert!((mean - 1.0).abs() < 0.03, "{mean}");
        assert!(
            (variance - 2.0).abs() < 0.2,
            "Gamma of shape 1/2 has variance 2: {variance}"
        );
    }

    proptest! {
        #[test]
        fn exp_agrees_with_the_library(x in -15.0_f64..15.0) {
            let relative = (exp(x) - x.exp()).abs() / x.exp();
            prop_assert!(relative < 1e-12, "{relative}");
        }

        #[test]
        fn lengths_stay_in_bounds(seed in any::<u64>(), max_tokens in 1_u32..5000) {
            let workload = Workload { max_tokens, ..Workload::new(20, seed) };
            for request in workload.trace().requests {
                prop_assert!((1..=max_tokens).contains(&request.input_tokens));
                prop_assert!((1..=max_tokens).contains(&request.output_tokens));
            }
        }
    }
}

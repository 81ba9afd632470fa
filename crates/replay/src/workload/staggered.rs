//! Staggered decode: sequences that start one after the other and grow token by token.

use std::time::Duration;

use super::{Draws, LogNormal};
use crate::{Format, PREFIX_TOKENS, Request, Trace};

/// How staggered decode is drawn.
///
/// Requests arrive one by one at nearly even distances, with prompts of one to three thousand
/// tokens and answers of a few hundred, so that most of the time memory grows by one block of one
/// sequence. Half of the requests begin with one of a few hot prefixes, such as the instructions
/// of a service; the others share nothing, but their prompts are cached as well where prompts are
/// cached. A cache of prompts is full after some tens of requests, and from then on each new
/// prompt has others evicted.
///
/// | quantity | distribution |
/// | --- | --- |
/// | gaps between arrivals | even, from half to one and a half times [`gap`](Self::gap): 16 sequences of one 8B model of the table run at a time |
/// | hot or cold | each as likely |
/// | hot prefix | the lower of two even draws out of [`hot_prefixes`](Self::hot_prefixes); each has one to three times 512 tokens |
/// | cold prompt | one to three times 512 tokens that nobody else has |
/// | tokens after that | even, 16 to 511 |
/// | generated tokens | log-normal, median 256, σ = 0.6, at most 2048 |
#[derive(Debug, Clone, PartialEq)]
pub struct Staggered {
    /// How many requests.
    pub requests: u32,
    /// The same seed gives the same workload.
    pub seed: u64,
    /// Mean time between two arrivals.
    pub gap: Duration,
    /// Prefixes that the hot half of the requests share; 0 is taken for 1.
    pub hot_prefixes: u32,
    /// Generated tokens.
    pub output: LogNormal,
}

/// No answer is longer.
const MAX_OUTPUT_TOKENS: u32 = 2_048;

/// Most times 512 tokens that a prompt has before its tail.
const MAX_PREFIXES: u32 = 3;

impl Staggered {
    /// `requests` requests at the rate at which 16 sequences run at a time.
    #[must_use]
    pub const fn new(requests: u32, seed: u64) -> Self {
        Self {
            requests,
            seed,
            gap: Duration::from_millis(540),
            hot_prefixes: 8,
            output: LogNormal {
                median: 256.0,
                sigma: 0.6,
            },
        }
    }

    /// Draws it.
    #[must_use]
    pub fn trace(&self) -> Trace {
        let mut arrivals = Draws::new(self.seed, 0);
        let mut lengths = Draws::new(self.seed, 1);
        let mut prompts = Draws::new(self.seed, 2);
        let hot_prefixes = self.hot_prefixes.max(1);
        let mut at = Duration::ZERO;
        let mut requests = Vec::new();
        for index in 0..self.requests {
            if index > 0 {
                at = at.saturating_add(arrivals.around(self.gap));
            }
            let is_hot = prompts.below(2) == 0;
            let hot = prompts.below(hot_prefixes).min(prompts.below(hot_prefixes));
            let cold_prefixes = 1 + prompts.below(MAX_PREFIXES);
            let tail_tokens = 16 + prompts.below(PREFIX_TOKENS - 16);
            // Ids of the hot ones below, of the cold ones above: each three in a row.
            let (first, prefixes) = if is_hot {
                (u64::from(hot), 1 + hot % MAX_PREFIXES)
            } else {
                (u64::from(hot_prefixes) + u64::from(index), cold_prefixes)
            };
            let ids = (first * 4)..;
            let own = u64::MAX - u64::from(index);
            requests.push(Request {
                arrival: at,
                input_tokens: prefixes * PREFIX_TOKENS + tail_tokens,
                output_tokens: self.output.tokens(lengths.normal(), MAX_OUTPUT_TOKENS),
                prefix: ids.take(prefixes as usize).chain([own]).collect(),
                model: None,
            });
        }
        Trace {
            format: Format::Staggered,
            requests,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::super::digest;
    use super::*;

    #[test]
    fn a_seed_means_the_same_workload_for_ever() {
        assert_eq!(digest(&Staggered::new(2_000, 7).trace()), PINNED);
    }

    const PINNED: u64 = 3_924_401_031_686_350_494;

    #[test]
    fn half_of_the_requests_share_few_prefixes_and_the_others_none() {
        let trace = Staggered::new(4_000, 1).trace();
        let mut uses = BTreeMap::<u64, u32>::new();
        for request in &trace.requests {
            assert_eq!(
                request.prefix.len(),
                request.input_tokens.div_ceil(PREFIX_TOKENS) as usize,
                "an id for each part of the prompt"
            );
            *uses.entry(request.prefix[0]).or_default() += 1;
        }
        let hot: u32 = uses.values().filter(|&&uses| uses > 1).sum();
        assert_eq!(uses.values().filter(|&&uses| uses > 1).count(), 8);
        assert!(hot.abs_diff(2_000) < 100, "{hot}");
        let coldest = uses.values().filter(|&&uses| uses > 1).min();
        assert!(coldest.is_some_and(|&uses| uses > 10), "{coldest:?}");
    }

    #[test]
    fn requests_come_one_by_one_and_grow_for_a_while() {
        let trace = Staggered::new(4_000, 2).trace();
        let gap = Duration::from_millis(540);
        for pair in trace.requests.windows(2) {
            let found = pair[1].arrival - pair[0].arrival;
            assert!(found >= gap / 2 && found <= gap * 3 / 2, "{found:?}");
        }
        let generated: u64 = trace
            .requests
            .iter()
            .map(|r| u64::from(r.output_tokens))
            .sum();
        assert!((280..340).contains(&(generated / 4_000)), "{generated}");
        assert!(trace.requests.iter().all(|r| {
            (512 + 16..4 * 512).contains(&r.input_tokens) && r.output_tokens <= MAX_OUTPUT_TOKENS
        }));
    }
}

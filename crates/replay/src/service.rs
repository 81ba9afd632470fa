//! How long a model takes: the only thing about a model's computation that a replay needs.

use std::{
    num::{NonZeroU32, NonZeroU64},
    time::Duration,
};

/// Time a model takes, step by step.
///
/// A step processes one token of every sequence that generates, and, beside them, up to
/// [`prefill_budget_tokens`](Self::prefill_budget_tokens) tokens of prompts (chunked prefill). It
/// takes
///
/// ```text
/// decode_base + decode_per_sequence × sequences that generate + prompt tokens / prefill_tokens_per_s
/// ```
///
/// What is left out: that long contexts make decoding slower, and that models which share a GPU
/// slow each other down. The numbers stand for one of several models on a shared GPU, each with
/// its part of the computing, so that what a replay compares is memory and nothing else.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ServiceTimes {
    /// Prompt tokens processed per second.
    pub prefill_tokens_per_s: NonZeroU64,
    /// Prompt tokens processed in one step at most.
    pub prefill_budget_tokens: NonZeroU32,
    /// What a step takes before any sequence is counted: reading the weights.
    pub decode_base: Duration,
    /// What each generating sequence adds to a step.
    pub decode_per_sequence: Duration,
    /// Sequences that run together at most.
    pub max_batch: NonZeroU32,
}

impl ServiceTimes {
    /// The length of a step with `prefill_tokens` tokens of prompts and `decoding` sequences that
    /// generate.
    #[must_use]
    pub fn step(&self, prefill_tokens: u32, decoding: u32) -> Duration {
        let prefill_ns =
            u64::from(prefill_tokens).saturating_mul(1_000_000_000) / self.prefill_tokens_per_s;
        self.decode_base
            .saturating_add(self.decode_per_sequence.saturating_mul(decoding))
            .saturating_add(Duration::from_nanos(prefill_ns))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_adds_up() {
        let times = ServiceTimes {
            prefill_tokens_per_s: NonZeroU64::new(10_000).expect("not zero"),
            prefill_budget_tokens: NonZeroU32::new(512).expect("not zero"),
            decode_base: Duration::from_millis(20),
            decode_per_sequence: Duration::from_micros(500),
            max_batch: NonZeroU32::new(64).expect("not zero"),
        };
        assert_eq!(times.step(0, 0), Duration::from_millis(20));
        assert_eq!(times.step(0, 10), Duration::from_millis(25));
        assert_eq!(times.step(512, 10), Duration::from_micros(76_200));
        assert!(times.step(u32::MAX, u32::MAX) > Duration::from_secs(400_000));
    }
}

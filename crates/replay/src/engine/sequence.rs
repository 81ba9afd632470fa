//! One request on its way through the engine.

use std::time::Duration;

use crate::{BlockId, Holder, Owner, Request};

/// A request: what it needs, how far it is, what it holds.
#[derive(Debug)]
pub(super) struct Sequence {
    pub(super) model: usize,
    pub(super) arrival: Duration,
    /// At least 1.
    input_tokens: u32,
    /// At least 1.
    output_tokens: u32,
    /// Tokens generated so far; they survive preemption and loss, their keys and values do not.
    pub(super) generated_tokens: u32,
    /// Tokens whose keys and values are in the cache, from the first on.
    pub(super) computed_tokens: u32,
    /// Still computing what was known when it was admitted: the prompt, and what had been
    /// generated before it gave up its blocks.
    pub(super) is_prefilling: bool,
    /// Leading blocks of 512 tokens that are held together with others.
    pub(super) shared_prefixes: usize,
    /// Blocks of its own, by pool.
    pub(super) blocks: Vec<Vec<BlockId>>,
    pub(super) preemptions: u32,
    /// How often it was begun anew because its content was lost.
    pub(super) retries: u32,
    pub(super) waited: bool,
    pub(super) first_token_at: Option<Duration>,
    pub(super) completed_at: Option<Duration>,
    pub(super) is_rejected: bool,
}

impl Sequence {
    pub(super) fn new(request: &Request, model: usize) -> Self {
        Self {
            model,
            arrival: request.arrival,
            input_tokens: request.input_tokens.max(1),
            output_tokens: request.output_tokens.max(1),
            generated_tokens: 0,
            computed_tokens: 0,
            is_prefilling: false,
            shared_prefixes: 0,
            blocks: Vec::new(),
            preemptions: 0,
            retries: 0,
            waited: false,
            first_token_at: None,
            completed_at: None,
            is_rejected: false,
        }
    }

    /// Tokens that exist: prompt and answer so far. Their keys and values must be in the cache
    /// before the next one can be generated.
    pub(super) const fn known_tokens(&self) -> u32 {
        self.input_tokens.saturating_add(self.generated_tokens)
    }

    /// Tokens in the cache at the end: the last one generated needs no keys and values.
    pub(super) const fn final_tokens(&self) -> u32 {
        self.input_tokens.saturating_add(self.output_tokens - 1)
    }

    pub(super) const fn answer_tokens(&self) -> u32 {
        self.output_tokens
    }

    pub(super) const fn is_complete(&self) -> bool {
        self.generated_tokens == self.output_tokens
    }

    pub(super) const fn owner(&self, request: u32) -> Owner {
        Owner {
            holder: Holder::Request(request),
            generation: self.generation(),
        }
    }

    /// How often it has given up its blocks, for whatever reason.
    pub(super) const fn generation(&self) -> u32 {
        self.preemptions.saturating_add(self.retries)
    }
}

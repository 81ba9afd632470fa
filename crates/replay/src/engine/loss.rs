//! What must hold when content is lost under the engine, at whatever moment.

use std::collections::BTreeMap;
use std::num::{NonZeroU32, NonZeroU64};

use proptest::prelude::*;

use super::*;
use crate::cache::tests::Checked;
use crate::{ElasticModel, ElasticPool, PREFIX_TOKENS, SharedMemory};

const BLOCK_TOKENS: u32 = 64;
const POOL: ElasticPool = ElasticPool {
    block_bytes: 1,
    page_bytes: 2,
    blocks_per_page: 2,
};

/// A cache that loses its content at given calls, and knows what each block holds.
#[derive(Debug)]
struct Losing {
    inner: ElasticModel,
    /// Calls before which, or in which, content is lost; the last comes first.
    at_calls: Vec<u32>,
    calls: u32,
    losses: u64,
    told: u64,
    /// Does it say so?
    tells: bool,
    /// After how many losses each block was written.
    written: BTreeMap<BlockId, u64>,
    /// Blocks that were taken for good though their content was lost.
    corrupted: u32,
}

impl Losing {
    fn new(memory: SharedMemory, mut at_calls: Vec<u32>, tells: bool) -> Self {
        at_calls.sort_unstable_by(|one, other| other.cmp(one));
        Self {
            inner: ElasticModel::new(memory, &[POOL], 1),
            at_calls,
            calls: 0,
            losses: 0,
            told: 0,
            tells,
            written: BTreeMap::new(),
            corrupted: 0,
        }
    }

    /// One more call is made.
    fn call(&mut self) {
        self.calls += 1;
        while self.at_calls.last().is_some_and(|at| *at <= self.calls) {
            self.at_calls.pop();
            self.losses += 1;
        }
    }

    fn forget(&mut self, returns: &[Return<'_>]) -> u32 {
        let blocks = returns.iter().flat_map(|returned| returned.blocks);
        let stale = blocks.filter(|block| {
            let written = self.written.remove(block);
            written.expect("handed out") != self.losses
        });
        u32::try_from(stale.count()).expect("few")
    }
}

impl KvCache for Losing {
    fn alloc(&mut self, wants: &[Want], out: &mut Vec<BlockId>) -> Result<(), CacheError> {
        self.call();
        if self.losses > self.told && self.tells {
            return Err(CacheError::Lost);
        }
        let before = out.len();
        self.inner.alloc(wants, out)?;
        let new = out[before..].iter().map(|block| (*block, self.losses));
        self.written.extend(new);
        Ok(())
    }

    fn free(&mut self, returns: &[Return<'_>]) -> Result<(), Broken> {
        self.corrupted += self.forget(returns);
        self.inner.free(returns)?;
        // Taking memory away meets a rank that has died; what was looked at before was still there.
        self.call();
        Ok(())
    }

    fn losses(&mut self) -> Result<u64, Broken> {
        self.call();
        self.told = self.losses;
        Ok(if self.tells { self.losses } else { 0 })
    }

    fn drop_lost(&mut self, returns: &[Return<'_>]) -> Result<(), Broken> {
        self.forget(returns);
        self.inner.free(returns)
    }

    fn fits(&self, blocks: &[u32]) -> bool {
        self.inner.fits(blocks)
    }

    fn trim(&mut self) -> Result<(), Broken> {
        self.call();
        self.inner.trim()
    }

    fn step_end(&mut self) -> Result<(), Broken> {
        self.call();
        self.inner.step_end()
    }

    fn mapped_bytes(&self) -> u64 {
        self.inner.mapped_bytes()
    }

    fn held_bytes(&self) -> u64 {
        self.inner.held_bytes()
    }
}

fn served() -> ServedModel {
    ServedModel {
        label: "m".to_owned(),
        block_tokens: NonZeroU32::new(BLOCK_TOKENS).expect("not zero"),
        pools: vec![Demand::PerToken],
        service: ServiceTimes {
            prefill_tokens_per_s: NonZeroU64::new(10_000).expect("not zero"),
            prefill_budget_tokens: NonZeroU32::new(512).expect("not zero"),
            decode_base: Duration::from_millis(20),
            decode_per_sequence: Duration::from_millis(1),
            max_batch: NonZeroU32::new(8).expect("not zero"),
        },
    }
}

fn request(at_ms: u64, input_tokens: u32, output_tokens: u32, family: u64) -> Request {
    let shared = u64::from(input_tokens / PREFIX_TOKENS);
    Request {
        arrival: Duration::from_millis(at_ms),
        input_tokens,
        output_tokens,
        prefix: (0..shared).map(|block| family * 1_000 + block).collect(),
        model: None,
    }
}

fn requests() -> impl Strategy<Value = Vec<Request>> {
    let drawn = (0_u64..3_000, 1_u32..2_500, 1_u32..200, 0_u64..3);
    prop::collection::vec(drawn, 1..30).prop_map(|mut drawn| {
        drawn.sort_by_key(|(at_ms, ..)| *at_ms);
        let requests = drawn
            .into_iter()
            .map(|(at_ms, input, output, family)| request(at_ms, input, output, family));
        requests.collect()
    })
}

/// Two models that share memory for so many blocks, and the calls at which each loses its content.
fn run(
    requests: &[Request],
    blocks: u64,
    losses: [&[u32]; 2],
    tells: bool,
) -> (Outcome, Vec<Losing>) {
    let memory = SharedMemory::new(blocks);
    let caches =
        losses.map(|at_calls| Checked::new(Losing::new(memory.clone(), at_calls.to_vec(), tells)));
    let model_of: Vec<usize> = (0..requests.len()).map(|nth| nth % 2).collect();
    let mut engine = Engine::new(requests, &model_of, vec![served(); 2], caches.into());
    while engine.next_event_time().is_some() {
        engine.advance().expect("never broken");
        assert!(engine.caches().iter().all(Checked::is_settled));
    }
    assert!(engine.serving.iter().all(Serving::holds_no_prefix));
    let (outcome, caches) = engine.finish();
    assert!(caches.iter().all(|cache| cache.blocks() == 0));
    (
        outcome,
        caches.into_iter().map(|cache| cache.inner).collect(),
    )
}

proptest! {
    #[test]
    fn every_request_completes_and_nothing_lost_is_taken_for_good_whenever_it_is_lost(
        requests in requests(),
        memory_blocks in 100_u64..200,
        one in prop::collection::vec(1_u32..2_000, 0..12),
        other in prop::collection::vec(1_u32..2_000, 0..12),
    ) {
        let (outcome, caches) = run(&requests, memory_blocks, [&one, &other], true);
        prop_assert_eq!(outcome.total.completed as usize, requests.len());
        for cache in &caches {
            prop_assert_eq!(cache.corrupted, 0);
        }
        let retries: u64 = outcome.requests.iter().map(|request| u64::from(request.retries)).sum();
        prop_assert_eq!(outcome.total.retries, retries);
        prop_assert!(u64::from(outcome.total.retried) <= retries);
    }
}

#[test]
fn a_request_that_is_not_begun_anew_after_a_loss_is_found_corrupted() {
    let requests = [request(0, 1_000, 100, 0), request(0, 1_000, 100, 0)];
    let lost = |tells| {
        let (outcome, caches) = run(&requests, 200, [&[150], &[]], tells);
        assert_eq!(outcome.total.completed, 2);
        (
            outcome.total.retries,
            caches[0].corrupted,
            caches[1].corrupted,
        )
    };
    assert_eq!(lost(true), (1, 0, 0));
    let (retries, corrupted, other) = lost(false);
    assert_eq!((retries, other), (0, 0), "nobody was told");
    assert!(corrupted > 0, "the loss is to be found");
}

#[test]
fn a_loss_costs_the_prompt_and_the_answer_so_far_but_no_token_and_no_preemption() {
    let requests = [request(0, 600, 100, 0), request(0, 600, 100, 0)];
    let (undisturbed, _) = run(&requests, 200, [&[], &[]], true);
    let (outcome, _) = run(&requests, 200, [&[150], &[]], true);
    assert_eq!((outcome.total.retried, outcome.total.preemptions), (1, 0));
    let first_of = |outcome: &Outcome| outcome.models[0].served.prefilled_tokens;
    let again = first_of(&outcome) - first_of(&undisturbed);
    assert!(
        (600..700).contains(&again),
        "{again} tokens were computed again"
    );
    assert_eq!(
        outcome.requests[0].ttft, undisturbed.requests[0].ttft,
        "it had its first token"
    );
    assert!(outcome.requests[0].completed_at > undisturbed.requests[0].completed_at);
    assert_eq!(
        outcome.requests[1], undisturbed.requests[1],
        "the other model lost nothing"
    );
}

#[test]
fn shared_prefixes_are_computed_again_after_a_loss() {
    // Both are of the first model and share 512 tokens; the second model has one of its own.
    let requests = [
        request(0, 600, 100, 1),
        request(0, 600, 100, 2),
        request(400, 600, 100, 1),
    ];
    let (undisturbed, _) = run(&requests, 200, [&[], &[]], true);
    assert_eq!(undisturbed.models[0].served.reused_tokens, 512);
    let (outcome, _) = run(&requests, 200, [&[150], &[]], true);
    assert_eq!(outcome.models[0].served.retried, 2);
    let again =
        outcome.models[0].served.prefilled_tokens - undisturbed.models[0].served.prefilled_tokens;
    assert!(again >= 512, "the prefix is no longer there: {again}");
    assert_eq!(
        outcome.models[0].served.reused_tokens,
        2 * 512,
        "and is shared again"
    );
}

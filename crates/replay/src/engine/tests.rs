//! What must hold whatever arrives, however much memory there is.

use std::num::{NonZeroU32, NonZeroU64};

use proptest::prelude::*;

use super::*;
use crate::cache::tests::Checked;
use crate::{ElasticModel, ElasticPool, FixedSplit, Holder, PREFIX_TOKENS, SharedMemory};

const BLOCK_TOKENS: NonZeroU32 = NonZeroU32::new(64).expect("not zero");
const BLOCK_BYTES: u64 = 64;
/// Pages of two blocks.
const POOL: ElasticPool = ElasticPool {
    block_bytes: BLOCK_BYTES,
    page_bytes: 2 * BLOCK_BYTES,
    blocks_per_page: 2,
};

fn served(label: &str) -> ServedModel {
    ServedModel {
        label: label.to_owned(),
        block_tokens: BLOCK_TOKENS,
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

/// Requests of two models, some of which share the beginning of their prompt.
fn requests() -> impl Strategy<Value = (Vec<Request>, Vec<usize>)> {
    let request = (0_u64..3_000, 1_u32..2_500, 1_u32..300, 0_u64..4, 0_usize..2);
    prop::collection::vec(request, 1..40).prop_map(|mut drawn| {
        drawn.sort_by_key(|(at_ms, ..)| *at_ms);
        let requests = drawn
            .iter()
            .map(|&(at_ms, input_tokens, output_tokens, family, _)| {
                // Family 0 shares nothing. In the others, whole blocks of a prompt are the family's
                // and what remains is the request's own.
                let whole = u64::from(input_tokens / PREFIX_TOKENS);
                let rest = u64::from(!input_tokens.is_multiple_of(PREFIX_TOKENS));
                let shared = (0..whole).map(|block| family * 1_000 + block);
                let own = (0..rest).map(|_| 1_000_000 + at_ms * 10_000 + u64::from(input_tokens));
                let prefix = if family == 0 {
                    Vec::new()
                } else {
                    shared.chain(own).collect()
                };
                let arrival = Duration::from_millis(at_ms);
                Request {
                    arrival,
                    input_tokens,
                    output_tokens,
                    prefix,
                    model: None,
                }
            });
        (
            requests.collect(),
            drawn.iter().map(|&(.., model)| model).collect(),
        )
    })
}

type Caches = Vec<Checked<ElasticModel>>;

fn elastic(memory_bytes: u64) -> Caches {
    let memory = SharedMemory::new(memory_bytes);
    (0..2)
        .map(|_| Checked::new(ElasticModel::new(memory.clone(), &[POOL], 1)))
        .collect()
}

fn engine<'a, C: KvCache>(
    requests: &'a [Request],
    model_of: &[usize],
    caches: Vec<C>,
) -> Engine<'a, C> {
    Engine::new(
        requests,
        model_of,
        vec![served("one"), served("two")],
        caches,
    )
}

/// Blocks that a request needs at the end, alone in an empty cache.
fn blocks(request: &Request) -> u64 {
    u64::from((request.input_tokens + request.output_tokens).div_ceil(BLOCK_TOKENS.get()))
}

proptest! {
    #[test]
    fn every_request_completes_or_never_fitted_and_every_block_comes_back(
        (requests, model_of) in requests(),
        memory_blocks in 2_u64..120,
        cached_blocks in prop::sample::select(vec![0, 8, 30, 1_000]),
    ) {
        let mut engine = engine(&requests, &model_of, elastic(memory_blocks * BLOCK_BYTES));
        engine.keep_prefixes(cached_blocks);
        let mut before = Duration::ZERO;
        while let Some(next) = engine.next_event_time() {
            prop_assert!(next >= before, "time never runs backwards");
            before = next;
            engine.advance().expect("never broken");
            prop_assert!(engine.caches().iter().all(Checked::is_settled), "a step ends with step_end");
        }
        let kept: u64 = engine.caches().iter().map(|cache| cache.blocks() as u64).sum();
        prop_assert!(kept <= 2 * u64::from(cached_blocks) && kept <= memory_blocks);
        engine.drop_prefixes().expect("never broken");
        prop_assert!(engine.serving.iter().all(Serving::holds_no_prefix));
        let (outcome, caches) = engine.finish();
        prop_assert!(caches.iter().all(|cache| cache.blocks() == 0 && cache.held_bytes() == 0));
        for (request, result) in requests.iter().zip(&outcome.requests) {
            let fits = blocks(request).div_ceil(2) * 2 <= memory_blocks;
            prop_assert!(result.completed_at.is_some() || !fits, "{request:?}");
            prop_assert_eq!(result.completed_at.is_some(), result.ttft.is_some());
        }
        let done = outcome.total.completed + outcome.total.rejected;
        prop_assert_eq!(done as usize, requests.len());
    }

    #[test]
    fn the_same_input_gives_the_same_result(
        (requests, model_of) in requests(),
        memory_blocks in 2_u64..120,
    ) {
        let run = || {
            let mut engine = engine(&requests, &model_of, elastic(memory_blocks * BLOCK_BYTES));
            engine.run().expect("never broken");
            engine.finish().0
        };
        prop_assert_eq!(run(), run());
    }

    #[test]
    fn with_memory_for_all_nobody_waits_or_is_preempted(
        (requests, model_of) in requests(),
    ) {
        let mut engine = engine(&requests, &model_of, elastic(1 << 40));
        engine.run().expect("never broken");
        let (outcome, caches) = engine.finish();
        prop_assert_eq!((outcome.total.waited, outcome.total.preemptions), (0, 0));
        prop_assert_eq!(outcome.total.completed as usize, requests.len());
        prop_assert!(caches.iter().all(|cache| cache.refused == 0));
    }

    #[test]
    fn requests_of_a_model_are_first_admitted_in_the_order_of_arrival(
        (mut requests, model_of) in requests(),
        share_blocks in 40_u64..120,
    ) {
        // So that each holds blocks of its own from its admission on.
        for request in &mut requests {
            request.prefix.clear();
        }
        let share = || Checked::new(FixedSplit::new(share_blocks * BLOCK_BYTES, &[BLOCK_BYTES]));
        let mut engine = engine(&requests, &model_of, vec![share(), share()]);
        let mut admitted: [Vec<u32>; 2] = Default::default();
        while engine.next_event_time().is_some() {
            engine.advance().expect("never broken");
            for (cache, admitted) in engine.caches().iter().zip(&mut admitted) {
                let mut new: Vec<u32> = cache
                    .owners()
                    .filter_map(|owner| match owner.holder {
                        Holder::Request(request) => Some(request),
                        Holder::Prefix(_) => None,
                    })
                    .filter(|request| !admitted.contains(request))
                    .collect();
                new.sort_unstable();
                new.dedup();
                admitted.extend(new);
            }
        }
        for admitted in admitted {
            prop_assert!(admitted.is_sorted(), "{admitted:?}");
        }
    }
}

#[test]
fn a_shared_prefix_is_held_once_and_computed_once() {
    let request = |at_ms, own| Request {
        arrival: Duration::from_millis(at_ms),
        input_tokens: PREFIX_TOKENS + 64,
        output_tokens: 64,
        prefix: vec![7, own],
        model: None,
    };
    let together = [request(0, 100), request(200, 101), request(200, 102)];
    let run = |requests: &[Request]| {
        let mut engine = engine(requests, &vec![0; requests.len()], elastic(1 << 30));
        engine.run().expect("never broken");
        let (outcome, caches) = engine.finish();
        (outcome.total, caches[0].peak_blocks)
    };
    let (alone, alone_blocks) = run(&together[..1]);
    let (all, all_blocks) = run(&together);
    assert_eq!(
        alone_blocks,
        8 + 2,
        "512 tokens of the prefix, 64 of the prompt, 64 of the answer"
    );
    assert_eq!(all_blocks, 8 + 3 * 2);
    assert_eq!(alone.prefilled_tokens, 576);
    assert_eq!(all.prefilled_tokens, 576 + 2 * 64);
    assert_eq!(all.reused_tokens, 2 * 512);
}

#[test]
fn a_prefix_that_is_kept_is_not_computed_again_until_others_need_its_memory() {
    let request = |at_s, prefix: u64| Request {
        arrival: Duration::from_secs(at_s),
        input_tokens: PREFIX_TOKENS + 64,
        output_tokens: 64,
        prefix: vec![prefix, 1_000 + at_s],
        model: None,
    };
    let requests = [
        request(0, 7),
        request(100, 7),
        request(200, 8),
        request(300, 7),
    ];
    let reused = |cached_blocks, memory_blocks: u64| {
        let memory = elastic(memory_blocks * BLOCK_BYTES);
        let mut engine = engine(&requests, &[0; 4], memory);
        engine.keep_prefixes(cached_blocks);
        engine.run().expect("never broken");
        engine.drop_prefixes().expect("never broken");
        let (outcome, caches) = engine.finish();
        assert_eq!((outcome.total.completed, caches[0].blocks()), (4, 0));
        outcome.total.reused_tokens
    };
    assert_eq!(reused(0, 100), 0, "nothing is kept");
    assert_eq!(reused(16, 100), 2 * 512, "both prefixes are kept");
    // Of 8 blocks each, one fits into the cache; the one that was used again is worth more.
    assert_eq!(reused(8, 100), 2 * 512);
    // A request takes 10 blocks: the other prefix has to go while it runs.
    assert_eq!(reused(16, 12), 512);
}

#[test]
fn a_model_that_needs_what_another_holds_gets_it_when_that_is_done() {
    let request = |at_ms| Request {
        arrival: Duration::from_millis(at_ms),
        input_tokens: 1_000,
        output_tokens: 24,
        prefix: Vec::new(),
        model: None,
    };
    let requests = [request(0), request(1)];
    // 16 blocks are all there are, and each of the two needs all of them.
    let mut engine = engine(&requests, &[0, 1], elastic(16 * BLOCK_BYTES));
    engine.run().expect("never broken");
    let (outcome, _) = engine.finish();
    assert_eq!(outcome.total.completed, 2);
    assert_eq!(
        (outcome.requests[0].waited, outcome.requests[1].waited),
        (false, true)
    );
    assert!(outcome.requests[1].ttft > outcome.requests[0].completed_at);
}

//! Runs by hand, with the times and blocks that must come out, and what holds for both kinds of
//! cache alike.

use std::num::NonZeroU64;

use proptest::prelude::*;

use super::*;
use crate::{
    Assign, ElasticModel, ElasticPool, FixedSplit, Holder, PREFIX_TOKENS, SharedMemory, Workload,
    cache::tests::Checked,
};

const MS: fn(u64) -> Duration = Duration::from_millis;

fn served(pools: &[Demand], block_tokens: u32, budget: u32) -> ServedModel {
    ServedModel {
        label: "m".to_owned(),
        block_tokens: NonZeroU32::new(block_tokens).expect("not zero"),
        pools: pools.to_vec(),
        service: ServiceTimes {
            prefill_tokens_per_s: NonZeroU64::new(1_000).expect("not zero"),
            prefill_budget_tokens: NonZeroU32::new(budget).expect("not zero"),
            decode_base: MS(10),
            decode_per_sequence: MS(1),
            max_batch: NonZeroU32::new(64).expect("not zero"),
        },
    }
}

fn tokens(block_tokens: u32, budget: u32) -> ServedModel {
    served(&[Demand::PerToken], block_tokens, budget)
}

fn request(arrival_ms: u64, input_tokens: u32, output_tokens: u32) -> Request {
    Request {
        arrival: MS(arrival_ms),
        input_tokens,
        output_tokens,
        prefix: Vec::new(),
        model: None,
    }
}

fn with_prefix(request: Request, prefix: &[u64]) -> Request {
    Request {
        prefix: prefix.to_vec(),
        ..request
    }
}

/// A share of `blocks` blocks of one byte.
fn blocks(blocks: u64) -> Checked<FixedSplit> {
    Checked::new(FixedSplit::new(blocks, &[1]))
}

/// Elastic models with pages of one block of one byte, sharing `blocks` of them.
fn sharing(blocks: u64, models: usize) -> Vec<Checked<ElasticModel>> {
    let memory = SharedMemory::new(blocks);
    let pool = ElasticPool {
        block_bytes: 1,
        page_bytes: 1,
        blocks_per_page: 1,
    };
    (0..models)
        .map(|_| Checked::new(ElasticModel::new(memory.clone(), &[pool], 0)))
        .collect()
}

fn run<C: KvCache>(
    requests: &[Request],
    model_of: &[usize],
    models: &[ServedModel],
    caches: Vec<Checked<C>>,
) -> (Outcome, Vec<Checked<C>>) {
    let mut engine = Engine::new(requests, model_of, models.to_vec(), caches);
    let mut before = Duration::ZERO;
    let mut events = 0_u64;
    while let Some(at) = engine.next_event_time() {
        assert!(at >= before, "time runs backwards");
        before = at;
        engine.advance().expect("never broken");
        assert_eq!(engine.now, at);
        assert!(
            engine.caches.iter().all(Checked::is_settled),
            "step_end follows each step"
        );
        events += 1;
        assert!(events <= most_events(requests, models), "no progress");
    }
    let progress = engine.progress();
    assert_eq!(
        (progress.done, progress.waiting, progress.running),
        (progress.requests, 0, 0)
    );
    assert!(
        engine.serving.iter().all(Serving::holds_no_prefix),
        "a prefix that nobody holds"
    );
    engine.finish()
}

/// An arrival is an event, and so is a step, in which the oldest running request of a model either
/// processes a budget's worth of its prompt or generates a token; each token may cost it the whole
/// prompt anew, if it is preempted alone.
fn most_events(requests: &[Request], models: &[ServedModel]) -> u64 {
    let budget = models
        .iter()
        .map(|m| m.service.prefill_budget_tokens.get())
        .min()
        .unwrap_or(1);
    requests
        .iter()
        .map(|request| {
            let (input, output) = (request.input_tokens.max(1), request.output_tokens.max(1));
            let prompt_steps = u64::from((input + output).div_ceil(budget));
            1 + u64::from(output) * (prompt_steps + 1)
        })
        .sum()
}

#[test]
fn times_add_up() {
    // Prompt of 100 tokens in chunks of 40, 40, 20, then two more tokens.
    let requests = [request(0, 100, 3)];
    let (outcome, _) = run(&requests, &[0], &[tokens(16, 40)], vec![blocks(100)]);
    let prefill = MS(3 * 10 + 100);
    assert_eq!(outcome.requests[0].ttft, Some(prefill));
    assert_eq!(outcome.requests[0].completed_at, Some(prefill + MS(2 * 11)));
    assert_eq!(outcome.total.mean_time_per_token, MS(11));
    assert_eq!(outcome.end, MS(152));
}

#[test]
fn a_request_without_tokens_generates_one() {
    let requests = [request(0, 0, 0)];
    let (outcome, caches) = run(&requests, &[0], &[tokens(16, 40)], vec![blocks(1)]);
    assert_eq!(outcome.total.completed, 1);
    assert_eq!(outcome.requests[0].ttft, Some(MS(11)));
    assert_eq!(caches[0].peak_blocks, 1);
}

#[test]
fn requests_that_arrive_together_share_the_first_step() {
    let requests = [request(0, 5, 1), request(0, 5, 1)];
    let (outcome, _) = run(&requests, &[0, 0], &[tokens(16, 40)], vec![blocks(9)]);
    assert_eq!(outcome.requests[1].ttft, Some(MS(20)));
}

#[test]
fn a_request_that_never_fits_is_rejected_and_counts_as_waiting() {
    // Ten blocks of 10 tokens; the last token generated needs no block.
    let requests = [request(0, 100, 2), request(0, 100, 1), request(50, 10, 1)];
    let (mut outcome, _) = run(&requests, &[0; 3], &[tokens(10, 100)], vec![blocks(10)]);
    let total = &outcome.total;
    assert_eq!((total.completed, total.rejected, total.waited), (2, 1, 0));
    assert_eq!(outcome.requests[0].ttft, None);
    assert_eq!(outcome.end, MS(130));
    assert_eq!(total.ttft.max, MS(130), "until the end of the run");
    outcome.observe_until(MS(1_000), requests.iter().map(|r| r.arrival));
    assert_eq!(
        outcome.total.ttft.max,
        MS(1_000),
        "until the end of the longer run"
    );
}

#[test]
fn whoever_is_behind_one_that_does_not_fit_waits() {
    let requests = [
        request(0, 40, 20),
        request(1, 80, 1),
        request(2, 1, 1),
        request(500, 1, 1),
    ];
    let (outcome, _) = run(&requests, &[0; 4], &[tokens(10, 100)], vec![blocks(10)]);
    let waited: Vec<bool> = outcome.requests.iter().map(|r| r.waited).collect();
    assert_eq!(waited, [false, true, true, false]);
    assert!(outcome.requests[2].ttft >= outcome.requests[0].ttft);
}

#[test]
fn waiting_for_a_free_step_or_for_budget_is_not_waiting_for_memory() {
    let requests = [request(0, 100, 5), request(1, 100, 5), request(2, 100, 5)];
    let (outcome, _) = run(&requests, &[0; 3], &[tokens(10, 10)], vec![blocks(100)]);
    assert_eq!(outcome.total.waited, 0);
    assert!(outcome.requests[2].ttft > outcome.requests[0].ttft);
}

#[test]
fn the_youngest_gives_way_and_keeps_what_it_generated() {
    // Two prompts of 40 tokens fill 8 of 9 blocks; each needs more as it generates.
    let requests = [request(0, 40, 30), request(0, 40, 30)];
    let (outcome, caches) = run(&requests, &[0; 2], &[tokens(10, 100)], vec![blocks(9)]);
    let preemptions: Vec<u32> = outcome.requests.iter().map(|r| r.preemptions).collect();
    assert_eq!(preemptions, [0, 1]);
    assert_eq!(outcome.total.completed, 2);
    assert_eq!(outcome.total.waited, 0, "preempted is not held back");
    assert_eq!(
        outcome.total.prefilled_tokens,
        40 + 40 + (40 + 1),
        "one token was generated"
    );
    assert_eq!(caches[0].peak_blocks, 9);
}

#[test]
fn who_runs_alone_waits_until_another_model_frees_memory() {
    // Both fit at first, and only one of them can grow.
    let requests = [request(0, 40, 30), request(0, 40, 30)];
    let models = [tokens(10, 100), tokens(10, 100)];
    let (outcome, _) = run(&requests, &[0, 1], &models, sharing(9, 2));
    assert_eq!(outcome.total.completed, 2);
    assert_eq!(
        outcome.total.preemptions, 1,
        "it does not come back before there is room"
    );
    let done: Vec<_> = outcome.requests.iter().map(|r| r.completed_at).collect();
    assert!(done[0] != done[1]);
}

#[test]
fn idle_memory_of_another_model_is_trimmed_before_anybody_waits() {
    let memory = SharedMemory::new(10);
    let pool = ElasticPool {
        block_bytes: 1,
        page_bytes: 1,
        blocks_per_page: 1,
    };
    let cache = |_| Checked::new(ElasticModel::new(memory.clone(), &[pool], 10));
    let requests = [request(0, 100, 1), request(1_000, 100, 1)];
    let models = [tokens(10, 100), tokens(10, 100)];
    let (outcome, caches) = run(&requests, &[0, 1], &models, (0..2).map(cache).collect());
    assert_eq!((outcome.total.completed, outcome.total.waited), (2, 0));
    assert_eq!(
        (caches[0].mapped_bytes(), caches[1].mapped_bytes()),
        (0, 10)
    );
}

#[test]
fn a_state_is_held_once_however_long_the_request() {
    let model = served(&[Demand::PerToken, Demand::PerRequest], 10, 1_000);
    let requests = [request(0, 500, 20), request(0, 20, 20)];
    let cache = Checked::new(FixedSplit::new(1_000, &[1, 100]));
    let (outcome, caches) = run(
        &requests,
        &[0, 0],
        std::slice::from_ref(&model),
        vec![cache],
    );
    assert_eq!(outcome.total.completed, 2);
    assert_eq!(outcome.memory.peak_held_bytes, 200 + 52 + 4);
    assert_eq!(caches[0].blocks(), 0);

    // Only one state fits at a time, though tokens would.
    let cache = Checked::new(FixedSplit::new(199, &[1, 100]));
    let (outcome, _) = run(&requests, &[0, 0], &[model], vec![cache]);
    assert_eq!((outcome.total.completed, outcome.total.waited), (2, 1));
}

#[test]
fn a_prefix_goes_with_the_last_request_that_holds_it() {
    let requests = [
        with_prefix(request(0, 600, 2), &[1, 2]),
        with_prefix(request(1, 600, 400), &[1, 3]),
        with_prefix(request(5_000, 600, 2), &[1, 4]),
        with_prefix(request(30_000, 600, 2), &[1, 5]),
    ];
    let (outcome, _) = run(&requests, &[0; 4], &[tokens(8, 100)], vec![blocks(1_000)]);
    assert_eq!(
        outcome.total.reused_tokens,
        512 * 2,
        "for the second and the third"
    );
}

#[test]
fn a_prompt_that_is_all_there_still_takes_its_last_token() {
    let requests = [
        with_prefix(request(0, 512, 50), &[1]),
        with_prefix(request(600, 512, 9), &[1]),
    ];
    let (outcome, _) = run(&requests, &[0, 0], &[tokens(8, 512)], vec![blocks(1_000)]);
    assert_eq!(outcome.total.reused_tokens, 511);
    assert_eq!(outcome.total.prefilled_tokens, 512 + 1);
}

#[test]
fn prefixes_are_shared_within_a_model_only() {
    let requests = [
        with_prefix(request(0, 600, 9), &[1, 2]),
        with_prefix(request(0, 600, 9), &[1, 3]),
    ];
    let models = [tokens(8, 512), tokens(8, 512)];
    let (outcome, _) = run(&requests, &[0, 1], &models, sharing(1_000, 2));
    assert_eq!(outcome.total.reused_tokens, 0);
}

#[test]
fn blocks_that_do_not_divide_a_prefix_share_nothing() {
    let requests = [
        with_prefix(request(0, 600, 9), &[1, 2]),
        with_prefix(request(0, 600, 9), &[1, 3]),
    ];
    for model in [
        tokens(48, 512),
        served(&[Demand::PerToken, Demand::PerRequest], 8, 512),
    ] {
        let cache = Checked::new(FixedSplit::new(10_000, &[1, 1]));
        let (outcome, _) = run(&requests, &[0, 0], &[model], vec![cache]);
        assert_eq!(
            (outcome.total.completed, outcome.total.reused_tokens),
            (2, 0)
        );
    }
}

/// Says that everything fits, and then never has a block.
#[derive(Debug)]
struct Boaster;

impl KvCache for Boaster {
    fn alloc(&mut self, _: &[Want], _: &mut Vec<BlockId>) -> Result<(), CacheError> {
        Err(CacheError::Full)
    }
    fn free(&mut self, _: &[Return<'_>]) -> Result<(), Broken> {
        Ok(())
    }
    fn fits(&self, _: &[u32]) -> bool {
        true
    }
    fn trim(&mut self) -> Result<(), Broken> {
        Ok(())
    }
    fn step_end(&mut self) -> Result<(), Broken> {
        Ok(())
    }
    fn mapped_bytes(&self) -> u64 {
        0
    }
    fn held_bytes(&self) -> u64 {
        0
    }
}

#[test]
fn a_cache_that_promised_too_much_does_not_stop_the_run() {
    let requests = [request(0, 9, 1), request(1, 9, 1), request(1, 9, 1)];
    let models = [tokens(8, 512), tokens(8, 512)];
    let caches = vec![Checked::new(Boaster), Checked::new(Boaster)];
    let (outcome, _) = run(&requests, &[0, 0, 1], &models, caches);
    assert_eq!((outcome.total.completed, outcome.total.rejected), (0, 3));
}

/// Breaks at its `nth` call.
#[derive(Debug)]
struct Breaks {
    inner: FixedSplit,
    calls_left: u32,
}

impl Breaks {
    fn call(&mut self) -> Result<(), Broken> {
        self.calls_left = self
            .calls_left
            .checked_sub(1)
            .ok_or_else(|| Broken::new("as told"))?;
        Ok(())
    }
}

impl KvCache for Breaks {
    fn alloc(&mut self, wants: &[Want], out: &mut Vec<BlockId>) -> Result<(), CacheError> {
        self.call()?;
        self.inner.alloc(wants, out)
    }
    fn free(&mut self, returns: &[Return<'_>]) -> Result<(), Broken> {
        self.call()?;
        self.inner.free(returns)
    }
    fn fits(&self, blocks: &[u32]) -> bool {
        self.inner.fits(blocks)
    }
    fn trim(&mut self) -> Result<(), Broken> {
        self.call()
    }
    fn step_end(&mut self) -> Result<(), Broken> {
        self.call()
    }
    fn mapped_bytes(&self) -> u64 {
        self.inner.mapped_bytes()
    }
    fn held_bytes(&self) -> u64 {
        self.inner.held_bytes()
    }
}

#[test]
fn a_broken_cache_ends_the_run_whichever_call_it_breaks_in() {
    let requests = [request(0, 40, 30), request(0, 40, 30)];
    let mut calls = 0;
    loop {
        let cache = Breaks {
            inner: FixedSplit::new(9, &[1]),
            calls_left: calls,
        };
        let mut engine = Engine::new(&requests, &[0, 0], vec![tokens(10, 100)], vec![cache]);
        match engine.run() {
            Err(broken) => assert_eq!(broken.source.to_string(), "as told"),
            Ok(()) => break,
        }
        calls += 1;
    }
    assert!(calls > 20, "every call was broken once: {calls}");
}

#[test]
fn an_engine_without_requests_has_nothing_to_do() {
    let mut engine = Engine::new(&[], &[], vec![tokens(8, 8)], vec![blocks(1)]);
    assert_eq!(engine.next_event_time(), None);
    engine.advance().expect("nothing");
    assert_eq!(engine.finish().0.total, Served::default());
}

#[test]
fn owners_change_with_every_generation() {
    let requests = [request(0, 40, 30), request(0, 40, 30)];
    let models = vec![tokens(10, 100)];
    let mut engine = Engine::new(&requests, &[0, 0], models, vec![blocks(9)]);
    let mut seen = std::collections::BTreeSet::new();
    while engine.next_event_time().is_some() {
        engine.advance().expect("never broken");
        seen.extend(engine.caches()[0].owners());
    }
    let owner = |request, generation| Owner {
        holder: Holder::Request(request),
        generation,
    };
    assert_eq!(
        seen.into_iter().collect::<Vec<_>>(),
        [owner(0, 0), owner(1, 0), owner(1, 1)]
    );
}

/// Requests for `models` models, small enough to meet every corner.
fn requests(models: usize) -> impl Strategy<Value = (Vec<Request>, Vec<usize>)> {
    let one = (
        0_u64..40,
        0_u32..60,
        0_u32..40,
        0_u64..3,
        0_usize..3,
        0..models,
    );
    prop::collection::vec(one, 0..40).prop_map(|drawn| {
        let mut at = 0;
        drawn
            .into_iter()
            .map(|(gap, input, output, family, prefixes, model)| {
                at += gap;
                let input = input + u32::try_from(prefixes).expect("small") * PREFIX_TOKENS;
                let ids = 0..u64::from(input.div_ceil(PREFIX_TOKENS));
                let prefix: Vec<u64> = ids.map(|id| family * 100 + id).collect();
                (with_prefix(request(at, input, output), &prefix), model)
            })
            .unzip()
    })
}

#[derive(Debug, Clone, Copy)]
struct Scene {
    models: usize,
    block_tokens: u32,
    budget: u32,
    max_batch: u32,
    memory_tokens: u64,
}

impl Scene {
    fn served(self) -> Vec<ServedModel> {
        let mut model = tokens(self.block_tokens, self.budget);
        model.service.max_batch = NonZeroU32::new(self.max_batch).expect("not zero");
        vec![model; self.models]
    }

    fn blocks(self) -> u64 {
        self.memory_tokens / u64::from(self.block_tokens)
    }
}

fn scenes() -> impl Strategy<Value = Scene> {
    (
        1_usize..=3,
        prop::sample::select(vec![1_u32, 8, 16, 24]),
        1_u32..300,
        1_u32..9,
        prop::sample::select(vec![60_u64, 700, 2_000, 6_000]),
    )
        .prop_map(
            |(models, block_tokens, budget, max_batch, memory_tokens)| Scene {
                models,
                block_tokens,
                budget,
                max_batch,
                memory_tokens,
            },
        )
}

fn scene_and_requests() -> impl Strategy<Value = (Scene, (Vec<Request>, Vec<usize>))> {
    scenes().prop_flat_map(|scene| (Just(scene), requests(scene.models)))
}

/// What holds after any run, whatever the cache.
fn check<C: KvCache>(
    (outcome, caches): &(Outcome, Vec<Checked<C>>),
    requests: &[Request],
    models: &[ServedModel],
) {
    let total = &outcome.total;
    assert_eq!(
        total.completed + total.rejected,
        total.requests,
        "completed or rejected"
    );
    for cache in caches {
        assert_eq!(
            (cache.blocks(), cache.held_bytes()),
            (0, 0),
            "every block came back"
        );
    }
    for (model, served) in models.iter().enumerate() {
        let mine = || {
            outcome
                .requests
                .iter()
                .zip(requests)
                .filter(|(r, _)| r.model == model)
        };
        let first_tokens: Vec<Duration> = mine()
            .filter_map(|(r, request)| r.ttft.map(|ttft| request.arrival + ttft))
            .collect();
        assert!(first_tokens.is_sorted(), "first come, first served");
        for (outcome, request) in mine() {
            let last = request.input_tokens.max(1) + request.output_tokens.max(1) - 1;
            let fits = caches[model].fits(&served.blocks(last));
            assert_eq!(
                outcome.completed_at.is_some(),
                fits,
                "rejected if and only if too large"
            );
            assert_eq!(outcome.ttft.is_some(), fits);
        }
    }
    let end = outcome.requests.iter().filter_map(|r| r.completed_at).max();
    assert!(end.unwrap_or_default() <= outcome.end);
    assert!(outcome.memory.mean_held_bytes <= outcome.memory.peak_held_bytes);
    assert!(outcome.memory.peak_held_bytes <= outcome.memory.peak_mapped_bytes);
}

proptest! {
    #[test]
    fn every_request_is_served_in_order_or_rejected_and_every_block_comes_back(
        (scene, (requests, model_of)) in scene_and_requests(),
    ) {
        let models = scene.served();
        let share = scene.blocks() / scene.models as u64;
        let split = || (0..scene.models).map(|_| blocks(share)).collect();
        let fixed = run(&requests, &model_of, &models, split());
        check(&fixed, &requests, &models);
        let elastic = run(&requests, &model_of, &models, sharing(scene.blocks(), scene.models));
        check(&elastic, &requests, &models);
    }

    #[test]
    fn with_memory_without_end_nobody_waits_elastic_or_not(
        (scene, (requests, model_of)) in scene_and_requests(),
    ) {
        let models = scene.served();
        let elastic = run(&requests, &model_of, &models, sharing(u64::MAX, scene.models)).0;
        prop_assert_eq!(
            (elastic.total.waited, elastic.total.preemptions, elastic.total.rejected),
            (0, 0, 0)
        );
        let split = (0..scene.models).map(|_| blocks(u64::MAX / 8)).collect();
        let fixed = run(&requests, &model_of, &models, split).0;
        prop_assert_eq!(elastic.requests, fixed.requests);
    }

    /// Tokens are computed or reused, each once, unless somebody was preempted.
    #[test]
    fn shared_tokens_are_computed_once((scene, (requests, model_of)) in scene_and_requests()) {
        let (outcome, _) = run(&requests, &model_of, &scene.served(), sharing(u64::MAX, scene.models));
        let prompts: u64 = requests.iter().map(|r| u64::from(r.input_tokens.max(1))).sum();
        prop_assert_eq!(outcome.total.prefilled_tokens + outcome.total.reused_tokens, prompts);
    }
}

#[test]
fn the_built_in_workload_waits_less_in_an_elastic_pool() {
    let trace = Workload::new(1_500, 3).trace();
    let model_of = Assign::default().models_of(&trace.requests, &["a", "b", "c"], 3);
    let model = crate::model("llama-3.1-8b").expect("known");
    let block_tokens = NonZeroU32::new(16).expect("not zero");
    let models: Vec<ServedModel> = ["a", "b", "c"]
        .map(|label| ServedModel::new(label.to_owned(), &model, block_tokens))
        .into();
    // 75 000 tokens in all.
    let total = 4_690;
    let fixed = run(
        &trace.requests,
        &model_of,
        &models,
        (0..3).map(|_| blocks(total / 3)).collect(),
    );
    let elastic = run(&trace.requests, &model_of, &models, sharing(total, 3));
    check(&fixed, &trace.requests, &models);
    check(&elastic, &trace.requests, &models);
    assert_eq!((fixed.0.total.rejected, elastic.0.total.rejected), (0, 0));
    assert!(
        fixed.0.total.waited > 10 * elastic.0.total.waited.max(1),
        "{:?}",
        fixed.0.total
    );
    assert!(elastic.0.total.ttft.p99 * 2 < fixed.0.total.ttft.p99);
    assert!(elastic.0.memory.mean_mapped_bytes < fixed.0.memory.mean_mapped_bytes);
}

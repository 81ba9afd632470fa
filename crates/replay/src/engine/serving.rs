//! One model being served: who waits, who runs, and what happens in a step.

use std::{collections::VecDeque, time::Duration};

use kvcached_mapper::PoolId;

use super::{Demand, Engine, Released, Sequence, ServedModel, prefix::Prefixes};
use crate::{BlockId, Broken, CacheError, KvCache, PREFIX_TOKENS, Return, Want};

/// The requests of one model, by index.
#[derive(Debug)]
pub(super) struct Serving {
    /// In order of arrival, all younger than those that run.
    waiting: VecDeque<usize>,
    /// In order of arrival.
    running: Vec<usize>,
    step_ends_at: Option<Duration>,
    /// The count of frees at which the head of the queue did not fit.
    blocked_at: Option<u64>,
    /// Losses of content after which everybody was begun anew.
    losses: u64,
    /// `None` for a model that cannot share prefixes: its blocks do not divide 512 tokens, or it
    /// keeps a state for each request, which no block of tokens stands for.
    pub(super) prefixes: Option<Prefixes>,
    pub(super) prefilled_tokens: u64,
    pub(super) reused_tokens: u64,
}

impl Serving {
    pub(super) fn new(model: &ServedModel) -> Self {
        let block_tokens = model.block_tokens.get();
        let shares =
            model.pools == [Demand::PerToken] && PREFIX_TOKENS.is_multiple_of(block_tokens);
        Self {
            waiting: VecDeque::new(),
            running: Vec::new(),
            step_ends_at: None,
            blocked_at: None,
            losses: 0,
            prefixes: shares.then(|| Prefixes::new(block_tokens)),
            prefilled_tokens: 0,
            reused_tokens: 0,
        }
    }

    pub(super) const fn step_ends_at(&self) -> Option<Duration> {
        self.step_ends_at
    }

    /// Nothing runs. Between two events, a model that is not in a step runs nothing.
    pub(super) fn is_idle(&self) -> bool {
        self.step_ends_at.is_none() && self.running.is_empty()
    }

    /// Nothing was freed since the head of the queue did not fit.
    pub(super) fn is_blocked(&self, freed: u64) -> bool {
        self.blocked_at == Some(freed)
    }

    /// Is it between two steps, with something to do?
    pub(super) fn can_begin(&self, freed: u64) -> bool {
        let may_admit = !self.waiting.is_empty() && !self.is_blocked(freed);
        self.step_ends_at.is_none() && (!self.running.is_empty() || may_admit)
    }

    pub(super) fn enqueue(&mut self, request: usize) {
        self.waiting.push_back(request);
    }

    pub(super) fn head(&self) -> Option<usize> {
        self.waiting.front().copied()
    }

    pub(super) fn drop_head(&mut self) {
        self.waiting.pop_front();
    }

    pub(super) fn waiting_count(&self) -> u32 {
        u32::try_from(self.waiting.len()).unwrap_or(u32::MAX)
    }

    pub(super) fn running_count(&self) -> u32 {
        u32::try_from(self.running.len()).unwrap_or(u32::MAX)
    }

    /// Releases every prefix that nobody holds.
    pub(super) fn evict_all(&mut self, released: &mut Vec<Released>) {
        while let Some(prefixes) = &mut self.prefixes
            && prefixes.evict(released)
        {}
    }

    /// Nobody holds a prefix any more.
    #[cfg(test)]
    pub(super) fn holds_no_prefix(&self) -> bool {
        self.prefixes.as_ref().is_none_or(Prefixes::is_empty)
    }
}

impl<'a, C: KvCache> Engine<'a, C> {
    pub(super) fn begin_step(&mut self, model: usize) -> Result<(), Broken> {
        // What was lost since the last step ended was lost by everybody who is to run in this one.
        self.restart_after_loss(model)?;
        match self.fill_step(model) {
            // Nothing was handed out to whoever asked, and everybody else runs with lost content.
            Err(CacheError::Lost) | Ok(()) => {}
            Err(CacheError::Broken(broken)) => return Err(broken),
            Err(full @ CacheError::Full) => return Err(Broken::new(full)),
        }
        self.caches[model].step_end()?;
        self.restart_after_loss(model)?;
        Ok(())
    }

    fn fill_step(&mut self, model: usize) -> Result<(), CacheError> {
        let service = self.models[model].service;
        let budget = service.prefill_budget_tokens.get();
        let mut blocked = self.grow_running(model)?;

        let mut prefilled = 0;
        for nth in 0..self.serving[model].running.len() {
            let request = self.serving[model].running[nth];
            prefilled += self.prefill(model, request, budget - prefilled);
        }
        while !blocked && prefilled < budget && self.may_admit(model) {
            match self.admit(model)? {
                Some(request) => prefilled += self.prefill(model, request, budget - prefilled),
                None => blocked = true,
            }
        }
        if blocked {
            self.serving[model].blocked_at = Some(self.freed);
        }
        if self.serving[model].is_blocked(self.freed) {
            self.note_waiting(model);
        }

        let serving = &mut self.serving[model];
        serving.prefilled_tokens += u64::from(prefilled);
        if !serving.running.is_empty() {
            let decoding = serving
                .running
                .iter()
                .filter(|&&request| !self.sequences[request].is_prefilling);
            let decoding = u32::try_from(decoding.count()).unwrap_or(u32::MAX);
            serving.step_ends_at = Some(self.now.saturating_add(service.step(prefilled, decoding)));
        }
        Ok(())
    }

    pub(super) fn end_step(&mut self, model: usize) -> Result<(), Broken> {
        if self.restart_after_loss(model)? {
            // The step has failed with the rank that was lost; nothing came of it.
            return Ok(());
        }
        let now = self.now;
        let mut released = Vec::new();
        let running = std::mem::take(&mut self.serving[model].running);
        let mut still_running = Vec::with_capacity(running.len());
        for request in running {
            let sequence = &mut self.sequences[request];
            let known_tokens = sequence.known_tokens();
            if sequence.is_prefilling && sequence.computed_tokens < known_tokens {
                still_running.push(request);
                continue;
            }
            sequence.is_prefilling = false;
            sequence.computed_tokens = known_tokens;
            sequence.generated_tokens += 1;
            sequence.first_token_at.get_or_insert(now);
            if sequence.is_complete() {
                sequence.completed_at = Some(now);
                self.done += 1;
                self.release(model, request, &mut released);
            } else {
                still_running.push(request);
            }
        }
        let serving = &mut self.serving[model];
        serving.running = still_running;
        serving.step_ends_at = None;
        let rests = serving.running.is_empty();
        self.take_back(model, &released)?;
        // A model with more to do ends its step when it has begun the next one; this may be the
        // last for long, and what it no longer needs is not to lie idle until then.
        if rests {
            self.caches[model].step_end()?;
        }
        Ok(())
    }

    /// Gives every running sequence that generates the blocks for its next token. `true`: the
    /// cache was full, and somebody had to give way.
    fn grow_running(&mut self, model: usize) -> Result<bool, CacheError> {
        let mut was_full = false;
        let mut nth = 0;
        while let Some(&request) = self.serving[model].running.get(nth) {
            nth += 1;
            let wants = self.growth(model, request);
            if wants.is_empty() {
                continue;
            }
            let mut blocks = Vec::new();
            loop {
                match self.hand_out(model, &wants, &mut blocks) {
                    Ok(()) => {
                        self.sequences[request].keep(&wants, &blocks);
                        break;
                    }
                    Err(CacheError::Full) => was_full = true,
                    Err(other) => return Err(other),
                }
                let victim = self.serving[model].running.pop();
                let victim = victim.expect("the sequence that grows is one of those that run");
                self.preempt(model, victim)?;
                if victim == request {
                    break;
                }
            }
        }
        Ok(was_full)
    }

    /// What a running sequence lacks for the token that it knows but has not computed.
    fn growth(&self, model: usize, request: usize) -> Vec<Want> {
        let sequence = &self.sequences[request];
        if sequence.is_prefilling {
            return Vec::new();
        }
        self.private_wants(model, request, sequence.shared_prefixes)
    }

    /// What `request` lacks of blocks of its own, if it holds `shared` prefixes.
    fn private_wants(&self, model: usize, request: usize, shared: usize) -> Vec<Want> {
        let sequence = &self.sequences[request];
        let served = &self.models[model];
        let shared_blocks = shared_tokens(shared) / served.block_tokens;
        let owner = sequence.owner(request_id(request));
        let mut wants = Vec::new();
        for ((needed, demand), pool) in served
            .blocks(sequence.known_tokens())
            .into_iter()
            .zip(&served.pools)
            .zip(0..)
        {
            let own = sequence.blocks.get(usize::from(pool)).map_or(0, Vec::len);
            let held = match demand {
                Demand::PerToken => u32::try_from(own).unwrap_or(u32::MAX) + shared_blocks,
                Demand::PerRequest => u32::try_from(own).unwrap_or(u32::MAX),
            };
            if needed > held {
                wants.push(Want {
                    pool: PoolId(pool),
                    owner,
                    blocks: needed - held,
                });
            }
        }
        wants
    }

    fn may_admit(&self, model: usize) -> bool {
        let serving = &self.serving[model];
        !serving.waiting.is_empty()
            && !serving.is_blocked(self.freed)
            && serving.running_count() < self.models[model].service.max_batch.get()
    }

    /// Admits the head of the queue, if all its blocks can be had. `None`: the cache is full.
    fn admit(&mut self, model: usize) -> Result<Option<usize>, CacheError> {
        let Some(request) = self.serving[model].head() else {
            return Ok(None);
        };
        let ids = self.shareable(model, request);
        let mut wants = match &mut self.serving[model].prefixes {
            Some(prefixes) => {
                prefixes.hold_present(ids);
                prefixes.wants(ids)
            }
            None => Vec::new(),
        };
        let prefix_wants = wants.len();
        wants.extend(self.private_wants(model, request, ids.len()));
        let mut blocks = Vec::new();
        if let Err(error) = self.hand_out(model, &wants, &mut blocks) {
            let mut released = Vec::new();
            if let Some(prefixes) = &mut self.serving[model].prefixes {
                prefixes.let_go(ids, &mut released);
            }
            // What the step found lost is dropped with everything else.
            if let CacheError::Full = error {
                self.take_back(model, &released)?;
                return Ok(None);
            }
            return Err(error);
        }
        let (prefix_wants, private_wants) = wants.split_at(prefix_wants);
        let prefix_blocks = prefix_wants.iter().map(|want| want.blocks as usize).sum();
        let (prefix_blocks, private_blocks) = blocks.split_at(prefix_blocks);

        let sequence = &mut self.sequences[request];
        sequence.shared_prefixes = ids.len();
        sequence.computed_tokens = 0;
        sequence.is_prefilling = true;
        sequence
            .blocks
            .resize_with(self.models[model].pools.len(), Vec::new);
        sequence.keep(private_wants, private_blocks);
        let serving = &mut self.serving[model];
        if let Some(prefixes) = &mut serving.prefixes {
            let cache = &self.caches[model];
            let goes_with = |block| cache.goes_with(PoolId(0), block);
            prefixes.create(ids, prefix_wants, prefix_blocks, goes_with);
        }
        serving.waiting.pop_front();
        serving.running.push(request);
        Ok(Some(request))
    }

    /// Processes up to `budget` tokens of a sequence that is not through with its prompt; returns
    /// how many. Tokens of a shared prefix that are there already cost nothing: they were computed
    /// in an earlier step, or are computed in this one for a sequence ahead.
    fn prefill(&mut self, model: usize, request: usize, budget: u32) -> u32 {
        let ids = self.shareable(model, request);
        let sequence = &mut self.sequences[request];
        if !sequence.is_prefilling {
            return 0;
        }
        let known_tokens = sequence.known_tokens();
        let serving = &mut self.serving[model];
        let mut used = 0;
        while sequence.computed_tokens < known_tokens {
            let at = sequence.computed_tokens;
            let left = known_tokens - at;
            let id = ids.get((at / PREFIX_TOKENS) as usize);
            let (Some(&id), Some(prefixes)) = (id, &mut serving.prefixes) else {
                let tokens = left.min(budget - used);
                sequence.computed_tokens += tokens;
                used += tokens;
                break;
            };
            let offset = at % PREFIX_TOKENS;
            // The last token is processed in any case: the first one generated follows from it.
            let present = prefixes.computed(id).saturating_sub(offset).min(left - 1);
            if present > 0 {
                sequence.computed_tokens += present;
                serving.reused_tokens += u64::from(present);
                continue;
            }
            let tokens = left.min(PREFIX_TOKENS - offset).min(budget - used);
            if tokens == 0 {
                break;
            }
            prefixes.compute(id, offset + tokens);
            sequence.computed_tokens += tokens;
            used += tokens;
        }
        used
    }

    /// Takes all its blocks from a sequence that was just removed from the running ones, and puts
    /// it back at the head of the queue.
    fn preempt(&mut self, model: usize, victim: usize) -> Result<(), Broken> {
        let mut released = Vec::new();
        self.release(model, victim, &mut released);
        let sequence = &mut self.sequences[victim];
        sequence.preemptions += 1;
        sequence.computed_tokens = 0;
        self.serving[model].waiting.push_front(victim);
        self.take_back(model, &released)
    }

    /// Begins everybody who runs anew, if content was lost since that was last done. `true`: it was.
    fn restart_after_loss(&mut self, model: usize) -> Result<bool, Broken> {
        let losses = self.caches[model].losses()?;
        if losses == self.serving[model].losses {
            return Ok(false);
        }
        self.serving[model].losses = losses;
        self.serving[model].step_ends_at = None;
        let mut released = Vec::new();
        // The oldest comes to stand at the head of the queue.
        while let Some(request) = self.serving[model].running.pop() {
            self.release(model, request, &mut released);
            let sequence = &mut self.sequences[request];
            sequence.retries += 1;
            sequence.computed_tokens = 0;
            self.serving[model].waiting.push_front(request);
        }
        self.serving[model].evict_all(&mut released);
        if !released.is_empty() {
            self.freed += 1;
            let returns: Vec<Return<'_>> = released.iter().map(Released::returned).collect();
            self.caches[model].drop_lost(&returns)?;
        }
        Ok(true)
    }

    fn release(&mut self, model: usize, request: usize, released: &mut Vec<Released>) {
        let sequence = &mut self.sequences[request];
        let owner = sequence.owner(request_id(request));
        for (blocks, pool) in std::mem::take(&mut sequence.blocks).into_iter().zip(0..) {
            if !blocks.is_empty() {
                released.push(Released {
                    pool: PoolId(pool),
                    owner,
                    blocks,
                });
            }
        }
        let shared = std::mem::take(&mut sequence.shared_prefixes);
        if let Some(prefixes) = &mut self.serving[model].prefixes {
            prefixes.let_go(&self.requests[request].prefix[..shared], released);
        }
    }

    /// The prefixes of 512 tokens that `request` can share: whole ones, the last part of the
    /// prompt is its own.
    fn shareable(&self, model: usize, request: usize) -> &'a [u64] {
        let Some(_) = self.serving[model].prefixes else {
            return &[];
        };
        let request = &self.requests[request];
        let whole = (request.input_tokens / PREFIX_TOKENS) as usize;
        &request.prefix[..whole.min(request.prefix.len())]
    }

    /// Whoever is in the queue now is held back for lack of memory.
    fn note_waiting(&mut self, model: usize) {
        for &request in self.serving[model].waiting.iter().rev() {
            let sequence = &mut self.sequences[request];
            // Those ahead were noted with this one, or were admitted before and came back.
            if sequence.waited {
                return;
            }
            sequence.waited = sequence.generation() == 0;
        }
    }
}

impl Sequence {
    /// Keeps the blocks that were handed out for `wants`.
    fn keep(&mut self, wants: &[Want], blocks: &[BlockId]) {
        let mut rest = blocks.iter().copied();
        for want in wants {
            self.blocks[usize::from(want.pool.0)].extend(rest.by_ref().take(want.blocks as usize));
        }
    }
}

fn shared_tokens(prefixes: usize) -> u32 {
    u32::try_from(prefixes)
        .unwrap_or(u32::MAX)
        .saturating_mul(PREFIX_TOKENS)
}

/// A request as owners name it.
fn request_id(request: usize) -> u32 {
    u32::try_from(request).expect("a trace has at most u32::MAX requests")
}

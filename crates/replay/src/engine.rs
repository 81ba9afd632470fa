//! A serving engine in virtual time, for several models at once: continuous batching step by
//! step, chunked prefill, preemption by recomputation, shared prefixes.
//!
//! ```text
//! arrival ▶ waiting (FIFO, per model) ▶ running (oldest first) ▶ complete
//!                  ▲                          │
//!                  └───── preempted ──────────┘        refused at once ▶ rejected
//! ```
//!
//! No clock, no thread, no socket: [`Engine::next_event_time`] says when something happens next,
//! [`Engine::advance`] makes it happen, and memory is whatever [`KvCache`] it is given. The same
//! input gives the same result, always.
//!
//! # A step
//!
//! 1. Running sequences, oldest first, get the block that their next token needs. If the cache is
//!    full, idle memory of all models is trimmed; if it still is, the youngest running sequence of
//!    the model gives up all its blocks and goes back to the head of the queue, to be computed
//!    again later.
//! 2. Prompts are processed in order of age, up to the token budget of a step. While budget is
//!    left, the head of the queue is admitted, if blocks for all its tokens can be had at once. If
//!    not, nobody behind it is, and the model does not ask again before something was freed, in
//!    whichever model.
//! 3. After the step's time has passed, sequences whose prompt is done, and those that generate,
//!    have one more token.
//!
//! # What is lost
//!
//! A cache whose content was lost, because a rank died, says so before the engine takes anything for
//! computed. Then the step that is under way has failed, and everybody who runs in that model is
//! begun anew: all blocks are dropped, shared prefixes with them, and the requests go back to the
//! head of the queue in their order. Tokens that were generated are known and stay; their keys and
//! values are computed again.
//!
//! # Why it ends
//!
//! Within a model, running sequences are older than waiting ones: the queue is first in first out,
//! and who is preempted is the youngest that runs. So the oldest unfinished request of a model,
//! once admitted, loses its blocks only if it runs alone. Every other preemption serves an older
//! sequence, which generates a token in that very step. A sequence that is admitted alone is not
//! disturbed before it has generated at least one token, and tokens generated are never lost; so
//! every step, and every admission of an oldest request, brings the run closer to its end. When a
//! sequence that runs alone gives up its blocks, it comes back only when one more than it had can
//! be had: the others' holdings only grow until one of them completes or gives up too, so it does
//! not come back before one did. When nothing runs anywhere, nothing is held anywhere, and the
//! oldest request fits or is rejected. All this holds as long as nothing is lost; after a loss it
//! holds anew, so a run with a finite number of losses ends.

mod prefix;
mod sequence;
mod serving;

use std::{iter, num::NonZeroU32, time::Duration};

use kvcached_mapper::PoolId;

use self::{sequence::Sequence, serving::Serving};
use crate::{
    BlockId, Broken, CacheError, KvCache, Model, ModelOutcome, Outcome, Owner, PoolKind, Request,
    RequestOutcome, Return, Sample, Served, ServiceTimes, Stats, Want,
    outcome::{Meter, duration},
};

/// A model that the engine serves.
#[derive(Debug, Clone, PartialEq)]
pub struct ServedModel {
    /// Its name and number, for reports.
    pub label: String,
    /// Tokens of one block.
    pub block_tokens: NonZeroU32,
    /// What a request needs of each pool.
    pub pools: Vec<Demand>,
    /// How fast it is.
    pub service: ServiceTimes,
}

/// What a request needs of a pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Demand {
    /// A block for every [`block_tokens`](ServedModel::block_tokens) tokens.
    PerToken,
    /// One block, however long it is.
    PerRequest,
}

/// The engine: requests on their way, and the caches they live in.
#[derive(Debug)]
pub struct Engine<'a, C> {
    requests: &'a [Request],
    models: Vec<ServedModel>,
    caches: Vec<C>,
    serving: Vec<Serving>,
    sequences: Vec<Sequence>,
    /// Requests before this one have arrived.
    arrived: usize,
    now: Duration,
    /// How often blocks were freed, in whichever model.
    freed: u64,
    done: u32,
    rejected: u32,
    meter: Meter,
}

/// How far a run is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    /// Virtual time.
    pub now: Duration,
    /// Requests of the trace.
    pub requests: u32,
    /// Completed or rejected.
    pub done: u32,
    /// Rejected.
    pub rejected: u32,
    /// Arrived, but not being served.
    pub waiting: u32,
    /// Being served.
    pub running: u32,
}

/// Blocks on their way back to a cache.
#[derive(Debug)]
struct Released {
    pool: PoolId,
    owner: Owner,
    blocks: Vec<BlockId>,
}

impl ServedModel {
    /// A model of the table, or one like it.
    #[must_use]
    pub fn new(label: String, model: &Model, block_tokens: NonZeroU32) -> Self {
        let demand = |pool: &PoolKind| match pool {
            PoolKind::PerToken { .. } => Demand::PerToken,
            PoolKind::PerRequest { .. } => Demand::PerRequest,
        };
        Self {
            label,
            block_tokens,
            pools: model.pools.iter().map(demand).collect(),
            service: model.service,
        }
    }

    /// Blocks that `tokens` tokens of one request need, by pool.
    #[must_use]
    pub fn blocks(&self, tokens: u32) -> Vec<u32> {
        let blocks = |demand: &Demand| match demand {
            Demand::PerToken => tokens.div_ceil(self.block_tokens.get()),
            Demand::PerRequest => 1,
        };
        self.pools.iter().map(blocks).collect()
    }
}

impl<'a, C: KvCache> Engine<'a, C> {
    /// An engine before its first request. Each model has its cache, in the same order;
    /// `model_of` names the model of each request, as [`Assign`](crate::Assign) does.
    ///
    /// # Panics
    /// If the lists do not match, or requests are not in order of arrival.
    #[must_use]
    pub fn new(
        requests: &'a [Request],
        model_of: &[usize],
        models: Vec<ServedModel>,
        caches: Vec<C>,
    ) -> Self {
        assert_eq!(requests.len(), model_of.len(), "each request has a model");
        assert_eq!(models.len(), caches.len(), "each model has a cache");
        assert!(
            requests.is_sorted_by_key(|r| r.arrival),
            "requests come in order of arrival"
        );
        let sequences: Vec<Sequence> = requests
            .iter()
            .zip(model_of)
            .map(|(request, &model)| Sequence::new(request, model))
            .collect();
        let serving: Vec<Serving> = models.iter().map(Serving::new).collect();
        let meter = Meter::new(models.len());
        Self {
            requests,
            models,
            caches,
            serving,
            sequences,
            arrived: 0,
            now: Duration::ZERO,
            freed: 0,
            done: 0,
            rejected: 0,
            meter,
        }
    }

    /// Has each model keep up to `blocks` blocks of prefixes that no running request shares, for
    /// later ones; 0, as it is otherwise, keeps none. What is kept is evicted when somebody would find
    /// the cache full: of the model that asks first, and of the others if that helps.
    pub fn keep_prefixes(&mut self, blocks: u32) {
        for serving in &mut self.serving {
            if let Some(prefixes) = &mut serving.prefixes {
                prefixes.keep(blocks);
            }
        }
    }

    /// Gives back every prefix that was kept for later requests.
    ///
    /// # Errors
    /// If a cache is broken, or a block's content is not what it should be.
    pub fn drop_prefixes(&mut self) -> Result<(), Broken> {
        for model in 0..self.serving.len() {
            let mut released = Vec::new();
            self.serving[model].evict_all(&mut released);
            self.take_back(model, &released)?;
        }
        Ok(())
    }

    /// When something happens next, in virtual time since the first request; `None` when every
    /// request is complete or rejected. A caller that paces by the clock waits until then before
    /// it calls [`advance`](Self::advance).
    #[must_use]
    pub fn next_event_time(&self) -> Option<Duration> {
        let arrival = self
            .requests
            .get(self.arrived)
            .map(|request| request.arrival);
        let steps = self.serving.iter().filter_map(Serving::step_ends_at);
        steps.chain(arrival).min()
    }

    /// Makes everything happen that happens at [`next_event_time`](Self::next_event_time): steps
    /// end, requests arrive, steps begin. Nothing, if there is no next event.
    ///
    /// # Errors
    /// If a cache is broken. The engine is of no further use then, except for
    /// [`into_caches`](Self::into_caches).
    pub fn advance(&mut self) -> Result<(), Broken> {
        let Some(now) = self.next_event_time() else {
            return Ok(());
        };
        debug_assert!(now >= self.now, "time never runs backwards");
        self.now = now;
        for model in 0..self.models.len() {
            if self.serving[model].step_ends_at() == Some(now) {
                self.end_step(model)?;
            }
        }
        self.take_arrivals();
        self.begin_steps()?;
        let samples = self
            .caches
            .iter()
            .zip(&self.serving)
            .map(|(cache, serving)| Sample {
                mapped_bytes: cache.mapped_bytes(),
                held_bytes: cache.held_bytes(),
                waiting: serving.waiting_count(),
            });
        self.meter.observe(now, samples);
        Ok(())
    }

    /// Advances until every request is complete or rejected.
    ///
    /// # Errors
    /// If a cache is broken.
    pub fn run(&mut self) -> Result<(), Broken> {
        while self.next_event_time().is_some() {
            self.advance()?;
        }
        Ok(())
    }

    /// How far it is.
    #[must_use]
    pub fn progress(&self) -> Progress {
        Progress {
            now: self.now,
            requests: u32::try_from(self.requests.len()).unwrap_or(u32::MAX),
            done: self.done,
            rejected: self.rejected,
            waiting: self.serving.iter().map(Serving::waiting_count).sum(),
            running: self.serving.iter().map(Serving::running_count).sum(),
        }
    }

    /// The caches, in the order of the models.
    #[must_use]
    pub fn caches(&self) -> &[C] {
        &self.caches
    }

    /// The caches, in the order of the models, between two events.
    pub(crate) fn caches_mut(&mut self) -> &mut [C] {
        &mut self.caches
    }

    /// The caches, with whatever is still handed out of them.
    #[must_use]
    pub fn into_caches(self) -> Vec<C> {
        self.caches
    }

    /// What was measured, and the caches. Requests that are not done count as not completed.
    #[must_use]
    pub fn finish(self) -> (Outcome, Vec<C>) {
        let end = self.now;
        let (memory, by_model, series) = self.meter.finish(end);
        let models: Vec<ModelOutcome> = self
            .models
            .iter()
            .zip(&self.serving)
            .zip(by_model)
            .enumerate()
            .map(|(index, ((model, serving), memory))| {
                let mine = self
                    .sequences
                    .iter()
                    .filter(|sequence| sequence.model == index);
                let served = Served {
                    prefilled_tokens: serving.prefilled_tokens,
                    reused_tokens: serving.reused_tokens,
                    ..served(mine, end)
                };
                ModelOutcome {
                    label: model.label.clone(),
                    served,
                    memory,
                }
            })
            .collect();
        let total = Served {
            prefilled_tokens: models.iter().map(|m| m.served.prefilled_tokens).sum(),
            reused_tokens: models.iter().map(|m| m.served.reused_tokens).sum(),
            ..served(self.sequences.iter(), end)
        };
        let requests = self.sequences.iter().map(Sequence::outcome).collect();
        (
            Outcome {
                end,
                total,
                memory,
                models,
                series,
                requests,
            },
            self.caches,
        )
    }

    fn take_arrivals(&mut self) {
        while let Some(request) = self.requests.get(self.arrived) {
            if request.arrival > self.now {
                return;
            }
            let index = self.arrived;
            self.arrived += 1;
            let sequence = &mut self.sequences[index];
            let model = sequence.model;
            let blocks = self.models[model].blocks(sequence.final_tokens());
            if !self.caches[model].fits(&blocks) {
                self.reject(index);
                continue;
            }
            let serving = &mut self.serving[model];
            serving.enqueue(index);
            // A model that sleeps until something is freed is not asked again for this one.
            if serving.is_idle() && serving.is_blocked(self.freed) {
                sequence.waited = true;
            }
        }
    }

    /// Begins a step in every model that has something to do and is not in a step already.
    fn begin_steps(&mut self) -> Result<(), Broken> {
        loop {
            // A preemption in one model frees memory for another that was asked before: hence not
            // one round but until nothing changes. Only models between two steps can preempt, and
            // each of them is asked once, so this ends.
            let mut asked = false;
            for model in 0..self.models.len() {
                if self.serving[model].can_begin(self.freed) {
                    self.begin_step(model)?;
                    asked = true;
                }
            }
            if asked {
                continue;
            }
            let at_rest = self.serving.iter().all(Serving::is_idle);
            let oldest = self.serving.iter().filter_map(Serving::head).min();
            let Some(oldest) = oldest.filter(|_| at_rest) else {
                return Ok(());
            };
            // Nothing runs, so nothing is held and nothing will ever be freed: the cache took this
            // request for one that fits, but it does not.
            self.serving[self.sequences[oldest].model].drop_head();
            self.reject(oldest);
            self.freed += 1;
        }
    }

    fn reject(&mut self, request: usize) {
        self.sequences[request].is_rejected = true;
        self.rejected += 1;
        self.done += 1;
    }

    /// Hands out `wants`, after everybody's idle memory was trimmed if need be.
    fn hand_out(
        &mut self,
        model: usize,
        wants: &[Want],
        out: &mut Vec<BlockId>,
    ) -> Result<(), CacheError> {
        match self.caches[model].alloc(wants, out) {
            Err(CacheError::Full) => {}
            other => return other,
        }
        loop {
            for cache in &mut self.caches {
                cache.trim()?;
            }
            match self.caches[model].alloc(wants, out) {
                Err(CacheError::Full) => {}
                other => return other,
            }
            if !self.evict_for(model, wants)? {
                return Err(CacheError::Full);
            }
        }
    }

    /// Evicts prefixes that are kept for later, of about as many blocks as are wanted. `false`: there
    /// are none, or none that would help.
    fn evict_for(&mut self, model: usize, wants: &[Want]) -> Result<bool, Broken> {
        let shares = self.caches[model].shares_memory();
        let others = (0..self.serving.len()).filter(|&other| shares && other != model);
        let wanted: usize = wants.iter().map(|want| want.blocks as usize).sum();
        let mut left = wanted.max(1);
        let mut has_evicted = false;
        for victim in iter::once(model).chain(others) {
            let mut released = Vec::new();
            while left > 0
                && let Some(prefixes) = &mut self.serving[victim].prefixes
                && prefixes.evict(&mut released)
            {
                let last = released.last().map_or(0, |one| one.blocks.len());
                left = left.saturating_sub(last);
            }
            if released.is_empty() {
                continue;
            }
            has_evicted = true;
            self.take_back(victim, &released)?;
            if victim != model {
                // It may not be in a step, whose end would settle this.
                self.caches[victim].step_end()?;
            }
        }
        Ok(has_evicted)
    }

    fn take_back(&mut self, model: usize, released: &[Released]) -> Result<(), Broken> {
        if released.is_empty() {
            return Ok(());
        }
        let returns: Vec<Return<'_>> = released.iter().map(Released::returned).collect();
        self.freed += 1;
        self.caches[model].free(&returns)
    }
}

impl Released {
    fn returned(&self) -> Return<'_> {
        Return {
            pool: self.pool,
            owner: self.owner,
            blocks: &self.blocks,
        }
    }
}

fn served<'s>(sequences: impl Iterator<Item = &'s Sequence>, end: Duration) -> Served {
    let mut served = Served::default();
    let mut ttft = Vec::new();
    let (mut between_ns, mut gaps) = (0_u128, 0_u128);
    for sequence in sequences {
        served.requests += 1;
        served.completed += u32::from(sequence.completed_at.is_some());
        served.rejected += u32::from(sequence.is_rejected);
        served.waited += u32::from(sequence.waited);
        served.preemptions += u64::from(sequence.preemptions);
        served.retried += u32::from(sequence.retries > 0);
        served.retries += u64::from(sequence.retries);
        let first = sequence.first_token_at.unwrap_or(end);
        ttft.push(first.saturating_sub(sequence.arrival));
        if let Some(completed) = sequence.completed_at {
            between_ns += completed.saturating_sub(first).as_nanos();
            gaps += u128::from(sequence.answer_tokens() - 1);
        }
    }
    served.ttft = Stats::of(ttft);
    served.mean_time_per_token = duration(between_ns.checked_div(gaps).unwrap_or(0));
    served
}

impl Sequence {
    fn outcome(&self) -> RequestOutcome {
        RequestOutcome {
            model: self.model,
            ttft: self
                .first_token_at
                .map(|at| at.saturating_sub(self.arrival)),
            completed_at: self.completed_at,
            waited: self.waited,
            preemptions: self.preemptions,
            retries: self.retries,
        }
    }
}

#[cfg(test)]
mod loss;
#[cfg(test)]
mod scenarios;
#[cfg(test)]
mod tests;

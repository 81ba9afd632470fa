//! A model whose every rank runs a scheduler of its own: all are asked the same, and must answer
//! the same.

use kvcached_mapper::{PageId, PoolId, Rank};

use super::cache::ModelPlan;
use super::crew::{Crew, CrewError};
use super::message::{Answer, Finished, Order, ReturnMessage, State, WantMessage};
use super::meters::Timed;
use crate::{BlockId, Broken, CacheError, KvCache, Return, Want};

/// See the module.
#[derive(Debug)]
pub(crate) struct AutonomousCache {
    crew: Crew,
    plan: ModelPlan,
    mapped_bytes: u64,
    held_bytes: u64,
    /// Of the first rank; all do the same.
    calls: Vec<Timed>,
}

impl AutonomousCache {
    pub(crate) const fn new(plan: ModelPlan, crew: Crew) -> Self {
        Self {
            crew,
            plan,
            mapped_bytes: 0,
            held_bytes: 0,
            calls: Vec::new(),
        }
    }

    /// Bytes of the pages that would do for what is handed out.
    pub(crate) fn packed_bytes(&self) -> u64 {
        self.plan.packed_bytes(self.held_bytes)
    }

    /// The ranks.
    pub(crate) const fn crew(&self) -> &Crew {
        &self.crew
    }

    /// Every measured call of the first rank since this was last asked.
    pub(crate) fn take_calls(&mut self) -> Vec<Timed> {
        std::mem::take(&mut self.calls)
    }

    /// What each rank did in all, and how many ever had other pages mapped than their scheduler
    /// believes, or have others than the first rank.
    pub(crate) fn finish(&mut self) -> Result<(Vec<Finished>, usize), CrewError> {
        let mapped = self.crew.mapped()?;
        let answers = self.crew.ask(&Order::Finish)?.into_iter();
        let finished: Vec<Finished> = answers
            .map(|(rank, answer)| match answer {
                Answer::Finished(finished) => Ok(finished),
                _ => Err(CrewError::OutOfTurn { rank }),
            })
            .collect::<Result<_, _>>()?;
        let divergent = mapped
            .iter()
            .zip(&finished)
            .filter(|((_, sets), finished)| *sets != mapped[0].1 || finished.divergent)
            .count();
        Ok((finished, divergent))
    }

    /// Asks all ranks; all must say the same. `None`: full.
    fn ask(&mut self, order: &Order) -> Result<Option<Vec<u32>>, CrewError> {
        let mut first: Option<Option<Vec<u32>>> = None;
        for (rank, answer) in self.crew.ask(order)? {
            let (decision, state) = match answer {
                Answer::Allocated { blocks, state } => (Some(blocks), state),
                Answer::Full(state) => (None, state),
                Answer::Done(state) => (Some(Vec::new()), state),
                _ => return Err(CrewError::OutOfTurn { rank }),
            };
            match &first {
                None => {
                    let State {
                        mapped_bytes,
                        calls,
                    } = state;
                    self.mapped_bytes = mapped_bytes;
                    self.calls.extend(calls);
                    first = Some(decision);
                }
                Some(first) => self.compare(rank, first == &decision, state.mapped_bytes)?,
            }
        }
        Ok(first.flatten())
    }

    fn compare(&self, rank: Rank, same_blocks: bool, mapped_bytes: u64) -> Result<(), CrewError> {
        if !same_blocks {
            return Err(CrewError::Diverged {
                rank,
                what: "which blocks to hand out",
            });
        }
        if mapped_bytes != self.mapped_bytes {
            return Err(CrewError::Diverged {
                rank,
                what: "how much to map",
            });
        }
        Ok(())
    }
}

impl KvCache for AutonomousCache {
    fn alloc(&mut self, wants: &[Want], out: &mut Vec<BlockId>) -> Result<(), CacheError> {
        let order = Order::Alloc(wants.iter().map(WantMessage::from).collect());
        let Some(blocks) = self.ask(&order).map_err(Broken::new)? else {
            return Err(CacheError::Full);
        };
        out.extend(blocks.into_iter().map(BlockId));
        for want in wants {
            self.held_bytes += self.plan.block_bytes(want.pool, u64::from(want.blocks));
        }
        Ok(())
    }

    fn free(&mut self, returns: &[Return<'_>]) -> Result<(), Broken> {
        let order = Order::Free(returns.iter().map(ReturnMessage::from).collect());
        self.ask(&order).map_err(Broken::new)?;
        for returned in returns {
            self.held_bytes -= self
                .plan
                .block_bytes(returned.pool, returned.blocks.len() as u64);
        }
        Ok(())
    }

    fn fits(&self, blocks: &[u32]) -> bool {
        self.plan.fits(blocks)
    }

    fn trim(&mut self) -> Result<(), Broken> {
        self.ask(&Order::Trim).map_err(Broken::new)?;
        Ok(())
    }

    fn step_end(&mut self) -> Result<(), Broken> {
        self.ask(&Order::StepEnd).map_err(Broken::new)?;
        Ok(())
    }

    fn mapped_bytes(&self) -> u64 {
        self.mapped_bytes
    }

    fn held_bytes(&self) -> u64 {
        self.held_bytes
    }

    fn goes_with(&self, pool: PoolId, block: BlockId) -> PageId {
        // Which runs there are is known to the ranks only.
        self.plan.page_of(pool, block)
    }
}

//! Prefixes that requests of one model share: the blocks of 512 tokens that several prompts begin with
//! are held once, as long as one of them runs, and beyond that as far as a bounded cache goes.

use std::collections::{BTreeMap, BTreeSet};

use kvcached_manager::EvictionQueue;
use kvcached_mapper::{PageId, PoolId};

use super::Released;
use crate::{BlockId, Holder, Owner, PREFIX_TOKENS, Want};

/// The only pool of a model that shares prefixes.
const TOKENS: PoolId = PoolId(0);

/// The shared prefixes of one model.
#[derive(Debug)]
pub(super) struct Prefixes {
    blocks_per_prefix: u32,
    nodes: BTreeMap<u64, Node>,
    created: u32,
    /// Blocks of prefixes that nobody holds are kept up to so many.
    most_idle: usize,
    queue: EvictionQueue,
    /// Whose block it is, of all nodes.
    node_of: BTreeMap<BlockId, u64>,
}

/// 512 tokens of a prompt, and by their hash id all tokens before them.
#[derive(Debug)]
struct Node {
    generation: u32,
    /// Running requests that hold it; zero if it is kept for later ones.
    holders: u32,
    /// Tokens that are computed, from the first on.
    computed_tokens: u32,
    blocks: Vec<BlockId>,
}

impl Prefixes {
    pub(super) fn new(block_tokens: u32) -> Self {
        Self {
            blocks_per_prefix: PREFIX_TOKENS / block_tokens,
            nodes: BTreeMap::new(),
            created: 0,
            most_idle: 0,
            queue: EvictionQueue::new(0),
            node_of: BTreeMap::new(),
        }
    }

    /// Keeps so many blocks of prefixes that nobody holds.
    pub(super) fn keep(&mut self, blocks: u32) {
        self.most_idle = blocks as usize;
        self.queue = EvictionQueue::new(blocks);
    }

    /// What has to be handed out so that every prefix of `ids` is there.
    pub(super) fn wants(&self, ids: &[u64]) -> Vec<Want> {
        let missing: BTreeSet<u64> = ids
            .iter()
            .copied()
            .filter(|id| !self.nodes.contains_key(id))
            .collect();
        (self.created..)
            .zip(missing)
            .map(|(generation, id)| Want {
                pool: TOKENS,
                owner: Owner {
                    holder: Holder::Prefix(id),
                    generation,
                },
                blocks: self.blocks_per_prefix,
            })
            .collect()
    }

    /// One more request holds those prefixes of `ids` that are there, so that nobody evicts them.
    pub(super) fn hold_present(&mut self, ids: &[u64]) {
        for id in ids {
            let Some(node) = self.nodes.get_mut(id) else {
                continue;
            };
            node.holders += 1;
            if node.holders == 1 {
                for &block in &node.blocks {
                    self.queue.hold_again(block);
                }
            }
        }
    }

    /// Puts the prefixes of `wants` there, with the `blocks` handed out for them; `goes_with` names
    /// what the memory of a block goes with. Each is held as often as it is in `ids`.
    pub(super) fn create(
        &mut self,
        ids: &[u64],
        wants: &[Want],
        blocks: &[BlockId],
        goes_with: impl Fn(BlockId) -> PageId,
    ) {
        let mut rest = blocks;
        for want in wants {
            let Holder::Prefix(id) = want.owner.holder else {
                continue;
            };
            let (mine, others) = rest.split_at(want.blocks as usize);
            rest = others;
            let holders = ids.iter().filter(|&&other| other == id).count();
            for &block in mine {
                self.queue.hold(block, goes_with(block));
                self.node_of.insert(block, id);
            }
            let node = Node {
                generation: want.owner.generation,
                holders: u32::try_from(holders).unwrap_or(u32::MAX),
                computed_tokens: 0,
                blocks: mine.to_vec(),
            };
            self.nodes.insert(id, node);
            self.created = self.created.wrapping_add(1);
        }
    }

    /// One request less holds those prefixes of `ids` that are there; those that nobody holds any
    /// more are kept, or released if that is too many.
    pub(super) fn let_go(&mut self, ids: &[u64], released: &mut Vec<Released>) {
        for id in ids {
            let Some(node) = self.nodes.get_mut(id) else {
                continue;
            };
            node.holders -= 1;
            if node.holders == 0 {
                // The last block is of no use without those before it: it goes first.
                for &block in node.blocks.iter().rev() {
                    self.queue.rest(block);
                }
            }
        }
        while self.queue.idle() > self.most_idle && self.evict(released) {}
    }

    /// Releases one prefix that nobody holds. `false`: there is none.
    pub(super) fn evict(&mut self, released: &mut Vec<Released>) -> bool {
        let Some(block) = self.queue.evict() else {
            return false;
        };
        let id = self.node_of[&block];
        let Some(node) = self.nodes.remove(&id) else {
            return false;
        };
        for block in &node.blocks {
            self.queue.forget(*block);
            self.node_of.remove(block);
        }
        let owner = Owner {
            holder: Holder::Prefix(id),
            generation: node.generation,
        };
        released.push(Released {
            pool: TOKENS,
            owner,
            blocks: node.blocks,
        });
        true
    }

    /// Tokens of prefix `id` that are computed.
    pub(super) fn computed(&self, id: u64) -> u32 {
        self.nodes.get(&id).map_or(0, |node| node.computed_tokens)
    }

    /// The first `tokens` of prefix `id` are computed now.
    pub(super) fn compute(&mut self, id: u64, tokens: u32) {
        let node = self.node_mut(id);
        node.computed_tokens = node.computed_tokens.max(tokens);
    }

    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.nodes.is_empty()
    }

    fn node_mut(&mut self, id: u64) -> &mut Node {
        self.nodes
            .get_mut(&id)
            .expect("a running request holds each of its prefixes")
    }
}

//! Prefixes that running requests of one model share: the blocks of 512 tokens that several
//! prompts begin with are held once, as long as one of them runs.

use std::collections::{BTreeMap, BTreeSet};

use kvcached_mapper::PoolId;

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
}

/// 512 tokens of a prompt, and by their hash id all tokens before them.
#[derive(Debug)]
struct Node {
    generation: u32,
    /// Running requests that hold it; never zero.
    holders: u32,
    /// Tokens that are computed, from the first on.
    computed_tokens: u32,
    blocks: Vec<BlockId>,
}

impl Prefixes {
    pub(super) const fn new(block_tokens: u32) -> Self {
        Self {
            blocks_per_prefix: PREFIX_TOKENS / block_tokens,
            nodes: BTreeMap::new(),
            created: 0,
        }
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

    /// One more request holds every prefix of `ids`. `blocks` are those handed out for `wants`.
    pub(super) fn hold(&mut self, ids: &[u64], wants: &[Want], blocks: &[BlockId]) {
        let mut rest = blocks;
        for want in wants {
            let Holder::Prefix(id) = want.owner.holder else {
                continue;
            };
            let (mine, others) = rest.split_at(want.blocks as usize);
            rest = others;
            let node = Node {
                generation: want.owner.generation,
                holders: 0,
                computed_tokens: 0,
                blocks: mine.to_vec(),
            };
            self.nodes.insert(id, node);
            self.created = self.created.wrapping_add(1);
        }
        for id in ids {
            self.node_mut(*id).holders += 1;
        }
    }

    /// One request less holds the prefixes of `ids`; those that nobody holds any more are
    /// released.
    pub(super) fn let_go(&mut self, ids: &[u64], released: &mut Vec<Released>) {
        for &id in ids {
            let node = self.node_mut(id);
            node.holders -= 1;
            if node.holders > 0 {
                continue;
            }
            if let Some(node) = self.nodes.remove(&id) {
                let owner = Owner {
                    holder: Holder::Prefix(id),
                    generation: node.generation,
                };
                released.push(Released {
                    pool: TOKENS,
                    owner,
                    blocks: node.blocks,
                });
            }
        }
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

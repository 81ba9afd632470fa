//! Real models' KV geometry, and what one rank of them needs in a pool.

mod choice;
mod table;

use kvcached_mapper::{KvBuffers, Layout, PageSize, PoolSpec};
use thiserror::Error;

pub use choice::{MAX_INSTANCES, ModelChoice, ParseModelError};
pub use table::{known_models, model};

use crate::ServiceTimes;

/// A model, as far as its KV memory and its speed go.
#[derive(Debug, Clone, PartialEq)]
pub struct Model {
    /// As given on the command line.
    pub name: String,
    /// Where the numbers come from.
    pub source: String,
    /// What it keeps in memory: tokens, and perhaps a state for each request.
    pub pools: Vec<PoolKind>,
    /// How fast it is.
    pub service: ServiceTimes,
}

/// What one pool of a model holds, over all ranks together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PoolKind {
    /// Keys and values: a block for every so many tokens.
    PerToken {
        /// Layers with attention over all tokens.
        layers: u32,
        /// K and V, or one latent buffer (MLA).
        kv_buffers: KvBuffers,
        /// KV heads of the whole model; 1 for a latent, which every rank needs whole.
        kv_heads: u32,
        /// Elements of one head in one buffer.
        head_dim: u32,
        /// Type of an element.
        dtype: Dtype,
    },
    /// The state of linear-attention layers: one block for each request, however long it is.
    PerRequest {
        /// Layers with such a state.
        layers: u32,
        /// State of one request in one layer, over all ranks.
        state_bytes: u64,
        /// Heads it consists of: ranks share them out evenly.
        heads: u32,
    },
}

/// Type of an element of the cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Dtype {
    /// Four bytes.
    F32,
    /// Two bytes.
    Bf16,
    /// Two bytes.
    F16,
    /// One byte.
    Fp8,
}

/// How a model is laid out on each of its ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Placement {
    /// Ranks in tensor parallelism.
    pub tp: u16,
    /// Layout of the tensors.
    pub layout: Layout,
    /// Tokens of one block.
    pub block_tokens: u32,
    /// Page size of the token pool. A state pool always has an automatic one: a single state is
    /// larger than the pages that suit tokens.
    pub page_size: PageSize,
    /// Addresses of each pool on each rank, in bytes.
    pub capacity_bytes: u64,
}

/// Why a model cannot be placed like that.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum PlacementError {
    /// Heads that ranks cannot share evenly.
    #[error("{heads} heads cannot be shared by {tp} ranks: one must be a multiple of the other")]
    Heads {
        /// Heads of the model.
        heads: u32,
        /// Ranks.
        tp: u16,
    },
    /// No rank, or blocks of no token.
    #[error("a placement without {what}")]
    Zero {
        /// What there is none of.
        what: &'static str,
    },
    /// A block whose size is beyond 64 bits.
    #[error("a block of {block_tokens} tokens overflows 64 bits")]
    Overflow {
        /// Tokens of a block.
        block_tokens: u32,
    },
}

impl Model {
    /// What each pool looks like on one rank, in the order of [`pools`](Self::pools).
    ///
    /// # Errors
    /// If the heads cannot be shared out, or a number is zero or too large.
    pub fn pool_specs(&self, placement: &Placement) -> Result<Vec<PoolSpec>, PlacementError> {
        self.pools.iter().map(|pool| pool.spec(placement)).collect()
    }
}

impl PoolKind {
    /// What this pool looks like on one rank.
    ///
    /// KV heads are divided by the ranks; where there are more ranks than heads, each head is on
    /// several ranks, and a latent (one head) is on all. A state is divided by the ranks.
    ///
    /// # Errors
    /// If the heads cannot be shared out, or a number is zero or too large.
    pub fn spec(self, placement: &Placement) -> Result<PoolSpec, PlacementError> {
        let Placement {
            tp,
            layout,
            block_tokens,
            page_size,
            capacity_bytes,
        } = *placement;
        for (count, what) in [
            (u32::from(tp), "ranks"),
            (block_tokens, "tokens in a block"),
        ] {
            if count == 0 {
                return Err(PlacementError::Zero { what });
            }
        }
        match self {
            Self::PerToken {
                layers,
                kv_buffers,
                kv_heads,
                head_dim,
                dtype,
            } => {
                let heads = u64::from(heads_per_rank(kv_heads, tp)?);
                let block_bytes = heads
                    .checked_mul(u64::from(head_dim))
                    .and_then(|elements| elements.checked_mul(dtype.bytes()))
                    .and_then(|token_bytes| token_bytes.checked_mul(u64::from(block_tokens)))
                    .ok_or(PlacementError::Overflow { block_tokens })?;
                Ok(PoolSpec {
                    layout,
                    layers,
                    kv_buffers,
                    block_bytes,
                    page_size,
                    capacity_bytes,
                })
            }
            Self::PerRequest {
                layers,
                state_bytes,
                heads,
            } => {
                if !heads.is_multiple_of(u32::from(tp)) {
                    return Err(PlacementError::Heads { heads, tp });
                }
                Ok(PoolSpec {
                    layout,
                    layers,
                    kv_buffers: KvBuffers::One,
                    block_bytes: state_bytes / u64::from(tp),
                    page_size: PageSize::Auto,
                    capacity_bytes,
                })
            }
        }
    }
}

impl Dtype {
    /// Bytes of one element.
    #[must_use]
    pub const fn bytes(self) -> u64 {
        match self {
            Self::F32 => 4,
            Self::Bf16 | Self::F16 => 2,
            Self::Fp8 => 1,
        }
    }
}

/// Bytes of one block of `spec` over all its layers and buffers, without any padding: what a
/// block costs in a static split, and what it holds in an elastic pool.
#[must_use]
pub const fn bytes_per_block(spec: &PoolSpec) -> u64 {
    let buffers = match spec.kv_buffers {
        KvBuffers::One => 1,
        KvBuffers::Two => 2,
    };
    spec.block_bytes
        .saturating_mul(buffers)
        .saturating_mul(spec.layers as u64)
}

fn heads_per_rank(heads: u32, tp: u16) -> Result<u32, PlacementError> {
    let ranks = u32::from(tp);
    if heads == 0 {
        return Err(PlacementError::Zero { what: "KV heads" });
    }
    if heads.is_multiple_of(ranks) {
        Ok(heads / ranks)
    } else if ranks.is_multiple_of(heads) {
        Ok(1)
    } else {
        Err(PlacementError::Heads { heads, tp })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;
    const GRANULARITY: u64 = 2 << 20;

    fn placement(tp: u16) -> Placement {
        Placement {
            tp,
            layout: Layout::Contiguous,
            block_tokens: 16,
            page_size: PageSize::Auto,
            capacity_bytes: 8 * GIB,
        }
    }

    fn bytes_per_token(name: &str, tp: u16) -> u64 {
        let specs = model(name)
            .expect("known")
            .pool_specs(&placement(tp))
            .expect("a placement");
        bytes_per_block(&specs[0]) / 16
    }

    #[test]
    fn bytes_per_token_are_the_published_ones() {
        assert_eq!(bytes_per_token("llama-3.1-8b", 1), 128 << 10);
        assert_eq!(bytes_per_token("llama-3.1-8b", 2), 64 << 10);
        assert_eq!(bytes_per_token("qwen2.5-32b", 1), 256 << 10);
        assert_eq!(bytes_per_token("deepseek-v3", 1), 61 * 576 * 2);
        assert_eq!(bytes_per_token("qwen3-next-80b", 1), 24 << 10);
    }

    #[test]
    fn heads_are_shared_out_and_then_repeated() {
        assert_eq!(bytes_per_token("llama-3.1-8b", 8), 16 << 10);
        assert_eq!(
            bytes_per_token("llama-3.1-8b", 16),
            16 << 10,
            "each head on two ranks"
        );
        assert_eq!(
            bytes_per_token("qwen3-next-80b", 8),
            12 << 10,
            "two heads on eight ranks"
        );
        let specs = model("llama-3.1-8b")
            .expect("known")
            .pool_specs(&placement(3));
        assert_eq!(specs, Err(PlacementError::Heads { heads: 8, tp: 3 }));
    }

    #[test]
    fn a_latent_is_whole_on_every_rank() {
        assert_eq!(
            bytes_per_token("deepseek-v3", 8),
            bytes_per_token("deepseek-v3", 1)
        );
        let specs = model("deepseek-v3")
            .expect("known")
            .pool_specs(&placement(8))
            .expect("fits");
        assert_eq!(specs[0].kv_buffers, KvBuffers::One);
    }

    #[test]
    fn a_hybrid_model_has_a_state_for_each_request() {
        let hybrid = model("qwen3-next-80b").expect("known");
        let one = hybrid.pool_specs(&placement(1)).expect("a placement");
        assert_eq!(one.len(), 2);
        assert_eq!(one[1].block_bytes, 1_097_728);
        assert_eq!((one[0].layers, one[1].layers), (12, 36));
        assert_eq!(one[1].kv_buffers, KvBuffers::One);
        let four = hybrid.pool_specs(&placement(4)).expect("a placement");
        assert_eq!(four[1].block_bytes, 1_097_728 / 4);
        let many = hybrid.pool_specs(&Placement {
            tp: 32,
            ..placement(1)
        });
        assert_eq!(many, Err(PlacementError::Heads { heads: 16, tp: 32 }));
    }

    #[test]
    fn an_explicit_page_size_is_for_tokens_not_for_states() {
        let page_size = PageSize::Bytes(GRANULARITY);
        let specs = model("qwen3-next-80b")
            .expect("known")
            .pool_specs(&Placement {
                page_size,
                ..placement(2)
            })
            .expect("a placement");
        assert_eq!(
            (specs[0].page_size, specs[1].page_size),
            (page_size, PageSize::Auto)
        );
    }

    #[test]
    fn every_known_model_has_a_geometry_in_every_layout() {
        for known in known_models() {
            for layout in [Layout::Contiguous, Layout::Unified, Layout::PerLayer] {
                for tp in [1, 2, 4, 8] {
                    let specs = known.pool_specs(&Placement {
                        layout,
                        ..placement(tp)
                    });
                    for spec in specs.expect("a placement") {
                        let geometry = spec.resolve(GRANULARITY);
                        assert!(
                            geometry.is_ok(),
                            "{} {layout} tp {tp}: {geometry:?}",
                            known.name
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn nothing_at_all_is_an_error_value() {
        let model = model("llama-3.1-8b").expect("known");
        let zero = |what| Err(PlacementError::Zero { what });
        assert_eq!(model.pool_specs(&placement(0)), zero("ranks"));
        let blockless = Placement {
            block_tokens: 0,
            ..placement(1)
        };
        assert_eq!(model.pool_specs(&blockless), zero("tokens in a block"));
    }
}

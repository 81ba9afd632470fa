//! The models known by name, with the published configuration each number comes from.
//!
//! | model | per token, all ranks | from |
//! | --- | --- | --- |
//! | `llama-3.1-8b` | 32 layers × K, V × 8 heads × 128 × bf16 = 128 KiB | `meta-llama/Llama-3.1-8B`, config.json: `num_hidden_layers`, `num_key_value_heads`, `hidden_size` / `num_attention_heads` |
//! | `qwen2.5-32b` | 64 layers × K, V × 8 heads × 128 × bf16 = 256 KiB | `Qwen/Qwen2.5-32B`, config.json: the same fields |
//! | `deepseek-v3` | 61 layers × one latent of 512 + 64 × bf16 = 68.6 KiB, whole on every rank | `deepseek-ai/DeepSeek-V3`, config.json: `num_hidden_layers`, `kv_lora_rank`, `qk_rope_head_dim` |
//! | `qwen3-next-80b` | 12 layers × K, V × 2 heads × 256 × bf16 = 24 KiB, and per request 36 layers × 1 097 728 B = 37.7 MiB | `Qwen/Qwen3-Next-80B-A3B-Instruct`, config.json: `num_hidden_layers` 48, `full_attention_interval` 4, `linear_*` |
//!
//! A linear-attention layer of Qwen3-Next keeps, per request, a convolution window of
//! (16 × 128 × 2 + 32 × 128) channels × 3 and a recurrent state of 32 × 128 × 128, both in bf16:
//! the shapes and the default type with which vLLM allocates a gated delta net.
//!
//! The service times are round numbers for one of several models on a shared GPU pair. They are
//! explained, with what follows from them, in `docs/replay-json.md`.

use std::{
    num::{NonZeroU32, NonZeroU64},
    time::Duration,
};

use kvcached_mapper::KvBuffers;

use super::{Dtype, Model, PoolKind};
use crate::ServiceTimes;

/// The models known by name.
#[must_use]
pub fn known_models() -> Vec<Model> {
    vec![
        Model {
            name: "llama-3.1-8b".to_owned(),
            source: "meta-llama/Llama-3.1-8B config.json".to_owned(),
            pools: vec![grouped_query(32, 8, 128)],
            service: service(LLAMA_8B),
        },
        Model {
            name: "qwen2.5-32b".to_owned(),
            source: "Qwen/Qwen2.5-32B config.json".to_owned(),
            pools: vec![grouped_query(64, 8, 128)],
            service: service(Speed {
                prefill_tokens_per_s: 6_000,
                base_us: 40_000,
                each_us: 500,
            }),
        },
        Model {
            name: "deepseek-v3".to_owned(),
            source: "deepseek-ai/DeepSeek-V3 config.json".to_owned(),
            pools: vec![PoolKind::PerToken {
                layers: 61,
                kv_buffers: KvBuffers::One,
                kv_heads: 1,
                head_dim: 512 + 64,
                dtype: Dtype::Bf16,
            }],
            service: service(Speed {
                prefill_tokens_per_s: 6_000,
                base_us: 40_000,
                each_us: 500,
            }),
        },
        Model {
            name: "qwen3-next-80b".to_owned(),
            source: "Qwen/Qwen3-Next-80B-A3B-Instruct config.json".to_owned(),
            pools: vec![
                grouped_query(12, 2, 256),
                PoolKind::PerRequest {
                    layers: 36,
                    state_bytes: DELTA_NET_STATE_BYTES,
                    heads: 16,
                },
            ],
            service: service(Speed {
                prefill_tokens_per_s: 32_000,
                base_us: 20_000,
                each_us: 300,
            }),
        },
    ]
}

/// The model called `name`, in any capitals.
#[must_use]
pub fn model(name: &str) -> Option<Model> {
    known_models()
        .into_iter()
        .find(|model| model.name.eq_ignore_ascii_case(name))
}

/// Convolution window and recurrent state of one gated delta net layer, bf16.
const DELTA_NET_STATE_BYTES: u64 = ((16 * 128 * 2 + 32 * 128) * 3 + 32 * 128 * 128) * 2;

/// Speed of the 8B model, and of models described by `--kv`.
pub(super) const LLAMA_8B: Speed = Speed {
    prefill_tokens_per_s: 24_000,
    base_us: 22_000,
    each_us: 400,
};

/// The part of [`ServiceTimes`] in which the known models differ.
#[derive(Debug, Clone, Copy)]
pub(super) struct Speed {
    prefill_tokens_per_s: u64,
    base_us: u64,
    each_us: u64,
}

pub(super) fn service(speed: Speed) -> ServiceTimes {
    ServiceTimes {
        prefill_tokens_per_s: NonZeroU64::new(speed.prefill_tokens_per_s)
            .expect("every model in the table has a rate"),
        prefill_budget_tokens: const { NonZeroU32::new(1024).expect("not zero") },
        decode_base: Duration::from_micros(speed.base_us),
        decode_per_sequence: Duration::from_micros(speed.each_us),
        max_batch: const { NonZeroU32::new(256).expect("not zero") },
    }
}

const fn grouped_query(layers: u32, kv_heads: u32, head_dim: u32) -> PoolKind {
    PoolKind::PerToken {
        layers,
        kv_buffers: KvBuffers::Two,
        kv_heads,
        head_dim,
        dtype: Dtype::Bf16,
    }
}

//! Models as an operator names them: `NAME`, `NAME*COUNT`, or a geometry spelt out.

use std::str::FromStr;

use kvcached_mapper::KvBuffers;
use thiserror::Error;

use super::{Dtype, Model, PoolKind, known_models, model, table};

/// More instances of one model than this are taken for a slip of the finger.
pub const MAX_INSTANCES: u32 = 256;

/// One model and how many instances of it there are.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelChoice {
    /// The model.
    pub model: Model,
    /// At least 1, at most [`MAX_INSTANCES`].
    pub count: u32,
}

/// A model that is not understood.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ParseModelError {
    /// No model has that name.
    #[error("no model is called \"{name}\": did you mean \"{nearest}\"? Known: {known}")]
    Unknown {
        /// As given.
        name: String,
        /// The known name that is most like it.
        nearest: String,
        /// All known names.
        known: String,
    },
    /// What follows the asterisk is no count.
    #[error("expected 1 to {MAX_INSTANCES} instances after \"*\", found \"{found}\"")]
    Count {
        /// As given.
        found: String,
    },
    /// A part of a geometry that is not `key=value`.
    #[error("expected key=value, found \"{found}\"")]
    Pair {
        /// As given.
        found: String,
    },
    /// A key that means nothing.
    #[error("no key is called \"{key}\": did you mean \"{nearest}\"? Known: {known}")]
    Key {
        /// As given.
        key: String,
        /// The known key that is most like it.
        nearest: String,
        /// All keys.
        known: String,
    },
    /// A key that was given twice.
    #[error("{key} is given twice")]
    Twice {
        /// The key.
        key: &'static str,
    },
    /// A key that must be there.
    #[error("{key} is missing: a geometry is layers=N,kv-heads=N,head-dim=N,dtype=bf16")]
    Missing {
        /// The key.
        key: &'static str,
    },
    /// A value that is not what the key needs.
    #[error("{key}: expected {expected}, found \"{found}\"")]
    Value {
        /// The key.
        key: &'static str,
        /// What it needs.
        expected: &'static str,
        /// As given.
        found: String,
    },
}

const LAYERS: &str = "layers";
const KV_HEADS: &str = "kv-heads";
const HEAD_DIM: &str = "head-dim";
const DTYPE: &str = "dtype";
const BUFFERS: &str = "buffers";
const KEYS: [&str; 5] = [LAYERS, KV_HEADS, HEAD_DIM, DTYPE, BUFFERS];

/// A count that no real model exceeds, so that no size overflows.
const MAX_COUNT: u32 = 1 << 16;

impl FromStr for ModelChoice {
    type Err = ParseModelError;

    /// `NAME` or `NAME*COUNT`, with a name from the table.
    fn from_str(text: &str) -> Result<Self, ParseModelError> {
        let (name, count) = match text.split_once('*') {
            None => (text.trim(), 1),
            Some((name, count)) => {
                let parsed = count
                    .trim()
                    .parse()
                    .ok()
                    .filter(|n| (1..=MAX_INSTANCES).contains(n));
                let Some(parsed) = parsed else {
                    return Err(ParseModelError::Count {
                        found: count.trim().to_owned(),
                    });
                };
                (name.trim(), parsed)
            }
        };
        if let Some(model) = model(name) {
            return Ok(Self { model, count });
        }
        let known = known_models();
        let names: Vec<&str> = known.iter().map(|model| model.name.as_str()).collect();
        Err(ParseModelError::Unknown {
            name: name.to_owned(),
            nearest: nearest(name, &names).to_owned(),
            known: names.join(", "),
        })
    }
}

impl ModelChoice {
    /// A geometry spelt out: `layers=32,kv-heads=8,head-dim=128,dtype=bf16`, and `buffers=1` for
    /// one latent buffer in place of K and V.
    ///
    /// # Errors
    /// Names the key that is missing, unknown, repeated or has a wrong value.
    pub fn from_geometry(text: &str) -> Result<Self, ParseModelError> {
        let mut values: [Option<&str>; KEYS.len()] = [None; KEYS.len()];
        for part in text.split(',') {
            let Some((key, value)) = part.split_once('=') else {
                return Err(ParseModelError::Pair {
                    found: part.trim().to_owned(),
                });
            };
            let key = key.trim();
            let Some(index) = KEYS.iter().position(|known| *known == key) else {
                return Err(ParseModelError::Key {
                    key: key.to_owned(),
                    nearest: nearest(key, &KEYS).to_owned(),
                    known: KEYS.join(", "),
                });
            };
            if values[index].replace(value.trim()).is_some() {
                return Err(ParseModelError::Twice { key: KEYS[index] });
            }
        }
        let [layers, kv_heads, head_dim, dtype, buffers] = values;
        let pool = PoolKind::PerToken {
            layers: count(LAYERS, layers)?,
            kv_heads: count(KV_HEADS, kv_heads)?,
            head_dim: count(HEAD_DIM, head_dim)?,
            dtype: dtype
                .ok_or(ParseModelError::Missing { key: DTYPE })?
                .parse()?,
            kv_buffers: match buffers {
                None | Some("2") => KvBuffers::Two,
                Some("1") => KvBuffers::One,
                Some(found) => {
                    let found = found.to_owned();
                    return Err(ParseModelError::Value {
                        key: BUFFERS,
                        expected: "1 or 2",
                        found,
                    });
                }
            },
        };
        let model = Model {
            name: "custom".to_owned(),
            source: text.to_owned(),
            pools: vec![pool],
            service: table::service(table::LLAMA_8B),
        };
        Ok(Self { model, count: 1 })
    }
}

impl FromStr for Dtype {
    type Err = ParseModelError;

    fn from_str(text: &str) -> Result<Self, ParseModelError> {
        match text.to_ascii_lowercase().as_str() {
            "f32" | "fp32" | "float32" => Ok(Self::F32),
            "bf16" | "bfloat16" => Ok(Self::Bf16),
            "f16" | "fp16" | "float16" => Ok(Self::F16),
            "fp8" | "f8" | "fp8_e4m3" | "fp8_e5m2" => Ok(Self::Fp8),
            _ => Err(ParseModelError::Value {
                key: DTYPE,
                expected: "f32, bf16, f16 or fp8",
                found: text.to_owned(),
            }),
        }
    }
}

fn count(key: &'static str, value: Option<&str>) -> Result<u32, ParseModelError> {
    let value = value.ok_or(ParseModelError::Missing { key })?;
    value
        .parse()
        .ok()
        .filter(|n| (1..=MAX_COUNT).contains(n))
        .ok_or_else(|| ParseModelError::Value {
            key,
            expected: "a whole number from 1 to 65536",
            found: value.to_owned(),
        })
}

/// The one of `known`, which is not empty, that takes the fewest edits to reach.
fn nearest<'a>(text: &str, known: &[&'a str]) -> &'a str {
    let text = text.to_ascii_lowercase();
    known
        .iter()
        .copied()
        .min_by_key(|name| edits(&text, name))
        .unwrap_or_default()
}

/// Insertions, deletions and replacements that turn `from` into `to` (Levenshtein).
fn edits(from: &str, to: &str) -> usize {
    let to: Vec<char> = to.chars().collect();
    let mut row: Vec<usize> = (0..=to.len()).collect();
    for (i, left) in from.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, &right) in to.iter().enumerate() {
            let replaced = diagonal + usize::from(left != right);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[to.len()]
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_name_may_carry_a_count() {
        let choice: ModelChoice = "llama-3.1-8b*3".parse().expect("known");
        assert_eq!(
            (choice.model.name.as_str(), choice.count),
            ("llama-3.1-8b", 3)
        );
        let choice: ModelChoice = "Qwen2.5-32B".parse().expect("known");
        assert_eq!(
            (choice.model.name.as_str(), choice.count),
            ("qwen2.5-32b", 1)
        );
    }

    #[test]
    fn an_unknown_name_gets_the_nearest_one() {
        for (name, nearest) in [
            ("lama-3.1-8b*2", "llama-3.1-8b"),
            ("llama3-8b", "llama-3.1-8b"),
            ("deepseek", "deepseek-v3"),
            ("qwen3-next", "qwen3-next-80b"),
            ("qwen-32b", "qwen2.5-32b"),
        ] {
            let message = name.parse::<ModelChoice>().expect_err(name).to_string();
            assert!(
                message.contains(&format!("did you mean \"{nearest}\"?")),
                "{message}"
            );
            assert!(message.contains("llama-3.1-8b, qwen2.5-32b"), "{message}");
        }
    }

    #[test]
    fn a_bad_count_is_named() {
        for count in ["0", "", "-1", "x", "257", "1*2"] {
            let text = format!("llama-3.1-8b*{count}");
            let error = text.parse::<ModelChoice>().expect_err("a bad count");
            assert_eq!(
                error,
                ParseModelError::Count {
                    found: count.to_owned()
                }
            );
        }
    }

    #[test]
    fn a_geometry_can_be_spelt_out() {
        let choice = ModelChoice::from_geometry("layers=32, kv-heads=8,head-dim=128,dtype=bf16")
            .expect("ok");
        assert_eq!(
            choice.model.pools,
            model("llama-3.1-8b").expect("known").pools
        );
        let latent =
            ModelChoice::from_geometry("dtype=fp8,buffers=1,head-dim=576,kv-heads=1,layers=61");
        let [
            PoolKind::PerToken {
                kv_buffers, dtype, ..
            },
        ] = latent.expect("ok").model.pools[..]
        else {
            panic!("one token pool")
        };
        assert_eq!((kv_buffers, dtype), (KvBuffers::One, Dtype::Fp8));
    }

    #[test]
    fn a_bad_geometry_names_the_key() {
        for (text, expected) in [
            ("layers=32", "kv-heads is missing"),
            ("layers=32,kv-heads=8,head-dim=128", "dtype is missing"),
            (
                "layers=0,kv-heads=8,head-dim=128,dtype=bf16",
                "layers: expected a whole number",
            ),
            (
                "layers=3.5,kv-heads=8,head-dim=128,dtype=bf16",
                "found \"3.5\"",
            ),
            (
                "layers=99999999999,kv-heads=8",
                "layers: expected a whole number from 1 to 65536",
            ),
            (
                "layers=32,kv-heads=8,head-dim=128,dtype=int3",
                "dtype: expected f32, bf16, f16",
            ),
            (
                "layers=32,kv-heads=8,head-dim=128,dtype=bf16,buffers=3",
                "buffers: expected 1 or 2",
            ),
            ("layers=32,layers=32", "layers is given twice"),
            ("layers", "expected key=value, found \"layers\""),
            ("", "expected key=value, found \"\""),
            (
                "layer=32",
                "no key is called \"layer\": did you mean \"layers\"?",
            ),
            ("kv_heads=32", "did you mean \"kv-heads\"?"),
        ] {
            let message = ModelChoice::from_geometry(text)
                .expect_err(text)
                .to_string();
            assert!(message.contains(expected), "{text}: {message}");
        }
    }

    proptest! {
        #[test]
        fn no_text_makes_it_panic(text in "[a-z0-9*=,.\\- ]{0,60}") {
            let _ = text.parse::<ModelChoice>();
            let _ = ModelChoice::from_geometry(&text);
        }

        #[test]
        fn edits_are_a_distance(a in "[abc]{0,6}", b in "[abc]{0,6}") {
            prop_assert_eq!(edits(&a, &b), edits(&b, &a));
            prop_assert_eq!(edits(&a, &b) == 0, a == b);
            prop_assert!(edits(&a, &b) <= a.len().max(b.len()));
        }
    }
}

//! The name of an instance, in the one spelling that every process derives alike.
//!
//! A name becomes a directory. Whatever a user wrote is cleaned for that, and whenever cleaning or
//! shortening lost something, a hash of the whole original is appended: names that differ stay
//! different.

use std::fmt;
use std::str::FromStr;

use thiserror::Error;

/// One engine: its scheduler process and its workers.
///
/// The text is safe as a file name, at most [`InstanceName::MAX_BYTES`] long, and denotes itself:
/// parsing it again, as a child process does with the name its parent hands over, changes nothing.
///
/// ```
/// use kvcached_tp_ipc::InstanceName;
///
/// let plain: InstanceName = "llama-8b".parse()?;
/// assert_eq!(plain.as_str(), "llama-8b");
///
/// let slash: InstanceName = "team/llama".parse()?;
/// let colon: InstanceName = "team:llama".parse()?;
/// assert_ne!(slash, colon);
/// assert_eq!(slash.as_str().parse::<InstanceName>()?, slash);
/// # Ok::<(), kvcached_tp_ipc::NameError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct InstanceName(String);

/// Text that cannot name an instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum NameError {
    /// Nothing at all.
    #[error("the name of an instance is empty")]
    Empty,
}

impl InstanceName {
    /// Longest name; endpoints have little room (see [`Endpoint`](crate::Endpoint)).
    pub const MAX_BYTES: usize = 48;

    /// A dash and the hash in hexadecimal digits.
    const SUFFIX_BYTES: usize = 17;

    /// The name as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for InstanceName {
    type Err = NameError;

    fn from_str(text: &str) -> Result<Self, NameError> {
        if text.is_empty() {
            return Err(NameError::Empty);
        }
        let kept = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
        let clean = text.chars().all(kept) && !text.starts_with('.');
        if clean && text.len() <= Self::MAX_BYTES {
            return Ok(Self(text.to_owned()));
        }
        let mut name: String = text
            .chars()
            .map(|c| if kept(c) { c } else { '-' })
            .take(Self::MAX_BYTES - Self::SUFFIX_BYTES)
            .collect();
        if name.starts_with('.') {
            name.replace_range(..1, "-");
        }
        Ok(Self(format!("{name}-{:016x}", fnv1a(text.as_bytes()))))
    }
}

impl fmt::Display for InstanceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// FNV-1a. The standard hasher may change between builds; two processes of one instance may not
/// disagree about its name.
fn fnv1a(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn name(text: &str) -> InstanceName {
        text.parse().unwrap()
    }

    #[test]
    fn names_that_cleaning_would_merge_stay_different() {
        let names = [
            "a/b", "a:b", "a-b", "a b", "a//b", "a-b-", "..", ".", "-", "./a",
        ];
        for (index, left) in names.iter().enumerate() {
            for right in &names[index + 1..] {
                assert_ne!(name(left), name(right), "{left:?} and {right:?}");
            }
        }
    }

    #[test]
    fn names_that_shortening_would_merge_stay_different() {
        let long = "m".repeat(100);
        assert_ne!(name(&format!("{long}1")), name(&format!("{long}2")));
        assert_eq!(name(&long[..InstanceName::MAX_BYTES]).as_str(), &long[..48]);
    }

    #[test]
    fn the_spelling_is_the_same_in_every_build() {
        assert_eq!(name("a/b").as_str(), "a-b-e620c3190468cf61");
    }

    #[test]
    fn an_empty_name_is_an_error() {
        assert_eq!("".parse::<InstanceName>(), Err(NameError::Empty));
    }

    proptest! {
        #[test]
        fn a_name_is_a_safe_file_name_and_denotes_itself(text in ".{1,80}") {
            let name = name(&text);
            prop_assert!(name.as_str().len() <= InstanceName::MAX_BYTES);
            prop_assert!(!name.as_str().starts_with('.'));
            prop_assert!(!name.as_str().contains(['/', '\0']));
            prop_assert_eq!(name.as_str().parse::<InstanceName>().unwrap(), name);
        }

        #[test]
        fn names_that_differ_stay_different(left in "[a-c./: -]{1,60}", right in "[a-c./: -]{1,60}") {
            prop_assume!(left != right);
            prop_assert_ne!(name(&left), name(&right));
        }
    }
}

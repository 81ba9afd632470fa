//! Sizes as people write them: `2MiB`, `4m`, `1.5 GiB`, `2097152`.
//!
//! Every unit is a power of 1024, whichever way it is spelled: nobody who asks for a page of `2MB`
//! wants one of 2 000 000 bytes, which no device could map.

use std::fmt;
use std::str::FromStr;

use thiserror::Error;

/// A number of bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ByteSize(pub u64);

/// A text that is no size.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{text:?} is no size: write a number with B, K, M, G or T, such as 2MiB")]
pub struct ParseSizeError {
    /// The text.
    pub text: String,
}

impl FromStr for ByteSize {
    type Err = ParseSizeError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        parse(text.trim()).map(Self).ok_or_else(|| ParseSizeError {
            text: text.to_owned(),
        })
    }
}

impl fmt::Display for ByteSize {
    /// The largest unit that gives a whole number, so that reading it back gives the same size.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (unit, shift) in [("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)] {
            if self.0 != 0 && self.0.trailing_zeros() >= shift {
                return write!(f, "{}{unit}", self.0 >> shift);
            }
        }
        write!(f, "{}B", self.0)
    }
}

fn parse(text: &str) -> Option<u64> {
    let end = text
        .find(|c: char| !c.is_ascii_digit() && c != '.')
        .unwrap_or(text.len());
    let (number, unit) = text.split_at(end);
    let unit: u128 = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 1,
        "k" | "kb" | "kib" => 1 << 10,
        "m" | "mb" | "mib" => 1 << 20,
        "g" | "gb" | "gib" => 1 << 30,
        "t" | "tb" | "tib" => 1 << 40,
        _ => return None,
    };
    let (whole, fraction) = number.split_once('.').unwrap_or((number, "0"));
    // Eighteen digits of fraction cannot overflow below, and are more than any unit can use.
    if whole.is_empty() || fraction.is_empty() || fraction.len() > 18 || fraction.contains('.') {
        return None;
    }
    let scale = 10u128.pow(u32::try_from(fraction.len()).ok()?);
    let part = fraction.parse::<u128>().ok()? * unit;
    if !part.is_multiple_of(scale) {
        return None;
    }
    let bytes = u128::from(whole.parse::<u64>().ok()?).checked_mul(unit)? + part / scale;
    u64::try_from(bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn sizes_read_as_people_write_them() {
        for (text, bytes) in [
            ("0", 0),
            ("2097152", 2 << 20),
            ("512b", 512),
            ("4k", 4 << 10),
            ("2MiB", 2 << 20),
            ("2 MiB", 2 << 20),
            ("2mb", 2 << 20),
            (" 4m ", 4 << 20),
            ("1.5GiB", 3 << 29),
            ("0.25K", 256),
            ("3T", 3 << 40),
            ("18446744073709551615", u64::MAX),
        ] {
            assert_eq!(text.parse(), Ok(ByteSize(bytes)), "{text}");
        }
    }

    #[test]
    fn what_is_no_size_is_an_error() {
        for text in [
            "",
            " ",
            "m",
            "-1",
            "+1",
            "2 mi b",
            "2x",
            "2MiBs",
            "1.5",
            "1.",
            ".5m",
            "1..5m",
            "1.2.3m",
            "1e6",
            "0x10",
            "16777216T",
            "18446744073709551616",
            "0.0001k",
            "２m",
            "nan",
            "1.0000000000000000000m",
        ] {
            assert_eq!(
                text.parse::<ByteSize>(),
                Err(ParseSizeError {
                    text: text.to_owned()
                }),
                "{text:?}"
            );
        }
    }

    proptest! {
        #[test]
        fn a_size_reads_back_as_written(bytes: u64) {
            prop_assert_eq!(ByteSize(bytes).to_string().parse(), Ok(ByteSize(bytes)));
        }

        #[test]
        fn no_text_panics(text in "[0-9.]{0,24}[ a-zA-Z]{0,4}|\\PC{0,12}") {
            let _ = text.parse::<ByteSize>();
        }
    }
}

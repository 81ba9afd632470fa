//! Serving traces: which request arrived when, how long its prompt was, how much it generated.
//!
//! Three public formats are told apart by content, never by file name: the CSV of the Azure LLM
//! inference dataset, the JSON lines of Mooncake, and the CSV of BurstGPT. Reading the file is the
//! caller's job; here are bytes in, requests out, and an error that names file, line and column.

mod azure;
mod burst;
mod mooncake;
mod table;

use std::{fmt, time::Duration};

use thiserror::Error;

/// A request with more tokens than this, in or out, is taken for a broken trace.
pub const MAX_REQUEST_TOKENS: u32 = 1 << 24;

/// Tokens that one id of [`Request::prefix`] stands for.
pub const PREFIX_TOKENS: u32 = 512;

/// Requests in order of arrival.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Trace {
    /// Where they come from.
    pub format: Format,
    /// Sorted by arrival; those that arrive together keep the order of the file. Never empty.
    pub requests: Vec<Request>,
}

/// Where a trace comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Format {
    /// `TIMESTAMP,ContextTokens,GeneratedTokens`: Azure Public Dataset, LLM inference traces.
    Azure,
    /// `{"timestamp", "input_length", "output_length", "hash_ids"}` a line: Mooncake.
    Mooncake,
    /// `Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type`: BurstGPT.
    BurstGpt,
    /// No file: drawn by [`Workload`](crate::Workload).
    BuiltIn,
    /// No file: drawn by [`Staggered`](crate::Staggered).
    Staggered,
    /// No file: drawn by [`Bursts`](crate::Bursts).
    Bursts,
}

/// One request of a trace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    /// Time since the first request of the trace.
    pub arrival: Duration,
    /// Tokens of the prompt. A trace may say 0; the engine then takes 1.
    pub input_tokens: u32,
    /// Tokens generated. A trace may say 0, for a request that failed; the engine then takes 1,
    /// since the prompt was processed and an answer begun.
    pub output_tokens: u32,
    /// One id for each [`PREFIX_TOKENS`] tokens of the prompt, the last for what remains. Requests
    /// whose ids agree up to some point share the prompt up to there. Empty: nothing is shared.
    pub prefix: Vec<u64>,
    /// The model it asked for, where the trace tells.
    pub model: Option<String>,
}

/// A trace that cannot be read, and where.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{file}, line {line}{}: {problem}", describe_column(.column))]
pub struct TraceError {
    /// The name the caller gave the input.
    pub file: String,
    /// Counted from 1.
    pub line: usize,
    /// Which field of the line, if one is to blame.
    pub column: Option<Column>,
    /// What is wrong there.
    pub problem: Problem,
}

/// A place in a line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Column {
    /// Counted from 1: fields in a CSV line, characters in a JSON line.
    pub number: usize,
    /// Its name in the header, or the name of the JSON field.
    pub name: Option<String>,
}

/// What is wrong with a trace.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum Problem {
    /// Nothing but blanks.
    #[error(
        "the trace is empty: expected the header of an Azure or BurstGPT CSV, or JSON objects as \
         in a Mooncake trace"
    )]
    Empty,
    /// A header and nothing after it.
    #[error("expected requests after the header, found none")]
    NoRequests,
    /// Bytes that are not text.
    #[error("expected UTF-8 text")]
    NotUtf8,
    /// A first line that no format begins with.
    #[error(
        "unknown format: expected the header \"TIMESTAMP,ContextTokens,GeneratedTokens\" (Azure), \
         a header with \"Timestamp\", \"Request tokens\" and \"Response tokens\" (BurstGPT), or a \
         JSON object (Mooncake), found \"{found}\""
    )]
    UnknownFormat {
        /// How the line begins.
        found: String,
    },
    /// A value that is not what belongs there.
    #[error("expected {expected}, found {found}")]
    Value {
        /// What belongs there.
        expected: String,
        /// What is there.
        found: String,
    },
    /// A line that is no JSON object.
    #[error("expected a JSON object: {reason}")]
    Json {
        /// The parser's words.
        reason: String,
    },
    /// More requests than can be numbered.
    #[error("more than {} requests", u32::MAX)]
    TooManyRequests,
}

impl Trace {
    /// Reads a trace of any known format. `file` is only quoted in errors.
    ///
    /// A byte-order mark, CRLF line ends and blank lines are tolerated. Requests out of order are
    /// sorted, stably.
    ///
    /// # Errors
    /// The first thing that is wrong, with its place.
    pub fn parse(file: &str, bytes: &[u8]) -> Result<Self, TraceError> {
        Self::parse_any(bytes).map_err(|fault| TraceError {
            file: file.to_owned(),
            line: fault.line,
            column: fault.column,
            problem: fault.problem,
        })
    }

    /// Drops the requests that arrive at `end` or after it; the first one stays.
    pub fn end_at(&mut self, end: Duration) {
        let before = self.requests.partition_point(|r| r.arrival < end);
        self.requests.truncate(before.max(1));
    }

    fn parse_any(bytes: &[u8]) -> Result<Self, Fault> {
        let text = match std::str::from_utf8(bytes) {
            Ok(text) => text,
            Err(error) => {
                let good = &bytes[..error.valid_up_to()];
                let line_start = good
                    .iter()
                    .rposition(|&b| b == b'\n')
                    .map_or(0, |at| at + 1);
                return Err(Fault {
                    line: 1 + good.iter().filter(|&&b| b == b'\n').count(),
                    column: Some(Column {
                        number: 1 + good.len() - line_start,
                        name: None,
                    }),
                    problem: Problem::NotUtf8,
                });
            }
        };
        let text = text.strip_prefix('\u{feff}').unwrap_or(text);
        let Some(first) = lines(text).next() else {
            return Err(Fault {
                line: 1,
                column: None,
                problem: Problem::Empty,
            });
        };
        let (format, timed) = if first.text.starts_with('{') {
            (Format::Mooncake, mooncake::parse(text)?)
        } else if azure::is_header(first.text) {
            (Format::Azure, azure::parse(text)?)
        } else if burst::is_header(first.text) {
            (Format::BurstGpt, burst::parse(text)?)
        } else {
            let found: String = first.text.chars().take(80).collect();
            return Err(Fault {
                line: first.number,
                column: None,
                problem: Problem::UnknownFormat { found },
            });
        };
        Ok(Self {
            format,
            requests: sorted(timed, first.number)?,
        })
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Azure => "azure",
            Self::Mooncake => "mooncake",
            Self::BurstGpt => "burstgpt",
            Self::BuiltIn => "built-in",
            Self::Staggered => "built-in: staggered",
            Self::Bursts => "built-in: bursts",
        })
    }
}

impl fmt::Display for Column {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.name {
            Some(name) => write!(f, "column {} ({name})", self.number),
            None => write!(f, "column {}", self.number),
        }
    }
}

/// A request with the time the file gives, since whatever epoch the format has.
#[derive(Debug)]
struct Timed {
    at: Duration,
    request: Request,
}

/// A problem whose file is not known yet.
#[derive(Debug)]
struct Fault {
    line: usize,
    column: Option<Column>,
    problem: Problem,
}

/// A line that is not blank, trimmed, with its number in the file.
#[derive(Debug, Clone, Copy)]
struct Line<'a> {
    number: usize,
    text: &'a str,
    /// Characters that were trimmed before the text.
    indent: usize,
}

fn lines(text: &str) -> impl Iterator<Item = Line<'_>> {
    text.split('\n')
        .enumerate()
        .map(|(index, text)| {
            let (text, long) = (text.trim_start(), text);
            Line {
                number: index + 1,
                text: text.trim_end(),
                indent: long[..long.len() - text.len()].chars().count(),
            }
        })
        .filter(|line| !line.text.is_empty())
}

fn sorted(mut timed: Vec<Timed>, first_line: usize) -> Result<Vec<Request>, Fault> {
    let fault = |problem| Fault {
        line: first_line,
        column: None,
        problem,
    };
    if u32::try_from(timed.len()).is_err() {
        return Err(fault(Problem::TooManyRequests));
    }
    timed.sort_by_key(|entry| entry.at);
    let Some(start) = timed.first().map(|entry| entry.at) else {
        return Err(fault(Problem::NoRequests));
    };
    Ok(timed
        .into_iter()
        .map(|Timed { at, mut request }| {
            request.arrival = at.saturating_sub(start);
            request
        })
        .collect())
}

fn describe_column(column: &Option<Column>) -> String {
    column
        .as_ref()
        .map(|column| format!(", {column}"))
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn message(bytes: &[u8]) -> String {
        Trace::parse("t", bytes)
            .expect_err("a broken trace")
            .to_string()
    }

    #[test]
    fn an_empty_file_says_what_was_expected() {
        for empty in ["", "\n\r\n  \n", "\u{feff}", "\u{feff}\n"] {
            let error = Trace::parse("t.csv", empty.as_bytes()).expect_err("empty");
            assert_eq!(
                (error.line, &error.problem),
                (1, &Problem::Empty),
                "{empty:?}"
            );
        }
        assert!(message(b"").starts_with("t, line 1: the trace is empty: expected"));
    }

    #[test]
    fn a_file_of_another_kind_is_named_with_the_line_it_begins_at() {
        assert_eq!(
            message(b"\n\nid;when\n1;2\n").split(": expected").next(),
            Some("t, line 3: unknown format")
        );
        assert!(message(b"id;when\n").ends_with("found \"id;when\""));
        assert!(message(b"2023-11-16 18:15:46.68,374,44\n").contains("unknown format"));
    }

    #[test]
    fn bytes_that_are_not_text_are_found() {
        assert_eq!(
            message(b"TIMESTAMP\nab\xffcd"),
            "t, line 2, column 3: expected UTF-8 text"
        );
    }

    #[test]
    fn a_trace_that_ends_sooner_keeps_what_arrives_before() {
        let text = "{\"timestamp\": 0, \"input_length\": 1, \"output_length\": 1}\n\
                    {\"timestamp\": 59, \"input_length\": 2, \"output_length\": 1}\n\
                    {\"timestamp\": 60, \"input_length\": 3, \"output_length\": 1}\n";
        let mut trace = Trace::parse("t", text.as_bytes()).expect("a good trace");
        trace.end_at(Duration::from_millis(60));
        assert_eq!(trace.requests.len(), 2);
        trace.end_at(Duration::ZERO);
        assert_eq!(trace.requests.len(), 1, "never empty");
    }

    #[test]
    fn requests_out_of_order_are_sorted_stably() {
        let text = "{\"timestamp\": 20, \"input_length\": 1, \"output_length\": 1}\n\
                    {\"timestamp\": 10, \"input_length\": 2, \"output_length\": 1}\n\
                    {\"timestamp\": 20, \"input_length\": 3, \"output_length\": 1}\n\
                    {\"timestamp\": 10, \"input_length\": 4, \"output_length\": 1}\n";
        let trace = Trace::parse("t", text.as_bytes()).expect("a good trace");
        let order: Vec<_> = trace
            .requests
            .iter()
            .map(|r| (r.arrival.as_millis(), r.input_tokens))
            .collect();
        assert_eq!(order, [(0, 2), (0, 4), (10, 1), (10, 3)]);
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = Trace::parse("t", &bytes);
        }

        #[test]
        fn no_text_after_a_good_header_makes_it_panic(
            header in prop::sample::select(vec![
                "TIMESTAMP,ContextTokens,GeneratedTokens",
                "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type",
                "{\"timestamp\": 0, \"input_length\": 1, \"output_length\": 1}",
            ]),
            rest in "[-0-9a-z:,.{}\"\\[\\] \r\n]{0,120}",
        ) {
            match Trace::parse("t", format!("{header}\n{rest}").as_bytes()) {
                Ok(trace) => {
                    prop_assert!(!trace.requests.is_empty());
                    prop_assert!(trace.requests.is_sorted_by_key(|r| r.arrival));
                    prop_assert_eq!(trace.requests[0].arrival, Duration::ZERO);
                }
                Err(error) => prop_assert!(error.line >= 1),
            }
        }
    }
}

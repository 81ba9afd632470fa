//! Mooncake: a JSON object a line, `timestamp` in milliseconds, and `hash_ids`, one id for each
//! 512 tokens of the prompt. An id stands for its tokens and all before them, so requests with
//! equal ids have that much of the prompt in common.

use std::time::Duration;

use serde_json::{Map, Value};

use super::{
    Column, Fault, Line, MAX_REQUEST_TOKENS, PREFIX_TOKENS, Problem, Request, Timed, lines,
    table::expected_tokens,
};

/// About 31 years; the published traces span an hour.
const MAX_MILLISECONDS: f64 = 1e12;

/// Longest reason of the parser that is passed on, in bytes: it may quote what it read.
const MAX_REASON_BYTES: usize = 200;

const EXPECTED_TIME: &str = "a time in milliseconds from 0 to 1000000000000";

pub(super) fn parse(text: &str) -> Result<Vec<Timed>, Fault> {
    lines(text).map(parse_line).collect()
}

fn parse_line(line: Line<'_>) -> Result<Timed, Fault> {
    let fields: Map<String, Value> =
        serde_json::from_str(line.text).map_err(|error| json_fault(line, &error))?;
    let object = Object { line, fields };
    let input_tokens = object.tokens("input_length")?;
    let request = Request {
        arrival: Duration::ZERO,
        input_tokens,
        output_tokens: object.tokens("output_length")?,
        prefix: object.prefix(input_tokens)?,
        model: match object.fields.get("model") {
            None | Some(Value::Null) => None,
            Some(Value::String(name)) => Some(name.clone()),
            Some(_) => return Err(object.fault("model", "the name of a model")),
        },
    };
    Ok(Timed {
        at: object.timestamp()?,
        request,
    })
}

/// One line's object.
#[derive(Debug)]
struct Object<'a> {
    line: Line<'a>,
    fields: Map<String, Value>,
}

impl Object<'_> {
    fn timestamp(&self) -> Result<Duration, Fault> {
        let fault = || self.fault("timestamp", EXPECTED_TIME);
        let milliseconds = self
            .fields
            .get("timestamp")
            .and_then(Value::as_f64)
            .ok_or_else(fault)?;
        if !(0.0..=MAX_MILLISECONDS).contains(&milliseconds) {
            return Err(fault());
        }
        Duration::try_from_secs_f64(milliseconds / 1e3).map_err(|_| fault())
    }

    fn tokens(&self, name: &str) -> Result<u32, Fault> {
        let tokens = self.fields.get(name).and_then(Value::as_u64);
        match tokens.map(u32::try_from) {
            Some(Ok(tokens)) if tokens <= MAX_REQUEST_TOKENS => Ok(tokens),
            _ => Err(self.fault(name, &expected_tokens())),
        }
    }

    /// The ids, which must be as many as the prompt has begun blocks of 512 tokens. No `hash_ids`
    /// at all means that nothing is known to be shared.
    fn prefix(&self, input_tokens: u32) -> Result<Vec<u64>, Fault> {
        let ids = match self.fields.get("hash_ids") {
            None | Some(Value::Null) => return Ok(Vec::new()),
            Some(ids) => ids,
        };
        let expected = input_tokens.div_ceil(PREFIX_TOKENS);
        let fault = || {
            let what = format!(
                "{expected} ids, one for each {PREFIX_TOKENS} of {input_tokens} input tokens"
            );
            self.fault("hash_ids", &what)
        };
        let ids = ids.as_array().ok_or_else(fault)?;
        if u32::try_from(ids.len()) != Ok(expected) {
            return Err(fault());
        }
        ids.iter().map(|id| id.as_u64().ok_or_else(fault)).collect()
    }

    fn fault(&self, name: &str, expected: &str) -> Fault {
        let found = match self.fields.get(name) {
            None => "no such field".to_owned(),
            Some(Value::Array(list)) => format!("a list of {}", list.len()),
            Some(value) => value.to_string().chars().take(80).collect(),
        };
        let at = self.line.text.find(&format!("\"{name}\"")).unwrap_or(0);
        Fault {
            line: self.line.number,
            column: Some(Column {
                number: self.line.character(at),
                name: Some(name.to_owned()),
            }),
            problem: Problem::Value {
                expected: expected.to_owned(),
                found,
            },
        }
    }
}

impl Line<'_> {
    /// Which character of the line the byte `at` of its text belongs to, counted from 1.
    fn character(self, at: usize) -> usize {
        let before = &self.text[..self.text.floor_char_boundary(at)];
        self.indent + before.chars().count() + 1
    }
}

fn json_fault(line: Line<'_>, error: &serde_json::Error) -> Fault {
    let mut reason = error.to_string();
    // The parser saw one line only, so its "line 1" would mislead.
    if let Some(at) = reason.rfind(" at line ") {
        reason.truncate(at);
    }
    if reason.len() > MAX_REASON_BYTES {
        reason.truncate(reason.floor_char_boundary(MAX_REASON_BYTES));
        reason.push('…');
    }
    Fault {
        line: line.number,
        column: Some(Column {
            number: line.character(error.column().saturating_sub(1)),
            name: None,
        }),
        problem: Problem::Json { reason },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::{Format, Trace};

    fn parse(text: &str) -> Result<Trace, String> {
        Trace::parse("m.jsonl", text.as_bytes()).map_err(|e| e.to_string())
    }

    const GOOD: &str = "{\"timestamp\": 0, \"input_length\": 600, \"output_length\": 5, \
                        \"hash_ids\": [46, 47]}\n";

    #[test]
    fn the_published_form_is_read() {
        let trace = parse(&format!(
            "{GOOD}{}",
            "{\"timestamp\": 1500, \"input_length\": 512, \"output_length\": 0, \"hash_ids\": [46]}"
        ))
        .expect("a good trace");
        assert_eq!(trace.format, Format::Mooncake);
        assert_eq!(trace.requests[0].prefix, [46, 47]);
        assert_eq!(trace.requests[1].arrival, Duration::from_millis(1500));
        assert_eq!(trace.requests[1].prefix, [46]);
    }

    #[test]
    fn ids_and_model_may_be_missing() {
        let trace =
            parse("{\"timestamp\":0.5,\"input_length\":600,\"output_length\":5}").expect("good");
        assert!(trace.requests[0].prefix.is_empty());
        let text = "{\"timestamp\":0,\"input_length\":1,\"output_length\":5,\"model\":\"a\"}";
        assert_eq!(
            parse(text).expect("good").requests[0].model.as_deref(),
            Some("a")
        );
    }

    #[test]
    fn a_bad_value_is_named_with_line_and_column() {
        for (line, expected) in [
            (
                "{\"timestamp\": -1, \"input_length\": 1, \"output_length\": 1}",
                "line 2, column 2 (timestamp): expected a time in milliseconds from 0 to \
                 1000000000000, found -1",
            ),
            (
                "{\"timestamp\": 0, \"input_length\": 1.5, \"output_length\": 1}",
                "line 2, column 18 (input_length): expected a whole number of tokens",
            ),
            (
                "{\"timestamp\": 0, \"input_length\": -7, \"output_length\": 1}",
                "found -7",
            ),
            (
                "{\"timestamp\": 0, \"input_length\": 99999999999, \"output_length\": 1}",
                "found 99999999999",
            ),
            (
                "{\"timestamp\": 0, \"input_length\": 1}",
                "(output_length): expected a whole",
            ),
            (
                "{\"input_length\": 1, \"output_length\": 1}",
                "(timestamp): expected a time",
            ),
            (
                "{\"timestamp\": 0, \"input_length\": 600, \"output_length\": 1, \"hash_ids\": [1]}",
                "(hash_ids): expected 2 ids, one for each 512 of 600 input tokens, found a list of 1",
            ),
            (
                "{\"timestamp\": 0, \"input_length\": 5, \"output_length\": 1, \"hash_ids\": [-1]}",
                "(hash_ids)",
            ),
            (
                "{\"timestamp\": 0, \"input_length\": 5, \"output_length\": 1, \"hash_ids\": 7}",
                "found 7",
            ),
            (
                "{\"timestamp\": 1e999}",
                "column 19: expected a JSON object: number out of range",
            ),
            (
                "{\"timestamp\": 0, \"input_len",
                "line 2, column 27: expected a JSON object: EOF",
            ),
            ("[1]", "line 2, column"),
            // Columns are characters of the line as it stands in the file.
            (
                "  {\"a\": \"éé\", \"timestamp\": -1, \"input_length\": 1, \"output_length\": 1}",
                "line 2, column 15 (timestamp)",
            ),
            ("  {\"a\": \"éé\", x", "line 2, column 15: expected a JSON"),
        ] {
            let message = parse(&format!("{GOOD}{line}\n")).expect_err(line);
            assert!(message.contains(expected), "{line}: {message}");
            assert!(message.contains("m.jsonl, line 2, column "), "{message}");
        }
        let words = format!("\"{}\"", "é".repeat(4000));
        let message = parse(&format!("{GOOD}{words}\n")).expect_err("no object");
        assert!(message.contains("invalid type: string \"ééé"), "{message}");
        assert!(message.len() < 300, "{message}");
    }
}

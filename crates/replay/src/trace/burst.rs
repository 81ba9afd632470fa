//! BurstGPT: `Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type`, the time in
//! seconds. Failed requests have 0 response tokens. Later releases add columns; they are ignored.

use std::time::Duration;

use super::{
    Fault, Request, Timed, lines,
    table::{Field, Header, Place, Row},
};

/// About 31 years: the published trace spans four months.
const MAX_SECONDS: f64 = 1e9;

const EXPECTED_TIME: &str = "a time in seconds from 0 to 1000000000";

/// Columns that are needed, and the model's name where there is one.
#[derive(Debug)]
struct Columns {
    time: Place,
    input: Place,
    output: Place,
    model: Option<Place>,
}

pub(super) fn is_header(line: &str) -> bool {
    columns(line).is_some()
}

pub(super) fn parse(text: &str) -> Result<Vec<Timed>, Fault> {
    let mut lines = lines(text);
    let Some(columns) = lines.next().and_then(|header| columns(header.text)) else {
        return Ok(Vec::new());
    };
    lines
        .map(|line| {
            let row = Row::parse(line);
            let at = timestamp(columns.time.field(&row)?)?;
            let model = match &columns.model {
                Some(model) => Some(model.field(&row)?.text).filter(|name| !name.is_empty()),
                None => None,
            };
            let request = Request {
                arrival: Duration::ZERO,
                input_tokens: columns.input.field(&row)?.tokens()?,
                output_tokens: columns.output.field(&row)?.tokens()?,
                prefix: Vec::new(),
                model: model.map(str::to_owned),
            };
            Ok(Timed { at, request })
        })
        .collect()
}

fn columns(line: &str) -> Option<Columns> {
    let header = Header::parse(line);
    Some(Columns {
        time: header.find("Timestamp")?,
        input: header.find("Request tokens")?,
        output: header.find("Response tokens")?,
        model: header.find("Model"),
    })
}

fn timestamp(field: Field<'_>) -> Result<Duration, Fault> {
    let fault = || field.fault(EXPECTED_TIME);
    let seconds: f64 = field.text.parse().map_err(|_| fault())?;
    if !(0.0..=MAX_SECONDS).contains(&seconds) {
        return Err(fault());
    }
    Duration::try_from_secs_f64(seconds).map_err(|_| fault())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::{Format, Trace};

    const HEADER: &str = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n";

    fn parse(rows: &str) -> Result<Trace, String> {
        Trace::parse("burst.csv", format!("{HEADER}{rows}").as_bytes()).map_err(|e| e.to_string())
    }

    #[test]
    fn the_published_form_is_read() {
        let trace = parse(
            "5,ChatGPT,472,18,490,Conversation log\n45.25,GPT-4,1087,0,1087,API log\n\
             46,,1,1,2,\"API log\"\n",
        )
        .expect("a good trace");
        assert_eq!(trace.format, Format::BurstGpt);
        let [first, second, third] = trace.requests.as_slice() else {
            panic!("three requests")
        };
        assert_eq!((first.input_tokens, first.output_tokens), (472, 18));
        assert_eq!(first.model.as_deref(), Some("ChatGPT"));
        assert_eq!(
            (second.arrival, second.output_tokens),
            (Duration::from_millis(40_250), 0)
        );
        assert_eq!(third.model, None);
    }

    #[test]
    fn columns_are_found_by_name_in_any_order() {
        let text = "Session ID,\"Response tokens\",Elapsed time,request tokens,TIMESTAMP\r\n\
                    7,18,0.5,472,5\r\n";
        let trace = Trace::parse("t", text.as_bytes()).expect("a good trace");
        let request = &trace.requests[0];
        assert_eq!((request.input_tokens, request.output_tokens), (472, 18));
        assert_eq!(request.model, None);
    }

    #[test]
    fn a_bad_value_is_named_with_line_and_column() {
        for (row, expected) in [
            (
                "NaN,m,1,1,2,l",
                "line 2, column 1 (Timestamp): expected a time in seconds",
            ),
            ("inf,m,1,1,2,l", "column 1 (Timestamp)"),
            ("-1,m,1,1,2,l", "found \"-1\""),
            ("1e300,m,1,1,2,l", "found \"1e300\""),
            (
                "1,m,-1,1,2,l",
                "column 3 (Request tokens): expected a whole number of tokens",
            ),
            ("1,m,1,x,2,l", "column 4 (Response tokens)"),
            (
                "1,m,1",
                "column 4 (Response tokens): expected a value, found the end of the line",
            ),
        ] {
            let message = parse(row).expect_err(row);
            assert!(message.contains(expected), "{row}: {message}");
        }
        assert!(parse("").expect_err("no requests").contains("found none"));
        // Otherwise the second request would silently be missing.
        let message = parse("1,m,1,1,2,l\r2,m,1,1,2,l\n").expect_err("two records in a line");
        assert!(
            message.contains("line 2, column 1 (Timestamp)"),
            "{message}"
        );
    }
}

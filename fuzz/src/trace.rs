//! Traces: whatever a file holds, it is read within its own size, or the place that is wrong is in
//! it.

use std::time::Duration;

use kvcached_replay::{Format, MAX_REQUEST_TOKENS, PREFIX_TOKENS, Problem, Trace, TraceError};

/// Bytes held of a request, at most, for each byte of its line: the shortest is `0,0,0`, and a
/// list that grows is up to twice as long as what it holds.
const HELD_PER_BYTE: usize = 32;

/// Letters of an error, at most: it goes to a terminal.
const MAX_MESSAGE_CHARS: usize = 600;

/// Reads bytes as a file, and as the rows of an Azure trace.
pub fn azure(input: &[u8]) {
    read(input);
    read_after("TIMESTAMP,ContextTokens,GeneratedTokens\r\n", input);
}

/// Reads bytes as a file, and as the lines after the first of a Mooncake trace.
pub fn mooncake(input: &[u8]) {
    read(input);
    let first = r#"{"timestamp": 7, "input_length": 600, "output_length": 1, "hash_ids": [1, 2]}"#;
    read_after(&format!("{first}\n"), input);
}

/// Reads bytes as a file, and as the rows of a BurstGPT trace.
pub fn burst(input: &[u8]) {
    read(input);
    let header = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n";
    read_after(header, input);
}

fn read_after(start: &str, input: &[u8]) {
    read(&[start.as_bytes(), input].concat());
}

fn read(file: &[u8]) {
    let read = Trace::parse("trace", file);
    match &read {
        Ok(trace) => {
            let text = std::str::from_utf8(file).expect("only text is a trace");
            check_trace(trace, text.strip_prefix('\u{feff}').unwrap_or(text));
        }
        Err(error) => check_error(error, file),
    }
    let blank_at_the_end = [file, b"\n \r\n"].concat();
    assert_eq!(read, Trace::parse("trace", &blank_at_the_end));
}

fn check_trace(trace: &Trace, text: &str) {
    let lines: Vec<&str> = text
        .split('\n')
        .map(str::trim)
        .filter(|line| !line.is_empty())
        .collect();
    let header_lines = usize::from(trace.format != Format::Mooncake);
    assert_eq!(trace.requests.len(), lines.len() - header_lines);

    let longest = match trace.format {
        // From 1970 to the end of 9999, and a day for the time zone.
        Format::Azure => Duration::from_secs(8030 * 366 * 86_400),
        Format::Mooncake | Format::BurstGpt => Duration::from_secs(1_000_000_000),
        other => panic!("a file is never {other}"),
    };
    assert_eq!(trace.requests[0].arrival, Duration::ZERO);
    assert!(trace.requests.is_sorted_by_key(|request| request.arrival));
    let mut held_bytes = trace.requests.capacity() * size_of_val(&trace.requests[0]);
    for request in &trace.requests {
        assert!(request.arrival <= longest, "{request:?}");
        assert!(request.input_tokens <= MAX_REQUEST_TOKENS, "{request:?}");
        assert!(request.output_tokens <= MAX_REQUEST_TOKENS, "{request:?}");
        let ids = request.prefix.len();
        let blocks = request.input_tokens.div_ceil(PREFIX_TOKENS) as usize;
        assert!(ids == 0 || ids == blocks, "{request:?}");
        held_bytes += request.prefix.capacity() * size_of::<u64>();
        held_bytes += request.model.as_ref().map_or(0, String::capacity);
    }
    assert!(
        held_bytes <= 1024 + HELD_PER_BYTE * text.len(),
        "{held_bytes} bytes held of a file of {}",
        text.len()
    );
    // Without quotes a line of CSV needs no parser.
    if header_lines == 1 && !text.contains('"') {
        let mut read: Vec<(u32, u32)> = trace
            .requests
            .iter()
            .map(|request| (request.input_tokens, request.output_tokens))
            .collect();
        let mut split = split_rows(trace.format, &lines);
        read.sort_unstable();
        split.sort_unstable();
        assert_eq!(read, split, "a row is read as it stands there");
    }
}

/// Tokens in and out of each row, by cutting it at its commas.
fn split_rows(format: Format, lines: &[&str]) -> Vec<(u32, u32)> {
    let names = match format {
        Format::Azure => ["ContextTokens", "GeneratedTokens"],
        _ => ["Request tokens", "Response tokens"],
    };
    let places = names.map(|name| {
        let mut columns = lines[0].trim_start_matches('\u{feff}').split(',');
        columns
            .position(|column| column.trim().eq_ignore_ascii_case(name))
            .expect("a trace was read, so that its columns are there")
    });
    let tokens = |row: &str, place| {
        let field = row.trim_start_matches('\u{feff}').split(',').nth(place);
        let tokens = field.and_then(|field| field.trim().parse().ok());
        tokens.expect("a request was read, so that its tokens are there")
    };
    let rows = lines[1..].iter();
    rows.map(|row| (tokens(row, places[0]), tokens(row, places[1])))
        .collect()
}

fn check_error(error: &TraceError, file: &[u8]) {
    assert_eq!(error.file, "trace");
    let chars = error.to_string().chars().count();
    assert!(chars <= MAX_MESSAGE_CHARS, "{chars} characters: {error}");
    let mut lines = file.split(|&byte| byte == b'\n');
    let line = error.line.checked_sub(1).and_then(|index| lines.nth(index));
    let line = line.expect("the line is one of the file's");
    let Some(column) = &error.column else {
        return;
    };
    let seen = line.strip_prefix("\u{feff}".as_bytes()).unwrap_or(line);
    let seen = String::from_utf8_lossy(if error.line == 1 { seen } else { line });
    assert!(column.number >= 1, "{error}");
    match &error.problem {
        Problem::NotUtf8 => {
            // Counted in bytes: characters are what is missing.
            let bytes = &line[..=column.number - 1];
            assert!(std::str::from_utf8(bytes).is_err(), "{error}");
            assert!(std::str::from_utf8(&bytes[..bytes.len() - 1]).is_ok());
        }
        Problem::Json { .. } => {
            assert!(column.number <= seen.chars().count(), "{error}");
        }
        Problem::Value { found, .. } => {
            assert!(found.chars().count() <= 82, "{error}");
            let name = column.name.as_ref().expect("a value has a name");
            let quoted = format!("\"{name}\"");
            let from_column: String = seen.chars().skip(column.number - 1).collect();
            // In JSON the column is where the name stands, if it does.
            if is_json(file) && seen.contains(&quoted) {
                assert!(from_column.starts_with(&quoted), "{error}");
            }
        }
        _ => {}
    }
}

fn is_json(file: &[u8]) -> bool {
    let text = String::from_utf8_lossy(file);
    let text = text.strip_prefix('\u{feff}').unwrap_or(&text);
    text.trim_start().starts_with('{')
}

//! The public traces, where they lie beside the checkout: `../shared/data` seen from the root.

use std::{fs, path::PathBuf};

use kvcached_replay::{Format, Trace};

/// The file's bytes, or `None`, said aloud, where the data is not there.
#[expect(clippy::print_stdout, reason = "a skipped test says so")]
fn public(name: &str) -> Option<Vec<u8>> {
    let path: PathBuf = [env!("CARGO_MANIFEST_DIR"), "../../../shared/data", name]
        .iter()
        .collect();
    match fs::read(&path) {
        Ok(bytes) => Some(bytes),
        Err(error) => {
            println!("skipped: {}: {error}", path.display());
            None
        }
    }
}

#[test]
fn the_azure_conversation_trace_is_read_whole() {
    let Some(bytes) = public("azure-llm-2023-conv.csv") else {
        return;
    };
    let trace = Trace::parse("azure", &bytes).expect("a public trace");
    assert_eq!(
        (trace.format, trace.requests.len()),
        (Format::Azure, 19_366)
    );
    let last = trace.requests.last().expect("not empty");
    assert_eq!(
        (
            last.arrival.as_secs(),
            last.input_tokens,
            last.output_tokens
        ),
        (3501, 197, 183)
    );
    let tokens: u64 = trace
        .requests
        .iter()
        .map(|r| u64::from(r.input_tokens))
        .sum();
    assert_eq!(tokens, 22_361_870);
}

#[test]
fn the_mooncake_conversation_trace_is_read_whole() {
    let Some(bytes) = public("mooncake-fast25-conversation.jsonl") else {
        return;
    };
    let trace = Trace::parse("mooncake", &bytes).expect("a public trace");
    assert_eq!(
        (trace.format, trace.requests.len()),
        (Format::Mooncake, 12_031)
    );
    assert!(
        trace.requests[..8].iter().all(|r| r.prefix[0] == 0),
        "they share a system prompt"
    );
    assert_eq!(
        trace
            .requests
            .last()
            .expect("not empty")
            .arrival
            .as_millis(),
        3_536_999
    );
}

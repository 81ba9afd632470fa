//! Messages: what is read of any bytes can be said again, and is the same.

use kvcached_tp_ipc::FrameDecoder;
use kvcached_tp_ipc::wire::{
    self, Command, Verb, push_hello, push_message, push_refusal, push_request, push_welcome,
};

/// Reads a payload as either side's hello.
pub fn greeting(payload: &[u8]) {
    if let Ok(hello) = wire::read_hello(payload) {
        let again = payloads(|out| push_hello(out, &hello));
        assert_eq!(again.len(), 1);
        assert_eq!(wire::read_hello(&again[0]), Ok(hello));
    }
    if let Ok(greeting) = wire::read_greeting(payload) {
        let again = payloads(|out| match &greeting {
            Ok(hello) => push_welcome(out, hello),
            Err(refusal) => push_refusal(out, refusal),
        });
        assert_eq!(again.len(), 1);
        assert_eq!(wire::read_greeting(&again[0]), Ok(greeting));
    }
}

/// Reads a payload as a request.
pub fn request(payload: &[u8]) {
    let Ok(request) = wire::read_request(payload) else {
        return;
    };
    let verb = match &request.command {
        // A part of a batch is said again only with the others.
        Command::Map { more: true, .. }
        | Command::Prepare { more: true, .. }
        | Command::Resync { more: true, .. } => return,
        Command::Map { runs, .. } => Verb::Map(&runs.0),
        Command::Prepare { runs, after, .. } => Verb::Prepare(&runs.0, (*after).into()),
        Command::Resync { runs, after, .. } => Verb::Resync(&runs.0, (*after).into()),
        Command::Commit => Verb::Commit,
        Command::Undo => Verb::Undo,
        Command::Ready => Verb::Ready,
        Command::Headroom => Verb::Headroom,
        Command::Trim => Verb::Trim,
        other => panic!("an unknown command, {other:?}"),
    };
    let again = payloads(|out| push_request(out, request.session, request.sequence, verb));
    let mut again = again.iter().map(|payload| wire::read_request(payload));
    let first = again.next().transpose().expect("what is said is read");
    assert_eq!(first, Some(request.clone()));
    assert!(again.next().is_none(), "it came in one frame");
}

/// Reads a payload as what a worker says.
pub fn message(payload: &[u8]) {
    let Ok(message) = wire::read_message(payload) else {
        return;
    };
    let again = payloads(|out| push_message(out, &message));
    assert_eq!(again.len(), 1);
    assert_eq!(wire::read_message(&again[0]), Ok(message));
}

/// The payloads of the frames that `write` writes.
pub(super) fn payloads(write: impl FnOnce(&mut Vec<u8>)) -> Vec<Vec<u8>> {
    let mut bytes = Vec::new();
    write(&mut bytes);
    let mut decoder = FrameDecoder::default();
    decoder.feed(&bytes);
    let mut payloads = Vec::new();
    while let Some(payload) = decoder.next_frame().expect("frames are well written") {
        payloads.push(payload.to_vec());
    }
    assert!(!decoder.is_partial(), "frames are written whole");
    payloads
}

//! Bytes that arrive as they were sent, and bytes that nobody sent.

use kvcached_mapper::{Cause, Epoch, MapError, NotReady, Readiness, Resynced};
use proptest::prelude::*;

use super::convert::LONG_PART;
use super::*;
use crate::FrameDecoder;

fn hello() -> Hello {
    Hello {
        instance: "llama".parse().unwrap(),
        stage: Stage(1),
        rank: Rank(3),
        pool: PoolId(2),
        geometry: GeometryDigest::new(100, 2 << 20, 64 << 10),
        session: SessionId(7),
    }
}

fn run(first: u32, count: u32) -> PageRun {
    PageRun::new(PageId(first), count).unwrap()
}

fn a_frame_full() -> u32 {
    u32::try_from(MAX_RUNS_PER_FRAME).unwrap()
}

fn payloads(bytes: &[u8]) -> Vec<Vec<u8>> {
    let mut decoder = FrameDecoder::default();
    decoder.feed(bytes);
    let mut payloads = Vec::new();
    while let Some(payload) = decoder.next_frame().unwrap() {
        payloads.push(payload.to_vec());
    }
    assert!(!decoder.is_partial());
    payloads
}

fn only_payload(write: impl FnOnce(&mut Vec<u8>)) -> Vec<u8> {
    let mut bytes = Vec::new();
    write(&mut bytes);
    let mut payloads = payloads(&bytes);
    assert_eq!(payloads.len(), 1);
    payloads.remove(0)
}

#[test]
fn hellos_arrive_as_they_were_sent() {
    let sent = only_payload(|out| push_hello(out, &hello()));
    assert_eq!(read_hello(&sent), Ok(hello()));
    let welcome = only_payload(|out| push_welcome(out, &hello()));
    assert_eq!(read_greeting(&welcome), Ok(Ok(hello())));
    let refusal = Refusal::Pool {
        wanted: 3,
        worker: vec![0, 1],
    };
    let refused = only_payload(|out| push_refusal(out, &refusal));
    assert_eq!(read_greeting(&refused), Ok(Err(refusal)));
}

#[test]
fn another_version_is_told_from_the_first_bytes_whatever_follows() {
    let mut sent = only_payload(|out| push_hello(out, &hello()));
    sent[4..6].copy_from_slice(&9u16.to_le_bytes());
    sent.truncate(6);
    sent.extend_from_slice(b"whatever version nine says");
    assert_eq!(read_hello(&sent), Err(WireError::Version { theirs: 9 }));
    assert_eq!(read_greeting(&sent), Err(WireError::Version { theirs: 9 }));
    assert_eq!(read_hello(b"GET / HTTP/1.1"), Err(WireError::Magic));
    assert_eq!(read_hello(b"KV"), Err(WireError::Magic));
    assert_eq!(
        read_hello(b"KVtp"),
        Err(WireError::Malformed { message: "version" })
    );
}

#[test]
fn geometries_agree_when_a_page_number_means_the_same_blocks() {
    let whole = GeometryDigest::new(100, 2 << 20, 64 << 10);
    // A stage with half the layers: half the bytes, the same blocks.
    assert_eq!(whole, GeometryDigest::new(100, 1 << 20, 32 << 10));
    assert_ne!(whole, GeometryDigest::new(101, 2 << 20, 64 << 10));
    assert_ne!(whole, GeometryDigest::new(100, 2 << 20, 32 << 10));
    assert_eq!(whole.to_string(), "100 pages of 32 blocks");
    let uneven = GeometryDigest::new(6, 2 << 20, 3 << 19);
    assert_eq!(uneven.to_string(), "6 pages of 4/3 blocks");
}

#[test]
fn a_run_that_is_none_is_malformed() {
    // Zero pages; and a run past the last page id.
    for (first, count) in [(0u32, 0u32), (u32::MAX, 1), (5, u32::MAX)] {
        let command = (SessionId(1), 1u64, 0u8, vec![(first, count)], false);
        let payload = only_payload(|out| push_frame(out, |payload| write(payload, &command)));
        let refused = Err(WireError::Malformed { message: "request" });
        assert_eq!(read_request(&payload), refused, "{first} {count}");
    }
    // The same shape with a good run passes, so the test above tests what it says.
    let good = (SessionId(1), 1u64, 0u8, vec![(5u32, 1u32)], false);
    let payload = only_payload(|out| push_frame(out, |payload| write(payload, &good)));
    assert!(read_request(&payload).is_ok());
}

#[test]
fn a_batch_too_long_for_a_frame_is_cut_into_parts_of_one_transaction() {
    let runs: Vec<PageRun> = (0..=2 * a_frame_full())
        .map(|i| run(u32::MAX - 2 - i, 1))
        .collect();
    let mut bytes = Vec::new();
    push_request(&mut bytes, SessionId(u64::MAX), u64::MAX, Verb::Map(&runs));
    let mut gathered = Vec::new();
    let mut mores = Vec::new();
    for payload in payloads(&bytes) {
        let request = read_request(&payload).unwrap();
        assert_eq!(request.sequence, u64::MAX);
        let Command::Map { runs, more } = request.command else {
            panic!("{request:?}")
        };
        gathered.extend_from_slice(&runs.0);
        mores.push(more);
    }
    assert_eq!(gathered, runs);
    assert_eq!(mores, [true, true, false]);
}

#[test]
fn answers_become_replies_that_keep_what_the_caller_acts_on() {
    let doubt = vec![run(1, 2)];
    let uncertain = MapError {
        cause: Cause::Vmm(kvcached_vmm::VmmError::NotMapped { offset: 4 }),
        uncertain: doubt.clone(),
    };
    let reason = "no mapping begins at offset 4".to_owned();
    assert_eq!(
        Reply::failed(uncertain),
        Reply::Failed {
            failure: Failure::Vmm { reason },
            doubt: Part::Runs(Runs(doubt.into()))
        }
    );
    let in_flight = Cause::InFlight { epoch: Epoch(7) };
    for (cause, failure) in [
        (Cause::OutOfMemory { at: None }, Failure::OutOfMemory),
        (in_flight, Failure::InFlight { epoch: 7 }),
    ] {
        let doubt = Part::Nothing;
        let reply = Reply::failed(MapError::clean(cause));
        assert_eq!(reply, Reply::Failed { failure, doubt });
    }

    let missing = NotReady {
        stage: Stage(9),
        rank: Rank(9),
        reason: "tensors are not there".to_owned(),
    };
    let reply = Reply::readiness(Ok(Readiness::NotReady(vec![missing])));
    assert_eq!(
        reply,
        Reply::NotReady {
            reason: "tensors are not there".to_owned()
        }
    );
}

#[test]
fn only_runs_of_the_batch_are_ever_meant() {
    let batch = [run(0, 2), run(4, 1), run(9, 3)];
    let runs = |runs: &[PageRun]| Part::Runs(Runs(runs.to_vec().into()));
    assert_eq!(Part::Nothing.of(&batch), []);
    assert_eq!(runs(&[run(4, 1)]).of(&batch), [run(4, 1)]);
    assert_eq!(Part::Whole.of(&batch), batch);
    // Whoever names something else may mean anything.
    assert_eq!(runs(&[run(4, 1), run(5, 1)]).of(&batch), batch);
}

#[test]
fn a_digest_tells_sets_of_runs_apart() {
    let digest = |runs: &[PageRun]| RunsDigest::new(runs.iter().copied());
    let sets = [
        &[][..],
        &[run(0, 1)],
        &[run(0, 2)],
        &[run(1, 1)],
        &[run(0, 1), run(1, 1)],
    ];
    for (index, set) in sets.iter().enumerate() {
        for (other, other_set) in sets.iter().enumerate() {
            assert_eq!(digest(set) == digest(other_set), index == other);
        }
    }
    // The two sides may be built by different compilers, so the numbers are fixed: FNV-1a,
    // whose offset basis is published.
    assert_eq!(digest(&[]), RunsDigest(0xcbf2_9ce4_8422_2325));
    let bytes = [0, 0, 0, 0, 1, 0, 0, 0];
    let fnv = |hash: u64, byte: &u64| (hash ^ byte).wrapping_mul(0x0100_0000_01b3);
    let expected = bytes.iter().fold(0xcbf2_9ce4_8422_2325, fnv);
    assert_eq!(digest(&[run(0, 1)]), RunsDigest(expected));
}

#[test]
fn a_reply_fits_a_frame_whatever_went_wrong() {
    let runs: Vec<PageRun> = (0..=a_frame_full()).map(|i| run(i, 1)).collect();
    let error = |uncertain: &[PageRun]| MapError {
        cause: Cause::Vmm(kvcached_vmm::VmmError::Unavailable {
            reason: "ü".repeat(4000),
        }),
        uncertain: uncertain.to_vec(),
    };
    let fits = |reply: Reply| {
        let message = WorkerMessage::Reply {
            sequence: u64::MAX,
            reply,
        };
        let payload = only_payload(|out| push_message(out, &message));
        assert_eq!(read_message(&payload), Ok(message));
    };
    for (uncertain, whole) in [(&runs[..], true), (&runs[1..], false)] {
        let reply = Reply::failed(error(uncertain));
        let Reply::Failed { doubt, .. } = &reply else {
            panic!("{reply:?}")
        };
        assert_eq!(*doubt == Part::Whole, whole);
        fits(reply);
    }
    let half = &runs[..LONG_PART];
    for (remade, in_doubt) in [(half, half), (&runs, half), (half, &runs)] {
        let resynced = Resynced {
            remade: remade.to_vec(),
            in_doubt: in_doubt.to_vec(),
        };
        fits(Reply::resynced(Ok(resynced), &runs));
    }
}

proptest! {
    #[test]
    fn requests_arrive_as_they_were_sent(
        pairs in prop::collection::vec((0u32..1000, 1u32..64), 1..20),
        unmap: bool,
        epoch: Option<u64>,
        device: bool,
        session: u64,
        sequence: u64,
    ) {
        let runs: Vec<PageRun> = pairs.into_iter().map(|(f, c)| run(f, c)).collect();
        let after = After { epoch: epoch.map(Epoch), device };
        let verb = if unmap { Verb::Prepare(&runs, after) } else { Verb::Map(&runs) };
        let payload =
            only_payload(|out| push_request(out, SessionId(session), sequence, verb));
        let runs = Runs(runs.clone().into());
        let command = if unmap {
            Command::Prepare { runs, after: after.into(), more: false }
        } else {
            Command::Map { runs, more: false }
        };
        let request = Request { session: SessionId(session), sequence, command };
        prop_assert_eq!(read_request(&payload), Ok(request));
    }

    #[test]
    fn garbage_is_an_error_and_never_a_panic(
        bytes in prop::collection::vec(any::<u8>(), 0..200),
        cut in 0usize..100,
    ) {
        let _ = (read_hello(&bytes), read_greeting(&bytes), read_request(&bytes));
        let _ = read_message(&bytes);
        let mut hello_bytes = only_payload(|out| push_hello(out, &hello()));
        // Cut short or with something behind it, a good hello is none.
        if cut > 0 && cut < hello_bytes.len() {
            prop_assert!(read_hello(&hello_bytes[..cut]).is_err());
        }
        hello_bytes.push(0);
        prop_assert!(read_hello(&hello_bytes).is_err());
    }
}

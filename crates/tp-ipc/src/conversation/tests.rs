//! The worker's side, frame by frame.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use kvcached_mapper::{
    After, Cause, MapError, Mapper, PageId, PageRun, Rank, RankMapper, Readiness, Resynced, Stage,
};
use proptest::prelude::*;

use super::*;
use crate::wire::{GeometryDigest, RunsDigest, Verb, read_greeting, read_message};
use crate::{FrameDecoder, push_frame};

/// Remembers the batches that it was given.
#[derive(Debug, Default)]
struct Recorder(Mutex<Vec<(&'static str, Vec<PageRun>)>>);

impl Mapper for Recorder {
    fn map(&self, runs: &[PageRun]) -> Result<(), MapError> {
        self.called("map", runs);
        Ok(())
    }

    fn unmap_after(&self, runs: &[PageRun], _: After) -> Result<(), MapError> {
        self.called("unmap", runs);
        Ok(())
    }

    fn headroom(&self) -> Option<u32> {
        None
    }

    fn ready(&self) -> Result<Readiness, MapError> {
        Ok(Readiness::Ready)
    }
}

impl Recorder {
    fn called(&self, call: &'static str, runs: &[PageRun]) {
        self.0.lock().unwrap().push((call, runs.to_vec()));
    }

    /// What was called since this was last asked.
    fn calls(&self) -> Vec<(&'static str, Vec<PageRun>)> {
        std::mem::take(&mut *self.0.lock().unwrap())
    }
}

impl RankMapper for Recorder {
    fn prepare_unmap(&self, runs: &[PageRun], _: After) -> Result<(), MapError> {
        self.called("prepare", runs);
        Ok(())
    }

    fn commit_unmap(&self, runs: &[PageRun]) {
        self.called("commit", runs);
    }

    fn abort_unmap(&self, runs: &[PageRun]) -> Result<(), MapError> {
        self.called("abort", runs);
        Ok(())
    }

    fn resync_after(&self, wanted: &[PageRun], _: After) -> Result<Resynced, MapError> {
        self.called("resync", wanted);
        Ok(Resynced::default())
    }

    fn mapped(&self) -> Vec<PageRun> {
        Vec::new()
    }
}

fn hello() -> Hello {
    Hello {
        instance: "llama".parse().unwrap(),
        stage: Stage(0),
        rank: Rank(1),
        pool: PoolId(0),
        geometry: GeometryDigest::new(100, 4, 1),
        session: SessionId(5),
    }
}

fn rank() -> (ServedRank, Arc<Recorder>) {
    let recorder = Arc::new(Recorder::default());
    let Hello {
        instance,
        stage,
        rank,
        pool,
        geometry,
        ..
    } = hello();
    let served = ServedPool {
        pool,
        geometry,
        mapper: recorder.clone(),
    };
    (ServedRank::new(instance, stage, rank, [served]), recorder)
}

fn runs(count: u32) -> Vec<PageRun> {
    (0..count)
        .map(|page| PageRun::new(PageId(page), 1).unwrap())
        .collect()
}

fn payloads(bytes: &[u8]) -> Vec<Vec<u8>> {
    let mut decoder = FrameDecoder::default();
    decoder.feed(bytes);
    let mut payloads = Vec::new();
    while let Some(payload) = decoder.next_frame().unwrap() {
        payloads.push(payload.to_vec());
    }
    payloads
}

fn framed(write: impl FnOnce(&mut Vec<u8>)) -> Vec<u8> {
    let mut bytes = Vec::new();
    write(&mut bytes);
    payloads(&bytes).remove(0)
}

/// A conversation that has greeted, in this session.
fn welcomed(rank: &mut ServedRank, session: u64) -> Conversation {
    let hello = Hello {
        session: SessionId(session),
        ..hello()
    };
    let mut conversation = Conversation::default();
    let payload = framed(|out| wire::push_hello(out, &hello));
    let mut out = Vec::new();
    assert_eq!(conversation.handle_frame(rank, &payload, &mut out), Ok(()));
    assert_eq!(read_greeting(&payloads(&out)[0]), Ok(Ok(hello)));
    conversation
}

/// The same, having been told under number 1 to have nothing.
fn greeted(rank: &mut ServedRank) -> Conversation {
    let mut conversation = welcomed(rank, 5);
    let resynced = Reply::Resynced {
        digest: RunsDigest::new([]),
        remade: wire::Part::Nothing,
        in_doubt: wire::Runs(Vec::new().into()),
    };
    assert_eq!(
        told(&mut conversation, rank, 1, Verb::Resync(&[], After::DEVICE)),
        [resynced]
    );
    conversation
}

fn ask(
    conversation: &mut Conversation,
    rank: &mut ServedRank,
    payload: &[u8],
) -> (Result<(), ConversationEnd>, Vec<WorkerMessage>) {
    let mut out = Vec::new();
    let result = conversation.handle_frame(rank, payload, &mut out);
    (
        result,
        payloads(&out)
            .iter()
            .map(|payload| read_message(payload).unwrap())
            .collect(),
    )
}

fn request(session: u64, sequence: u64, verb: Verb<'_>) -> Vec<u8> {
    framed(|out| wire::push_request(out, SessionId(session), sequence, verb))
}

/// The replies to a good request of session 5.
fn told(
    conversation: &mut Conversation,
    rank: &mut ServedRank,
    number: u64,
    verb: Verb<'_>,
) -> Vec<Reply> {
    let (result, messages) = ask(conversation, rank, &request(5, number, verb));
    assert_eq!(result, Ok(()));
    let reply = |message| match message {
        WorkerMessage::Reply { sequence, reply } => {
            assert_eq!(sequence, number);
            reply
        }
        other => panic!("{other:?}"),
    };
    messages.into_iter().map(reply).collect()
}

#[expect(
    clippy::disallowed_methods,
    reason = "any moment will do as the first one"
)]
fn start() -> Instant {
    Instant::now()
}

#[test]
fn a_hello_for_somebody_else_is_refused_and_both_sides_are_named() {
    type Change = fn(&mut Hello);
    let rows: [(Change, &str); 5] = [
        (
            |hello| hello.instance = "other".parse().unwrap(),
            "the coordinator belongs to instance other, the worker to llama",
        ),
        (
            |hello| hello.rank = Rank(2),
            "the coordinator wants stage 0, rank 2, the worker is stage 0, rank 1",
        ),
        (
            |hello| hello.stage = Stage(3),
            "the coordinator wants stage 3, rank 1, the worker is stage 0, rank 1",
        ),
        (
            |hello| hello.pool = PoolId(9),
            "the coordinator wants pool 9, the worker has pools [0]",
        ),
        (
            |hello| hello.geometry = GeometryDigest::new(100, 8, 1),
            "the coordinator has 100 pages of 8 blocks in pool 0, the worker 100 pages of 4 blocks",
        ),
    ];
    for (change, words) in rows {
        let (mut rank, _) = rank();
        let mut hello = hello();
        change(&mut hello);
        assert_eq!(refused(&mut rank, &hello).to_string(), words);
    }
}

/// What a rank answers to a hello that it does not welcome.
fn refused(rank: &mut ServedRank, hello: &Hello) -> Refusal {
    let payload = framed(|out| wire::push_hello(out, hello));
    let mut out = Vec::new();
    let end = Conversation::default().handle_frame(rank, &payload, &mut out);
    let Ok(Err(refusal)) = read_greeting(&payloads(&out)[0]) else {
        panic!("{hello:?} was welcomed")
    };
    assert_eq!(end, Err(ConversationEnd::Refused(refusal.clone())));
    refusal
}

#[test]
fn another_version_and_no_hello_at_all_are_refused() {
    let mut newer = framed(|out| wire::push_hello(out, &hello()));
    newer[4] = 77;
    let request = request(5, 1, Verb::Ready);
    for (payload, words) in [
        (
            &newer[..],
            "the coordinator speaks protocol version 77, the worker version 3",
        ),
        (
            b"GET / HTTP/1.1",
            "the coordinator did not say hello: does not begin as this protocol does",
        ),
        (
            &request,
            "the coordinator did not say hello: does not begin as this protocol does",
        ),
    ] {
        let (mut rank, _) = rank();
        let mut out = Vec::new();
        let end = Conversation::default().handle_frame(&mut rank, payload, &mut out);
        assert!(matches!(end, Err(ConversationEnd::Refused(_))));
        let Ok(Err(refusal)) = read_greeting(&payloads(&out)[0]) else {
            panic!("{words}")
        };
        assert_eq!(refusal.to_string(), words);
    }
}

/// Two engines that meet by mistake: the one that runs is not disturbed. One that is gone makes
/// room for a later one, and is not let in again after it.
#[test]
fn a_pool_has_one_coordinator_and_never_an_earlier_one() {
    let (mut rank, recorder) = rank();
    let in_session = |session| Hello {
        session: SessionId(session),
        ..hello()
    };
    let mut first = greeted(&mut rank);
    let taken = Refusal::Taken { pool: 0 };
    assert_eq!(refused(&mut rank, &in_session(6)), taken);
    let superseded = Refusal::Superseded { pool: 0 };
    assert_eq!(refused(&mut rank, &in_session(4)), superseded);

    recorder.calls();
    let runs = runs(1);
    let done = told(&mut first, &mut rank, 2, Verb::Map(&runs));
    assert_eq!(done, [Reply::Done]);
    assert_eq!(recorder.calls(), [("map", runs)]);
    first.end(&mut rank, start());
    let second = welcomed(&mut rank, 6);
    second.end(&mut rank, start());
    assert_eq!(refused(&mut rank, &in_session(5)), superseded);
}

/// The same coordinator connects again while its old connection still has something to say.
#[test]
fn of_two_conversations_of_one_session_the_later_is_listened_to() {
    let (mut rank, recorder) = rank();
    let mut old = greeted(&mut rank);
    let mut new = greeted(&mut rank);
    recorder.calls();
    let late = request(5, 9, Verb::Map(&runs(1)));
    let (result, messages) = ask(&mut old, &mut rank, &late);
    assert_eq!(result, Err(ConversationEnd::Replaced));
    assert_eq!(messages, []);
    old.end(&mut rank, start());
    assert_eq!(recorder.calls(), []);
    let ready = told(&mut new, &mut rank, 2, Verb::Ready);
    assert_eq!(ready, [Reply::Ready]);
}

#[test]
fn nothing_is_done_before_the_first_resync() {
    let runs = runs(2);
    for verb in [
        Verb::Map(&runs),
        Verb::Prepare(&runs, After::DEVICE),
        Verb::Commit,
        Verb::Undo,
        Verb::Ready,
        Verb::Headroom,
        Verb::Trim,
    ] {
        let (mut rank, recorder) = rank();
        let mut conversation = welcomed(&mut rank, 5);
        let (result, _) = ask(&mut conversation, &mut rank, &request(5, 1, verb));
        assert!(
            matches!(result, Err(ConversationEnd::Violation { .. })),
            "{verb:?}"
        );
        assert_eq!(recorder.calls(), []);
    }
}

/// A rank that begins with nothing, and has room for so many runs, attempt after attempt.
#[derive(Debug)]
struct Cramped {
    mapped: Mutex<Vec<PageRun>>,
    room: Mutex<Vec<usize>>,
}

impl Mapper for Cramped {
    fn map(&self, _: &[PageRun]) -> Result<(), MapError> {
        Ok(())
    }

    fn unmap_after(&self, _: &[PageRun], _: After) -> Result<(), MapError> {
        Ok(())
    }

    fn headroom(&self) -> Option<u32> {
        None
    }

    fn ready(&self) -> Result<Readiness, MapError> {
        Ok(Readiness::Ready)
    }
}

impl RankMapper for Cramped {
    fn prepare_unmap(&self, _: &[PageRun], _: After) -> Result<(), MapError> {
        Ok(())
    }

    fn commit_unmap(&self, _: &[PageRun]) {}

    fn abort_unmap(&self, _: &[PageRun]) -> Result<(), MapError> {
        Ok(())
    }

    fn resync_after(&self, wanted: &[PageRun], _: After) -> Result<Resynced, MapError> {
        let room = self.room.lock().unwrap().remove(0);
        let mut mapped = self.mapped.lock().unwrap();
        let before = std::mem::take(&mut *mapped);
        mapped.extend(wanted.iter().take(room));
        if room < wanted.len() {
            return Err(MapError::clean(Cause::OutOfMemory { at: None }));
        }
        let remade = wanted.iter().filter(|run| !before.contains(run));
        Ok(Resynced {
            remade: remade.copied().collect(),
            in_doubt: Vec::new(),
        })
    }

    fn mapped(&self) -> Vec<PageRun> {
        self.mapped.lock().unwrap().clone()
    }
}

/// Else an engine would read what is empty, and not know.
#[test]
fn what_was_remade_is_told_until_the_coordinator_has_heard_it() {
    let hello = hello();
    let served = ServedPool {
        pool: hello.pool,
        geometry: hello.geometry,
        mapper: Arc::new(Cramped {
            mapped: Mutex::default(),
            room: Mutex::new(vec![2, 3, 3, 3]),
        }),
    };
    let mut rank = ServedRank::new(hello.instance, hello.stage, hello.rank, [served]);
    let wanted = runs(3);
    let resync = |rank: &mut ServedRank, number| {
        // Nobody hears the reply: the connection ends, and there is another.
        let mut conversation = welcomed(rank, 5);
        let replies = told(
            &mut conversation,
            rank,
            number,
            Verb::Resync(&wanted, After::DEVICE),
        );
        (conversation, replies)
    };
    let remade = |remade| Reply::Resynced {
        digest: RunsDigest::new(runs(3)),
        remade,
        in_doubt: wire::Runs(Vec::new().into()),
    };
    let all = || wire::Part::Runs(wire::Runs(runs(3).into()));
    let (_, replies) = resync(&mut rank, 1);
    assert!(matches!(replies[..], [Reply::Failed { .. }]), "no room");
    for number in [2, 3] {
        assert_eq!(resync(&mut rank, number).1, [remade(all())]);
    }
    let (mut conversation, _) = resync(&mut rank, 3);
    let ready = told(&mut conversation, &mut rank, 4, Verb::Ready);
    assert_eq!(ready, [Reply::Ready]);
    assert_eq!(resync(&mut rank, 5).1, [remade(wire::Part::Nothing)]);
}

/// A request that comes again is answered from memory; one that comes late is not answered.
#[test]
fn a_transaction_is_applied_once() {
    let (mut rank, recorder) = rank();
    let mut it = greeted(&mut rank);
    let runs = runs(3);
    recorder.calls();
    for _ in 0..3 {
        let done = told(&mut it, &mut rank, 2, Verb::Map(&runs));
        assert_eq!(done, [Reply::Done]);
    }
    assert_eq!(recorder.calls(), [("map", runs.clone())]);
    for _ in 0..3 {
        assert_eq!(told(&mut it, &mut rank, 2, Verb::Undo), [Reply::Undone]);
    }
    assert_eq!(recorder.calls(), [("unmap", runs.clone())]);

    let prepare = Verb::Prepare(&runs, After::DEVICE);
    for _ in 0..3 {
        let prepared = told(&mut it, &mut rank, 3, prepare);
        assert_eq!(prepared, [Reply::Prepared]);
    }
    for _ in 0..3 {
        let committed = told(&mut it, &mut rank, 3, Verb::Commit);
        assert_eq!(committed, [Reply::Committed]);
    }
    let calls = [("prepare", runs.clone()), ("commit", runs.clone())];
    assert_eq!(recorder.calls(), calls);

    assert_eq!(told(&mut it, &mut rank, 4, prepare), [Reply::Prepared]);
    for _ in 0..3 {
        assert_eq!(told(&mut it, &mut rank, 4, Verb::Undo), [Reply::Undone]);
    }
    let calls = [("prepare", runs.clone()), ("abort", runs.clone())];
    assert_eq!(recorder.calls(), calls);

    // All of that once more, late.
    for (number, verb) in [
        (2, Verb::Map(&runs)),
        (2, Verb::Undo),
        (3, prepare),
        (3, Verb::Commit),
        (1, Verb::Resync(&[], After::DEVICE)),
    ] {
        assert_eq!(told(&mut it, &mut rank, number, verb), [], "{verb:?}");
    }
    // An undo that overtakes what it undoes makes that late, too.
    assert_eq!(told(&mut it, &mut rank, 7, Verb::Undo), [Reply::Undone]);
    assert_eq!(told(&mut it, &mut rank, 6, Verb::Map(&runs)), []);
    assert_eq!(recorder.calls(), []);
}

/// What no coordinator does that goes by the rules.
#[test]
fn a_transaction_that_contradicts_itself_is_a_violation() {
    let (all, fewer) = (runs(3), runs(2));
    let prepare = Verb::Prepare(&all, After::DEVICE);
    for (first, then) in [
        ((2, Verb::Map(&all)), (2, Verb::Map(&fewer))),
        ((2, Verb::Map(&all)), (2, prepare)),
        ((2, Verb::Map(&all)), (2, Verb::Ready)),
        ((2, Verb::Map(&all)), (2, Verb::Commit)),
        ((2, Verb::Ready), (3, Verb::Commit)),
        ((2, prepare), (3, Verb::Map(&all))),
        ((2, prepare), (3, Verb::Ready)),
    ] {
        let (mut rank, recorder) = rank();
        let mut it = greeted(&mut rank);
        assert_eq!(told(&mut it, &mut rank, first.0, first.1).len(), 1);
        recorder.calls();
        let (result, _) = ask(&mut it, &mut rank, &request(5, then.0, then.1));
        let violated = matches!(result, Err(ConversationEnd::Violation { .. }));
        assert!(violated, "{first:?} {then:?}");
        assert_eq!(recorder.calls(), []);
    }
}

#[test]
fn what_nobody_comes_back_for_is_released_after_the_bound() {
    let (rank, recorder) = rank();
    let bound = Duration::from_secs(5);
    let mut rank = rank.with_orphan_timeout(bound);
    let now = start();
    assert_eq!(rank.poll_timeout(), None);
    let it = greeted(&mut rank);
    assert_eq!(rank.poll_timeout(), None);
    it.end(&mut rank, now);
    assert_eq!(rank.poll_timeout(), Some(now + bound));

    // Back in time: nothing is released, then or later.
    recorder.calls();
    let it = welcomed(&mut rank, 5);
    rank.handle_timeout(now + bound);
    assert_eq!((rank.poll_timeout(), recorder.calls()), (None, Vec::new()));

    it.end(&mut rank, now);
    rank.handle_timeout(now + bound - Duration::from_millis(1));
    assert_eq!(recorder.calls(), []);
    rank.handle_timeout(now + bound);
    assert_eq!(recorder.calls(), [("resync", Vec::new())]);
    assert_eq!(rank.poll_timeout(), None);
}

#[test]
fn a_rank_that_could_not_begin_says_so() {
    let Hello {
        instance,
        stage,
        rank,
        ..
    } = hello();
    let mut rank = ServedRank::unable(instance, stage, rank, "no device".to_owned());
    assert_eq!(
        refused(&mut rank, &hello()).to_string(),
        "the worker cannot serve: no device"
    );
}

#[test]
fn a_batch_in_parts_is_done_once_and_whole() {
    let (mut rank, recorder) = rank();
    let mut conversation = greeted(&mut rank);
    recorder.calls();
    let part = |runs: &[PageRun], more: bool| {
        // As `push_request` cuts a batch, only sooner.
        let command = Command::Map {
            runs: wire::Runs(runs.into()),
            more,
        };
        let envelope = (SessionId(5), 8u64, command);
        framed(|out| {
            push_frame(out, |payload| {
                payload.extend(postcard::to_stdvec(&envelope).unwrap());
            });
        })
    };
    let all = runs(6);
    for (index, first) in [0, 2].into_iter().enumerate() {
        let asked = ask(
            &mut conversation,
            &mut rank,
            &part(&all[first..first + 2], true),
        );
        assert_eq!(asked, (Ok(()), Vec::new()), "part {index}");
        assert!(conversation.is_unfinished());
    }
    assert_eq!(recorder.calls(), []);
    let (result, messages) = ask(&mut conversation, &mut rank, &part(&all[4..], false));
    assert_eq!(result, Ok(()));
    assert_eq!(
        messages,
        [WorkerMessage::Reply {
            sequence: 8,
            reply: Reply::Done
        }]
    );
    assert_eq!(recorder.calls(), [("map", all.clone())]);
    assert!(!conversation.is_unfinished());

    // Neither may another request come between its parts, nor may it have more than can be.
    let between = request(5, 9, Verb::Ready);
    let too_much: Vec<PageRun> = runs(101);
    for parts in [
        [part(&all, true), between],
        [part(&all, true), part(&too_much, true)],
    ] {
        let (mut rank, recorder) = self::rank();
        let mut conversation = greeted(&mut rank);
        recorder.calls();
        assert_eq!(ask(&mut conversation, &mut rank, &parts[0]).0, Ok(()));
        let (result, messages) = ask(&mut conversation, &mut rank, &parts[1]);
        assert!(matches!(result, Err(ConversationEnd::Violation { .. })));
        assert!(matches!(messages[..], [WorkerMessage::Violation { .. }]));
        assert_eq!(recorder.calls(), []);
    }
}

#[test]
fn a_request_of_another_session_changes_nothing() {
    for session in [4, 6] {
        let (mut rank, recorder) = rank();
        let mut conversation = greeted(&mut rank);
        recorder.calls();
        let map = request(session, 3, Verb::Map(&runs(1)));
        let (result, _) = ask(&mut conversation, &mut rank, &map);
        assert!(matches!(result, Err(ConversationEnd::Violation { .. })));
        assert_eq!(recorder.calls(), []);
    }
}

proptest! {
    /// Bytes that nobody meant: answered, and over, and nothing was done.
    #[test]
    fn a_malformed_frame_changes_nothing(
        garbage in prop::collection::vec(any::<u8>(), 1..100),
        flips in prop::collection::vec((any::<prop::sample::Index>(), 1u8..), 1..4),
    ) {
        let (mut rank, recorder) = rank();
        let mut conversation = greeted(&mut rank);
        recorder.calls();
        let mut request = request(5, 2, Verb::Map(&runs(5)));
        for (index, bits) in flips {
            let at = index.index(request.len());
            request[at] ^= bits;
        }
        for payload in [garbage, request] {
            let good = wire::read_request(&payload).is_ok_and(|r| r.session == SessionId(5));
            let (result, messages) = ask(&mut conversation, &mut rank, &payload);
            if result.is_err() {
                let told = matches!(messages[..], [WorkerMessage::Violation { .. }]);
                prop_assert!(told, "{:?}", messages);
                prop_assert!(recorder.calls().is_empty() || good);
                break;
            }
            prop_assert!(good);
        }
    }
}

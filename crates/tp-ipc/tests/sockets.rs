//! Over real sockets, ranks as threads: what only a kernel can get wrong.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::Duration;

use kvcached_mapper::{
    After, Cause, Health, MapError, Mapper, PageRun, PeerCause, PoolId, Rank, Readiness,
    Reconciled, Stage,
};
use kvcached_tp_ipc::wire::{self, Refusal, Reply, Verb, WorkerMessage};
use kvcached_tp_ipc::{
    BindError, Broadcast, BroadcastConfig, ConnectError, Deadline, Endpoint, FrameDecoder,
    FrameError, FramedListener, FramedStream, GeometryDigest, Hello, MAX_FRAME_BYTES, ServedPool,
    Server, SessionId, StreamError, Topology, push_frame,
};

use crate::served::{
    Home, LONG, PATIENCE, POOL, Recorder, SHORT, config, connect, file_exists, geometry, run,
    serve, serve_within, server_config,
};

/// A coordinator made by hand, for what a good one never does.
#[derive(Debug)]
struct RawClient {
    stream: UnixStream,
    decoder: FrameDecoder,
    session: SessionId,
}

impl RawClient {
    fn connect(endpoint: &Endpoint) -> Self {
        let stream = UnixStream::connect(endpoint.path()).unwrap();
        stream.set_read_timeout(Some(LONG)).unwrap();
        Self {
            stream,
            decoder: FrameDecoder::default(),
            session: SessionId::fresh(),
        }
    }

    /// Connects and says hello to rank 1 of the instance `llama`.
    fn greeted(endpoint: &Endpoint) -> Self {
        let mut client = Self::connect(endpoint);
        client.write(&client.hello_frame());
        client.assert_welcome();
        client.ask(1, Verb::Resync(&[], After::DEVICE));
        assert!(matches!(
            client.message(),
            WorkerMessage::Reply {
                sequence: 1,
                reply: Reply::Resynced { .. }
            }
        ));
        client
    }

    fn hello(&self) -> Hello {
        Hello {
            instance: "llama".parse().unwrap(),
            stage: Stage(0),
            rank: Rank(1),
            pool: POOL,
            geometry: geometry(),
            session: self.session,
        }
    }

    fn hello_frame(&self) -> Vec<u8> {
        let mut out = Vec::new();
        wire::push_hello(&mut out, &self.hello());
        out
    }

    fn assert_welcome(&mut self) {
        let greeting = wire::read_greeting(&self.read().unwrap());
        assert_eq!(greeting, Ok(Ok(self.hello())));
    }

    fn request(&self, sequence: u64, verb: Verb<'_>) -> Vec<u8> {
        let mut out = Vec::new();
        wire::push_request(&mut out, self.session, sequence, verb);
        out
    }

    fn ask(&mut self, sequence: u64, verb: Verb<'_>) {
        self.write(&self.request(sequence, verb));
    }

    fn write(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).unwrap();
    }

    /// The next frame; `None` once the other side has closed.
    fn read(&mut self) -> Option<Vec<u8>> {
        loop {
            if let Some(payload) = self.decoder.next_frame().unwrap() {
                return Some(payload.to_vec());
            }
            let mut chunk = [0; 256];
            match self.stream.read(&mut chunk).unwrap() {
                0 => return None,
                len => self.decoder.feed(&chunk[..len]),
            }
        }
    }

    fn message(&mut self) -> WorkerMessage {
        wire::read_message(&self.read().unwrap()).unwrap()
    }
}

/// Whoever came before: a coordinator is served as ever.
fn assert_serves(dir: &kvcached_tp_ipc::EndpointDir, mapper: &Recorder, page: u32) {
    let local = Arc::new(Recorder::default());
    let topology = Topology::rank0_coordinates(2, dir);
    let ranks = connect(dir, &topology, Some(&local), LONG).unwrap();
    ranks.map(&[run(page, 1)]).unwrap();
    assert!(mapper.mapped().contains(&run(page, 1)));
    assert_eq!(local.mapped(), [run(page, 1)]);
}

#[test]
fn every_rank_of_every_stage_maps_once() {
    let home = Home::new();
    let dir = home.instance("llama");
    let ranks = [(0, 0), (0, 1), (1, 0), (1, 1)];
    let mappers = ranks.map(|_| Arc::new(Recorder::default()));
    let _serving = [0, 1, 2, 3].map(|index| serve(&dir, ranks[index], &mappers[index]));
    let topology = Topology::separate_coordinator(2, 2, &dir);
    let all = connect(&dir, &topology, None, LONG).unwrap();
    all.map(&[run(3, 4), run(9, 1)]).unwrap();
    all.unmap(&[run(9, 1)]).unwrap();
    assert_eq!(all.headroom(), Some(7));
    for mapper in &mappers {
        assert_eq!((mapper.mapped(), mapper.calls()), (vec![run(3, 4)], 2));
    }
    assert_eq!(all.health(), Health::Healthy);
}

/// A group of one in another process is still in another process.
#[test]
fn one_rank_elsewhere_means_one_remote_map() {
    let home = Home::new();
    let dir = home.instance("llama");
    let mapper = Arc::new(Recorder::default());
    let _serving = serve(&dir, (0, 0), &mapper);
    let topology = Topology::separate_coordinator(1, 1, &dir);
    let ranks = connect(&dir, &topology, None, LONG).unwrap();
    ranks.map(&[run(0, 1)]).unwrap();
    assert_eq!((mapper.mapped(), mapper.calls()), (vec![run(0, 1)], 1));
}

/// Every rank has a scheduler and a listener: each maps its own pages, and nobody else's.
#[test]
fn autonomous_ranks_leave_each_other_alone() {
    let home = Home::new();
    let dir = home.instance("llama");
    let mappers = [0, 1].map(|_| Arc::new(Recorder::default()));
    let _serving = [0, 1].map(|rank| serve(&dir, (0, rank), &mappers[usize::from(rank)]));
    for rank in [0, 1] {
        let topology = Topology::autonomous(Stage(0), Rank(rank));
        let local = &mappers[usize::from(rank)];
        let own = connect(&dir, &topology, Some(local), LONG).unwrap();
        own.map(&[run(u32::from(rank), 1)]).unwrap();
    }
    for (page, mapper) in (0..).zip(&mappers) {
        assert_eq!((mapper.mapped(), mapper.calls()), (vec![run(page, 1)], 1));
    }
}

/// Two engines on one host, with names that a careless cleaning would make one.
#[test]
fn two_instances_do_not_meet() {
    let home = Home::new();
    let names = ["a/b", "a:b"];
    let dirs = names.map(|name| home.instance(name));
    let mappers = names.map(|_| Arc::new(Recorder::default()));
    let _serving = [0, 1].map(|index| serve(&dirs[index], (0, 0), &mappers[index]));
    for index in [0, 1] {
        let topology = Topology::separate_coordinator(1, 1, &dirs[index]);
        let ranks = connect(&dirs[index], &topology, None, LONG).unwrap();
        ranks.map(&[run(10, 1)]).unwrap();
        assert_eq!(mappers[index].calls(), 1);
    }
    assert_eq!(mappers[0].calls(), 1);
}

/// One engine finds a worker of another where its own should be.
#[test]
fn a_worker_of_another_instance_is_refused_at_once() {
    let home = Home::new();
    let dir = home.instance("llama");
    let mapper = Arc::new(Recorder::default());
    let mut config = server_config(&dir, Stage(0), Rank(0), &mapper, LONG);
    config.instance = "mistral".parse().unwrap();
    let _serving =
        crate::served::spawn(Server::bind(&dir.endpoint(Stage(0), Rank(0)), config).unwrap());
    let topology = Topology::separate_coordinator(1, 1, &dir);
    let error = connect(&dir, &topology, None, LONG)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("instance llama") && error.contains("mistral"),
        "{error}"
    );
}

#[test]
fn a_rank_with_another_geometry_is_an_error_at_once() {
    let home = Home::new();
    let dir = home.instance("llama");
    let mapper = Arc::new(Recorder::default());
    let _serving = serve(&dir, (0, 0), &mapper);
    // The other rank is not even there: waiting for it would be in vain.
    let topology = Topology::separate_coordinator(2, 1, &dir);
    let mut config = config(&dir, &topology, LONG);
    config.geometry = GeometryDigest::new(3, 2, 1);
    match Broadcast::connect(config, None, Deadline::after(LONG)) {
        Err(ConnectError::Broken(MapError { cause, .. })) => {
            let endpoint = dir.endpoint(Stage(0), Rank(0));
            assert_eq!(
                cause.to_string(),
                format!(
                    "stage 0, rank 0 did not join: {endpoint}: the coordinator has 3 pages of 2 \
                     blocks in pool 0, the worker 1048576 pages of 32 blocks"
                )
            );
        }
        other => panic!("{other:?}"),
    }
}

/// Something that speaks the language and is somebody else.
#[test]
fn a_welcome_in_another_name_is_not_believed() {
    let home = Home::new();
    let dir = home.instance("llama");
    let listener = FramedListener::bind(&dir.endpoint(Stage(0), Rank(0))).unwrap();
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut stream = listener.accept(Deadline::after(LONG)).unwrap();
            let said = wire::read_hello(&stream.recv(Deadline::after(LONG)).unwrap()).unwrap();
            let mut welcome = Vec::new();
            wire::push_welcome(
                &mut welcome,
                &Hello {
                    session: SessionId(0),
                    ..said
                },
            );
            stream.send(&welcome[4..], Deadline::after(LONG)).unwrap();
        });
        let topology = Topology::separate_coordinator(1, 1, &dir);
        let refused = connect(&dir, &topology, None, LONG).unwrap_err();
        assert!(
            refused.to_string().ends_with("it welcomed somebody else"),
            "{refused}"
        );
    });
}

#[test]
fn ranks_that_never_come_are_all_named_with_their_endpoints() {
    let home = Home::new();
    let dir = home.instance("llama");
    let local = Arc::new(Recorder::default());
    // Rank 1 does not exist, rank 2 is dead, rank 3 accepts and says nothing.
    drop(UnixListener::bind(dir.endpoint(Stage(0), Rank(2)).path()).unwrap());
    let _mute = UnixListener::bind(dir.endpoint(Stage(0), Rank(3)).path()).unwrap();
    let config = config(&dir, &Topology::rank0_coordinates(4, &dir), SHORT);
    let error =
        Broadcast::connect(config, Some(local.clone()), Deadline::after(SHORT)).unwrap_err();
    let ConnectError::NotReady { missing } = &error else {
        panic!("{error}")
    };
    let named: Vec<u16> = missing.iter().map(|missing| missing.rank.0).collect();
    assert_eq!(named, [1, 2, 3]);
    for (missing, words) in missing
        .iter()
        .zip(["No such file", "Connection refused", "no answer"])
    {
        let endpoint = dir.endpoint(missing.stage, missing.rank);
        assert!(
            missing.reason.starts_with(&endpoint.to_string()),
            "{missing}"
        );
        assert!(missing.reason.contains(words), "{missing}");
        assert!(error.to_string().contains(&missing.to_string()));
    }
    assert_eq!(local.calls(), 0);
}

/// The coordinator starts first and keeps asking; a rank that comes later is found.
#[test]
fn a_rank_that_comes_later_is_waited_for() {
    let home = Home::new();
    let dir = home.instance("llama");
    let topology = Topology::separate_coordinator(1, 1, &dir);
    let ranks = Broadcast::new(config(&dir, &topology, LONG), None).unwrap();
    let Ok(Readiness::NotReady(missing)) = ranks.ready() else {
        panic!("nobody is there yet")
    };
    assert_eq!(missing.len(), 1);
    let error = ranks.map(&[run(0, 1)]).unwrap_err();
    assert!(matches!(
        error.cause,
        Cause::Peer {
            cause: PeerCause::Unreachable { .. },
            ..
        }
    ));

    thread::scope(|scope| {
        let waiting = scope.spawn(|| ranks.wait_ready(Deadline::after(LONG)));
        let mapper = Arc::new(Recorder::default());
        let _serving = serve(&dir, (0, 0), &mapper);
        assert_eq!(waiting.join().unwrap(), Ok(()));
        ranks.map(&[run(0, 1)]).unwrap();
        assert_eq!(mapper.calls(), 1);
    });
}

#[test]
fn a_mapper_and_a_topology_that_contradict_each_other_are_an_error() {
    let home = Home::new();
    let dir = home.instance("llama");
    let local = Arc::new(Recorder::default());
    let missing = Broadcast::new(config(&dir, &Topology::single(), LONG), None).unwrap_err();
    assert_eq!(
        missing,
        ConnectError::NoLocalMapper {
            stage: Stage(0),
            rank: Rank(0)
        }
    );
    let topology = Topology::separate_coordinator(1, 1, &dir);
    let surplus = Broadcast::new(config(&dir, &topology, LONG), Some(local)).unwrap_err();
    assert_eq!(surplus, ConnectError::NoLocalRank);
}

/// The bound is on the clock; the error says who, what, and how long.
#[test]
fn a_worker_that_never_answers_is_an_error_that_names_it() {
    let home = Home::new();
    let dir = home.instance("llama");
    let (mapper, keeper) = Recorder::gated();
    let _serving = serve(&dir, (0, 1), &mapper);
    let local = Arc::new(Recorder::default());
    let topology = Topology::rank0_coordinates(2, &dir);
    let ranks = connect(&dir, &topology, Some(&local), SHORT).unwrap();
    let error = ranks.map(&[run(0, 2)]).unwrap_err();
    assert_eq!(
        error.to_string(),
        "stage 0, rank 1 did not map: no answer within 200 ms (in doubt: pages 0..2)"
    );
    // Undone here; fenced there; and the next call does not wait.
    assert_eq!(local.mapped(), []);
    let fenced = ranks.health();
    assert_eq!(
        fenced.to_string(),
        "fenced, 0 pages in doubt; stage 0, rank 1: no answer within 200 ms"
    );
    let diverged = MapError::clean(Cause::Diverged {
        stage: Stage(0),
        rank: Rank(1),
    });
    assert_eq!(ranks.map(&[run(5, 1)]), Err(diverged));
    assert_eq!(ranks.headroom(), None);
    // It cannot be brought back while it does not answer; once it does, it is.
    assert!(matches!(ranks.ready(), Ok(Readiness::NotReady(_))));
    ranks.reconcile(&[run(0, 2)]).unwrap_err();
    drop(keeper);
    let reconciled = within(LONG, || ranks.reconcile(&[run(0, 2)]).ok());
    assert_eq!(reconciled.cold, [run(0, 2)]);
    assert_eq!(ranks.health(), Health::Healthy);
    assert_eq!(mapper.mapped(), []);
    ranks.map(&[run(0, 2)]).unwrap();
    assert_eq!(mapper.mapped(), [run(0, 2)]);
}

/// Asks again and again until there is an answer.
fn within<T>(bound: Duration, mut ask: impl FnMut() -> Option<T>) -> T {
    let deadline = Deadline::after(bound);
    loop {
        if let Some(answer) = ask() {
            return answer;
        }
        assert!(!deadline.is_over(), "no answer within {bound:?}");
    }
}

/// The same process, whose connection ended, has kept everything; nobody has to be told anything.
#[test]
fn a_broken_connection_costs_no_content() {
    let home = Home::new();
    let dir = home.instance("llama");
    let mapper = Arc::new(Recorder::default());
    let serving = serve(&dir, (0, 1), &mapper);
    let local = Arc::new(Recorder::default());
    let topology = Topology::rank0_coordinates(2, &dir);
    let ranks = connect(&dir, &topology, Some(&local), LONG).unwrap();
    ranks.map(&[run(0, 1)]).unwrap();
    drop(serving);
    let _serving = serve(&dir, (0, 1), &mapper);
    let reconciled = within(LONG, || ranks.reconcile(&[]).ok());
    assert_eq!(reconciled, Reconciled::default());
    ranks.map(&[run(1, 1)]).unwrap();
    assert_eq!(mapper.mapped(), [run(0, 1), run(1, 1)]);
}

/// What a coordinator leaves behind does not trip up the next one.
#[test]
fn a_new_coordinator_brings_live_workers_to_a_known_state() {
    let home = Home::new();
    let dir = home.instance("llama");
    let mapper = Arc::new(Recorder::default());
    let _serving = serve(&dir, (0, 0), &mapper);
    let topology = Topology::separate_coordinator(1, 1, &dir);
    let first = connect(&dir, &topology, None, LONG).unwrap();
    first.map(&[run(0, 3), run(7, 1)]).unwrap();
    drop(first);
    let second = connect(&dir, &topology, None, LONG).unwrap();
    assert_eq!(mapper.mapped(), []);
    second.map(&[run(1, 1)]).unwrap();
    assert_eq!(mapper.mapped(), [run(1, 1)]);
}

/// A worker without a coordinator gives back what it holds, and waits for the next one.
#[test]
fn what_nobody_comes_back_for_is_released() {
    let home = Home::new();
    let dir = home.instance("llama");
    let mapper = Arc::new(Recorder::default());
    let (stage, rank) = (Stage(0), Rank(0));
    let mut config = server_config(&dir, stage, rank, &mapper, LONG);
    config.orphan_timeout = SHORT;
    let _serving = crate::served::spawn(Server::bind(&dir.endpoint(stage, rank), config).unwrap());
    let topology = Topology::separate_coordinator(1, 1, &dir);
    let first = connect(&dir, &topology, None, LONG).unwrap();
    first.map(&[run(0, 3)]).unwrap();
    drop(first);
    within(LONG, || mapper.mapped().is_empty().then_some(()));
    let second = connect(&dir, &topology, None, LONG).unwrap();
    second.map(&[run(0, 3)]).unwrap();
}

/// A coordinator that is back in time finds what it left, though the worker was busy with another pool
/// for longer than it keeps what nobody comes back for.
#[test]
fn a_busy_worker_does_not_take_a_coordinator_for_gone_that_is_back() {
    let home = Home::new();
    let dir = home.instance("llama");
    let (busy, keeper) = Recorder::gated();
    let mapper = Arc::new(Recorder::default());
    let (stage, rank) = (Stage(0), Rank(1));
    let endpoint = dir.endpoint(stage, rank);
    let mut config = server_config(&dir, stage, rank, &mapper, LONG);
    config.pools.push(ServedPool {
        pool: PoolId(1),
        geometry: geometry(),
        mapper: busy,
    });
    config.orphan_timeout = SHORT;
    let _serving = crate::served::spawn(Server::bind(&endpoint, config).unwrap());
    let topology = Topology::rank0_coordinates(2, &dir);
    let config = BroadcastConfig {
        pool: PoolId(1),
        ..crate::served::config(&dir, &topology, LONG)
    };
    let local = Arc::new(Recorder::default());
    let other = Broadcast::connect(config, Some(local), Deadline::after(LONG)).unwrap();
    let mut client = RawClient::greeted(&endpoint);
    client.ask(2, Verb::Map(&[run(0, 3)]));
    assert!(matches!(client.message(), WorkerMessage::Reply { .. }));
    thread::scope(|scope| {
        scope.spawn(|| other.map(&[run(0, 1)]).unwrap());
        keeper.come.recv_timeout(LONG).unwrap();
        // Gone and back, while the worker is at it.
        let session = client.session;
        drop(client);
        let mut back = RawClient::connect(&endpoint);
        back.session = session;
        back.write(&back.hello_frame());
        let over = Deadline::after(2 * SHORT);
        within(LONG, || over.is_over().then_some(()));
        drop(keeper);
        back.assert_welcome();
        assert_eq!(mapper.mapped(), [run(0, 3)]);
    });
}

/// A worker that cannot begin ends the start of its coordinator at once, with its reason.
#[test]
fn a_worker_that_cannot_begin_is_named() {
    let home = Home::new();
    let dir = home.instance("llama");
    let (stage, rank) = (Stage(0), Rank(0));
    let endpoint = dir.endpoint(stage, rank);
    let (instance, reason) = (dir.instance().clone(), "no usable device".to_owned());
    let mut server = Server::bind_unable(&endpoint, instance, (stage, rank), reason, LONG).unwrap();
    thread::scope(|scope| {
        let told = scope.spawn(move || server.run_until_told(Deadline::after(LONG)).unwrap());
        let topology = Topology::separate_coordinator(2, 1, &dir);
        let error = connect(&dir, &topology, None, LONG).unwrap_err();
        assert_eq!(
            error.to_string(),
            format!(
                "stage 0, rank 0 did not join: {endpoint}: the worker cannot serve: no usable device"
            )
        );
        assert!(told.join().unwrap());
    });
}

#[test]
fn a_client_that_leaves_before_its_reply_harms_nobody() {
    let home = Home::new();
    let dir = home.instance("llama");
    let (mapper, keeper) = Recorder::gated();
    let _serving = serve(&dir, (0, 1), &mapper);
    let mut client = RawClient::greeted(&dir.endpoint(Stage(0), Rank(1)));
    client.ask(2, Verb::Map(&[run(0, 1)]));
    keeper.come.recv_timeout(LONG).unwrap();
    drop(client);
    drop(keeper);
    let topology = Topology::rank0_coordinates(2, &dir);
    let local = Arc::new(Recorder::default());
    let ranks = connect(&dir, &topology, Some(&local), LONG).unwrap();
    assert_eq!(ranks.ready(), Ok(Readiness::Ready));
    // What the client had asked for went with it.
    assert_eq!(mapper.mapped(), []);
}

#[test]
fn bytes_may_come_one_by_one() {
    let home = Home::new();
    let dir = home.instance("llama");
    let mapper = Arc::new(Recorder::default());
    let _serving = serve(&dir, (0, 1), &mapper);
    let mut client = RawClient::connect(&dir.endpoint(Stage(0), Rank(1)));
    for byte in client.hello_frame() {
        client.write(&[byte]);
    }
    client.assert_welcome();
    for byte in client.request(1, Verb::Resync(&[run(0, 1)], After::DEVICE)) {
        client.write(&[byte]);
    }
    assert!(matches!(client.message(), WorkerMessage::Reply { .. }));
    assert_eq!(mapper.mapped(), [run(0, 1)]);
}

/// Several requests in one portion are answered in order, one by one.
#[test]
fn requests_may_come_all_at_once() {
    let home = Home::new();
    let dir = home.instance("llama");
    let mapper = Arc::new(Recorder::default());
    let _serving = serve(&dir, (0, 1), &mapper);
    let mut client = RawClient::greeted(&dir.endpoint(Stage(0), Rank(1)));
    let bytes: Vec<u8> = (2..=51)
        .flat_map(|n| client.request(n, Verb::Map(&[run(u32::try_from(n).unwrap(), 1)])))
        .collect();
    client.write(&bytes);
    for sequence in 2..=51 {
        assert_eq!(
            client.message(),
            WorkerMessage::Reply {
                sequence,
                reply: Reply::Done
            }
        );
    }
    assert_eq!(mapper.calls(), 50);
}

#[test]
fn a_malformed_or_oversized_frame_ends_its_connection_and_changes_nothing() {
    let home = Home::new();
    let dir = home.instance("llama");
    let mapper = Arc::new(Recorder::default());
    let _serving = serve(&dir, (0, 1), &mapper);
    let endpoint = dir.endpoint(Stage(0), Rank(1));
    let too_long = u32::try_from(MAX_FRAME_BYTES + 1).unwrap().to_le_bytes();
    let mut garbage = Vec::new();
    push_frame(&mut garbage, |out| out.extend_from_slice(b"map everything"));
    let empty = [0; 4];

    for bytes in [&too_long[..], &garbage, &empty] {
        // After the hello, and instead of it.
        let mut client = RawClient::greeted(&endpoint);
        client.write(bytes);
        assert!(matches!(client.message(), WorkerMessage::Violation { .. }));
        assert_eq!(client.read(), None);

        let mut client = RawClient::connect(&endpoint);
        client.write(bytes);
        let greeting = wire::read_greeting(&client.read().unwrap());
        assert!(
            matches!(greeting, Ok(Err(Refusal::NoHello { .. }))),
            "{greeting:?}"
        );
        assert_eq!(client.read(), None);
    }
    assert_eq!(mapper.calls(), 0);
    assert_serves(&dir, &mapper, 4);
}

/// Somebody begins and does not go on: with its hello, a frame, or the reading of its replies.
#[test]
fn a_slow_client_is_dropped_and_does_not_hold_up_others() {
    let home = Home::new();
    let dir = home.instance("llama");
    let mapper = Arc::new(Recorder::default());
    let _serving = serve_within(&dir, (0, 1), &mapper, PATIENCE);
    let endpoint = dir.endpoint(Stage(0), Rank(1));

    let mut silent = RawClient::connect(&endpoint);
    let mut halfway = RawClient::connect(&endpoint);
    halfway.write(&halfway.hello_frame()[..9]);
    assert_serves(&dir, &mapper, 1);
    assert_eq!((silent.read(), halfway.read()), (None, None));

    let mut amid = RawClient::greeted(&endpoint);
    amid.write(&amid.request(2, Verb::Ready)[..3]);
    assert_eq!(amid.read(), None);

    // Its requests fill one direction, their replies the other; then nothing moves any more.
    let mut deaf = RawClient::greeted(&endpoint);
    let refused = (2..).find_map(|n| {
        let bytes = deaf.request(n, Verb::Ready);
        deaf.stream.write_all(&bytes).err()
    });
    assert!(refused.is_some());
    assert_serves(&dir, &mapper, 2);
}

/// Whoever is silent between requests is left alone, however long.
#[test]
fn an_idle_coordinator_stays_connected() {
    let home = Home::new();
    let dir = home.instance("llama");
    let mapper = Arc::new(Recorder::default());
    let _serving = serve_within(&dir, (0, 1), &mapper, PATIENCE);
    let endpoint = dir.endpoint(Stage(0), Rank(1));
    let mut idle = RawClient::greeted(&endpoint);
    // Somebody else's bound passes meanwhile.
    assert_eq!(RawClient::connect(&endpoint).read(), None);
    idle.ask(2, Verb::Ready);
    assert_eq!(
        idle.message(),
        WorkerMessage::Reply {
            sequence: 2,
            reply: Reply::Ready
        }
    );
}

/// The second coordinator waits until the first has gone; it does not disturb it.
#[test]
fn two_coordinators_do_not_drive_one_pool() {
    let home = Home::new();
    let dir = home.instance("llama");
    let mapper = Arc::new(Recorder::default());
    let _serving = serve(&dir, (0, 0), &mapper);
    let topology = Topology::separate_coordinator(1, 1, &dir);
    let first = connect(&dir, &topology, None, LONG).unwrap();
    let config = config(&dir, &topology, LONG);
    let refused = Broadcast::connect(config, None, Deadline::after(SHORT)).unwrap_err();
    let words = "another coordinator is connected to pool 0 of the worker";
    assert!(refused.to_string().ends_with(words), "{refused}");
    first.map(&[run(0, 1)]).unwrap();
    drop(first);
    let second = connect(&dir, &topology, None, LONG).unwrap();
    second.map(&[run(0, 1)]).unwrap();
    assert_eq!(mapper.mapped(), [run(0, 1)]);
}

/// More runs than fit a frame: several frames, one call of each mapper, all or nothing.
#[test]
fn a_batch_longer_than_a_frame_is_one_transaction() {
    let home = Home::new();
    let dir = home.instance("llama");
    let mapper = Arc::new(Recorder::default());
    let _serving = serve(&dir, (0, 0), &mapper);
    let topology = Topology::separate_coordinator(1, 1, &dir);
    let ranks = connect(&dir, &topology, None, LONG).unwrap();
    let batch: Vec<PageRun> = (0..250_000).map(|page| run(page, 1)).collect();
    ranks.map(&batch).unwrap();
    assert_eq!((mapper.calls(), mapper.mapped()), (1, batch));
}

#[test]
fn a_worker_that_leaves_between_calls_is_noticed_before_anything_is_done() {
    let home = Home::new();
    let dir = home.instance("llama");
    let mapper = Arc::new(Recorder::default());
    let local = Arc::new(Recorder::default());
    let serving = serve(&dir, (0, 1), &mapper);
    let topology = Topology::rank0_coordinates(2, &dir);
    let ranks = connect(&dir, &topology, Some(&local), LONG).unwrap();
    ranks.map(&[run(0, 1)]).unwrap();
    drop(serving);
    let error = ranks.map(&[run(1, 1)]).unwrap_err();
    let diverged = Cause::Diverged {
        stage: Stage(0),
        rank: Rank(1),
    };
    assert_eq!(error, MapError::clean(diverged));
    assert_eq!(local.mapped(), [run(0, 1)]);
}

#[test]
fn a_dead_socket_is_replaced_and_a_live_one_is_not() {
    let home = Home::new();
    let dir = home.instance("llama");
    let endpoint = dir.endpoint(Stage(0), Rank(0));
    // Closed and left there, as by a process that was killed.
    drop(UnixListener::bind(endpoint.path()).unwrap());
    assert!(file_exists(&endpoint));
    let mapper = Arc::new(Recorder::default());
    let bind = || {
        Server::bind(
            &endpoint,
            server_config(&dir, Stage(0), Rank(0), &mapper, LONG),
        )
    };
    let live = bind().unwrap();
    match bind() {
        Err(BindError::AlreadyServed { endpoint: at }) => assert_eq!(at, endpoint),
        other => panic!("{other:?}"),
    }
    let _serving = crate::served::spawn(live);
    let ranks = connect(
        &dir,
        &Topology::separate_coordinator(1, 1, &dir),
        None,
        LONG,
    )
    .unwrap();
    ranks.map(&[run(0, 1)]).unwrap();
}

/// All of them find the dead socket; none removes the new one of another.
#[test]
fn of_many_that_find_a_dead_socket_one_replaces_it() {
    let home = Home::new();
    let dir = home.instance("llama");
    let endpoint = dir.endpoint(Stage(0), Rank(0));
    let together = Barrier::new(6);
    for _ in 0..200 {
        drop(UnixListener::bind(endpoint.path()).unwrap());
        let bound: Vec<Result<FramedListener, BindError>> = thread::scope(|scope| {
            let bind = || {
                together.wait();
                FramedListener::bind(&endpoint)
            };
            let binding: Vec<_> = (0..6).map(|_| scope.spawn(bind)).collect();
            binding
                .into_iter()
                .map(|thread| thread.join().unwrap())
                .collect()
        });
        let (live, refused): (Vec<_>, Vec<_>) = bound.into_iter().partition(Result::is_ok);
        assert_eq!(live.len(), 1);
        for refused in refused {
            assert!(matches!(refused, Err(BindError::AlreadyServed { .. })));
        }
        FramedStream::try_connect(&endpoint).unwrap();
    }
}

#[test]
fn nothing_but_its_own_socket_is_ever_removed() {
    let home = Home::new();
    let dir = home.instance("llama");
    let endpoint = dir.endpoint(Stage(0), Rank(0));
    fs::write(endpoint.path(), b"precious").unwrap();
    let refused = FramedListener::bind(&endpoint);
    assert!(matches!(refused, Err(BindError::NotASocket { .. })));
    assert_eq!(fs::read(endpoint.path()).unwrap(), b"precious");
    fs::remove_file(endpoint.path()).unwrap();

    let first = FramedListener::bind(&endpoint).unwrap();
    fs::remove_file(endpoint.path()).unwrap();
    let second = FramedListener::bind(&endpoint).unwrap();
    drop(first);
    assert!(
        file_exists(&endpoint),
        "the successor's socket is left alone"
    );
    drop(second);
    assert!(!file_exists(&endpoint));
    assert!(dir.remove_if_empty().unwrap());
}

#[test]
fn a_server_that_was_stopped_before_it_ran_ends_at_once() {
    let home = Home::new();
    let dir = home.instance("llama");
    let endpoint = dir.endpoint(Stage(0), Rank(0));
    let mapper = Arc::new(Recorder::default());
    let mut server = Server::bind(
        &endpoint,
        server_config(&dir, Stage(0), Rank(0), &mapper, LONG),
    )
    .unwrap();
    let stop = server.stop_handle();
    stop.stop();
    stop.stop();
    server.run().unwrap();
    drop(server);
    assert!(!file_exists(&endpoint));
}

#[test]
fn a_framed_stream_carries_any_frame_and_waits_no_longer_than_asked() {
    let (left, right) = UnixStream::pair().unwrap();
    let mut left = FramedStream::new(left).unwrap();
    let mut right = FramedStream::new(right).unwrap();
    assert!(matches!(
        right.recv(Deadline::after(SHORT)),
        Err(StreamError::TimedOut)
    ));
    let largest = vec![3; MAX_FRAME_BYTES];
    let oversized = left.send(&vec![0; MAX_FRAME_BYTES + 1], Deadline::after(LONG));
    assert!(matches!(
        oversized,
        Err(StreamError::Frame(FrameError::TooLong { .. }))
    ));
    let empty = left.send(&[], Deadline::after(LONG));
    assert!(matches!(empty, Err(StreamError::Frame(FrameError::Empty))));

    // Larger than the socket takes: it must be waited for, and nobody reads yet.
    let unread = left.send(&largest, Deadline::after(SHORT));
    assert!(matches!(unread, Err(StreamError::TimedOut)));
    thread::scope(|scope| {
        let reading = scope.spawn(|| {
            let first = right.recv(Deadline::after(LONG)).unwrap();
            (first, right.recv(Deadline::after(LONG)).unwrap())
        });
        left.send(b"next", Deadline::after(LONG)).unwrap();
        let (first, next) = reading.join().unwrap();
        assert!(first == largest, "the frame that was begun is whole");
        assert_eq!(next, b"next");
    });
    drop(left);
    assert!(matches!(
        right.recv(Deadline::after(LONG)),
        Err(StreamError::Ended)
    ));
    // Nobody is there any more: an error, not a signal that ends the process.
    assert!(matches!(
        right.send(b"hello?", Deadline::after(LONG)),
        Err(StreamError::Io(_))
    ));
}

#[test]
fn a_framed_stream_is_accepted_and_connected_within_a_bound() {
    let home = Home::new();
    let dir = home.instance("llama");
    let endpoint = dir.endpoint(Stage(0), Rank(0));
    match FramedStream::connect(&endpoint, Deadline::after(SHORT)) {
        Err(StreamError::Unreachable { endpoint: at, .. }) => assert_eq!(at, endpoint),
        other => panic!("{other:?}"),
    }
    let listener = FramedListener::bind(&endpoint).unwrap();
    assert!(matches!(
        listener.accept(Deadline::after(SHORT)),
        Err(StreamError::TimedOut)
    ));
    let mut client = FramedStream::connect(&endpoint, Deadline::after(LONG)).unwrap();
    let mut served = listener.accept(Deadline::after(LONG)).unwrap();
    client.send(b"ping", Deadline::after(LONG)).unwrap();
    assert_eq!(served.recv(Deadline::after(LONG)).unwrap(), b"ping");
}

/// A listener whose queue is full would keep an ordinary connect waiting for ever.
#[test]
fn a_full_queue_is_not_waited_for_without_a_bound() {
    let home = Home::new();
    let dir = home.instance("llama");
    let endpoint = dir.endpoint(Stage(0), Rank(0));
    let _deaf = FramedListener::bind(&endpoint).unwrap();
    let mut waiting = Vec::new();
    let full = (0..100_000).find_map(|_| match FramedStream::try_connect(&endpoint) {
        Ok(stream) => {
            waiting.push(stream);
            None
        }
        Err(error) => Some(error),
    });
    let full = full.expect("a queue has an end");
    assert_eq!(full.kind(), std::io::ErrorKind::WouldBlock);
    let topology = Topology::separate_coordinator(1, 1, &dir);
    let refused = Broadcast::connect(config(&dir, &topology, LONG), None, Deadline::after(SHORT));
    assert!(matches!(refused, Err(ConnectError::NotReady { .. })));
}

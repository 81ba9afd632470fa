//! What fuzzing sets out from: real encodings of every kind of message, and lines of every format
//! of trace, good ones and ones that are just not.

use kvcached_mapper::{After, Epoch, PageId, PageRun, PoolId, Rank, Stage};
use kvcached_tp_ipc::wire::{
    Failure, Part, Reply, Runs, RunsDigest, Verb, WorkerMessage, push_hello, push_message,
    push_refusal, push_request, push_welcome,
};
use kvcached_tp_ipc::{GeometryDigest, Hello, Refusal, SessionId, push_frame};

use super::conversation::good;
use super::wire::payloads;

/// One file of the corpus.
#[derive(Debug)]
pub struct Seed {
    /// The function that it is for.
    pub target: &'static str,
    /// Name of the file.
    pub name: String,
    /// Content of the file.
    pub bytes: Vec<u8>,
}

/// All that is made; what fuzzing found lies beside it under other names.
pub fn seeds() -> Vec<Seed> {
    let kinds = [
        ("frame", frames()),
        ("greeting", greetings()),
        ("request", requests()),
        ("message", messages()),
        ("conversation", conversations()),
        ("azure", texts(&AZURE)),
        ("mooncake", texts(&MOONCAKE)),
        ("burst", texts(&BURST)),
    ];
    let mut seeds = Vec::new();
    for (target, inputs) in kinds {
        for (bytes, number) in inputs.into_iter().zip(0..) {
            let name = format!("seed-{number:02}");
            seeds.push(Seed {
                target,
                name,
                bytes,
            });
        }
    }
    seeds
}

/// See [`frame`](super::frame) for the first bytes.
fn frames() -> Vec<Vec<u8>> {
    let framed = |payloads: &[&[u8]]| {
        let mut bytes = Vec::new();
        for payload in payloads {
            push_frame(&mut bytes, |out| out.extend_from_slice(payload));
        }
        bytes
    };
    let whole = framed(&[b"a", b"hello", &[7; 40]]);
    let cut_short = &whole[..whole.len() - 3];
    let longest = [0, 0, 16, 0];
    let too_long = [1, 0, 16, 0];
    [
        (&[0x00][..], &whole[..]),
        (&[0x01, 0], &whole),
        (&[0x03, 2, 0, 5], &whole),
        (&[0x01, 3], cut_short),
        (&[0x01, 0], &[0; 4]),
        (&[0x01, 1], &[1, 0, 0, 0, 9, 0, 0, 0, 0, 1]),
        (&[0x01, 0], &too_long),
        (&[0x81, 3], &longest),
        (&[0x82, 255, 0], &longest[..3]),
        (&[0x80], &too_long),
    ]
    .map(|(how, stream)| [how, stream].concat())
    .into()
}

fn hello() -> Hello {
    Hello {
        instance: "llama-8b".parse().expect("a name"),
        stage: Stage(1),
        rank: Rank(3),
        pool: PoolId(2),
        geometry: GeometryDigest::new(1000, 2 << 20, 128 << 10),
        session: SessionId(1 << 40),
    }
}

fn greetings() -> Vec<Vec<u8>> {
    let small = Hello {
        instance: "a".parse().expect("a name"),
        stage: Stage(0),
        rank: Rank(0),
        pool: PoolId(0),
        geometry: GeometryDigest::new(1, 3, 2),
        session: SessionId(0),
    };
    let refusals = [
        Refusal::Version {
            coordinator: 1,
            worker: 700,
        },
        Refusal::Instance {
            coordinator: "a".to_owned(),
            worker: "b".to_owned(),
        },
        Refusal::Place {
            wanted: (0, 1),
            worker: (300, 2),
        },
        Refusal::Pool {
            wanted: 3,
            worker: vec![0, 1, 2],
        },
        Refusal::Geometry {
            pool: 0,
            coordinator: hello().geometry,
            worker: small.geometry,
        },
        Refusal::Taken { pool: 1 },
        Refusal::Superseded { pool: 700 },
        Refusal::Unable {
            reason: "no device".to_owned(),
        },
        Refusal::NoHello {
            reason: "does not begin".to_owned(),
        },
    ];
    let mut greetings = payloads(|out| {
        for hello in [&hello(), &small] {
            push_hello(out, hello);
            push_welcome(out, hello);
        }
        for refusal in &refusals {
            push_refusal(out, refusal);
        }
    });
    let newer = [&greetings[0][..4], &[9, 9], b"what nine says"].concat();
    let cut_short = greetings[0][..9].to_vec();
    greetings.extend([newer, cut_short, b"GET / HTTP/1.1".to_vec()]);
    greetings
}

fn run(first: u32, count: u32) -> PageRun {
    PageRun::new(PageId(first), count).expect("a run of pages")
}

fn requests() -> Vec<Vec<u8>> {
    let runs = [run(0, 1), run(200, 70_000), run(u32::MAX - 1, 1)];
    let verbs = [
        Verb::Ready,
        Verb::Headroom,
        Verb::Map(&runs[..1]),
        Verb::Map(&runs),
        Verb::Prepare(&runs[1..2], After::DEVICE),
        Verb::Prepare(&runs, After::epoch(Epoch(u64::MAX))),
        Verb::Commit,
        Verb::Undo,
        Verb::Resync(&[], After::DEVICE),
        Verb::Resync(&runs, After::DEVICE),
        Verb::Trim,
    ];
    let mut requests = payloads(|out| {
        for verb in verbs {
            push_request(out, SessionId(5), 1, verb);
            push_request(out, SessionId(u64::MAX), u64::MAX, verb);
        }
    });
    let cut_short = requests[7][..12].to_vec();
    requests.push(cut_short);
    requests
}

fn messages() -> Vec<Vec<u8>> {
    let reason = || "no mapping begins at offset 4".to_owned();
    let failures = [
        Failure::OutOfMemory,
        Failure::State { reason: reason() },
        Failure::Vmm { reason: reason() },
        Failure::InFlight { epoch: 300 },
    ];
    let doubts = [
        Part::Nothing,
        Part::Runs(Runs(vec![run(1, 2), run(300, 1)].into())),
        Part::Whole,
        Part::Nothing,
    ];
    let mut replies = vec![
        Reply::Done,
        Reply::Prepared,
        Reply::Committed,
        Reply::Undone,
        Reply::Resynced {
            digest: RunsDigest::new([run(1, 2)]),
            remade: Part::Whole,
            in_doubt: Runs(vec![run(1, 2), run(300, 1)].into()),
        },
        Reply::Ready,
        Reply::NotReady { reason: reason() },
        Reply::Headroom(None),
        Reply::Headroom(Some(70_000)),
    ];
    let failed = failures.into_iter().zip(doubts);
    replies.extend(failed.map(|(failure, doubt)| Reply::Failed { failure, doubt }));
    let mut said = vec![WorkerMessage::Violation { reason: reason() }];
    said.extend(
        replies
            .into_iter()
            .zip(1..)
            .map(|(reply, sequence)| WorkerMessage::Reply {
                sequence: 1 << (8 * (sequence % 7)),
                reply,
            }),
    );
    payloads(|out| {
        for message in &said {
            push_message(out, message);
        }
    })
}

/// See [`conversation`](super::conversation) for the first bytes.
fn conversations() -> Vec<Vec<u8>> {
    let good = good();
    let framed = |payloads: &[Vec<u8>]| {
        let mut bytes = Vec::new();
        for payload in payloads {
            push_frame(&mut bytes, |out| out.extend_from_slice(payload));
        }
        bytes
    };
    let mut inputs = Vec::new();
    for (before, piece) in (0..=good.len()).zip([0, 255, 6].into_iter().cycle()) {
        let head = [u8::try_from(before).expect("few frames"), piece];
        inputs.push([&head[..], &framed(&good[before..])].concat());
        // The same once more.
        let last = good.get(before.saturating_sub(1)..before);
        inputs.push([&head[..], &framed(last.unwrap_or_default())].concat());
    }
    let stranger = payloads(|out| push_request(out, SessionId(6), 1, Verb::Ready));
    inputs.push([&[1, 255][..], &framed(&stranger)].concat());
    // Between two requests, what is none.
    inputs.push([&[2, 255][..], &framed(&good[2..4]), &[0; 4]].concat());
    inputs.push([&[1, 255][..], &framed(&[b"nobody's".to_vec()])].concat());
    inputs
}

fn texts(texts: &[&str]) -> Vec<Vec<u8>> {
    texts.iter().map(|text| text.as_bytes().to_vec()).collect()
}

const AZURE: [&str; 12] = [
    "TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:15:46.6805900,374,44\r\n",
    "\u{feff}TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:59.5+00:00,1,2\n",
    "generatedtokens, timestamp ,\"ContextTokens\",more\n\n7,1970-01-01T00:00:00Z,16777216,x\n",
    "2023-12-31 23:59:59.999999999,0,0\n2024-02-29 00:00:00-23:59,1,1\n",
    "2024-05-10 02:01:00.5+02:00,1,1\n2024-05-10 00:00:59.5,2,2\r\n \r\n",
    "\"2023-11-16 18:15:46.68\",\"3\",\"4\"\n",
    "2023-02-29 18:15:46.68,1,1\n",
    "9999-12-31 23:59:59-23:59,1,16777217\n",
    "1970-01-01 00:00:00+00:01,1,1\n",
    "2023-11-16 18:15:46.0123456789,1,1\n",
    "2023-11-16 18:15:46.68,-3,99999999999999999999\n",
    "2023-11-16 18:15:46.68,\"374\n",
];

const MOONCAKE: [&str; 12] = [
    "{\"timestamp\": 0, \"input_length\": 600, \"output_length\": 5, \"hash_ids\": [46, 47]}\n",
    "{\"timestamp\":0.5,\"input_length\":513,\"output_length\":0,\"model\":\"llama\"}\r\n",
    "  {\"hash_ids\": [], \"output_length\": 16777216, \"input_length\": 0, \"timestamp\": 1e12}",
    "{\"timestamp\": 3, \"input_length\": 1, \"output_length\": 1, \"hash_ids\": null, \"x\": [{}]}",
    "{\"timestamp\": -1, \"input_length\": 1, \"output_length\": 1}",
    "{\"timestamp\": 1e999}",
    "{\"timestamp\": 0, \"input_length\": 16777217, \"output_length\": 1.5}",
    "{\"timestamp\": 0, \"input_length\": 5, \"output_length\": 1, \"hash_ids\": [-1]}",
    "{\"timestamp\": 0, \"input_length\": 5, \"output_length\": 1, \"hash_ids\": 7}",
    "{\"timestamp\": 0, \"input_length\": 1, \"output_length\": 1, \"model\": {\"\\u00e9\": true}}",
    "{\"timestamp\": 0, \"input_len",
    "[1]\n{}\n\"words\"\n",
];

const BURST: [&str; 11] = [
    "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n\
     5,ChatGPT,472,18,490,Conversation log\n45.25,GPT-4,1087,0,1087,API log\n",
    "Session ID,\"Response tokens\",Elapsed time,request tokens,TIMESTAMP\r\n7,18,0.5,472,5\r\n",
    "Timestamp,Request tokens,Response tokens\n0,0,0\n0,0,0\n0,0,0\n0,0,0\n",
    "46,,1,1,2,\"API log\"\n1e9,m,16777216,0\n",
    "1.5e-3,m,1,1\n.5,m,1,1\n+5,m,1,1\n-0,m,1,1\n",
    "NaN,m,1,1,2,l\n",
    "inf,m,1,1,2,l\n",
    "1e300,m,1,1,2,l\n",
    "1,m,+1,1,2,l\n",
    "1,m,1\n",
    "1,\"a \"\"model\"\"\",1,2\n",
];

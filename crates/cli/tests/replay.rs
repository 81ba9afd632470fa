//! `kvcached replay` as an operator runs it: real processes, files, signals, mistakes.
#![expect(clippy::print_stdout, reason = "a test that cannot run here says why")]

use std::fs::{self, Permissions};
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use tempfile::TempDir;

/// A folder closed to others: sockets in `run`, results beside it.
fn folder() -> TempDir {
    let closed = Permissions::from_mode(0o700);
    tempfile::Builder::new()
        .permissions(closed)
        .tempdir()
        .expect("a folder")
}

fn kvcached(folder: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvcached"));
    command
        .current_dir(folder)
        .env("KVCACHED_RUNTIME_DIR", folder.join("run"))
        .args(arguments);
    command
}

fn replay(folder: &Path, arguments: &[&str]) -> Output {
    kvcached(folder, &["replay"])
        .args(arguments)
        .output()
        .expect("the binary starts")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Runs a replay that must succeed, and reads its JSON.
fn report(arguments: &[&str]) -> Value {
    let folder = folder();
    let output = replay(
        folder.path(),
        &[arguments, &["--json", "out.json"]].concat(),
    );
    assert!(
        output.status.success(),
        "{arguments:?}: {}",
        text(&output.stderr)
    );
    assert!(
        !text(&output.stderr).contains("ended badly"),
        "every rank ends in good order: {}",
        text(&output.stderr)
    );
    nothing_is_left(folder.path());
    let json = fs::read(folder.path().join("out.json")).expect("written");
    serde_json::from_slice(&json).expect("JSON")
}

fn number(report: &Value, pointer: &str) -> f64 {
    let found = report.pointer(pointer).and_then(Value::as_f64);
    assert!(found.is_some(), "no number at {pointer}");
    found.unwrap_or_default()
}

/// No socket, no folder of a replay, no part of a file.
fn nothing_is_left(folder: &Path) {
    let run = folder.join("run");
    let left: Vec<_> = match fs::read_dir(&run) {
        Ok(entries) => entries
            .map(|entry| entry.expect("readable").path())
            .collect(),
        Err(_) => Vec::new(),
    };
    assert!(left.is_empty(), "left behind: {left:?}");
    assert!(!folder.join("out.json.part").exists());
}

fn assert_sound(report: &Value, requests: f64) {
    assert_eq!(number(report, "/requests"), requests);
    assert_eq!(number(report, "/completed"), requests);
    assert_eq!(number(report, "/rejected"), 0.0);
    assert_eq!(number(report, "/verify/corrupted"), 0.0);
    assert_eq!(number(report, "/ranks_divergent"), 0.0);
    assert!(number(report, "/pages/mapped") > 0.0);
    assert!(
        number(report, "/elastic/mean_held_bytes") <= number(report, "/elastic/mean_mapped_bytes")
    );
}

/// A trace that makes a static split wait: one model is asked for almost everything.
fn bursty_trace(folder: &Path) -> PathBuf {
    let mut csv = String::from("TIMESTAMP,ContextTokens,GeneratedTokens\n");
    for request in 0..120 {
        csv.push_str(&format!(
            "2023-11-16 18:15:{:02}.{:07},900,200\n",
            request / 6,
            request % 6 * 1_000_000
        ));
    }
    let path = folder.join("trace.csv");
    fs::write(&path, csv).expect("writable");
    path
}

#[test]
fn every_topology_serves_everything_with_the_same_result() {
    let base = ["--max-requests", "150", "--memory", "1GiB"];
    let mut results = Vec::new();
    for (tp, topology) in [
        ("1", "rank0"),
        ("2", "rank0"),
        ("1", "separate"),
        ("2", "separate"),
        ("2", "autonomous"),
    ] {
        let report = report(&[&base[..], &["--tp", tp, "--topology", topology]].concat());
        assert_sound(&report, 150.0);
        assert!(number(&report, "/verify/blocks_checked") > 0.0);
        let crosses = tp != "1" && topology != "autonomous" || topology == "separate";
        assert_eq!(
            number(&report, "/latency_us/broadcast/count") > 0.0,
            crosses,
            "{topology} {tp}"
        );
        let allocs = number(&report, "/latency_us/alloc/count");
        let mapped = number(&report, "/latency_us/alloc_mapped/count");
        assert!(mapped > 0.0 && mapped < allocs, "{mapped} of {allocs}");
        if tp == "2" {
            results.push((
                topology,
                number(&report, "/pages/mapped"),
                number(&report, "/elastic/ttft_ms/mean"),
            ));
        }
    }
    let (_, mapped, mean) = results[0];
    for (topology, other_mapped, other_mean) in &results[1..] {
        assert_eq!((*other_mapped, *other_mean), (mapped, mean), "{topology}");
    }
}

#[test]
fn every_layout_and_the_model_with_two_pools_are_served() {
    for layout in ["contiguous", "unified", "per-layer"] {
        let kv = "layers=4,kv-heads=4,head-dim=64,dtype=bf16";
        let arguments = [
            "--kv", kv, "--layout", layout, "--tp", "2", "--memory", "256MiB",
        ];
        let report = report(&[&arguments[..], &["--max-requests", "60"]].concat());
        assert_sound(&report, 60.0);
    }
    let hybrid = [
        "--model",
        "qwen3-next-80b*2",
        "--memory",
        "6GiB",
        "--max-requests",
        "40",
    ];
    assert_sound(&report(&hybrid), 40.0);
    let latent = [
        "--model",
        "deepseek-v3",
        "--memory",
        "6GiB",
        "--max-requests",
        "40",
    ];
    assert_sound(&report(&latent), 40.0);
}

#[test]
fn every_built_in_workload_is_served() {
    for workload in ["drawn", "staggered", "bursts"] {
        let arguments = [
            "--workload",
            workload,
            "--max-requests",
            "40",
            "--memory",
            "4GiB",
        ];
        let report = report(&[&arguments[..], &["--driver", "mock"]].concat());
        assert_eq!(number(&report, "/completed"), 40.0, "{workload}");
        let idle = report.pointer("/idle/over_packed").and_then(Value::as_f64);
        assert_eq!(idle.is_some(), workload == "staggered", "{report}");
        assert!(
            idle.is_none_or(|idle| (1.0..4.0).contains(&idle)),
            "{idle:?}"
        );
        let found = report.pointer("/config/trace").and_then(Value::as_str);
        assert!(
            found.is_some_and(|found| found.starts_with("built-in")),
            "{found:?}"
        );
    }
}

#[test]
fn a_replay_by_the_clock_says_how_its_processes_grew() {
    let kv = "layers=2,kv-heads=4,head-dim=64,dtype=bf16";
    let arguments = [
        "--kv",
        kv,
        "--tp",
        "2",
        "--time",
        "real",
        "--max-minutes",
        "0.05",
    ];
    let report = report(&[&arguments[..], &["--decode-ms", "1"]].concat());
    let requests = number(&report, "/requests");
    assert!(
        (2.0..100.0).contains(&requests),
        "those of three seconds: {requests}"
    );
    assert_sound(&report, requests);
    assert!(number(&report, "/growth/samples") >= 8.0, "{report}");
    for process in ["0", "1"] {
        for quarter in ["first", "last"] {
            for figure in [
                "anonymous_bytes",
                "descriptors",
                "mappings",
                "pool_mappings",
            ] {
                let pointer = format!("/growth/processes/{process}/{quarter}/{figure}");
                assert!(number(&report, &pointer) > 0.0, "{pointer}");
            }
        }
    }
    assert!(
        report.pointer("/growth/processes/2").is_none(),
        "a rank here and one beside"
    );
}

#[test]
fn an_explicit_page_size_with_uneven_pages_is_served() {
    // A block is 1.5 MiB over all layers: pages of 2 MiB hold one or none.
    let kv = "layers=24,kv-heads=8,head-dim=128,dtype=bf16";
    let arguments = ["--kv", kv, "--page-size", "2MiB", "--memory", "2GiB"];
    assert_sound(
        &report(&[&arguments[..], &["--max-requests", "12"]].concat()),
        12.0,
    );
}

#[test]
fn where_a_split_makes_requests_wait_the_elastic_pool_serves_them_sooner() {
    let folder = folder();
    let trace = bursty_trace(folder.path());
    let trace = trace.to_str().expect("a plain name");
    let report = report(&[
        "--trace",
        trace,
        "--model",
        "llama-3.1-8b*3",
        "--tp",
        "2",
        "--memory",
        "3GiB",
    ]);
    assert_sound(&report, 120.0);
    assert!(
        number(&report, "/static/waited") > 0.0,
        "the split is to be too small"
    );
    assert!(number(&report, "/elastic/ttft_ms/p99") < number(&report, "/static/ttft_ms/p99"));
    assert!(number(&report, "/elastic/waited") < number(&report, "/static/waited"));
}

#[test]
fn ranks_that_are_killed_and_stalled_cost_no_request_and_no_content() {
    for (topology, seed) in [("rank0", "1"), ("separate", "2")] {
        // Little memory for much: pages come and go all the time.
        let model = ["--model", "llama-3.1-8b*2", "--tp", "4", "--memory", "1GiB"];
        let faults = ["--chaos", seed, "--chaos-every", "4"];
        let rest = ["--topology", topology, "--max-requests", "150"];
        let report = report(&[&model[..], &faults, &rest].concat());
        assert_sound(&report, 150.0);
        let count = |name: &str| number(&report, &format!("/chaos/{name}"));
        assert!(count("kills") > 0.0 && count("stalls") > 0.0, "{report}");
        assert_eq!(count("restarts"), count("kills"));
        let recoveries = count("recovery_ms/count");
        assert!(
            recoveries >= count("kills"),
            "a rank that dies loses content"
        );
        assert!(recoveries <= count("kills") + count("stalls"));
        assert!(count("fenced") > 0.0, "coordinators meet them");
        assert!(count("requests_retried") > 0.0 && count("blocks_lost") > 0.0);
        assert!(
            count("losses") > 0.0 && count("losses") <= count("kills"),
            "a stall loses nothing"
        );
        assert!(count("retries") >= count("requests_retried"));
        assert!(count("recovery_ms/p50") <= count("recovery_ms/p99"));
        assert!(count("recovery_ms/p99") <= count("recovery_ms/max"));
    }
}

#[test]
fn the_same_seed_gives_the_same_result_and_another_seed_another() {
    let run = |seed: &str| {
        let arguments = [
            "--max-requests",
            "80",
            "--memory",
            "1GiB",
            "--driver",
            "mock",
            "--seed",
            seed,
        ];
        let report = report(&arguments);
        (
            number(&report, "/elastic/ttft_ms/mean"),
            number(&report, "/pages/mapped"),
        )
    };
    assert_eq!(run("3"), run("3"));
    assert_ne!(run("3"), run("4"));
}

#[test]
fn a_plot_and_a_table_are_made() {
    let folder = folder();
    let output = replay(
        folder.path(),
        &[
            "--max-requests",
            "50",
            "--memory",
            "1GiB",
            "--plot",
            "out.svg",
        ],
    );
    assert!(output.status.success(), "{}", text(&output.stderr));
    let table = text(&output.stdout);
    for part in ["TTFT p99", "static", "elastic", "corrupted: 0", "broadcast"] {
        assert!(table.contains(part), "{part} is not in:\n{table}");
    }
    let svg = fs::read_to_string(folder.path().join("out.svg")).expect("written");
    assert!(
        svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"),
        "whole"
    );
    assert!(svg.contains("static share"));
}

#[test]
fn bad_input_is_one_clear_error_and_nothing_is_written() {
    let folder = folder();
    let write = |name: &str, content: &str| {
        fs::write(folder.path().join(name), content).expect("writable");
    };
    write("empty.csv", "");
    write("header.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n");
    write(
        "broken.csv",
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,12,x\n",
    );
    write("broken.jsonl", "{\"timestamp\": 0, \"input_length\": 5}\n");
    write("other.txt", "hello\n");
    fs::create_dir(folder.path().join("dir")).expect("writable");
    let cases: &[(&[&str], &[&str])] = &[
        (&["--trace", "none.csv"], &["none.csv"]),
        (&["--workload", "calm"], &["calm", "staggered"]),
        (
            &["--trace", "a.csv", "--workload", "bursts"],
            &["--workload"],
        ),
        (&["--trace", "dir"], &["dir"]),
        (&["--trace", "empty.csv"], &["empty.csv", "empty"]),
        (&["--trace", "header.csv"], &["header.csv", "found none"]),
        (
            &["--trace", "broken.csv"],
            &["broken.csv", "line 2", "GeneratedTokens"],
        ),
        (&["--trace", "broken.jsonl"], &["broken.jsonl", "line 1"]),
        (&["--trace", "other.txt"], &["other.txt", "unknown format"]),
        (&["--model", "llama-3.1-8c"], &["llama-3.1-8b"]),
        (&["--model", "llama-3.1-8b*0"], &["instances"]),
        (&["--kv", "layers=3"], &["kv-heads"]),
        (&["--tp", "0"], &["--tp"]),
        (&["--tp", "3"], &["heads", "3 ranks"]),
        (&["--memory", "12parsecs"], &["12parsecs"]),
        (&["--memory", "1MiB"], &["1048576 bytes"]),
        (&["--page-size", "3MiB"], &["page"]),
        (&["--page-size", "nan"], &["nan"]),
        (&["--topology", "ring"], &["ring"]),
        (&["--driver", "tpu"], &["tpu"]),
        (&["--driver", "mock", "--verify"], &["mock"]),
        (&["--decode-ms=-1"], &["decode-ms"]),
        (&["--chaos", "1"], &["chaos", "only rank"]),
        (
            &["--chaos", "1", "--tp", "2", "--topology", "autonomous"],
            &["chaos", "autonomous"],
        ),
        (
            &["--chaos", "1", "--tp", "2", "--driver", "mock"],
            &["--chaos", "mock"],
        ),
        (
            &["--chaos", "1", "--tp", "2", "--no-verify"],
            &["--chaos", "--no-verify"],
        ),
        (&["--max-minutes", "0"], &["--max-minutes", "above 0"]),
        (&["--chaos", "x"], &["--chaos"]),
        (&["--chaos-every", "5"], &["--chaos"]),
        (
            &["--chaos", "1", "--chaos-every", "0"],
            &["--chaos-every", "above 0"],
        ),
        (&["--json", "no/such/folder/out.json"], &["no/such/folder"]),
        (&["--json", "dir"], &["dir"]),
        (&["--json", "one", "--plot", "one"], &["same file"]),
        (&["--frobnicate"], &["--frobnicate"]),
    ];
    for (arguments, parts) in cases {
        let output = replay(
            folder.path(),
            &[arguments, &["--max-requests", "5"][..]].concat(),
        );
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {said}");
        assert!(output.stdout.is_empty(), "{arguments:?} printed a result");
        for part in *parts {
            assert!(
                said.contains(part),
                "{part:?} is not in what {arguments:?} said: {said}"
            );
        }
        assert!(!said.contains("panicked"), "{said}");
        nothing_is_left(folder.path());
    }
}

#[test]
fn a_gpu_that_is_not_there_is_an_error_not_a_crash() {
    let folder = folder();
    let output = replay(
        folder.path(),
        &["--driver", "cuda:4095", "--max-requests", "5"],
    );
    assert_eq!(output.status.code(), Some(1), "{}", text(&output.stderr));
    assert!(
        text(&output.stderr).contains("no usable device"),
        "{}",
        text(&output.stderr)
    );
    nothing_is_left(folder.path());
}

#[test]
fn a_runtime_folder_that_others_can_enter_is_refused() {
    let folder = folder();
    let run = folder.path().join("run");
    fs::create_dir(&run).expect("writable");
    fs::set_permissions(&run, Permissions::from_mode(0o777)).expect("own folder");
    let output = replay(folder.path(), &["--max-requests", "5", "--tp", "2"]);
    assert_eq!(output.status.code(), Some(1), "{}", text(&output.stderr));
    assert!(
        text(&output.stderr).contains("run"),
        "{}",
        text(&output.stderr)
    );
}

/// A replay by the clock, which goes on until something happens to it.
fn endless(folder: &Path, more: &[&str]) -> Child {
    let arguments = [
        "replay",
        "--time",
        "real",
        "--tp",
        "3",
        "--kv",
        "layers=2,kv-heads=6,head-dim=64,dtype=bf16",
        "--topology",
        "separate",
    ];
    let child = kvcached(folder, &arguments)
        // A rank that dies before the others are connected is waited for so long.
        .env("KVCACHED_READY_TIMEOUT", "5")
        .args(["--memory", "256MiB", "--max-requests", "5000"])
        .args(more)
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the binary starts");
    // All ranks listen as soon as their sockets are there.
    let sockets =
        |rank: u32| folder.join(format!("run/replay-{}/model-0/s0-r{rank}.sock", child.id()));
    eventually("all ranks listen", || {
        (0..3).all(|rank| sockets(rank).exists())
    });
    child
}

/// Waits for other processes, but not for ever.
#[expect(
    clippy::disallowed_methods,
    reason = "what other processes do can only be waited for"
)]
fn eventually(what: &str, happened: impl Fn() -> bool) {
    let start = Instant::now();
    while !happened() {
        assert!(
            start.elapsed() < Duration::from_secs(30),
            "{what}: not within 30 s"
        );
        std::thread::yield_now();
    }
}

/// Process ids of the ranks of a replay.
fn ranks(replay: &Child) -> Vec<i32> {
    let task = format!("/proc/{0}/task/{0}/children", replay.id());
    let children = fs::read_to_string(task).expect("it runs");
    children
        .split_whitespace()
        .map(|id| id.parse().expect("a number"))
        .collect()
}

fn is_running(id: i32) -> bool {
    // One that has ended and was not waited for is gone, too.
    fs::read_to_string(format!("/proc/{id}/stat")).is_ok_and(|stat| !stat.contains(") Z "))
}

fn end(mut child: Child) -> (Option<i32>, String) {
    let mut said = String::new();
    child
        .stderr
        .take()
        .expect("a pipe")
        .read_to_string(&mut said)
        .expect("text");
    (child.wait().expect("a child").code(), said)
}

#[test]
fn ctrl_c_ends_every_process_and_leaves_nothing() {
    for signal in [Signal::SIGINT, Signal::SIGTERM] {
        let folder = folder();
        let child = endless(folder.path(), &[]);
        let ranks = ranks(&child);
        assert_eq!(ranks.len(), 3);
        let id = i32::try_from(child.id()).expect("a process id");
        kill(Pid::from_raw(id), signal).expect("it runs");
        let (status, said) = end(child);
        assert_eq!(status, Some(130), "{said}");
        assert!(said.contains("interrupted after"), "{said}");
        assert!(!ranks.iter().any(|id| is_running(*id)), "a rank goes on");
        nothing_is_left(folder.path());
    }
}

#[test]
fn ctrl_c_while_a_rank_is_stalled_ends_every_process_and_leaves_nothing() {
    let folder = folder();
    let child = endless(folder.path(), &["--chaos", "1", "--chaos-every", "0.1"]);
    let is_stopped = |id: &i32| {
        let stat = fs::read_to_string(format!("/proc/{id}/stat"));
        stat.is_ok_and(|stat| stat.contains(") T "))
    };
    eventually("a rank is stopped", || ranks(&child).iter().any(is_stopped));
    let ranks = ranks(&child);
    let id = i32::try_from(child.id()).expect("a process id");
    kill(Pid::from_raw(id), Signal::SIGINT).expect("it runs");
    let (status, said) = end(child);
    assert_eq!(status, Some(130), "{said}");
    assert!(!ranks.iter().any(|id| is_running(*id)), "a rank goes on");
    nothing_is_left(folder.path());
}

#[test]
fn a_dying_rank_ends_the_replay_with_its_name_and_leaves_nothing() {
    let folder = folder();
    let child = endless(folder.path(), &[]);
    let ranks = ranks(&child);
    kill(Pid::from_raw(ranks[1]), Signal::SIGKILL).expect("it runs");
    let (status, said) = end(child);
    assert_eq!(status, Some(1), "{said}");
    assert!(said.contains("rank 1"), "{said}");
    assert!(!ranks.iter().any(|id| is_running(*id)), "a rank goes on");
    nothing_is_left(folder.path());
}

#[test]
fn ranks_end_when_the_replay_is_killed_and_take_their_sockets_away() {
    let folder = folder();
    let mut child = endless(folder.path(), &[]);
    let ranks = ranks(&child);
    let model = folder
        .path()
        .join(format!("run/replay-{}/model-0", child.id()));
    child.kill().expect("it runs");
    child.wait().expect("a child");
    eventually("all ranks end", || !ranks.iter().any(|id| is_running(*id)));
    assert!(!model.exists(), "the sockets are gone");
}

#[test]
fn a_rank_started_by_hand_says_that_it_is_not_for_hands() {
    let folder = folder();
    let output = kvcached(folder.path(), &["rank"])
        .stdin(Stdio::null())
        .output()
        .expect("starts");
    assert_eq!(output.status.code(), Some(1));
    assert!(
        text(&output.stderr).contains("started by a replay"),
        "{}",
        text(&output.stderr)
    );
}

/// The traces that are published, where they lie beside the workspace.
fn published(name: &str) -> Option<String> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../../shared/data")
        .join(name);
    if path.exists() {
        return Some(path.to_str().expect("a plain name").to_owned());
    }
    println!("skipped: {name} is not at {}", path.display());
    None
}

#[test]
fn published_traces_are_served() {
    if let Some(trace) = published("azure-llm-2023-conv.csv") {
        let arguments = [
            "--trace",
            &trace,
            "--tp",
            "2",
            "--memory",
            "2GiB",
            "--max-requests",
            "400",
        ];
        assert_sound(&report(&arguments), 400.0);
    }
    if let Some(trace) = published("mooncake-fast25-conversation.jsonl") {
        let arguments = [
            "--trace",
            &trace,
            "--tp",
            "2",
            "--memory",
            "16GiB",
            "--max-requests",
            "60",
        ];
        let report = report(&arguments);
        assert_sound(&report, 60.0);
        assert!(
            number(&report, "/elastic/reused_tokens") > 0.0,
            "prefixes are shared"
        );
    }
}

//! Where the sockets lie, as whole processes see it: what is wrong with the place ends the start,
//! and says which place. The rules themselves are tested where they are made.

use std::fs::{self, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::sync::Arc;

use kvcached_mapper::Layout;
use kvcached_tp_ipc::{Endpoint, RuntimeDir};
use kvcached_vmm::{Driver, Host, HostConfig};
use nix::unistd::geteuid;

use crate::ranks::{POOL, Place, WorkerProcess, folder, program, scheduler};

const DEVICE: &str = "host:268435456";
const LAYOUT: Layout = Layout::Contiguous;

/// The user that owns nothing.
const NOBODY: u32 = 65_534;

/// The words after the program of a rank and of a coordinator with sockets in `folder`.
fn processes(folder: &Path, name: &str) -> [Command; 2] {
    let mut rank = Command::new(program());
    rank.arg(folder)
        .args([name, "0", "0", DEVICE, "contiguous", "268435456"]);
    let mut coordinator = Command::new(env!("CARGO_BIN_EXE_process"));
    coordinator
        .arg("coordinator")
        .arg(folder)
        .args([name, "1", "1", "0", "1000", "1000"]);
    [rank, coordinator]
}

/// What a process says that does not come up, or ends when its standard input has.
fn output(command: &mut Command) -> Output {
    command
        .stdin(Stdio::null())
        .output()
        .expect("it is built beside the tests")
}

fn fails_saying(command: &mut Command, parts: &[&str], case: &str) {
    let output = output(command);
    assert!(!output.status.success(), "{case}");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    for part in parts {
        assert!(said.contains(part), "{case}: {part} is not in: {said}");
    }
}

#[test]
fn a_place_that_is_not_there_is_made_by_whoever_comes_first() {
    let folder = folder();
    let place = folder.path().join("not/there/yet");
    let worker = WorkerProcess::start(&place, "engine", (0, 0), DEVICE, LAYOUT);
    let scheduler = scheduler::<Host>(&place, "engine", Place::Separate(1, 1), LAYOUT, None);
    scheduler.expect("they meet there");
    drop(worker);
    let mode = fs::metadata(&place).expect("it was made").mode();
    assert_eq!(mode & 0o777, 0o700);
}

#[test]
fn a_place_that_is_not_ours_alone_ends_the_start_of_every_process() {
    let folder = folder();
    let file = folder.path().join("file");
    fs::write(&file, "").expect("a folder of this test");
    let open = folder.path().join("open");
    fs::create_dir(&open).expect("a folder of this test");
    fs::set_permissions(&open, Permissions::from_mode(0o755)).expect("it is ours");
    let mut cases = vec![(file, "NotADirectory"), (open, "WrongMode")];
    if geteuid().is_root() {
        let theirs = folder.path().join("theirs");
        fs::create_dir(&theirs).expect("a folder of this test");
        fs::set_permissions(&theirs, Permissions::from_mode(0o700)).expect("it is ours");
        chown(&theirs, Some(NOBODY), None).expect("root may");
        cases.push((theirs, "WrongOwner"));
    } else {
        eprintln!("one case skipped: only root can give a directory away");
    }
    for (place, word) in cases {
        let path = place.to_str().expect("a folder of this test");
        for mut command in processes(&place, "engine") {
            fails_saying(&mut command, &[path, word], word);
        }
    }
}

/// That a connection of another user is refused where it does get through is tested with sockets.
#[test]
fn another_user_does_not_even_get_to_see_the_socket() {
    if !geteuid().is_root() {
        eprintln!("skipped: only root can start a process of another user");
        return;
    }
    let folder = folder();
    // A place that both can reach.
    fs::set_permissions(folder.path(), Permissions::from_mode(0o755)).expect("it is ours");
    let place = folder.path().join("place");
    let _worker = WorkerProcess::start(&place, "engine", (0, 0), DEVICE, LAYOUT);
    let sees = |uid, path: &Path| {
        let mut test = Command::new("test");
        let status = test.arg("-e").arg(path).uid(uid).current_dir("/").status();
        status.expect("every system has it").success()
    };
    let socket = place.join("engine/s0-r0.sock");
    assert!(sees(0, &socket));
    assert!(sees(NOBODY, &place), "up to here anybody gets");
    assert!(!sees(NOBODY, &socket));
}

/// Needs a disk of its own to fill, so it needs root, and a system that lets root mount one.
#[test]
fn a_place_without_room_ends_the_start_and_keeps_nothing() {
    let folder = folder();
    let mounts = |options: &str, command: &Command, then: &str| {
        // In a name space of its own, which goes with the process.
        let script = format!(
            "mount -t tmpfs -o mode=0700,{options} none \"$PLACE\" || exit 99; \"$@\"; code=$?; \
             {then}; exit $code"
        );
        let mut shell = Command::new("unshare");
        shell
            .args(["--mount", "sh", "-c", &script, "sh"])
            .env("PLACE", folder.path());
        shell.arg(command.get_program()).args(command.get_args());
        shell
    };
    let probe = output(&mut mounts("size=64k", &Command::new("true"), "true"));
    if !geteuid().is_root() || !probe.status.success() {
        eprintln!("skipped: no disk can be mounted here");
        return;
    }
    let path = folder.path().join("engine");
    let path = path.to_str().expect("a folder of this test");
    for command in processes(folder.path(), "engine") {
        let full = "no inode for the directory";
        fails_saying(
            &mut mounts("nr_inodes=1", &command, "true"),
            &[path, "No space left"],
            full,
        );
        let read_only = "nothing may be written";
        fails_saying(
            &mut mounts("ro", &command, "true"),
            &[path, "Read-only"],
            read_only,
        );
    }
    // Room for the directory, and none for the socket.
    let [rank, _] = processes(folder.path(), "engine");
    let endpoint = format!("{path}/s0-r0.sock");
    let case = "no inode for the socket";
    let empty = "test -z \"$(ls -A \"$PLACE\")\" || code=98";
    let mut full = mounts("nr_inodes=2", &rank, empty);
    fails_saying(&mut full, &[&endpoint, "No space left"], case);
    assert_ne!(
        output(&mut full).status.code(),
        Some(98),
        "it took its directory away again"
    );
}

#[test]
fn engines_whose_names_are_cleaned_or_shortened_alike_do_not_meet() {
    let folder = folder();
    let long = "a-name-that-is-too-long-for-a-directory-".repeat(3);
    let names = [
        "a/b",
        "a b",
        "a:b",
        "../b",
        &format!("{long}1"),
        &format!("{long}2"),
    ];
    let mut engines: Vec<_> = names
        .iter()
        .map(|name| {
            let worker = WorkerProcess::start(folder.path(), name, (0, 0), DEVICE, LAYOUT);
            let place = Place::Separate(1, 1);
            let scheduler = scheduler::<Host>(folder.path(), name, place, LAYOUT, None);
            (worker, scheduler.expect("its rank listens"))
        })
        .collect();
    for (at, (_, scheduler)) in engines.iter().enumerate() {
        let pool = scheduler.pool(POOL).expect("the one pool");
        pool.alloc(u32::try_from(at).expect("few") + 1)
            .expect("there is room");
    }
    for (at, (worker, _)) in engines.iter_mut().enumerate() {
        let pages: u64 = crate::crew::pages(&worker.mapped());
        let own = u64::try_from(at).expect("few") + 2;
        assert_eq!(pages, own, "{}: its own, and the null block's", names[at]);
    }
    drop(engines);
    assert_eq!(fs::read_dir(folder.path()).expect("a folder").count(), 0);
}

#[test]
fn the_longest_path_that_a_socket_can_have_serves_and_a_longer_one_ends_the_start() {
    let folder = folder();
    let longest_name = "/engine/s65535-r65535.sock".len();
    let resolved = RuntimeDir::open(folder.path()).expect("a folder of this test");
    let room = Endpoint::MAX_BYTES - longest_name - resolved.path().as_os_str().len() - 1;
    let fits = resolved.path().join("d".repeat(room));
    let place = Place::Rank0(2);
    let _worker = WorkerProcess::start(&fits, "engine", (0, 1), DEVICE, LAYOUT);
    let device = Arc::new(Host::new(HostConfig::new(256 << 20)).expect("a device"));
    let driver = Some(Arc::clone(&device));
    scheduler(&fits, "engine", place, LAYOUT, driver).expect("its rank listens");
    assert_eq!(device.memory().expect("it can be asked").free, 256 << 20);

    let too_long = resolved.path().join("d".repeat(room + 1));
    let path = too_long.to_str().expect("a folder of this test");
    for mut command in processes(&too_long, "engine") {
        fails_saying(&mut command, &[path, "TooLong"], "a byte too many");
    }
}

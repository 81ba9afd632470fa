//! What must hold of bytes from outside holds of every file in `fuzz/corpus`, from which fuzzing
//! sets out, and in `fuzz/regressions`, where it found that something did not.

#[cfg(test)]
#[path = "../../fuzz/src/lib.rs"]
#[expect(unreachable_pub, reason = "the fuzz targets see it from outside")]
mod fuzz;

use std::path::{Path, PathBuf};
use std::{fs, io};

/// Checks every kept file of `target`.
#[expect(clippy::print_stdout, reason = "shown beside what did not hold")]
fn check_all(target: &str, check: fn(&[u8])) {
    let mut files = files(&folder("corpus", target)).expect("each target has a corpus");
    assert!(!files.is_empty(), "the corpus of {target} is empty");
    match self::files(&folder("regressions", target)) {
        Ok(found) => files.extend(found),
        // Nothing was ever found.
        Err(error) => assert_eq!(error.kind(), io::ErrorKind::NotFound, "{error}"),
    }
    for file in files {
        println!("{}", file.display());
        check(&fs::read(&file).expect("a file that can be read"));
    }
}

fn folder(kind: &str, target: &str) -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz");
    root.join(kind).join(target)
}

fn files(folder: &Path) -> io::Result<Vec<PathBuf>> {
    let mut files = fs::read_dir(folder)?
        .map(|entry| Ok(entry?.path()))
        .collect::<io::Result<Vec<_>>>()?;
    files.sort();
    Ok(files)
}

#[test]
fn frames_are_the_same_however_they_are_cut() {
    check_all("frame", fuzz::frame);
}

#[test]
fn greetings_are_said_again_as_they_were_read() {
    check_all("greeting", fuzz::greeting);
}

#[test]
fn requests_are_said_again_as_they_were_read() {
    check_all("request", fuzz::request);
}

#[test]
fn messages_are_said_again_as_they_were_read() {
    check_all("message", fuzz::message);
}

#[test]
fn no_coordinator_brings_a_worker_out_of_its_pool() {
    check_all("conversation", fuzz::conversation);
}

#[test]
fn azure_traces_are_read_in_range_or_refused_by_line() {
    check_all("azure", fuzz::azure);
}

#[test]
fn mooncake_traces_are_read_in_range_or_refused_by_line() {
    check_all("mooncake", fuzz::mooncake);
}

#[test]
fn burst_traces_are_read_in_range_or_refused_by_line() {
    check_all("burst", fuzz::burst);
}

/// What fuzzing sets out from is real: a format that changed needs
/// `cargo test -p kvcached-tests --test fuzz -- --ignored`.
#[test]
fn the_corpus_holds_todays_encodings() {
    for seed in fuzz::seeds() {
        let file = folder("corpus", seed.target).join(&seed.name);
        let kept = fs::read(&file).unwrap_or_default();
        assert!(kept == seed.bytes, "{} is out of date", file.display());
    }
}

#[test]
#[ignore = "writes the corpus"]
fn write_the_corpus() {
    for seed in fuzz::seeds() {
        let folder = folder("corpus", seed.target);
        fs::create_dir_all(&folder).expect("a folder");
        fs::write(folder.join(&seed.name), &seed.bytes).expect("a file");
    }
}

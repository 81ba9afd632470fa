//! The benchmark as a program, with host memory for a device: what it measures there means
//! nothing, but every row has to come about, ranks in processes of their own included.

use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;

fn bench_program(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_kvcached-bench-gpu"))
        .args(arguments)
        .output()
        .expect("the program was built")
}

fn bench(arguments: &[&str]) -> Output {
    bench_program(&[&["--driver", "host", "--quick"], arguments].concat())
}

fn read(file: &Path) -> Value {
    let text = std::fs::read_to_string(file).expect("it was written");
    serde_json::from_str(&text).expect("it is JSON")
}

#[test]
fn every_row_comes_about_with_all_its_samples_and_floors() {
    let folder = tempfile::tempdir().expect("there is a place for files");
    let json = folder.path().join("bench.json");
    let output = bench(&["--json", json.to_str().expect("a plain path")]);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{said}");

    let document = read(&json);
    let rows = document["rows"].as_array().expect("rows");
    let named = |name: &str| {
        let row = rows.iter().find(|row| row["name"] == name);
        row.unwrap_or_else(|| panic!("there is no {name}"))
    };
    for name in [
        "warm-1",
        "warm-256-pool",
        "available",
        "cold-16384-contiguous",
        "cold-4096-per-layer:back",
        "grow-1-contiguous-kept",
        "grow-16-per-layer",
        "create-per-layer",
        "empty-pool-bytes-contiguous",
        "broadcast-8",
        "pinned-16-single",
        "staggered-idle",
    ] {
        assert!(
            !named(name)["samples"]
                .as_array()
                .expect("samples")
                .is_empty(),
            "{name}"
        );
    }
    for name in ["cold-16384-contiguous", "grow-1-per-layer", "broadcast-4"] {
        let row = named(name);
        let count = |of: &str| row[of].as_array().map_or(0, Vec::len);
        assert_eq!(count("samples"), count("floor"), "{name}");
    }
    // One page a tensor, and as many chunks as there are tensors and buffers.
    assert_eq!(named("grow-1-per-layer:chunks")["samples"][0], 64.0);
    assert_eq!(named("grow-1-unified:chunks")["samples"][0], 32.0);
    assert_eq!(named("grow-1-contiguous:chunks")["samples"][0], 1.0);
    // Addresses are no memory; the granule of zeros is one.
    assert_eq!(named("empty-pool-bytes-per-layer")["samples"][0], 0.0);
    assert_eq!(
        named("empty-pool-bytes-per-layer-zero")["samples"][0],
        f64::from(2 << 20)
    );
    // Where a page is a block, survivors pin nothing but themselves.
    assert_eq!(named("pinned-16-single")["samples"][0], 1.0);
}

#[test]
fn another_systems_rows_stand_beside_ours() {
    let folder = tempfile::tempdir().expect("there is a place for files");
    let other = folder.path().join("other.json");
    let rows = r#"{"rows": [{"name": "pinned-16", "unit": "ratio", "samples": [16]}]}"#;
    std::fs::write(&other, rows).expect("the folder is ours");
    let other = other.to_str().expect("a plain path");

    let output = bench(&["--only", "pinned-16-single", "--beside", other]);

    let table = String::from_utf8_lossy(&output.stdout).into_owned();
    let line = table
        .lines()
        .find(|line| line.starts_with("| pinned-16-single "));
    let cells: Vec<&str> = line.expect(&table).split('|').map(str::trim).collect();
    assert_eq!(
        cells[2..10],
        ["ratio", "1", "1", "1", "1", "1.00", "16", "16.0"]
    );
    assert!(!table.contains("| warm"), "{table}");

    let shown = bench_program(&["--show", other]);
    let shown = String::from_utf8_lossy(&shown.stdout).into_owned();
    assert!(shown.contains("| pinned-16 | ratio | "), "{shown}");
}

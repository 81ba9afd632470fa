//! `cargo xtask tidy`: the repository's own rules, those that no compiler or lint checks.
//!
//! - Crates depend on each other only along the arrows of ARCHITECTURE.md.
//! - Nothing below `integrations` names an engine.
//! - Unsafe code stands in the listed files only.
//! - Every test that `GUARANTEES.md` and `docs/faults.md` name exists, and where they say.

use std::fs;
use std::path::{Path, PathBuf};

use crate::process;

/// Which crates of the workspace each may depend on (normal dependencies).
const EDGES: &[(&str, &[&str])] = &[
    ("vmm", &[]),
    ("mapper", &["vmm"]),
    ("page-alloc", &["mapper"]),
    ("manager", &["page-alloc", "mapper"]),
    ("tp-ipc", &["mapper"]),
    (
        "integrations",
        &["manager", "page-alloc", "mapper", "tp-ipc", "vmm"],
    ),
    (
        "replay",
        &[
            "integrations",
            "manager",
            "page-alloc",
            "mapper",
            "tp-ipc",
            "vmm",
        ],
    ),
    ("sim", &["manager", "page-alloc", "mapper", "tp-ipc", "vmm"]),
    ("cli", &["replay", "integrations", "tp-ipc", "mapper"]),
];

/// Crates that serve any engine and so name none.
const ENGINE_FREE: &[&str] = &["vmm", "mapper", "page-alloc", "manager", "tp-ipc"];
const ENGINES: &[&str] = &["vllm", "sglang", "llama.cpp", "tensorrt"];

/// The only files with unsafe code; ARCHITECTURE.md says why each.
const UNSAFE_FILES: &[&str] = &[
    "crates/vmm/src/host.rs",
    "crates/vmm/src/cuda.rs",
    "tests/gpu/watch.rs",
];

/// What promises something and names the tests that hold it.
const PROMISES: &[&str] = &["GUARANTEES.md", "docs/faults.md"];

/// Checks all rules and names every breach.
pub(crate) fn run() -> Result<(), String> {
    println!("$ tidy");
    let root = process::root();
    let mut breaches = Vec::new();
    let mut files = Vec::new();
    for folder in [
        "crates",
        "xtask",
        "tests",
        "benches",
        "fuzz/src",
        "fuzz/fuzz_targets",
    ] {
        rust_files(&root.join(folder), &mut files)?;
    }
    check_edges(&root, &mut breaches)?;
    let mut sources = Vec::new();
    for file in &files {
        let text = read(file)?;
        let name = file
            .strip_prefix(&root)
            .expect("found below the root")
            .display()
            .to_string();
        check_engines(&name, &text, &mut breaches);
        check_unsafe(&name, &text, &mut breaches);
        sources.push((name, text));
    }
    for promise in PROMISES {
        check_named(
            promise,
            &read(&root.join(promise))?,
            &sources,
            &mut breaches,
        );
    }
    if breaches.is_empty() {
        return Ok(());
    }
    for breach in &breaches {
        println!("{breach}");
    }
    Err(format!(
        "{} breaches of the repository's rules",
        breaches.len()
    ))
}

fn check_edges(root: &Path, breaches: &mut Vec<String>) -> Result<(), String> {
    let crates = fs::read_dir(root.join("crates")).map_err(|error| format!("crates: {error}"))?;
    for entry in crates {
        let folder = entry.map_err(|error| format!("crates: {error}"))?.path();
        let name = folder
            .file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned();
        let Some((_, allowed)) = EDGES.iter().find(|(known, _)| *known == name) else {
            breaches.push(format!(
                "crates/{name}: not in the crate graph (xtask/src/tidy.rs)"
            ));
            continue;
        };
        for dependency in dependencies(&read(&folder.join("Cargo.toml"))?) {
            if !allowed.contains(&dependency.as_str()) {
                breaches.push(format!(
                    "crates/{name}: depends on {dependency}, against the arrows"
                ));
            }
        }
    }
    Ok(())
}

/// Crates of this workspace named in the `[dependencies]` of a manifest.
fn dependencies(manifest: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut inside = false;
    for line in manifest.lines() {
        if line.starts_with('[') {
            inside = line.trim() == "[dependencies]";
        } else if inside && let Some(rest) = line.strip_prefix("kvcached-") {
            found.push(
                rest.split(['.', ' ', '='])
                    .next()
                    .unwrap_or_default()
                    .to_owned(),
            );
        }
    }
    found
}

fn check_engines(name: &str, text: &str, breaches: &mut Vec<String>) {
    let inside = |folder: &&&str| name.starts_with(&format!("crates/{folder}/src/"));
    if ENGINE_FREE.iter().find(inside).is_none() {
        return;
    }
    for (number, line) in text.lines().enumerate() {
        let lower = line.to_lowercase();
        for engine in ENGINES.iter().filter(|engine| lower.contains(*engine)) {
            breaches.push(format!("{name}:{}: names the engine {engine}", number + 1));
        }
    }
}

fn check_unsafe(name: &str, text: &str, breaches: &mut Vec<String>) {
    if UNSAFE_FILES.contains(&name) || name == "xtask/src/tidy.rs" {
        return;
    }
    for (number, line) in text.lines().enumerate() {
        let code = line.split("//").next().unwrap_or_default();
        let opens = [
            "unsafe {",
            "unsafe fn",
            "unsafe impl",
            "unsafe extern",
            "(unsafe_code",
        ];
        if opens.iter().any(|open| code.contains(open)) {
            breaches.push(format!(
                "{name}:{}: unsafe code outside the listed files",
                number + 1
            ));
        }
    }
}

/// Tests are named by code spans that are paths of theirs: `crate::module::test`, or
/// `crate/tests/target::module::test` for those beside the sources. A path whose last part has no
/// underscore names no test.
fn check_named(
    promise: &str,
    text: &str,
    sources: &[(String, String)],
    breaches: &mut Vec<String>,
) {
    for (number, line) in text.lines().enumerate() {
        if line.matches('`').count() % 2 == 1 {
            breaches.push(format!(
                "{promise}:{}: a code span that goes on in another line is not looked at",
                number + 1
            ));
        }
        for span in line.split('`').skip(1).step_by(2) {
            let Some((place, test)) = span.rsplit_once("::") else {
                continue;
            };
            let named = |(file, text): &(String, String)| {
                is_at(place, file) && text.contains(&format!("fn {test}("))
            };
            if test.contains('_') && !sources.iter().any(named) {
                breaches.push(format!("{promise}:{}: there is no {span}", number + 1));
            }
        }
    }
}

/// Can what is at `place`, as in `mapper::local::tests`, stand in `file`? A module may be a file or
/// a part of one, and a target of tests need not be called as its folder.
fn is_at(place: &str, file: &str) -> bool {
    let place = place.replace("::", "/");
    let Some((krate, modules)) = place.split_once('/') else {
        return file.starts_with(&format!("crates/{place}/src/"));
    };
    let rest = match krate {
        "tests" | "fuzz" | "xtask" => file.strip_prefix(&format!("{krate}/")),
        _ => file.strip_prefix(&format!("crates/{krate}/")),
    };
    let Some(rest) = rest.and_then(|rest| rest.strip_suffix(".rs")) else {
        return false;
    };
    let mut modules = modules.split('/');
    rest.split('/')
        .filter(|part| !["src", "main", "lib", "mod"].contains(part))
        .all(|part| modules.any(|module| module == part))
}

fn rust_files(folder: &Path, found: &mut Vec<PathBuf>) -> Result<(), String> {
    let entries = match fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(format!("{}: {error}", folder.display())),
    };
    for entry in entries {
        let path = entry
            .map_err(|error| format!("{}: {error}", folder.display()))?
            .path();
        if path.is_dir() {
            rust_files(&path, found)?;
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
    Ok(())
}

fn read(path: &Path) -> Result<String, String> {
    fs::read_to_string(path).map_err(|error| format!("{}: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_normal_dependencies_count_as_edges() {
        let manifest = "[dependencies]\nkvcached-vmm.workspace = true\nnix.workspace = true\n\
                        [dev-dependencies]\nkvcached-mapper = { workspace = true }\n";
        assert_eq!(dependencies(manifest), ["vmm"]);
    }

    #[test]
    fn an_engine_named_low_down_is_a_breach() {
        let mut breaches = Vec::new();
        check_engines("crates/vmm/src/lib.rs", "// as vLLM does", &mut breaches);
        check_engines(
            "crates/integrations/src/vllm.rs",
            "// as vLLM does",
            &mut breaches,
        );
        assert_eq!(breaches.len(), 1, "{breaches:?}");
    }

    #[test]
    fn unsafe_code_outside_the_listed_files_is_a_breach() {
        let mut breaches = Vec::new();
        check_unsafe("crates/vmm/src/host.rs", "unsafe { f() }", &mut breaches);
        check_unsafe(
            "crates/mapper/src/local.rs",
            "// unsafe { in a comment }",
            &mut breaches,
        );
        assert!(breaches.is_empty(), "{breaches:?}");
        check_unsafe(
            "crates/mapper/src/local.rs",
            "unsafe { f() }",
            &mut breaches,
        );
        assert_eq!(breaches.len(), 1, "{breaches:?}");
    }

    #[test]
    fn a_promise_that_names_no_test_or_another_place_is_a_breach() {
        let source = |file: &str, test: &str| (file.to_owned(), format!("fn {test}() {{"));
        let sources = [
            source("crates/mapper/src/local/tests/faults.rs", "it_holds"),
            source("crates/tp-ipc/tests/local_first.rs", "all_or_none"),
            source("tests/host/processes.rs", "a_rank_dies"),
            source("crates/vmm/src/span.rs", "an_end_is_inside"),
        ];
        let named = |text: &str| {
            let mut breaches = Vec::new();
            check_named("GUARANTEES.md", text, &sources, &mut breaches);
            breaches
        };
        for good in [
            "Held by `mapper::local::tests::faults::it_holds`, `Pool::free` and `one_word`.",
            "| x | `tp-ipc/tests/ranks::local_first::all_or_none` |",
            "`tests/host::processes::a_rank_dies`, `vmm::span::tests::an_end_is_inside`",
        ] {
            assert_eq!(named(good), Vec::<String>::new(), "{good}");
        }
        for bad in [
            "`mapper::local::tests::faults::it_held`",
            "`mapper::local::tests::it_holds`",
            "`manager::local::tests::faults::it_holds`",
            "`tp-ipc/tests/ranks::sockets::all_or_none`",
            "`vmm::span::tests::an_end_is_inside",
        ] {
            assert_eq!(named(bad).len(), 1, "{bad}");
        }
        let second = named("fine\n`vmm::span::tests::a_beginning_is_inside`");
        assert_eq!(
            second,
            ["GUARANTEES.md:2: there is no vmm::span::tests::a_beginning_is_inside"]
        );
    }
}

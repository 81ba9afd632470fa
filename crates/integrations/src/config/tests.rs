use std::collections::HashMap;
use std::os::unix::ffi::OsStringExt;

use kvcached_mapper::{KvBuffers, PoolSpec};
use proptest::prelude::*;

use super::*;
use crate::testing::logged;

const IDS: ProcessIds = ProcessIds {
    uid: 1000,
    process_group: 4711,
};

fn resolve(pairs: &[(&str, &str)]) -> Result<Config, ConfigError> {
    let values: HashMap<&str, &str> = pairs.iter().copied().collect();
    Config::from_lookup(|name| values.get(name).map(OsString::from), IDS)
}

#[test]
fn every_variable_is_optional() {
    let config = resolve(&[]).unwrap();
    assert_eq!(config.runtime_dir, PathBuf::from("/tmp/kvcached-1000"));
    assert_eq!(config.instance.as_str(), "pg4711");
    assert_eq!(config.topology, None);
    assert_eq!(config.layout, Layout::Contiguous);
    assert_eq!(config.page_size, PageSize::Auto);
    assert_eq!(config.cold, Cold::Unbacked);
    assert_eq!(config.reserve, ReserveBounds { min: 0, max: None });
    assert_eq!(config.runs, RunChoice::default());
    assert_eq!(config.recycler, RecyclerConfig::default());
    assert_eq!(config.ipc_timeout, Duration::from_secs(60));
    assert_eq!(config.orphan_timeout, Duration::from_secs(150));
    assert_eq!(config.retire_timeout, Duration::from_millis(50));
    assert_eq!(config.ready_timeout, Duration::from_secs(60));
    assert_eq!(config.device, Device::Cuda { ordinal: 0 });
    let empty: Vec<_> = VARIABLES
        .iter()
        .map(|variable| (variable.name, ""))
        .collect();
    assert_eq!(resolve(&empty), Ok(config), "an empty value is none");
}

#[test]
fn the_documentation_lists_every_variable() {
    let documentation = include_str!("variables.rs");
    for Variable {
        name,
        allowed,
        default,
        ..
    } in VARIABLES
    {
        let row = format!("/// | `{name}` | {allowed} | {default} |\n");
        assert!(documentation.contains(&row), "missing: {row}");
    }
}

#[test]
fn every_variable_takes_effect() {
    let config = resolve(&[
        ("KVCACHED_RUNTIME_DIR", "/run/kv"),
        ("KVCACHED_INSTANCE", "llama"),
        ("KVCACHED_TOPOLOGY", "rank0"),
        ("KVCACHED_LAYOUT", "per-layer"),
        ("KVCACHED_PAGE_SIZE", "4m"),
        ("KVCACHED_COLD", "zero"),
        ("KVCACHED_MIN_RESERVED_PAGES", "3"),
        ("KVCACHED_MAX_RESERVED_PAGES", "5"),
        ("KVCACHED_MAX_RUN_PAGES", "64"),
        ("KVCACHED_BULK_RUN_BYTES", "256m"),
        ("KVCACHED_BULK_FROM_BYTES", "2 GiB"),
        ("KVCACHED_GROWTH_CHUNKS", "2"),
        ("KVCACHED_CALM_BYTES", "0"),
        ("KVCACHED_CHUNK_POOL_BYTES", "1g"),
        ("KVCACHED_CHUNK_POOL_IDLE", "0.1"),
        ("KVCACHED_IPC_TIMEOUT", "1.5"),
        ("KVCACHED_ORPHAN_TIMEOUT", "7"),
        ("KVCACHED_RETIRE_TIMEOUT", "0.25"),
        ("KVCACHED_READY_TIMEOUT", "300"),
        ("KVCACHED_DEVICE", "cuda:3"),
    ]);
    let config = config.unwrap();
    assert_eq!(config.runtime_dir, PathBuf::from("/run/kv"));
    assert_eq!(config.instance.as_str(), "llama");
    assert_eq!(config.topology, Some(TopologyMode::Rank0));
    assert_eq!(config.layout, Layout::PerLayer);
    assert_eq!(config.page_size, PageSize::Bytes(4 << 20));
    assert_eq!(config.cold, Cold::Zero);
    assert_eq!(config.reserve, Reserve { min: 3, max: 5 }.into());
    let runs = RunChoice {
        longest: RunLength::Pages(NonZeroU32::new(64).unwrap()),
        bulk: RunLength::Bytes(256 << 20),
        bulk_from_bytes: 2 << 30,
        growth_chunks: NonZeroU32::new(2).unwrap(),
        short_runs: NonZeroU32::new(16).unwrap(),
        calm_bytes: 0,
    };
    assert_eq!(config.runs, runs);
    let recycler = RecyclerConfig {
        limit_bytes: 1 << 30,
        idle: Duration::from_millis(100),
    };
    assert_eq!(config.recycler, recycler);
    assert_eq!(config.ipc_timeout, Duration::from_millis(1500));
    assert_eq!(config.orphan_timeout, Duration::from_secs(7));
    assert_eq!(config.retire_timeout, Duration::from_millis(250));
    assert_eq!(config.ready_timeout, Duration::from_secs(300));
    assert_eq!(config.device, Device::Cuda { ordinal: 3 });
    let config = resolve(&[
        ("KVCACHED_MAX_RUN_BYTES", "8MiB"),
        ("KVCACHED_CHUNK_POOL_BYTES", "0"),
        ("KVCACHED_DEVICE", "host"),
    ]);
    let config = config.unwrap();
    let runs = RunChoice {
        longest: RunLength::Bytes(8 << 20),
        bulk: RunLength::Bytes(8 << 20),
        ..RunChoice::default()
    };
    assert_eq!((config.runs, config.device), (runs, Device::Host));
    assert_eq!(config.recycler.limit_bytes, 0);
}

#[test]
fn a_bad_value_is_named_with_what_is_allowed() {
    let bad: &[(&str, &[&str])] = &[
        ("KVCACHED_RUNTIME_DIR", &["relative/path", "."]),
        ("KVCACHED_TOPOLOGY", &["rank1", "Separate", "2"]),
        ("KVCACHED_LAYOUT", &["per_layer", "true"]),
        (
            "KVCACHED_PAGE_SIZE",
            &["0", "-2m", "2 mebibytes", "two", "99999999T"],
        ),
        ("KVCACHED_COLD", &["none", "ZERO"]),
        (
            "KVCACHED_MIN_RESERVED_PAGES",
            &["-1", "1.5", "many", "4294967296"],
        ),
        ("KVCACHED_MAX_RESERVED_PAGES", &["-1", "x"]),
        ("KVCACHED_MAX_RUN_PAGES", &["0", "65", "-1"]),
        ("KVCACHED_MAX_RUN_BYTES", &["0", "much"]),
        ("KVCACHED_BULK_RUN_BYTES", &["0", "-1"]),
        ("KVCACHED_BULK_FROM_BYTES", &["0", "many"]),
        ("KVCACHED_GROWTH_CHUNKS", &["0", "65", "1.5"]),
        ("KVCACHED_CALM_BYTES", &["-1", "calm"]),
        (
            "KVCACHED_IPC_TIMEOUT",
            &["0", "-1", "nan", "inf", "1e300", "1s", "0.0001"],
        ),
        ("KVCACHED_CHUNK_POOL_BYTES", &["-1", "some"]),
        ("KVCACHED_CHUNK_POOL_IDLE", &["0", "-1", "never"]),
        ("KVCACHED_ORPHAN_TIMEOUT", &["0", "0.5", "120", "never"]),
        ("KVCACHED_RETIRE_TIMEOUT", &["0", "never"]),
        ("KVCACHED_READY_TIMEOUT", &["0", "never"]),
        (
            "KVCACHED_DEVICE",
            &[
                "gpu",
                "cuda:",
                "cuda:-1",
                "cuda:+1",
                "cuda:99999999999",
                "host:0",
            ],
        ),
    ];
    for &(variable, values) in bad {
        for &value in values {
            let error = resolve(&[(variable, value)]).unwrap_err();
            let allowed = allowed(variable);
            let expected = ConfigError::Value {
                variable,
                value: value.into(),
                allowed,
            };
            assert_eq!(error, expected);
            let text = error.to_string();
            for part in [variable, value, allowed] {
                assert!(text.contains(part), "{text:?} should contain {part:?}");
            }
        }
    }
}

#[test]
fn what_is_no_text_is_an_error_not_a_panic() {
    let bytes = OsString::from_vec(vec![0xff, 0xfe]);
    for variable in VARIABLES
        .iter()
        .filter(|v| v.name != "KVCACHED_RUNTIME_DIR")
    {
        let lookup = |name: &str| (name == variable.name).then(|| bytes.clone());
        let error = Config::from_lookup(lookup, IDS).unwrap_err();
        assert!(error.to_string().contains(variable.name), "{error}");
    }
}

#[test]
fn reserves_that_are_half_given_stay_in_order() {
    let reserve = |pairs: &[(&str, &str)]| resolve(pairs).map(|config| config.reserve);
    const MIN: &str = "KVCACHED_MIN_RESERVED_PAGES";
    const MAX: &str = "KVCACHED_MAX_RESERVED_PAGES";
    let bounds = |min, max| Ok(ReserveBounds { min, max });
    assert_eq!(reserve(&[(MIN, "100")]), bounds(100, None));
    assert_eq!(reserve(&[(MAX, "2")]), bounds(0, Some(2)));
    assert_eq!(reserve(&[(MAX, "0")]), Ok(ReserveBounds::NONE));
    let error = reserve(&[(MIN, "5"), (MAX, "4")]).unwrap_err();
    let text = error.to_string();
    assert!(
        text.contains(MIN) && text.contains(MAX) && text.contains("\"5\""),
        "{text}"
    );
}

#[test]
fn two_bounds_for_runs_exclude_each_other() {
    let both = [
        ("KVCACHED_MAX_RUN_PAGES", "4"),
        ("KVCACHED_MAX_RUN_BYTES", "8m"),
    ];
    assert!(matches!(
        resolve(&both),
        Err(ConfigError::Contradiction { .. })
    ));
}

/// Of a pool with one extent a page.
fn geometry(page_bytes: u64) -> Geometry {
    geometry_of(Layout::Contiguous, page_bytes)
}

/// Of a pool with four layers.
fn geometry_of(layout: Layout, page_bytes: u64) -> Geometry {
    let spec = PoolSpec {
        layout,
        layers: 4,
        kv_buffers: KvBuffers::One,
        block_bytes: 4096,
        page_size: PageSize::Bytes(page_bytes),
        capacity_bytes: 1 << 40,
    };
    spec.resolve(2 << 20).unwrap()
}

#[test]
fn a_reserve_has_at_most_the_pages_of_1_gib_unless_more_are_asked_for() {
    let pages = |min, max, page_bytes| {
        let Reserve { min, max } = ReserveBounds { min, max }.pages(&geometry(page_bytes));
        (min, max)
    };
    assert_eq!(pages(0, None, 2 << 20), (0, 512));
    assert_eq!(pages(0, None, 128 << 20), (0, 8));
    assert_eq!(pages(0, None, 4 << 30), (0, 1));
    assert_eq!(pages(600, None, 2 << 20), (600, 600));
    assert_eq!(pages(3, Some(900), 2 << 20), (3, 900));
    assert_eq!(pages(0, Some(0), 2 << 20), (0, 0));
}

#[test]
fn bulk_runs_shorter_than_others_are_refused() {
    let shorter = [
        ("KVCACHED_MAX_RUN_BYTES", "64m"),
        ("KVCACHED_BULK_RUN_BYTES", "32m"),
    ];
    let error = resolve(&shorter).unwrap_err().to_string();
    assert!(
        error.contains("KVCACHED_MAX_RUN_BYTES is \"64m\""),
        "{error}"
    );
    let alone = resolve(&[("KVCACHED_BULK_RUN_BYTES", "16m")]);
    assert!(matches!(alone, Err(ConfigError::Value { .. })), "{alone:?}");
}

#[test]
fn bulk_runs_that_come_to_less_than_the_pages_of_others_are_as_long_and_that_is_said() {
    let config = resolve(&[
        ("KVCACHED_MAX_RUN_PAGES", "64"),
        ("KVCACHED_BULK_RUN_BYTES", "2m"),
    ])
    .unwrap();
    let policy = config.runs.policy(&geometry(2 << 20));
    assert_eq!((policy.longest.get(), policy.bulk.get()), (64, 64));
    let bulk = VARIABLES
        .iter()
        .find(|variable| variable.name == "KVCACHED_BULK_RUN_BYTES")
        .unwrap();
    assert!(bulk.meaning.contains("KVCACHED_MAX_RUN_PAGES"));
}

#[test]
fn a_run_has_1_to_64_pages() {
    let run = RunLength::Bytes(32 << 20);
    assert_eq!(run.pages(&geometry(2 << 20)).get(), 16);
    assert_eq!(run.pages(&geometry(1 << 30)).get(), 1);
    let longest = RunLength::Bytes(1 << 40);
    assert_eq!(longest.pages(&geometry(2 << 20)).get(), 64);
    let three = RunLength::Pages(NonZeroU32::new(3).unwrap());
    assert_eq!(three.pages(&geometry(1 << 30)).get(), 3);

    let policy = RunChoice::default().policy(&geometry(2 << 20));
    assert_eq!((policy.longest.get(), policy.bulk.get()), (16, 64));
    assert_eq!((policy.bulk_from.get(), policy.calm), (512, 2048));
    assert_eq!((policy.share.get(), policy.share_when_short.get()), (8, 16));
    // Four tensors: a run takes four chunks, and a page four times the memory.
    let policy = RunChoice::default().policy(&geometry_of(Layout::PerLayer, 2 << 20));
    assert_eq!((policy.longest.get(), policy.share.get()), (16, 2));
    assert_eq!((policy.bulk_from.get(), policy.calm), (128, 512));
    let policy = RunChoice::default().policy(&geometry(8 << 30));
    assert_eq!((policy.longest.get(), policy.bulk.get()), (1, 1));
    assert_eq!((policy.bulk_from.get(), policy.calm), (1, 1));
    // Three pages of 1 GiB are more than 128 MiB of bulk: no run is shorter for being bulk.
    let mixed = RunChoice {
        longest: three,
        ..RunChoice::default()
    };
    assert_eq!(mixed.policy(&geometry(1 << 30)).bulk.get(), 3);
}

#[test]
fn the_runtime_directory_is_the_sessions_if_there_is_one() {
    let dir = |xdg: &str| resolve(&[("XDG_RUNTIME_DIR", xdg)]).unwrap().runtime_dir;
    assert_eq!(
        dir("/run/user/1000"),
        PathBuf::from("/run/user/1000/kvcached")
    );
    assert_eq!(dir("run/user"), PathBuf::from("/tmp/kvcached-1000"));
    assert_eq!(dir(""), PathBuf::from("/tmp/kvcached-1000"));
}

/// A worker that looks at another name than its engine finds nothing there.
#[test]
fn children_of_a_process_have_its_instance() {
    let name = |process_group| {
        let ids = ProcessIds {
            process_group,
            ..IDS
        };
        Config::from_lookup(|_| None, ids).unwrap().instance
    };
    assert_eq!(name(4711), name(4711));
    assert_ne!(name(4711), name(4712));
}

#[test]
fn names_that_differ_stay_different() {
    let name = |text| resolve(&[("KVCACHED_INSTANCE", text)]).unwrap().instance;
    assert_ne!(name("a/b"), name("a:b"));
    let config = resolve(&[("KVCACHED_INSTANCE", "llama")]).unwrap();
    assert_eq!(config.replica_instance(None).as_str(), "llama");
    assert_eq!(config.replica_instance(Some(3)).as_str(), "llama-dp3");
    let longest = "x".repeat(InstanceName::MAX_BYTES);
    let config = resolve(&[("KVCACHED_INSTANCE", &longest)]).unwrap();
    assert_ne!(
        config.replica_instance(Some(1)),
        config.replica_instance(Some(2))
    );
}

#[test]
fn unknown_variables_are_warned_of_once_each() {
    let pairs = [
        ("KVCACHED_PAGESIZE", "4m"),
        ("KVCACHED_PAGESIZE", "4m"),
        ("KVCACHED_LAYOUT", "unified"),
        ("KVCACHED_WHATEVER_THAT_IS", "1"),
        ("PATH", "/bin"),
    ];
    let pairs = pairs.map(|(name, value)| (name.into(), value.into()));
    let (config, lines) = logged(|| Config::from_pairs(pairs, IDS).unwrap());
    assert_eq!(config.layout, Layout::Unified);
    let warnings: Vec<_> = lines.iter().filter(|line| line.contains("WARN")).collect();
    assert_eq!(warnings.len(), 2, "{lines:?}");
    assert!(
        warnings[0].contains("is it KVCACHED_PAGE_SIZE?"),
        "{lines:?}"
    );
    assert!(
        warnings[1].contains("KVCACHED_WHATEVER_THAT_IS"),
        "{lines:?}"
    );
    assert!(!warnings[1].contains("is it"), "{lines:?}");
}

#[test]
fn what_was_resolved_is_one_line_at_info() {
    let config = resolve(&[("KVCACHED_PAGE_SIZE", "4m")]).unwrap();
    let ((), lines) = logged(|| config.log_resolved());
    assert_eq!(lines.len(), 1, "{lines:?}");
    for part in [
        "INFO",
        "page_size=4MiB",
        "instance=pg4711",
        "device=cuda:0",
        "max_run=32MiB",
    ] {
        assert!(
            lines[0].contains(part),
            "{} should contain {part}",
            lines[0]
        );
    }
}

#[test]
fn the_environment_of_this_process_resolves() {
    // Tests run with whatever environment there is; nothing in it may panic.
    if let Ok(config) = Config::from_env() {
        assert!(config.runtime_dir.is_absolute());
    }
}

proptest! {
    #[test]
    fn no_value_panics(
        variable in prop::sample::select(VARIABLES),
        value in prop_oneof![
            prop::collection::vec(any::<u8>(), 0..12),
            "[0-9.:a-zA-Z +-]{0,12}".prop_map(String::into_bytes),
        ],
    ) {
        let value = OsString::from_vec(value);
        let lookup = |name: &str| (name == variable.name).then(|| value.clone());
        if let Err(error) = Config::from_lookup(lookup, IDS) {
            prop_assert!(error.to_string().contains(variable.name));
        }
    }
}

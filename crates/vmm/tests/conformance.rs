//! The suite on every driver that needs no device.

use std::sync::Arc;

use kvcached_vmm::{
    Budget, Capped, DeviceMemory, Driver, Host, HostConfig, Mock, MockConfig, VmmError, conformance,
};

const GRANULES: u64 = conformance::GRANULES;

#[test]
fn mock_keeps_the_contract_and_the_suite_keeps_the_callers_duties() {
    for (granularity, alias, read_only) in [
        (4096, true, true),
        (2 << 20, false, true),
        (65536, true, false),
        (512, false, false),
    ] {
        let config = MockConfig {
            granularity,
            alias,
            read_only,
            ..MockConfig::new(GRANULES * granularity)
        };
        let mock = Arc::new(Mock::new(config));

        conformance::contract(&mock);

        // The only duties that the suite breaks are those whose answer a driver owes.
        for violation in mock.violations() {
            let answer = violation.error;
            let owed = matches!(
                answer,
                VmmError::Misaligned { .. } | VmmError::OutOfRange { .. }
            );
            assert!(owed, "{:?}: {answer}", violation.call);
        }
        assert_eq!(
            (mock.live_ranges(), mock.live_chunks(), mock.live_mappings()),
            (0, 0, 0)
        );
    }
}

#[test]
fn host_keeps_the_contract_and_its_bytes() {
    for (granularity, alias, read_only) in [
        (4096, true, true),
        (2 << 20, true, true),
        (65536, false, false),
    ] {
        let config = HostConfig {
            granularity,
            alias,
            read_only,
            ..HostConfig::new(GRANULES * granularity)
        };
        let host = Arc::new(Host::new(config).expect("the machine gives memory"));
        conformance::contract(&host);
        conformance::content(&host);
        let memory = host.memory().expect("the host answers");
        assert_eq!(memory.free, memory.total);
    }
}

#[test]
fn a_capped_host_keeps_both_whichever_of_the_two_is_smaller() {
    let dir = tempfile::tempdir().expect("there is a place for files");
    for (device, budget) in [(GRANULES, 1 << 20), (1 << 20, GRANULES)] {
        let g = 65536;
        let path = dir.path().join(format!("budget-{budget}"));
        let config = HostConfig {
            granularity: g,
            ..HostConfig::new(device * g)
        };
        let host = Host::new(config).expect("the machine gives memory");
        let budget = Budget::create(&path, budget * g).expect("the file is new");
        let capped = Arc::new(Capped::new(host, budget));
        conformance::contract(&capped);
        conformance::content(&capped);
        let memory = capped.memory().expect("it answers");
        assert_eq!(
            memory,
            DeviceMemory {
                free: GRANULES * g,
                total: GRANULES * g
            }
        );
    }
}

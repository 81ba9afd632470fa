//! At the system's limit on the number of mappings, `Host` is full: an answer, not an end.
//!
//! Alone in its file: the limit is of the whole process, and nothing here may allocate meanwhile.

use std::fs;

use kvcached_vmm::{Access, AddressRange, Bytes, Driver, Host, HostConfig, VmmError};

const G: u64 = 4096;
/// A machine that allows more than this is not driven to its limit.
const MOST: u64 = 300_000;

#[test]
fn at_the_limit_of_mappings_the_host_is_full_and_goes_on() {
    let limit = fs::read_to_string("/proc/sys/vm/max_map_count").expect("Linux says its limit");
    let limit: u64 = limit.trim().parse().expect("a number");
    if limit > MOST {
        eprintln!("skipped: this machine allows {limit} mappings");
        return;
    }
    let host = Host::new(HostConfig {
        granularity: G,
        ..HostConfig::new(G)
    });
    let host = host.expect("the machine gives memory");
    let range = host.reserve(2 * limit * G).expect("addresses suffice");
    let chunk = host.create(G).expect("it fits exactly");
    let map = |nth: u64| host.map(&range, 2 * nth * G, &chunk, Access::ReadWrite);

    // Every other granule, so that no two mappings become one.
    let mut mapped = 0;
    let answer = loop {
        match map(mapped) {
            Ok(()) => mapped += 1,
            Err(error) => break error,
        }
    };

    assert_eq!(answer, VmmError::OutOfMemory { requested: G });
    assert!(mapped > limit / 4 && mapped < limit, "{mapped} of {limit}");
    // Nothing is mapped where it failed, all else still is, and room that is made is used.
    let fault = Err(VmmError::Fault {
        address: range.base() + 2 * mapped * G,
    });
    assert_eq!(host.read(&range, 2 * mapped * G, &mut [0]), fault);
    host.write(&range, 0, b"seen").expect("it is mapped");
    let mut seen = [0; 4];
    host.read(&range, 2 * (mapped - 1) * G, &mut seen)
        .expect("it is mapped");
    assert_eq!(&seen, b"seen");
    for nth in 0..5 {
        host.unmap(&range, 2 * nth * G, G).expect("it is mapped");
        assert_eq!(map(mapped + nth), Ok(()));
    }
    host.release(range).expect("it goes with all that is in it");
}

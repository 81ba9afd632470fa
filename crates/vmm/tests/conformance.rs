//! The suite on every driver that needs no device.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex};

use kvcached_vmm::{
    Access, Budget, Bytes, Capped, DeviceMemory, Driver, Host, HostConfig, Mock, MockConfig,
    Properties, VmmError, conformance,
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

/// A driver with one fault: it hands memory to the next owner as the last one left it.
#[derive(Debug)]
struct Recycler {
    host: Host,
    shelf: Mutex<Vec<Recycled>>,
}

#[derive(Debug)]
struct Recycled {
    chunk: <Host as Driver>::Chunk,
    len: u64,
}

impl Driver for Recycler {
    type Range = <Host as Driver>::Range;
    type Chunk = Recycled;

    fn properties(&self) -> Properties {
        self.host.properties()
    }

    fn reserve(&self, len: u64) -> Result<Self::Range, VmmError> {
        self.host.reserve(len)
    }

    fn release(&self, range: Self::Range) -> Result<(), VmmError> {
        self.host.release(range)
    }

    fn create(&self, len: u64) -> Result<Recycled, VmmError> {
        let mut shelf = self.shelf.lock().expect("nobody panics holding it");
        if let Some(at) = shelf.iter().position(|recycled| recycled.len == len) {
            return Ok(shelf.swap_remove(at));
        }
        Ok(Recycled {
            chunk: self.host.create(len)?,
            len,
        })
    }

    fn destroy(&self, chunk: Recycled) -> Result<(), VmmError> {
        self.shelf
            .lock()
            .expect("nobody panics holding it")
            .push(chunk);
        Ok(())
    }

    fn map(
        &self,
        range: &Self::Range,
        offset: u64,
        chunk: &Recycled,
        access: Access,
    ) -> Result<(), VmmError> {
        self.host.map(range, offset, &chunk.chunk, access)
    }

    fn unmap(&self, range: &Self::Range, offset: u64, len: u64) -> Result<(), VmmError> {
        self.host.unmap(range, offset, len)
    }

    fn memory(&self) -> Result<DeviceMemory, VmmError> {
        self.host.memory()
    }

    fn synchronize(&self) -> Result<(), VmmError> {
        self.host.synchronize()
    }
}

impl Bytes for Recycler {
    fn write(&self, range: &Self::Range, offset: u64, bytes: &[u8]) -> Result<(), VmmError> {
        self.host.write(range, offset, bytes)
    }

    fn read(&self, range: &Self::Range, offset: u64, buffer: &mut [u8]) -> Result<(), VmmError> {
        self.host.read(range, offset, buffer)
    }
}

#[test]
fn a_driver_that_shows_bytes_of_an_earlier_owner_is_caught() {
    let host = Host::new(HostConfig {
        granularity: 4096,
        ..HostConfig::new(1 << 30)
    });
    let host = host.expect("the machine gives memory");
    let recycler = Arc::new(Recycler {
        host,
        shelf: Mutex::new(Vec::new()),
    });
    conformance::contract(&recycler);
    let caught = catch_unwind(AssertUnwindSafe(|| conformance::content(&recycler)));
    let words = caught.expect_err("the suite must not pass");
    let words = words
        .downcast_ref::<String>()
        .expect("an assertion with a message");
    assert!(words.contains("bytes of an earlier owner"), "{words}");
}

//! As many chunks as a large pool has, with as few file descriptors as a shell allows.
//!
//! Alone in its file: the limit is of the whole process.

use std::sync::Arc;

use kvcached_vmm::{Access, Chunk, Driver, Host, HostConfig, Reservation};
use nix::sys::resource::{Resource, getrlimit, setrlimit};

const G: u64 = 4096;
const CHUNKS: u64 = 100_000;

#[test]
fn a_hundred_thousand_chunks_live_with_1024_file_descriptors() {
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).expect("limits can be read");
    setrlimit(Resource::RLIMIT_NOFILE, hard.min(1024), hard).expect("a limit can be lowered");
    let config = HostConfig {
        granularity: G,
        ..HostConfig::new(CHUNKS * G)
    };
    let host = Arc::new(Host::new(config).expect("the granularity is this machine's page"));
    let mut range = Reservation::new(Arc::clone(&host), CHUNKS * G).expect("addresses suffice");

    let chunks: Vec<_> = (0..CHUNKS)
        .map(|_| Arc::new(Chunk::create(&host, G).expect("they fit exactly")))
        .collect();
    assert_eq!(host.memory().expect("the host answers").free, 0);
    assert!(Chunk::create(&host, G).is_err());

    // Neighbours that are neighbours in the file too count as one mapping for the system.
    for (granule, chunk) in chunks.iter().enumerate() {
        let offset = granule as u64 * G;
        range
            .map(offset, Arc::clone(chunk), Access::ReadWrite)
            .expect("all can be mapped");
    }
    for granule in (0..CHUNKS).step_by(997) {
        range
            .write(granule * G, &granule.to_le_bytes())
            .expect("it is mapped");
    }
    for granule in (0..CHUNKS).step_by(997) {
        let mut found = [0; 8];
        range.read(granule * G, &mut found).expect("it is mapped");
        assert_eq!(u64::from_le_bytes(found), granule);
    }
    drop((range, chunks));
    assert_eq!(host.memory().expect("the host answers").free, CHUNKS * G);
}

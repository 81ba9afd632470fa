//! What every driver does, as a suite that panics at the first difference.
//!
//! ```
//! use std::sync::Arc;
//! use kvcached_vmm::{Host, HostConfig, conformance};
//!
//! let host = Arc::new(Host::new(HostConfig::new(64 << 20)).expect("memory is there"));
//! conformance::contract(&host);
//! conformance::content(&host);
//! ```
//!
//! Only what [`Driver`] and [`Bytes`] promise is asked, and no duty of the caller is broken, except
//! those whose answer is promised. A device needs [`GRANULES`] free granules; other users may share
//! it meanwhile.

use std::sync::Arc;
use std::thread;

use crate::{Access, Bytes, Chunk, Driver, Reservation, VmmError};

/// The most memory that the suite takes at once, in granules.
pub const GRANULES: u64 = 16;

/// Promises of [`Driver`].
///
/// # Panics
/// If the driver breaks one.
pub fn contract<D: Driver>(driver: &Arc<D>) {
    properties_are_constant_and_sensible(driver);
    ranges_are_aligned_and_apart(driver);
    odd_and_empty_lengths_are_misaligned(driver);
    a_chunk_is_mapped_whole_and_taken_away_whole(driver);
    places_outside_are_refused_and_leave_nothing(driver);
    aliases_and_read_only_work_where_promised(driver);
    more_than_there_is_is_out_of_memory(driver);
    memory_adds_up(driver);
    threads_map_and_unmap_at_once(driver);
    the_owning_tier_gives_everything_back(driver);
}

/// Promises of [`Bytes`], and those of [`Driver`] about what memory holds.
///
/// # Panics
/// If the driver breaks one.
pub fn content<D: Bytes>(driver: &Arc<D>) {
    what_is_written_is_there_and_nowhere_else(driver);
    unmapped_addresses_fault(driver);
    accesses_outside_are_out_of_range(driver);
    memory_given_back_reads_zero_for_its_next_owner(driver);
    content_moves_with_its_chunk(driver);
    aliases_show_the_same_bytes(driver);
    read_only_mappings_cannot_be_written(driver);
    threads_do_not_see_each_others_bytes(driver);
}

fn granule<D: Driver>(driver: &Arc<D>) -> u64 {
    driver.properties().granularity
}

fn reservation<D: Driver>(driver: &Arc<D>, granules: u64) -> Reservation<D> {
    Reservation::new(Arc::clone(driver), granules * granule(driver)).expect("addresses suffice")
}

fn chunk<D: Driver>(driver: &Arc<D>, granules: u64) -> Arc<Chunk<D>> {
    let len = granules * granule(driver);
    Arc::new(Chunk::create(driver, len).expect("the device has room for the suite"))
}

/// `len` bytes that differ from those of another `seed`, and from place to place.
fn pattern(seed: u8, len: u64) -> Vec<u8> {
    (0..len)
        .map(|at| (at % 251).to_le_bytes()[0] ^ seed)
        .collect()
}

fn filled<D: Bytes>(range: &Reservation<D>, offset: u64, len: u64) -> Vec<u8> {
    let mut found = vec![0x5a; usize::try_from(len).expect("the suite is small")];
    range.read(offset, &mut found).expect("it is mapped");
    found
}

fn properties_are_constant_and_sensible<D: Driver>(driver: &Arc<D>) {
    let properties = driver.properties();
    assert!(properties.granularity.is_power_of_two());
    assert_eq!(driver.properties(), properties);
}

fn ranges_are_aligned_and_apart<D: Driver>(driver: &Arc<D>) {
    let g = granule(driver);
    let ranges: Vec<_> = (1..5).map(|n| reservation(driver, n * 7)).collect();
    let mut ends: Vec<_> = ranges
        .iter()
        .map(|r| (r.base(), r.base() + r.byte_len()))
        .collect();
    ends.sort_unstable();
    assert!(
        ends.iter()
            .all(|(base, _)| *base > 0 && base.is_multiple_of(g))
    );
    assert!(
        ends.windows(2).all(|pair| pair[0].1 <= pair[1].0),
        "ranges overlap: {ends:x?}"
    );
    for (range, n) in ranges.iter().zip(1..) {
        assert_eq!(range.byte_len(), n * 7 * g);
    }
}

fn odd_and_empty_lengths_are_misaligned<D: Driver>(driver: &Arc<D>) {
    let g = granule(driver);
    for len in [0, g - 1, g + 1] {
        let error = VmmError::Misaligned {
            value: len,
            granularity: g,
        };
        assert_eq!(driver.reserve(len).map(drop), Err(error.clone()));
        assert_eq!(driver.create(len).map(drop), Err(error));
    }
}

fn a_chunk_is_mapped_whole_and_taken_away_whole<D: Driver>(driver: &Arc<D>) {
    let g = granule(driver);
    let range = driver.reserve(16 * g).expect("addresses suffice");
    for granules in [1, 2, 5, 16] {
        let chunk = driver
            .create(granules * g)
            .expect("the device has room for the suite");
        for offset in [0, 16 - granules] {
            let place = (offset * g, granules * g);
            driver
                .map(&range, place.0, &chunk, Access::ReadWrite)
                .expect("the place is free");
            driver.synchronize().expect("the device answers");
            driver
                .unmap(&range, place.0, place.1)
                .expect("exactly this was mapped");
        }
        driver.destroy(chunk).expect("it is mapped nowhere");
    }
    driver.release(range).expect("nothing is mapped");
}

fn places_outside_are_refused_and_leave_nothing<D: Driver>(driver: &Arc<D>) {
    let g = granule(driver);
    let range = driver.reserve(4 * g).expect("addresses suffice");
    let chunk = driver
        .create(2 * g)
        .expect("the device has room for the suite");
    let map = |offset| driver.map(&range, offset, &chunk, Access::ReadWrite);
    assert_eq!(
        map(1),
        Err(VmmError::Misaligned {
            value: 1,
            granularity: g
        })
    );
    let last = u64::MAX - g + 1;
    for offset in [3 * g, 4 * g, last] {
        let error = VmmError::OutOfRange {
            offset,
            len: 2 * g,
            range_len: 4 * g,
        };
        assert_eq!(map(offset), Err(error.clone()));
        assert_eq!(driver.unmap(&range, offset, 2 * g), Err(error));
    }
    // Had any of them left something, one of these would be refused.
    driver
        .map(&range, 2 * g, &chunk, Access::ReadWrite)
        .expect("the place is free");
    driver
        .unmap(&range, 2 * g, 2 * g)
        .expect("exactly this was mapped");
    driver.destroy(chunk).expect("it is mapped nowhere");
    driver.release(range).expect("nothing is mapped");
}

fn aliases_and_read_only_work_where_promised<D: Driver>(driver: &Arc<D>) {
    let g = granule(driver);
    let properties = driver.properties();
    let mut range = reservation(driver, 8);
    let zero = chunk(driver, 1);
    let access = if properties.read_only {
        Access::Read
    } else {
        Access::ReadWrite
    };
    let places = if properties.alias { 8 } else { 1 };
    for place in 0..places {
        range
            .map(place * g, Arc::clone(&zero), access)
            .expect("the device can do that");
    }
    for place in 0..places {
        range.unmap(place * g).expect("it is mapped");
    }
}

fn more_than_there_is_is_out_of_memory<D: Driver>(driver: &Arc<D>) {
    let g = granule(driver);
    let total = driver.memory().expect("the device answers").total;
    let requested = (total / g + 1) * g;
    assert_eq!(
        driver.create(requested).map(drop),
        Err(VmmError::OutOfMemory { requested })
    );
    // And it goes on.
    drop(chunk(driver, 1));
}

fn memory_adds_up<D: Driver>(driver: &Arc<D>) {
    let chunks: Vec<_> = (0..4).map(|_| chunk(driver, 1)).collect();
    let memory = driver.memory().expect("the device answers");
    let held: u64 = chunks.iter().map(|chunk| chunk.byte_len()).sum();
    assert!(memory.free <= memory.total);
    assert!(
        held <= memory.total - memory.free,
        "{memory:?} leaves no room for {held}"
    );
}

fn threads_map_and_unmap_at_once<D: Driver>(driver: &Arc<D>) {
    const THREADS: u64 = 8;
    const ROUNDS: u64 = 100;
    let g = granule(driver);
    let range = driver.reserve(THREADS * 2 * g).expect("addresses suffice");
    thread::scope(|scope| {
        for place in 0..THREADS {
            let range = &range;
            scope.spawn(move || {
                for round in 0..ROUNDS {
                    let offset = (2 * place + round % 2) * g;
                    let chunk = driver.create(g).expect("the device has room for the suite");
                    let map = driver.map(range, offset, &chunk, Access::ReadWrite);
                    map.expect("nobody else maps there");
                    driver
                        .unmap(range, offset, g)
                        .expect("nobody else unmaps there");
                    driver.destroy(chunk).expect("it is mapped nowhere");
                }
            });
        }
    });
    driver.release(range).expect("nothing is mapped");
}

fn the_owning_tier_gives_everything_back<D: Driver>(driver: &Arc<D>) {
    let g = granule(driver);
    // Each round fits by itself only.
    for _ in 0..4 {
        let mut range = reservation(driver, GRANULES);
        for place in 0..GRANULES / 2 {
            let map = range.map(2 * place * g, chunk(driver, 2), Access::ReadWrite);
            map.expect("the place is free");
        }
        assert_eq!(range.mappings().count() as u64, GRANULES / 2);
    }
}

fn what_is_written_is_there_and_nowhere_else<D: Bytes>(driver: &Arc<D>) {
    let g = granule(driver);
    let mut range = reservation(driver, 8);
    // Two neighbours, and one apart from them.
    for (place, granules) in [(1, 1), (2, 2), (5, 1)] {
        let map = range.map(place * g, chunk(driver, granules), Access::ReadWrite);
        map.expect("the place is free");
    }
    assert!(
        filled(&range, g, 3 * g).iter().all(|byte| *byte == 0),
        "fresh memory is not zero"
    );

    // Over the seam between two chunks, at no alignment.
    let written = pattern(1, g);
    range.write(2 * g - 13, &written).expect("it is mapped");

    assert_eq!(filled(&range, 2 * g - 13, g), written);
    assert!(filled(&range, g, g - 13).iter().all(|byte| *byte == 0));
    assert!(
        filled(&range, 3 * g - 13, g + 13)
            .iter()
            .all(|byte| *byte == 0)
    );
    assert!(filled(&range, 5 * g, g).iter().all(|byte| *byte == 0));
    range.write(6 * g, &[]).expect("nothing is no access");
}

fn unmapped_addresses_fault<D: Bytes>(driver: &Arc<D>) {
    let g = granule(driver);
    let mut range = reservation(driver, 4);
    range
        .map(g, chunk(driver, 1), Access::ReadWrite)
        .expect("the place is free");
    let fault = Err(VmmError::Fault {
        address: range.base() + 2 * g,
    });
    assert_eq!(range.write(2 * g - 1, &[1, 2]), fault);
    assert_eq!(range.read(2 * g - 1, &mut [0; 2]), fault);
    assert_eq!(range.read(2 * g, &mut [0]), fault);
    assert!(matches!(range.write(0, &[1]), Err(VmmError::Fault { .. })));

    range.unmap(g).expect("it is mapped");
    assert!(matches!(
        range.read(g, &mut [0]),
        Err(VmmError::Fault { .. })
    ));
    assert!(matches!(range.write(g, &[1]), Err(VmmError::Fault { .. })));
}

fn accesses_outside_are_out_of_range<D: Bytes>(driver: &Arc<D>) {
    let g = granule(driver);
    let range = driver.reserve(2 * g).expect("addresses suffice");
    for offset in [2 * g, u64::MAX] {
        let error = VmmError::OutOfRange {
            offset,
            len: 1,
            range_len: 2 * g,
        };
        assert_eq!(driver.write(&range, offset, &[1]), Err(error.clone()));
        assert_eq!(driver.read(&range, offset, &mut [0]), Err(error));
    }
    driver.release(range).expect("nothing is mapped");
}

fn memory_given_back_reads_zero_for_its_next_owner<D: Bytes>(driver: &Arc<D>) {
    let g = granule(driver);
    let mut range = reservation(driver, GRANULES);
    for (round, granules) in (0..).zip([1, 4, 1, 4, 2, 8]) {
        let map = range.map(0, chunk(driver, granules), Access::ReadWrite);
        map.expect("the place is free");
        let found = filled(&range, 0, granules * g);
        assert!(
            found.iter().all(|byte| *byte == 0),
            "round {round}: bytes of an earlier owner"
        );
        range
            .write(0, &pattern(0xff, granules * g))
            .expect("it is mapped");
        driver.synchronize().expect("the device answers");
        drop(range.unmap(0).expect("it is mapped"));
    }
}

fn content_moves_with_its_chunk<D: Bytes>(driver: &Arc<D>) {
    let g = granule(driver);
    let (mut from, mut to) = (reservation(driver, 2), reservation(driver, 4));
    from.map(0, chunk(driver, 2), Access::ReadWrite)
        .expect("the place is free");
    let written = pattern(3, 2 * g);
    from.write(0, &written).expect("it is mapped");
    driver.synchronize().expect("the device answers");
    let moved = from.unmap(0).expect("it is mapped");
    to.map(2 * g, moved, Access::ReadWrite)
        .expect("the place is free");
    assert_eq!(filled(&to, 2 * g, 2 * g), written);
}

fn aliases_show_the_same_bytes<D: Bytes>(driver: &Arc<D>) {
    if !driver.properties().alias {
        return;
    }
    let g = granule(driver);
    let mut range = reservation(driver, 3);
    let shared = chunk(driver, 1);
    for place in [0, 2] {
        let map = range.map(place * g, Arc::clone(&shared), Access::ReadWrite);
        map.expect("the device can alias");
    }
    range.write(2 * g + 5, b"seen twice").expect("it is mapped");
    driver.synchronize().expect("the device answers");
    assert_eq!(filled(&range, 5, 10), b"seen twice");
}

fn read_only_mappings_cannot_be_written<D: Bytes>(driver: &Arc<D>) {
    if !driver.properties().read_only {
        return;
    }
    let g = granule(driver);
    let mut range = reservation(driver, 2);
    range
        .map(0, chunk(driver, 1), Access::Read)
        .expect("the place is free");
    range
        .map(g, chunk(driver, 1), Access::ReadWrite)
        .expect("the place is free");
    let fault = Err(VmmError::Fault {
        address: range.base() + g - 4,
    });
    assert_eq!(range.write(g - 4, &[1; 4]), fault);
    assert!(filled(&range, 0, 2 * g).iter().all(|byte| *byte == 0));
}

fn threads_do_not_see_each_others_bytes<D: Bytes>(driver: &Arc<D>) {
    const THREADS: u8 = 4;
    const ROUNDS: u8 = 8;
    let g = granule(driver);
    thread::scope(|scope| {
        for me in 0..THREADS {
            scope.spawn(move || {
                let mut range = reservation(driver, 2);
                for round in 0..ROUNDS {
                    let place = u64::from(round % 2) * g;
                    let map = range.map(place, chunk(driver, 1), Access::ReadWrite);
                    map.expect("the place is free");
                    assert!(filled(&range, place, g).iter().all(|byte| *byte == 0));
                    let mine = pattern(me * ROUNDS + round, g);
                    range.write(place, &mine).expect("it is mapped");
                    assert_eq!(filled(&range, place, g), mine);
                    driver.synchronize().expect("the device answers");
                    drop(range.unmap(place).expect("it is mapped"));
                }
            });
        }
    });
}

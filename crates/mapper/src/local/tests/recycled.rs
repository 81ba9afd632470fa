//! Chunks that are used again instead of going through the device.

use std::time::Instant;

use super::content::{read_word, words};
use super::*;

fn calls(mock: &Mock) -> (u64, u64) {
    (mock.calls(Call::Create), mock.calls(Call::Destroy))
}

#[expect(
    clippy::disallowed_methods,
    reason = "some moment, from which a test counts"
)]
fn start() -> Instant {
    Instant::now()
}

#[test]
fn steady_traffic_neither_creates_nor_destroys() {
    for geometry in all_geometries(8) {
        for cold in BOTH {
            let mock = mock(1 << 30);
            let mapper = local(&mock, &geometry, cold).with_recycler(&recycler(&mock));
            mapper.map(&[run(0, 2), run(5, 1)]).unwrap();
            let before = calls(&mock);
            for first in [2, 0, 3, 1] {
                let other = run((first + 5) % 8, 1);
                mapper.unmap(&mapper.mapped()).unwrap();
                assert_eq!(mapper.kept_bytes(), 3 * geometry.bundle_bytes());
                mapper.map(&[run(first, 2), other]).unwrap();
            }
            assert_eq!(calls(&mock), before);
            assert_eq!(mapper.kept_bytes(), 0);
            drop(mapper);
            assert_nothing_left(&mock);
        }
    }
}

#[test]
fn it_passes_the_contract_whatever_is_used_again() {
    for geometry in all_geometries(9) {
        for cold in BOTH {
            let mock = mock(1 << 30);
            let mapper = local(&mock, &geometry, cold).with_recycler(&recycler(&mock));
            contract(&mapper, 9);
            rank_contract(&mapper, 9);
            assert_eq!((mapper.mapped(), mapper.in_doubt()), (vec![], vec![]));
            drop(mapper);
            assert_nothing_left(&mock);
        }
    }
}

#[test]
fn what_is_kept_counts_as_headroom_and_goes_on_a_trim_or_after_a_while() {
    let geometry = simple(8);
    let bundle = geometry.bundle_bytes();
    let mock = mock(8 * bundle);
    let recycler = recycler(&mock);
    let [one, other] =
        [(); 2].map(|()| local(&mock, &geometry, Cold::Unbacked).with_recycler(&recycler));
    for mapper in [&one, &other] {
        mapper.map(&[run(0, 1), run(1, 2)]).unwrap();
        mapper.unmap(&[run(0, 1), run(1, 2)]).unwrap();
    }
    assert_eq!(
        (one.kept_bytes(), mock.used_bytes()),
        (3 * bundle, 6 * bundle)
    );
    assert_eq!(one.headroom(), Some(8), "what others keep is to be had too");

    one.trim();
    assert_eq!((one.kept_bytes(), mock.used_bytes()), (0, 3 * bundle));

    let begin = start();
    let next = other.tend(begin).expect("something is kept");
    assert_eq!(mock.used_bytes(), 3 * bundle);
    assert_eq!(other.tend(next), None);
    assert_eq!(mock.used_bytes(), 0);
}

#[test]
fn a_full_device_gets_back_what_is_kept_before_it_is_the_answer() {
    let geometry = simple(8);
    let mock = mock(4 * geometry.bundle_bytes());
    let recycler = recycler(&mock);
    let [one, other] =
        [(); 2].map(|()| local(&mock, &geometry, Cold::Unbacked).with_recycler(&recycler));
    one.map(&[run(0, 4)]).unwrap();
    one.unmap(&[run(0, 4)]).unwrap();

    other.map(&[run(0, 1), run(1, 2)]).unwrap();
    assert_eq!(one.kept_bytes(), 0);
    assert!(one.map(&[run(0, 2)]).unwrap_err().is_full());
    one.map(&[run(0, 1)]).unwrap();
}

/// A mapper with page 4, and another that has left a page to the recycler of both.
fn with_something_kept(geometry: &Geometry, cold: Cold) -> (Arc<Mock>, [LocalMapper<Mock>; 2]) {
    let mock = mock(1 << 30);
    let recycler = recycler(&mock);
    let pools = [(); 2].map(|()| LocalMapper::over(&recycler, geometry, cold).unwrap());
    pools[0].map(&[run(4, 1)]).unwrap();
    pools[1].map(&[run(0, 1)]).unwrap();
    pools[1].unmap(&[run(0, 1)]).unwrap();
    assert_eq!(pools[1].kept_bytes(), geometry.bundle_bytes());
    (mock, pools)
}

const FULL: VmmError = VmmError::OutOfMemory { requested: G };

#[test]
fn a_device_too_full_to_map_gets_back_what_is_kept_before_it_is_the_answer() {
    let map: fn(&LocalMapper<Mock>) -> _ = |mapper| mapper.map(&[run(2, 2)]);
    let resync: fn(&LocalMapper<Mock>) -> _ =
        |mapper| mapper.resync(&[run(2, 2), run(4, 1)]).map(drop);
    for geometry in all_geometries(8) {
        for ask in [map, resync] {
            let (mock, [mapper, other]) = with_something_kept(&geometry, Cold::Unbacked);
            // There is no room for the device's own tables until somebody gives memory back.
            let mut room = false;
            mock.fail_with(move |call| {
                room |= call == Call::Destroy;
                (call == Call::Map && !room).then_some(FULL)
            });
            ask(&mapper).unwrap();
            assert!(mapper.mapped().contains(&run(2, 2)));
            assert_eq!(other.kept_bytes(), 0, "it went back");
        }
    }
}

#[test]
fn zeros_too_many_for_a_full_device_are_laid_once_what_is_kept_went_back() {
    let map: fn(&LocalMapper<Mock>) -> _ = |mapper| mapper.map(&[run(2, 2)]);
    let unmap: fn(&LocalMapper<Mock>) -> _ = |mapper| mapper.unmap(&[run(4, 1)]);
    let resync: fn(&LocalMapper<Mock>) -> _ = |mapper| mapper.resync(&[]).map(drop);
    for geometry in all_geometries(8) {
        for ask in [map, unmap, resync] {
            let (mock, [mapper, other]) = with_something_kept(&geometry, Cold::Zero);
            mock.fail(Call::Map, 0, FULL);
            ask(&mapper).unwrap();
            assert_eq!(other.kept_bytes(), 0, "it went back");

            // With nothing kept, one refusal is the answer.
            mapper.trim();
            let before = mapper.mapped();
            mock.fail(Call::Map, 0, FULL);
            assert!(mapper.map(&[run(6, 1)]).unwrap_err().is_full());
            assert_eq!(mapper.mapped(), before);
            assert_eq!(mock.violations(), []);
        }
    }
}

#[test]
fn a_mapper_that_is_made_on_a_full_device_has_what_is_kept() {
    let geometry = simple(8);
    let mock = mock(geometry.bundle_bytes());
    let recycler = recycler(&mock);
    let one = LocalMapper::over(&recycler, &geometry, Cold::Unbacked).unwrap();
    one.map(&[run(0, 1)]).unwrap();
    let full = LocalMapper::over(&recycler, &geometry, Cold::Zero);
    assert!(full.unwrap_err().is_full(), "the page is in use");
    one.unmap(&[run(0, 1)]).unwrap();
    LocalMapper::over(&recycler, &geometry, Cold::Zero).unwrap();
    assert_eq!((one.kept_bytes(), mock.used_bytes()), (0, 0));
}

#[test]
fn a_batch_that_failed_leaves_its_chunks_for_the_next() {
    for geometry in all_geometries(8) {
        let mock = mock(1 << 30);
        let mapper = local(&mock, &geometry, Cold::Unbacked).with_recycler(&recycler(&mock));
        mock.fail(Call::Map, 0, broken());
        mapper.map(&[run(0, 2)]).unwrap_err();
        let before = calls(&mock);
        mapper.map(&[run(3, 2)]).unwrap();
        assert_eq!(calls(&mock), before);
    }
}

#[test]
fn after_a_resync_no_fresh_page_shows_what_was_written_before() {
    for geometry in all_geometries(8) {
        let device = host(1 << 30);
        let mapper = local(&device, &geometry, Cold::Unbacked).with_recycler(&recycler(&device));
        let [kept, prepared, mapped] = [run(0, 2), run(2, 2), run(4, 2)];
        let engine = |wrote: bool| {
            for run in [kept, prepared, mapped] {
                mapper.map(&[run]).unwrap();
                for word in run.pages().flat_map(|page| words(&geometry, page)) {
                    assert_eq!(
                        read_word(&mapper, word),
                        Ok(0),
                        "{run}, another before: {wrote}"
                    );
                    mapper.write(word, &[7; 8]).unwrap();
                }
            }
        };
        engine(false);
        mapper.unmap(&[kept]).unwrap();
        mapper.prepare_unmap(&[prepared], After::NOTHING).unwrap();
        assert_eq!(mapper.kept_bytes(), 2 * geometry.bundle_bytes());

        // Its coordinator is gone; or the next one is there.
        mapper.resync(&[]).unwrap();
        assert_eq!((mapper.mapped(), mapper.kept_bytes()), (vec![], 0));
        engine(true);
    }
}

#[test]
#[should_panic(expected = "chunks are mapped by the driver value that made them")]
fn a_recycler_of_another_device_is_refused() {
    let (one, other) = (mock(1 << 30), mock(1 << 30));
    let _ = local(&one, &simple(8), Cold::Unbacked).with_recycler(&recycler(&other));
}

//! What every mapper owes its caller, as far as a caller can see it.

use crate::{MapError, Mapper, PageId, PageRun, Readiness};

/// Runs one mapper through its duties. `mapper` serves a pool of at least 8 pages, `pages` of
/// them, none of which is mapped, with memory for 8; it is left so.
///
/// # Panics
/// Where a duty is not met.
pub fn contract(mapper: &dyn Mapper, pages: u32) {
    assert!(pages >= 8, "the suite needs 8 pages");
    assert_eq!(
        mapper.ready(),
        Ok(Readiness::Ready),
        "a mapper under test can map"
    );

    nothing_asked_is_nothing_done(mapper);
    what_is_mapped_once_cannot_be_mapped_again(mapper);
    a_batch_is_refused_whole(mapper, pages);
    a_run_leaves_as_it_came(mapper);
    a_page_can_be_mapped_again_after_it_left(mapper);
}

fn nothing_asked_is_nothing_done(mapper: &dyn Mapper) {
    mapper.map(&[]).expect("mapping nothing");
    mapper.unmap(&[]).expect("unmapping nothing");
}

fn what_is_mapped_once_cannot_be_mapped_again(mapper: &dyn Mapper) {
    mapper.map(&[run(2, 2)]).expect("cold pages");
    for overlapping in [
        run(2, 2),
        run(2, 1),
        run(3, 1),
        run(1, 2),
        run(3, 3),
        run(0, 8),
    ] {
        refused(mapper.map(&[overlapping]));
        refused(mapper.map(&[run(6, 1), overlapping]));
    }
    mapper
        .unmap(&[run(2, 2)])
        .expect("the refusals changed nothing");
}

fn a_batch_is_refused_whole(mapper: &dyn Mapper, pages: u32) {
    mapper.map(&[run(0, 1), run(4, 2)]).expect("cold pages");
    let outside = run(pages, 1);
    let beyond = run(pages - 1, 2);
    for wrong in [run(5, 1), outside, beyond, run(u32::MAX - 1, 1)] {
        refused(mapper.map(&[run(1, 1), run(2, 2), wrong]));
        refused(mapper.map(&[wrong, run(1, 1), run(2, 2)]));
        refused(mapper.unmap(&[run(0, 1), run(4, 2), wrong]));
        refused(mapper.unmap(&[wrong, run(0, 1), run(4, 2)]));
    }
    refused(mapper.map(&[run(1, 2), run(2, 1)]));
    refused(mapper.map(&[run(1, 1), run(1, 1)]));
    refused(mapper.unmap(&[run(0, 1), run(0, 1)]));
    // None of the pages named beside a wrong one was mapped, none was unmapped.
    mapper.map(&[run(1, 1), run(2, 2)]).expect("still cold");
    mapper
        .unmap(&[run(4, 2), run(1, 1), run(0, 1), run(2, 2)])
        .expect("still mapped");
}

fn a_run_leaves_as_it_came(mapper: &dyn Mapper) {
    mapper.map(&[run(0, 2), run(2, 2)]).expect("cold pages");
    refused(mapper.unmap(&[run(0, 1)]));
    refused(mapper.unmap(&[run(1, 1)]));
    refused(mapper.unmap(&[run(0, 4)]));
    refused(mapper.unmap(&[run(1, 2)]));
    refused(mapper.unmap(&[run(4, 1)]));
    mapper.unmap(&[run(2, 2)]).expect("one of two");
    refused(mapper.unmap(&[run(2, 2)]));
    mapper.unmap(&[run(0, 2)]).expect("the other");
}

fn a_page_can_be_mapped_again_after_it_left(mapper: &dyn Mapper) {
    for count in 1..=8 {
        mapper.map(&[run(0, count)]).expect("cold pages");
        mapper.unmap(&[run(0, count)]).expect("as it was mapped");
    }
}

/// The call failed, and left every run as it was.
#[track_caller]
fn refused(outcome: Result<(), MapError>) {
    let error = outcome.expect_err("the caller's mistake is refused");
    assert_eq!(
        error.uncertain,
        [],
        "a refusal leaves nothing in doubt: {error}"
    );
    assert!(
        !error.is_full(),
        "a mistake is not the answer full: {error}"
    );
}

fn run(first: u32, count: u32) -> PageRun {
    PageRun::new(PageId(first), count).expect("a run of the suite is not empty")
}

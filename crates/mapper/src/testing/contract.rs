//! What every mapper owes its caller, as far as a caller can see it.

use crate::{After, MapError, Mapper, PageId, PageRun, RankMapper, Readiness, Resynced};

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

/// Runs one rank's mapper through what it owes beyond [`contract`], under the same conditions; it
/// is left with nothing mapped, too.
///
/// # Panics
/// Where a duty is not met.
pub fn rank_contract(mapper: &dyn RankMapper, pages: u32) {
    assert!(pages >= 8, "the suite needs 8 pages");
    assert_eq!(mapper.mapped(), [], "the suite begins with an empty pool");

    a_prepared_run_is_neither_mapped_nor_mappable(mapper);
    an_abort_restores_exactly_what_was_prepared(mapper);
    a_commit_frees_exactly_what_was_prepared(mapper);
    a_mistake_in_a_batch_prepares_none_of_it(mapper, pages);
    what_is_not_prepared_is_passed_over(mapper);
    a_resync_ends_with_exactly_what_is_wanted(mapper);
    a_resync_of_what_is_so_already_changes_nothing(mapper);
    a_set_that_cannot_be_is_refused_and_changes_nothing(mapper, pages);
    after_a_resync_everything_goes_on(mapper);

    assert_eq!(mapper.mapped(), [], "the suite ends with an empty pool");
}

fn a_prepared_run_is_neither_mapped_nor_mappable(mapper: &dyn RankMapper) {
    mapper.map(&[run(0, 1), run(2, 2)]).expect("cold pages");
    prepare(mapper, &[run(2, 2)]);
    assert_eq!(mapper.mapped(), [run(0, 1)]);
    for overlapping in [run(2, 2), run(2, 1), run(3, 1), run(1, 2), run(3, 3)] {
        refused(mapper.map(&[overlapping]));
        refused(mapper.map(&[run(6, 1), overlapping]));
        refused(mapper.unmap(&[overlapping]));
        refused(mapper.prepare_unmap(&[run(0, 1), overlapping], After::NOTHING));
    }
    // The rest of the pool goes on meanwhile.
    mapper.map(&[run(1, 1), run(4, 4)]).expect("cold pages");
    let others = [run(0, 1), run(1, 1), run(4, 4)];
    assert_eq!(mapper.mapped(), others);
    mapper.unmap(&others).expect("mapped");
    mapper.commit_unmap(&[run(2, 2)]);
}

fn an_abort_restores_exactly_what_was_prepared(mapper: &dyn RankMapper) {
    let all = [run(0, 1), run(1, 3), run(6, 2)];
    mapper.map(&all).expect("cold pages");
    prepare(mapper, &all);
    assert_eq!(mapper.mapped(), []);
    mapper.abort_unmap(&[run(1, 3)]).expect("nothing fails");
    assert_eq!(mapper.mapped(), [run(1, 3)]);
    mapper
        .abort_unmap(&[run(6, 2), run(0, 1)])
        .expect("nothing fails");
    assert_eq!(mapper.mapped(), all);
    // As mapped as ever: not mappable, and unmapped as they were mapped.
    refused(mapper.map(&[run(1, 3)]));
    refused(mapper.unmap(&[run(1, 2)]));
    mapper.unmap(&all).expect("mapped again");
}

fn a_commit_frees_exactly_what_was_prepared(mapper: &dyn RankMapper) {
    mapper.map(&[run(0, 4), run(4, 4)]).expect("cold pages");
    prepare(mapper, &[run(4, 4), run(0, 4)]);
    mapper.commit_unmap(&[run(0, 4)]);
    mapper
        .map(&[run(0, 1), run(1, 3)])
        .expect("free in any shape");
    refused(mapper.map(&[run(4, 1)]));
    mapper.commit_unmap(&[run(4, 4)]);
    mapper.map(&[run(4, 4)]).expect("free");
    mapper
        .unmap(&[run(0, 1), run(1, 3), run(4, 4)])
        .expect("mapped");
}

fn a_mistake_in_a_batch_prepares_none_of_it(mapper: &dyn RankMapper, pages: u32) {
    mapper.map(&[run(0, 1), run(4, 2)]).expect("cold pages");
    for wrong in [run(5, 1), run(0, 1), run(2, 1), run(pages, 1)] {
        refused(mapper.prepare_unmap(&[run(0, 1), wrong], After::NOTHING));
    }
    assert_eq!(mapper.mapped(), [run(0, 1), run(4, 2)]);
    mapper.unmap(&[run(0, 1), run(4, 2)]).expect("still mapped");
}

fn what_is_not_prepared_is_passed_over(mapper: &dyn RankMapper) {
    mapper.map(&[run(0, 2), run(2, 2)]).expect("cold pages");
    let unprepared = [run(0, 2), run(4, 1), run(6, 2)];
    mapper.commit_unmap(&unprepared);
    mapper.abort_unmap(&unprepared).expect("nothing to do");
    assert_eq!(mapper.mapped(), [run(0, 2), run(2, 2)]);
    prepare(mapper, &[run(2, 2)]);
    // Twice, as the retry of a lost answer would, and beside what is not prepared.
    for _ in 0..2 {
        mapper.abort_unmap(&[run(0, 2), run(2, 2)]).expect("one is");
        assert_eq!(mapper.mapped(), [run(0, 2), run(2, 2)]);
    }
    prepare(mapper, &[run(2, 2)]);
    for _ in 0..2 {
        mapper.commit_unmap(&[run(2, 2), run(0, 2)]);
        assert_eq!(mapper.mapped(), [run(0, 2)]);
    }
    mapper.unmap(&[run(0, 2)]).expect("mapped");
}

fn a_resync_ends_with_exactly_what_is_wanted(mapper: &dyn RankMapper) {
    let sets: [&[PageRun]; 6] = [
        &[],
        &[run(0, 1)],
        &[run(0, 2), run(3, 1)],
        // The same pages with other bounds.
        &[run(0, 1), run(1, 1), run(3, 2)],
        &[run(0, 8)],
        &[run(1, 3), run(4, 4)],
    ];
    for before in sets {
        for nth_prepared in 0..=before.len() {
            for wanted in sets {
                resync(mapper, before);
                if let Some(&run) = before.get(nth_prepared) {
                    prepare(mapper, &[run]);
                }
                let remade = resync(mapper, wanted);
                let missing: Vec<PageRun> = wanted
                    .iter()
                    .copied()
                    .filter(|run| !before.contains(run))
                    .collect();
                assert_eq!(remade, missing, "what was there keeps its content");
            }
        }
    }
    resync(mapper, &[]);
}

fn a_resync_of_what_is_so_already_changes_nothing(mapper: &dyn RankMapper) {
    let wanted = [run(5, 2), run(0, 1)];
    assert_eq!(resync(mapper, &wanted), [run(0, 1), run(5, 2)]);
    for _ in 0..2 {
        assert_eq!(resync(mapper, &wanted), []);
    }
    resync(mapper, &[]);
}

fn a_set_that_cannot_be_is_refused_and_changes_nothing(mapper: &dyn RankMapper, pages: u32) {
    resync(mapper, &[run(0, 2), run(6, 1)]);
    prepare(mapper, &[run(6, 1)]);
    for wrong in [run(1, 1), run(0, 2), run(pages - 1, 2), run(pages, 1)] {
        refused(mapper.resync(&[run(0, 2), run(4, 1), wrong]).map(drop));
    }
    assert_eq!(mapper.mapped(), [run(0, 2)]);
    mapper.abort_unmap(&[run(6, 1)]).expect("still prepared");
    assert_eq!(mapper.mapped(), [run(0, 2), run(6, 1)]);
    resync(mapper, &[]);
}

fn after_a_resync_everything_goes_on(mapper: &dyn RankMapper) {
    resync(mapper, &[run(0, 2), run(4, 1)]);
    refused(mapper.map(&[run(1, 1)]));
    refused(mapper.unmap(&[run(0, 1)]));
    mapper.map(&[run(2, 2)]).expect("cold pages");
    prepare(mapper, &[run(0, 2)]);
    mapper.commit_unmap(&[run(0, 2)]);
    mapper.unmap(&[run(2, 2), run(4, 1)]).expect("mapped");
}

fn prepare(mapper: &dyn RankMapper, runs: &[PageRun]) {
    mapper
        .prepare_unmap(runs, After::NOTHING)
        .expect("mapped, and nothing to wait for");
}

/// What had to be remade, once exactly `wanted` is mapped.
fn resync(mapper: &dyn RankMapper, wanted: &[PageRun]) -> Vec<PageRun> {
    let Resynced { remade, in_doubt } = mapper.resync(wanted).expect("nothing fails");
    assert_eq!(in_doubt, []);
    let mut sorted = wanted.to_vec();
    sorted.sort_unstable();
    assert_eq!(mapper.mapped(), sorted);
    remade
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

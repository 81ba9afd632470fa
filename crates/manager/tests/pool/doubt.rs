//! Ranks that are in doubt, and work that is in flight, as the pool of an engine sees them.

use kvcached_manager::{AllocError, BlockId};
use kvcached_mapper::testing::Call;
use kvcached_mapper::{
    After, Cause, Epoch, Health, MapError, PageId, PageRun, Rank, Stage, Suspect,
};

use crate::support::{Pool, Shape, blocks};

const STAGE: Stage = Stage(0);
const RANK: Rank = Rank(3);

fn suspects() -> Vec<Suspect> {
    vec![Suspect {
        stage: STAGE,
        rank: RANK,
        reason: "no answer within 5 ms".to_owned(),
    }]
}

/// A rank becomes suspect, and somebody looks.
fn fence(pool: &Pool) {
    pool.mapper.set_health(Health::Fenced {
        ranks: suspects(),
        pages: 0,
    });
    assert!(pool.blocks.health().is_fenced());
}

#[test]
fn a_fenced_pool_hands_out_nothing_not_even_what_is_free_on_pages_in_use() {
    let mut pool = Pool::new(Shape::uniform(8, 4));
    let mine = pool.blocks.alloc(5).unwrap();
    let hold = pool.blocks.hold(4).unwrap();
    assert!(pool.blocks.available() > 2);
    let before = pool.look();
    fence(&pool);
    let ranks = suspects();
    let refused = AllocError::Fenced {
        ranks: ranks.clone(),
    };
    for n in [0, 1, 2, 7, 100] {
        assert_eq!(pool.blocks.alloc(n), Err(refused.clone()));
        assert_eq!(pool.blocks.hold(n), Err(refused.clone()));
    }
    assert_eq!(
        refused.to_string(),
        "no block is handed out until every rank is known again; stage 0, rank 3: no answer within 5 ms"
    );
    assert_eq!(pool.blocks.available(), 0);
    assert_eq!(pool.look().of_blocks(), before.of_blocks());

    // What was promised is kept, and what is not needed is taken back.
    assert_eq!(pool.blocks.take_held(hold, 2).unwrap(), blocks([6, 7]));
    pool.blocks.free(&mine[..2]).unwrap();
    pool.blocks.free_in(&mine[2..], Epoch(1)).unwrap();
    assert_eq!(pool.blocks.release_hold(hold), Ok(2));
    assert_eq!(pool.blocks.clear(), Ok(2));

    pool.mapper.set_health(Health::Healthy);
    assert_eq!(pool.blocks.repair().unwrap().health, Health::Healthy);
    assert_eq!(pool.blocks.available(), 31);
    assert_eq!(pool.blocks.alloc(31).unwrap().len(), 31);
}

#[test]
fn a_suspect_rank_met_by_an_alloc_refuses_the_next_one_without_a_call() {
    let mut pool = Pool::new(Shape::uniform(8, 4));
    pool.mapper.set_health(Health::Fenced {
        ranks: suspects(),
        pages: 0,
    });
    let (stage, rank) = (STAGE, RANK);
    let diverged = MapError::clean(Cause::Diverged { stage, rank });
    pool.mapper.fail(Call::Map, 0, diverged.clone());
    assert_eq!(pool.blocks.alloc(9), Err(AllocError::Broken(diverged)));
    let calls = pool.mapper.calls();
    let ranks = suspects();
    assert_eq!(pool.blocks.alloc(1), Err(AllocError::Fenced { ranks }));
    assert_eq!(pool.mapper.calls(), calls);
}

#[test]
fn blocks_on_repaired_pages_are_had_again_and_a_loss_is_told() {
    let mut pool = Pool::new(Shape::uniform(4, 4));
    let uncertain = vec![PageRun::new(PageId(1), 1).unwrap()];
    let (stage, rank) = (STAGE, RANK);
    let error = MapError {
        cause: Cause::Diverged { stage, rank },
        uncertain,
    };
    pool.mapper.fail(Call::Map, 0, error.clone());
    assert_eq!(pool.blocks.alloc(7), Err(AllocError::Broken(error)));
    assert_eq!(pool.blocks.available(), 11);
    assert_eq!(
        pool.blocks.health().to_string(),
        "degraded, 1 pages in doubt"
    );
    pool.mapper.lose_content(STAGE, RANK);
    assert_eq!(pool.blocks.contents_lost(), 0);
    let repaired = pool.blocks.repair().unwrap();
    assert_eq!((repaired.cold, repaired.warm), (1, 0));
    assert_eq!(repaired.lost, [(STAGE, RANK)]);
    assert_eq!(pool.blocks.contents_lost(), 1);
    assert_eq!(pool.blocks.alloc(15).unwrap(), blocks(1..16));
}

#[test]
fn a_page_waits_for_the_latest_epoch_of_its_blocks_whichever_is_freed_last() {
    let mut pool = Pool::new(Shape::uniform(8, 4));
    pool.blocks.alloc(11).unwrap();
    pool.blocks.free_in(&blocks(4..7), Epoch(9)).unwrap();
    pool.blocks.free_in(&[BlockId(7)], Epoch(5)).unwrap();
    pool.blocks.trim().unwrap();
    assert_eq!(pool.mapper.last_after(), Some(After::epoch(Epoch(9))));

    pool.blocks.free_in(&blocks(8..12), Epoch(10)).unwrap();
    pool.blocks.retire(Epoch(9));
    assert_eq!(
        pool.pages.replenish().unwrap().unmapped,
        0,
        "10 is in flight"
    );
    pool.blocks.retire(Epoch(10));
    assert_eq!(pool.pages.replenish().unwrap().unmapped, 1);
    assert_eq!(pool.mapper.last_after(), Some(After::NOTHING));
}

#[test]
fn blocks_freed_without_an_epoch_wait_for_the_device() {
    let mut pool = Pool::new(Shape::uniform(8, 4));
    let mine = pool.blocks.alloc(11).unwrap();
    pool.blocks.free(&mine).unwrap();
    pool.blocks.trim().unwrap();
    assert_eq!(pool.mapper.last_after(), Some(After::DEVICE));
}

#[test]
fn blocks_that_were_only_held_wait_for_nothing() {
    let mut pool = Pool::new(Shape::uniform(8, 4));
    let hold = pool.blocks.hold(11).unwrap();
    pool.blocks.release_hold(hold).unwrap();
    pool.blocks.trim().unwrap();
    assert_eq!(pool.mapper.last_after(), Some(After::NOTHING));

    // Unless the page had others.
    pool.blocks.alloc(3).unwrap();
    let mine = pool.blocks.alloc(1).unwrap();
    let hold = pool.blocks.hold(3).unwrap();
    pool.blocks.free_in(&mine, Epoch(4)).unwrap();
    pool.blocks.release_hold(hold).unwrap();
    pool.blocks.trim().unwrap();
    assert_eq!(pool.mapper.last_after(), Some(After::epoch(Epoch(4))));
}

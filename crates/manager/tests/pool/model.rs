//! Random operations and faults, against a model that is nothing but sets of numbers.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};

use kvcached_manager::{
    AllocError, BlockId, FreeError, FullReason, HoldError, HoldId, LimitStatus, NULL_BLOCK,
};
use kvcached_mapper::testing::Call;
use kvcached_mapper::{Cause, Epoch, Health, MapError, PageId, Rank, Stage, Suspect};
use kvcached_page_alloc::{PageState, Reserve};
use proptest::prelude::*;

use crate::support::{Pool, Seen, Shape};

#[derive(Debug, Clone)]
enum Op {
    Alloc(u32),
    /// As many as can be had, after one more was refused.
    AllocAll,
    /// Blocks picked and ordered by a seed, about this many eighths of all.
    Free {
        eighths: u64,
        seed: u64,
        /// In this one, or in none.
        epoch: Option<Epoch>,
    },
    Retire(Epoch),
    Fence,
    Repair,
    FreeWrong {
        wrong: Wrong,
        seed: u64,
    },
    Hold(u32),
    TakeHeld {
        hold: usize,
        n: u32,
    },
    ReleaseHold(usize),
    Clear,
    Limit(u32),
    Memory(Option<u32>),
    Trim,
    Replenish,
    Fail {
        call: Call,
        uncertain: bool,
    },
}

#[derive(Debug, Clone, Copy)]
enum Wrong {
    Twice,
    Free,
    Null,
    OutOfRange,
    Straddler,
    Held,
}

fn op() -> impl Strategy<Value = Op> {
    let wrong = prop::sample::select(vec![
        Wrong::Twice,
        Wrong::Free,
        Wrong::Null,
        Wrong::OutOfRange,
        Wrong::Straddler,
        Wrong::Held,
    ]);
    let call = prop::sample::select(vec![Call::Map, Call::Unmap]);
    prop_oneof![
        8 => (0_u32..40).prop_map(Op::Alloc),
        2 => (0_u32..300).prop_map(Op::Alloc),
        2 => Just(Op::AllocAll),
        8 => (1_u64..=8, any::<u64>(), prop::option::of((0_u64..9).prop_map(Epoch)))
            .prop_map(|(eighths, seed, epoch)| Op::Free { eighths, seed, epoch }),
        1 => (0_u64..9).prop_map(|epoch| Op::Retire(Epoch(epoch))),
        1 => Just(Op::Fence),
        2 => Just(Op::Repair),
        4 => (wrong, any::<u64>()).prop_map(|(wrong, seed)| Op::FreeWrong { wrong, seed }),
        3 => (0_u32..20).prop_map(Op::Hold),
        3 => (0_usize..4, 0_u32..12).prop_map(|(hold, n)| Op::TakeHeld { hold, n }),
        2 => (0_usize..4).prop_map(Op::ReleaseHold),
        1 => Just(Op::Clear),
        3 => (0_u32..14).prop_map(Op::Limit),
        2 => prop::option::of(0_u32..14).prop_map(Op::Memory),
        1 => Just(Op::Trim),
        2 => Just(Op::Replenish),
        2 => (call, any::<bool>()).prop_map(|(call, uncertain)| Op::Fail { call, uncertain }),
    ]
}

fn shape() -> impl Strategy<Value = Shape> {
    let sizes = vec![
        (1, 1),
        (4, 1),
        (63, 1),
        (64, 1),
        (100, 1),
        (7, 2),
        (7, 3),
        (4, 3),
        (130, 3),
    ];
    (
        1_u32..12,
        prop::sample::select(sizes),
        1_u32..6,
        0_u32..3,
        0_u32..3,
    )
        .prop_map(
            |(pages, (page_bytes, unit_bytes), max_run, min, more)| Shape {
                max_run,
                reserve: Reserve {
                    min,
                    max: min + more,
                },
                ..Shape::of_bytes(pages, page_bytes, unit_bytes)
            },
        )
}

/// The next call of a kind that fails, and whether it leaves its first run in doubt.
type Fault = Arc<Mutex<Option<(Call, bool)>>>;

struct Run {
    pool: Pool,
    /// Blocks handed out.
    ours: BTreeSet<BlockId>,
    holds: BTreeMap<HoldId, BTreeSet<BlockId>>,
    fault: Fault,
    memory: Option<u32>,
    /// Does every page that holds blocks hold the same number?
    even: bool,
}

impl Run {
    fn new(shape: Shape) -> Self {
        let pool = Pool::new(shape);
        let fault = Fault::default();
        let armed = Arc::clone(&fault);
        pool.mapper.set_before(move |call, runs| {
            let mut armed = armed.lock().unwrap();
            match armed.take_if(|(failing, _)| *failing == call) {
                None => Ok(()),
                Some((_, uncertain)) => Err(MapError {
                    cause: Cause::Diverged {
                        stage: Stage(0),
                        rank: Rank(1),
                    },
                    uncertain: runs.iter().take(usize::from(uncertain)).copied().collect(),
                }),
            }
        });
        let even = shape.page_bytes.is_multiple_of(shape.unit_bytes)
            || pool.blocks.space().max_blocks_per_page() == 1;
        Self {
            pool,
            ours: BTreeSet::new(),
            holds: BTreeMap::new(),
            fault,
            memory: None,
            even,
        }
    }

    fn apply(&mut self, op: &Op) {
        match *op {
            Op::Alloc(n) => self.alloc(n),
            Op::AllocAll => {
                self.alloc(self.within_reach().1 + 1);
                self.alloc(self.within_reach().0);
            }
            Op::Free {
                eighths,
                seed,
                epoch,
            } => {
                let picked = self.pick(eighths, seed);
                match epoch {
                    Some(epoch) => self.pool.blocks.free_in(&picked, epoch).unwrap(),
                    None => self.pool.blocks.free(&picked).unwrap(),
                }
                self.ours.retain(|block| !picked.contains(block));
            }
            Op::FreeWrong { wrong, seed } => self.free_wrong(wrong, seed),
            Op::Hold(n) => self.hold(n),
            Op::TakeHeld { hold, n } => self.take_held(hold, n),
            Op::ReleaseHold(hold) => {
                let Some(&hold) = self.holds.keys().nth(hold) else {
                    return;
                };
                let blocks = self.holds.remove(&hold).unwrap();
                assert_eq!(self.pool.blocks.release_hold(hold), Ok(count(blocks)));
                let again = self.pool.blocks.release_hold(hold);
                assert_eq!(again, Err(HoldError::Unknown { hold }));
            }
            Op::Clear => {
                assert_eq!(self.pool.blocks.clear(), Ok(count(&self.ours)));
                self.ours.clear();
            }
            Op::Limit(pages) => {
                let status = self.pool.limit_pages(pages);
                assert_eq!(status, self.pool.blocks.limit_status());
            }
            Op::Memory(pages) => {
                self.memory = pages;
                self.pool.mapper.set_memory_pages(pages);
            }
            Op::Retire(epoch) => self.pool.blocks.retire(epoch),
            Op::Fence => {
                let ranks = vec![suspect()];
                let pages = self.pool.pages.usage().quarantined;
                let fenced = Health::Fenced { ranks, pages };
                self.pool.mapper.set_health(fenced.clone());
                assert_eq!(self.pool.blocks.health(), fenced);
            }
            Op::Repair => {
                self.pool.mapper.set_health(Health::Healthy);
                let armed = self.fault.lock().unwrap().is_some();
                let in_doubt = self.pool.pages.usage().quarantined;
                let repaired = self.pool.blocks.repair().unwrap();
                assert_eq!(repaired.cold, in_doubt);
                // Unless what the fence kept from being unmapped is in doubt now.
                let pages = self.pool.pages.usage().quarantined;
                let ranks = Vec::new();
                let expected = match pages {
                    0 => Health::Healthy,
                    pages => Health::Degraded { ranks, pages },
                };
                assert!(pages == 0 || armed);
                assert_eq!(repaired.health, expected);
            }
            Op::Trim => {
                let allowed = self.fault.lock().unwrap().is_none() && !self.pool.pages.is_fenced();
                assert!(self.pool.blocks.trim().is_ok() || !allowed);
            }
            Op::Replenish => {
                let armed = self.fault.lock().unwrap().is_some();
                assert!(self.pool.pages.replenish().is_ok() || armed);
            }
            Op::Fail { call, uncertain } => *self.fault.lock().unwrap() = Some((call, uncertain)),
        }
    }

    fn alloc(&mut self, n: u32) {
        let (before, reach) = (self.pool.look(), self.within_reach());
        let armed = self.fault.lock().unwrap().is_some();
        let mut blocks = vec![NULL_BLOCK];
        match self.pool.blocks.alloc_into(n, &mut blocks) {
            Ok(()) => {
                assert!(n <= reach.1, "no more than is there");
                let new = &blocks[1..];
                assert_eq!(new.len(), usize::try_from(n).unwrap());
                for &block in new {
                    assert!(!self.is_taken(block), "{block} has an owner");
                    assert!(self.ours.insert(block), "{block} is handed out once");
                }
                let page_of = |block: BlockId| self.pool.blocks.page_of(block).unwrap();
                let ascending = new
                    .windows(2)
                    .all(|two| page_of(two[0]) != page_of(two[1]) || two[0] < two[1]);
                assert!(ascending, "{new:?}");
            }
            Err(error) => {
                assert_eq!(blocks, [NULL_BLOCK], "nothing was appended");
                self.refused(n, reach, armed, &error, &before);
            }
        }
    }

    /// An answer other than blocks has its reason, and has changed nothing that blocks stand on.
    fn refused(&self, n: u32, reach: (u32, u32), armed: bool, error: &AllocError, before: &Seen) {
        match *error {
            AllocError::Full {
                requested,
                reason: FullReason::DeviceMemory,
                ..
            } => {
                assert_eq!(requested, n);
                assert!(n <= before.usage.blocks_available && self.memory.is_some());
            }
            AllocError::Full {
                requested,
                available,
                ..
            } => {
                assert_eq!((requested, available), (n, self.pool.blocks.available()));
                assert!(n > reach.0, "{n} of {reach:?} were refused: {error}");
            }
            AllocError::Broken(_) => assert!(armed, "{error}"),
            AllocError::Fenced { ref ranks } => assert_eq!(*ranks, [suspect()]),
            _ => panic!("{error}"),
        }
        assert_eq!(self.pool.look().of_blocks(), before.of_blocks());
    }

    fn free_wrong(&mut self, wrong: Wrong, seed: u64) {
        let mut blocks = self.pick(4, seed);
        let all = self.pool.blocks.space().blocks();
        let space = self.pool.blocks.space();
        let straddles = |block: &BlockId| space.page_of(block.0).is_none();
        let every = || (0..all).map(BlockId);
        let bad = match wrong {
            Wrong::Twice => blocks.first().copied(),
            Wrong::Free => every().find(|block| !straddles(block) && !self.is_taken(*block)),
            Wrong::Null => Some(NULL_BLOCK),
            Wrong::OutOfRange => Some(BlockId(
                all.saturating_add(u32::try_from(seed % 9).unwrap()),
            )),
            Wrong::Straddler => every().find(straddles),
            Wrong::Held => self.holds.values().flatten().next().copied(),
        };
        let Some(block) = bad else { return };
        // Blocks before it have been looked at when it is found, those after it have not.
        let at = blocks.len() - usize::try_from(seed % 3).unwrap().min(blocks.len() / 2);
        blocks.insert(at, block);
        let expected = match wrong {
            Wrong::Twice => FreeError::NamedTwice { block },
            Wrong::Free => FreeError::NotTaken { block },
            Wrong::Null => FreeError::Null,
            Wrong::OutOfRange => FreeError::OutOfRange { block, blocks: all },
            Wrong::Straddler => FreeError::Straddles { block },
            Wrong::Held => FreeError::Held { block },
        };
        let before = self.pool.look();
        let epoch = Epoch(seed % 9);
        assert_eq!(self.pool.blocks.free(&blocks), Err(expected.clone()));
        assert_eq!(self.pool.blocks.free_in(&blocks, epoch), Err(expected));
        assert_eq!(self.pool.look(), before);
    }

    fn hold(&mut self, n: u32) {
        let (before, reach) = (self.pool.look(), self.within_reach());
        let armed = self.fault.lock().unwrap().is_some();
        match self.pool.blocks.hold(n) {
            Ok(hold) => {
                // Nothing tells what is in a hold, except that it cannot be freed.
                let pool = &mut self.pool.blocks;
                let all = pool.space().blocks();
                let is_held = |block: &BlockId| {
                    !self.ours.contains(block)
                        && pool.free(&[*block]) == Err(FreeError::Held { block: *block })
                };
                let held: BTreeSet<BlockId> = (0..all).map(BlockId).filter(is_held).collect();
                let new = held
                    .into_iter()
                    .filter(|b| !self.holds.values().any(|h| h.contains(b)));
                let new: BTreeSet<BlockId> = new.collect();
                assert_eq!(count(&new), n);
                assert_eq!(
                    self.holds.insert(hold, new),
                    None,
                    "a hold has a name of its own"
                );
            }
            Err(error) => self.refused(n, reach, armed, &error, &before),
        }
    }

    fn take_held(&mut self, hold: usize, n: u32) {
        let Some(&hold) = self.holds.keys().nth(hold) else {
            return;
        };
        let (before, held) = (self.pool.look(), count(&self.holds[&hold]));
        match self.pool.blocks.take_held(hold, n) {
            Ok(blocks) => {
                assert_eq!(blocks.len(), usize::try_from(n).unwrap());
                for block in blocks {
                    assert!(self.holds.get_mut(&hold).unwrap().remove(&block), "its own");
                    self.ours.insert(block);
                }
            }
            Err(error) => {
                assert_eq!(
                    error,
                    HoldError::TooFew {
                        hold,
                        requested: n,
                        held
                    }
                );
                assert!(n > held);
                assert_eq!(self.pool.look(), before);
            }
        }
    }

    /// The fewest and the most blocks that can be had if the device has memory, counted page by
    /// page: they differ where the limit leaves it open which of several uneven pages may be had.
    fn within_reach(&self) -> (u32, u32) {
        if self.pool.pages.is_fenced() {
            return (0, 0);
        }
        let space = self.pool.blocks.space();
        let (mut free, mut idle) = (0, Vec::new());
        for page in (0..space.pages()).map(PageId) {
            let taken = space
                .blocks_in(page)
                .filter(|&block| self.is_taken(BlockId(block)));
            match self.pool.pages.state(page).unwrap() {
                PageState::Cold | PageState::Warm => idle.push(space.count_in(page)),
                PageState::Used => free += space.count_in(page) - count(taken),
                _ => {}
            }
        }
        let pages = self.pool.pages.usage();
        let limit = pages.limit.bytes / self.pool.page_bytes;
        let room = limit.saturating_sub(u64::from(pages.used + pages.quarantined));
        let room = idle.len().min(usize::try_from(room).unwrap());
        idle.sort();
        let fewest: u32 = idle[..room].iter().sum();
        let most: u32 = idle[idle.len() - room..].iter().sum();
        (free + fewest, free + most)
    }

    fn is_taken(&self, block: BlockId) -> bool {
        block == NULL_BLOCK
            || self.ours.contains(&block)
            || self.holds.values().any(|held| held.contains(&block))
    }

    fn pick(&self, eighths: u64, seed: u64) -> Vec<BlockId> {
        // Any mixing will do that makes neighbours differ.
        let mix = |block: &BlockId| {
            let mixed = (u64::from(block.0) ^ seed).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            mixed ^ (mixed >> 29)
        };
        let mut picked: Vec<BlockId> = self
            .ours
            .iter()
            .filter(|block| mix(block) % 8 < eighths)
            .copied()
            .collect();
        if seed % 2 == 1 {
            picked.sort_by_key(mix);
        }
        picked
    }

    fn check(&self) {
        let Pool {
            blocks: pool,
            pages,
            mapper,
            ..
        } = &self.pool;
        let usage = pool.usage();
        let held: Vec<u32> = self.holds.values().map(count).collect();
        assert_eq!(usage.blocks_used, count(&self.ours));
        assert_eq!(usage.blocks_held, held.iter().sum::<u32>());
        assert_eq!(pool.holds().collect::<Vec<_>>(), {
            self.holds.keys().copied().zip(held).collect::<Vec<_>>()
        });

        // Every block with an owner lies on a page that has memory, and keeps it.
        let mut used = BTreeMap::new();
        let held = self.holds.values().flatten();
        for block in self.ours.iter().chain(held).chain([&NULL_BLOCK]) {
            let page = pool.page_of(*block).expect("no straddler is handed out");
            *used.entry(page).or_insert(0_u32) += 1;
        }
        let mapped = mapper.mapped();
        for page in used.keys() {
            assert!(
                mapped.iter().any(|run| run.contains(*page)),
                "{page} has no memory"
            );
            assert_eq!(pages.state(*page), Some(PageState::Used));
        }
        let occupancy: Vec<_> = pool
            .occupancy()
            .map(|page| (page.page, page.used))
            .collect();
        assert_eq!(occupancy, used.into_iter().collect::<Vec<_>>());
        let on_pages = u32::try_from(occupancy.len()).unwrap();
        assert_eq!(usage.pages.used, on_pages, "an empty page is given back");

        let ((_, most), available) = (self.within_reach(), pool.available());
        assert_eq!(usage.blocks_available, available);
        assert!(available >= most);
        let kept_back = usage.pages.total - usage.pages.void - usage.pages.used - pages.available();
        if self.even || kept_back == 0 {
            assert_eq!(available, most);
        }

        let over = usage
            .pages
            .mapped_bytes
            .checked_sub(usage.pages.limit.bytes);
        match usage.pages.limit_status {
            LimitStatus::Applied => assert!(matches!(over, None | Some(0))),
            LimitStatus::Deferred { excess_bytes } => assert_eq!(over, Some(excess_bytes)),
            status => panic!("{status:?}"),
        }
        assert_eq!(mapper.violations(), []);
    }
}

fn suspect() -> Suspect {
    Suspect {
        stage: Stage(0),
        rank: Rank(1),
        reason: "the connection ended".to_owned(),
    }
}

fn count(blocks: impl IntoIterator) -> u32 {
    u32::try_from(blocks.into_iter().count()).unwrap()
}

proptest! {
    // The sequences that matter are long ones: many are tried, in about a second.
    #![proptest_config(ProptestConfig::with_cases(2000))]

    /// No block is handed out twice, every block with an owner lies on a page with memory, an
    /// answer other than yes changes nothing, and all counts agree with the sets, whatever is asked
    /// in whatever order and whatever fails.
    #[test]
    fn no_block_is_handed_out_twice_or_without_memory(
        shape in shape(),
        ops in prop::collection::vec(op(), 1..50),
    ) {
        let mut run = Run::new(shape);
        run.check();
        for op in &ops {
            run.apply(op);
            run.check();
        }
    }
}

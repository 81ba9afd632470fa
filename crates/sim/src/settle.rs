//! The end of a run: nothing fails any more, and everything must come to rest within a bound.

use kvcached_mapper::{Health, PageId};

use crate::device::GRANULE;
use crate::engine::{Life, Op, Pool};
use crate::report::Guarantee;
use crate::script::Step;
use crate::world::{World, lock};

/// Longer than the longest pause between two repairs, the longest absence of a process and a few
/// time-outs together.
const REST_NS: u64 = 5_000_000_000;

impl World {
    pub(crate) fn settle(&self) {
        if self.is_over() {
            return;
        }
        self.mend();
        let mut mended = self.go_on_until(REST_NS, |world| world.is_mended().is_ok());
        if !mended && self.is_short_of_memory() {
            // What a rank had lost somebody else may have taken, and nobody can mend that but who
            // has it.
            if let Some(life) = self.current() {
                self.free_all(&life);
                mended = self.go_on_until(REST_NS, |world| {
                    for pool in 0..world.config.pools {
                        world.do_now(&life, Step::Trim { pool });
                    }
                    world.is_mended().is_ok()
                });
            }
        }
        if !mended {
            let why = self.is_mended().err().unwrap_or_default();
            return self.violate(
                Guarantee::Mended,
                format!("{} ms later {why}", REST_NS / 1_000_000),
            );
        }
        let Some(life) = self.current() else { return };
        self.check_all_equal(&life);
        self.give_all_back(&life);
    }

    fn mend(&self) {
        let now_ns = self.clock.now_ns();
        lock(&self.network).heal(now_ns);
        for rank in 0..self.places.len() {
            self.devices[rank].unfill();
            if let Some(memory) = self.memory(rank) {
                memory.driver.heal();
            }
        }
    }

    /// Lets time pass, within a bound, until `done`.
    fn go_on_until(&self, within_ns: u64, done: impl Fn(&Self) -> bool) -> bool {
        let until_ns = self.clock.now_ns() + within_ns;
        while !self.is_over() && self.clock.now_ns() < until_ns {
            if done(self) {
                return true;
            }
            self.advance();
        }
        self.is_over() || done(self)
    }

    /// Is every process there, and every pool healthy? If not, what is missing.
    fn is_mended(&self) -> Result<(), String> {
        let life = self
            .current()
            .ok_or_else(|| "there is no coordinator".to_owned())?;
        if self.is_stalled() || self.depth() > 0 || !lock(&self.state).waiting.is_empty() {
            return Err("operations are under way".to_owned());
        }
        let now_ns = self.clock.now_ns();
        let busy = |rank: usize| {
            let served = lock(&self.served[rank]);
            served
                .as_ref()
                .is_some_and(|served| served.busy_until_ns > now_ns)
        };
        if (0..self.places.len()).any(busy) {
            return Err("a rank is at work, or stalled".to_owned());
        }
        for (index, pool) in life.pools.iter().enumerate() {
            let manager = lock(&pool.manager);
            if manager.is_none() {
                return Err(format!(
                    "pool {index} has not begun: {}",
                    pool.pages.health()
                ));
            }
            drop(manager);
            let health = pool.pages.health();
            if health != Health::Healthy {
                return Err(format!("pool {index} is {health}"));
            }
            if !lock(&pool.fan).doubtful.is_empty() && pool.pages.usage().quarantined > 0 {
                return Err(format!("pool {index} has pages in quarantine"));
            }
            for rank in 0..self.places.len() {
                let known = lock(&pool.books).known[rank];
                if self
                    .memory(rank)
                    .is_none_or(|memory| memory.generation != known)
                {
                    return Err(format!("pool {index} has not joined rank {rank}"));
                }
            }
        }
        Ok(())
    }

    fn check_all_equal(&self, life: &Life) {
        for (index, pool) in life.pools.iter().enumerate() {
            let agreed: Vec<_> = lock(&pool.fan).agreed.iter().copied().collect();
            for rank in 0..self.places.len() {
                let Some(memory) = self.memory(rank) else {
                    continue;
                };
                let mapper = &memory.mappers[index];
                if mapper.mapped() != agreed || !mapper.in_doubt().is_empty() {
                    let what = format!(
                        "at rest rank {rank} has {:?} in pool {index}, and {:?} in doubt; agreed are {agreed:?}",
                        mapper.mapped(),
                        mapper.in_doubt(),
                    );
                    return self.violate(Guarantee::Mended, what);
                }
            }
        }
    }

    /// Everything is freed, and the devices get their memory back; then there is room again.
    fn give_all_back(&self, life: &Life) {
        self.free_all(life);
        self.keep_nothing();
        let done = self.go_on_until(REST_NS, |world| {
            for pool in 0..world.config.pools {
                world.do_now(life, Step::Trim { pool });
            }
            let mut pools = life.pools.iter();
            let empty = pools.all(|pool| lock(&pool.fan).agreed.len() <= 1);
            // A rank that was away meanwhile has yet to give the same up.
            empty && world.is_mended().is_ok()
        });
        self.keep_nothing();
        if self.is_over() {
            return;
        }
        let mut bytes = 0;
        for (index, pool) in life.pools.iter().enumerate() {
            let agreed = lock(&pool.fan).agreed.clone();
            let null = agreed.iter().all(|run| run.contains(PageId(0)));
            if !done || !null {
                let usage = pool.pages.usage();
                let what = format!("pool {index} keeps {agreed:?} after all was freed: {usage:?}");
                return self.violate(Guarantee::Mended, what);
            }
            let pages: u64 = agreed.iter().map(|run| u64::from(run.count())).sum();
            bytes += pages * pool.geometry.bundle_bytes();
            // And the zeros behind its cold pages.
            bytes += u64::from(self.config.zero) * GRANULE;
        }
        for (rank, device) in self.devices.iter().enumerate() {
            if device.used() != bytes {
                let used = device.used();
                let what = format!("device {rank} has {used} bytes in use, the pools have {bytes}");
                return self.violate(Guarantee::Mended, what);
            }
        }
        for pool in 0..self.config.pools {
            self.do_now(
                life,
                Step::Alloc {
                    pool,
                    label: 0,
                    blocks: 1,
                },
            );
            let got = !lock(&life.pools[usize::from(pool)].books)
                .requests
                .is_empty();
            if !got && self.has_room(&life.pools[usize::from(pool)]) && !self.is_over() {
                let what = format!("pool {pool} hands nothing out though nothing is in use");
                return self.violate(Guarantee::Mended, what);
            }
        }
        self.go_on_until(20_000_000, |_| false);
    }

    /// What ranks keep to use it again, they let go of after a while, without being told.
    fn keep_nothing(&self) {
        let kept = |world: &Self| -> u64 {
            let ranks = 0..world.places.len();
            let memories = ranks.filter_map(|rank| world.memory(rank));
            memories.map(|memory| memory.kept_bytes()).sum()
        };
        if !self.go_on_until(REST_NS, |world| kept(world) == 0) {
            let what = format!("{} bytes are kept for ever", kept(self));
            self.violate(Guarantee::Mended, what);
        }
    }

    fn free_all(&self, life: &Life) {
        for (index, pool) in life.pools.iter().enumerate() {
            let number = u16::try_from(index).expect("a few pools");
            for step in last_steps(pool, number, self.config.pages) {
                self.do_now(life, step);
            }
        }
    }

    /// Is a pool ill for want of memory?
    fn is_short_of_memory(&self) -> bool {
        let Some(life) = self.current() else {
            return false;
        };
        life.pools.iter().any(|pool| {
            let health = pool.pages.health();
            let mut ranks = health.ranks().iter();
            // Or the null block's page has none, so that the pool cannot even begin.
            let stuck = lock(&pool.manager).is_none() && pool.pages.usage().map_full_total > 0;
            stuck || ranks.any(|suspect| suspect.reason.contains("out of device memory"))
        })
    }

    /// Is there a block beside the null block at all?
    fn has_room(&self, pool: &Pool) -> bool {
        let per_page = pool.geometry.max_blocks_per_page();
        let nulls = u32::from(self.config.pools);
        pool.geometry.pages() * per_page > 1 && (per_page > 1 || self.config.memory > 2 * nulls)
    }

    fn do_now(&self, life: &Life, step: Step) {
        self.submit(Op::Step(step));
        while self.is_current(life.number) && !lock(&self.state).waiting.is_empty() {
            self.advance();
        }
    }
}

fn last_steps(pool: &Pool, number: u16, pages: u32) -> Vec<Step> {
    let books = lock(&pool.books);
    let mut steps = vec![Step::Limit {
        pool: number,
        pages,
    }];
    for (label, request) in &books.requests {
        steps.push(match request.pages.is_empty() {
            true => Step::Free {
                pool: number,
                label: *label,
            },
            false => Step::FreePages {
                pool: number,
                label: *label,
            },
        });
    }
    let holds = books.holds.keys();
    steps.extend(holds.map(|label| Step::ReleaseHold {
        pool: number,
        label: *label,
    }));
    steps
}

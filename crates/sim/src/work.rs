//! What an engine launches on its devices: a request writes what it has not written yet, and reads
//! all that it has, on every rank, some time later.

use std::sync::Arc;

use kvcached_manager::BlockId;
use kvcached_mapper::Epoch;

use crate::device::Work;
use crate::engine::Pool;
use crate::random::mix;
use crate::script::EpochsKept;
use crate::world::{World, lock};

impl World {
    /// A request works on its blocks, on every rank: writes what it has not written, reads all.
    pub(crate) fn launch(&self, pool: &Pool, label: u32) {
        // A fresh look raises the fence; it falls once a loss is counted, and not before.
        if pool.pages.health().is_fenced() || pool.pages.is_fenced() || !self.is_known(pool) {
            return;
        }
        let losses = pool.pages.contents_lost();
        let mut books = lock(&pool.books);
        let Some(request) = books.requests.get_mut(&label) else {
            return;
        };
        if request.losses != losses {
            request.losses = losses;
            request
                .blocks
                .iter_mut()
                .for_each(|(_, write)| *write = None);
        }
        request.writes += 1;
        let number = request.writes;
        let mut fresh = Vec::new();
        for (block, write) in &mut request.blocks {
            if write.is_none() {
                fresh.push((*block, number));
                *write = Some(number);
            }
        }
        let written = |(block, write): &(BlockId, Option<u64>)| Some((*block, (*write)?));
        let all: Vec<_> = request.blocks.iter().filter_map(written).collect();
        let serial = request.serial;
        drop(books);

        let mut state = lock(&self.state);
        state.epoch += 1;
        let epoch = state.epoch;
        drop(state);
        let now_ns = self.clock.now_ns();
        let index = self.index_of(pool);
        for rank in 0..self.places.len() {
            let memory = self
                .memory(rank)
                .expect("all ranks are known, so they are there");
            let drawn = mix(self.config.delays ^ mix(epoch << 8 ^ rank as u64));
            let late_ns = match self.config.epochs {
                // Who synchronises the device does so after everything that was launched.
                EpochsKept::ByNobody => 0,
                _ => drawn % 100_000,
            };
            for (writes, blocks) in [(true, &fresh), (false, &all)] {
                memory.driver.launch(Work {
                    epoch: Epoch(epoch),
                    arrives_ns: now_ns + late_ns,
                    takes_ns: 20_000 + mix(drawn) % 400_000,
                    ends_ns: 0,
                    writes,
                    serial,
                    at: addresses(pool, &memory.bases[index], blocks),
                    who: label,
                    last: !writes,
                });
            }
        }
    }

    fn index_of(&self, pool: &Pool) -> usize {
        let life = self.current();
        let pools = life.iter().flat_map(|life| &life.pools);
        let mut found = pools
            .enumerate()
            .filter(|(_, other)| Arc::ptr_eq(&other.fan, &pool.fan));
        found.next().map_or(0, |(index, _)| index)
    }
}

fn addresses(pool: &Pool, bases: &[u64], blocks: &[(BlockId, u64)]) -> Vec<(u64, u64)> {
    let mut found = Vec::new();
    for &(block, write) in blocks {
        for piece in pool.geometry.block_pieces(block.0).into_iter().flatten() {
            found.push((bases[piece.tensor as usize] + piece.offset, write));
        }
    }
    found
}

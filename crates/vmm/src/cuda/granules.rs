//! What the device may do with each part of a range: known here before a copy is begun, because an
//! access that faults on the device ends the context for the whole process.

use std::fmt;
use std::sync::atomic::{AtomicU8, Ordering};

use super::size_of;

pub(super) const UNMAPPED: u8 = 0;
pub(super) const READABLE: u8 = 1;
pub(super) const WRITABLE: u8 = 2;

/// What the device may do with each granule of a range.
///
/// A byte a granule: 2 MiB for 4 TiB of addresses, and setting it costs nothing beside a map.
pub(super) struct Granules {
    granularity: u64,
    allowed: Box<[AtomicU8]>,
}

impl Granules {
    pub(super) fn new(len: u64, granularity: u64) -> Self {
        let count = len / granularity;
        Self {
            granularity,
            allowed: (0..count).map(|_| AtomicU8::new(UNMAPPED)).collect(),
        }
    }

    // Relaxed: who maps and who copies have to agree on an order among themselves anyway.
    pub(super) fn set(&self, offset: u64, len: u64, allowed: u8) {
        for granule in self.within(offset, len) {
            granule.store(allowed, Ordering::Relaxed);
        }
    }

    /// First offset of a stretch at which less than `need` is allowed.
    pub(super) fn first_below(&self, offset: u64, len: u64, need: u8) -> Option<u64> {
        let below = |granule: &AtomicU8| granule.load(Ordering::Relaxed) < need;
        let nth = self.within(offset, len).iter().position(below)?;
        let start = (offset / self.granularity + nth as u64) * self.granularity;
        Some(start.max(offset))
    }

    fn within(&self, offset: u64, len: u64) -> &[AtomicU8] {
        if len == 0 {
            return &[];
        }
        let first = size_of(offset / self.granularity);
        let last = size_of((offset + len - 1) / self.granularity);
        &self.allowed[first..=last]
    }
}

impl fmt::Debug for Granules {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mapped = self
            .allowed
            .iter()
            .filter(|one| one.load(Ordering::Relaxed) > UNMAPPED);
        write!(
            f,
            "{} of {} granules mapped",
            mapped.count(),
            self.allowed.len()
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const G: u64 = 2 << 20;

    #[test]
    fn the_table_says_where_an_access_would_fault() {
        let table = Granules::new(8 * G, G);
        table.set(G, 3 * G, WRITABLE);
        table.set(4 * G, G, READABLE);

        assert_eq!(table.first_below(G, 3 * G, WRITABLE), None);
        assert_eq!(table.first_below(2 * G - 1, 2, WRITABLE), None);
        assert_eq!(table.first_below(G, 4 * G, READABLE), None);
        assert_eq!(table.first_below(G, 4 * G, WRITABLE), Some(4 * G));
        // The very byte if it begins in the gap, the start of the gap if it runs into one.
        assert_eq!(table.first_below(7, 1, READABLE), Some(7));
        assert_eq!(table.first_below(5 * G - 1, 2, READABLE), Some(5 * G));
        assert_eq!(table.first_below(8 * G - 1, 1, READABLE), Some(8 * G - 1));

        table.set(G, 3 * G, UNMAPPED);
        assert_eq!(table.first_below(3 * G, G, READABLE), Some(3 * G));
    }

    #[test]
    fn an_access_of_nothing_faults_nowhere() {
        let table = Granules::new(2 * G, G);
        assert_eq!(table.first_below(0, 0, WRITABLE), None);
        assert_eq!(table.first_below(2 * G, 0, WRITABLE), None);
    }
}

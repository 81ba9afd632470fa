//! Limits with revisions: how many bytes a pool may use, and whether it already keeps to that.
//!
//! Several parties may set a limit (an operator, a controller, the engine). A revision orders
//! them, so that a late message never undoes a newer one; equality with what was in force at
//! start-up means nothing. Whether a limit is applied is computed from what is backed at the
//! moment of asking, never remembered, so a deferred shrink cannot be forgotten.

use thiserror::Error;

/// How many bytes of memory a pool may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Limit {
    /// Bytes of one rank; a part of a page counts as no page.
    pub bytes: u64,
    /// Orders limits from different places: the highest revision is in force. A pool starts with
    /// revision 0 and its whole capacity.
    pub revision: u64,
}

/// What became of a limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum LimitStatus {
    /// In force, and the pool keeps to it.
    Applied,
    /// In force for growth, but pages in use reach beyond it; the rest follows as they are freed.
    Deferred {
        /// Bytes still backed above the limit, those of quarantined pages included.
        excess_bytes: u64,
    },
    /// Not taken: a newer revision is in force. Nothing changed.
    Stale {
        /// The limit in force.
        current: Limit,
    },
    /// Not taken: the same revision is in force with other bytes. Nothing changed.
    Conflict {
        /// The limit in force.
        current: Limit,
    },
}

/// Why a limit cannot be taken at all.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum LimitError {
    /// The pool was promised more than that. Nothing changed.
    #[error(
        "a limit of {requested_bytes} bytes is below the promised floor of {floor_bytes} bytes"
    )]
    BelowFloor {
        /// Bytes asked for.
        requested_bytes: u64,
        /// Bytes the pool was promised.
        floor_bytes: u64,
    },
}

/// The limit in force, and the rules for taking another one.
#[derive(Debug)]
pub(crate) struct LimitBook {
    current: Limit,
    floor_bytes: u64,
    bundle_bytes: u64,
}

/// How a request for a limit ended.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Request {
    /// It is in force now, or was already.
    InForce,
    /// It was not taken, and this is the answer.
    Refused(LimitStatus),
}

impl LimitBook {
    pub(crate) const fn new(capacity_bytes: u64, floor_bytes: u64, bundle_bytes: u64) -> Self {
        Self {
            current: Limit {
                bytes: capacity_bytes,
                revision: 0,
            },
            floor_bytes,
            bundle_bytes,
        }
    }

    pub(crate) const fn current(&self) -> Limit {
        self.current
    }

    pub(crate) fn request(&mut self, limit: Limit) -> Result<Request, LimitError> {
        let current = self.current;
        if limit.revision < current.revision {
            return Ok(Request::Refused(LimitStatus::Stale { current }));
        }
        if limit.revision == current.revision {
            return Ok(match limit.bytes == current.bytes {
                true => Request::InForce,
                false => Request::Refused(LimitStatus::Conflict { current }),
            });
        }
        if limit.bytes < self.floor_bytes {
            return Err(LimitError::BelowFloor {
                requested_bytes: limit.bytes,
                floor_bytes: self.floor_bytes,
            });
        }
        self.current = limit;
        Ok(Request::InForce)
    }

    /// The limit in whole pages; more than any pool has, if it is that high.
    pub(crate) fn pages(&self) -> u32 {
        u32::try_from(self.current.bytes / self.bundle_bytes).unwrap_or(u32::MAX)
    }

    /// Does a pool with so many pages backed keep to the limit?
    pub(crate) const fn status(&self, backed_pages: u32) -> LimitStatus {
        // Cannot overflow: the constructor of the allocator checked pages times bundle bytes.
        let backed_bytes = backed_pages as u64 * self.bundle_bytes;
        match backed_bytes.checked_sub(self.current.bytes) {
            None | Some(0) => LimitStatus::Applied,
            Some(excess_bytes) => LimitStatus::Deferred { excess_bytes },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn book() -> LimitBook {
        LimitBook::new(1000, 100, 10)
    }

    #[test]
    fn the_highest_revision_is_in_force_and_nothing_older_or_contradicting_changes_it() {
        let mut book = book();
        let five = Limit {
            bytes: 500,
            revision: 5,
        };
        assert_eq!(book.request(five), Ok(Request::InForce));
        let stale = book.request(Limit {
            bytes: 700,
            revision: 4,
        });
        assert_eq!(
            stale,
            Ok(Request::Refused(LimitStatus::Stale { current: five }))
        );
        let conflict = book.request(Limit {
            bytes: 700,
            revision: 5,
        });
        assert_eq!(
            conflict,
            Ok(Request::Refused(LimitStatus::Conflict { current: five }))
        );
        assert_eq!(
            book.request(five),
            Ok(Request::InForce),
            "the same again is no conflict"
        );
        assert_eq!(book.current(), five);
    }

    #[test]
    fn a_limit_below_the_promised_floor_is_refused_and_a_stale_one_is_only_stale() {
        let mut book = book();
        let start = book.current();
        assert_eq!(
            book.request(Limit {
                bytes: 99,
                revision: 1
            }),
            Err(LimitError::BelowFloor {
                requested_bytes: 99,
                floor_bytes: 100
            })
        );
        assert_eq!(
            book.current(),
            start,
            "a refused limit changes nothing, its revision included"
        );
        assert_eq!(
            book.request(Limit {
                bytes: 100,
                revision: 1
            }),
            Ok(Request::InForce)
        );
        assert!(matches!(
            book.request(Limit {
                bytes: 0,
                revision: 0
            }),
            Ok(Request::Refused(LimitStatus::Stale { .. }))
        ));
    }

    #[test]
    fn a_part_of_a_page_is_no_page_and_excess_is_counted_in_bytes() {
        let mut book = book();
        book.request(Limit {
            bytes: 105,
            revision: 1,
        })
        .unwrap();
        assert_eq!(book.pages(), 10);
        assert_eq!(book.status(10), LimitStatus::Applied);
        assert_eq!(book.status(11), LimitStatus::Deferred { excess_bytes: 5 });
        book.request(Limit {
            bytes: u64::MAX,
            revision: 2,
        })
        .unwrap();
        assert_eq!(book.pages(), u32::MAX);
    }
}

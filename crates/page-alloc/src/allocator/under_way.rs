//! What becomes of runs whose call never comes back: a mapper that panics leaves them in doubt, and
//! not busy for ever.

use kvcached_mapper::PageRun;

use super::PageAllocator;
use crate::table::PageTable;

/// Records that a call about busy runs failed, and about which of them nobody knows anything.
type Fail = fn(&mut PageTable, runs: &[PageRun], uncertain: &[PageRun]);

/// Busy runs that a call is about.
struct UnderWay<'a> {
    pages: &'a PageAllocator,
    runs: &'a [PageRun],
    fail: Fail,
    came_back: bool,
}

impl PageAllocator {
    /// Makes a call about busy runs. If it panics, all of them are quarantined by `fail`.
    pub(super) fn call<R>(&self, runs: &[PageRun], fail: Fail, call: impl FnOnce() -> R) -> R {
        let mut under_way = UnderWay {
            pages: self,
            runs,
            fail,
            came_back: false,
        };
        let result = call();
        under_way.came_back = true;
        result
    }
}

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        if self.came_back {
            return;
        }
        // If the books are lost as well, there is nothing to record any more.
        if let Ok(mut books) = self.pages.books.lock() {
            (self.fail)(&mut books.table, self.runs, self.runs);
            self.pages.publish(&mut books);
        }
    }
}

//! A pool for a test: an allocator and the recording mapper under it.

use std::collections::BTreeMap;
use std::sync::{Arc, Weak};

use kvcached_mapper::testing::Call;
use kvcached_mapper::{Cause, Health, MapError, PageId, PageRun, PeerCause, Rank, Stage, Suspect};
use kvcached_page_alloc::{
    AllocError, Limit, PageAllocator, PageAllocatorConfig, PageState, PageUsage, Reserve,
};

use crate::ranks::Ranks;

/// Bytes of a page in these tests.
pub(crate) const BUNDLE: u64 = 2 << 20;

pub(crate) struct Pool {
    pub(crate) pages: Arc<PageAllocator>,
    pub(crate) mapper: Arc<Ranks>,
}

impl Pool {
    pub(crate) fn new(pages: u32) -> Self {
        Self::with(PageAllocatorConfig::new(pages, BUNDLE))
    }

    pub(crate) fn with_reserve(pages: u32, min: u32, max: u32) -> Self {
        let reserve = Reserve { min, max };
        Self::with(PageAllocatorConfig {
            reserve,
            ..PageAllocatorConfig::new(pages, BUNDLE)
        })
    }

    pub(crate) fn with(config: PageAllocatorConfig) -> Self {
        let mapper = Arc::new(Ranks::new(config.pages));
        let pages = PageAllocator::new(config, Arc::clone(&mapper) as _).expect("a good config");
        Self {
            pages: Arc::new(pages),
            mapper,
        }
    }

    pub(crate) fn alloc(&self, n: u32) -> Result<Vec<PageId>, AllocError> {
        let mut out = Vec::new();
        self.pages.alloc(n, &mut out)?;
        assert_eq!(out.len(), PageId(n).index());
        Ok(out)
    }

    /// `n` pages, which there are.
    pub(crate) fn take(&self, n: u32) -> Vec<PageId> {
        self.alloc(n).expect("there are pages")
    }

    pub(crate) fn free(&self, pages: &[PageId]) {
        self.pages.free(pages).expect("pages in use");
    }

    pub(crate) fn limit(&self, pages: u32, revision: u64) -> Limit {
        let limit = Limit {
            bytes: u64::from(pages) * BUNDLE,
            revision,
        };
        self.pages.set_limit(limit).expect("not below a floor");
        limit
    }

    pub(crate) fn usage(&self) -> PageUsage {
        let usage = self.pages.usage();
        assert_adds_up(&usage);
        usage
    }

    /// Backed pages as the mapper knows them; at rest these are the warm and used ones.
    pub(crate) fn mapped(&self) -> u32 {
        self.mapper.mapped_pages()
    }

    /// Of rank 1 it is not known what it has, as the mapper says from now on; the allocator has not
    /// looked yet.
    pub(crate) fn fence(&self) -> Vec<Suspect> {
        let ranks = vec![suspect()];
        self.mapper.set_health(Health::Fenced {
            ranks: ranks.clone(),
            pages: 0,
        });
        ranks
    }

    /// Runs `look` at the allocator from inside every call of the mapper, and fails the call with
    /// what it answers.
    pub(crate) fn during_calls(
        &self,
        look: impl Fn(&PageAllocator, Call, &[PageRun]) -> Result<(), MapError> + Send + Sync + 'static,
    ) {
        // Weak, or mapper and allocator would keep each other alive.
        let pages: Weak<PageAllocator> = Arc::downgrade(&self.pages);
        let mapper: Weak<Ranks> = Arc::downgrade(&self.mapper);
        self.mapper.set_before(move |call, runs| {
            if mapper.upgrade().is_some_and(|mapper| mapper.is_repairing()) {
                return Ok(());
            }
            look(
                &pages.upgrade().expect("the allocator is calling"),
                call,
                runs,
            )
        });
    }

    /// At rest the books of the allocator, page by page, are those of the mapper.
    pub(crate) fn assert_books_agree(&self) {
        assert_eq!(
            self.mapper.violations(),
            [],
            "every duty to the mapper was met"
        );
        let usage = self.usage();
        assert_eq!(usage.busy, 0, "no call is under way");
        let mut tally: BTreeMap<PageState, u32> = BTreeMap::new();
        for page in 0..usage.total {
            *tally
                .entry(self.pages.state(PageId(page)).expect("a page"))
                .or_default() += 1;
        }
        let counted = [
            (PageState::Void, usage.void),
            (PageState::Cold, usage.cold),
            (PageState::Warm, usage.warm),
            (PageState::Used, usage.used),
            (PageState::Withheld, usage.withheld),
            (PageState::Quarantined, usage.quarantined),
        ];
        assert_eq!(
            tally,
            counted
                .into_iter()
                .filter(|&(_, count)| count > 0)
                .collect()
        );
        for run in self.mapper.mapped() {
            for page in run.pages() {
                let state = self.pages.state(page);
                assert!(
                    matches!(state, Some(PageState::Warm | PageState::Used)),
                    "{page} {state:?}"
                );
            }
        }
        assert_eq!(self.mapped(), usage.warm + usage.used);
        let pinned = self.mapper.mapped().into_iter().map(|run| {
            let used = run
                .pages()
                .filter(|&page| self.pages.state(page) == Some(PageState::Used));
            match used.count() {
                0 => 0,
                used => run.pages().count() - used,
            }
        });
        assert_eq!(usage.pinned as usize, pinned.sum::<usize>());
        assert_eq!(usage.runs as usize, self.mapper.mapped().len());
        let mut quarantined = self.pages.quarantined();
        quarantined.sort();
        assert_eq!(quarantined, self.mapper.in_doubt());
        let in_doubt = u64::from(usage.quarantined);
        assert_eq!(
            usage.mapped_bytes,
            (u64::from(self.mapped()) + in_doubt) * BUNDLE
        );
    }
}

pub(crate) fn assert_adds_up(usage: &PageUsage) {
    let states = [
        usage.void,
        usage.cold,
        usage.warm,
        usage.used,
        usage.busy,
        usage.withheld,
        usage.quarantined,
    ];
    assert_eq!(states.iter().sum::<u32>(), usage.total, "{usage:?}");
}

pub(crate) fn run(first: u32, count: u32) -> PageRun {
    PageRun::new(PageId(first), count).expect("a run of a test")
}

pub(crate) fn ids(pages: impl IntoIterator<Item = u32>) -> Vec<PageId> {
    pages.into_iter().map(PageId).collect()
}

/// Full right now.
pub(crate) fn full() -> MapError {
    MapError::clean(Cause::OutOfMemory { at: None })
}

/// Another rank refused, and nothing changed.
pub(crate) fn refused() -> MapError {
    MapError::clean(Cause::Peer {
        stage: Stage(0),
        rank: Rank(1),
        call: "map",
        cause: PeerCause::Refused {
            reason: "status 999".to_owned(),
        },
    })
}

/// Another rank refused, and nobody knows what became of `uncertain`.
pub(crate) fn doubtful(uncertain: Vec<PageRun>) -> MapError {
    MapError {
        uncertain,
        ..refused()
    }
}

pub(crate) fn suspect() -> Suspect {
    Suspect {
        stage: Stage(0),
        rank: Rank(1),
        reason: "the connection ended".to_owned(),
    }
}

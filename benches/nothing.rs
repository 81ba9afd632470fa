//! The mapper of the benchmarks: backs every page with nothing at all, so that only what is above
//! it is measured.

use kvcached_mapper::{After, MapError, Mapper, PageRun, RankMapper, Readiness, Resynced};

/// See the file.
#[derive(Debug)]
pub(crate) struct Nothing;

impl Mapper for Nothing {
    fn map(&self, _: &[PageRun]) -> Result<(), MapError> {
        Ok(())
    }

    fn unmap_after(&self, _: &[PageRun], _: After) -> Result<(), MapError> {
        Ok(())
    }

    fn headroom(&self) -> Option<u32> {
        None
    }

    fn ready(&self) -> Result<Readiness, MapError> {
        Ok(Readiness::Ready)
    }
}

impl RankMapper for Nothing {
    fn prepare_unmap(&self, _: &[PageRun], _: After) -> Result<(), MapError> {
        Ok(())
    }

    fn commit_unmap(&self, _: &[PageRun]) {}

    fn abort_unmap(&self, _: &[PageRun]) -> Result<(), MapError> {
        Ok(())
    }

    fn resync_after(&self, _: &[PageRun], _: After) -> Result<Resynced, MapError> {
        Ok(Resynced::default())
    }

    fn mapped(&self) -> Vec<PageRun> {
        Vec::new()
    }
}

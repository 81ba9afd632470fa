//! The folder where the ranks of a replay meet.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use kvcached_tp_ipc::RuntimeDir;

use crate::ReplayError;

/// A folder of the replay's own, gone when it is dropped.
#[derive(Debug)]
pub(super) struct Folder(PathBuf);

impl Folder {
    /// Makes it in the runtime folder.
    pub(super) fn make(runtime_dir: &Path) -> Result<Self, ReplayError> {
        let parent = RuntimeDir::open(runtime_dir)?;
        let path = parent.path().join(format!("replay-{}", std::process::id()));
        let failed = |source| ReplayError::Folder {
            path: path.clone(),
            source,
        };
        // What a process of the same number left behind long ago.
        match fs::remove_dir_all(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(failed(error)),
            _ => {}
        }
        RuntimeDir::open(&path)?;
        Ok(Self(path))
    }

    pub(super) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir_all(&self.0) {
            tracing::warn!(folder = %self.0.display(), %error, "a folder was left behind");
        }
    }
}

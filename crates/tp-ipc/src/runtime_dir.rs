//! Where the sockets of an instance lie: `<runtime dir>/<instance>/s<stage>-r<rank>.sock`.
//!
//! Both directories belong to this user alone, so that another user's process can neither listen
//! where a worker should nor connect to one. An existing directory is checked, never mended: wrong
//! permissions may mean that somebody else put it there.

use std::fmt;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use kvcached_mapper::{Rank, Stage};
use nix::fcntl::OFlag;
use nix::unistd::geteuid;
use thiserror::Error;

use crate::InstanceName;

/// The directory that holds one directory per instance; mode 0700, owned by this user.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RuntimeDir(PathBuf);

/// The directory of one instance; mode 0700, owned by this user. Every endpoint in it is short
/// enough to be one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EndpointDir {
    path: PathBuf,
    instance: InstanceName,
}

/// A unix socket by its path: short enough for the kernel, known to both sides.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Endpoint(PathBuf);

/// Why a directory cannot hold endpoints.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum RuntimeDirError {
    /// A path that means something else in another working directory.
    #[error("runtime directory {} is not an absolute path", .path.display())]
    NotAbsolute {
        /// The path as given.
        path: PathBuf,
    },
    /// It is not there and cannot be made, or cannot be looked at.
    #[error("cannot {call} {}: {source}", .path.display())]
    Io {
        /// `"create"`, `"open"`, `"inspect"`, `"resolve"` or `"remove"`.
        call: &'static str,
        /// The directory.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
    /// A file, or a symbolic link that could lead anywhere.
    #[error("{} is not a directory itself (a file or a symbolic link)", .path.display())]
    NotADirectory {
        /// What was found there.
        path: PathBuf,
    },
    /// Somebody else made it.
    #[error("{} belongs to uid {owner}, not to uid {expected} of this process", .path.display())]
    WrongOwner {
        /// The directory.
        path: PathBuf,
        /// Its owner.
        owner: u32,
        /// The user of this process.
        expected: u32,
    },
    /// Others may enter it, or its owner may not.
    #[error("{} has mode {mode:04o}, it must be 0700", .path.display())]
    WrongMode {
        /// The directory.
        path: PathBuf,
        /// Its permission bits.
        mode: u32,
    },
    /// Anybody could move a directory above it away and put another in its place.
    #[error("{} may be written by every user and is not sticky", .ancestor.display())]
    Exposed {
        /// The directory above.
        ancestor: PathBuf,
    },
    /// The endpoints would not fit a socket address.
    #[error(transparent)]
    Endpoint(#[from] EndpointError),
}

/// Why a path is no endpoint.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum EndpointError {
    /// Longer than a socket address holds.
    #[error("endpoint {} has {len} bytes, a socket address holds {}", .path.display(), Endpoint::MAX_BYTES)]
    TooLong {
        /// The path.
        path: PathBuf,
        /// Its length in bytes.
        len: usize,
    },
    /// Empty, or with a zero byte in it.
    #[error("endpoint {path:?} is empty or holds a zero byte")]
    NotAPath {
        /// The path.
        path: PathBuf,
    },
}

impl RuntimeDir {
    /// The directory at `path`, created with mode 0700 if it is not there (and so are those above
    /// it that are missing).
    ///
    /// # Errors
    /// [`RuntimeDirError`] if it cannot be made, or is there and somebody else could reach into it.
    pub fn open(path: &Path) -> Result<Self, RuntimeDirError> {
        if !path.is_absolute() {
            return Err(RuntimeDirError::NotAbsolute {
                path: path.to_owned(),
            });
        }
        create(path)?;
        check(path)?;
        // One spelling for all processes, and no link above it that could be turned later.
        let path = path.canonicalize().map_err(io_error("resolve", path))?;
        for ancestor in path.ancestors().skip(1) {
            let mode = fs::metadata(ancestor)
                .map_err(io_error("inspect", ancestor))?
                .mode();
            if mode & 0o002 != 0 && mode & 0o1000 == 0 {
                return Err(RuntimeDirError::Exposed {
                    ancestor: ancestor.to_owned(),
                });
            }
        }
        Ok(Self(path))
    }

    /// The path, without symbolic links.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// The directory of `instance`, created with mode 0700 if it is not there.
    ///
    /// # Errors
    /// As [`open`](Self::open), and if an endpoint in it could be too long.
    pub fn instance(&self, instance: &InstanceName) -> Result<EndpointDir, RuntimeDirError> {
        let path = self.0.join(instance.as_str());
        Endpoint::new(&path.join(endpoint_name(Stage(u16::MAX), Rank(u16::MAX))))?;
        create(&path)?;
        check(&path)?;
        Ok(EndpointDir {
            path,
            instance: instance.clone(),
        })
    }
}

impl EndpointDir {
    /// Where `rank` of `stage` listens. Follows from its place in the engine alone, never from a
    /// device.
    #[must_use]
    pub fn endpoint(&self, stage: Stage, rank: Rank) -> Endpoint {
        // The longest name was tried when this directory was opened.
        Endpoint(self.path.join(endpoint_name(stage, rank)))
    }

    /// The path.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whose endpoints these are.
    #[must_use]
    pub const fn instance(&self) -> &InstanceName {
        &self.instance
    }

    /// Takes the directory away if nothing is left in it; for whoever ends an instance.
    /// Returns whether it is gone.
    ///
    /// # Errors
    /// [`RuntimeDirError::Io`] for anything but a directory that is still in use or gone already.
    pub fn remove_if_empty(&self) -> Result<bool, RuntimeDirError> {
        match fs::remove_dir(&self.path) {
            Ok(()) => Ok(true),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(true),
            Err(e) if e.kind() == io::ErrorKind::DirectoryNotEmpty => Ok(false),
            Err(e) => Err(io_error("remove", &self.path)(e)),
        }
    }
}

impl Endpoint {
    /// Longest path of a unix socket on Linux: 108 bytes with the final zero.
    pub const MAX_BYTES: usize = 107;

    /// The socket at `path`, wherever that is; instances take theirs from
    /// [`EndpointDir::endpoint`].
    ///
    /// # Errors
    /// [`EndpointError`] if no socket can have that path.
    pub fn new(path: &Path) -> Result<Self, EndpointError> {
        let bytes = path.as_os_str().as_bytes();
        if bytes.is_empty() || bytes.contains(&0) {
            return Err(EndpointError::NotAPath {
                path: path.to_owned(),
            });
        }
        if bytes.len() > Self::MAX_BYTES {
            return Err(EndpointError::TooLong {
                path: path.to_owned(),
                len: bytes.len(),
            });
        }
        Ok(Self(path.to_owned()))
    }

    /// The path.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.display().fmt(f)
    }
}

fn endpoint_name(stage: Stage, rank: Rank) -> String {
    format!("s{}-r{}.sock", stage.0, rank.0)
}

fn create(path: &Path) -> Result<(), RuntimeDirError> {
    // Recursive also means: no error if it is there already.
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(path)
        .or_else(|e| match e.kind() {
            // A file or a dangling link: the check says so better.
            io::ErrorKind::AlreadyExists => Ok(()),
            _ => Err(io_error("create", path)(e)),
        })
}

/// Looks at the directory through a handle, so that what was checked is what is there.
fn check(path: &Path) -> Result<(), RuntimeDirError> {
    let flags = OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
    let opened = OpenOptions::new()
        .read(true)
        .custom_flags(flags.bits())
        .open(path);
    let directory: File = match opened {
        Ok(directory) => directory,
        Err(e) if e.kind() == io::ErrorKind::PermissionDenied => {
            // Still say whose it is, where that can be seen from outside.
            let seen = fs::symlink_metadata(path).map_err(io_error("open", path))?;
            permit(path, seen.uid(), seen.mode(), geteuid().as_raw())?;
            return Err(io_error("open", path)(e));
        }
        Err(e)
            if matches!(
                e.raw_os_error(),
                Some(nix::libc::ENOTDIR | nix::libc::ELOOP)
            ) =>
        {
            return Err(RuntimeDirError::NotADirectory {
                path: path.to_owned(),
            });
        }
        Err(e) => return Err(io_error("open", path)(e)),
    };
    let found = directory.metadata().map_err(io_error("inspect", path))?;
    permit(path, found.uid(), found.mode(), geteuid().as_raw())
}

/// The rule itself: mine, and mine alone.
fn permit(path: &Path, owner: u32, mode: u32, expected: u32) -> Result<(), RuntimeDirError> {
    if owner != expected {
        return Err(RuntimeDirError::WrongOwner {
            path: path.to_owned(),
            owner,
            expected,
        });
    }
    // Set-group-id is inherited from a directory above on some systems, and lets nobody in.
    let bits = mode & 0o777;
    if bits != 0o700 {
        return Err(RuntimeDirError::WrongMode {
            path: path.to_owned(),
            mode: bits,
        });
    }
    Ok(())
}

fn io_error(call: &'static str, path: &Path) -> impl FnOnce(io::Error) -> RuntimeDirError {
    let path = path.to_owned();
    move |source| RuntimeDirError::Io { call, path, source }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, chown, symlink};

    use super::*;

    fn instance(text: &str) -> InstanceName {
        text.parse().unwrap()
    }

    #[test]
    fn a_new_directory_is_for_this_user_alone() {
        let temp = tempfile::tempdir().unwrap();
        let runtime = RuntimeDir::open(&temp.path().join("above/run")).unwrap();
        let endpoints = runtime.instance(&instance("llama")).unwrap();
        for path in [runtime.path(), endpoints.path()] {
            assert_eq!(
                fs::metadata(path).unwrap().mode() & 0o7777,
                0o700,
                "{}",
                path.display()
            );
        }
        // A second process finds it and takes it as it is.
        assert_eq!(RuntimeDir::open(runtime.path()).unwrap(), runtime);
        assert_eq!(runtime.instance(&instance("llama")).unwrap(), endpoints);
    }

    #[test]
    fn the_endpoint_follows_from_stage_and_rank() {
        let temp = tempfile::tempdir().unwrap();
        let runtime = RuntimeDir::open(&temp.path().join("run")).unwrap();
        let endpoints = runtime.instance(&instance("llama")).unwrap();
        let endpoint = endpoints.endpoint(Stage(1), Rank(3));
        assert_eq!(endpoint.path(), endpoints.path().join("s1-r3.sock"));
        assert_ne!(endpoint, endpoints.endpoint(Stage(3), Rank(1)));
    }

    #[test]
    fn a_directory_that_others_may_enter_is_refused() {
        let temp = tempfile::tempdir().unwrap();
        let path = temp.path().join("run");
        for bits in [0o755, 0o750, 0o701, 0o777, 0o500] {
            let _ = fs::remove_dir(&path);
            fs::create_dir(&path).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(bits)).unwrap();
            match RuntimeDir::open(&path) {
                Err(RuntimeDirError::WrongMode { mode, .. }) => assert_eq!(mode, bits),
                other => panic!("mode {bits:o}: {other:?}"),
            }
            // Nothing was mended behind the user's back.
            assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, bits);
        }
    }

    #[test]
    fn an_instance_directory_is_held_to_the_same_rule() {
        let temp = tempfile::tempdir().unwrap();
        let runtime = RuntimeDir::open(&temp.path().join("run")).unwrap();
        let path = runtime.path().join("llama");
        fs::create_dir(&path).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o770)).unwrap();
        let refused = runtime.instance(&instance("llama"));
        assert!(matches!(
            refused,
            Err(RuntimeDirError::WrongMode { mode: 0o770, .. })
        ));
    }

    #[test]
    fn a_directory_of_another_user_is_refused() {
        let temp = tempfile::tempdir().unwrap();
        let path = temp.path().join("run");
        if geteuid().is_root() {
            fs::create_dir(&path).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o700)).unwrap();
            chown(&path, Some(65_534), None).unwrap();
            let refused = RuntimeDir::open(&path);
            assert!(matches!(
                refused,
                Err(RuntimeDirError::WrongOwner { owner: 65_534, .. })
            ));
        }
        // The rule itself needs no root.
        let refused = permit(&path, 7, 0o40_700, 8);
        assert!(matches!(
            refused,
            Err(RuntimeDirError::WrongOwner {
                owner: 7,
                expected: 8,
                ..
            })
        ));
    }

    #[test]
    fn a_link_or_a_file_is_not_a_directory() {
        let temp = tempfile::tempdir().unwrap();
        let real = RuntimeDir::open(&temp.path().join("real")).unwrap();
        let link = temp.path().join("link");
        symlink(real.path(), &link).unwrap();
        let dangling = temp.path().join("dangling");
        symlink(temp.path().join("nowhere"), &dangling).unwrap();
        let file = temp.path().join("file");
        fs::write(&file, b"").unwrap();
        for path in [&link, &dangling, &file] {
            let refused = RuntimeDir::open(path);
            assert!(
                matches!(refused, Err(RuntimeDirError::NotADirectory { .. })),
                "{}: {refused:?}",
                path.display()
            );
        }
        assert!(!temp.path().join("nowhere").exists());
    }

    #[test]
    fn a_directory_that_anyone_can_swap_is_refused() {
        let temp = tempfile::tempdir().unwrap();
        let above = temp.path().join("above");
        fs::create_dir(&above).unwrap();
        fs::set_permissions(&above, fs::Permissions::from_mode(0o777)).unwrap();
        let refused = RuntimeDir::open(&above.join("run"));
        assert!(
            matches!(refused, Err(RuntimeDirError::Exposed { .. })),
            "{refused:?}"
        );
        fs::set_permissions(&above, fs::Permissions::from_mode(0o1777)).unwrap();
        RuntimeDir::open(&above.join("run")).unwrap();
    }

    #[test]
    fn a_relative_or_overlong_path_is_refused() {
        let refused = RuntimeDir::open(Path::new("run"));
        assert!(matches!(refused, Err(RuntimeDirError::NotAbsolute { .. })));
        let temp = tempfile::tempdir().unwrap();
        let runtime = RuntimeDir::open(&temp.path().join("r".repeat(80))).unwrap();
        let refused = runtime.instance(&instance("a-name-of-an-instance"));
        assert!(matches!(
            refused,
            Err(RuntimeDirError::Endpoint(EndpointError::TooLong { .. }))
        ));
        assert_eq!(fs::read_dir(runtime.path()).unwrap().count(), 0);
    }

    #[test]
    fn an_instance_leaves_nothing_when_it_ends() {
        let temp = tempfile::tempdir().unwrap();
        let runtime = RuntimeDir::open(&temp.path().join("run")).unwrap();
        let endpoints = runtime.instance(&instance("llama")).unwrap();
        let socket = endpoints.path().join("s0-r0.sock");
        fs::write(&socket, b"").unwrap();
        assert!(!endpoints.remove_if_empty().unwrap());
        fs::remove_file(&socket).unwrap();
        assert!(endpoints.remove_if_empty().unwrap());
        assert!(endpoints.remove_if_empty().unwrap());
        assert!(!endpoints.path().exists());
    }
}

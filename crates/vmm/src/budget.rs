//! A stated amount of memory that several drivers, or several processes, draw from.
//!
//! In a file, for processes:
//!
//! ```text
//! 0        8        16       24              64       72       80
//! │ magic  │ total  │ slots  │               │ share 0│ share 1│ … │ share 255
//! └──────────── table lock ──────────────────┴ lock 0 ┴ lock 1 ┴ …
//! ```
//!
//! Each [`Budget`] opened on the file holds the lock of its slot for life, and the share there is
//! what it has taken. The system drops the locks of a process that dies however it dies, so a share
//! whose lock nobody holds belongs to a dead process and is free. Locks are those of the open file
//! description: two budgets in one process exclude each other like two processes do.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, fcntl};
use nix::libc;
use thiserror::Error;

use crate::VmmError;

/// First bytes of a budget file; the digit is the version of its form.
const MAGIC: [u8; 8] = *b"kvcbudg1";
const HEADER_BYTES: usize = 64;
const SHARE_BYTES: usize = 8;
/// So many budgets can be open on one file at once: one for each rank of each engine on a device.
const SLOTS: usize = 256;
const FILE_BYTES: usize = HEADER_BYTES + SLOTS * SHARE_BYTES;

/// Memory that its holders may take in all; a clone draws from the same share.
///
/// After a fork without exec, parent and child share one open file and are one holder, whose share
/// lives as long as either: open the file anew in the child. (A child that does exec keeps its
/// parent's locks for the moment in between only.)
#[derive(Debug, Clone)]
pub struct Budget {
    books: Arc<Books>,
}

#[derive(Debug)]
enum Books {
    Private {
        total_bytes: u64,
        used_bytes: Mutex<u64>,
    },
    Shared(Table),
}

/// Why a budget file cannot be used.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum BudgetError {
    /// The system refused access to the file.
    #[error("{call} on budget file {}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What was tried.
        call: &'static str,
        /// The system's answer.
        source: io::Error,
    },
    /// There is a file, but no budget was ever written to it, or one of another version.
    #[error("{} is not a budget file of this version", path.display())]
    NotABudget {
        /// The file.
        path: PathBuf,
    },
    /// A living process holds a share of the budget that was to be made anew.
    #[error("budget file {} is in use", path.display())]
    InUse {
        /// The file.
        path: PathBuf,
    },
    /// As many budgets as the file has slots are open on it.
    #[error("budget file {} has its {slots} holders already", path.display())]
    Crowded {
        /// The file.
        path: PathBuf,
        /// The most holders at once.
        slots: usize,
    },
}

impl Budget {
    /// `total_bytes` for the drivers of this process.
    #[must_use]
    pub fn private(total_bytes: u64) -> Self {
        Self {
            books: Arc::new(Books::Private {
                total_bytes,
                used_bytes: Mutex::new(0),
            }),
        }
    }

    /// Writes a budget of `total_bytes` to `path` and joins it.
    ///
    /// A budget file that no living process holds is left over, and is written anew. Nobody removes
    /// the file: it goes with its directory. Others [`open`](Self::open) it after this returned.
    ///
    /// # Errors
    /// [`BudgetError::InUse`] if somebody holds a share, [`BudgetError::NotABudget`] if `path` is
    /// some other file, [`BudgetError::Io`].
    pub fn create(path: &Path, total_bytes: u64) -> Result<Self, BudgetError> {
        Table::create(path, total_bytes).map(Self::shared)
    }

    /// Joins the budget that another process made at `path`.
    ///
    /// # Errors
    /// [`BudgetError::NotABudget`], [`BudgetError::Crowded`], [`BudgetError::Io`].
    pub fn open(path: &Path) -> Result<Self, BudgetError> {
        Table::open(path).map(Self::shared)
    }

    fn shared(table: Table) -> Self {
        Self {
            books: Arc::new(Books::Shared(table)),
        }
    }

    /// What all holders may take together.
    #[must_use]
    pub fn total_bytes(&self) -> u64 {
        match &*self.books {
            Books::Private { total_bytes, .. } => *total_bytes,
            Books::Shared(table) => table.total_bytes,
        }
    }

    /// What nobody has taken just now; shares of dead processes are nobody's.
    ///
    /// # Errors
    /// [`VmmError::Driver`] if the file cannot be read.
    pub fn free_bytes(&self) -> Result<u64, VmmError> {
        match &*self.books {
            Books::Private {
                total_bytes,
                used_bytes,
            } => Ok(total_bytes.saturating_sub(*lock(used_bytes))),
            Books::Shared(table) => table.free_bytes(),
        }
    }

    /// Takes `bytes`, or nothing.
    ///
    /// # Errors
    /// [`VmmError::OutOfMemory`] if they are not there, [`VmmError::Driver`] if the file cannot be
    /// read or written.
    pub fn take(&self, bytes: u64) -> Result<(), VmmError> {
        match &*self.books {
            Books::Private {
                total_bytes,
                used_bytes,
            } => {
                let mut used = lock(used_bytes);
                if bytes > total_bytes.saturating_sub(*used) {
                    return Err(VmmError::OutOfMemory { requested: bytes });
                }
                *used += bytes;
                Ok(())
            }
            Books::Shared(table) => table.take(bytes),
        }
    }

    /// Gives back `bytes` of what this budget took.
    ///
    /// # Errors
    /// [`VmmError::Contract`] if it never took so many, [`VmmError::Driver`] if the file cannot be
    /// written; nothing has changed then.
    pub fn give(&self, bytes: u64) -> Result<(), VmmError> {
        match &*self.books {
            Books::Private { used_bytes, .. } => {
                let mut used = lock(used_bytes);
                *used = less(*used, bytes)?;
                Ok(())
            }
            Books::Shared(table) => table.give(bytes),
        }
    }
}

fn lock(used: &Mutex<u64>) -> MutexGuard<'_, u64> {
    // The number is changed in one step, so a panic elsewhere leaves it right.
    used.lock().unwrap_or_else(PoisonError::into_inner)
}

fn less(used: u64, bytes: u64) -> Result<u64, VmmError> {
    let broken = "no more is given back than was taken";
    used.checked_sub(bytes).ok_or(VmmError::Contract {
        call: "Budget::give",
        broken,
    })
}

/// The file of a shared budget, and one slot of it.
#[derive(Debug)]
struct Table {
    file: File,
    total_bytes: u64,
    slot: usize,
    /// Our share, as it is in the file.
    own_bytes: Mutex<u64>,
}

impl Table {
    fn create(path: &Path, total_bytes: u64) -> Result<Self, BudgetError> {
        let mut options = OpenOptions::new();
        let options = options
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600);
        let io = |call| {
            move |source| BudgetError::Io {
                path: path.to_path_buf(),
                call,
                source,
            }
        };
        let file = options.open(path).map_err(io("open"))?;
        let table_lock = lock_table(&file).map_err(io("lock"))?;
        let len = file.metadata().map_err(io("stat"))?.len();
        if len > 0 {
            read_total(&file, path)?;
            for slot in 0..SLOTS {
                if is_held(&file, slot).map_err(io("lock"))? {
                    return Err(BudgetError::InUse {
                        path: path.to_path_buf(),
                    });
                }
            }
        }
        let mut bytes = [0; FILE_BYTES];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..16].copy_from_slice(&total_bytes.to_le_bytes());
        bytes[16..24].copy_from_slice(&(SLOTS as u64).to_le_bytes());
        file.write_all_at(&bytes, 0).map_err(io("write"))?;
        let slot = claim_slot(&file, path)?;
        drop(table_lock);
        Ok(Self {
            file,
            total_bytes,
            slot,
            own_bytes: Mutex::new(0),
        })
    }

    fn open(path: &Path) -> Result<Self, BudgetError> {
        let io = |call| {
            move |source| BudgetError::Io {
                path: path.to_path_buf(),
                call,
                source,
            }
        };
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .open(path)
            .map_err(io("open"))?;
        let table_lock = lock_table(&file).map_err(io("lock"))?;
        let total_bytes = read_total(&file, path)?;
        let slot = claim_slot(&file, path)?;
        drop(table_lock);
        Ok(Self {
            file,
            total_bytes,
            slot,
            own_bytes: Mutex::new(0),
        })
    }

    fn free_bytes(&self) -> Result<u64, VmmError> {
        let own = lock(&self.own_bytes);
        let _table_lock = lock_table(&self.file).map_err(failed("lock of a budget file"))?;
        let others = self.others_living_bytes()?;
        Ok(self.total_bytes.saturating_sub(*own).saturating_sub(others))
    }

    fn take(&self, bytes: u64) -> Result<(), VmmError> {
        let mut own = lock(&self.own_bytes);
        let _table_lock = lock_table(&self.file).map_err(failed("lock of a budget file"))?;
        let fits = |others: u64| {
            let free = self.total_bytes.saturating_sub(*own).saturating_sub(others);
            bytes <= free
        };
        // Who is alive is asked only when it matters.
        if !fits(sum(&self.others()?)) && !fits(self.others_living_bytes()?) {
            return Err(VmmError::OutOfMemory { requested: bytes });
        }
        self.write_share(self.slot, *own + bytes)?;
        *own += bytes;
        Ok(())
    }

    fn give(&self, bytes: u64) -> Result<(), VmmError> {
        let mut own = lock(&self.own_bytes);
        let rest = less(*own, bytes)?;
        // Without the table lock: a share that shrinks makes nobody's decision wrong.
        self.write_share(self.slot, rest)?;
        *own = rest;
        Ok(())
    }

    /// All shares; our own slot reads as zero.
    fn others(&self) -> Result<[u64; SLOTS], VmmError> {
        let mut bytes = [0; SLOTS * SHARE_BYTES];
        let read = self.file.read_exact_at(&mut bytes, HEADER_BYTES as u64);
        read.map_err(failed("read of a budget file"))?;
        let mut shares = [0; SLOTS];
        let (chunks, _) = bytes.as_chunks::<SHARE_BYTES>();
        for (share, bytes) in shares.iter_mut().zip(chunks) {
            *share = u64::from_le_bytes(*bytes);
        }
        shares[self.slot] = 0;
        Ok(shares)
    }

    /// What the others have taken, after striking out the shares of the dead.
    ///
    /// Under the table lock, so nobody can claim a slot meanwhile.
    fn others_living_bytes(&self) -> Result<u64, VmmError> {
        let mut shares = self.others()?;
        for (slot, share) in shares
            .iter_mut()
            .enumerate()
            .filter(|(_, share)| **share > 0)
        {
            if !is_held(&self.file, slot).map_err(failed("lock of a budget file"))? {
                tracing::warn!(
                    slot,
                    bytes = *share,
                    "share of a dead process is free again"
                );
                self.write_share(slot, 0)?;
                *share = 0;
            }
        }
        Ok(sum(&shares))
    }

    fn write_share(&self, slot: usize, bytes: u64) -> Result<(), VmmError> {
        let at = share_offset(slot);
        self.file
            .write_all_at(&bytes.to_le_bytes(), at)
            .map_err(failed("write of a budget file"))
    }
}

/// The table lock, let go on drop.
#[derive(Debug)]
struct TableLock<'a> {
    file: &'a File,
}

impl Drop for TableLock<'_> {
    fn drop(&mut self) {
        if let Err(errno) = set_lock(self.file, libc::F_UNLCK, 0, HEADER_BYTES) {
            tracing::error!(%errno, "budget file stays locked until the process ends");
        }
    }
}

/// Keeps everybody else's decisions out until the result is dropped.
///
/// A holder keeps it for a few microseconds. Locks of files cannot be awaited with a bound, so this
/// tries again, and gives up on a holder that was stopped.
fn lock_table(file: &File) -> io::Result<TableLock<'_>> {
    const YIELDS: u32 = 1_000;
    const NAPS: u32 = 5_000;
    for attempt in 0..YIELDS + NAPS {
        match set_lock(file, libc::F_WRLCK, 0, HEADER_BYTES) {
            Ok(()) => return Ok(TableLock { file }),
            Err(Errno::EAGAIN | Errno::EACCES | Errno::EINTR) if attempt < YIELDS => {
                thread::yield_now();
            }
            Err(Errno::EAGAIN | Errno::EACCES | Errno::EINTR) => {
                thread::park_timeout(Duration::from_millis(1));
            }
            Err(errno) => return Err(errno.into()),
        }
    }
    Err(io::ErrorKind::TimedOut.into())
}

/// Takes the lock of the first slot that nobody holds, and empties its share.
fn claim_slot(file: &File, path: &Path) -> Result<usize, BudgetError> {
    let io = |call| {
        move |source| BudgetError::Io {
            path: path.to_path_buf(),
            call,
            source,
        }
    };
    for slot in 0..SLOTS {
        match set_lock(file, libc::F_WRLCK, share_offset(slot), SHARE_BYTES) {
            Ok(()) => {
                let empty = 0_u64.to_le_bytes();
                file.write_all_at(&empty, share_offset(slot))
                    .map_err(io("write"))?;
                return Ok(slot);
            }
            Err(Errno::EAGAIN | Errno::EACCES) => {}
            Err(errno) => return Err(io("lock")(errno.into())),
        }
    }
    Err(BudgetError::Crowded {
        path: path.to_path_buf(),
        slots: SLOTS,
    })
}

/// The total of a file that is a budget; under the table lock.
fn read_total(file: &File, path: &Path) -> Result<u64, BudgetError> {
    let mut header = [0; 24];
    match file.read_exact_at(&mut header, 0) {
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
            return Err(BudgetError::NotABudget {
                path: path.to_path_buf(),
            });
        }
        Err(source) => {
            return Err(BudgetError::Io {
                path: path.to_path_buf(),
                call: "read",
                source,
            });
        }
    }
    let word = |at: usize| {
        u64::from_le_bytes(
            header[at..at + 8]
                .try_into()
                .expect("eight bytes are eight bytes"),
        )
    };
    if header[..8] != MAGIC || word(16) != SLOTS as u64 {
        return Err(BudgetError::NotABudget {
            path: path.to_path_buf(),
        });
    }
    Ok(word(8))
}

fn sum(shares: &[u64; SLOTS]) -> u64 {
    // Saturating: a damaged file means "full", not a number that wrapped to "empty".
    shares
        .iter()
        .fold(0, |sum, share| sum.saturating_add(*share))
}

fn share_offset(slot: usize) -> u64 {
    (HEADER_BYTES + slot * SHARE_BYTES) as u64
}

fn failed(call: &'static str) -> impl Fn(io::Error) -> VmmError {
    move |error| VmmError::Driver {
        call,
        code: error.raw_os_error().unwrap_or(0).into(),
        name: error.to_string(),
    }
}

/// Does another open file description hold the lock of `slot`?
fn is_held(file: &File, slot: usize) -> io::Result<bool> {
    let mut lock = file_lock(libc::F_WRLCK, share_offset(slot), SHARE_BYTES);
    fcntl(file, FcntlArg::F_OFD_GETLK(&mut lock))?;
    Ok(i32::from(lock.l_type) != libc::F_UNLCK)
}

fn set_lock(file: &File, kind: libc::c_int, start: u64, len: usize) -> Result<(), Errno> {
    fcntl(file, FcntlArg::F_OFD_SETLK(&file_lock(kind, start, len))).map(drop)
}

fn file_lock(kind: libc::c_int, start: u64, len: usize) -> libc::flock {
    libc::flock {
        l_type: kind
            .try_into()
            .expect("the kinds of locks are small numbers"),
        l_whence: libc::SEEK_SET.try_into().expect("SEEK_SET is zero"),
        l_start: start.try_into().expect("a budget file is small"),
        l_len: len.try_into().expect("a budget file is small"),
        l_pid: 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FULL: fn(u64) -> Result<(), VmmError> =
        |requested| Err(VmmError::OutOfMemory { requested });

    #[test]
    fn a_private_budget_gives_what_it_has_and_clones_share_it() {
        let budget = Budget::private(100);
        let clone = budget.clone();
        budget.take(60).unwrap();
        assert_eq!(clone.take(41), FULL(41));
        clone.take(40).unwrap();
        assert_eq!((budget.free_bytes(), budget.total_bytes()), (Ok(0), 100));
        budget.give(100).unwrap();
        assert!(matches!(clone.give(1), Err(VmmError::Contract { .. })));
        assert_eq!(clone.free_bytes(), Ok(100));
    }

    #[test]
    fn two_budgets_on_one_file_draw_from_one_total() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("budget");
        let one = Budget::create(&path, 100).unwrap();
        let two = Budget::open(&path).unwrap();
        assert_eq!(two.total_bytes(), 100);

        one.take(60).unwrap();
        assert_eq!(two.take(60), FULL(60));
        assert_eq!((one.free_bytes(), two.free_bytes()), (Ok(40), Ok(40)));
        two.take(40).unwrap();
        one.give(10).unwrap();
        two.take(10).unwrap();
        assert_eq!(one.take(1), FULL(1));
    }

    #[test]
    fn one_budget_cannot_give_back_what_another_took() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("budget");
        let one = Budget::create(&path, 100).unwrap();
        let two = Budget::open(&path).unwrap();
        one.take(60).unwrap();
        assert!(matches!(two.give(1), Err(VmmError::Contract { .. })));
        assert_eq!(two.free_bytes(), Ok(40));
    }

    #[test]
    fn the_share_of_a_budget_that_is_gone_is_free_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("budget");
        let one = Budget::create(&path, 100).unwrap();
        let two = Budget::open(&path).unwrap();
        two.take(100).unwrap();
        assert_eq!(one.take(1), FULL(1));
        drop(two);
        assert_eq!(one.take(100), Ok(()));
    }

    #[test]
    fn a_slot_that_is_used_again_begins_empty() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("budget");
        let one = Budget::create(&path, 100).unwrap();
        for _ in 0..SLOTS * 2 {
            let two = Budget::open(&path).unwrap();
            two.take(100).unwrap();
        }
        assert_eq!(one.free_bytes(), Ok(100));
    }

    #[test]
    fn only_a_budget_that_nobody_holds_is_written_anew() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("budget");
        let one = Budget::create(&path, 100).unwrap();
        one.take(70).unwrap();
        assert!(matches!(
            Budget::create(&path, 5),
            Err(BudgetError::InUse { .. })
        ));
        assert_eq!(one.free_bytes(), Ok(30));
        drop(one);
        let two = Budget::create(&path, 5).unwrap();
        assert_eq!((two.total_bytes(), two.free_bytes()), (5, Ok(5)));
    }

    #[test]
    fn another_file_is_neither_read_as_a_budget_nor_overwritten() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("precious");
        for content in [
            "",
            "short",
            "a text that is longer than any header has to be",
        ] {
            std::fs::write(&path, content).unwrap();
            assert!(matches!(
                Budget::open(&path),
                Err(BudgetError::NotABudget { .. })
            ));
            if !content.is_empty() {
                assert!(matches!(
                    Budget::create(&path, 5),
                    Err(BudgetError::NotABudget { .. })
                ));
            }
            assert_eq!(std::fs::read_to_string(&path).unwrap(), content);
        }
        let missing = Budget::open(&dir.path().join("missing"));
        assert!(matches!(missing, Err(BudgetError::Io { call: "open", .. })));
    }

    #[test]
    fn the_last_slot_is_the_last_holder() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("budget");
        let mut all = vec![Budget::create(&path, 100).unwrap()];
        all.extend((1..SLOTS).map(|_| Budget::open(&path).unwrap()));
        assert!(matches!(
            Budget::open(&path),
            Err(BudgetError::Crowded { slots: SLOTS, .. })
        ));
        all.pop();
        assert!(Budget::open(&path).is_ok());
    }

    #[test]
    fn a_damaged_share_reads_as_full_not_as_empty() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("budget");
        let one = Budget::create(&path, 100).unwrap();
        let _alive = [Budget::open(&path).unwrap(), Budget::open(&path).unwrap()];
        let file = OpenOptions::new().write(true).open(&path).unwrap();
        for slot in [1, 2] {
            file.write_all_at(&u64::MAX.to_le_bytes(), share_offset(slot))
                .unwrap();
        }
        assert_eq!(one.free_bytes(), Ok(0));
        assert_eq!(one.take(1), FULL(1));
    }

    #[test]
    fn threads_over_several_budgets_never_take_more_than_the_total() {
        const TOTAL: u64 = 10;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("budget");
        let budgets = [
            Budget::create(&path, TOTAL).unwrap(),
            Budget::open(&path).unwrap(),
        ];
        let taken = Mutex::new(0_u64);
        thread::scope(|scope| {
            for worker in 0..4_u64 {
                let (budget, taken) = (&budgets[usize::try_from(worker % 2).unwrap()], &taken);
                scope.spawn(move || {
                    for round in 0..200 {
                        let bytes = 1 + (worker + round) % 7;
                        if budget.take(bytes).is_ok() {
                            *lock(taken) += bytes;
                            assert!(*lock(taken) <= TOTAL);
                            *lock(taken) -= bytes;
                            budget.give(bytes).unwrap();
                        }
                    }
                });
            }
        });
        assert_eq!(budgets[0].free_bytes(), Ok(TOTAL));
    }
}

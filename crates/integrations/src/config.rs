//! Everything an operator may set, read once.
//!
//! [`Config::from_env`] is the only place in the workspace that looks at the environment. It hands
//! over to [`Config::from_lookup`], which is pure: a value that is not allowed is an error that
//! names the variable, what was written, and what may be. [`VARIABLES`] is the documentation.

use std::ffi::OsString;
use std::num::NonZeroU32;
use std::path::PathBuf;
use std::time::Duration;
use std::{fmt, str::FromStr};

use kvcached_mapper::{Cold, Geometry, Layout, PageSize};
use kvcached_page_alloc::{MAX_RUN, Reserve};
use kvcached_tp_ipc::InstanceName;
use kvcached_vmm::RecyclerConfig;
use thiserror::Error;

use crate::detect::TopologyMode;
use crate::kv::LayoutChoice;
use crate::size::ByteSize;

mod runs;
#[cfg(test)]
mod tests;
mod variables;

pub use runs::{RunChoice, RunLength};
use variables::allowed;
pub use variables::{UnknownVariable, VARIABLES, Variable, unknown_variables};

/// What a reserve may grow to if nobody says so: the blocks of a few long prompts, and less than a
/// hundredth of the GPUs that were measured.
const DEFAULT_RESERVE_BYTES: u64 = 1 << 30;

/// A configuration in which every value is allowed.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Config {
    /// Directory of the sockets.
    pub runtime_dir: PathBuf,
    /// Name of the engine.
    pub instance: InstanceName,
    /// The topology asked for, if any.
    pub topology: Option<TopologyMode>,
    /// How layers, and K and V, share tensors.
    pub layout: Layout,
    /// Bytes of a page in one extent.
    pub page_size: PageSize,
    /// What lies behind a page without memory.
    pub cold: Cold,
    /// Idle pages kept backed.
    pub reserve: ReserveBounds,
    /// How many pages are backed together.
    pub runs: RunChoice,
    /// How much memory that came free is kept to be used again, and for how long.
    pub recycler: RecyclerConfig,
    /// How long to wait for another rank's answer.
    pub ipc_timeout: Duration,
    /// How long a worker keeps what is mapped after its coordinator is gone.
    pub orphan_timeout: Duration,
    /// How long a rank waits for an epoch to retire before it refuses to unmap.
    pub retire_timeout: Duration,
    /// How long to wait at start for every rank.
    pub ready_timeout: Duration,
    /// Where the memory is.
    pub device: Device,
}

/// Between which bounds the idle pages follow the demand that are kept backed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ReserveBounds {
    /// Pages kept whatever the demand.
    pub min: u32,
    /// Pages kept at most, not less than `min`; 0: none, ever. `None`: those of 1 GiB on one rank, but
    /// at least one, and at least `min`.
    pub max: Option<u32>,
}

/// Where memory comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Device {
    /// This machine's memory.
    Host,
    /// A GPU.
    Cuda {
        /// Its number among those that the process can see.
        ordinal: u32,
    },
}

/// What the operating system says about this process; defaults follow from it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ProcessIds {
    /// Effective user.
    pub uid: u32,
    /// Process group: children inherit it, so that a worker finds its engine's instance.
    pub process_group: i32,
}

/// A value that is not allowed.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// One variable alone.
    #[error("{variable} is {value:?}: allowed is {allowed}")]
    Value {
        /// The variable.
        variable: &'static str,
        /// What was written.
        value: OsString,
        /// What may be.
        allowed: &'static str,
    },
    /// Two variables that exclude each other.
    #[error("{one} is {one_value:?} and {other} is {other_value:?}: allowed is {allowed}")]
    Contradiction {
        /// One of them.
        one: &'static str,
        /// What was written there.
        one_value: OsString,
        /// The other.
        other: &'static str,
        /// What was written there.
        other_value: OsString,
        /// What the first one may be.
        allowed: &'static str,
    },
}

impl Config {
    /// Reads the environment: call it once, when the process starts to use this library, so that
    /// what a script set before is seen. Variables with the prefix that nothing reads are warned
    /// of.
    ///
    /// # Errors
    /// [`ConfigError`] for the first value that is not allowed.
    #[expect(
        clippy::disallowed_methods,
        reason = "this is the place that reads the environment"
    )]
    pub fn from_env() -> Result<Self, ConfigError> {
        let ids = ProcessIds {
            uid: nix::unistd::geteuid().as_raw(),
            process_group: nix::unistd::getpgrp().as_raw(),
        };
        Self::from_pairs(std::env::vars_os(), ids)
    }

    /// Reads name and value pairs, such as those of an environment, and warns of the unknown.
    ///
    /// # Errors
    /// [`ConfigError`] for the first value that is not allowed.
    pub fn from_pairs(
        pairs: impl IntoIterator<Item = (OsString, OsString)>,
        ids: ProcessIds,
    ) -> Result<Self, ConfigError> {
        let pairs: Vec<_> = pairs.into_iter().collect();
        for UnknownVariable { name, nearest } in
            unknown_variables(pairs.iter().filter_map(|(name, _)| name.to_str()))
        {
            match nearest {
                Some(nearest) => {
                    tracing::warn!("{name} is not a setting and has no effect: is it {nearest}?");
                }
                None => tracing::warn!("{name} is not a setting and has no effect"),
            }
        }
        let lookup = |wanted: &str| {
            pairs
                .iter()
                .find(|(name, _)| name == wanted)
                .map(|(_, value)| value.clone())
        };
        Self::from_lookup(lookup, ids)
    }

    /// Resolves every setting. Pure: the same answers and ids give the same configuration.
    ///
    /// # Errors
    /// [`ConfigError`] for the first value that is not allowed.
    pub fn from_lookup(
        lookup: impl Fn(&str) -> Option<OsString>,
        ids: ProcessIds,
    ) -> Result<Self, ConfigError> {
        let settings = Settings {
            lookup: |name: &str| lookup(name).filter(|v| !v.is_empty()),
        };
        let ipc_timeout = settings
            .parse("KVCACHED_IPC_TIMEOUT", seconds)?
            .unwrap_or(Duration::from_secs(60));
        Ok(Self {
            runtime_dir: settings.runtime_dir(ids.uid)?,
            instance: settings
                .parse("KVCACHED_INSTANCE", from_str)?
                .unwrap_or_else(|| process_group_instance(ids.process_group)),
            topology: settings.parse("KVCACHED_TOPOLOGY", from_str)?,
            layout: settings
                .parse("KVCACHED_LAYOUT", from_str)?
                .unwrap_or(Layout::Contiguous),
            page_size: settings
                .parse("KVCACHED_PAGE_SIZE", page_size)?
                .unwrap_or(PageSize::Auto),
            cold: settings
                .parse("KVCACHED_COLD", cold)?
                .unwrap_or(Cold::Unbacked),
            reserve: settings.reserve()?,
            runs: settings.runs()?,
            recycler: settings.recycler()?,
            ipc_timeout,
            orphan_timeout: settings
                .parse("KVCACHED_ORPHAN_TIMEOUT", |word| {
                    orphan_seconds(word, ipc_timeout)
                })?
                .unwrap_or(2 * ipc_timeout + Duration::from_secs(30)),
            retire_timeout: settings
                .parse("KVCACHED_RETIRE_TIMEOUT", seconds)?
                .unwrap_or(Duration::from_millis(50)),
            ready_timeout: settings
                .parse("KVCACHED_READY_TIMEOUT", seconds)?
                .unwrap_or(Duration::from_secs(60)),
            device: settings
                .parse("KVCACHED_DEVICE", from_str)?
                .unwrap_or(Device::Cuda { ordinal: 0 }),
        })
    }

    /// Logs what was resolved, at info. Call it once.
    pub fn log_resolved(&self) {
        tracing::info!(
            runtime_dir = %self.runtime_dir.display(),
            instance = %self.instance,
            topology = self.topology.map_or("as the engine is", TopologyMode::name),
            layout = %self.layout,
            page_size = %describe_page_size(self.page_size),
            cold = describe_cold(self.cold),
            min_reserved_pages = self.reserve.min,
            max_reserved_pages = self.reserve.max.map_or_else(
                || format!("those of {}", ByteSize(DEFAULT_RESERVE_BYTES)),
                |pages| pages.to_string(),
            ),
            max_run = %self.runs.longest,
            bulk_run = %self.runs.bulk,
            bulk_from = %ByteSize(self.runs.bulk_from_bytes),
            growth_chunks = self.runs.growth_chunks.get(),
            calm = %ByteSize(self.runs.calm_bytes),
            chunk_pool = %ByteSize(self.recycler.limit_bytes),
            chunk_pool_idle_s = self.recycler.idle.as_secs_f64(),
            ipc_timeout_s = self.ipc_timeout.as_secs_f64(),
            orphan_timeout_s = self.orphan_timeout.as_secs_f64(),
            retire_timeout_s = self.retire_timeout.as_secs_f64(),
            ready_timeout_s = self.ready_timeout.as_secs_f64(),
            device = %self.device,
            "configuration"
        );
    }

    /// How pools are laid out on a device of that granularity.
    #[must_use]
    pub const fn layout_choice(&self, granularity: u64) -> LayoutChoice {
        LayoutChoice {
            layout: self.layout,
            page_size: self.page_size,
            granularity,
        }
    }

    /// The name of a replica's own instance. Replicas of one engine share a process group and a
    /// configuration, but not their workers.
    #[must_use]
    pub fn replica_instance(&self, replica: Option<u16>) -> InstanceName {
        match replica {
            None => self.instance.clone(),
            Some(replica) => format!("{}-dp{replica}", self.instance)
                .parse()
                .expect("a name stays one with letters and digits at its end"),
        }
    }
}

impl ReserveBounds {
    /// No reserve.
    pub const NONE: Self = Self {
        min: 0,
        max: Some(0),
    };

    /// In pages of a pool of that geometry.
    #[must_use]
    pub fn pages(self, geometry: &Geometry) -> Reserve {
        let Self { min, max } = self;
        let max = max.unwrap_or_else(|| {
            let pages = runs::whole(DEFAULT_RESERVE_BYTES / geometry.bundle_bytes());
            pages.max(1).max(min)
        });
        Reserve { min, max }
    }
}

impl From<Reserve> for ReserveBounds {
    fn from(Reserve { min, max }: Reserve) -> Self {
        let max = Some(max);
        Self { min, max }
    }
}

struct Settings<F> {
    lookup: F,
}

impl<F: Fn(&str) -> Option<OsString>> Settings<F> {
    /// The variable's value through `parse`; `None` if it is not set or empty.
    fn parse<T>(
        &self,
        variable: &'static str,
        parse: impl Fn(&str) -> Option<T>,
    ) -> Result<Option<T>, ConfigError> {
        let Some(value) = (self.lookup)(variable) else {
            return Ok(None);
        };
        match value.to_str().and_then(|text| parse(text.trim())) {
            Some(parsed) => Ok(Some(parsed)),
            None => Err(ConfigError::Value {
                variable,
                value,
                allowed: allowed(variable),
            }),
        }
    }

    fn runtime_dir(&self, uid: u32) -> Result<PathBuf, ConfigError> {
        let variable = "KVCACHED_RUNTIME_DIR";
        if let Some(value) = (self.lookup)(variable) {
            // A relative path would mean another directory to each process.
            let path = PathBuf::from(&value);
            if path.is_absolute() {
                return Ok(path);
            }
            return Err(ConfigError::Value {
                variable,
                value,
                allowed: allowed(variable),
            });
        }
        // The standard tells to ignore a relative one.
        let of_session = (self.lookup)("XDG_RUNTIME_DIR").map(PathBuf::from);
        Ok(match of_session.filter(|path| path.is_absolute()) {
            Some(path) => path.join("kvcached"),
            None => PathBuf::from(format!("/tmp/kvcached-{uid}")),
        })
    }

    fn reserve(&self) -> Result<ReserveBounds, ConfigError> {
        const MIN: &str = "KVCACHED_MIN_RESERVED_PAGES";
        const MAX: &str = "KVCACHED_MAX_RESERVED_PAGES";
        let min = self.parse(MIN, from_str::<u32>)?.unwrap_or(0);
        let max = self.parse(MAX, from_str::<u32>)?;
        if max.is_some_and(|max| min > max) {
            return Err(self.contradiction(MIN, MAX));
        }
        Ok(ReserveBounds { min, max })
    }

    fn runs(&self) -> Result<RunChoice, ConfigError> {
        const PAGES: &str = "KVCACHED_MAX_RUN_PAGES";
        const BYTES: &str = "KVCACHED_MAX_RUN_BYTES";
        const BULK: &str = "KVCACHED_BULK_RUN_BYTES";
        let up_to_a_run =
            |text: &str| from_str::<NonZeroU32>(text).filter(|number| number.get() <= MAX_RUN);
        let pages = self.parse(PAGES, up_to_a_run)?;
        let bytes = self.parse(BYTES, some_bytes)?;
        let bulk = self.parse(BULK, some_bytes)?;
        let default = RunChoice::default();
        let longest = match (pages, bytes) {
            (Some(_), Some(_)) => return Err(self.contradiction(PAGES, BYTES)),
            (Some(pages), None) => Some(RunLength::Pages(pages)),
            (None, bytes) => bytes.map(RunLength::Bytes),
        };
        if let (RunLength::Bytes(least), Some(most)) = (longest.unwrap_or(default.longest), bulk)
            && most < least
        {
            return Err(match longest {
                Some(_) => self.contradiction(BULK, BYTES),
                None => self.refused(BULK),
            });
        }
        Ok(RunChoice {
            longest: longest.unwrap_or(default.longest),
            // Who bounds all runs means these too.
            bulk: bulk
                .map(RunLength::Bytes)
                .or(longest)
                .unwrap_or(default.bulk),
            bulk_from_bytes: self
                .parse("KVCACHED_BULK_FROM_BYTES", some_bytes)?
                .unwrap_or(default.bulk_from_bytes),
            growth_chunks: self
                .parse("KVCACHED_GROWTH_CHUNKS", up_to_a_run)?
                .unwrap_or(default.growth_chunks),
            short_runs: default.short_runs,
            calm_bytes: self
                .parse("KVCACHED_CALM_BYTES", |text| {
                    from_str::<ByteSize>(text).map(|bytes| bytes.0)
                })?
                .unwrap_or(default.calm_bytes),
        })
    }

    fn refused(&self, variable: &'static str) -> ConfigError {
        ConfigError::Value {
            variable,
            value: (self.lookup)(variable).unwrap_or_default(),
            allowed: allowed(variable),
        }
    }

    fn recycler(&self) -> Result<RecyclerConfig, ConfigError> {
        let default = RecyclerConfig::default();
        let limit = self.parse("KVCACHED_CHUNK_POOL_BYTES", from_str::<ByteSize>)?;
        let idle = self.parse("KVCACHED_CHUNK_POOL_IDLE", seconds)?;
        Ok(RecyclerConfig {
            limit_bytes: limit.map_or(default.limit_bytes, |bytes| bytes.0),
            idle: idle.unwrap_or(default.idle),
        })
    }

    fn contradiction(&self, one: &'static str, other: &'static str) -> ConfigError {
        let value = |name| (self.lookup)(name).unwrap_or_default();
        ConfigError::Contradiction {
            one,
            one_value: value(one),
            other,
            other_value: value(other),
            allowed: allowed(one),
        }
    }
}

fn process_group_instance(process_group: i32) -> InstanceName {
    format!("pg{process_group}")
        .parse()
        .expect("letters and digits are a name")
}

fn from_str<T: FromStr>(word: &str) -> Option<T> {
    word.parse().ok()
}

/// More than none.
fn some_bytes(word: &str) -> Option<u64> {
    from_str::<ByteSize>(word)
        .map(|bytes| bytes.0)
        .filter(|&bytes| bytes > 0)
}

fn page_size(word: &str) -> Option<PageSize> {
    if word.eq_ignore_ascii_case("auto") {
        return Some(PageSize::Auto);
    }
    some_bytes(word).map(PageSize::Bytes)
}

fn describe_page_size(page_size: PageSize) -> String {
    match page_size {
        PageSize::Auto => "auto".to_owned(),
        PageSize::Bytes(bytes) => ByteSize(bytes).to_string(),
    }
}

fn cold(word: &str) -> Option<Cold> {
    [Cold::Unbacked, Cold::Zero]
        .into_iter()
        .find(|&cold| describe_cold(cold) == word)
}

const fn describe_cold(cold: Cold) -> &'static str {
    match cold {
        Cold::Unbacked => "unbacked",
        Cold::Zero => "zero",
    }
}

/// A wait that has a bound, and is none that ends before it begins.
fn seconds(word: &str) -> Option<Duration> {
    from_str::<f64>(word)
        .filter(|seconds| (0.001..=86_400.0).contains(seconds))
        .and_then(|seconds| Duration::try_from_secs_f64(seconds).ok())
}

/// The same, but longer than a coordinator may need to come back: an operation waits for a rank that
/// hangs once for it to answer, and once for it to undo.
fn orphan_seconds(word: &str, ipc_timeout: Duration) -> Option<Duration> {
    let least = Duration::from_secs(1);
    seconds(word).filter(|&timeout| timeout >= least && timeout > 2 * ipc_timeout)
}

impl FromStr for Device {
    type Err = UnknownDevice;

    fn from_str(word: &str) -> Result<Self, Self::Err> {
        let unknown = || UnknownDevice {
            word: word.to_owned(),
        };
        match word.split_once(':') {
            None if word == "host" => Ok(Self::Host),
            None if word == "cuda" => Ok(Self::Cuda { ordinal: 0 }),
            Some(("cuda", number)) if number.bytes().all(|byte| byte.is_ascii_digit()) => number
                .parse()
                .map(|ordinal| Self::Cuda { ordinal })
                .map_err(|_| unknown()),
            _ => Err(unknown()),
        }
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host => f.pad("host"),
            Self::Cuda { ordinal } => write!(f, "cuda:{ordinal}"),
        }
    }
}

/// A word that names no device.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("no device is called {word:?}: use host, cuda or cuda:N")]
pub struct UnknownDevice {
    /// The word.
    pub word: String,
}

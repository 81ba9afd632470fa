//! A process of an engine for tests that kill it: a rank, or the coordinator with or without a rank
//! of its own. Its mapper strikes where it is told to. Or it is an impostor, where a rank should be.
//!
//! Arguments: `rank`, `coordinator` or `impostor`, runtime directory, instance, stage, rank (for a coordinator:
//! stages, ranks of a stage), bytes of its device (0: a coordinator without a rank), milliseconds of
//! the IPC time-out, milliseconds until an orphan lets go; for a rank perhaps a point and a stroke, for an impostor its manner;
//! a coordinator that is `gated` begins with the first line that it is given.
//!
//! It says `ready`, or why not, and answers each line on its standard input by one, until that ends.
#![expect(clippy::print_stdout, reason = "standard output is how it answers")]

use std::error::Error;
use std::io::BufRead;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use kvcached_integrations::{
    Background, MappedPool, MapperConfig, Pool, PoolPolicy, RunChoice, RunLength, Scheduler,
    compose_over,
};
use kvcached_manager::BlockId;
use kvcached_mapper::{
    Cold, Epochs, Extent, Geometry, KvBuffers, Layout, LocalMapper, PageSize, PoolId, PoolSpec,
    Rank, RankMapper, Stage,
};
use kvcached_tp_ipc::{
    Deadline, Endpoint, EndpointDir, GeometryDigest, RuntimeDir, ServedPool, Server, ServerConfig,
    Topology,
};
use kvcached_vmm::{Driver, Host, HostConfig, RecyclerConfig, VmmError};

#[path = "../impostor.rs"]
mod impostor;
#[path = "../strike.rs"]
mod strike;
#[path = "../striking.rs"]
mod striking;

use striking::Striking;

type Failure = Box<dyn Error>;

const POOL: PoolId = PoolId(0);
const GRANULARITY: u64 = 2 << 20;

/// How often the coordinator looks at its ranks by itself.
const EVERY: Duration = Duration::from_millis(20);

/// How long a coordinator waits for its ranks.
const READY_TIMEOUT: Duration = Duration::from_secs(10);

/// What all processes are told.
struct Arguments {
    endpoints: EndpointDir,
    place: (u16, u16),
    device_bytes: u64,
    ipc_timeout: Duration,
    orphan_timeout: Duration,
}

/// A rank's memory, wherever the rank is.
struct Part {
    device: Arc<Host>,
    mapper: Arc<LocalMapper<Host>>,
    striking: Arc<Striking>,
}

fn main() -> Result<(), Failure> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [
        role,
        folder,
        instance,
        stage,
        rank,
        bytes,
        ipc_ms,
        orphan_ms,
        stroke @ ..,
    ] = arguments.as_slice()
    else {
        return Err("eight arguments are expected".into());
    };
    let arguments = Arguments {
        endpoints: RuntimeDir::open(Path::new(folder))?.instance(&instance.parse()?)?,
        place: (stage.parse()?, rank.parse()?),
        device_bytes: bytes.parse()?,
        ipc_timeout: Duration::from_millis(ipc_ms.parse()?),
        orphan_timeout: Duration::from_millis(orphan_ms.parse()?),
    };
    if let ("impostor", [manner]) = (role.as_str(), stroke) {
        let endpoint = arguments.endpoint();
        return impostor::listen(&endpoint, manner);
    }
    let part = match arguments.device_bytes {
        0 => None,
        bytes => Some(Part::new(bytes)?),
    };
    if let (Some(part), [point, stroke]) = (&part, stroke) {
        part.striking.arm(point.parse()?, stroke.parse()?);
    }
    match (role.as_str(), part) {
        ("rank", Some(part)) => serve(&arguments, &part),
        ("coordinator", part) => {
            if stroke == ["gated"] {
                std::io::stdin().lock().read_line(&mut String::new())?;
            }
            schedule(&arguments, part.as_ref())
        }
        _ => Err(format!("no such role: {role}").into()),
    }
}

impl Arguments {
    fn place(&self) -> (Stage, Rank) {
        (Stage(self.place.0), Rank(self.place.1))
    }

    fn endpoint(&self) -> Endpoint {
        let (stage, rank) = self.place();
        self.endpoints.endpoint(stage, rank)
    }
}

/// A contiguous pool with four blocks on a page.
fn geometry() -> Result<Geometry, Failure> {
    let spec = PoolSpec {
        layout: Layout::Contiguous,
        layers: 4,
        kv_buffers: KvBuffers::Two,
        block_bytes: 64 << 10,
        page_size: PageSize::Auto,
        capacity_bytes: 256 << 20,
    };
    Ok(spec.resolve(GRANULARITY)?)
}

fn serve(arguments: &Arguments, part: &Part) -> Result<(), Failure> {
    let endpoints = &arguments.endpoints;
    let (stage, rank) = arguments.place();
    let geometry = geometry()?;
    let pool = ServedPool {
        pool: POOL,
        geometry: GeometryDigest::new(
            geometry.pages(),
            geometry.page_bytes(),
            geometry.block_stride_bytes(),
        ),
        mapper: Arc::clone(&part.striking) as Arc<dyn RankMapper>,
    };
    let config = ServerConfig {
        instance: endpoints.instance().clone(),
        stage,
        rank,
        pools: vec![pool],
        timeout: arguments.ipc_timeout,
        orphan_timeout: arguments.orphan_timeout,
        epochs: None,
    };
    let mut server = Server::bind(&arguments.endpoint(), config)?;
    let stop = server.stop_handle();
    ready();
    std::thread::scope(|scope| {
        let serving = scope.spawn(move || server.run());
        let answered = answer(|order, _| part.answer(order));
        stop.stop();
        serving.join().expect("the server does not panic")?;
        answered
    })?;
    endpoints.remove_if_empty()?;
    Ok(())
}

fn schedule(arguments: &Arguments, part: Option<&Part>) -> Result<(), Failure> {
    let (stages, tp) = arguments.place;
    let topology = match part {
        Some(_) => Topology::rank0_coordinates(tp, &arguments.endpoints),
        None => Topology::separate_coordinator(tp, stages, &arguments.endpoints),
    };
    let config = MapperConfig {
        instance: arguments.endpoints.instance().clone(),
        topology,
        cold: Cold::Unbacked,
        recycler: RecyclerConfig::default(),
        ipc_timeout: arguments.ipc_timeout,
        epochs: Arc::new(Epochs::new(Duration::from_secs(1))),
    };
    let geometry = geometry()?;
    let local = part.map(|part| Arc::clone(&part.striking) as Arc<dyn RankMapper>);
    let ready_by = Deadline::after(READY_TIMEOUT);
    let mapper = compose_over(&config, POOL, &geometry, local, ready_by)?;
    let pool = MappedPool {
        id: POOL,
        geometry,
        policy: PoolPolicy::default(),
        mapper,
        tensor_bases: Vec::new(),
    };
    let background = Background::On { every: EVERY };
    let scheduler = Scheduler::with_mappers(
        vec![pool],
        RunChoice::up_to(RunLength::Bytes(8 << 20)),
        background,
    )?;
    let pool = scheduler.pool(POOL).ok_or("the one pool")?;
    ready();
    answer(|order, numbers| {
        let blocks = || numbers.iter().copied().map(BlockId).collect::<Vec<_>>();
        Ok(match order.split(' ').next().unwrap_or_default() {
            "alloc" => alloc(pool, numbers),
            "free" => said(pool.free(&blocks()).map(|()| "freed")),
            "trim" => said(pool.trim()),
            "health" => pool.health().to_string(),
            "lost" => pool.contents_lost().to_string(),
            "quarantined" => pool.usage().pages.quarantined.to_string(),
            "pages" => {
                (pool.usage().pages.mapped_bytes / pool.geometry().bundle_bytes()).to_string()
            }
            _ => part.ok_or("no rank is here")?.answer(order)?,
        })
    })
}

fn ready() {
    println!("ready");
}

/// Answers each line by what `deal` makes of it and of the numbers that are in it.
fn answer(mut deal: impl FnMut(&str, &[u32]) -> Result<String, Failure>) -> Result<(), Failure> {
    for order in std::io::stdin().lock().lines() {
        let order = order?;
        println!("{}", deal(&order, &numbers(&order))?);
    }
    Ok(())
}

fn numbers(order: &str) -> Vec<u32> {
    order
        .split(' ')
        .filter_map(|word| word.parse().ok())
        .collect()
}

fn alloc(pool: &Pool, numbers: &[u32]) -> String {
    match pool.alloc(numbers.first().copied().unwrap_or_default()) {
        Ok(blocks) => {
            let blocks: Vec<String> = blocks.iter().map(|block| block.0.to_string()).collect();
            blocks.join(" ")
        }
        Err(error) => format!("refused: {error}"),
    }
}

fn said<T: ToString, E: Error>(result: Result<T, E>) -> String {
    match result {
        Ok(value) => value.to_string(),
        Err(error) => format!("refused: {error}"),
    }
}

impl Part {
    fn new(device_bytes: u64) -> Result<Self, Failure> {
        let device = Arc::new(Host::new(HostConfig::new(device_bytes))?);
        let mapper = LocalMapper::new(Arc::clone(&device), geometry()?, Cold::Unbacked)?;
        let mapper = Arc::new(mapper);
        let striking = Arc::new(Striking::new(Arc::clone(&mapper) as Arc<dyn RankMapper>));
        Ok(Self {
            device,
            mapper,
            striking,
        })
    }

    fn answer(&self, order: &str) -> Result<String, Failure> {
        let blocks = numbers(order);
        let words: Vec<&str> = order.split(' ').collect();
        Ok(match words.as_slice() {
            ["mapped"] => {
                let runs = self.mapper.mapped().into_iter();
                let runs = runs.map(|run| format!("{}+{}", run.first().0, run.count()));
                runs.collect::<Vec<_>>().join(" ")
            }
            ["memory"] => self.device.memory()?.free.to_string(),
            ["strike", point, stroke] => {
                self.striking.arm(point.parse()?, stroke.parse()?);
                "armed".to_owned()
            }
            ["armed"] => self.striking.is_armed().to_string(),
            ["write", ..] => {
                self.each_piece(&blocks, |mapper, piece, mark| mapper.write(piece, &mark))?;
                "written".to_owned()
            }
            ["holds", ..] => {
                let mut all = true;
                self.each_piece(&blocks, |mapper, piece, mark| {
                    let mut found = [0; 8];
                    mapper.read(piece, &mut found)?;
                    all &= found == mark;
                    Ok(())
                })?;
                all.to_string()
            }
            _ => return Err(format!("{order:?} is no order").into()),
        })
    }

    /// Every piece of these blocks, with what is to be there.
    fn each_piece(
        &self,
        blocks: &[u32],
        mut with: impl FnMut(&LocalMapper<Host>, Extent, [u8; 8]) -> Result<(), VmmError>,
    ) -> Result<(), Failure> {
        for &block in blocks {
            let pieces = self.mapper.geometry().block_pieces(block);
            for (index, piece) in pieces.ok_or("no such block")?.enumerate() {
                let mark = u64::from(block) << 32 | 0xa5a5_0000 | u64::try_from(index)?;
                with(&self.mapper, piece, mark.to_le_bytes())?;
            }
        }
        Ok(())
    }
}

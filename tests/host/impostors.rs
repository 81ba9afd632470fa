//! What listens where a rank should and is none: it is never taken for the rank.

use std::time::Duration;

use kvcached_mapper::Layout;
use kvcached_tp_ipc::Deadline;
use kvcached_vmm::Host;

use crate::crew::{Engine, NAME, Process, RECOVERY, blocks, order, within};
use crate::ranks::{Place, READY_TIMEOUT, WorkerProcess, scheduler};

const DEVICE: &str = "host:268435456";

/// What it does, and what is said of it at the start and later.
const MANNERS: [(&str, &str, &str); 5] = [
    ("silent", "no answer within", "no answer within"),
    ("noisy", "protocol violation", "protocol violation"),
    (
        "stranger",
        "it welcomed somebody else",
        "it welcomed somebody else",
    ),
    ("mute", "no answer within", "no answer within"),
    ("babbling", "protocol violation", "protocol violation"),
];

#[test]
fn a_start_with_an_impostor_fails_within_its_bound_and_names_it() {
    for (manner, reason, _) in MANNERS {
        let engine = Engine::new();
        let layout = Layout::Contiguous;
        let place = (0, 0);
        let _rank = WorkerProcess::start(engine.folder.path(), NAME, place, DEVICE, layout);
        let _impostor = engine.impostor(1, manner);
        // What the processes are given to do their part beside all others.
        let bound = Deadline::after(READY_TIMEOUT + Duration::from_secs(2));
        let place = Place::Separate(2, 1);
        let error = scheduler::<Host>(engine.folder.path(), NAME, place, layout, None)
            .expect_err("rank 1 is not there");
        assert!(!bound.is_over(), "{manner}");
        let error = error.to_string();
        let endpoint = engine.endpoint(1);
        let endpoint = endpoint.to_str().expect("a folder of this test");
        for part in ["stage 0, rank 1", endpoint, reason] {
            assert!(error.contains(part), "{manner}: {part} is not in: {error}");
        }
        assert!(
            !error.contains("rank 0"),
            "{manner}: rank 0 is there: {error}"
        );
    }
}

#[test]
fn an_impostor_in_a_ranks_place_keeps_the_pool_fenced_until_the_rank_is_back() {
    for (manner, _, reason) in MANNERS {
        let engine = Engine {
            ipc_timeout: Duration::from_millis(200),
            ..Engine::new()
        };
        let mut ranks = engine.ranks();
        let mut coordinator = engine.coordinator();
        let held = coordinator.alloc(9);
        for rank in &mut ranks {
            rank.told(&order("write", &held));
        }
        let before = ranks[0].told("mapped");
        ranks[1].kill();
        let mut impostor = engine.impostor(1, manner);
        let fenced = within(RECOVERY, manner, || {
            let health = coordinator.told("health");
            (health.starts_with("fenced") && health.contains(reason)).then_some(health)
        });
        assert!(fenced.contains("stage 0, rank 1"), "{manner}: {fenced}");
        for _ in 0..20 {
            let refused = coordinator.told("alloc 1");
            assert_eq!(blocks(&refused), None, "{manner}");
            assert!(coordinator.told("health").starts_with("fenced"), "{manner}");
        }
        assert_eq!(
            ranks[0].told("mapped"),
            before,
            "{manner}: nothing is begun"
        );
        assert_eq!(
            coordinator.told("lost"),
            "0",
            "{manner}: nothing was made again"
        );
        impostor.kill();
        ranks[1] = engine.rank(1);
        within(RECOVERY, manner, || {
            let known = coordinator.told("health") == "healthy";
            (known && coordinator.told("lost") != "0").then_some(())
        });
        assert_eq!(coordinator.told("lost"), "1", "{manner}");
        assert_eq!(ranks[1].told("mapped"), before, "{manner}");
        assert_eq!(ranks[0].told(&order("holds", &held)), "true", "{manner}");
        assert_eq!(coordinator.alloc(6).len(), 6, "{manner}");
        assert_eq!(coordinator.told(&order("free", &held)), "freed", "{manner}");
        coordinator.end();
        ranks.into_iter().for_each(Process::end);
    }
}

use kvcached_mapper::{KvBuffers, Layout, PageSize, Rank, Stage};
use proptest::prelude::*;

use super::*;
use crate::detect::{Arrangement, Dimension, Role};
use crate::kv::DType;

fn ranks(tp: u32, tp_rank: Option<u32>, pp: u32, pp_rank: Option<u32>) -> RankReport {
    RankReport {
        tp_size: Some(tp),
        tp_rank,
        pp_size: Some(pp),
        pp_rank,
        ..RankReport::default()
    }
}

fn core(tp: u32, pp: u32) -> VllmReport {
    VllmReport {
        ranks: RankReport {
            is_worker: Some(false),
            ..ranks(tp, None, pp, None)
        },
        coordinator_separate: Some(true),
        external_launcher: None,
    }
}

fn worker(tp: u32, rank: u32, pp: u32, stage: u32) -> VllmReport {
    VllmReport {
        ranks: RankReport {
            is_worker: Some(true),
            ..ranks(tp, Some(rank), pp, Some(stage))
        },
        ..core(tp, pp)
    }
}

fn as_worker(stage: u16, rank: u16) -> Role {
    Role::Worker {
        stage: Stage(stage),
        rank: Rank(rank),
    }
}

/// Every way in which vLLM can put rank 0 somewhere.
#[test]
fn rank0_is_where_the_executor_puts_it() {
    let separate = |tp, stages| Role::Coordinator(Arrangement::Separate { tp, stages });
    let single = Role::Coordinator(Arrangement::Single);
    let in_process = |report: VllmReport| VllmReport {
        coordinator_separate: Some(false),
        ..report
    };
    let launched = |report: VllmReport| VllmReport {
        external_launcher: Some(true),
        coordinator_separate: None,
        ..report
    };
    let own = |stage, rank| {
        Role::Coordinator(Arrangement::Autonomous {
            stage: Stage(stage),
            rank: Rank(rank),
        })
    };
    let ray = |hosts, report: VllmReport| VllmReport {
        ranks: RankReport {
            hosts: Some(hosts),
            ..report.ranks
        },
        ..report
    };
    let cases = [
        (
            "one GPU, in-process executor: the core",
            in_process(core(1, 1)),
            single,
        ),
        (
            "one GPU, in-process executor: the worker",
            in_process(worker(1, 0, 1, 0)),
            single,
        ),
        (
            "one GPU, multiprocessing: the core",
            core(1, 1),
            separate(1, 1),
        ),
        (
            "one GPU, multiprocessing: the worker",
            worker(1, 0, 1, 0),
            as_worker(0, 0),
        ),
        (
            "TP 4, multiprocessing: the core",
            core(4, 1),
            separate(4, 1),
        ),
        (
            "TP 4, multiprocessing: rank 0 listens",
            worker(4, 0, 1, 0),
            as_worker(0, 0),
        ),
        (
            "TP 4, multiprocessing: rank 3",
            worker(4, 3, 1, 0),
            as_worker(0, 3),
        ),
        (
            "TP 2, PP 2: one core for all stages",
            core(2, 2),
            separate(2, 2),
        ),
        (
            "TP 2, PP 2: a worker of stage 1",
            worker(2, 1, 2, 1),
            as_worker(1, 1),
        ),
        (
            "Ray on this host: the core",
            ray(1, core(2, 1)),
            separate(2, 1),
        ),
        (
            "Ray on this host: a worker",
            ray(1, worker(2, 1, 1, 0)),
            as_worker(0, 1),
        ),
        (
            "external launcher: rank 0",
            launched(worker(4, 0, 1, 0)),
            own(0, 0),
        ),
        (
            "external launcher: rank 2",
            launched(worker(4, 2, 1, 0)),
            own(0, 2),
        ),
        (
            "external launcher: stage 1",
            launched(worker(2, 1, 2, 1)),
            own(1, 1),
        ),
        (
            "core multiprocessing off: the API process",
            in_process(core(1, 1)),
            single,
        ),
    ];
    for (case, report, role) in cases {
        let detected = detect(&report, None).unwrap_or_else(|e| panic!("{case}: {e}"));
        assert_eq!(detected.role, role, "{case}");
        assert!(!detected.fell_back, "{case}");
    }
}

/// The coordinator of one rank cannot know yet where that rank is: a wrong guess at *here*
/// once left the worker without its tensors.
#[test]
fn a_core_that_does_not_know_where_rank0_is_waits_for_its_initialisation() {
    let report = VllmReport {
        coordinator_separate: None,
        ..core(1, 1)
    };
    let role = Role::Coordinator(Arrangement::Separate { tp: 1, stages: 1 });
    assert_eq!(detect(&report, None).unwrap().role, role);
}

#[test]
fn ranks_on_other_hosts_are_an_error_at_start() {
    for report in [core(4, 1), worker(4, 3, 1, 0)] {
        let ranks = RankReport {
            hosts: Some(2),
            ..report.ranks
        };
        let report = VllmReport { ranks, ..report };
        assert_eq!(
            detect(&report, None),
            Err(DetectError::OtherHosts { hosts: 2 })
        );
    }
    // Whoever sends and receives nothing may be anywhere.
    let mut report = worker(4, 3, 1, 0);
    report.ranks.hosts = Some(2);
    report.external_launcher = Some(true);
    report.coordinator_separate = None;
    assert!(detect(&report, None).is_ok());
}

#[test]
fn each_replica_is_an_instance_of_its_own() {
    let replica = |dp_size, dp_rank| {
        let ranks = RankReport {
            dp_size,
            dp_rank,
            ..core(2, 1).ranks
        };
        detect(
            &VllmReport {
                ranks,
                ..core(2, 1)
            },
            None,
        )
        .map(|detected| detected.replica)
    };
    assert_eq!(replica(None, None), Ok(None));
    assert_eq!(replica(Some(1), Some(0)), Ok(None));
    assert_eq!(replica(Some(3), Some(2)), Ok(Some(2)));
    let size = Dimension::DataParallel;
    assert_eq!(
        replica(Some(3), None),
        Err(DetectError::RankUnknown {
            who: "replica",
            size,
            value: 3
        })
    );
    assert_eq!(
        replica(Some(3), Some(3)),
        Err(DetectError::RankOutsideSize {
            size,
            rank: 3,
            value: 3
        })
    );
}

#[test]
fn nothing_reported_is_one_gpu() {
    let nothing = VllmReport::default();
    let (detected, lines) = crate::testing::logged(|| detect(&nothing, None).unwrap());
    assert_eq!(detected.role, Role::Coordinator(Arrangement::Single));
    assert_eq!(detected.world, World { tp: 1, stages: 1 });
    assert!(detected.fell_back);
    let debug: Vec<_> = lines.iter().filter(|line| line.contains("DEBUG")).collect();
    assert_eq!(debug.len(), 1, "{lines:?}");
    assert!(debug[0].contains("single GPU"), "{lines:?}");

    let ranks = RankReport {
        is_worker: Some(false),
        ..RankReport::default()
    };
    let core = VllmReport {
        ranks,
        ..VllmReport::default()
    };
    assert_eq!(
        detect(&core, None).unwrap().role,
        Role::Coordinator(Arrangement::Single)
    );
    let (_, lines) = crate::testing::logged(|| detect(&worker(2, 0, 1, 0), None).unwrap());
    assert!(lines.is_empty(), "{lines:?}");
}

#[test]
fn what_contradicts_itself_is_an_error() {
    let tp = Dimension::TensorParallel;
    let pp = Dimension::PipelineParallel;
    let with = |change: fn(&mut VllmReport)| {
        let mut report = worker(4, 1, 2, 1);
        change(&mut report);
        report
    };
    let cases = [
        (
            with(|r| r.ranks.tp_size = Some(0)),
            DetectError::ZeroSize { size: tp },
        ),
        (
            with(|r| r.ranks.pp_size = Some(0)),
            DetectError::ZeroSize { size: pp },
        ),
        (
            with(|r| r.ranks.world_size = Some(0)),
            DetectError::ZeroSize {
                size: Dimension::World,
            },
        ),
        (
            with(|r| r.ranks.hosts = Some(0)),
            DetectError::ZeroSize {
                size: Dimension::Hosts,
            },
        ),
        (
            with(|r| r.ranks.tp_size = Some(70_000)),
            DetectError::SizeTooLarge {
                size: tp,
                value: 70_000,
                max: u16::MAX,
            },
        ),
        (
            with(|r| r.ranks.tp_rank = Some(4)),
            DetectError::RankOutsideSize {
                size: tp,
                rank: 4,
                value: 4,
            },
        ),
        (
            with(|r| r.ranks.tp_rank = Some(70_000)),
            DetectError::RankOutsideSize {
                size: tp,
                rank: 70_000,
                value: 4,
            },
        ),
        (
            with(|r| r.ranks.pp_rank = Some(2)),
            DetectError::RankOutsideSize {
                size: pp,
                rank: 2,
                value: 2,
            },
        ),
        (
            with(|r| r.ranks.tp_size = None),
            DetectError::RankWithoutSize { size: tp, rank: 1 },
        ),
        (
            with(|r| r.ranks.tp_rank = None),
            DetectError::RankUnknown {
                who: "worker",
                size: tp,
                value: 4,
            },
        ),
        (
            with(|r| r.ranks.pp_rank = None),
            DetectError::RankUnknown {
                who: "worker",
                size: pp,
                value: 2,
            },
        ),
        (
            with(|r| r.ranks.world_size = Some(4)),
            DetectError::SizesDisagree {
                world: 4,
                tp: 4,
                stages: 2,
            },
        ),
        (
            with(|r| r.ranks.is_worker = Some(false)),
            DetectError::CoordinatorWithRank { rank: 1 },
        ),
        (
            with(|r| r.external_launcher = Some(true)),
            DetectError::Excluded {
                one: "an external launcher",
                other: "a separate coordinator",
            },
        ),
        (
            with(|r| r.coordinator_separate = Some(false)),
            DetectError::StagesUnderRank0 { stages: 2 },
        ),
        // A coordinator that takes an unknown size for one leaves the other ranks unmapped.
        (
            VllmReport {
                ranks: RankReport {
                    is_worker: Some(false),
                    ..RankReport::default()
                },
                coordinator_separate: Some(true),
                external_launcher: None,
            },
            DetectError::SizeUnknown {
                mode: TopologyMode::Separate,
            },
        ),
    ];
    for (report, expected) in cases {
        assert_eq!(detect(&report, None), Err(expected), "{report:?}");
    }
}

#[test]
fn sizes_that_follow_from_the_world_are_filled_in() {
    let world = |tp_size, pp_size, world_size| {
        let ranks = RankReport {
            tp_size,
            pp_size,
            world_size,
            ..RankReport::default()
        };
        let report = VllmReport {
            ranks,
            coordinator_separate: Some(true),
            ..core(1, 1)
        };
        detect(&report, None).map(|detected| detected.world)
    };
    assert_eq!(
        world(Some(4), None, Some(8)),
        Ok(World { tp: 4, stages: 2 })
    );
    assert_eq!(
        world(None, Some(2), Some(8)),
        Ok(World { tp: 4, stages: 2 })
    );
    assert_eq!(world(None, None, Some(8)), Ok(World { tp: 8, stages: 1 }));
    assert_eq!(
        world(Some(3), None, Some(8)),
        Err(DetectError::SizesDisagree {
            world: 8,
            tp: 3,
            stages: 1
        })
    );
}

#[test]
fn the_operators_topology_overrides_the_engines() {
    use TopologyMode::{Autonomous, Rank0, Separate, Single};
    let in_process = |report: VllmReport| VllmReport {
        coordinator_separate: Some(false),
        ..report
    };
    let unknown = |report: VllmReport| VllmReport {
        coordinator_separate: None,
        ..report
    };
    let rank0 = Role::Coordinator(Arrangement::Rank0 { tp: 4 });
    let own = Role::Coordinator(Arrangement::Autonomous {
        stage: Stage(0),
        rank: Rank(3),
    });
    let separate = Role::Coordinator(Arrangement::Separate { tp: 4, stages: 1 });
    let accepted = [
        (Rank0, unknown(core(4, 1)), rank0),
        (Rank0, unknown(worker(4, 0, 1, 0)), rank0),
        (Rank0, unknown(worker(4, 3, 1, 0)), as_worker(0, 3)),
        (Rank0, in_process(worker(4, 3, 1, 0)), as_worker(0, 3)),
        (Autonomous, unknown(worker(4, 3, 1, 0)), own),
        (Separate, unknown(core(4, 1)), separate),
        (
            Single,
            unknown(core(1, 1)),
            Role::Coordinator(Arrangement::Single),
        ),
    ];
    for (asked, report, role) in accepted {
        let detected = detect(&report, Some(asked));
        assert_eq!(detected.map(|d| d.role), Ok(role), "{asked} for {report:?}");
    }
    let launched = VllmReport {
        external_launcher: Some(true),
        ..unknown(worker(4, 3, 1, 0))
    };
    let refused = [
        (Single, core(1, 1)),
        (Single, unknown(core(4, 1))),
        (Single, unknown(core(1, 2))),
        (Rank0, core(4, 1)),
        (Rank0, unknown(core(2, 2))),
        (Rank0, unknown(VllmReport::default())),
        (Separate, in_process(core(4, 1))),
        (Separate, launched),
        (Autonomous, core(4, 1)),
        (Autonomous, unknown(core(4, 1))),
    ];
    for (asked, report) in refused {
        let answer = detect(&report, Some(asked));
        assert!(answer.is_err(), "{asked} for {report:?}: {answer:?}");
    }
    let mut claims = unknown(worker(4, 3, 1, 0));
    claims.ranks.is_worker = Some(false);
    let error = detect(&claims, Some(Rank0)).unwrap_err();
    assert_eq!(
        error.to_string(),
        "topology rank0 does not fit: rank 3 reports that it coordinates"
    );
}

fn gqa(blocks: u64, shape: Vec<u64>) -> VllmPool {
    VllmPool {
        layers: 4,
        attention: Attention::Gqa {
            kv_heads: 8,
            head_size: 128,
        },
        elements: Elements::plain(DType::Bf16),
        block_tokens: 16,
        kernel_block_tokens: None,
        tensor_bytes: blocks * 2 * 32768,
        padded_block_bytes: None,
        shape,
    }
}

fn choice(layout: Layout) -> LayoutChoice {
    LayoutChoice {
        layout,
        page_size: PageSize::Auto,
        granularity: 2 << 20,
    }
}

#[test]
fn blocks_before_or_behind_kv_have_the_same_bytes() {
    for layout in Layout::ALL {
        let behind = pool_spec(&gqa(512, vec![2, 512, 16, 8, 128]), &choice(layout)).unwrap();
        let before = pool_spec(&gqa(512, vec![512, 2, 16, 8, 128]), &choice(layout)).unwrap();
        assert_eq!(behind.spec, before.spec);
        assert_eq!(behind.spec.block_bytes, 32768);
        assert_eq!(behind.spec.kv_buffers, KvBuffers::Two);
        for (behind, before) in behind.views.iter().zip(&before.views) {
            for (block, kv, token) in [(0, 0, 0), (7, 1, 3), (511, 1, 15), (300, 0, 1)] {
                assert_eq!(
                    behind.byte_at(&[kv, block, token, 5, 77]),
                    before.byte_at(&[block, kv, token, 5, 77]),
                    "{layout}"
                );
            }
        }
    }
}

#[test]
fn strides_in_elements_are_those_of_the_bytes() {
    let pool = pool_spec(
        &gqa(512, vec![2, 512, 16, 8, 128]),
        &choice(Layout::PerLayer),
    );
    let pool = pool.unwrap();
    let view = &pool.views[1];
    assert_eq!((view.layer, view.tensor, view.offset_bytes), (1, 1, 0));
    assert_eq!(view.shape, [2, 512, 16, 8, 128]);
    assert_eq!(view.strides_bytes, [16 << 20, 32768, 2048, 256, 2]);
    assert_eq!(view.strides_elements(), [8 << 20, 16384, 1024, 128, 1]);

    let pool = pool_spec(
        &gqa(512, vec![512, 2, 16, 8, 128]),
        &choice(Layout::Contiguous),
    );
    let view = &pool.unwrap().views[3];
    assert_eq!(
        (view.layer, view.tensor, view.offset_bytes),
        (3, 0, 3 * 65536)
    );
    assert_eq!(view.strides_elements(), [4 * 32768, 16384, 1024, 128, 1]);
}

#[test]
fn mla_has_one_buffer() {
    let pool = VllmPool {
        attention: Attention::Mla { latent_size: 576 },
        tensor_bytes: 100 * 16 * 576 * 2,
        shape: vec![100, 16, 576],
        layers: 61,
        ..gqa(1, vec![])
    };
    let pool = pool_spec(&pool, &choice(Layout::PerLayer)).unwrap();
    assert_eq!(pool.spec.kv_buffers, KvBuffers::One);
    assert_eq!(pool.geometry.extents_per_page(), 61);
    assert!(pool.geometry.blocks() >= 100);
    assert_eq!(pool.views.len(), 61);
    assert_eq!(pool.views[60].strides_elements()[1..], [576, 1]);
}

#[test]
fn a_recurrent_state_is_a_block() {
    let pool = VllmPool {
        attention: Attention::Linear {
            state_bytes: 1 << 20,
        },
        elements: Elements::plain(DType::U8),
        block_tokens: 1,
        tensor_bytes: 64 << 20,
        shape: vec![64, 1 << 20],
        ..gqa(1, vec![])
    };
    let pool = pool_spec(&pool, &choice(Layout::Unified)).unwrap();
    assert_eq!(pool.spec.block_bytes, 1 << 20);
    assert_eq!(pool.views[0].strides_bytes, [1 << 20, 1]);
}

/// The engine pads the blocks of one group to the size of another's.
#[test]
fn a_padded_block_is_the_stride() {
    // 3840 bytes of K and V, padded to 4096.
    let padded = VllmPool {
        attention: Attention::Mha {
            heads: 1,
            head_size: 60,
        },
        padded_block_bytes: Some(4096),
        tensor_bytes: 1000 * 4096,
        shape: vec![1000, 2, 16, 1, 60],
        ..gqa(1, vec![])
    };
    for layout in [Layout::Unified, Layout::PerLayer] {
        let pool = pool_spec(&padded, &choice(layout)).unwrap();
        for (layer, view) in pool.views.iter().enumerate() {
            assert_eq!(view.layer, u32::try_from(layer).unwrap());
            for block in [0, 1, 777, 999] {
                assert_eq!(view.byte_at(&[block, 0, 0, 0, 0]), Some(block * 4096));
                assert_eq!(
                    view.byte_at(&[block, 1, 0, 0, 0]),
                    Some(block * 4096 + 1920)
                );
            }
        }
    }
    let pool = pool_spec(&padded, &choice(Layout::Contiguous)).unwrap();
    assert_eq!(
        pool.views[2].byte_at(&[5, 0, 0, 0, 0]),
        Some((5 * 4 + 2) * 4096)
    );

    let short = VllmPool {
        padded_block_bytes: Some(3839),
        tensor_bytes: 3839,
        ..padded.clone()
    };
    assert!(matches!(
        pool_spec(
            &VllmPool {
                shape: vec![1, 2, 16, 1, 60],
                ..short
            },
            &choice(Layout::Unified)
        ),
        Err(KvError::PaddedTooSmall {
            padded_bytes: 3839,
            block_bytes: 3840
        })
    ));
    let split = VllmPool {
        kernel_block_tokens: Some(8),
        shape: vec![2000, 2, 8, 1, 60],
        ..padded
    };
    assert!(matches!(
        pool_spec(&split, &choice(Layout::Unified)),
        Err(KvError::PaddedSplit { parts: 2, .. })
    ));
}

#[test]
fn bytes_follow_the_storage_type() {
    let fp8 = |storage| VllmPool {
        elements: Elements {
            logical: DType::F8,
            storage,
        },
        tensor_bytes: 512 * 2 * 16384,
        ..gqa(512, vec![2, 512, 16, 8, 128])
    };
    let pool = pool_spec(&fp8(Some(DType::U8)), &choice(Layout::PerLayer)).unwrap();
    assert_eq!(pool.spec.block_bytes, 16384);
    assert_eq!(pool.views[0].element_bytes, 1);
    let plain = pool_spec(&fp8(None), &choice(Layout::PerLayer)).unwrap();
    assert_eq!(plain.spec, pool.spec);
    // A type that a logical name says nothing about: half-precision kept as 32-bit.
    let wide = VllmPool {
        elements: Elements {
            logical: DType::F8,
            storage: Some(DType::F32),
        },
        tensor_bytes: 512 * 2 * 65536,
        ..gqa(512, vec![2, 512, 16, 8, 128])
    };
    let pool = pool_spec(&wide, &choice(Layout::PerLayer)).unwrap();
    assert_eq!(pool.spec.block_bytes, 65536);
}

/// The shape of a cache with a scale behind each head is not that of the model's head.
#[test]
fn a_shape_of_other_bytes_is_an_error() {
    let pool = gqa(512, vec![2, 512, 16, 8, 132]);
    assert_eq!(
        pool_spec(&pool, &choice(Layout::PerLayer)),
        Err(KvError::ShapeDisagrees {
            shape: pool.shape,
            shape_bytes: 16 * 8 * 132 * 2,
            block_bytes: 32768,
        })
    );
}

#[test]
fn a_kernel_that_splits_blocks_sees_each_part() {
    for layout in Layout::ALL {
        let split = VllmPool {
            kernel_block_tokens: Some(4),
            ..gqa(512, vec![2, 2048, 4, 8, 128])
        };
        let pool = pool_spec(&split, &choice(layout)).unwrap();
        let pages = pool.geometry.blocks_in(kvcached_mapper::PageId(1));
        let unit = pool.geometry.block_stride_bytes();
        for view in &pool.views {
            // All four parts of a block of page 1 lie where the page is backed.
            for part in u64::from(pages.start) * 4..u64::from(pages.end) * 4 {
                let key = view.byte_at(&[0, part, 0, 0, 0]).unwrap();
                let last = view.byte_at(&[0, part, 3, 7, 127]).unwrap();
                let block = part / 4 * unit;
                assert!(key >= block && last < block + unit, "{layout}: part {part}");
            }
        }
    }
}

#[test]
fn sizes_of_zero_and_sizes_that_do_not_divide_are_errors() {
    let good = gqa(512, vec![2, 512, 16, 8, 128]);
    let with = |change: fn(&mut VllmPool)| {
        let mut pool = good.clone();
        change(&mut pool);
        pool_spec(&pool, &choice(Layout::PerLayer)).unwrap_err()
    };
    let zero = |what| KvError::Zero { what };
    assert_eq!(with(|p| p.layers = 0), zero("layers"));
    assert_eq!(with(|p| p.block_tokens = 0), zero("tokens per block"));
    assert_eq!(
        with(|p| p.kernel_block_tokens = Some(0)),
        zero("tokens per kernel block")
    );
    assert_eq!(with(|p| p.tensor_bytes = 0), zero("tensor size"));
    assert_eq!(
        with(|p| p.padded_block_bytes = Some(0)),
        zero("padded block size")
    );
    assert_eq!(
        with(|p| p.attention = Attention::Gqa {
            kv_heads: 0,
            head_size: 128
        }),
        zero("heads")
    );
    assert_eq!(
        with(|p| p.attention = Attention::Mha {
            heads: 8,
            head_size: 0
        }),
        zero("head size")
    );
    assert_eq!(
        with(|p| p.attention = Attention::Linear { state_bytes: 0 }),
        zero("state bytes")
    );
    assert_eq!(
        with(|p| p.tensor_bytes += 1),
        KvError::NotMultiple {
            what: "tensor size",
            value: 512 * 65536 + 1,
            of: 65536
        }
    );
    assert_eq!(
        with(|p| p.kernel_block_tokens = Some(5)),
        KvError::NotMultiple {
            what: "tokens per block",
            value: 16,
            of: 5
        }
    );
    assert_eq!(
        with(|p| p.attention = Attention::Linear { state_bytes: 3 }),
        KvError::NotMultiple {
            what: "state bytes",
            value: 3,
            of: 2
        }
    );
    assert_eq!(
        with(|p| p.attention = Attention::Mha {
            heads: u32::MAX,
            head_size: u32::MAX
        }),
        KvError::Overflow { what: "block size" }
    );
    assert!(matches!(
        with(|p| p.shape = vec![]),
        KvError::NoBlockDimension { .. }
    ));
    assert!(matches!(
        with(|p| p.shape = vec![2, 511, 16, 8, 128]),
        KvError::NoBlockDimension { blocks: 512, .. }
    ));
    let two = gqa(2, vec![2, 2, 16, 8, 128]);
    assert!(matches!(
        pool_spec(&two, &choice(Layout::PerLayer)),
        Err(KvError::AmbiguousShape { .. })
    ));
}

proptest! {
    /// Distinct elements of all views are distinct bytes, inside the blocks that own them.
    #[test]
    fn no_two_elements_of_the_views_share_a_byte(
        layout in prop::sample::select(Layout::ALL.to_vec()),
        behind: bool,
        mla: bool,
        split in prop::sample::select(vec![1u64, 2, 4]),
        padding in prop::sample::select(vec![0u64, 0, 64, 512]),
        heads in 1u32..5,
        head_size in prop::sample::select(vec![8u32, 24, 64]),
        blocks in 3u64..9,
    ) {
        let attention = match mla {
            true => Attention::Mla { latent_size: head_size },
            false => Attention::Gqa { kv_heads: heads, head_size },
        };
        let elements = Elements::plain(DType::F16);
        let block_bytes = attention.block_bytes(4, elements).unwrap();
        let buffers = u64::from(attention.kv_buffers().count());
        let joint = block_bytes * buffers + padding;
        let tokens = 4 / split;
        let parts = blocks * split;
        let inner = match mla {
            true => vec![tokens, u64::from(head_size)],
            false => vec![tokens, u64::from(heads), u64::from(head_size)],
        };
        let lead = match (mla, behind) {
            (true, _) => vec![parts],
            (false, true) => vec![2, parts],
            (false, false) => vec![parts, 2],
        };
        let pool = VllmPool {
            layers: 2,
            attention,
            elements,
            block_tokens: 4,
            kernel_block_tokens: Some(u32::try_from(tokens).unwrap()),
            tensor_bytes: joint * blocks,
            padded_block_bytes: (padding > 0).then_some(joint),
            shape: [lead.clone(), inner.clone()].concat(),
        };
        let choice =
            LayoutChoice { layout, page_size: PageSize::Auto, granularity: 4096 };
        let laid_out = match pool_spec(&pool, &choice) {
            // The one thing that may be in the way of these sizes.
            Err(KvError::PaddedSplit { .. }) => {
                prop_assert!(split > 1);
                return Ok(());
            }
            other => other.unwrap(),
        };
        prop_assert!(u64::from(laid_out.geometry.blocks()) >= blocks);
        let mut seen = std::collections::HashSet::new();
        for view in &laid_out.views {
            prop_assert!(u64::from(view.tensor) < u64::from(laid_out.geometry.tensors()));
            let mut indices = vec![vec![]];
            for (dimension, &reported) in pool.shape.iter().enumerate() {
                prop_assert!(view.shape[dimension] >= reported);
                indices = indices
                    .into_iter()
                    .flat_map(|index: Vec<u64>| {
                        (0..reported).map(move |i| [index.clone(), vec![i]].concat())
                    })
                    .collect();
            }
            for index in indices {
                let byte = view.byte_at(&index).unwrap();
                prop_assert!(byte + view.element_bytes <= laid_out.geometry.tensor_bytes());
                prop_assert!(seen.insert((view.tensor, byte / 2)), "{index:?}");
                prop_assert_eq!(byte % 2, 0);
                // The page that backs the element is the page of its block.
                let part = index[if mla || !behind { 0 } else { 1 }];
                let block = u32::try_from(part / split).unwrap();
                let page = laid_out.geometry.page_of(block).unwrap();
                let run = kvcached_mapper::PageRun::single(page).unwrap();
                let backed = laid_out.geometry.extents(run).any(|extent| {
                    extent.tensor == view.tensor
                        && (extent.offset..extent.offset + extent.len).contains(&byte)
                });
                prop_assert!(backed, "{index:?} lies outside its block's page");
            }
        }
    }
}

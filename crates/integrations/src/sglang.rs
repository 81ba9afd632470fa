//! SGLang: every rank runs a scheduler of its own, so every rank is autonomous.
//!
//! Messages between its ranks would map each page twice. An operator may still ask for another
//! topology, for a fork that has one scheduler in rank 0.

use std::ops::Range;

use crate::detect::{
    DetectError, Detected, Nature, RankReport, TopologyMode, World, assign, check,
};
use crate::kv::{
    Attention, Block, Elements, EnginePool, KvError, KvView, LayerPlace, LayoutChoice,
    dense_strides, lay_out, multiple, nonzero,
};

/// What an SGLang process reports about itself.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SglangReport {
    /// Sizes and ranks. `is_worker` is for engines with one scheduler in rank 0: here every rank
    /// has its own, and it is not set.
    pub ranks: RankReport,
}

/// What SGLang says about one KV pool of one stage.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SglangPool {
    /// Layers of this stage: its first one up to, and without, its end.
    pub layers: Range<u32>,
    /// What a token, or a state slot, leaves behind on this rank.
    pub attention: Attention,
    /// `dtype` and `store_dtype`: 8-bit floats are stored as bytes.
    pub elements: Elements,
    /// Tokens, or state slots, of the pool.
    pub size: u64,
    /// Tokens of one block (`page_size`); 1 for state slots.
    pub page_tokens: u32,
}

/// The part that an SGLang process plays; `asked` is what an operator wants instead.
///
/// # Errors
/// [`DetectError`] for a report that contradicts itself or what was asked for.
pub fn detect(report: &SglangReport, asked: Option<TopologyMode>) -> Result<Detected, DetectError> {
    let checked = check(&report.ranks)?;
    let nature = Nature {
        engine: "sglang",
        own_scheduler: checked.is_worker != Some(true),
        coordinator_separate: None,
    };
    let one = checked.world == World { tp: 1, stages: 1 };
    let own = if one {
        TopologyMode::Single
    } else {
        TopologyMode::Autonomous
    };
    assign(&checked, nature, asked.unwrap_or(own))
}

/// Lays a pool out for SGLang: one view per layer and buffer, `[token, head, element]` or
/// `[slot, byte]`, K before V.
///
/// # Errors
/// [`KvError`] for sizes that are zero, do not divide, or cannot be laid out.
pub fn pool_spec(pool: &SglangPool, choice: &LayoutChoice) -> Result<EnginePool, KvError> {
    let page_tokens = nonzero(u64::from(pool.page_tokens), "page size in tokens")?;
    let blocks =
        multiple(nonzero(pool.size, "pool size")?, page_tokens, "pool size")? / page_tokens;
    let block = Block {
        buffers: pool.attention.kv_buffers(),
        bytes: pool
            .attention
            .block_bytes(pool.page_tokens, pool.elements)?,
        padded_bytes: None,
        parts: page_tokens,
    };
    let layers = pool.layers.end.saturating_sub(pool.layers.start);
    let (spec, geometry, places) = lay_out(choice, layers, block, blocks)?;

    let element_bytes = pool.elements.bytes();
    let row = match pool.attention {
        Attention::Mha { heads, head_size } => vec![u64::from(heads), u64::from(head_size)],
        Attention::Gqa {
            kv_heads,
            head_size,
        } => vec![u64::from(kv_heads), u64::from(head_size)],
        Attention::Mla { latent_size } => vec![1, u64::from(latent_size)],
        Attention::Linear { state_bytes } => vec![state_bytes / element_bytes],
    };
    let rows = u64::from(geometry.blocks()) * page_tokens;
    let view = |place: LayerPlace, offset_bytes: u64| {
        let shape = [vec![rows], row.clone()].concat();
        let strides = [
            vec![place.part_stride_bytes],
            dense_strides(&row, element_bytes),
        ]
        .concat();
        KvView::new(
            LayerPlace {
                offset_bytes,
                ..place
            },
            element_bytes,
            shape,
            strides,
        )
    };
    let mut views = Vec::new();
    for place in places {
        views.push(view(place, place.offset_bytes)?);
        if let Some(value_stride) = place.value_stride_bytes {
            views.push(view(place, place.offset_bytes + value_stride)?);
        }
    }
    Ok(EnginePool {
        spec,
        geometry,
        views,
    })
}

#[cfg(test)]
mod tests {
    use kvcached_mapper::{KvBuffers, Layout, PageSize, Rank, Stage};

    use super::*;
    use crate::detect::{Arrangement, Dimension, Role};
    use crate::kv::DType;

    fn report(tp: u32, rank: u32, pp: u32, stage: u32) -> SglangReport {
        SglangReport {
            ranks: RankReport {
                tp_size: Some(tp),
                tp_rank: Some(rank),
                pp_size: Some(pp),
                pp_rank: Some(stage),
                ..RankReport::default()
            },
        }
    }

    fn own(stage: u16, rank: u16) -> Role {
        Role::Coordinator(Arrangement::Autonomous {
            stage: Stage(stage),
            rank: Rank(rank),
        })
    }

    #[test]
    fn every_rank_is_autonomous() {
        let cases = [
            (
                "one GPU",
                report(1, 0, 1, 0),
                Role::Coordinator(Arrangement::Single),
            ),
            ("TP 2, rank 0", report(2, 0, 1, 0), own(0, 0)),
            ("TP 2, rank 1", report(2, 1, 1, 0), own(0, 1)),
            ("TP 1, PP 3, stage 2", report(1, 0, 3, 2), own(2, 0)),
            ("TP 4, PP 2", report(4, 3, 2, 1), own(1, 3)),
        ];
        for (case, report, role) in cases {
            assert_eq!(
                detect(&report, None).map(|detected| detected.role),
                Ok(role),
                "{case}"
            );
        }
        // Nothing is sent, so it does not matter where the others are.
        let mut far = report(4, 3, 1, 0);
        far.ranks.hosts = Some(2);
        assert_eq!(
            detect(&far, None).map(|detected| detected.role),
            Ok(own(0, 3))
        );
    }

    #[test]
    fn rank_0_coordinates_where_an_operator_asks_for_it() {
        let rank0 = Some(TopologyMode::Rank0);
        let role = |report: &SglangReport| detect(report, rank0).map(|detected| detected.role);
        let coordinates = Role::Coordinator(Arrangement::Rank0 { tp: 4 });
        assert_eq!(role(&report(4, 0, 1, 0)), Ok(coordinates));
        let takes_orders = Role::Worker {
            stage: Stage(0),
            rank: Rank(3),
        };
        assert_eq!(role(&report(4, 3, 1, 0)), Ok(takes_orders));
        let mut marked = report(4, 3, 1, 0);
        marked.ranks.is_worker = Some(true);
        assert_eq!(role(&marked), Ok(takes_orders));
        assert_eq!(
            role(&report(4, 3, 2, 0)),
            Err(DetectError::StagesUnderRank0 { stages: 2 })
        );
        let mut unknown = report(4, 0, 1, 0);
        unknown.ranks.tp_rank = None;
        assert_eq!(
            role(&unknown),
            Err(DetectError::RankUnknown {
                who: "process",
                size: Dimension::TensorParallel,
                value: 4,
            })
        );
    }

    #[test]
    fn a_separate_coordinator_has_no_place_beside_own_schedulers() {
        let separate = Some(TopologyMode::Separate);
        assert!(matches!(
            detect(&report(2, 1, 1, 0), separate),
            Err(DetectError::ModeContradicted {
                mode: TopologyMode::Separate,
                ..
            })
        ));
        let mut marked = report(2, 1, 1, 0);
        marked.ranks.is_worker = Some(true);
        let takes_orders = Role::Worker {
            stage: Stage(0),
            rank: Rank(1),
        };
        assert_eq!(
            detect(&marked, separate).map(|detected| detected.role),
            Ok(takes_orders)
        );
        assert!(detect(&report(2, 1, 1, 0), Some(TopologyMode::Single)).is_err());
    }

    #[test]
    fn nothing_reported_is_one_gpu() {
        let nothing = SglangReport::default();
        let (detected, lines) = crate::testing::logged(|| detect(&nothing, None).unwrap());
        assert_eq!(detected.role, Role::Coordinator(Arrangement::Single));
        assert!(detected.fell_back);
        assert!(
            lines
                .iter()
                .any(|line| line.contains("DEBUG") && line.contains("single GPU"))
        );
    }

    #[test]
    fn a_rank_that_cannot_be_is_an_error() {
        let size = Dimension::TensorParallel;
        assert_eq!(
            detect(&report(2, 2, 1, 0), None),
            Err(DetectError::RankOutsideSize {
                size,
                rank: 2,
                value: 2
            })
        );
        assert_eq!(
            detect(&report(0, 0, 1, 0), None),
            Err(DetectError::ZeroSize { size })
        );
        let mut unknown = report(2, 0, 1, 0);
        unknown.ranks.tp_rank = None;
        assert_eq!(
            detect(&unknown, None),
            Err(DetectError::RankUnknown {
                who: "rank with a scheduler",
                size,
                value: 2
            })
        );
    }

    fn pool() -> SglangPool {
        SglangPool {
            layers: 8..12,
            attention: Attention::Gqa {
                kv_heads: 8,
                head_size: 128,
            },
            elements: Elements {
                logical: DType::F8,
                storage: Some(DType::U8),
            },
            size: 65536,
            page_tokens: 16,
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
    fn tokens_lie_at_one_stride_in_every_layout() {
        for layout in Layout::ALL {
            let pool = pool_spec(&pool(), &choice(layout)).unwrap();
            assert_eq!(
                pool.spec.block_bytes,
                16 * 8 * 128,
                "bytes of the storage type"
            );
            assert_eq!(pool.spec.kv_buffers, KvBuffers::Two);
            assert_eq!(pool.views.len(), 8, "K and V of each layer");
            let unit = pool.geometry.block_stride_bytes();
            for view in &pool.views {
                assert!(view.shape[0] >= 65536);
                assert_eq!(view.shape[1..], [8, 128]);
                for token in [0, 15, 16, 65535] {
                    let byte = view.byte_at(&[token, 0, 0]).unwrap();
                    let inside = byte
                        - if layout == Layout::PerLayer {
                            view.offset_bytes
                        } else {
                            0
                        };
                    assert_eq!(
                        inside / unit,
                        token / 16,
                        "{layout}: the block of token {token}"
                    );
                }
            }
        }
    }

    #[test]
    fn layers_of_a_stage_are_counted_without_the_end() {
        let stages = [0..27, 27..54, 54..80];
        let layers = stages.map(|layers| {
            let pool = SglangPool { layers, ..pool() };
            pool_spec(&pool, &choice(Layout::PerLayer))
                .unwrap()
                .spec
                .layers
        });
        assert_eq!(layers, [27, 27, 26]);
    }

    #[test]
    fn states_are_blocks() {
        let states = SglangPool {
            attention: Attention::Linear {
                state_bytes: 1 << 20,
            },
            elements: Elements::plain(DType::U8),
            size: 64,
            page_tokens: 1,
            ..pool()
        };
        let pool = pool_spec(&states, &choice(Layout::Unified)).unwrap();
        assert_eq!(pool.views[0].shape, [64, 1 << 20]);
        assert_eq!(pool.views.len(), 4);
        let latent = SglangPool {
            attention: Attention::Mla { latent_size: 576 },
            ..states
        };
        let pool = pool_spec(&latent, &choice(Layout::PerLayer)).unwrap();
        assert_eq!(pool.views[0].shape[1..], [1, 576]);
    }

    #[test]
    fn sizes_of_zero_and_sizes_that_do_not_divide_are_errors() {
        let with = |change: fn(&mut SglangPool)| {
            let mut pool = pool();
            change(&mut pool);
            pool_spec(&pool, &choice(Layout::PerLayer)).unwrap_err()
        };
        let zero = |what| KvError::Zero { what };
        assert_eq!(with(|p| p.layers = 12..12), zero("layers"));
        assert_eq!(with(|p| p.size = 0), zero("pool size"));
        assert_eq!(with(|p| p.page_tokens = 0), zero("page size in tokens"));
        assert_eq!(
            with(|p| p.size += 1),
            KvError::NotMultiple {
                what: "pool size",
                value: 65537,
                of: 16
            }
        );
        // 61 layers of a latent fill no reasonable page without padding behind each block, and so
        // tokens lie at no common stride.
        let latent = SglangPool {
            attention: Attention::Mla { latent_size: 576 },
            layers: 0..61,
            ..pool()
        };
        assert!(matches!(
            pool_spec(&latent, &choice(Layout::Contiguous)),
            Err(KvError::PaddedSplit { parts: 16, .. })
        ));
        assert!(pool_spec(&latent, &choice(Layout::PerLayer)).is_ok());
    }
}

use super::*;

#[test]
fn names_of_element_types_are_known() {
    for (word, dtype) in [
        ("torch.bfloat16", DType::Bf16),
        ("half", DType::F16),
        ("float32", DType::F32),
        ("fp8_e4m3", DType::F8),
        ("torch.float8_e5m2", DType::F8),
        ("uint8", DType::U8),
        ("int8", DType::I8),
    ] {
        assert_eq!(word.parse(), Ok(dtype), "{word}");
        assert_eq!(dtype.to_string().parse(), Ok(dtype));
    }
    for word in ["", "auto", "torch.", "int4", "BFLOAT16"] {
        assert_eq!(
            word.parse::<DType>(),
            Err(UnknownDType {
                word: word.to_owned()
            })
        );
    }
}

#[test]
fn heads_are_shared_or_copied() {
    assert_eq!(kv_heads_per_rank(8, 1), Ok(8));
    assert_eq!(kv_heads_per_rank(8, 4), Ok(2));
    assert_eq!(kv_heads_per_rank(8, 16), Ok(1));
    assert_eq!(
        kv_heads_per_rank(8, 3),
        Err(KvError::NotMultiple {
            what: "KV heads",
            value: 8,
            of: 3
        })
    );
    assert_eq!(
        kv_heads_per_rank(0, 3),
        Err(KvError::Zero { what: "KV heads" })
    );
    assert_eq!(
        kv_heads_per_rank(8, 0),
        Err(KvError::Zero {
            what: "tensor-parallel size"
        })
    );
}

#[test]
fn an_index_outside_the_view_has_no_byte() {
    let place = LayerPlace {
        layer: 0,
        tensor: 0,
        offset_bytes: 64,
        part_stride_bytes: 128,
        value_stride_bytes: None,
    };
    let view = KvView::new(place, 2, vec![3, 8], vec![128, 2]).unwrap();
    assert_eq!(view.byte_at(&[2, 7]), Some(64 + 256 + 14));
    assert_eq!(view.byte_at(&[3, 0]), None);
    assert_eq!(view.byte_at(&[0]), None);
    assert_eq!(
        KvView::new(place, 2, vec![3, 8], vec![129, 2]),
        Err(KvError::NotWholeElements {
            bytes: 129,
            element_bytes: 2
        })
    );
}

#[test]
fn every_block_that_the_engine_counts_on_is_there() {
    let block = Block {
        buffers: KvBuffers::Two,
        bytes: 3 << 10,
        padded_bytes: None,
        parts: 1,
    };
    for layout in Layout::ALL {
        for blocks in [1, 5, 683, 10_000] {
            let choice = LayoutChoice {
                layout,
                page_size: PageSize::Auto,
                granularity: 2 << 20,
            };
            let (spec, geometry, _) = lay_out(&choice, 3, block, blocks).unwrap();
            assert!(
                u64::from(geometry.blocks()) >= blocks,
                "{layout}, {blocks} blocks"
            );
            assert_eq!(spec.resolve(2 << 20), Ok(geometry.clone()));
            assert_eq!(spec.capacity_bytes, geometry.virtual_bytes());
        }
    }
}

//! The CUDA driver: what it says where there is no device, and the suite where there is one.
//!
//! `cargo test -p kvcached-vmm --features cuda --test cuda -- --ignored` on a machine with a GPU.
#![cfg(feature = "cuda")]

use std::sync::Arc;

use kvcached_vmm::{Access, Chunk, Cuda, Driver, Reservation, VmmError, conformance};

#[test]
fn without_a_device_the_answer_is_an_error_that_says_what_is_missing() {
    match Cuda::new(0) {
        Err(VmmError::Unavailable { reason }) => {
            let says = [
                "libcuda",
                "sees no device",
                "does not start",
                "has no",
                "gives no context",
            ];
            assert!(says.iter().any(|words| reason.contains(words)), "{reason}");
        }
        Err(error) => panic!("a missing device is not {error:?}"),
        Ok(cuda) => eprintln!("skipped: there is a device here, {}", cuda.name()),
    }
}

#[test]
#[ignore = "needs a GPU"]
fn an_ordinal_that_is_too_large_is_an_error_that_names_both_numbers() {
    let Err(VmmError::Unavailable { reason }) = Cuda::new(4096) else {
        panic!("there are no 4097 devices");
    };
    assert!(reason.contains("4096"), "{reason}");
}

#[test]
#[ignore = "needs a GPU"]
fn cuda_keeps_the_contract_and_its_bytes() {
    let cuda = Arc::new(Cuda::new(0).expect("there is a GPU"));
    eprintln!(
        "{} {:02x?} {:?}",
        cuda.name(),
        cuda.uuid(),
        cuda.properties()
    );
    conformance::contract(&cuda);
    conformance::content(&cuda);
}

#[test]
#[ignore = "needs a GPU"]
fn a_full_device_is_an_answer_after_which_everything_goes_on() {
    let cuda = Arc::new(Cuda::new(0).expect("there is a GPU"));
    let g = cuda.properties().granularity;
    let len = (cuda.memory().expect("it answers").total / 8 / g).max(1) * g;
    let mut held = Vec::new();
    let full = loop {
        match Chunk::create(&cuda, len) {
            Ok(chunk) => held.push(Arc::new(chunk)),
            Err(error) => break error,
        }
        assert!(held.len() <= 8, "a device has more than its total");
    };
    assert_eq!(full, VmmError::OutOfMemory { requested: len });

    let mut range = Reservation::new(Arc::clone(&cuda), len).expect("addresses suffice");
    let last = held.pop().expect("an eighth fits");
    range
        .map(0, last, Access::ReadWrite)
        .expect("the place is free");
    range.write(0, b"still here").expect("it is mapped");
    drop((range, held));
    assert!(Chunk::create(&cuda, len).is_ok());
}

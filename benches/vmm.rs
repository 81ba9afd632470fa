//! Primitives of `Host`, which stands in for a device in everything that runs without one: what
//! a page costs there, and what a budget that processes share adds to it.

use std::hint::black_box;
use std::sync::Arc;

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use kvcached_vmm::{Access, Budget, Bytes, Capped, Chunk, Driver, Host, HostConfig, Reservation};

const GRANULE: u64 = 2 << 20;
const TOTAL: u64 = 1 << 30;

fn host() -> Host {
    Host::new(HostConfig::new(TOTAL)).expect("the machine gives memory")
}

/// One chunk's whole life, in a reservation that is there already.
fn cycle<D: Driver>(range: &mut Reservation<D>, len: u64) {
    let chunk = Chunk::create(range.driver(), len).expect("the device is empty");
    range
        .map(0, Arc::new(chunk), Access::ReadWrite)
        .expect("the place is free");
    drop(range.unmap(black_box(0)).expect("it is mapped"));
}

fn chunk_cycle(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("vmm/create_map_unmap_destroy");
    let budget = Budget::private(TOTAL);
    let dir = tempfile::tempdir().expect("there is a place for files");
    let shared = Budget::create(&dir.path().join("budget"), TOTAL).expect("the file is new");
    for granules in [1, 16] {
        let len = granules * GRANULE;
        let mut range = Reservation::new(Arc::new(host()), len).expect("addresses suffice");
        group.bench_function(BenchmarkId::new("host", granules), |bencher| {
            bencher.iter(|| cycle(&mut range, len));
        });
        for (name, budget) in [("capped_private", &budget), ("capped_shared", &shared)] {
            let device = Arc::new(Capped::new(host(), budget.clone()));
            let mut range = Reservation::new(device, len).expect("addresses suffice");
            group.bench_function(BenchmarkId::new(name, granules), |bencher| {
                bencher.iter(|| cycle(&mut range, len));
            });
        }
    }
    group.finish();
}

fn reservation(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("vmm/reserve_release");
    let device = Arc::new(host());
    for bytes in [1_u64 << 30, 1 << 40] {
        group.bench_function(BenchmarkId::new("host", bytes), |bencher| {
            bencher.iter(|| Reservation::new(Arc::clone(&device), black_box(bytes)));
        });
    }
    group.finish();
}

/// What the content oracle of a replay does for each block.
fn stamp(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("vmm/content");
    let device = host();
    let range = device.reserve(GRANULE).expect("addresses suffice");
    let chunk = device.create(GRANULE).expect("the device is empty");
    device
        .map(&range, 0, &chunk, Access::ReadWrite)
        .expect("the place is free");
    let mut word = [7; 16];
    group.bench_function("write_16", |bencher| {
        bencher.iter(|| device.write(&range, black_box(4096), &word));
    });
    group.bench_function("read_16", |bencher| {
        bencher.iter(|| device.read(&range, black_box(4096), &mut word));
    });
    group.finish();
    device.unmap(&range, 0, GRANULE).expect("it is mapped");
    device.destroy(chunk).expect("it is mapped nowhere");
    device.release(range).expect("nothing is mapped");
}

criterion_group!(benches, chunk_cycle, reservation, stamp);
criterion_main!(benches);

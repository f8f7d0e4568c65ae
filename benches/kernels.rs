//! Every case of the table (`wgpu_attention::bench::CASES`) that suits the adapter which the environment names, by criterion.
//!
//! `cargo bench --bench kernels [-- PART_OF_A_NAME]`. Time is the GPU's own where its clock can be believed, else the wall's;
//! throughput counts operations (`Gelem/s` are GFLOP/s), of `decode` cases bytes. A case is held against the reference before it
//! is measured, and a wrong one ends the run. `wgpu-attention bench` measures the same table without criterion, and
//! says what share of the adapter's peaks each case reaches.
#![allow(clippy::panic)] // A bench may end so.

use criterion::{Criterion, Throughput};
use std::time::Duration;
use wgpu_attention::bench::{
    Case, MeasureOptions, PrepareOptions, Prepared, Stopwatch, measure, select,
};
use wgpu_attention::{Error, Gpu, Result, wgpu};

/// A case that is ready, and whether the GPU's clock can be believed of it.
struct Ready {
    prepared: Prepared,
    watch: Stopwatch,
    by_gpu: bool,
}

impl Ready {
    fn new(gpu: &Gpu, case: &Case) -> Result<Self> {
        let prepared = Prepared::new(gpu, &case.work, &PrepareOptions::suited(gpu, None))?;
        let check = prepared.check()?;
        assert!(check.passed(), "{} is wrong: {check}", case.work.name());
        let mut options = MeasureOptions::default();
        (options.samples, options.budget) = (5, Duration::from_millis(200));
        let measured = measure(gpu, &options, &mut prepared.recorder())?;
        if let Err(reason) = &measured.gpu {
            println!("{}: wall time, since {reason}", case.work.name());
        }
        Ok(Ready {
            by_gpu: measured.gpu.is_ok(),
            watch: Stopwatch::new(gpu)?,
            prepared,
        })
    }

    fn time(&mut self, calls: u64) -> Duration {
        let mut record = self.prepared.recorder();
        match self.watch.time(calls, self.by_gpu, &mut record) {
            Ok(time) => time,
            Err(error) => panic!("{}: {error}", self.prepared.work().name()),
        }
    }
}

fn main() {
    let gpu = match Gpu::open_blocking(&Default::default()) {
        Ok(gpu) => gpu,
        Err(error) => panic!("{error}"),
    };
    println!("{}", gpu.describe());
    let software = gpu.adapter_info().device_type == wgpu::DeviceType::Cpu;
    let (cases, left_out) = select(&[], false, software);
    for case in left_out {
        println!("{}: left out, a GPU's size", case.work.name());
    }
    let mut criterion = Criterion::default()
        .sample_size(10)
        .warm_up_time(Duration::from_millis(500))
        .measurement_time(Duration::from_secs(2))
        .configure_from_args();
    for case in cases {
        bench(&mut criterion, &gpu, case);
    }
    criterion.final_summary();
}

fn bench(criterion: &mut Criterion, gpu: &Gpu, case: &Case) {
    let mut group = criterion.benchmark_group(case.work.kind());
    group.throughput(match case.work.moves_memory() {
        true => Throughput::Bytes(case.work.bytes()),
        false => Throughput::Elements(case.work.flops()),
    });
    // Made by the first call: one that is not chosen is not made.
    let mut ready = None;
    group.bench_function(case.work.name(), |bencher| {
        let ready = ready.get_or_insert_with(|| Ready::new(gpu, case));
        match ready {
            Ok(ready) => bencher.iter_custom(|calls| ready.time(calls)),
            // An adapter may be too small for it; anything else is a fault.
            Err(error @ (Error::LimitExceeded { .. } | Error::OutOfMemory { .. })) => {
                println!("{}: does not fit: {error}", case.work.name());
                bencher.iter(|| ());
            }
            Err(error) => panic!("{}: {error}", case.work.name()),
        }
    });
    group.finish();
}

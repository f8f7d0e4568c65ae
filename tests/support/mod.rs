//! What the GPU tests share: the adapter under test, random numbers, outputs that notice stray writes.
// Each test file uses a part of it; `pub` is what a test file sees.
#![allow(dead_code, unreachable_pub)]

pub mod check;

use std::sync::{Mutex, OnceLock};
use wgpu_attention::{ElementType, Gpu, GpuOptions, Tensor, wgpu};

/// The adapter under test, chosen by `WGPU_BACKEND` and `WGPU_ADAPTER_NAME`; one for the whole process.
///
/// Without one a test must return, which is said loudly, and is a failure where
/// `WGPU_ATTENTION_REQUIRE_GPU=1`.
pub fn gpu() -> Option<Gpu> {
    static GPU: OnceLock<Mutex<Option<Gpu>>> = OnceLock::new();
    let shared = GPU.get_or_init(|| Mutex::new(open(&GpuOptions::default())));
    shared.lock().expect("no test panics while opening").clone()
}

/// A `Gpu` of its own, for tests about devices.
pub fn open(options: &GpuOptions) -> Option<Gpu> {
    match Gpu::open_blocking(options) {
        Ok(gpu) => Some(gpu),
        Err(error) => {
            let required =
                std::env::var("WGPU_ATTENTION_REQUIRE_GPU").is_ok_and(|value| value == "1");
            assert!(!required, "WGPU_ATTENTION_REQUIRE_GPU=1, but {error}");
            eprintln!("\n*** NOT TESTED ON A GPU: {error} ***\n");
            None
        }
    }
}

/// Numbers that look random and are the same every time (a 64-bit linear congruential generator, top bits).
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x1234_5678_9abc_def0);
        random.next();
        random
    }

    fn next(&mut self) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        self.0 >> 33
    }

    /// Roughly normal with mean 0 and deviation 1: the sum of 12 uniform numbers, less 6.
    pub fn normal(&mut self) -> f32 {
        let sum: f64 = (0..12)
            .map(|_| self.next() as f64 / (1u64 << 31) as f64)
            .sum();
        (sum - 6.0) as f32
    }

    pub fn normals(&mut self, count: usize) -> Vec<f32> {
        (0..count).map(|_| self.normal()).collect()
    }

    /// One of `0..end`.
    pub fn below(&mut self, end: usize) -> usize {
        (self.next() % end as u64) as usize
    }

    pub fn bools(&mut self, count: usize) -> Vec<bool> {
        (0..count).map(|_| self.next() & 1 == 1).collect()
    }
}

/// Elements in front of and behind a guarded output. It begins where eight elements can be read at once, as most callers' do; layouts that
/// begin elsewhere are cases of their own.
const GUARD: usize = 80;
/// What lies there: a NaN that no kernel makes, in f32 and in both halves of a word.
pub const SENTINEL: u32 = 0x7fc1_7fc1;

/// An output inside a larger buffer: poisoned with NaN, with sentinels in front of and behind it.
pub struct Guarded {
    pub tensor: Tensor,
    whole: Tensor,
}

impl Guarded {
    /// Of f32.
    pub fn new(gpu: &Gpu, shape: &[usize]) -> Self {
        Self::typed(gpu, shape, ElementType::F32)
    }

    pub fn typed(gpu: &Gpu, shape: &[usize], element_type: ElementType) -> Self {
        let elements = shape.iter().product::<usize>() as u64;
        let count = (elements * element_type.size()).div_ceil(4) as usize;
        let all = vec![f32::from_bits(SENTINEL); count + 2 * GUARD];
        let whole = Tensor::from_slice(gpu, &[all.len()], &all).expect("a guarded output");
        let tensor = Tensor::from_buffer(
            gpu,
            whole.buffer().clone(),
            4 * GUARD as u64,
            shape,
            element_type,
        )
        .expect("a guarded output");
        Guarded { tensor, whole }
    }

    /// An f32 output, once nothing beside it was written and every element of it was.
    pub fn read(&self) -> Result<Vec<f32>, String> {
        let all: Vec<f32> = self
            .whole
            .read_blocking()
            .map_err(|error| error.to_string())?;
        let untouched = |value: &f32| value.to_bits() == SENTINEL;
        let end = all.len() - GUARD;
        let inside = &all[GUARD..end];
        let beside = all[..GUARD].iter().chain(&all[end..]);
        let strays = beside.filter(|value| !untouched(value)).count();
        if strays > 0 {
            return Err(format!("{strays} elements beside the output were written"));
        }
        if let Some(at) = inside.iter().position(untouched) {
            return Err(format!("element {at} of {} was not written", inside.len()));
        }
        Ok(inside.to_vec())
    }

    /// Every element inside, written or not, with its bits, once nothing beside them was written.
    pub fn bits(&self, element_type: ElementType) -> Result<Vec<(u32, f32)>, String> {
        let all: Vec<f32> = self
            .whole
            .read_blocking()
            .map_err(|error| error.to_string())?;
        let end = all.len() - GUARD;
        let mut beside = all[..GUARD].iter().chain(&all[end..]);
        if beside.any(|value| value.to_bits() != SENTINEL) {
            return Err("elements beside the output were written".into());
        }
        let words = all[GUARD..end].iter().map(|value| value.to_bits());
        let halves = |word: u32| [word & 0xffff, word >> 16];
        Ok(match element_type {
            ElementType::F16 => words
                .flat_map(halves)
                .map(|bits| (bits, half::f16::from_bits(bits as u16).to_f32()))
                .collect(),
            ElementType::BF16 => words
                .flat_map(halves)
                .map(|bits| (bits, half::bf16::from_bits(bits as u16).to_f32()))
                .collect(),
            _ => words.map(|bits| (bits, f32::from_bits(bits))).collect(),
        })
    }
}

/// Fills memory of the given size with NaN and gives it back, so that what is allocated next may be that memory.
pub fn leave_dirt(gpu: &Gpu, elements: usize) {
    for _ in 0..3 {
        let dirt = Tensor::from_slice(gpu, &[elements.max(1)], &vec![f32::NAN; elements.max(1)])
            .expect("dirt");
        let _ = dirt.read_blocking::<f32>();
    }
}

/// Runs what `record` records, and waits.
pub fn run(gpu: &Gpu, record: impl FnOnce(&mut wgpu::CommandEncoder)) {
    let mut encoder = gpu.device().create_command_encoder(&Default::default());
    record(&mut encoder);
    let submission = gpu.submit(encoder.finish()).expect("submitted");
    gpu.wait_for(submission).expect("done");
}

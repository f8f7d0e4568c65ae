//! What a whole pass costs: causal attention, the projection and the layer, at the sizes of GPT-2 small.
//!
//! `cargo bench --bench forward [-- WORD...]`, on the adapter that the environment names; words pick the cases whose names
//! hold one of them.
//!
//! Wall time of encoding, submitting and waiting; operands stay on the GPU. The first call is told apart: it compiles what
//! the calls before it did not (with a cold shader cache where the driver has none, or it is switched off:
//! `MESA_SHADER_CACHE_DISABLE=true`). All cases are measured turn and turn about. Nothing is asserted.

use std::time::{Duration, Instant};
use wgpu_attention::{
    Attention, AttentionArguments, AttentionProblem, ElementType, Gpu, GpuOptions, LayerArguments,
    LayerConfig, LayerShape, LayerWeights, Linear, LinearArguments, LinearProblem,
    MultiHeadAttention, Projection, QkvWeights, Result, Tensor, TensorView, wgpu,
};

/// Rounds over all cases: at most so many, at least three, and no more once this time has passed.
const ROUNDS: usize = 30;
const ENOUGH: Duration = Duration::from_secs(45);

const WIDTH: usize = 768;
const HEADS: usize = 12;

struct Case {
    name: String,
    /// Useful operations: a multiply-add is two, causal work is counted once.
    flops: u64,
    encode: Box<Encode>,
    first: Duration,
    samples: Vec<Duration>,
}

fn main() -> std::process::ExitCode {
    match run() {
        Ok(()) => std::process::ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            std::process::ExitCode::FAILURE
        }
    }
}

fn run() -> Result<()> {
    // Cargo adds a word of its own.
    let words: Vec<String> = std::env::args()
        .skip(1)
        .filter(|w| w != "--bench")
        .collect();
    let gpu = Gpu::open_blocking(&GpuOptions::default())?;
    let info = gpu.adapter_info();
    println!(
        "{}, driver {} {}",
        gpu.describe(),
        info.driver,
        info.driver_info
    );
    let mut cases = Vec::new();
    let mut add = |name: String, make: &dyn Fn() -> Result<(u64, Box<Encode>)>| -> Result<()> {
        if !words.is_empty() && !words.iter().any(|word| name.contains(word.as_str())) {
            return Ok(());
        }
        let start = Instant::now();
        let (flops, encode) = make()?;
        call(&gpu, &encode)?;
        cases.push(Case {
            name,
            flops,
            encode,
            first: start.elapsed(),
            samples: Vec::new(),
        });
        Ok(())
    };
    for tokens in [128, 1024, 4096] {
        for (layout, name) in [(Layout::HeadMajor, "head-major"), (Layout::Fused, "q|k|v")] {
            add(
                format!("attention H {HEADS} D 64 T {tokens} {name}"),
                &|| attention(&gpu, tokens, HEADS, 64, layout),
            )?;
        }
    }
    for (heads, head_dim) in [(24, 32), (6, 128), (3, 256)] {
        add(
            format!("attention H {heads} D {head_dim} T 1024 q|k|v"),
            &|| attention(&gpu, 1024, heads, head_dim, Layout::Fused),
        )?;
    }
    for tokens in [128, 1024] {
        add(
            format!("linear {tokens} rows {WIDTH} -> {}", 3 * WIDTH),
            &|| projection(&gpu, tokens, WIDTH, 3 * WIDTH),
        )?;
    }
    for tokens in [128, 1024] {
        add(format!("layer C {WIDTH} H {HEADS} T {tokens}"), &|| {
            layer(&gpu, 1, tokens, WIDTH, WIDTH, HEADS)
        })?;
    }
    add("layer toy (5, 6, 3) -> 18, 2 heads".into(), &|| {
        layer(&gpu, 5, 6, 3, 18, 2)
    })?;

    let start = Instant::now();
    for round in 0..ROUNDS {
        if round >= 3 && start.elapsed() > ENOUGH {
            break;
        }
        for case in &mut cases {
            let start = Instant::now();
            call(&gpu, &case.encode)?;
            case.samples.push(start.elapsed());
        }
    }
    println!(
        "{:<36} {:>10} {:>26} {:>8} {:>6}",
        "", "first, s", "ms, median (p10 .. p90)", "GFLOP/s", "runs"
    );
    for case in &mut cases {
        case.samples.sort_unstable();
        let last = case.samples.len() - 1;
        let at = |tenth: usize| case.samples[tenth * last / 10].as_secs_f64() * 1e3;
        let spread = format!("{:.2} ({:.2} .. {:.2})", at(5), at(1), at(9));
        println!(
            "{:<36} {:>10.2} {spread:>26} {:>8.1} {:>6}",
            case.name,
            case.first.as_secs_f64(),
            case.flops as f64 / at(5) / 1e6,
            last + 1
        );
    }
    Ok(())
}

/// Encodes, submits and waits.
fn call(gpu: &Gpu, encode: &Encode) -> Result<()> {
    let mut encoder = gpu.device().create_command_encoder(&Default::default());
    encode(&mut encoder)?;
    gpu.queue().submit([encoder.finish()]);
    gpu.device()
        .poll(wgpu::PollType::wait_indefinitely())
        .map_err(|error| wgpu_attention::Error::DeviceLost {
            reason: error.to_string(),
        })?;
    Ok(())
}

type Encode = dyn Fn(&mut wgpu::CommandEncoder) -> Result<()>;

#[derive(Clone, Copy)]
enum Layout {
    /// `(H, T, D)`, each of q, k and v by itself.
    HeadMajor,
    /// `(T, 3 * H * D)`, as a fused projection leaves them.
    Fused,
}

fn attention(
    gpu: &Gpu,
    tokens: usize,
    heads: usize,
    head_dim: usize,
    layout: Layout,
) -> Result<(u64, Box<Encode>)> {
    let values = noise(3 * tokens * heads * head_dim);
    let part: Vec<TensorView> = match layout {
        Layout::HeadMajor => {
            let all = Tensor::from_slice(gpu, &[3, heads, tokens, head_dim], &values)?.view();
            let part = |i: usize| all.slice(0, i..i + 1)?.permute(&[0, 2, 1, 3]);
            (0..3).map(part).collect::<Result<_>>()?
        }
        Layout::Fused => {
            let all = Tensor::from_slice(gpu, &[1, tokens, 3 * heads, head_dim], &values)?.view();
            let part = |i: usize| all.slice(2, i * heads..(i + 1) * heads);
            (0..3).map(part).collect::<Result<_>>()?
        }
    };
    let out = Tensor::empty(gpu, &[1, tokens, heads, head_dim], ElementType::F32)?.view();
    let mut problem = AttentionProblem::new(1, heads, tokens, head_dim);
    problem.rules.causal = true;
    let attention = Attention::new(gpu, problem)?;
    Ok((
        attention.plan().flops,
        Box::new(move |encoder| {
            let arguments = AttentionArguments::new(&part[0], &part[1], &part[2], &out);
            attention.encode(encoder, arguments)
        }),
    ))
}

fn projection(gpu: &Gpu, rows: usize, d_in: usize, d_out: usize) -> Result<(u64, Box<Encode>)> {
    let x = Tensor::from_slice(gpu, &[1, rows, d_in], &noise(rows * d_in))?.view();
    let weight = Tensor::from_slice(gpu, &[d_out, d_in], &noise(d_out * d_in))?.view();
    let y = Tensor::empty(gpu, &[1, rows, d_out], ElementType::F32)?.view();
    let linear = Linear::new(
        gpu,
        LinearProblem {
            batch: 1,
            tokens: rows,
            d_in,
            d_out,
            form: None,
            few: None,
        },
    )?;
    Ok((
        linear.plan().flops,
        Box::new(move |encoder| {
            let arguments = LinearArguments {
                x: &x,
                weight: &weight,
                bias: None,
                y: &y,
            };
            linear.encode(encoder, arguments)
        }),
    ))
}

fn layer(
    gpu: &Gpu,
    batch: usize,
    tokens: usize,
    d_in: usize,
    d_out: usize,
    heads: usize,
) -> Result<(u64, Box<Encode>)> {
    let (qkv, output) = (noise(3 * d_in * d_out), noise(d_out * d_out));
    let weights = LayerWeights {
        qkv: QkvWeights::Fused(Projection::new(&qkv)),
        output: Some(Projection::new(&output)),
    };
    let config = LayerConfig::new(d_in, d_out, heads).causal(true);
    let layer = MultiHeadAttention::new(gpu, config, &weights)?;
    let x = Tensor::from_slice(gpu, &[batch, tokens, d_in], &noise(batch * tokens * d_in))?.view();
    let y = Tensor::empty(gpu, &[batch, tokens, d_out], ElementType::F32)?.view();
    let plan = layer.plan(LayerShape::new(batch, tokens))?;
    let flops = plan.steps().iter().map(|(_, step)| step.flops).sum();
    Ok((
        flops,
        Box::new(move |encoder| layer.encode(encoder, &plan, LayerArguments::new(&x, &y))),
    ))
}

/// The same numbers in -0.1..0.1 each time, by a linear congruential generator.
fn noise(count: usize) -> Vec<f32> {
    let mut state = 1u32;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        ((state >> 8) as f32 / (1 << 23) as f32 - 1.0) * 0.1
    };
    (0..count).map(|_| next()).collect()
}

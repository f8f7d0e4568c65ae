//! What a step of decoding costs: attention of one new token to a KV cache, the layer on a cache, and the projections of
//! a few rows, against what the adapter's memory can do.
//!
//! `cargo bench --bench decode -- [--quick] [--json FILE]`, on the adapter that the environment names.
//!
//! Wall time is that of encoding, submitting and waiting; GPU time, where the adapter has timestamps, the sum of the
//! dispatches in runs of their own. What is compared is measured turn and turn about. Nothing is asserted.

use serde_json::{Value, json};
use std::time::{Duration, Instant, SystemTime};
use wgpu_attention::bench::{Bound, Peak, Peaks, Spread, Stopwatch, noise, utc};
use wgpu_attention::{
    AppendArguments, Attention, AttentionArguments, ElementType, Gpu, GpuOptions, KvCache,
    KvCacheConfig, LayerArguments, LayerConfig, LayerShape, LayerWeights, Linear, LinearArguments,
    LinearProblem, MultiHeadAttention, Projection, QkvWeights, Tensor, Timestamps, wgpu,
};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// Tokens that a cache is filled with at once.
const CHUNK: usize = 256;

/// Tokens of a page.
const PAGE: usize = 16;

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
    let options = Options::parse()?;
    let gpu = Gpu::open_blocking(&GpuOptions::default())?;
    let info = gpu.adapter_info();
    println!(
        "{}, driver {} {}",
        gpu.describe(),
        info.driver,
        info.driver_info
    );
    let mut bench = Bench {
        watch: Stopwatch::new(&gpu)?,
        gpu: gpu.clone(),
        scale: options.scale,
        bandwidth: None,
    };
    let memory = bench.memory()?;
    let attention = bench.decode_attention();
    let layer = bench.layer();
    let projections = bench.projections();
    if let Some(path) = &options.json {
        let clock = if gpu.capabilities().timestamps {
            "gpu"
        } else {
            "wall"
        };
        let report = json!({
            "bench": "decode",
            "crate_version": env!("CARGO_PKG_VERSION"),
            "date": utc(SystemTime::now()),
            "adapter": info.name,
            "backend": info.backend.to_string(),
            "device_type": format!("{:?}", info.device_type),
            "driver": info.driver,
            "driver_info": info.driver_info,
            "quick": options.quick,
            "rates_by_clock": clock,
            "memory": memory,
            "attention": attention,
            "layer": layer,
            "projections": projections,
        });
        std::fs::write(path, serde_json::to_string_pretty(&report)? + "\n")
            .map_err(|error| format!("{path}: {error}"))?;
    }
    Ok(())
}

// ---------------------------------------------------------------- what is measured

/// Sizes and repetitions.
#[derive(Clone, Copy)]
struct Scale {
    kv_lens: &'static [usize],
    width: usize,
    heads: usize,
    prompt: usize,
    steps: usize,
    warm_up: usize,
    /// Rounds over all that is compared: at least and at most so many, and no more once this time has passed.
    rounds: (usize, usize, Duration),
}

const FULL: Scale = Scale {
    kv_lens: &[1024, 4096, 16384],
    width: 768,
    heads: 12,
    prompt: 128,
    steps: 64,
    warm_up: 3,
    rounds: (7, 50, Duration::from_secs(30)),
};

const QUICK: Scale = Scale {
    kv_lens: &[64, 256],
    width: 128,
    heads: 2,
    prompt: 16,
    steps: 4,
    warm_up: 1,
    rounds: (2, 3, Duration::from_secs(2)),
};

/// A call to be measured.
struct Case {
    /// What it is, for people and for the file.
    name: String,
    about: Value,
    /// What it has to move to and from memory.
    bytes: u64,
    /// Calls in a round.
    calls: usize,
    /// Records it; or why it cannot be.
    encode: wgpu_attention::Result<Box<Encode>>,
}

type Encode =
    dyn FnMut(&mut wgpu::CommandEncoder, Option<&mut Timestamps>) -> wgpu_attention::Result<()>;

/// In milliseconds, for the file.
fn spread_json(spread: &Spread) -> Value {
    let ms = |seconds: f64| seconds * 1e3;
    json!({
        "p10_ms": ms(spread.p10), "median_ms": ms(spread.median), "p90_ms": ms(spread.p90),
        "samples": spread.samples.len(),
    })
}

/// In milliseconds, for people.
fn spread_text(spread: Option<&Spread>) -> String {
    spread.map_or("-".into(), |own| {
        let [p10, median, p90] = [own.p10, own.median, own.p90].map(|seconds| seconds * 1e3);
        format!("{median:.3} ({p10:.3} .. {p90:.3})")
    })
}

struct Outcome {
    name: String,
    about: Value,
    bytes: u64,
    /// Wall time, and GPU time where there is one; or why there is neither.
    times: std::result::Result<(Spread, Option<Spread>), String>,
}

impl Outcome {
    /// By the GPU's clock where it has one.
    fn seconds(&self) -> Option<f64> {
        let (wall, gpu) = self.times.as_ref().ok()?;
        Some(gpu.as_ref().unwrap_or(wall).median)
    }

    fn rate(&self) -> Option<f64> {
        Some(self.bytes as f64 / self.seconds()?)
    }

    fn json(&self, bandwidth: Option<f64>) -> Value {
        let mut value = json!({ "name": self.name, "what": self.about });
        match &self.times {
            Err(reason) => value["skipped"] = json!(reason),
            Ok((wall, gpu)) => {
                value["wall"] = spread_json(wall);
                value["gpu"] = gpu.as_ref().map_or(Value::Null, spread_json);
                value["bytes"] = json!(self.bytes);
                value["gb_per_s"] = json!(self.rate().map(|rate| rate / 1e9));
                let share = self.rate().zip(bandwidth);
                value["of_bandwidth"] = json!(share.map(|(rate, most)| rate / most));
            }
        }
        value
    }
}

struct Bench {
    gpu: Gpu,
    watch: Stopwatch,
    scale: Scale,
    /// Bytes a second, read and written.
    bandwidth: Option<f64>,
}

impl Bench {
    /// All cases, turn and turn about.
    fn measure(&mut self, mut cases: Vec<Case>) -> Vec<Outcome> {
        let mut samples = vec![(Vec::new(), Vec::new()); cases.len()];
        let (least, most, enough) = self.scale.rounds;
        let mut start = Instant::now();
        for round in 0..self.scale.warm_up + most {
            let measured = round.checked_sub(self.scale.warm_up);
            if measured == Some(0) {
                start = Instant::now();
            }
            if measured.is_some_and(|rounds| rounds >= least) && start.elapsed() > enough {
                break;
            }
            for (case, (walls, gpus)) in cases.iter_mut().zip(&mut samples) {
                for _ in 0..case.calls {
                    let Ok(encode) = &mut case.encode else {
                        break;
                    };
                    let wall = self.watch.wall(1, encode);
                    match wall.and_then(|wall| Ok((wall, self.watch.gpu(encode)?))) {
                        Ok((wall, gpu)) if measured.is_some() => {
                            walls.push(wall);
                            gpus.extend(gpu);
                        }
                        Ok(_) => {}
                        Err(error) => case.encode = Err(error),
                    }
                }
            }
        }
        let outcomes = cases.into_iter().zip(samples);
        outcomes
            .map(|(case, (walls, gpus))| Outcome {
                name: case.name,
                about: case.about,
                bytes: case.bytes,
                times: match (case.encode, Spread::of(walls)) {
                    (Err(error), _) => Err(error.to_string()),
                    (Ok(_), None) => Err("no sample".into()),
                    (Ok(_), Some(wall)) => Ok((wall, Spread::of(gpus))),
                },
            })
            .collect()
    }

    fn table(&self, title: &str, outcomes: &[Outcome]) {
        println!("\n{title}");
        println!(
            "  {:<34} {:>28} {:>28} {:>9} {:>8} {:>6}",
            "", "wall ms (p10 .. p90)", "GPU ms (p10 .. p90)", "MB", "GB/s", "share"
        );
        for outcome in outcomes {
            let (wall, gpu) = match &outcome.times {
                Ok(times) => times,
                Err(reason) => {
                    println!("  {:<34} skipped: {reason}", outcome.name);
                    continue;
                }
            };
            let rate = outcome.rate().unwrap_or_default();
            let share = self
                .bandwidth
                .map(|most| format!("{:.0}%", 100.0 * rate / most));
            println!(
                "  {:<34} {:>28} {:>28} {:>9.2} {:>8.2} {:>6}",
                outcome.name,
                spread_text(Some(wall)),
                spread_text(gpu.as_ref()),
                outcome.bytes as f64 / 1e6,
                rate / 1e9,
                share.unwrap_or("-".into())
            );
        }
    }

    fn json(&self, outcomes: &[Outcome]) -> Value {
        outcomes
            .iter()
            .map(|outcome| outcome.json(self.bandwidth))
            .collect()
    }

    // ------------------------------------------------------------ memory

    /// What the adapter's memory does at best, read and written bytes together.
    fn memory(&mut self) -> wgpu_attention::Result<Value> {
        let peaks = Peaks::measure(&self.gpu)?;
        let memory: Vec<&Peak> = peaks
            .forms
            .iter()
            .filter(|peak| peak.bound == Bound::Memory)
            .collect();
        self.bandwidth = peaks.best(Bound::Memory).map(|peak| peak.rate);
        let mib = peaks.copied_bytes >> 20;
        println!("\nMemory bandwidth: the best of these, on {mib} MiB");
        for peak in &memory {
            println!("  {:<34} {:>8.2} GB/s", peak.form, peak.rate / 1e9);
        }
        if !self.gpu.capabilities().timestamps {
            println!(
                "  This adapter has no timestamps: all rates are by wall time, submission included."
            );
        }
        let forms = memory
            .iter()
            .map(|peak| json!({ "by": peak.form, "gb_per_s": peak.rate / 1e9 }));
        Ok(json!({ "bytes": peaks.copied_bytes, "forms": forms.collect::<Vec<_>>() }))
    }

    fn case(
        &self,
        name: String,
        about: Value,
        bytes: u64,
        calls: usize,
        make: impl FnOnce(&Gpu) -> wgpu_attention::Result<Box<Encode>>,
    ) -> Case {
        Case {
            name,
            about,
            bytes,
            calls,
            encode: make(&self.gpu),
        }
    }

    // ------------------------------------------------------------ attention

    /// One new token of one sequence, of which the cache has Tk tokens.
    fn decode_attention(&mut self) -> Value {
        let mut shapes = Vec::new();
        for (heads, kv_heads, head_dim) in [(12, 12, 64), (32, 8, 128)] {
            let mut cases = Vec::new();
            for &kv_len in self.scale.kv_lens {
                for element_type in [ElementType::F32, ElementType::F16] {
                    for paged in [false, true] {
                        let mut config = KvCacheConfig::new(1, kv_len, kv_heads, head_dim)
                            .stored_as(element_type);
                        if paged {
                            config = config.paged(PAGE, kv_len.div_ceil(PAGE));
                        }
                        let layout = if paged { "pages" } else { "contiguous" };
                        let about = json!({
                            "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "kv_len": kv_len,
                            "type": element_type.to_string(), "layout": layout,
                        });
                        let q_and_out = 2 * (heads * head_dim * 4) as u64;
                        cases.push(self.case(
                            format!("Tk {kv_len} {element_type} {layout}"),
                            about,
                            config.bytes() + q_and_out,
                            1,
                            |gpu| one_token(gpu, config, heads),
                        ));
                    }
                }
            }
            let outcomes = self.measure(cases);
            let title =
                format!("Attention of one new token, H {heads}, Hkv {kv_heads}, D {head_dim}");
            self.table(&title, &outcomes);
            let ratios = self.ratios(&outcomes);
            shapes.push(json!({
                "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim,
                "cases": self.json(&outcomes), "ratios": ratios,
            }));
        }
        Value::Array(shapes)
    }

    /// Four times the keys, and pages against contiguous, by the medians.
    fn ratios(&self, outcomes: &[Outcome]) -> Value {
        let find = |kv_len: usize, element_type: ElementType, layout: &str| {
            let wanted = format!("Tk {kv_len} {element_type} {layout}");
            outcomes.iter().find(|own| own.name == wanted)?.seconds()
        };
        let types = [ElementType::F32, ElementType::F16];
        let mut ratios = Vec::new();
        let mut add = |name: String, above: Option<f64>, below: Option<f64>| {
            if let (Some(above), Some(below)) = (above, below) {
                println!("  {name}: {:.2}", above / below);
                ratios.push(json!({ "name": name, "ratio": above / below }));
            }
        };
        if let [few, many, ..] = *self.scale.kv_lens {
            for element_type in types {
                for layout in ["contiguous", "pages"] {
                    let [many_s, few_s] =
                        [many, few].map(|kv_len| find(kv_len, element_type, layout));
                    add(
                        format!("Tk {many} / Tk {few}, {element_type} {layout}"),
                        many_s,
                        few_s,
                    );
                }
            }
        }
        for &kv_len in self.scale.kv_lens {
            for element_type in types {
                let [pages, contiguous] =
                    ["pages", "contiguous"].map(|layout| find(kv_len, element_type, layout));
                add(
                    format!("pages / contiguous, Tk {kv_len} {element_type}"),
                    pages,
                    contiguous,
                );
            }
        }
        Value::Array(ratios)
    }

    // ------------------------------------------------------------ layer

    /// A layer of GPT-2 small's size: a prompt, and steps behind it.
    fn layer(&mut self) -> Value {
        let Scale {
            width,
            heads,
            prompt,
            steps,
            ..
        } = self.scale;
        let mut cases = Vec::new();
        for element_type in [ElementType::F32, ElementType::F16] {
            for paged in [false, true] {
                let layout = if paged { "pages" } else { "contiguous" };
                for (what, calls) in [("prefill", 1), ("step", steps)] {
                    let tokens = if calls == 1 { prompt } else { 1 };
                    let about = json!({
                        "width": width, "heads": heads, "prompt": prompt, "steps": steps, "call": what,
                        "type": element_type.to_string(), "layout": layout,
                    });
                    // Both weights, x and y; of keys and values those that a step in the middle reads.
                    let keys = (prompt + if calls == 1 { 0 } else { steps / 2 }) * 2 * width;
                    let bytes = 4 * (4 * width * width + 2 * tokens * width) as u64
                        + keys as u64 * element_type.size();
                    cases.push(self.case(
                        format!("{what} {element_type} {layout}"),
                        about,
                        bytes,
                        calls,
                        |gpu| {
                            let layer = random_layer(gpu, width, heads)?;
                            let mut config = layer
                                .cache_config(1, prompt + steps)
                                .stored_as(element_type);
                            if paged {
                                config = config.paged(PAGE, config.capacity.div_ceil(PAGE));
                            }
                            let cache = KvCache::new(gpu, config)?;
                            calls_of_layer(layer, cache, prompt, tokens)
                        },
                    ));
                }
            }
        }
        let outcomes = self.measure(cases);
        let title = format!(
            "A layer of {width} channels, {heads} heads: a prompt of {prompt}, {steps} steps"
        );
        self.table(&title, &outcomes);
        for outcome in outcomes.iter().filter(|own| own.name.starts_with("step")) {
            if let Ok((wall, _)) = &outcome.times {
                println!(
                    "  {}: {:.1} steps a second",
                    outcome.name,
                    1.0 / wall.median
                );
            }
        }
        self.json(&outcomes)
    }

    // ------------------------------------------------------------ projections

    /// A few rows through a matrix: its bytes are what takes the time.
    fn projections(&mut self) -> Value {
        let width = self.scale.width;
        let mut cases = Vec::new();
        for d_out in [3 * width, width] {
            for rows in [1, 3, 8] {
                let about = json!({ "d_in": width, "d_out": d_out, "rows": rows });
                let bytes = 4 * (width * d_out + rows * (width + d_out)) as u64;
                let name = format!("{width} -> {d_out}, {rows} rows");
                cases.push(self.case(name, about, bytes, 1, |gpu| {
                    projection(gpu, width, d_out, rows)
                }));
            }
        }
        let outcomes = self.measure(cases);
        self.table("Projections of a few rows", &outcomes);
        self.json(&outcomes)
    }
}

// ---------------------------------------------------------------- the calls

/// Attention of one token to a cache that is full.
fn one_token(
    gpu: &Gpu,
    config: KvCacheConfig,
    heads: usize,
) -> wgpu_attention::Result<Box<Encode>> {
    let attention = Attention::new(gpu, config.attention(heads, 1))?;
    let mut cache = KvCache::new(gpu, config)?;
    fill(gpu, &mut cache, config.capacity)?;
    let (keys, values, lengths) = (cache.keys(), cache.values(), cache.lengths_view());
    let table = cache.block_table();
    let q = random(gpu, &[1, 1, heads, config.head_dim], 1.0)?.view();
    let out = Tensor::empty(gpu, &[1, 1, heads, config.value_dim], ElementType::F32)?.view();
    Ok(Box::new(move |encoder, timestamps| {
        let mut arguments = AttentionArguments::new(&q, &keys, &values, &out);
        arguments.rules.kv_lens = Some(&lengths);
        arguments.rules.block_table = table.as_ref();
        attention.encode_timed(encoder, arguments, "attention", timestamps)
    }))
}

/// Puts random tokens into a cache.
fn fill(gpu: &Gpu, cache: &mut KvCache, tokens: usize) -> wgpu_attention::Result<()> {
    let config = *cache.config();
    let chunk = CHUNK.min(tokens.max(1));
    let k = random(gpu, &[1, chunk, config.kv_heads, config.head_dim], 1.0)?.view();
    let v = random(gpu, &[1, chunk, config.kv_heads, config.value_dim], 1.0)?.view();
    let mut encoder = gpu.device().create_command_encoder(&Default::default());
    for first in (0..tokens).step_by(chunk) {
        let new = chunk.min(tokens - first);
        let (k, v) = (k.slice(1, 0..new)?, v.slice(1, 0..new)?);
        cache.append(&mut encoder, AppendArguments::new(&k, &v))?;
    }
    let submission = gpu.submit(encoder.finish())?;
    gpu.wait_for(submission)
}

fn random_layer(
    gpu: &Gpu,
    width: usize,
    heads: usize,
) -> wgpu_attention::Result<MultiHeadAttention> {
    let spread = (3.0 / width as f32).sqrt();
    let (qkv, output) = (
        noise(3 * width * width, spread, 1)?,
        noise(width * width, spread, 2)?,
    );
    let config = LayerConfig::new(width, width, heads).causal(true);
    let weights = LayerWeights {
        qkv: QkvWeights::Fused(Projection::new(&qkv)),
        output: Some(Projection::new(&output)),
    };
    MultiHeadAttention::new(gpu, config, &weights)
}

/// Calls of a layer: prompts into an empty cache again and again, or steps behind a prompt until the cache is full.
fn calls_of_layer(
    layer: MultiHeadAttention,
    mut cache: KvCache,
    prompt: usize,
    tokens: usize,
) -> wgpu_attention::Result<Box<Encode>> {
    let config = *cache.config();
    let plan = layer.plan(LayerShape::cached(&config, tokens))?;
    let behind = if tokens == prompt { 0 } else { prompt };
    fill(layer.gpu(), &mut cache, behind)?;
    let shape = [1, tokens, layer.config().d_in];
    let x = random(layer.gpu(), &shape, 1.0)?.view();
    let y = Tensor::empty(layer.gpu(), &shape, ElementType::F32)?.view();
    Ok(Box::new(move |encoder, timestamps| {
        if cache.lengths()[0] + tokens > config.capacity || behind == 0 {
            cache.truncate(0, behind)?;
        }
        let arguments = LayerArguments::new(&x, &y);
        layer.encode_cached_timed(encoder, &plan, &mut cache, None, arguments, timestamps)
    }))
}

fn projection(
    gpu: &Gpu,
    d_in: usize,
    d_out: usize,
    rows: usize,
) -> wgpu_attention::Result<Box<Encode>> {
    let problem = LinearProblem {
        batch: 1,
        tokens: rows,
        d_in,
        d_out,
        few: None,
        form: None,
    };
    let linear = Linear::new(gpu, problem)?;
    let weight = random(gpu, &[d_out, d_in], (3.0 / d_in as f32).sqrt())?.view();
    let x = random(gpu, &[1, rows, d_in], 1.0)?.view();
    let y = Tensor::empty(gpu, &[1, rows, d_out], ElementType::F32)?.view();
    Ok(Box::new(move |encoder, timestamps| {
        let arguments = LinearArguments {
            x: &x,
            weight: &weight,
            bias: None,
            y: &y,
        };
        linear.encode_timed(encoder, arguments, "projection", timestamps)
    }))
}

fn random(gpu: &Gpu, shape: &[usize], spread: f32) -> wgpu_attention::Result<Tensor> {
    Tensor::from_slice(gpu, shape, &noise(shape.iter().product(), spread, 1)?)
}

// ---------------------------------------------------------------- around it

struct Options {
    quick: bool,
    scale: Scale,
    json: Option<String>,
}

impl Options {
    fn parse() -> Result<Self> {
        let mut options = Options {
            quick: false,
            scale: FULL,
            json: None,
        };
        let mut arguments = std::env::args().skip(1);
        while let Some(name) = arguments.next() {
            match name.as_str() {
                "--quick" => (options.quick, options.scale) = (true, QUICK),
                "--json" => options.json = Some(arguments.next().ok_or("--json wants a file")?),
                // cargo says so of itself.
                "--bench" => {}
                _ => return Err(format!("{name:?} is unknown: [--quick] [--json FILE]").into()),
            }
        }
        Ok(options)
    }
}

//! A small GPT that writes text, on a KV cache: all of a step is recorded into one encoder, the crate's attention layers
//! and projections among the application's own kernels (`generate/kernels.wgsl`), and all that comes back to the host is the next
//! token, or the logits to draw it from.
//!
//! `cargo run --release --example generate -- [--weights FILE] [--prompt TEXT] [--tokens N] [--seed N] ...`
//!
//! Weights are those of a character model in nanoGPT's or GPT-2's names; without any, a random model talks nonsense. It
//! checks what it shows: with and without a cache the logits are the same, and after the first step nothing is made.

#[path = "generate/model.rs"]
mod model;
#[path = "generate/pass.rs"]
mod pass;
#[path = "generate/text.rs"]
mod text;

use model::{Model, random_model};
use pass::Pass;
use std::sync::mpsc;
use std::time::{Duration, Instant};
use text::Random;
use wgpu_attention::tensor_file::TensorFile;
use wgpu_attention::{ElementType, Gpu, GpuOptions, KvCache, Tensor, wgpu};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// The most that logits with and without a cache may differ by, of the largest logit.
const TOLERANCE: f32 = 1e-4;

fn main() -> std::process::ExitCode {
    match Options::parse().and_then(|options| generate(&options)) {
        Ok(()) => std::process::ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            std::process::ExitCode::FAILURE
        }
    }
}

fn generate(options: &Options) -> Result<()> {
    let gpu = Gpu::open_blocking(&GpuOptions::default())?;
    let file = match &options.weights {
        Some(path) => TensorFile::open(path)?,
        None => TensorFile::parse(random_model()?, "the random model")?,
    };
    let model = Model::load(&gpu, &file, options)?;
    println!("{}\n{model}", gpu.describe());
    let prompt = model.vocabulary.tokens(&options.prompt)?;
    let mut decoder = Decoder::new(&model, prompt.len(), options.tokens)?;
    let mut sampler = options.seed.map(Random);

    // Many drivers compile at the first use: once for nothing.
    decoder.run(&model, &prompt, None)?;
    decoder.forget();
    let start = Instant::now();
    let mut next = decoder.run(&model, &prompt, sampler.as_mut())?;
    let prefill = start.elapsed();
    let mut tokens = prompt.clone();
    let (mut times, mut made) = (Vec::new(), None);
    for _ in 1..options.tokens {
        tokens.push(next);
        let start = Instant::now();
        next = decoder.run(&model, &[next], sampler.as_mut())?;
        times.push(start.elapsed());
        // The first step may make parameters and bind groups; later ones find them.
        let now = gpu.objects_made();
        if *made.get_or_insert(now) != now {
            return Err(format!("a step made objects: {made:?} before, {now:?} after it").into());
        }
    }
    let text: Vec<u32> = tokens.iter().chain([&next]).copied().collect();
    println!("\n{}\n", model.vocabulary.text(&text));
    report(prompt.len(), prefill, &times);
    if let Some(steps) = times.len().checked_sub(1).filter(|steps| *steps > 0) {
        println!("{steps} steps after the first made no buffer, no bind group and no pipeline");
    }
    compare(&model, &decoder, &text, sampler.is_none())
}

fn report(prompt: usize, prefill: Duration, times: &[Duration]) {
    let ms = |time: Duration| time.as_secs_f64() * 1e3;
    println!("prefill of {prompt} tokens: {:.2} ms", ms(prefill));
    let mut later = times.get(1..).unwrap_or_default().to_vec();
    later.sort();
    if let Some(median) = later.get(later.len() / 2) {
        let rate = 1.0 / median.as_secs_f64();
        println!(
            "a step: {:.2} ms in the median, {rate:.1} a second",
            ms(*median)
        );
    }
}

/// Runs the whole text once without a cache, and holds the logits of every generated token against those of the steps.
fn compare(model: &Model, decoder: &Decoder, text: &[u32], greedy: bool) -> Result<()> {
    let read = &text[..text.len() - 1];
    let pass = Pass::new(model, read.len(), decoder.generated, None)?;
    let mut encoder = model.device().create_command_encoder(&Default::default());
    pass.write_input(0, read)?;
    pass.encode(model, None, &mut encoder)?;
    model.gpu.submit(encoder.finish())?;
    let whole = pass.logits.read_blocking::<f32>()?;
    let steps = decoder.history.read_blocking::<f32>()?;
    let largest = whole
        .iter()
        .fold(0.0, |most: f32, logit| most.max(logit.abs()));
    // `max` forgets a NaN, which `all` below does not: it is no more than anything.
    let distances = || whole.iter().zip(&steps).map(|(a, b)| (a - b).abs());
    let difference = distances().fold(0.0, f32::max);
    let close = distances().all(|distance| distance <= TOLERANCE * largest);
    println!(
        "cached and uncached logits of {} tokens differ by {difference:.1e} at most; the largest is {largest:.2}",
        decoder.generated
    );
    if !close || largest == 0.0 || whole.len() != steps.len() {
        return Err("with a cache the logits are others than without".into());
    }
    if greedy {
        let written = &text[text.len() - decoder.generated..];
        for (logits, token) in steps.chunks(model.vocabulary.size()).zip(written) {
            let chosen = logits[*token as usize];
            if logits.iter().any(|logit| *logit > chosen) {
                return Err(
                    format!("token {token} was chosen, whose logit is not the highest").into(),
                );
            }
        }
    }
    Ok(())
}

/// What lives as long as a text: caches, the passes of prompt and step, the logits of all steps.
struct Decoder {
    caches: Vec<KvCache>,
    prefill: Pass,
    step: Pass,
    /// `(generated, vocabulary)`: what the check at the end reads.
    history: Tensor,
    generated: usize,
    rows: u64,
    /// Where the next token, or the logits to draw it from, come back to the host.
    staging: wgpu::Buffer,
}

impl Decoder {
    fn new(model: &Model, prompt: usize, generated: usize) -> Result<Self> {
        let context = model.context;
        if prompt == 0 || generated == 0 || prompt + generated - 1 > context {
            return Err(format!(
                "a prompt of {prompt} tokens and {generated} new ones: expected at least one of each, and a context of {context} that holds all but the last; choose others with --prompt and --tokens"
            )
            .into());
        }
        let first = &model.blocks[0].attention;
        let config = first.cache_config(1, context);
        let caches = model
            .blocks
            .iter()
            .map(|_| KvCache::new(&model.gpu, config));
        let size = model.vocabulary.size();
        Ok(Decoder {
            caches: caches.collect::<wgpu_attention::Result<_>>()?,
            prefill: Pass::new(model, prompt, 1, Some(&config))?,
            step: Pass::new(model, 1, 1, Some(&config))?,
            history: Tensor::empty(&model.gpu, &[generated, size], ElementType::F32)?,
            generated,
            rows: 0,
            staging: model.device().create_buffer(&wgpu::BufferDescriptor {
                label: Some("read-back"),
                size: 4 * size as u64,
                usage: wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST,
                mapped_at_creation: false,
            }),
        })
    }

    /// Begins anew.
    fn forget(&mut self) {
        self.caches.iter_mut().for_each(KvCache::reset);
        self.rows = 0;
    }

    /// Reads tokens, the whole prompt or the last one written, and gives the next. One encoder, one submission.
    fn run(&mut self, model: &Model, tokens: &[u32], sampler: Option<&mut Random>) -> Result<u32> {
        let pass = if self.rows == 0 {
            &self.prefill
        } else {
            &self.step
        };
        let mut encoder = model.device().create_command_encoder(&Default::default());
        pass.write_input(self.caches[0].lengths()[0], tokens)?;
        pass.encode(model, Some(&mut self.caches), &mut encoder)?;

        let bytes = 4 * model.vocabulary.size() as u64;
        let (logits, history) = (pass.logits.buffer(), self.history.buffer());
        encoder.copy_buffer_to_buffer(logits, 0, history, self.rows * bytes, bytes);
        let (wanted, size) = match sampler {
            None => (pass.next.buffer(), 4),
            Some(_) => (logits, bytes),
        };
        encoder.copy_buffer_to_buffer(wanted, 0, &self.staging, 0, size);
        let submission = model.gpu.submit(encoder.finish())?;

        // The staging buffer is the application's own and used again: reading makes nothing either.
        let (sender, receiver) = mpsc::channel();
        let slice = self.staging.slice(..size);
        slice.map_async(wgpu::MapMode::Read, move |result| {
            let _ = sender.send(result);
        });
        model.gpu.wait_for(submission)?;
        receiver.recv()??;
        let next = {
            let mapped = slice.get_mapped_range()?;
            match sampler {
                None => bytemuck::pod_read_unaligned(&mapped),
                Some(random) => random.draw(&bytemuck::pod_collect_to_vec::<u8, f32>(&mapped)),
            }
        };
        self.staging.unmap();
        self.rows += 1;
        Ok(next)
    }
}

struct Options {
    weights: Option<String>,
    prompt: String,
    tokens: usize,
    /// Draws tokens by their probability; without it the likeliest is taken.
    seed: Option<u64>,
    heads: Option<usize>,
    context: usize,
    gelu_tanh: bool,
}

const USAGE: &str = "usage: generate [--weights FILE.safetensors] [--prompt TEXT] [--tokens N] [--greedy | --seed N]
       [--heads N]    heads, where the file's metadata have no n_head and they are not of 64 channels
       [--context N]  the most tokens, where the file has no wpe.weight
       [--gelu-tanh]  GELU by tanh, as GPT-2 has it; nanoGPT has the exact one";

impl Options {
    fn parse() -> Result<Self> {
        let mut options = Options {
            weights: None,
            prompt: "Attention is all".into(),
            tokens: 32,
            seed: None,
            heads: None,
            context: 256,
            gelu_tanh: false,
        };
        let mut arguments = std::env::args().skip(1);
        while let Some(name) = arguments.next() {
            let mut value = || {
                let value = arguments.next();
                value.ok_or_else(|| format!("{name} wants a value\n{USAGE}"))
            };
            match name.as_str() {
                "--weights" => options.weights = Some(value()?),
                "--prompt" => options.prompt = value()?,
                "--tokens" => options.tokens = number(&name, &value()?)?,
                "--seed" => options.seed = Some(number(&name, &value()?)?),
                "--greedy" => options.seed = None,
                "--heads" => options.heads = Some(number(&name, &value()?)?),
                "--context" => options.context = number(&name, &value()?)?,
                "--gelu-tanh" => options.gelu_tanh = true,
                _ => return Err(format!("{name:?} is unknown\n{USAGE}").into()),
            }
        }
        Ok(options)
    }
}

fn number<T: std::str::FromStr>(name: &str, value: &str) -> Result<T> {
    let parsed = value.parse();
    parsed.map_err(|_| format!("{name}: expected a number, got {value:?}\n{USAGE}").into())
}

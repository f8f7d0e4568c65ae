//! `run`: a real layer on real input, timed and checked.

use crate::{BackendOption, FormOption, Verdict, load_tuning, open, say};
use clap::Args;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use wgpu_attention::case::{Case, Tolerances};
use wgpu_attention::checkpoint::{LayerCheckpoint, gpt2_layers};
use wgpu_attention::compare::{Comparison, Outcome, Tolerance, compare};
use wgpu_attention::tensor_file::{FileTensor, TensorFile, write_tensors};
use wgpu_attention::{
    ElementType, Error, Gpu, LayerArguments, LayerConfig, LayerPlan, LayerShape,
    MultiHeadAttention, Result, Step, Tensor, Timestamps, install_hint, reference,
};

#[derive(Args)]
#[command(after_help = "\
Weights, by their names: Wqkv (3*d_out, d_in), bqkv, Wproj (d_out, d_out), bproj; or Wq, Wk, Wv (d_out, d_in), \
bq, bk, bv, Wo, bo; or a list of heads: Wq, Wk, Wv (H, d_in, D), bq, bk, bv (H, D), Wproj, bproj; or GPT-2's \
h.N.attn.c_attn.weight (d_in, 3*d_out), .bias, h.N.attn.c_proj.weight, .bias. Biases and the output projection may \
be missing.")]
pub(crate) struct Options {
    /// A safetensors file with the weights of a layer (for the names see below); without it the bundled layer runs
    #[arg(
        long,
        value_name = "W.safetensors",
        requires = "input",
        requires = "heads"
    )]
    weights: Option<PathBuf>,
    /// A safetensors file with the input X (or x, hidden, input, or one tensor alone), (B, T, d_in) or (T, d_in), and
    /// key_mask (B, T) if tokens are padding (0)
    #[arg(long, value_name = "X.safetensors", requires = "weights")]
    input: Option<PathBuf>,
    /// Heads of the layer
    #[arg(long, requires = "weights", value_name = "H")]
    heads: Option<usize>,
    /// Which layer of a GPT-2 checkpoint: the N of h.N.attn; the first without it
    #[arg(long, requires = "weights", value_name = "N")]
    layer: Option<usize>,
    /// A token sees only itself and those before it
    #[arg(long, requires = "weights")]
    causal: bool,
    /// Write the result Y (B, T, d_out) to this safetensors file
    #[arg(long, value_name = "Y.safetensors")]
    output: Option<PathBuf>,
    /// Part of the adapter's name
    #[arg(long, value_name = "NAME")]
    adapter: Option<String>,
    /// The backend
    #[arg(long, value_enum)]
    backend: Option<BackendOption>,
    /// The form of the kernels
    #[arg(long, value_enum, default_value = "auto")]
    form: FormOption,
    /// Do not compute the f64 reference to compare with (it takes a minute and more for thousands of tokens)
    #[arg(long, requires = "weights")]
    no_check: bool,
    /// Take what `tune` kept in this file
    #[arg(long, value_name = "TUNING.json")]
    tuning: Option<PathBuf>,
    /// Keep wgpu's runtime checks of indices and loops in the kernels too
    #[arg(long)]
    runtime_checks: bool,
    /// Timed runs after the warm-up; the median is printed
    #[arg(long, default_value_t = 20, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    samples: u32,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            weights: None,
            input: None,
            heads: None,
            layer: None,
            causal: false,
            output: None,
            adapter: None,
            backend: None,
            form: FormOption::Auto,
            no_check: false,
            tuning: None,
            runtime_checks: false,
            samples: 20,
        }
    }
}

/// The bundled case: weights of sentence-transformers/all-MiniLM-L6-v2 (Apache-2.0, see tests/cases/LICENCES.md).
static BUNDLED: &[u8] =
    include_bytes!("../../../tests/cases/bert/bert__minilm_layer0_batch3.safetensors");
static BUNDLED_MANIFEST: &str = include_str!("../../../tests/cases/manifest.json");

/// Runs before anything is timed.
const WARM_UP: u32 = 3;
/// Timed runs end after this long, however many there were to be.
const LONGEST: Duration = Duration::from_secs(5);

/// A layer and its input, from wherever they come.
struct Job {
    title: String,
    layer: LayerCheckpoint,
    heads: usize,
    causal: bool,
    batch: usize,
    tokens: usize,
    x: Vec<f32>,
    key_mask: Option<Vec<bool>>,
    /// What somebody else's code found, and how far from it the result may lie.
    stored: Option<(Vec<f64>, Tolerance)>,
}

impl Job {
    fn bundled() -> Result<Self> {
        let origin = Path::new("the bundled case");
        let case = Case::parse(BUNDLED, "bert__minilm_layer0_batch3.safetensors")?;
        let hidden = case.input("hidden")?;
        let sentences = case.attr_json("sentences")?;
        let sentences: Vec<String> = sentences
            .as_array()
            .map(|list| {
                list.iter()
                    .map(|sentence| format!("\n            {sentence}"))
                    .collect()
            })
            .unwrap_or_default();
        let (tolerance, _) = Tolerances::with_manifest(BUNDLED_MANIFEST, origin)?.of(&case, "Y")?;
        Ok(Job {
            title: format!(
                "layer {} of all-MiniLM-L6-v2 (bundled) on {} sentences:{}",
                case.attr_usize("layer")?,
                sentences.len(),
                sentences.concat()
            ),
            layer: LayerCheckpoint::from_tensors(&case.inputs, origin)?,
            heads: case.attr_usize("heads")?,
            causal: false,
            batch: hidden.shape[0],
            tokens: hidden.shape[1],
            x: hidden.to_f32(),
            key_mask: Some(case.input("key_mask")?.to_bool()?),
            stored: Some((case.output("Y")?.values.clone(), tolerance)),
        })
    }

    fn from_files(weights: &Path, input: &Path, heads: usize, options: &Options) -> Result<Self> {
        let file = TensorFile::open(weights)?;
        let layers = gpt2_layers(&file);
        let wrong = |path: &Path, problem: String| Error::Format {
            path: path.display().to_string(),
            problem,
        };
        let prefix = match options.layer {
            None => layers.first(),
            Some(number) => {
                let number = number.to_string();
                let of_number = |prefix: &&String| prefix.split('.').any(|part| part == number);
                let Some(prefix) = layers.iter().find(of_number) else {
                    return Err(wrong(
                        weights,
                        format!("--layer {number}: expected one of the GPT-2 layers {layers:?}"),
                    ));
                };
                Some(prefix)
            }
        };
        let layer = LayerCheckpoint::read(&file, prefix.map(String::as_str))?;
        if let Some(own) = layer.heads.filter(|own| *own != heads) {
            return Err(wrong(
                weights,
                format!("--heads {heads}: the weights are a list of {own} heads"),
            ));
        }

        let input_file = TensorFile::open(input)?;
        let x = read_input(&input_file)?;
        let (batch, tokens, d_in) = match x.shape[..] {
            [batch, tokens, d_in] => (batch, tokens, d_in),
            [tokens, d_in] => (1, tokens, d_in),
            _ => {
                return Err(wrong(
                    input,
                    format!(
                        "tensor {:?}: expected (B, T, d_in) or (T, d_in), got {:?}",
                        x.name, x.shape
                    ),
                ));
            }
        };
        if d_in != layer.d_in {
            return Err(wrong(
                input,
                format!(
                    "tensor {:?}: expected {} channels as the weights, got {d_in}",
                    x.name, layer.d_in
                ),
            ));
        }
        let key_mask = input_file.get("key_mask")?;
        if let Some(mask) = &key_mask
            && mask.shape[..] != x.shape[..x.shape.len() - 1]
            && mask.shape != [batch, tokens]
        {
            return Err(wrong(
                input,
                format!(
                    "tensor \"key_mask\": expected {:?}, got {:?}",
                    &x.shape[..x.shape.len() - 1],
                    mask.shape
                ),
            ));
        }
        let which = match prefix {
            None => String::new(),
            Some(prefix) => {
                let full = if options.causal {
                    ""
                } else {
                    "; GPT-2 itself is causal: --causal"
                };
                let count = layers.len();
                format!(" ({prefix}c_attn, one of {count} layers{full})")
            }
        };
        expect_finite(
            weights,
            "the weights",
            layer.qkv.iter().chain(layer.output.iter().flatten()),
        )?;
        let x_values = x.to_f32();
        expect_finite(input, &format!("tensor {:?}", x.name), x_values.iter())?;
        Ok(Job {
            title: format!("{}{which} on {}", weights.display(), input.display()),
            layer,
            heads,
            causal: options.causal,
            batch,
            tokens,
            x: x_values,
            key_mask: key_mask.map(|mask| mask.to_bool()).transpose()?,
            stored: None,
        })
    }

    fn config(&self, options: &Options) -> LayerConfig {
        LayerConfig {
            form: options.form.form(),
            ..LayerConfig::new(self.layer.d_in, self.layer.d_out, self.heads).causal(self.causal)
        }
    }

    fn reference(&self) -> Result<Vec<f64>> {
        let widen = |values: &Option<Vec<f32>>| values.as_deref().map(reference::widen);
        let (qkv_bias, output, output_bias) = (
            widen(&self.layer.qkv_bias),
            widen(&self.layer.output),
            widen(&self.layer.output_bias),
        );
        let result = reference::layer_without_weights(&reference::LayerInputs {
            batch: self.batch,
            tokens: self.tokens,
            d_in: self.layer.d_in,
            d_out: self.layer.d_out,
            heads: self.heads,
            x: &reference::widen(&self.x),
            qkv_weight: &reference::widen(&self.layer.qkv),
            qkv_bias: qkv_bias.as_deref(),
            output_weight: output.as_deref(),
            output_bias: output_bias.as_deref(),
            rules: reference::Rules {
                causal: self.causal,
                mask: self.key_mask.as_deref().map(|values| reference::Broadcast {
                    values,
                    shape: [self.batch, 1, 1, self.tokens],
                }),
                ..Default::default()
            },
            ..Default::default()
        })?;
        Ok(result.y)
    }

    fn shape(&self) -> [usize; 3] {
        [self.batch, self.tokens, self.layer.d_out]
    }
}

/// NaN and infinity make NaN of the result and of the reference: nothing could be compared.
fn expect_finite<'a>(
    path: &Path,
    what: &str,
    mut values: impl Iterator<Item = &'a f32>,
) -> Result<()> {
    match values.position(|value| !value.is_finite()) {
        None => Ok(()),
        Some(at) => Err(Error::Format {
            path: path.display().to_string(),
            problem: format!(
                "{what}: value {at} is NaN or infinite as f32, expected finite values"
            ),
        }),
    }
}

/// Before anything is computed: a result that could not be written, or would take the place of what it came from.
fn check_output(options: &Options) -> Result<()> {
    let Some(output) = &options.output else {
        return Ok(());
    };
    let fail = |path: &Path, source: std::io::Error| Error::Io {
        path: path.display().to_string(),
        source,
    };
    let folder = match output.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    std::fs::metadata(folder).map_err(|error| fail(folder, error))?;
    let same = |other: &PathBuf| {
        let (a, b) = (output.canonicalize(), other.canonicalize());
        matches!((a, b), (Ok(a), Ok(b)) if a == b)
    };
    for other in [&options.weights, &options.input].into_iter().flatten() {
        if same(other) {
            let words = "it is the weights or the input; give --output another name";
            return Err(fail(output, std::io::Error::other(words)));
        }
    }
    Ok(())
}

/// The input: the tensor of a usual name, or the only one of a float type.
fn read_input(file: &TensorFile) -> Result<FileTensor> {
    for name in ["X", "x", "hidden", "input"] {
        if let Some(tensor) = file.get(name)? {
            return Ok(tensor);
        }
    }
    let names: Vec<&str> = file.names().filter(|name| *name != "key_mask").collect();
    if let [only] = names[..]
        && let Some(tensor) = file.get(only)?
    {
        return Ok(tensor);
    }
    Err(Error::Format {
        path: file.path().display().to_string(),
        problem: format!(
            "expected a tensor named X, x, hidden or input, or one tensor alone; got {names:?}"
        ),
    })
}

pub(crate) fn run(options: &Options) -> Result<Verdict> {
    check_output(options)?;
    let job = match (&options.weights, &options.input, options.heads) {
        (Some(weights), Some(input), Some(heads)) => {
            Job::from_files(weights, input, heads, options)?
        }
        _ => Job::bundled()?,
    };
    let config = job.config(options);
    let head_dim = config.head_dim()?;
    let gpu = match open(&options.adapter, options.backend) {
        Ok(gpu) => Some(gpu.with_runtime_checks(options.runtime_checks)),
        Err(Error::NoAdapter { .. }) => None,
        Err(error) => return Err(error),
    };
    say(format_args!("layer       {}", job.title));
    say(format_args!(
        "            d_in {}, d_out {}, {} heads of {head_dim}, {}{}, {} x {} tokens",
        config.d_in,
        config.d_out,
        config.heads,
        if config.rules.causal {
            "causal"
        } else {
            "full"
        },
        if job.key_mask.is_some() {
            " with a key padding mask"
        } else {
            ""
        },
        job.batch,
        job.tokens,
    ));
    let Some(gpu) = gpu else {
        return run_on_reference(&job, options);
    };
    let info = gpu.adapter_info();
    say(format_args!(
        "adapter     {}, driver {}",
        gpu.describe(),
        format!("{} {}", info.driver, info.driver_info).trim()
    ));

    if let Some(file) = &options.tuning {
        let known = load_tuning(&gpu, file)?;
        say(format_args!(
            "tuning      {}, {known} problems of this adapter",
            file.display()
        ));
    }
    let layer = MultiHeadAttention::new(&gpu, config, &job.layer.weights())?;
    let started = Instant::now();
    let shape = LayerShape::new(job.batch, job.tokens).mask(job.key_mask.is_some());
    let plan = layer.plan(shape)?;
    for (number, line) in plan.to_string().lines().enumerate() {
        say(format_args!(
            "{:<11} {line}",
            if number == 0 { "plan" } else { "" }
        ));
    }
    let run = Run::new(&gpu, &layer, &plan, &job)?;
    run.once(None)?;
    say(format_args!(
        "first call  {:.1} ms, compiling the kernels included",
        started.elapsed().as_secs_f64() * 1e3
    ));
    run.time(options.samples)?;

    let y: Vec<f32> = run.y.read_blocking()?;
    let shape = job.shape();
    let mut right = true;
    if options.no_check {
        say("check       none, as asked");
    } else {
        let expected = job.reference()?;
        let comparison = compare(&y, &shape, &expected, &shape, Tolerance::F32);
        right &= report("the f64 reference", &comparison);
    }
    if let Some((stored, tolerance)) = &job.stored {
        right &= report(
            "the stored result",
            &compare(&y, &shape, stored, &shape, *tolerance),
        );
    }
    write_result(options, &shape, &y)?;
    Ok(if right {
        Verdict::Right
    } else {
        Verdict::Wrong
    })
}

/// Without an adapter: says so, and computes on the CPU all the same.
fn run_on_reference(job: &Job, options: &Options) -> Result<Verdict> {
    say(format_args!(
        "adapter     none: no GPU adapter was found. {}",
        install_hint()
    ));
    say("            running on the f64 CPU reference instead (not a measure of anything)");
    let started = Instant::now();
    let y = job.reference()?;
    say(format_args!(
        "reference   {:.1} ms",
        started.elapsed().as_secs_f64() * 1e3
    ));
    let shape = job.shape();
    let mut right = true;
    if let Some((stored, tolerance)) = &job.stored {
        right = report(
            "the stored result",
            &compare(&y, &shape, stored, &shape, *tolerance),
        );
    }
    let y: Vec<f32> = y.iter().map(|value| *value as f32).collect();
    write_result(options, &shape, &y)?;
    Ok(if right {
        Verdict::Right
    } else {
        Verdict::Wrong
    })
}

/// Writes the result to where it was asked for.
fn write_result(options: &Options, shape: &[usize; 3], y: &[f32]) -> Result<()> {
    let Some(path) = &options.output else {
        return Ok(());
    };
    write_tensors(path, &[("Y", shape, y)])?;
    say(format_args!(
        "written     {} (Y, f32, {shape:?})",
        path.display()
    ));
    Ok(())
}

/// Prints a comparison; whether it passed.
fn report(with: &str, comparison: &Comparison) -> bool {
    say(format_args!(
        "check       largest error {:.2e} against {with} (allowed {}): {}",
        comparison.max_error,
        comparison.tolerance,
        if comparison.passed() {
            "passed".into()
        } else if comparison.outcome == Outcome::NothingCompared {
            "the result is empty".into()
        } else {
            format!("FAILED. {comparison}")
        },
    ));
    comparison.passed() || comparison.outcome == Outcome::NothingCompared
}

/// A layer with its operands on the GPU.
struct Run<'a> {
    gpu: &'a Gpu,
    layer: &'a MultiHeadAttention,
    plan: &'a LayerPlan,
    x: Tensor,
    key_mask: Option<Tensor>,
    y: Tensor,
}

impl<'a> Run<'a> {
    fn new(
        gpu: &'a Gpu,
        layer: &'a MultiHeadAttention,
        plan: &'a LayerPlan,
        job: &Job,
    ) -> Result<Self> {
        let mask = job.key_mask.as_ref();
        let mask = mask.map(|mask| Tensor::from_slice(gpu, &[job.batch, job.tokens], mask));
        Ok(Run {
            gpu,
            layer,
            plan,
            x: Tensor::from_slice(gpu, &[job.batch, job.tokens, job.layer.d_in], &job.x)?,
            key_mask: mask.transpose()?,
            y: Tensor::empty(gpu, &job.shape(), ElementType::F32)?,
        })
    }

    /// Records something into an encoder of its own, submits and waits; the wall time of it all.
    fn submit(
        &self,
        record: impl FnOnce(&mut wgpu_attention::wgpu::CommandEncoder) -> Result<()>,
    ) -> Result<f64> {
        let started = Instant::now();
        let mut encoder = self
            .gpu
            .device()
            .create_command_encoder(&Default::default());
        record(&mut encoder)?;
        let submission = self.gpu.submit(encoder.finish())?;
        self.gpu.wait_for(submission)?;
        Ok(started.elapsed().as_secs_f64())
    }

    fn with_arguments<T>(&self, call: impl FnOnce(LayerArguments<'_>) -> T) -> T {
        let mask = self.key_mask.as_ref().map(Tensor::view);
        call(LayerArguments {
            key_mask: mask.as_ref(),
            ..LayerArguments::new(&self.x.view(), &self.y.view())
        })
    }

    /// The whole layer once; wall seconds.
    fn once(&self, mut timestamps: Option<&mut Timestamps>) -> Result<f64> {
        self.submit(|encoder| {
            self.with_arguments(|arguments| {
                self.layer
                    .encode_timed(encoder, self.plan, arguments, timestamps.as_deref_mut())
            })?;
            if let Some(timestamps) = timestamps {
                timestamps.resolve(encoder);
            }
            Ok(())
        })
    }

    /// One dispatch alone; wall seconds.
    fn step(&self, step: Step) -> Result<f64> {
        self.submit(|encoder| {
            self.with_arguments(|arguments| {
                self.layer
                    .encode_step(encoder, self.plan, step, arguments, None)
            })
        })
    }

    /// Prints the time of each dispatch and of the whole: medians after a warm-up.
    fn time(&self, samples: u32) -> Result<()> {
        for _ in 0..WARM_UP {
            self.once(None)?;
        }
        let steps = self.plan.steps();
        let mut of_steps = vec![Vec::new(); steps.len()];
        let mut of_all = Vec::new();
        let on_gpu = self.gpu.capabilities().timestamps;
        let started = Instant::now();
        while (of_all.len() as u32) < samples && (of_all.is_empty() || started.elapsed() < LONGEST)
        {
            of_all.push(self.once(None)?);
            if on_gpu {
                let mut timestamps = Timestamps::new(self.gpu, steps.len() as u32)?;
                self.once(Some(&mut timestamps))?;
                for (times, span) in of_steps.iter_mut().zip(timestamps.read_blocking()?) {
                    times.push(span.seconds);
                }
            } else {
                for (times, (step, _)) in of_steps.iter_mut().zip(&steps) {
                    times.push(self.step(*step)?);
                }
            }
        }
        let clock = if on_gpu {
            "the GPU's clock"
        } else {
            "wall time of each alone"
        };
        say(format_args!(
            "time        median of {} runs after {WARM_UP} to warm up; dispatches by {clock}",
            of_all.len()
        ));
        let line = |name: String, seconds: f64, flops: u64, note: &str| {
            say(format_args!(
                "            {name:<18} {:>10.3} ms {:>9.2} GFLOP/s{note}",
                seconds * 1e3,
                // A step of no work takes no time.
                if flops == 0 {
                    0.0
                } else {
                    flops as f64 / seconds * 1e-9
                }
            ));
        };
        for ((step, plan), times) in steps.iter().zip(&mut of_steps) {
            line(step.to_string(), median(times), plan.flops, "");
        }
        line(
            "whole".into(),
            median(&mut of_all),
            self.plan.flops(),
            "  (wall time, submit to done)",
        );
        Ok(())
    }
}

fn median(times: &mut [f64]) -> f64 {
    times.sort_by(f64::total_cmp);
    let (lower, upper) = (times.len().saturating_sub(1) / 2, times.len() / 2);
    match (times.get(lower), times.get(upper)) {
        (Some(lower), Some(upper)) => (lower + upper) / 2.0,
        _ => f64::NAN,
    }
}

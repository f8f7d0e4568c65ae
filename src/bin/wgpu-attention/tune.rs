//! `tune`: measures the plans that could compute a shape on this adapter, and keeps the fastest in a file.

use crate::{BackendOption, FormOption, Verdict, open, say};
use clap::{Args, ValueEnum};
use std::path::PathBuf;
use std::time::Duration;
use wgpu_attention::wgpu::DeviceType;
use wgpu_attention::{
    Alignment, AttentionProblem, AttentionRules, Capabilities, ElementType, LayerConfig,
    LinearProblem, Result, TuneOptions,
};

#[derive(Args)]
#[command(after_help = "\
Of a layer of d_model channels: its two projections and its attention, for calls of that many tokens, and for one token \
against a cache of as many. `run --tuning FILE` and Gpu::load_tuning take what is kept; a file of another adapter, driver \
or version is ignored.")]
pub(crate) struct Options {
    /// Channels of the layer
    #[arg(long, default_value_t = 768, value_name = "C")]
    d_model: usize,
    /// Query heads, a divisor of the channels
    #[arg(long, default_value_t = 12, value_name = "H")]
    heads: usize,
    /// Heads of keys and values, a divisor of the query heads; as many as those without it
    #[arg(long, value_name = "H")]
    kv_heads: Option<usize>,
    /// Tokens of a sequence
    #[arg(long, default_value_t = 1024, value_name = "T")]
    tokens: usize,
    /// Sequences
    #[arg(long, default_value_t = 1, value_name = "B")]
    batch: usize,
    /// Every token sees all others, not just those before it
    #[arg(long)]
    full: bool,
    /// How queries, keys and values are stored
    #[arg(long, value_enum, default_value = "f32")]
    element: ElementOption,
    /// Seconds for each problem
    #[arg(long, default_value_t = 2.0, value_name = "S", value_parser = seconds)]
    seconds: f64,
    /// Keep what is found in this file, beside what it holds of other adapters and shapes
    #[arg(long, value_name = "TUNING.json")]
    file: Option<PathBuf>,
    /// Part of the adapter's name
    #[arg(long, value_name = "NAME")]
    adapter: Option<String>,
    /// The backend
    #[arg(long, value_enum)]
    backend: Option<BackendOption>,
    /// The form of the kernels
    #[arg(long, value_enum, default_value = "auto")]
    form: FormOption,
}

/// An element type, as the command line names it.
#[derive(Clone, Copy, Debug, PartialEq, ValueEnum)]
enum ElementOption {
    F32,
    F16,
    Bf16,
}

impl ElementOption {
    fn element_type(self) -> ElementType {
        match self {
            ElementOption::F32 => ElementType::F32,
            ElementOption::F16 => ElementType::F16,
            ElementOption::Bf16 => ElementType::BF16,
        }
    }
}

/// A time that makes sense.
fn seconds(text: &str) -> std::result::Result<f64, String> {
    let seconds: f64 = text.parse().map_err(|_| "not a number".to_string())?;
    match (0.01..=3600.0).contains(&seconds) {
        true => Ok(seconds),
        false => Err("must be from 0.01 to 3600".into()),
    }
}

pub(crate) fn run(options: &Options) -> Result<Verdict> {
    let kv_heads = options.kv_heads.unwrap_or(options.heads);
    let head_dim = LayerConfig::new(options.d_model, options.d_model, options.heads).head_dim()?;
    let tune = TuneOptions::within(Duration::from_secs_f64(options.seconds));
    let form = options.form.form();
    let causal = |problem: AttentionProblem| AttentionProblem {
        kv_heads,
        rules: match options.full {
            true => AttentionRules::default(),
            false => AttentionRules::causal(Alignment::BottomRight),
        },
        form,
        ..problem.stored_as(options.element.element_type())
    };
    let prefill = causal(AttentionProblem::new(
        options.batch,
        options.heads,
        options.tokens,
        head_dim,
    ));
    let decode = AttentionProblem {
        kv_len: options.tokens,
        ..causal(AttentionProblem::new(
            options.batch,
            options.heads,
            1,
            head_dim,
        ))
    };
    let fused = (options.heads.saturating_add(kv_heads.saturating_mul(2))).saturating_mul(head_dim);
    let projections = [options.tokens, 1].into_iter().flat_map(|tokens| {
        [fused, options.d_model].map(|d_out| LinearProblem {
            batch: options.batch,
            tokens,
            d_in: options.d_model,
            d_out,
            form,
            few: None,
        })
    });
    let projections: Vec<LinearProblem> = projections.collect();
    // What cannot be is an error before anything is measured.
    let any = Capabilities::webgpu_defaults(DeviceType::Other);
    projections
        .iter()
        .try_for_each(|problem| problem.plan(&any).map(drop))?;
    prefill.plan(&any)?;

    let gpu = open(&options.adapter, options.backend)?;
    let info = gpu.adapter_info();
    say(format_args!(
        "adapter     {}, driver {}",
        gpu.describe(),
        format!("{} {}", info.driver, info.driver_info).trim()
    ));
    // A file that could not be written afterwards is an error before anything is measured.
    if let Some(file) = &options.file {
        let known = gpu.load_tuning(file)?;
        gpu.save_tuning(file)?;
        say(format_args!(
            "file        {}, {known} problems of this adapter",
            file.display()
        ));
    }
    for problem in projections {
        say(problem.tune_blocking(&gpu, &tune)?);
    }
    for problem in [prefill, decode] {
        say(problem.tune_blocking(&gpu, &tune)?);
    }
    if let Some(file) = &options.file {
        gpu.save_tuning(file)?;
        say(format_args!("written     {}", file.display()));
    }
    Ok(Verdict::Right)
}

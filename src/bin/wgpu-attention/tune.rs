//! `tune`: measures the plans that could compute a shape on this adapter, and keeps the fastest in a file.

use crate::{BackendOption, FormOption, Verdict, open, say};
use clap::{Args, ValueEnum};
use std::path::PathBuf;
use std::time::Duration;
use wgpu_attention::{
    ElementType, Error, LayerConfig, LayerShape, LayerWeights, MultiHeadAttention, Projection,
    QkvWeights, Result, TuneOptions,
};

#[derive(Args)]
#[command(after_help = "\
Of a layer of d_model channels: its two projections and its attention, for calls of that many tokens, and for one token \
against a cache of as many. What is kept is taken by equal calls: by `run --tuning FILE`, `bench --tuning FILE`, and in a program after \
Gpu::load_tuning. What is of another adapter, driver or version is not.")]
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
    /// How the cache stores keys and values
    #[arg(long, value_enum, default_value = "f32")]
    cache_element: ElementOption,
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
    let &Options {
        d_model,
        heads,
        tokens,
        batch,
        ..
    } = options;
    let kv_heads = options.kv_heads.unwrap_or(heads);
    let config = LayerConfig {
        form: options.form.form(),
        ..LayerConfig::new(d_model, d_model, heads)
            .kv_heads(kv_heads)
            .causal(!options.full)
    };
    // What cannot be is an error before anything is opened.
    let head_dim = config.head_dim()?;
    for (name, value) in [("tokens", tokens), ("batch", batch)] {
        if value == 0 {
            return Err(Error::Parameter {
                parameter: name,
                value: "0".into(),
                rule: "must be at least 1".into(),
            });
        }
    }
    let columns = kv_heads
        .saturating_mul(2)
        .saturating_add(heads)
        .saturating_mul(head_dim);
    let rows = columns.saturating_add(d_model);
    let too_large = Error::Parameter {
        parameter: "d_model",
        value: d_model.to_string(),
        rule: "must be small enough for the weights to fit the memory".into(),
    };
    let Some(weights) = rows.checked_mul(d_model).filter(|count| *count < 1 << 32) else {
        return Err(too_large);
    };
    let weights = vec![0.0; weights];
    let (qkv, output) = weights.split_at(columns * d_model);

    let gpu = open(&options.adapter, options.backend)?;
    let info = gpu.adapter_info();
    say(format_args!(
        "adapter     {}, driver {}",
        gpu.describe(),
        format!("{} {}", info.driver, info.driver_info).trim()
    ));
    if let Some(file) = &options.file {
        // A file that cannot be added to is an error before anything is measured.
        gpu.check_tuning(file)?;
        let known = gpu.load_tuning(file)?;
        say(format_args!(
            "file        {}, {known} problems of this adapter",
            file.display()
        ));
    }
    let weights = LayerWeights {
        qkv: QkvWeights::Fused(Projection::new(qkv)),
        output: Some(Projection::new(output)),
    };
    let layer = MultiHeadAttention::new(&gpu, config, &weights)?;
    let cache = layer
        .cache_config(batch, tokens)
        .stored_as(options.cache_element.element_type());
    let tune = TuneOptions::within(Duration::from_secs_f64(options.seconds));
    for (what, shape) in [
        (
            format!("a call of {tokens} tokens"),
            LayerShape::new(batch, tokens),
        ),
        (
            format!("a step on a cache of {tokens} tokens"),
            LayerShape::cached(&cache, 1),
        ),
    ] {
        say(format_args!(
            "\n{what}: milliseconds a call, fastest first; * is taken from now on"
        ));
        for tuned in layer.tune_blocking(shape, &tune)? {
            say(tuned);
        }
        if let Some(file) = &options.file {
            gpu.save_tuning(file)?;
            say(format_args!("written     {}", file.display()));
        }
    }
    Ok(Verdict::Right)
}

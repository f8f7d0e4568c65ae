//! Multi-head attention as hand-written WGSL compute kernels, on any vendor's GPU through [`wgpu`].
//!
//! ```no_run
//! use wgpu_attention::{Gpu, LayerConfig, LayerWeights, MultiHeadAttention, Projection, QkvWeights};
//!
//! # fn main() -> wgpu_attention::Result<()> {
//! let gpu = Gpu::open_blocking(&Default::default())?;
//! let (d_in, d_out, heads) = (3, 18, 2);
//! let qkv = vec![0.1; 3 * d_out * d_in]; // (3 * d_out, d_in), as nn.Linear keeps it
//! let output = vec![0.2; d_out * d_out];
//! let layer = MultiHeadAttention::new(
//!     &gpu,
//!     LayerConfig::new(d_in, d_out, heads).causal(true),
//!     &LayerWeights {
//!         qkv: QkvWeights::Fused(Projection::new(&qkv)),
//!         output: Some(Projection::new(&output)),
//!     },
//! )?;
//! let x = vec![1.0; 5 * 6 * d_in]; // a batch of 5 sequences of 6 tokens
//! let y = layer.forward_host_blocking(&x, 5, 6, None)?;
//! assert_eq!(y.len(), 5 * 6 * d_out);
//! # Ok(())
//! # }
//! ```
//!
//! # Objects by lifetime
//!
//! | made | object | holds |
//! | --- | --- | --- |
//! | once | [`Gpu`] | device, queue, pipelines; opened here or wrapped around the application's own device |
//! | once | [`MultiHeadAttention`] | the weights, on the GPU |
//! | per shape | [`LayerPlan`], [`Linear`], [`Attention`] | the [`Plan`] (which kernel, and why), its pipeline, memory between dispatches |
//! | per call | [`MultiHeadAttention::encode`] | nothing: it records into the caller's encoder |
//!
//! Everything convenient ([`MultiHeadAttention::forward`], host slices, the blocking twins) is built on
//! `encode`. What waits for the GPU is `async`; twins that end in `_blocking` exist off the web.
//!
//! # What a result means
//!
//! ```text
//! o_i = sum_j softmax_j(s_ij) v_j      s_ij = softcap(scale * q_i . k_j) - slope * |own_i - j| + bias_ij
//! ```
//!
//! over the keys j that query i may see: [`AttentionRules`] says which, and what a score becomes. A key that is hidden adds nothing, whatever
//! lies there, NaN included. A row that sees no key gives 0, and a log-sum-exp of -infinity or, where there is one, of its sink. A NaN or +infinity
//! at a key that is seen makes a NaN of that row and of no other.
//!
//! f32 in, f32 out: within `1e-5 + 1e-4 * |ref|` of the [`reference`](mod@reference) in f64; 16-bit outputs add their rounding. The same
//! call twice gives the same bits. Memory grows with the number of tokens, not with its square.
//!
//! # Features
//!
//! - `cli` (default): the program `wgpu-attention`. An embedder turns it off with `default-features = false`.
//! - `safetensors` (part of `cli`): golden case files (`case`), safetensors files (`tensor_file`) and the
//!   weights of layers in them (`checkpoint`).
//! - `tuning-file` (part of `cli`): what tuning found, kept in a file ([`Gpu::save_tuning`](Gpu)).
//! - `results` (part of `cli`): files of benchmark results, their comparison and reports (`results`).

mod attention;
#[cfg(not(target_family = "wasm"))]
pub mod bench;
mod cache;
#[cfg(feature = "safetensors")]
pub mod case;
#[cfg(feature = "safetensors")]
pub mod checkpoint;
pub mod compare;
mod copy;
mod element;
mod error;
mod gpu;
pub mod kernels;
mod layer;
mod linear;
mod merge;
mod operands;
mod plan;
mod qualify;
pub mod reference;
#[cfg(any(
    not(target_family = "wasm"),
    feature = "safetensors",
    feature = "tuning-file"
))]
mod replace_file;
#[cfg(all(feature = "results", not(target_family = "wasm")))]
pub mod results;
mod rotary;
mod tensor;
#[cfg(feature = "safetensors")]
pub mod tensor_file;
mod tune;

pub use attention::{
    Alignment, Attention, AttentionArguments, AttentionProblem, AttentionRules, AttentionWeights,
    Rule, RuleArguments, WeightsArguments, WeightsStage,
};
pub use cache::{AppendArguments, KvCache, KvCacheConfig, PageConfig, Prefix};
pub use copy::TensorCopy;
pub use element::{Element, ElementType};
pub use error::{Error, Result};
#[cfg(not(target_family = "wasm"))]
pub use gpu::adapters_blocking;
pub use gpu::{
    AdapterReport, Capabilities, Gpu, GpuOptions, LimitProfile, ObjectsMade, Span, Timestamps,
    adapters, install_hint,
};
pub use kernels::{Form, Tier};
pub use layer::{
    HeadProjections, LayerArguments, LayerConfig, LayerPlan, LayerShape, LayerWeights,
    MatrixLayout, MultiHeadAttention, Projection, ProjectionTensors, QkvTensors, QkvWeights, Step,
};
#[doc(hidden)]
pub use linear::{CacheArguments, CacheColumns};
pub use linear::{Linear, LinearArguments, LinearProblem};
pub use merge::{Merge, MergeArguments, MergeProblem};
pub use plan::Plan;
pub use qualify::{Qualification, Verdict};
pub use rotary::{Rotary, RotaryArguments, RotaryConfig, RotaryPairing};
pub use tensor::{Tensor, TensorView};
pub use tune::{Measured, TuneOptions, Tuned};

/// The host types of 16-bit elements: `half::f16`, `half::bf16`.
pub use half;
pub use wgpu;

/// The examples of the README compile.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

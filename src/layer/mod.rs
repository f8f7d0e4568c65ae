//! The multi-head attention layer: projections of queries, keys and values, attention, output projection.
//!
//! ```text
//! x (B, T, d_in) --linear--> (B, T, q|k|v) --attention--> (B, T, H*Dv) --linear--> y (B, T, d_out)
//! ```
//!
//! Three dispatches. q, k and v are strided views of what the first one wrote, and the heads lie side by side
//! in what the second one wrote: nothing is transposed or copied between them. In cross-attention q is made of x, and
//! k and v of a source, which is a dispatch more:
//!
//! ```text
//! x      (B, T, d_in)      --linear--> (B, T, q)    --attention--> (B, T, H*Dv) --linear--> y (B, T, d_out)
//! source (B, Ts, d_source) --linear--> (B, Ts, k|v)
//! ```
//!
//! Objects by lifetime: [`MultiHeadAttention`] once, [`LayerPlan`] per shape, and per call
//! [`MultiHeadAttention::encode`].

mod config;
mod encode;
mod plan;
mod weights;

pub use config::LayerConfig;
pub use encode::LayerArguments;
pub use plan::{LayerPlan, LayerShape, Step};
pub use weights::{
    HeadProjections, LayerWeights, MatrixLayout, Projection, ProjectionTensors, QkvTensors,
    QkvWeights,
};

use crate::cache::{KvCache, KvCacheConfig};
use crate::element::ElementType;
use crate::gpu::Gpu;
use crate::rotary::{Rotary, RotaryPairing};
use crate::tensor::{Tensor, elements, shape_text};
use crate::{Error, Result};
use config::Widths;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use weights::QkvViews;

/// A multi-head attention layer whose weights are on a GPU. Cheap to clone, `Send + Sync`.
#[derive(Clone)]
pub struct MultiHeadAttention {
    gpu: Gpu,
    config: LayerConfig,
    widths: Widths,
    projections: QkvViews,
    output: Option<ProjectionTensors>,
    rotary: Option<Rotary>,
    /// The plans of the shapes that [`forward`](Self::forward) or [`prefill`](Self::prefill), and [`step`](Self::step), saw last.
    last: Arc<[Mutex<Option<LayerPlan>>; 2]>,
}

impl fmt::Debug for MultiHeadAttention {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MultiHeadAttention")
            .field("gpu", &self.gpu)
            .field("config", &self.config)
            .finish_non_exhaustive()
    }
}

impl MultiHeadAttention {
    /// Uploads the weights, in whatever form they come.
    ///
    /// ```
    /// # use wgpu_attention::*;
    /// # fn layer(gpu: &Gpu, c_attn: &[f32], c_attn_b: &[f32], c_proj: &[f32], c_proj_b: &[f32]) -> Result<()> {
    /// // A layer of GPT-2 small, as its checkpoint keeps it.
    /// let layer = MultiHeadAttention::new(
    ///     gpu,
    ///     LayerConfig::new(768, 768, 12).causal(true),
    ///     &LayerWeights {
    ///         qkv: QkvWeights::Fused(Projection::conv1d(c_attn).with_bias(c_attn_b)),
    ///         output: Some(Projection::conv1d(c_proj).with_bias(c_proj_b)),
    ///     },
    /// )?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::Parameter`] as [`LayerConfig::head_dim`], for weights in a form that this configuration does not have, and
    /// where `d_out` is not the width of all heads though there is no output projection; [`Error::Shape`] naming the weight
    /// whose size is not what the configuration calls for; [`Error::LimitExceeded`] if a head or a weight is too large for
    /// this device; [`Error::OutOfMemory`].
    pub fn new(gpu: &Gpu, config: LayerConfig, weights: &LayerWeights) -> Result<Self> {
        let widths = Self::check(gpu, &config, weights.output.is_some())?;
        let LayerConfig {
            d_in,
            d_source,
            d_out,
            ..
        } = config;
        // All sizes are right before the first upload.
        let qkv = weights.dense_qkv(&config, &widths)?;
        let output = weights.dense_output(d_out, widths.context)?;
        let qkv = match qkv {
            (qkv, None) => QkvTensors::Fused(qkv.upload(gpu, widths.qkv, d_in)?),
            (q, Some(kv)) => QkvTensors::Split {
                q: q.upload(gpu, widths.q, d_in)?,
                kv: kv.upload(gpu, widths.kv, d_source)?,
            },
        };
        let output = output.map(|dense| dense.upload(gpu, d_out, widths.context));
        Self::build(gpu, config, widths, qkv, output.transpose()?)
    }

    /// A layer over weights that are on the GPU already. Nothing is copied.
    ///
    /// `output` is `(d_out, H * Dv)`, or left out.
    ///
    /// # Errors
    ///
    /// As [`new`](Self::new), and [`Error::Type`], [`Error::Layout`], [`Error::OtherDevice`].
    pub fn from_tensors(
        gpu: &Gpu,
        config: LayerConfig,
        qkv: QkvTensors,
        output: Option<ProjectionTensors>,
    ) -> Result<Self> {
        let widths = Self::check(gpu, &config, output.is_some())?;
        Self::build(gpu, config, widths, qkv, output)
    }

    /// What must hold before anything is allocated.
    fn check(gpu: &Gpu, config: &LayerConfig, output: bool) -> Result<Widths> {
        let widths = config.widths()?;
        if !output && config.d_out != widths.context {
            return Err(Error::parameter(
                "d_out",
                config.d_out,
                format!(
                    "must be heads * value_dim = {} where there is no output projection",
                    widths.context
                ),
            ));
        }
        // A head that no kernel takes, or a weight that cannot be bound, is refused now, not at the first call.
        let capabilities = gpu.capabilities();
        config.attention(1, 1)?.plan(capabilities)?;
        let available = capabilities.max_binding_bytes;
        let (qkv, [q_rows, kv_rows]) = match config.d_source == config.d_in {
            true => ("the qkv weight", [widths.qkv, 0]),
            false => ("the q weight", [widths.q, widths.kv]),
        };
        let output_rows = if output { config.d_out } else { 0 };
        for (name, shape) in [
            (qkv, [q_rows, config.d_in]),
            ("the kv weight", [kv_rows, config.d_source]),
            ("the output weight", [output_rows, widths.context]),
        ] {
            let needed = elements(name, &shape)? * ElementType::F32.size();
            if needed > available {
                let limit = "max_storage_buffer_binding_size";
                return Err(Error::limit_bytes(name, limit, needed, available));
            }
        }
        Ok(widths)
    }

    fn build(
        gpu: &Gpu,
        config: LayerConfig,
        widths: Widths,
        qkv: QkvTensors,
        output: Option<ProjectionTensors>,
    ) -> Result<Self> {
        if let Some(output) = &output {
            output.check("output", gpu, config.d_out, widths.context)?;
        }
        Ok(MultiHeadAttention {
            gpu: gpu.clone(),
            projections: qkv.views(gpu, &config, &widths)?,
            config,
            widths,
            output,
            rotary: None,
            last: Default::default(),
        })
    }

    /// With rotary embedding of queries and keys, by the positions of their tokens: from 0, or in calls on a cache from
    /// the length of each sequence.
    ///
    /// # Errors
    ///
    /// [`Error::Parameter`] if more channels are turned than a head has, [`Error::OtherDevice`].
    pub fn with_rotary(self, rotary: &Rotary) -> Result<Self> {
        rotary.expect_head_dim(self.widths.head_dim)?;
        rotary.table().expect_gpu("rotary", &self.gpu)?;
        Ok(MultiHeadAttention {
            rotary: Some(rotary.clone()),
            last: Default::default(),
            ..self
        })
    }

    /// Its rotary embedding.
    pub fn rotary(&self) -> Option<&Rotary> {
        self.rotary.as_ref()
    }

    fn rotary_kind(&self) -> Option<(usize, RotaryPairing)> {
        let rotary = self.rotary.as_ref();
        rotary.map(|rotary| (rotary.dims(), rotary.pairing()))
    }

    /// A cache for this layer: that many sequences of up to `capacity` tokens each, stored as f32. Change its fields for
    /// another type, or for pages.
    pub fn cache_config(&self, batch: usize, capacity: usize) -> KvCacheConfig {
        KvCacheConfig {
            value_dim: self.widths.value_dim,
            ..KvCacheConfig::new(batch, capacity, self.config.kv_heads, self.widths.head_dim)
        }
    }

    /// What the layer is.
    pub fn config(&self) -> &LayerConfig {
        &self.config
    }

    /// The GPU it is on.
    pub fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// Computes y `(B, T, d_out)` from x `(B, T, d_in)` into a new tensor and submits; does not wait for the
    /// result. Plans on the first call of a shape and keeps that plan until the shape changes.
    ///
    /// Off the web, a caller who never reads a result is held back once 32 submissions are unfinished.
    ///
    /// # Errors
    ///
    /// As [`plan`](Self::plan) and [`encode`](Self::encode). A layer whose rules take tensors besides the key mask wants
    /// `encode`.
    pub fn forward(&self, x: &Tensor, key_mask: Option<&Tensor>) -> Result<Tensor> {
        self.forward_of(x, None, key_mask)
    }

    /// Cross-attention: [`forward`](Self::forward) with keys and values made of `source` `(B, Ts, d_source)`; the key
    /// mask is `(B, Ts)`.
    ///
    /// # Errors
    ///
    /// As [`forward`](Self::forward).
    pub fn forward_cross(
        &self,
        x: &Tensor,
        source: &Tensor,
        key_mask: Option<&Tensor>,
    ) -> Result<Tensor> {
        self.forward_of(x, Some(source), key_mask)
    }

    fn forward_of(
        &self,
        x: &Tensor,
        source: Option<&Tensor>,
        key_mask: Option<&Tensor>,
    ) -> Result<Tensor> {
        let sizes = |name, tensor: &Tensor, axes: &str, channels: usize| match *tensor.shape() {
            [batch, tokens, own] if own == channels => Ok((batch, tokens)),
            _ => Err(Error::shape(
                name,
                format!("({axes}, {channels})"),
                shape_text(tensor.shape()),
            )),
        };
        let (batch, tokens) = sizes("x", x, "B, T", self.config.d_in)?;
        let shape = LayerShape {
            source_tokens: match source {
                Some(source) => Some(sizes("source", source, "B, Ts", self.config.d_source)?.1),
                None => None,
            },
            ..LayerShape::new(batch, tokens).mask(key_mask.is_some())
        };
        let plan = self.plan_for(shape, 0)?;
        let shape = [batch, tokens, self.config.d_out];
        let y = Tensor::empty(&self.gpu, &shape, ElementType::F32)?;
        let (source, mask) = (source.map(Tensor::view), key_mask.map(Tensor::view));
        let (x, out) = (x.view(), y.view());
        let arguments = LayerArguments {
            source: source.as_ref(),
            key_mask: mask.as_ref(),
            ..LayerArguments::new(&x, &out)
        };
        self.gpu
            .record_and_submit(|encoder| self.encode(encoder, &plan, arguments))?;
        Ok(y)
    }

    /// Computes y `(B, T, d_out)` of the first tokens x `(B, T, d_in)` of the sequences of a cache, or of the next ones, and
    /// submits; does not wait. Their keys and values are in the cache afterwards. Each token attends to those before it and
    /// to itself if the layer is causal, else to all that its sequence then has.
    ///
    /// `tokens` says how many of the T tokens each sequence gets, for prompts of different lengths; rows of y from there on
    /// are those of an attention that saw nothing. `None`: all.
    ///
    /// Plans on the first call of a shape and keeps that plan until the shape changes, apart from the one of
    /// [`step`](Self::step). For an encoder of your own see [`encode_cached`](Self::encode_cached).
    ///
    /// # Errors
    ///
    /// As [`plan`](Self::plan) and [`encode_cached`](Self::encode_cached). The cache is unchanged if it is too small.
    pub fn prefill(
        &self,
        x: &Tensor,
        tokens: Option<&[usize]>,
        cache: &mut KvCache,
    ) -> Result<Tensor> {
        self.cached(x, tokens, cache, 0)
    }

    /// [`prefill`](Self::prefill) with a few tokens x `(B, T, d_in)` for every sequence: one, or those that a draft model
    /// proposes. From the second step on nothing is made but y, and bind groups for x and y;
    /// [`encode_cached`](Self::encode_cached) with an x and a y that stay makes nothing.
    ///
    /// ```
    /// # use wgpu_attention::*;
    /// # async fn generate(layer: &MultiHeadAttention, prompt: &Tensor, next: fn(Vec<f32>) -> Tensor) -> Result<()> {
    /// let mut cache = KvCache::new(layer.gpu(), layer.cache_config(1, 4096))?;
    /// let mut y = layer.prefill(prompt, None, &mut cache)?; // (1, T, d_in)
    /// while cache.lengths()[0] < 4096 {
    ///     let x = next(y.read().await?); // (1, 1, d_in)
    ///     y = layer.step(&x, &mut cache)?;
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// As [`prefill`](Self::prefill).
    pub fn step(&self, x: &Tensor, cache: &mut KvCache) -> Result<Tensor> {
        self.cached(x, None, cache, 1)
    }

    fn cached(
        &self,
        x: &Tensor,
        tokens: Option<&[usize]>,
        cache: &mut KvCache,
        kept: usize,
    ) -> Result<Tensor> {
        let config = *cache.config();
        let new = match *x.shape() {
            [batch, new, own] if batch == config.batch && own == self.config.d_in => new,
            _ => {
                let expected = format!("({}, T, {})", config.batch, self.config.d_in);
                return Err(Error::shape("x", expected, shape_text(x.shape())));
            }
        };
        let shape = LayerShape {
            q_lens: tokens.is_some(),
            ..LayerShape::cached(&config, new)
        };
        let plan = self.plan_for(shape, kept)?;
        let y = [config.batch, new, self.config.d_out];
        let y = Tensor::empty(&self.gpu, &y, ElementType::F32)?;
        let (from, to) = (x.view(), y.view());
        let arguments = LayerArguments::new(&from, &to);
        let before = cache.lengths();
        let submitted = self.gpu.record_and_submit(|encoder| {
            self.encode_cached(encoder, &plan, cache, tokens, arguments)
        });
        if submitted.is_err() {
            cache.restore(&before);
        }
        submitted?;
        Ok(y)
    }

    /// The kept plan if it is for this shape, or a new one, which is then kept.
    fn plan_for(&self, shape: LayerShape, kept: usize) -> Result<LayerPlan> {
        let kept = || {
            self.last[kept]
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
        };
        {
            let mut last = kept();
            if let Some(plan) = last.as_ref().filter(|plan| plan.shape == shape) {
                return Ok(plan.clone());
            }
            // The old workspace goes before the new one comes.
            *last = None;
        }
        // Planned outside the lock: compiling may take a second, and others may come with the shape they had.
        let plan = self.plan(shape)?;
        *kept() = Some(plan.clone());
        Ok(plan)
    }

    /// Uploads x `(B, T, d_in)` in row-major order, computes, and reads y `(B, T, d_out)` back.
    ///
    /// `key_mask` is `(B, T)`: false hides the token from every query.
    ///
    /// # Errors
    ///
    /// [`Error::Shape`] if a slice has not as many values as `batch` and `tokens` call for, and as
    /// [`forward`](Self::forward).
    pub async fn forward_host(
        &self,
        x: &[f32],
        batch: usize,
        tokens: usize,
        key_mask: Option<&[bool]>,
    ) -> Result<Vec<f32>> {
        let named = |error, name: &str| match error {
            Error::Shape {
                argument,
                expected,
                got,
            } if argument == "values" => Error::Shape {
                argument: name.into(),
                expected,
                got,
            },
            other => other,
        };
        let x = Tensor::from_slice(&self.gpu, &[batch, tokens, self.config.d_in], x)
            .map_err(|error| named(error, "x"))?;
        let key_mask = key_mask
            .map(|mask| Tensor::from_slice(&self.gpu, &[batch, tokens], mask))
            .transpose()
            .map_err(|error| named(error, "key_mask"))?;
        self.forward(&x, key_mask.as_ref())?.read().await
    }

    /// [`forward_host`](Self::forward_host), waiting on this thread.
    ///
    /// # Errors
    ///
    /// As [`forward_host`](Self::forward_host).
    #[cfg(not(target_family = "wasm"))]
    pub fn forward_host_blocking(
        &self,
        x: &[f32],
        batch: usize,
        tokens: usize,
        key_mask: Option<&[bool]>,
    ) -> Result<Vec<f32>> {
        pollster::block_on(self.forward_host(x, batch, tokens, key_mask))
    }
}

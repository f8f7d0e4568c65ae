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

use crate::element::ElementType;
use crate::gpu::Gpu;
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
    /// The plan of the shape that [`forward`](Self::forward) saw last.
    last: Arc<Mutex<Option<LayerPlan>>>,
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
            last: Default::default(),
        })
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
        let plan = self.plan_for(shape)?;
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

    /// The kept plan if it is for this shape, or a new one, which is then kept.
    fn plan_for(&self, shape: LayerShape) -> Result<LayerPlan> {
        let kept = || self.last.lock().unwrap_or_else(PoisonError::into_inner);
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

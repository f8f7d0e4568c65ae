//! A layer for one shape: its dispatches, and the memory between them.

use super::config::Widths;
use super::{LayerConfig, MultiHeadAttention};
use crate::attention::{
    Attention, AttentionProblem, AttentionRules, AttentionWeights, WeightsStage,
};
use crate::element::ElementType;
use crate::linear::{Linear, LinearProblem};
use crate::plan::Plan;
use crate::tensor::{Tensor, TensorView, elements};
use crate::{Error, Result};
use std::fmt;

/// What the calls of a [`LayerPlan`] are like. Plain data: start from [`LayerShape::new`] and change fields.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LayerShape {
    /// Batch items (B).
    pub batch: usize,
    /// Tokens of x (T).
    pub tokens: usize,
    /// Tokens of what keys and values are made of (Ts): cross-attention. `None` is self-attention, Ts = T.
    pub source_tokens: Option<usize>,
    /// Whether values are made of a third tensor, as long as the source. Needs `source_tokens`.
    pub value_source: bool,
    /// Whether calls come with a mask, of keys or of pairs. (This, `bias`, `kv_lens` and `q_lens` are added to what
    /// the layer's rules say.)
    pub mask: bool,
    /// Whether calls come with a bias of pairs.
    pub bias: bool,
    /// Whether calls come with the number of keys of each batch item.
    pub kv_lens: bool,
    /// Whether calls come with the number of queries of each batch item.
    pub q_lens: bool,
    /// Whether calls may ask for the attention weights.
    pub weights: bool,
}

impl LayerShape {
    /// Self-attention with no tensor but x and y.
    pub fn new(batch: usize, tokens: usize) -> Self {
        LayerShape {
            batch,
            tokens,
            source_tokens: None,
            value_source: false,
            mask: false,
            bias: false,
            kv_lens: false,
            q_lens: false,
            weights: false,
        }
    }

    /// Cross-attention: keys and values are made of that many tokens of another tensor.
    #[must_use]
    pub fn source(self, tokens: usize) -> Self {
        LayerShape {
            source_tokens: Some(tokens),
            ..self
        }
    }

    /// With a mask or without.
    #[must_use]
    pub fn mask(self, mask: bool) -> Self {
        LayerShape { mask, ..self }
    }

    /// With the attention weights or without.
    #[must_use]
    pub fn weights(self, weights: bool) -> Self {
        LayerShape { weights, ..self }
    }

    /// Tokens that keys and values are made of (Ts).
    pub(super) fn keys(&self) -> usize {
        self.source_tokens.unwrap_or(self.tokens)
    }
}

/// A layer that is planned and compiled for one shape, with the memory between its dispatches. Cheap to clone;
/// clones share that memory, and so do all calls that are encoded with it: the GPU runs them one after another.
#[derive(Clone)]
pub struct LayerPlan {
    /// What the layer is that it was made for.
    pub(super) config: LayerConfig,
    pub(super) shape: LayerShape,
    /// What makes q, k and v, and where each dispatch writes.
    pub(super) projections: Vec<(Step, Linear, TensorView)>,
    /// `(B, T, H, D)`, `(B, Ts, Hkv, D)`, `(B, Ts, Hkv, Dv)`: views of what the projections write.
    pub(super) qkv: [TensorView; 3],
    pub(super) attention: Attention,
    pub(super) weights: Option<AttentionWeights>,
    pub(super) output_projection: Option<Linear>,
    /// `(B, T, H * Dv)`, heads side by side; absent where the attention writes y itself.
    pub(super) context: Option<Tensor>,
    workspace_bytes: u64,
}

/// One dispatch of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Step {
    /// Self-attention: x to q, k and v of all heads.
    QkvProjection,
    /// x to q, where k and v are made of something else, or their weights lie apart.
    QProjection,
    /// The source to k and v.
    KvProjection,
    /// The source to k, where v is made of something else.
    KProjection,
    /// The source of values to v.
    VProjection,
    /// Scores, rules, softmax and values.
    Attention,
    /// The attention weights, in calls that ask for them.
    Weights,
    /// The heads' outputs to y.
    OutputProjection,
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Step::QkvProjection => "QKV projection",
            Step::QProjection => "Q projection",
            Step::KvProjection => "KV projection",
            Step::KProjection => "K projection",
            Step::VProjection => "V projection",
            Step::Attention => "attention",
            Step::Weights => "attention weights",
            Step::OutputProjection => "output projection",
        })
    }
}

impl MultiHeadAttention {
    /// Plans and compiles the layer for calls of that shape, and allocates what lies between its dispatches: q, k, v and
    /// the heads' outputs of all tokens, nothing of size T x T.
    ///
    /// # Errors
    ///
    /// [`Error::Parameter`] where shape and layer contradict each other, or cross-attention has a rule that counts from a
    /// token's own key and the layer's rules do not say where that is; [`Error::LimitExceeded`] for what does not fit the
    /// device, before anything is allocated; [`Error::OutOfMemory`], [`Error::Shader`], [`Error::DeviceLost`].
    pub fn plan(&self, shape: LayerShape) -> Result<LayerPlan> {
        let config = &self.config;
        let LayerShape { batch, tokens, .. } = shape;
        let cross = shape.source_tokens.is_some();
        if !cross && config.d_source != config.d_in {
            return Err(Error::parameter(
                "source_tokens",
                "none",
                format!(
                    "must be given: keys and values are made of {} channels, x has {}",
                    config.d_source, config.d_in
                ),
            ));
        }
        if !cross && shape.value_source {
            return Err(Error::parameter(
                "value_source",
                true,
                "needs source_tokens: values alone cannot come from elsewhere",
            ));
        }
        let base = config.attention(batch, tokens)?;
        let problem = AttentionProblem {
            kv_len: shape.keys(),
            rules: AttentionRules {
                alignment: if cross {
                    config.rules.alignment
                } else {
                    base.rules.alignment
                },
                mask: base.rules.mask || shape.mask,
                bias: base.rules.bias || shape.bias,
                kv_lens: base.rules.kv_lens || shape.kv_lens,
                q_lens: base.rules.q_lens || shape.q_lens,
                ..base.rules
            },
            ..base
        };
        self.check_bindings(&shape)?;
        let linear = |tokens, d_in, d_out| {
            let problem = LinearProblem {
                batch,
                tokens,
                d_in,
                d_out,
                form: config.form,
                few: None,
            };
            Linear::new(&self.gpu, problem)
        };
        let Widths {
            head_dim,
            value_dim,
            q,
            k,
            kv,
            qkv,
            context,
        } = self.widths;
        let (d_in, d_source, keys) = (config.d_in, config.d_source, shape.keys());
        let fused = !cross && self.projections.qkv.is_some();
        let projections = if fused {
            vec![(Step::QkvProjection, linear(tokens, d_in, qkv)?)]
        } else if shape.value_source {
            vec![
                (Step::QProjection, linear(tokens, d_in, q)?),
                (Step::KProjection, linear(keys, d_source, k)?),
                (Step::VProjection, linear(keys, d_source, kv - k)?),
            ]
        } else {
            vec![
                (Step::QProjection, linear(tokens, d_in, q)?),
                (Step::KvProjection, linear(keys, d_source, kv)?),
            ]
        };
        let weights = shape
            .weights
            .then(|| AttentionWeights::new(&self.gpu, problem.clone(), WeightsStage::Weights))
            .transpose()?;
        let attention = Attention::new(&self.gpu, problem)?;
        let output_projection = self
            .output
            .as_ref()
            .map(|_| linear(tokens, context, config.d_out))
            .transpose()?;

        // Everything fits: now memory.
        let mut workspace_bytes = 0;
        let mut tensor = |tokens, channels| {
            let tensor = Tensor::empty(&self.gpu, &[batch, tokens, channels], ElementType::F32)?;
            workspace_bytes += tensor.buffer().size();
            Ok::<_, Error>(tensor)
        };
        // Where all are made at once, they lie side by side.
        let (all, queries, both) = if fused {
            let all = tensor(tokens, qkv)?.view();
            (
                Some(all.clone()),
                all.slice(2, 0..q)?,
                all.slice(2, q..qkv)?,
            )
        } else {
            (None, tensor(tokens, q)?.view(), tensor(keys, kv)?.view())
        };
        let (key, value) = (both.slice(2, 0..k)?, both.slice(2, k..kv)?);
        let context = output_projection.as_ref().map(|_| tensor(tokens, context));
        let context = context.transpose()?;
        let tables = [Some(attention.plan()), weights.as_ref().map(|w| w.plan())];
        workspace_bytes += tables
            .iter()
            .flatten()
            .map(|p| p.workspace_bytes)
            .sum::<u64>();
        let to = |step| match step {
            Step::QkvProjection => all.as_ref().unwrap_or(&queries).clone(),
            Step::QProjection => queries.clone(),
            Step::KvProjection => both.clone(),
            Step::KProjection => key.clone(),
            _ => value.clone(),
        };
        Ok(LayerPlan {
            config: config.clone(),
            shape,
            projections: projections
                .into_iter()
                .map(|(step, linear)| (step, linear, to(step)))
                .collect(),
            qkv: [
                queries.split_axis(2, &[config.heads, head_dim])?,
                key.split_axis(2, &[config.kv_heads, head_dim])?,
                value.split_axis(2, &[config.kv_heads, value_dim])?,
            ],
            attention,
            weights,
            output_projection,
            context,
            workspace_bytes,
        })
    }

    /// The largest things a call binds are x, and q, k and v of all tokens together.
    fn check_bindings(&self, shape: &LayerShape) -> Result<()> {
        let (config, widths) = (&self.config, &self.widths);
        let (of_x, width) = match shape.source_tokens {
            None => ("q, k and v", widths.qkv),
            Some(_) => ("q", widths.q),
        };
        let widest = config.d_in.max(width).max(widths.context).max(config.d_out);
        let sides = [
            (of_x, shape.tokens, widest),
            ("k and v", shape.keys(), config.d_source.max(widths.kv)),
        ];
        let available = self.gpu.capabilities().max_binding_bytes;
        let batch = shape.batch;
        for (what, tokens, widest) in sides {
            let count = elements("batch * tokens * channels", &[batch, tokens, widest])?;
            let needed = count * ElementType::F32.size();
            if needed > available {
                return Err(Error::limit_bytes(
                    format!("{what} of a batch of {batch} x {tokens} tokens, {widest} channels"),
                    "max_storage_buffer_binding_size",
                    needed,
                    available,
                ));
            }
        }
        Ok(())
    }
}

impl LayerPlan {
    /// The dispatches in order, each with its plan; [`Step::Weights`] is left out of calls that do not ask for it.
    pub fn steps(&self) -> Vec<(Step, &Plan)> {
        let projections = self.projections.iter();
        let mut steps: Vec<_> = projections
            .map(|(step, linear, _)| (*step, linear.plan()))
            .collect();
        steps.push((Step::Attention, self.attention.plan()));
        let weights = self.weights.as_ref();
        steps.extend(weights.map(|weights| (Step::Weights, weights.plan())));
        let output = self.output_projection.as_ref();
        steps.extend(output.map(|output| (Step::OutputProjection, output.plan())));
        steps
    }

    /// Useful floating-point operations of one call with all its steps: a multiply-add is two, causal work is counted once.
    pub fn flops(&self) -> u64 {
        self.steps()
            .iter()
            .fold(0u64, |sum, (_, plan)| sum.saturating_add(plan.flops))
    }

    /// Bytes of GPU memory that it holds between the dispatches: grows with the number of tokens.
    pub fn workspace_bytes(&self) -> u64 {
        self.workspace_bytes
    }

    /// What calls it is for.
    pub fn shape(&self) -> &LayerShape {
        &self.shape
    }
}

impl fmt::Debug for LayerPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LayerPlan")
            .field("config", &self.config)
            .field("shape", &self.shape)
            .finish_non_exhaustive()
    }
}

impl fmt::Display for LayerPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (step, plan) in self.steps() {
            writeln!(f, "{step:<18} {plan}")?;
        }
        write!(f, "{:<18} {} bytes", "workspace", self.workspace_bytes())
    }
}

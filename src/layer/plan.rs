//! A layer for one shape: its dispatches, and the memory between them.

use super::config::Widths;
use super::{LayerConfig, MultiHeadAttention};
use crate::attention::{
    Alignment, Attention, AttentionProblem, AttentionRules, AttentionWeights, WeightsStage,
};
use crate::cache::{Append, KvCacheConfig};
use crate::element::ElementType;
use crate::linear::{CacheColumns, Linear, LinearProblem};
use crate::plan::Plan;
use crate::rotary::RotaryPairing;
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
    /// Calls on a cache of this configuration: [`MultiHeadAttention::encode_cached`]. Keys are then those of the cache,
    /// Ts is its capacity; `kv_lens` comes from the cache, and `q_lens` says that calls tell how many of the T tokens
    /// each sequence gets.
    pub cache: Option<KvCacheConfig>,
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
            cache: None,
        }
    }

    /// T new tokens for every sequence of a cache.
    pub fn cached(cache: &KvCacheConfig, tokens: usize) -> Self {
        LayerShape {
            cache: Some(*cache),
            ..LayerShape::new(cache.batch, tokens)
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

    /// Tokens that a call makes keys and values of.
    pub(super) fn made(&self) -> usize {
        self.source_tokens.unwrap_or(self.tokens)
    }

    /// Keys that there may be (Ts).
    pub(super) fn keys(&self) -> usize {
        self.cache.map_or(self.made(), |cache| cache.capacity)
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
    /// `(B, T, H, D)`: the queries as attention reads them.
    pub(super) q: TensorView,
    /// `(B, Ts, Hkv, D)`, `(B, Ts, Hkv, Dv)`: keys and values as attention reads them; `None`: those of the cache.
    pub(super) kv: Option<[TensorView; 2]>,
    /// What stands between the projections and the attention.
    pub(super) placing: Placing,
    /// Of rotary embedding, which the layer must have as well: channels and pairing.
    pub(super) rotary: Option<(usize, RotaryPairing)>,
    pub(super) attention: Attention,
    pub(super) weights: Option<AttentionWeights>,
    pub(super) output_projection: Option<Linear>,
    /// `(B, T, H * Dv)`, heads side by side; absent where the attention writes y itself.
    pub(super) context: Option<TensorView>,
    workspace_bytes: u64,
}

/// How queries, keys and values come from where they are projected to where attention reads them.
#[derive(Clone)]
pub(super) enum Placing {
    /// They stay.
    InPlace,
    /// Queries and keys are turned: `(B, T, H + Hkv, D)` as projected, and where they go.
    Turned {
        append: Append,
        from: TensorView,
        to: TensorView,
    },
    /// Keys and values as projected go into the cache; where there is rotary embedding queries go from one place to another.
    Appended {
        append: Append,
        q: Option<[TensorView; 2]>,
        kv: [TensorView; 2],
    },
    /// The projection writes keys and values into the cache itself.
    Straight,
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
    /// Queries and keys turned by their positions.
    Rotary,
    /// Keys and values into the cache, where the projection does not write them there itself; with rotary embedding keys
    /// are turned on the way, and so are queries.
    Append,
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
            Step::Rotary => "rotary",
            Step::Append => "append",
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
        self.check_cache(&shape)?;
        if let Some(rotary) = &self.rotary {
            if cross {
                let rule = "must be none in a layer with rotary embedding: keys of another tensor have no position";
                return Err(Error::parameter("source_tokens", shape.made(), rule));
            }
            if shape.cache.is_none() {
                rotary.expect_positions(tokens)?;
            }
        }
        let problem = AttentionProblem {
            kv_len: shape.keys(),
            kv_type: shape
                .cache
                .map_or(ElementType::F32, |cache| cache.element_type),
            page_size: shape.cache.and_then(|cache| Some(cache.pages?.size)),
            rules: AttentionRules {
                alignment: match (cross, shape.cache) {
                    (true, _) => config.rules.alignment,
                    (false, None) => base.rules.alignment,
                    (false, Some(_)) => Some(Alignment::BottomRight),
                },
                mask: base.rules.mask || shape.mask,
                bias: base.rules.bias || shape.bias,
                kv_lens: base.rules.kv_lens || shape.kv_lens || shape.cache.is_some(),
                q_lens: base.rules.q_lens || shape.q_lens,
                ..base.rules
            },
            ..base
        };
        self.check_bindings(&shape)?;
        let linear_problem = |tokens, d_in, d_out| LinearProblem {
            batch,
            tokens,
            d_in,
            d_out,
            form: config.form,
            few: None,
        };
        let linear =
            |tokens, d_in, d_out| Linear::new(&self.gpu, linear_problem(tokens, d_in, d_out));
        let Widths {
            head_dim,
            value_dim,
            q,
            k,
            kv,
            qkv,
            context,
        } = self.widths;
        let (d_in, d_source, made) = (config.d_in, config.d_source, shape.made());
        let fused = !cross && self.projections.qkv.is_some();
        // A projection turns nothing, and writes 16-bit elements two by two.
        let straight = shape.cache.filter(|cache| {
            let whole_words = head_dim.is_multiple_of(2) && value_dim.is_multiple_of(2);
            self.rotary.is_none() && (cache.element_type.size() == 4 || whole_words)
        });
        let into_cache = |d_out, q_columns, cache: &KvCacheConfig| {
            let columns = CacheColumns {
                q_columns,
                kv_heads: cache.kv_heads,
                head_dim: cache.head_dim,
                value_dim: cache.value_dim,
                element_type: cache.element_type,
                page_size: cache.pages.map(|pages| pages.size),
                capacity: cache.capacity,
            };
            Linear::into_cache(&self.gpu, linear_problem(tokens, d_in, d_out), columns)
        };
        let projections = match (fused, &straight) {
            (true, None) => vec![(Step::QkvProjection, linear(tokens, d_in, qkv)?)],
            (true, Some(cache)) => vec![(Step::QkvProjection, into_cache(qkv, q, cache)?)],
            (false, Some(cache)) => vec![
                (Step::QProjection, linear(tokens, d_in, q)?),
                (Step::KvProjection, into_cache(kv, 0, cache)?),
            ],
            (false, None) if shape.value_source => vec![
                (Step::QProjection, linear(tokens, d_in, q)?),
                (Step::KProjection, linear(made, d_source, k)?),
                (Step::VProjection, linear(made, d_source, kv - k)?),
            ],
            (false, None) => vec![
                (Step::QProjection, linear(tokens, d_in, q)?),
                (Step::KvProjection, linear(made, d_source, kv)?),
            ],
        };
        let append = match (&shape.cache, &self.rotary, &straight) {
            (None, None, _) | (_, _, Some(_)) => None,
            _ => {
                // Two channels at a time: q where it is turned, k always, v into a cache.
                let pairs = |heads: usize, channels: usize| (heads * channels.div_ceil(2)) as u64;
                let turned_q = self.rotary.as_ref().map_or(0, |_| config.heads);
                let moved_v = shape.cache.map_or(0, |_| config.kv_heads);
                let a_token =
                    pairs(turned_q + config.kv_heads, head_dim) + pairs(moved_v, value_dim);
                let pairs = a_token.saturating_mul(batch as u64 * tokens as u64);
                Some(Append::new(&self.gpu, pairs)?)
            }
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
            Ok::<_, Error>(tensor.view())
        };
        // Where all are made at once, or moved on at once, they lie side by side.
        let (all, queries, both) = if straight.is_some() {
            (None, tensor(tokens, q)?, None)
        } else if fused || append.is_some() {
            let all = tensor(tokens, qkv)?;
            let (queries, both) = (all.slice(2, 0..q)?, all.slice(2, q..qkv)?);
            (Some(all), queries, Some(both))
        } else {
            (None, tensor(tokens, q)?, Some(tensor(made, kv)?))
        };
        let key_and_value = match &both {
            Some(both) => Some([both.slice(2, 0..k)?, both.slice(2, k..kv)?]),
            None => None,
        };
        // Of a projection that goes into the cache as a whole.
        let nothing = queries.slice(2, 0..0)?;
        let to = |step| match (step, &all, &key_and_value, &both) {
            (Step::QkvProjection, Some(all), ..) => all.clone(),
            (Step::KProjection, _, Some([key, _]), _) => key.clone(),
            (Step::VProjection, _, Some([_, value]), _) => value.clone(),
            (Step::KvProjection, _, _, Some(both)) => both.clone(),
            (Step::KvProjection, _, _, None) => nothing.clone(),
            // Queries alone, the rest goes into the cache.
            _ => queries.clone(),
        };
        let projections = projections
            .into_iter()
            .map(|(step, linear)| (step, linear, to(step)))
            .collect();
        let split_queries = queries.split_axis(2, &[config.heads, head_dim])?;
        let split = match &key_and_value {
            Some([key, value]) => Some([
                key.split_axis(2, &[config.kv_heads, head_dim])?,
                value.split_axis(2, &[config.kv_heads, value_dim])?,
            ]),
            None => None,
        };
        let (placing, q, kv) = match (append, split, all) {
            // Rotary embedding without a cache.
            (Some(append), Some([_, value]), Some(all)) if shape.cache.is_none() => {
                let heads = [config.heads + config.kv_heads, head_dim];
                let from = all.slice(2, 0..q + k)?.split_axis(2, &heads)?;
                let to = tensor(tokens, q + k)?.split_axis(2, &heads)?;
                let q = to.slice(2, 0..config.heads)?;
                let k = to.slice(2, config.heads..heads[0])?;
                (Placing::Turned { append, from, to }, q, Some([k, value]))
            }
            (Some(append), Some(kv), _) => match self.rotary {
                None => (
                    Placing::Appended {
                        append,
                        q: None,
                        kv,
                    },
                    split_queries,
                    None,
                ),
                Some(_) => {
                    let to = tensor(tokens, q)?.split_axis(2, &[config.heads, head_dim])?;
                    let q = Some([split_queries, to.clone()]);
                    (Placing::Appended { append, q, kv }, to, None)
                }
            },
            (_, None, _) => (Placing::Straight, split_queries, None),
            (None, kv, _) => (Placing::InPlace, split_queries, kv),
        };
        let context = output_projection.as_ref().map(|_| tensor(tokens, context));
        let context = context.transpose()?;
        let tables = [Some(attention.plan()), weights.as_ref().map(|w| w.plan())];
        workspace_bytes += tables
            .iter()
            .flatten()
            .map(|p| p.workspace_bytes)
            .sum::<u64>();
        Ok(LayerPlan {
            config: config.clone(),
            shape,
            projections,
            q,
            kv,
            placing,
            rotary: self.rotary_kind(),
            attention,
            weights,
            output_projection,
            context,
            workspace_bytes,
        })
    }

    /// What must hold of calls on a cache.
    fn check_cache(&self, shape: &LayerShape) -> Result<()> {
        let Some(cache) = &shape.cache else {
            return Ok(());
        };
        let (config, widths) = (&self.config, &self.widths);
        if let Some(tokens) = shape.source_tokens {
            let rule = "must be none with a cache, which is for self-attention";
            return Err(Error::parameter("source_tokens", tokens, rule));
        }
        if shape.kv_lens || config.rules.kv_lens {
            let rule = "must be false with a cache, which has the lengths itself";
            return Err(Error::parameter("kv_lens", true, rule));
        }
        if config.rules.q_lens {
            let rule = "must be false in the rules of a layer on a cache: LayerShape::q_lens says it, and calls tell tokens";
            return Err(Error::parameter("q_lens", true, rule));
        }
        if config.rules.is_positional() && config.rules.alignment == Some(Alignment::TopLeft) {
            let rule = "must be BottomRight, or left unsaid, with a cache: a new token's own key is the last";
            return Err(Error::parameter("alignment", "TopLeft", rule));
        }
        for (name, of_cache, expected, whose) in [
            ("cache.batch", cache.batch, shape.batch, "the shape's"),
            (
                "cache.kv_heads",
                cache.kv_heads,
                config.kv_heads,
                "the layer's",
            ),
            (
                "cache.head_dim",
                cache.head_dim,
                widths.head_dim,
                "the layer's",
            ),
            (
                "cache.value_dim",
                cache.value_dim,
                widths.value_dim,
                "the layer's",
            ),
        ] {
            if of_cache != expected {
                let rule = format!("must be {expected}, {whose}");
                return Err(Error::parameter(name, of_cache, rule));
            }
        }
        Ok(())
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
            ("k and v", shape.made(), config.d_source.max(widths.kv)),
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
    /// The projections that a call makes.
    pub(crate) fn linear_problems(&self) -> Vec<LinearProblem> {
        let projections = self.projections.iter().map(|(_, linear, _)| linear);
        let all = projections.chain(&self.output_projection);
        all.map(|linear| *linear.problem()).collect()
    }

    /// The attention that a call makes.
    pub(crate) fn attention_problem(&self) -> &AttentionProblem {
        self.attention.problem()
    }

    /// The dispatches in order, each with its plan; [`Step::Weights`] is left out of calls that do not ask for it.
    pub fn steps(&self) -> Vec<(Step, &Plan)> {
        let projections = self.projections.iter();
        let mut steps: Vec<_> = projections
            .map(|(step, linear, _)| (*step, linear.plan()))
            .collect();
        match &self.placing {
            Placing::InPlace | Placing::Straight => {}
            Placing::Turned { append, .. } => steps.push((Step::Rotary, append.plan())),
            Placing::Appended { append, .. } => steps.push((Step::Append, append.plan())),
        }
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

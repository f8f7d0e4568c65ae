//! A call of a layer, recorded into the caller's encoder.

use super::plan::Placing;
use super::{LayerPlan, LayerShape, MultiHeadAttention, Step};
use crate::attention::{AttentionArguments, RuleArguments, WeightsArguments};
use crate::cache::{CacheDevice, KvCache, Moves, Place};
use crate::element::ElementType;
use crate::gpu::Timestamps;
use crate::linear::{CacheArguments, LinearArguments};
use crate::operands::{check_operands, expect_contiguous_last};
use crate::rotary::RotaryPairing;
use crate::tensor::TensorView;
use crate::{Error, Result};

/// The operands of a layer's call. Sources and what rules take are given exactly if the plan says so. Start from [`LayerArguments::new`].
///
/// x, source and y may be images with the channels first, seen as tokens: [`TensorView::image_tokens`].
#[derive(Clone, Copy, Debug)]
pub struct LayerArguments<'a> {
    /// `(B, T, d_in)`, f32, any strides.
    pub x: &'a TensorView,
    /// `(B, Ts, d_source)`, f32, any strides: what keys and values are made of in cross-attention.
    pub source: Option<&'a TensorView>,
    /// `(B, Ts, d_source)`, f32, any strides: what values are made of, where it is not the source.
    pub value_source: Option<&'a TensorView>,
    /// `(B, T, d_out)`, f32, any strides, overwritten. May share a buffer with x and the sources, which were read before.
    /// Without an output projection its last axis is contiguous, and it may not share a buffer with what rules take.
    pub y: &'a TensorView,
    /// `(B, Ts)`, bool: false hides the key from every query. Short for a mask `(B, 1, 1, Ts)` among `rules`.
    pub key_mask: Option<&'a TensorView>,
    /// What the rules take; Tq is T, Tk is Ts.
    pub rules: RuleArguments<'a>,
    /// `(B, H, T, Ts)`, f32, any strides, overwritten: the attention weights. Any call may leave it out. May not share a
    /// buffer with y, with the log-sum-exp or with what rules take.
    pub weights: Option<&'a TensorView>,
    /// `(B, H, T)`, f32, any strides, overwritten: the rows' log-sum-exp. Any call may ask for it. May not share a buffer
    /// as the weights may not.
    pub lse: Option<&'a TensorView>,
}

impl<'a> LayerArguments<'a> {
    /// Self-attention with nothing else.
    pub fn new(x: &'a TensorView, y: &'a TensorView) -> Self {
        LayerArguments {
            x,
            source: None,
            value_source: None,
            y,
            key_mask: None,
            rules: RuleArguments::default(),
            weights: None,
            lse: None,
        }
    }
}

impl MultiHeadAttention {
    /// Records a call into the caller's encoder: submits nothing, waits for nothing, allocates nothing on the
    /// GPU unless views are laid out as never before (then parameter buffers of 100 to 300 bytes).
    ///
    /// Any number of calls, of this layer and others, may be recorded before one submit.
    ///
    /// # Errors
    ///
    /// [`Error::Shape`], [`Error::Type`], [`Error::Layout`], [`Error::OtherDevice`] for operands that do not
    /// fit the plan. Nothing was recorded then.
    pub fn encode(
        &self,
        encoder: &mut wgpu::CommandEncoder,
        plan: &LayerPlan,
        arguments: LayerArguments<'_>,
    ) -> Result<()> {
        self.encode_timed(encoder, plan, arguments, None)
    }

    /// Records a call on a cache into the caller's encoder: x `(B, T, d_in)` are the next T tokens of every sequence. Their
    /// keys and values go into the cache, y `(B, T, d_out)` is what they attend to. The plan is one of
    /// [`LayerShape::cached`]; prompts, single tokens and a few at once differ in T only.
    ///
    /// Submits nothing and waits for nothing. From the second call with the same plan and tensors on it makes no buffer, no
    /// bind group and no pipeline, however long the sequences are. Any number of calls may be recorded before one submit;
    /// the lengths of the cache grow as they are recorded (see [`KvCache`]).
    ///
    /// `tokens`, given exactly if the plan's shape has `q_lens`: how many of the T tokens each sequence gets.
    ///
    /// # Errors
    ///
    /// As [`encode`](Self::encode), and [`Error::NoRoom`] for a cache without room. Nothing was recorded then, and
    /// the cache is as it was.
    pub fn encode_cached(
        &self,
        encoder: &mut wgpu::CommandEncoder,
        plan: &LayerPlan,
        cache: &mut KvCache,
        tokens: Option<&[usize]>,
        arguments: LayerArguments<'_>,
    ) -> Result<()> {
        self.encode_cached_timed(encoder, plan, cache, tokens, arguments, None)
    }

    /// [`encode_cached`](Self::encode_cached), with timestamps around each dispatch, under the name of its [`Step`].
    ///
    /// # Errors
    ///
    /// As [`encode_cached`](Self::encode_cached), and [`Error::LimitExceeded`] where the timestamps have no room left.
    pub fn encode_cached_timed(
        &self,
        encoder: &mut wgpu::CommandEncoder,
        plan: &LayerPlan,
        cache: &mut KvCache,
        tokens: Option<&[usize]>,
        arguments: LayerArguments<'_>,
        mut timestamps: Option<&mut Timestamps>,
    ) -> Result<()> {
        let shape = &plan.shape;
        if shape.cache != Some(*cache.config()) {
            return Err(Error::parameter(
                "plan",
                format!("{:?}", shape.cache),
                format!("must be made for this cache, {:?}", cache.config()),
            ));
        }
        let word = |there| if there { "given" } else { "none" };
        if shape.q_lens != tokens.is_some() {
            let expected = format!("{} as planned (q_lens)", word(shape.q_lens));
            return Err(Error::shape("tokens", expected, word(tokens.is_some())));
        }
        let rules = arguments.rules;
        for (name, view) in [
            ("kv_lens", rules.kv_lens),
            ("q_lens", rules.q_lens),
            ("block_table", rules.block_table),
        ] {
            if view.is_some() {
                let expected = "none: the cache has its own";
                return Err(Error::shape(name, expected, "a tensor"));
            }
        }
        let device = cache.device().clone();
        device.tables().expect_gpu("cache", &self.gpu)?;
        for (name, view) in [
            ("x", Some(arguments.x)),
            ("y", Some(arguments.y)),
            ("weights", arguments.weights),
            ("lse", arguments.lse),
        ] {
            let of_cache = |view: &&TensorView| device.owns(view.buffer());
            if view.filter(of_cache).is_some() {
                return Err(Error::Layout {
                    argument: name.into(),
                    problem: "it lies in a buffer of the cache".into(),
                    remedy:
                        "a call reads and writes the cache: keep other tensors in other buffers"
                            .into(),
                });
            }
        }
        let appending = cache.prepare(shape.tokens, tokens, self.rotary.as_ref())?;
        let (lengths, counts) = (device.lengths_view(), device.counts_view());
        let block_table = device.block_table();
        let arguments = LayerArguments {
            rules: RuleArguments {
                kv_lens: Some(&lengths),
                q_lens: tokens.map(|_| &counts),
                block_table: block_table.as_ref(),
                ..rules
            },
            ..arguments
        };
        let steps = self.steps_of(plan, &arguments, timestamps.as_deref())?;
        let on_cache = OnCache {
            device: &device,
            counts: appending.told,
        };
        let before = cache.lengths();
        let mut recorded = match shape.batch * shape.tokens {
            0 => Ok(()),
            _ => cache.commit(encoder, &appending),
        };
        for step in steps {
            recorded = recorded.and_then(|()| {
                let timestamps = timestamps.as_deref_mut();
                self.record(encoder, plan, step, arguments, Some(&on_cache), timestamps)
            });
        }
        if recorded.is_err() {
            cache.restore(&before);
        }
        recorded
    }

    /// [`encode`](Self::encode), with timestamps around each dispatch, under the name of its [`Step`]. Where there
    /// is nothing to compute there is no dispatch and no span.
    ///
    /// # Errors
    ///
    /// As [`encode`](Self::encode), and [`Error::LimitExceeded`] where the timestamps have no room left.
    pub fn encode_timed(
        &self,
        encoder: &mut wgpu::CommandEncoder,
        plan: &LayerPlan,
        arguments: LayerArguments<'_>,
        mut timestamps: Option<&mut Timestamps>,
    ) -> Result<()> {
        plan.expect_no_cache()?;
        for step in self.steps_of(plan, &arguments, timestamps.as_deref())? {
            let timestamps = timestamps.as_deref_mut();
            self.record(encoder, plan, step, arguments, None, timestamps)?;
        }
        Ok(())
    }

    /// The steps of a call whose arguments are found right, with room for their timestamps.
    fn steps_of(
        &self,
        plan: &LayerPlan,
        arguments: &LayerArguments<'_>,
        timestamps: Option<&Timestamps>,
    ) -> Result<Vec<Step>> {
        self.check_arguments(plan, arguments)?;
        let mut steps = plan.steps();
        steps.retain(|(step, _)| *step != Step::Weights || arguments.weights.is_some());
        if let Some(timestamps) = timestamps {
            timestamps.expect_room(steps.iter().map(|(_, step)| step.passes()).sum())?;
        }
        Ok(steps.into_iter().map(|(step, _)| step).collect())
    }

    /// Records one dispatch of a call. All steps of [`LayerPlan::steps`] in order are the call.
    ///
    /// # Errors
    ///
    /// As [`encode`](Self::encode); [`Error::Parameter`] for a step that the plan does not have, or the weights in a call
    /// that does not ask for them. A call on a cache is not recorded in pieces: its lengths are one thing with it.
    pub fn encode_step(
        &self,
        encoder: &mut wgpu::CommandEncoder,
        plan: &LayerPlan,
        step: Step,
        arguments: LayerArguments<'_>,
        timestamps: Option<&mut Timestamps>,
    ) -> Result<()> {
        plan.expect_no_cache()?;
        self.check_arguments(plan, &arguments)?;
        self.record(encoder, plan, step, arguments, None, timestamps)
    }

    fn record(
        &self,
        encoder: &mut wgpu::CommandEncoder,
        plan: &LayerPlan,
        step: Step,
        arguments: LayerArguments<'_>,
        on_cache: Option<&OnCache<'_>>,
        timestamps: Option<&mut Timestamps>,
    ) -> Result<()> {
        let LayerArguments { x, y, .. } = arguments;
        let LayerShape { batch, tokens, .. } = plan.shape;
        let q = &plan.q;
        let [k, v] = match (&plan.kv, on_cache) {
            (Some([k, v]), _) => [k, v],
            (None, Some(on_cache)) => on_cache.device.keys_and_values(),
            // Plans without a cache have keys and values of their own.
            (None, None) => [q, q],
        };
        let source = arguments.source.unwrap_or(x);
        let value_source = arguments.value_source.unwrap_or(source);
        let label = &step.to_string();
        let absent = |rule: &str| Error::parameter("step", step, rule);
        let views = &self.projections;
        let (from, weight) = match step {
            Step::QkvProjection => (x, views.qkv.as_ref()),
            Step::QProjection => (x, Some(&views.q)),
            Step::KvProjection => (source, Some(&views.kv)),
            Step::KProjection => (source, Some(&views.k)),
            Step::VProjection => (value_source, Some(&views.v)),
            Step::Rotary | Step::Append => {
                let (append, moves) = match (&plan.placing, on_cache) {
                    (Placing::Turned { append, from, to }, None) => (
                        append,
                        Moves {
                            q: Some(("q and k", from, "turned q and k", to)),
                            kv: None,
                            rotary: self.rotary.as_ref(),
                            place: Place::Positions {
                                first: 0,
                                starts: None,
                            },
                        },
                    ),
                    (
                        Placing::Appended {
                            append,
                            q,
                            kv: [k, v],
                        },
                        Some(on_cache),
                    ) => (
                        append,
                        Moves {
                            q: q.as_ref().map(|[from, to]| ("q", from, "turned q", to)),
                            kv: Some([k, v]),
                            rotary: self.rotary.as_ref(),
                            place: Place::Cache {
                                cache: on_cache.device,
                                counts: on_cache.counts,
                            },
                        },
                    ),
                    _ => return Err(absent("this plan moves nothing before the attention")),
                };
                let ready = append.prepare(&moves, batch, tokens)?;
                return append.record(encoder, ready, label, timestamps);
            }
            Step::Attention => {
                let out = plan.context.as_ref().unwrap_or(y);
                let sizes = [self.config.heads, self.widths.value_dim];
                let key_mask = pairs_of(plan, arguments.key_mask)?;
                let out = &out.split_axis(2, &sizes)?;
                let attention = AttentionArguments {
                    lse: arguments.lse,
                    rules: with_mask(arguments.rules, key_mask.as_ref()),
                    ..AttentionArguments::new(q, k, v, out)
                };
                let planned = &plan.attention;
                return planned.encode_timed(encoder, attention, label, timestamps);
            }
            Step::Weights => {
                let (Some(planned), Some(weights)) = (&plan.weights, arguments.weights) else {
                    return Err(absent("this call does not ask for the weights"));
                };
                let key_mask = pairs_of(plan, arguments.key_mask)?;
                let weights = WeightsArguments {
                    q,
                    k,
                    weights,
                    rules: with_mask(arguments.rules, key_mask.as_ref()),
                };
                return planned.encode_timed(encoder, weights, label, timestamps);
            }
            Step::OutputProjection => {
                let (Some(linear), Some(output), Some(context)) =
                    (&plan.output_projection, &self.output, &plan.context)
                else {
                    return Err(absent("this layer has no output projection"));
                };
                let linear_arguments = LinearArguments {
                    x: context,
                    weight: &output.weight,
                    bias: output.bias.as_ref(),
                    y,
                };
                return linear.encode_timed(encoder, linear_arguments, label, timestamps);
            }
        };
        let planned = plan.projections.iter().find(|(own, ..)| *own == step);
        let (Some((_, linear, to)), Some(weight)) = (planned, weight) else {
            return Err(absent("this plan makes q, k and v in other steps"));
        };
        let linear_arguments = LinearArguments {
            x: from,
            weight: &weight.weight,
            bias: weight.bias.as_ref(),
            y: to,
        };
        if let (Placing::Straight, Some(on_cache), true) =
            (&plan.placing, on_cache, step != Step::QProjection)
        {
            let device = on_cache.device;
            let counts = on_cache.counts.then(|| device.counts_view());
            let block_table = device.block_table();
            let [k, v] = device.keys_and_values();
            let cache = CacheArguments {
                k,
                v,
                lengths: &device.lengths_view(),
                counts: counts.as_ref(),
                block_table: block_table.as_ref(),
            };
            return linear.encode_into_cache(encoder, linear_arguments, cache, label, timestamps);
        }
        linear.encode_timed(encoder, linear_arguments, label, timestamps)
    }

    /// Everything about a call that could be wrong, before its first dispatch is recorded.
    fn check_arguments(&self, plan: &LayerPlan, arguments: &LayerArguments<'_>) -> Result<()> {
        let LayerShape { batch, tokens, .. } = plan.shape;
        let keys = plan.shape.keys();
        let config = &self.config;
        plan.q.expect_gpu("plan", &self.gpu)?;
        // Another layer's plan does as well, if that layer differs in nothing but its weights.
        let kind = |output: bool, fused: bool| {
            let output = if output { "with" } else { "without" };
            let qkv = if fused { "fused" } else { "split" };
            format!("{output} output projection, {qkv} qkv")
        };
        let cross = plan.shape.source_tokens.is_some();
        let fused = cross || self.projections.qkv.is_some();
        let planned_fused = cross || plan.projections.len() == 1;
        if plan.rotary != self.rotary_kind() {
            let name = |kind: Option<(usize, RotaryPairing)>| match kind {
                Some((dims, pairing)) => {
                    format!("rotary embedding of {dims} channels, {pairing:?}")
                }
                None => "no rotary embedding".into(),
            };
            return Err(Error::parameter(
                "plan",
                format!("with {}", name(plan.rotary)),
                format!(
                    "must be made for this layer, which has {}",
                    name(self.rotary_kind())
                ),
            ));
        }
        if let (Some(rotary), None) = (&self.rotary, plan.shape.cache) {
            rotary.expect_positions(tokens)?;
        }
        let (planned, present) = (plan.output_projection.is_some(), self.output.is_some());
        if plan.config != *config || planned != present || planned_fused != fused {
            return Err(Error::parameter(
                "plan",
                format!("{:?} {}", plan.config, kind(planned, planned_fused)),
                format!(
                    "must be made for this layer, {config:?} {}",
                    kind(present, fused)
                ),
            ));
        }
        let rules = &plan.attention.problem().rules;
        let given = &arguments.rules;
        if arguments.key_mask.is_some() && given.mask.is_some() {
            let expected = "a key mask or a mask of pairs";
            return Err(Error::shape("key_mask", expected, "both"));
        }
        let (mask_name, mask) = match given.mask {
            Some(mask) => ("mask", Some(mask)),
            None => ("key_mask", arguments.key_mask),
        };
        let (value_source, reads_data) = (
            plan.shape.value_source,
            rules.rule.as_ref().is_some_and(|rule| rule.reads_data()),
        );
        for (name, planned, view) in [
            ("source", cross, arguments.source),
            ("value_source", value_source, arguments.value_source),
            (mask_name, rules.mask, mask),
            ("bias", rules.bias, given.bias),
            ("kv_lens", rules.kv_lens, given.kv_lens),
            ("q_lens", rules.q_lens, given.q_lens),
            ("slopes", rules.alibi, given.slopes),
            ("sinks", rules.sinks, given.sinks),
            ("rule_data", reads_data, given.rule_data),
            ("cu_seqlens_q", false, given.cu_seqlens_q),
            ("cu_seqlens_k", false, given.cu_seqlens_k),
        ] {
            if planned != view.is_some() {
                let word = |there| if there { "a tensor" } else { "none" };
                let expected = format!("{} as planned", word(planned));
                return Err(Error::shape(name, expected, word(!planned)));
            }
        }
        if arguments.weights.is_some() && plan.weights.is_none() {
            return Err(Error::shape("weights", "none as planned", "a tensor"));
        }

        let f32 = ElementType::F32;
        let pairs = [batch, config.heads, tokens, keys];
        for (name, view, shape, element_type) in [
            (
                "x",
                Some(arguments.x),
                &[batch, tokens, config.d_in][..],
                f32,
            ),
            (
                "source",
                arguments.source,
                &[batch, keys, config.d_source],
                f32,
            ),
            (
                "value_source",
                arguments.value_source,
                &[batch, keys, config.d_source],
                f32,
            ),
            ("y", Some(arguments.y), &[batch, tokens, config.d_out], f32),
            (
                "key_mask",
                arguments.key_mask,
                &[batch, keys],
                ElementType::Bool,
            ),
            ("weights", arguments.weights, &pairs, f32),
            ("lse", arguments.lse, &pairs[..3], f32),
        ] {
            if let Some(view) = view {
                view.expect_shape(name, shape)?;
                view.expect_type(name, element_type)?;
                view.expect_gpu(name, &self.gpu)?;
                view.bind(name)?;
            }
        }
        let key_mask = pairs_of(plan, arguments.key_mask)?;
        with_mask(*given, key_mask.as_ref()).check(plan.attention.problem())?;
        // What is read after, or in the dispatch that writes an output, besides what lies in the plan. (x and the sources
        // were read before.)
        let output = self.output.as_ref();
        let of_output = [
            ("output weight", output.map(|output| &output.weight)),
            (
                "output bias",
                output.and_then(|output| output.bias.as_ref()),
            ),
        ];
        let of_rules = [
            ("mask", mask),
            ("bias", given.bias),
            ("kv_lens", given.kv_lens),
            ("q_lens", given.q_lens),
            ("slopes", given.slopes),
            ("sinks", given.sinks),
            ("rule_data", given.rule_data),
        ];
        let extra = [("weights", arguments.weights), ("lse", arguments.lse)];
        let extra: Vec<_> = extra
            .into_iter()
            .filter_map(|(name, view)| Some((name, view?)))
            .collect();
        let all: Vec<_> = [&[("y", arguments.y)][..], &extra].concat();
        check_operands(&self.gpu, &of_output, &all)?;
        if output.is_some() {
            return check_operands(&self.gpu, &of_rules, &extra);
        }
        expect_contiguous_last("y", arguments.y)?;
        check_operands(&self.gpu, &of_rules, &all)
    }
}

/// The cache of a call.
struct OnCache<'a> {
    device: &'a CacheDevice,
    /// Whether each sequence has its own number of new tokens.
    counts: bool,
}

impl LayerPlan {
    fn expect_no_cache(&self) -> Result<()> {
        match self.shape.cache {
            None => Ok(()),
            Some(_) => Err(Error::parameter(
                "plan",
                "for calls on a cache",
                "must be without one here: use encode_cached",
            )),
        }
    }
}

/// A key mask as a mask of pairs, `(B, 1, 1, Ts)`.
fn pairs_of(plan: &LayerPlan, key_mask: Option<&TensorView>) -> Result<Option<TensorView>> {
    let pairs = |mask: &TensorView| mask.split_axis(0, &[plan.shape.batch, 1, 1]);
    key_mask.map(pairs).transpose()
}

/// What rules take, with the key mask among it.
fn with_mask<'a>(rules: RuleArguments<'a>, key_mask: Option<&'a TensorView>) -> RuleArguments<'a> {
    RuleArguments {
        mask: rules.mask.or(key_mask),
        ..rules
    }
}

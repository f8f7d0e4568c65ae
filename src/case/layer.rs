//! Cases of layers: projections, attention, output projection. Kinds `module_fused`, `module_heads`, `module_mha4`
//! and `bert`.

use super::Case;
use super::attention::{four_axes, reference_rules};
use super::host::{Values, download};
use super::kind::{Computed, Engine, Kind, Selection, unsupported};
use crate::attention::{AttentionRules, RuleArguments};
use crate::checkpoint::LayerCheckpoint;
use crate::kernels::Form;
use crate::layer::{LayerArguments, LayerConfig, LayerShape, MultiHeadAttention};
use crate::tensor::{Tensor, shape_text};
use crate::tensor_file::{ElementKind, FileTensor};
use crate::{ElementType, Error, Gpu, Result, reference};

pub(super) const FUSED: Kind = Kind {
    names: &["module_fused"],
    attributes: &[
        "B",
        "T",
        "causal",
        "d_in",
        "d_out",
        "dropout",
        "dtype",
        "head_dim",
        "heads",
        "qkv_bias",
        "results_only",
    ],
    inputs: &["X", "Wqkv", "bqkv", "Wproj", "bproj", "dY"],
    run,
};

pub(super) const HEADS: Kind = Kind {
    names: &["module_heads"],
    attributes: FUSED.attributes,
    inputs: &[
        "X",
        "Wq",
        "Wk",
        "Wv",
        "bq",
        "bk",
        "bv",
        "Wproj",
        "bproj",
        "fused_Wqkv",
        "fused_bqkv",
        "dY",
    ],
    run,
};

pub(super) const MHA4: Kind = Kind {
    names: &["module_mha4"],
    attributes: &[
        "B",
        "Tk",
        "Tq",
        "blocked_rows",
        "d_model",
        "dtype",
        "head_dim",
        "heads",
        "mask",
        "results_only",
        "role",
    ],
    inputs: &[
        "X", "query", "key", "value", "memory", "mask", "Wq", "bq", "Wk", "bk", "Wv", "bv", "Wo",
        "bo", "dY",
    ],
    run,
};

pub(super) const BERT: Kind = Kind {
    names: &["bert"],
    attributes: &[
        "B",
        "T",
        "d_model",
        "head_dim",
        "heads",
        "input_ids",
        "layer",
        "reactions",
        "sentences",
    ],
    inputs: &[
        "hidden", "key_mask", "Wq", "bq", "Wk", "bk", "Wv", "bv", "Wo", "bo", "dY",
    ],
    run,
};

fn run(case: &Case, selection: &Selection, engine: &Engine) -> Result<Computed> {
    let mut layer = LayerCase::read(case)?;
    for run in &mut layer.runs {
        run.y.retain(|name| selection.includes(name));
        run.weights.retain(|name| selection.includes(name));
    }
    layer
        .runs
        .retain(|run| !run.y.is_empty() || !run.weights.is_empty());
    let (mut outputs, mut kernels) = (Vec::new(), Vec::new());
    for run in &layer.runs {
        let [y, weights] = match engine {
            Engine::Kernels { gpu, form } => layer.by_kernels(run, gpu, *form, &mut kernels)?,
            Engine::Reference => layer.by_reference(run)?,
        };
        for (names, values) in [(&run.y, y), (&run.weights, weights)] {
            outputs.extend(
                names
                    .iter()
                    .map(|name| (*name, values.values.clone(), values.shape.clone())),
            );
        }
    }
    Ok(Computed {
        outputs,
        kernel: match engine {
            Engine::Kernels { .. } => kernels.join(" "),
            Engine::Reference => "reference".into(),
        },
        otherwise: "an output of this name is not understood".into(),
    })
}

/// A layer as a case asks for it, for both engines.
struct LayerCase {
    heads: usize,
    causal: bool,
    /// `(B, T, d_in)`.
    x: Values,
    /// What keys and values are made of, and what values alone, `(B, Ts, d_in)`; x where there is none.
    source: Option<Values>,
    value_source: Option<Values>,
    /// `(B, Ts)`, or four axes that broadcast to `(B, H, T, Ts)`.
    mask: Option<Values>,
    bias: Option<Values>,
    /// One for each form that the case has the weights in.
    runs: Vec<Run>,
}

/// The layer with one form of its weights.
struct Run {
    weights_of: LayerCheckpoint,
    /// The outputs that are its y, and those that are its attention weights.
    y: Vec<&'static str>,
    weights: Vec<&'static str>,
}

impl LayerCase {
    fn read(case: &Case) -> Result<Self> {
        if case.attributes.contains_key("dropout") && case.attr_f64("dropout")? != 0.0 {
            return Err(unsupported("attribute dropout", "it is not 0"));
        }
        let precision = case.precision()?;
        if !matches!(precision, ElementKind::F64 | ElementKind::F32) {
            return Err(unsupported(
                format!("a layer stored in {precision}"),
                "it is not built yet",
            ));
        }
        let checkpoint =
            |tensors: &[FileTensor]| LayerCheckpoint::from_tensors(tensors, &case.file);
        let fused = |input: &&FileTensor| input.name.starts_with("fused_");
        let first: Vec<FileTensor> = case
            .inputs
            .iter()
            .filter(|input| !fused(input))
            .cloned()
            .collect();
        let bert = case.kind == "bert";
        let mut runs = vec![Run {
            weights_of: checkpoint(&first)?,
            y: if bert { vec!["Y", "hf_Y"] } else { vec!["Y"] },
            weights: if bert { vec!["P", "hf_P"] } else { vec!["P"] },
        }];
        if case.kind == "module_heads" {
            // The same weights side by side, and the output projection that both forms have.
            let renamed = case.inputs.iter().filter(fused).map(|input| FileTensor {
                name: input.name.trim_start_matches("fused_").to_string(),
                ..input.clone()
            });
            let output = case
                .inputs
                .iter()
                .filter(|input| input.name.ends_with("proj"));
            let tensors: Vec<FileTensor> = renamed.chain(output.cloned()).collect();
            runs.push(Run {
                weights_of: checkpoint(&tensors)?,
                y: vec!["Y_fused"],
                weights: Vec::new(),
            });
        }

        let tokens = |name: &str| {
            let tensor = case.input_opt(name)?;
            Some(Values::from(tensor))
        };
        let (source, value_source) = match (tokens("memory"), tokens("key"), tokens("value")) {
            (None, None, None) => (None, None),
            (Some(memory), None, None) => (Some(memory), None),
            (None, Some(key), Some(value)) => (Some(key), Some(value)),
            _ => {
                return Err(
                    case.error("expected inputs `memory`, or `key` and `value`, got others")
                );
            }
        };
        let x = case.input(match (bert, &source) {
            (true, _) => "hidden",
            (false, None) => "X",
            (false, Some(_)) => "query",
        })?;
        let heads = case.attr_usize("heads")?;
        let &[batch, length, d_in] = &x.shape[..] else {
            return Err(case.error(format!(
                "input {:?}: expected (B, T, d_in), got {}",
                x.name,
                shape_text(&x.shape)
            )));
        };
        let keys = source
            .as_ref()
            .and_then(|source| source.shape.get(1).copied());
        let d_out = runs[0].weights_of.d_out;
        case.expect_sizes(&[
            ("B", batch),
            ("T", length),
            ("Tq", length),
            ("Tk", keys.unwrap_or(length)),
            ("d_in", d_in),
            ("d_model", d_in),
            ("d_out", d_out),
            ("head_dim", d_out.checked_div(heads).unwrap_or(0)),
        ])?;
        let keys = keys.unwrap_or(length);
        for made_of in source.iter().chain(&value_source) {
            if made_of.shape != [batch, keys, d_in] {
                let (expected, got) =
                    (shape_text(&[batch, keys, d_in]), shape_text(&made_of.shape));
                return Err(Error::shape("key, value or memory", expected, got));
            }
        }
        for run in &runs {
            let weights = &run.weights_of;
            if weights.d_in != d_in || weights.heads.is_some_and(|own| own != heads) {
                return Err(case.error(format!(
                    "the weights of {} have d_in {} and {:?} heads, the input has d_in {d_in}, attribute heads is {heads}",
                    run.y.join(", "), weights.d_in, weights.heads
                )));
            }
        }

        let mut read = LayerCase {
            heads,
            causal: case.attributes.contains_key("causal") && case.attr_bool("causal")?,
            x: x.into(),
            source,
            value_source,
            mask: case.input_opt("key_mask").map(Values::mask).transpose()?,
            bias: None,
            runs,
        };
        let uniform = match case
            .attributes
            .get("blocked_rows")
            .map_or("zero", String::as_str)
        {
            "zero" => false,
            "uniform" => true,
            other => return Err(case.attribute_error("blocked_rows", "zero or uniform", other)),
        };
        let mask = case.input_opt("mask");
        let described = mask.map_or("none".into(), |mask| {
            let axes: Vec<String> = mask.shape.iter().map(usize::to_string).collect();
            axes.join("x")
        });
        if case
            .attributes
            .get("mask")
            .is_some_and(|said| *said != described)
        {
            let said = case.attr_str("mask")?;
            return Err(case.attribute_error("mask", &described, said));
        }
        if let Some(mask) = mask {
            let mut mask = Values::mask(mask)?;
            match mask.shape.len() {
                // (B, T, Ts), the same for all heads.
                3 => mask.shape.insert(1, 1),
                4 => {}
                _ => return Err(Error::shape("mask", "three or four axes", described)),
            }
            if uniform {
                // No mask: scores sink so low that a row which has no others is spread evenly.
                for value in &mut mask.values {
                    *value = if *value == 0.0 {
                        f64::from(f32::MIN)
                    } else {
                        0.0
                    };
                }
                read.bias = Some(mask);
            } else {
                read.mask = Some(mask);
            }
        }
        Ok(read)
    }

    /// Tokens that keys and values are made of.
    fn source_tokens(&self) -> usize {
        self.source
            .as_ref()
            .unwrap_or(&self.x)
            .shape
            .get(1)
            .copied()
            .unwrap_or(0)
    }

    /// The shapes of y and of the attention weights.
    fn shapes(&self, run: &Run) -> [Vec<usize>; 2] {
        let (batch, tokens) = (self.x.shape[0], self.x.shape[1]);
        [
            vec![batch, tokens, run.weights_of.d_out],
            vec![batch, self.heads, tokens, self.source_tokens()],
        ]
    }

    /// y and the attention weights (empty unless they are asked for).
    fn by_kernels(
        &self,
        run: &Run,
        gpu: &Gpu,
        form: Option<Form>,
        kernels: &mut Vec<&'static str>,
    ) -> Result<[Values; 2]> {
        let checkpoint = &run.weights_of;
        let config = LayerConfig {
            form,
            ..LayerConfig::new(checkpoint.d_in, checkpoint.d_out, self.heads).causal(self.causal)
        };
        let layer = MultiHeadAttention::new(gpu, config, &checkpoint.weights())?;
        let upload = |values: Option<&Values>, element_type| {
            let tensor = values.map(|values| values.upload(gpu, element_type));
            Ok::<_, Error>(tensor.transpose()?.map(|tensor| tensor.view()))
        };
        let x = self.x.upload(gpu, ElementType::F32)?.view();
        let source = upload(self.source.as_ref(), ElementType::F32)?;
        let value_source = upload(self.value_source.as_ref(), ElementType::F32)?;
        let mask = upload(self.mask.as_ref(), ElementType::Bool)?;
        let bias = upload(self.bias.as_ref(), ElementType::F32)?;
        let of_keys = mask.as_ref().filter(|mask| mask.shape().len() == 2);
        let of_pairs = mask.as_ref().filter(|mask| mask.shape().len() != 2);
        let wants_weights = !run.weights.is_empty();
        let plan = layer.plan(LayerShape {
            source_tokens: source.as_ref().map(|_| self.source_tokens()),
            value_source: value_source.is_some(),
            mask: mask.is_some(),
            bias: bias.is_some(),
            weights: wants_weights,
            ..LayerShape::new(x.shape()[0], x.shape()[1])
        })?;
        for (_, step) in plan.steps() {
            if !kernels.contains(&step.kernel.name) {
                kernels.push(step.kernel.name);
            }
        }
        let [y_shape, weights_shape] = self.shapes(run);
        let y = Tensor::empty(gpu, &y_shape, ElementType::F32)?.view();
        let weights = match wants_weights {
            true => Some(Tensor::empty(gpu, &weights_shape, ElementType::F32)?.view()),
            false => None,
        };
        gpu.record_and_submit(|encoder| {
            layer.encode(
                encoder,
                &plan,
                LayerArguments {
                    source: source.as_ref(),
                    value_source: value_source.as_ref(),
                    key_mask: of_keys,
                    rules: RuleArguments {
                        mask: of_pairs,
                        bias: bias.as_ref(),
                        ..Default::default()
                    },
                    weights: weights.as_ref(),
                    ..LayerArguments::new(&x, &y)
                },
            )
        })?;
        let weights = weights
            .as_ref()
            .map(download)
            .transpose()?
            .unwrap_or_default();
        Ok([
            Values {
                values: download(&y)?,
                shape: y_shape,
            },
            Values {
                values: weights,
                shape: weights_shape,
            },
        ])
    }

    fn by_reference(&self, run: &Run) -> Result<[Values; 2]> {
        let checkpoint = &run.weights_of;
        let wide = |values: &[f32]| reference::widen(values);
        let qkv = wide(&checkpoint.qkv);
        let [qkv_bias, output, output_bias] = [
            &checkpoint.qkv_bias,
            &checkpoint.output,
            &checkpoint.output_bias,
        ]
        .map(|values| values.as_deref().map(wide));
        let (batch, tokens) = (self.x.shape[0], self.x.shape[1]);
        let mask = self.mask.as_ref();
        let shown: Option<Vec<bool>> =
            mask.map(|mask| mask.values.iter().map(|value| *value != 0.0).collect());
        let mask_shape = match mask.map(|mask| &mask.shape[..]) {
            Some(&[b, t]) => [b, 1, 1, t],
            Some(shape) => four_axes("mask", shape)?,
            None => [0; 4],
        };
        let bias = match &self.bias {
            Some(bias) => Some(reference::Broadcast {
                values: &bias.values[..],
                shape: four_axes("bias", &bias.shape)?,
            }),
            None => None,
        };
        let found = reference::layer(&reference::LayerInputs {
            batch,
            tokens,
            d_in: checkpoint.d_in,
            d_out: checkpoint.d_out,
            heads: self.heads,
            x: &self.x.values,
            source: self.source.as_ref().map(|source| &source.values[..]),
            value_source: self.value_source.as_ref().map(|source| &source.values[..]),
            source_tokens: Some(self.source_tokens()),
            qkv_weight: &qkv,
            qkv_bias: qkv_bias.as_deref(),
            output_weight: output.as_deref(),
            output_bias: output_bias.as_deref(),
            rules: reference::Rules {
                mask: shown.as_deref().map(|values| reference::Broadcast {
                    values,
                    shape: mask_shape,
                }),
                bias,
                ..reference_rules(&AttentionRules {
                    causal: self.causal,
                    ..Default::default()
                })
            },
            ..Default::default()
        })?;
        let [y, weights] = self.shapes(run);
        Ok([
            Values {
                values: found.y,
                shape: y,
            },
            Values {
                values: found.weights,
                shape: weights,
            },
        ])
    }
}

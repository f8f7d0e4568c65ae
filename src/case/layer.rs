//! Cases of layers: projections, attention, output projection.

use super::Case;
use super::check::{Computed, Engine, Kind, Selection};
use crate::checkpoint::LayerCheckpoint;
use crate::kernels::Form;
use crate::layer::{LayerConfig, LayerPlan, MultiHeadAttention};
use crate::tensor::shape_text;
use crate::tensor_file::{FileTensor, format_error};
use crate::{Gpu, Result, reference};

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

/// A case of a layer: what the kinds have in common.
struct LayerCase {
    batch: usize,
    tokens: usize,
    heads: usize,
    causal: bool,
    x: Vec<f32>,
    key_mask: Option<Vec<bool>>,
    /// The weights under the names of the case, and, where the case has them in a second form, those.
    forms: Vec<(&'static str, LayerCheckpoint)>,
}

impl LayerCase {
    fn read(case: &Case, wanted: impl Fn(&str) -> bool) -> Result<Self> {
        let bert = case.kind == "bert";
        let wrong = |problem: String| format_error(&case.file, problem);
        let x = case.input(if bert { "hidden" } else { "X" })?;
        let &[batch, tokens, d_in] = &x.shape[..] else {
            return Err(wrong(format!(
                "input {:?}: expected (B, T, d_in), got {}",
                x.name,
                shape_text(&x.shape)
            )));
        };
        let first = LayerCheckpoint::from_tensors(&without(&case.inputs, "fused_"), &case.file)?;
        let mut forms = vec![("Y", first)];
        if case.kind == "module_heads" {
            let fused: Vec<FileTensor> = case
                .inputs
                .iter()
                .filter(|input| !input.name.starts_with("Wq") && !input.name.starts_with("bq"))
                .map(|input| FileTensor {
                    name: input.name.trim_start_matches("fused_").to_string(),
                    ..input.clone()
                })
                .collect();
            forms.push((
                "Y_fused",
                LayerCheckpoint::from_tensors(&fused, &case.file)?,
            ));
        }
        if bert {
            let again = forms[0].1.clone();
            forms.push(("hf_Y", again));
        }
        let heads = case.attr_usize("heads")?;
        for (name, form) in &forms {
            if form.d_in != d_in || form.heads.is_some_and(|own| own != heads) {
                return Err(wrong(format!(
                    "the weights of {name} have d_in {} and {:?} heads, the input has d_in {d_in}, attribute heads is {heads}",
                    form.d_in, form.heads
                )));
            }
        }
        forms.retain(|(name, _)| wanted(name));
        let key_mask = case.input_opt("key_mask");
        if let Some(mask) = key_mask
            && mask.shape != [batch, tokens]
        {
            return Err(wrong(format!(
                "input \"key_mask\": expected {}, got {}",
                shape_text(&[batch, tokens]),
                shape_text(&mask.shape)
            )));
        }
        Ok(LayerCase {
            batch,
            tokens,
            heads,
            causal: !bert && case.attr_bool("causal")?,
            x: x.to_f32(),
            key_mask: key_mask.map(FileTensor::to_bool).transpose()?,
            forms,
        })
    }
}

/// The tensors whose name does not begin so.
fn without(tensors: &[FileTensor], prefix: &str) -> Vec<FileTensor> {
    tensors
        .iter()
        .filter(|tensor| !tensor.name.starts_with(prefix))
        .cloned()
        .collect()
}

fn run(case: &Case, selection: &Selection, engine: &Engine) -> Result<Computed> {
    let wanted = |form: &str| selection.includes(form) || form == "Y" && selection.includes("P");
    let case = LayerCase::read(case, wanted)?;
    match engine {
        Engine::Kernels { gpu, form } => by_kernels(&case, gpu, *form),
        Engine::Reference => by_reference(&case),
    }
}

fn by_reference(case: &LayerCase) -> Result<Computed> {
    let x = reference::widen(&case.x);
    let mut outputs = Vec::new();
    for (name, form) in &case.forms {
        let [qkv, qkv_bias, output, output_bias] = [
            Some(&form.qkv),
            form.qkv_bias.as_ref(),
            form.output.as_ref(),
            form.output_bias.as_ref(),
        ]
        .map(|values| values.map(|values| reference::widen(values)));
        let result = reference::layer(&reference::LayerInputs {
            batch: case.batch,
            tokens: case.tokens,
            d_in: form.d_in,
            d_out: form.d_out,
            heads: case.heads,
            x: &x,
            qkv_weight: qkv.as_deref().unwrap_or_default(),
            qkv_bias: qkv_bias.as_deref(),
            output_weight: output.as_deref(),
            output_bias: output_bias.as_deref(),
            rules: reference::Rules {
                causal: case.causal,
                mask: case.key_mask.as_deref().map(|values| reference::Broadcast {
                    values,
                    shape: [case.batch, 1, 1, case.tokens],
                }),
                ..Default::default()
            },
            ..Default::default()
        })?;
        outputs.push((*name, result.y, vec![case.batch, case.tokens, form.d_out]));
        if *name == "Y" {
            let shape = vec![case.batch, case.heads, case.tokens, case.tokens];
            outputs.push(("P", result.weights, shape));
        }
    }
    Ok(Computed {
        outputs,
        kernel: "reference".into(),
        otherwise: "the reference does not give it".into(),
    })
}

fn by_kernels(case: &LayerCase, gpu: &Gpu, form_of: Option<Form>) -> Result<Computed> {
    let (batch, tokens) = (case.batch, case.tokens);
    let mut outputs = Vec::new();
    let mut kernels = Vec::new();
    for (name, form) in &case.forms {
        let config = LayerConfig {
            form: form_of,
            ..LayerConfig::new(form.d_in, form.d_out, case.heads).causal(case.causal)
        };
        let layer = MultiHeadAttention::new(gpu, config, &form.weights())?;
        note_kernels(
            &mut kernels,
            &layer.plan(batch, tokens, case.key_mask.is_some())?,
        );
        let y = layer.forward_host_blocking(&case.x, batch, tokens, case.key_mask.as_deref())?;
        outputs.push((*name, reference::widen(&y), vec![batch, tokens, form.d_out]));
    }
    Ok(Computed {
        outputs,
        kernel: kernels.join(" "),
        otherwise: "the kernels do not give attention weights yet".into(),
    })
}

/// Adds the kernels of a plan that are not named yet.
fn note_kernels(kernels: &mut Vec<&'static str>, plan: &LayerPlan) {
    for (_, step) in plan.steps() {
        if !kernels.contains(&step.kernel.name) {
            kernels.push(step.kernel.name);
        }
    }
}

//! Running a case and comparing what comes out with what it says.
//!
//! Cases of precision f64 check the [`reference`](mod@crate::reference), all others the kernels. What this crate cannot do
//! yet is [`Status::Unsupported`] with the reason, never a pass.

use super::{Case, ToleranceOrigin, Tolerances};
use crate::checkpoint::LayerCheckpoint;
use crate::compare::{Comparison, Outcome, compare};
use crate::gpu::Gpu;
use crate::kernels::Form;
use crate::layer::{LayerConfig, LayerPlan, LayerShape, MultiHeadAttention};
use crate::reference;
use crate::tensor::shape_text;
use crate::tensor_file::{ElementKind, FileTensor, format_error};
use crate::{Error, Result};

/// Which outputs of a case are compared.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Selection {
    /// Those of these names; a case without any of them is left out.
    Names(Vec<String>),
    /// All but gradients.
    Forward,
    /// All.
    All,
}

impl Selection {
    /// From the command line: `forward`, `all`, or names with commas between.
    ///
    /// # Errors
    ///
    /// [`Error::Parameter`] for an empty name.
    pub fn parse(text: &str) -> Result<Self> {
        match text {
            "all" => Ok(Selection::All),
            "forward" => Ok(Selection::Forward),
            _ => {
                let names: Vec<String> = text.split(',').map(|name| name.trim().into()).collect();
                if names.iter().any(String::is_empty) {
                    return Err(Error::parameter(
                        "outputs",
                        format!("{text:?}"),
                        "must be forward, all, or names with commas between",
                    ));
                }
                Ok(Selection::Names(names))
            }
        }
    }

    /// Whether an output of this name is compared. Gradients are named `d` and what they are with respect to.
    pub fn includes(&self, output: &str) -> bool {
        match self {
            Selection::Names(names) => names.iter().any(|name| name == output),
            Selection::Forward => !output.starts_with('d'),
            Selection::All => true,
        }
    }
}

/// How a case, or one output of it, ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Status {
    /// Everything chosen was compared and lies within its tolerance.
    Passed,
    /// Something lies outside.
    Failed,
    /// An attribute or a chosen output that this crate cannot do yet.
    Unsupported,
    /// The case has none of the chosen outputs.
    NotChosen,
}

impl Status {
    /// In one word.
    pub fn name(self) -> &'static str {
        match self {
            Status::Passed => "passed",
            Status::Failed => "failed",
            Status::Unsupported => "unsupported",
            Status::NotChosen => "not_chosen",
        }
    }
}

/// What became of one chosen output.
#[derive(Clone, Debug)]
pub struct OutputReport {
    /// Its name.
    pub name: String,
    /// How it ended.
    pub status: Status,
    /// The comparison and where its tolerance came from, where there was one.
    pub comparison: Option<(Comparison, ToleranceOrigin)>,
    /// Why it is unsupported.
    pub reason: Option<String>,
}

/// What became of one case.
#[derive(Clone, Debug)]
pub struct CaseReport {
    /// How it ended.
    pub status: Status,
    /// Each chosen output.
    pub outputs: Vec<OutputReport>,
    /// The kernels that ran, or `reference`; empty where nothing ran.
    pub kernel: String,
}

impl CaseReport {
    /// The largest absolute error of what was compared.
    pub fn max_error(&self) -> Option<f64> {
        self.comparisons().map(|c| c.max_error).reduce(f64::max)
    }

    /// The largest error in parts of what is allowed.
    pub fn worst_ratio(&self) -> Option<f64> {
        self.comparisons().map(|c| c.worst_ratio).reduce(f64::max)
    }

    fn comparisons(&self) -> impl Iterator<Item = &Comparison> {
        self.outputs
            .iter()
            .filter_map(|output| output.comparison.as_ref().map(|(comparison, _)| comparison))
    }

    /// Why it did not pass, in one line; `None` where it did.
    pub fn reason(&self) -> Option<String> {
        let reasons: Vec<String> = self
            .outputs
            .iter()
            .filter(|output| output.status == self.status)
            .filter_map(|output| match (&output.reason, &output.comparison) {
                (Some(reason), _) => Some(format!("{}: {reason}", output.name)),
                (None, Some((comparison, _))) if output.status == Status::Failed => {
                    Some(format!("{}: {comparison}", output.name))
                }
                _ => None,
            })
            .collect();
        (!reasons.is_empty()).then(|| reasons.join("; "))
    }
}

/// What runs a case of precision other than f64.
#[derive(Clone, Debug)]
pub struct Engine {
    /// The GPU.
    pub gpu: Gpu,
    /// The form of the kernels; `None` leaves it to the planner.
    pub form: Option<Form>,
}

/// Whether a case checks the reference, and so needs no GPU.
///
/// # Errors
///
/// As [`Case::precision`].
pub fn checks_reference(case: &Case) -> Result<bool> {
    Ok(case.precision()? == ElementKind::F64)
}

/// Runs a case and compares the chosen outputs.
///
/// # Errors
///
/// [`Error::Format`] for a case that contradicts itself; those of the layer for one that cannot run;
/// [`Error::Parameter`] if the case needs a GPU and `engine` is `None`.
pub fn check(
    case: &Case,
    selection: &Selection,
    tolerances: &mut Tolerances,
    engine: Option<&Engine>,
) -> Result<CaseReport> {
    let chosen: Vec<&FileTensor> = case
        .outputs
        .iter()
        .filter(|output| selection.includes(&output.name))
        .collect();
    if chosen.is_empty() {
        return Ok(CaseReport {
            status: Status::NotChosen,
            outputs: Vec::new(),
            kernel: String::new(),
        });
    }
    // A form of the weights is run for the output of its name; the first one gives the attention weights too.
    let wanted = |form: &str| selection.includes(form) || form == "Y" && selection.includes("P");
    let computed = match unsupported(case)? {
        Some(reason) => Computed::unsupported(reason),
        None if checks_reference(case)? => by_reference(&LayerCase::read(case, wanted)?)?,
        None => {
            let engine = engine.ok_or_else(|| {
                Error::parameter(
                    "engine",
                    "none",
                    "this case checks the kernels: a GPU is needed",
                )
            })?;
            by_kernels(&LayerCase::read(case, wanted)?, engine)?
        }
    };

    let mut outputs = Vec::new();
    for expected in chosen {
        let name = &expected.name;
        let report = match computed.output(name) {
            Ok((values, shape)) => {
                let (tolerance, origin) = tolerances.of(case, name)?;
                let comparison =
                    compare(values, shape, &expected.values, &expected.shape, tolerance);
                OutputReport {
                    name: name.clone(),
                    status: match comparison.outcome {
                        Outcome::Passed => Status::Passed,
                        _ => Status::Failed,
                    },
                    comparison: Some((comparison, origin)),
                    reason: None,
                }
            }
            Err(reason) => OutputReport {
                name: name.clone(),
                status: Status::Unsupported,
                comparison: None,
                reason: Some(reason),
            },
        };
        outputs.push(report);
    }
    let any = |status| {
        outputs
            .iter()
            .any(|output: &OutputReport| output.status == status)
    };
    let status = if any(Status::Failed) {
        Status::Failed
    } else if any(Status::Unsupported) {
        Status::Unsupported
    } else {
        Status::Passed
    };
    Ok(CaseReport {
        status,
        outputs,
        kernel: computed.kernel,
    })
}

/// The attributes that are understood, by kind. Any other could change what is to be computed.
fn known_attributes(kind: &str) -> Option<&'static [&'static str]> {
    match kind {
        "module_fused" | "module_heads" => Some(&[
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
        ]),
        "bert" => Some(&[
            "B",
            "T",
            "d_model",
            "head_dim",
            "heads",
            "input_ids",
            "layer",
            "reactions",
            "sentences",
        ]),
        _ => None,
    }
}

/// Why the case as a whole cannot run yet.
fn unsupported(case: &Case) -> Result<Option<String>> {
    let Some(known) = known_attributes(&case.kind) else {
        return Ok(Some(format!(
            "cases of kind {} are not built yet",
            case.kind
        )));
    };
    if let Some(name) = case
        .attributes
        .keys()
        .find(|name| !known.contains(&name.as_str()))
    {
        return Ok(Some(format!("attribute {name} is not understood")));
    }
    if case.attributes.contains_key("dropout") && case.attr_f64("dropout")? != 0.0 {
        return Ok(Some("attribute dropout is not 0".into()));
    }
    let precision = case.precision()?;
    if !matches!(precision, ElementKind::F64 | ElementKind::F32) {
        return Ok(Some(format!("{precision} storage is not built yet")));
    }
    // Inputs go to both engines as f32 values, which those of the format are.
    let not_f32 = |value: &f64| f64::from(*value as f32) != *value && !value.is_nan();
    if let Some(input) = case
        .inputs
        .iter()
        .find(|input| input.values.iter().any(not_f32))
    {
        return Ok(Some(format!(
            "input {} holds values that are not f32",
            input.name
        )));
    }
    Ok(None)
}

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

/// Outputs by name, with their shapes, and what made them.
struct Computed {
    outputs: Vec<(&'static str, Vec<f64>, Vec<usize>)>,
    kernel: String,
    /// Why any other output is not there.
    otherwise: String,
}

impl Computed {
    fn unsupported(reason: String) -> Self {
        Computed {
            outputs: Vec::new(),
            kernel: String::new(),
            otherwise: reason,
        }
    }

    fn output(&self, name: &str) -> Result<(&[f64], &[usize]), String> {
        match self.outputs.iter().find(|(own, ..)| *own == name) {
            Some((_, values, shape)) => Ok((values, shape)),
            None if self.outputs.is_empty() => Err(self.otherwise.clone()),
            None if name.starts_with('d') => Err("gradients are not built yet".into()),
            None => Err(self.otherwise.clone()),
        }
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

fn by_kernels(case: &LayerCase, engine: &Engine) -> Result<Computed> {
    let (batch, tokens) = (case.batch, case.tokens);
    let mut outputs = Vec::new();
    let mut kernels = Vec::new();
    for (name, form) in &case.forms {
        let config = LayerConfig {
            form: engine.form,
            ..LayerConfig::new(form.d_in, form.d_out, case.heads).causal(case.causal)
        };
        let layer = MultiHeadAttention::new(&engine.gpu, config, &form.weights())?;
        note_kernels(
            &mut kernels,
            &layer.plan(LayerShape::new(batch, tokens).mask(case.key_mask.is_some()))?,
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

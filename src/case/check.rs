//! Running a case and comparing what comes out with what it says.
//!
//! Cases of precision f64 check the [`reference`](mod@crate::reference), all others the kernels. What this crate cannot do
//! yet is [`Status::Unsupported`] with the reason, never a pass.

use super::kind::{Computed, Kind, unsupported};
pub use super::kind::{Engine, Selection};
use super::{Case, ToleranceOrigin, Tolerances, attention, layer, onnx, ort};
use crate::compare::{Comparison, Outcome, compare};
use crate::tensor_file::{ElementKind, FileTensor};
use crate::{Error, Result};

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
/// What this crate says it cannot do ([`Error::Unsupported`]), or not on this device or in this form
/// ([`Error::LimitExceeded`]), is [`Status::Unsupported`].
///
/// # Errors
///
/// [`Error::Format`] for a case that contradicts itself; those of the operations for one that cannot run;
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
    let computed = match compute(case, selection, engine) {
        Ok(computed) => Ok(computed),
        Err(error @ (Error::Unsupported { .. } | Error::LimitExceeded { .. })) => {
            Err(error.to_string())
        }
        Err(error) => return Err(error),
    };

    let mut outputs = Vec::new();
    for expected in chosen {
        let name = &expected.name;
        let found = match &computed {
            Ok(computed) => computed.output(name),
            Err(reason) => Err(reason.clone()),
        };
        let report = match found {
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
        kernel: computed.map(|computed| computed.kernel).unwrap_or_default(),
    })
}

const KINDS: &[&Kind] = &[
    &attention::SDPA,
    &attention::VARLEN,
    &layer::FUSED,
    &layer::HEADS,
    &layer::MHA4,
    &layer::BERT,
    &onnx::ONNX,
    &ort::ORT,
];

fn compute(case: &Case, selection: &Selection, engine: Option<&Engine>) -> Result<Computed> {
    let Some(kind) = KINDS.iter().find(|kind| kind.names.contains(&&*case.kind)) else {
        return Err(unsupported(
            format!("kind {:?}", case.kind),
            "no such kind is known",
        ));
    };
    let attributes = case.attributes.keys().map(|name| ("attribute", name));
    let inputs = case.inputs.iter().map(|input| ("input", &input.name));
    for ((what, name), known) in attributes
        .map(|named| (named, kind.attributes))
        .chain(inputs.map(|named| (named, kind.inputs)))
    {
        if !known.contains(&&**name) {
            return Err(unsupported(
                format!("{what} {name:?}"),
                format!("it is not understood in cases of kind {}", case.kind),
            ));
        }
    }
    // Inputs go to both engines as f32 values, which those of the format are.
    let not_f32 = |value: &f64| f64::from(*value as f32) != *value && !value.is_nan();
    if let Some(input) = case
        .inputs
        .iter()
        .find(|input| input.values.iter().any(not_f32))
    {
        return Err(unsupported(
            format!("input {:?}", input.name),
            "it holds values that are not f32",
        ));
    }
    let engine = match engine {
        _ if checks_reference(case)? => &Engine::Reference,
        Some(engine) => engine,
        None => {
            return Err(Error::parameter(
                "engine",
                "none",
                "this case checks the kernels: a GPU is needed",
            ));
        }
    };
    (kind.run)(case, selection, engine)
}

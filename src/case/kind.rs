//! What the families of cases share: which outputs are wanted, what computes them, and what a kind understands.

use super::Case;
use crate::gpu::Gpu;
use crate::kernels::Form;
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

/// What runs the cases of a precision other than f64.
#[derive(Clone, Debug)]
pub enum Engine {
    /// The kernels.
    Kernels {
        /// The GPU.
        gpu: Gpu,
        /// The form of the kernels; `None` leaves it to the planner.
        form: Option<Form>,
    },
    /// The [`reference`](mod@crate::reference), which is then held to the tolerances of the kernels.
    Reference,
}

/// What is understood of the cases of some kinds, and what runs them.
pub(super) struct Kind {
    pub(super) names: &'static [&'static str],
    /// Any other attribute could change what is to be computed.
    pub(super) attributes: &'static [&'static str],
    /// And so could any other input.
    pub(super) inputs: &'static [&'static str],
    /// Computes what is chosen.
    pub(super) run: fn(&Case, &Selection, &Engine) -> Result<Computed>,
}

/// That a case asks for something that is not built.
pub(super) fn unsupported(what: impl Into<String>, reason: impl Into<String>) -> Error {
    Error::Unsupported {
        what: what.into(),
        reason: reason.into(),
    }
}

/// Outputs by name, with their shapes, and what made them.
pub(super) struct Computed {
    pub(super) outputs: Vec<(&'static str, Vec<f64>, Vec<usize>)>,
    /// The names of the kernels that ran, each once, or `reference`.
    pub(super) kernel: String,
    /// Why any other output is not there.
    pub(super) otherwise: String,
}

impl Computed {
    pub(super) fn output(&self, name: &str) -> Result<(&[f64], &[usize]), String> {
        match self.outputs.iter().find(|(own, ..)| *own == name) {
            Some((_, values, shape)) => Ok((values, shape)),
            None if name.starts_with('d') => Err("gradients are not built yet".into()),
            None => Err(self.otherwise.clone()),
        }
    }
}

//! A layer for one shape: its dispatches, and the memory between them.

use super::LayerConfig;
use crate::attention::Attention;
use crate::linear::Linear;
use crate::plan::Plan;
use crate::tensor::Tensor;
use std::fmt;

/// A layer that is planned and compiled for one shape, with the memory between its dispatches. Cheap to clone;
/// clones share that memory, and so do all calls that are encoded with it: the GPU runs them one after another.
#[derive(Clone)]
pub struct LayerPlan {
    /// What the layer is that it was made for.
    pub(super) config: LayerConfig,
    pub(super) batch: usize,
    pub(super) tokens: usize,
    pub(super) masked: bool,
    pub(super) qkv_projection: Linear,
    pub(super) attention: Attention,
    pub(super) output_projection: Option<Linear>,
    /// `(B, T, 3 * d_out)`: q | k | v.
    pub(super) qkv: Tensor,
    /// `(B, T, d_out)`, heads side by side; absent where the attention writes y itself.
    pub(super) context: Option<Tensor>,
}

/// One dispatch of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Step {
    /// x to q, k and v of all heads.
    QkvProjection,
    /// Scores, mask, softmax and values.
    Attention,
    /// The heads' outputs to y.
    OutputProjection,
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Step::QkvProjection => "QKV projection",
            Step::Attention => "attention",
            Step::OutputProjection => "output projection",
        })
    }
}

impl LayerPlan {
    /// The dispatches in order, each with its plan.
    pub fn steps(&self) -> Vec<(Step, &Plan)> {
        let mut steps = vec![
            (Step::QkvProjection, self.qkv_projection.plan()),
            (Step::Attention, self.attention.plan()),
        ];
        if let Some(output) = &self.output_projection {
            steps.push((Step::OutputProjection, output.plan()));
        }
        steps
    }

    /// Useful floating-point operations of one call: a multiply-add is two, causal work is counted once.
    pub fn flops(&self) -> u64 {
        self.steps()
            .iter()
            .fold(0u64, |sum, (_, plan)| sum.saturating_add(plan.flops))
    }

    /// Bytes of GPU memory that it holds between the dispatches: grows with the number of tokens.
    pub fn workspace_bytes(&self) -> u64 {
        let context = self
            .context
            .as_ref()
            .map_or(0, |context| context.buffer().size());
        self.qkv.buffer().size() + context
    }

    /// Batch items and tokens that it is for.
    pub fn shape(&self) -> (usize, usize) {
        (self.batch, self.tokens)
    }
}

impl fmt::Debug for LayerPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LayerPlan")
            .field("config", &self.config)
            .field("batch", &self.batch)
            .field("tokens", &self.tokens)
            .field("masked", &self.masked)
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

//! Scaled dot-product attention: what is asked, which rules hold, how it is planned, and how it is encoded.
//!
//! ```text
//! o_i = sum_j softmax_j(s_ij) v_j      s_ij = softcap(scale * q_i . k_j) - slope * |own_i - j| + bias_ij
//! ```
//!
//! over the keys j that query i may see. A key that is hidden adds nothing, whatever lies there. A row that sees
//! no key gives 0, and a log-sum-exp of -infinity or, where there is one, of its sink. A NaN or +infinity at a key that is seen makes a NaN of that row
//! and of no other.
//!
//! - `problem`: shapes, types, and the positions' arithmetic ([`AttentionProblem`]).
//! - `rules`: who may attend and what a score becomes ([`AttentionRules`], the tensors that they take).
//! - `rule`: a rule of the caller's own, in WGSL ([`Rule`]).
//! - `plan`: which kernel, and why. `encode`: into the caller's encoder ([`Attention`]).
//! - `weights`: the probabilities themselves ([`AttentionWeights`]).

mod encode;
mod plan;
mod problem;
mod rule;
mod rules;
mod weights;

pub use encode::{Attention, AttentionArguments};
pub use problem::AttentionProblem;
pub use rule::Rule;
pub use rules::{Alignment, AttentionRules, RuleArguments};
pub use weights::{AttentionWeights, WeightsArguments, WeightsStage};

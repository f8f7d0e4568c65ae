//! The attention weights themselves: the one result that grows with Tq x Tk, for those who ask for it by name.

use super::encode::{BoundPairs, Side};
use super::{AttentionProblem, RuleArguments};
use crate::gpu::{Call, Gpu, Pipeline, Timestamps};
use crate::kernels::{AttentionParams, Operation};
use crate::operands::{argument, check_operands, expect_contiguous_last, first};
use crate::plan::{Plan, check_plan};
use crate::tensor::{Tensor, TensorView};
use crate::{ElementType, Result};
use std::sync::Arc;

/// How far a score has come when it is written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum WeightsStage {
    /// `scale * q.k`, of every pair.
    Products,
    /// After the softcap, of every pair.
    Capped,
    /// After ALiBi, bias and the caller's own rule; -infinity where the key is hidden.
    Masked,
    /// After the softmax: the weights. Rows add up to 1 (with a sink to less); a row that sees no key is 0.
    #[default]
    Weights,
}

/// The operands of an [`AttentionWeights`].
#[derive(Clone, Copy, Debug)]
pub struct WeightsArguments<'a> {
    /// As [`AttentionArguments::q`](crate::AttentionArguments::q).
    pub q: &'a TensorView,
    /// As [`AttentionArguments::k`](crate::AttentionArguments::k).
    pub k: &'a TensorView,
    /// `(B, H, Tq, Tk)`, f32, any strides; overwritten. Packed sequences are padded here: each has its `q_len` rows of
    /// `kv_len` keys.
    pub weights: &'a TensorView,
    /// What the rules take.
    pub rules: RuleArguments<'a>,
}

/// The probabilities of an [`AttentionProblem`], or its scores, compiled for one problem. They take memory of
/// `B * H * Tq * Tk` numbers, which the caller allocates.
#[derive(Clone)]
pub struct AttentionWeights {
    gpu: Gpu,
    problem: AttentionProblem,
    stage: WeightsStage,
    plan: Plan,
    pipeline: Arc<Pipeline>,
    tables: Option<Tensor>,
}

impl std::fmt::Debug for AttentionWeights {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("AttentionWeights")
            .field("problem", &self.problem)
            .field("stage", &self.stage)
            .field("plan", &self.plan)
            .finish_non_exhaustive()
    }
}

impl AttentionWeights {
    /// Plans the problem for this GPU and compiles what it needs. (v, the output and the kernel's form play no part.)
    ///
    /// # Errors
    ///
    /// As [`Attention::new`](crate::Attention::new).
    pub fn new(gpu: &Gpu, problem: AttentionProblem, stage: WeightsStage) -> Result<Self> {
        let plan = problem.plan_weights(gpu.capabilities())?;
        Self::from_plan(gpu, problem, stage, plan)
    }

    /// Compiles a plan that the caller has changed, as [`Attention::from_plan`](crate::Attention::from_plan) does.
    ///
    /// # Errors
    ///
    /// As [`Attention::from_plan`](crate::Attention::from_plan).
    pub fn from_plan(
        gpu: &Gpu,
        problem: AttentionProblem,
        stage: WeightsStage,
        plan: Plan,
    ) -> Result<Self> {
        problem.check()?;
        check_plan(&plan, Operation::Weights, gpu.capabilities())?;
        Ok(AttentionWeights {
            pipeline: gpu.pipeline(
                plan.kernel,
                &plan.configuration,
                problem.origin_of(&plan, gpu.capabilities()),
            )?,
            tables: problem.tables_workspace(gpu, &plan)?,
            gpu: gpu.clone(),
            problem,
            stage,
            plan,
        })
    }

    /// The plan.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Records it into an encoder, as [`Attention::encode`](crate::Attention::encode) does.
    ///
    /// # Errors
    ///
    /// As [`Attention::encode`](crate::Attention::encode).
    pub fn encode(
        &self,
        encoder: &mut wgpu::CommandEncoder,
        arguments: WeightsArguments<'_>,
    ) -> Result<()> {
        self.encode_timed(encoder, arguments, self.plan.kernel.name, None)
    }

    /// [`encode`](Self::encode), with a label and timestamps around the pass.
    ///
    /// # Errors
    ///
    /// As [`Attention::encode_timed`](crate::Attention::encode_timed).
    pub fn encode_timed(
        &self,
        encoder: &mut wgpu::CommandEncoder,
        arguments: WeightsArguments<'_>,
        label: &str,
        timestamps: Option<&mut Timestamps>,
    ) -> Result<()> {
        let WeightsArguments {
            q,
            k,
            weights,
            rules,
        } = arguments;
        let problem = &self.problem;
        let q = &problem.batched("q", q, Side::Queries, problem.heads, problem.head_dim)?;
        let k = &problem.batched("k", k, Side::Keys, problem.kv_heads, problem.head_dim)?;
        let AttentionProblem {
            batch,
            heads,
            q_len,
            kv_len,
            ..
        } = *problem;
        weights.expect_shape("weights", &[batch, heads, q_len, kv_len])?;
        weights.expect_type("weights", ElementType::F32)?;
        for (name, view, element_type) in [("q", q, problem.q_type), ("k", k, problem.kv_type)] {
            view.expect_type(name, element_type)?;
            expect_contiguous_last(name, view)?;
        }
        let (mask, bias) = rules.check(problem)?;
        let mut inputs = vec![("q", Some(q)), ("k", Some(k))];
        inputs.extend(rules.named());
        check_operands(&self.gpu, &inputs, &[("weights", weights)])?;
        let Some(grid) = self.plan.grid else {
            return Ok(());
        };
        problem.expect_pages(k.shape()[1])?;
        let [q_at, k_at, weights_at] = [q.bind("q")?, k.bind("k")?, weights.bind("weights")?];
        let pairs = BoundPairs::new(&rules, mask, bias)?;
        if let Some(timestamps) = &timestamps {
            timestamps.expect_room(1)?;
        }
        let (tables, places) = rules.bind_tables(&self.gpu, encoder, self.tables.as_ref())?;
        let tables_at = tables.as_ref().map(|t| t.bind("tables")).transpose()?;
        let params = AttentionParams {
            q_total: q.shape()[1] as u32,
            kv_total: k.shape()[1] as u32,
            groups: self.plan.groups,
            q_offset: first(q_at),
            q_batch_stride: q.stride(0),
            q_token_stride: q.stride(1),
            q_head_stride: q.stride(2),
            k_offset: first(k_at),
            k_batch_stride: k.stride(0),
            k_token_stride: k.stride(1),
            k_head_stride: k.stride(2),
            out_offset: first(weights_at),
            out_batch_stride: weights.stride(0),
            out_head_stride: weights.stride(1),
            out_token_stride: weights.stride(2),
            weights_key_stride: weights.stride(3),
            stage: match self.stage {
                WeightsStage::Products => 0,
                WeightsStage::Capped => 1,
                WeightsStage::Masked => 2,
                WeightsStage::Weights => 3,
            },
            ..problem.params(&pairs, &places)?
        };
        let mut bound = vec![
            ("q", argument(Some(q), q_at)),
            ("k", argument(Some(k), k_at)),
            ("weights", argument(Some(weights), weights_at)),
            ("tables", argument(tables.as_ref(), tables_at.flatten())),
        ];
        bound.extend(pairs.arguments());
        self.gpu.record(
            encoder,
            &self.pipeline,
            Call {
                label,
                arguments: &bound,
                params: bytemuck::bytes_of(&params),
                grid,
                slices: self.plan.slices,
                timestamps,
            },
        )
    }
}

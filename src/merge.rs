//! Attention over all keys, put together from attention over parts of them.

use crate::element::ElementType;
use crate::gpu::{Call, Capabilities, Gpu, Origin, Pipeline, Timestamps, fold};
use crate::kernels::{Configuration, Form, MergeParams, Operation};
use crate::operands::{
    argument, check_operands, expect_contiguous_last, expect_writable_rows, first,
};
use crate::plan::{MOVED_COST, Plan, check_plan, choose_kernel, is_own, size, slices};
use crate::tensor::TensorView;
use crate::{Error, Result};
use std::sync::Arc;

/// Partial results to be merged: `lse = log sum_p exp(lse_p)`, `o = sum_p exp(lse_p - lse) o_p`.
///
/// As exact as the log-sum-exp are told: beside a log-sum-exp of a million an f32 does not tell sixteenths. What each part's softmax divided by is undone and done again for the whole (Milakov and Gimelshein 2018,
/// "Online normalizer calculation for softmax"). The parts come from [`Attention`](crate::Attention) over ranges of the keys
/// ([`AttentionProblem::keys`](crate::AttentionProblem::keys)) that cover each key once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MergeProblem {
    /// Partial results (P).
    pub parts: usize,
    /// Batch items (B).
    pub batch: usize,
    /// Query heads (H).
    pub heads: usize,
    /// Queries of a batch item (Tq).
    pub q_len: usize,
    /// Channels of a head of the output (Dv).
    pub value_dim: usize,
    /// The type of the output; the parts are f32.
    pub out_type: ElementType,
}

impl MergeProblem {
    /// Chooses kernel and grid for a device.
    ///
    /// # Errors
    ///
    /// [`Error::Parameter`] for an output that is no float, [`Error::LimitExceeded`] for what does not fit the device.
    pub fn plan(&self, capabilities: &Capabilities) -> Result<Plan> {
        if self.out_type.float_number().is_none() {
            let rule = "must be f32, f16 or bf16";
            return Err(Error::parameter("out_type", self.out_type, rule));
        }
        for (name, value) in [
            ("parts", self.parts),
            ("batch", self.batch),
            ("heads", self.heads),
            ("q_len", self.q_len),
            ("value_dim", self.value_dim),
        ] {
            size(name, value)?;
        }
        let (kernel, _) = choose_kernel(Operation::Merge, capabilities, Some(Form::Tiled))?;
        let rows = (self.batch as u64 * self.heads as u64).saturating_mul(self.q_len as u64);
        let configuration = Configuration {
            consts: Vec::new(),
            rules: Vec::new(),
        };
        capabilities.can_loop(
            kernel,
            &configuration,
            self.parts as u64,
            self.value_dim as u64,
        )?;
        let per_row = (self.parts as u64).saturating_mul(2 * self.value_dim as u64);
        let cost = rows.saturating_mul(per_row).saturating_mul(MOVED_COST);
        Ok(Plan {
            kernel,
            configuration,
            parts: 1,
            splits: 1,
            slices: slices(cost, rows, capabilities),
            grid: fold(rows, capabilities, "merge")?,
            groups: rows as u32,
            flops: rows.saturating_mul(per_row),
            workspace_bytes: 0,
            reason: "a row a workgroup".into(),
        })
    }
}

/// The operands of a [`Merge`].
#[derive(Clone, Copy, Debug)]
pub struct MergeArguments<'a> {
    /// `(P, B, Tq, H, Dv)`, f32, any strides but a contiguous last axis: the outputs of the parts.
    pub parts: &'a TensorView,
    /// `(P, B, H, Tq)`, f32, any strides: their log-sum-exp. A part of -infinity adds nothing, whatever its output holds.
    pub part_lse: &'a TensorView,
    /// `(B, Tq, H, Dv)`; overwritten. As [`AttentionArguments::out`](crate::AttentionArguments::out).
    pub out: &'a TensorView,
    /// `(B, H, Tq)`, f32, any strides; overwritten with the log-sum-exp of the whole.
    pub lse: Option<&'a TensorView>,
}

/// A merge that is compiled for one shape.
#[derive(Clone)]
pub struct Merge {
    gpu: Gpu,
    problem: MergeProblem,
    plan: Plan,
    pipeline: Arc<Pipeline>,
}

impl std::fmt::Debug for Merge {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Merge")
            .field("problem", &self.problem)
            .field("plan", &self.plan)
            .finish_non_exhaustive()
    }
}

impl Merge {
    /// Plans the problem for this GPU and compiles what it needs.
    ///
    /// # Errors
    ///
    /// As [`MergeProblem::plan`], and [`Error::Shader`] if the driver refuses the kernel.
    pub fn new(gpu: &Gpu, problem: MergeProblem) -> Result<Self> {
        let plan = problem.plan(gpu.capabilities())?;
        Self::from_plan(gpu, problem, plan)
    }

    /// Compiles a plan that the caller has changed, as [`Attention::from_plan`](crate::Attention::from_plan) does.
    ///
    /// # Errors
    ///
    /// As [`Attention::from_plan`](crate::Attention::from_plan).
    pub fn from_plan(gpu: &Gpu, problem: MergeProblem, plan: Plan) -> Result<Self> {
        check_plan(&plan, Operation::Merge, gpu.capabilities())?;
        let made = problem
            .plan(gpu.capabilities())
            .is_ok_and(|own| own.configuration == plan.configuration && plan.groups <= own.groups);
        let origin = match is_own(plan.kernel) && made {
            true => Origin::Own,
            false => Origin::Callers,
        };
        Ok(Merge {
            pipeline: gpu.pipeline(plan.kernel, &plan.configuration, origin)?,
            gpu: gpu.clone(),
            problem,
            plan,
        })
    }

    /// The plan.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Records the merge into an encoder: submits nothing, waits for nothing, copies nothing.
    ///
    /// # Errors
    ///
    /// [`Error::Shape`], [`Error::Type`], [`Error::Layout`], [`Error::OtherDevice`], [`Error::LimitExceeded`] if an
    /// operand is larger than the device can bind. Nothing was recorded then.
    pub fn encode(
        &self,
        encoder: &mut wgpu::CommandEncoder,
        arguments: MergeArguments<'_>,
    ) -> Result<()> {
        self.encode_timed(encoder, arguments, self.plan.kernel.name, None)
    }

    /// [`encode`](Self::encode), with a label and timestamps around the pass.
    ///
    /// # Errors
    ///
    /// As [`encode`](Self::encode), and [`Error::LimitExceeded`] where the timestamps have no room left.
    pub fn encode_timed(
        &self,
        encoder: &mut wgpu::CommandEncoder,
        arguments: MergeArguments<'_>,
        label: &str,
        timestamps: Option<&mut Timestamps>,
    ) -> Result<()> {
        self.encode_parts(encoder, arguments, false, label, timestamps)
    }

    /// With the log-sum-exp of the parts as highest and total, `(P, B, H, Tq, 2)`, if `paired`.
    pub(crate) fn encode_parts(
        &self,
        encoder: &mut wgpu::CommandEncoder,
        arguments: MergeArguments<'_>,
        paired: bool,
        label: &str,
        timestamps: Option<&mut Timestamps>,
    ) -> Result<()> {
        let MergeArguments {
            parts,
            part_lse,
            out,
            lse,
        } = arguments;
        let p = self.problem;
        parts.expect_shape("parts", &[p.parts, p.batch, p.q_len, p.heads, p.value_dim])?;
        let lse_shape = [p.parts, p.batch, p.heads, p.q_len, 2];
        let axes = if paired { 5 } else { 4 };
        part_lse.expect_shape("part_lse", &lse_shape[..axes])?;
        out.expect_shape("out", &[p.batch, p.q_len, p.heads, p.value_dim])?;
        out.expect_type("out", p.out_type)?;
        let mut outputs = vec![("out", out)];
        if let Some(lse) = lse {
            lse.expect_shape("lse", &[p.batch, p.heads, p.q_len])?;
            lse.expect_type("lse", ElementType::F32)?;
            outputs.push(("lse", lse));
        }
        parts.expect_type("parts", ElementType::F32)?;
        part_lse.expect_type("part_lse", ElementType::F32)?;
        expect_contiguous_last("parts", parts)?;
        expect_contiguous_last("out", out)?;
        expect_writable_rows("out", out)?;
        let inputs = [("parts", Some(parts)), ("part_lse", Some(part_lse))];
        check_operands(&self.gpu, &inputs, &outputs)?;
        let Some(grid) = self.plan.grid else {
            return Ok(());
        };
        let [parts_at, part_lse_at, out_at] = [
            parts.bind("parts")?,
            part_lse.bind("part_lse")?,
            out.bind("out")?,
        ];
        let lse_at = lse.map(|lse| lse.bind("lse")).transpose()?.flatten();
        let lse_stride = |axis| lse.map_or(0, |lse| lse.stride(axis));
        let params = MergeParams {
            parts: p.parts as u32,
            heads: p.heads as u32,
            q_len: p.q_len as u32,
            value_dim: p.value_dim as u32,
            groups: self.plan.groups,
            first_group: 0,
            parts_offset: first(parts_at),
            parts_part_stride: parts.stride(0),
            parts_batch_stride: parts.stride(1),
            parts_token_stride: parts.stride(2),
            parts_head_stride: parts.stride(3),
            paired: u32::from(paired),
            part_lse_offset: first(part_lse_at),
            part_lse_part_stride: part_lse.stride(0),
            part_lse_batch_stride: part_lse.stride(1),
            part_lse_head_stride: part_lse.stride(2),
            part_lse_token_stride: part_lse.stride(3),
            out_type: p.out_type.float_number().unwrap_or(0),
            out_offset: first(out_at),
            out_batch_stride: out.stride(0),
            out_token_stride: out.stride(1),
            out_head_stride: out.stride(2),
            has_lse: u32::from(lse_at.is_some()),
            lse_offset: first(lse_at),
            lse_batch_stride: lse_stride(0),
            lse_head_stride: lse_stride(1),
            lse_token_stride: lse_stride(2),
        };
        self.gpu.record(
            encoder,
            &self.pipeline,
            Call {
                label,
                arguments: &[
                    ("parts", argument(Some(parts), parts_at)),
                    ("part_lse", argument(Some(part_lse), part_lse_at)),
                    ("out", argument(Some(out), out_at)),
                    ("lse", argument(lse, lse_at)),
                ],
                params: bytemuck::bytes_of(&params),
                grid,
                slices: self.plan.slices,
                timestamps,
            },
        )
    }
}

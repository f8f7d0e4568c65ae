//! Scaled dot-product attention: what is asked, how it is planned, and how it is encoded.
//!
//! ```text
//! o_i = sum_j softmax_j(scale * q_i . k_j) v_j      over the keys j that query i may see
//! ```
//!
//! A key that is hidden adds nothing, whatever lies there. A row that sees no key gives 0. A score of -infinity
//! weighs nothing; a NaN or +infinity at a key that is seen makes a NaN of that row and of no other.

use crate::element::ElementType;
use crate::gpu::{Call, Capabilities, Gpu, Pipeline, Timestamps};
use crate::kernels::{
    ATTEND_ALL, AttentionParams, Configuration, Form, HEAD_DIMS, KEY_MASK, Kernel, Operation,
    compiled_head_dim,
};
use crate::operands::{argument, check_operands, expect_contiguous_last, first};
use crate::plan::{Plan, check_plan, choose_kernel, fold, size};
use crate::tensor::TensorView;
use crate::{Error, Result};
use std::sync::Arc;

/// Which corner of the scores a causal mask is anchored at, where queries and keys differ in number.
///
/// For 2 queries by 4 keys (left) and 4 queries by 2 keys (right), `x` may be seen:
///
/// ```text
/// TopLeft        x . . .      x .        row i sees keys 0..=i
///                x x . .      x x
///                             x x
///                             x x
///
/// BottomRight    x x x .      . .        row i sees keys 0..=i + Tk - Tq
///                x x x x      . .        (rows that see no key give 0)
///                             x .
///                             x x
/// ```
///
/// Both are the same where Tq = Tk. Decoding against a cache wants `BottomRight`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CausalAlignment {
    /// Query 0 sees key 0.
    TopLeft,
    /// The last query sees the last key.
    BottomRight,
}

/// Attention over given shapes with given rules. Plain data: start from [`AttentionProblem::new`] and change fields.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionProblem {
    /// Batch items (B).
    pub batch: usize,
    /// Heads (H).
    pub heads: usize,
    /// Queries of a batch item (Tq).
    pub q_len: usize,
    /// Keys of a batch item (Tk).
    pub kv_len: usize,
    /// Channels of a head (D), 1 to 256.
    pub head_dim: usize,
    /// What the products q.k are multiplied with; `None` is `1/sqrt(head_dim)`. 0 and negative values are used as given.
    pub scale: Option<f32>,
    /// Hides the keys after a query's own.
    pub causal: Option<CausalAlignment>,
    /// Whether a mask (B, Tk) that hides single keys will be given.
    pub key_mask: bool,
    /// The form of the kernel; `None` leaves it to the planner.
    pub form: Option<Form>,
}

impl AttentionProblem {
    /// Full self-attention: every query sees every key.
    pub fn new(batch: usize, heads: usize, tokens: usize, head_dim: usize) -> Self {
        AttentionProblem {
            batch,
            heads,
            q_len: tokens,
            kv_len: tokens,
            head_dim,
            scale: None,
            causal: None,
            key_mask: false,
            form: None,
        }
    }

    /// The scale in force.
    ///
    /// # Errors
    ///
    /// [`Error::Parameter`] if it is NaN or infinite.
    pub fn effective_scale(&self) -> Result<f32> {
        match self.scale {
            None if self.head_dim == 0 => {
                Err(Error::parameter("head_dim", 0, "must be at least 1"))
            }
            None => Ok((1.0 / (self.head_dim as f64).sqrt()) as f32),
            Some(scale) if scale.is_finite() => Ok(scale),
            Some(scale) => Err(Error::parameter("scale", scale, "must be finite")),
        }
    }

    /// Pairs of a query and a key that its position lets it see, over all heads and batch items; `u64::MAX`
    /// if there are more.
    pub fn pairs(&self) -> u64 {
        // In 128 bits: the lengths are a caller's, and need not have been planned.
        let (q_len, kv_len) = (self.q_len as i128, self.kv_len as i128);
        let offset = match self.causal {
            None => kv_len,
            Some(CausalAlignment::TopLeft) => 0,
            Some(CausalAlignment::BottomRight) => kv_len - q_len,
        };
        // Row i sees i + offset + 1 keys, from 0 up to all of them.
        let seen_from = (-offset).clamp(0, q_len);
        let full_from = (kv_len - 1 - offset).clamp(seen_from, q_len);
        let ramp = full_from - seen_from;
        let first = (seen_from + offset + 1).clamp(0, kv_len);
        let one_head = (ramp as u128 * first as u128)
            .saturating_add(ramp as u128 * (ramp - 1).max(0) as u128 / 2)
            .saturating_add((q_len - full_from) as u128 * kv_len as u128);
        let all = one_head
            .saturating_mul(self.heads as u128)
            .saturating_mul(self.batch as u128);
        u64::try_from(all).unwrap_or(u64::MAX)
    }

    /// Row i sees keys 0..=i + offset.
    fn causal_offset(&self) -> Option<i64> {
        self.causal.map(|alignment| match alignment {
            CausalAlignment::TopLeft => 0,
            CausalAlignment::BottomRight => self.kv_len as i64 - self.q_len as i64,
        })
    }

    /// Chooses kernel, configuration and grid for a device.
    ///
    /// # Errors
    ///
    /// [`Error::Parameter`] for no heads, no channels or a scale that is not finite; [`Error::LimitExceeded`] for
    /// heads of more than 256 channels (64 in the lanes form, if that is asked for), and for what does not fit
    /// the device or 32-bit counting.
    pub fn plan(&self, capabilities: &Capabilities) -> Result<Plan> {
        self.effective_scale()?;
        if self.heads == 0 {
            return Err(Error::parameter("heads", 0, "must be at least 1"));
        }
        if self.head_dim == 0 {
            return Err(Error::parameter("head_dim", 0, "must be at least 1"));
        }
        let most = HEAD_DIMS[HEAD_DIMS.len() - 1];
        let too_large = || Error::LimitExceeded {
            what: "head_dim".into(),
            limit: "the largest compiled head size".into(),
            needed: self.head_dim as u64,
            available: u64::from(most),
            unit: "channels",
        };
        let head_dim = size("head_dim", self.head_dim)?;
        let compiled = compiled_head_dim(head_dim).ok_or_else(too_large)?;
        for (name, value) in [
            ("batch", self.batch),
            ("heads", self.heads),
            ("q_len", self.q_len),
            ("kv_len", self.kv_len),
        ] {
            size(name, value)?;
        }

        let rule = if self.key_mask {
            &KEY_MASK
        } else {
            &ATTEND_ALL
        };
        // From the smallest block of queries to the largest; empty where the kernel has no such head size.
        let fitting = |kernel: &Kernel| -> Vec<Configuration> {
            (kernel.configurations)()
                .into_iter()
                .filter(|c| c.get("HEAD_DIM") == compiled && c.rules.contains(&rule))
                .collect()
        };
        let (mut kernel, mut reason) =
            choose_kernel(Operation::Attention, capabilities, self.form)?;
        let mut configurations = fitting(kernel);
        if configurations.is_empty() {
            let largest = (kernel.configurations)()
                .iter()
                .map(|c| c.get("HEAD_DIM"))
                .max();
            let largest = largest.unwrap_or(0);
            if self.form.is_some() {
                return Err(Error::LimitExceeded {
                    what: "head_dim".into(),
                    limit: format!("the largest head of {}", kernel.name),
                    needed: self.head_dim as u64,
                    available: u64::from(largest),
                    unit: "channels",
                });
            }
            let small = kernel.name;
            (kernel, _) = choose_kernel(Operation::Attention, capabilities, Some(Form::Tiled))?;
            reason = format!("tiles, since {small} takes heads of {largest} channels at most");
            configurations = fitting(kernel);
        }
        // Large blocks where at least two of them are full.
        let full = |c: &&Configuration| 2 * queries_per_group(kernel, c) <= self.q_len as u64;
        let chosen = configurations.iter().rev().find(full);
        let chosen = chosen.or(configurations.first());
        let configuration = chosen.cloned().ok_or_else(too_large)?;
        let block_q = queries_per_group(kernel, &configuration);
        let groups = (self.q_len as u64)
            .div_ceil(block_q)
            .saturating_mul(self.heads as u64)
            .saturating_mul(self.batch as u64);
        let plan = Plan {
            grid: fold(groups, capabilities, "attention")?,
            groups: groups as u32,
            flops: self.pairs().saturating_mul(4 * self.head_dim as u64),
            workspace_bytes: 0,
            reason: format!(
                "{reason}; head_dim {head_dim} by the kernel of {compiled}, {block_q} queries a workgroup"
            ),
            kernel,
            configuration,
        };
        log::debug!("{self:?} -> {plan}");
        Ok(plan)
    }
}

/// Queries that one workgroup computes.
fn queries_per_group(kernel: &Kernel, configuration: &Configuration) -> u64 {
    let lanes = match kernel.form {
        Form::Tiled => 8,
        Form::Lanes => configuration.get("LANES"),
    };
    u64::from(lanes * configuration.get("ROWS")).max(1)
}

/// The operands of an [`Attention`]. Views may have any strides for batch, token and head and begin anywhere;
/// their last axis is contiguous. q, k and v may be parts of one buffer, or the same view.
#[derive(Clone, Copy, Debug)]
pub struct AttentionArguments<'a> {
    /// `(B, Tq, H, D)`, f32.
    pub q: &'a TensorView,
    /// `(B, Tk, H, D)`, f32.
    pub k: &'a TensorView,
    /// `(B, Tk, H, D)`, f32.
    pub v: &'a TensorView,
    /// `(B, Tk)`, bool: false hides the key from every query of the batch item. Given exactly if the problem says so.
    pub mask: Option<&'a TensorView>,
    /// `(B, Tq, H, D)`, f32; overwritten. May not share a buffer with the others.
    pub out: &'a TensorView,
}

/// Attention that is compiled for one problem, ready to be encoded any number of times.
#[derive(Clone)]
pub struct Attention {
    gpu: Gpu,
    problem: AttentionProblem,
    plan: Plan,
    pipeline: Arc<Pipeline>,
}

impl std::fmt::Debug for Attention {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Attention")
            .field("problem", &self.problem)
            .field("plan", &self.plan)
            .finish_non_exhaustive()
    }
}

impl Attention {
    /// Plans the problem for this GPU and compiles what it needs.
    ///
    /// # Errors
    ///
    /// As [`AttentionProblem::plan`], and [`Error::Shader`] if the driver refuses the kernel.
    pub fn new(gpu: &Gpu, problem: AttentionProblem) -> Result<Self> {
        Self::from_plan(gpu, problem, problem.plan(gpu.capabilities())?)
    }

    /// Compiles a plan that the caller has changed: another configuration, or a kernel of their own that takes
    /// the bindings and parameters of the one it replaces (a `&'static Kernel`: `Box::leak` makes one). Nothing
    /// checks that its grid still covers the problem.
    ///
    /// # Errors
    ///
    /// [`Error::Parameter`] for a kernel of another operation, [`Error::Shader`] if it is refused, [`Error::LimitExceeded`] if the grid is over the device's limit.
    pub fn from_plan(gpu: &Gpu, problem: AttentionProblem, plan: Plan) -> Result<Self> {
        check_plan(&plan, Operation::Attention, gpu.capabilities())?;
        Ok(Attention {
            pipeline: gpu.pipeline(plan.kernel, &plan.configuration)?,
            gpu: gpu.clone(),
            problem,
            plan,
        })
    }

    /// The plan.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Records the attention into an encoder. Submits nothing and waits for nothing; allocates nothing on the
    /// GPU unless views are laid out as never before (then one parameter buffer of about 100 bytes).
    ///
    /// # Errors
    ///
    /// [`Error::Shape`], [`Error::Type`], [`Error::Layout`], [`Error::OtherDevice`],
    /// [`Error::LimitExceeded`] if an operand is larger than the device can bind. Nothing was recorded then.
    pub fn encode(
        &self,
        encoder: &mut wgpu::CommandEncoder,
        arguments: AttentionArguments<'_>,
    ) -> Result<()> {
        self.encode_timed(encoder, arguments, self.plan.kernel.name, None)
    }

    /// [`encode`](Self::encode), with a label and timestamps around the pass (none where there is nothing to
    /// compute).
    ///
    /// # Errors
    ///
    /// As [`encode`](Self::encode), and [`Error::LimitExceeded`] where the timestamps have no room left.
    pub fn encode_timed(
        &self,
        encoder: &mut wgpu::CommandEncoder,
        arguments: AttentionArguments<'_>,
        label: &str,
        timestamps: Option<&mut Timestamps>,
    ) -> Result<()> {
        let AttentionArguments { q, k, v, mask, out } = arguments;
        let AttentionProblem {
            batch,
            heads,
            q_len,
            kv_len,
            head_dim,
            ..
        } = self.problem;
        q.expect_shape("q", &[batch, q_len, heads, head_dim])?;
        k.expect_shape("k", &[batch, kv_len, heads, head_dim])?;
        v.expect_shape("v", &[batch, kv_len, heads, head_dim])?;
        out.expect_shape("out", &[batch, q_len, heads, head_dim])?;
        match (self.problem.key_mask, mask) {
            (true, Some(mask)) => {
                mask.expect_shape("mask", &[batch, kv_len])?;
                mask.expect_type("mask", ElementType::Bool)?;
                expect_contiguous_last("mask", mask)?;
            }
            (false, None) => {}
            (planned, _) => {
                let word = |there| if there { "a mask" } else { "no mask" };
                return Err(Error::shape(
                    "mask",
                    format!("{} as the problem says", word(planned)),
                    word(!planned),
                ));
            }
        }
        for (name, view) in [("q", q), ("k", k), ("v", v), ("out", out)] {
            expect_contiguous_last(name, view)?;
        }
        let inputs = [
            ("q", Some(q)),
            ("k", Some(k)),
            ("v", Some(v)),
            ("mask", mask),
        ];
        check_operands(&self.gpu, &inputs, ("out", out))?;
        let Some(grid) = self.plan.grid else {
            return Ok(());
        };

        let mask_at = match mask {
            Some(mask) => mask.bind("mask")?,
            None => None,
        };
        let [q_at, k_at, v_at, out_at] =
            [q.bind("q")?, k.bind("k")?, v.bind("v")?, out.bind("out")?];
        let causal_offset = self.problem.causal_offset();
        let block_q = queries_per_group(self.plan.kernel, &self.plan.configuration);
        let params = AttentionParams {
            heads: heads as u32,
            q_len: q_len as u32,
            kv_len: kv_len as u32,
            head_dim: head_dim as u32,
            causal: u32::from(causal_offset.is_some()),
            // Both lengths are below 2^31, so their difference fits.
            causal_offset: causal_offset.unwrap_or(0) as i32,
            scale: self.problem.effective_scale()?,
            q_tiles: (q_len as u64).div_ceil(block_q) as u32,
            groups: self.plan.groups,
            q_offset: first(q_at),
            q_batch_stride: q.stride(0),
            q_token_stride: q.stride(1),
            q_head_stride: q.stride(2),
            k_offset: first(k_at),
            k_batch_stride: k.stride(0),
            k_token_stride: k.stride(1),
            k_head_stride: k.stride(2),
            v_offset: first(v_at),
            v_batch_stride: v.stride(0),
            v_token_stride: v.stride(1),
            v_head_stride: v.stride(2),
            out_offset: first(out_at),
            out_batch_stride: out.stride(0),
            out_token_stride: out.stride(1),
            out_head_stride: out.stride(2),
            mask_offset: first(mask_at),
            mask_batch_stride: mask.map_or(0, |mask| mask.stride(0)),
        };
        self.gpu.record(
            encoder,
            &self.pipeline,
            Call {
                label,
                arguments: &[
                    argument(Some(q), q_at),
                    argument(Some(k), k_at),
                    argument(Some(v), v_at),
                    argument(mask, mask_at),
                    argument(Some(out), out_at),
                ],
                params: bytemuck::bytes_of(&params),
                grid,
                timestamps,
            },
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_are_counted_once() {
        for q_len in 0..7usize {
            for kv_len in 0..7usize {
                for causal in [
                    None,
                    Some(CausalAlignment::TopLeft),
                    Some(CausalAlignment::BottomRight),
                ] {
                    let problem = AttentionProblem {
                        kv_len,
                        causal,
                        ..AttentionProblem::new(2, 3, q_len, 4)
                    };
                    let mut expected = 0;
                    for i in 0..q_len as i64 {
                        for j in 0..kv_len as i64 {
                            let offset = match causal {
                                None => i64::MAX / 2,
                                Some(CausalAlignment::TopLeft) => 0,
                                Some(CausalAlignment::BottomRight) => kv_len as i64 - q_len as i64,
                            };
                            expected += u64::from(j <= i + offset);
                        }
                    }
                    assert_eq!(problem.pairs(), 6 * expected, "{problem:?}");
                }
            }
        }
    }

    /// modular/modular#5557: causal work counted as full.
    #[test]
    fn causal_flops_are_counted_once() {
        let capabilities = Capabilities::webgpu_defaults(wgpu::DeviceType::Cpu);
        let full = AttentionProblem::new(1, 8, 1024, 64);
        let causal = AttentionProblem {
            causal: Some(CausalAlignment::TopLeft),
            ..full
        };
        let flops =
            |problem: AttentionProblem| problem.plan(&capabilities).map(|plan| plan.flops).ok();
        assert_eq!(flops(full), Some(2_147_483_648));
        assert_eq!(flops(causal), Some(1_074_790_400));
    }
}

//! Attention, compiled for one problem and recorded into the caller's encoder.

use super::plan::narrower;
use super::rules::TablePlaces;
use super::{Alignment, AttentionProblem, RuleArguments};
use crate::gpu::{Argument, Call, Gpu, Origin, Others, Pipeline, Timestamps};
use crate::kernels::{AttentionParams, Operation, Q_OUT_F32};
use crate::merge::{Merge, MergeArguments};
use crate::operands::{
    argument, begins_on, check_operands, expect_contiguous_last, expect_writable_rows, first,
};
use crate::plan::{Plan, check_plan};
use crate::tensor::{Tensor, TensorView, shape_text};
use crate::{ElementType, Error, Result};
use std::sync::Arc;

/// The operands of an [`Attention`]. Views may have any strides for batch, token and head and begin anywhere;
/// their last axis is contiguous. q, k and v may be parts of one buffer, or the same view.
///
/// Of a packed problem q, k, v and out have no batch axis: `(tokens, H, D)`, and the log-sum-exp is `(tokens, H)`; see
/// [`AttentionProblem::packed`].
#[derive(Clone, Copy, Debug)]
pub struct AttentionArguments<'a> {
    /// `(B, Tq, H, D)`, of the problem's `q_type`.
    pub q: &'a TensorView,
    /// `(B, Tk, Hkv, D)`, of the problem's `kv_type`; where it has a `page_size`, pages `(P, page_size, Hkv, D)`, any
    /// number of them, one behind the other in memory.
    pub k: &'a TensorView,
    /// `(B, Tk, Hkv, Dv)`, of the problem's `kv_type`; in as many pages as k.
    pub v: &'a TensorView,
    /// `(B, Tq, H, Dv)`, of the problem's `out_type`; overwritten. May not share a buffer with the others. Rows of
    /// 16-bit elements begin on whole words: its offset and its strides for batch, token and head are even.
    pub out: &'a TensorView,
    /// `(B, H, Tq)`, f32, any strides; overwritten with each row's log-sum-exp: the natural logarithm of the sum of
    /// the exponentials of its scores, and of its sink where there is one; -infinity for a row that has neither (and
    /// for rows past `q_lens`). May not share a buffer with the others.
    pub lse: Option<&'a TensorView>,
    /// What the rules take.
    pub rules: RuleArguments<'a>,
}

impl<'a> AttentionArguments<'a> {
    /// Without a log-sum-exp, and without what rules take.
    pub fn new(
        q: &'a TensorView,
        k: &'a TensorView,
        v: &'a TensorView,
        out: &'a TensorView,
    ) -> Self {
        AttentionArguments {
            q,
            k,
            v,
            out,
            lse: None,
            rules: RuleArguments::default(),
        }
    }
}

/// Attention that is compiled for one problem, ready to be encoded any number of times. Cheap to clone; clones share
/// the workspace, and so do all calls that are encoded with it: the GPU runs them one after another.
#[derive(Clone)]
pub struct Attention {
    gpu: Gpu,
    problem: AttentionProblem,
    plan: Plan,
    pipeline: Arc<Pipeline>,
    others: Others,
    origin: Origin,
    /// Where small operands are gathered.
    tables: Option<Tensor>,
    parts: Option<Parts>,
}

/// What a problem in parts of the keys takes.
#[derive(Clone)]
struct Parts {
    /// `(P, B, Tq, H, Dv)`, f32.
    out: TensorView,
    /// `(P, B, H, Tq, 2)`: the highest score and the total of each row.
    lse: TensorView,
    merge: Merge,
}

impl Parts {
    fn new(gpu: &Gpu, problem: &AttentionProblem, plan: &Plan) -> Result<Option<Self>> {
        let parts = plan.parts.max(plan.splits) as usize;
        if parts <= 1 || plan.grid.is_none() {
            return Ok(None);
        }
        let AttentionProblem {
            batch,
            heads,
            q_len,
            value_dim,
            ..
        } = *problem;
        let out = [parts, batch, q_len, heads, value_dim];
        let lse = [parts, batch, heads, q_len, 2];
        Ok(Some(Parts {
            merge: Merge::new(gpu, problem.merge_of(parts))?,
            out: Tensor::empty(gpu, &out, ElementType::F32)?.view(),
            lse: Tensor::empty(gpu, &lse, ElementType::F32)?.view(),
        }))
    }
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
    /// Plans the problem for this GPU, or takes the plan that [`tune`](AttentionProblem::tune) found, and compiles what it needs.
    ///
    /// # Errors
    ///
    /// As [`AttentionProblem::plan`], [`Error::Shader`] if the driver refuses the kernel, and
    /// [`Error::OutOfMemory`].
    pub fn new(gpu: &Gpu, problem: AttentionProblem) -> Result<Self> {
        let plan = problem.plan_on(gpu)?;
        Self::from_plan(gpu, problem, plan)
    }

    /// Compiles a plan that the caller has changed: another configuration, or a kernel of their own that takes
    /// the bindings and parameters of the one it replaces (a `&'static Kernel`: `Box::leak` makes one). Nothing
    /// checks that its grid still covers the problem.
    ///
    /// # Errors
    ///
    /// [`Error::Parameter`] for a kernel of another operation, or parts of the keys that there cannot be; [`Error::Unsupported`] for arithmetic
    /// that is not for this problem; [`Error::Shader`] if it is refused; [`Error::LimitExceeded`] if its grid is over the device's limit, or the
    /// problem's workgroups are more than 32 bits count.
    pub fn from_plan(gpu: &Gpu, problem: AttentionProblem, plan: Plan) -> Result<Self> {
        problem.check()?;
        let operation = match plan.kernel.operation {
            Operation::Decode => Operation::Decode,
            _ => Operation::Attention,
        };
        check_plan(&plan, operation, gpu.capabilities())?;
        problem.check_own_plan(&plan, gpu.capabilities())?;
        let origin = problem.origin_of(&plan, gpu.capabilities());
        Ok(Attention {
            pipeline: gpu.pipeline(plan.kernel, &plan.configuration, origin)?,
            others: Others::default(),
            origin,
            tables: problem.tables_workspace(gpu, &plan)?,
            parts: Parts::new(gpu, &problem, &plan)?,
            gpu: gpu.clone(),
            problem,
            plan,
        })
    }

    /// The plan.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// What it computes.
    pub fn problem(&self) -> &AttentionProblem {
        &self.problem
    }

    /// Records the attention into an encoder. Submits nothing and waits for nothing; allocates nothing on the
    /// GPU unless views are laid out as never before (then one parameter buffer of about 300 bytes). Copies nothing
    /// but what the plan names. (The first call whose rows do not begin on multiples of four elements compiles the kernel once more, if it
    /// reads them so: rows of k and v, and of q and out too where the form is lanes and all four are f32. So does one whose rows of k and v do
    /// not begin on multiples of eight, where they are read so: lanes, with 64-bit integers.)
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
        mut timestamps: Option<&mut Timestamps>,
    ) -> Result<()> {
        let AttentionArguments {
            q,
            k,
            v,
            out,
            lse,
            rules,
        } = arguments;
        let problem = &self.problem;
        let q = &problem.batched("q", q, Side::Queries, problem.heads, problem.head_dim)?;
        let k = &problem.batched("k", k, Side::Keys, problem.kv_heads, problem.head_dim)?;
        let v = &problem.batched("v", v, Side::Keys, problem.kv_heads, problem.value_dim)?;
        let out = &problem.batched("out", out, Side::Queries, problem.heads, problem.value_dim)?;
        let (q_total, kv_total) = (q.shape()[1], k.shape()[1]);
        v.expect_axis("v", 1, kv_total)?;
        out.expect_axis("out", 1, q_total)?;
        let lse = match lse {
            Some(lse) if problem.packed => {
                lse.expect_shape("lse", &[q_total, problem.heads])?;
                Some(lse.permute(&[1, 0])?.unsqueeze(0))
            }
            Some(lse) => {
                lse.expect_shape("lse", &[problem.batch, problem.heads, problem.q_len])?;
                Some(lse.clone())
            }
            None => None,
        };
        for (name, view, element_type) in [
            ("q", q, problem.q_type),
            ("k", k, problem.kv_type),
            ("v", v, problem.kv_type),
            ("out", out, problem.out_type),
        ] {
            view.expect_type(name, element_type)?;
            expect_contiguous_last(name, view)?;
        }
        expect_writable_rows("out", out)?;
        if let Some(lse) = &lse {
            lse.expect_type("lse", ElementType::F32)?;
        }
        let (mask, bias) = rules.check(problem)?;
        let mut inputs = vec![("q", Some(q)), ("k", Some(k)), ("v", Some(v))];
        inputs.extend(rules.named());
        let mut outputs = vec![("out", out)];
        outputs.extend(lse.as_ref().map(|lse| ("lse", lse)));
        check_operands(&self.gpu, &inputs, &outputs)?;
        let Some(grid) = self.plan.grid.filter(|_| q_total > 0) else {
            return Ok(());
        };
        problem.expect_pages(kv_total)?;

        let [q_at, k_at, v_at] = [q.bind("q")?, k.bind("k")?, v.bind("v")?];
        // Nothing is recorded for outputs that cannot be bound.
        let out_at = out.bind("out")?;
        if let Some(lse) = &lse {
            lse.bind("lse")?;
        }
        let pairs = BoundPairs::new(&rules, mask, bias)?;
        // Most callers' rows begin where as many channels can be read at once as planned; a pipeline for the others is made when they come.
        let fits = |channels: usize| {
            let whole = |size: usize| size.is_multiple_of(channels);
            let keys = [(k, k_at), (v, v_at)];
            let begins = |(view, at)| begins_on(channels as u32, view, at, 0..3);
            whole(problem.head_dim) && whole(problem.value_dim) && keys.into_iter().all(begins)
        };
        // (Planned for operands that are not f32 it is by a caller alone.)
        let queries = !self.plan.configuration.links(&Q_OUT_F32)
            || [(q, q_at), (out, out_at)].into_iter().all(|(view, at)| {
                view.element_type() == ElementType::F32 && begins_on(4, view, at, 0..3)
            });
        let narrow = match () {
            () if !queries || !fits(4) => narrower(&self.plan.configuration, 1),
            () if !fits(8) => narrower(&self.plan.configuration, 4),
            () => None,
        };
        let pipeline = match narrow {
            Some(configuration) => {
                let (kernel, origin) = (self.plan.kernel, self.origin);
                &self.others.get(&self.gpu, kernel, configuration, origin)?
            }
            None => &self.pipeline,
        };
        if let Some(timestamps) = &timestamps {
            timestamps.expect_room(self.plan.passes())?;
        }
        let (tables, places) = rules.bind_tables(&self.gpu, encoder, self.tables.as_ref())?;
        let tables_at = tables.as_ref().map(|t| t.bind("tables")).transpose()?;
        let tiles = problem.row_tiles(self.plan.kernel, &self.plan.configuration);
        let params = AttentionParams {
            q_total: q_total as u32,
            kv_total: kv_total as u32,
            q_tiles: tiles as u32,
            parts: self.plan.splits.max(1),
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
            ..problem.params(&pairs, &places)?
        };
        // One dispatch with these outputs.
        let dispatch = |encoder: &mut wgpu::CommandEncoder,
                        params: AttentionParams,
                        out: &TensorView,
                        lse: Option<&TensorView>,
                        timestamps: Option<&mut Timestamps>| {
            let out_at = out.bind("out")?;
            let lse_at = lse.map(|lse| lse.bind("lse")).transpose()?.flatten();
            let lse_stride = |axis| lse.map_or(0, |lse| lse.stride(axis));
            // Results of parts side by side have an axis in front.
            let lead = out.shape().len().saturating_sub(4);
            let params = AttentionParams {
                out_offset: first(out_at),
                out_part_stride: if lead > 0 { out.stride(0) } else { 0 },
                out_batch_stride: out.stride(lead),
                out_token_stride: out.stride(lead + 1),
                out_head_stride: out.stride(lead + 2),
                has_lse: match lse.map(|lse| lse.shape().len()) {
                    _ if lse_at.is_none() => 0,
                    Some(4..) => 2,
                    _ => 1,
                },
                lse_offset: first(lse_at),
                lse_part_stride: if lead > 0 { lse_stride(0) } else { 0 },
                lse_batch_stride: lse_stride(lead),
                lse_head_stride: lse_stride(lead + 1),
                lse_token_stride: lse_stride(lead + 2),
                ..params
            };
            let mut bound = vec![
                ("q", argument(Some(q), q_at)),
                ("k", argument(Some(k), k_at)),
                ("v", argument(Some(v), v_at)),
                ("out", argument(Some(out), out_at)),
                ("lse", argument(lse, lse_at)),
                ("tables", argument(tables.as_ref(), tables_at.flatten())),
            ];
            bound.extend(pairs.arguments());
            self.gpu.record(
                encoder,
                pipeline,
                Call {
                    label,
                    arguments: &bound,
                    params: bytemuck::bytes_of(&params),
                    grid,
                    slices: self.plan.slices,
                    timestamps,
                },
            )
        };
        let Some(parts) = &self.parts else {
            return dispatch(encoder, params, out, lse.as_ref(), timestamps);
        };
        let keys = problem.key_range();
        let count = self.plan.parts as usize;
        let edge =
            |part: usize| keys.start + (keys.len() as u64 * part as u64 / count as u64) as usize;
        if self.plan.splits > 1 {
            let (out, lse) = (&parts.out, Some(&parts.lse));
            let params = AttentionParams {
                out_type: 0,
                ..params
            };
            dispatch(encoder, params, out, lse, timestamps.as_deref_mut())?;
        }
        // Parts one after the other; none where they are computed side by side.
        for part in (0..count).filter(|_| self.plan.splits <= 1) {
            let only = |view: &TensorView| view.slice(0, part..part + 1)?.merge_axes(0..2);
            let params = AttentionParams {
                key_begin: edge(part) as u32,
                key_end: edge(part + 1) as u32,
                out_type: 0,
                // A sink counts once.
                sinks_at: if part == 0 { params.sinks_at } else { u32::MAX },
                ..params
            };
            let (out, lse) = (only(&parts.out)?, only(&parts.lse)?);
            dispatch(encoder, params, &out, Some(&lse), timestamps.as_deref_mut())?;
        }
        let arguments = MergeArguments {
            parts: &parts.out,
            part_lse: &parts.lse,
            out,
            lse: lse.as_ref(),
        };
        parts
            .merge
            .encode_parts(encoder, arguments, true, label, timestamps)
    }
}

/// Pages `(P, page_size, heads, channels)` as `(1, P * page_size, heads, channels)`.
fn paged(
    name: &str,
    view: &TensorView,
    page_size: usize,
    heads: usize,
    channels: usize,
) -> Result<TensorView> {
    let pages = match *view.shape() {
        [pages, ref rest @ ..] if *rest == [page_size, heads, channels] => pages,
        _ => {
            let expected = format!(
                "(pages, {page_size}, {heads}, {channels}), since k and v lie in pages of {page_size}"
            );
            return Err(Error::shape(name, expected, shape_text(view.shape())));
        }
    };
    let tokens = pages.saturating_mul(page_size);
    crate::plan::size(name, tokens)?;
    let merged = view.merge_axes(0..2).map_err(|_| Error::Layout {
        argument: name.into(),
        problem: format!(
            "its pages do not follow one another in memory as their tokens do (shape {}, strides {})",
            shape_text(view.shape()),
            shape_text(view.strides())
        ),
        remedy: "pages and the tokens in them must be one axis: let the pages of a head follow one another, as KvCache keeps them".into(),
    })?;
    Ok(merged.unsqueeze(0))
}

/// Which tokens an operand runs along.
#[derive(Clone, Copy)]
pub(super) enum Side {
    Queries,
    Keys,
}

impl AttentionProblem {
    /// An operand as `(B, T, heads, channels)`: one of a packed problem gets a batch axis of 1, and so do pages, whose
    /// tokens are then one axis.
    pub(super) fn batched(
        &self,
        name: &str,
        view: &TensorView,
        side: Side,
        heads: usize,
        channels: usize,
    ) -> Result<TensorView> {
        let tokens = match side {
            Side::Queries => self.q_len,
            Side::Keys => self.kv_len,
        };
        if let (Side::Keys, Some(page_size)) = (side, self.page_size) {
            return paged(name, view, page_size, heads, channels);
        }
        if !self.packed {
            view.expect_shape(name, &[self.batch, tokens, heads, channels])?;
            return Ok(view.clone());
        }
        // Of packed sequences there may be any number of tokens.
        let any = match *view.shape() {
            [any, own_heads, own_channels] if (own_heads, own_channels) == (heads, channels) => any,
            _ => {
                let expected =
                    format!("(tokens, {heads}, {channels}), since the problem is packed");
                return Err(Error::shape(name, expected, shape_text(view.shape())));
            }
        };
        crate::plan::size(name, any)?;
        Ok(view.unsqueeze(0))
    }

    /// [`Error::Shape`] unless there is a page that a block table could name, where keys are read at all.
    pub(super) fn expect_pages(&self, kv_total: usize) -> Result<()> {
        if self.page_size.is_some() && kv_total == 0 && self.kv_len > 0 {
            let expected = format!("a page at least, since there may be {} keys", self.kv_len);
            return Err(Error::shape("k", expected, "no pages".to_string()));
        }
        Ok(())
    }

    /// The buffer in which small operands are gathered, where there may be several.
    pub(super) fn tables_workspace(&self, gpu: &Gpu, plan: &Plan) -> Result<Option<Tensor>> {
        let (bytes, _) = self.gathered_tables();
        (bytes > 0 && plan.grid.is_some())
            .then(|| Tensor::empty(gpu, &[(bytes / 4) as usize], ElementType::U32))
            .transpose()
    }

    /// The parameters that every kernel of attention takes from problem and rules.
    pub(super) fn params(
        &self,
        pairs: &BoundPairs<'_>,
        places: &TablePlaces,
    ) -> Result<AttentionParams> {
        let (window_left, window_right) = self.window();
        let keys = self.key_range();
        let number = |element: ElementType| element.float_number().unwrap_or(0);
        let stride = |view: &Option<TensorView>, axis| view.as_ref().map_or(0, |v| v.stride(axis));
        Ok(AttentionParams {
            packed: u32::from(self.packed),
            heads: self.heads as u32,
            group: (self.heads / self.kv_heads) as u32,
            q_len: self.q_len as u32,
            kv_len: self.kv_len as u32,
            head_dim: self.head_dim as u32,
            value_dim: self.value_dim as u32,
            scale: self.effective_scale()?,
            softcap: self.rules.softcap.unwrap_or(0.0),
            bottom_right: u32::from(self.rules.alignment == Some(Alignment::BottomRight)),
            window_left,
            window_right,
            key_begin: keys.start as u32,
            key_end: keys.end as u32,
            q_type: number(self.q_type),
            out_type: number(self.out_type),
            has_mask: u32::from(pairs.mask.is_some()),
            mask_offset: first(pairs.mask_at),
            mask_batch_stride: stride(&pairs.mask, 0),
            mask_head_stride: stride(&pairs.mask, 1),
            mask_query_stride: stride(&pairs.mask, 2),
            mask_key_stride: stride(&pairs.mask, 3),
            has_bias: u32::from(pairs.bias.is_some()),
            bias_offset: first(pairs.bias_at),
            bias_batch_stride: stride(&pairs.bias, 0),
            bias_head_stride: stride(&pairs.bias, 1),
            bias_query_stride: stride(&pairs.bias, 2),
            bias_key_stride: stride(&pairs.bias, 3),
            q_lens_at: places.q_lens,
            kv_lens_at: places.kv_lens,
            cu_seqlens_q_at: places.cu_seqlens_q,
            cu_seqlens_k_at: places.cu_seqlens_k,
            slopes_at: places.slopes,
            slopes_batch_stride: places.slopes_batch_stride,
            sinks_at: places.sinks,
            page_size: self.page_size.unwrap_or(0) as u32,
            block_table_at: places.block_table,
            block_table_stride: self.pages() as u32,
            rule_data_offset: first(pairs.data_at),
            ..Default::default()
        })
    }
}

/// The larger operands of the rules, as they are bound.
pub(super) struct BoundPairs<'a> {
    mask: Option<TensorView>,
    bias: Option<TensorView>,
    data: Option<&'a TensorView>,
    mask_at: Option<crate::gpu::Bound>,
    bias_at: Option<crate::gpu::Bound>,
    data_at: Option<crate::gpu::Bound>,
}

impl<'a> BoundPairs<'a> {
    pub(super) fn new(
        rules: &RuleArguments<'a>,
        mask: Option<TensorView>,
        bias: Option<TensorView>,
    ) -> Result<Self> {
        let bind = |name: &str, view: Option<&TensorView>| match view {
            Some(view) => view.bind(name),
            None => Ok(None),
        };
        Ok(BoundPairs {
            mask_at: bind("mask", mask.as_ref())?,
            bias_at: bind("bias", bias.as_ref())?,
            data_at: bind("rule_data", rules.rule_data)?,
            data: rules.rule_data,
            mask,
            bias,
        })
    }

    pub(super) fn arguments(&self) -> [(&'static str, Argument<'_>); 3] {
        [
            ("mask", argument(self.mask.as_ref(), self.mask_at)),
            ("bias", argument(self.bias.as_ref(), self.bias_at)),
            ("rule_values", argument(self.data, self.data_at)),
        ]
    }
}

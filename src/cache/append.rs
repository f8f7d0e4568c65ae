//! The dispatch that moves new queries, keys and values to where attention reads them.

use super::CacheDevice;
use crate::gpu::{Argument, Call, Gpu, Pipeline, Timestamps, fold};
use crate::kernels::{AppendParams, Configuration, Form, Kernel, Operation};
use crate::operands::{
    argument, check_operands, expect_contiguous_last, expect_writable_rows, first,
};
use crate::plan::{MOVED_COST, Plan, choose_kernel, origin_of, slices};
use crate::rotary::{Rotary, RotaryPairing};
use crate::tensor::TensorView;
use crate::{Error, Result};
use std::sync::Arc;

/// The compiled kernel.
#[derive(Clone)]
pub(crate) struct Append {
    gpu: Gpu,
    plan: Plan,
    pipeline: Arc<Pipeline>,
}

/// What one dispatch moves.
pub(crate) struct Moves<'a> {
    /// Names and views of q `(B, T, H, D)` and of where it goes.
    pub(crate) q: Option<(&'static str, &'a TensorView, &'static str, &'a TensorView)>,
    /// k `(B, T, Hkv, D)` and v `(B, T, Hkv, Dv)`, which go into a cache.
    pub(crate) kv: Option<[&'a TensorView; 2]>,
    /// Turns q and k.
    pub(crate) rotary: Option<&'a Rotary>,
    pub(crate) place: Place<'a>,
}

/// Where the new tokens stand.
pub(crate) enum Place<'a> {
    /// From these positions on: `first` for all batch items, and `(B)` of each.
    Positions {
        first: usize,
        starts: Option<&'a TensorView>,
    },
    /// Behind what a cache has; `counts`: with each sequence's own number of new tokens.
    Cache {
        cache: &'a CacheDevice,
        counts: bool,
    },
}

/// Operands that were found sound, ready to be recorded.
pub(crate) struct Ready<'a> {
    params: AppendParams,
    grid: Option<[u32; 3]>,
    slices: u32,
    arguments: Vec<(&'static str, Argument<'a>)>,
}

/// Invocations of a workgroup, each of which moves two neighbouring elements.
const INVOCATIONS: u64 = 64;

/// Twin of `NONE` in shaders/append.wgsl and of `ALL_TOKENS` in shaders/shared/cache_row.wgsl.
const NONE: u32 = u32::MAX;

impl Append {
    /// For calls that move that many pairs of elements; other calls may be made with it as well.
    pub(crate) fn new(gpu: &Gpu, pairs: u64) -> Result<Self> {
        let (kernel, _) = choose_kernel(Operation::Append, gpu.capabilities(), Some(Form::Tiled))?;
        Self::from_kernel(gpu, kernel, pairs)
    }

    /// With a kernel of the caller's own that takes the bindings and parameters of `append`.
    pub(crate) fn from_kernel(gpu: &Gpu, kernel: &'static Kernel, pairs: u64) -> Result<Self> {
        if kernel.operation != Operation::Append {
            let rule = "must be a kernel for Append";
            return Err(Error::parameter("kernel", kernel.name, rule));
        }
        let configuration = Configuration {
            consts: Vec::new(),
            rules: Vec::new(),
        };
        gpu.capabilities().can_bind(kernel, &configuration)?;
        let groups = pairs.div_ceil(INVOCATIONS);
        Ok(Append {
            gpu: gpu.clone(),
            pipeline: gpu.pipeline(kernel, &configuration, origin_of(kernel))?,
            plan: Plan {
                kernel,
                configuration,
                grid: fold(groups, gpu.capabilities(), "append")?,
                groups: groups as u32,
                parts: 1,
                splits: 1,
                slices: slices(pairs.saturating_mul(MOVED_COST), groups, gpu.capabilities()),
                flops: 0,
                workspace_bytes: 0,
                reason: "two neighbouring channels an invocation".into(),
            },
        })
    }

    pub(crate) fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Holds all operands of a call against each other. Records nothing.
    pub(crate) fn prepare<'a>(
        &self,
        moves: &Moves<'a>,
        batch: usize,
        tokens: usize,
    ) -> Result<Ready<'a>> {
        let mut params = AppendParams {
            tokens: tokens as u32,
            lengths_at: NONE,
            counts_at: NONE,
            starts_at: NONE,
            block_table_at: NONE,
            ..Default::default()
        };
        let mut arguments: Vec<(&'static str, Argument<'a>)> = Vec::new();
        let mut pairs = 0u64;
        let (mut inputs, mut outputs) = (Vec::new(), Vec::new());
        if let Some((name, q, out_name, q_out)) = moves.q {
            let &[_, _, heads, head_dim] = q.shape() else {
                let got = crate::tensor::shape_text(q.shape());
                return Err(Error::shape(name, "(B, T, heads, D)", got));
            };
            q.expect_shape(name, &[batch, tokens, heads, head_dim])?;
            q_out.expect_shape(out_name, q.shape())?;
            expect_contiguous_last(name, q)?;
            expect_contiguous_last(out_name, q_out)?;
            expect_writable_rows(out_name, q_out)?;
            inputs.push((name, Some(q)));
            outputs.push((out_name, q_out));
            let (from, to) = (q.bind(name)?, q_out.bind(out_name)?);
            arguments.push(("q", argument(Some(q), from)));
            arguments.push(("q_out", argument(Some(q_out), to)));
            pairs += heads as u64 * (head_dim as u64).div_ceil(2);
            params = AppendParams {
                heads: heads as u32,
                head_dim: head_dim as u32,
                q_type: number(name, q)?,
                q_out_type: number(out_name, q_out)?,
                q_offset: first(from),
                q_batch_stride: q.stride(0),
                q_token_stride: q.stride(1),
                q_head_stride: q.stride(2),
                q_out_offset: first(to),
                q_out_batch_stride: q_out.stride(0),
                q_out_token_stride: q_out.stride(1),
                q_out_head_stride: q_out.stride(2),
                ..params
            };
        }
        if let (Some([k, v]), Place::Cache { cache, .. }) = (moves.kv, &moves.place) {
            let config = cache.config();
            let (kv_heads, head_dim, value_dim) =
                (config.kv_heads, config.head_dim, config.value_dim);
            k.expect_shape("k", &[batch, tokens, kv_heads, head_dim])?;
            v.expect_shape("v", &[batch, tokens, kv_heads, value_dim])?;
            v.expect_type("v", k.element_type())?;
            expect_contiguous_last("k", k)?;
            expect_contiguous_last("v", v)?;
            let [k_cache, v_cache] = cache.rows();
            inputs.extend([("k", Some(k)), ("v", Some(v))]);
            outputs.extend([
                ("the cache's keys", k_cache),
                ("the cache's values", v_cache),
            ]);
            let [k_at, v_at] = [k.bind("k")?, v.bind("v")?];
            let [k_to, v_to] = [k_cache.bind("keys")?, v_cache.bind("values")?];
            arguments.push(("k", argument(Some(k), k_at)));
            arguments.push(("v", argument(Some(v), v_at)));
            arguments.push(("k_cache", argument(Some(k_cache), k_to)));
            arguments.push(("v_cache", argument(Some(v_cache), v_to)));
            pairs +=
                kv_heads as u64 * ((head_dim as u64).div_ceil(2) + (value_dim as u64).div_ceil(2));
            params = AppendParams {
                k_heads: kv_heads as u32,
                v_heads: kv_heads as u32,
                head_dim: head_dim as u32,
                value_dim: value_dim as u32,
                kv_type: number("k", k)?,
                cache_type: number("the cache", k_cache)?,
                k_offset: first(k_at),
                k_batch_stride: k.stride(0),
                k_token_stride: k.stride(1),
                k_head_stride: k.stride(2),
                v_offset: first(v_at),
                v_batch_stride: v.stride(0),
                v_token_stride: v.stride(1),
                v_head_stride: v.stride(2),
                k_cache_offset: first(k_to),
                k_cache_batch_stride: k_cache.stride(0),
                k_cache_token_stride: k_cache.stride(1),
                k_cache_head_stride: k_cache.stride(2),
                v_cache_offset: first(v_to),
                v_cache_batch_stride: v_cache.stride(0),
                v_cache_token_stride: v_cache.stride(1),
                v_cache_head_stride: v_cache.stride(2),
                ..params
            };
        }
        match moves.place {
            Place::Positions {
                first: from,
                starts,
            } => {
                params.first_position = from as u32;
                if let Some(starts) = starts {
                    inputs.push(("starts", Some(starts)));
                    let at = starts.bind("starts")?;
                    params.starts_at = first(at);
                    arguments.push(("tables", argument(Some(starts), at)));
                }
            }
            Place::Cache { cache, counts } => {
                let config = cache.config();
                let tables = cache.tables();
                inputs.push(("the cache's lengths", Some(tables)));
                let at = tables.bind("the cache's lengths")?;
                let places = cache.table_places();
                params.lengths_at = first(at);
                params.counts_at = if counts {
                    first(at) + places.counts
                } else {
                    NONE
                };
                params.capacity = config.capacity as u32;
                if let Some(pages) = config.pages {
                    params.page_size = pages.size as u32;
                    params.block_table_at = first(at) + places.block_table;
                    params.block_table_stride = places.block_table_stride;
                    params.cache_rows = (pages.size * pages.count) as u32;
                }
                arguments.push(("tables", argument(Some(tables), at)));
            }
        }
        if let Some(rotary) = moves.rotary {
            inputs.push(("the table of angles", Some(rotary.table())));
            let head_dim = params.head_dim as usize;
            rotary.expect_head_dim(head_dim)?;
            let at = rotary.table().bind("the table of angles")?;
            params.rotary_dims = rotary.dims() as u32;
            params.interleaved = u32::from(rotary.pairing() == RotaryPairing::Interleaved);
            params.positions = rotary.positions() as u32;
            params.angles_offset = first(at);
            arguments.push(("angles", argument(Some(rotary.table()), at)));
        }
        check_operands(&self.gpu, &inputs, &outputs)?;
        let pairs = pairs
            .saturating_mul(tokens as u64)
            .saturating_mul(batch as u64);
        let available = u64::from(u32::MAX) - INVOCATIONS;
        if pairs > available {
            return Err(Error::LimitExceeded {
                what: "new tokens".into(),
                limit: "32-bit counting".into(),
                needed: pairs,
                available,
                unit: "pairs of elements",
            });
        }
        params.pairs = pairs as u32;
        let groups = pairs.div_ceil(INVOCATIONS);
        params.groups = groups as u32;
        Ok(Ready {
            params,
            grid: fold(groups, self.gpu.capabilities(), "append")?,
            slices: slices(
                pairs.saturating_mul(MOVED_COST),
                groups,
                self.gpu.capabilities(),
            ),
            arguments,
        })
    }

    /// Records the dispatch.
    pub(crate) fn record(
        &self,
        encoder: &mut wgpu::CommandEncoder,
        ready: Ready<'_>,
        label: &str,
        timestamps: Option<&mut Timestamps>,
    ) -> Result<()> {
        let Some(grid) = ready.grid else {
            return Ok(());
        };
        self.gpu.record(
            encoder,
            &self.pipeline,
            Call {
                label,
                arguments: &ready.arguments,
                params: bytemuck::bytes_of(&ready.params),
                grid,
                slices: ready.slices,
                timestamps,
            },
        )
    }
}

/// How kernels number the type of a view's elements.
fn number(name: &str, view: &TensorView) -> Result<u32> {
    view.element_type()
        .float_number()
        .ok_or_else(|| Error::Type {
            argument: name.into(),
            expected: "f32, f16 or bf16".into(),
            got: view.element_type().to_string(),
        })
}

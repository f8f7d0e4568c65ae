//! Projections to q | k | v whose keys and values go straight into a cache, behind those that it holds.

use super::{Linear, LinearArguments, LinearProblem};
use crate::element::ElementType;
use crate::gpu::{Argument, Capabilities, Gpu, Timestamps};
use crate::kernels::{LinearParams, STORE_CACHE};
use crate::operands::{
    argument, expect_contiguous, expect_contiguous_last, expect_writable_rows, first,
};
use crate::plan::{Plan, size};
use crate::tensor::{TensorView, shape_text};
use crate::{Error, Result};

/// Twin of `ALL_TOKENS` in shaders/shared/cache_row.wgsl.
const ALL_TOKENS: u32 = u32::MAX;

/// What the columns of a projection into a cache are: `q_columns` for y, then the keys of all heads, then their values;
/// and what the cache is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CacheColumns {
    /// Columns that go to y.
    pub q_columns: usize,
    /// Heads of keys and values.
    pub kv_heads: usize,
    /// Channels of a key of one head.
    pub head_dim: usize,
    /// Channels of a value of one head.
    pub value_dim: usize,
    /// What the cache stores: f32, f16 or bf16. The last two need even `q_columns`, `head_dim` and `value_dim`.
    pub element_type: ElementType,
    /// Tokens of a page, where the cache is in pages.
    pub page_size: Option<usize>,
    /// Tokens that a batch item may hold.
    pub capacity: usize,
}

/// The cache that a projection writes into. Outputs share no buffer with each other or with anything else.
#[derive(Clone, Copy, Debug)]
pub struct CacheArguments<'a> {
    /// `(B, capacity, Hkv, D)`, or pages `(P, page_size, Hkv, D)`.
    pub k: &'a TensorView,
    /// The same with `Dv`.
    pub v: &'a TensorView,
    /// `(B)`, u32: tokens of each batch item, the new ones included. Those are the last of them; what has no place in
    /// the cache is left out.
    pub lengths: &'a TensorView,
    /// `(B)`, u32: how many of x's tokens are new ones, from the first on; without it all of them.
    pub counts: Option<&'a TensorView>,
    /// `(B, ceil(capacity / page_size))`, u32: the pages of each batch item in order; exactly where there are pages.
    /// Those that the pool does not have are not written.
    pub block_table: Option<&'a TensorView>,
}

impl CacheColumns {
    fn check(&self, problem: &LinearProblem) -> Result<()> {
        for (name, value) in [
            ("kv_heads", self.kv_heads),
            ("head_dim", self.head_dim),
            ("value_dim", self.value_dim),
            ("page_size", self.page_size.unwrap_or(1)),
        ] {
            size(name, value)?;
            if value == 0 {
                return Err(Error::parameter(name, value, "must be at least 1"));
            }
        }
        size("capacity", self.capacity)?;
        let heads = self.head_dim.checked_add(self.value_dim);
        let cached = heads.and_then(|heads| heads.checked_mul(self.kv_heads));
        let all = cached.and_then(|cached| cached.checked_add(self.q_columns));
        if all != Some(problem.d_out) {
            return Err(Error::parameter(
                "d_out",
                problem.d_out,
                format!(
                    "must be q_columns + kv_heads * (head_dim + value_dim) = {} + {} * ({} + {})",
                    self.q_columns, self.kv_heads, self.head_dim, self.value_dim
                ),
            ));
        }
        self.number()?;
        for (name, value) in [
            ("q_columns", self.q_columns),
            ("head_dim", self.head_dim),
            ("value_dim", self.value_dim),
        ] {
            if self.element_type.size() < 4 && !value.is_multiple_of(2) {
                return Err(Error::parameter(
                    name,
                    value,
                    format!(
                        "must be even to write {} into a cache, two in a word: project to f32 and copy",
                        self.element_type
                    ),
                ));
            }
        }
        Ok(())
    }

    /// The element type as kernels number it.
    fn number(&self) -> Result<u32> {
        self.element_type.float_number().ok_or_else(|| Error::Type {
            argument: "element_type".into(),
            expected: "f32, f16 or bf16".into(),
            got: self.element_type.to_string(),
        })
    }
}

impl CacheArguments<'_> {
    /// The small operands that are there.
    pub(super) fn tables(&self) -> [(&'static str, Option<&TensorView>); 3] {
        [
            ("lengths", Some(self.lengths)),
            ("counts", self.counts),
            ("block_table", self.block_table),
        ]
    }

    /// Holds every tensor against what was planned, and says how it is bound: the arguments, and the parameters of the
    /// cache.
    pub(super) fn bind<T>(
        &self,
        batch: usize,
        columns: &CacheColumns,
        bound: impl FnOnce(&[(&'static str, Argument<'_>)], LinearParams) -> Result<T>,
    ) -> Result<T> {
        let (k, rows) = self.operand("k", self.k, batch, columns.head_dim, columns)?;
        let (v, v_rows) = self.operand("v", self.v, batch, columns.value_dim, columns)?;
        if rows != v_rows {
            return Err(Error::shape(
                "v",
                format!("as many pages as k, {}", shape_text(self.k.shape())),
                shape_text(self.v.shape()),
            ));
        }
        let window = self.window(batch, columns)?;
        let (k_at, v_at, tables_at) = (k.bind("k")?, v.bind("v")?, window.bind("tables")?);
        let at = |view: &TensorView| {
            first(tables_at) + view.offset().saturating_sub(window.offset()) as u32
        };
        let params = LinearParams {
            q_columns: columns.q_columns as u32,
            kv_heads: columns.kv_heads as u32,
            head_dim: columns.head_dim as u32,
            value_dim: columns.value_dim as u32,
            cache_type: columns.number()?,
            k_offset: first(k_at),
            k_batch_stride: k.stride(0),
            k_token_stride: k.stride(1),
            k_head_stride: k.stride(2),
            v_offset: first(v_at),
            v_batch_stride: v.stride(0),
            v_token_stride: v.stride(1),
            v_head_stride: v.stride(2),
            lengths_at: at(self.lengths),
            counts_at: self.counts.map_or(ALL_TOKENS, at),
            capacity: columns.capacity as u32,
            page_size: columns.page_size.unwrap_or(0) as u32,
            block_table_at: self.block_table.map_or(0, at),
            block_table_stride: self.block_table.map_or(0, |table| table.stride(0)),
            cache_rows: rows as u32,
            ..Default::default()
        };
        bound(
            &[
                ("k_cache", argument(Some(&k), k_at)),
                ("v_cache", argument(Some(&v), v_at)),
                ("tables", argument(Some(&window), tables_at)),
            ],
            params,
        )
    }

    /// k or v as `(B or 1, rows, Hkv, D)`, and the rows of a pool of pages.
    fn operand(
        &self,
        name: &str,
        view: &TensorView,
        batch: usize,
        dim: usize,
        columns: &CacheColumns,
    ) -> Result<(TensorView, usize)> {
        view.expect_type(name, columns.element_type)?;
        let heads = columns.kv_heads;
        let view = match columns.page_size {
            None => {
                view.expect_shape(name, &[batch, columns.capacity, heads, dim])?;
                view.clone()
            }
            Some(page_size) => {
                let pages = view.shape().first().copied().unwrap_or(0);
                view.expect_shape(name, &[pages, page_size, heads, dim])?;
                let merged = view.merge_axes(0..2).map_err(|error| match error {
                    Error::Layout { problem, .. } => Error::Layout {
                        argument: name.into(),
                        problem,
                        remedy: "pages must follow one another in memory: make the pool contiguous"
                            .into(),
                    },
                    other => other,
                })?;
                size(&format!("rows of {name}"), merged.shape()[0])?;
                merged.unsqueeze(0)
            }
        };
        expect_contiguous_last(name, &view)?;
        expect_writable_rows(name, &view)?;
        let rows = match columns.page_size {
            None => 0,
            Some(_) => view.shape()[1],
        };
        Ok((view, rows))
    }

    /// The small operands as one window of the buffer that all of them lie in.
    fn window(&self, batch: usize, columns: &CacheColumns) -> Result<TensorView> {
        if self.block_table.is_some() != columns.page_size.is_some() {
            let (expected, got) = match columns.page_size {
                Some(_) => ("a tensor, since the cache is in pages", "none"),
                None => ("none, since the cache is not in pages", "a tensor"),
            };
            return Err(Error::shape("block_table", expected, got));
        }
        let pages = columns.capacity.div_ceil(columns.page_size.unwrap_or(1));
        let present = || {
            let tables = self.tables().into_iter();
            tables.filter_map(|(name, view)| Some((name, view?)))
        };
        for (name, view) in present() {
            view.expect_type(name, ElementType::U32)?;
            match name {
                "block_table" => {
                    view.expect_shape(name, &[batch, pages])?;
                    expect_contiguous_last(name, view)?;
                }
                _ => {
                    view.expect_shape(name, &[batch])?;
                    expect_contiguous(name, view)?;
                }
            }
            if view.buffer() != self.lengths.buffer() {
                return Err(Error::Layout {
                    argument: name.into(),
                    problem: "it lies in another buffer than lengths".into(),
                    remedy: "keep lengths, counts and block table in one buffer".into(),
                });
            }
        }
        // From the first element of the first to the last of the last.
        let filled = || present().filter(|(_, view)| view.elements() > 0);
        let begin = filled().map(|(_, view)| view.offset()).min().unwrap_or(0);
        let end = filled().map(|(_, view)| {
            let (shape, strides) = (view.shape(), view.strides());
            let last = shape
                .iter()
                .zip(strides)
                .map(|(size, stride)| (size - 1) * stride);
            view.offset() + last.sum::<usize>() + 1
        });
        let end = end.max().unwrap_or(begin);
        Ok(self.lengths.words(begin, end - begin))
    }
}

impl LinearProblem {
    /// [`plan`](Self::plan) for a projection whose keys and values go into a cache.
    ///
    /// # Errors
    ///
    /// As [`plan`](Self::plan); [`Error::Parameter`] where the columns contradict `d_out` or cannot be written in that
    /// type.
    #[doc(hidden)]
    pub fn plan_into_cache(
        &self,
        capabilities: &Capabilities,
        columns: &CacheColumns,
    ) -> Result<Plan> {
        columns.check(self)?;
        self.plan_storing(capabilities, &STORE_CACHE)
    }
}

impl Linear {
    /// [`new`](Self::new) for a projection to q | k | v whose keys and values go into a cache.
    ///
    /// # Errors
    ///
    /// As [`LinearProblem::plan_into_cache`] and [`from_plan`](Self::from_plan).
    #[doc(hidden)]
    pub fn into_cache(gpu: &Gpu, problem: LinearProblem, columns: CacheColumns) -> Result<Self> {
        let plan = problem.plan_into_cache(gpu.capabilities(), &columns)?;
        let plan = problem.chosen_on(gpu, plan, |capabilities| {
            problem.candidates_storing(capabilities, &STORE_CACHE)
        });
        Self::into_cache_from_plan(gpu, problem, columns, plan)
    }

    /// [`from_plan`](Self::from_plan) for a projection into a cache.
    ///
    /// # Errors
    ///
    /// As [`from_plan`](Self::from_plan), and [`Error::Parameter`] as [`LinearProblem::plan_into_cache`].
    #[doc(hidden)]
    pub fn into_cache_from_plan(
        gpu: &Gpu,
        problem: LinearProblem,
        columns: CacheColumns,
        plan: Plan,
    ) -> Result<Self> {
        columns.check(&problem)?;
        Ok(Linear {
            cache: Some(columns),
            ..Self::storing(gpu, problem, plan, &STORE_CACHE)?
        })
    }

    /// [`encode_timed`](Self::encode_timed) for a projection into a cache: `arguments.y` is `(B, T, q_columns)`, and
    /// not used where that is empty.
    ///
    /// # Errors
    ///
    /// As [`encode_timed`](Self::encode_timed), and [`Error::Parameter`] if it was not planned for a cache.
    #[doc(hidden)]
    pub fn encode_into_cache(
        &self,
        encoder: &mut wgpu::CommandEncoder,
        arguments: LinearArguments<'_>,
        cache: CacheArguments<'_>,
        label: &str,
        timestamps: Option<&mut Timestamps>,
    ) -> Result<()> {
        let Some(columns) = self.cache else {
            return Err(Error::parameter(
                "cache",
                "a cache",
                "this projection was planned to write y alone: plan it by into_cache",
            ));
        };
        cache.bind(self.problem.batch, &columns, |bound, params| {
            self.record(
                encoder,
                arguments,
                Some((&cache, bound)),
                params,
                label,
                timestamps,
            )
        })
    }
}

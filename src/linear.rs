//! `y = x Wᵀ + b`: the projections.

use crate::Result;
use crate::element::ElementType;
use crate::gpu::{Call, Capabilities, Gpu, Pipeline, Timestamps};
use crate::kernels::{Configuration, Form, Kernel, LinearParams, Operation};
use crate::operands::{argument, check_operands, expect_contiguous_last, first};
use crate::plan::{Plan, check_plan, choose_kernel, fold, size};
use crate::tensor::{Tensor, TensorView};
use std::sync::Arc;

/// A projection of `batch * tokens` rows from `d_in` to `d_out` channels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LinearProblem {
    /// Batch items.
    pub batch: usize,
    /// Rows of a batch item.
    pub tokens: usize,
    /// Channels of x.
    pub d_in: usize,
    /// Channels of y.
    pub d_out: usize,
    /// The form of the kernel; `None` leaves it to the planner.
    pub form: Option<Form>,
}

impl LinearProblem {
    /// Chooses kernel, configuration and grid for a device.
    ///
    /// # Errors
    ///
    /// [`Error::LimitExceeded`](crate::Error::LimitExceeded) for what does not fit the device or 32-bit counting.
    pub fn plan(&self, capabilities: &Capabilities) -> Result<Plan> {
        let (kernel, reason) = choose_kernel(Operation::Linear, capabilities, self.form)?;
        for (name, value) in [
            ("batch", self.batch),
            ("tokens", self.tokens),
            ("d_in", self.d_in),
            ("d_out", self.d_out),
        ] {
            size(name, value)?;
        }
        // Both are below 2^31 here, so that their product fits.
        let rows = self.batch as u64 * self.tokens as u64;
        size(
            "batch * tokens",
            usize::try_from(rows).unwrap_or(usize::MAX),
        )?;
        let (configuration, why) = configure(kernel, rows);
        capabilities.can_loop(kernel, &configuration, self.d_in as u64, 0)?;
        let (tile_m, tile_n) = tile(kernel.form, &configuration);
        let groups = rows.div_ceil(tile_m) * (self.d_out as u64).div_ceil(tile_n);
        let grid = fold(groups, capabilities, "linear")?;
        let plan = Plan {
            kernel,
            configuration,
            grid,
            groups: groups as u32,
            parts: 1,
            flops: (2 * rows * self.d_in as u64).saturating_mul(self.d_out as u64),
            workspace_bytes: 0,
            reason: format!("{reason}; {why}"),
        };
        log::debug!("{self:?} -> {plan}");
        Ok(plan)
    }
}

/// The configuration for that many rows, and why. Small tiles where a large one would be less than half full.
fn configure(kernel: &Kernel, rows: u64) -> (Configuration, String) {
    let configurations = (kernel.configurations)();
    let fits = |configuration: &&Configuration| tile(kernel.form, configuration).0 <= 2 * rows;
    // They are listed from the smallest tile to the largest.
    let chosen = configurations.iter().rev().find(fits);
    let chosen = chosen.or(configurations.first()).cloned();
    let configuration = chosen.unwrap_or(Configuration {
        consts: Vec::new(),
        rules: Vec::new(),
    });
    let (tile_m, tile_n) = tile(kernel.form, &configuration);
    let why = format!("{rows} rows in tiles of {tile_m} x {tile_n}");
    (configuration, why)
}

/// Rows and columns of y that one workgroup computes.
fn tile(form: Form, configuration: &Configuration) -> (u64, u64) {
    let (rows, columns) = (configuration.get("ROWS"), configuration.get("COLUMNS"));
    let (m, n) = match form {
        Form::Tiled => (16 * rows, 16 * columns),
        Form::Lanes => (configuration.get("LANES") * rows, columns),
    };
    (u64::from(m.max(1)), u64::from(n.max(1)))
}

/// The operands of a [`Linear`]. Every view may have any strides and begin anywhere.
#[derive(Clone, Copy, Debug)]
pub struct LinearArguments<'a> {
    /// `(B, T, d_in)`, f32.
    pub x: &'a TensorView,
    /// `(d_out, d_in)`, f32, as `nn.Linear` keeps it. For a `(d_in, d_out)` matrix pass its permuted view.
    pub weight: &'a TensorView,
    /// `(d_out)`, f32.
    pub bias: Option<&'a TensorView>,
    /// `(B, T, d_out)`, f32; overwritten. May not share a buffer with the others.
    pub y: &'a TensorView,
}

/// A projection that is compiled for one shape, ready to be encoded any number of times.
#[derive(Clone)]
pub struct Linear {
    gpu: Gpu,
    problem: LinearProblem,
    plan: Plan,
    pipeline: Arc<Pipeline>,
}

impl std::fmt::Debug for Linear {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Linear")
            .field("problem", &self.problem)
            .field("plan", &self.plan)
            .finish_non_exhaustive()
    }
}

impl Linear {
    /// Plans the problem for this GPU and compiles what it needs.
    ///
    /// # Errors
    ///
    /// As [`LinearProblem::plan`], and [`Error::Shader`](crate::Error::Shader) if the driver refuses the kernel.
    pub fn new(gpu: &Gpu, problem: LinearProblem) -> Result<Self> {
        Self::from_plan(gpu, problem, problem.plan(gpu.capabilities())?)
    }

    /// Compiles a plan that the caller has changed: another configuration, or a kernel of their own that takes
    /// the bindings and parameters of the one it replaces (a `&'static Kernel`: `Box::leak` makes one). Nothing
    /// checks that its grid still covers the problem.
    ///
    /// # Errors
    ///
    /// [`Error::Parameter`](crate::Error::Parameter) for a kernel of another operation,
    /// [`Error::Shader`](crate::Error::Shader) if it is refused, [`Error::LimitExceeded`](crate::Error::LimitExceeded) if the grid is over the device's limit.
    pub fn from_plan(gpu: &Gpu, problem: LinearProblem, plan: Plan) -> Result<Self> {
        check_plan(&plan, Operation::Linear, gpu.capabilities())?;
        Ok(Linear {
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

    /// Records the projection into an encoder. Submits nothing and waits for nothing; allocates nothing on
    /// the GPU unless views are laid out as never before (then one parameter buffer of about 100 bytes).
    ///
    /// # Errors
    ///
    /// [`Error::Shape`](crate::Error::Shape), [`Error::Type`](crate::Error::Type), [`Error::Layout`](crate::Error::Layout), [`Error::OtherDevice`](crate::Error::OtherDevice),
    /// [`Error::LimitExceeded`](crate::Error::LimitExceeded) if an operand is larger than the device can bind. Nothing was recorded then.
    pub fn encode(
        &self,
        encoder: &mut wgpu::CommandEncoder,
        arguments: LinearArguments<'_>,
    ) -> Result<()> {
        self.encode_timed(encoder, arguments, self.plan.kernel.name, None)
    }

    /// [`encode`](Self::encode), with a label and timestamps around the pass (none where there is nothing to
    /// compute).
    ///
    /// # Errors
    ///
    /// As [`encode`](Self::encode), and [`Error::LimitExceeded`](crate::Error::LimitExceeded) where the timestamps have no room left.
    pub fn encode_timed(
        &self,
        encoder: &mut wgpu::CommandEncoder,
        arguments: LinearArguments<'_>,
        label: &str,
        timestamps: Option<&mut Timestamps>,
    ) -> Result<()> {
        let LinearArguments { x, weight, bias, y } = arguments;
        let LinearProblem {
            batch,
            tokens,
            d_in,
            d_out,
            ..
        } = self.problem;
        let inputs = [("x", Some(x)), ("weight", Some(weight)), ("bias", bias)];
        x.expect_shape("x", &[batch, tokens, d_in])?;
        weight.expect_shape("weight", &[d_out, d_in])?;
        if let Some(bias) = bias {
            bias.expect_shape("bias", &[d_out])?;
            expect_contiguous_last("bias", bias)?;
        }
        y.expect_shape("y", &[batch, tokens, d_out])?;
        for (name, view) in inputs.into_iter().chain([("y", Some(y))]) {
            if let Some(view) = view {
                view.expect_type(name, ElementType::F32)?;
            }
        }
        check_operands(&self.gpu, &inputs, &[("y", y)])?;
        let Some(grid) = self.plan.grid else {
            return Ok(());
        };

        let bound = |name, view: Option<&TensorView>| match view {
            Some(view) => view.bind(name),
            None => Ok(None),
        };
        let [x_at, weight_at, bias_at, y_at] = [
            bound("x", Some(x))?,
            bound("weight", Some(weight))?,
            bound("bias", bias)?,
            bound("y", Some(y))?,
        ];
        let (_, tile_n) = tile(self.plan.kernel.form, &self.plan.configuration);
        let params = LinearParams {
            rows: (batch * tokens) as u32,
            tokens: tokens as u32,
            d_in: d_in as u32,
            d_out: d_out as u32,
            has_bias: u32::from(bias.is_some()),
            column_tiles: (d_out as u64).div_ceil(tile_n) as u32,
            groups: self.plan.groups,
            x_offset: first(x_at),
            x_batch_stride: x.stride(0),
            x_token_stride: x.stride(1),
            x_channel_stride: x.stride(2),
            weight_offset: first(weight_at),
            weight_out_stride: weight.stride(0),
            weight_in_stride: weight.stride(1),
            bias_offset: first(bias_at),
            y_offset: first(y_at),
            y_batch_stride: y.stride(0),
            y_token_stride: y.stride(1),
            y_channel_stride: y.stride(2),
            padding: 0,
        };
        self.gpu.record(
            encoder,
            &self.pipeline,
            Call {
                label,
                arguments: &[
                    ("x", argument(Some(x), x_at)),
                    ("weight", argument(Some(weight), weight_at)),
                    ("bias", argument(bias, bias_at)),
                    ("y", argument(Some(y), y_at)),
                ],
                params: bytemuck::bytes_of(&params),
                grid,
                timestamps,
            },
        )
    }
}

impl Linear {
    /// Computes `y` into a new tensor `(B, T, d_out)` and submits; does not wait.
    ///
    /// # Errors
    ///
    /// As [`encode`](Self::encode) and [`Tensor::empty`].
    pub fn forward(&self, x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        let LinearProblem {
            batch,
            tokens,
            d_out,
            ..
        } = self.problem;
        let y = Tensor::empty(&self.gpu, &[batch, tokens, d_out], ElementType::F32)?;
        let bias = bias.map(Tensor::view);
        let arguments = LinearArguments {
            x: &x.view(),
            weight: &weight.view(),
            bias: bias.as_ref(),
            y: &y.view(),
        };
        self.gpu
            .record_and_submit(|encoder| self.encode(encoder, arguments))?;
        Ok(y)
    }
}

//STUB begin
pub(crate) struct CacheColumns;
impl CacheColumns {
    pub(crate) fn new(_: usize, _: &crate::cache::KvCacheConfig) -> Self {
        CacheColumns
    }
}
pub(crate) struct CacheArguments;
impl Linear {
    pub(crate) fn into_cache(_: &Gpu, _: LinearProblem, _: CacheColumns) -> Result<Self> {
        unimplemented!()
    }
    pub(crate) fn encode_into_cache(
        &self,
        _: &mut wgpu::CommandEncoder,
        _: LinearArguments<'_>,
        _: &CacheArguments,
        _: &str,
        _: Option<&mut Timestamps>,
    ) -> Result<()> {
        unimplemented!()
    }
}

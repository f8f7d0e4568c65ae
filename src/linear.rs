//! `y = x Wᵀ + b`: the projections.

mod cache;

pub use cache::{CacheArguments, CacheColumns};

use crate::element::ElementType;
use crate::gpu::{Argument, Call, Capabilities, Gpu, Origin, Others, Pipeline, Timestamps, fold};
use crate::kernels::{
    Configuration, FEW_LANES, Form, Fragment, KERNELS, Kernel, LINEAR_EIGHTS, LINEAR_FOURS_ANY,
    LINEAR_LANES, LINEAR_X_FOURS, LinearParams, Operation, READS, STORE_ROWS,
};
use crate::operands::{argument, begins_on, check_operands, expect_contiguous_last, first};
use crate::plan::{Plan, check_plan, choose_kernel, is_own, lanes_of, size, slices, suited};
use crate::tensor::{Tensor, TensorView};
use crate::{Error, Result};
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
    /// Whether the kernel for few rows computes it, which is the same for both forms but for its size; `None` leaves it
    /// to the planner, which takes it for up to 8 rows.
    pub few: Option<bool>,
}

/// Rows up to which reading the weights is most of the work.
const FEW_ROWS: u64 = 8;

impl LinearProblem {
    /// Chooses kernel, configuration and grid for a device.
    ///
    /// # Errors
    ///
    /// [`Error::LimitExceeded`](crate::Error::LimitExceeded) for what does not fit the device or 32-bit counting.
    pub fn plan(&self, capabilities: &Capabilities) -> Result<Plan> {
        self.plan_storing(capabilities, &STORE_ROWS)
    }

    /// [`plan`](Self::plan) with that store linked in.
    fn plan_storing(&self, capabilities: &Capabilities, store: &Fragment) -> Result<Plan> {
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
        let (kernel, reason) = self.choose(capabilities, rows)?;
        let (configuration, why) = self.configure(kernel, rows, store, capabilities);
        let plan = self.planned(
            kernel,
            configuration,
            format!("{reason}; {why}"),
            capabilities,
        )?;
        log::debug!("{self:?} -> {plan}");
        Ok(plan)
    }

    /// The plan of a kernel in a configuration that can compute this.
    fn planned(
        &self,
        kernel: &'static Kernel,
        configuration: Configuration,
        reason: String,
        capabilities: &Capabilities,
    ) -> Result<Plan> {
        capabilities.can_bind(kernel, &configuration)?;
        capabilities.can_loop(kernel, &configuration, self.d_in as u64, 0)?;
        let rows = self.rows();
        let groups = self.groups(kernel, &configuration);
        let flops = (2 * rows * self.d_in as u64).saturating_mul(self.d_out as u64);
        // Of few rows, reading the weights is the work.
        let cost = match kernel.operation {
            Operation::LinearFew => flops.saturating_mul(8),
            _ => flops,
        };
        Ok(Plan {
            grid: fold(groups, capabilities, "linear")?,
            groups: groups as u32,
            parts: 1,
            splits: 1,
            slices: slices(cost, groups, capabilities),
            flops,
            workspace_bytes: 0,
            reason,
            kernel,
            configuration,
        })
    }

    /// Rows of all batch items together.
    fn rows(&self) -> u64 {
        (self.batch as u64).saturating_mul(self.tokens as u64)
    }

    /// Workgroups in all.
    fn groups(&self, kernel: &Kernel, configuration: &Configuration) -> u64 {
        let (tile_m, tile_n) = tile(kernel, configuration);
        let columns = (self.d_out as u64).div_ceil(tile_n);
        self.rows().div_ceil(tile_m).saturating_mul(columns)
    }

    /// Every plan that could compute this on a device by kernels of the form that planning takes (or that is asked for): first the
    /// one that [`plan`](Self::plan) gives, then other sizes of its tiles, and up to 32 rows the kernel for few. What
    /// [`tune`](Self::tune) measures.
    ///
    /// # Errors
    ///
    /// As [`plan`](Self::plan).
    pub fn candidates(&self, capabilities: &Capabilities) -> Result<Vec<Plan>> {
        self.candidates_storing(capabilities, &STORE_ROWS)
    }

    /// [`candidates`](Self::candidates) with that store linked in.
    fn candidates_storing(
        &self,
        capabilities: &Capabilities,
        store: &Fragment,
    ) -> Result<Vec<Plan>> {
        let planned = self.plan_storing(capabilities, store)?;
        let form = self.form.unwrap_or(suited(capabilities));
        let mut candidates = vec![planned];
        for kernel in KERNELS.iter().copied() {
            let suits = match kernel.operation {
                Operation::Linear => kernel.form == form && self.few != Some(true),
                Operation::LinearFew => self.few.unwrap_or(self.rows() <= MOST_FEW_ROWS),
                _ => false,
            };
            if !suits || capabilities.can_run(kernel).is_err() {
                continue;
            }
            for configuration in self.configurations(kernel, store, capabilities) {
                let reason = "a candidate".to_string();
                // (One that does not fit the device is none.)
                let Ok(plan) = self.planned(kernel, configuration, reason, capabilities) else {
                    continue;
                };
                let same = |other: &Plan| {
                    other.kernel.name == plan.kernel.name
                        && other.configuration == plan.configuration
                };
                if !candidates.iter().any(same) {
                    candidates.push(plan);
                }
            }
        }
        Ok(candidates)
    }
}

/// Rows up to which the kernel for few is worth a measurement.
const MOST_FEW_ROWS: u64 = 32;

impl LinearProblem {
    /// The kernel for that many rows, and why.
    fn choose(&self, capabilities: &Capabilities, rows: u64) -> Result<(&'static Kernel, String)> {
        let any = || choose_kernel(Operation::Linear, capabilities, self.form);
        if !self.few.unwrap_or((1..=FEW_ROWS).contains(&rows)) {
            return any();
        }
        // It is the same for all adapters.
        match (
            choose_kernel(Operation::LinearFew, capabilities, Some(Form::Tiled)),
            self.few,
        ) {
            (Ok((kernel, _)), None) => Ok((
                kernel,
                "few rows, so that each weight is read once for all".into(),
            )),
            (Ok((kernel, _)), Some(_)) => Ok((kernel, "few rows as asked".into())),
            (Err(error), None) => {
                let (kernel, reason) = any()?;
                Ok((
                    kernel,
                    format!("{reason}; the kernel for few rows does not fit ({error})"),
                ))
            }
            (Err(error), Some(_)) => Err(error),
        }
    }
}

impl LinearProblem {
    /// The configuration for that many rows, and why. They are listed from the smallest tile to the largest.
    fn configure(
        &self,
        kernel: &Kernel,
        rows: u64,
        store: &Fragment,
        capabilities: &Capabilities,
    ) -> (Configuration, String) {
        let few = kernel.operation == Operation::LinearFew;
        let tiled = !few && kernel.form == Form::Tiled;
        let configurations = self.configurations(kernel, store, capabilities);
        let tile_m = |configuration: &Configuration| tile(kernel, configuration).0;
        let tiles = |configuration: &Configuration| self.groups(kernel, configuration);
        let chosen = if few {
            // The smallest that holds all rows.
            let holds = |configuration: &&Configuration| tile_m(configuration) >= rows;
            let chosen = configurations.iter().find(holds);
            chosen.or(configurations.last())
        } else {
            // Small tiles where a large one would be less than half full, or would leave a GPU idle.
            let fits = |configuration: &&Configuration| {
                tile_m(configuration) <= 2 * rows
                    && (!tiled || tiles(configuration) >= ENOUGH_TILES)
            };
            let chosen = configurations.iter().rev().find(fits);
            chosen.or(configurations.first())
        };
        let configuration = chosen.cloned().unwrap_or(Configuration {
            consts: Vec::new(),
            rules: Vec::new(),
        });
        let (tile_m, tile_n) = tile(kernel, &configuration);
        let mut why = format!("{rows} rows in tiles of {tile_m} x {tile_n}");
        if tiled {
            why.push_str(match tiles(&configuration) {
                ENOUGH_TILES.. => {
                    ", the largest that rows fill and of which there are enough for a GPU"
                }
                _ => ", the smallest, since there are few of them",
            });
        }
        (configuration, why)
    }
}

impl LinearProblem {
    /// The configurations of a kernel that can compute this, from the smallest tile to the largest.
    fn configurations(
        &self,
        kernel: &Kernel,
        store: &Fragment,
        capabilities: &Capabilities,
    ) -> Vec<Configuration> {
        let few = kernel.operation == Operation::LinearFew;
        let few_lanes = match self.form.unwrap_or(suited(capabilities)) {
            Form::Lanes => FEW_LANES[0],
            Form::Tiled => FEW_LANES[1],
        };
        let (lanes, weights) = lanes_of(capabilities, &LINEAR_LANES);
        let mut configurations = (kernel.configurations)();
        configurations.retain(|configuration| {
            let suits = match kernel.form {
                _ if few => configuration.get("LANES") == few_lanes,
                Form::Tiled => true,
                Form::Lanes => {
                    configuration.rules.contains(weights) && configuration.get("LANES") == lanes
                }
            };
            suits && configuration.rules.contains(store) && capabilities.suits(configuration)
        });
        // The fewest loads that the channels allow. Where rows of a call's operands do not begin there, `narrower` takes its place.
        let there = |reads: &&Fragment| configurations.iter().any(|c| c.rules.contains(reads));
        let fits = |reads: &&Fragment| self.d_in.is_multiple_of(channels_a_load(reads));
        let mut all = READS.iter().map(|reads| reads[0]);
        if let Some(reads) = all.find(|reads| there(reads) && fits(reads)) {
            configurations.retain(|configuration| configuration.rules.contains(reads));
        }
        configurations
    }

    /// Whether a plan is this crate's own through and through: one that planning makes for this problem on this device with that
    /// store, if perhaps with another of its configurations or fewer workgroups.
    fn origin_of(&self, plan: &Plan, store: &Fragment, capabilities: &Capabilities) -> Origin {
        let groups = self.groups(plan.kernel, &plan.configuration);
        let configurations = self.configurations(plan.kernel, store, capabilities);
        let made = configurations.contains(&plan.configuration);
        match is_own(plan.kernel) && made && u64::from(plan.groups) <= groups {
            true => Origin::Own,
            false => Origin::Callers,
        }
    }
}

/// Tiles of a projection that keep a GPU busy: it takes some hundred workgroups at once.
const ENOUGH_TILES: u64 = 128;

/// Channels that a way of reading x and the weight (the first fragment of one of [`READS`]) takes in one load.
fn channels_a_load(reads: &Fragment) -> usize {
    match &*reads.name {
        name if name == LINEAR_EIGHTS.name => 8,
        name if name == LINEAR_FOURS_ANY.name => 1,
        _ => 4,
    }
}

/// The same configuration of linear_tiled or linear_lanes for operands that only some of [`READS`] fit; `None` where its own does, or it
/// is another kernel's.
fn narrower(
    configuration: &Configuration,
    form: Form,
    fits: impl Fn(&Fragment) -> bool,
) -> Option<Configuration> {
    let own = READS.iter().find(|reads| configuration.links(reads[0]))?[0];
    if fits(own) {
        return None;
    }
    let has = |reads: &&&[&Fragment]| form == Form::Lanes || reads[0] != &LINEAR_X_FOURS;
    let next = READS.iter().filter(has).find(|reads| fits(reads[0]))?;
    match form {
        Form::Tiled => configuration.exchanged(own, &next[..1]),
        Form::Lanes => {
            let mut others = next.to_vec();
            others.retain(|fragment| !configuration.links(fragment));
            configuration.exchanged(own, &others)
        }
    }
}

/// Rows and columns of y that one workgroup computes.
fn tile(kernel: &Kernel, configuration: &Configuration) -> (u64, u64) {
    let number = |name: &str| u64::from(configuration.get(name));
    let (rows, columns) = (number("ROWS"), number("COLUMNS"));
    let (m, n) = match (kernel.operation, kernel.form) {
        (Operation::LinearFew, _) => (rows, columns),
        (_, Form::Tiled) => (number("DOWN") * rows, number("ACROSS") * columns),
        (_, Form::Lanes) => (number("LANES") * rows, columns),
    };
    (m.max(1), n.max(1))
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
    /// Where it writes into a cache.
    cache: Option<CacheColumns>,
    plan: Plan,
    pipeline: Arc<Pipeline>,
    others: Others,
    origin: Origin,
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
    /// Plans the problem for this GPU, or takes the plan that [`tune`](LinearProblem::tune) found, and compiles what it needs.
    ///
    /// # Errors
    ///
    /// As [`LinearProblem::plan`], and [`Error::Shader`](crate::Error::Shader) if the driver refuses the kernel.
    pub fn new(gpu: &Gpu, problem: LinearProblem) -> Result<Self> {
        let plan = problem.plan(gpu.capabilities())?;
        let plan = problem.chosen_on(gpu, plan, |capabilities| problem.candidates(capabilities));
        Self::from_plan(gpu, problem, plan)
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
        Self::storing(gpu, problem, plan, &STORE_ROWS)
    }

    /// [`from_plan`](Self::from_plan) with that store linked in.
    fn storing(gpu: &Gpu, problem: LinearProblem, plan: Plan, store: &Fragment) -> Result<Self> {
        let operation = match plan.kernel.operation {
            Operation::LinearFew => Operation::LinearFew,
            _ => Operation::Linear,
        };
        check_plan(&plan, operation, gpu.capabilities())?;
        // The sizes of a problem that was never planned may be any.
        let checked = problem.plan_storing(gpu.capabilities(), store).is_ok();
        let origin = match checked {
            true => problem.origin_of(&plan, store, gpu.capabilities()),
            false => Origin::Callers,
        };
        Ok(Linear {
            pipeline: gpu.pipeline(plan.kernel, &plan.configuration, origin)?,
            others: Others::default(),
            origin,
            gpu: gpu.clone(),
            problem,
            cache: None,
            plan,
        })
    }

    /// The plan.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// What it computes.
    pub fn problem(&self) -> &LinearProblem {
        &self.problem
    }

    /// Records the projection into an encoder. Submits nothing and waits for nothing; allocates nothing on
    /// the GPU unless views are laid out as never before (then one parameter buffer of about 100 bytes). (The first call whose rows do
    /// not begin on multiples of as many elements as the kernel reads at once, eight at most, compiles it once more.)
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
        if self.cache.is_some() {
            return Err(Error::parameter(
                "cache",
                "none",
                "this projection was planned to write into a cache: use encode_into_cache",
            ));
        }
        let params = LinearParams::default();
        self.record(encoder, arguments, None, params, label, timestamps)
    }

    /// Records the projection: with the cache that it writes into, how that is bound, and its parameters.
    fn record(
        &self,
        encoder: &mut wgpu::CommandEncoder,
        arguments: LinearArguments<'_>,
        cache: Option<(&CacheArguments<'_>, &[(&'static str, Argument<'_>)])>,
        params: LinearParams,
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
        let mut inputs = vec![("x", Some(x)), ("weight", Some(weight)), ("bias", bias)];
        let y_columns = self.cache.map_or(d_out, |columns| columns.q_columns);
        x.expect_shape("x", &[batch, tokens, d_in])?;
        weight.expect_shape("weight", &[d_out, d_in])?;
        if let Some(bias) = bias {
            bias.expect_shape("bias", &[d_out])?;
            expect_contiguous_last("bias", bias)?;
        }
        y.expect_shape("y", &[batch, tokens, y_columns])?;
        for (name, view) in inputs.iter().copied().chain([("y", Some(y))]) {
            if let Some(view) = view {
                view.expect_type(name, ElementType::F32)?;
            }
        }
        // What nothing is written to may lie anywhere.
        let mut outputs = vec![("y", y)];
        if let Some((cache, _)) = cache {
            inputs.extend(cache.tables());
            outputs.retain(|_| y_columns > 0);
            outputs.extend([("k", cache.k), ("v", cache.v)]);
        }
        check_operands(&self.gpu, &inputs, &outputs)?;
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
        // Most callers' rows begin where several channels can be read at once; a pipeline for the others is made when they come.
        let narrow = narrower(
            &self.plan.configuration,
            self.plan.kernel.form,
            |reads: &Fragment| {
                let channels = channels_a_load(reads);
                let whole = |view: &TensorView, at, rows: usize| {
                    view.stride(rows) == 1 && begins_on(channels as u32, view, at, 0..rows)
                };
                channels == 1
                    || d_in.is_multiple_of(channels)
                        && whole(x, x_at, 2)
                        && (*reads == LINEAR_X_FOURS || whole(weight, weight_at, 1))
            },
        );
        let pipeline = match narrow {
            Some(configuration) => {
                let (kernel, origin) = (self.plan.kernel, self.origin);
                &self.others.get(&self.gpu, kernel, configuration, origin)?
            }
            None => &self.pipeline,
        };
        let (_, tile_n) = tile(self.plan.kernel, &self.plan.configuration);
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
            ..params
        };
        let mut arguments = vec![
            ("x", argument(Some(x), x_at)),
            ("weight", argument(Some(weight), weight_at)),
            ("bias", argument(bias, bias_at)),
            ("y", argument(Some(y), y_at)),
        ];
        arguments.extend(cache.iter().flat_map(|(_, bound)| bound.iter().copied()));
        self.gpu.record(
            encoder,
            pipeline,
            Call {
                label,
                arguments: &arguments,
                params: bytemuck::bytes_of(&params),
                grid,
                slices: self.plan.slices,
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

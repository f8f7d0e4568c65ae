//! What an adapter reaches at best, measured by kernels that do nothing else, and a case's share of it.
//!
//! The kernels stand beside the table [`KERNELS`](crate::kernels::KERNELS) and not in it, since nothing is planned with
//! them; they are assembled, validated and translated as those are.

use super::measure::{MeasureOptions, Measured, Recorder, Stopwatch, measure};
use super::prepared::noise;
use crate::element::ElementType;
use crate::gpu::{Call, Gpu, Origin, Pipeline, Timestamps, fold};
use crate::kernels::{
    Configuration, Form, Fragment, GRID, Kernel, NUMBER_F16, NUMBER_F32, Operation, PEAK_PARAMS,
    PeakParams, Tier, params, read, write,
};
use crate::operands::argument;
use crate::tensor::{Tensor, TensorView};
use crate::{Error, Result};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

static MULTIPLY_ADD: Kernel = Kernel {
    name: "peak_multiply_add",
    operation: Operation::Peak,
    form: Form::Tiled,
    summary: "multiply-adds in registers and nothing else",
    source: include_str!("../../shaders/peak_multiply_add.wgsl"),
    fragments: &[&GRID, &PEAK_PARAMS],
    bindings: &[write(0, "out"), params(1)],
    params: PeakParams::LAYOUT,
    // From what 16 vector registers hold to what hides a GPU's latency.
    configurations: || {
        let of = |number: &Fragment| [2, 3, 4, 8].map(|chains| chains_of(chains, number));
        [of(&NUMBER_F32), of(&NUMBER_F16)].concat()
    },
    workgroup_bytes: |_| 0,
    invocations: |_| MULTIPLY_ADD_INVOCATIONS as u32,
    loop_iterations: |configuration, _, _| u64::from(configuration.get("ROUNDS")) + 1,
    needs_cleared_memory: false,
};

static MATRICES: Kernel = Kernel {
    name: "peak_matrices",
    operation: Operation::Peak,
    form: Form::Tiled,
    summary: "multiply-adds by matrix units and nothing else",
    source: include_str!("../../shaders/peak_matrices.wgsl"),
    fragments: &[&GRID, &PEAK_PARAMS],
    bindings: &[write(0, "out"), params(1)],
    params: PeakParams::LAYOUT,
    configurations: || {
        vec![Configuration {
            consts: vec![("ROUNDS", 256), ("REPEATS", 4)],
            rules: Vec::new(),
        }]
    },
    workgroup_bytes: |_| 2 * 2 * 256 + 4 * 3 * 4 * 256,
    invocations: |_| MULTIPLY_ADD_INVOCATIONS as u32,
    // Filling 8, tiles 4 (of ROUNDS each, if one subgroup has them all), adding up 48, and the exits.
    loop_iterations: |configuration, _, _| {
        4 * (u64::from(configuration.get("ROUNDS")) + 1) + (8 + 1) + (4 + 1) + (48 + 1)
    },
    needs_cleared_memory: false,
};

static COPY: Kernel = Kernel {
    name: "peak_copy",
    operation: Operation::Peak,
    form: Form::Tiled,
    summary: "a copy of vectors of 16 bytes and nothing else",
    source: include_str!("../../shaders/peak_copy.wgsl"),
    fragments: &[&GRID, &PEAK_PARAMS],
    bindings: &[read(0, "source"), write(1, "out"), params(2)],
    params: PeakParams::LAYOUT,
    configurations: || [1, 4].map(each_of).to_vec(),
    workgroup_bytes: |_| 0,
    invocations: |_| MOVING_INVOCATIONS as u32,
    loop_iterations: |_, _, _| 0,
    needs_cleared_memory: false,
};

static READ: Kernel = Kernel {
    name: "peak_read",
    operation: Operation::Peak,
    form: Form::Tiled,
    summary: "reads of vectors of 16 bytes and nothing else",
    source: include_str!("../../shaders/peak_read.wgsl"),
    fragments: &[&GRID, &PEAK_PARAMS],
    bindings: &[read(0, "source"), write(1, "out"), params(2)],
    params: PeakParams::LAYOUT,
    configurations: || [8, 16].map(each_of).to_vec(),
    workgroup_bytes: |_| 0,
    invocations: |_| MOVING_INVOCATIONS as u32,
    loop_iterations: |_, _, _| 0,
    needs_cleared_memory: false,
};

/// The kernels that peaks are measured with.
pub static PEAK_KERNELS: &[&Kernel] = &[&MULTIPLY_ADD, &MATRICES, &COPY, &READ];

const MULTIPLY_ADD_INVOCATIONS: u64 = 64;
const MOVING_INVOCATIONS: u64 = 256;

/// Bytes of what one invocation moves at once.
const VECTOR: u64 = 16;

fn chains_of(chains: u32, number: &Fragment) -> Configuration {
    Configuration {
        consts: vec![("CHAINS", chains), ("ROUNDS", 256), ("REPEATS", 8)],
        rules: vec![number.clone()],
    }
}

fn each_of(each: u32) -> Configuration {
    Configuration {
        consts: vec![("EACH", each)],
        rules: Vec::new(),
    }
}

/// What a peak is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bound {
    /// f32 multiply-adds.
    F32,
    /// f16 multiply-adds.
    F16,
    /// Multiply-adds of tiles of f16 by matrix units, with sums in f32.
    Matrices,
    /// Bytes read and written.
    Memory,
}

impl fmt::Display for Bound {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Bound::F32 => "f32",
            Bound::F16 => "f16",
            Bound::Matrices => "matrices",
            Bound::Memory => "memory",
        })
    }
}

/// One form of one peak.
#[derive(Clone, Debug, PartialEq)]
pub struct Peak {
    /// What it is of.
    pub bound: Bound,
    /// How it was reached: the kernel and its constants, or what else.
    pub form: String,
    /// Operations (a multiply-add is two) or bytes (read and written) a second: of the fastest tenth of the samples.
    pub rate: f64,
    /// What was measured.
    pub measured: Measured,
}

/// What an adapter reaches at best.
#[derive(Clone, Debug, PartialEq)]
pub struct Peaks {
    /// Every form that was tried.
    pub forms: Vec<Peak>,
    /// Seconds of one dispatch more in a submission, which does nothing, in a pass of its own: recording and executing.
    pub dispatch_seconds: f64,
    /// Seconds of a submission with one such dispatch: recording, submitting and waiting.
    pub submission_seconds: f64,
    /// Bytes of each of the two buffers that copies were measured on.
    pub copied_bytes: u64,
}

/// Which peak is in the way of a piece of work, and how near it comes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Share {
    /// The peak that allows the least.
    pub bound: Bound,
    /// The time that the peak allows, as a share of the time that was taken.
    pub share: f64,
}

impl Peaks {
    /// Measures them: some seconds. Two buffers of 512 MiB (an adapter that is a CPU: 128), or what there is room for.
    ///
    /// # Errors
    ///
    /// [`Error::Shader`] if the driver refuses a kernel, [`Error::OutOfMemory`], [`Error::DeviceLost`].
    pub fn measure(gpu: &Gpu) -> Result<Self> {
        let mut forms = Vec::new();
        for (bound, kernel, configuration) in computing(gpu) {
            match computed(gpu, bound, kernel, &configuration) {
                Ok(peak) => forms.push(peak),
                // Nothing but a peak is lost where a driver refuses what not every adapter has.
                Err(error @ Error::Shader { .. }) if bound != Bound::F32 => {
                    log::warn!("no peak of {bound}: {error}");
                }
                Err(error) => return Err(error),
            }
        }
        let buffers = Buffers::new(gpu)?;
        for kernel in [&COPY, &READ] {
            for configuration in (kernel.configurations)() {
                forms.push(buffers.moved(gpu, kernel, &configuration)?);
            }
        }
        forms.push(buffers.copied(gpu)?);
        let (dispatch_seconds, submission_seconds) = buffers.overhead(gpu)?;
        Ok(Peaks {
            forms,
            dispatch_seconds,
            submission_seconds,
            copied_bytes: buffers.bytes,
        })
    }

    /// The best form of each peak once more: whether the adapter is still what it was before the cases.
    ///
    /// # Errors
    ///
    /// As [`measure`](Self::measure).
    pub fn again(&self, gpu: &Gpu) -> Result<Vec<Peak>> {
        let mut again = Vec::new();
        let is_best = |bound, form: &str| self.best(bound).is_some_and(|best| best.form == form);
        for (bound, kernel, configuration) in computing(gpu) {
            if is_best(bound, &form(kernel, &configuration)) {
                again.push(computed(gpu, bound, kernel, &configuration)?);
            }
        }
        let buffers = Buffers::new(gpu)?;
        for kernel in [&COPY, &READ] {
            for configuration in (kernel.configurations)() {
                if is_best(Bound::Memory, &form(kernel, &configuration)) {
                    again.push(buffers.moved(gpu, kernel, &configuration)?);
                }
            }
        }
        if is_best(Bound::Memory, COPIED) {
            again.push(buffers.copied(gpu)?);
        }
        Ok(again)
    }

    /// The best form of a peak.
    pub fn best(&self, bound: Bound) -> Option<&Peak> {
        let forms = self.forms.iter().filter(|peak| peak.bound == bound);
        forms.max_by(|a, b| a.rate.total_cmp(&b.rate))
    }

    /// How near work of that many operations and bytes, which took so long, comes to what binds it: memory, or the fastest
    /// arithmetic that its tier may use. `None` for no work or no time.
    pub fn share(&self, tier: Tier, flops: u64, bytes: u64, seconds: f64) -> Option<Share> {
        let allowed = |bound, amount: u64| {
            let rate = self.best(bound)?.rate;
            let share = amount as f64 / rate / seconds;
            (share.is_finite() && share > 0.0).then_some(Share { bound, share })
        };
        // (Half-precision tiles are multiplied and added in f32.)
        let arithmetic = match tier {
            Tier::Plain | Tier::Half => [Some(Bound::F32), None],
            Tier::Matrices => [Some(Bound::F32), Some(Bound::Matrices)],
        };
        let least = |a: &Share, b: &Share| a.share.total_cmp(&b.share);
        let computing = arithmetic
            .into_iter()
            .flatten()
            .filter_map(|bound| allowed(bound, flops))
            .min_by(least);
        let shares = [computing, allowed(Bound::Memory, bytes)];
        shares.into_iter().flatten().max_by(least)
    }
}

/// A kernel's form in words.
fn form(kernel: &Kernel, configuration: &Configuration) -> String {
    format!("{} [{configuration}]", kernel.name)
}

/// Every form of a peak of arithmetic that the device has the features for. (Matrix units must have shown first that they are right.)
fn computing(gpu: &Gpu) -> Vec<(Bound, &'static Kernel, Configuration)> {
    let capabilities = gpu.capabilities();
    let multiply_adds = (MULTIPLY_ADD.configurations)().into_iter();
    let multiply_adds = multiply_adds.map(|own| match own.rules.contains(&NUMBER_F16) {
        true => (Bound::F16, &MULTIPLY_ADD, own),
        false => (Bound::F32, &MULTIPLY_ADD, own),
    });
    let matrices = (MATRICES.configurations)().into_iter();
    multiply_adds
        .chain(matrices.map(|own| (Bound::Matrices, &MATRICES, own)))
        .filter(|(bound, _, _)| match bound {
            Bound::F16 => capabilities.offers(Tier::Half),
            Bound::Matrices => capabilities.has_qualified(Tier::Matrices),
            Bound::F32 | Bound::Memory => true,
        })
        .collect()
}

/// The form that is the driver's own copy of buffers.
const COPIED: &str = "copy_buffer_to_buffer";

/// How a form is measured.
fn options() -> MeasureOptions {
    MeasureOptions {
        samples: 15,
        budget: Duration::from_millis(250),
        warm_up: Duration::from_millis(150),
        ..Default::default()
    }
}

/// The rate of work of that amount a call.
fn peak(bound: Bound, form: String, amount: u64, measured: Measured) -> Peak {
    Peak {
        bound,
        form,
        rate: amount as f64 / measured.best().p10.max(f64::MIN_POSITIVE),
        measured,
    }
}

/// Records a dispatch of a kernel for peaks.
fn dispatch(
    gpu: &Gpu,
    encoder: &mut wgpu::CommandEncoder,
    pipeline: &Pipeline,
    source: Option<&TensorView>,
    out: &TensorView,
    groups: u64,
    timestamps: Option<&mut Timestamps>,
) -> Result<()> {
    let source_at = source.map(|source| source.bind("source")).transpose()?;
    let out_at = out.bind("out")?;
    let arguments = [
        ("source", argument(source, source_at.flatten())),
        ("out", argument(Some(out), out_at)),
    ];
    // (A grid of one workgroup that has no work is a dispatch all the same.)
    let Some(grid) = fold(groups.max(1), gpu.capabilities(), "peak")? else {
        return Ok(());
    };
    gpu.record(
        encoder,
        pipeline,
        Call {
            label: "peak",
            arguments: &arguments,
            params: bytemuck::bytes_of(&PeakParams {
                groups: groups as u32,
                first_group: 0,
            }),
            grid,
            slices: 1,
            timestamps,
        },
    )
}

/// A dispatch is made so long at least, by more workgroups: what it costs to begin one does not count then.
const LEAST_DISPATCH: f64 = 4e-3;

/// By a kernel that computes.
fn computed(
    gpu: &Gpu,
    bound: Bound,
    kernel: &'static Kernel,
    configuration: &Configuration,
) -> Result<Peak> {
    let pipeline = gpu.pipeline(kernel, configuration, Origin::Own)?;
    let constant = |name: &str| u64::from(configuration.get(name));
    let turns = constant("ROUNDS") * constant("REPEATS");
    // Multiply-adds of a workgroup: vectors of four in every invocation, or three sums of each of four tiles.
    let each = match bound {
        Bound::Matrices => turns * 3 * 4 * 16 * 16 * 16,
        _ => turns * 4 * constant("CHAINS") * MULTIPLY_ADD_INVOCATIONS,
    };
    let most = u64::from(gpu.capabilities().max_groups_per_axis.clamp(1, 65_535));
    let out = Tensor::empty(
        gpu,
        &[most as usize, MULTIPLY_ADD_INVOCATIONS as usize],
        ElementType::F32,
    )?
    .view();
    let mut groups = 64.min(most);
    let watch = Stopwatch::new(gpu)?;
    loop {
        let mut record = recorder(gpu, &pipeline, None, &out, groups);
        watch.wall(1, &mut record)?;
        if watch.wall(1, &mut record)? >= LEAST_DISPATCH || groups == most {
            break;
        }
        groups = (groups * 4).min(most);
    }
    let measured = measure(
        gpu,
        &options(),
        &mut recorder(gpu, &pipeline, None, &out, groups),
    )?;
    Ok(peak(
        bound,
        form(kernel, configuration),
        2 * each * groups,
        measured,
    ))
}

/// What records that dispatch again and again.
fn recorder<'a>(
    gpu: &'a Gpu,
    pipeline: &'a Arc<Pipeline>,
    source: Option<&'a TensorView>,
    out: &'a TensorView,
    groups: u64,
) -> Box<Recorder<'a>> {
    Box::new(move |encoder, timestamps| {
        dispatch(gpu, encoder, pipeline, source, out, groups, timestamps)
    })
}

/// Two buffers that fit no cache.
struct Buffers {
    source: Tensor,
    out: Tensor,
    bytes: u64,
}

/// What is moved is written in pieces of this size, and is a multiple of it: so is every workgroup's share.
const PIECE: u64 = 1 << 20;

impl Buffers {
    fn new(gpu: &Gpu) -> Result<Self> {
        let wanted: u64 = match gpu.adapter_info().device_type {
            wgpu::DeviceType::Cpu => 128 << 20,
            _ => 512 << 20,
        };
        let limits = gpu.capabilities();
        let most = wanted
            .min(limits.max_binding_bytes)
            .min(limits.max_buffer_bytes);
        let mut bytes = (most / PIECE * PIECE).max(PIECE);
        let (source, out) = loop {
            let tensor = || Tensor::empty(gpu, &[(bytes / 4) as usize], ElementType::U32);
            match tensor().and_then(|source| Ok((source, tensor()?))) {
                Err(Error::OutOfMemory { .. }) if bytes > 16 * PIECE => {
                    bytes = bytes / 2 / PIECE * PIECE;
                }
                made => break made?,
            }
        };
        // Memory that nobody wrote may be one page of zeros many times over, or be kept in a shorter form.
        let noise = noise((PIECE / 4) as usize, 1.0, 1)?;
        let piece = Tensor::from_slice(gpu, &[noise.len()], &noise)?;
        let submission = gpu.record_and_submit(|encoder| {
            for to in [&source, &out] {
                for at in (0..bytes).step_by(PIECE as usize) {
                    gpu.record_copy(encoder, piece.buffer(), 0, to.buffer(), at, PIECE)?;
                }
            }
            Ok(())
        })?;
        gpu.wait_for(submission)?;
        Ok(Buffers { source, out, bytes })
    }

    /// By a kernel.
    fn moved(
        &self,
        gpu: &Gpu,
        kernel: &'static Kernel,
        configuration: &Configuration,
    ) -> Result<Peak> {
        let pipeline = gpu.pipeline(kernel, configuration, Origin::Own)?;
        let each = u64::from(configuration.get("EACH"));
        let groups = self.bytes / (MOVING_INVOCATIONS * VECTOR * each);
        let written = match kernel.name == COPY.name {
            true => self.bytes,
            false => 4 * MOVING_INVOCATIONS * groups,
        };
        let (source, out) = (self.source.view(), self.out.view());
        let measured = measure(
            gpu,
            &options(),
            &mut recorder(gpu, &pipeline, Some(&source), &out, groups),
        )?;
        let form = form(kernel, configuration);
        Ok(peak(Bound::Memory, form, self.bytes + written, measured))
    }

    /// By the driver's own copy of buffers.
    fn copied(&self, gpu: &Gpu) -> Result<Peak> {
        let mut record = |encoder: &mut wgpu::CommandEncoder, _: Option<&mut Timestamps>| {
            let (from, to) = (self.source.buffer(), self.out.buffer());
            gpu.record_copy(encoder, from, 0, to, 0, self.bytes)
        };
        let measured = measure(gpu, &options(), &mut record)?;
        let form = COPIED.to_string();
        Ok(peak(Bound::Memory, form, 2 * self.bytes, measured))
    }

    /// Seconds of a dispatch that does nothing, and of a submission with one.
    fn overhead(&self, gpu: &Gpu) -> Result<(f64, f64)> {
        let configuration = each_of(1);
        let pipeline = gpu.pipeline(&COPY, &configuration, Origin::Own)?;
        let (source, out) = (self.source.view(), self.out.view());
        let mut record = recorder(gpu, &pipeline, Some(&source), &out, 0);
        let many = measure(gpu, &options(), &mut record)?.wall.median;
        let watch = Stopwatch::new(gpu)?;
        let mut alone = (0..21)
            .map(|_| watch.wall(1, &mut record))
            .collect::<Result<Vec<f64>>>()?;
        alone.sort_by(f64::total_cmp);
        Ok((many, alone[alone.len() / 2]))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::super::measure::{NoGpuTime, Spread};
    use super::*;

    #[test]
    fn the_share_is_of_what_binds() {
        let form = |bound, rate| Peak {
            bound,
            form: String::new(),
            rate,
            measured: Measured {
                wall: Spread::of(vec![1.0]).unwrap(),
                gpu: Err(NoGpuTime::NoTimestamps),
                calls: 1,
            },
        };
        let peaks = Peaks {
            forms: vec![
                form(Bound::F32, 80e9),
                form(Bound::F32, 100e9),
                form(Bound::Memory, 10e9),
            ],
            dispatch_seconds: 0.0,
            submission_seconds: 0.0,
            copied_bytes: 0,
        };
        // 0.5 s of operations and 0.1 s of bytes in a second; then the other way round.
        let share = peaks
            .share(Tier::Plain, 50_000_000_000, 1_000_000_000, 1.0)
            .unwrap();
        assert_eq!((share.bound, share.share), (Bound::F32, 0.5));
        let share = peaks
            .share(Tier::Plain, 1_000_000_000, 1_000_000_000, 0.2)
            .unwrap();
        assert_eq!((share.bound, share.share), (Bound::Memory, 0.5));
        assert_eq!(peaks.share(Tier::Plain, 0, 0, 1.0), None);
        assert_eq!(peaks.share(Tier::Plain, 1, 1, f64::NAN), None);
    }
}

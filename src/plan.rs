//! Plans: which kernel, in which configuration, on which grid, and why.
//!
//! Planning is a pure function of the problem and the device's [`Capabilities`]: it allocates nothing and
//! can be done for a device that is not there. Compiling a plan gives something that encodes
//! ([`Linear`](crate::Linear), [`Attention`](crate::Attention)).

use crate::gpu::{Capabilities, Origin};
use crate::kernels::{Configuration, Form, Fragment, KERNELS, Kernel, Operation, Tier};
use crate::{Error, Result};
use std::fmt;

/// What one operation will dispatch, and why.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The kernel.
    pub kernel: &'static Kernel,
    /// Its constants and rules.
    pub configuration: Configuration,
    /// Workgroups along x, y, z; `None` where there is nothing to compute and nothing is dispatched.
    pub grid: Option<[u32; 3]>,
    /// Workgroups that have work. (A folded grid may hold some that return at once.)
    pub groups: u32,
    /// Ranges of keys that are computed one after the other, in a dispatch each, and then merged; 1 where the whole
    /// is one dispatch.
    pub parts: u32,
    /// Parts of the keys that workgroups of one dispatch compute side by side, and that are then merged; 1 where a workgroup
    /// has all keys of its queries. (Of the kernels for few queries and of attention_tiled.)
    pub splits: u32,
    /// Dispatches that the grid is cut into, so that none takes longer than
    /// [`Capabilities::longest_dispatch`](crate::Capabilities::longest_dispatch); 256 at most. Results do not depend on it. (A grid that is not the folded
    /// `groups` is not cut.)
    pub slices: u32,
    /// Useful floating-point operations: a multiply-add is two, causal work is counted once.
    pub flops: u64,
    /// GPU memory beyond the operands, in bytes.
    pub workspace_bytes: u64,
    /// Why this kernel in this configuration.
    pub reason: String,
}

impl Plan {
    /// Compute passes of one call, which is what timestamps are taken around; a pass that is cut has
    /// [`slices`](Self::slices) dispatches.
    pub fn passes(&self) -> usize {
        match (self.grid, self.parts) {
            (None, _) => 0,
            (Some(_), 0 | 1) if self.splits > 1 => 2,
            (Some(_), 0 | 1) => 1,
            (Some(_), parts) => parts as usize + 1,
        }
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} [{}] ", self.kernel.name, self.configuration)?;
        match self.grid {
            Some([x, 1, 1]) => write!(f, "{x} workgroups")?,
            Some([x, y, z]) => write!(f, "{x} x {y} x {z} workgroups ({} used)", self.groups)?,
            None => write!(f, "nothing to dispatch")?,
        }
        if self.slices > 1 && self.grid.is_some() {
            write!(f, " in {} dispatches", self.slices)?;
        }
        if self.parts > 1 {
            write!(
                f,
                " for each of {} parts of the keys, and a merge",
                self.parts
            )?;
        }
        if self.splits > 1 {
            write!(
                f,
                " with the keys in {} parts side by side, and a merge",
                self.splits
            )?;
        }
        write!(f, ": {}", self.reason)
    }
}

/// The form that suits an adapter.
pub(crate) fn suited(capabilities: &Capabilities) -> Form {
    match capabilities.device_type {
        wgpu::DeviceType::Cpu => Form::Lanes,
        _ => Form::Tiled,
    }
}

/// Lanes of a workgroup of the lanes form, and the fragment that loads what all of them need: by broadcasts where subgroups have
/// a size that is known in advance and that the kernel is compiled for, otherwise the first of the list.
pub(crate) fn lanes_of(
    capabilities: &Capabilities,
    list: &[(Option<u32>, u32, &'static Fragment)],
) -> (u32, &'static Fragment) {
    let known = capabilities.known_subgroup();
    let by_subgroup = list
        .iter()
        .find(|(size, ..)| size.is_some() && *size == known);
    let (_, lanes, fragment) = by_subgroup.unwrap_or(&list[0]);
    (*lanes, fragment)
}

/// The kernel for an operation in plain arithmetic: the form that suits the adapter, or the one asked for.
///
/// # Errors
///
/// The limit that is in the way, if the form asked for, or every form, cannot run.
pub(crate) fn choose_kernel(
    operation: Operation,
    capabilities: &Capabilities,
    form: Option<Form>,
) -> Result<(&'static Kernel, String)> {
    let suited = suited(capabilities);
    let software = suited == Form::Lanes;
    let wanted = form.unwrap_or(suited);
    let mut refusal = None;
    let mut usable = Vec::new();
    for kernel in KERNELS
        .iter()
        .filter(|kernel| kernel.operation == operation && kernel.least_tier() == Tier::Plain)
    {
        match capabilities.can_run(kernel) {
            Ok(()) => usable.push(*kernel),
            Err(error) if kernel.form == wanted => refusal = Some(error),
            Err(_) => {}
        }
    }
    if let Some(kernel) = usable.iter().find(|kernel| kernel.form == wanted) {
        let reason = match (form, software) {
            (Some(Form::Lanes), _) => "lanes as asked",
            (Some(Form::Tiled), _) => "tiles as asked",
            (None, true) => "lanes, since the adapter is a CPU",
            (None, false) => "tiles, since the adapter is a GPU",
        };
        return Ok((*kernel, reason.to_string()));
    }
    // The form asked for by name is never exchanged for another.
    match (form, usable.first(), refusal) {
        (None, Some(kernel), Some(error)) => Ok((
            *kernel,
            format!("the form that suits better does not fit ({error})"),
        )),
        (_, _, Some(error)) => Err(error),
        _ => Err(Error::Unsupported {
            what: format!("{operation:?}"),
            reason: "no kernel of the table computes it".into(),
        }),
    }
}

/// Dispatches into which that much work is cut, so that none is longer than the device's bound by the rate that is known of
/// it. `cost` is in floating-point operations, and counts what is done rather than what is useful; a workgroup is not cut.
pub(crate) fn slices(cost: u64, groups: u64, capabilities: &Capabilities) -> u32 {
    let nanoseconds = capabilities.longest_dispatch.as_nanos();
    let allowed =
        nanoseconds.saturating_mul(u128::from(capabilities.flops_per_second)) / 1_000_000_000;
    let slices = u128::from(cost).div_ceil(allowed.max(1));
    slices.clamp(1, u128::from(groups.clamp(1, MOST_SLICES))) as u32
}

/// Dispatches into which a pass is cut at most: each has parameters and a bind group of its own, which are kept. (Where it is reached, one takes
/// longer than it should.)
const MOST_SLICES: u64 = 256;

/// What it costs to move a pair of elements, as [`slices`] counts: a device that computes so many operations moves a few bytes.
pub(crate) const MOVED_COST: u64 = 200;

/// Whether a kernel is one of this crate's own table, and not a caller's.
pub(crate) fn is_own(kernel: &'static Kernel) -> bool {
    KERNELS.iter().any(|own| std::ptr::eq(*own, kernel))
}

/// Whose a kernel is that has one configuration and is planned anew for each call.
pub(crate) fn origin_of(kernel: &'static Kernel) -> Origin {
    match is_own(kernel) {
        true => Origin::Own,
        false => Origin::Callers,
    }
}

/// What a caller may have got wrong in a plan: [`Error::Parameter`] for a kernel that computes something else,
/// [`Error::LimitExceeded`] for a grid over the device's limit (wgpu would only say so when the encoder is finished).
pub(crate) fn check_plan(
    plan: &Plan,
    operation: Operation,
    capabilities: &Capabilities,
) -> Result<()> {
    if plan.kernel.operation != operation {
        return Err(Error::parameter(
            "plan.kernel",
            plan.kernel.name,
            format!("must be a kernel for {operation:?}"),
        ));
    }
    let most = capabilities.max_groups_per_axis;
    match plan
        .grid
        .into_iter()
        .flatten()
        .find(|groups| *groups > most)
    {
        None => Ok(()),
        Some(groups) => Err(Error::LimitExceeded {
            what: "the plan's grid".into(),
            limit: "max_compute_workgroups_per_dimension".into(),
            needed: u64::from(groups),
            available: u64::from(most),
            unit: "workgroups",
        }),
    }
}

/// A size as kernels count it.
///
/// # Errors
///
/// [`Error::LimitExceeded`] past 2^31 - 1: positions are compared as signed numbers.
pub(crate) fn size(name: &str, value: usize) -> Result<u32> {
    match i32::try_from(value) {
        Ok(value) => Ok(value as u32),
        Err(_) => Err(Error::LimitExceeded {
            what: name.into(),
            limit: "sizes of one axis".into(),
            needed: value as u64,
            available: i32::MAX as u64,
            unit: "elements",
        }),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::kernels::{ATTENTION_LANES, LINEAR_LANES};

    #[test]
    fn the_form_follows_the_adapter_or_the_caller() {
        struct Case {
            device: wgpu::DeviceType,
            form: Option<Form>,
            expected: &'static str,
        }
        let cases = [
            Case {
                device: wgpu::DeviceType::Cpu,
                form: None,
                expected: "attention_lanes",
            },
            Case {
                device: wgpu::DeviceType::DiscreteGpu,
                form: None,
                expected: "attention_tiled",
            },
            Case {
                device: wgpu::DeviceType::Other,
                form: None,
                expected: "attention_tiled",
            },
            Case {
                device: wgpu::DeviceType::Cpu,
                form: Some(Form::Tiled),
                expected: "attention_tiled",
            },
        ];
        for case in cases {
            let capabilities = Capabilities::webgpu_defaults(case.device);
            let (kernel, reason) =
                choose_kernel(Operation::Attention, &capabilities, case.form).unwrap();
            assert_eq!(kernel.name, case.expected);
            assert!(!reason.is_empty());
        }
    }

    /// Large tiles where there are enough of them to keep a GPU busy, small ones elsewhere; and the plan says so.
    #[test]
    fn tiles_are_as_large_as_a_gpu_stays_busy_with() {
        struct Case {
            heads: usize,
            tokens: usize,
            queries: u32,
            outputs: u32,
        }
        let case = |heads, tokens, queries, outputs| Case {
            heads,
            tokens,
            queries,
            outputs,
        };
        let capabilities = Capabilities::webgpu_defaults(wgpu::DeviceType::DiscreteGpu);
        for case in [
            case(1, 1024, 32, 32),
            case(12, 64, 32, 32),
            case(12, 1024, 64, 64),
            case(48, 4096, 64, 128),
        ] {
            let problem = crate::AttentionProblem::new(1, case.heads, case.tokens, 64);
            let plan = problem.plan(&capabilities).unwrap();
            assert_eq!(4 * plan.configuration.get("DOWN"), case.queries, "{plan}");
            assert!(plan.reason.contains("blocks, since there are"), "{plan}");
            let problem = crate::LinearProblem {
                batch: 1,
                tokens: case.tokens,
                d_in: 768,
                d_out: 64 * case.heads,
                form: None,
                few: None,
            };
            let plan = problem.plan(&capabilities).unwrap();
            let [rows, down] = ["ROWS", "DOWN"].map(|name| plan.configuration.get(name));
            assert_eq!(rows * down, case.outputs, "{plan}");
            assert!(plan.reason.contains("rows in tiles of"), "{plan}");
        }
    }

    #[test]
    fn lanes_follow_subgroups_of_a_size_that_is_known_in_advance() {
        let mut capabilities = Capabilities::webgpu_defaults(wgpu::DeviceType::Cpu);
        for (sizes, allowed, lanes, broadcasts) in [
            ((8, 8), true, 8, true),
            ((4, 4), true, 4, true),
            ((8, 8), false, 8, false),
            ((4, 8), true, 8, false),
            ((32, 32), true, 8, false),
        ] {
            capabilities.subgroup_sizes = sizes;
            capabilities.subgroups = allowed;
            for list in [ATTENTION_LANES, LINEAR_LANES] {
                let (got, fragment) = lanes_of(&capabilities, &list);
                assert_eq!(got, lanes, "{sizes:?} {allowed}");
                assert_eq!(fragment.name.ends_with("_subgroup"), broadcasts);
            }
        }
    }

    #[test]
    fn a_form_that_does_not_fit_is_replaced_with_the_reason_or_refused_if_asked_for() {
        let mut capabilities = Capabilities::webgpu_defaults(wgpu::DeviceType::DiscreteGpu);
        capabilities.max_workgroup_bytes = 9216;
        let (kernel, reason) = choose_kernel(Operation::Attention, &capabilities, None).unwrap();
        assert_eq!(kernel.name, "attention_lanes");
        assert!(
            reason.contains("max_compute_workgroup_storage_size"),
            "{reason}"
        );
        let refused = choose_kernel(Operation::Attention, &capabilities, Some(Form::Tiled));
        assert!(matches!(
            refused,
            Err(Error::LimitExceeded {
                available: 9216,
                ..
            })
        ));
        capabilities.max_storage_buffers = 4;
        assert!(matches!(
            choose_kernel(Operation::Attention, &capabilities, None),
            Err(Error::LimitExceeded {
                needed: 6,
                available: 4,
                ..
            })
        ));
    }
}

//! A strided copy on the GPU that may change the element type.

use crate::gpu::{Call, Gpu, Pipeline, Timestamps, fold};
use crate::kernels::{Configuration, CopyParams, Form, Kernel, Operation};
use crate::operands::{
    argument, check_operands, expect_contiguous_last, expect_writable_rows, first,
};
use crate::plan::{MOVED_COST, choose_kernel, origin_of, size, slices};
use crate::tensor::{TensorView, shape_text};
use crate::{Error, Result};
use std::sync::Arc;

/// Copies tensors on the GPU, from any strides to any strides and from any float type (f32, f16, bf16; rounded to
/// nearest even) to any: casts weights, makes views contiguous, puts new keys behind old ones.
#[derive(Clone)]
pub struct TensorCopy {
    gpu: Gpu,
    pipeline: Arc<Pipeline>,
}

impl std::fmt::Debug for TensorCopy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TensorCopy").finish_non_exhaustive()
    }
}

/// Invocations of a workgroup, each of which moves two elements.
const INVOCATIONS: u64 = 64;

impl TensorCopy {
    /// Compiles the kernel.
    ///
    /// # Errors
    ///
    /// [`Error::Shader`] if the driver refuses it, [`Error::LimitExceeded`] if the device has too few storage buffers.
    pub fn new(gpu: &Gpu) -> Result<Self> {
        let (kernel, _) = choose_kernel(Operation::Copy, gpu.capabilities(), Some(Form::Tiled))?;
        Self::from_kernel(gpu, kernel)
    }

    /// Compiles a kernel of the caller's own that takes the bindings and parameters of `copy`.
    ///
    /// # Errors
    ///
    /// As [`new`](Self::new), and [`Error::Parameter`] for a kernel of another operation.
    pub fn from_kernel(gpu: &Gpu, kernel: &'static Kernel) -> Result<Self> {
        if kernel.operation != Operation::Copy {
            return Err(Error::parameter(
                "kernel",
                kernel.name,
                "must be a kernel for Copy",
            ));
        }
        let configuration = Configuration {
            consts: Vec::new(),
            rules: Vec::new(),
        };
        Ok(TensorCopy {
            gpu: gpu.clone(),
            pipeline: gpu.pipeline(kernel, &configuration, origin_of(kernel))?,
        })
    }

    /// Records a copy of `from` to `to`, of the same shape of up to five axes, in different buffers. A 16-bit `to`
    /// has a contiguous last axis and rows that begin on whole words.
    ///
    /// # Errors
    ///
    /// [`Error::Shape`] for different shapes or more than five axes, [`Error::Type`] for elements that are no floats,
    /// [`Error::Layout`], [`Error::OtherDevice`], [`Error::LimitExceeded`]. Nothing was recorded then.
    pub fn encode(
        &self,
        encoder: &mut wgpu::CommandEncoder,
        from: &TensorView,
        to: &TensorView,
    ) -> Result<()> {
        self.encode_timed(encoder, from, to, "copy", None)
    }

    /// [`encode`](Self::encode), with a label and timestamps around the pass (none where there is nothing to copy).
    ///
    /// # Errors
    ///
    /// As [`encode`](Self::encode), and [`Error::LimitExceeded`] where the timestamps have no room left.
    pub fn encode_timed(
        &self,
        encoder: &mut wgpu::CommandEncoder,
        from: &TensorView,
        to: &TensorView,
        label: &str,
        timestamps: Option<&mut Timestamps>,
    ) -> Result<()> {
        if from.shape() != to.shape() || from.shape().len() > 5 {
            return Err(Error::shape(
                "to",
                format!("{} of at most 5 axes", shape_text(from.shape())),
                shape_text(to.shape()),
            ));
        }
        let number = |name: &str, view: &TensorView| {
            let number = view.element_type().float_number();
            number.ok_or_else(|| Error::Type {
                argument: name.into(),
                expected: "f32, f16 or bf16".into(),
                got: view.element_type().to_string(),
            })
        };
        let (from_type, out_type) = (number("from", from)?, number("to", to)?);
        if out_type != 0 {
            expect_contiguous_last("to", to)?;
            expect_writable_rows("to", to)?;
        }
        check_operands(&self.gpu, &[("from", Some(from))], &[("to", to)])?;
        let padded = |view: &TensorView| {
            (view.shape().len()..5).fold(view.clone(), |view, _| view.unsqueeze(0))
        };
        let (from, to) = (&padded(from), &padded(to));
        let [s0, s1, s2, s3, s4] = [0, 1, 2, 3, 4].map(|axis| from.shape()[axis]);
        for (axis, value) in from.shape().iter().enumerate() {
            size(&format!("axis {axis}"), *value)?;
        }
        let sizes = [s0, s1, s2, s3, s4.div_ceil(2)].map(|size| size as u64);
        let pairs = sizes.into_iter().fold(1, u64::saturating_mul);
        if pairs > u64::from(u32::MAX) - INVOCATIONS {
            return Err(Error::LimitExceeded {
                what: "copy".into(),
                limit: "32-bit counting".into(),
                needed: pairs,
                available: u64::from(u32::MAX) - INVOCATIONS,
                unit: "pairs of elements",
            });
        }
        let groups = pairs.div_ceil(INVOCATIONS);
        let Some(grid) = fold(groups, self.gpu.capabilities(), "copy")? else {
            return Ok(());
        };
        let (from_at, to_at) = (from.bind("from")?, to.bind("to")?);
        let params = CopyParams {
            pairs: pairs as u32,
            groups: groups as u32,
            first_group: 0,
            size_1: s1 as u32,
            size_2: s2 as u32,
            size_3: s3 as u32,
            size_4: s4 as u32,
            from_type,
            from_offset: first(from_at),
            from_stride_0: from.stride(0),
            from_stride_1: from.stride(1),
            from_stride_2: from.stride(2),
            from_stride_3: from.stride(3),
            from_stride_4: from.stride(4),
            out_type,
            to_offset: first(to_at),
            to_stride_0: to.stride(0),
            to_stride_1: to.stride(1),
            to_stride_2: to.stride(2),
            to_stride_3: to.stride(3),
            to_stride_4: to.stride(4),
        };
        self.gpu.record(
            encoder,
            &self.pipeline,
            Call {
                label,
                arguments: &[
                    ("source", argument(Some(from), from_at)),
                    ("out", argument(Some(to), to_at)),
                ],
                params: bytemuck::bytes_of(&params),
                grid,
                slices: slices(
                    pairs.saturating_mul(MOVED_COST),
                    groups,
                    self.gpu.capabilities(),
                ),
                timestamps,
            },
        )
    }
}

//! What every operation asks of its operands.

use crate::element::ElementType;
use crate::gpu::{Argument, Bound, Gpu};
use crate::tensor::{TensorView, shape_text};
use crate::{Error, Result};

/// Elements from the start of the binding to the first one of the view.
pub(crate) fn first(at: Option<Bound>) -> u32 {
    at.map_or(0, |bound| bound.first)
}

/// What is bound for a view: nothing where there is none or it is empty.
pub(crate) fn argument<'a>(view: Option<&'a TensorView>, at: Option<Bound>) -> Argument<'a> {
    match (view, at) {
        (Some(view), Some(at)) => Argument::Tensor(view.buffer(), at),
        _ => Argument::Unused,
    }
}

/// [`Error::Layout`] unless neighbours along the last axis are neighbours in memory.
pub(crate) fn expect_contiguous_last(argument: &str, view: &TensorView) -> Result<()> {
    let last = view.shape().len().saturating_sub(1);
    if view.shape().get(last).is_none_or(|size| *size <= 1) || view.strides()[last] == 1 {
        return Ok(());
    }
    Err(Error::Layout {
        argument: argument.into(),
        problem: format!(
            "its last axis has a stride of {} elements (shape {}, strides {})",
            view.strides()[last],
            shape_text(view.shape()),
            shape_text(view.strides())
        ),
        remedy: "the last axis must be contiguous: permute another axis there, or copy".into(),
    })
}

/// What holds for every operand of every operation: f32, on this GPU, and an output that nothing else shares.
pub(crate) fn check_operands(
    gpu: &Gpu,
    inputs: &[(&str, Option<&TensorView>)],
    output: (&str, &TensorView),
) -> Result<()> {
    let (output_name, output) = output;
    output.expect_type(output_name, ElementType::F32)?;
    output.expect_gpu(output_name, gpu)?;
    if !output.is_injective() {
        return Err(Error::Layout {
            argument: output_name.into(),
            problem: format!(
                "different indices share elements (shape {}, strides {})",
                shape_text(output.shape()),
                shape_text(output.strides())
            ),
            remedy: "an output needs strides that keep its elements apart".into(),
        });
    }
    for (name, view) in inputs {
        let Some(view) = view else { continue };
        // A mask is the only operand of another type; whoever takes one checks it.
        if *name != "mask" {
            view.expect_type(name, ElementType::F32)?;
        }
        view.expect_gpu(name, gpu)?;
        if view.buffer() == output.buffer() {
            return Err(Error::Layout {
                argument: output_name.into(),
                problem: format!("it lies in the same buffer as {name}"),
                remedy: "a buffer cannot be read and written by one dispatch: give the output a buffer of its own".into(),
            });
        }
    }
    Ok(())
}

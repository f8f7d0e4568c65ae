//! What every operation asks of its operands.

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

/// [`Error::Layout`] unless the elements lie one behind the other.
pub(crate) fn expect_contiguous(argument: &str, view: &TensorView) -> Result<()> {
    if view.is_contiguous() {
        return Ok(());
    }
    Err(Error::Layout {
        argument: argument.into(),
        problem: format!(
            "it is not contiguous (shape {}, strides {})",
            shape_text(view.shape()),
            shape_text(view.strides())
        ),
        remedy: "copy it to a tensor of its own".into(),
    })
}

/// [`Error::Layout`] unless the rows of an output of 16-bit elements begin on whole words: two invocations must not
/// write one word.
pub(crate) fn expect_writable_rows(argument: &str, view: &TensorView) -> Result<()> {
    if view.element_type().size() == 4 || view.elements() == 0 {
        return Ok(());
    }
    let rows = view.shape().len().saturating_sub(1);
    let odd = |axis: &usize| view.shape()[*axis] > 1 && !view.strides()[*axis].is_multiple_of(2);
    if view.offset().is_multiple_of(2) && !(0..rows).any(|axis| odd(&axis)) {
        return Ok(());
    }
    Err(Error::Layout {
        argument: argument.into(),
        problem: format!(
            "rows of {} elements that begin at odd ones (offset {}, strides {})",
            view.element_type(),
            view.offset(),
            shape_text(view.strides())
        ),
        remedy: "rows of a 16-bit output must begin on 4-byte words: pad the rows to an even number of elements and slice, or write f32 and copy".into(),
    })
}

/// What holds for every operand of every operation: it is on this GPU, and outputs keep their elements apart and
/// share no buffer with anything.
pub(crate) fn check_operands(
    gpu: &Gpu,
    inputs: &[(&str, Option<&TensorView>)],
    outputs: &[(&str, &TensorView)],
) -> Result<()> {
    for (name, view) in inputs {
        if let Some(view) = view {
            view.expect_gpu(name, gpu)?;
        }
    }
    for (number, (output_name, output)) in outputs.iter().enumerate() {
        output.expect_gpu(output_name, gpu)?;
        if !output.is_injective() {
            return Err(Error::Layout {
                argument: (*output_name).into(),
                problem: format!(
                    "different indices share elements (shape {}, strides {})",
                    shape_text(output.shape()),
                    shape_text(output.strides())
                ),
                remedy: "an output needs strides that keep its elements apart".into(),
            });
        }
        let others = outputs[..number].iter().map(|(name, view)| (*name, *view));
        let read = inputs
            .iter()
            .filter_map(|(name, view)| Some((*name, (*view)?)));
        for (name, view) in read.chain(others) {
            if view.buffer() == output.buffer() {
                return Err(Error::Layout {
                    argument: (*output_name).into(),
                    problem: format!("it lies in the same buffer as {name}"),
                    remedy: "a buffer cannot be read and written by one dispatch: give the output a buffer of its own".into(),
                });
            }
        }
    }
    Ok(())
}

/// Whether every row of an operand, as it is bound, begins where that many elements can be read at once: its first element, and its
/// strides along `axes`.
pub(crate) fn begins_on(
    elements: u32,
    view: &TensorView,
    at: Option<Bound>,
    axes: std::ops::Range<usize>,
) -> bool {
    let whole = |number: u32| number.is_multiple_of(elements);
    at.is_some_and(|bound| whole(bound.first))
        && axes.into_iter().all(|axis| whole(view.stride(axis)))
}

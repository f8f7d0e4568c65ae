//! The reference: attention, projections and the whole layer in plain `f64` loops.
//!
//! It is the oracle that every kernel is held against, and it is public so that you can check your own
//! kernels with it. It is written to be read, not to be fast, and it shares no code with what it judges.
//!
//! - [`linear`]: `y = x · Wᵀ + b`.
//! - [`attention`], [`attention_without_weights`], [`attention_row`]: the attention core, all of it or
//!   one query row at a time (a large problem can be checked on sampled rows); [`attention_packed`]: sequences
//!   of their own lengths, one after the other. [`Rules`] say which pairs attend and what they score.
//! - [`scores`]: what goes into the softmax, and the steps before.
//! - [`merge`]: attention over all keys from attention over parts of them.
//! - [`rotary`](fn@rotary): rotary position embedding of queries or keys.
//! - [`layer`], [`layer_without_weights`]: the three projections, attention and the output projection.
//! - [`widen`]: `f32` values as the `f64` that they exactly are.
//!
//! There is no cache here: what is decoded token by token on a cache of keys and values is held against one
//! causal pass over the whole sequence, of which the step of token t is row t. With rotary embedding the pass
//! counts positions from 0, and so does the cache.
//!
//! Nothing here panics on bad input: lengths are held against the shapes before anything is read.

mod attention;
mod layer;
mod linear;
mod merge;
mod rotary;
mod rules;
#[cfg(test)]
mod testing;

pub use attention::{
    AttentionInputs, AttentionOutputs, AttentionRow, Stage, attention, attention_packed,
    attention_row, attention_without_weights, scores,
};
pub use layer::{LayerInputs, LayerOutputs, layer, layer_without_weights};
pub use linear::linear;
pub use merge::{MergeInputs, Partial, merge};
pub use rotary::{Angles, Pairing, Rotary, RotaryInputs, rotary};
pub use rules::{Alignment, Broadcast, Rules};

use crate::error::{Error, Result};

/// `f32` values as `f64`, exactly.
///
/// ```
/// assert_eq!(wgpu_attention::reference::widen(&[0.5, -2.0]), [0.5, -2.0]);
/// ```
pub fn widen(values: &[f32]) -> Vec<f64> {
    values.iter().copied().map(f64::from).collect()
}

/// One axis of a shape: what it is called and how long it is.
type Axis = (&'static str, usize);

/// The product of the axes, or `None` where it does not fit in 64 bits. An empty axis makes it 0.
fn count(axes: &[Axis]) -> Option<u64> {
    if axes.iter().any(|&(_, length)| length == 0) {
        return Some(0);
    }
    axes.iter().try_fold(1_u64, |product, &(_, length)| {
        product.checked_mul(u64::try_from(length).ok()?)
    })
}

/// `(batch 2, tokens 3) = 6 elements`.
fn describe(axes: &[Axis]) -> String {
    let axis_list: Vec<String> = axes.iter().map(|(name, n)| format!("{name} {n}")).collect();
    let elements = count(axes).map_or("more than 2^64".into(), |n| n.to_string());
    format!("({}) = {elements} elements", axis_list.join(", "))
}

/// An error unless `length` is the product of the axes.
fn check_length(argument: &str, axes: &[Axis], length: usize) -> Result<()> {
    if count(axes) == u64::try_from(length).ok() {
        Ok(())
    } else {
        Err(Error::shape(
            argument,
            describe(axes),
            format_args!("{length} elements"),
        ))
    }
}

/// A result of these axes, filled with zeros; an error where it cannot be allocated.
fn zeros(result: &str, axes: &[Axis]) -> Result<Vec<f64>> {
    let too_large = || {
        Error::shape(
            result,
            "a result that fits in this machine's memory",
            describe(axes),
        )
    };
    let length = count(axes)
        .and_then(|n| usize::try_from(n).ok())
        .ok_or_else(too_large)?;
    let mut values = Vec::new();
    values.try_reserve_exact(length).map_err(|_| too_large())?;
    values.resize(length, 0.0);
    Ok(values)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn an_empty_axis_counts_before_an_overflow() {
        assert_eq!(count(&[]), Some(1));
        assert_eq!(count(&[("a", 2), ("b", 3)]), Some(6));
        assert_eq!(
            count(&[("a", usize::MAX), ("b", usize::MAX), ("c", 0)]),
            Some(0)
        );
        assert_eq!(count(&[("a", usize::MAX), ("b", usize::MAX)]), None);
    }

    #[test]
    fn a_length_that_differs_is_named_with_its_shape() {
        let error = check_length("x", &[("rows", 2), ("d_in", 3)], 5).unwrap_err();
        assert_eq!(
            error.to_string(),
            "x: expected (rows 2, d_in 3) = 6 elements, got 5 elements"
        );
    }

    #[test]
    fn a_result_too_large_to_allocate_is_an_error() {
        for length in [usize::MAX / 8, usize::MAX] {
            assert!(matches!(
                zeros("y", &[("rows", length), ("d_out", 1)]),
                Err(Error::Shape { .. })
            ));
        }
        assert!(zeros("y", &[("rows", usize::MAX), ("d_out", 2)]).is_err());
    }
}

//! The projection of rows by a weight matrix, `y = x · Wᵀ + b`.

use super::{check_length, zeros};
use crate::error::Result;

/// `y = x · Wᵀ + b`, that is `y[r][o] = sum_i x[r][i] * weight[o][i] + bias[o]`.
///
/// - `x`: `(rows, d_in)`
/// - `weight`: `(d_out, d_in)`, as a linear layer of torch keeps it: one row for each output
/// - `bias`: `(d_out)`
///
/// Returns y, `(rows, d_out)`. With `d_in = 0` every row of it is the bias.
///
/// # Errors
///
/// [`Error::Shape`](crate::error::Error::Shape) where a length is not what `rows`, `d_in` and `d_out` call
/// for, or where the result cannot be allocated.
///
/// ```
/// use wgpu_attention::reference::linear;
///
/// let weight = [1.0, 0.0, /* second output */ 2.0, -1.0];
/// let y = linear(&[3.0, 4.0], 1, 2, &weight, Some(&[0.5, 0.0]), 2)?;
/// assert_eq!(y, [3.5, 2.0]);
/// # Ok::<(), wgpu_attention::Error>(())
/// ```
pub fn linear(
    x: &[f64],
    rows: usize,
    d_in: usize,
    weight: &[f64],
    bias: Option<&[f64]>,
    d_out: usize,
) -> Result<Vec<f64>> {
    check_length("x", &[("rows", rows), ("d_in", d_in)], x.len())?;
    check_length("weight", &[("d_out", d_out), ("d_in", d_in)], weight.len())?;
    if let Some(bias) = bias {
        check_length("bias", &[("d_out", d_out)], bias.len())?;
    }

    let mut y = zeros("y", &[("rows", rows), ("d_out", d_out)])?;
    if y.is_empty() {
        return Ok(y);
    }
    for (row, y_row) in y.chunks_exact_mut(d_out).enumerate() {
        let x_row = &x[row * d_in..(row + 1) * d_in];
        for (output, value) in y_row.iter_mut().enumerate() {
            let weight_row = &weight[output * d_in..(output + 1) * d_in];
            let mut sum = 0.0;
            for (a, b) in x_row.iter().zip(weight_row) {
                sum += a * b;
            }
            *value = sum + bias.map_or(0.0, |bias| bias[output]);
        }
    }
    Ok(y)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::error::Error;

    #[test]
    fn weight_rows_are_outputs() {
        let x = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0];
        let weight = [1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 0.0, -1.0, 2.0];
        let without = linear(&x, 2, 3, &weight, None, 4).unwrap();
        assert_eq!(without, [1.0, 3.0, 6.0, 4.0, 4.0, 6.0, 15.0, 7.0]);
        let with = linear(&x, 2, 3, &weight, Some(&[10.0, 20.0, 30.0, 40.0]), 4).unwrap();
        assert_eq!(with, [11.0, 23.0, 36.0, 44.0, 14.0, 26.0, 45.0, 47.0]);
    }

    #[test]
    fn empty_axes_give_empty_results_or_the_bias() {
        assert!(linear(&[], 0, 3, &[0.0; 6], None, 2).unwrap().is_empty());
        assert!(linear(&[0.0; 6], 2, 3, &[], None, 0).unwrap().is_empty());
        assert!(linear(&[], usize::MAX, 0, &[], None, 0).unwrap().is_empty());
        let bias = linear(&[], 2, 0, &[], Some(&[1.0, 2.0]), 2).unwrap();
        assert_eq!(bias, [1.0, 2.0, 1.0, 2.0]);
        assert_eq!(linear(&[], 1, 0, &[], None, 2).unwrap(), [0.0, 0.0]);
    }

    #[test]
    fn each_wrong_length_is_named() {
        let named = |result: Result<Vec<f64>>| match result {
            Err(Error::Shape { argument, .. }) => argument,
            other => format!("{other:?}"),
        };
        assert_eq!(named(linear(&[0.0; 5], 2, 3, &[0.0; 6], None, 2)), "x");
        assert_eq!(named(linear(&[0.0; 6], 2, 3, &[0.0; 7], None, 2)), "weight");
        assert_eq!(
            named(linear(&[0.0; 6], 2, 3, &[0.0; 6], Some(&[0.0]), 2)),
            "bias"
        );
        assert_eq!(named(linear(&[], usize::MAX, 2, &[], None, 0)), "x");
        assert_eq!(named(linear(&[], usize::MAX, 0, &[], None, 2)), "y");
    }
}

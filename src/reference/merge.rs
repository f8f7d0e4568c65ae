//! Attention over all keys from attention over parts of them.

use super::{check_length, zeros};
use crate::error::Result;

/// What [`merge`] puts together. Axes: batch B, queries Tq, heads H, value dimension Dv.
#[derive(Debug, Clone, Copy, Default)]
pub struct MergeInputs<'a> {
    /// B.
    pub batch: usize,
    /// Tq.
    pub q_len: usize,
    /// H.
    pub heads: usize,
    /// Dv.
    pub value_dim: usize,
    /// One for each part of the keys, in any order. None at all is as no keys.
    pub parts: &'a [Partial<'a>],
}

/// Attention over a part of the keys.
#[derive(Debug, Clone, Copy)]
pub struct Partial<'a> {
    /// `(B, Tq, H, Dv)`.
    pub out: &'a [f64],
    /// `(B, H, Tq)`.
    pub lse: &'a [f64],
}

/// `lse = ln sum_p exp(lse_p)`, `out = sum_p exp(lse_p - lse) out_p`: exactly what attention over all the
/// keys gives, if each key was seen in one part only (and so was the sink, if there is one).
///
/// Returns out `(B, Tq, H, Dv)` and lse `(B, H, Tq)`. A row of a part with `lse` -inf adds nothing, whatever
/// its `out` holds; a row for which that is so in all parts gives out 0 and lse -inf. A NaN or +inf in `lse`
/// makes its row NaN.
///
/// # Errors
///
/// [`Error::Shape`](crate::error::Error::Shape) where a length is not what the shapes call for or a result
/// cannot be allocated.
///
/// ```
/// use wgpu_attention::reference::{MergeInputs, Partial, merge};
///
/// // Three keys of score 0 whose mean is 2, and one key of score 0 that holds 6.
/// let (out, lse) = merge(&MergeInputs {
///     batch: 1, q_len: 1, heads: 1, value_dim: 1,
///     parts: &[
///         Partial { out: &[2.0], lse: &[3.0_f64.ln()] },
///         Partial { out: &[6.0], lse: &[0.0] },
///     ],
/// })?;
/// assert!((out[0] - 3.0).abs() < 1e-14 && (lse[0] - 4.0_f64.ln()).abs() < 1e-15);
/// # Ok::<(), wgpu_attention::Error>(())
/// ```
pub fn merge(inputs: &MergeInputs) -> Result<(Vec<f64>, Vec<f64>)> {
    let MergeInputs {
        batch,
        q_len,
        heads,
        value_dim,
        parts,
    } = *inputs;
    let (b, q, h) = (("batch", batch), ("q_len", q_len), ("heads", heads));
    let (out_axes, lse_axes) = ([b, q, h, ("value_dim", value_dim)], [b, h, q]);
    for part in parts {
        check_length("out", &out_axes, part.out.len())?;
        check_length("lse", &lse_axes, part.lse.len())?;
    }

    let mut out = zeros("out", &out_axes)?;
    let mut lse = zeros("lse", &lse_axes)?;
    for (index, lse) in lse.iter_mut().enumerate() {
        let (batch, head, query) = (
            index / (heads * q_len),
            index / q_len % heads,
            index % q_len,
        );
        let start = ((batch * q_len + query) * heads + head) * value_dim;
        let row = start..start + value_dim;

        let mut maximum = f64::NEG_INFINITY;
        let mut sum = 0.0;
        let seen = || {
            let some = |part: &&Partial| part.lse[index] != f64::NEG_INFINITY;
            parts.iter().filter(some)
        };
        for part in seen() {
            maximum = maximum.max(part.lse[index]);
        }
        for part in seen() {
            sum += (part.lse[index] - maximum).exp();
        }
        for part in seen() {
            let weight = (part.lse[index] - maximum).exp() / sum;
            for (o, v) in out[row.clone()].iter_mut().zip(&part.out[row.clone()]) {
                *o += weight * v;
            }
        }
        // Of no part: -inf + ln 0.
        *lse = maximum + f64::ln(sum);
    }
    Ok((out, lse))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::error::Error;

    const NONE: f64 = f64::NEG_INFINITY;

    #[test]
    fn each_row_weighs_its_parts_by_their_sums() {
        // Two heads of one query: (B, Tq, H, Dv) and (B, H, Tq) by (1, 2, 2, 1), so that the orders differ.
        let ln = f64::ln;
        let (out, lse) = merge(&MergeInputs {
            batch: 1,
            q_len: 2,
            heads: 2,
            value_dim: 1,
            parts: &[
                Partial {
                    // Query 0: heads 0, 1; query 1: heads 0, 1.
                    out: &[4.0, 8.0, f64::NAN, f64::NAN],
                    // Head 0: queries 0, 1; head 1: queries 0, 1.
                    lse: &[ln(3.0), NONE, 1000.0, NONE],
                },
                Partial {
                    out: &[8.0, 80.0, 7.0, f64::INFINITY],
                    lse: &[ln(1.0), -5.0, -1000.0, NONE],
                },
            ],
        })
        .unwrap();
        for (got, expected) in out.iter().zip([5.0, 8.0, 7.0, 0.0]) {
            assert!((got - expected).abs() < 1e-14, "{out:?}");
        }
        assert!((lse[0] - ln(4.0)).abs() < 1e-15);
        assert_eq!(lse[1..], [-5.0, 1000.0, NONE]);
    }

    #[test]
    fn no_parts_and_empty_axes_work() {
        let one = MergeInputs {
            batch: 1,
            q_len: 1,
            heads: 1,
            value_dim: 2,
            parts: &[],
        };
        assert_eq!(merge(&one).unwrap(), (vec![0.0; 2], vec![NONE]));
        let nothing = [Partial { out: &[], lse: &[] }];
        let empty = MergeInputs {
            batch: 0,
            q_len: usize::MAX,
            heads: usize::MAX,
            value_dim: 0,
            parts: &nothing,
        };
        assert_eq!(merge(&empty).unwrap(), (vec![], vec![]));
    }

    #[test]
    fn a_nan_or_infinite_sum_makes_its_row_nan() {
        for lse in [f64::NAN, f64::INFINITY] {
            let (good, bad) = ([1.0, 1.0], [1.0, lse]);
            let part = |lse| Partial {
                out: &[2.0, 2.0],
                lse,
            };
            let (out, lse) = merge(&MergeInputs {
                batch: 1,
                q_len: 2,
                heads: 1,
                value_dim: 1,
                parts: &[part(&good), part(&bad)],
            })
            .unwrap();
            assert!(out[0] == 2.0 && out[1].is_nan() && lse[1].is_nan());
        }
    }

    #[test]
    fn each_wrong_length_is_named() {
        let named = |parts: &[Partial]| {
            let inputs = MergeInputs {
                batch: 1,
                q_len: 2,
                heads: 1,
                value_dim: 2,
                parts,
            };
            match merge(&inputs) {
                Err(Error::Shape { argument, .. }) => argument,
                other => format!("{other:?}"),
            }
        };
        let (out, lse) = (&[0.0; 4][..], &[0.0; 2][..]);
        assert_eq!(named(&[Partial { out: lse, lse }]), "out");
        assert_eq!(named(&[Partial { out, lse: out }]), "lse");
        let huge = MergeInputs {
            batch: usize::MAX,
            q_len: 2,
            heads: 1,
            value_dim: 1,
            parts: &[],
        };
        assert!(matches!(merge(&huge), Err(Error::Shape { .. })));
    }
}

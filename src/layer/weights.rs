//! Every form in which the weights of a layer come in, and the one form it computes with.
//!
//! The layer keeps one fused matrix `(3 * d_out, d_in)`: the rows are q, then k, then v, `d_out` each, and
//! head h owns rows `h * D .. (h + 1) * D` of each block. Every other form is copied into that order once,
//! when the layer is made.

use crate::tensor::shape_text;
use crate::{Error, Result};

/// How a weight matrix lies in memory. Both are row-major.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MatrixLayout {
    /// `(out, in)`, as PyTorch's `nn.Linear` keeps it: `y = x Wᵀ + b`.
    OutIn,
    /// `(in, out)`, as GPT-2's `Conv1D` keeps it: `y = x W + b`.
    InOut,
}

/// A matrix and its bias, on the host.
#[derive(Clone, Copy, Debug)]
pub struct Projection<'a> {
    /// The matrix, row-major.
    pub weight: &'a [f32],
    /// Which way round it is.
    pub layout: MatrixLayout,
    /// One value for each output channel.
    pub bias: Option<&'a [f32]>,
}

impl<'a> Projection<'a> {
    /// `(out, in)` without a bias, as `nn.Linear(…, bias=False)` keeps it.
    pub fn new(weight: &'a [f32]) -> Self {
        Projection {
            weight,
            layout: MatrixLayout::OutIn,
            bias: None,
        }
    }

    /// `(in, out)` without a bias, as GPT-2's `Conv1D` keeps it.
    pub fn conv1d(weight: &'a [f32]) -> Self {
        Projection {
            layout: MatrixLayout::InOut,
            ..Projection::new(weight)
        }
    }

    /// With a bias.
    pub fn with_bias(self, bias: &'a [f32]) -> Self {
        Projection {
            bias: Some(bias),
            ..self
        }
    }
}

/// The three matrices of one head: each from `d_in` to `head_dim` channels.
#[derive(Clone, Copy, Debug)]
pub struct HeadProjections<'a> {
    /// Queries.
    pub q: Projection<'a>,
    /// Keys.
    pub k: Projection<'a>,
    /// Values.
    pub v: Projection<'a>,
}

/// The weights that make q, k and v.
#[derive(Clone, Copy, Debug)]
pub enum QkvWeights<'a> {
    /// One matrix from `d_in` to `3 * d_out` channels, q, k and v one after another: `nn.Linear`'s
    /// `(3 * d_out, d_in)`, or GPT-2's `c_attn` `(d_in, 3 * d_out)`.
    Fused(Projection<'a>),
    /// Three matrices from `d_in` to `d_out` channels.
    Separate {
        /// Queries.
        q: Projection<'a>,
        /// Keys.
        k: Projection<'a>,
        /// Values.
        v: Projection<'a>,
    },
    /// A list of heads, each with its own three matrices; side by side they are the fused form.
    Heads(&'a [HeadProjections<'a>]),
}

/// All weights of a layer, on the host, as they come.
#[derive(Clone, Copy, Debug)]
pub struct LayerWeights<'a> {
    /// Those of q, k and v.
    pub qkv: QkvWeights<'a>,
    /// The output projection from `d_out` to `d_out` channels; `None` leaves it out.
    pub output: Option<Projection<'a>>,
}

/// A matrix `(out, in)` and its bias, as the layer uploads it.
pub(crate) struct Dense {
    pub(crate) weight: Vec<f32>,
    pub(crate) bias: Option<Vec<f32>>,
}

/// One of a head's three matrices.
type Pick = for<'a> fn(&'a HeadProjections<'a>) -> Projection<'a>;

impl LayerWeights<'_> {
    /// The fused `(3 * d_out, d_in)` matrix and `(3 * d_out)` bias.
    pub(crate) fn fuse_qkv(&self, d_in: usize, d_out: usize, heads: usize) -> Result<Dense> {
        let head_dim = d_out / heads;
        let parts: Vec<(String, Projection, usize)> = match self.qkv {
            QkvWeights::Fused(fused) => vec![("qkv".to_string(), fused, 3 * d_out)],
            QkvWeights::Separate { q, k, v } => [("q", q), ("k", k), ("v", v)]
                .into_iter()
                .map(|(name, projection)| (name.to_string(), projection, d_out))
                .collect(),
            QkvWeights::Heads(list) => {
                if list.len() != heads {
                    return Err(Error::shape(
                        "heads of the weights",
                        format!("{heads} (heads of the layer)"),
                        list.len(),
                    ));
                }
                // All q, then all k, then all v, each head after head.
                let pick: [(&str, Pick); 3] = [("q", |h| h.q), ("k", |h| h.k), ("v", |h| h.v)];
                let mut parts = Vec::with_capacity(3 * heads);
                for (name, pick) in pick {
                    for (number, head) in list.iter().enumerate() {
                        parts.push((format!("head {number} {name}"), pick(head), head_dim));
                    }
                }
                parts
            }
        };
        // A part without a bias beside one with a bias adds 0.
        let any_bias = parts
            .iter()
            .any(|(_, projection, _)| projection.bias.is_some());
        let mut fused = Dense {
            // Sizes are held against the slices part by part: nothing is reserved for what may not be there.
            weight: Vec::new(),
            bias: any_bias.then(Vec::new),
        };
        for (name, projection, out) in parts {
            let dense = dense(&name, projection, d_in, out)?;
            fused.weight.extend(dense.weight);
            if let Some(bias) = &mut fused.bias {
                bias.extend(dense.bias.unwrap_or_else(|| vec![0.0; out]));
            }
        }
        Ok(fused)
    }

    /// The output projection `(d_out, d_out)`.
    pub(crate) fn dense_output(&self, d_out: usize) -> Result<Option<Dense>> {
        self.output
            .map(|output| dense("output", output, d_out, d_out))
            .transpose()
    }
}

/// Checks a projection's sizes and brings it into `(out, in)` order.
fn dense(name: &str, projection: Projection, d_in: usize, out: usize) -> Result<Dense> {
    let shape = match projection.layout {
        MatrixLayout::OutIn => [out, d_in],
        MatrixLayout::InOut => [d_in, out],
    };
    // In u128: the sizes are a caller's.
    if projection.weight.len() as u128 != out as u128 * d_in as u128 {
        return Err(Error::shape(
            format!("{name} weight"),
            format!(
                "{} = {} values",
                shape_text(&shape),
                out as u128 * d_in as u128
            ),
            format!("{} values", projection.weight.len()),
        ));
    }
    if let Some(bias) = projection.bias
        && bias.len() != out
    {
        return Err(Error::shape(
            format!("{name} bias"),
            format!("{out} values"),
            format!("{} values", bias.len()),
        ));
    }
    let weight = match projection.layout {
        MatrixLayout::OutIn => projection.weight.to_vec(),
        MatrixLayout::InOut => {
            let mut turned = Vec::with_capacity(projection.weight.len());
            for column in 0..out {
                turned.extend((0..d_in).map(|row| projection.weight[row * out + column]));
            }
            turned
        }
    };
    Ok(Dense {
        weight,
        bias: projection.bias.map(<[f32]>::to_vec),
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// d_in 2, d_out 4, 2 heads: q rows 0..4, k rows 4..8, v rows 8..12; row r is [10 r, 10 r + 1].
    fn fused() -> (Vec<f32>, Vec<f32>) {
        let weight = (0..12).flat_map(|row| [10.0 * row as f32, 10.0 * row as f32 + 1.0]);
        (weight.collect(), (0..12).map(|row| row as f32).collect())
    }

    fn turned(rows: &[f32], out: usize) -> Vec<f32> {
        let d_in = rows.len() / out;
        (0..d_in)
            .flat_map(|i| (0..out).map(move |o| rows[o * d_in + i]))
            .collect()
    }

    fn check(qkv: QkvWeights, bias: bool) {
        let got = LayerWeights { qkv, output: None }
            .fuse_qkv(2, 4, 2)
            .unwrap();
        let (weight, biases) = fused();
        assert_eq!(got.weight, weight, "{qkv:?}");
        assert_eq!(got.bias, bias.then_some(biases), "{qkv:?}");
    }

    #[test]
    fn every_form_gives_the_fused_form() {
        let (w, b) = fused();
        let conv = turned(&w, 12);
        check(QkvWeights::Fused(Projection::new(&w)), false);
        check(QkvWeights::Fused(Projection::new(&w).with_bias(&b)), true);
        check(
            QkvWeights::Fused(Projection::conv1d(&conv).with_bias(&b)),
            true,
        );
        let third =
            |n: usize| Projection::new(&w[8 * n..8 * (n + 1)]).with_bias(&b[4 * n..4 * (n + 1)]);
        check(
            QkvWeights::Separate {
                q: third(0),
                k: third(1),
                v: third(2),
            },
            true,
        );
        let part = |n: usize, h: usize| {
            let row = 4 * n + 2 * h;
            Projection::new(&w[2 * row..2 * (row + 2)]).with_bias(&b[row..row + 2])
        };
        let heads = [0, 1].map(|h| HeadProjections {
            q: part(0, h),
            k: part(1, h),
            v: part(2, h),
        });
        check(QkvWeights::Heads(&heads), true);
        let columns: Vec<Vec<f32>> = (0..6)
            .map(|at| turned(&w[4 * at..4 * (at + 1)], 2))
            .collect();
        let conv_heads = [0, 1].map(|h| HeadProjections {
            q: Projection::conv1d(&columns[h]),
            k: Projection::conv1d(&columns[2 + h]),
            v: Projection::conv1d(&columns[4 + h]),
        });
        check(QkvWeights::Heads(&conv_heads), false);
    }

    #[test]
    fn a_bias_beside_none_adds_zero() {
        let (w, b) = fused();
        let qkv = QkvWeights::Separate {
            q: Projection::new(&w[..8]),
            k: Projection::new(&w[8..16]).with_bias(&b[4..8]),
            v: Projection::new(&w[16..]),
        };
        let got = LayerWeights { qkv, output: None }
            .fuse_qkv(2, 4, 2)
            .unwrap();
        assert_eq!(
            got.bias.unwrap(),
            [0.0, 0.0, 0.0, 0.0, 4.0, 5.0, 6.0, 7.0, 0.0, 0.0, 0.0, 0.0]
        );
    }

    #[test]
    fn wrong_sizes_are_named() {
        let (w, b) = fused();
        let error = |qkv| {
            let weights = LayerWeights { qkv, output: None };
            weights.fuse_qkv(2, 4, 2).err().unwrap().to_string()
        };
        assert_eq!(
            error(QkvWeights::Fused(Projection::new(&w[1..]))),
            "qkv weight: expected (12, 2) = 24 values, got 23 values"
        );
        assert_eq!(
            error(QkvWeights::Fused(Projection::conv1d(&w).with_bias(&b[1..]))),
            "qkv bias: expected 12 values, got 11 values"
        );
        assert_eq!(
            error(QkvWeights::Heads(&[])),
            "heads of the weights: expected 2 (heads of the layer), got 0"
        );
    }
}

//! Every form in which the weights of a layer come in, and the one form it computes with.
//!
//! The layer keeps one fused matrix `(H * D + Hkv * D + Hkv * Dv, d_in)`: the rows are q, then k, then v, and
//! head h owns rows `h * D .. (h + 1) * D` of its block. Every other form is copied into that order once,
//! when the layer is made. Where keys and values are made of other channels than queries, it keeps two: the rows
//! of q, and those of k and v.

use super::LayerConfig;
use super::config::Widths;
use crate::element::ElementType;
use crate::gpu::Gpu;
use crate::operands::expect_contiguous_last;
use crate::tensor::{Tensor, TensorView, shape_text};
use crate::{Error, Result};
use std::ops::Range;

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

/// The three matrices of one head, as [`QkvWeights::Separate`] has them of all heads.
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
    /// One matrix from `d_in` to `H * D + Hkv * D + Hkv * Dv` channels, q, k and v one after another: `nn.Linear`'s
    /// `(3 * d_out, d_in)`, or GPT-2's `c_attn` `(d_in, 3 * d_out)`. Only where `d_source` is `d_in`.
    Fused(Projection<'a>),
    /// Three matrices.
    Separate {
        /// Queries: from `d_in` to `H * D` channels.
        q: Projection<'a>,
        /// Keys: from `d_source` to `Hkv * D` channels.
        k: Projection<'a>,
        /// Values: from `d_source` to `Hkv * Dv` channels.
        v: Projection<'a>,
    },
    /// A list of heads, each with its own three matrices; side by side they are the fused form. Only where there are
    /// as many heads of keys and values as of queries.
    Heads(&'a [HeadProjections<'a>]),
}

/// All weights of a layer, on the host, as they come.
#[derive(Clone, Copy, Debug)]
pub struct LayerWeights<'a> {
    /// Those of q, k and v.
    pub qkv: QkvWeights<'a>,
    /// The output projection from `H * Dv` to `d_out` channels; `None` leaves it out.
    pub output: Option<Projection<'a>>,
}

/// A matrix and its bias, on the GPU. Nothing is copied.
#[derive(Clone, Debug)]
pub struct ProjectionTensors {
    /// `(out, in)`, f32, any strides: a `(in, out)` matrix is passed as its permuted view.
    pub weight: TensorView,
    /// `(out)`, f32, contiguous.
    pub bias: Option<TensorView>,
}

impl ProjectionTensors {
    /// Without a bias.
    pub fn new(weight: TensorView) -> Self {
        ProjectionTensors { weight, bias: None }
    }

    /// With a bias.
    #[must_use]
    pub fn with_bias(self, bias: TensorView) -> Self {
        ProjectionTensors {
            bias: Some(bias),
            ..self
        }
    }

    /// Some of its output channels.
    pub(super) fn rows(&self, rows: Range<usize>) -> Result<Self> {
        let bias = self.bias.as_ref();
        Ok(ProjectionTensors {
            weight: self.weight.slice(0, rows.clone())?,
            bias: bias.map(|bias| bias.slice(0, rows)).transpose()?,
        })
    }

    /// Holds it against its sizes.
    pub(super) fn check(&self, name: &str, gpu: &Gpu, out: usize, d_in: usize) -> Result<()> {
        let weight = format!("{name} weight");
        self.weight.expect_shape(&weight, &[out, d_in])?;
        self.weight.expect_type(&weight, ElementType::F32)?;
        self.weight.expect_gpu(&weight, gpu)?;
        let Some(values) = &self.bias else {
            return Ok(());
        };
        let bias = format!("{name} bias");
        values.expect_shape(&bias, &[out])?;
        expect_contiguous_last(&bias, values)?;
        values.expect_type(&bias, ElementType::F32)?;
        values.expect_gpu(&bias, gpu)
    }
}

/// The weights that make q, k and v, on the GPU.
#[derive(Clone, Debug)]
pub enum QkvTensors {
    /// `(H * D + Hkv * D + Hkv * Dv, d_in)`: the rows of q, then k, then v. Only where `d_source` is `d_in`.
    /// Self-attention is one dispatch then.
    Fused(ProjectionTensors),
    /// Queries apart from keys and values: a dispatch each.
    Split {
        /// `(H * D, d_in)`.
        q: ProjectionTensors,
        /// `(Hkv * D + Hkv * Dv, d_source)`: the rows of k, then v.
        kv: ProjectionTensors,
    },
}

/// The weights of q, k and v in every division that a call may want. They are views of the same one or two matrices.
#[derive(Clone)]
pub(super) struct QkvViews {
    /// Absent where q is kept apart.
    pub(super) qkv: Option<ProjectionTensors>,
    pub(super) q: ProjectionTensors,
    pub(super) kv: ProjectionTensors,
    pub(super) k: ProjectionTensors,
    pub(super) v: ProjectionTensors,
}

impl QkvTensors {
    /// Holds them against the configuration and divides them.
    pub(super) fn views(
        self,
        gpu: &Gpu,
        config: &LayerConfig,
        widths: &Widths,
    ) -> Result<QkvViews> {
        let LayerConfig { d_in, d_source, .. } = *config;
        let (qkv, q, kv) = match self {
            QkvTensors::Fused(qkv) => {
                config.expect_one_source()?;
                qkv.check("qkv", gpu, widths.qkv, d_in)?;
                let (q, kv) = (qkv.rows(0..widths.q)?, qkv.rows(widths.q..widths.qkv)?);
                (Some(qkv), q, kv)
            }
            QkvTensors::Split { q, kv } => {
                q.check("q", gpu, widths.q, d_in)?;
                kv.check("kv", gpu, widths.kv, d_source)?;
                (None, q, kv)
            }
        };
        Ok(QkvViews {
            k: kv.rows(0..widths.k)?,
            v: kv.rows(widths.k..widths.kv)?,
            qkv,
            q,
            kv,
        })
    }
}

impl LayerConfig {
    /// One matrix cannot make q, k and v of different numbers of channels.
    fn expect_one_source(&self) -> Result<()> {
        if self.d_source == self.d_in {
            return Ok(());
        }
        Err(Error::parameter(
            "d_source",
            self.d_source,
            format!(
                "must be d_in = {} where the weights of q, k and v are fused; give those of q apart",
                self.d_in
            ),
        ))
    }
}

/// A matrix `(out, in)` and its bias, as the layer uploads it.
pub(crate) struct Dense {
    pub(crate) weight: Vec<f32>,
    pub(crate) bias: Option<Vec<f32>>,
}

impl Dense {
    pub(super) fn upload(&self, gpu: &Gpu, out: usize, d_in: usize) -> Result<ProjectionTensors> {
        let bias = self.bias.as_ref();
        let bias = bias.map(|bias| Tensor::from_slice(gpu, &[out], bias));
        Ok(ProjectionTensors {
            weight: Tensor::from_slice(gpu, &[out, d_in], &self.weight)?.view(),
            bias: bias.transpose()?.map(|bias| bias.view()),
        })
    }
}

/// A projection with its name, its input and its output channels.
type Part<'a> = (String, Projection<'a>, usize, usize);

/// One of a head's three matrices.
type Pick = for<'a> fn(&'a HeadProjections<'a>) -> Projection<'a>;

impl LayerWeights<'_> {
    /// The weights of q, k and v in the form that the layer keeps: q | k | v in one, or q and k | v.
    pub(crate) fn dense_qkv(
        &self,
        config: &LayerConfig,
        widths: &Widths,
    ) -> Result<(Dense, Option<Dense>)> {
        let LayerConfig {
            d_in,
            d_source,
            heads,
            kv_heads,
            ..
        } = *config;
        // The parts of q, and those of k and v.
        let (mut q, kv): (Vec<Part>, Vec<Part>) = match self.qkv {
            QkvWeights::Fused(fused) => {
                config.expect_one_source()?;
                (vec![("qkv".into(), fused, d_in, widths.qkv)], Vec::new())
            }
            QkvWeights::Separate { q, k, v } => (
                vec![("q".into(), q, d_in, widths.q)],
                vec![
                    ("k".into(), k, d_source, widths.k),
                    ("v".into(), v, d_source, widths.kv - widths.k),
                ],
            ),
            QkvWeights::Heads(list) => {
                if list.len() != heads {
                    return Err(Error::shape(
                        "heads of the weights",
                        format!("{heads} (heads of the layer)"),
                        list.len(),
                    ));
                }
                if kv_heads != heads {
                    return Err(Error::parameter(
                        "kv_heads",
                        kv_heads,
                        format!(
                            "must be heads = {heads} where the weights are a list of heads; give them fused or separate"
                        ),
                    ));
                }
                // All q, then all k, then all v, each head after head.
                let block = |name: &str, pick: Pick, d_in, out| -> Vec<Part> {
                    let heads = list.iter().enumerate();
                    heads
                        .map(|(number, head)| {
                            (format!("head {number} {name}"), pick(head), d_in, out)
                        })
                        .collect()
                };
                let (head_dim, value_dim) = (widths.head_dim, widths.value_dim);
                let mut kv = block("k", |h| h.k, d_source, head_dim);
                kv.extend(block("v", |h| h.v, d_source, value_dim));
                (block("q", |h| h.q, d_in, head_dim), kv)
            }
        };
        if d_source != d_in {
            return Ok((fuse(q)?, Some(fuse(kv)?)));
        }
        q.extend(kv);
        Ok((fuse(q)?, None))
    }

    /// The output projection `(d_out, H * Dv)`.
    pub(crate) fn dense_output(&self, d_out: usize, context: usize) -> Result<Option<Dense>> {
        self.output
            .map(|output| dense("output", output, context, d_out))
            .transpose()
    }
}

/// One matrix of several with the same input, their outputs one after another.
fn fuse(parts: Vec<Part>) -> Result<Dense> {
    // A part without a bias beside one with a bias adds 0.
    let any_bias = parts.iter().any(|(_, part, ..)| part.bias.is_some());
    let mut fused = Dense {
        // Sizes are held against the slices part by part: nothing is reserved for what may not be there.
        weight: Vec::new(),
        bias: any_bias.then(Vec::new),
    };
    for (name, projection, d_in, out) in parts {
        let dense = dense(&name, projection, d_in, out)?;
        fused.weight.extend(dense.weight);
        if let Some(bias) = &mut fused.bias {
            bias.extend(dense.bias.unwrap_or_else(|| vec![0.0; out]));
        }
    }
    Ok(fused)
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

    fn fuse_4_of_2(qkv: QkvWeights) -> Result<Dense> {
        let config = LayerConfig::new(2, 4, 2);
        let weights = LayerWeights { qkv, output: None };
        let (fused, split) = weights.dense_qkv(&config, &config.widths()?)?;
        assert!(split.is_none());
        Ok(fused)
    }

    fn turned(rows: &[f32], out: usize) -> Vec<f32> {
        let d_in = rows.len() / out;
        (0..d_in)
            .flat_map(|i| (0..out).map(move |o| rows[o * d_in + i]))
            .collect()
    }

    fn check(qkv: QkvWeights, bias: bool) {
        let got = fuse_4_of_2(qkv).unwrap();
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

    /// 2 query heads of 2 channels that share a KV head whose values have 1 channel: 4 + 2 + 1 rows.
    #[test]
    fn parts_of_other_sizes_are_put_together_or_kept_apart() {
        let (w, b) = fused();
        let part = |from: usize, to: usize, d_in: usize| {
            Projection::new(&w[d_in * from..d_in * to]).with_bias(&b[from..to])
        };
        let dense = |d_source: usize| {
            let config = LayerConfig {
                value_dim: Some(1),
                ..LayerConfig::new(2, 4, 2).kv_heads(1).source(d_source)
            };
            let qkv = QkvWeights::Separate {
                q: part(0, 4, 2),
                k: part(4, 6, d_source),
                v: part(6, 7, d_source),
            };
            let weights = LayerWeights { qkv, output: None };
            weights.dense_qkv(&config, &config.widths().unwrap())
        };
        let (fused, apart) = dense(2).unwrap();
        assert!(apart.is_none());
        assert_eq!(
            (&fused.weight[..], fused.bias.as_deref()),
            (&w[..14], Some(&b[..7]))
        );
        let (q, apart) = dense(3).unwrap();
        let kv = apart.unwrap();
        assert_eq!((&q.weight[..], q.bias.as_deref()), (&w[..8], Some(&b[..4])));
        assert_eq!(
            (&kv.weight[..], kv.bias.as_deref()),
            (&w[12..21], Some(&b[4..7]))
        );
    }

    #[test]
    fn a_bias_beside_none_adds_zero() {
        let (w, b) = fused();
        let qkv = QkvWeights::Separate {
            q: Projection::new(&w[..8]),
            k: Projection::new(&w[8..16]).with_bias(&b[4..8]),
            v: Projection::new(&w[16..]),
        };
        let got = fuse_4_of_2(qkv).unwrap();
        assert_eq!(
            got.bias.unwrap(),
            [0.0, 0.0, 0.0, 0.0, 4.0, 5.0, 6.0, 7.0, 0.0, 0.0, 0.0, 0.0]
        );
    }

    #[test]
    fn wrong_sizes_are_named() {
        let (w, b) = fused();
        let error = |qkv| fuse_4_of_2(qkv).err().unwrap().to_string();
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

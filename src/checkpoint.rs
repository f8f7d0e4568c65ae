//! The weights of one attention layer in a safetensors file, by the names that people give them.
//!
//! | names | what they are |
//! | --- | --- |
//! | `c_attn.weight`, `c_attn.bias`, `c_proj.weight`, `c_proj.bias` | GPT-2, under any prefix such as `h.3.attn.`: `(d_in, 3*d_out)` as Conv1D keeps it, or `(3*d_out, d_in)` |
//! | `Wqkv`, `bqkv`, `Wproj`, `bproj` | one fused `(3*d_out, d_in)` matrix |
//! | `Wq`, `Wk`, `Wv` of three axes, `bq`, `bk`, `bv`, `Wproj`, `bproj` | a list of heads: `(H, d_in, D)` each, `(H, D)` biases |
//! | `Wq`, `Wk`, `Wv` of two axes, `bq`, `bk`, `bv`, `Wo`, `bo` (or `Wproj`, `bproj`) | three `(d_out, d_in)` matrices |
//!
//! Biases and the output projection may be missing. Other tensors are left alone. Values of any float type
//! are taken as f32.

use crate::layer::{
    HeadProjections, LayerConfig, LayerWeights, MatrixLayout, Projection, QkvWeights,
};
use crate::tensor::shape_text;
use crate::tensor_file::{FileTensor, TensorFile, format_error};
use crate::{Error, Result};
use std::path::Path;

/// The weights of a layer, read from a file and brought into the fused form.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerCheckpoint {
    /// Channels of x.
    pub d_in: usize,
    /// Channels of y, and of all heads together.
    pub d_out: usize,
    /// Heads, where the file says so itself.
    pub heads: Option<usize>,
    /// `(3 * d_out, d_in)`: q, then k, then v.
    pub qkv: Vec<f32>,
    /// `(3 * d_out)`.
    pub qkv_bias: Option<Vec<f32>>,
    /// `(d_out, d_out)`.
    pub output: Option<Vec<f32>>,
    /// `(d_out)`.
    pub output_bias: Option<Vec<f32>>,
    /// The tensors that were taken.
    pub names: Vec<String>,
}

/// Where the tensors come from: a file, or the inputs of a case.
struct Source<'a> {
    origin: &'a Path,
    get: &'a dyn Fn(&str) -> Result<Option<FileTensor>>,
    taken: Vec<String>,
}

/// The prefixes of the GPT-2 layers in a checkpoint, in the order of their numbers: `h.0.attn.`, `h.1.attn.`, ...
pub fn gpt2_layers(file: &TensorFile) -> Vec<String> {
    let mut prefixes: Vec<String> = file
        .names()
        .filter_map(|name| name.strip_suffix("c_attn.weight"))
        // Cross-attention has a c_attn of another kind.
        .filter(|prefix| prefix.is_empty() || *prefix == "attn." || prefix.ends_with(".attn."))
        .map(str::to_string)
        .collect();
    // Numbers in the order of numbers: h.2 before h.10.
    prefixes.sort_by_key(|prefix| {
        let numbers = prefix
            .split('.')
            .filter_map(|part| part.parse::<u64>().ok());
        (numbers.collect::<Vec<_>>(), prefix.clone())
    });
    prefixes
}

impl LayerCheckpoint {
    /// Reads a layer of a file: the one whose GPT-2 `prefix` is given (see [`gpt2_layers`]), or the one whose
    /// names stand without a prefix.
    ///
    /// # Errors
    ///
    /// [`Error::Format`] naming the tensor that is missing or has the wrong shape, with what was expected and
    /// what was there; those of [`TensorFile::get`].
    pub fn read(file: &TensorFile, prefix: Option<&str>) -> Result<Self> {
        let get = |name: &str| file.get(name);
        let mut source = Source {
            origin: file.path(),
            get: &get,
            taken: Vec::new(),
        };
        match prefix {
            Some(prefix) => source.gpt2(prefix),
            None => source.plain(),
        }
    }

    /// Reads the layer among tensors that are in memory; `origin` is what messages call them.
    ///
    /// # Errors
    ///
    /// As [`read`](Self::read).
    pub fn from_tensors(tensors: &[FileTensor], origin: &Path) -> Result<Self> {
        let get = |name: &str| Ok(tensors.iter().find(|tensor| tensor.name == name).cloned());
        let mut source = Source {
            origin,
            get: &get,
            taken: Vec::new(),
        };
        source.plain()
    }

    /// The weights, as a layer takes them.
    pub fn weights(&self) -> LayerWeights<'_> {
        LayerWeights {
            qkv: QkvWeights::Fused(Projection {
                weight: &self.qkv,
                layout: MatrixLayout::OutIn,
                bias: self.qkv_bias.as_deref(),
            }),
            output: self.output.as_deref().map(|weight| Projection {
                weight,
                layout: MatrixLayout::OutIn,
                bias: self.output_bias.as_deref(),
            }),
        }
    }
}

impl Source<'_> {
    fn wrong(&self, problem: String) -> Error {
        format_error(self.origin, problem)
    }

    /// The tensor of that name, if it is there.
    fn take(&mut self, name: &str) -> Result<Option<FileTensor>> {
        let tensor = (self.get)(name)?;
        if let Some(tensor) = &tensor {
            if !tensor.dtype.is_float() {
                return Err(self.wrong(format!(
                    "tensor {name:?}: expected a float type, got {}",
                    tensor.dtype
                )));
            }
            self.taken.push(name.to_string());
        }
        Ok(tensor)
    }

    /// The tensor of that name, with that many axes.
    fn need(&mut self, name: &str, axes: &str) -> Result<FileTensor> {
        let tensor = self
            .take(name)?
            .ok_or_else(|| self.wrong(format!("tensor {name:?} {axes} is missing")))?;
        self.expect_axes(&tensor, axes)?;
        Ok(tensor)
    }

    fn expect_axes(&self, tensor: &FileTensor, axes: &str) -> Result<()> {
        if tensor.shape.len() == axes.split(',').count() {
            return Ok(());
        }
        Err(self.wrong(format!(
            "tensor {:?}: expected {axes}, got {}",
            tensor.name,
            shape_text(&tensor.shape)
        )))
    }

    /// A tensor whose number of values is right may still be another matrix: its shape is held to the letter.
    fn expect_shape(&self, tensor: Option<&FileTensor>, expected: &[usize]) -> Result<()> {
        match tensor {
            Some(tensor) if tensor.shape != expected => Err(self.wrong(format!(
                "tensor {:?}: expected {}, got {}",
                tensor.name,
                shape_text(expected),
                shape_text(&tensor.shape)
            ))),
            _ => Ok(()),
        }
    }

    /// GPT-2's names under a prefix.
    fn gpt2(&mut self, prefix: &str) -> Result<LayerCheckpoint> {
        let c_attn = self.need(&format!("{prefix}c_attn.weight"), "(d_in, 3*d_out)")?;
        let (rows, columns) = (c_attn.shape[0], c_attn.shape[1]);
        let c_proj = self.take(&format!("{prefix}c_proj.weight"))?;
        let output_bias = self.take(&format!("{prefix}c_proj.bias"))?;
        self.expect_weight_of(c_proj.as_ref(), output_bias.as_ref())?;
        // The output projection is square and says nothing of its order; it is kept as c_attn is. What tells
        // that one's order is which of its axes is three times the output projection's, or, where there is
        // none, three times the other.
        let d_out = match &c_proj {
            Some(c_proj) => {
                self.expect_axes(c_proj, "(d_out, d_out)")?;
                let d_out = c_proj.shape[0];
                self.expect_shape(Some(c_proj), &[d_out, d_out])?;
                d_out
            }
            None => rows.min(columns),
        };
        let layout = match d_out.checked_mul(3) {
            Some(three) if three == columns => MatrixLayout::InOut,
            Some(three) if three == rows => MatrixLayout::OutIn,
            _ => {
                return Err(self.wrong(format!(
                    "tensor {:?}: expected (d_in, 3*d_out) or (3*d_out, d_in) with d_out = {d_out}, got {}",
                    c_attn.name,
                    shape_text(&c_attn.shape)
                )));
            }
        };
        let d_in = match layout {
            MatrixLayout::InOut => rows,
            MatrixLayout::OutIn => columns,
        };
        let bias = self.take(&format!("{prefix}c_attn.bias"))?;
        self.expect_shape(bias.as_ref(), &[3 * d_out])?;
        let weight = c_attn.to_f32();
        let bias = bias.map(|bias| bias.to_f32());
        let qkv = QkvWeights::Fused(Projection {
            weight: &weight,
            layout,
            bias: bias.as_deref(),
        });
        self.fuse((d_in, d_out, None), qkv, layout, (c_proj, output_bias))
    }

    /// The names of case files, without a prefix.
    fn plain(&mut self) -> Result<LayerCheckpoint> {
        if let Some(fused) = self.take("Wqkv")? {
            self.expect_axes(&fused, "(3*d_out, d_in)")?;
            let (rows, d_in) = (fused.shape[0], fused.shape[1]);
            if !rows.is_multiple_of(3) {
                return Err(self.wrong(format!(
                    "tensor \"Wqkv\": expected (3*d_out, d_in), got {}",
                    shape_text(&fused.shape)
                )));
            }
            let bias = self.take("bqkv")?;
            self.expect_shape(bias.as_ref(), &[rows])?;
            let bias = bias.map(|bias| bias.to_f32());
            let weight = fused.to_f32();
            let qkv = QkvWeights::Fused(Projection {
                weight: &weight,
                layout: MatrixLayout::OutIn,
                bias: bias.as_deref(),
            });
            let output = self.output()?;
            return self.fuse((d_in, rows / 3, None), qkv, MatrixLayout::OutIn, output);
        }
        let Some(first) = self.take("Wq")? else {
            return Err(self.wrong(
                "no attention weights: expected tensors named Wqkv, or Wq, Wk and Wv, or GPT-2's c_attn.weight"
                    .into(),
            ));
        };
        match first.shape.len() {
            3 => self.heads(first),
            2 => self.separate(first),
            _ => Err(self.wrong(format!(
                "tensor \"Wq\": expected (d_out, d_in) or (H, d_in, D), got {}",
                shape_text(&first.shape)
            ))),
        }
    }

    /// Three matrices `(d_out, d_in)`.
    fn separate(&mut self, q: FileTensor) -> Result<LayerCheckpoint> {
        let (d_out, d_in) = (q.shape[0], q.shape[1]);
        let k = self.need("Wk", "(d_out, d_in)")?;
        let v = self.need("Wv", "(d_out, d_in)")?;
        self.expect_shape(Some(&k), &q.shape)?;
        self.expect_shape(Some(&v), &q.shape)?;
        let weights = [q, k, v].map(|matrix| matrix.to_f32());
        let mut biases = Vec::new();
        for name in ["bq", "bk", "bv"] {
            let bias = self.take(name)?;
            self.expect_shape(bias.as_ref(), &[d_out])?;
            biases.push(bias.map(|bias| bias.to_f32()));
        }
        let projection = |at: usize| Projection {
            weight: &weights[at],
            layout: MatrixLayout::OutIn,
            bias: biases[at].as_deref(),
        };
        let qkv = QkvWeights::Separate {
            q: projection(0),
            k: projection(1),
            v: projection(2),
        };
        let output = self.output()?;
        self.fuse((d_in, d_out, None), qkv, MatrixLayout::OutIn, output)
    }

    /// Three stacks of matrices `(H, d_in, D)`, with biases `(H, D)`.
    fn heads(&mut self, q: FileTensor) -> Result<LayerCheckpoint> {
        let (heads, d_in, head_dim) = (q.shape[0], q.shape[1], q.shape[2]);
        let stacks = [
            q,
            self.need("Wk", "(H, d_in, D)")?,
            self.need("Wv", "(H, d_in, D)")?,
        ];
        let mut weights = Vec::new();
        let mut biases = Vec::new();
        for (stack, bias_name) in stacks.iter().zip(["bq", "bk", "bv"]) {
            self.expect_shape(Some(stack), &stacks[0].shape)?;
            weights.push(stack.to_f32());
            let bias = self.take(bias_name)?;
            self.expect_shape(bias.as_ref(), &[heads, head_dim])?;
            biases.push(bias.map(|bias| bias.to_f32()));
        }
        let d_out = heads.checked_mul(head_dim).unwrap_or(0);
        if d_out == 0 || d_in == 0 {
            return Err(self.wrong(format!(
                "tensor \"Wq\": expected no axis of size 0, got {}",
                shape_text(&stacks[0].shape)
            )));
        }
        let part = |at: usize, head: usize| {
            let size = d_in * head_dim;
            let bias = biases[at].as_deref();
            Projection {
                weight: &weights[at][head * size..(head + 1) * size],
                layout: MatrixLayout::InOut,
                bias: bias.map(|bias| &bias[head * head_dim..(head + 1) * head_dim]),
            }
        };
        let list: Vec<HeadProjections> = (0..heads)
            .map(|head| HeadProjections {
                q: part(0, head),
                k: part(1, head),
                v: part(2, head),
            })
            .collect();
        let output = self.output()?;
        self.fuse(
            (d_in, d_out, Some(heads)),
            QkvWeights::Heads(&list),
            MatrixLayout::OutIn,
            output,
        )
    }

    /// The output projection and its bias under either of their names.
    fn output(&mut self) -> Result<(Option<FileTensor>, Option<FileTensor>)> {
        for (weight, bias) in [("Wproj", "bproj"), ("Wo", "bo")] {
            let (weight, bias) = (self.take(weight)?, self.take(bias)?);
            self.expect_weight_of(weight.as_ref(), bias.as_ref())?;
            if weight.is_some() {
                return Ok((weight, bias));
            }
        }
        Ok((None, None))
    }

    /// A bias without its weight is half of a layer, such as one file of several.
    fn expect_weight_of(
        &self,
        weight: Option<&FileTensor>,
        bias: Option<&FileTensor>,
    ) -> Result<()> {
        match (weight, bias) {
            (None, Some(bias)) => Err(self.wrong(format!(
                "tensor {:?} is there, but the weight it belongs to is missing",
                bias.name
            ))),
            _ => Ok(()),
        }
    }

    /// Checks every size and brings the weights into the fused form.
    fn fuse(
        &mut self,
        (d_in, d_out, heads): (usize, usize, Option<usize>),
        qkv: QkvWeights<'_>,
        output_layout: MatrixLayout,
        (output, output_bias): (Option<FileTensor>, Option<FileTensor>),
    ) -> Result<LayerCheckpoint> {
        if d_in == 0 || d_out == 0 {
            return Err(self.wrong(format!(
                "the weights have an axis of size 0 (d_in {d_in}, d_out {d_out})"
            )));
        }
        self.expect_shape(output.as_ref(), &[d_out, d_out])?;
        self.expect_shape(output_bias.as_ref(), &[d_out])?;
        let output = output.map(|weight| weight.to_f32());
        let output_bias = output_bias.map(|bias| bias.to_f32());
        let weights = LayerWeights {
            qkv,
            output: output.as_deref().map(|weight| Projection {
                weight,
                layout: output_layout,
                bias: output_bias.as_deref(),
            }),
        };
        // A size that does not fit is this file's fault: say which file.
        let in_file = |error: Error| self.wrong(error.to_string());
        let config = LayerConfig::new(d_in, d_out, heads.unwrap_or(1));
        let widths = config.widths().map_err(in_file)?;
        // Keys and values have the channels of queries: all is one matrix.
        let (fused, _) = weights.dense_qkv(&config, &widths).map_err(in_file)?;
        let output = weights.dense_output(d_out, d_out).map_err(in_file)?;
        let (output, output_bias) = match output {
            Some(dense) => (Some(dense.weight), dense.bias),
            None => (None, None),
        };
        Ok(LayerCheckpoint {
            d_in,
            d_out,
            heads,
            qkv: fused.weight,
            qkv_bias: fused.bias,
            output,
            output_bias,
            names: std::mem::take(&mut self.taken),
        })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::tensor_file::ElementKind;

    fn tensor(name: &str, shape: &[usize]) -> FileTensor {
        let count: usize = shape.iter().product();
        FileTensor {
            name: name.into(),
            shape: shape.to_vec(),
            dtype: ElementKind::F32,
            values: (0..count).map(|value| value as f64).collect(),
        }
    }

    fn read(tensors: &[(&str, &[usize])]) -> Result<LayerCheckpoint> {
        let tensors: Vec<_> = tensors
            .iter()
            .map(|(name, shape)| tensor(name, shape))
            .collect();
        LayerCheckpoint::from_tensors(&tensors, Path::new("test"))
    }

    #[test]
    fn sizes_come_from_the_shapes() {
        let fused = read(&[("Wqkv", &[12, 5]), ("bqkv", &[12])]).unwrap();
        assert_eq!(
            (fused.d_in, fused.d_out, fused.heads, &fused.output),
            (5, 4, None, &None)
        );
        let heads = read(&[
            ("Wq", &[3, 5, 2]),
            ("Wk", &[3, 5, 2]),
            ("Wv", &[3, 5, 2]),
            ("Wproj", &[6, 6]),
        ])
        .unwrap();
        assert_eq!((heads.d_in, heads.d_out, heads.heads), (5, 6, Some(3)));
        // Head 1's first q channel is column 0 of the second (5, 2) block.
        assert_eq!(heads.qkv[2 * 5..3 * 5], [10.0, 12.0, 14.0, 16.0, 18.0]);
    }

    /// A matrix of the right number of values may still be another matrix.
    #[test]
    fn a_shape_that_does_not_fit_is_named() {
        type Tensors<'a> = &'a [(&'a str, &'a [usize])];
        let cases: &[(Tensors, &[&str])] = &[
            (
                &[("Wqkv", &[11, 5])],
                &["\"Wqkv\"", "(3*d_out, d_in)", "(11, 5)"],
            ),
            (&[("Wqkv", &[60])], &["\"Wqkv\"", "(60)"]),
            (
                &[("Wqkv", &[12, 5]), ("bqkv", &[3, 4])],
                &["\"bqkv\"", "(12)", "(3, 4)"],
            ),
            (
                &[("Wqkv", &[12, 5]), ("Wproj", &[2, 8])],
                &["\"Wproj\"", "(4, 4)", "(2, 8)"],
            ),
            (
                &[("Wqkv", &[12, 5]), ("Wproj", &[4, 4]), ("bproj", &[2, 2])],
                &["\"bproj\"", "(4)", "(2, 2)"],
            ),
            (
                &[("Wqkv", &[12, 5]), ("bproj", &[4])],
                &["\"bproj\"", "missing"],
            ),
            (
                &[("Wq", &[4, 6]), ("Wk", &[6, 4]), ("Wv", &[4, 6])],
                &["\"Wk\"", "(4, 6)", "(6, 4)"],
            ),
            (&[("Wq", &[4, 6]), ("Wk", &[4, 6])], &["\"Wv\"", "missing"]),
            (
                &[("Wq", &[2, 3, 4]), ("Wk", &[2, 4, 3]), ("Wv", &[2, 3, 4])],
                &["\"Wk\"", "(2, 3, 4)", "(2, 4, 3)"],
            ),
            (
                &[
                    ("Wq", &[2, 3, 4]),
                    ("Wk", &[2, 3, 4]),
                    ("Wv", &[2, 3, 4]),
                    ("bq", &[8]),
                ],
                &["\"bq\"", "(2, 4)", "(8)"],
            ),
            (&[("Wq", &[2, 3, 4, 5])], &["\"Wq\"", "(2, 3, 4, 5)"]),
            (
                &[("Wq", &[0, 3, 4]), ("Wk", &[0, 3, 4]), ("Wv", &[0, 3, 4])],
                &["size 0"],
            ),
            (&[("something", &[4])], &["no attention weights"]),
        ];
        for (tensors, words) in cases {
            let error = read(tensors).unwrap_err().to_string();
            for word in *words {
                assert!(
                    error.contains(word),
                    "{tensors:?}: expected {word:?} in: {error}"
                );
            }
        }
    }

    fn gpt2(tensors: &[(&str, &[usize])]) -> Result<LayerCheckpoint> {
        let tensors: Vec<_> = tensors
            .iter()
            .map(|(name, shape)| tensor(name, shape))
            .collect();
        let get = |name: &str| Ok(tensors.iter().find(|tensor| tensor.name == name).cloned());
        let mut source = Source {
            origin: Path::new("test"),
            get: &get,
            taken: Vec::new(),
        };
        source.gpt2("h.3.attn.")
    }

    #[test]
    fn gpt2_weights_come_in_either_order() {
        let (attn, proj) = ("h.3.attn.c_attn.weight", "h.3.attn.c_proj.weight");
        let conv = gpt2(&[(attn, &[5, 12]), (proj, &[4, 4])]).unwrap();
        let linear = gpt2(&[(attn, &[12, 5]), (proj, &[4, 4])]).unwrap();
        for layer in [&conv, &linear] {
            assert_eq!((layer.d_in, layer.d_out), (5, 4));
        }
        // Conv1D is turned, nn.Linear is kept; the output projection goes with it.
        assert_eq!(conv.qkv[..5], [0.0, 12.0, 24.0, 36.0, 48.0]);
        assert_eq!(linear.qkv[..5], [0.0, 1.0, 2.0, 3.0, 4.0]);
        assert_eq!(conv.output.unwrap()[..4], [0.0, 4.0, 8.0, 12.0]);
        assert_eq!(linear.output.unwrap()[..4], [0.0, 1.0, 2.0, 3.0]);

        for (tensors, words) in [
            (
                &[(attn, &[5, 12][..]), ("h.3.attn.c_proj.bias", &[4])][..],
                "c_proj.bias",
            ),
            (&[(attn, &[5, 12]), (proj, &[2, 8])], "c_proj.weight"),
            (&[(attn, &[5, 11]), (proj, &[4, 4])], "(5, 11)"),
            (
                &[
                    (attn, &[5, 12]),
                    (proj, &[4, 4]),
                    ("h.3.attn.c_attn.bias", &[4]),
                ],
                "(12)",
            ),
            (&[(proj, &[4, 4])], "c_attn.weight"),
        ] {
            let error = gpt2(tensors).unwrap_err().to_string();
            assert!(error.contains(words), "expected {words:?} in: {error}");
        }
    }
}

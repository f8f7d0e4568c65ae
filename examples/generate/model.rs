//! The model's weights, on the GPU, and where they come from.

use crate::pass::Kernels;
use crate::text::{Random, Vocabulary};
use crate::{Options, Result};
use safetensors::tensor::{Dtype, TensorView as Bytes, serialize};
use std::collections::HashMap;
use wgpu_attention::checkpoint::LayerCheckpoint;
use wgpu_attention::tensor_file::TensorFile;
use wgpu_attention::{
    Gpu, LayerConfig, Linear, LinearArguments, MultiHeadAttention, Rotary, RotaryConfig, Tensor,
    TensorView, wgpu,
};

pub(crate) struct Model {
    pub(crate) gpu: Gpu,
    pub(crate) kernels: Kernels,
    pub(crate) vocabulary: Vocabulary,
    pub(crate) width: usize,
    pub(crate) context: usize,
    pub(crate) gelu_tanh: bool,
    /// `(vocabulary, width)`.
    pub(crate) embeddings: TensorView,
    /// `(context, width)`; without them the layers turn queries and keys by their positions.
    pub(crate) positions: Option<TensorView>,
    pub(crate) blocks: Vec<Block>,
    pub(crate) ln_f: Norm,
    pub(crate) head: Dense,
}

pub(crate) struct Block {
    pub(crate) ln_1: Norm,
    pub(crate) attention: MultiHeadAttention,
    pub(crate) ln_2: Norm,
    pub(crate) up: Dense,
    pub(crate) down: Dense,
}

pub(crate) struct Norm {
    pub(crate) weight: TensorView,
    pub(crate) bias: TensorView,
}

/// A projection's weight `(d_out, d_in)` and bias.
pub(crate) struct Dense {
    pub(crate) weight: TensorView,
    pub(crate) bias: Option<TensorView>,
}

impl Dense {
    pub(crate) fn d_out(&self) -> usize {
        self.weight.shape()[0]
    }

    pub(crate) fn encode(
        &self,
        encoder: &mut wgpu::CommandEncoder,
        linear: &Linear,
        x: &TensorView,
        y: &TensorView,
    ) -> Result<()> {
        let arguments = LinearArguments {
            x,
            weight: &self.weight,
            bias: self.bias.as_ref(),
            y,
        };
        Ok(linear.encode(encoder, arguments)?)
    }
}

impl std::fmt::Display for Model {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let config = self.blocks[0].attention.config();
        let positions = match self.positions {
            Some(_) => "learned positions",
            None => "rotary embedding",
        };
        write!(
            f,
            "{} layers of {} channels, {} heads, {positions}, a context of {}, {} tokens to choose from",
            self.blocks.len(),
            self.width,
            config.heads,
            self.context,
            self.vocabulary.size()
        )
    }
}

impl Model {
    pub(crate) fn device(&self) -> &wgpu::Device {
        self.gpu.device()
    }

    pub(crate) fn load(gpu: &Gpu, file: &TensorFile, options: &Options) -> Result<Self> {
        let source = Source::new(gpu, file)?;
        let [size, width] = source.axes("wte.weight")?;
        let vocabulary = Vocabulary::of(file, size)?;
        let positions = source.has("wpe.weight").then(|| source.axes("wpe.weight"));
        let context = match positions.transpose()? {
            Some([positions, _]) => positions,
            None => options.context,
        };
        let heads = source.heads(options.heads, width)?;
        let rotary = match source.has("wpe.weight") {
            true => None,
            false => Some(Rotary::new(gpu, RotaryConfig::new(width / heads, context))?),
        };
        let count = (0..)
            .take_while(|n| source.has(&format!("h.{n}.ln_1.weight")))
            .count();
        if count == 0 {
            return Err(source.wrong("h.0.ln_1.weight", "expected, is missing"));
        }
        let block = |number: usize| {
            let name = |part: &str| format!("h.{number}.{part}");
            let prefix = format!("{}{}", source.prefix, name("attn."));
            let weights = LayerCheckpoint::read(file, Some(&prefix))?;
            if (weights.d_in, weights.d_out) != (width, width) {
                let got = format!(
                    "expected {width} channels as wte.weight has, got {}",
                    weights.d_in
                );
                return Err(source.wrong(&name("attn.c_attn.weight"), &got));
            }
            let config = LayerConfig::new(width, width, heads).causal(true);
            let layer = MultiHeadAttention::new(gpu, config, &weights.weights())?;
            let [rows, columns] = source.axes(&name("mlp.c_fc.weight"))?;
            let inner = if rows == width { columns } else { rows };
            Ok(Block {
                ln_1: source.norm(&name("ln_1"), width)?,
                attention: match &rotary {
                    Some(rotary) => layer.with_rotary(rotary)?,
                    None => layer,
                },
                ln_2: source.norm(&name("ln_2"), width)?,
                up: source.dense(&name("mlp.c_fc"), inner, width)?,
                down: source.dense(&name("mlp.c_proj"), width, inner)?,
            })
        };
        let blocks: Vec<Block> = (0..count).map(block).collect::<Result<_>>()?;
        if let Some(other) = blocks
            .iter()
            .find(|other| other.up.d_out() != blocks[0].up.d_out())
        {
            let problem = format!("{} and {}", blocks[0].up.d_out(), other.up.d_out());
            return Err(source.wrong(
                "h.*.mlp.c_fc.weight",
                &format!("not of one width: {problem}"),
            ));
        }
        let embeddings = source.tensor("wte.weight", &[size, width])?;
        Ok(Model {
            kernels: Kernels::new(gpu.device()),
            // Most models choose tokens by the embeddings that they read them with.
            head: match source.has("lm_head.weight") {
                true => source.dense("lm_head", size, width)?,
                false => Dense {
                    weight: embeddings.clone(),
                    bias: None,
                },
            },
            positions: match rotary {
                None => Some(source.tensor("wpe.weight", &[context, width])?),
                Some(_) => None,
            },
            ln_f: source.norm("ln_f", width)?,
            embeddings,
            blocks,
            vocabulary,
            width,
            context,
            gelu_tanh: options.gelu_tanh,
            gpu: gpu.clone(),
        })
    }
}

/// A file of weights, whose names may have a prefix such as `transformer.`.
struct Source<'a> {
    gpu: &'a Gpu,
    file: &'a TensorFile,
    prefix: String,
}

impl<'a> Source<'a> {
    fn new(gpu: &'a Gpu, file: &'a TensorFile) -> Result<Self> {
        let prefix = file
            .names()
            .find_map(|name| name.strip_suffix("wte.weight"));
        let prefix = prefix.unwrap_or_default().to_string();
        Ok(Source { gpu, file, prefix })
    }

    fn wrong(&self, name: &str, problem: &str) -> Box<dyn std::error::Error> {
        format!("{}: tensor {name:?}: {problem}", self.file.path().display()).into()
    }

    /// The tensor's name in the file: with the prefix, or as `lm_head.weight` without its last part.
    fn find(&self, name: &str) -> Option<String> {
        let outer = self
            .prefix
            .strip_suffix("transformer.")
            .unwrap_or(&self.prefix);
        [&self.prefix, outer]
            .map(|prefix| format!("{prefix}{name}"))
            .into_iter()
            .find(|name| self.file.shape(name).is_some())
    }

    fn has(&self, name: &str) -> bool {
        self.find(name).is_some()
    }

    fn axes<const N: usize>(&self, name: &str) -> Result<[usize; N]> {
        let Some(found) = self.find(name) else {
            return Err(self.wrong(name, "expected, is missing"));
        };
        let shape = self.file.shape(&found).unwrap_or_default();
        let axes = shape.try_into();
        axes.map_err(|_| self.wrong(name, &format!("expected {N} axes, got {shape:?}")))
    }

    fn values(&self, name: &str) -> Result<Option<Vec<f32>>> {
        let tensor = match self.find(name) {
            Some(found) => self.file.get(&found)?,
            None => None,
        };
        Ok(tensor.map(|tensor| tensor.to_f32()))
    }

    fn tensor(&self, name: &str, shape: &[usize]) -> Result<TensorView> {
        let found = self.find(name);
        let values = self.values(name)?;
        let (Some(found), Some(values)) = (found, values) else {
            return Err(self.wrong(name, &format!("expected {shape:?}, is missing")));
        };
        let got = self.file.shape(&found).unwrap_or_default();
        if got != shape {
            return Err(self.wrong(name, &format!("expected {shape:?}, got {got:?}")));
        }
        // One binding holds it: the kernels of this example do not go through large vocabularies in pieces.
        let (bytes, most) = (
            4 * values.len() as u64,
            self.gpu.capabilities().max_binding_bytes,
        );
        if bytes > most {
            let problem = format!("has {bytes} bytes, this adapter binds at most {most}");
            return Err(self.wrong(name, &problem));
        }
        Ok(Tensor::from_slice(self.gpu, shape, &values)?.view())
    }

    fn norm(&self, name: &str, width: usize) -> Result<Norm> {
        let bias = format!("{name}.bias");
        Ok(Norm {
            weight: self.tensor(&format!("{name}.weight"), &[width])?,
            // nanoGPT may leave it out.
            bias: match self.has(&bias) {
                true => self.tensor(&bias, &[width])?,
                false => Tensor::from_slice(self.gpu, &[width], &vec![0.0_f32; width])?.view(),
            },
        })
    }

    /// A weight `(d_out, d_in)`, also where it is kept as GPT-2's Conv1D has it, `(d_in, d_out)`.
    fn dense(&self, name: &str, d_out: usize, d_in: usize) -> Result<Dense> {
        let (weight, bias) = (format!("{name}.weight"), format!("{name}.bias"));
        let axes: [usize; 2] = self.axes(&weight)?;
        Ok(Dense {
            weight: match axes == [d_in, d_out] && d_in != d_out {
                // Any view will do for a projection: nothing is transposed.
                true => self.tensor(&weight, &axes)?.permute(&[1, 0])?,
                false => self.tensor(&weight, &[d_out, d_in])?,
            },
            bias: match self.has(&bias) {
                true => Some(self.tensor(&bias, &[d_out])?),
                false => None,
            },
        })
    }

    /// The number of heads, which no shape tells: as asked for, as the file's metadata say, or of 64 channels each.
    fn heads(&self, asked: Option<usize>, width: usize) -> Result<usize> {
        let told = self
            .file
            .metadata()
            .get("n_head")
            .and_then(|n| n.parse().ok());
        let heads = asked.or(told).unwrap_or(width / 64);
        if heads == 0 || !width.is_multiple_of(heads) {
            let problem = format!("{heads} heads do not share {width} channels: say --heads N");
            return Err(self.wrong("wte.weight", &problem));
        }
        Ok(heads)
    }
}

/// A file in memory with the weights of a model that has learned nothing: what is read from a file is tried, too.
pub(crate) fn random_model() -> Result<Vec<u8>> {
    let (layers, heads, width, inner) = (4, 4, 128, 512);
    let vocabulary: String = (' '..='~').collect();
    let mut shapes = vec![
        (
            "transformer.wte.weight".to_string(),
            vec![vocabulary.len(), width],
        ),
        ("transformer.ln_f.weight".to_string(), vec![width]),
    ];
    for layer in 0..layers {
        for (part, shape) in [
            ("ln_1.weight", vec![width]),
            ("ln_1.bias", vec![width]),
            ("attn.c_attn.weight", vec![3 * width, width]),
            ("attn.c_attn.bias", vec![3 * width]),
            ("attn.c_proj.weight", vec![width, width]),
            ("ln_2.weight", vec![width]),
            ("mlp.c_fc.weight", vec![inner, width]),
            ("mlp.c_fc.bias", vec![inner]),
            ("mlp.c_proj.weight", vec![width, inner]),
        ] {
            shapes.push((format!("transformer.h.{layer}.{part}"), shape));
        }
    }
    let mut random = Random(1);
    let tensors: Vec<(String, Vec<usize>, Vec<u8>)> = shapes
        .into_iter()
        .map(|(name, shape)| {
            // Of a variance that keeps what passes through at its size; norms around 1.
            let spread = 2.0 * (3.0 / shape[shape.len() - 1] as f32).sqrt();
            let middle = if name.contains("ln_") && name.ends_with("weight") {
                1.0
            } else {
                0.0
            };
            let values: Vec<f32> = (0..shape.iter().product())
                .map(|_| middle + spread * (random.unit() - 0.5))
                .collect();
            (name, shape, bytemuck::cast_slice(&values).to_vec())
        })
        .collect();
    let views = tensors
        .iter()
        .map(|(name, shape, bytes)| Ok((name, Bytes::new(Dtype::F32, shape.clone(), bytes)?)));
    let views: Vec<_> = views.collect::<Result<_>>()?;
    let metadata = [("n_head", heads.to_string()), ("vocab", vocabulary)];
    let metadata = metadata.map(|(name, value)| (name.to_string(), value));
    Ok(serialize(views, Some(HashMap::from(metadata)))?)
}

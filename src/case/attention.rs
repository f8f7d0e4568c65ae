//! Cases of attention without projections: how both engines run them, and the kinds `sdpa`, `sdpa_grad` and
//! `sdpa_varlen`.

use super::Case;
use super::host::{Values, download, stored_type};
use super::kind::{Computed, Engine, Kind, Selection};
use crate::attention::{
    Alignment, Attention, AttentionArguments, AttentionProblem, AttentionRules, AttentionWeights,
    RuleArguments, WeightsArguments, WeightsStage,
};
use crate::cache::{AppendArguments, KvCache, KvCacheConfig};
use crate::kernels::Form;
use crate::rotary::{Rotary, RotaryArguments, RotaryPairing};
use crate::tensor::{Tensor, TensorView, shape_text};
use crate::tensor_file::FileTensor;
use crate::{ElementType, Error, Gpu, Result, reference};

pub(super) const SDPA: Kind = Kind {
    names: &["sdpa", "sdpa_grad"],
    attributes: &[
        "B",
        "D",
        "Dv",
        "Hkv",
        "Hq",
        "Tk",
        "Tq",
        "align",
        "causal",
        "default_scale",
        "grad",
        "poison",
        "scale",
        "softcap",
        "tags",
        "window_left",
        "window_right",
    ],
    inputs: &[
        "q",
        "k",
        "v",
        "alibi_slopes",
        "bias",
        "mask",
        "kv_lens",
        "q_lens",
        "sinks",
        "dout",
    ],
    run: |case, selection, engine| read(case)?.run(selection, engine),
};

pub(super) const VARLEN: Kind = Kind {
    names: &["sdpa_varlen"],
    attributes: &[
        "D",
        "Dv",
        "Hkv",
        "Hq",
        "Nk",
        "Nq",
        "align",
        "causal",
        "default_scale",
        "grad",
        "max_k",
        "max_q",
        "nseq",
        "scale",
        "softcap",
        "tags",
        "window_left",
        "window_right",
    ],
    inputs: &[
        "q",
        "k",
        "v",
        "cu_seqlens_q",
        "cu_seqlens_k",
        "alibi_slopes",
        "kv_lens",
        "q_lens",
        "sinks",
        "dout",
    ],
    run: |case, selection, engine| read(case)?.run(selection, engine),
};

fn read(case: &Case) -> Result<AttentionCase> {
    let packed = case.kind == "sdpa_varlen";
    let operand = |name| {
        let tensor = case.input(name)?;
        let layout = if packed {
            Layout::Packed
        } else {
            Layout::HeadsFirst
        };
        Operand::new(case, tensor, layout)
    };
    let mut read = AttentionCase::new(case, operand("q")?, operand("k")?, operand("v")?)?;
    let problem = &mut read.problem;
    let sizes = [
        ("Hq", problem.heads),
        ("Hkv", problem.kv_heads),
        ("D", problem.head_dim),
        ("Dv", problem.value_dim),
    ];
    case.expect_sizes(&sizes)?;
    if packed {
        case.expect_sizes(&[("Nq", problem.q_len), ("Nk", problem.kv_len)])?;
        problem.packed = true;
        problem.batch = case.attr_usize("nseq")?;
        problem.q_len = case.attr_usize("max_q")?;
        problem.kv_len = case.attr_usize("max_k")?;
        read.starts = Some([
            case.lengths_of("cu_seqlens_q")?,
            case.lengths_of("cu_seqlens_k")?,
        ]);
    } else {
        case.expect_sizes(&[
            ("B", problem.batch),
            ("Tq", problem.q_len),
            ("Tk", problem.kv_len),
        ])?;
    }
    read.mask = case.input_opt("mask").map(Values::mask).transpose()?;
    read.bias = case.input_opt("bias").map(Values::from);
    read.slopes = case.input_opt("alibi_slopes").map(Values::from);
    read.sinks = case.input_opt("sinks").map(Values::from);
    read.kv_lens = case.lengths("kv_lens")?;
    read.q_lens = case.lengths("q_lens")?;
    let scale = case.attr_f64("scale")? as f32;
    let default_scale =
        case.attributes.contains_key("default_scale") && case.attr_bool("default_scale")?;
    if default_scale && scale != read.problem.effective_scale()? {
        return Err(case.error("`default_scale` is true, but `scale` is not 1/sqrt(D)"));
    }
    read.problem.rules = AttentionRules {
        scale: (!default_scale).then_some(scale),
        softcap: case.softcap()?,
        causal: case.attr_bool("causal")?,
        alignment: Some(case.alignment()?),
        window_left: case.window("window_left")?,
        window_right: case.window("window_right")?,
        ..Default::default()
    };
    read.outputs = vec![
        ("out", Output::Out),
        ("lse", Output::Lse),
        ("p", Output::Weights(WeightsStage::Weights)),
    ];
    Ok(read)
}

impl Case {
    /// [`Error::Format`] where an attribute says another size than the tensors do.
    pub(super) fn expect_sizes(&self, sizes: &[(&str, usize)]) -> Result<()> {
        for (name, size) in sizes {
            if self.attributes.contains_key(*name) && self.attr_usize(name)? != *size {
                let given = self.attr_usize(name)?;
                return Err(self.attribute_error(
                    name,
                    &format!("{size} as the inputs have"),
                    given,
                ));
            }
        }
        Ok(())
    }

    /// An input that is a list of lengths.
    pub(super) fn lengths_of(&self, name: &str) -> Result<Vec<usize>> {
        let tensor = self.input(name)?;
        if tensor.shape.len() != 1 {
            let got = shape_text(&tensor.shape);
            return Err(self.error(format!("input {name:?}: expected one axis, got {got}")));
        }
        tensor.to_usize()
    }

    /// One that may be left out.
    pub(super) fn lengths(&self, name: &str) -> Result<Option<Vec<usize>>> {
        self.input_opt(name)
            .map(|_| self.lengths_of(name))
            .transpose()
    }

    /// An attribute that is a number of keys, -1 (or nothing) for all of them.
    pub(super) fn window(&self, name: &str) -> Result<Option<usize>> {
        if !self.attributes.contains_key(name) {
            return Ok(None);
        }
        match self.attr_i64(name)? {
            -1 => Ok(None),
            keys => usize::try_from(keys)
                .map(Some)
                .map_err(|_| self.attribute_error(name, "-1 or a number of keys", keys)),
        }
    }

    /// Attribute `softcap`; 0 and nothing are none.
    pub(super) fn softcap(&self) -> Result<Option<f32>> {
        if !self.attributes.contains_key("softcap") {
            return Ok(None);
        }
        let softcap = self.attr_f64("softcap")? as f32;
        Ok((softcap != 0.0).then_some(softcap))
    }

    /// Attribute `align`.
    pub(super) fn alignment(&self) -> Result<Alignment> {
        match self.attr_str("align")? {
            "top_left" => Ok(Alignment::TopLeft),
            "bottom_right" => Ok(Alignment::BottomRight),
            other => Err(self.attribute_error("align", "top_left or bottom_right", other)),
        }
    }
}

/// How a case lays out q, k and v.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Layout {
    /// `(B, H, T, D)`.
    HeadsFirst,
    /// `(B, T, H*D)`, with that many heads.
    SideBySide(usize),
    /// `(T, H, D)`: all sequences one behind the other.
    Packed,
}

/// q, k or v as it lies in the case.
#[derive(Clone, Debug)]
pub(super) struct Operand {
    values: Vec<f64>,
    layout: Layout,
    /// `(B, T, H, D)` whatever the layout; B is 1 where sequences are packed.
    pub(super) shape: [usize; 4],
    element_type: ElementType,
}

impl Operand {
    pub(super) fn new(case: &Case, tensor: &FileTensor, layout: Layout) -> Result<Self> {
        let shape = match (layout, &tensor.shape[..]) {
            (Layout::HeadsFirst, &[b, h, t, d]) => [b, t, h, d],
            (Layout::SideBySide(h), &[b, t, c]) if h > 0 && c % h == 0 => [b, t, h, c / h],
            (Layout::Packed, &[t, h, d]) => [1, t, h, d],
            (layout, shape) => {
                let expected = match layout {
                    Layout::HeadsFirst => "(B, H, T, D)".to_string(),
                    Layout::SideBySide(heads) => format!("(B, T, H*D) of {heads} heads"),
                    Layout::Packed => "(T, H, D)".to_string(),
                };
                return Err(case.error(format!(
                    "input {:?}: expected {expected}, got {}",
                    tensor.name,
                    shape_text(shape)
                )));
            }
        };
        Ok(Operand {
            values: tensor.values.clone(),
            layout,
            shape,
            element_type: stored_type(tensor)?,
        })
    }

    /// Adds a vector of H*D to every token; an error unless the heads lie side by side.
    pub(super) fn add(&mut self, case: &Case, bias: &[f64]) -> Result<()> {
        if !matches!(self.layout, Layout::SideBySide(_)) {
            return Err(case.error("a bias goes with heads side by side: expected (B, T, H*D)"));
        }
        for (value, bias) in self.values.iter_mut().zip(bias.iter().cycle()) {
            *value += bias;
        }
        Ok(())
    }

    /// A view `(B, T, H, D)` of the operand as it lies in the case.
    fn upload(&self, gpu: &Gpu) -> Result<TensorView> {
        let [b, t, h, d] = self.shape;
        let heads_first = self.layout == Layout::HeadsFirst;
        let shape = if heads_first {
            [b, h, t, d]
        } else {
            self.shape
        };
        let stored = Values {
            shape: shape.to_vec(),
            values: self.values.clone(),
        };
        let view = stored.upload(gpu, self.element_type)?.view();
        if heads_first {
            view.permute(&[0, 2, 1, 3])
        } else {
            Ok(view)
        }
    }

    /// Where the row of a token and head begins.
    fn row(&self, batch: usize, token: usize, head: usize) -> &[f64] {
        let [_, t, h, d] = self.shape;
        let row = match self.layout {
            Layout::HeadsFirst => (batch * h + head) * t + token,
            _ => (batch * t + token) * h + head,
        };
        &self.values[row * d..(row + 1) * d]
    }
}

/// What stands in front of k or v: `(B, Hkv, P, D)`.
#[derive(Clone, Debug)]
pub(super) struct Past {
    k: Operand,
    v: Operand,
    /// How many of its tokens each batch item keeps.
    pub(super) kept: Vec<usize>,
}

/// Rotary embedding of the queries and of the new keys; those of a past are turned already.
#[derive(Clone, Debug)]
pub(super) struct CaseRotary {
    /// Whether channels 2i and 2i + 1 turn together, not i and i + R/2.
    pub(super) interleaved: bool,
    /// Cosines and sines, `(positions, R/2)`.
    pub(super) cos: Values,
    pub(super) sin: Values,
    /// The position of each batch item's first new token.
    pub(super) starts: Vec<usize>,
}

impl CaseRotary {
    /// How many channels of a head turn: R.
    pub(super) fn dims(&self) -> usize {
        self.cos.shape.last().map_or(0, |pairs| 2 * pairs)
    }

    fn on(&self, gpu: &Gpu) -> Result<Rotary> {
        let pairing = match self.interleaved {
            true => RotaryPairing::Interleaved,
            false => RotaryPairing::HalfSplit,
        };
        let values = |of: &Values| -> Vec<f32> { of.values.iter().map(|v| *v as f32).collect() };
        let (cos, sin) = (values(&self.cos), values(&self.sin));
        Rotary::from_tables(gpu, pairing, self.dims(), &cos, &sin)
    }
}

/// What attention was computed from on the GPU: views `(B, T, H, D)`, k and v with the past in front.
struct Attended {
    q: TensorView,
    k: TensorView,
    v: TensorView,
}

/// What an output of a case is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Output {
    /// The result, as q lies.
    Out,
    /// The log-sum-exp, `(B, H, Tq)` or packed `(T, H)`.
    Lse,
    /// `(B, H, Tq, Tk)`.
    Weights(WeightsStage),
    /// Past and new keys, `(B, Hkv, Tk, D)`.
    PresentKey,
    /// Past and new values, `(B, Hkv, Tk, Dv)`.
    PresentValue,
}

/// Attention as a case asks for it, for both engines.
#[derive(Clone, Debug)]
pub(super) struct AttentionCase {
    /// Sizes, types and the rules that are numbers; which tensors the rules take, the fields below say.
    pub(super) problem: AttentionProblem,
    q: Operand,
    k: Operand,
    v: Operand,
    pub(super) past: Option<Past>,
    pub(super) rotary: Option<CaseRotary>,
    pub(super) mask: Option<Values>,
    pub(super) bias: Option<Values>,
    pub(super) slopes: Option<Values>,
    pub(super) sinks: Option<Values>,
    pub(super) kv_lens: Option<Vec<usize>>,
    pub(super) q_lens: Option<Vec<usize>>,
    /// Where packed sequences begin, in q and in k and v.
    pub(super) starts: Option<[Vec<usize>; 2]>,
    /// The outputs that a case of this kind can have.
    pub(super) outputs: Vec<(&'static str, Output)>,
    /// Why it has no others.
    pub(super) otherwise: String,
}

impl AttentionCase {
    /// Without rules and outputs.
    pub(super) fn new(case: &Case, q: Operand, k: Operand, v: Operand) -> Result<Self> {
        let [batch, q_len, heads, head_dim] = q.shape;
        if [k.shape[0], k.shape[3]] != [batch, head_dim] || k.shape[..3] != v.shape[..3] {
            return Err(case.error(format!(
                "q, k and v do not go together: (B, T, H, D) are {}, {} and {}",
                shape_text(&q.shape),
                shape_text(&k.shape),
                shape_text(&v.shape)
            )));
        }
        Ok(AttentionCase {
            problem: AttentionProblem {
                kv_heads: k.shape[2],
                kv_len: k.shape[1],
                value_dim: v.shape[3],
                q_type: q.element_type,
                kv_type: k.element_type,
                out_type: q.element_type,
                ..AttentionProblem::new(batch, heads, q_len, head_dim)
            },
            q,
            k,
            v,
            past: None,
            rotary: None,
            mask: None,
            bias: None,
            slopes: None,
            sinks: None,
            kv_lens: None,
            q_lens: None,
            starts: None,
            outputs: Vec::new(),
            otherwise: "an output of this name is not understood".into(),
        })
    }

    /// Puts inputs `past_key` and `past_value` in front of k and v, where there are any; returns how many tokens
    /// they have. Each batch item keeps all of them.
    pub(super) fn read_past(&mut self, case: &Case) -> Result<usize> {
        let input = |name| {
            let past = case.input_opt(name);
            past.map(|past| Operand::new(case, past, Layout::HeadsFirst))
                .transpose()
        };
        let (k, v) = match (input("past_key")?, input("past_value")?) {
            (None, None) => return Ok(0),
            (Some(k), Some(v)) => (k, v),
            _ => return Err(case.error("expected both past_key and past_value, got one of them")),
        };
        let [batch, tokens, ..] = k.shape;
        for (name, past, new) in [("past_key", &k, &self.k), ("past_value", &v, &self.v)] {
            let [b, _, h, d] = new.shape;
            if past.shape != [b, tokens, h, d] || past.element_type != new.element_type {
                return Err(case.error(format!(
                    "input {name:?}: expected {} of {}, got {} of {}",
                    shape_text(&[b, h, tokens, d]),
                    new.element_type,
                    shape_text(&[past.shape[0], past.shape[2], past.shape[1], past.shape[3]]),
                    past.element_type
                )));
            }
        }
        self.problem.kv_len += tokens;
        self.past = Some(Past {
            k,
            v,
            kept: vec![tokens; batch],
        });
        Ok(tokens)
    }

    /// Computes the chosen outputs.
    pub(super) fn run(mut self, selection: &Selection, engine: &Engine) -> Result<Computed> {
        self.outputs.retain(|(name, _)| selection.includes(name));
        let rules = &mut self.problem.rules;
        rules.mask = self.mask.is_some();
        rules.bias = self.bias.is_some();
        rules.alibi = self.slopes.is_some();
        rules.sinks = self.sinks.is_some();
        rules.kv_lens = self.kv_lens.is_some();
        rules.q_lens = self.q_lens.is_some();
        // The reference takes slices: it cannot see how they are shaped.
        let (batch, heads) = (self.problem.batch, self.problem.heads);
        for (name, values, shapes) in [
            ("slopes", &self.slopes, [&[heads][..], &[batch, heads]]),
            ("sinks", &self.sinks, [&[heads], &[heads]]),
        ] {
            if let Some(values) = values
                && !shapes.contains(&&values.shape[..])
            {
                let (expected, got) = (shape_text(shapes[0]), shape_text(&values.shape));
                return Err(Error::shape(name, expected, got));
            }
        }
        let (kernel, found) = match engine {
            Engine::Kernels { gpu, form } => self.by_kernels(gpu, *form)?,
            Engine::Reference => ("reference".into(), self.by_reference()?),
        };
        let named = self.outputs.iter().zip(found);
        Ok(Computed {
            outputs: named
                .map(|((name, output), values)| (*name, values, self.shape_of(*output)))
                .collect(),
            kernel,
            otherwise: self.otherwise,
        })
    }

    /// The stages of the weights that are asked for.
    fn stages(&self) -> Vec<WeightsStage> {
        let stages = self.outputs.iter().filter_map(|(_, output)| match output {
            Output::Weights(stage) => Some(*stage),
            _ => None,
        });
        stages.collect()
    }

    fn shape_of(&self, output: Output) -> Vec<usize> {
        let AttentionProblem {
            batch,
            heads,
            kv_heads,
            q_len,
            kv_len,
            head_dim,
            value_dim,
            packed,
            ..
        } = self.problem;
        match output {
            Output::Out => match self.q.layout {
                Layout::HeadsFirst => vec![batch, heads, q_len, value_dim],
                Layout::SideBySide(_) => vec![batch, q_len, heads * value_dim],
                Layout::Packed => vec![self.q.shape[1], heads, value_dim],
            },
            Output::Lse if packed => vec![self.q.shape[1], heads],
            Output::Lse => vec![batch, heads, q_len],
            Output::Weights(_) => vec![batch, heads, q_len, kv_len],
            Output::PresentKey => vec![batch, kv_heads, kv_len, head_dim],
            Output::PresentValue => vec![batch, kv_heads, kv_len, value_dim],
        }
    }

    /// The outputs in order, and the kernels that ran.
    fn by_kernels(&self, gpu: &Gpu, form: Option<Form>) -> Result<(String, Vec<Vec<f64>>)> {
        let problem = AttentionProblem {
            form,
            ..self.problem.clone()
        };
        let upload = |values: Option<&Values>, element_type| {
            values
                .map(|values| Ok(values.upload(gpu, element_type)?.view()))
                .transpose()
        };
        let list = |lengths: Option<&Vec<usize>>| {
            upload(
                lengths.map(|lengths| Values::list(lengths)).as_ref(),
                ElementType::U32,
            )
        };
        let [starts_q, starts_k] = match &self.starts {
            Some([q, k]) => [list(Some(q))?, list(Some(k))?],
            None => [None, None],
        };
        let mask = upload(self.mask.as_ref(), ElementType::Bool)?;
        let bias = upload(self.bias.as_ref(), ElementType::F32)?;
        let slopes = upload(self.slopes.as_ref(), ElementType::F32)?;
        let sinks = upload(self.sinks.as_ref(), ElementType::F32)?;
        let (kv_lens, q_lens) = (list(self.kv_lens.as_ref())?, list(self.q_lens.as_ref())?);
        let rules = RuleArguments {
            mask: mask.as_ref(),
            bias: bias.as_ref(),
            kv_lens: kv_lens.as_ref(),
            q_lens: q_lens.as_ref(),
            slopes: slopes.as_ref(),
            sinks: sinks.as_ref(),
            rule_data: None,
            cu_seqlens_q: starts_q.as_ref(),
            cu_seqlens_k: starts_k.as_ref(),
            block_table: None,
        };

        let attention = Attention::new(gpu, problem.clone())?;
        let mut kernels = vec![attention.plan().kernel.name];
        // The result lies as q does. Rows of 16-bit elements begin on whole words.
        let row = match problem.out_type {
            ElementType::F32 => problem.value_dim,
            _ => problem.value_dim.next_multiple_of(2),
        };
        let [b, t, h, _] = self.q.shape;
        let heads_first = self.q.layout == Layout::HeadsFirst;
        let shape = if heads_first {
            [b, h, t, row]
        } else {
            [b, t, h, row]
        };
        let stored = Tensor::empty(gpu, &shape, problem.out_type)?;
        let stored = stored.view().slice(3, 0..problem.value_dim)?;
        let out = if heads_first {
            stored.permute(&[0, 2, 1, 3])?
        } else {
            stored.clone()
        };
        let lse = Tensor::empty(gpu, &self.shape_of(Output::Lse), ElementType::F32)?.view();
        let wants_lse = self
            .outputs
            .iter()
            .any(|(_, output)| *output == Output::Lse);
        let mut weights = Vec::new();
        for stage in self.stages() {
            let operation = AttentionWeights::new(gpu, problem.clone(), stage)?;
            let shape = self.shape_of(Output::Weights(stage));
            kernels.push(operation.plan().kernel.name);
            weights.push((
                operation,
                Tensor::empty(gpu, &shape, ElementType::F32)?.view(),
            ));
        }
        kernels.dedup();
        let mut attended = None;
        gpu.record_and_submit(|encoder| {
            let lse = wants_lse.then_some(&lse);
            let made = self.attend_with_past(gpu, encoder, &attention, &out, lse, rules)?;
            for (operation, weights) in &weights {
                operation.encode(
                    encoder,
                    WeightsArguments {
                        q: &self.unbatched(&made.q)?,
                        k: &self.unbatched(&made.k)?,
                        weights,
                        rules,
                    },
                )?;
            }
            attended = Some(made);
            Ok(())
        })?;

        let present = |joined: Option<&TensorView>| match joined {
            Some(view) => download(&view.permute(&[0, 2, 1, 3])?),
            None => Ok(Vec::new()),
        };
        let mut weights = weights.iter();
        let outputs = self.outputs.iter().map(|(_, output)| match output {
            Output::Out => download(&stored),
            Output::Lse => download(&lse),
            Output::Weights(_) => weights
                .next()
                .map_or(Ok(Vec::new()), |(_, view)| download(view)),
            Output::PresentKey => present(attended.as_ref().map(|of| &of.k)),
            Output::PresentValue => present(attended.as_ref().map(|of| &of.v)),
        });
        Ok((kernels.join(" "), outputs.collect::<Result<_>>()?))
    }

    /// Records rotary embedding, appends past and new keys and values to a cache, and attends over it.
    ///
    /// The one place that knows how past and new tokens come together on the GPU. Present outputs are read back
    /// from what it gives, which is what attention read.
    fn attend_with_past(
        &self,
        gpu: &Gpu,
        encoder: &mut wgpu::CommandEncoder,
        attention: &Attention,
        out: &TensorView,
        lse: Option<&TensorView>,
        rules: RuleArguments,
    ) -> Result<Attended> {
        let mut q = self.q.upload(gpu)?;
        let (mut k, mut v) = (self.k.upload(gpu)?, self.v.upload(gpu)?);
        let rotary = match &self.rotary {
            Some(rotary) => Some(rotary.on(gpu)?),
            None => None,
        };
        if let (Some(rotary), Some(own)) = (&rotary, &self.rotary) {
            let starts: Vec<u32> = own.starts.iter().map(|start| *start as u32).collect();
            let starts = Tensor::from_slice(gpu, &[starts.len()], &starts)?.view();
            let turned = Tensor::empty(gpu, q.shape(), q.element_type())?.view();
            let arguments = RotaryArguments {
                starts: Some(&starts),
                ..RotaryArguments::new(&q, &turned)
            };
            rotary.encode(encoder, arguments)?;
            q = turned;
        }
        // Present outputs come from kernels even where there is no past: never from what was uploaded.
        let wanted = |output| self.outputs.iter().any(|(_, own)| *own == output);
        let asked = wanted(Output::PresentKey) || wanted(Output::PresentValue);
        if self.past.is_some() || rotary.is_some() || asked {
            let problem = &self.problem;
            let config = KvCacheConfig {
                value_dim: problem.value_dim,
                element_type: problem.kv_type,
                ..KvCacheConfig::new(
                    problem.batch,
                    problem.kv_len,
                    problem.kv_heads,
                    problem.head_dim,
                )
            };
            let mut cache = KvCache::new(gpu, config)?;
            if let Some(past) = &self.past {
                let (k, v) = (past.k.upload(gpu)?, past.v.upload(gpu)?);
                let arguments = AppendArguments {
                    tokens: Some(&past.kept),
                    ..AppendArguments::new(&k, &v)
                };
                cache.append(encoder, arguments)?;
            }
            let arguments = AppendArguments {
                rotary: rotary.as_ref(),
                ..AppendArguments::new(&k, &v)
            };
            cache.append(encoder, arguments)?;
            (k, v) = (cache.keys(), cache.values());
        }
        attention.encode(
            encoder,
            AttentionArguments {
                lse,
                rules,
                ..AttentionArguments::new(
                    &self.unbatched(&q)?,
                    &self.unbatched(&k)?,
                    &self.unbatched(&v)?,
                    &self.unbatched(out)?,
                )
            },
        )?;
        Ok(Attended { q, k, v })
    }

    /// A view as attention takes it: without a batch axis where sequences are packed.
    fn unbatched(&self, view: &TensorView) -> Result<TensorView> {
        match self.problem.packed {
            true => view.merge_axes(0..2),
            false => Ok(view.clone()),
        }
    }

    /// The outputs in order.
    fn by_reference(&self) -> Result<Vec<Vec<f64>>> {
        let problem = &self.problem;
        let tokens_first = |operand: &Operand| self.tokens_first(operand, None);
        let (new_q, new_k) = (self.turned(&self.q)?, self.turned(&self.k)?);
        let q = tokens_first(&new_q)?;
        let [k, v] = match &self.past {
            None => [tokens_first(&new_k)?, tokens_first(&self.v)?],
            Some(past) => [
                self.tokens_first(&new_k, Some((&past.k, &past.kept)))?,
                self.tokens_first(&self.v, Some((&past.v, &past.kept)))?,
            ],
        };
        let mask_values: Option<Vec<bool>> = self
            .mask
            .as_ref()
            .map(|mask| mask.values.iter().map(|value| *value != 0.0).collect());
        let mask = match (&self.mask, &mask_values) {
            (Some(mask), Some(values)) => Some(reference::Broadcast {
                values: &values[..],
                shape: four_axes("mask", &mask.shape)?,
            }),
            _ => None,
        };
        let bias = match &self.bias {
            Some(bias) => Some(reference::Broadcast {
                values: &bias.values[..],
                shape: four_axes("bias", &bias.shape)?,
            }),
            None => None,
        };
        let inputs = reference::AttentionInputs {
            batch: problem.batch,
            heads: problem.heads,
            kv_heads: Some(problem.kv_heads),
            q_len: problem.q_len,
            kv_len: problem.kv_len,
            head_dim: problem.head_dim,
            value_dim: Some(problem.value_dim),
            q: &q,
            k: &k,
            v: &v,
            rules: reference::Rules {
                mask,
                bias,
                kv_lens: self.kv_lens.as_deref(),
                q_lens: self.q_lens.as_deref(),
                slopes: self.slopes.as_ref().map(|slopes| &slopes.values[..]),
                sinks: self.sinks.as_ref().map(|sinks| &sinks.values[..]),
                ..reference_rules(&problem.rules)
            },
        };
        let found = match &self.starts {
            Some([q, k]) => reference::attention_packed(&inputs, q, k)?,
            None => reference::attention(&inputs)?,
        };
        let stage = |stage| match stage {
            WeightsStage::Weights => Ok(found.weights.clone()),
            WeightsStage::Products => reference::scores(&inputs, reference::Stage::Products),
            WeightsStage::Capped => reference::scores(&inputs, reference::Stage::Capped),
            WeightsStage::Masked => reference::scores(&inputs, reference::Stage::Masked),
        };
        let heads_first =
            |values: &[f64], tokens, heads| swap_axes(values, tokens, heads, problem.batch);
        let outputs = self.outputs.iter().map(|(_, output)| match *output {
            Output::Out if self.q.layout == Layout::HeadsFirst => {
                Ok(heads_first(&found.out, problem.q_len, problem.heads))
            }
            Output::Out => Ok(found.out.clone()),
            Output::Lse => Ok(found.lse.clone()),
            Output::Weights(wanted) => stage(wanted),
            Output::PresentKey => Ok(heads_first(&k, problem.kv_len, problem.kv_heads)),
            Output::PresentValue => Ok(heads_first(&v, problem.kv_len, problem.kv_heads)),
        });
        outputs.collect()
    }

    /// q or new k after rotary embedding, by the reference; as it is where the case has none.
    fn turned(&self, operand: &Operand) -> Result<Operand> {
        let Some(rotary) = &self.rotary else {
            return Ok(operand.clone());
        };
        let [batch, tokens, heads, head_dim] = operand.shape;
        let values = reference::rotary(&reference::RotaryInputs {
            batch,
            tokens,
            heads,
            head_dim,
            x: &self.tokens_first(operand, None)?,
            starts: Some(&rotary.starts),
            rotary: reference::Rotary {
                dims: Some(rotary.dims()),
                pairing: match rotary.interleaved {
                    true => reference::Pairing::Interleaved,
                    false => reference::Pairing::HalfSplit,
                },
                angles: reference::Angles::Tables {
                    cos: &rotary.cos.values,
                    sin: &rotary.sin.values,
                },
            },
        })?;
        Ok(Operand {
            values,
            layout: Layout::SideBySide(heads),
            ..*operand
        })
    }

    /// `(B, T, H, D)`, with the kept tokens of a past in front; what is behind them is 0.
    fn tokens_first(&self, new: &Operand, past: Option<(&Operand, &[usize])>) -> Result<Vec<f64>> {
        let [batch, tokens, heads, channels] = new.shape;
        let total = if past.is_some() {
            self.problem.kv_len
        } else {
            tokens
        };
        let mut values = Vec::with_capacity(batch * total * heads * channels);
        for item in 0..batch {
            let kept = past.map_or(0, |(_, kept)| kept[item]);
            for token in 0..total {
                for head in 0..heads {
                    match past {
                        Some((past, _)) if token < kept => {
                            values.extend_from_slice(past.row(item, token, head));
                        }
                        _ if token - kept < tokens => {
                            values.extend_from_slice(new.row(item, token - kept, head));
                        }
                        _ => values.resize(values.len() + channels, 0.0),
                    }
                }
            }
        }
        Ok(values)
    }
}

/// The rules that are numbers. An f32 is exactly an f64.
pub(super) fn reference_rules(rules: &AttentionRules) -> reference::Rules<'static> {
    reference::Rules {
        scale: rules.scale.map(f64::from),
        softcap: rules.softcap.map(f64::from),
        causal: rules.causal,
        alignment: rules.alignment.map(|alignment| match alignment {
            Alignment::TopLeft => reference::Alignment::TopLeft,
            Alignment::BottomRight => reference::Alignment::BottomRight,
        }),
        window_left: rules.window_left,
        window_right: rules.window_right,
        ..Default::default()
    }
}

/// The shape of what broadcasts over `(B, H, Tq, Tk)`, with all four axes.
pub(super) fn four_axes(name: &str, shape: &[usize]) -> Result<[usize; 4]> {
    let mut axes = [1; 4];
    let missing = 4_usize
        .checked_sub(shape.len())
        .ok_or_else(|| Error::shape(name, "at most four axes", shape_text(shape)))?;
    axes[missing..].copy_from_slice(shape);
    Ok(axes)
}

/// `(B, T, H, D)` as `(B, H, T, D)`.
fn swap_axes(values: &[f64], tokens: usize, heads: usize, batch: usize) -> Vec<f64> {
    let rows = batch * tokens * heads;
    let channels = values.len().checked_div(rows).unwrap_or(0);
    let mut swapped = Vec::with_capacity(values.len());
    for item in 0..batch {
        for head in 0..heads {
            for token in 0..tokens {
                let row = (item * tokens + token) * heads + head;
                swapped.extend_from_slice(&values[row * channels..(row + 1) * channels]);
            }
        }
    }
    swapped
}

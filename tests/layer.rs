//! The layer against the f64 reference and against golden files, on the adapter under test.
#![allow(clippy::unwrap_used, clippy::panic, unreachable_pub)]

#[path = "support/own_device.rs"]
mod own_device;
mod support;

use support::check::{AttentionData, OwnRule};
use support::{Guarded, Random, gpu, open, run};
use wgpu_attention::compare::{Tolerance, compare};
use wgpu_attention::kernels::Form;
use wgpu_attention::reference::{self, widen};
use wgpu_attention::*;

/// A layer and what goes in, on the host.
#[derive(Clone)]
struct Setup {
    batch: usize,
    tokens: usize,
    config: LayerConfig,
    x: Vec<f32>,
    /// Cross-attention: how many tokens keys and values are made of, and those.
    source: Option<(usize, Vec<f32>)>,
    value_source: Option<Vec<f32>>,
    /// The rows of q | k | v, or of q where the source has other channels.
    qkv: Vec<f32>,
    /// The rows of k | v where the source has other channels.
    kv: Option<Vec<f32>>,
    /// Of q | k | v.
    qkv_bias: Option<Vec<f32>>,
    output: Option<Vec<f32>>,
    output_bias: Option<Vec<f32>>,
    key_mask: Option<Vec<bool>>,
    /// What rules take; its q, k and v play no part.
    operands: AttentionData,
}

impl Setup {
    /// Self-attention with random weights and x, with both biases and no operand of a rule.
    fn random(seed: u64, batch: usize, tokens: usize, config: LayerConfig) -> Self {
        Self::made(seed, batch, tokens, None, config)
    }

    /// Cross-attention.
    fn cross(seed: u64, batch: usize, tokens: usize, keys: usize, config: LayerConfig) -> Self {
        Self::made(seed, batch, tokens, Some(keys), config)
    }

    fn made(
        seed: u64,
        batch: usize,
        tokens: usize,
        source_tokens: Option<usize>,
        config: LayerConfig,
    ) -> Self {
        let mut random = Random::new(seed);
        let LayerConfig {
            d_in,
            d_source,
            d_out,
            heads,
            kv_heads,
            ..
        } = config;
        let (head_dim, value_dim) = (config.head_dim().unwrap(), config.value_dim().unwrap());
        let width = config.qkv_width().unwrap();
        // So that q, k and v have a size of about 1.
        let mut matrix = |out: usize, d_in: usize| -> Vec<f32> {
            let size = 1.0 / (d_in as f32).sqrt();
            random
                .normals(out * d_in)
                .iter()
                .map(|w| w * size)
                .collect()
        };
        let q_width = heads * head_dim;
        let (qkv, kv) = match d_source == d_in {
            true => (matrix(width, d_in), None),
            false => (
                matrix(q_width, d_in),
                Some(matrix(width - q_width, d_source)),
            ),
        };
        let output = matrix(d_out, heads * value_dim);
        let problem = AttentionProblem {
            kv_heads,
            kv_len: source_tokens.unwrap_or(tokens),
            value_dim,
            ..AttentionProblem::new(batch, heads, tokens, head_dim)
        };
        let zeros = |tokens: usize, channels: usize| vec![0.0; batch * tokens * channels];
        let operands = AttentionData::of(
            problem.clone(),
            zeros(tokens, q_width),
            zeros(problem.kv_len, kv_heads * head_dim),
            zeros(problem.kv_len, kv_heads * value_dim),
        );
        Setup {
            batch,
            tokens,
            config,
            x: random.normals(batch * tokens * d_in),
            source: source_tokens.map(|keys| (keys, random.normals(batch * keys * d_source))),
            value_source: None,
            qkv,
            kv,
            qkv_bias: Some(random.normals(width)),
            output: Some(output),
            output_bias: Some(random.normals(d_out)),
            key_mask: None,
            operands,
        }
    }

    /// With what rules take.
    fn with(self, add: impl FnOnce(AttentionData) -> AttentionData) -> Self {
        Setup {
            operands: add(self.operands),
            ..self
        }
    }

    /// Tokens that keys and values are made of.
    fn keys(&self) -> usize {
        self.source.as_ref().map_or(self.tokens, |(keys, _)| *keys)
    }

    fn output_projection(&self) -> Option<Projection<'_>> {
        let bias = self.output_bias.as_deref();
        self.output.as_deref().map(|weight| Projection {
            bias,
            ..Projection::new(weight)
        })
    }

    fn layer(&self, gpu: &Gpu) -> MultiHeadAttention {
        let bias = self.qkv_bias.as_deref();
        let output = self.output_projection();
        let qkv = match &self.kv {
            None => QkvWeights::Fused(Projection {
                bias,
                ..Projection::new(&self.qkv)
            }),
            Some(kv) => {
                let q_width = self.qkv.len() / self.config.d_in;
                let k_width = self.config.kv_heads * self.config.head_dim().unwrap();
                let (k, v) = kv.split_at(k_width * self.config.d_source);
                let part = |weight, from: usize, to: usize| Projection {
                    bias: bias.map(|bias| &bias[from..to]),
                    ..Projection::new(weight)
                };
                let end = self.config.qkv_width().unwrap();
                QkvWeights::Separate {
                    q: part(&self.qkv, 0, q_width),
                    k: part(k, q_width, q_width + k_width),
                    v: part(v, q_width + k_width, end),
                }
            }
        };
        MultiHeadAttention::new(gpu, self.config.clone(), &LayerWeights { qkv, output }).unwrap()
    }

    fn forward(&self, gpu: &Gpu) -> Vec<f32> {
        let layer = self.layer(gpu);
        layer
            .forward_host_blocking(&self.x, self.batch, self.tokens, self.key_mask.as_deref())
            .unwrap()
    }

    fn reference(&self) -> Vec<f64> {
        self.reference_all(reference::layer_without_weights).y
    }

    fn reference_all(
        &self,
        layer: impl FnOnce(&reference::LayerInputs) -> Result<reference::LayerOutputs>,
    ) -> reference::LayerOutputs {
        let wide = |values: &Option<Vec<f32>>| values.as_deref().map(widen);
        let (kv, qkv_bias, output, output_bias) = (
            wide(&self.kv),
            wide(&self.qkv_bias),
            wide(&self.output),
            wide(&self.output_bias),
        );
        let source = self.source.as_ref().map(|(_, values)| widen(values));
        let value_source = wide(&self.value_source);
        let mut operands = self.operands.clone();
        operands.problem.rules = self.config.rules.clone();
        let outputs = operands.with_inputs(|inputs| {
            layer(&reference::LayerInputs {
                batch: self.batch,
                tokens: self.tokens,
                d_in: self.config.d_in,
                d_out: self.config.d_out,
                heads: self.config.heads,
                kv_heads: Some(self.config.kv_heads),
                head_dim: self.config.head_dim,
                value_dim: self.config.value_dim,
                x: &widen(&self.x),
                source: source.as_deref(),
                value_source: value_source.as_deref(),
                source_tokens: Some(self.keys()),
                d_source: Some(self.config.d_source),
                qkv_weight: &widen(&self.qkv),
                kv_weight: kv.as_deref(),
                qkv_bias: qkv_bias.as_deref(),
                output_weight: output.as_deref(),
                output_bias: output.as_ref().and(output_bias.as_deref()),
                rotary: None,
                rules: reference::Rules {
                    // In self-attention a token's own key is its own.
                    alignment: match (inputs.rules.alignment, &self.source) {
                        (None, None) => Some(reference::Alignment::TopLeft),
                        (alignment, _) => alignment,
                    },
                    mask: match self.key_mask.as_deref() {
                        Some(values) => Some(reference::Broadcast {
                            values,
                            shape: [self.batch, 1, 1, self.keys()],
                        }),
                        None => inputs.rules.mask,
                    },
                    ..inputs.rules
                },
            })
        });
        outputs.unwrap()
    }

    fn shape(&self) -> [usize; 3] {
        [self.batch, self.tokens, self.config.d_out]
    }

    fn check(&self, gpu: &Gpu, label: &str) {
        expect(label, &self.forward(gpu), &self.shape(), &self.reference());
    }

    /// The shape of its calls, weights included.
    fn layer_shape(&self) -> LayerShape {
        LayerShape {
            source_tokens: self.source.as_ref().map(|(keys, _)| *keys),
            value_source: self.value_source.is_some(),
            mask: self.key_mask.is_some() || self.operands.mask.is_some(),
            bias: self.operands.bias.is_some(),
            kv_lens: self.operands.kv_lens.is_some(),
            q_lens: self.operands.q_lens.is_some(),
            weights: true,
            ..LayerShape::new(self.batch, self.tokens)
        }
    }

    /// Encodes a call with everything, poisoned outputs included, and gives y.
    fn check_all(&self, gpu: &Gpu, label: &str) -> Vec<f32> {
        let layer = self.layer(gpu);
        let plan = layer.plan(self.layer_shape()).unwrap();
        let upload = |tokens: usize, channels: usize, values: &[f32]| {
            let shape = [self.batch, tokens, channels];
            Tensor::from_slice(gpu, &shape, values).unwrap().view()
        };
        let LayerConfig {
            d_in,
            d_source,
            heads,
            ..
        } = self.config;
        let of_source = |values: &[f32]| upload(self.keys(), d_source, values);
        let x = upload(self.tokens, d_in, &self.x);
        let source = self.source.as_ref().map(|(_, values)| of_source(values));
        let value_source = self.value_source.as_deref().map(of_source);
        let key_mask = self.key_mask.as_deref().map(|mask| {
            let shape = [self.batch, self.keys()];
            Tensor::from_slice(gpu, &shape, mask).unwrap().view()
        });
        let operands = self.operands.upload(gpu);
        let y = Guarded::new(gpu, &self.shape());
        let pairs = [self.batch, heads, self.tokens, self.keys()];
        let weights = Guarded::new(gpu, &pairs);
        let lse = Guarded::new(gpu, &pairs[..3]);
        let (out, weights_out, lse_out) =
            (y.tensor.view(), weights.tensor.view(), lse.tensor.view());
        run(gpu, |encoder| {
            let arguments = LayerArguments {
                source: source.as_ref(),
                value_source: value_source.as_ref(),
                key_mask: key_mask.as_ref(),
                rules: operands.rules(),
                weights: Some(&weights_out),
                lse: Some(&lse_out),
                ..LayerArguments::new(&x, &out)
            };
            layer.encode(encoder, &plan, arguments).unwrap();
        });
        let expected = self.reference_all(reference::layer);
        let got = y.read().unwrap();
        expect(label, &got, &self.shape(), &expected.y);
        let weights = weights.read().unwrap();
        expect(
            &format!("{label}: weights"),
            &weights,
            &pairs,
            &expected.weights,
        );
        expect(
            &format!("{label}: log-sum-exp"),
            &lse.read().unwrap(),
            &pairs[..3],
            &expected.lse,
        );
        // Where every key is hidden a row is 0; where a sink takes its part it adds up to less.
        for (row, lse) in weights.chunks(self.keys().max(1)).zip(&expected.lse) {
            let sum: f32 = row.iter().sum();
            let empty = *lse == f64::NEG_INFINITY;
            assert!(
                self.config.rules.sinks && sum < 1.0
                    || empty && sum == 0.0
                    || (sum - 1.0).abs() < 1e-5,
                "{label}: a row of weights adds up to {sum}"
            );
        }
        got
    }
}

/// Within `1e-5 + 1e-4 * |expected|`.
fn expect(label: &str, got: &[f32], shape: &[usize], expected: &[f64]) {
    // Nothing compared is a failure, unless there is nothing.
    if shape.contains(&0) {
        assert_eq!((got.len(), expected.len()), (0, 0), "{label}");
        return;
    }
    let comparison = compare(got, shape, expected, shape, Tolerance::F32);
    assert!(comparison.passed(), "{label}: {comparison}");
}

/// Rules of that scale, causal or not.
fn scaled(scale: Option<f32>, causal: bool) -> AttentionRules {
    AttentionRules {
        scale,
        causal,
        ..Default::default()
    }
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

#[test]
fn every_option_gives_what_the_reference_gives() {
    let Some(gpu) = gpu() else { return };
    let config = LayerConfig::new(7, 12, 3);
    for form in [Form::Lanes, Form::Tiled] {
        for (number, scale) in [None, Some(0.3), Some(0.0), Some(-0.7)]
            .into_iter()
            .enumerate()
        {
            for causal in [false, true] {
                let config = LayerConfig {
                    form: Some(form),
                    ..config.clone().rules(scaled(scale, causal))
                };
                let full = Setup::random(number as u64, 2, 19, config.clone());
                for qkv_bias in [false, true] {
                    for output in ["none", "weight", "weight and bias"] {
                        let setup = Setup {
                            qkv_bias: full.qkv_bias.clone().filter(|_| qkv_bias),
                            output: full.output.clone().filter(|_| output != "none"),
                            output_bias: full
                                .output_bias
                                .clone()
                                .filter(|_| output == "weight and bias"),
                            ..full.clone()
                        };
                        setup.check(
                            &gpu,
                            &format!("{config:?}, qkv bias {qkv_bias}, output {output}"),
                        );
                    }
                }
            }
        }
    }
}

/// Rows `from..to` of a matrix `(out, d_in)`.
fn rows(matrix: &[f32], d_in: usize, from: usize, to: usize) -> &[f32] {
    &matrix[from * d_in..to * d_in]
}

/// `(out, in)` as `(in, out)`.
fn turned(matrix: &[f32], d_in: usize) -> Vec<f32> {
    let out = matrix.len() / d_in;
    (0..d_in)
        .flat_map(|i| (0..out).map(move |o| matrix[o * d_in + i]))
        .collect()
}

#[test]
fn every_form_of_weights_gives_the_same_bits() {
    let Some(gpu) = gpu() else { return };
    let (d_in, d_out, heads) = (7, 12, 3);
    let head_dim = d_out / heads;
    let full = Setup::random(40, 2, 5, LayerConfig::new(d_in, d_out, heads).causal(true));
    full.check(&gpu, "fused");
    for with_bias in [false, true] {
        let setup = Setup {
            qkv_bias: full.qkv_bias.clone().filter(|_| with_bias),
            ..full.clone()
        };
        let expected = bits(&setup.forward(&gpu));
        let bias = setup.qkv_bias.as_deref();
        let part = |from: usize, to: usize| Projection {
            bias: bias.map(|bias| &bias[from..to]),
            ..Projection::new(rows(&setup.qkv, d_in, from, to))
        };
        let check = |label: &str, qkv: QkvWeights, output: Option<Projection>| {
            let layer =
                MultiHeadAttention::new(&gpu, setup.config.clone(), &LayerWeights { qkv, output })
                    .unwrap();
            let got = layer.forward_host_blocking(&setup.x, 2, 5, None).unwrap();
            assert_eq!(bits(&got), expected, "{label}, bias {with_bias}");
        };
        let output = setup.output_projection();

        let conv = turned(&setup.qkv, d_in);
        let conv_output = turned(setup.output.as_deref().unwrap(), d_out);
        let output_bias = setup.output_bias.as_deref().unwrap();
        check(
            "Conv1D",
            QkvWeights::Fused(Projection {
                bias,
                ..Projection::conv1d(&conv)
            }),
            Some(Projection::conv1d(&conv_output).with_bias(output_bias)),
        );
        let [q, k, v] = [0, 1, 2].map(|block| part(block * d_out, (block + 1) * d_out));
        check("separate", QkvWeights::Separate { q, k, v }, output);
        let turned_k = turned(k.weight, d_in);
        let k = Projection {
            bias: k.bias,
            ..Projection::conv1d(&turned_k)
        };
        check(
            "separate, k as Conv1D",
            QkvWeights::Separate { q, k, v },
            output,
        );

        let list: Vec<HeadProjections> = (0..heads)
            .map(|head| {
                let of = |block: usize| {
                    let from = block * d_out + head * head_dim;
                    part(from, from + head_dim)
                };
                HeadProjections {
                    q: of(0),
                    k: of(1),
                    v: of(2),
                }
            })
            .collect();
        check("list of heads", QkvWeights::Heads(&list), output);

        // On the GPU already, the fused matrix once as it is and once as the permuted view of its transpose.
        let upload = |shape: &[usize], values: &[f32]| {
            Tensor::from_slice(&gpu, shape, values).unwrap().view()
        };
        let gpu_bias = bias.map(|bias| upload(&[3 * d_out], bias));
        let gpu_output =
            ProjectionTensors::new(upload(&[d_out, d_out], setup.output.as_deref().unwrap()))
                .with_bias(upload(&[d_out], output_bias));
        for (label, weight) in [
            ("tensors", upload(&[3 * d_out, d_in], &setup.qkv)),
            (
                "a permuted tensor",
                upload(&[d_in, 3 * d_out], &conv).permute(&[1, 0]).unwrap(),
            ),
        ] {
            let fused = ProjectionTensors {
                weight,
                bias: gpu_bias.clone(),
            };
            let rows = |from: usize, to: usize| ProjectionTensors {
                weight: fused.weight.slice(0, from..to).unwrap(),
                bias: gpu_bias.as_ref().map(|b| b.slice(0, from..to).unwrap()),
            };
            let split = QkvTensors::Split {
                q: rows(0, d_out),
                kv: rows(d_out, 3 * d_out),
            };
            for qkv in [QkvTensors::Fused(fused.clone()), split] {
                let layer = MultiHeadAttention::from_tensors(
                    &gpu,
                    setup.config.clone(),
                    qkv,
                    Some(gpu_output.clone()),
                )
                .unwrap();
                let got = layer.forward_host_blocking(&setup.x, 2, 5, None).unwrap();
                assert_eq!(bits(&got), expected, "{label}, bias {with_bias}");
            }
        }
    }
}

#[test]
fn the_toy_batch_has_its_shape_and_identical_sequences_give_identical_rows() {
    let Some(gpu) = gpu() else { return };
    for heads in [1, 2, 3, 6, 9] {
        for causal in [false, true] {
            let mut setup = Setup::random(
                heads as u64,
                5,
                6,
                LayerConfig::new(3, 18, heads).causal(causal),
            );
            let sequence = setup.x[..6 * 3].to_vec();
            setup.x = sequence.repeat(5);
            let layer = setup.layer(&gpu);
            let x = Tensor::from_slice(&gpu, &[5, 6, 3], &setup.x).unwrap();
            let y = layer.forward(&x, None).unwrap();
            assert_eq!(y.shape(), [5, 6, 18], "{heads} heads");
            let y: Vec<f32> = y.read_blocking().unwrap();
            expect(
                &format!("{heads} heads"),
                &y,
                &[5, 6, 18],
                &setup.reference(),
            );
            let first = bits(&y[..6 * 18]);
            for (item, rows) in y.chunks(6 * 18).enumerate() {
                assert_eq!(bits(rows), first, "{heads} heads, sequence {item}");
            }
        }
    }
}

/// keras#23081.
#[test]
fn heads_that_do_not_divide_are_refused_with_both_numbers() {
    for (d_out, heads) in [(10, 4), (18, 4), (3, 6)] {
        let error = LayerConfig::new(3, d_out, heads).head_dim().unwrap_err();
        assert!(
            matches!(
                error,
                Error::Parameter {
                    parameter: "d_out",
                    ..
                }
            ),
            "{error:?}"
        );
        let text = error.to_string();
        assert!(
            text.contains(&d_out.to_string()) && text.contains(&format!("heads = {heads}")),
            "{text}"
        );
    }
    let Some(gpu) = gpu() else { return };
    let weight = vec![0.0; 3 * 10 * 10];
    let weights = LayerWeights {
        qkv: QkvWeights::Fused(Projection::new(&weight)),
        output: None,
    };
    let error = MultiHeadAttention::new(&gpu, LayerConfig::new(10, 10, 4), &weights)
        .err()
        .unwrap();
    assert_eq!(
        error.to_string(),
        "d_out = 10: must be a multiple of heads = 4"
    );
}

/// pytorch#97128.
#[test]
fn odd_numbers_of_heads_work_without_any_bias() {
    let Some(gpu) = gpu() else { return };
    for (d_out, heads) in [(12, 3), (12, 1), (14, 7), (5, 5)] {
        let setup = Setup {
            qkv_bias: None,
            output_bias: None,
            ..Setup::random(97, 2, 9, LayerConfig::new(d_out, d_out, heads))
        };
        setup.check(&gpu, &format!("{heads} heads of {d_out} channels"));
    }
}

/// jax#19237.
#[test]
fn the_causal_switch_changes_every_row_but_the_last() {
    let Some(gpu) = gpu() else { return };
    let full = Setup::random(19237, 1, 8, LayerConfig::new(6, 10, 2));
    let causal = Setup {
        config: full.config.clone().causal(true),
        ..full.clone()
    };
    let (full, causal) = (full.forward(&gpu), causal.forward(&gpu));
    for row in 0..8 {
        let of = |y: &[f32]| y[row * 10..(row + 1) * 10].to_vec();
        let apart = of(&full)
            .iter()
            .zip(of(&causal))
            .map(|(a, b)| (a - b).abs())
            .fold(0.0, f32::max);
        if row == 7 {
            assert!(apart < 1e-5, "the last row differs by {apart}");
        } else {
            assert!(apart > 1e-3, "row {row} differs by {apart} only");
        }
    }
}

/// dfdx#158: heads are merged token by token.
#[test]
fn the_outputs_of_heads_lie_side_by_side() {
    let Some(gpu) = gpu() else { return };
    // x is the identity, so that column t of a matrix is what token t becomes; q = k = 0.
    let mut qkv = vec![0.0; 12 * 2];
    let values = [[1.0, 2.0, 5.0, 6.0], [3.0, 4.0, 7.0, 8.0]];
    for channel in 0..4 {
        for token in 0..2 {
            qkv[(8 + channel) * 2 + token] = values[token][channel];
        }
    }
    let identity: Vec<f32> = (0..16).map(|at| f32::from(u8::from(at % 5 == 0))).collect();
    for output in [None, Some(Projection::new(&identity))] {
        let weights = LayerWeights {
            qkv: QkvWeights::Fused(Projection::new(&qkv)),
            output,
        };
        let layer = MultiHeadAttention::new(&gpu, LayerConfig::new(2, 4, 2).causal(true), &weights)
            .unwrap();
        let y = layer
            .forward_host_blocking(&[1.0, 0.0, 0.0, 1.0], 1, 2, None)
            .unwrap();
        expect(
            "merged heads",
            &y,
            &[1, 2, 4],
            &[1.0, 2.0, 5.0, 6.0, 2.0, 3.0, 6.0, 7.0],
        );
    }
}

#[test]
fn the_same_call_twice_gives_the_same_bits_and_the_future_changes_none() {
    let Some(gpu) = gpu() else { return };
    for form in [Form::Lanes, Form::Tiled] {
        let config = LayerConfig {
            form: Some(form),
            ..LayerConfig::new(6, 10, 2).causal(true)
        };
        let setup = Setup::random(7, 2, 37, config);
        let layer = setup.layer(&gpu);
        let forward = |x: &[f32]| layer.forward_host_blocking(x, 2, 37, None).unwrap();
        let before = forward(&setup.x);
        assert_eq!(bits(&forward(&setup.x)), bits(&before), "{form:?}");
        for position in [0, 1, 16, 36] {
            let mut x = setup.x.clone();
            for item in 0..2 {
                x[(item * 37 + position) * 6..][..6].fill(9.5);
            }
            let after = forward(&x);
            for item in 0..2 {
                let of = |y: &[f32], from: usize, to: usize| {
                    bits(&y[(item * 37 + from) * 10..(item * 37 + to) * 10])
                };
                assert_eq!(
                    of(&after, 0, position),
                    of(&before, 0, position),
                    "{form:?}, token {position}"
                );
                assert_ne!(
                    of(&after, position, position + 1),
                    of(&before, position, position + 1),
                    "{form:?}, token {position}"
                );
            }
        }
    }
}

#[test]
fn a_key_mask_hides_tokens_whatever_they_hold() {
    let Some(gpu) = gpu() else { return };
    for form in [Form::Lanes, Form::Tiled] {
        for causal in [false, true] {
            let config = LayerConfig {
                form: Some(form),
                ..LayerConfig::new(5, 12, 3).causal(causal)
            };
            let mut setup = Setup::random(11, 3, 21, config);
            let mut mask = Random::new(5).bools(3 * 21);
            // Item 1 sees nothing at all: every y there is the output's bias.
            mask[21..42].fill(false);
            setup.key_mask = Some(mask.clone());
            let label = format!("{form:?}, causal {causal}");
            let before = setup.forward(&gpu);
            expect(&label, &before, &setup.shape(), &setup.reference());
            for row in before[21 * 12..42 * 12].chunks(12) {
                assert_eq!(row, setup.output_bias.as_deref().unwrap(), "{label}");
            }
            for (token, seen) in mask.iter().enumerate() {
                if !seen {
                    setup.x[token * 5..(token + 1) * 5].fill(f32::NAN);
                }
            }
            let after = setup.forward(&gpu);
            for (token, _) in mask.iter().enumerate().filter(|(_, seen)| **seen) {
                let row = token * 12..(token + 1) * 12;
                assert_eq!(
                    bits(&after[row.clone()]),
                    bits(&before[row]),
                    "{label}, token {token}"
                );
            }
        }
    }
}

#[test]
fn calls_before_one_submit_do_not_see_each_other() {
    let Some(gpu) = gpu() else { return };
    // The same shapes and the same weights: only parameters differ.
    let first = Setup::random(3, 2, 11, LayerConfig::new(6, 10, 2));
    let setups = [
        first.clone(),
        Setup {
            config: first.config.clone().causal(true),
            ..first.clone()
        },
        Setup {
            config: first.config.clone().rules(scaled(Some(0.05), false)),
            ..first.clone()
        },
        Setup {
            config: first.config.clone().rules(scaled(Some(-2.0), true)),
            ..first
        },
    ];
    let alone: Vec<Vec<u32>> = setups
        .iter()
        .map(|setup| bits(&setup.forward(&gpu)))
        .collect();
    for (a, b) in [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)] {
        assert_ne!(
            alone[a], alone[b],
            "the calls {a} and {b} would not show a mix-up"
        );
    }
    let layers: Vec<MultiHeadAttention> = setups.iter().map(|setup| setup.layer(&gpu)).collect();
    let plans: Vec<LayerPlan> = layers
        .iter()
        .map(|layer| layer.plan(LayerShape::new(2, 11)).unwrap())
        .collect();
    let x = Tensor::from_slice(&gpu, &[2, 11, 6], &setups[0].x)
        .unwrap()
        .view();
    let ys: Vec<Guarded> = setups
        .iter()
        .map(|setup| Guarded::new(&gpu, &setup.shape()))
        .collect();
    run(&gpu, |encoder| {
        for ((layer, plan), y) in layers.iter().zip(&plans).zip(&ys) {
            let y_view = y.tensor.view();
            let arguments = LayerArguments::new(&x, &y_view);
            layer.encode(encoder, plan, arguments).unwrap();
        }
    });
    for (number, y) in ys.iter().enumerate() {
        assert_eq!(bits(&y.read().unwrap()), alone[number], "call {number}");
    }
}

#[test]
fn one_plan_serves_many_calls_before_one_submit() {
    let Some(gpu) = gpu() else { return };
    let setups: Vec<Setup> = (0..3)
        .map(|seed| {
            let setup = Setup::random(50, 2, 7, LayerConfig::new(6, 10, 2).causal(true));
            Setup {
                x: Random::new(seed).normals(2 * 7 * 6),
                ..setup
            }
        })
        .collect();
    let alone: Vec<Vec<u32>> = setups
        .iter()
        .map(|setup| bits(&setup.forward(&gpu)))
        .collect();
    assert!(alone[0] != alone[1] && alone[1] != alone[2]);
    let layer = setups[0].layer(&gpu);
    let plan = layer.plan(LayerShape::new(2, 7)).unwrap();
    let ys: Vec<Guarded> = setups
        .iter()
        .map(|setup| Guarded::new(&gpu, &setup.shape()))
        .collect();
    run(&gpu, |encoder| {
        for (setup, y) in setups.iter().zip(&ys) {
            let x = Tensor::from_slice(&gpu, &[2, 7, 6], &setup.x).unwrap();
            let (x_view, y_view) = (x.view(), y.tensor.view());
            let arguments = LayerArguments::new(&x_view, &y_view);
            layer.encode(encoder, &plan, arguments).unwrap();
        }
    });
    for (number, y) in ys.iter().enumerate() {
        assert_eq!(bits(&y.read().unwrap()), alone[number], "call {number}");
    }
}

#[test]
fn encoding_submits_nothing() {
    let Some(gpu) = gpu() else { return };
    let setup = Setup::random(4, 1, 5, LayerConfig::new(3, 8, 2));
    let layer = setup.layer(&gpu);
    let plan = layer.plan(LayerShape::new(1, 5)).unwrap();
    let x = Tensor::from_slice(&gpu, &[1, 5, 3], &setup.x).unwrap();
    let y = Tensor::from_slice(&gpu, &[1, 5, 8], &[7.0f32; 40]).unwrap();
    let mut encoder = gpu.device().create_command_encoder(&Default::default());
    let (x_view, y_view) = (x.view(), y.view());
    let arguments = LayerArguments::new(&x_view, &y_view);
    layer.encode(&mut encoder, &plan, arguments).unwrap();
    assert_eq!(
        y.read_blocking::<f32>().unwrap(),
        [7.0; 40],
        "before the submit"
    );
    let submission = gpu.submit(encoder.finish()).unwrap();
    gpu.wait_for(submission).unwrap();
    expect(
        "after the submit",
        &y.read_blocking::<f32>().unwrap(),
        &[1, 5, 8],
        &setup.reference(),
    );
}

/// A plan is for the layers that it was made for: another layer's would compute something else.
#[test]
fn a_plan_of_another_kind_of_layer_is_refused() {
    let Some(gpu) = gpu() else { return };
    let setup = Setup::random(4, 1, 5, LayerConfig::new(3, 8, 2));
    let layer = setup.layer(&gpu);
    let x = Tensor::from_slice(&gpu, &[1, 5, 3], &setup.x).unwrap();
    let y = Tensor::empty(&gpu, &[1, 5, 8], ElementType::F32).unwrap();
    let (x_view, y_view) = (x.view(), y.view());
    let arguments = LayerArguments::new(&x_view, &y_view);
    let mut encoder = gpu.device().create_command_encoder(&Default::default());
    for (label, other) in [
        (
            "causal",
            Setup {
                config: setup.config.clone().causal(true),
                ..setup.clone()
            },
        ),
        (
            "scale",
            Setup {
                config: setup.config.clone().rules(scaled(Some(0.1), false)),
                ..setup.clone()
            },
        ),
        (
            "heads",
            Setup {
                config: LayerConfig {
                    heads: 4,
                    kv_heads: 4,
                    ..setup.config.clone()
                },
                ..setup.clone()
            },
        ),
        (
            "no output projection",
            Setup {
                output: None,
                ..setup.clone()
            },
        ),
        ("d_out", Setup::random(5, 1, 5, LayerConfig::new(3, 10, 2))),
    ] {
        let plan = other.layer(&gpu).plan(LayerShape::new(1, 5)).unwrap();
        let error = layer.encode(&mut encoder, &plan, arguments).unwrap_err();
        assert!(
            matches!(
                error,
                Error::Parameter {
                    parameter: "plan",
                    ..
                }
            ),
            "{label}: {error}"
        );
    }
    let shape = layer.plan(LayerShape::new(1, 6)).unwrap();
    let error = layer.encode(&mut encoder, &shape, arguments).unwrap_err();
    assert_eq!(error.to_string(), "x: expected (1, 6, 3), got (1, 5, 3)");
    let masked = layer.plan(LayerShape::new(1, 5).mask(true)).unwrap();
    let error = layer.encode(&mut encoder, &masked, arguments).unwrap_err();
    assert_eq!(
        error.to_string(),
        "key_mask: expected a tensor as planned, got none"
    );

    // The plan of a layer that differs in its weights alone will do.
    let twin = Setup::random(77, 1, 5, setup.config.clone());
    let plan = twin.layer(&gpu).plan(LayerShape::new(1, 5)).unwrap();
    layer.encode(&mut encoder, &plan, arguments).unwrap();
    gpu.submit(encoder.finish()).unwrap();
    expect(
        "a twin's plan",
        &y.read_blocking::<f32>().unwrap(),
        &[1, 5, 8],
        &setup.reference(),
    );
}

#[test]
fn x_and_y_may_be_strided_views() {
    let Some(gpu) = gpu() else { return };
    let (batch, tokens, d_in, d_out) = (2, 9, 6, 10);
    for output in [true, false] {
        let mut setup = Setup::random(
            8,
            batch,
            tokens,
            LayerConfig::new(d_in, d_out, 2).causal(true),
        );
        setup.output = setup.output.filter(|_| output);
        let layer = setup.layer(&gpu);
        let plan = layer.plan(LayerShape::new(batch, tokens)).unwrap();
        let expected = bits(&setup.forward(&gpu));
        let at = |b: usize, t: usize, c: usize| setup.x[(b * tokens + t) * d_in + c];

        // x in the middle of a larger tensor full of NaN, and x with the channels first.
        let (wide_b, wide_t, wide_c) = (batch + 1, tokens + 3, d_in + 5);
        let mut inside = vec![f32::NAN; wide_b * wide_t * wide_c];
        let mut channels_first = vec![f32::NAN; batch * d_in * tokens];
        for b in 0..batch {
            for t in 0..tokens {
                for c in 0..d_in {
                    inside[((b + 1) * wide_t + t + 2) * wide_c + c + 3] = at(b, t, c);
                    channels_first[(b * d_in + c) * tokens + t] = at(b, t, c);
                }
            }
        }
        let inside = Tensor::from_slice(&gpu, &[wide_b, wide_t, wide_c], &inside)
            .unwrap()
            .view();
        let inside = inside
            .slice(0, 1..1 + batch)
            .unwrap()
            .slice(1, 2..2 + tokens)
            .unwrap();
        let inside = inside.slice(2, 3..3 + d_in).unwrap();
        let image = Tensor::from_slice(&gpu, &[batch, d_in, 3, 3], &channels_first).unwrap();
        let image = image
            .reshape(&[batch, d_in, tokens])
            .unwrap()
            .view()
            .permute(&[0, 2, 1])
            .unwrap();
        for (label, x) in [("a slice", &inside), ("channels first", &image)] {
            let y = Guarded::new(&gpu, &setup.shape());
            run(&gpu, |encoder| {
                let y_view = y.tensor.view();
                let arguments = LayerArguments::new(x, &y_view);
                layer.encode(encoder, &plan, arguments).unwrap();
            });
            assert_eq!(
                bits(&y.read().unwrap()),
                expected,
                "x is {label}, output projection {output}"
            );
        }

        // y in the middle of a larger tensor: what lies beside it stays.
        let whole =
            Tensor::from_slice(&gpu, &[batch, 13, 17], &vec![-1.0f32; batch * 13 * 17]).unwrap();
        let y = whole
            .view()
            .slice(1, 2..2 + tokens)
            .unwrap()
            .slice(2, 4..4 + d_out)
            .unwrap();
        run(&gpu, |encoder| {
            layer
                .encode(encoder, &plan, LayerArguments::new(&inside, &y))
                .unwrap();
        });
        assert_eq!(
            bits(&y.read_blocking().unwrap()),
            expected,
            "y is a slice, output projection {output}"
        );
        let all: Vec<f32> = whole.read_blocking().unwrap();
        for (place, value) in all.iter().enumerate() {
            let (t, c) = (place / 17 % 13, place % 17);
            if !(2..2 + tokens).contains(&t) || !(4..4 + d_out).contains(&c) {
                assert_eq!(*value, -1.0, "element {place} beside y was written");
            }
        }

        // y with the channels first: the output projection writes it as it lies, attention alone does not.
        let whole = Tensor::empty(&gpu, &[batch, d_out, tokens], ElementType::F32).unwrap();
        let y = whole.view().permute(&[0, 2, 1]).unwrap();
        let mut encoder = gpu.device().create_command_encoder(&Default::default());
        let result = layer.encode(&mut encoder, &plan, LayerArguments::new(&inside, &y));
        if output {
            result.unwrap();
            gpu.submit(encoder.finish()).unwrap();
            assert_eq!(
                bits(&y.read_blocking().unwrap()),
                expected,
                "y has its channels first"
            );
        } else {
            assert!(matches!(result, Err(Error::Layout { .. })), "{result:?}");
        }
    }
}

/// mlx#3312: no buffer of size T x T.
#[test]
fn memory_grows_with_the_number_of_tokens() {
    let Some(gpu) = open(&GpuOptions::default()) else {
        return;
    };
    let (d_in, d_out) = (16, 256);
    let setup = Setup {
        output: None,
        ..Setup::random(1, 1, 1, LayerConfig::new(d_in, d_out, 4).causal(true))
    };
    let with_output = Setup::random(1, 1, 1, setup.config.clone());
    let (layer, projected) = (setup.layer(&gpu), with_output.layer(&gpu));
    let weights = gpu.allocated_bytes();
    for tokens in [4096, 8192, 16384] {
        let plan = layer.plan(LayerShape::new(1, tokens)).unwrap();
        let of_tokens = |channels: usize| (4 * tokens * channels) as u64;
        assert_eq!(
            plan.workspace_bytes(),
            of_tokens(3 * d_out),
            "{tokens} tokens"
        );
        assert!(
            plan.steps()
                .iter()
                .all(|(_, plan)| plan.workspace_bytes == 0)
        );
        assert_eq!(
            gpu.allocated_bytes(),
            weights + plan.workspace_bytes(),
            "{tokens} tokens"
        );
        assert_eq!(
            gpu.peak_allocated_bytes(),
            gpu.allocated_bytes(),
            "{tokens} tokens"
        );
        drop(plan);
        assert_eq!(gpu.allocated_bytes(), weights, "{tokens} tokens");
    }
    let plan = projected.plan(LayerShape::new(1, 4096)).unwrap();
    assert_eq!(plan.workspace_bytes(), 4 * 4096 * 4 * 256);
    drop(plan);

    // Run at 2048 tokens, with smaller heads; rows are sampled, since the reference is slow.
    let (tokens, d_out) = (2048, 64);
    let setup = Setup {
        output: None,
        ..Setup::random(3, 1, tokens, LayerConfig::new(d_in, d_out, 4).causal(true))
    };
    let mut peak = 0;
    for half in [tokens / 2, tokens] {
        // A device of its own, so that the peak is that of this call.
        let Some(gpu) = open(&GpuOptions::default()) else {
            return;
        };
        let part = Setup {
            tokens: half,
            x: setup.x[..half * d_in].to_vec(),
            ..setup.clone()
        };
        let layer = part.layer(&gpu);
        let weights = gpu.allocated_bytes();
        let y = layer.forward_host_blocking(&part.x, 1, half, None).unwrap();
        let used = gpu.peak_allocated_bytes() - weights;
        assert_eq!(
            used,
            (4 * half * (d_in + 4 * d_out)) as u64,
            "{half} tokens: x, q|k|v and y"
        );
        assert!(
            peak == 0 || used == 2 * peak,
            "{used} bytes for {half} tokens, {peak} for half of them"
        );
        peak = used;
        if half == tokens {
            check_sampled_rows(&setup, &y);
        }
    }
}

/// Rows of a layer without output projection against the reference's.
fn check_sampled_rows(setup: &Setup, y: &[f32]) {
    let LayerConfig {
        d_in, d_out, heads, ..
    } = setup.config;
    let (x, weight) = (widen(&setup.x), widen(&setup.qkv));
    let bias = widen(setup.qkv_bias.as_deref().unwrap());
    let [q, k, v] = [0, 1, 2].map(|block| {
        let weight = &weight[block * d_out * d_in..(block + 1) * d_out * d_in];
        let bias = &bias[block * d_out..(block + 1) * d_out];
        reference::linear(&x, setup.tokens, d_in, weight, Some(bias), d_out).unwrap()
    });
    let inputs = reference::AttentionInputs {
        batch: 1,
        heads,
        q_len: setup.tokens,
        kv_len: setup.tokens,
        head_dim: d_out / heads,
        q: &q,
        k: &k,
        v: &v,
        rules: reference::Rules {
            causal: setup.config.rules.causal,
            ..Default::default()
        },
        ..Default::default()
    };
    let head_dim = d_out / heads;
    for token in [0, 1, 63, 64, 1000, setup.tokens - 2, setup.tokens - 1] {
        for head in 0..heads {
            let row = reference::attention_row(&inputs, 0, head, token).unwrap();
            let got = &y[token * d_out + head * head_dim..][..head_dim];
            expect(
                &format!("token {token}, head {head}"),
                got,
                &[head_dim],
                &row.out,
            );
        }
    }
}

#[test]
fn an_empty_batch_gives_an_empty_result() {
    let Some(gpu) = gpu() else { return };
    let setup = Setup::random(2, 1, 1, LayerConfig::new(3, 8, 2));
    let layer = setup.layer(&gpu);
    for (batch, tokens) in [(0, 5), (5, 0), (0, 0)] {
        for mask in [None, Some(&[][..])] {
            let y = layer
                .forward_host_blocking(&[], batch, tokens, mask)
                .unwrap();
            assert!(y.is_empty(), "{batch} x {tokens}");
        }
        let plan = layer.plan(LayerShape::new(batch, tokens)).unwrap();
        assert!(
            plan.steps().iter().all(|(_, plan)| plan.grid.is_none()),
            "{plan}"
        );
    }
    // And the layer works as before.
    Setup::random(2, 1, 1, setup.config).check(&gpu, "after nothing");
}

/// An application's own device with WebGPU's default limits, and its own encoder and submission.
#[test]
fn an_application_brings_its_own_device() {
    let Some(under_test) = gpu() else { return };
    let (device, queue) = own_device::own_device(&under_test, wgpu::Features::empty());
    let gpu = Gpu::from_device(device.clone(), queue.clone()).unwrap();
    let setup = Setup::random(31, 2, 13, LayerConfig::new(6, 12, 3).causal(true));
    let layer = setup.layer(&gpu);
    let plan = layer.plan(LayerShape::new(2, 13)).unwrap();

    // Everything but the layer is plain wgpu.
    let buffer = |label, usage, size: usize| {
        device.create_buffer(&wgpu::BufferDescriptor {
            label: Some(label),
            size: size as u64,
            usage,
            mapped_at_creation: false,
        })
    };
    use wgpu::BufferUsages as Usage;
    let x = buffer("x", Usage::STORAGE | Usage::COPY_DST, 4 * 2 * 13 * 6);
    let y = buffer("y", Usage::STORAGE | Usage::COPY_SRC, 4 * 2 * 13 * 12);
    let host = buffer("host", Usage::MAP_READ | Usage::COPY_DST, 4 * 2 * 13 * 12);
    let bytes: Vec<u8> = setup
        .x
        .iter()
        .flat_map(|value| value.to_le_bytes())
        .collect();
    queue.write_buffer(&x, 0, &bytes);
    let x = Tensor::from_buffer(&gpu, x, 0, &[2, 13, 6], ElementType::F32).unwrap();
    let y_tensor = Tensor::from_buffer(&gpu, y.clone(), 0, &[2, 13, 12], ElementType::F32).unwrap();
    let mut encoder = device.create_command_encoder(&Default::default());
    let (x_view, y_view) = (x.view(), y_tensor.view());
    let arguments = LayerArguments::new(&x_view, &y_view);
    layer.encode(&mut encoder, &plan, arguments).unwrap();
    encoder.copy_buffer_to_buffer(&y, 0, &host, 0, 4 * 2 * 13 * 12);
    queue.submit([encoder.finish()]);
    host.map_async(wgpu::MapMode::Read, .., |result| result.unwrap());
    device.poll(wgpu::PollType::wait_indefinitely()).unwrap();
    let mapped = host.get_mapped_range(..).unwrap();
    let got: Vec<f32> = mapped
        .chunks(4)
        .map(|b| f32::from_le_bytes(b.try_into().unwrap()))
        .collect();
    expect("own device", &got, &[2, 13, 12], &setup.reference());
}

const FORMS: [Form; 2] = [Form::Lanes, Form::Tiled];

#[test]
fn heads_in_groups_and_of_any_width_give_what_the_reference_gives() {
    let Some(gpu) = gpu() else { return };
    for form in FORMS {
        for (heads, kv_heads, head_dim, value_dim) in [
            (4, 2, None, None),
            (6, 3, None, None),
            (6, 1, None, None),
            (4, 4, Some(5), None),
            (4, 2, None, Some(7)),
            (6, 1, Some(9), Some(4)),
            (1, 1, Some(33), Some(17)),
        ] {
            for causal in [false, true] {
                let config = LayerConfig {
                    head_dim,
                    value_dim,
                    form: Some(form),
                    ..LayerConfig::new(7, 12, heads)
                        .kv_heads(kv_heads)
                        .causal(causal)
                };
                let label = format!("{config:?}");
                let mut setup = Setup::random(heads as u64, 2, 19, config);
                setup.check_all(&gpu, &label);
                setup.check(&gpu, &label);
                // Without an output projection y is as wide as all heads together.
                setup.config.d_out = heads * setup.config.value_dim().unwrap();
                setup.config.head_dim = Some(setup.operands.problem.head_dim);
                setup.output = None;
                setup.check_all(&gpu, &format!("{label}, no output projection"));
            }
        }
    }
}

/// maxtext#4442: 4 query heads that share 2 KV heads of 16 channels have a fused weight of 128 rows, not 192.
#[test]
fn the_fused_weight_of_grouped_heads_has_as_many_rows_as_there_are_heads() {
    let Some(gpu) = gpu() else { return };
    let config = LayerConfig::new(64, 64, 4).kv_heads(2);
    assert_eq!(config.qkv_width().unwrap(), 128);
    let setup = Setup::random(4442, 2, 9, config.clone());
    assert_eq!(setup.qkv.len(), 128 * 64);
    setup.check_all(&gpu, "128 rows");
    let wide = vec![0.1; 192 * 64];
    let weights = LayerWeights {
        qkv: QkvWeights::Fused(Projection::new(&wide)),
        output: None,
    };
    let error = MultiHeadAttention::new(&gpu, config, &weights).unwrap_err();
    assert_eq!(
        error.to_string(),
        "qkv weight: expected (128, 64) = 8192 values, got 12288 values"
    );
    assert!(matches!(error, Error::Shape { .. }));
}

#[test]
fn cross_attention_gives_what_the_reference_gives() {
    let Some(gpu) = gpu() else { return };
    for form in FORMS {
        for (tokens, keys) in [(5, 19), (21, 3), (8, 8), (4, 0), (0, 4)] {
            for d_source in [6, 11] {
                let config = LayerConfig {
                    value_dim: Some(5),
                    form: Some(form),
                    ..LayerConfig::new(6, 12, 4).kv_heads(2).source(d_source)
                };
                let label = format!("{form:?}, {tokens} by {keys} tokens, {d_source} channels");
                let shared = Setup::cross(7, 2, tokens, keys, config);
                let y = shared.check_all(&gpu, &label);
                let layer = shared.layer(&gpu);
                let tensor = |shape: &[usize], values: &[f32]| {
                    Tensor::from_slice(&gpu, shape, values).unwrap()
                };
                let source = &shared.source.as_ref().unwrap().1;
                let forward = layer.forward_cross(
                    &tensor(&[2, tokens, 6], &shared.x),
                    &tensor(&[2, keys, d_source], source),
                    None,
                );
                let forward: Vec<f32> = forward.unwrap().read_blocking().unwrap();
                assert_eq!(bits(&forward), bits(&y), "{label}: forward");
                let separate = Setup {
                    value_source: Some(Random::new(8).normals(2 * keys * d_source)),
                    ..shared.clone()
                };
                let other = separate.check_all(&gpu, &format!("{label}, values apart"));
                assert!(tokens * keys == 0 || bits(&other) != bits(&y), "{label}");
                let masked = Setup {
                    key_mask: Some(Random::new(9).bools(2 * keys)),
                    ..separate
                };
                masked.check_all(&gpu, &format!("{label}, masked"));
                for alignment in [Alignment::TopLeft, Alignment::BottomRight] {
                    let mut causal = masked.clone();
                    causal.config.rules = AttentionRules::causal(alignment);
                    causal.check_all(&gpu, &format!("{label}, {alignment:?}"));
                }
            }
        }
    }
}

/// One dispatch makes q, k and v in self-attention, two do in cross-attention, three where values come from elsewhere.
#[test]
fn a_plan_says_its_steps() {
    let Some(gpu) = gpu() else { return };
    let layer = Setup::random(1, 2, 5, LayerConfig::new(6, 12, 3)).layer(&gpu);
    let steps = |shape: LayerShape| -> Vec<Step> {
        let plan = layer.plan(shape).unwrap();
        plan.steps().iter().map(|(step, _)| *step).collect()
    };
    let (shape, cross) = (LayerShape::new(2, 5), LayerShape::new(2, 5).source(7));
    use Step::*;
    assert_eq!(steps(shape), [QkvProjection, Attention, OutputProjection]);
    assert_eq!(
        steps(shape.weights(true)),
        [QkvProjection, Attention, Weights, OutputProjection]
    );
    assert_eq!(
        steps(cross),
        [QProjection, KvProjection, Attention, OutputProjection]
    );
    let values_apart = LayerShape {
        value_source: true,
        ..cross
    };
    assert_eq!(
        steps(values_apart),
        [
            QProjection,
            KProjection,
            VProjection,
            Attention,
            OutputProjection
        ]
    );
}

#[test]
fn padding_is_the_same_as_key_mask_as_lengths_and_as_mask_of_pairs() {
    let Some(gpu) = gpu() else { return };
    let (batch, tokens) = (3, 21);
    let lens = [21u32, 8, 0];
    let seen = |item: usize, key: usize| key < lens[item] as usize;
    let mask: Vec<bool> = (0..batch * tokens)
        .map(|at| seen(at / tokens, at % tokens))
        .collect();
    let pairs: Vec<bool> = (0..batch * tokens * tokens)
        .map(|at| seen(at / (tokens * tokens), at % tokens))
        .collect();
    for form in FORMS {
        for causal in [false, true] {
            let config = LayerConfig {
                form: Some(form),
                ..LayerConfig::new(5, 12, 3).causal(causal)
            };
            let setup = Setup::random(12, batch, tokens, config);
            let label = format!("{form:?}, causal {causal}");
            let by_key_mask = Setup {
                key_mask: Some(mask.clone()),
                ..setup.clone()
            };
            let by_lens = setup.clone().with(|data| data.with_kv_lens(&lens));
            let by_pairs = setup
                .clone()
                .with(|data| data.with_mask([batch, 1, tokens, tokens], pairs.clone()));
            let ys = [by_key_mask, by_lens, by_pairs].map(|setup| setup.check_all(&gpu, &label));
            expect(
                &label,
                &ys[0],
                &setup.shape(),
                &ys[1].iter().map(|y| f64::from(*y)).collect::<Vec<_>>(),
            );
            expect(
                &label,
                &ys[0],
                &setup.shape(),
                &ys[2].iter().map(|y| f64::from(*y)).collect::<Vec<_>>(),
            );
            // Padded queries as well: what is left of their rows is the output's bias.
            let both = setup.with(|data| data.with_kv_lens(&lens).with_q_lens(&lens));
            let y = both.check_all(&gpu, &format!("{label}, queries too"));
            for row in y[(tokens + 8) * 12..].chunks(12) {
                assert_eq!(row, both.output_bias.as_deref().unwrap(), "{label}");
            }
        }
    }
}

/// The same in WGSL and on the host: documents of 5 tokens, and a bias by distance.
const DOCUMENTS: OwnRule = OwnRule {
    wgsl: "
        fn may_attend(batch: u32, head: u32, query: u32, key: u32) -> bool {
            return query / 5u == key / 5u;
        }
        fn score(score: f32, batch: u32, head: u32, query: u32, key: u32) -> f32 {
            return score + rule_data(head) * f32(key);
        }
    ",
    may_attend: |[_, _, query, key], _| query / 5 == key / 5,
    score: |score, [_, head, _, key], data| score + f64::from(data[head]) * key as f64,
};

#[test]
fn every_rule_reaches_the_layer() {
    let Some(gpu) = gpu() else { return };
    let (batch, heads, tokens) = (2, 4, 23);
    let rules = AttentionRules::default;
    type Add = fn(AttentionData) -> AttentionData;
    let cases: Vec<(&str, AttentionRules, Add)> = vec![
        (
            "window",
            AttentionRules {
                window_left: Some(3),
                window_right: Some(2),
                ..rules()
            },
            |data| data,
        ),
        (
            "causal window",
            AttentionRules {
                causal: true,
                window_left: Some(4),
                ..rules()
            },
            |data| data,
        ),
        (
            "softcap",
            AttentionRules {
                softcap: Some(0.7),
                scale: Some(0.9),
                ..rules()
            },
            |data| data,
        ),
        (
            "alibi",
            AttentionRules {
                alibi: true,
                causal: true,
                ..rules()
            },
            |data| data.with_slopes(vec![0.5, 0.25, 0.125, 0.0625]),
        ),
        (
            "sinks",
            AttentionRules {
                sinks: true,
                ..rules()
            },
            |data| data.with_sinks(vec![0.3, -1.0, 2.0, 0.0]),
        ),
        ("bias", rules(), |data| {
            data.with_bias([1, 4, 23, 23], Random::new(5).normals(4 * 23 * 23))
        }),
        ("mask of pairs", rules(), |data| {
            data.with_mask([2, 1, 23, 23], Random::new(6).bools(2 * 23 * 23))
        }),
        (
            "own rule",
            AttentionRules {
                rule: Some(Rule::new(DOCUMENTS.wgsl).unwrap()),
                ..rules()
            },
            |data| data.with_rule(DOCUMENTS, vec![0.1, -0.2, 0.3, 0.0]),
        ),
    ];
    for form in FORMS {
        let plain = LayerConfig {
            form: Some(form),
            ..LayerConfig::new(7, 12, heads).kv_heads(2)
        };
        let plain = Setup::random(3, batch, tokens, plain);
        let without = bits(&plain.check_all(&gpu, "no rule"));
        for (name, rules, add) in &cases {
            let mut setup = plain.clone().with(add);
            setup.config.rules = rules.clone();
            let with = setup.check_all(&gpu, &format!("{name}, {form:?}"));
            assert_ne!(bits(&with), without, "{name} changed nothing");
        }
    }
}

/// A U-Net's block attends over an image as it lies, channels first.
#[test]
fn an_image_with_its_channels_first_is_not_transposed() {
    let Some(gpu) = gpu() else { return };
    let (batch, d_in, d_out, height, width) = (2, 6, 10, 3, 5);
    let tokens = height * width;
    let setup = Setup::random(8, batch, tokens, LayerConfig::new(d_in, d_out, 2));
    let mut x = vec![0.0; batch * d_in * tokens];
    for b in 0..batch {
        for t in 0..tokens {
            for c in 0..d_in {
                x[(b * d_in + c) * tokens + t] = setup.x[(b * tokens + t) * d_in + c];
            }
        }
    }
    let x = Tensor::from_slice(&gpu, &[batch, d_in, height, width], &x).unwrap();
    let y = Guarded::new(&gpu, &[batch, d_out, height, width]);
    let layer = setup.layer(&gpu);
    let plan = layer.plan(LayerShape::new(batch, tokens)).unwrap();
    assert_eq!(plan.steps().len(), 3);
    let from = x.view().image_tokens().unwrap();
    let to = y.tensor.view().image_tokens().unwrap();
    assert_eq!(
        (from.shape(), to.shape()),
        (&[batch, tokens, d_in][..], &[batch, tokens, d_out][..])
    );
    run(&gpu, |encoder| {
        layer
            .encode(encoder, &plan, LayerArguments::new(&from, &to))
            .unwrap();
    });
    y.read().unwrap();
    let got: Vec<f32> = to.read_blocking().unwrap();
    expect("channels first", &got, &setup.shape(), &setup.reference());
    assert_eq!(bits(&got), bits(&setup.forward(&gpu)));

    let flat = x.reshape(&[batch, d_in, tokens]).unwrap();
    let error = flat.view().image_tokens().unwrap_err();
    assert_eq!(
        error.to_string(),
        "image: expected an image (B, C, height, width), got (2, 6, 15)"
    );
    // Every second column: pixels are not evenly spaced.
    let part = x.view().slice(3, 0..4).unwrap().image_tokens();
    assert!(matches!(part, Err(Error::Layout { .. })), "{part:?}");
}

/// Calls of different kinds before one submit, and one plan for several of them.
#[test]
fn kinds_of_calls_before_one_submit_do_not_see_each_other() {
    let Some(gpu) = gpu() else { return };
    let config = LayerConfig::new(6, 12, 3);
    let setup = Setup::cross(1, 2, 5, 9, config);
    let layer = setup.layer(&gpu);
    let other = Setup {
        x: Random::new(2).normals(setup.x.len()),
        source: Some((9, Random::new(3).normals(2 * 9 * 6))),
        ..setup.clone()
    };
    let alone = Setup {
        source: None,
        operands: Setup::random(1, 2, 5, setup.config.clone()).operands,
        ..setup.clone()
    };
    let f32s =
        |shape: &[usize], values: &[f32]| Tensor::from_slice(&gpu, shape, values).unwrap().view();
    let outputs = [&setup, &other, &alone].map(|setup| Guarded::new(&gpu, &setup.shape()));
    let weights = Guarded::new(&gpu, &[2, 3, 5, 9]);
    let plan = layer
        .plan(LayerShape::new(2, 5).source(9).weights(true))
        .unwrap();
    let self_plan = layer.plan(LayerShape::new(2, 5)).unwrap();
    run(&gpu, |encoder| {
        for (setup, y) in [&setup, &other, &alone].into_iter().zip(&outputs) {
            let (x, y) = (f32s(&[2, 5, 6], &setup.x), y.tensor.view());
            let source = setup
                .source
                .as_ref()
                .map(|(_, values)| f32s(&[2, 9, 6], values));
            let plan = if source.is_some() { &plan } else { &self_plan };
            // The weights of the first call alone.
            let asked = std::ptr::eq(setup, &other).then(|| weights.tensor.view());
            let arguments = LayerArguments {
                source: source.as_ref(),
                weights: asked.as_ref(),
                ..LayerArguments::new(&x, &y)
            };
            layer.encode(encoder, plan, arguments).unwrap();
        }
    });
    for (number, (setup, y)) in [&setup, &other, &alone]
        .into_iter()
        .zip(&outputs)
        .enumerate()
    {
        let label = format!("call {number}");
        expect(
            &label,
            &y.read().unwrap(),
            &setup.shape(),
            &setup.reference(),
        );
    }
    let expected = other.reference_all(reference::layer).weights;
    expect(
        "weights",
        &weights.read().unwrap(),
        &[2, 3, 5, 9],
        &expected,
    );
}

/// Each wrong argument is an error of its kind that names it.
#[test]
fn wrong_arguments_are_named() {
    let Some(gpu) = gpu() else { return };
    fn says<T>(result: Result<T>, kind: &str, text: &str) {
        let error = result.err().expect(text);
        assert_eq!(error.to_string(), text);
        let got = match error {
            Error::Shape { .. } => "shape",
            Error::Type { .. } => "type",
            Error::Layout { .. } => "layout",
            Error::Parameter { .. } => "parameter",
            _ => "other",
        };
        assert_eq!(got, kind, "{text}");
    }
    let config = LayerConfig::new(4, 8, 4);
    let width = |config: LayerConfig| config.qkv_width();
    says(
        width(config.clone().kv_heads(3)),
        "parameter",
        "heads = 4: must be a multiple of kv_heads = 3",
    );
    says(
        width(config.clone().kv_heads(0)),
        "parameter",
        "kv_heads = 0: must be at least 1",
    );
    says(
        width(config.clone().source(0)),
        "parameter",
        "d_source = 0: must be at least 1",
    );
    let of_dims = |head_dim, value_dim| LayerConfig {
        head_dim,
        value_dim,
        ..config.clone()
    };
    says(
        width(of_dims(Some(0), None)),
        "parameter",
        "head_dim = 0: must be at least 1",
    );
    says(
        width(of_dims(None, Some(0))),
        "parameter",
        "value_dim = 0: must be at least 1",
    );
    says(
        width(of_dims(Some(usize::MAX), None)),
        "parameter",
        "heads = 4: q, k and v of all heads together must fit a machine word",
    );
    says(
        width(config.clone().rules(AttentionRules {
            softcap: Some(0.0),
            ..Default::default()
        })),
        "parameter",
        "softcap = 0: must be from 1e-30 to 1e30; leave it unset for none",
    );

    let values = vec![0.1; 1024];
    let part = |count: usize| Projection::new(&values[..count]);
    let new = |config: LayerConfig, qkv| {
        MultiHeadAttention::new(&gpu, config, &LayerWeights { qkv, output: None })
    };
    says(
        new(config.clone().source(5), QkvWeights::Fused(part(96))),
        "parameter",
        "d_source = 5: must be d_in = 4 where the weights of q, k and v are fused; give those of q apart",
    );
    let separate = |k: usize| QkvWeights::Separate {
        q: part(32),
        k: part(k),
        v: part(40),
    };
    says(
        new(config.clone().source(5), separate(32)),
        "shape",
        "k weight: expected (8, 5) = 40 values, got 32 values",
    );
    says(
        new(of_dims(None, Some(3)), QkvWeights::Fused(part(112))),
        "parameter",
        "d_out = 8: must be heads * value_dim = 12 where there is no output projection",
    );
    let head = HeadProjections {
        q: part(8),
        k: part(8),
        v: part(8),
    };
    let four = [head; 4];
    says(
        new(config.clone().kv_heads(2), QkvWeights::Heads(&four)),
        "parameter",
        "kv_heads = 2: must be heads = 4 where the weights are a list of heads; give them fused or separate",
    );
    let other_source = new(config.clone().source(5), separate(40)).unwrap();
    says(
        other_source.plan(LayerShape::new(1, 3)),
        "parameter",
        "source_tokens = none: must be given: keys and values are made of 5 channels, x has 4",
    );
    let layer = new(config.clone(), QkvWeights::Fused(part(96))).unwrap();
    let values_apart = LayerShape {
        value_source: true,
        ..LayerShape::new(1, 3)
    };
    says(
        layer.plan(values_apart),
        "parameter",
        "value_source = true: needs source_tokens: values alone cannot come from elsewhere",
    );
    let causal = new(config.clone().causal(true), QkvWeights::Fused(part(96))).unwrap();
    causal.plan(LayerShape::new(1, 3)).unwrap();
    let error = causal.plan(LayerShape::new(1, 3).source(4)).unwrap_err();
    assert!(
        matches!(
            error,
            Error::Parameter {
                parameter: "alignment",
                ..
            }
        ),
        "{error}"
    );

    let tensor = |shape: &[usize], ty| Tensor::empty(&gpu, shape, ty).unwrap().view();
    let (f32, bool) = (ElementType::F32, ElementType::Bool);
    let mut encoder = gpu.device().create_command_encoder(&Default::default());
    let (x, y) = (tensor(&[1, 3, 4], f32), tensor(&[1, 3, 8], f32));
    let mut says_of = |shape: LayerShape, arguments: LayerArguments, kind: &str, text: &str| {
        let plan = layer.plan(shape).unwrap();
        says(layer.encode(&mut encoder, &plan, arguments), kind, text);
    };
    let plain = LayerShape::new(1, 3);
    let cross = plain.source(5);
    let call = LayerArguments::new(&x, &y);
    let source = tensor(&[1, 5, 4], f32);
    let (wrong, mask) = (tensor(&[1, 4, 4], f32), tensor(&[1, 3], bool));
    says_of(
        cross,
        call,
        "shape",
        "source: expected a tensor as planned, got none",
    );
    says_of(
        plain,
        LayerArguments {
            source: Some(&source),
            ..call
        },
        "shape",
        "source: expected none as planned, got a tensor",
    );
    says_of(
        cross,
        LayerArguments {
            source: Some(&wrong),
            ..call
        },
        "shape",
        "source: expected (1, 5, 4), got (1, 4, 4)",
    );
    says_of(
        LayerShape {
            value_source: true,
            ..cross
        },
        LayerArguments {
            source: Some(&source),
            value_source: Some(&wrong),
            ..call
        },
        "shape",
        "value_source: expected (1, 5, 4), got (1, 4, 4)",
    );
    says_of(
        LayerShape {
            value_source: true,
            ..cross
        },
        LayerArguments {
            source: Some(&source),
            ..call
        },
        "shape",
        "value_source: expected a tensor as planned, got none",
    );
    says_of(
        cross.mask(true),
        LayerArguments {
            source: Some(&source),
            key_mask: Some(&mask),
            ..call
        },
        "shape",
        "key_mask: expected (1, 5), got (1, 3)",
    );
    says_of(
        plain.mask(true),
        LayerArguments {
            key_mask: Some(&tensor(&[1, 3], f32)),
            ..call
        },
        "type",
        "key_mask: expected element type bool, got f32",
    );
    let pairs = tensor(&[1, 1, 3, 3], bool);
    let rules = RuleArguments {
        mask: Some(&pairs),
        ..Default::default()
    };
    says_of(
        plain.mask(true),
        LayerArguments {
            key_mask: Some(&mask),
            rules,
            ..call
        },
        "shape",
        "key_mask: expected a key mask or a mask of pairs, got both",
    );
    says_of(
        plain,
        LayerArguments { rules, ..call },
        "shape",
        "mask: expected none as planned, got a tensor",
    );
    let bias = tensor(&[1, 1, 3, 4], f32);
    let rules = RuleArguments {
        bias: Some(&bias),
        ..Default::default()
    };
    says_of(
        LayerShape {
            bias: true,
            ..plain
        },
        LayerArguments { rules, ..call },
        "shape",
        "bias: expected a shape that broadcasts to (1, 4, 3, 3) (each axis full or 1, aligned at the last), got (1, 1, 3, 4)",
    );
    let lens = tensor(&[2], ElementType::U32);
    let rules = RuleArguments {
        kv_lens: Some(&lens),
        ..Default::default()
    };
    says_of(
        LayerShape {
            kv_lens: true,
            ..plain
        },
        LayerArguments { rules, ..call },
        "shape",
        "kv_lens: expected (1), got (2)",
    );
    says_of(
        LayerShape {
            q_lens: true,
            ..plain
        },
        call,
        "shape",
        "q_lens: expected a tensor as planned, got none",
    );
    let rules = RuleArguments {
        slopes: Some(&bias),
        ..Default::default()
    };
    says_of(
        plain,
        LayerArguments { rules, ..call },
        "shape",
        "slopes: expected none as planned, got a tensor",
    );
    let rules = RuleArguments {
        cu_seqlens_q: Some(&lens),
        ..Default::default()
    };
    says_of(
        plain,
        LayerArguments { rules, ..call },
        "shape",
        "cu_seqlens_q: expected none as planned, got a tensor",
    );
    let (weights, lse) = (tensor(&[1, 4, 3, 3], f32), tensor(&[1, 3, 4], f32));
    says_of(
        plain,
        LayerArguments {
            weights: Some(&weights),
            ..call
        },
        "shape",
        "weights: expected none as planned, got a tensor",
    );
    says_of(
        plain.weights(true),
        LayerArguments {
            weights: Some(&bias),
            ..call
        },
        "shape",
        "weights: expected (1, 4, 3, 3), got (1, 1, 3, 4)",
    );
    says_of(
        plain,
        LayerArguments {
            lse: Some(&lse),
            ..call
        },
        "shape",
        "lse: expected (1, 4, 3), got (1, 3, 4)",
    );
    let plan = layer.plan(plain.weights(true)).unwrap();
    says(
        layer.encode_step(&mut encoder, &plan, Step::Weights, call, None),
        "parameter",
        "step = attention weights: this call does not ask for the weights",
    );
    says(
        layer.encode_step(&mut encoder, &plan, Step::KvProjection, call, None),
        "parameter",
        "step = KV projection: this plan makes q, k and v in other steps",
    );
    // Two outputs in one buffer.
    let whole = tensor(&[2, 1, 4, 3, 3], f32);
    let half = whole.slice(0, 0..1).unwrap();
    let both = LayerArguments {
        weights: Some(
            &half
                .slice(1, 0..1)
                .unwrap()
                .split_axis(0, &[1])
                .unwrap()
                .merge_axes(0..2)
                .unwrap(),
        ),
        lse: Some(
            &whole
                .slice(0, 1..2)
                .unwrap()
                .slice(4, 0..1)
                .unwrap()
                .merge_axes(3..5)
                .unwrap()
                .merge_axes(0..2)
                .unwrap(),
        ),
        ..call
    };
    let error = layer.encode(&mut encoder, &plan, both).unwrap_err();
    assert!(
        matches!(error, Error::Layout { .. }) && error.to_string().starts_with("lse"),
        "{error}"
    );

    // After all of that the same encoder still works.
    let call = LayerArguments {
        weights: Some(&weights),
        ..call
    };
    layer.encode(&mut encoder, &plan, call).unwrap();
    gpu.submit(encoder.finish()).unwrap();
}

#[cfg(feature = "safetensors")]
mod golden {
    use super::*;
    use std::path::PathBuf;
    use wgpu_attention::case::{Case, Tolerances, find_cases};

    /// The cases of a folder that check kernels, not the reference.
    fn cases(folder: &str, at_least: usize) -> Vec<Case> {
        let folder =
            PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/cases")).join(folder);
        let files = find_cases(&[folder]).unwrap().into_iter();
        let cases: Vec<Case> = files
            .filter(|file| !file.to_string_lossy().contains(".f64."))
            .map(|file| Case::load(file).unwrap())
            .collect();
        assert!(cases.len() >= at_least, "only {} cases", cases.len());
        cases
    }

    fn input(case: &Case, name: &str) -> Vec<f32> {
        case.input(name).unwrap().to_f32()
    }

    fn input_opt(case: &Case, name: &str) -> Option<Vec<f32>> {
        case.input_opt(name).map(|tensor| tensor.to_f32())
    }

    fn check(tolerances: &mut Tolerances, case: &Case, label: &str, output: &str, got: &[f32]) {
        let expected = case.output(output).unwrap();
        let (tolerance, _) = tolerances.of(case, output).unwrap();
        let comparison = compare(
            got,
            &expected.shape,
            &expected.values,
            &expected.shape,
            tolerance,
        );
        assert!(
            comparison.passed(),
            "{} {output}, {label}: {comparison}",
            case.name
        );
    }

    /// `[B, T, d_in]` and the heads, of a case that says so by its attributes and the shape of `x`.
    fn shape(case: &Case, x: &str) -> ([usize; 3], usize) {
        let shape = case.input(x).unwrap().shape.clone().try_into().unwrap();
        (shape, case.attr_usize("heads").unwrap())
    }

    /// Both forms where the tiled one is quick enough on a software adapter.
    fn forms(head_dim: usize) -> &'static [Option<Form>] {
        if head_dim <= 32 {
            &[Some(Form::Lanes), Some(Form::Tiled)]
        } else {
            &[None]
        }
    }

    #[test]
    fn fused_modules() {
        let Some(gpu) = gpu() else { return };
        let mut tolerances = Tolerances::new();
        for case in cases("module_fused", 11) {
            let ([batch, tokens, d_in], heads) = shape(&case, "X");
            let d_out = case.attr_usize("d_out").unwrap();
            let (x, qkv, output) = (
                input(&case, "X"),
                input(&case, "Wqkv"),
                input(&case, "Wproj"),
            );
            let (qkv_bias, output_bias) = (input_opt(&case, "bqkv"), input_opt(&case, "bproj"));
            assert_eq!(qkv_bias.is_some(), case.attr_bool("qkv_bias").unwrap());
            for form in forms(d_out / heads) {
                let config =
                    LayerConfig::new(d_in, d_out, heads).causal(case.attr_bool("causal").unwrap());
                let weights = LayerWeights {
                    qkv: QkvWeights::Fused(Projection {
                        bias: qkv_bias.as_deref(),
                        ..Projection::new(&qkv)
                    }),
                    output: Some(Projection {
                        bias: output_bias.as_deref(),
                        ..Projection::new(&output)
                    }),
                };
                let layer = MultiHeadAttention::new(
                    &gpu,
                    LayerConfig {
                        form: *form,
                        ..config.clone()
                    },
                    &weights,
                )
                .unwrap();
                let y = layer
                    .forward_host_blocking(&x, batch, tokens, None)
                    .unwrap();
                check(&mut tolerances, &case, &format!("{form:?}"), "Y", &y);
            }
        }
    }

    #[test]
    fn modules_with_a_list_of_heads() {
        let Some(gpu) = gpu() else { return };
        let mut tolerances = Tolerances::new();
        for case in cases("module_heads", 4) {
            let ([batch, tokens, d_in], heads) = shape(&case, "X");
            let head_dim = case.attr_usize("head_dim").unwrap();
            let config = LayerConfig::new(d_in, heads * head_dim, heads)
                .causal(case.attr_bool("causal").unwrap());
            let (x, output) = (input(&case, "X"), input(&case, "Wproj"));
            let output_bias = input_opt(&case, "bproj");
            let output = Some(Projection {
                bias: output_bias.as_deref(),
                ..Projection::new(&output)
            });

            // (H, d_in, head_dim): each head has an (in, out) matrix.
            let parts = ["q", "k", "v"].map(|part| {
                (
                    input(&case, &format!("W{part}")),
                    input_opt(&case, &format!("b{part}")),
                )
            });
            let list: Vec<HeadProjections> = (0..heads)
                .map(|head| {
                    let [q, k, v] = [0, 1, 2].map(|part: usize| {
                        let (weight, bias) = &parts[part];
                        let size = d_in * head_dim;
                        Projection {
                            bias: bias
                                .as_deref()
                                .map(|bias| &bias[head * head_dim..(head + 1) * head_dim]),
                            ..Projection::conv1d(&weight[head * size..(head + 1) * size])
                        }
                    });
                    HeadProjections { q, k, v }
                })
                .collect();
            let fused = input(&case, "fused_Wqkv");
            let fused_bias = input_opt(&case, "fused_bqkv");
            let fused = Projection {
                bias: fused_bias.as_deref(),
                ..Projection::new(&fused)
            };

            for form in forms(head_dim) {
                let config = LayerConfig {
                    form: *form,
                    ..config.clone()
                };
                for (label, qkv) in [
                    ("list", QkvWeights::Heads(&list)),
                    ("fused", QkvWeights::Fused(fused)),
                ] {
                    let layer = MultiHeadAttention::new(
                        &gpu,
                        config.clone(),
                        &LayerWeights { qkv, output },
                    )
                    .unwrap();
                    let y = layer
                        .forward_host_blocking(&x, batch, tokens, None)
                        .unwrap();
                    let label = format!("{label}, {form:?}");
                    check(&mut tolerances, &case, &label, "Y", &y);
                    check(&mut tolerances, &case, &label, "Y_fused", &y);
                }
            }
        }
    }

    #[test]
    fn a_trained_sentence_encoder_with_padding() {
        let Some(gpu) = gpu() else { return };
        let mut tolerances = Tolerances::new();
        for case in cases("bert", 1) {
            let ([batch, tokens, d_model], heads) = shape(&case, "hidden");
            let hidden = input(&case, "hidden");
            let mask = case.input("key_mask").unwrap().to_bool().unwrap();
            assert!(
                mask.contains(&false),
                "a case without padding shows nothing"
            );
            let parts = ["q", "k", "v", "o"].map(|part| {
                (
                    input(&case, &format!("W{part}")),
                    input(&case, &format!("b{part}")),
                )
            });
            let [q, k, v, output] = [0, 1, 2, 3].map(|part: usize| {
                let (weight, bias) = &parts[part];
                Projection::new(weight).with_bias(bias)
            });
            for form in forms(d_model / heads) {
                let config = LayerConfig {
                    form: *form,
                    ..LayerConfig::new(d_model, d_model, heads)
                };
                let weights = LayerWeights {
                    qkv: QkvWeights::Separate { q, k, v },
                    output: Some(output),
                };
                let layer = MultiHeadAttention::new(&gpu, config, &weights).unwrap();
                let y = layer
                    .forward_host_blocking(&hidden, batch, tokens, Some(&mask))
                    .unwrap();
                check(&mut tolerances, &case, &format!("{form:?}"), "Y", &y);
                check(&mut tolerances, &case, &format!("{form:?}"), "hf_Y", &y);
            }
        }
    }
}

//! The layer against the f64 reference and against golden files, on the adapter under test.
#![allow(clippy::unwrap_used, clippy::panic, unreachable_pub)]

#[path = "support/own_device.rs"]
mod own_device;
mod support;

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
    qkv: Vec<f32>,
    qkv_bias: Option<Vec<f32>>,
    output: Option<Vec<f32>>,
    output_bias: Option<Vec<f32>>,
    key_mask: Option<Vec<bool>>,
}

impl Setup {
    /// Random weights and x, with both biases and no key mask.
    fn random(seed: u64, batch: usize, tokens: usize, config: LayerConfig) -> Self {
        let mut random = Random::new(seed);
        let LayerConfig { d_in, d_out, .. } = config;
        // So that q, k and v have a size of about 1.
        let mut matrix = |out: usize, d_in: usize| -> Vec<f32> {
            let size = 1.0 / (d_in as f32).sqrt();
            random
                .normals(out * d_in)
                .iter()
                .map(|w| w * size)
                .collect()
        };
        let (qkv, output) = (matrix(3 * d_out, d_in), matrix(d_out, d_out));
        Setup {
            batch,
            tokens,
            config,
            x: random.normals(batch * tokens * d_in),
            qkv,
            qkv_bias: Some(random.normals(3 * d_out)),
            output: Some(output),
            output_bias: Some(random.normals(d_out)),
            key_mask: None,
        }
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
        let qkv = QkvWeights::Fused(Projection {
            bias,
            ..Projection::new(&self.qkv)
        });
        let output = self.output_projection();
        MultiHeadAttention::new(gpu, self.config, &LayerWeights { qkv, output }).unwrap()
    }

    fn forward(&self, gpu: &Gpu) -> Vec<f32> {
        let layer = self.layer(gpu);
        layer
            .forward_host_blocking(&self.x, self.batch, self.tokens, self.key_mask.as_deref())
            .unwrap()
    }

    fn reference(&self) -> Vec<f64> {
        let wide = |values: &Option<Vec<f32>>| values.as_deref().map(widen);
        let (qkv_bias, output, output_bias) = (
            wide(&self.qkv_bias),
            wide(&self.output),
            wide(&self.output_bias),
        );
        let outputs = reference::layer_without_weights(&reference::LayerInputs {
            batch: self.batch,
            tokens: self.tokens,
            d_in: self.config.d_in,
            d_out: self.config.d_out,
            heads: self.config.heads,
            x: &widen(&self.x),
            qkv_weight: &widen(&self.qkv),
            qkv_bias: qkv_bias.as_deref(),
            output_weight: output.as_deref(),
            output_bias: output.as_ref().and(output_bias.as_deref()),
            rules: reference::Rules {
                causal: self.config.causal,
                scale: self.config.scale.map(f64::from),
                mask: self.key_mask.as_deref().map(|values| reference::Broadcast {
                    values,
                    shape: [self.batch, 1, 1, self.tokens],
                }),
                ..Default::default()
            },
            ..Default::default()
        });
        outputs.unwrap().y
    }

    fn shape(&self) -> [usize; 3] {
        [self.batch, self.tokens, self.config.d_out]
    }

    fn check(&self, gpu: &Gpu, label: &str) {
        expect(label, &self.forward(gpu), &self.shape(), &self.reference());
    }
}

/// Within `1e-5 + 1e-4 * |expected|`.
fn expect(label: &str, got: &[f32], shape: &[usize], expected: &[f64]) {
    let comparison = compare(got, shape, expected, shape, Tolerance::F32);
    assert!(comparison.passed(), "{label}: {comparison}");
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
                    scale,
                    causal,
                    form: Some(form),
                    ..config
                };
                let full = Setup::random(number as u64, 2, 19, config);
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
                MultiHeadAttention::new(&gpu, setup.config, &LayerWeights { qkv, output }).unwrap();
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
        let gpu_output = (
            upload(&[d_out, d_out], setup.output.as_deref().unwrap()),
            Some(upload(&[d_out], output_bias)),
        );
        for (label, weight) in [
            ("tensors", upload(&[3 * d_out, d_in], &setup.qkv)),
            (
                "a permuted tensor",
                upload(&[d_in, 3 * d_out], &conv).permute(&[1, 0]).unwrap(),
            ),
        ] {
            let qkv = (weight, gpu_bias.clone());
            let layer =
                MultiHeadAttention::from_tensors(&gpu, setup.config, qkv, Some(gpu_output.clone()))
                    .unwrap();
            let got = layer.forward_host_blocking(&setup.x, 2, 5, None).unwrap();
            assert_eq!(bits(&got), expected, "{label}, bias {with_bias}");
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
        config: full.config.causal(true),
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
            config: first.config.causal(true),
            ..first.clone()
        },
        Setup {
            config: LayerConfig {
                scale: Some(0.05),
                ..first.config
            },
            ..first.clone()
        },
        Setup {
            config: LayerConfig {
                scale: Some(-2.0),
                causal: true,
                ..first.config
            },
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
        .map(|layer| layer.plan(2, 11, false).unwrap())
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
            let arguments = LayerArguments {
                x: &x,
                key_mask: None,
                y: &y.tensor.view(),
            };
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
    let plan = layer.plan(2, 7, false).unwrap();
    let ys: Vec<Guarded> = setups
        .iter()
        .map(|setup| Guarded::new(&gpu, &setup.shape()))
        .collect();
    run(&gpu, |encoder| {
        for (setup, y) in setups.iter().zip(&ys) {
            let x = Tensor::from_slice(&gpu, &[2, 7, 6], &setup.x).unwrap();
            let arguments = LayerArguments {
                x: &x.view(),
                key_mask: None,
                y: &y.tensor.view(),
            };
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
    let plan = layer.plan(1, 5, false).unwrap();
    let x = Tensor::from_slice(&gpu, &[1, 5, 3], &setup.x).unwrap();
    let y = Tensor::from_slice(&gpu, &[1, 5, 8], &[7.0f32; 40]).unwrap();
    let mut encoder = gpu.device().create_command_encoder(&Default::default());
    let arguments = LayerArguments {
        x: &x.view(),
        key_mask: None,
        y: &y.view(),
    };
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
    let arguments = LayerArguments {
        x: &x.view(),
        key_mask: None,
        y: &y.view(),
    };
    let mut encoder = gpu.device().create_command_encoder(&Default::default());
    for (label, other) in [
        (
            "causal",
            Setup {
                config: setup.config.causal(true),
                ..setup.clone()
            },
        ),
        (
            "scale",
            Setup {
                config: LayerConfig {
                    scale: Some(0.1),
                    ..setup.config
                },
                ..setup.clone()
            },
        ),
        (
            "heads",
            Setup {
                config: LayerConfig {
                    heads: 4,
                    ..setup.config
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
        let plan = other.layer(&gpu).plan(1, 5, false).unwrap();
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
    let shape = layer.plan(1, 6, false).unwrap();
    let error = layer.encode(&mut encoder, &shape, arguments).unwrap_err();
    assert_eq!(error.to_string(), "x: expected (1, 6, 3), got (1, 5, 3)");
    let masked = layer.plan(1, 5, true).unwrap();
    let error = layer.encode(&mut encoder, &masked, arguments).unwrap_err();
    assert_eq!(
        error.to_string(),
        "key_mask: expected a key mask as planned, got no key mask"
    );

    // The plan of a layer that differs in its weights alone will do.
    let twin = Setup::random(77, 1, 5, setup.config);
    let plan = twin.layer(&gpu).plan(1, 5, false).unwrap();
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
        let plan = layer.plan(batch, tokens, false).unwrap();
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
                let arguments = LayerArguments {
                    x,
                    key_mask: None,
                    y: &y.tensor.view(),
                };
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
                .encode(
                    encoder,
                    &plan,
                    LayerArguments {
                        x: &inside,
                        key_mask: None,
                        y: &y,
                    },
                )
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
        let result = layer.encode(
            &mut encoder,
            &plan,
            LayerArguments {
                x: &inside,
                key_mask: None,
                y: &y,
            },
        );
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
    let with_output = Setup::random(1, 1, 1, setup.config);
    let (layer, projected) = (setup.layer(&gpu), with_output.layer(&gpu));
    let weights = gpu.allocated_bytes();
    for tokens in [4096, 8192, 16384] {
        let plan = layer.plan(1, tokens, false).unwrap();
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
    let plan = projected.plan(1, 4096, false).unwrap();
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
            causal: setup.config.causal,
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
        let plan = layer.plan(batch, tokens, false).unwrap();
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
    let plan = layer.plan(2, 13, false).unwrap();

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
    let arguments = LayerArguments {
        x: &x.view(),
        key_mask: None,
        y: &y_tensor.view(),
    };
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
                        ..config
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
                    ..config
                };
                for (label, qkv) in [
                    ("list", QkvWeights::Heads(&list)),
                    ("fused", QkvWeights::Fused(fused)),
                ] {
                    let layer =
                        MultiHeadAttention::new(&gpu, config, &LayerWeights { qkv, output })
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

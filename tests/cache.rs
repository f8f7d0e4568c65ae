//! The KV cache, rotary embedding, and the layer that steps on a cache, on the adapter under test.
#![allow(clippy::unwrap_used, clippy::panic)]

mod support;

use std::fmt::Write as _;
use support::Random;
use support::check::{compared, gpu};
use wgpu_attention::compare::Tolerance;
use wgpu_attention::reference::{self, LayerInputs, Pairing, Rules, widen};
use wgpu_attention::*;

/// What a cached result may differ from one full pass.
const CHUNKED: Tolerance = Tolerance {
    absolute: 1e-6,
    relative: 1e-5,
};

/// A layer with random weights, on the host.
struct Toy {
    config: LayerConfig,
    qkv: Vec<f32>,
    qkv_bias: Vec<f32>,
    output: Vec<f32>,
    rotary: Option<RotaryConfig>,
}

impl Toy {
    fn new(seed: u64, config: LayerConfig) -> Self {
        let mut random = Random::new(seed);
        let width = config.qkv_width().unwrap();
        let context = config.heads * config.value_dim().unwrap();
        // So that q, k, v and y have a size of about 1.
        let mut matrix = |out: usize, d_in: usize| -> Vec<f32> {
            let size = 1.0 / (d_in as f32).sqrt();
            let values = random.normals(out * d_in);
            values.iter().map(|w| w * size).collect()
        };
        Toy {
            qkv: matrix(width, config.d_in),
            output: matrix(config.d_out, context),
            qkv_bias: random.normals(width),
            config,
            rotary: None,
        }
    }

    fn with_rotary(self, rotary: RotaryConfig) -> Self {
        Toy {
            rotary: Some(rotary),
            ..self
        }
    }

    fn layer(&self, gpu: &Gpu) -> MultiHeadAttention {
        let qkv = Projection::new(&self.qkv).with_bias(&self.qkv_bias);
        let weights = LayerWeights {
            qkv: QkvWeights::Fused(qkv),
            output: Some(Projection::new(&self.output)),
        };
        let layer = MultiHeadAttention::new(gpu, self.config.clone(), &weights).unwrap();
        self.turned(gpu, layer)
    }

    /// With q kept apart from k and v.
    fn split_layer(&self, gpu: &Gpu) -> MultiHeadAttention {
        let LayerConfig { d_in, d_out, .. } = self.config;
        let q_rows = self.config.heads * self.config.head_dim().unwrap();
        let projection = |weight: &[f32], bias: &[f32]| {
            let shape = [bias.len(), d_in];
            let weight = Tensor::from_slice(gpu, &shape, weight).unwrap();
            let bias = Tensor::from_slice(gpu, &[bias.len()], bias).unwrap();
            ProjectionTensors::new(weight.view()).with_bias(bias.view())
        };
        let (q, kv) = self.qkv.split_at(q_rows * d_in);
        let (q_bias, kv_bias) = self.qkv_bias.split_at(q_rows);
        let output = [d_out, self.output.len() / d_out];
        let output = Tensor::from_slice(gpu, &output, &self.output).unwrap();
        let layer = MultiHeadAttention::from_tensors(
            gpu,
            self.config.clone(),
            QkvTensors::Split {
                q: projection(q, q_bias),
                kv: projection(kv, kv_bias),
            },
            Some(ProjectionTensors::new(output.view())),
        );
        self.turned(gpu, layer.unwrap())
    }

    fn turned(&self, gpu: &Gpu, layer: MultiHeadAttention) -> MultiHeadAttention {
        match self.rotary {
            None => layer,
            Some(rotary) => layer
                .with_rotary(&Rotary::new(gpu, rotary).unwrap())
                .unwrap(),
        }
    }

    /// One full pass over a sequence `(T, d_in)`.
    fn reference(&self, x: &[f32], rules: Rules) -> Vec<f64> {
        let config = &self.config;
        let rotary = self.rotary.map(|rotary| reference::Rotary {
            dims: Some(rotary.dims),
            pairing: match rotary.pairing {
                RotaryPairing::HalfSplit => Pairing::HalfSplit,
                RotaryPairing::Interleaved => Pairing::Interleaved,
            },
            angles: reference::Angles::Base(rotary.base),
        });
        let inputs = LayerInputs {
            batch: 1,
            tokens: x.len() / config.d_in,
            d_in: config.d_in,
            d_out: config.d_out,
            heads: config.heads,
            kv_heads: Some(config.kv_heads),
            head_dim: config.head_dim,
            value_dim: config.value_dim,
            x: &widen(x),
            qkv_weight: &widen(&self.qkv),
            qkv_bias: Some(&widen(&self.qkv_bias)),
            output_weight: Some(&widen(&self.output)),
            rotary,
            rules,
            ..Default::default()
        };
        reference::layer_without_weights(&inputs).unwrap().y
    }
}

fn causal() -> Rules<'static> {
    Rules {
        causal: true,
        ..Default::default()
    }
}

/// Runs calls on a cache, `calls[n][b]` tokens of sequence b in call n, and compares every row with one full pass over
/// each sequence. Rows that a sequence does not get are NaN.
fn check_chunks(
    layer: &MultiHeadAttention,
    toy: &Toy,
    rules: Rules,
    cache: KvCacheConfig,
    calls: &[&[usize]],
    tolerance: Tolerance,
) -> Result<(), String> {
    let mut cache = KvCache::new(layer.gpu(), cache).map_err(|error| error.to_string())?;
    let sequences = sequences(toy, &lengths(calls, cache.config().batch));
    let got = decode(layer, &mut cache, &sequences, calls)?;
    for (number, (x, got)) in sequences.iter().zip(&got).enumerate() {
        let expected = toy.reference(x, rules);
        compared(got, &expected, &[expected.len()], tolerance).map_err(|error| format!("sequence {number}: {error}"))?;
    }
    Ok(())
}

fn lengths(calls: &[&[usize]], batch: usize) -> Vec<usize> {
    let of = |b: usize| calls.iter().map(|call| call[b]).sum();
    (0..batch).map(of).collect()
}

/// Random tokens of sequences of those lengths.
fn sequences(toy: &Toy, lengths: &[usize]) -> Vec<Vec<f32>> {
    let mut random = Random::new(77);
    let d_in = toy.config.d_in;
    lengths.iter().map(|n| random.normals(n * d_in)).collect()
}

/// What the layer makes of each sequence, call by call.
fn decode(
    layer: &MultiHeadAttention,
    cache: &mut KvCache,
    sequences: &[Vec<f32>],
    calls: &[&[usize]],
) -> Result<Vec<Vec<f32>>, String> {
    let text = |error: Error| error.to_string();
    let LayerConfig { d_in, d_out, .. } = *layer.config();
    let batch = sequences.len();
    let mut done = vec![0; batch];
    let mut got = vec![Vec::new(); batch];
    for call in calls {
        let most = call.iter().copied().max().unwrap_or(0);
        let mut x = Vec::new();
        for (b, new) in call.iter().enumerate() {
            x.extend_from_slice(&sequences[b][done[b] * d_in..(done[b] + new) * d_in]);
            x.extend(std::iter::repeat_n(f32::NAN, (most - new) * d_in));
        }
        let x = Tensor::from_slice(layer.gpu(), &[batch, most, d_in], &x).map_err(text)?;
        let uneven = call.iter().any(|new| *new != most);
        let y = layer.prefill(&x, uneven.then_some(*call), cache).map_err(text)?;
        let y = y.read_blocking::<f32>().map_err(text)?;
        for (b, new) in call.iter().enumerate() {
            let at = b * most * d_out;
            got[b].extend_from_slice(&y[at..at + new * d_out]);
            done[b] += new;
        }
    }
    assert_eq!(cache.lengths(), done);
    Ok(got)
}

/// The layer that most tests use: 4 query heads, 2 KV heads of 16 channels.
fn toy() -> Toy {
    Toy::new(3, LayerConfig::new(24, 64, 4).kv_heads(2).causal(true))
}

/// Every way that the tests keep a cache: contiguous, and in pages of sizes that divide nothing.
fn layouts(config: KvCacheConfig) -> [KvCacheConfig; 3] {
    let pages = |size: usize| config.paged(size, config.batch * config.capacity.div_ceil(size));
    [config, pages(5), pages(16)]
}

/// microsoft/onnxruntime#26715, Dao-AILab/flash-attention#1402: new tokens behind old ones differ from one full pass.
#[test]
fn chunked_equals_whole() {
    let Some(turn) = gpu() else { return };
    let gpu: &Gpu = &turn;
    let toy = toy();
    let layer = toy.layer(gpu);
    let mut failures = String::new();
    let one: &[&[&[usize]]] = &[
        &[&[16]],
        &[&[16], &[1]],
        &[&[64], &[1]],
        &[&[20], &[4]],
        &[&[1023], &[1]],
        &[&[10], &[1], &[2], &[3], &[7]],
        &[&[1], &[1], &[1], &[8], &[9]],
    ];
    let three: &[&[&[usize]]] = &[
        &[&[16, 16, 16], &[1, 1, 1]],
        &[&[16, 3, 64], &[1, 1, 1], &[1, 1, 1]],
        &[&[20, 0, 5], &[4, 4, 4], &[0, 3, 1], &[2, 2, 2]],
        &[&[0, 32, 1], &[1, 1, 1]],
        &[&[1023, 7, 300], &[1, 1, 1], &[4, 4, 4]],
    ];
    for (batch, all) in [(1, one), (3, three)] {
        for calls in all {
            let most = lengths(calls, batch).into_iter().max().unwrap();
            for config in layouts(layer.cache_config(batch, most)) {
                if let Err(error) = check_chunks(&layer, &toy, causal(), config, calls, CHUNKED) {
                    let _ = writeln!(failures, "{calls:?} {:?}: {error}", config.pages);
                }
            }
        }
    }
    assert!(failures.is_empty(), "{failures}");
}


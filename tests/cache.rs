//! The KV cache, rotary embedding, and the layer that steps on a cache, on the adapter under test.
#![allow(clippy::unwrap_used, clippy::panic)]

mod support;

use std::fmt::Write as _;
use support::check::{compared, gpu};
use support::{Guarded, Random, run};
use wgpu_attention::compare::Tolerance;
use wgpu_attention::kernels::{Fragment, Kernel};
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
            qkv_bias: random.normals(width).iter().map(|b| 0.1 * b).collect(),
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
        compared(got, &expected, &[expected.len()], tolerance)
            .map_err(|error| format!("sequence {number}: {error}"))?;
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
        let y = layer
            .prefill(&x, uneven.then_some(*call), cache)
            .map_err(text)?;
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

/// Layers of every kind on caches of every kind, a prompt of uneven lengths and then steps of 1, 3 and 2 tokens.
#[test]
fn every_kind_of_layer_steps_on_every_kind_of_cache() {
    let Some(turn) = gpu() else { return };
    let gpu: &Gpu = &turn;
    let calls: &[&[usize]] = &[&[7, 0, 19], &[1, 1, 1], &[3, 3, 3], &[1, 0, 1]];
    let base = || LayerConfig::new(24, 64, 4).causal(true);
    let windowed = AttentionRules {
        causal: true,
        window_left: Some(3),
        ..Default::default()
    };
    let capped = AttentionRules {
        causal: true,
        softcap: Some(2.0),
        scale: Some(0.4),
        ..Default::default()
    };
    let odd = LayerConfig {
        head_dim: Some(5),
        value_dim: Some(7),
        ..LayerConfig::new(11, 9, 3)
    };
    let rotary = |dims, pairing| RotaryConfig {
        pairing,
        ..RotaryConfig::new(dims, 32)
    };
    let (half, pairs) = (RotaryPairing::HalfSplit, RotaryPairing::Interleaved);
    let kinds: Vec<(&str, Toy, Rules)> = vec![
        ("plain", Toy::new(1, base()), causal()),
        ("one KV head", Toy::new(2, base().kv_heads(1)), causal()),
        ("odd heads", Toy::new(3, odd.clone().causal(true)), causal()),
        (
            "window",
            Toy::new(4, base().kv_heads(2).rules(windowed)),
            Rules {
                window_left: Some(3),
                ..causal()
            },
        ),
        (
            "softcap",
            Toy::new(5, base().kv_heads(2).rules(capped)),
            Rules {
                softcap: Some(2.0),
                scale: Some(f64::from(0.4f32)),
                ..causal()
            },
        ),
        (
            "rotary",
            Toy::new(6, base().kv_heads(2)).with_rotary(rotary(16, half)),
            causal(),
        ),
        (
            "interleaved rotary of some channels",
            Toy::new(7, base()).with_rotary(rotary(6, pairs)),
            causal(),
        ),
        (
            "rotary in odd heads",
            Toy::new(8, odd.causal(true)).with_rotary(rotary(4, half)),
            causal(),
        ),
        (
            "large heads",
            Toy::new(9, LayerConfig::new(8, 320, 2).causal(true)),
            causal(),
        ),
    ];
    let mut failures = String::new();
    for (name, toy, rules) in &kinds {
        for (split, layer) in [toy.layer(gpu), toy.split_layer(gpu)].iter().enumerate() {
            for config in layouts(layer.cache_config(3, 24)).into_iter().take(2) {
                // Small types with a kind of each: through the projection, and not.
                let small = split == 0 && ["one KV head", "rotary in odd heads"].contains(name);
                for (element_type, tolerance) in [
                    (ElementType::F32, Tolerance::F32),
                    // Keys and values are rounded once, scores and sums of them follow.
                    (ElementType::F16, Tolerance::new(4e-3, 4e-3)),
                    (ElementType::BF16, Tolerance::new(3e-2, 3e-2)),
                ] {
                    if element_type != ElementType::F32 && !small {
                        continue;
                    }
                    let config = config.stored_as(element_type);
                    let result = check_chunks(layer, toy, *rules, config, calls, tolerance);
                    if let Err(error) = result {
                        let pages = config.pages;
                        let _ = writeln!(
                            failures,
                            "{name}, split {split}, {element_type}, {pages:?}: {error}"
                        );
                    }
                }
            }
        }
    }
    assert!(failures.is_empty(), "{failures}");
}

/// Rotary embedding without a cache.
#[test]
fn a_layer_turns_queries_and_keys() {
    let Some(turn) = gpu() else { return };
    let gpu: &Gpu = &turn;
    for (seed, pairing) in [
        (1, RotaryPairing::HalfSplit),
        (2, RotaryPairing::Interleaved),
    ] {
        let rotary = RotaryConfig {
            pairing,
            base: 500.0,
            ..RotaryConfig::new(8, 40)
        };
        let config = LayerConfig::new(24, 64, 4).kv_heads(2).causal(true);
        let toy = Toy::new(seed, config).with_rotary(rotary);
        for layer in [toy.layer(gpu), toy.split_layer(gpu)] {
            let x = sequences(&toy, &[40]).remove(0);
            let y = layer.forward_host_blocking(&x, 1, 40, None).unwrap();
            let expected = toy.reference(&x, causal());
            compared(&y, &expected, &[expected.len()], Tolerance::F32).unwrap();
            // A position more than there are angles for.
            let x = Tensor::from_slice(gpu, &[1, 41, 24], &[0.0f32; 41 * 24]).unwrap();
            assert_eq!(
                layer.forward(&x, None).unwrap_err().to_string(),
                "rotary embedding needs room for 41 positions, and there is room for 40; make it with angles for more positions"
            );
        }
    }
}

/// The `append` kernel of the table.
fn append_kernel() -> &'static Kernel {
    wgpu_attention::kernels::find("append").unwrap()
}

/// The rotary embedding by itself over guarded outputs, and what an append leaves in caches of every kind.
fn check_append(gpu: &Gpu, kernel: &'static Kernel) -> Result<(), String> {
    let mut random = Random::new(5);
    let (batch, tokens) = (2, 3);
    for (heads, head_dim, dims) in [(1, 2, 2), (3, 5, 4), (2, 33, 32), (1, 64, 10)] {
        for pairing in [RotaryPairing::HalfSplit, RotaryPairing::Interleaved] {
            let rotary = Rotary::new(gpu, turning(dims, pairing)).unwrap();
            let rotary = rotary.with_kernel(kernel).unwrap();
            let shape = [batch, tokens, heads, head_dim];
            let x = random.normals(batch * tokens * heads * head_dim);
            let tensor = Tensor::from_slice(gpu, &shape, &x).unwrap();
            let starts = [400u32, 7];
            let starts_tensor = Tensor::from_slice(gpu, &[2], &starts).unwrap().view();
            for (first, given) in [(0, false), (11, true)] {
                let out = Guarded::new(gpu, &shape);
                run(gpu, |encoder| {
                    let (x, out) = (tensor.view(), out.tensor.view());
                    let arguments = RotaryArguments {
                        first,
                        starts: given.then_some(&starts_tensor),
                        ..RotaryArguments::new(&x, &out)
                    };
                    rotary.encode(encoder, arguments).unwrap();
                });
                let starts = starts.map(|start| first + if given { start as usize } else { 0 });
                let expected = turned_by_reference(&x, shape, dims, pairing, &starts);
                let got = out.read()?;
                compared(&got, &expected, &shape, Tolerance::new(1e-6, 1e-6))
                    .map_err(|error| format!("{shape:?} {dims} {pairing:?}: {error}"))?;
            }
        }
    }
    for (number, config) in [
        KvCacheConfig::new(2, 11, 2, 5),
        KvCacheConfig::new(2, 11, 2, 6).paged(4, 6),
        KvCacheConfig::new(2, 11, 2, 5).stored_as(ElementType::F16),
        KvCacheConfig::new(2, 11, 3, 4)
            .stored_as(ElementType::BF16)
            .paged(3, 8),
    ]
    .into_iter()
    .enumerate()
    {
        // Values of another width than keys.
        let config = KvCacheConfig {
            value_dim: 3,
            ..config
        };
        for rotary in [
            None,
            Some(RotaryPairing::HalfSplit),
            Some(RotaryPairing::Interleaved),
        ] {
            appended(gpu, kernel, config, rotary)
                .map_err(|error| format!("cache {number}, {rotary:?}: {error}"))?;
        }
    }
    Ok(())
}

fn turning(dims: usize, pairing: RotaryPairing) -> RotaryConfig {
    RotaryConfig {
        pairing,
        ..RotaryConfig::new(dims, 500)
    }
}

fn turned_by_reference(
    x: &[f32],
    [batch, tokens, heads, head_dim]: [usize; 4],
    dims: usize,
    pairing: RotaryPairing,
    starts: &[usize],
) -> Vec<f64> {
    let inputs = reference::RotaryInputs {
        batch,
        tokens,
        heads,
        head_dim,
        x: &widen(x),
        starts: Some(starts),
        rotary: reference::Rotary {
            dims: Some(dims),
            pairing: match pairing {
                RotaryPairing::HalfSplit => Pairing::HalfSplit,
                RotaryPairing::Interleaved => Pairing::Interleaved,
            },
            angles: reference::Angles::Base(10_000.0),
        },
    };
    reference::rotary(&inputs).unwrap()
}

/// Appends several times, and holds every element of the cache against what should be there: 0 where nothing was stored.
fn appended(
    gpu: &Gpu,
    kernel: &'static Kernel,
    config: KvCacheConfig,
    pairing: Option<RotaryPairing>,
) -> Result<(), String> {
    let mut random = Random::new(6);
    let mut cache = KvCache::from_kernel(gpu, config, kernel).unwrap();
    let rotary = pairing.map(|pairing| Rotary::new(gpu, turning(4, pairing)).unwrap());
    let (heads, head_dim, value_dim) = (config.kv_heads, config.head_dim, config.value_dim);
    let mut rows: Vec<[Vec<f64>; 2]> = vec![Default::default(); 2];
    for counts in [[3, 1], [0, 4], [2, 2], [4, 4]] {
        let tokens = *counts.iter().max().unwrap();
        let k = random.normals(2 * tokens * heads * head_dim);
        let v = random.normals(2 * tokens * heads * value_dim);
        let (k_shape, v_shape) = ([2, tokens, heads, head_dim], [2, tokens, heads, value_dim]);
        let upload = |shape: &[usize], values: &[f32]| {
            Tensor::from_slice(gpu, shape, values).unwrap().view()
        };
        let starts = cache.lengths();
        run(gpu, |encoder| {
            let (k, v) = (upload(&k_shape, &k), upload(&v_shape, &v));
            let uneven = counts[0] != counts[1];
            let arguments = AppendArguments {
                tokens: uneven.then_some(&counts[..]),
                rotary: rotary.as_ref(),
                ..AppendArguments::new(&k, &v)
            };
            cache.append(encoder, arguments).unwrap();
        });
        let keys = match pairing {
            None => widen(&k),
            Some(pairing) => turned_by_reference(&k, k_shape, 4, pairing, &starts),
        };
        for (b, count) in counts.iter().enumerate() {
            let of = |values: &[f64], channels: usize| {
                let row = heads * channels;
                values[b * tokens * row..][..count * row].to_vec()
            };
            rows[b][0].extend(of(&keys, head_dim));
            rows[b][1].extend(of(&widen(&v), value_dim));
        }
    }
    let tolerance = match config.element_type {
        ElementType::F32 => Tolerance::new(1e-6, 1e-6),
        ElementType::F16 => Tolerance::new(1e-6, 0.5f64.powi(11) * 1.001),
        _ => Tolerance::new(1e-6, 0.5f64.powi(8) * 1.001),
    };
    for (number, (view, channels)) in [(cache.keys(), head_dim), (cache.values(), value_dim)]
        .into_iter()
        .enumerate()
    {
        let stored: Vec<f32> = match config.element_type {
            ElementType::F32 => view.read_blocking().unwrap(),
            ElementType::F16 => {
                let stored = view.read_blocking::<half::f16>().unwrap();
                stored.iter().map(|value| value.to_f32()).collect()
            }
            _ => {
                let stored = view.read_blocking::<half::bf16>().unwrap();
                stored.iter().map(|value| value.to_f32()).collect()
            }
        };
        let row = heads * channels;
        let mut expected = vec![0.0; stored.len()];
        for (b, rows) in rows.iter().enumerate() {
            for (token, values) in rows[number].chunks(row).enumerate() {
                let at = match config.pages {
                    None => b * config.capacity + token,
                    Some(pages) => {
                        let page = cache.pages(b).unwrap()[token / pages.size] as usize;
                        page * pages.size + token % pages.size
                    }
                };
                expected[at * row..][..row].copy_from_slice(values);
            }
        }
        let name = ["keys", "values"][number];
        compared(&stored, &expected, view.shape(), tolerance)
            .map_err(|error| format!("{name}: {error}"))?;
    }
    Ok(())
}

#[test]
fn tokens_are_turned_and_put_where_they_belong() {
    let Some(turn) = gpu() else { return };
    check_append(&turn, append_kernel()).unwrap();
}

/// What is replaced in the kernel's file or in a fragment of it, and by what.
const APPEND_MUTANTS: &[(&str, &str, &str)] = &[
    (
        "position one too far",
        "let position = length - (count - token);",
        "let position = length - (count - token) + 1u;",
    ),
    (
        "from the front",
        "let position = length - (count - token);",
        "let position = token;",
    ),
    (
        "tokens that a sequence does not get",
        "token < count && ",
        "",
    ),
    (
        "all tokens wherever counts are told",
        "params.counts_at != ALL_TOKENS",
        "false",
    ),
    (
        "always the first page",
        "+ position / params.page_size]",
        "]",
    ),
    (
        "always the first row of a page",
        "page * params.page_size + position % params.page_size",
        "page * params.page_size",
    ),
    (
        "block table of the first sequence",
        "batch * params.block_table_stride",
        "0u",
    ),
    (
        "all sequences into the first",
        "place.batch * params.k_cache",
        "0u * params.k_cache",
    ),
    (
        "turned the other way",
        "select(-other, other, second)",
        "select(other, -other, second)",
    ),
    (
        "both channels as the first",
        "select(-other, other, second)",
        "-other",
    ),
    ("sines are cosines", "angles[at + half]", "angles[at]"),
    (
        "pairs of halves where neighbours belong",
        "channel / 2u, params.interleaved != 0u",
        "channel % max(half, 1u), params.interleaved != 0u",
    ),
    (
        "always the neighbour",
        "channel >= half), channel ^ 1u, params.interleaved != 0u",
        "channel >= half), channel ^ 1u, true",
    ),
    (
        "all channels turned",
        "if (channel >= params.rotary_dims) {\n        return value;\n    }\n    let other = base + partner(channel);\n    return turned(value, value_of(k[",
        "let other = base + partner(channel);\n    return turned(value, value_of(k[",
    ),
    ("starts ignored", "params.starts_at != NONE", "false"),
    (
        "first position ignored",
        "params.first_position + token",
        "token",
    ),
    (
        "values of the first head",
        "(pair - q_pairs - k_pairs) / value_pairs",
        "0u",
    ),
    (
        "keys of the first head",
        "(pair - q_pairs) / head_pairs",
        "0u",
    ),
    (
        "an odd last channel spills",
        "if (both) {\n                v_cache[to + 1u]",
        "if (true) {\n                v_cache[to + 1u]",
    ),
    (
        "an odd last channel of q spills",
        "if (both) {\n                q_out[to + 1u]",
        "if (true) {\n                q_out[to + 1u]",
    ),
    (
        "f16 for every small type",
        "half_bits(first, params.cache_type)",
        "half_bits(first, F16)",
    ),
    (
        "the second channel is the first",
        "v_value(base, channel + u32(both))",
        "v_value(base, channel)",
    ),
];

/// Kernels broken on purpose are found out.
#[test]
fn broken_append_kernels_are_rejected() {
    let Some(turn) = gpu() else { return };
    let own = append_kernel();
    let mut survived = String::new();
    for (name, from, to) in APPEND_MUTANTS {
        let places = |source: &str| source.matches(from).count();
        let in_fragments: usize = own.fragments.iter().map(|f| places(&f.source)).sum();
        assert!(
            places(own.source) + in_fragments >= 1,
            "{name}: nothing to replace"
        );
        let fragments: Vec<&'static Fragment> = own
            .fragments
            .iter()
            .map(|fragment| {
                let source = fragment.source.replace(from, to);
                &*Box::leak(Box::new(Fragment {
                    name: fragment.name.clone(),
                    source: source.into(),
                }))
            })
            .collect();
        let broken = Kernel {
            source: Box::leak(own.source.replace(from, to).into_boxed_str()),
            fragments: Box::leak(fragments.into_boxed_slice()),
            ..own.clone()
        };
        if check_append(&turn, Box::leak(Box::new(broken))).is_ok() {
            let _ = writeln!(survived, "{name}");
        }
    }
    assert!(survived.is_empty(), "accepted:\n{survived}");
}

/// Angles that the caller gives, in 16 bits, and what is refused.
#[test]
fn rotary_embedding_by_tables() {
    let Some(turn) = gpu() else { return };
    let gpu: &Gpu = &turn;
    // A quarter turn a position.
    let (cos, sin) = ([1.0, 0.0, -1.0, 0.0], [0.0, 1.0, 0.0, -1.0]);
    let half = RotaryPairing::HalfSplit;
    let rotary = Rotary::from_tables(gpu, half, 2, &cos, &sin).unwrap();
    let x = [1.0, 2.0, 9.0].map(half::bf16::from_f32).repeat(4);
    let padded = |tensor: &Tensor| tensor.view().slice(3, 0..3).unwrap();
    let mut wide = Vec::new();
    for row in x.chunks(3) {
        wide.extend_from_slice(row);
        wide.push(half::bf16::NAN);
    }
    let x = Tensor::from_slice(gpu, &[1, 4, 1, 4], &wide).unwrap();
    let out = Tensor::from_slice(gpu, &[1, 4, 1, 4], &[half::bf16::ONE; 16]).unwrap();
    run(gpu, |encoder| {
        let (x, out) = (padded(&x), padded(&out));
        rotary
            .encode(encoder, RotaryArguments::new(&x, &out))
            .unwrap();
    });
    let got = out.read_blocking::<half::bf16>().unwrap();
    let got: Vec<f32> = got.iter().map(|value| value.to_f32()).collect();
    // The element beside a row of three is as it was.
    let expected = [
        [1.0, 2.0, 9.0, 1.0],
        [-2.0, 1.0, 9.0, 1.0],
        [-1.0, -2.0, 9.0, 1.0],
        [2.0, -1.0, 9.0, 1.0],
    ];
    assert_eq!(got, expected.concat());

    let text = |result: Result<Rotary>| result.unwrap_err().to_string();
    let new = |config| text(Rotary::new(gpu, config));
    let config = RotaryConfig::new(4, 8);
    assert_eq!(
        new(RotaryConfig { dims: 3, ..config }),
        "dims = 3: must be even and at least 2: channels are turned two by two"
    );
    assert_eq!(
        new(RotaryConfig {
            positions: 0,
            ..config
        }),
        "positions = 0: must be at least 1"
    );
    assert_eq!(
        new(RotaryConfig {
            base: f64::NAN,
            ..config
        }),
        "base = NaN: must be finite and above 0"
    );
    assert_eq!(
        text(Rotary::from_tables(gpu, half, 4, &cos[..3], &sin)),
        "cos: expected a multiple of dims / 2 = 2 values, got 3"
    );
    assert_eq!(
        text(Rotary::from_tables(gpu, half, 4, &cos, &sin[..2])),
        "sin: expected 4 values as in cos, got 2"
    );
    let layer = toy().layer(gpu);
    let wide = Rotary::new(gpu, RotaryConfig::new(32, 8)).unwrap();
    assert_eq!(
        layer.with_rotary(&wide).unwrap_err().to_string(),
        "dims = 32: must be at most head_dim = 16"
    );
}

/// Tokens `(B, T, Hkv, D)` of a cache's own shape for the tests of the operator: keys 0, values their position.
fn positions(gpu: &Gpu, config: &KvCacheConfig, tokens: usize) -> [TensorView; 2] {
    let (batch, heads) = (config.batch, config.kv_heads);
    let keys = vec![0.0f32; batch * tokens * heads * config.head_dim];
    let mut values = Vec::new();
    for _ in 0..batch {
        for token in 0..tokens {
            values.extend(vec![token as f32; heads * config.value_dim]);
        }
    }
    let k = [batch, tokens, heads, config.head_dim];
    let v = [batch, tokens, heads, config.value_dim];
    [
        Tensor::from_slice(gpu, &k, &keys).unwrap().view(),
        Tensor::from_slice(gpu, &v, &values).unwrap().view(),
    ]
}

/// Attention of one query of zeros for every head to what a cache holds: the mean of the values it may see.
fn means(cache: &KvCache, heads: usize, change: impl Fn(&mut AttentionProblem)) -> Vec<f32> {
    let gpu = cache.gpu();
    let config = cache.config();
    let mut problem = config.attention(heads, 1);
    change(&mut problem);
    let attention = Attention::new(gpu, problem).unwrap();
    let q = [config.batch, 1, heads, config.head_dim];
    let q = Tensor::from_slice(gpu, &q, &vec![0.0f32; q.iter().product()]).unwrap();
    let out = Guarded::new(gpu, &[config.batch, 1, heads, config.value_dim]);
    let (k, v, table) = (cache.keys(), cache.values(), cache.block_table());
    let lengths = cache.lengths_view();
    run(gpu, |encoder| {
        let (q, out) = (q.view(), out.tensor.view());
        let mut arguments = AttentionArguments::new(&q, &k, &v, &out);
        arguments.rules.kv_lens = Some(&lengths);
        arguments.rules.block_table = table.as_ref();
        attention.encode(encoder, arguments).unwrap();
    });
    out.read().unwrap()
}

/// microsoft/onnxruntime#29247: the length of the first sequence taken for all. goombalab/hnet#20: a window dropped in decoding.
#[test]
fn each_sequence_has_its_own_length() {
    let Some(turn) = gpu() else { return };
    let gpu: &Gpu = &turn;
    for config in layouts(KvCacheConfig::new(2, 16, 1, 4)) {
        for (counts, expected) in [([2, 9], [0.5, 4.0]), ([9, 2], [4.0, 0.5])] {
            let mut cache = KvCache::new(gpu, config).unwrap();
            let [k, v] = positions(gpu, &config, 9);
            run(gpu, |encoder| {
                let arguments = AppendArguments {
                    tokens: Some(&counts),
                    ..AppendArguments::new(&k, &v)
                };
                cache.append(encoder, arguments).unwrap();
            });
            assert_eq!(cache.lengths(), counts);
            let expected = expected.map(|mean| vec![mean; 3 * 4]).concat();
            assert_eq!(means(&cache, 3, |_| ()), expected);
        }
        // Keys 6 to 9 of 10.
        let mut cache = KvCache::new(gpu, config).unwrap();
        let [k, v] = positions(gpu, &config, 10);
        run(gpu, |encoder| {
            cache.append(encoder, AppendArguments::new(&k, &v)).unwrap();
        });
        let window = |problem: &mut AttentionProblem| problem.rules.window_left = Some(3);
        assert_eq!(means(&cache, 1, window), vec![7.5; 8]);
    }
}

/// huggingface/candle#3035: a capacity check that ignores what is stored; and everything else that is refused. The
/// cache is as it was, on the host and on the GPU.
#[test]
fn refusals_change_nothing() {
    let Some(turn) = gpu() else { return };
    let gpu: &Gpu = &turn;
    for config in layouts(KvCacheConfig::new(1, 16, 1, 4)) {
        let mut cache = KvCache::new(gpu, config).unwrap();
        let append = |cache: &mut KvCache, tokens: usize| {
            let [k, v] = positions(gpu, &config, tokens);
            let mut encoder = gpu.device().create_command_encoder(&Default::default());
            let result = cache.append(&mut encoder, AppendArguments::new(&k, &v));
            gpu.submit(encoder.finish()).unwrap();
            result
        };
        append(&mut cache, 10).unwrap();
        append(&mut cache, 6).unwrap();
        let before = cache.values().read_blocking::<f32>().unwrap();
        let free = cache.free_pages();
        assert_eq!(
            append(&mut cache, 1).unwrap_err().to_string(),
            "sequence 0 of the KV cache, 16 tokens and 1 new ones, needs room for 17 tokens, and there is room for 16; truncate or reset it, or make the cache with a larger capacity"
        );
        let text = |result: Result<()>| result.unwrap_err().to_string();
        assert_eq!(
            text(cache.truncate(0, 17)),
            "length = 17: must be at most 16, the tokens that sequence 0 has"
        );
        assert_eq!(
            text(cache.truncate(1, 0)),
            "sequence = 1: must be below 1, the batch"
        );
        assert_eq!(
            text(cache.reset_sequence(7)),
            "sequence = 7: must be below 1, the batch"
        );
        let [k, v] = positions(gpu, &config, 2);
        let mut encoder = gpu.device().create_command_encoder(&Default::default());
        let mut told = |tokens: &[usize]| {
            let arguments = AppendArguments {
                tokens: Some(tokens),
                ..AppendArguments::new(&k, &v)
            };
            text(cache.append(&mut encoder, arguments))
        };
        assert_eq!(
            told(&[1, 1]),
            "tokens: expected 1 numbers, one of each sequence, got 2"
        );
        assert_eq!(
            told(&[3]),
            "tokens = 3: must be at most 2, the tokens that there are"
        );
        let wide = v.slice(3, 0..3).unwrap();
        cache.truncate(0, 16).unwrap();
        cache.truncate(0, 14).unwrap();
        assert_eq!(
            text(cache.append(&mut encoder, AppendArguments::new(&k, &wide))),
            "v: expected (1, 2, 1, 4), got (1, 2, 1, 3)"
        );
        let own = cache.keys();
        let own = own.slice(1, 0..2).unwrap().slice(0, 0..1).unwrap();
        let error = text(cache.append(&mut encoder, AppendArguments::new(&own, &own)));
        assert!(error.contains("it lies in the same buffer as"), "{error}");
        assert_eq!(cache.lengths(), [14]);
        assert_eq!(cache.values().read_blocking::<f32>().unwrap(), before);
        if config.pages.is_none() {
            assert_eq!(free, None);
            assert_eq!(
                text(cache.prefix(0, 1).map(drop)),
                "sharing a prefix is not supported: this cache has no pages: make it with KvCacheConfig::paged"
            );
        }
    }
    let refused = |config| KvCache::new(gpu, config).unwrap_err().to_string();
    let config = KvCacheConfig::new(1, 16, 1, 4);
    assert_eq!(
        refused(KvCacheConfig {
            capacity: 0,
            ..config
        }),
        "capacity = 0: must be at least 1"
    );
    assert_eq!(
        refused(config.paged(0, 4)),
        "pages.size = 0: must be at least 1"
    );
    assert_eq!(
        refused(config.stored_as(ElementType::U32)),
        "element_type = u32: must be f32, f16 or bf16"
    );
    assert_eq!(
        refused(KvCacheConfig::new(1, 33, 1, 4).paged(8, 4)),
        "capacity = 33: must be at most pages.size * pages.count = 32, all there is room for"
    );
    assert!(
        refused(KvCacheConfig::new(0, i32::MAX as usize, 1, 1))
            .starts_with("the lengths that the cache's sequences may have needs "),
    );
    assert_eq!(
        KvCacheConfig::new(1, 1, 1, usize::MAX)
            .stored_as(ElementType::F16)
            .bytes(),
        u64::MAX
    );
    let most = gpu.capabilities().max_binding_bytes as usize;
    let held = gpu.allocated_bytes();
    assert!(refused(KvCacheConfig::new(1, most, 8, 64)).starts_with("the cache's keys needs "),);
    assert_eq!(gpu.allocated_bytes(), held);
}

/// Pages: a pool that is too small, one that is used up and freed, and a prefix that is shared.
#[test]
fn a_prefix_is_shared_and_its_last_page_copied_on_write() {
    let Some(turn) = gpu() else { return };
    let gpu: &Gpu = &turn;
    let toy = toy();
    let layer = toy.layer(gpu);
    for element_type in [ElementType::F32, ElementType::F16] {
        let tolerance = match element_type {
            ElementType::F32 => Tolerance::F32,
            _ => Tolerance::new(4e-3, 4e-3),
        };
        // 10 tokens are 2 full pages and half a page.
        let config = layer
            .cache_config(3, 24)
            .stored_as(element_type)
            .paged(4, 9);
        let mut cache = KvCache::new(gpu, config).unwrap();
        let all = sequences(&toy, &[10, 6, 6, 6]);
        let streams: Vec<Vec<f32>> = (1..4)
            .map(|own| [&all[0][..], &all[own]].concat())
            .collect();
        decode(&layer, &mut cache, &streams, &[&[10, 0, 0]]).unwrap();
        assert_eq!(cache.free_pages(), Some(6));
        let prefix = cache.prefix(0, 10).unwrap();
        cache.attach(1, &prefix).unwrap();
        cache.attach(2, &prefix).unwrap();
        assert_eq!(
            (cache.lengths(), cache.free_pages()),
            (vec![10; 3], Some(6))
        );
        assert_eq!(
            cache.attach(1, &prefix).unwrap_err().to_string(),
            "sequence = 1, which has 10 tokens: must be empty: reset it first"
        );
        assert_eq!(
            cache.attach(3, &prefix).unwrap_err().to_string(),
            "sequence = 3: must be below 3, the batch"
        );
        // Two of the three need a copy of the half page, one stays where it is; then a page each.
        let rest: Vec<Vec<f32>> = all[1..].to_vec();
        let steps: &[&[usize]] = &[&[1, 1, 1], &[1, 1, 1], &[4, 4, 4]];
        let mut got = vec![Vec::new(); 3];
        let mut done = 0;
        for call in steps {
            let new = call[0];
            let mut x = Vec::new();
            for own in &rest {
                x.extend_from_slice(&own[done * 24..(done + new) * 24]);
            }
            let x = Tensor::from_slice(gpu, &[3, new, 24], &x).unwrap();
            let y = layer.step(&x, &mut cache).unwrap();
            let y = y.read_blocking::<f32>().unwrap();
            for (own, rows) in got.iter_mut().zip(y.chunks(new * 64)) {
                own.extend_from_slice(rows);
            }
            done += new;
            if done == 1 {
                assert_eq!(cache.free_pages(), Some(4));
                let pages: Vec<_> = (0..3).map(|b| cache.pages(b).unwrap().to_vec()).collect();
                assert_eq!([&pages[1][..2], &pages[2][..2]], [&pages[0][..2]; 2]);
                assert!(pages[0][2] != pages[1][2] && pages[1][2] != pages[2][2]);
            }
        }
        assert_eq!(cache.free_pages(), Some(1));
        for (number, (stream, got)) in streams.iter().zip(&got).enumerate() {
            let expected = &toy.reference(stream, causal())[10 * 64..];
            compared(got, expected, &[expected.len()], tolerance)
                .unwrap_or_else(|error| panic!("{element_type} sequence {number}: {error}"));
        }
        // 16 tokens each: a page for one sequence, but not for three.
        let x = Tensor::from_slice(gpu, &[3, 1, 24], &[0.0f32; 3 * 24]).unwrap();
        let lengths = cache.lengths();
        assert_eq!(
            layer.step(&x, &mut cache).unwrap_err().to_string(),
            "3 new tokens in the KV cache needs room for 3 pages, and there is room for 1; truncate or reset sequences, or make the cache with more pages"
        );
        assert_eq!((cache.lengths(), cache.free_pages()), (lengths, Some(1)));
        // The half page was written by the one that stayed: the prefix is what it was.
        cache.reset_sequence(0).unwrap();
        cache.reset_sequence(1).unwrap();
        cache.attach(0, &cache.prefix(2, 8).unwrap()).unwrap();
        cache.truncate(2, 9).unwrap();
        let shorter = cache.prefix(2, 9).unwrap();
        cache.reset_sequence(2).unwrap();
        let error = cache.attach(2, &shorter).unwrap_err().to_string();
        assert!(
            error.starts_with("prefix = with page")
                && error.contains(
                    "which was freed or overwritten: must be of tokens that a sequence still has"
                ),
            "{error}"
        );
        let other = KvCache::new(gpu, config).unwrap();
        let error = cache.attach(1, &other.prefix(0, 0).unwrap()).unwrap_err();
        assert_eq!(
            error.to_string(),
            "prefix = of another cache: must be of this cache"
        );
        cache.reset();
        assert_eq!((cache.lengths(), cache.free_pages()), (vec![0; 3], Some(9)));
    }
}

/// microsoft/onnxruntime#23315: wrong where the old and the new cache are one buffer. Against tensors that are made anew
/// for every step.
#[test]
fn in_place_equals_copied() {
    let Some(turn) = gpu() else { return };
    let gpu: &Gpu = &turn;
    let mut random = Random::new(9);
    let config = KvCacheConfig::new(1, 20, 2, 8);
    let mut cache = KvCache::new(gpu, config).unwrap();
    let (mut keys, mut values) = (Vec::new(), Vec::new());
    for step in 1..=20 {
        let (k, v, q) = (random.normals(16), random.normals(16), random.normals(32));
        keys.extend_from_slice(&k);
        values.extend_from_slice(&v);
        let new = |values: &[f32], tokens| {
            Tensor::from_slice(gpu, &[1, tokens, 2, 8], values)
                .unwrap()
                .view()
        };
        let q = Tensor::from_slice(gpu, &[1, 1, 4, 8], &q).unwrap().view();
        let out = [(); 2].map(|()| Guarded::new(gpu, &[1, 1, 4, 8]));
        let views = [out[0].tensor.view(), out[1].tensor.view()];
        let on_cache = Attention::new(gpu, config.attention(4, 1)).unwrap();
        let problem = AttentionProblem {
            kv_heads: 2,
            kv_len: step,
            ..AttentionProblem::new(1, 4, 1, 8)
        };
        let on_copy = Attention::new(gpu, problem).unwrap();
        run(gpu, |encoder| {
            let arguments = AppendArguments::new;
            cache
                .append(encoder, arguments(&new(&k, 1), &new(&v, 1)))
                .unwrap();
            let (k, v, lengths) = (cache.keys(), cache.values(), cache.lengths_view());
            let mut arguments = AttentionArguments::new(&q, &k, &v, &views[0]);
            arguments.rules.kv_lens = Some(&lengths);
            on_cache.encode(encoder, arguments).unwrap();
            let (k, v) = (new(&keys, step), new(&values, step));
            let arguments = AttentionArguments::new(&q, &k, &v, &views[1]);
            on_copy.encode(encoder, arguments).unwrap();
        });
        let [got, expected] = out.map(|out| out.read().unwrap());
        compared(&got, &widen(&expected), &[32], CHUNKED).unwrap();
    }
}

/// What a cache held does not matter once it is reset; a NaN that a sequence had does not outlive it.
#[test]
fn after_a_reset_a_cache_is_as_new() {
    let Some(turn) = gpu() else { return };
    let gpu: &Gpu = &turn;
    let toy = toy();
    let layer = toy.layer(gpu);
    let calls: &[&[usize]] = &[&[5, 5], &[1, 1], &[3, 2]];
    let clean = sequences(&toy, &lengths(calls, 2));
    for config in layouts(layer.cache_config(2, 12)) {
        let mut fresh = KvCache::new(gpu, config).unwrap();
        let expected = decode(&layer, &mut fresh, &clean, calls).unwrap();
        let mut used = KvCache::new(gpu, config).unwrap();
        let spoilt = vec![vec![f32::NAN; 12 * 24]; 2];
        let y = decode(&layer, &mut used, &spoilt, &[&[12, 12]]).unwrap();
        assert!(y.iter().flatten().all(|value| value.is_nan()));
        used.reset();
        let got = decode(&layer, &mut used, &clean, calls).unwrap();
        assert_eq!(got, expected, "{:?}", config.pages);
        // And a NaN in the last token is gone with it.
        used.truncate(0, 8).unwrap();
        used.truncate(1, 7).unwrap();
        let mut x = vec![f32::NAN; 24];
        x.extend([0.5; 24]);
        let x = Tensor::from_slice(gpu, &[2, 1, 24], &x).unwrap();
        let y = layer
            .step(&x, &mut used)
            .unwrap()
            .read_blocking::<f32>()
            .unwrap();
        assert!(y[..64].iter().all(|value| value.is_nan()));
        assert!(y[64..].iter().all(|value| value.is_finite()));
        used.truncate(0, 8).unwrap();
        used.truncate(1, 7).unwrap();
        let x = Tensor::from_slice(gpu, &[2, 1, 24], &[0.5f32; 48]).unwrap();
        let got = layer
            .step(&x, &mut used)
            .unwrap()
            .read_blocking::<f32>()
            .unwrap();
        fresh.truncate(0, 8).unwrap();
        fresh.truncate(1, 7).unwrap();
        let expected = layer
            .step(&x, &mut fresh)
            .unwrap()
            .read_blocking::<f32>()
            .unwrap();
        assert_eq!(got, expected);
    }
}

/// microsoft/onnxruntime#28027: a call without a cache after one with it saw the past.
#[test]
fn a_call_without_a_cache_sees_no_past() {
    let Some(turn) = gpu() else { return };
    let gpu: &Gpu = &turn;
    let toy = toy();
    let layer = toy.layer(gpu);
    let x = sequences(&toy, &[9]).remove(0);
    let fresh = layer.forward_host_blocking(&x, 1, 9, None).unwrap();
    let mut cache = KvCache::new(gpu, layer.cache_config(1, 20)).unwrap();
    decode(
        &layer,
        &mut cache,
        &[[&x[..], &x[..]].concat()],
        &[&[9], &[9]],
    )
    .unwrap();
    assert_eq!(layer.forward_host_blocking(&x, 1, 9, None).unwrap(), fresh);
}

/// gfx-rs/wgpu#6467, gfx-rs/wgpu#1173: no new tokens, no sequence, nothing in the cache.
#[test]
fn nothing_new_is_no_work() {
    let Some(turn) = gpu() else { return };
    let gpu: &Gpu = &turn;
    let toy = toy();
    let layer = toy.layer(gpu);
    for batch in [0, 2] {
        for config in layouts(layer.cache_config(batch, 8)) {
            let Ok(mut cache) = KvCache::new(gpu, config) else {
                // No sequence takes no page, and no page is no pool.
                assert!(batch == 0 && config.pages.is_some());
                continue;
            };
            let x = Tensor::empty(gpu, &[batch, 0, 24], ElementType::F32).unwrap();
            let y = layer.step(&x, &mut cache).unwrap();
            assert_eq!(y.shape(), [batch, 0, 64]);
            assert_eq!(cache.lengths(), vec![0; batch]);
            if batch > 0 {
                // Sequences without a key.
                run(gpu, |encoder| cache.encode_lengths(encoder).unwrap());
                assert_eq!(means(&cache, 4, |_| ()), vec![0.0; batch * 64]);
                let x = Tensor::empty(gpu, &[batch, 3, 24], ElementType::F32).unwrap();
                let none = vec![0; batch];
                let y = layer.prefill(&x, Some(&none), &mut cache).unwrap();
                // No output bias.
                let y = y.read_blocking::<f32>().unwrap();
                assert_eq!(y, vec![0.0; batch * 3 * 64]);
                assert_eq!(cache.lengths(), none);
            }
        }
    }
}

/// Calls recorded before one submit see their own lengths, and in several encoders as well.
#[test]
fn steps_before_one_submit_are_right() {
    let Some(turn) = gpu() else { return };
    let gpu: &Gpu = &turn;
    let toy = toy();
    let layers = [toy.layer(gpu), toy.layer(gpu)];
    let x = sequences(&toy, &[9]).remove(0);
    let expected = toy.reference(&x, causal());
    for config in layouts(layers[0].cache_config(1, 9)) {
        let plan = layers[0].plan(LayerShape::cached(&config, 1)).unwrap();
        let whole = Tensor::from_slice(gpu, &[1, 9, 24], &x).unwrap().view();
        // Two layers with a cache each take turns.
        let mut caches = [(); 2].map(|()| KvCache::new(gpu, config).unwrap());
        let out = [(); 2].map(|()| Guarded::new(gpu, &[1, 9, 64]));
        let mut encoders: Vec<_> = (0..3)
            .map(|_| gpu.device().create_command_encoder(&Default::default()))
            .collect();
        for token in 0..9 {
            let encoder = &mut encoders[token / 3];
            for ((layer, cache), out) in layers.iter().zip(&mut caches).zip(&out) {
                let one = |view: &TensorView| view.slice(1, token..token + 1).unwrap();
                let (x, y) = (one(&whole), one(&out.tensor.view()));
                let arguments = LayerArguments::new(&x, &y);
                layer
                    .encode_cached(encoder, &plan, cache, None, arguments)
                    .unwrap();
            }
        }
        for encoder in encoders {
            gpu.submit(encoder.finish()).unwrap();
        }
        for out in out {
            compared(&out.read().unwrap(), &expected, &[9, 64], Tolerance::F32).unwrap();
        }
    }
}

/// An encoder that is never submitted: truncating to the length before brings the cache back in step.
#[test]
fn a_dropped_encoder_is_undone_by_truncating() {
    let Some(turn) = gpu() else { return };
    let gpu: &Gpu = &turn;
    let toy = toy();
    let layer = toy.layer(gpu);
    let x = sequences(&toy, &[9]).remove(0);
    let expected = toy.reference(&x, causal());
    for config in layouts(layer.cache_config(1, 9)) {
        let mut cache = KvCache::new(gpu, config).unwrap();
        let mut got = decode(&layer, &mut cache, &[x[..4 * 24].to_vec()], &[&[4]]).unwrap();
        let plan = layer.plan(LayerShape::cached(&config, 5)).unwrap();
        let rest = Tensor::from_slice(gpu, &[1, 5, 24], &x[4 * 24..]).unwrap();
        let y = Tensor::empty(gpu, &[1, 5, 64], ElementType::F32).unwrap();
        let (x, out) = (rest.view(), y.view());
        let arguments = LayerArguments::new(&x, &out);
        let mut dropped = gpu.device().create_command_encoder(&Default::default());
        layer
            .encode_cached(&mut dropped, &plan, &mut cache, None, arguments)
            .unwrap();
        drop(dropped);
        assert_eq!(cache.lengths(), [9]);
        cache.truncate(0, 4).unwrap();
        run(gpu, |encoder| {
            layer
                .encode_cached(encoder, &plan, &mut cache, None, arguments)
                .unwrap();
        });
        got[0].extend(y.read_blocking::<f32>().unwrap());
        compared(&got[0], &expected, &[9, 64], Tolerance::F32).unwrap();
    }
}

/// After the first two steps of its kind a step makes no buffer, no bind group and no pipeline, 10,000 times; nor does it
/// hold more memory.
#[test]
fn ten_thousand_steps_make_nothing() {
    let Some(turn) = gpu() else { return };
    // Alone on a device of its own: other tests make things meanwhile.
    let name = turn.adapter_info().name.clone();
    let own = support::open(&GpuOptions::named(name)).unwrap();
    let gpu = &own;
    let toy = Toy::new(1, LayerConfig::new(8, 16, 2).kv_heads(1).causal(true));
    let rotary = Toy::new(1, toy.config.clone()).with_rotary(RotaryConfig::new(8, 64));
    for (steps, toy) in [(5000, &toy), (5000, &rotary)] {
        let layer = toy.layer(gpu);
        for config in [
            layer.cache_config(1, 64),
            layer.cache_config(1, 64).paged(4, 16),
        ] {
            let mut cache = KvCache::new(gpu, config).unwrap();
            let plan = layer.plan(LayerShape::cached(&config, 1)).unwrap();
            let x = Tensor::from_slice(gpu, &[1, 1, 8], &[0.5f32; 8]).unwrap();
            let y = Tensor::empty(gpu, &[1, 1, 16], ElementType::F32).unwrap();
            let (x, out) = (x.view(), y.view());
            let arguments = LayerArguments::new(&x, &out);
            let mut after_two = None;
            // Half of the steps on each kind of cache, many before a submit.
            let mut encoder = gpu.device().create_command_encoder(&Default::default());
            for step in 0..steps / 2 {
                if cache.lengths()[0] == 64 {
                    cache.truncate(0, 1 + step % 7).unwrap();
                }
                layer
                    .encode_cached(&mut encoder, &plan, &mut cache, None, arguments)
                    .unwrap();
                if step % 50 == 49 {
                    let next = gpu.device().create_command_encoder(&Default::default());
                    gpu.submit(std::mem::replace(&mut encoder, next).finish())
                        .unwrap();
                }
                let made = (gpu.objects_made(), gpu.allocated_bytes());
                if step >= 1 {
                    assert_eq!(*after_two.get_or_insert(made), made, "step {step}");
                }
            }
            gpu.submit(encoder.finish()).unwrap();
            assert!(
                y.read_blocking::<f32>()
                    .unwrap()
                    .iter()
                    .all(|v| v.is_finite())
            );
        }
    }
}

/// What contradicts the plan is refused, and says what.
#[test]
fn plans_and_caches_must_fit() {
    let Some(turn) = gpu() else { return };
    let gpu: &Gpu = &turn;
    let toy = toy();
    let layer = toy.layer(gpu);
    let config = layer.cache_config(1, 8);
    let mut cache = KvCache::new(gpu, config).unwrap();
    let plan = layer.plan(LayerShape::cached(&config, 1)).unwrap();
    let x = Tensor::empty(gpu, &[1, 1, 24], ElementType::F32)
        .unwrap()
        .view();
    let y = Tensor::empty(gpu, &[1, 1, 64], ElementType::F32)
        .unwrap()
        .view();
    let mut encoder = gpu.device().create_command_encoder(&Default::default());
    let arguments = LayerArguments::new(&x, &y);
    let text = |result: Result<()>| result.unwrap_err().to_string();

    let error = text(layer.encode(&mut encoder, &plan, arguments));
    assert_eq!(
        error,
        "plan = for calls on a cache: must be without one here: use encode_cached"
    );
    let uncached = layer.plan(LayerShape::new(1, 1)).unwrap();
    let error = text(layer.encode_cached(&mut encoder, &uncached, &mut cache, None, arguments));
    assert!(
        error.starts_with("plan = None: must be made for this cache"),
        "{error}"
    );
    let error = text(layer.encode_cached(&mut encoder, &plan, &mut cache, Some(&[1]), arguments));
    assert_eq!(
        error,
        "tokens: expected none as planned (q_lens), got given"
    );
    let lens = Tensor::from_slice(gpu, &[1], &[1u32]).unwrap().view();
    let mut with_lens = arguments;
    with_lens.rules.kv_lens = Some(&lens);
    let error = text(layer.encode_cached(&mut encoder, &plan, &mut cache, None, with_lens));
    assert_eq!(
        error,
        "kv_lens: expected none: the cache has its own, got a tensor"
    );
    let other = KvCacheConfig {
        capacity: 9,
        ..config
    };
    let mut other = KvCache::new(gpu, other).unwrap();
    let error = text(layer.encode_cached(&mut encoder, &plan, &mut other, None, arguments));
    assert!(error.contains("must be made for this cache"), "{error}");
    let turned = layer
        .clone()
        .with_rotary(&Rotary::new(gpu, RotaryConfig::new(4, 8)).unwrap());
    let error =
        text(
            turned
                .unwrap()
                .encode_cached(&mut encoder, &plan, &mut cache, None, arguments),
        );
    assert_eq!(
        error,
        "plan = with no rotary embedding: must be made for this layer, which has rotary embedding of 4 channels, HalfSplit"
    );
    let cached_x = cache.keys();
    let cached_x = LayerArguments::new(&cached_x, &y);
    let error = text(layer.encode_cached(&mut encoder, &plan, &mut cache, None, cached_x));
    assert!(
        error.starts_with("x: it lies in a buffer of the cache"),
        "{error}"
    );
    assert_eq!(cache.lengths(), [0]);

    let plan_of = |shape| layer.plan(shape).map(drop);
    let shape = LayerShape::cached(&config, 1);
    let error = text(plan_of(LayerShape {
        kv_lens: true,
        ..shape
    }));
    assert_eq!(
        error,
        "kv_lens = true: must be false with a cache, which has the lengths itself"
    );
    let error = text(plan_of(shape.source(4)));
    assert_eq!(
        error,
        "source_tokens = 4: must be none with a cache, which is for self-attention"
    );
    let heads = KvCacheConfig {
        kv_heads: 4,
        ..config
    };
    let error = text(plan_of(LayerShape::cached(&heads, 1)));
    assert_eq!(error, "cache.kv_heads = 4: must be 2, the layer's");
    let top_left = LayerConfig::new(24, 64, 4)
        .kv_heads(2)
        .rules(AttentionRules::causal(Alignment::TopLeft));
    let error = text(Toy::new(1, top_left).layer(gpu).plan(shape).map(drop));
    assert_eq!(
        error,
        "alignment = TopLeft: must be BottomRight, or left unsaid, with a cache: a new token's own key is the last"
    );
    let x = Tensor::empty(gpu, &[2, 1, 24], ElementType::F32).unwrap();
    let error = text(layer.step(&x, &mut cache).map(drop));
    assert_eq!(error, "x: expected (1, T, 24), got (2, 1, 24)");
}

/// A dropped encoder that held the copy of a shared page.
#[test]
fn a_dropped_copy_on_write_is_undone_by_truncating() {
    let Some(turn) = gpu() else { return };
    let gpu: &Gpu = &turn;
    let config = KvCacheConfig::new(2, 16, 1, 4).paged(4, 8);
    // Sequence 0 has tokens 0 to 5 (the mean is 2.5), sequence 1 shares them.
    let start = || {
        let mut cache = KvCache::new(gpu, config).unwrap();
        let [k, v] = positions(gpu, &config, 6);
        run(gpu, |encoder| {
            let arguments = AppendArguments {
                tokens: Some(&[6, 0]),
                ..AppendArguments::new(&k, &v)
            };
            cache.append(encoder, arguments).unwrap();
        });
        cache.attach(1, &cache.prefix(0, 6).unwrap()).unwrap();
        cache
    };
    let [k, v] = positions(gpu, &config, 1);
    for counts in [[0, 1], [1, 0], [1, 1]] {
        let mut cache = start();
        let arguments = AppendArguments {
            tokens: Some(&counts),
            ..AppendArguments::new(&k, &v)
        };
        let mut dropped = gpu.device().create_command_encoder(&Default::default());
        cache.append(&mut dropped, arguments).unwrap();
        drop(dropped);
        for sequence in 0..2 {
            cache.truncate(sequence, 6).unwrap();
        }
        run(gpu, |encoder| cache.encode_lengths(encoder).unwrap());
        assert_eq!(means(&cache, 1, |_| ()), [2.5; 8], "{counts:?}");
        // And with a token of 0 more.
        run(gpu, |encoder| {
            cache.append(encoder, AppendArguments::new(&k, &v)).unwrap();
        });
        let mean = 15.0 / 7.0;
        for got in means(&cache, 1, |_| ()) {
            assert!((got - mean).abs() < 1e-6, "{counts:?}: {got}");
        }
    }
    // Tokens of a dropped encoder are no prefix.
    let mut cache = start();
    let mut dropped = gpu.device().create_command_encoder(&Default::default());
    cache.reset_sequence(1).unwrap();
    let arguments = AppendArguments {
        tokens: Some(&[1, 0]),
        ..AppendArguments::new(&k, &v)
    };
    cache.append(&mut dropped, arguments).unwrap();
    let never = cache.prefix(0, 7).unwrap();
    drop(dropped);
    cache.truncate(0, 6).unwrap();
    let error = cache.attach(1, &never).unwrap_err().to_string();
    assert!(error.contains("which was freed or overwritten"), "{error}");
}

/// What fails while a call is recorded, after its tokens had their places: the cache is as it was.
#[test]
fn a_call_that_fails_on_the_way_leaves_the_cache_as_it_was() {
    let Some(turn) = gpu() else { return };
    let gpu: &Gpu = &turn;
    let toy = toy();
    let layer = toy.layer(gpu);
    for config in layouts(layer.cache_config(1, 9)) {
        let mut cache = KvCache::new(gpu, config).unwrap();
        let x = sequences(&toy, &[9]).remove(0);
        let mut got = decode(&layer, &mut cache, &[x[..4 * 24].to_vec()], &[&[4]]).unwrap();
        let free = cache.free_pages();
        let buffer = gpu.device().create_buffer(&wgpu::BufferDescriptor {
            label: None,
            size: 4 * 5 * 24,
            usage: wgpu::BufferUsages::STORAGE,
            mapped_at_creation: false,
        });
        let gone = Tensor::from_buffer(gpu, buffer.clone(), 0, &[1, 5, 24], ElementType::F32);
        buffer.destroy();
        assert!(layer.step(&gone.unwrap(), &mut cache).is_err());
        assert_eq!((cache.lengths(), cache.free_pages()), (vec![4], free));
        let rest = Tensor::from_slice(gpu, &[1, 5, 24], &x[4 * 24..]).unwrap();
        let y = layer.step(&rest, &mut cache).unwrap();
        got[0].extend(y.read_blocking::<f32>().unwrap());
        let expected = toy.reference(&x, causal());
        compared(&got[0], &expected, &[9, 64], Tolerance::F32).unwrap();
    }
}

/// Operands and plans that do not go together.
#[test]
fn rotary_embedding_refuses_what_does_not_fit() {
    let Some(turn) = gpu() else { return };
    let gpu: &Gpu = &turn;
    let rotary = Rotary::new(gpu, RotaryConfig::new(4, 8)).unwrap();
    let buffer = gpu.device().create_buffer(&wgpu::BufferDescriptor {
        label: None,
        size: 2048,
        usage: wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_SRC,
        mapped_at_creation: false,
    });
    let part = |offset, shape: &[usize], element_type| {
        Tensor::from_buffer(gpu, buffer.clone(), offset, shape, element_type)
            .unwrap()
            .view()
    };
    let x = Tensor::from_slice(gpu, &[2, 2, 1, 4], &[1.0f32; 16]).unwrap();
    let (starts, out) = (
        part(0, &[2], ElementType::U32),
        part(512, &[2, 2, 1, 4], ElementType::F32),
    );
    let mut encoder = gpu.device().create_command_encoder(&Default::default());
    let view = x.view();
    let arguments = RotaryArguments {
        starts: Some(&starts),
        ..RotaryArguments::new(&view, &out)
    };
    let error = rotary.encode(&mut encoder, arguments).unwrap_err();
    assert!(
        error
            .to_string()
            .starts_with("out: it lies in the same buffer as starts"),
        "{error}"
    );
    // Positions past the last are taken for the last, and do not wrap around.
    let starts = Tensor::from_slice(gpu, &[2], &[u32::MAX, 7])
        .unwrap()
        .view();
    let out = Guarded::new(gpu, &[2, 2, 1, 4]);
    run(gpu, |encoder| {
        let out = out.tensor.view();
        let arguments = RotaryArguments {
            starts: Some(&starts),
            ..RotaryArguments::new(&view, &out)
        };
        rotary.encode(encoder, arguments).unwrap();
    });
    let got = out.read().unwrap();
    assert!(got.chunks(4).all(|row| row == &got[8..12]), "{got:?}");

    // A plan that was made with angles for more positions.
    let toy = toy();
    let long = Rotary::new(gpu, RotaryConfig::new(4, 64)).unwrap();
    let plan = toy.layer(gpu).with_rotary(&long).unwrap();
    let plan = plan.plan(LayerShape::new(1, 20)).unwrap();
    let short = toy.layer(gpu).with_rotary(&rotary).unwrap();
    let x = Tensor::empty(gpu, &[1, 20, 24], ElementType::F32)
        .unwrap()
        .view();
    let y = Tensor::empty(gpu, &[1, 20, 64], ElementType::F32)
        .unwrap()
        .view();
    let error = short
        .encode(&mut encoder, &plan, LayerArguments::new(&x, &y))
        .unwrap_err();
    assert_eq!(
        error.to_string(),
        "rotary embedding needs room for 20 positions, and there is room for 8; make it with angles for more positions"
    );
    // Rows that no sequence gets need no angle.
    let mut cache = KvCache::new(gpu, short.cache_config(1, 8)).unwrap();
    let x = Tensor::empty(gpu, &[1, 20, 24], ElementType::F32).unwrap();
    short.prefill(&x, Some(&[3]), &mut cache).unwrap();
    let error = Rotary::new(
        gpu,
        RotaryConfig {
            base: f64::from_bits(1),
            ..RotaryConfig::new(64, 9)
        },
    );
    assert!(error.is_err());
}

/// The dispatch that moves tokens is counted right where heads are odd: a call refused for its timestamps changes nothing.
#[test]
fn plans_count_what_is_moved() {
    let Some(turn) = gpu() else { return };
    let gpu: &Gpu = &turn;
    for (heads, kv_heads, head_dim, rotary) in [(1, 1, 1, false), (4, 2, 5, true), (4, 2, 5, false)]
    {
        let config = LayerConfig {
            head_dim: Some(head_dim),
            value_dim: Some(3),
            ..LayerConfig::new(4, 6, heads)
                .kv_heads(kv_heads)
                .causal(true)
        };
        let mut toy = Toy::new(1, config);
        if rotary {
            toy = toy.with_rotary(RotaryConfig::new(2, 8));
        }
        let layer = toy.layer(gpu);
        let cache = layer.cache_config(2, 8).stored_as(ElementType::F16);
        let plan = layer.plan(LayerShape::cached(&cache, 3)).unwrap();
        let steps = plan.steps();
        let (_, append) = steps
            .iter()
            .find(|(step, _)| *step == Step::Append)
            .unwrap();
        let turned = if rotary { heads } else { 0 };
        let pairs = 6 * ((turned + kv_heads) * head_dim.div_ceil(2) + kv_heads * 2);
        assert_eq!(append.groups as usize, pairs.div_ceil(64));
        assert_eq!(append.passes(), 1);
        if let Ok(mut room) = Timestamps::new(gpu, 3) {
            let mut cache = KvCache::new(gpu, cache).unwrap();
            let x = Tensor::empty(gpu, &[2, 3, 4], ElementType::F32)
                .unwrap()
                .view();
            let y = Tensor::empty(gpu, &[2, 3, 6], ElementType::F32)
                .unwrap()
                .view();
            let arguments = LayerArguments::new(&x, &y);
            let mut encoder = gpu.device().create_command_encoder(&Default::default());
            let refused = layer.encode_cached_timed(
                &mut encoder,
                &plan,
                &mut cache,
                None,
                arguments,
                Some(&mut room),
            );
            assert!(matches!(refused, Err(Error::LimitExceeded { .. })));
            assert_eq!(cache.lengths(), [0, 0]);
        }
    }
}

//! The whole layer: query, key and value projections, attention, output projection.

use super::{
    AttentionInputs, Axis, Rotary, RotaryInputs, Rules, attention, attention_without_weights,
    check_length, count, linear, rotary,
};
use crate::error::{Error, Result};

/// What an attention layer is computed from. Axes: batch B, tokens T, tokens of the source Ts, features d_in,
/// d_source and d_out, heads H, heads of keys and values Hkv, head dimension D, value dimension Dv.
///
/// End a literal with `..Default::default()`: self-attention with as many heads of keys and values as of
/// queries, D = Dv = d_out / H, no bias, no output projection and the default [`Rules`].
#[derive(Debug, Clone, Copy, Default)]
pub struct LayerInputs<'a> {
    /// B.
    pub batch: usize,
    /// T.
    pub tokens: usize,
    /// Features of each token that comes in.
    pub d_in: usize,
    /// Features of each token that goes out, at least 1: `H * Dv` without an output projection.
    pub d_out: usize,
    /// H, at least 1.
    pub heads: usize,
    /// Hkv, H where `None`. H must be a multiple of it.
    pub kv_heads: Option<usize>,
    /// D, at least 1; `d_out / H` where `None`, and then d_out must be a multiple of H.
    pub head_dim: Option<usize>,
    /// Dv, at least 1; D where `None`.
    pub value_dim: Option<usize>,
    /// Tokens, `(B, T, d_in)`.
    pub x: &'a [f64],
    /// What keys and values are made of, `(B, Ts, d_source)` (cross-attention); x where `None`.
    pub source: Option<&'a [f64]>,
    /// What values are made of, `(B, Ts, d_source)`; as the keys where `None`.
    pub value_source: Option<&'a [f64]>,
    /// Ts, T where `None`. Other than T it needs a `source`.
    pub source_tokens: Option<usize>,
    /// d_source, d_in where `None`. Other than d_in it needs a `source` and a `kv_weight`.
    pub d_source: Option<usize>,
    /// Query, key and value projections, `(H * D + Hkv * D + Hkv * Dv, d_in)`: the rows of q, then k, then v;
    /// head h owns rows `h*D..(h+1)*D` of its block (`h*Dv..(h+1)*Dv` for v). With a `kv_weight` those of q
    /// alone, `(H * D, d_in)`.
    pub qkv_weight: &'a [f64],
    /// Key and value projections of their own, `(Hkv * D + Hkv * Dv, d_source)`.
    pub kv_weight: Option<&'a [f64]>,
    /// `(H * D + Hkv * D + Hkv * Dv)`: q, k, v, with a `kv_weight` or without.
    pub qkv_bias: Option<&'a [f64]>,
    /// Output projection, `(d_out, H * Dv)`; without it the context is the result.
    pub output_weight: Option<&'a [f64]>,
    /// `(d_out)`; needs an `output_weight`.
    pub output_bias: Option<&'a [f64]>,
    /// Turns queries and keys after their projections and biases: token t of x and of the source stands at
    /// position t.
    pub rotary: Option<Rotary<'a>>,
    /// What happens to the scores, and which pairs are hidden; Tq is T, Tk is Ts.
    pub rules: Rules<'a>,
}

/// What [`layer`] gives.
#[derive(Debug, Clone, PartialEq)]
pub struct LayerOutputs {
    /// `(B, T, d_out)`.
    pub y: Vec<f64>,
    /// What attention gave, heads side by side, `(B, T, H * Dv)`.
    pub context: Vec<f64>,
    /// Log-sum-exp of each row's scores and its sink, `(B, H, T)`.
    pub lse: Vec<f64>,
    /// The probabilities, `(B, H, T, Ts)`; empty from [`layer_without_weights`].
    pub weights: Vec<f64>,
}

/// `y = attention(x·Wqᵀ + bq, s·Wkᵀ + bk, s·Wvᵀ + bv) · Woᵀ + bo`, where the source s is x unless one is given.
/// With [`rotary`](LayerInputs::rotary) the first two go through [`rotary`](fn@super::rotary).
///
/// Shapes stand at [`LayerInputs`] and [`LayerOutputs`], the rules of scores and hidden pairs at [`Rules`]
/// and [`attention`](super::attention). A token that sees no key has context 0, so its y is the output bias.
///
/// # Errors
///
/// [`Error::Shape`] where a length is not what the shapes call for or a result cannot be allocated;
/// [`Error::Parameter`] where `heads` or `d_out` is 0, `d_out` is not what `heads` and the dimensions make of
/// it, an output bias comes without an output weight or another source's shape without a `source` and
/// `kv_weight`, and where [`attention`](super::attention) or [`rotary`](fn@super::rotary) gives one.
///
/// ```
/// use wgpu_attention::reference::{LayerInputs, Rules, layer};
///
/// // q = k = 0, so each token sees itself and those before it alike; v = x; the output is doubled.
/// let outputs = layer(&LayerInputs {
///     batch: 1, tokens: 3, d_in: 1, d_out: 1, heads: 1,
///     x: &[1.0, 3.0, 8.0],
///     qkv_weight: &[0.0, 0.0, 1.0],
///     output_weight: Some(&[2.0]),
///     output_bias: Some(&[0.5]),
///     rules: Rules { causal: true, ..Default::default() },
///     ..Default::default()
/// })?;
/// let rounded: Vec<f64> = outputs.context.iter().map(|c| (c * 1e9).round() / 1e9).collect();
/// assert_eq!(rounded, [1.0, 2.0, 4.0]);
/// assert_eq!(outputs.y[1], 4.5);
/// # Ok::<(), wgpu_attention::Error>(())
/// ```
pub fn layer(inputs: &LayerInputs) -> Result<LayerOutputs> {
    run(inputs, true)
}

/// [`layer`] in memory that grows with T + Ts, not their product: `weights` is left empty.
///
/// # Errors
///
/// As [`layer`].
pub fn layer_without_weights(inputs: &LayerInputs) -> Result<LayerOutputs> {
    run(inputs, false)
}

fn run(inputs: &LayerInputs, keep_weights: bool) -> Result<LayerOutputs> {
    let sizes = check(inputs)?;
    let LayerInputs {
        batch,
        tokens,
        d_in,
        d_out,
        heads,
        x,
        qkv_weight,
        ..
    } = *inputs;
    let Sizes {
        source_tokens,
        d_source,
        ends: [q_end, k_end, v_end],
        ..
    } = sizes;

    let rows = product("x", &[("batch", batch), ("tokens", tokens)])?;
    let source_axes = [("batch", batch), ("source_tokens", source_tokens)];
    let source_rows = product("source", &source_axes)?;
    let key_source = inputs.source.unwrap_or(x);
    let value_source = inputs.value_source.unwrap_or(key_source);
    // Which rows of the bias, and where the first of them lies in the weight.
    let (kv_weight, kv_start) = match inputs.kv_weight {
        Some(weight) => (weight, q_end),
        None => (qkv_weight, 0),
    };

    // Head h of a token starts at h*D of its features, so (rows, H*D) is (B, T, H, D) as it lies.
    let bias = |start: usize, end: usize| inputs.qkv_bias.map(|bias| &bias[start..end]);
    let q_weight = &qkv_weight[..q_end * d_in];
    let turn = |projected: Vec<f64>, tokens, heads| match inputs.rotary {
        None => Ok(projected),
        Some(embedding) => rotary(&RotaryInputs {
            batch,
            tokens,
            heads,
            head_dim: sizes.head_dim,
            x: &projected,
            starts: None,
            rotary: embedding,
        }),
    };
    let q = linear(x, rows, d_in, q_weight, bias(0, q_end), q_end)?;
    let q = turn(q, tokens, heads)?;
    let project = |source, start: usize, end: usize| {
        let weight = &kv_weight[(start - kv_start) * d_source..(end - kv_start) * d_source];
        linear(
            source,
            source_rows,
            d_source,
            weight,
            bias(start, end),
            end - start,
        )
    };
    let k = project(key_source, q_end, k_end)?;
    let k = turn(k, source_tokens, inputs.kv_heads.unwrap_or(heads))?;
    let v = project(value_source, k_end, v_end)?;

    let core = AttentionInputs {
        batch,
        heads,
        kv_heads: inputs.kv_heads,
        q_len: tokens,
        kv_len: source_tokens,
        head_dim: sizes.head_dim,
        value_dim: inputs.value_dim,
        q: &q,
        k: &k,
        v: &v,
        rules: inputs.rules,
    };
    let attended = if keep_weights {
        attention(&core)?
    } else {
        attention_without_weights(&core)?
    };

    let context = attended.out;
    let y = match inputs.output_weight {
        None => context.clone(),
        Some(weight) => {
            let features = sizes.context;
            linear(&context, rows, features, weight, inputs.output_bias, d_out)?
        }
    };
    Ok(LayerOutputs {
        y,
        context,
        lse: attended.lse,
        weights: attended.weights,
    })
}

/// What [`LayerInputs`] leave unsaid.
struct Sizes {
    source_tokens: usize,
    d_source: usize,
    head_dim: usize,
    /// `H * Dv`.
    context: usize,
    /// Where the rows of q, k and v end in the weight of all three.
    ends: [usize; 3],
}

/// Checks, under the names of [`LayerInputs`], all that the projections would refuse under their own names.
fn check(inputs: &LayerInputs) -> Result<Sizes> {
    let LayerInputs {
        batch,
        tokens,
        d_in,
        d_out,
        heads,
        ..
    } = *inputs;
    if heads == 0 {
        return Err(Error::parameter("heads", 0, "must be at least 1"));
    }
    if d_out == 0 || (inputs.head_dim.is_none() && d_out % heads != 0) {
        return Err(Error::parameter(
            "d_out",
            d_out,
            format!("must be a multiple of heads = {heads}, and at least 1"),
        ));
    }
    if inputs.output_bias.is_some() && inputs.output_weight.is_none() {
        return Err(Error::parameter(
            "output_bias",
            "given",
            "needs an output_weight; give one or leave the bias out",
        ));
    }
    let source_tokens = inputs.source_tokens.unwrap_or(tokens);
    let d_source = inputs.d_source.unwrap_or(d_in);
    if inputs.source.is_none() && (source_tokens != tokens || d_source != d_in) {
        return Err(Error::parameter(
            "source",
            "none",
            "must be given where source_tokens is not tokens or d_source not d_in",
        ));
    }
    if inputs.kv_weight.is_none() && d_source != d_in {
        return Err(Error::parameter(
            "kv_weight",
            "none",
            "must be given where d_source is not d_in",
        ));
    }

    let h = ("heads", heads);
    let g = ("kv_heads", inputs.kv_heads.unwrap_or(heads));
    let head_dim = inputs.head_dim.unwrap_or(d_out / heads);
    let value_dim = ("value_dim", inputs.value_dim.unwrap_or(head_dim));
    let dim = ("head_dim", head_dim);
    let context = product("output_weight", &[h, value_dim])?;
    if inputs.output_weight.is_none() && d_out != context {
        return Err(Error::parameter(
            "d_out",
            d_out,
            format!("must be heads * value_dim = {context} without an output_weight"),
        ));
    }
    let mut ends = [0; 3];
    let mut end = 0_usize;
    for (block, axes) in [[h, dim], [g, dim], [g, value_dim]].iter().enumerate() {
        let more = end.checked_add(product("qkv_weight", axes)?);
        end = more.ok_or_else(|| too_many("qkv_weight"))?;
        ends[block] = end;
    }

    let (b, input, output) = (("batch", batch), ("d_in", d_in), ("d_out", d_out));
    let source = [b, ("source_tokens", source_tokens), ("d_source", d_source)];
    check_length("x", &[b, ("tokens", tokens), input], inputs.x.len())?;
    for (name, tensor) in [
        ("source", inputs.source),
        ("value_source", inputs.value_source),
    ] {
        if let Some(tensor) = tensor {
            check_length(name, &source, tensor.len())?;
        }
    }
    let qkv = ("q|k|v", end);
    match inputs.kv_weight {
        None => check_length("qkv_weight", &[qkv, input], inputs.qkv_weight.len())?,
        Some(weight) => {
            let (q, kv) = (("q", ends[0]), ("k|v", end - ends[0]));
            check_length("qkv_weight", &[q, input], inputs.qkv_weight.len())?;
            check_length("kv_weight", &[kv, ("d_source", d_source)], weight.len())?;
        }
    }
    if let Some(bias) = inputs.qkv_bias {
        check_length("qkv_bias", &[qkv], bias.len())?;
    }
    if let Some(weight) = inputs.output_weight {
        let axes = [output, ("heads * value_dim", context)];
        check_length("output_weight", &axes, weight.len())?;
    }
    if let Some(bias) = inputs.output_bias {
        check_length("output_bias", &[output], bias.len())?;
    }
    Ok(Sizes {
        source_tokens,
        d_source,
        head_dim,
        context,
        ends,
    })
}

/// The product of the axes; an error where this machine cannot count that far.
fn product(argument: &str, axes: &[Axis]) -> Result<usize> {
    count(axes)
        .and_then(|n| usize::try_from(n).ok())
        .ok_or_else(|| too_many(argument))
}

fn too_many(argument: &str) -> Error {
    Error::shape(
        argument,
        "axes that fit in this machine's memory",
        "a product beyond what it can count",
    )
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::reference::testing::wave;
    use crate::reference::{Angles, Broadcast, Pairing};

    fn causal<'a>() -> Rules<'a> {
        Rules {
            causal: true,
            ..Default::default()
        }
    }

    /// Two tokens, two heads of one feature. Head 0 has q = 0 and reads x0; head 1 has k = x1, v = x0 + x1.
    const QKV: [f64; 12] = [
        0.0, 0.0, 1.0, 0.0, // q: head 0, head 1
        5.0, 5.0, 0.0, 1.0, // k
        1.0, 0.0, 1.0, 1.0, // v
    ];

    fn two_heads() -> LayerInputs<'static> {
        LayerInputs {
            batch: 1,
            tokens: 2,
            d_in: 2,
            d_out: 2,
            heads: 2,
            x: &[1.0, 0.0, 2.0, 3.0],
            qkv_weight: &QKV,
            ..Default::default()
        }
    }

    #[test]
    fn a_layer_worked_by_hand() {
        let inputs = LayerInputs {
            output_weight: Some(&[0.0, 1.0, 1.0, 0.0]),
            output_bias: Some(&[10.0, 20.0]),
            ..two_heads()
        };
        let outputs = layer(&inputs).unwrap();
        // Head 1: q = [1, 2], k = [0, 3], v = [1, 5]; scores [0, 3] and [0, 6].
        let p = [
            1.0 / (1.0 + (-3.0_f64).exp()),
            1.0 / (1.0 + (-6.0_f64).exp()),
        ];
        let weights = [0.5, 0.5, 0.5, 0.5, 1.0 - p[0], p[0], 1.0 - p[1], p[1]];
        let context = [1.5, 1.0 + 4.0 * p[0], 1.5, 1.0 + 4.0 * p[1]];
        let y = [
            10.0 + context[1],
            20.0 + context[0],
            10.0 + context[3],
            20.0 + context[2],
        ];
        let lse = [2.0_f64.ln(), 2.0_f64.ln(), 3.0 - p[0].ln(), 6.0 - p[1].ln()];
        for (name, got, expected) in [
            ("weights", &outputs.weights, &weights[..]),
            ("context", &outputs.context, &context),
            ("y", &outputs.y, &y),
            ("lse", &outputs.lse, &lse),
        ] {
            assert_eq!(got.len(), expected.len(), "{name}");
            for (g, e) in got.iter().zip(expected) {
                assert!((g - e).abs() < 1e-14, "{name}: {got:?} is not {expected:?}");
            }
        }
        let lean = layer_without_weights(&inputs).unwrap();
        assert_eq!((lean.y, lean.lse), (outputs.y, outputs.lse));
        assert!(lean.weights.is_empty());
    }

    #[test]
    fn without_an_output_projection_the_context_is_the_result() {
        let outputs = layer(&LayerInputs {
            rules: causal(),
            qkv_bias: Some(&[0.0, 0.0, 0.0, 0.0, 100.0, 0.0]),
            ..two_heads()
        })
        .unwrap();
        assert_eq!(outputs.y, outputs.context);
        assert_eq!(outputs.y[..2], [101.0, 1.0]);
        assert_eq!(outputs.y[2], 101.5);
    }

    #[test]
    fn a_token_that_sees_no_key_gives_the_output_bias() {
        let outputs = layer(&LayerInputs {
            rules: Rules {
                mask: Some(Broadcast {
                    values: &[false, true],
                    shape: [1, 1, 1, 2],
                }),
                ..causal()
            },
            output_weight: Some(&[1.0, 0.0, 0.0, 1.0]),
            output_bias: Some(&[-1.0, -2.0]),
            ..two_heads()
        })
        .unwrap();
        assert_eq!(outputs.y, [-1.0, -2.0, 1.0, 3.0]);
        assert_eq!(outputs.lse[0], f64::NEG_INFINITY);
    }

    #[test]
    fn keys_and_values_from_other_tokens() {
        // q = k = 0: the mean of the values, v = [2 s, 3 s] of one head that two heads of queries share.
        let weight = [0.0, 2.0, 3.0];
        let inputs = LayerInputs {
            batch: 1,
            tokens: 1,
            d_in: 2,
            d_out: 4,
            heads: 2,
            kv_heads: Some(1),
            head_dim: Some(1),
            value_dim: Some(2),
            x: &[5.0, 7.0],
            source: Some(&[1.0, 2.0, 6.0]),
            source_tokens: Some(3),
            d_source: Some(1),
            qkv_weight: &[0.0; 4],
            kv_weight: Some(&weight),
            qkv_bias: Some(&[0.0, 0.0, 0.0, 0.5, 0.0]),
            ..Default::default()
        };
        let round = |values: &[f64]| -> Vec<f64> {
            values.iter().map(|v| (v * 1e9).round() / 1e9).collect()
        };
        let outputs = layer(&inputs).unwrap();
        assert_eq!(round(&outputs.y), [6.5, 9.0, 6.5, 9.0]);
        assert_eq!(outputs.y, outputs.context);
        assert_eq!(outputs.weights.len(), 2 * 3);
        assert_eq!(outputs.lse, [outputs.lse[0]; 2]);

        // Values of their own source; an output projection from 4 features to 1.
        let outputs = layer(&LayerInputs {
            value_source: Some(&[0.0, 0.0, 3.0]),
            d_out: 1,
            output_weight: Some(&[1.0, 0.0, 0.0, 10.0]),
            output_bias: Some(&[0.25]),
            ..inputs
        })
        .unwrap();
        assert_eq!(round(&outputs.context), [2.5, 3.0, 2.5, 3.0]);
        assert_eq!(round(&outputs.y), [32.75]);

        // One token of a source that is not there, and a source like x with one weight for all.
        let rules = Rules {
            kv_lens: Some(&[0]),
            ..Default::default()
        };
        let outputs = layer(&LayerInputs { rules, ..inputs }).unwrap();
        assert_eq!(outputs.y, [0.0; 4]);
        let good = two_heads();
        let expected = layer(&good).unwrap();
        let same = LayerInputs {
            source: Some(good.x),
            value_source: Some(good.x),
            ..good
        };
        assert_eq!(layer(&same).unwrap(), expected);
        let split = LayerInputs {
            qkv_weight: &QKV[..4],
            kv_weight: Some(&QKV[4..]),
            ..good
        };
        assert_eq!(layer(&split).unwrap(), expected);
    }

    #[test]
    fn rotary_embedding_turns_queries_and_keys_and_not_values() {
        // One head of two channels: q = v = x, k = x + (1, 0).
        let (cos, sin) = ([0.0, -1.0], [1.0, 0.0]);
        let identity = [1.0, 0.0, 0.0, 1.0].repeat(3);
        let inputs = LayerInputs {
            batch: 1,
            tokens: 2,
            d_in: 2,
            d_out: 2,
            heads: 1,
            x: &[1.0, 0.0, 0.0, 1.0],
            qkv_weight: &identity,
            qkv_bias: Some(&[0.0, 0.0, 1.0, 0.0, 0.0, 0.0]),
            rotary: Some(Rotary {
                angles: Angles::Tables {
                    cos: &cos,
                    sin: &sin,
                },
                ..Default::default()
            }),
            rules: Rules {
                scale: Some(1.0),
                ..Default::default()
            },
            ..Default::default()
        };
        // A quarter: q0 = (1, 0) -> (0, 1), k0 = (2, 0) -> (0, 2). A half: q1 = (0, 1) -> (0, -1),
        // k1 = (1, 1) -> (-1, -1). Scores [2, -1] and [-2, 1].
        let p = 1.0 / (1.0 + (-3.0_f64).exp());
        let outputs = layer(&inputs).unwrap();
        for (got, expected) in outputs.weights.iter().zip([p, 1.0 - p, 1.0 - p, p]) {
            assert!((got - expected).abs() < 1e-14, "{:?}", outputs.weights);
        }
        assert!((outputs.y[0] - p).abs() < 1e-14 && (outputs.y[1] - (1.0 - p)).abs() < 1e-14);

        // As attention over q and k that were turned before, with groups, odd values and a source.
        let (x, source) = (wave(2 * 3 * 5, 0.9), wave(2 * 4 * 5, 0.4));
        let weight = wave((4 * 6 + 2 * 6 + 2 * 3) * 5, 1.7);
        let embedding = Rotary {
            dims: Some(4),
            pairing: Pairing::Interleaved,
            angles: Angles::Base(30.0),
        };
        let cross = LayerInputs {
            batch: 2,
            tokens: 3,
            d_in: 5,
            d_out: 12,
            heads: 4,
            kv_heads: Some(2),
            head_dim: Some(6),
            value_dim: Some(3),
            x: &x,
            source: Some(&source),
            source_tokens: Some(4),
            qkv_weight: &weight,
            rotary: Some(embedding),
            ..Default::default()
        };
        let project = |source: &[f64], rows, range: std::ops::Range<usize>| {
            let weight = &weight[range.start * 5..range.end * 5];
            linear(source, rows, 5, weight, None, range.len()).unwrap()
        };
        let turn = |x: &[f64], tokens, heads| {
            rotary(&RotaryInputs {
                batch: 2,
                tokens,
                heads,
                head_dim: 6,
                x,
                starts: None,
                rotary: embedding,
            })
            .unwrap()
        };
        let expected = attention(&AttentionInputs {
            batch: 2,
            heads: 4,
            kv_heads: Some(2),
            q_len: 3,
            kv_len: 4,
            head_dim: 6,
            value_dim: Some(3),
            q: &turn(&project(&x, 6, 0..24), 3, 4),
            k: &turn(&project(&source, 8, 24..36), 4, 2),
            v: &project(&source, 8, 36..42),
            ..Default::default()
        })
        .unwrap();
        let found = layer(&cross).unwrap();
        assert_eq!((&found.y, &found.lse), (&expected.out, &expected.lse));
        let plain = layer(&LayerInputs {
            rotary: None,
            ..cross
        })
        .unwrap();
        assert_ne!(found.y, plain.y);
        let unsound = layer(&LayerInputs {
            rotary: Some(Rotary {
                dims: Some(8),
                ..embedding
            }),
            ..cross
        });
        let said = unsound.unwrap_err().to_string();
        assert_eq!(
            said,
            "dims = 8: must be even and from 2 to head_dim = 6; channels turn in pairs"
        );
    }

    #[test]
    fn empty_axes_work() {
        for (batch, tokens) in [(0, 5), (5, 0), (0, usize::MAX)] {
            let inputs = LayerInputs {
                batch,
                tokens,
                x: &[],
                ..two_heads()
            };
            assert!(layer(&inputs).unwrap().y.is_empty());
        }
        let no_features = layer(&LayerInputs {
            d_in: 0,
            x: &[],
            qkv_weight: &[],
            qkv_bias: Some(&[0.0, 0.0, 0.0, 0.0, 3.0, 4.0]),
            ..two_heads()
        });
        assert_eq!(no_features.unwrap().y, [3.0, 4.0, 3.0, 4.0]);
    }

    #[test]
    fn each_wrong_argument_is_named() {
        let good = two_heads();
        let named = |inputs: LayerInputs| match layer(&inputs) {
            Err(Error::Shape { argument, .. }) => argument,
            Err(Error::Parameter { parameter, .. }) => parameter.into(),
            other => format!("{other:?}"),
        };
        let five = [0.0; 5];
        let some = Some(&five[..]);
        assert_eq!(named(LayerInputs { x: &five, ..good }), "x");
        assert_eq!(
            named(LayerInputs {
                qkv_weight: &five,
                ..good
            }),
            "qkv_weight"
        );
        assert_eq!(
            named(LayerInputs {
                qkv_bias: some,
                ..good
            }),
            "qkv_bias"
        );
        assert_eq!(
            named(LayerInputs {
                output_weight: some,
                ..good
            }),
            "output_weight"
        );
        assert_eq!(
            named(LayerInputs {
                output_weight: Some(&[0.0; 4]),
                output_bias: some,
                ..good
            }),
            "output_bias"
        );
        assert_eq!(
            named(LayerInputs {
                output_bias: Some(&[0.0; 2]),
                ..good
            }),
            "output_bias"
        );
        let rules = Rules {
            scale: Some(f64::NAN),
            ..Default::default()
        };
        assert_eq!(named(LayerInputs { rules, ..good }), "scale");
        let mask = Some(Broadcast {
            values: &[true],
            shape: [1, 1, 1, 3],
        });
        let rules = Rules {
            mask,
            ..Default::default()
        };
        assert_eq!(named(LayerInputs { rules, ..good }), "mask");
        assert_eq!(named(LayerInputs { heads: 0, ..good }), "heads");
        assert_eq!(named(LayerInputs { d_out: 0, ..good }), "d_out");
        assert_eq!(
            named(LayerInputs {
                d_out: usize::MAX,
                heads: 1,
                ..good
            }),
            "qkv_weight"
        );
        for (inputs, name) in [
            (
                LayerInputs {
                    source: some,
                    ..good
                },
                "source",
            ),
            (
                LayerInputs {
                    value_source: some,
                    ..good
                },
                "value_source",
            ),
            (
                LayerInputs {
                    source_tokens: Some(3),
                    ..good
                },
                "source",
            ),
            (
                LayerInputs {
                    d_source: Some(1),
                    ..good
                },
                "source",
            ),
            (
                LayerInputs {
                    d_source: Some(1),
                    source: Some(&[0.0; 2]),
                    ..good
                },
                "kv_weight",
            ),
            (
                LayerInputs {
                    kv_weight: some,
                    ..good
                },
                "qkv_weight",
            ),
            (
                LayerInputs {
                    kv_weight: some,
                    qkv_weight: &[0.0; 4],
                    ..good
                },
                "kv_weight",
            ),
            (
                LayerInputs {
                    kv_heads: Some(0),
                    qkv_weight: &[0.0; 4],
                    ..good
                },
                "kv_heads",
            ),
            (
                LayerInputs {
                    kv_heads: Some(3),
                    qkv_weight: &[0.0; 16],
                    ..good
                },
                "kv_heads",
            ),
            (
                LayerInputs {
                    head_dim: Some(3),
                    ..good
                },
                "d_out",
            ),
            (
                LayerInputs {
                    value_dim: Some(3),
                    ..good
                },
                "d_out",
            ),
            (
                LayerInputs {
                    head_dim: Some(0),
                    value_dim: Some(1),
                    qkv_weight: &[0.0; 4],
                    ..good
                },
                "head_dim",
            ),
            (
                LayerInputs {
                    value_dim: Some(usize::MAX),
                    ..good
                },
                "output_weight",
            ),
        ] {
            assert_eq!(named(inputs), name);
        }
        let error = layer(&LayerInputs { heads: 3, ..good }).unwrap_err();
        assert_eq!(
            error.to_string(),
            "d_out = 2: must be a multiple of heads = 3, and at least 1"
        );
    }

    #[test]
    fn huge_axes_without_features_are_refused() {
        let max = usize::MAX;
        for (batch, tokens, d_out) in [(max, 2, 1), (1, max, 1), (1, 1, max / 4), (0, 0, max)] {
            let inputs = LayerInputs {
                batch,
                tokens,
                d_out,
                heads: 1,
                ..Default::default()
            };
            assert!(matches!(
                layer(&inputs),
                Err(Error::Shape { .. } | Error::Parameter { .. })
            ));
        }
    }
}

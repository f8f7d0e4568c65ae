//! The whole layer: query, key and value projections, attention, output projection.

use super::{
    Alignment, AttentionInputs, attention, attention_without_weights, check_length, linear,
};
use crate::error::{Error, Result};

/// What a self-attention layer is computed from. Axes: batch B, tokens T, features d_in and d_out, heads H;
/// the head dimension D is `d_out / H`.
///
/// End a literal with `..Default::default()`, which is no bias, no mask and no output projection.
#[derive(Debug, Clone, Copy, Default)]
pub struct LayerInputs<'a> {
    /// B.
    pub batch: usize,
    /// T.
    pub tokens: usize,
    /// Features of each token that comes in.
    pub d_in: usize,
    /// Features of each token that goes out: a multiple of `heads`, at least 1.
    pub d_out: usize,
    /// H, at least 1.
    pub heads: usize,
    /// Whether token i sees tokens `0..=i` only.
    pub causal: bool,
    /// What `q·k` is multiplied with: `1/sqrt(D)` where `None`.
    pub scale: Option<f64>,
    /// Tokens, `(B, T, d_in)`.
    pub x: &'a [f64],
    /// Query, key and value projections, `(3 * d_out, d_in)`: the rows of q, then k, then v; head h owns
    /// rows `h*D..(h+1)*D` of each block.
    pub qkv_weight: &'a [f64],
    /// `(3 * d_out)`, in the order of `qkv_weight`.
    pub qkv_bias: Option<&'a [f64]>,
    /// Output projection, `(d_out, d_out)`; without it the context is the result.
    pub output_weight: Option<&'a [f64]>,
    /// `(d_out)`; needs an `output_weight`.
    pub output_bias: Option<&'a [f64]>,
    /// Which tokens may be seen as keys, `(B, T)`, true = may attend.
    pub key_mask: Option<&'a [bool]>,
}

/// What [`layer`] gives.
#[derive(Debug, Clone, PartialEq)]
pub struct LayerOutputs {
    /// `(B, T, d_out)`.
    pub y: Vec<f64>,
    /// What attention gave, heads side by side, `(B, T, d_out)`.
    pub context: Vec<f64>,
    /// Log-sum-exp of each row's scores, `(B, H, T)`.
    pub lse: Vec<f64>,
    /// The probabilities, `(B, H, T, T)`; empty from [`layer_without_weights`].
    pub weights: Vec<f64>,
}

/// `y = attention(x·Wqᵀ + bq, x·Wkᵀ + bk, x·Wvᵀ + bv) · Woᵀ + bo`, each head on its own D features.
///
/// Shapes stand at [`LayerInputs`] and [`LayerOutputs`], the rules of masks at
/// [`attention`](super::attention). A token that sees no key has context 0, so its y is the output bias.
///
/// # Errors
///
/// [`Error::Shape`] where a length is not what the shapes call for or a result cannot be allocated;
/// [`Error::Parameter`] where `heads` or `d_out` is 0, `d_out` is no multiple of `heads`, `scale` is NaN or
/// infinite, or an output bias comes without an output weight.
///
/// ```
/// use wgpu_attention::reference::{LayerInputs, layer};
///
/// // q = k = 0, so each token sees itself and those before it alike; v = x; the output is doubled.
/// let outputs = layer(&LayerInputs {
///     batch: 1, tokens: 3, d_in: 1, d_out: 1, heads: 1,
///     causal: true,
///     x: &[1.0, 3.0, 8.0],
///     qkv_weight: &[0.0, 0.0, 1.0],
///     output_weight: Some(&[2.0]),
///     output_bias: Some(&[0.5]),
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

/// [`layer`] in memory that grows with T, not T²: `weights` is left empty.
///
/// # Errors
///
/// As [`layer`].
pub fn layer_without_weights(inputs: &LayerInputs) -> Result<LayerOutputs> {
    run(inputs, false)
}

fn run(inputs: &LayerInputs, keep_weights: bool) -> Result<LayerOutputs> {
    check(inputs)?;
    let LayerInputs {
        batch,
        tokens,
        d_in,
        d_out,
        heads,
        x,
        ..
    } = *inputs;

    // Of no tokens there is nothing to compute, however large the other axes are.
    let rows = if batch == 0 || tokens == 0 {
        0
    } else {
        batch.checked_mul(tokens).ok_or_else(|| {
            Error::shape(
                "x",
                "batch * tokens that fits in this machine's memory",
                format_args!("batch {batch} and tokens {tokens}"),
            )
        })?
    };
    // Head h of a token starts at h*D of its d_out features, so (rows, d_out) is (B, T, H, D) as it lies.
    let project = |block: usize| {
        let features = block * d_out..(block + 1) * d_out;
        let weight = &inputs.qkv_weight[features.start * d_in..features.end * d_in];
        let bias = inputs.qkv_bias.map(|bias| &bias[features]);
        linear(x, rows, d_in, weight, bias, d_out)
    };
    let (q, k, v) = (project(0)?, project(1)?, project(2)?);

    let core = AttentionInputs {
        batch,
        heads,
        q_len: tokens,
        kv_len: tokens,
        head_dim: d_out / heads,
        q: &q,
        k: &k,
        v: &v,
        scale: inputs.scale,
        causal: inputs.causal.then_some(Alignment::TopLeft),
        key_mask: inputs.key_mask,
    };
    let attended = if keep_weights {
        attention(&core)?
    } else {
        attention_without_weights(&core)?
    };

    let context = attended.out;
    let y = match inputs.output_weight {
        None => context.clone(),
        Some(weight) => linear(&context, rows, d_out, weight, inputs.output_bias, d_out)?,
    };
    Ok(LayerOutputs {
        y,
        context,
        lse: attended.lse,
        weights: attended.weights,
    })
}

/// Checks, under the names of [`LayerInputs`], all that the steps would refuse under their own names.
fn check(inputs: &LayerInputs) -> Result<()> {
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
    if d_out == 0 || d_out % heads != 0 {
        return Err(Error::parameter(
            "d_out",
            d_out,
            format!("must be a multiple of heads = {heads}, and at least 1"),
        ));
    }
    if d_out.checked_mul(3).is_none() {
        return Err(Error::parameter(
            "d_out",
            d_out,
            "3 * d_out must fit in this machine's memory",
        ));
    }
    if inputs.output_bias.is_some() && inputs.output_weight.is_none() {
        return Err(Error::parameter(
            "output_bias",
            "given",
            "needs an output_weight; give one or leave the bias out",
        ));
    }

    let (b, t) = (("batch", batch), ("tokens", tokens));
    let (input, output) = (("d_in", d_in), ("d_out", d_out));
    let blocks = ("q|k|v", 3);
    check_length("x", &[b, t, input], inputs.x.len())?;
    check_length(
        "qkv_weight",
        &[blocks, output, input],
        inputs.qkv_weight.len(),
    )?;
    if let Some(bias) = inputs.qkv_bias {
        check_length("qkv_bias", &[blocks, output], bias.len())?;
    }
    if let Some(weight) = inputs.output_weight {
        check_length("output_weight", &[output, output], weight.len())?;
    }
    if let Some(bias) = inputs.output_bias {
        check_length("output_bias", &[output], bias.len())?;
    }
    if let Some(mask) = inputs.key_mask {
        check_length("key_mask", &[b, t], mask.len())?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

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
            causal: true,
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
            causal: true,
            key_mask: Some(&[false, true]),
            output_weight: Some(&[1.0, 0.0, 0.0, 1.0]),
            output_bias: Some(&[-1.0, -2.0]),
            ..two_heads()
        })
        .unwrap();
        assert_eq!(outputs.y, [-1.0, -2.0, 1.0, 3.0]);
        assert_eq!(outputs.lse[0], f64::NEG_INFINITY);
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
        assert_eq!(
            named(LayerInputs {
                key_mask: Some(&[true]),
                ..good
            }),
            "key_mask"
        );
        assert_eq!(
            named(LayerInputs {
                scale: Some(f64::NAN),
                ..good
            }),
            "scale"
        );
        assert_eq!(named(LayerInputs { heads: 0, ..good }), "heads");
        assert_eq!(named(LayerInputs { d_out: 0, ..good }), "d_out");
        assert_eq!(
            named(LayerInputs {
                d_out: usize::MAX,
                heads: 1,
                ..good
            }),
            "d_out"
        );
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

//! A rule of one's own, in WGSL: several documents lie in one sequence and must not see each other, and a learned bias is
//! added by head and distance. The kernels link it in; nothing of size T x T is made. The result is checked against the
//! f64 reference, which takes the same rule as closures.
//!
//! `cargo run --release --example own_rule`

use wgpu_attention::compare::{Tolerance, compare};
use wgpu_attention::reference::{self, widen};
use wgpu_attention::{
    AttentionRules, ElementType, Gpu, GpuOptions, LayerArguments, LayerConfig, LayerShape,
    LayerWeights, MultiHeadAttention, Projection, QkvWeights, Rule, RuleArguments, Tensor,
};

/// Tokens of the sequence.
const TOKENS: usize = 32;
/// Distances that have a bias of their own; those beyond share the last one's.
const DISTANCES: usize = 8;

/// `rule_data` is the document of each token, then the biases `(H, DISTANCES)`.
const WGSL: &str = "
const TOKENS: u32 = 32u;
const DISTANCES: u32 = 8u;

fn may_attend(batch: u32, head: u32, query: u32, key: u32) -> bool {
    return rule_data(query) == rule_data(key);
}

fn score(score: f32, batch: u32, head: u32, query: u32, key: u32) -> f32 {
    let distance = max(query, key) - min(query, key);
    return score + rule_data(TOKENS + head * DISTANCES + min(distance, DISTANCES - 1u));
}
";

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let gpu = Gpu::open_blocking(&GpuOptions::default())?;
    let (batch, d_model, heads) = (2, 48, 4);
    let (qkv, output) = (
        wave(3 * d_model * d_model, 0.37),
        wave(d_model * d_model, 0.53),
    );
    let rules = AttentionRules {
        // Checked here: a mistake in the text is an error with its line.
        rule: Some(Rule::new(WGSL)?),
        ..Default::default()
    };
    let layer = MultiHeadAttention::new(
        &gpu,
        LayerConfig::new(d_model, d_model, heads).rules(rules),
        &LayerWeights {
            qkv: QkvWeights::Fused(Projection::new(&qkv)),
            output: Some(Projection::new(&output)),
        },
    )?;
    let plan = layer.plan(LayerShape::new(batch, TOKENS))?;
    println!("{plan}\n");

    // Documents of 10, 15 and 7 tokens, and a bias that falls with the distance, in each head at its own pace.
    let document = |token: usize| [10, 25, 32].iter().filter(|end| **end <= token).count();
    let bias = |head: usize, distance: usize| -0.2 * (head as f32 + 1.0) * distance as f32;
    let mut data: Vec<f32> = (0..TOKENS).map(|token| document(token) as f32).collect();
    for head in 0..heads {
        data.extend((0..DISTANCES).map(|distance| bias(head, distance)));
    }
    let x_values = wave(batch * TOKENS * d_model, 0.11);
    let shape = [batch, TOKENS, d_model];
    let x = Tensor::from_slice(&gpu, &shape, &x_values)?.view();
    let rule_data = Tensor::from_slice(&gpu, &[data.len()], &data)?.view();
    let y = Tensor::empty(&gpu, &shape, ElementType::F32)?;
    let out = y.view();
    let call = LayerArguments {
        rules: RuleArguments {
            rule_data: Some(&rule_data),
            ..Default::default()
        },
        ..LayerArguments::new(&x, &out)
    };
    let mut encoder = gpu.device().create_command_encoder(&Default::default());
    layer.encode(&mut encoder, &plan, call)?;
    gpu.submit(encoder.finish())?;
    let y = y.read_blocking::<f32>()?;
    println!("y[0, 0, ..4] = {:.4?}", &y[..4]);

    // The same rule on the host, in f64.
    let may_attend = |_, _, query, key| document(query) == document(key);
    let score = |score, _, head, query: usize, key: usize| {
        score + f64::from(bias(head, query.abs_diff(key).min(DISTANCES - 1)))
    };
    let expected = reference::layer(&reference::LayerInputs {
        batch,
        tokens: TOKENS,
        d_in: d_model,
        d_out: d_model,
        heads,
        x: &widen(&x_values),
        qkv_weight: &widen(&qkv),
        output_weight: Some(&widen(&output)),
        rules: reference::Rules {
            may_attend: Some(&may_attend),
            score: Some(&score),
            ..Default::default()
        },
        ..Default::default()
    })?;
    let comparison = compare(&y, &shape, &expected.y, &shape, Tolerance::F32);
    println!("against the f64 reference: {comparison}");
    assert!(comparison.passed());
    Ok(())
}

/// Numbers in -0.3..0.3.
fn wave(count: usize, step: f32) -> Vec<f32> {
    (0..count).map(|i| (i as f32 * step).sin() * 0.3).collect()
}

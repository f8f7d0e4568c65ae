//! A decoder's masked self-attention as newer language models have it: groups of query heads share a head of keys and
//! values, and each token sees itself and a window of tokens before it. The weights, returned by the same call,
//! show who saw whom.
//!
//! `cargo run --release --example decoder`

use wgpu_attention::{
    AttentionRules, ElementType, Gpu, GpuOptions, LayerArguments, LayerConfig, LayerShape,
    LayerWeights, MultiHeadAttention, Projection, QkvWeights, Tensor,
};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let gpu = Gpu::open_blocking(&GpuOptions::default())?;
    let (batch, tokens, d_model, heads, kv_heads, window) = (1, 20, 64, 8, 2, 5);
    let config = LayerConfig::new(d_model, d_model, heads)
        .kv_heads(kv_heads)
        .rules(AttentionRules {
            causal: true,
            window_left: Some(window),
            ..Default::default()
        });
    // 8 heads of q, but 2 of k and 2 of v: 96 rows instead of 192.
    let rows = config.qkv_width()?;
    println!(
        "fused weight: {rows} x {d_model} for {heads} query heads that share {kv_heads} KV heads"
    );
    let layer = MultiHeadAttention::new(
        &gpu,
        config,
        &LayerWeights {
            qkv: QkvWeights::Fused(Projection::new(&wave(rows * d_model, 0.37))),
            output: Some(Projection::new(&wave(d_model * d_model, 0.53))),
        },
    )?;

    // Once per shape. The calls of this plan may ask for the attention weights.
    let plan = layer.plan(LayerShape::new(batch, tokens).weights(true))?;
    println!("{plan}\n");
    let x = Tensor::from_slice(
        &gpu,
        &[batch, tokens, d_model],
        &wave(batch * tokens * d_model, 0.11),
    )?;
    let y = Tensor::empty(&gpu, &[batch, tokens, d_model], ElementType::F32)?;
    let weights = Tensor::empty(&gpu, &[batch, heads, tokens, tokens], ElementType::F32)?;

    // Per call.
    let (x, out, weights_out) = (x.view(), y.view(), weights.view());
    let mut encoder = gpu.device().create_command_encoder(&Default::default());
    let call = LayerArguments {
        weights: Some(&weights_out),
        ..LayerArguments::new(&x, &out)
    };
    layer.encode(&mut encoder, &plan, call)?;
    gpu.submit(encoder.finish())?;

    println!("y[0, 0, ..4] = {:.4?}", &y.read_blocking::<f32>()?[..4]);
    let weights = weights.read_blocking::<f32>()?;
    println!("\nwhich keys (columns) each token (row) of head 0 sees, in tenths of its attention:");
    for (token, row) in weights.chunks(tokens).enumerate() {
        let token = token % tokens;
        for (key, weight) in row.iter().enumerate() {
            assert_eq!(
                *weight > 0.0,
                (token.saturating_sub(window)..=token).contains(&key)
            );
        }
        assert!((row.iter().sum::<f32>() - 1.0).abs() < 1e-5);
    }
    for (token, row) in weights.chunks(tokens).take(tokens).enumerate() {
        let cells = row.iter().map(|weight| match weight {
            0.0 => " .".to_string(),
            weight => format!("{:2.0}", weight * 10.0),
        });
        println!("{token:>3} {}", cells.collect::<String>());
    }
    Ok(())
}

/// Numbers that look random enough, -0.5 to 0.5.
fn wave(count: usize, step: f32) -> Vec<f32> {
    let places = (0..count).map(|i| i as f32);
    places
        .map(|i| ((i * step).sin() * 43758.547).rem_euclid(1.0) - 0.5)
        .collect()
}

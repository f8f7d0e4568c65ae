//! An encoder's self-attention over sentences of different lengths: the shorter ones are padded, and a key mask keeps
//! every token from looking at padding, whatever lies there.
//!
//! `cargo run --release --example encoder`

use wgpu_attention::{
    Gpu, GpuOptions, LayerConfig, LayerWeights, MultiHeadAttention, Projection, QkvWeights, Tensor,
};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let gpu = Gpu::open_blocking(&GpuOptions::default())?;
    let (d_model, heads) = (64, 4);
    let layer = MultiHeadAttention::new(
        &gpu,
        LayerConfig::new(d_model, d_model, heads),
        &LayerWeights {
            // q, k and v in one matrix, as nn.Linear keeps it, and the output projection.
            qkv: QkvWeights::Fused(Projection::new(&wave(3 * d_model * d_model, 0.37))),
            output: Some(Projection::new(&wave(d_model * d_model, 0.53))),
        },
    )?;

    // Three sentences in one batch, as long as the longest: what is behind the others' ends is padding.
    let lengths = [12, 7, 4];
    let (batch, tokens) = (lengths.len(), 12);
    let key_mask: Vec<bool> = (0..batch * tokens)
        .map(|at| at % tokens < lengths[at / tokens])
        .collect();
    let mut x = wave(batch * tokens * d_model, 0.11);
    let mask = Tensor::from_slice(&gpu, &[batch, tokens], &key_mask)?;
    let forward = |x: &[f32]| -> wgpu_attention::Result<Vec<f32>> {
        let x = Tensor::from_slice(&gpu, &[batch, tokens, d_model], x)?;
        let y = layer.forward(&x, Some(&mask))?;
        assert_eq!(y.shape(), [batch, tokens, d_model]);
        y.read_blocking()
    };
    let y = forward(&x)?;
    for (item, length) in lengths.iter().enumerate() {
        let first = &y[item * tokens * d_model..][..4];
        println!(
            "sentence {item}, {length:>2} tokens and {:>2} of padding: y[0][..4] = {first:.4?}",
            tokens - length
        );
    }

    // The padding may be anything at all: no row of a real token changes by a bit.
    for (row, seen) in x.chunks_mut(d_model).zip(&key_mask) {
        if !seen {
            row.fill(f32::NAN);
        }
    }
    let again = forward(&x)?;
    let rows = y.chunks(d_model).zip(again.chunks(d_model)).zip(&key_mask);
    let real: Vec<_> = rows.filter(|(_, seen)| **seen).collect();
    assert!(real.iter().all(|((before, after), _)| before == after));
    println!(
        "with NaN for padding the rows of all {} tokens are the same",
        real.len()
    );
    Ok(())
}

/// Numbers in -0.3..0.3.
fn wave(count: usize, step: f32) -> Vec<f32> {
    (0..count).map(|i| (i as f32 * step).sin() * 0.3).collect()
}

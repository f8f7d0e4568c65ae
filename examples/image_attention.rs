//! Self-attention over an image, as a U-Net's blocks have it. The image lies channels first, `(B, C, height, width)`, and
//! stays so: the layer reads its pixels as tokens through strides and writes the result the same way, without a transpose.
//!
//! `cargo run --release --example image_attention`

use wgpu_attention::{
    ElementType, Gpu, GpuOptions, LayerArguments, LayerConfig, LayerShape, LayerWeights,
    MultiHeadAttention, Projection, QkvWeights, Tensor,
};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let gpu = Gpu::open_blocking(&GpuOptions::default())?;
    let (batch, channels, height, width, heads) = (2, 32, 12, 16, 4);
    let pixels = height * width;
    let layer = MultiHeadAttention::new(
        &gpu,
        LayerConfig::new(channels, channels, heads),
        &LayerWeights {
            qkv: QkvWeights::Fused(Projection::new(&wave(3 * channels * channels, 0.37))),
            output: Some(Projection::new(&wave(channels * channels, 0.53))),
        },
    )?;
    let plan = layer.plan(LayerShape::new(batch, pixels))?;
    println!("{plan}\n");

    let image = wave(batch * channels * pixels, 0.11);
    let shape = [batch, channels, height, width];
    let x = Tensor::from_slice(&gpu, &shape, &image)?;
    let y = Tensor::empty(&gpu, &shape, ElementType::F32)?;
    // The same memory as (B, height * width, C): nothing is copied.
    let (tokens, tokens_out) = (x.view().image_tokens()?, y.view().image_tokens()?);
    println!(
        "image {shape:?} as tokens {:?}, strides {:?}",
        tokens.shape(),
        tokens.strides()
    );
    let mut encoder = gpu.device().create_command_encoder(&Default::default());
    layer.encode(
        &mut encoder,
        &plan,
        LayerArguments::new(&tokens, &tokens_out),
    )?;
    gpu.submit(encoder.finish())?;
    let y = y.read_blocking::<f32>()?;
    println!(
        "y[0, ..4, 0, 0] = {:.4?}",
        [0, 1, 2, 3].map(|channel| y[channel * pixels])
    );

    // The long way round: transpose on the host, compute, transpose back.
    let mut transposed = vec![0.0; image.len()];
    let places = || {
        (0..image.len()).map(|at| {
            (
                at,
                (at / pixels) % channels,
                at % pixels,
                at / pixels / channels,
            )
        })
    };
    for (at, channel, pixel, item) in places() {
        transposed[(item * pixels + pixel) * channels + channel] = image[at];
    }
    let long_way = layer.forward_host_blocking(&transposed, batch, pixels, None)?;
    for (at, channel, pixel, item) in places() {
        assert_eq!(
            y[at],
            long_way[(item * pixels + pixel) * channels + channel]
        );
    }
    println!("the same, bit by bit, as with transposes in front and behind");
    Ok(())
}

/// Numbers in -0.3..0.3.
fn wave(count: usize, step: f32) -> Vec<f32> {
    (0..count).map(|i| (i as f32 * step).sin() * 0.3).collect()
}

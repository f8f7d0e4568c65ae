//! A decoder's cross-attention over an encoder's output: queries are made of one tensor, keys and values of another, with
//! other channels and another number of tokens. The attention weights come back with the result and are drawn as a
//! heat map.
//!
//! `cargo run --release --example cross_attention [FILE.svg]` (else `target/cross_attention.svg`)

use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};
use std::path::PathBuf;
use wgpu_attention::{
    ElementType, Gpu, GpuOptions, LayerArguments, LayerConfig, LayerShape, LayerWeights,
    MultiHeadAttention, Projection, QkvWeights, Tensor,
};

const SOURCE: [&str; 7] = ["the", "black", "cat", "sat", "on", "the", "mat"];
const TARGET: [&str; 6] = ["le", "chat", "noir", "assis", "sur", "tapis"];
/// Which words of the source each word of the target means.
const MEANING: [&[usize]; 6] = [&[0, 5], &[2], &[1], &[3], &[4], &[6]];

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let path = std::env::args().nth(1).map(PathBuf::from);
    let path = path.unwrap_or_else(|| "target/cross_attention.svg".into());
    let gpu = Gpu::open_blocking(&GpuOptions::default())?;
    // The encoder's output has more channels than the decoder's state.
    let (d_in, d_source, d_out, heads) = (16, 24, 16, 2);
    let (tokens, keys) = (TARGET.len(), SOURCE.len());

    // In place of trained embeddings: each word of the source is a random direction, and the decoder's state at a word of
    // the target is that of what it means. Equal words of the source differ in the channels of their place alone.
    let mut random = random_numbers();
    let meanings: Vec<Vec<f32>> = (0..keys).map(|_| random(d_in)).collect();
    let mut source = Vec::new();
    for (place, word) in SOURCE.iter().enumerate() {
        let first = SOURCE
            .iter()
            .position(|other| other == word)
            .unwrap_or(place);
        source.extend(&meanings[first]);
        source.extend(random(d_source - d_in));
    }
    let mut x = Vec::new();
    for means in MEANING {
        let noise = random(d_in);
        x.extend(
            meanings[means[0]]
                .iter()
                .zip(noise)
                .map(|(m, noise)| m + 0.4 * noise),
        );
    }

    // q and k take the channels of meaning, v is random. Queries come from d_in channels, keys and values from d_source.
    let pick = |d: usize, size: f32| -> Vec<f32> {
        (0..d_out * d)
            .map(|at| if at / d == at % d { size } else { 0.0 })
            .collect()
    };
    let layer = MultiHeadAttention::new(
        &gpu,
        LayerConfig::new(d_in, d_out, heads).source(d_source),
        &LayerWeights {
            qkv: QkvWeights::Separate {
                q: Projection::new(&pick(d_in, 2.0)),
                k: Projection::new(&pick(d_source, 2.0)),
                v: Projection::new(&random(d_out * d_source)),
            },
            output: Some(Projection::new(&random(d_out * d_out))),
        },
    )?;
    let plan = layer.plan(LayerShape::new(1, tokens).source(keys).weights(true))?;
    println!("{plan}\n");
    let x = Tensor::from_slice(&gpu, &[1, tokens, d_in], &x)?.view();
    let source = Tensor::from_slice(&gpu, &[1, keys, d_source], &source)?.view();
    let y = Tensor::empty(&gpu, &[1, tokens, d_out], ElementType::F32)?;
    let weights = Tensor::empty(&gpu, &[1, heads, tokens, keys], ElementType::F32)?;
    let (out, weights_out) = (y.view(), weights.view());
    let call = LayerArguments {
        source: Some(&source),
        weights: Some(&weights_out),
        ..LayerArguments::new(&x, &out)
    };
    let mut encoder = gpu.device().create_command_encoder(&Default::default());
    layer.encode(&mut encoder, &plan, call)?;
    gpu.submit(encoder.finish())?;

    println!("y[0, 0, ..4] = {:.4?}", &y.read_blocking::<f32>()?[..4]);
    let weights = weights.read_blocking::<f32>()?;
    let sums = weights.chunks(keys).map(|row| row.iter().sum::<f32>());
    assert!(sums.map(|sum| (sum - 1.0).abs()).all(|error| error < 1e-5));
    draw(&path, &weights, heads)?;
    println!("attention weights drawn to {}", path.display());
    Ok(())
}

/// Numbers that look random and are the same every time, -1 to 1.
fn random_numbers() -> impl FnMut(usize) -> Vec<f32> {
    let mut state = 7u64;
    move |count| {
        let mut next = || {
            state = state
                .wrapping_mul(6364136223846793005)
                .wrapping_add(1442695040888963407);
            (state >> 33) as f32 / (1u64 << 30) as f32 - 1.0
        };
        (0..count).map(|_| next()).collect()
    }
}

type Drawn<T = ()> = Result<T, Box<dyn std::error::Error>>;

/// A heat map for each head, and a bar that says what the colours mean.
fn draw(path: &PathBuf, weights: &[f32], heads: usize) -> Drawn {
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder)?;
    }
    let (panel, bar) = (470, 110);
    let area = SVGBackend::new(path, (panel * heads as u32 + bar, 440)).into_drawing_area();
    area.fill(&WHITE)?;
    let (maps, bar) = area.split_horizontally(panel * heads as u32);
    let per_head = weights.chunks(weights.len() / heads);
    for (head, (area, weights)) in maps
        .split_evenly((1, heads))
        .iter()
        .zip(per_head)
        .enumerate()
    {
        heat_map(area, &format!("head {head}"), weights)?;
    }
    colour_bar(&bar)?;
    area.present()?;
    Ok(())
}

/// Light is 0, dark is 1.
fn colour(weight: f32) -> RGBColor {
    let mix = |light: u8, dark: u8| {
        (f32::from(light) + weight.clamp(0.0, 1.0) * (f32::from(dark) - f32::from(light))) as u8
    };
    RGBColor(mix(247, 8), mix(251, 48), mix(255, 107))
}

fn heat_map(area: &DrawingArea<SVGBackend, Shift>, title: &str, weights: &[f32]) -> Drawn {
    let (keys, tokens) = (SOURCE.len(), TARGET.len());
    let mut chart = ChartBuilder::on(area)
        .caption(title, ("sans-serif", 20))
        .margin(12)
        .x_label_area_size(56)
        .y_label_area_size(76)
        .build_cartesian_2d(
            (0..keys - 1).into_segmented(),
            (0..tokens - 1).into_segmented(),
        )?;
    let word = |words: &'static [&'static str], at: &SegmentValue<usize>| match at {
        SegmentValue::CenterOf(at) => words.get(*at).copied().unwrap_or("").to_string(),
        _ => String::new(),
    };
    chart
        .configure_mesh()
        .disable_mesh()
        .x_labels(keys)
        .y_labels(tokens)
        .x_label_formatter(&|at| word(&SOURCE, at))
        // The first token is the top row.
        .y_label_formatter(&|at| match at {
            SegmentValue::CenterOf(at) => word(&TARGET, &SegmentValue::CenterOf(tokens - 1 - at)),
            _ => String::new(),
        })
        .x_desc("key: word of the encoder's sentence")
        .y_desc("query: word of the decoder's sentence")
        .label_style(("sans-serif", 15))
        .axis_desc_style(("sans-serif", 15))
        .draw()?;
    let centred = Pos::new(HPos::Center, VPos::Center);
    for (at, weight) in weights.iter().enumerate() {
        let (row, key) = (tokens - 1 - at / keys, at % keys);
        let cell = [
            (SegmentValue::Exact(key), SegmentValue::Exact(row)),
            (SegmentValue::Exact(key + 1), SegmentValue::Exact(row + 1)),
        ];
        let ink = if *weight > 0.5 { WHITE } else { BLACK };
        let style = ("sans-serif", 14).into_font().color(&ink).pos(centred);
        chart.draw_series([Rectangle::new(cell, colour(*weight).filled())])?;
        let middle = (SegmentValue::CenterOf(key), SegmentValue::CenterOf(row));
        chart.draw_series([Text::new(format!("{weight:.2}"), middle, style)])?;
    }
    Ok(())
}

fn colour_bar(area: &DrawingArea<SVGBackend, Shift>) -> Drawn {
    let mut chart = ChartBuilder::on(area)
        .caption("weight", ("sans-serif", 20))
        .margin(12)
        .margin_bottom(68)
        .y_label_area_size(50)
        .build_cartesian_2d(0f32..1f32, 0f32..1f32)?;
    chart
        .configure_mesh()
        .disable_mesh()
        .disable_x_axis()
        .y_labels(6)
        .y_label_formatter(&|weight| format!("{weight:.1}"))
        .label_style(("sans-serif", 15))
        .draw()?;
    let steps = (0..100).map(|step| step as f32 / 100.0);
    chart.draw_series(
        steps.map(|low| Rectangle::new([(0.0, low), (1.0, low + 0.01)], colour(low).filled())),
    )?;
    Ok(())
}

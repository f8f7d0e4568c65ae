use std::time::Instant;
use wgpu_attention::*;
fn rnd(n: usize, seed: u32) -> Vec<f32> {
    let mut s = seed;
    (0..n)
        .map(|_| {
            s = s.wrapping_mul(1664525).wrapping_add(1013904223);
            (s >> 8) as f32 / 8388608.0 - 1.0
        })
        .collect()
}
fn main() -> Result<()> {
    let gpu = Gpu::open_blocking(&Default::default())?;
    println!("{:?} {:?}", gpu.adapter_info().name, gpu.capabilities());
    let arg: Vec<String> = std::env::args().collect();
    let form = match arg.get(1).map(String::as_str) {
        Some("tiled") => Some(kernels::Form::Tiled),
        Some("lanes") => Some(kernels::Form::Lanes),
        _ => None,
    };
    for (b, t, c, h) in [(5, 6, 18, 2), (1, 128, 768, 12), (1, 1024, 768, 12)] {
        let w = rnd(3 * c * c, 1);
        let o = rnd(c * c, 2);
        let wq: Vec<f32> = w.iter().map(|x| x * 0.05).collect();
        let config = LayerConfig {
            form,
            ..LayerConfig::new(c, c, h).causal(true)
        };
        let layer = MultiHeadAttention::new(
            &gpu,
            config,
            &LayerWeights {
                qkv: QkvWeights::Fused(Projection::new(&wq)),
                output: Some(Projection::new(&o)),
            },
        )?;
        let s = Instant::now();
        let plan = layer.plan(b, t, false)?;
        println!("plan {:.3}\n{plan}", s.elapsed().as_secs_f64());
        let x = rnd(b * t * c, 3);
        let xt = Tensor::from_slice(&gpu, &[b, t, c], &x)?;
        let y = Tensor::empty(&gpu, &[b, t, c], ElementType::F32)?;
        for _ in 0..5 {
            let s = Instant::now();
            let mut enc = gpu.device().create_command_encoder(&Default::default());
            let mut ts = gpu
                .capabilities()
                .timestamps
                .then(|| Timestamps::new(&gpu, 3))
                .transpose()?;
            layer.encode_timed(
                &mut enc,
                &plan,
                LayerArguments {
                    x: &xt.view(),
                    key_mask: None,
                    y: &y.view(),
                },
                ts.as_mut(),
            )?;
            if let Some(ts) = &ts {
                ts.resolve(&mut enc);
            }
            let i = gpu.submit(enc.finish())?;
            gpu.wait_for(i)?;
            print!("{:.2} ms", s.elapsed().as_secs_f64() * 1e3);
            if let Some(ts) = &mut ts {
                for span in ts.read_blocking()? {
                    print!("  {} {:.2}", span.label, span.seconds * 1e3);
                }
            }
            println!();
        }
        let got: Vec<f32> = y.read_blocking()?;
        let (x64, w64, o64) = (
            reference::widen(&x),
            reference::widen(&wq),
            reference::widen(&o),
        );
        let r = reference::layer_without_weights(&reference::LayerInputs {
            batch: b,
            tokens: t,
            d_in: c,
            d_out: c,
            heads: h,
            causal: true,
            x: &x64,
            qkv_weight: &w64,
            output_weight: Some(&o64),
            ..Default::default()
        })?;
        println!(
            "{}",
            compare::compare(&got, &[b, t, c], &r.y, &[b, t, c], compare::Tolerance::F32)
        );
    }
    Ok(())
}

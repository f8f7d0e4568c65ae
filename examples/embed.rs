//! The layer inside an application that has a device, buffers and an encoder of its own.
//!
//! `cargo run --release --example embed`

use wgpu_attention::wgpu::util::DeviceExt;
use wgpu_attention::{
    ElementType, Gpu, LayerArguments, LayerConfig, LayerShape, LayerWeights, MultiHeadAttention,
    Projection, QkvWeights, Tensor, wgpu,
};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    // What the application has already: a device and a queue, opened its own way ...
    let (device, queue) = pollster::block_on(open_device())?;
    let (batch, tokens, d_in, d_out, heads) = (2, 16, 32, 48, 4);
    // ... and buffers of its own for x and y.
    let x_values: Vec<f32> = (0..batch * tokens * d_in)
        .map(|i| (i as f32 * 0.37).sin())
        .collect();
    let x_buffer = device.create_buffer_init(&wgpu::util::BufferInitDescriptor {
        label: Some("the application's x"),
        contents: bytemuck::cast_slice(&x_values),
        usage: wgpu::BufferUsages::STORAGE,
    });
    let y_buffer = device.create_buffer(&wgpu::BufferDescriptor {
        label: Some("the application's y"),
        size: (batch * tokens * d_out * 4) as u64,
        usage: wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_SRC,
        mapped_at_creation: false,
    });

    // Once: wrap the device, upload the weights.
    let gpu = Gpu::from_device(device.clone(), queue.clone())?;
    let qkv: Vec<f32> = (0..3 * d_out * d_in)
        .map(|i| (i as f32 * 0.11).cos() * 0.2)
        .collect();
    let output: Vec<f32> = (0..d_out * d_out)
        .map(|i| (i as f32 * 0.07).sin() * 0.2)
        .collect();
    let layer = MultiHeadAttention::new(
        &gpu,
        LayerConfig::new(d_in, d_out, heads).causal(true),
        &LayerWeights {
            qkv: QkvWeights::Fused(Projection::new(&qkv)),
            output: Some(Projection::new(&output)),
        },
    )?;
    // Once per shape: plan, compile, allocate what lies between the dispatches.
    let plan = layer.plan(LayerShape::new(batch, tokens))?;
    println!("{plan}");
    let f32 = ElementType::F32;
    let x = Tensor::from_buffer(&gpu, x_buffer, 0, &[batch, tokens, d_in], f32)?;
    let y = Tensor::from_buffer(&gpu, y_buffer, 0, &[batch, tokens, d_out], f32)?;

    // Per call: record into the application's encoder, among whatever else it records.
    let mut encoder = device.create_command_encoder(&wgpu::CommandEncoderDescriptor {
        label: Some("the application's frame"),
    });
    let (x, out) = (x.view(), y.view());
    layer.encode(&mut encoder, &plan, LayerArguments::new(&x, &out))?;
    queue.submit([encoder.finish()]);

    let values = y.read_blocking::<f32>()?;
    println!("y[0, 0, ..4] = {:?}", &values[..4]);
    Ok(())
}

async fn open_device() -> Result<(wgpu::Device, wgpu::Queue), Box<dyn std::error::Error>> {
    let instance =
        wgpu::Instance::new(wgpu::InstanceDescriptor::new_without_display_handle_from_env());
    let adapter = instance.request_adapter(&Default::default()).await?;
    Ok(adapter.request_device(&Default::default()).await?)
}

//! A device as an application opens it itself, on the adapter under test.

use wgpu_attention::wgpu;

/// The adapter under test with the given features and WebGPU's default limits (or less, where it has less).
pub fn own_device(
    gpu: &wgpu_attention::Gpu,
    features: wgpu::Features,
) -> (wgpu::Device, wgpu::Queue) {
    own_devices(gpu, features, 1).remove(0)
}

/// Several of them, of one instance.
pub fn own_devices(
    gpu: &wgpu_attention::Gpu,
    features: wgpu::Features,
    count: usize,
) -> Vec<(wgpu::Device, wgpu::Queue)> {
    let wanted = gpu.adapter_info();
    let backends = wgpu::Backends::from(wanted.backend);
    let mut descriptor = wgpu::InstanceDescriptor::new_without_display_handle_from_env();
    descriptor.backends = backends;
    let adapters = pollster::block_on(wgpu::Instance::new(descriptor).enumerate_adapters(backends));
    let adapter = adapters
        .into_iter()
        .find(|adapter| adapter.get_info().name == wanted.name)
        .expect("the adapter under test is still there");
    let descriptor = wgpu::DeviceDescriptor {
        label: Some("an application's own"),
        required_features: features,
        required_limits: wgpu::Limits::default().or_worse_values_from(&adapter.limits()),
        ..Default::default()
    };
    let request = || pollster::block_on(adapter.request_device(&descriptor));
    (0..count)
        .map(|_| request().expect("a device with default limits"))
        .collect()
}

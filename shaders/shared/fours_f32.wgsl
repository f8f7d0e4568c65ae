// Four neighbouring channels of k or v at once, f32: one load of 16 bytes. Heads are multiples of four channels, and rows
// begin on 16 bytes (the host sees to both).
@group(0) @binding(1)
var<storage, read> k: array<vec4<u32>>;
@group(0) @binding(2)
var<storage, read> v: array<vec4<u32>>;

// Channels past the head are anything.
fn k_four_unmasked(row: u32, channel: u32) -> vec4<f32> {
    return bitcast<vec4<f32>>(k[(row + min(channel, params.head_dim - 4u)) / 4u]);
}

// Channels past the head are 0.
fn k_four(row: u32, channel: u32) -> vec4<f32> {
    return select(vec4<f32>(), k_four_unmasked(row, channel), channel < params.head_dim);
}

// Channels past the head are anything.
fn v_four(row: u32, channel: u32) -> vec4<f32> {
    return bitcast<vec4<f32>>(v[(row + min(channel, params.value_dim - 4u)) / 4u]);
}

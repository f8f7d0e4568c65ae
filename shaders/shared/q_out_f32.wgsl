// Four neighbouring channels of q, and of the output, at once: both are f32, heads are multiples of four channels, and rows begin
// on 16 bytes (the host sees to all three).
@group(0) @binding(0)
var<storage, read> q: array<vec4<f32>>;
@group(0) @binding(3)
var<storage, read_write> out: array<vec4<f32>>;

// scale * q. Channels past the head are 0.
fn q_four(row: u32, channel: u32) -> vec4<f32> {
    let four = q[(row + min(channel, params.head_dim - 4u)) / 4u] * params.scale;
    return select(vec4<f32>(), four, channel < params.head_dim);
}

// Channels past those of the values are left out.
fn store_out(row: u32, channel: u32, four: vec4<f32>) {
    if (channel < params.value_dim) {
        out[(row + channel) / 4u] = four;
    }
}

// Four neighbouring channels of k or v at once, 16 bits each: one load of 8 bytes. Heads are multiples of four channels,
// and rows begin on 8 bytes (the host sees to both).
@group(0) @binding(1)
var<storage, read> k: array<vec2<u32>>;
@group(0) @binding(2)
var<storage, read> v: array<vec2<u32>>;

fn four_of(words: vec2<u32>) -> vec4<f32> {
    return vec4<f32>(
        value_of(words.x, 0u, KV_TYPE),
        value_of(words.x, 1u, KV_TYPE),
        value_of(words.y, 0u, KV_TYPE),
        value_of(words.y, 1u, KV_TYPE),
    );
}

// Channels past the head are anything.
fn k_four_unmasked(row: u32, channel: u32) -> vec4<f32> {
    return four_of(k[(row + min(channel, params.head_dim - 4u)) / 4u]);
}

// Channels past the head are 0.
fn k_four(row: u32, channel: u32) -> vec4<f32> {
    return select(vec4<f32>(), k_four_unmasked(row, channel), channel < params.head_dim);
}

// Channels past the head are anything.
fn v_four(row: u32, channel: u32) -> vec4<f32> {
    return four_of(v[(row + min(channel, params.value_dim - 4u)) / 4u]);
}

// Four neighbouring channels of k or v at once, as f16: one load of 8 bytes. Heads are multiples of four channels, and rows
// begin on 8 bytes (the host sees to both).
enable f16;

@group(0) @binding(1)
var<storage, read> k: array<vec4<f16>>;
@group(0) @binding(2)
var<storage, read> v: array<vec4<f16>>;

// Channels past the head are anything.
fn k_four_unmasked(row: u32, channel: u32) -> vec4<f16> {
    return k[(row + min(channel, params.head_dim - 4u)) / 4u];
}

// Channels past the head are anything.
fn v_four(row: u32, channel: u32) -> vec4<f16> {
    return v[(row + min(channel, params.value_dim - 4u)) / 4u];
}

// Eight neighbouring channels of k or v at once, 16 bits each: one load of 16 bytes, as integers of 64 bits (linear_eights says
// why). Heads are multiples of eight channels, and rows begin on 16 bytes (the host sees to both).
@group(0) @binding(1)
var<storage, read> k: array<Eight>;
@group(0) @binding(2)
var<storage, read> v: array<Eight>;

alias Eight = vec2<u64>;

fn four_of(pair: u64) -> vec4<f32> {
    let low = u32(pair);
    let high = u32(pair >> 32u);
    return vec4<f32>(
        value_of(low, 0u, KV_TYPE),
        value_of(low, 1u, KV_TYPE),
        value_of(high, 0u, KV_TYPE),
        value_of(high, 1u, KV_TYPE),
    );
}

// The fours of eight channels.
fn fours_of(eight: Eight) -> array<vec4<f32>, 2> {
    return array<vec4<f32>, 2>(four_of(eight.x), four_of(eight.y));
}

// Channels past the head are anything.
fn k_eight(row: u32, channel: u32) -> Eight {
    return k[(row + min(channel, params.head_dim - 8u)) / 8u];
}

// Channels past the head are anything.
fn v_eight(row: u32, channel: u32) -> Eight {
    return v[(row + min(channel, params.value_dim - 8u)) / 8u];
}

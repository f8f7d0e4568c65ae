// Eight neighbouring channels of k or v at once, f32: one load of 32 bytes, as integers of 64 bits (linear_eights says why). Heads
// are multiples of eight channels, and rows begin on 32 bytes (the host sees to both).
@group(0) @binding(1)
var<storage, read> k: array<Eight>;
@group(0) @binding(2)
var<storage, read> v: array<Eight>;

alias Eight = vec4<u64>;

// The fours of eight channels.
fn fours_of(eight: Eight) -> array<vec4<f32>, 2> {
    let low = vec4<u32>(eight);
    let high = vec4<u32>(eight >> vec4<u32>(32u));
    return array<vec4<f32>, 2>(
        bitcast<vec4<f32>>(vec4<u32>(low.x, high.x, low.y, high.y)),
        bitcast<vec4<f32>>(vec4<u32>(low.z, high.z, low.w, high.w)),
    );
}

// Channels past the head are anything.
fn k_eight(row: u32, channel: u32) -> Eight {
    return k[(row + min(channel, params.head_dim - 8u)) / 8u];
}

// Channels past the head are anything.
fn v_eight(row: u32, channel: u32) -> Eight {
    return v[(row + min(channel, params.value_dim - 8u)) / 8u];
}

// Four neighbouring channels of k or v, of any type, wherever they begin: four loads.
@group(0) @binding(1)
var<storage, read> k: array<u32>;
@group(0) @binding(2)
var<storage, read> v: array<u32>;

fn k_one(row: u32, channel: u32) -> f32 {
    let at = row + min(channel, params.head_dim - 1u);
    return value_of(k[word_of(at, KV_TYPE)], at, KV_TYPE);
}

fn v_one(row: u32, channel: u32) -> f32 {
    let at = row + min(channel, params.value_dim - 1u);
    return value_of(v[word_of(at, KV_TYPE)], at, KV_TYPE);
}

// Channels past the head are anything.
fn k_four_unmasked(row: u32, channel: u32) -> vec4<f32> {
    return vec4<f32>(k_one(row, channel), k_one(row, channel + 1u), k_one(row, channel + 2u), k_one(row, channel + 3u));
}

// Channels past the head are 0.
fn k_four(row: u32, channel: u32) -> vec4<f32> {
    let there = vec4<u32>(channel, channel + 1u, channel + 2u, channel + 3u) < vec4<u32>(params.head_dim);
    return select(vec4<f32>(), k_four_unmasked(row, channel), there);
}

// Channels past the head are anything.
fn v_four(row: u32, channel: u32) -> vec4<f32> {
    return vec4<f32>(v_one(row, channel), v_one(row, channel + 1u), v_one(row, channel + 2u), v_one(row, channel + 3u));
}

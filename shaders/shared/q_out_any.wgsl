// Four neighbouring channels of q, and of the output, at once, of any type, wherever they begin.
@group(0) @binding(0)
var<storage, read> q: array<u32>;
@group(0) @binding(3)
var<storage, read_write> out: array<u32>;

fn q_one(row: u32, channel: u32) -> f32 {
    let at = row + min(channel, params.head_dim - 1u);
    let value = value_of(q[word_of(at, params.q_type)], at, params.q_type) * params.scale;
    return select(0.0, value, channel < params.head_dim);
}

// scale * q. Channels past the head are 0.
fn q_four(row: u32, channel: u32) -> vec4<f32> {
    return vec4<f32>(q_one(row, channel), q_one(row, channel + 1u), q_one(row, channel + 2u), q_one(row, channel + 3u));
}

// Channels past those of the values are left out.
fn store_out(row: u32, channel: u32, four: vec4<f32>) {
    if (channel < params.value_dim) {
        store_pair(row + channel, four.x, four.y, channel + 1u < params.value_dim);
    }
    if (channel + 2u < params.value_dim) {
        store_pair(row + channel + 2u, four.z, four.w, channel + 3u < params.value_dim);
    }
}

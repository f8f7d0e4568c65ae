// Four neighbouring channels of x at once, wherever they lie: four loads.
@group(0) @binding(0)
var<storage, read> x: array<f32>;

// Channels past the end are 0.
fn x_one(row: u32, channel: u32) -> f32 {
    let value = x[row + min(channel, params.d_in - 1u) * params.x_channel_stride];
    return select(0.0, value, channel < params.d_in);
}

fn x_four(row: u32, channel: u32) -> vec4<f32> {
    return vec4<f32>(x_one(row, channel), x_one(row, channel + 1u), x_one(row, channel + 2u), x_one(row, channel + 3u));
}

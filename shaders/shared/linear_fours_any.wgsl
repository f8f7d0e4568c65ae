// Four neighbouring channels of a row of x or of the weight, wherever they lie: four loads. Channels past the last one
// are anything.
@group(0) @binding(0)
var<storage, read> x: array<f32>;
@group(0) @binding(1)
var<storage, read> weight: array<f32>;

fn x_one(start: u32, channel: u32) -> f32 {
    return x[start + min(channel, params.d_in - 1u) * params.x_channel_stride];
}

fn weight_one(start: u32, channel: u32) -> f32 {
    return weight[start + min(channel, params.d_in - 1u) * params.weight_in_stride];
}

fn x_four(start: u32, channel: u32) -> vec4<f32> {
    return vec4<f32>(x_one(start, channel), x_one(start, channel + 1u), x_one(start, channel + 2u), x_one(start, channel + 3u));
}

fn weight_four(start: u32, channel: u32) -> vec4<f32> {
    return vec4<f32>(
        weight_one(start, channel),
        weight_one(start, channel + 1u),
        weight_one(start, channel + 2u),
        weight_one(start, channel + 3u),
    );
}

// Four neighbouring channels of a row of x in one load of 16 bytes, as shared/linear_fours has it (d_in is a multiple of four, channels
// lie one behind the other, and rows begin on 16 bytes: the host sees to all three), and of the weight in four loads, wherever they
// lie: a matrix that is kept (d_in, d_out), say. Channels past the last one are anything.
@group(0) @binding(0)
var<storage, read> x: array<vec4<f32>>;
@group(0) @binding(1)
var<storage, read> weight: array<f32>;

fn x_four(start: u32, channel: u32) -> vec4<f32> {
    return x[(start + min(channel, params.d_in - 4u)) / 4u];
}

fn weight_one(start: u32, channel: u32) -> f32 {
    return weight[start + min(channel, params.d_in - 1u) * params.weight_in_stride];
}

fn weight_four(start: u32, channel: u32) -> vec4<f32> {
    return vec4<f32>(
        weight_one(start, channel),
        weight_one(start, channel + 1u),
        weight_one(start, channel + 2u),
        weight_one(start, channel + 3u),
    );
}

// Four neighbouring channels of a row of x or of the weight in one load of 16 bytes: d_in is a multiple of four, channels
// lie one behind the other, and rows begin on 16 bytes (the host sees to all three). Channels past the last one are anything.
@group(0) @binding(0)
var<storage, read> x: array<vec4<f32>>;
@group(0) @binding(1)
var<storage, read> weight: array<vec4<f32>>;

fn x_four(start: u32, channel: u32) -> vec4<f32> {
    return x[(start + min(channel, params.d_in - 4u)) / 4u];
}

fn weight_four(start: u32, channel: u32) -> vec4<f32> {
    return weight[(start + min(channel, params.d_in - 4u)) / 4u];
}

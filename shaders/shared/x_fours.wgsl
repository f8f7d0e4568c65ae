// Four neighbouring channels of x in one load of 16 bytes. Rows are contiguous, begin on 16 bytes, and have a multiple of
// four channels (the host sees to it).
@group(0) @binding(0)
var<storage, read> x: array<vec4<f32>>;

// Channels past the end are 0.
fn x_four(row: u32, channel: u32) -> vec4<f32> {
    let four = x[(row + min(channel, params.d_in - 4u)) / 4u];
    return select(vec4<f32>(), four, channel < params.d_in);
}

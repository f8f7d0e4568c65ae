// As many channels of a row of x or of the weight as there are lanes, by fours (shared/linear_fours, linear_fours_any).

// Channels past the end are 0.
fn if_there(four: vec4<f32>, channel: u32) -> vec4<f32> {
    let there = vec4<u32>(channel, channel + 1u, channel + 2u, channel + 3u) < vec4<u32>(params.d_in);
    return select(vec4<f32>(), four, there);
}

// LANES channels of a row of x from `first` on.
fn x_step(start: u32, first: u32) -> array<vec4<f32>, STEP> {
    var fours = array<vec4<f32>, STEP>();
    // @unroll
    for (var f = 0u; f < STEP; f++) {
        fours[f] = if_there(x_four(start, first + f * 4u), first + f * 4u);
    }
    return fours;
}

// LANES channels of a row of the weight from `first` on.
fn weight_step(start: u32, first: u32) -> array<vec4<f32>, STEP> {
    var fours = array<vec4<f32>, STEP>();
    // @unroll
    for (var f = 0u; f < STEP; f++) {
        fours[f] = if_there(weight_four(start, first + f * 4u), first + f * 4u);
    }
    return fours;
}

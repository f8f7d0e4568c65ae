// Fours of a row of k or v that all lanes of a workgroup need: every lane loads all of them, at addresses that the lanes
// share.

// Fours `first` and after of a row, SPREAD of them.
fn k_spread(row: u32, first: u32, lane: u32) -> array<vec4<f32>, SPREAD> {
    var fours = array<vec4<f32>, SPREAD>();
    // @unroll
    for (var i = 0u; i < SPREAD; i++) {
        fours[i] = k_four(row, (first + i) * 4u);
    }
    return fours;
}

fn v_spread(row: u32, first: u32, lane: u32) -> array<vec4<f32>, SPREAD> {
    var fours = array<vec4<f32>, SPREAD>();
    // @unroll
    for (var i = 0u; i < SPREAD; i++) {
        fours[i] = v_four(row, (first + i) * 4u);
    }
    return fours;
}

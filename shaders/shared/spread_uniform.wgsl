// Fours of rows of k or v that all lanes of a workgroup need: every lane loads all of them, at addresses that the lanes
// share.

// Fours `first` and after of each row, SPREAD of them, row by row.
fn k_spread(rows: array<u32, TOGETHER>, first: u32, lane: u32) -> array<vec4<f32>, TOGETHER * SPREAD> {
    var fours = array<vec4<f32>, TOGETHER * SPREAD>();
    // @unroll
    for (var i = 0u; i < TOGETHER * SPREAD; i++) {
        fours[i] = k_four(rows[i / SPREAD], (first + i % SPREAD) * 4u);
    }
    return fours;
}

fn v_spread(rows: array<u32, TOGETHER>, first: u32, lane: u32) -> array<vec4<f32>, TOGETHER * SPREAD> {
    var fours = array<vec4<f32>, TOGETHER * SPREAD>();
    // @unroll
    for (var i = 0u; i < TOGETHER * SPREAD; i++) {
        fours[i] = v_four(rows[i / SPREAD], (first + i % SPREAD) * 4u);
    }
    return fours;
}

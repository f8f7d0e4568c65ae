// Weights of as many columns as there are lanes, which all of them need: every lane loads all of them, at addresses that the lanes
// share.

// Of columns `column` and after, LANES of them, channels `first` and after, LANES of them.
fn weights_of(column: u32, first: u32, lane: u32) -> array<array<vec4<f32>, STEP>, LANES> {
    var weights = array<array<vec4<f32>, STEP>, LANES>();
    // @unroll
    for (var c = 0u; c < LANES; c++) {
        weights[c] = weight_step(weight_row(column + c), first);
    }
    return weights;
}

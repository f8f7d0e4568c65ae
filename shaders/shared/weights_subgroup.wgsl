// Weights of as many columns as there are lanes, which all of them need: every lane loads those of one column, and broadcasts hand
// them round. The workgroup is one whole subgroup, its lanes numbered alike (the host sees to it).

// Of columns `column` and after, LANES of them, channels `first` and after, LANES of them.
fn weights_of(column: u32, first: u32, lane: u32) -> array<array<vec4<f32>, STEP>, LANES> {
    let mine = weight_step(weight_row(column + lane), first);
    var weights = array<array<vec4<f32>, STEP>, LANES>();
    // @unroll
    for (var c = 0u; c < LANES; c++) {
        // @unroll
        for (var f = 0u; f < STEP; f++) {
            weights[c][f] = subgroupBroadcast(mine[f], c);
        }
    }
    return weights;
}

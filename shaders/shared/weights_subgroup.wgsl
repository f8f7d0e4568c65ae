// Weights of a column that all lanes of a workgroup need: every lane loads one, and broadcasts hand them round. The
// workgroup is one whole subgroup, its lanes numbered alike (the host sees to it).

// Channels `first` and after of the column that begins at `column`, LANES of them; those past the end are 0.
fn weights_of(column: u32, first: u32, lane: u32) -> array<f32, LANES> {
    let value = weight[column + min(first + lane, params.d_in - 1u) * params.weight_in_stride];
    let mine = select(0.0, value, first + lane < params.d_in);
    var weights = array<f32, LANES>();
    // @unroll
    for (var i = 0u; i < LANES; i++) {
        weights[i] = subgroupBroadcast(mine, i);
    }
    return weights;
}

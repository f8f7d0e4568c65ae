// Weights of a column that all lanes of a workgroup need: every lane loads all of them, at addresses that the lanes share.

// Channels `first` and after of the column that begins at `column`, LANES of them; those past the end are 0.
fn weights_of(column: u32, first: u32, lane: u32) -> array<f32, LANES> {
    var weights = array<f32, LANES>();
    // @unroll
    for (var i = 0u; i < LANES; i++) {
        let value = weight[column + min(first + i, params.d_in - 1u) * params.weight_in_stride];
        weights[i] = select(0.0, value, first + i < params.d_in);
    }
    return weights;
}

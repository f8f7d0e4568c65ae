// Fours of a row of k or v that all lanes of a workgroup need: every lane loads one, and broadcasts hand them round. The
// workgroup is one whole subgroup, its lanes numbered alike (the host sees to it).

// `mine` of every lane.
fn spread(mine: vec4<f32>) -> array<vec4<f32>, SPREAD> {
    var fours = array<vec4<f32>, SPREAD>();
    // @unroll
    for (var i = 0u; i < SPREAD; i++) {
        fours[i] = subgroupBroadcast(mine, i);
    }
    return fours;
}

// Fours `first` and after of a row, SPREAD of them.
fn k_spread(row: u32, first: u32, lane: u32) -> array<vec4<f32>, SPREAD> {
    return spread(k_four(row, (first + min(lane, SPREAD - 1u)) * 4u));
}

fn v_spread(row: u32, first: u32, lane: u32) -> array<vec4<f32>, SPREAD> {
    return spread(v_four(row, (first + min(lane, SPREAD - 1u)) * 4u));
}

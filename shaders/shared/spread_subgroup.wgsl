// Fours of rows of k or v that all lanes of a workgroup need: every lane loads one, and broadcasts hand them round. The
// workgroup is one whole subgroup, its lanes numbered alike (the host sees to it). Where a row has fewer fours than there are
// lanes, TOGETHER rows are loaded at once.

// `mine` of the lanes.
fn spread(mine: vec4<f32>) -> array<vec4<f32>, TOGETHER * SPREAD> {
    var fours = array<vec4<f32>, TOGETHER * SPREAD>();
    // @unroll
    for (var i = 0u; i < TOGETHER * SPREAD; i++) {
        fours[i] = subgroupBroadcast(mine, i);
    }
    return fours;
}

// The row that a lane loads a four of.
fn row_of_lane(rows: array<u32, TOGETHER>, lane: u32) -> u32 {
    var row = rows[0];
    // @unroll
    for (var j = 1u; j < TOGETHER; j++) {
        row = select(row, rows[j], lane >= j * SPREAD);
    }
    return row;
}

// Fours `first` and after of each row, SPREAD of them, row by row.
fn k_spread(rows: array<u32, TOGETHER>, first: u32, lane: u32) -> array<vec4<f32>, TOGETHER * SPREAD> {
    return spread(k_four(row_of_lane(rows, lane), (first + lane % SPREAD) * 4u));
}

fn v_spread(rows: array<u32, TOGETHER>, first: u32, lane: u32) -> array<vec4<f32>, TOGETHER * SPREAD> {
    return spread(v_four(row_of_lane(rows, lane), (first + lane % SPREAD) * 4u));
}

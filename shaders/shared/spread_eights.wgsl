// Fours of rows of k or v that all lanes of a workgroup need, as those of shared/spread_subgroup; but every lane loads two of them at
// once, so that twice as many rows have room. The workgroup is one whole subgroup, its lanes numbered alike, SPREAD is even, and
// TOGETHER * SPREAD is LANES * 2 at most (the host sees to all of them).

// Lanes that load a row.
const LANES_OF_ROW: u32 = SPREAD / 2u;

// The row that a lane loads fours of.
fn row_of_lane(rows: array<u32, TOGETHER>, lane: u32) -> u32 {
    var row = rows[0];
    // @unroll
    for (var j = 1u; j < TOGETHER; j++) {
        row = select(row, rows[j], lane >= j * LANES_OF_ROW);
    }
    return row;
}

// Whether a lane loads any. (Where rows are short, llvmpipe need not go over the lanes that do not.)
fn loads(lane: u32) -> bool {
    return TOGETHER * LANES_OF_ROW >= LANES || lane < TOGETHER * LANES_OF_ROW;
}

// The first channel that a lane loads, in a row whose four `first` the first lane begins with.
fn channel_of_lane(first: u32, lane: u32) -> u32 {
    return (first + lane % LANES_OF_ROW * 2u) * 4u;
}

// `mine` of the lanes.
fn spread(mine: array<vec4<f32>, 2>) -> array<vec4<f32>, TOGETHER * SPREAD> {
    var fours = array<vec4<f32>, TOGETHER * SPREAD>();
    // @unroll
    for (var i = 0u; i < TOGETHER * LANES_OF_ROW; i++) {
        fours[i * 2u] = subgroupBroadcast(mine[0], i);
        fours[i * 2u + 1u] = subgroupBroadcast(mine[1], i);
    }
    return fours;
}

// Fours `first` and after of each row, SPREAD of them, row by row. Channels past the head are 0.
fn k_spread(rows: array<u32, TOGETHER>, first: u32, lane: u32) -> array<vec4<f32>, TOGETHER * SPREAD> {
    let channel = channel_of_lane(first, lane);
    var eight = Eight();
    if (loads(lane) && channel < params.head_dim) {
        eight = k_eight(row_of_lane(rows, lane), channel);
    }
    return spread(fours_of(eight));
}

fn v_spread(rows: array<u32, TOGETHER>, first: u32, lane: u32) -> array<vec4<f32>, TOGETHER * SPREAD> {
    var eight = Eight();
    if (loads(lane)) {
        eight = v_eight(row_of_lane(rows, lane), channel_of_lane(first, lane));
    }
    return spread(fours_of(eight));
}

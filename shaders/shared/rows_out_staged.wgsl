// Rows that lanes hold, one each, to memory, by way of workgroup memory: a loop over fours empties it, since stores that are written
// out compile for long, and a private array that a loop's variable indexes becomes a tree of branches. A lane reads only what it
// wrote itself: no barrier.
//
// The kernel has Block, which says where its rows lie, and store_four(block, row, four, value) for a row of the block.
var<workgroup> staged: array<vec4<f32>, ROWS * FOURS * LANES>;

// Of each row of a lane, FOURS fours; row r of lane l is r * LANES + l of the block.
fn rows_out(block: Block, fours: ptr<function, array<vec4<f32>, ROWS * FOURS>>, lane: u32) {
    // @unroll
    for (var e = 0u; e < ROWS * FOURS; e++) {
        staged[e * LANES + lane] = (*fours)[e];
    }
    for (var e = 0u; e < ROWS * FOURS; e++) {
        store_four(block, e / FOURS * LANES + lane, e % FOURS, staged[e * LANES + lane]);
    }
}

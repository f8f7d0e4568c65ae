// Rows that lie in memory, one into each lane, by way of workgroup memory (which shared/rows_out_staged brings): a loop over fours
// fills it, since a private array that a loop's variable indexes becomes a tree of branches. A lane reads only what it wrote
// itself: no barrier.
//
// The kernel has Block, which says where its rows lie, and load_four(block, row, four) for a row of the block.

// Of each row of a lane, FOURS fours; row r of lane l is r * LANES + l of the block.
fn rows_in(block: Block, fours: ptr<function, array<vec4<f32>, ROWS * FOURS>>, lane: u32) {
    for (var e = 0u; e < ROWS * FOURS; e++) {
        staged[e * LANES + lane] = load_four(block, e / FOURS * LANES + lane, e % FOURS);
    }
    // @unroll
    for (var e = 0u; e < ROWS * FOURS; e++) {
        (*fours)[e] = staged[e * LANES + lane];
    }
}

// Rows that lie in memory, one into each lane: lanes load fours of one lane's row side by side, and broadcasts bring them to it.
// (A loop over lanes, in which all indices of private memory are constants: what is written out compiles for long.) The workgroup
// is one whole subgroup, its lanes numbered alike (the host sees to it).
//
// The kernel has Block, which says where its rows lie, and load_four(block, row, four) for a row of the block.

// Of each row of a lane, FOURS fours; row r of lane l is r * LANES + l of the block.
fn rows_in(block: Block, fours: ptr<function, array<vec4<f32>, ROWS * FOURS>>, lane: u32) {
    for (var l = 0u; l < LANES; l++) {
        // @unroll
        for (var r = 0u; r < ROWS; r++) {
            // @unroll
            for (var first = 0u; first < FOURS; first += SPREAD) {
                let mine = load_four(block, r * LANES + l, first + lane % SPREAD);
                // @unroll
                for (var i = 0u; i < SPREAD; i++) {
                    let four = subgroupBroadcast(mine, i);
                    (*fours)[r * FOURS + first + i] = select((*fours)[r * FOURS + first + i], four, lane == l);
                }
            }
        }
    }
}

// Rows that lanes hold, one each, to memory: lanes take fours of one lane's row from it, and store them side by side. (A loop over
// lanes, in which all indices of private memory are constants: stores that are written out compile for long.) The workgroup is
// one whole subgroup, its lanes numbered alike (the host sees to it).
//
// The kernel has Block, which says where its rows lie, and store_four(block, row, four, value) for a row of the block.

// Of each row of a lane, FOURS fours; row r of lane l is r * LANES + l of the block.
fn rows_out(block: Block, fours: ptr<function, array<vec4<f32>, ROWS * FOURS>>, lane: u32) {
    for (var l = 0u; l < LANES; l++) {
        // @unroll
        for (var r = 0u; r < ROWS; r++) {
            // @unroll
            for (var first = 0u; first < FOURS; first += SPREAD) {
                var mine = vec4<f32>();
                // @unroll
                for (var i = 0u; i < SPREAD; i++) {
                    mine = select(mine, subgroupShuffle((*fours)[r * FOURS + first + i], l), lane == i);
                }
                if (lane < SPREAD) {
                    store_four(block, r * LANES + l, first + lane, mine);
                }
            }
        }
    }
}

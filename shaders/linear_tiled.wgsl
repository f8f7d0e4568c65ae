// linear_tiled: y = x Wᵀ + b for GPUs.
//
// One workgroup of ACROSS x DOWN invocations covers TILE_M rows by TILE_N columns of y and walks over d_in DEPTH
// channels at a time, with the tiles of x and W in workgroup memory, channel by channel; each invocation owns ROWS by
// COLUMNS outputs, four neighbouring rows and four neighbouring columns at a time.
//
// x (B, T, d_in), weight (d_out, d_in), bias (d_out), y (B, T, d_out), each by its strides.
// Each output is one chain of multiply-adds over d_in in order, whatever its place in the tile: equal rows
// of x give equal bits.
// Host: ROWS and COLUMNS (multiples of 4), ACROSS and DOWN (multiples of 8; both operands together are as many blocks of 4 x 4 for
// each invocation). x and weight, four channels at a time: shared/linear_fours or shared/linear_fours_any.
//
// No workgroup memory is read before it was written, so the driver need not clear it.
//
// Against the kernel before it (4 x 4 outputs an invocation, from single words), by AMD's open compiler for RDNA2 and RDNA3: 16
// multiply-adds for each access of workgroup memory instead of 2.9, 98 % of the vector arithmetic of the innermost loop instead of
// 97 %, 8 reads of global memory in flight instead of one. Reading the next tiles before computing with these was tried: the compiler moves
// the reads behind the loop again, or waits for them at once where they go round it.

@group(0) @binding(2)
var<storage, read> bias: array<f32>;
@group(0) @binding(3)
var<storage, read_write> y: array<f32>;
@group(0) @binding(4)
var<uniform> params: LinearParams;

const THREADS: u32 = ACROSS * DOWN;
const DEPTH: u32 = 16u;
const TILE_M: u32 = DOWN * ROWS;
const TILE_N: u32 = ACROSS * COLUMNS;
// In fours.
const DEPTH_FOURS: u32 = DEPTH / 4u;
const ROW_FOURS: u32 = ROWS / 4u;
const COLUMN_FOURS: u32 = COLUMNS / 4u;
const X_FOURS: u32 = TILE_M / 4u;
const W_FOURS: u32 = TILE_N / 4u;
// Blocks of four rows of x (or of the weight) by four channels, and how many of them each invocation moves.
const X_BLOCKS: u32 = X_FOURS * DEPTH_FOURS;
const W_BLOCKS: u32 = W_FOURS * DEPTH_FOURS;
const BLOCKS: u32 = X_BLOCKS + W_BLOCKS;
const MOVES: u32 = BLOCKS / THREADS;

// Channel by channel, four rows (or columns) each; see `place`.
var<workgroup> x_tile: array<vec4<f32>, DEPTH * X_FOURS>;
var<workgroup> weight_tile: array<vec4<f32>, DEPTH * W_FOURS>;

// Where four rows or columns lie within their channel: eight invocations that write blocks beside each other use
// different banks, and so do eight that read one channel.
fn place(four: u32, channel: u32) -> u32 {
    return four ^ (channel / 4u * 2u);
}

// Whether that block is one of x: known in advance where each invocation has as many of both.
fn is_of_x(turn: u32, thread: u32) -> bool {
    return (turn + 1u) * THREADS <= X_BLOCKS || (turn * THREADS < X_BLOCKS && turn * THREADS + thread < X_BLOCKS);
}

// Four channels of four rows, which begin there.
fn block_at(of_x: bool, start: vec4<u32>, channel: u32) -> array<vec4<f32>, 4> {
    if (of_x) {
        return array<vec4<f32>, 4>(
            x_four(start.x, channel),
            x_four(start.y, channel),
            x_four(start.z, channel),
            x_four(start.w, channel),
        );
    }
    return array<vec4<f32>, 4>(
        weight_four(start.x, channel),
        weight_four(start.y, channel),
        weight_four(start.z, channel),
        weight_four(start.w, channel),
    );
}

// Puts a block into its tile, channel by channel. Channels past the last one are 0, whatever was read in their place.
fn put(block: array<vec4<f32>, 4>, of_x: bool, to: u32, channel: u32) {
    let there = vec4<u32>(channel, channel + 1u, channel + 2u, channel + 3u) < vec4<u32>(params.d_in);
    // @unroll
    for (var i = 0u; i < 4u; i++) {
        let four = select(vec4<f32>(), vec4<f32>(block[0u][i], block[1u][i], block[2u][i], block[3u][i]), there[i]);
        if (of_x) {
            x_tile[to + i * X_FOURS] = four;
        } else {
            weight_tile[to + i * W_FOURS] = four;
        }
    }
}

@compute @workgroup_size(ACROSS, DOWN)
fn linear_tiled(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_id) local: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let number = workgroup_number(group, groups);
    if (number >= params.groups) {
        return;
    }
    let first_column = (number % params.column_tiles) * TILE_N;
    let first_row = (number / params.column_tiles) * TILE_M;

    // What this invocation moves: its blocks' first channel and rows, and where in the tiles they go.
    var start = array<vec4<u32>, MOVES>();
    var to = array<u32, MOVES>();
    let channel = thread % DEPTH_FOURS * 4u;
    // @unroll
    for (var m = 0u; m < MOVES; m++) {
        let of_x = is_of_x(m, thread);
        let block = m * THREADS + thread - select(X_BLOCKS, 0u, of_x);
        let four = block / DEPTH_FOURS;
        to[m] = channel * select(W_FOURS, X_FOURS, of_x) + place(four, channel);
        // @unroll
        for (var i = 0u; i < 4u; i++) {
            // Rows and columns past the end read the last one; nothing is stored of them.
            if (of_x) {
                let row = min(first_row + four * 4u + i, params.rows - 1u);
                start[m][i] = params.x_offset + row_start(row, params.x_batch_stride, params.x_token_stride);
            } else {
                let column = min(first_column + four * 4u + i, params.d_out - 1u);
                start[m][i] = params.weight_offset + column * params.weight_out_stride;
            }
        }
    }

    if (params.d_in > 0u) {
        var block = array<array<vec4<f32>, 4>, MOVES>();
        // @unroll
        for (var m = 0u; m < MOVES; m++) {
            block[m] = block_at(is_of_x(m, thread), start[m], channel);
        }
        // @unroll
        for (var m = 0u; m < MOVES; m++) {
            put(block[m], is_of_x(m, thread), to[m], channel);
        }
    }
    // The first tiles are read by invocations that did not write them.
    workgroupBarrier();
    var sum = array<vec4<f32>, ROWS * COLUMN_FOURS>();
    for (var first = 0u; first < params.d_in; first += DEPTH) {
        // Of the next tiles. (After the last ones the last channels once more, for nobody.)
        var next = array<array<vec4<f32>, 4>, MOVES>();
        // @unroll
        for (var m = 0u; m < MOVES; m++) {
            next[m] = block_at(is_of_x(m, thread), start[m], first + DEPTH + channel);
        }
        for (var channel = 0u; channel < DEPTH; channel += 4u) {
            let x_from = channel * X_FOURS + place(local.y, channel);
            let w_from = channel * W_FOURS + place(local.x, channel);
            // @unroll
            for (var i = 0u; i < 4u; i++) {
                var x_i = array<vec4<f32>, ROW_FOURS>();
                // @unroll
                for (var r = 0u; r < ROW_FOURS; r++) {
                    x_i[r] = x_tile[x_from + i * X_FOURS + r * DOWN];
                }
                // @unroll
                for (var c = 0u; c < COLUMN_FOURS; c++) {
                    let weight_i = weight_tile[w_from + i * W_FOURS + c * ACROSS];
                    // @unroll
                    for (var r = 0u; r < ROWS; r++) {
                        sum[r * COLUMN_FOURS + c] = fma(
                            vec4<f32>(x_i[r / 4u][r % 4u]),
                            weight_i,
                            sum[r * COLUMN_FOURS + c],
                        );
                    }
                }
            }
        }
        // Others may still read these tiles.
        workgroupBarrier();
        // @unroll
        for (var m = 0u; m < MOVES; m++) {
            put(next[m], is_of_x(m, thread), to[m], first + DEPTH + channel);
        }
        // The next tiles are read by invocations that did not write them.
        workgroupBarrier();
    }

    // @unroll
    for (var r = 0u; r < ROWS; r++) {
        let row = first_row + (r / 4u * DOWN + local.y) * 4u + r % 4u;
        if (row < params.rows) {
            let store = store_row(row);
            // @unroll
            for (var c = 0u; c < COLUMNS; c += 2u) {
                let column = first_column + (c / 4u * ACROSS + local.x) * 4u + c % 4u;
                if (column < params.d_out) {
                    let both = column + 1u < params.d_out;
                    let four = sum[r * COLUMN_FOURS + c / 4u];
                    store_pair(store, column, vec2<f32>(four[c % 4u], four[c % 4u + 1u]) + bias_pair(column, both), both);
                }
            }
        }
    }
}

// linear_tiled: y = x Wᵀ + b for GPUs.
//
// One workgroup of ACROSS x DOWN invocations covers TILE_M rows by TILE_N columns of y and walks over d_in DEPTH
// channels at a time, with the tiles of x and W in workgroup memory, channel by channel; each invocation owns ROWS by
// COLUMNS outputs, four neighbouring rows and four neighbouring columns at a time. What an invocation reads of the next
// tiles waits in its registers while it computes with these.
//
// x (B, T, d_in), weight (d_out, d_in), bias (d_out), y (B, T, d_out), each by its strides.
// Each output is one chain of multiply-adds over d_in in order, whatever its place in the tile: equal rows
// of x give equal bits.
// Host: ROWS and COLUMNS (multiples of 4), ACROSS and DOWN (multiples of 8, one invocation a block of 4 rows or columns
// by 4 channels at least). x and weight, four channels at a time: shared/linear_fours or shared/linear_fours_any.
//
// No workgroup memory is read before it was written, so the driver need not clear it.
//
// Measured by AMD's open compiler for RDNA2, a channel's worth of a tile of 64 x 64 outputs: the kernel before this one, 4 x 4 outputs
// an invocation from single words, made 2 multiply-adds for each access of workgroup memory; this one makes 16.

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
// Blocks of four rows (or columns) by four channels.
const X_BLOCKS: u32 = X_FOURS * DEPTH_FOURS;
const W_BLOCKS: u32 = W_FOURS * DEPTH_FOURS;

// Channel by channel, four rows (or columns) each; see `place`.
var<workgroup> x_tile: array<vec4<f32>, DEPTH * X_FOURS>;
var<workgroup> weight_tile: array<vec4<f32>, DEPTH * W_FOURS>;

// Where four rows or columns lie within their channel: eight invocations that write blocks beside each other use
// different banks, and so do eight that read one channel.
fn place(four: u32, channel: u32) -> u32 {
    return four ^ (channel / 4u * 2u);
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

    // The block of x and the block of the weight that this invocation moves, if there is one for it: blocks of x are dealt
    // out from the first invocation on, those of the weight from the last one back.
    let x_block = thread;
    let w_block = THREADS - 1u - thread;
    let x_channel = x_block % DEPTH_FOURS * 4u;
    let w_channel = w_block % DEPTH_FOURS * 4u;
    let x_at = x_channel * X_FOURS + place(x_block / DEPTH_FOURS, x_channel);
    let w_at = w_channel * W_FOURS + place(w_block / DEPTH_FOURS, w_channel);
    // Rows and columns past the end read the last one; nothing is stored of them.
    var x_start = array<u32, 4>();
    var w_start = array<u32, 4>();
    // @unroll
    for (var i = 0u; i < 4u; i++) {
        let row = min(first_row + x_block / DEPTH_FOURS * 4u + i, params.rows - 1u);
        x_start[i] = params.x_offset + row_start(row, params.x_batch_stride, params.x_token_stride);
        let column = min(first_column + w_block / DEPTH_FOURS * 4u + i, params.d_out - 1u);
        w_start[i] = params.weight_offset + column * params.weight_out_stride;
    }

    var x_next = array<vec4<f32>, 4>();
    var w_next = array<vec4<f32>, 4>();
    var sum = array<vec4<f32>, ROWS * COLUMN_FOURS>();
    // Each turn of the loop computes with the tiles that the one before it has read.
    if (params.d_in > 0u) {
        // @unroll
        for (var i = 0u; i < 4u; i++) {
            if (x_block < X_BLOCKS) {
                x_next[i] = x_four(x_start[i], x_channel);
            }
            if (w_block < W_BLOCKS) {
                w_next[i] = weight_four(w_start[i], w_channel);
            }
        }
    }
    for (var first = 0u; first < params.d_in; first += DEPTH) {
        // Others may still read the tiles before these.
        workgroupBarrier();
        if (x_block < X_BLOCKS) {
            // @unroll
            for (var i = 0u; i < 4u; i++) {
                x_tile[x_at + i * X_FOURS] = vec4<f32>(x_next[0u][i], x_next[1u][i], x_next[2u][i], x_next[3u][i]);
            }
        }
        if (w_block < W_BLOCKS) {
            // @unroll
            for (var i = 0u; i < 4u; i++) {
                weight_tile[w_at + i * W_FOURS] = vec4<f32>(w_next[0u][i], w_next[1u][i], w_next[2u][i], w_next[3u][i]);
            }
        }
        // The tiles are read by invocations that did not write them.
        workgroupBarrier();
        if (first + DEPTH < params.d_in) {
            // @unroll
            for (var i = 0u; i < 4u; i++) {
                if (x_block < X_BLOCKS) {
                    x_next[i] = x_four(x_start[i], first + DEPTH + x_channel);
                }
                if (w_block < W_BLOCKS) {
                    w_next[i] = weight_four(w_start[i], first + DEPTH + w_channel);
                }
            }
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

// linear_lanes: y = x Wᵀ + b for adapters that are a CPU underneath, whose lanes are SIMD lanes.
//
// One invocation owns ROWS rows of x by COLUMNS columns of y, all in private memory. It walks over d_in LANES channels at
// a time; the weights of LANES columns are loaded once for all lanes and handed round (shared/weights_*). One workgroup covers
// ROWS * LANES rows by COLUMNS columns; row r of an invocation lies LANES rows after row r - 1. No barrier.
//
// x (B, T, d_in), weight (d_out, d_in), bias (d_out), y (B, T, d_out), each by its strides.
// Each output is one chain of multiply-adds over d_in in order, whatever the tile: equal rows of x give
// equal bits.
// Host: ROWS, COLUMNS (a multiple of LANES), LANES, SPREAD (fours of a row of y that are stored at once: LANES or, if they are
// fewer, all), shared/linear_eights or shared/linear_steps with one of shared/linear_fours*, and one each of shared/weights_* and
// shared/rows_out_*.
//
// Measured on lavapipe against the kernel before it, which read one weight at a time: docs/performance.md.

@group(0) @binding(2)
var<storage, read> bias: array<f32>;
@group(0) @binding(3)
var<storage, read_write> y: array<f32>;
@group(0) @binding(4)
var<uniform> params: LinearParams;

// Columns of a row of y, four at a time.
const FOURS: u32 = COLUMNS / 4u;
// Channels of a step, four at a time.
const STEP: u32 = LANES / 4u;

// Rows and columns past the end repeat the last one and are not stored.
fn x_row(row: u32) -> u32 {
    return params.x_offset + row_start(min(row, params.rows - 1u), params.x_batch_stride, params.x_token_stride);
}

fn weight_row(column: u32) -> u32 {
    return params.weight_offset + min(column, params.d_out - 1u) * params.weight_out_stride;
}

// The sums of one column with what LANES channels add to them. (A function, since compilers take long over long ones.)
fn add_channels(
    x_fours: ptr<function, array<vec4<f32>, ROWS * STEP>>,
    weights: array<vec4<f32>, STEP>,
    sums: array<f32, ROWS>,
) -> array<f32, ROWS> {
    var added = sums;
    // @unroll
    for (var i = 0u; i < LANES; i++) {
        // @unroll
        for (var r = 0u; r < ROWS; r++) {
            added[r] = fma((*x_fours)[r * STEP + i / 4u][i % 4u], weights[i / 4u][i % 4u], added[r]);
        }
    }
    return added;
}

// What a workgroup has of y.
struct Block {
    first_row: u32,
    first_column: u32,
}

fn store_four(block: Block, row_of_block: u32, four: u32, value: vec4<f32>) {
    let row = block.first_row + row_of_block;
    let column = block.first_column + four * 4u;
    let store = store_row(min(row, params.rows - 1u));
    if (row < params.rows && column < params.d_out) {
        let second = column + 1u < params.d_out;
        store_pair(store, column, value.xy + bias_pair(column, second), second);
    }
    if (row < params.rows && column + 2u < params.d_out) {
        let fourth = column + 3u < params.d_out;
        store_pair(store, column + 2u, value.zw + bias_pair(column + 2u, fourth), fourth);
    }
}

@compute @workgroup_size(LANES)
fn linear_lanes(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let number = workgroup_number(group, groups);
    if (number >= params.groups) {
        return;
    }
    let first_column = (number % params.column_tiles) * COLUMNS;
    let first_row = (number / params.column_tiles) * (ROWS * LANES);

    var x_rows = array<u32, ROWS>();
    // @unroll
    for (var r = 0u; r < ROWS; r++) {
        x_rows[r] = x_row(first_row + r * LANES + lane);
    }
    var sum = array<array<f32, ROWS>, COLUMNS>();
    for (var first = 0u; first < params.d_in; first += LANES) {
        var x_fours = array<vec4<f32>, ROWS * STEP>();
        // @unroll
        for (var r = 0u; r < ROWS; r++) {
            let some = x_step(x_rows[r], first);
            // @unroll
            for (var f = 0u; f < STEP; f++) {
                x_fours[r * STEP + f] = some[f];
            }
        }
        // @unroll
        for (var c = 0u; c < COLUMNS; c += LANES) {
            let weights = weights_of(first_column + c, first, lane);
            // @unroll
            for (var j = 0u; j < LANES; j++) {
                sum[c + j] = add_channels(&x_fours, weights[j], sum[c + j]);
            }
        }
    }

    var rows = array<vec4<f32>, ROWS * FOURS>();
    // @unroll
    for (var r = 0u; r < ROWS; r++) {
        // @unroll
        for (var c = 0u; c < COLUMNS; c += 4u) {
            rows[r * FOURS + c / 4u] = vec4<f32>(sum[c][r], sum[c + 1u][r], sum[c + 2u][r], sum[c + 3u][r]);
        }
    }
    rows_out(Block(first_row, first_column), &rows, lane);
}

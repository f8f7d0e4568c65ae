// linear_lanes: y = x Wᵀ + b for adapters that are a CPU underneath, whose lanes are SIMD lanes.
//
// One invocation owns ROWS rows of x by COLUMNS columns of y, all in private memory; weights are read at
// addresses that all invocations share, so that it computes without workgroup memory and without a barrier (both
// are slow there). One workgroup covers ROWS * LANES rows by COLUMNS columns; row r of an invocation lies
// LANES rows after row r - 1.
//
// x (B, T, d_in), weight (d_out, d_in), bias (d_out), y (B, T, d_out), each by its strides.
// Each output is one chain of multiply-adds over d_in in order, whatever the tile: equal rows of x give
// equal bits.
// Host: ROWS, COLUMNS, LANES.

@group(0) @binding(0)
var<storage, read> x: array<f32>;
@group(0) @binding(1)
var<storage, read> weight: array<f32>;
@group(0) @binding(2)
var<storage, read> bias: array<f32>;
@group(0) @binding(3)
var<storage, read_write> y: array<f32>;
@group(0) @binding(4)
var<uniform> params: LinearParams;

// Rows whose sums are stored in a loop, and rows whose stores are written out: one of them is none.
const LOOPED: u32 = ROWS * STORE_IN_LOOPS;
const WRITTEN_OUT: u32 = ROWS - LOOPED;

// Sums that are stored in a loop. (A private array that a loop's variable indexes compiles for as long as stores that
// are written out.)
var<workgroup> staged: array<f32, 1u + LOOPED * COLUMNS * LANES>;

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

    // Rows and columns past the end repeat the last one and are not stored.
    var x_row = array<u32, ROWS>();
    // @unroll
    for (var r = 0u; r < ROWS; r++) {
        let row = min(first_row + r * LANES + lane, params.rows - 1u);
        x_row[r] = params.x_offset + row_start(row, params.x_batch_stride, params.x_token_stride);
    }
    var weight_row = array<u32, COLUMNS>();
    // @unroll
    for (var c = 0u; c < COLUMNS; c++) {
        weight_row[c] = params.weight_offset
            + min(first_column + c, params.d_out - 1u) * params.weight_out_stride;
    }

    var sum = array<f32, ROWS * COLUMNS>();
    for (var i = 0u; i < params.d_in; i++) {
        let x_channel = i * params.x_channel_stride;
        let weight_channel = i * params.weight_in_stride;
        var x_i = array<f32, ROWS>();
        // @unroll
        for (var r = 0u; r < ROWS; r++) {
            x_i[r] = x[x_row[r] + x_channel];
        }
        // @unroll
        for (var c = 0u; c < COLUMNS; c++) {
            let weight_i = weight[weight_row[c] + weight_channel];
            // @unroll
            for (var r = 0u; r < ROWS; r++) {
                sum[r * COLUMNS + c] = fma(x_i[r], weight_i, sum[r * COLUMNS + c]);
            }
        }
    }

    // Each lane reads what it wrote itself: no barrier.
    // @unroll
    for (var s = 0u; s < LOOPED * COLUMNS; s++) {
        staged[s * LANES + lane] = sum[s];
    }
    for (var r = 0u; r < LOOPED; r++) {
        let row = first_row + r * LANES + lane;
        let store = store_row(min(row, params.rows - 1u));
        for (var c = 0u; c < COLUMNS; c += 2u) {
            let column = first_column + c;
            if (row < params.rows && column < params.d_out) {
                let second = column + 1u < params.d_out;
                let at = (r * COLUMNS + c) * LANES + lane;
                let sums = vec2<f32>(staged[at], staged[at + LANES]);
                store_pair(store, column, sums + bias_pair(column, second), second);
            }
        }
    }

    var store = array<StoreRow, ROWS>();
    // @unroll
    for (var r = 0u; r < WRITTEN_OUT; r++) {
        store[r] = store_row(min(first_row + r * LANES + lane, params.rows - 1u));
    }
    // @unroll
    for (var c = 0u; c < COLUMNS - COLUMNS * STORE_IN_LOOPS; c += 2u) {
        let column = first_column + c;
        if (column < params.d_out) {
            let both = column + 1u < params.d_out;
            let bias_c = bias_pair(column, both);
            // @unroll
            for (var r = 0u; r < WRITTEN_OUT; r++) {
                let row = first_row + r * LANES + lane;
                if (row < params.rows) {
                    let sums = vec2<f32>(sum[r * COLUMNS + c], sum[r * COLUMNS + c + 1u]);
                    store_pair(store[r], column, sums + bias_c, both);
                }
            }
        }
    }
}

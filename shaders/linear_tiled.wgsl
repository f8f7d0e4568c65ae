// linear_tiled: y = x Wᵀ + b for GPUs.
//
// One workgroup of 16 x 16 invocations covers TILE_M rows by TILE_N columns of y and walks over d_in DEPTH
// channels at a time, with the tiles of x and W in workgroup memory; each invocation owns ROWS by COLUMNS
// outputs.
//
// x (B, T, d_in), weight (d_out, d_in), bias (d_out), y (B, T, d_out), each by its strides.
// Each output is one chain of multiply-adds over d_in in order, whatever its place in the tile: equal rows
// of x give equal bits.
// Host: ROWS, COLUMNS.
//
// No workgroup memory is read before it was written, so the driver need not clear it.

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

const SIDE: u32 = 16u;
const THREADS: u32 = SIDE * SIDE;
const DEPTH: u32 = 16u;
const TILE_M: u32 = SIDE * ROWS;
const TILE_N: u32 = SIDE * COLUMNS;
// One more than the tile, so that invocations that write down a column use different banks.
const X_STRIDE: u32 = TILE_M + 1u;
const W_STRIDE: u32 = TILE_N + 1u;

// Channel by channel.
var<workgroup> x_tile: array<f32, DEPTH * X_STRIDE>;
var<workgroup> weight_tile: array<f32, DEPTH * W_STRIDE>;

// The tile's column that is column c of an invocation. Each owns pairs of neighbours; sixteen invocations beside each
// other read sixteen different even (or odd) banks.
fn column_of(c: u32, x: u32) -> u32 {
    return c / 2u * 2u * SIDE + 2u * x + c % 2u;
}

@compute @workgroup_size(SIDE, SIDE)
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

    var sum = array<f32, ROWS * COLUMNS>();
    for (var first = 0u; first < params.d_in; first += DEPTH) {
        // Others may still read the tiles before these.
        workgroupBarrier();
        for (var e = thread; e < TILE_M * DEPTH; e += THREADS) {
            let row = first_row + e / DEPTH;
            let channel = first + e % DEPTH;
            var value = 0.0;
            if (row < params.rows && channel < params.d_in) {
                value = x[params.x_offset + row_start(row, params.x_batch_stride, params.x_token_stride)
                    + channel * params.x_channel_stride];
            }
            x_tile[(e % DEPTH) * X_STRIDE + e / DEPTH] = value;
        }
        for (var e = thread; e < TILE_N * DEPTH; e += THREADS) {
            let column = first_column + e / DEPTH;
            let channel = first + e % DEPTH;
            var value = 0.0;
            if (column < params.d_out && channel < params.d_in) {
                value = weight[params.weight_offset + column * params.weight_out_stride
                    + channel * params.weight_in_stride];
            }
            weight_tile[(e % DEPTH) * W_STRIDE + e / DEPTH] = value;
        }
        // The tiles are read by invocations that did not write them.
        workgroupBarrier();
        for (var i = 0u; i < DEPTH; i++) {
            var x_i = array<f32, ROWS>();
            // @unroll
            for (var r = 0u; r < ROWS; r++) {
                x_i[r] = x_tile[i * X_STRIDE + r * SIDE + local.y];
            }
            // @unroll
            for (var c = 0u; c < COLUMNS; c++) {
                let weight_i = weight_tile[i * W_STRIDE + column_of(c, local.x)];
                // @unroll
                for (var r = 0u; r < ROWS; r++) {
                    sum[r * COLUMNS + c] = fma(x_i[r], weight_i, sum[r * COLUMNS + c]);
                }
            }
        }
    }

    var store = array<StoreRow, ROWS>();
    // @unroll
    for (var r = 0u; r < ROWS; r++) {
        store[r] = store_row(min(first_row + r * SIDE + local.y, params.rows - 1u));
    }
    // @unroll
    for (var c = 0u; c < COLUMNS; c += 2u) {
        let column = first_column + column_of(c, local.x);
        if (column < params.d_out) {
            let both = column + 1u < params.d_out;
            let bias_c = bias_pair(column, both);
            // @unroll
            for (var r = 0u; r < ROWS; r++) {
                let row = first_row + r * SIDE + local.y;
                if (row < params.rows) {
                    let sums = vec2<f32>(sum[r * COLUMNS + c], sum[r * COLUMNS + c + 1u]);
                    store_pair(store[r], column, sums + bias_c, both);
                }
            }
        }
    }
}

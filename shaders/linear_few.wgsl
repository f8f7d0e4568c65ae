// linear_few: y = x Wᵀ + b for few rows, where reading W once is all the work.
//
// One workgroup covers ROWS rows by COLUMNS columns of y. Invocation `lane` owns the channels lane, lane + LANES, ...
// of all of them and keeps ROWS * COLUMNS partial sums in private memory: neighbouring lanes read neighbouring
// weights, and each weight is read once for all rows. At the end the lanes' sums are added in the order of the lanes.
//
// x (B, T, d_in), weight (d_out, d_in), bias (d_out), y (B, T, d_out), each by its strides.
// Each output is the same sum in the same order whatever its place in the tile: equal rows of x give equal bits.
// Host: ROWS, COLUMNS (even), LANES.
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

const OUTPUTS: u32 = ROWS * COLUMNS;

// Output by output, the sums of its lanes beside each other.
var<workgroup> sums: array<f32, OUTPUTS * LANES>;

// Turned by the output's number: neither lanes that write one output nor lanes that read one lane's share of theirs meet in
// a bank.
fn sum_at(output: u32, lane: u32) -> u32 {
    return output * LANES + (lane + output) % LANES;
}

@compute @workgroup_size(LANES)
fn linear_few(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let number = workgroup_number(group, groups);
    if (number >= params.groups) {
        return;
    }
    let first_column = (number % params.column_tiles) * COLUMNS;
    let first_row = (number / params.column_tiles) * ROWS;

    // Rows and columns past the end repeat the last one and are not stored.
    var x_row = array<u32, ROWS>();
    // @unroll
    for (var r = 0u; r < ROWS; r++) {
        let row = min(first_row + r, params.rows - 1u);
        x_row[r] = params.x_offset + row_start(row, params.x_batch_stride, params.x_token_stride);
    }
    var weight_row = array<u32, COLUMNS>();
    // @unroll
    for (var c = 0u; c < COLUMNS; c++) {
        weight_row[c] = params.weight_offset
            + min(first_column + c, params.d_out - 1u) * params.weight_out_stride;
    }

    var sum = array<f32, OUTPUTS>();
    for (var i = lane; i < params.d_in; i += LANES) {
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

    // @unroll
    for (var o = 0u; o < OUTPUTS; o++) {
        sums[sum_at(o, lane)] = sum[o];
    }
    // Each output is added up by one invocation from what all lanes wrote.
    workgroupBarrier();
    for (var pair = lane; pair < OUTPUTS / 2u; pair += LANES) {
        let row = first_row + 2u * pair / COLUMNS;
        let column = first_column + 2u * pair % COLUMNS;
        if (row < params.rows && column < params.d_out) {
            var total = vec2<f32>();
            for (var l = 0u; l < LANES; l++) {
                total += vec2<f32>(sums[sum_at(2u * pair, l)], sums[sum_at(2u * pair + 1u, l)]);
            }
            let both = column + 1u < params.d_out;
            store_pair(store_row(row), column, total + bias_pair(column, both), both);
        }
    }
}

// linear_lanes: y = x Wᵀ + b for adapters that are a CPU underneath, whose lanes are SIMD lanes.
//
// One invocation owns ROWS rows of x by COLUMNS columns of y, all in private memory. It walks over d_in LANES channels at
// a time; the weights of a column are loaded once for all lanes and handed round (shared/weights_*). One workgroup covers
// ROWS * LANES rows by COLUMNS columns; row r of an invocation lies LANES rows after row r - 1. No barrier.
//
// x (B, T, d_in), weight (d_out, d_in), bias (d_out), y (B, T, d_out), each by its strides.
// Each output is one chain of multiply-adds over d_in in order, whatever the tile: equal rows of x give
// equal bits.
// Host: ROWS, COLUMNS, LANES, one of shared/x_* and one of shared/weights_*.
//
// Measured on lavapipe against the kernel before it, which read one weight at a time: docs/performance.md.

@group(0) @binding(1)
var<storage, read> weight: array<f32>;
@group(0) @binding(2)
var<storage, read> bias: array<f32>;
@group(0) @binding(3)
var<storage, read_write> y: array<f32>;
@group(0) @binding(4)
var<uniform> params: LinearParams;

// Columns of a row, four at a time.
const FOURS: u32 = COLUMNS / 4u;

// Sums, on their way out: a loop goes over them, since stores that are written out compile for long. (And a private array
// that a loop's variable indexes becomes a tree of branches.) A lane reads only what it wrote itself: no barrier.
var<workgroup> staged: array<vec4<f32>, ROWS * FOURS * LANES>;

// The sums of one column with what LANES channels add to them. (A function, since compilers take long over long ones.)
fn add_channels(
    x_fours: ptr<function, array<vec4<f32>, ROWS * LANES / 4u>>,
    weights: array<f32, LANES>,
    sums: array<f32, ROWS>,
) -> array<f32, ROWS> {
    var added = sums;
    // @unroll
    for (var i = 0u; i < LANES; i++) {
        // @unroll
        for (var r = 0u; r < ROWS; r++) {
            added[r] = fma((*x_fours)[(r * LANES + i) / 4u][i % 4u], weights[i], added[r]);
        }
    }
    return added;
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

    var sum = array<array<f32, ROWS>, COLUMNS>();
    for (var first = 0u; first < params.d_in; first += LANES) {
        // Channels past the end are 0, those of x and those of the weights.
        var x_fours = array<vec4<f32>, ROWS * LANES / 4u>();
        // @unroll
        for (var r = 0u; r < ROWS; r++) {
            // @unroll
            for (var f = 0u; f < LANES / 4u; f++) {
                x_fours[r * LANES / 4u + f] = x_four(x_row[r], first + f * 4u);
            }
        }
        // @unroll
        for (var c = 0u; c < COLUMNS; c++) {
            sum[c] = add_channels(&x_fours, weights_of(weight_row[c], first, lane), sum[c]);
        }
    }

    // @unroll
    for (var r = 0u; r < ROWS; r++) {
        // @unroll
        for (var c = 0u; c < COLUMNS; c += 4u) {
            staged[(r * FOURS + c / 4u) * LANES + lane] = vec4<f32>(
                sum[c][r],
                sum[c + 1u][r],
                sum[c + 2u][r],
                sum[c + 3u][r],
            );
        }
    }
    for (var r = 0u; r < ROWS; r++) {
        let row = first_row + r * LANES + lane;
        let store = store_row(min(row, params.rows - 1u));
        for (var f = 0u; f < FOURS; f++) {
            let column = first_column + f * 4u;
            let four = staged[(r * FOURS + f) * LANES + lane];
            if (row < params.rows && column < params.d_out) {
                let second = column + 1u < params.d_out;
                store_pair(store, column, four.xy + bias_pair(column, second), second);
            }
            if (row < params.rows && column + 2u < params.d_out) {
                let fourth = column + 3u < params.d_out;
                store_pair(store, column + 2u, four.zw + bias_pair(column + 2u, fourth), fourth);
            }
        }
    }
}

// attention_lanes: o_i = sum_j softmax_j(scale * q_i.k_j) v_j in one pass (online softmax), for
// adapters that are a CPU underneath, whose lanes are SIMD lanes.
//
// One invocation owns ROWS query rows: their q and their accumulators stay in private memory, keys and
// values are read at addresses that all invocations share, so that no workgroup memory and no barrier
// is needed (both are slow there). One workgroup of LANES invocations covers ROWS * LANES queries of
// one head of one batch item; row r of an invocation is LANES queries after row r - 1.
//
// q, k, v, out: (B, T, H, D) by strides. mask: see rules/. Memory beyond the operands: none.
// Host: HEAD_DIM (D rounded up to a compiled size; channels past params.head_dim count as 0), ROWS, LANES.
//
// The running maximum starts with the first key that a row sees, not with a stand-in for -infinity:
// `total` is 0 exactly until then. It is at least 1 afterwards (the maximal key adds exp(0)) unless NaN.
//
// Measured on lavapipe, 2 cores, causal, H 12, D 64, T 1024: see docs/performance.md.

@group(0) @binding(0)
var<storage, read> q: array<f32>;
@group(0) @binding(1)
var<storage, read> k: array<f32>;
@group(0) @binding(2)
var<storage, read> v: array<f32>;
@group(0) @binding(3)
var<storage, read> mask: array<u32>;
@group(0) @binding(4)
var<storage, read_write> out: array<f32>;
@group(0) @binding(5)
var<uniform> params: AttentionParams;

@compute @workgroup_size(LANES)
fn attention_lanes(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let number = workgroup_number(group, groups);
    if (number >= params.groups) {
        return;
    }
    let first_query = (number % params.q_tiles) * (ROWS * LANES);
    let head = (number / params.q_tiles) % params.heads;
    let batch = number / (params.q_tiles * params.heads);
    let last_query = min(first_query + ROWS * LANES, params.q_len) - 1u;

    let seen_by_any = key_limit(last_query);

    let last_channel = params.head_dim - 1u;
    var query = array<f32, ROWS * HEAD_DIM>();
    var limit = array<u32, ROWS>();
    // @unroll
    for (var r = 0u; r < ROWS; r++) {
        // Rows past the end repeat the last one and are not stored.
        let row = min(first_query + r * LANES + lane, last_query);
        limit[r] = key_limit(row);
        let base = params.q_offset + batch * params.q_batch_stride + row * params.q_token_stride
            + head * params.q_head_stride;
        // @unroll
        for (var d = 0u; d < HEAD_DIM; d++) {
            query[r * HEAD_DIM + d] = select(0.0, q[base + min(d, last_channel)] * params.scale, d < params.head_dim);
        }
    }

    var highest = array<f32, ROWS>();
    var total = array<f32, ROWS>();
    var sum = array<f32, ROWS * HEAD_DIM>();
    let k_base = params.k_offset + batch * params.k_batch_stride + head * params.k_head_stride;
    let v_base = params.v_offset + batch * params.v_batch_stride + head * params.v_head_stride;

    for (var key = 0u; key < seen_by_any; key++) {
        let k_row = k_base + key * params.k_token_stride;
        let v_row = v_base + key * params.v_token_stride;

        var score = array<f32, ROWS>();
        // @unroll
        for (var d = 0u; d < HEAD_DIM; d++) {
            let k_d = select(0.0, k[k_row + min(d, last_channel)], d < params.head_dim);
            // @unroll
            for (var r = 0u; r < ROWS; r++) {
                score[r] = fma(query[r * HEAD_DIM + d], k_d, score[r]);
            }
        }

        // What the key adds to each row, and what shrinks what was there: one of the two is 1, the other
        // exp of the distance between the score and the highest before it. No branch: these adapters execute
        // both sides of one anyway.
        var visible = array<bool, ROWS>();
        var weight = array<f32, ROWS>();
        var shrink = array<f32, ROWS>();
        // @unroll
        for (var r = 0u; r < ROWS; r++) {
            visible[r] = key < limit[r] && may_attend(batch, head, first_query + r * LANES + lane, key);
            // The first key of a row is its own highest; a score of NaN or infinity still makes a NaN of it.
            let before = select(highest[r], score[r], total[r] == 0.0);
            let distance = score[r] - before;
            let factor = select(exp(-abs(distance)), 1.0, distance == 0.0);
            let rises = score[r] > before;
            let counts = visible[r] && !weighs_nothing(score[r]);
            weight[r] = select(0.0, select(factor, 1.0, rises), counts);
            shrink[r] = select(1.0, factor, rises && counts);
            highest[r] = select(highest[r], select(before, score[r], rises), counts);
            total[r] = select(total[r], fma(total[r], shrink[r], weight[r]), counts);
        }

        // @unroll
        for (var d = 0u; d < HEAD_DIM; d++) {
            let v_d = v[v_row + min(d, last_channel)];
            // @unroll
            for (var r = 0u; r < ROWS; r++) {
                // Whatever lies in a value that a row may not see, NaN included, must not reach that row.
                sum[r * HEAD_DIM + d] = select(
                    sum[r * HEAD_DIM + d],
                    fma(weight[r], v_d, sum[r * HEAD_DIM + d] * shrink[r]),
                    visible[r],
                );
            }
        }
    }

    // @unroll
    for (var r = 0u; r < ROWS; r++) {
        let row = first_query + r * LANES + lane;
        if (row <= last_query) {
            // A highest score of +infinity makes a NaN of the row, as inf - inf would; told by the exponent's
            // bits and made by setting one more, since compilers may take floats for finite.
            let bits = bitcast<u32>(highest[r]);
            let divisor = select(total[r], bitcast<f32>(bits | 0x400000u), ((bits >> 23u) & 0xffu) == 0xffu);
            let base = params.out_offset + batch * params.out_batch_stride + row * params.out_token_stride
                + head * params.out_head_stride;
            // @unroll
            for (var d = 0u; d < HEAD_DIM; d++) {
                if (d < params.head_dim) {
                    // A row that saw no key gives 0.
                    out[base + d] = select(sum[r * HEAD_DIM + d] / divisor, 0.0, total[r] == 0.0);
                }
            }
        }
    }
}

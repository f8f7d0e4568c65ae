// attention_lanes: o_i = sum_j softmax_j(score_ij) v_j in one pass (online softmax), for
// adapters that are a CPU underneath, whose lanes are SIMD lanes.
//
// One invocation owns ROWS query rows: their q and their accumulators stay in private memory, keys and
// values are read at addresses that all invocations share, so that no workgroup memory and no barrier
// is needed (both are slow there). One workgroup of LANES invocations covers ROWS * LANES queries of
// one head of one batch item; row r of an invocation is LANES queries after row r - 1. What a pair scores and
// whether it is seen: shared/pair, shared/item, rules/.
//
// q, k: (B, T, H or Hkv, D), v: (B, Tk, Hkv, Dv), out: (B, Tq, H, Dv), lse: (B, H, Tq), all by strides; packed
// sequences have no B. tables: lengths, starts, slopes, sinks. Memory beyond the operands: none.
// Host: HEAD_DIM (the larger of D and Dv rounded up to a compiled size; channels past params.head_dim and
// params.value_dim count as 0), Q_TYPE, KV_TYPE (of k and v: 0 f32, 1 f16, 2 bf16), ROWS, LANES.
//
// The running maximum starts with the first key that a row sees (or with its sink), not with a stand-in for
// -infinity: `total` is 0 exactly until then. It is at least 1 afterwards (the maximal key adds exp(0)) unless NaN.
//
// Measured on lavapipe, 2 cores, causal, H 12, D 64, T 1024: see docs/performance.md.

@group(0) @binding(0)
var<storage, read> q: array<u32>;
@group(0) @binding(1)
var<storage, read> k: array<u32>;
@group(0) @binding(2)
var<storage, read> v: array<u32>;
@group(0) @binding(3)
var<storage, read_write> out: array<u32>;
@group(0) @binding(4)
var<storage, read_write> lse: array<u32>;
@group(0) @binding(5)
var<storage, read> tables: array<u32>;
@group(0) @binding(6)
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
    let item = item_at(batch, head);
    // Queries of this workgroup that the item has; the others see no key. (At least one row is there to be read.)
    let end_query = min(first_query + ROWS * LANES, item.q_len);
    let last_query = max(end_query, 1u) - 1u;

    // Keys that some query of this workgroup may see, by position.
    let seen_from = key_first(item, first_query);
    let seen_to = select(0u, key_limit(item, last_query), first_query < end_query);

    let last_channel = params.head_dim - 1u;
    let last_value_channel = params.value_dim - 1u;
    var query = array<f32, ROWS * HEAD_DIM>();
    var from_key = array<u32, ROWS>();
    var limit = array<u32, ROWS>();
    // Rows past the end repeat the last one, and see nothing.
    var read_row = array<u32, ROWS>();
    // @unroll
    for (var r = 0u; r < ROWS; r++) {
        from_key[r] = key_first(item, first_query + r * LANES + lane);
        limit[r] = key_limit(item, first_query + r * LANES + lane);
        read_row[r] = min(first_query + r * LANES + lane, last_query);
        let base = params.q_offset + batch * params.q_batch_stride + head * params.q_head_stride
            + (item.q_start + read_row[r]) * params.q_token_stride;
        // @unroll
        for (var d = 0u; d < HEAD_DIM; d++) {
            let at = base + min(d, last_channel);
            let q_d = value_of(q[word_of(at, Q_TYPE)], at, Q_TYPE) * params.scale;
            query[r * HEAD_DIM + d] = select(0.0, q_d, d < params.head_dim);
        }
    }

    var highest = array<f32, ROWS>();
    var total = array<f32, ROWS>();
    var sum = array<f32, ROWS * HEAD_DIM>();
    // @unroll
    for (var r = 0u; r < ROWS; r++) {
        let sinks = item.has_sink && first_query + r * LANES + lane < item.q_len;
        highest[r] = select(0.0, item.sink, sinks);
        total[r] = select(0.0, 1.0, sinks);
    }
    let kv_head = head / params.group;
    let k_base = params.k_offset + batch * params.k_batch_stride + kv_head * params.k_head_stride;
    let v_base = params.v_offset + batch * params.v_batch_stride + kv_head * params.v_head_stride;

    for (var key = seen_from; key < seen_to; key++) {
        let token = key_row(item, key);
        let k_row = k_base + token * params.k_token_stride;
        let v_row = v_base + token * params.v_token_stride;

        var score = array<f32, ROWS>();
        // @unroll
        for (var d = 0u; d < HEAD_DIM; d++) {
            let at = k_row + min(d, last_channel);
            let k_d = select(0.0, value_of(k[word_of(at, KV_TYPE)], at, KV_TYPE), d < params.head_dim);
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
            let pair = judge(item, score[r], read_row[r], key);
            score[r] = pair.score;
            visible[r] = pair.visible & (key >= from_key[r]) & (key < limit[r]);
            // The first key of a row is its own highest; a score of NaN or infinity still makes a NaN of it.
            let before = select(highest[r], score[r], total[r] == 0.0);
            let distance = score[r] - before;
            let factor = select(exp(-abs(distance)), 1.0, distance == 0.0);
            let rises = score[r] > before;
            let counts = visible[r] & !weighs_nothing(score[r]);
            weight[r] = select(0.0, select(factor, 1.0, rises), counts);
            shrink[r] = select(1.0, factor, rises & counts);
            highest[r] = select(highest[r], select(before, score[r], rises), counts);
            total[r] = select(total[r], fma(total[r], shrink[r], weight[r]), counts);
        }

        // @unroll
        for (var d = 0u; d < HEAD_DIM; d++) {
            let at = v_row + min(d, last_value_channel);
            let v_d = value_of(v[word_of(at, KV_TYPE)], at, KV_TYPE);
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
        // Rows past the end of a packed sequence belong to others.
        if (row < item.rows) {
            // A highest score of +infinity makes a NaN of the row, as inf - inf would; told by the exponent's
            // bits and made by setting one more, since compilers may take floats for finite.
            let bits = bitcast<u32>(highest[r]);
            let divisor = select(total[r], bitcast<f32>(bits | 0x400000u), ((bits >> 23u) & 0xffu) == 0xffu);
            // A row that saw no key gives 0. (Not `total != 0.0`, which is false for NaN where comparisons are ordered.)
            let none = total[r] == 0.0;
            let base = params.out_offset + batch * params.out_batch_stride + head * params.out_head_stride
                + (item.q_start + row) * params.out_token_stride;
            // @unroll
            for (var d = 0u; d < HEAD_DIM; d += 2u) {
                if (d < params.value_dim) {
                    store_pair(
                        base + d,
                        select(sum[r * HEAD_DIM + d] / divisor, 0.0, none),
                        select(sum[r * HEAD_DIM + d + 1u] / divisor, 0.0, none),
                        d + 1u < params.value_dim,
                    );
                }
            }
            store_lse(item, row, !none, highest[r], divisor);
        }
    }
}

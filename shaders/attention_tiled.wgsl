// attention_tiled: o_i = sum_j softmax_j(score_ij) v_j in one pass (online softmax), for GPUs.
//
// One workgroup of 8 x 8 invocations covers BLOCK_Q queries of one head of one batch item and walks over the
// keys BLOCK_K at a time. Scores of a block are made from tiles of q and k in workgroup memory, CHUNK
// channels at a time; each invocation owns ROWS queries by KEYS keys of them, and later the same ROWS
// queries by VALUE_DIM / 8 channels of the output, two neighbours at a time. Keys that no query of the block may
// see are skipped. What a pair scores and whether it is seen: shared/pair, shared/item, rules/.
//
// q, k: (B, T, H or Hkv, D), v: (B, Tk, Hkv, Dv), out: (B, Tq, H, Dv), lse: (B, H, Tq), all by strides; packed
// sequences have no B. tables: lengths, starts, slopes, sinks. Memory beyond the operands: none.
// Host: VALUE_DIM (Dv rounded up to a compiled size, a multiple of 16; channels past params.value_dim count as 0),
// KV_TYPE (of k and v: 0 f32, 1 f16, 2 bf16), ROWS, KEYS, VALUE_KEYS (keys whose values fit `staged` at once;
// divides BLOCK_K). D is free: the walk over its chunks is a loop.
//
// No stand-in for -infinity: a row carries whether it has seen a key. No workgroup memory is read before
// it was written, so the driver need not clear it.

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

const SIDE: u32 = 8u;
const THREADS: u32 = SIDE * SIDE;
const BLOCK_Q: u32 = SIDE * ROWS;
const BLOCK_K: u32 = SIDE * KEYS;
const CHUNK: u32 = 16u;
const COLUMNS: u32 = VALUE_DIM / SIDE;
// One more than the tile, so that invocations that write down a column use different banks.
const Q_STRIDE: u32 = BLOCK_Q + 1u;
const K_STRIDE: u32 = BLOCK_K + 1u;
const K_START: u32 = CHUNK * Q_STRIDE;

// Tiles of q and k, channel by channel; afterwards the values of VALUE_KEYS keys.
var<workgroup> staged: array<f32, max(K_START + CHUNK * K_STRIDE, VALUE_KEYS * VALUE_DIM)>;
// Weights of the block, query by query; -1 where the query may not see the key.
var<workgroup> weights: array<f32, BLOCK_Q * BLOCK_K>;
// What each invocation knows of its rows: the highest score and whether there is one; at the end the total.
var<workgroup> partial: array<f32, BLOCK_Q * SIDE>;
var<workgroup> partial_seen: array<u32, BLOCK_Q * SIDE>;

@compute @workgroup_size(SIDE, SIDE)
fn attention_tiled(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_id) local: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let number = workgroup_number(group, groups);
    if (number >= params.groups) {
        return;
    }
    let first_query = (number % params.q_tiles) * BLOCK_Q;
    let head = (number / params.q_tiles) % params.heads;
    let batch = number / (params.q_tiles * params.heads);
    let item = item_at(batch, head);
    // Queries of this workgroup that the item has; the others see no key. (At least one row is there to be read.)
    let end_query = min(first_query + BLOCK_Q, item.q_len);
    let last_query = max(end_query, 1u) - 1u;

    // Keys that some query of this workgroup may see, and those that every one of them may, by position.
    let seen_from = key_first(item, first_query);
    let seen_to = select(0u, key_limit(item, last_query), first_query < end_query);
    let full_from = key_first(item, last_query);
    let full_to = key_limit(item, first_query);

    let kv_head = head / params.group;
    let q_base = params.q_offset + batch * params.q_batch_stride + head * params.q_head_stride
        + item.q_start * params.q_token_stride;
    let k_base = params.k_offset + batch * params.k_batch_stride + kv_head * params.k_head_stride;
    let v_base = params.v_offset + batch * params.v_batch_stride + kv_head * params.v_head_stride;
    let first_row = local.y * ROWS;

    var from_key = array<u32, ROWS>();
    var limit = array<u32, ROWS>();
    // @unroll
    for (var r = 0u; r < ROWS; r++) {
        from_key[r] = key_first(item, first_query + first_row + r);
        limit[r] = key_limit(item, first_query + first_row + r);
    }
    var highest = array<f32, ROWS>();
    var seen = array<bool, ROWS>();
    // The sum of this invocation's own weights; the other seven of the row are added at the end.
    var total = array<f32, ROWS>();
    var sum = array<f32, ROWS * COLUMNS>();
    if (item.has_sink) {
        // @unroll
        for (var r = 0u; r < ROWS; r++) {
            seen[r] = first_query + first_row + r < item.q_len;
            highest[r] = item.sink;
            total[r] = select(0.0, 1.0, seen[r] && local.x == 0u);
        }
    }

    for (var first_key = seen_from; first_key < seen_to; first_key += BLOCK_K) {
        var score = array<f32, ROWS * KEYS>();
        for (var chunk = 0u; chunk < params.head_dim; chunk += CHUNK) {
            // Others may still read `staged`: values of the block before, or the chunk before.
            workgroupBarrier();
            for (var e = thread; e < BLOCK_Q * CHUNK; e += THREADS) {
                let row = min(first_query + e / CHUNK, last_query);
                let channel = chunk + e % CHUNK;
                var value = 0.0;
                if (channel < params.head_dim) {
                    let at = q_base + row * params.q_token_stride + channel;
                    value = value_of(q[word_of(at, params.q_type)], at, params.q_type) * params.scale;
                }
                staged[(e % CHUNK) * Q_STRIDE + e / CHUNK] = value;
            }
            for (var e = thread; e < BLOCK_K * CHUNK; e += THREADS) {
                let key = first_key + e / CHUNK;
                let channel = chunk + e % CHUNK;
                var value = 0.0;
                if (key < seen_to && channel < params.head_dim) {
                    let at = k_base + key_row(item, key) * params.k_token_stride + channel;
                    value = value_of(k[word_of(at, KV_TYPE)], at, KV_TYPE);
                }
                staged[K_START + (e % CHUNK) * K_STRIDE + e / CHUNK] = value;
            }
            // The tiles are read by invocations that did not write them.
            workgroupBarrier();
            for (var i = 0u; i < CHUNK; i++) {
                var q_i = array<f32, ROWS>();
                // @unroll
                for (var r = 0u; r < ROWS; r++) {
                    q_i[r] = staged[i * Q_STRIDE + first_row + r];
                }
                // @unroll
                for (var c = 0u; c < KEYS; c++) {
                    let k_i = staged[K_START + i * K_STRIDE + c * SIDE + local.x];
                    // @unroll
                    for (var r = 0u; r < ROWS; r++) {
                        score[r * KEYS + c] = fma(q_i[r], k_i, score[r * KEYS + c]);
                    }
                }
            }
        }

        var visible = array<bool, ROWS * KEYS>();
        // @unroll
        for (var r = 0u; r < ROWS; r++) {
            let row = first_query + first_row + r;
            var peak = 0.0;
            var any = false;
            // @unroll
            for (var c = 0u; c < KEYS; c++) {
                let key = first_key + c * SIDE + local.x;
                if (key >= from_key[r] && key < limit[r]) {
                    let pair = judge(item, score[r * KEYS + c], row, key);
                    visible[r * KEYS + c] = pair.visible;
                    score[r * KEYS + c] = pair.score;
                    if (pair.visible && !weighs_nothing(score[r * KEYS + c]) && (!any || score[r * KEYS + c] > peak)) {
                        peak = score[r * KEYS + c];
                        any = true;
                    }
                }
            }
            partial[(first_row + r) * SIDE + local.x] = peak;
            partial_seen[(first_row + r) * SIDE + local.x] = u32(any);
        }
        // The eight invocations of a row read each other's peaks. This also ends all reading of the k tile,
        // and, from the block before, all reading of `weights`: both may be written from here on.
        workgroupBarrier();

        // @unroll
        for (var r = 0u; r < ROWS; r++) {
            var top = highest[r];
            var any = seen[r];
            for (var i = 0u; i < SIDE; i++) {
                let peak = partial[(first_row + r) * SIDE + i];
                if (partial_seen[(first_row + r) * SIDE + i] != 0u && (!any || peak > top)) {
                    top = peak;
                    any = true;
                }
            }
            // Before the first key the sums are 0 and stay 0 (and an exponent of 0 cannot overflow).
            let shrink = exp(select(0.0, highest[r] - top, seen[r]));
            highest[r] = top;
            seen[r] = any;
            total[r] = total[r] * shrink;
            // @unroll
            for (var c = 0u; c < COLUMNS; c++) {
                sum[r * COLUMNS + c] = sum[r * COLUMNS + c] * shrink;
            }
            // @unroll
            for (var c = 0u; c < KEYS; c++) {
                var weight = -1.0;
                if (visible[r * KEYS + c]) {
                    weight = select(exp(score[r * KEYS + c] - top), 0.0, weighs_nothing(score[r * KEYS + c]));
                    total[r] = total[r] + weight;
                }
                weights[(first_row + r) * BLOCK_K + c * SIDE + local.x] = weight;
            }
        }

        // Uniform: whether some query of the workgroup may not see some key of the block.
        let hides_some = HIDES_SINGLE_KEYS || first_key < full_from || first_key + BLOCK_K > full_to;
        for (var first = 0u; first < BLOCK_K; first += VALUE_KEYS) {
            // Others may still read the values before these. (The first time nobody reads `staged` any more.)
            workgroupBarrier();
            for (var e = thread; e < VALUE_KEYS * VALUE_DIM; e += THREADS) {
                let key = first_key + first + e / VALUE_DIM;
                let channel = e % VALUE_DIM;
                var value = 0.0;
                if (key < seen_to && channel < params.value_dim) {
                    let at = v_base + key_row(item, key) * params.v_token_stride + channel;
                    value = value_of(v[word_of(at, KV_TYPE)], at, KV_TYPE);
                }
                staged[e] = value;
            }
            // Values, and the first time the weights, are read by invocations that did not write them.
            workgroupBarrier();
            if (hides_some) {
                for (var j = 0u; j < VALUE_KEYS; j++) {
                    // @unroll
                    for (var r = 0u; r < ROWS; r++) {
                        let weight = weights[(first_row + r) * BLOCK_K + first + j];
                        // Whatever lies in a value that a row may not see, NaN included, must not reach the row.
                        if (!(weight < 0.0)) {
                            // @unroll
                            for (var c = 0u; c < COLUMNS; c++) {
                                sum[r * COLUMNS + c] = fma(
                                    weight,
                                    staged[j * VALUE_DIM + c / 2u * 16u + local.x * 2u + c % 2u],
                                    sum[r * COLUMNS + c],
                                );
                            }
                        }
                    }
                }
            } else {
                for (var j = 0u; j < VALUE_KEYS; j++) {
                    var weight = array<f32, ROWS>();
                    // @unroll
                    for (var r = 0u; r < ROWS; r++) {
                        weight[r] = weights[(first_row + r) * BLOCK_K + first + j];
                    }
                    // @unroll
                    for (var c = 0u; c < COLUMNS; c++) {
                        let value = staged[j * VALUE_DIM + c / 2u * 16u + local.x * 2u + c % 2u];
                        // @unroll
                        for (var r = 0u; r < ROWS; r++) {
                            sum[r * COLUMNS + c] = fma(weight[r], value, sum[r * COLUMNS + c]);
                        }
                    }
                }
            }
        }
    }

    // `partial` was last read before the barriers of the value loop; without a block it was never used.
    // @unroll
    for (var r = 0u; r < ROWS; r++) {
        partial[(first_row + r) * SIDE + local.x] = total[r];
    }
    // The eight invocations of a row add up each other's totals.
    workgroupBarrier();
    // @unroll
    for (var r = 0u; r < ROWS; r++) {
        let row = first_query + first_row + r;
        var row_total = 0.0;
        for (var i = 0u; i < SIDE; i++) {
            row_total = row_total + partial[(first_row + r) * SIDE + i];
        }
        // Rows past the end of a packed sequence belong to others.
        if (row < item.rows) {
            let base = params.out_offset + batch * params.out_batch_stride + head * params.out_head_stride
                + (item.q_start + row) * params.out_token_stride;
            // @unroll
            for (var c = 0u; c < COLUMNS; c += 2u) {
                let channel = c * SIDE + local.x * 2u;
                if (channel < params.value_dim) {
                    // A row that saw no key gives 0.
                    store_pair(
                        base + channel,
                        select(0.0, sum[r * COLUMNS + c] / row_total, seen[r]),
                        select(0.0, sum[r * COLUMNS + c + 1u] / row_total, seen[r]),
                        channel + 1u < params.value_dim,
                    );
                }
            }
            if (local.x == 0u) {
                store_lse(item, row, seen[r], highest[r], row_total);
            }
        }
    }
}

// attention_weights: w_ij = softmax_j(score_ij), the probabilities themselves (or the scores before them): the one
// result that grows with Tq * Tk, for those who want to look at it.
//
// One workgroup of 64 invocations computes one row: first the scores of all keys, which wait in the output
// itself, then their softmax. What a pair scores and whether it is seen: shared/pair, shared/item, rules/.
//
// q, k: (B, T, H or Hkv, D) by strides; weights: (B, H, Tq, Tk), f32, by strides (head, query and key are written,
// packed sequences as padded ones). params.out_* are the strides of weights: out_token_stride that of queries.
// Host: KV_TYPE (of k). stage: 0 scale * q.k, 1 softcap applied, 2 all rules applied (-infinity where hidden), 3 softmax.

@group(0) @binding(0)
var<storage, read> q: array<u32>;
@group(0) @binding(1)
var<storage, read> k: array<u32>;
@group(0) @binding(3)
var<storage, read_write> weights: array<u32>;
@group(0) @binding(5)
var<storage, read> tables: array<u32>;
@group(0) @binding(6)
var<uniform> params: AttentionParams;

const THREADS: u32 = 64u;
const PRODUCTS: u32 = 0u;
const CAPPED: u32 = 1u;
const MASKED_SCORES: u32 = 2u;
const HIDDEN: u32 = 0xff800000u;

var<workgroup> peaks: array<f32, THREADS>;
var<workgroup> peaks_seen: array<u32, THREADS>;
var<workgroup> totals: array<f32, THREADS>;

@compute @workgroup_size(THREADS)
fn attention_weights(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let number = workgroup_number(group, groups);
    if (number >= params.groups) {
        return;
    }
    let query = number % params.q_len;
    let head = (number / params.q_len) % params.heads;
    let batch = number / (params.q_len * params.heads);
    let item = item_at(batch, head);
    let first = key_first(item, query);
    let limit = key_limit(item, query);
    let there = query < item.q_len;

    let q_base = params.q_offset + batch * params.q_batch_stride + head * params.q_head_stride
        + (item.q_start + min(query, max(item.rows, 1u) - 1u)) * params.q_token_stride;
    let k_base = params.k_offset + batch * params.k_batch_stride + head / params.group * params.k_head_stride;
    let row = params.out_offset + batch * params.out_batch_stride + head * params.out_head_stride
        + query * params.out_token_stride;

    var peak = 0.0;
    var any = false;
    for (var key = thread; key < params.kv_len; key += THREADS) {
        var product = 0.0;
        // Keys past a packed sequence are not read: their memory is another's. (Where all are empty there is no query to read.)
        if (key < item.keys && params.q_total > 0u) {
            let k_row = k_base + key_row(item, key) * params.k_token_stride;
            for (var d = 0u; d < params.head_dim; d++) {
                let q_at = q_base + d;
                let k_at = k_row + d;
                let q_d = value_of(q[word_of(q_at, params.q_type)], q_at, params.q_type) * params.scale;
                product = fma(q_d, value_of(k[word_of(k_at, KV_TYPE)], k_at, KV_TYPE), product);
            }
        }
        var bits = HIDDEN;
        if (params.stage == PRODUCTS) {
            bits = bitcast<u32>(product);
        } else if (params.stage == CAPPED) {
            bits = bitcast<u32>(capped(product));
        } else if (key >= first && key < limit) {
            let pair = judge(item, product, query, key);
            if (pair.visible && !weighs_nothing(pair.score)) {
                bits = bitcast<u32>(pair.score);
                if (!any || pair.score > peak) {
                    peak = pair.score;
                    any = true;
                }
            }
        }
        weights[row + key * params.weights_key_stride] = bits;
    }
    peaks[thread] = peak;
    peaks_seen[thread] = u32(any);
    // Every invocation reads the peaks of all.
    workgroupBarrier();
    var highest = item.sink;
    var seen = item.has_sink && there;
    for (var i = 0u; i < THREADS; i++) {
        if (peaks_seen[i] != 0u && (!seen || peaks[i] > highest)) {
            highest = peaks[i];
            seen = true;
        }
    }

    let softmax = params.stage > MASKED_SCORES;
    var total = 0.0;
    for (var key = thread; key < params.kv_len; key += THREADS) {
        // Written by this very invocation.
        let bits = weights[row + key * params.weights_key_stride];
        if (softmax) {
            let weight = select(exp(bitcast<f32>(bits) - highest), 0.0, bits == HIDDEN);
            total = total + weight;
            weights[row + key * params.weights_key_stride] = bitcast<u32>(weight);
        }
    }
    totals[thread] = total;
    // Every invocation reads the totals of all.
    workgroupBarrier();
    var row_total = select(0.0, exp(item.sink - highest), item.has_sink);
    for (var i = 0u; i < THREADS; i++) {
        row_total = row_total + totals[i];
    }
    for (var key = thread; key < params.kv_len; key += THREADS) {
        if (softmax) {
            let at = row + key * params.weights_key_stride;
            // A row that saw no key has weights of 0.
            let weight = select(0.0, bitcast<f32>(weights[at]) / row_total, seen);
            weights[at] = bitcast<u32>(weight);
        }
    }
}

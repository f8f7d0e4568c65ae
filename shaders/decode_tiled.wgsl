// decode_tiled: attention of few queries over many keys, for GPUs: o_i = sum_j softmax_j(score_ij) v_j in one pass over
// one part of the keys.
//
// One workgroup of 64 invocations has ROWS rows that share a KV head (shared/share) and walks over its part of the keys
// BLOCK at a time. Scores: an invocation has one key of the block; k and q go through workgroup memory, CHUNK channels at
// a time, so that k is read along its channels. Values: an invocation has every 64th channel of the output, and reads
// each key's value there beside its neighbours. What a pair scores and whether it is seen: shared/pair, shared/item, rules/.
//
// q: (B, Tq, H, D), k: (B, Tk, Hkv, D), v: (B, Tk, Hkv, Dv), out: (B, Tq, H, Dv), lse: (B, H, Tq), all by strides; packed
// sequences have no B, pages are (P, page_size, Hkv, D). Where params.parts > 1, out and lse have a leading axis of parts.
// tables: lengths, starts, slopes, sinks, pages. Host: VALUE_DIM (Dv rounded up to a compiled size, a multiple of 64),
// KV_TYPE (of k and v: 0 f32, 1 f16, 2 bf16), ROWS. D is free: the walk over its chunks is a loop.
//
// No workgroup memory is read before it was written, so the driver need not clear it.

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

const THREADS: u32 = 64u;
const BLOCK: u32 = THREADS;
const CHUNK: u32 = 16u;
const COLUMNS: u32 = VALUE_DIM / THREADS;
// Peaks of a row: each of BLOCK / PEAKS keys.
const PEAKS: u32 = 8u;
// One more than the tile, so that invocations that read a column use different banks.
const K_STRIDE: u32 = CHUNK + 1u;
// Past the largest row of the output.
const TOTALS: u32 = 256u;
const HIDDEN: u32 = 0xff800000u;

// A tile of k, key by key; at the end a row of the output, and behind it each invocation's totals of up to 8 rows.
var<workgroup> staged: array<f32, BLOCK * K_STRIDE>;
var<workgroup> staged_q: array<f32, ROWS * CHUNK>;
// Of each row and key of the block, by their bits: the score, HIDDEN where it weighs nothing; then the weight, -1 where
// the row may not see the key.
var<workgroup> weights: array<u32, ROWS * BLOCK>;
var<workgroup> peaks: array<u32, ROWS * PEAKS>;
// Where the keys of the block lie.
var<workgroup> tokens: array<u32, BLOCK>;

@compute @workgroup_size(THREADS)
fn decode_tiled(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let number = workgroup_number(group, groups);
    if (number >= params.groups) {
        return;
    }
    let share = share_of(number);
    let first_item = row_item(share, share.first_row);
    let own_keys = keys_of(share, first_item, BLOCK);
    let last_query = max(first_item.q_len, 1u) - 1u;
    let k_base = params.k_offset + share.batch * params.k_batch_stride + share.kv_head * params.k_head_stride;
    let v_base = params.v_offset + share.batch * params.v_batch_stride + share.kv_head * params.v_head_stride;

    // Lavapipe compiles a kernel anew at every dispatch where a loop's end is nothing but a parameter. (There is always
    // some workgroup.)
    let depth = select(params.head_dim, 0u, groups.x == 0u);
    let value_channels = select(params.value_dim, 0u, groups.x == 0u);

    var item = array<Item, ROWS>();
    var from_key = array<u32, ROWS>();
    var limit = array<u32, ROWS>();
    // Rows past the end repeat the last query, and see nothing.
    var read_row = array<u32, ROWS>();
    var highest = array<f32, ROWS>();
    var seen = array<bool, ROWS>();
    // The sum of this invocation's own weights; the others' are added at the end.
    var total = array<f32, ROWS>();
    var sum = array<f32, ROWS * COLUMNS>();
    // @unroll
    for (var r = 0u; r < ROWS; r++) {
        item[r] = row_item(share, share.first_row + r);
        let own_query = query_of(share.first_row + r);
        from_key[r] = key_first(item[r], own_query);
        limit[r] = key_limit(item[r], own_query);
        read_row[r] = min(own_query, last_query);
        seen[r] = item[r].has_sink && own_query < item[r].q_len;
        highest[r] = select(0.0, item[r].sink, seen[r]);
        total[r] = select(0.0, 1.0, seen[r] && thread == 0u);
    }

    for (var first_key = own_keys.x; first_key < own_keys.y; first_key += BLOCK) {
        let keys = min(own_keys.y - first_key, BLOCK);
        let key = first_key + min(thread, keys - 1u);
        // Others may still read the places and the weights of the block before.
        workgroupBarrier();
        tokens[thread] = key_row(first_item, key);
        var score = array<f32, ROWS>();
        for (var chunk = 0u; chunk < depth; chunk += CHUNK) {
            // The places are read by invocations that did not write them; and others may still read the chunk before.
            workgroupBarrier();
            for (var e = thread; e < ROWS * CHUNK; e += THREADS) {
                let row = share.first_row + e / CHUNK;
                let channel = chunk + e % CHUNK;
                var value = 0.0;
                if (channel < params.head_dim) {
                    let at = params.q_offset + share.batch * params.q_batch_stride
                        + head_of(share, row) * params.q_head_stride
                        + (first_item.q_start + min(query_of(row), last_query)) * params.q_token_stride + channel;
                    value = value_of(q[word_of(at, params.q_type)], at, params.q_type) * params.scale;
                }
                staged_q[e] = value;
            }
            for (var e = thread; e < BLOCK * CHUNK; e += THREADS) {
                let channel = chunk + e % CHUNK;
                var value = 0.0;
                if (e / CHUNK < keys && channel < params.head_dim) {
                    let at = k_base + tokens[e / CHUNK] * params.k_token_stride + channel;
                    value = value_of(k[word_of(at, KV_TYPE)], at, KV_TYPE);
                }
                staged[e / CHUNK * K_STRIDE + e % CHUNK] = value;
            }
            // The tiles are read by invocations that did not write them.
            workgroupBarrier();
            for (var i = 0u; i < CHUNK; i++) {
                let k_i = staged[thread * K_STRIDE + i];
                // @unroll
                for (var r = 0u; r < ROWS; r++) {
                    score[r] = fma(staged_q[r * CHUNK + i], k_i, score[r]);
                }
            }
        }

        var visible = array<bool, ROWS>();
        // @unroll
        for (var r = 0u; r < ROWS; r++) {
            var bits = HIDDEN;
            if (thread < keys && key >= from_key[r] && key < limit[r]) {
                let pair = judge(item[r], score[r], read_row[r], key);
                visible[r] = pair.visible;
                score[r] = pair.score;
                if (pair.visible) {
                    bits = bitcast<u32>(pair.score);
                }
            }
            weights[r * BLOCK + thread] = bits;
        }
        // Scores are read by invocations that did not write them.
        workgroupBarrier();
        if (thread < ROWS * PEAKS) {
            var top = 0.0;
            var any = false;
            for (var i = 0u; i < BLOCK / PEAKS; i++) {
                let other = bitcast<f32>(weights[thread * (BLOCK / PEAKS) + i]);
                if (!weighs_nothing(other) && (!any || other > top)) {
                    top = other;
                    any = true;
                }
            }
            peaks[thread] = select(HIDDEN, bitcast<u32>(top), any);
        }
        // All read the peaks. The scores were read for the last time, so that weights may take their place.
        workgroupBarrier();
        // @unroll
        for (var r = 0u; r < ROWS; r++) {
            var top = highest[r];
            var any = seen[r];
            for (var i = 0u; i < PEAKS; i++) {
                let other = bitcast<f32>(peaks[r * PEAKS + i]);
                if (!weighs_nothing(other) && (!any || other > top)) {
                    top = other;
                    any = true;
                }
            }
            // Before the first key the sums are 0 and stay 0 (and an exponent of 0 cannot overflow).
            let shrink = exp(select(0.0, highest[r] - top, seen[r]));
            highest[r] = top;
            seen[r] = any;
            var weight = -1.0;
            total[r] = total[r] * shrink;
            if (visible[r]) {
                weight = select(exp(score[r] - top), 0.0, weighs_nothing(score[r]));
                total[r] = total[r] + weight;
            }
            weights[r * BLOCK + thread] = bitcast<u32>(weight);
            // @unroll
            for (var c = 0u; c < COLUMNS; c++) {
                sum[r * COLUMNS + c] = sum[r * COLUMNS + c] * shrink;
            }
        }
        // Weights are read by invocations that did not write them. (The peaks were read for the last time.)
        workgroupBarrier();
        for (var j = 0u; j < keys; j++) {
            let v_row = v_base + tokens[j] * params.v_token_stride;
            var value = array<f32, COLUMNS>();
            // @unroll
            for (var c = 0u; c < COLUMNS; c++) {
                let at = v_row + min(c * THREADS + thread, params.value_dim - 1u);
                value[c] = value_of(v[word_of(at, KV_TYPE)], at, KV_TYPE);
            }
            // @unroll
            for (var r = 0u; r < ROWS; r++) {
                let weight = bitcast<f32>(weights[r * BLOCK + j]);
                // Whatever lies in a value that a row may not see, NaN included, must not reach the row.
                if (!(weight < 0.0)) {
                    // @unroll
                    for (var c = 0u; c < COLUMNS; c++) {
                        sum[r * COLUMNS + c] = fma(weight, value[c], sum[r * COLUMNS + c]);
                    }
                }
            }
        }
    }

    // The tile of k was last read before three barriers of a block.
    // @unroll
    for (var r = 0u; r < ROWS; r++) {
        staged[TOTALS + r * THREADS + thread] = total[r];
    }
    // @unroll
    for (var r = 0u; r < ROWS; r++) {
        // Totals are read by invocations that did not write them; and others may still read the row before in `staged`.
        workgroupBarrier();
        var row_total = 0.0;
        for (var i = 0u; i < THREADS; i++) {
            row_total = row_total + staged[TOTALS + r * THREADS + i];
        }
        // A highest score of +infinity makes a NaN of the row, as inf - inf would; told by the exponent's bits and made
        // by setting one more, since compilers may take floats for finite.
        let bits = bitcast<u32>(highest[r]);
        let divisor = select(row_total, bitcast<f32>(bits | 0x400000u), ((bits >> 23u) & 0xffu) == 0xffu);
        // @unroll
        for (var c = 0u; c < COLUMNS; c++) {
            // A row that saw no key gives 0.
            staged[c * THREADS + thread] = select(0.0, sum[r * COLUMNS + c] / divisor, seen[r]);
        }
        // Two neighbouring channels, which two invocations made, are written by one.
        workgroupBarrier();
        let own_query = query_of(share.first_row + r);
        // Rows past the end of a packed sequence belong to others.
        if (own_query < item[r].rows) {
            let base = params.out_offset + share.part * params.out_part_stride + share.batch * params.out_batch_stride
                + item[r].head * params.out_head_stride + (item[r].q_start + own_query) * params.out_token_stride;
            for (var channel = 2u * thread; channel < value_channels; channel += 2u * THREADS) {
                store_pair(base + channel, staged[channel], staged[channel + 1u], channel + 1u < params.value_dim);
            }
            if (thread == 0u) {
                store_lse(item[r], own_query, seen[r], highest[r], divisor);
            }
        }
    }
}

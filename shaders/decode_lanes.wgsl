// decode_lanes: attention of few queries over many keys, for adapters that are a CPU underneath, whose lanes are SIMD
// lanes: o_i = sum_j softmax_j(score_ij) v_j in one pass over one part of the keys.
//
// One workgroup of LANES invocations has ROWS rows that share a KV head (shared/share) and walks over its part of the
// keys BLOCK at a time. Scores: a lane has FOUR keys of the block, each of whose channels it reads four at a time.
// Values: a lane has four neighbouring channels in each 4 * LANES of them, and reads every key's. Between the two the
// weights go through workgroup memory, once a block, so that only 1 / LANES of the output is kept by each lane. (For one
// row a whole row in each lane is faster: decode_rows.) What a
// pair scores and whether it is seen: shared/pair, shared/item, rules/.
//
// q: (B, Tq, H, D), k: (B, Tk, Hkv, D), v: (B, Tk, Hkv, Dv), out: (B, Tq, H, Dv), lse: (B, H, Tq), all by strides; packed
// sequences have no B, pages are (P, page_size, Hkv, D). Where params.parts > 1, out and lse have a leading axis of parts.
// tables: lengths, starts, slopes, sinks, pages. Host: HEAD_DIM (the larger of D and Dv rounded up to a compiled size),
// COLUMNS (HEAD_DIM / 32 rounded up), KV_TYPE (of k and v: 0 f32, 1 f16, 2 bf16), ROWS, and one of shared/fours_*.
//
// No workgroup memory is read before it was written, so the driver need not clear it.

@group(0) @binding(0)
var<storage, read> q: array<u32>;
@group(0) @binding(3)
var<storage, read_write> out: array<u32>;
@group(0) @binding(4)
var<storage, read_write> lse: array<u32>;
@group(0) @binding(5)
var<storage, read> tables: array<u32>;
@group(0) @binding(6)
var<uniform> params: AttentionParams;

const LANES: u32 = 8u;
const FOUR: u32 = 4u;
const BLOCK: u32 = FOUR * LANES;
const FOURS: u32 = HEAD_DIM / 4u;
const HIDDEN: u32 = 0xff800000u;

// q * scale, four channels at a time.
var<workgroup> staged: array<vec4<f32>, ROWS * FOURS>;
// What each lane knows of each row, by its bits: the highest score, HIDDEN where there is none; at the end the total.
var<workgroup> partial: array<u32, ROWS * LANES>;
// Weights of a lane's four keys; -1 where the row may not see the key.
var<workgroup> weights: array<vec4<f32>, ROWS * LANES>;
// Where a lane's four keys lie, if they lie in pages.
var<workgroup> tokens: array<vec4<u32>, LANES>;

fn q_one(base: u32, channel: u32) -> f32 {
    let at = base + min(channel, params.head_dim - 1u);
    let value = value_of(q[word_of(at, params.q_type)], at, params.q_type) * params.scale;
    return select(0.0, value, channel < params.head_dim);
}

@compute @workgroup_size(LANES)
fn decode_lanes(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let number = workgroup_number(group, groups);
    if (number >= params.groups) {
        return;
    }
    let share = share_of(number);
    let first_item = row_item(share, share.first_row);
    let own_keys = keys_of(share, first_item, BLOCK);
    let last_key = max(own_keys.y, 1u) - 1u;
    let last_query = max(first_item.q_len, 1u) - 1u;
    let k_base = params.k_offset + share.batch * params.k_batch_stride + share.kv_head * params.k_head_stride;
    let v_base = params.v_offset + share.batch * params.v_batch_stride + share.kv_head * params.v_head_stride;

    for (var e = lane; e < ROWS * FOURS; e += LANES) {
        let row = share.first_row + e / FOURS;
        let base = params.q_offset + share.batch * params.q_batch_stride + head_of(share, row) * params.q_head_stride
            + (first_item.q_start + min(query_of(row), last_query)) * params.q_token_stride;
        let channel = e % FOURS * 4u;
        staged[e] = vec4<f32>(
            q_one(base, channel),
            q_one(base, channel + 1u),
            q_one(base, channel + 2u),
            q_one(base, channel + 3u),
        );
    }
    // Every lane reads all of q.
    workgroupBarrier();
    var query = array<vec4<f32>, ROWS * FOURS>();
    // @unroll
    for (var d = 0u; d < ROWS * FOURS; d++) {
        query[d] = staged[d];
    }

    var item = array<Item, ROWS>();
    var from_key = array<u32, ROWS>();
    var limit = array<u32, ROWS>();
    // Rows past the end repeat the last query, and see nothing.
    var read_row = array<u32, ROWS>();
    var highest = array<f32, ROWS>();
    var seen = array<bool, ROWS>();
    // The sum of this lane's own weights; the other lanes' are added at the end.
    var total = array<f32, ROWS>();
    var sum = array<vec4<f32>, ROWS * COLUMNS>();
    // @unroll
    for (var r = 0u; r < ROWS; r++) {
        item[r] = row_item(share, share.first_row + r);
        let own_query = query_of(share.first_row + r);
        from_key[r] = key_first(item[r], own_query);
        limit[r] = key_limit(item[r], own_query);
        read_row[r] = min(own_query, last_query);
        seen[r] = item[r].has_sink && own_query < item[r].q_len;
        highest[r] = select(0.0, item[r].sink, seen[r]);
        total[r] = select(0.0, 1.0, seen[r] && lane == 0u);
    }

    for (var first_key = own_keys.x; first_key < own_keys.y; first_key += BLOCK) {
        var score = array<vec4<f32>, ROWS>();
        var visible = array<vec4<u32>, ROWS>();
        var peak = array<f32, ROWS>();
        var any = array<bool, ROWS>();
        var token = vec4<u32>();
        for (var s = 0u; s < FOUR; s++) {
            let there = first_key + s * LANES + lane <= last_key;
            let key = min(first_key + s * LANES + lane, last_key);
            let slot = vec4<u32>(0u, 1u, 2u, 3u) == vec4<u32>(s);
            let place = key_row(first_item, key);
            if (PAGED) {
                token = select(token, vec4<u32>(place), slot);
            }
            let k_row = k_base + place * params.k_token_stride;
            var product = array<vec4<f32>, ROWS>();
            // @unroll
            for (var d = 0u; d < FOURS; d++) {
                let k_d = k_four(k_row, d * 4u);
                // @unroll
                for (var r = 0u; r < ROWS; r++) {
                    product[r] = fma(query[r * FOURS + d], k_d, product[r]);
                }
            }
            // @unroll
            for (var r = 0u; r < ROWS; r++) {
                let whole = (product[r].x + product[r].y) + (product[r].z + product[r].w);
                let pair = judge(item[r], whole, read_row[r], key);
                let sees = there & pair.visible & (key >= from_key[r]) & (key < limit[r]);
                let counts = sees & !weighs_nothing(pair.score);
                peak[r] = select(peak[r], pair.score, counts & (!any[r] | (pair.score > peak[r])));
                any[r] = any[r] | counts;
                score[r] = select(score[r], vec4<f32>(pair.score), slot);
                visible[r] = select(visible[r], vec4<u32>(u32(sees)), slot);
            }
        }
        // @unroll
        for (var r = 0u; r < ROWS; r++) {
            partial[r * LANES + lane] = select(HIDDEN, bitcast<u32>(peak[r]), any[r]);
        }
        // Every lane reads the peaks of all. This also ends all reading of `weights` and `tokens` of the block before:
        // both may be written from here on.
        workgroupBarrier();
        if (PAGED) {
            tokens[lane] = token;
        }
        // @unroll
        for (var r = 0u; r < ROWS; r++) {
            var top = highest[r];
            var some = seen[r];
            // @unroll
            for (var i = 0u; i < LANES; i++) {
                let other = bitcast<f32>(partial[r * LANES + i]);
                let better = !weighs_nothing(other) & (!some | (other > top));
                top = select(top, other, better);
                some = some | better;
            }
            // Before the first key the sums are 0 and stay 0 (and an exponent of 0 cannot overflow).
            let shrink = exp(select(0.0, highest[r] - top, seen[r]));
            highest[r] = top;
            seen[r] = some;
            let nothing = bitcast<vec4<u32>>(score[r]) == vec4<u32>(HIDDEN);
            let weight = select(exp(score[r] - top), vec4<f32>(), nothing);
            let hidden = visible[r] == vec4<u32>();
            let added = select(weight, vec4<f32>(), hidden);
            total[r] = fma(total[r], shrink, (added.x + added.y) + (added.z + added.w));
            weights[lane * ROWS + r] = select(weight, vec4<f32>(-1.0), hidden);
            // @unroll
            for (var c = 0u; c < COLUMNS; c++) {
                sum[r * COLUMNS + c] = sum[r * COLUMNS + c] * shrink;
            }
        }
        // Every lane reads the weights and places of all keys. This also ends all reading of `partial`.
        workgroupBarrier();
        for (var i = 0u; i < LANES; i++) {
            var weight = array<vec4<f32>, ROWS>();
            // @unroll
            for (var r = 0u; r < ROWS; r++) {
                weight[r] = weights[i * ROWS + r];
            }
            var place = vec4<u32>();
            if (PAGED) {
                place = tokens[i];
            }
            // @unroll
            for (var s = 0u; s < FOUR; s++) {
                if (!PAGED) {
                    place[s] = key_row(first_item, min(first_key + s * LANES + i, last_key));
                }
                let v_row = v_base + place[s] * params.v_token_stride;
                // @unroll
                for (var c = 0u; c < COLUMNS; c++) {
                    let v_c = v_four(v_row, c * BLOCK + lane * 4u);
                    // @unroll
                    for (var r = 0u; r < ROWS; r++) {
                        // Whatever lies in a value that a row may not see, NaN included, must not reach that row.
                        let hidden = weight[r][s] < 0.0;
                        sum[r * COLUMNS + c] = fma(
                            vec4<f32>(select(weight[r][s], 0.0, hidden)),
                            select(v_c, vec4<f32>(), hidden),
                            sum[r * COLUMNS + c],
                        );
                    }
                }
            }
        }
    }

    // `partial` was last read before the second barrier of a block; without a block it was never used.
    // @unroll
    for (var r = 0u; r < ROWS; r++) {
        partial[r * LANES + lane] = bitcast<u32>(total[r]);
    }
    // The lanes of a row add up each other's totals.
    workgroupBarrier();
    // @unroll
    for (var r = 0u; r < ROWS; r++) {
        let row = share.first_row + r;
        let own_query = query_of(row);
        var row_total = 0.0;
        // @unroll
        for (var i = 0u; i < LANES; i++) {
            row_total = row_total + bitcast<f32>(partial[r * LANES + i]);
        }
        // Rows past the end of a packed sequence belong to others.
        if (own_query < item[r].rows) {
            // A highest score of +infinity makes a NaN of the row, as inf - inf would; told by the exponent's
            // bits and made by setting one more, since compilers may take floats for finite.
            let bits = bitcast<u32>(highest[r]);
            let divisor = select(row_total, bitcast<f32>(bits | 0x400000u), ((bits >> 23u) & 0xffu) == 0xffu);
            let base = params.out_offset + share.part * params.out_part_stride + share.batch * params.out_batch_stride
                + item[r].head * params.out_head_stride + (item[r].q_start + own_query) * params.out_token_stride;
            // @unroll
            for (var c = 0u; c < COLUMNS; c++) {
                // A row that saw no key gives 0.
                let result = select(vec4<f32>(), sum[r * COLUMNS + c] / divisor, seen[r]);
                let channel = c * BLOCK + lane * 4u;
                if (channel < params.value_dim) {
                    store_pair(base + channel, result.x, result.y, channel + 1u < params.value_dim);
                }
                if (channel + 2u < params.value_dim) {
                    store_pair(base + channel + 2u, result.z, result.w, channel + 3u < params.value_dim);
                }
            }
            if (lane == 0u) {
                store_lse(item[r], own_query, seen[r], highest[r], divisor);
            }
        }
    }
}

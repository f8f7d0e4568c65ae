// decode_rows: attention of single queries over many keys, for adapters that are a CPU underneath, whose lanes are SIMD
// lanes: o = sum_j softmax_j(score_j) v_j in one pass over one part of the keys.
//
// One workgroup of LANES invocations has one row (shared/share, ROWS is 1). Each lane walks over keys of its own, every
// LANES-th of the part, with a highest score, a total and a sum of all channels of its own, so that nothing is exchanged
// between keys; at the end the lanes are put together by their highest scores, as parts of the keys are. More rows would
// need as many sums in each lane: decode_lanes is for them. What a pair scores and whether it is seen: shared/pair,
// shared/item, rules/.
//
// q: (B, Tq, H, D), k: (B, Tk, Hkv, D), v: (B, Tk, Hkv, Dv), out: (B, Tq, H, Dv), lse: (B, H, Tq), all by strides; packed
// sequences have no B, pages are (P, page_size, Hkv, D). Where params.parts > 1, out and lse have a leading axis of parts.
// tables: lengths, starts, slopes, sinks, pages. Host: HEAD_DIM (the larger of D and Dv rounded up to a compiled size),
// COLUMNS (HEAD_DIM / 32 rounded up), KV_TYPE (of k and v: 0 f32, 1 f16, 2 bf16), ROWS, and one of shared/fours_*.
//
// A lane's highest score starts with the first key that counts (or with the sink), not with a stand-in for -infinity:
// `total` is 0 exactly until then. It is at least 1 afterwards (the highest key adds exp(0)) unless NaN.
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
const FOURS: u32 = HEAD_DIM / 4u;
// Cache lines of a row of f32.
const LINES: u32 = HEAD_DIM / 16u;

// q * scale, four channels at a time.
var<workgroup> staged: array<vec4<f32>, FOURS>;
// What each lane has at the end.
var<workgroup> peaks: array<f32, LANES>;
var<workgroup> totals: array<f32, LANES>;
var<workgroup> sums: array<vec4<f32>, FOURS * LANES>;

fn q_one(base: u32, channel: u32) -> f32 {
    let at = base + min(channel, params.head_dim - 1u);
    let value = value_of(q[word_of(at, params.q_type)], at, params.q_type) * params.scale;
    return select(0.0, value, channel < params.head_dim);
}

@compute @workgroup_size(LANES)
fn decode_rows(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let number = workgroup_number(group, groups);
    if (number >= params.groups) {
        return;
    }
    let share = share_of(number);
    let item = row_item(share, share.first_row);
    let own_query = query_of(share.first_row);
    // Rows past the end repeat the last query, and see nothing.
    let read_row = min(own_query, max(item.q_len, 1u) - 1u);
    // The keys that this one row may see by position: no other test of that is needed.
    let own_keys = keys_of(share, item, LANES);
    let last_key = max(own_keys.y, 1u) - 1u;
    let q_base = params.q_offset + share.batch * params.q_batch_stride + item.head * params.q_head_stride
        + (item.q_start + read_row) * params.q_token_stride;
    let k_base = params.k_offset + share.batch * params.k_batch_stride + share.kv_head * params.k_head_stride;
    let v_base = params.v_offset + share.batch * params.v_batch_stride + share.kv_head * params.v_head_stride;

    for (var e = lane; e < FOURS; e += LANES) {
        staged[e] = vec4<f32>(
            q_one(q_base, e * 4u),
            q_one(q_base, e * 4u + 1u),
            q_one(q_base, e * 4u + 2u),
            q_one(q_base, e * 4u + 3u),
        );
    }
    // Every lane reads all of q. (The lanes need not be one subgroup.)
    workgroupBarrier();
    var query = array<vec4<f32>, FOURS>();
    // @unroll
    for (var d = 0u; d < FOURS; d++) {
        query[d] = staged[d];
    }

    // The sink counts once: in the first lane.
    let sinks = item.has_sink && own_query < item.q_len && lane == 0u;
    var highest = select(0.0, item.sink, sinks);
    var total = select(0.0, 1.0, sinks);
    var sum = array<vec4<f32>, FOURS>();

    for (var first_key = own_keys.x; first_key < own_keys.y; first_key += LANES) {
        let there = first_key + lane <= last_key;
        let key = min(first_key + lane, last_key);
        let place = key_row(item, key);
        let k_row = k_base + place * params.k_token_stride;
        let v_row = v_base + place * params.v_token_stride;

        // The first four channels of every cache line come first: what is not in the cache is asked for all at once.
        var product = vec4<f32>();
        // @unroll
        for (var i = 0u; i < FOURS; i++) {
            product = fma(
                query[i % LINES * 4u + i / LINES],
                k_four(k_row, (i % LINES * 4u + i / LINES) * 4u),
                product,
            );
        }
        let pair = judge(item, (product.x + product.y) + (product.z + product.w), read_row, key);
        let visible = there & pair.visible;

        // What the key adds, and what shrinks what was there: one of the two is 1, the other exp of the distance between
        // the score and the highest before it. The first key is its own highest; a score of NaN or infinity still makes
        // a NaN of it.
        let before = select(highest, pair.score, total == 0.0);
        let distance = pair.score - before;
        let factor = select(exp(-abs(distance)), 1.0, distance == 0.0);
        let rises = pair.score > before;
        let counts = visible & !weighs_nothing(pair.score);
        let weight = select(0.0, select(factor, 1.0, rises), counts);
        let shrink = select(1.0, factor, rises & counts);
        highest = select(highest, select(before, pair.score, rises), counts);
        total = select(total, fma(total, shrink, weight), counts);

        // @unroll
        for (var i = 0u; i < FOURS; i++) {
            let v_d = v_four(v_row, (i % LINES * 4u + i / LINES) * 4u);
            // Whatever lies in a value that the row may not see, NaN included, must not reach it.
            sum[i % LINES * 4u + i / LINES] = fma(
                vec4<f32>(weight),
                select(vec4<f32>(), v_d, visible),
                sum[i % LINES * 4u + i / LINES] * shrink,
            );
        }
    }

    peaks[lane] = highest;
    totals[lane] = total;
    // @unroll
    for (var d = 0u; d < FOURS; d++) {
        sums[d * LANES + lane] = sum[d];
    }
    // Every lane reads what all have. Nothing is written to workgroup memory afterwards, and none of this was read before.
    workgroupBarrier();
    var top = 0.0;
    var some = false;
    // @unroll
    for (var i = 0u; i < LANES; i++) {
        let better = !(totals[i] == 0.0) & (!some | (peaks[i] > top));
        top = select(top, peaks[i], better);
        some = some | better;
    }
    // What each lane weighs beside the one with the highest score; a lane without a key nothing.
    var part = array<f32, LANES>();
    var row_total = 0.0;
    // @unroll
    for (var i = 0u; i < LANES; i++) {
        let none = totals[i] == 0.0;
        part[i] = select(exp(select(peaks[i] - top, 0.0, none)), 0.0, none);
        row_total = fma(part[i], totals[i], row_total);
    }
    // Rows past the end of a packed sequence belong to others.
    if (own_query < item.rows) {
        // A highest score of +infinity makes a NaN of the row, as inf - inf would; told by the exponent's
        // bits and made by setting one more, since compilers may take floats for finite.
        let bits = bitcast<u32>(top);
        let divisor = select(row_total, bitcast<f32>(bits | 0x400000u), ((bits >> 23u) & 0xffu) == 0xffu);
        let base = params.out_offset + share.part * params.out_part_stride + share.batch * params.out_batch_stride
            + item.head * params.out_head_stride + (item.q_start + own_query) * params.out_token_stride;
        // @unroll
        for (var c = 0u; c < COLUMNS; c++) {
            let channel = (c * LANES + lane) * 4u;
            var row_sum = vec4<f32>();
            // @unroll
            for (var i = 0u; i < LANES; i++) {
                row_sum = fma(vec4<f32>(part[i]), sums[min(c * LANES + lane, FOURS - 1u) * LANES + i], row_sum);
            }
            // A row that saw no key gives 0.
            let result = select(vec4<f32>(), row_sum / divisor, some);
            if (channel < params.value_dim) {
                store_pair(base + channel, result.x, result.y, channel + 1u < params.value_dim);
            }
            if (channel + 2u < params.value_dim) {
                store_pair(base + channel + 2u, result.z, result.w, channel + 3u < params.value_dim);
            }
        }
        if (lane == 0u) {
            store_lse(item, own_query, some, top, divisor);
        }
    }
}

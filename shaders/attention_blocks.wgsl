// attention_blocks: o_i = sum_j softmax_j(score_ij) v_j, for large heads on adapters that are a CPU underneath, by code that
// does not grow with the head as that of attention_lanes does.
//
// One invocation owns ROWS query rows. Keys are taken KEYS at a time: their scores, then their weights, stay in private
// memory, all of whose indices are constants, while loops go over the channels, four at a time: of q, which is read where it
// lies, and of the sums, which lie in workgroup memory. So what is loaded of a row serves KEYS keys, and what is loaded of a
// key the rows of all lanes: of LANES keys each lane loads one, and broadcasts hand them round (shared/spread_subgroup). No
// barrier. One workgroup of LANES invocations covers ROWS * LANES queries of one head of one batch item; row r of an
// invocation is LANES queries after row r - 1. What a pair scores and whether it is seen: shared/pair, shared/item, rules/.
//
// q, k: (B, T, H or Hkv, D), v: (B, Tk, Hkv, Dv), out: (B, Tq, H, Dv), lse: (B, H, Tq), all by strides; packed
// sequences have no B. tables: lengths, starts, slopes, sinks. Memory beyond the operands: none.
// Host: HEAD_DIM (the larger of D and Dv rounded up to a compiled size; memory alone depends on it), KV_TYPE (of k and v:
// 0 f32, 1 f16, 2 bf16), ROWS (1, 2 or 4), KEYS (a multiple of 32), LANES, SPREAD (LANES), one each of shared/fours_* and
// q_out_*, and shared/spread_subgroup.
//
// Measured on lavapipe against attention_lanes: docs/performance.md.

@group(0) @binding(4)
var<storage, read_write> lse: array<u32>;
@group(0) @binding(5)
var<storage, read> tables: array<u32>;
@group(0) @binding(6)
var<uniform> params: AttentionParams;

const QUERIES: u32 = ROWS * LANES;
// (Of shared/spread_subgroup.)
const TOGETHER: u32 = 1u;
// Groups of keys of a block, of which each lane loads one.
const GROUPS: u32 = KEYS / LANES;
// Pairs of a key of a block and a row of a lane: key by key, of each all rows.
const PAIRS: u32 = KEYS * ROWS;
// Words that have a bit for each key of a block.
const WORDS: u32 = KEYS / 32u;
// The sign of 0 marks the weight of a hidden key. What it is multiplied by and added to stays as it is, -0 too. (WGSL lets a compiler
// lose that sign; those of the adapters that this form is for keep it, as tests with NaN behind masks show.)
const HIDDEN: u32 = 0x80000000u;

// The sums of each four channels and row; behind them, where rules look at single pairs, the scores of a block. A lane reads
// only what it wrote itself: no barrier.
const SUMS: u32 = ROWS * HEAD_DIM / 4u;
var<workgroup> staged: array<vec4<f32>, (SUMS + u32(HIDES_SINGLE_KEYS) * PAIRS / 4u) * LANES>;

// exp(-distance), and exactly 1 where there is none.
fn weight_below(distance: f32) -> f32 {
    return select(exp(-distance), 1.0, distance == 0.0);
}

// A value, or 0 where its weight is that of a hidden key.
fn if_seen(value: vec4<f32>, weight: f32) -> vec4<f32> {
    let hidden = bitcast<u32>(bitcast<i32>(weight) >> 31u);
    return bitcast<vec4<f32>>(bitcast<vec4<u32>>(value) & vec4<u32>(~hidden));
}

// scale * q.k of all pairs of a block, whose rows of q and k begin there.
fn products(q_rows: array<u32, ROWS>, k_rows: array<u32, GROUPS>) -> array<f32, PAIRS> {
    var product = array<f32, PAIRS>();
    for (var channel = 0u; channel < params.head_dim; channel += 4u) {
        var query = array<vec4<f32>, ROWS>();
        // @unroll
        for (var r = 0u; r < ROWS; r++) {
            query[r] = q_four(q_rows[r], channel);
        }
        // @unroll
        for (var g = 0u; g < GROUPS; g++) {
            let k_fours = spread(k_four(k_rows[g], channel));
            // @unroll
            for (var i = 0u; i < LANES; i++) {
                let k_i = k_fours[i];
                // @unroll
                for (var r = 0u; r < ROWS; r++) {
                    var sum = product[(g * LANES + i) * ROWS + r];
                    sum = fma(query[r].x, k_i.x, sum);
                    sum = fma(query[r].y, k_i.y, sum);
                    sum = fma(query[r].z, k_i.z, sum);
                    product[(g * LANES + i) * ROWS + r] = fma(query[r].w, k_i.w, sum);
                }
            }
        }
    }
    return product;
}

// Adds the values of a block, whose rows of v begin there, to the sums, each by its weight, and shrinks what was there.
fn add_values(
    weight: array<f32, PAIRS>,
    shrink: array<f32, ROWS>,
    v_rows: array<u32, GROUPS>,
    all_seen: bool,
    lane: u32,
) {
    // Twice, once where every row sees every key. (llvmpipe executes both sides of a branch, but no loop that goes round 0 times.)
    // @unroll
    for (var hides = 0u; hides < 2u; hides++) {
        let start = select(params.value_dim, 0u, all_seen == (hides == 0u));
        for (var channel = start; channel < params.value_dim; channel += 4u) {
            let at = channel / 4u * ROWS * LANES + lane;
            var sum = array<vec4<f32>, ROWS>();
            // @unroll
            for (var r = 0u; r < ROWS; r++) {
                sum[r] = staged[at + r * LANES] * shrink[r];
            }
            // @unroll
            for (var g = 0u; g < GROUPS; g++) {
                let v_fours = spread(v_four(v_rows[g], channel));
                // @unroll
                for (var i = 0u; i < LANES; i++) {
                    // @unroll
                    for (var r = 0u; r < ROWS; r++) {
                        let w = weight[(g * LANES + i) * ROWS + r];
                        // Whatever lies in a value that a row may not see, NaN included, must not reach that row.
                        let v_i = select(v_fours[i], if_seen(v_fours[i], w), hides == 1u);
                        sum[r] = fma(vec4<f32>(w), v_i, sum[r]);
                    }
                }
            }
            // @unroll
            for (var r = 0u; r < ROWS; r++) {
                staged[at + r * LANES] = sum[r];
            }
        }
    }
}

@compute @workgroup_size(LANES)
fn attention_blocks(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let number = workgroup_number(group, groups);
    if (number >= params.groups) {
        return;
    }
    // The last queries first: under a causal rule they have the most keys, and short work fills the end.
    let first_query = (params.q_tiles - 1u - number % params.q_tiles) * QUERIES;
    let head = (number / params.q_tiles) % params.heads;
    let batch = number / (params.q_tiles * params.heads);
    let item = item_at(batch, head);
    // Queries of this workgroup that the item has; the others see no key. (At least one row is there to be read.)
    let end_query = min(first_query + QUERIES, item.q_len);
    let last_query = max(end_query, 1u) - 1u;

    // Keys that some query of this workgroup may see, by position; and among them those that each may see.
    let seen_from = key_first(item, first_query);
    let seen_to = max(select(0u, key_limit(item, last_query), first_query < end_query), seen_from);
    let all_from = key_first(item, last_query);
    let all_to = select(key_limit(item, first_query), 0u, HIDES_SINGLE_KEYS);

    // Rows past the end repeat the last one. Nobody sees what they come to.
    var from_key = array<u32, ROWS>();
    var limit = array<u32, ROWS>();
    var read_row = array<u32, ROWS>();
    var q_rows = array<u32, ROWS>();
    var row = array<Online, ROWS>();
    // @unroll
    for (var r = 0u; r < ROWS; r++) {
        let own_query = first_query + r * LANES + lane;
        from_key[r] = key_first(item, own_query);
        limit[r] = key_limit(item, own_query);
        read_row[r] = min(own_query, last_query);
        q_rows[r] = params.q_offset + batch * params.q_batch_stride + head * params.q_head_stride
            + (item.q_start + read_row[r]) * params.q_token_stride;
        let sinks = item.has_sink && own_query < item.q_len;
        row[r] = Online(select(0.0, item.sink, sinks), select(0.0, 1.0, sinks));
    }
    for (var e = 0u; e < SUMS; e++) {
        staged[e * LANES + lane] = vec4<f32>();
    }
    let kv_head = head / params.group;
    let k_base = params.k_offset + batch * params.k_batch_stride + kv_head * params.k_head_stride;
    let v_base = params.v_offset + batch * params.v_batch_stride + kv_head * params.v_head_stride;
    var k_rows = array<u32, GROUPS>();
    var v_rows = array<u32, GROUPS>();
    var shrink = array<f32, ROWS>();

    for (var first_key = seen_from; first_key < seen_to; first_key += KEYS) {
        // @unroll
        for (var g = 0u; g < GROUPS; g++) {
            // Past the end it is the last key again, which no row sees then.
            let place = key_row(item, min(first_key + g * LANES + lane, seen_to - 1u));
            k_rows[g] = k_base + place * params.k_token_stride;
            v_rows[g] = v_base + place * params.v_token_stride;
        }
        var score = products(q_rows, k_rows);

        // Which keys the rules leave to each row, a bit each.
        var seen = array<u32, ROWS * WORDS>();
        if (HIDES_SINGLE_KEYS) {
            // @unroll
            for (var e = 0u; e < PAIRS; e += 4u) {
                staged[(SUMS + e / 4u) * LANES + lane] = vec4<f32>(score[e], score[e + 1u], score[e + 2u], score[e + 3u]);
            }
            // @unroll
            for (var word = 0u; word < WORDS; word++) {
                for (var first = 0u; first < 32u; first += 4u / ROWS) {
                    let at = (SUMS + (word * 32u + first) * ROWS / 4u) * LANES + lane;
                    var four = staged[at];
                    // @unroll
                    for (var e = 0u; e < 4u; e++) {
                        let bit = first + e / ROWS;
                        let key = min(first_key + word * 32u + bit, seen_to - 1u);
                        let pair = judge(item, four[e], read_row[e % ROWS], key);
                        four[e] = pair.score;
                        seen[e % ROWS * WORDS + word] |= u32(pair.visible) << bit;
                    }
                    staged[at] = four;
                }
            }
            // @unroll
            for (var e = 0u; e < PAIRS; e += 4u) {
                let four = staged[(SUMS + e / 4u) * LANES + lane];
                score[e] = four.x;
                score[e + 1u] = four.y;
                score[e + 2u] = four.z;
                score[e + 3u] = four.w;
            }
        }

        // Weights in the scores' place, and what shrinks everything that was there.
        // @unroll
        for (var r = 0u; r < ROWS; r++) {
            // The keys that the row sees by position, counted from the block's first.
            let before = max(from_key[r], first_key) - first_key;
            let count = max(limit[r], first_key + before) - first_key - before;
            var sees = array<bool, KEYS>();
            var highest = row[r].highest;
            var any = row[r].total != 0.0;
            // @unroll
            for (var j = 0u; j < KEYS; j++) {
                let s = score[j * ROWS + r];
                sees[j] = (j - before < count) & (!HIDES_SINGLE_KEYS | ((seen[r * WORDS + j / 32u] >> (j % 32u)) & 1u) == 1u);
                // The first key is its own highest; a score of NaN or infinity still makes a NaN of the row.
                let rises = sees[j] & !weighs_nothing(s) & (!any | s > highest);
                highest = select(highest, s, rises);
                any = any | rises;
            }
            shrink[r] = select(weight_below(highest - row[r].highest), 1.0, row[r].total == 0.0);
            var total = row[r].total * shrink[r];
            // @unroll
            for (var j = 0u; j < KEYS; j++) {
                let s = score[j * ROWS + r];
                let weight = select(weight_below(highest - s), 0.0, weighs_nothing(s));
                score[j * ROWS + r] = select(bitcast<f32>(HIDDEN), weight, sees[j]);
                total += score[j * ROWS + r];
            }
            row[r] = Online(highest, total);
        }
        add_values(score, shrink, v_rows, (all_from <= first_key) & (first_key + KEYS <= all_to), lane);
    }

    // @unroll
    for (var r = 0u; r < ROWS; r++) {
        let own_query = first_query + r * LANES + lane;
        // A row that saw no key gives 0. (Not `total != 0.0`, which is false for NaN where comparisons are ordered.)
        let none = row[r].total == 0.0 || own_query >= item.q_len;
        let divisor = divisor_of(row[r]);
        // Rows past the end of a packed sequence belong to others.
        if (own_query < item.rows) {
            store_lse(item, own_query, !none, row[r].highest, divisor);
            let base = params.out_offset + batch * params.out_batch_stride + head * params.out_head_stride
                + (item.q_start + own_query) * params.out_token_stride;
            for (var channel = 0u; channel < params.value_dim; channel += 4u) {
                let sum = staged[(channel / 4u * ROWS + r) * LANES + lane];
                store_out(base, channel, select(sum / divisor, vec4<f32>(), none));
            }
        }
    }
}

// attention_lanes: o_i = sum_j softmax_j(score_ij) v_j in one pass (online softmax), for
// adapters that are a CPU underneath, whose lanes are SIMD lanes.
//
// One invocation owns ROWS query rows: their q and their sums stay in private memory. Keys and values are loaded once for
// all lanes, four or eight channels at a time (shared/fours_*, eights_*), and handed round (shared/spread_*): loads, not
// arithmetic, are what takes time there. No barrier. One workgroup of LANES invocations covers ROWS * LANES queries of
// one head of one batch item; row r of an invocation is LANES queries after row r - 1. Keys are taken KEYS at a time:
// first those that every row sees by position, without a test, then the others. What a pair scores and whether it is
// seen: shared/pair, shared/item, rules/. The softmax: shared/online.
//
// q, k: (B, T, H or Hkv, D), v: (B, Tk, Hkv, Dv), out: (B, Tq, H, Dv), lse: (B, H, Tq), all by strides; packed
// sequences have no B. tables: lengths, starts, slopes, sinks. Memory beyond the operands: none.
// Host: HEAD_DIM (the larger of D and Dv rounded up to a compiled size; channels past params.head_dim and
// params.value_dim count as 0), KV_TYPE (of k and v: 0 f32, 1 f16, 2 bf16), ROWS, LANES, SPREAD (fours of a row that are
// handed round at once: LANES or, if they are fewer, all), TOGETHER (rows that are loaded at once: as many as SPREAD leaves
// lanes for, twice as many with eights_*, KEYS at most), one each of shared/fours_* or eights_*, q_out_*, spread_*, rows_in_*
// and rows_out_*.
//
// Measured on lavapipe against the kernel before it, which read k and v value by value at addresses that the lanes
// share and rescaled every sum at every key: docs/performance.md.

@group(0) @binding(4)
var<storage, read_write> lse: array<u32>;
@group(0) @binding(5)
var<storage, read> tables: array<u32>;
@group(0) @binding(6)
var<uniform> params: AttentionParams;

const FOURS: u32 = HEAD_DIM / 4u;
const QUERIES: u32 = ROWS * LANES;
// Keys of one step.
const KEYS: u32 = 2u;

// The rows of q and of the output that a workgroup has.
struct Block {
    first_query: u32,
    last_query: u32,
    // Rows that the item has in memory.
    rows: u32,
    // Where its row 0 begins, of q and of the output.
    q: u32,
    out: u32,
}

// Rows past the end repeat the last one. Nobody sees what they come to.
fn load_four(block: Block, row: u32, four: u32) -> vec4<f32> {
    let query = min(block.first_query + row, block.last_query);
    return q_four(block.q + query * params.q_token_stride, four * 4u);
}

// Rows past the end of a packed sequence belong to others.
fn store_four(block: Block, row: u32, four: u32, value: vec4<f32>) {
    let query = block.first_query + row;
    if (query < block.rows) {
        store_out(block.out + query * params.out_token_stride, four * 4u, value);
    }
}

// Where a key's row of k and of v begins, from the head's first.
fn k_row(item: Item, key: u32) -> u32 {
    return key_row(item, key) * params.k_token_stride;
}

fn v_row(item: Item, key: u32) -> u32 {
    return key_row(item, key) * params.v_token_stride;
}

// Those of a step that are loaded at once.
fn rows_from(rows: array<u32, KEYS>, first: u32) -> array<u32, TOGETHER> {
    var some = array<u32, TOGETHER>();
    // @unroll
    for (var j = 0u; j < TOGETHER; j++) {
        some[j] = rows[first + j];
    }
    return some;
}

// scale * q.k of each row and each of the keys whose rows of k these are.
fn products(query: ptr<function, array<vec4<f32>, ROWS * FOURS>>, k_rows: array<u32, KEYS>, lane: u32) -> array<f32, ROWS * KEYS> {
    var product = array<f32, ROWS * KEYS>();
    // @unroll
    for (var first = 0u; first < FOURS; first += SPREAD) {
        var k_fours = array<array<vec4<f32>, TOGETHER * SPREAD>, KEYS / TOGETHER>();
        // @unroll
        for (var j = 0u; j < KEYS / TOGETHER; j++) {
            k_fours[j] = k_spread(rows_from(k_rows, j * TOGETHER), first, lane);
        }
        // @unroll
        for (var i = 0u; i < SPREAD; i++) {
            // @unroll
            for (var j = 0u; j < KEYS; j++) {
                let k_i = k_fours[j / TOGETHER][j % TOGETHER * SPREAD + i];
                // @unroll
                for (var r = 0u; r < ROWS; r++) {
                    let q_i = (*query)[r * FOURS + first + i];
                    var sum = product[r * KEYS + j];
                    sum = fma(q_i.x, k_i.x, sum);
                    sum = fma(q_i.y, k_i.y, sum);
                    sum = fma(q_i.z, k_i.z, sum);
                    product[r * KEYS + j] = fma(q_i.w, k_i.w, sum);
                }
            }
        }
    }
    return product;
}

// Adds the values of the keys whose rows of v these are to the sums, each by its weight, and shrinks what was there.
fn add_values(
    sum: ptr<function, array<vec4<f32>, ROWS * FOURS>>,
    v_rows: array<u32, KEYS>,
    weight: array<f32, ROWS * KEYS>,
    shrink: array<f32, ROWS>,
    visible: array<bool, ROWS * KEYS>,
    lane: u32,
) {
    // @unroll
    for (var first = 0u; first < FOURS; first += SPREAD) {
        var v_fours = array<array<vec4<f32>, TOGETHER * SPREAD>, KEYS / TOGETHER>();
        // @unroll
        for (var j = 0u; j < KEYS / TOGETHER; j++) {
            v_fours[j] = v_spread(rows_from(v_rows, j * TOGETHER), first, lane);
        }
        // @unroll
        for (var i = 0u; i < SPREAD; i++) {
            // @unroll
            for (var r = 0u; r < ROWS; r++) {
                var all = (*sum)[r * FOURS + first + i] * shrink[r];
                // @unroll
                for (var j = 0u; j < KEYS; j++) {
                    // Whatever lies in a value that a row may not see, NaN included, must not reach that row.
                    let v_j = v_fours[j / TOGETHER][j % TOGETHER * SPREAD + i];
                    let v_i = select(vec4<f32>(), v_j, visible[r * KEYS + j]);
                    all = fma(vec4<f32>(weight[r * KEYS + j]), v_i, all);
                }
                (*sum)[r * FOURS + first + i] = all;
            }
        }
    }
}

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
    // The last queries first: under a causal rule they have the most keys, and short work fills the end.
    let first_query = (params.q_tiles - 1u - number % params.q_tiles) * QUERIES;
    let head = (number / params.q_tiles) % params.heads;
    let batch = number / (params.q_tiles * params.heads);
    let item = item_at(batch, head);
    // Queries of this workgroup that the item has; the others see no key. (At least one row is there to be read.)
    let end_query = min(first_query + QUERIES, item.q_len);
    let last_query = max(end_query, 1u) - 1u;

    // Keys that some query of this workgroup may see, by position; and among them whole steps of keys that each may see.
    let seen_from = key_first(item, first_query);
    let seen_to = max(select(0u, key_limit(item, last_query), first_query < end_query), seen_from);
    let all_from = min(max(key_first(item, last_query), seen_from), seen_to);
    let all_keys = max(min(key_limit(item, first_query), seen_to), all_from) - all_from;
    let all_to = all_from + select(all_keys / KEYS * KEYS, 0u, HIDES_SINGLE_KEYS);

    let block = Block(
        first_query,
        last_query,
        item.rows,
        params.q_offset + batch * params.q_batch_stride + head * params.q_head_stride + item.q_start * params.q_token_stride,
        params.out_offset + batch * params.out_batch_stride + head * params.out_head_stride
            + item.q_start * params.out_token_stride,
    );
    var query = array<vec4<f32>, ROWS * FOURS>();
    rows_in(block, &query, lane);
    var from_key = array<u32, ROWS>();
    var limit = array<u32, ROWS>();
    var read_row = array<u32, ROWS>();
    var row = array<Online, ROWS>();
    var sum = array<vec4<f32>, ROWS * FOURS>();
    // @unroll
    for (var r = 0u; r < ROWS; r++) {
        let own_query = first_query + r * LANES + lane;
        from_key[r] = key_first(item, own_query);
        limit[r] = key_limit(item, own_query);
        read_row[r] = min(own_query, last_query);
        let sinks = item.has_sink && own_query < item.q_len;
        row[r] = Online(select(0.0, item.sink, sinks), select(0.0, 1.0, sinks));
    }
    let kv_head = head / params.group;
    let k_base = params.k_offset + batch * params.k_batch_stride + kv_head * params.k_head_stride;
    let v_base = params.v_offset + batch * params.v_batch_stride + kv_head * params.v_head_stride;
    var k_rows = array<u32, KEYS>();
    var v_rows = array<u32, KEYS>();
    var weight = array<f32, ROWS * KEYS>();
    var shrink = array<f32, ROWS>();
    var visible = array<bool, ROWS * KEYS>();

    // Keys that every row sees, and that no rule of pairs changes.
    // @unroll
    for (var i = 0u; i < ROWS * KEYS; i++) {
        visible[i] = true;
    }
    for (var key = all_from; key < all_to; key += KEYS) {
        // @unroll
        for (var j = 0u; j < KEYS; j++) {
            k_rows[j] = k_base + k_row(item, key + j);
            v_rows[j] = v_base + v_row(item, key + j);
        }
        let product = products(&query, k_rows, lane);
        // @unroll
        for (var r = 0u; r < ROWS; r++) {
            var together = 1.0;
            // @unroll
            for (var j = 0u; j < KEYS; j++) {
                let weighed = weigh(row[r], product[r * KEYS + j], true);
                row[r] = weighed.row;
                // @unroll
                for (var i = 0u; i < j; i++) {
                    weight[r * KEYS + i] = weight[r * KEYS + i] * weighed.shrink;
                }
                weight[r * KEYS + j] = weighed.weight;
                together = together * weighed.shrink;
            }
            shrink[r] = together;
        }
        add_values(&sum, v_rows, weight, shrink, visible, lane);
    }

    // The other keys: those before, then those after.
    let before = all_from - seen_from;
    let others = before + (seen_to - all_to);
    for (var other = 0u; other < others; other += KEYS) {
        var keys = array<u32, KEYS>();
        // @unroll
        for (var j = 0u; j < KEYS; j++) {
            // Past the end it is the last key again, which no row sees then.
            let place = min(other + j, others - 1u);
            keys[j] = place + select(all_to - before, seen_from, place < before);
            k_rows[j] = k_base + k_row(item, keys[j]);
            v_rows[j] = v_base + v_row(item, keys[j]);
        }
        let product = products(&query, k_rows, lane);
        // @unroll
        for (var r = 0u; r < ROWS; r++) {
            var together = 1.0;
            // @unroll
            for (var j = 0u; j < KEYS; j++) {
                let pair = judge(item, product[r * KEYS + j], read_row[r], keys[j]);
                let sees = pair.visible & (other + j < others) & (keys[j] >= from_key[r]) & (keys[j] < limit[r]);
                let weighed = weigh(row[r], pair.score, sees);
                row[r] = weighed.row;
                // @unroll
                for (var i = 0u; i < j; i++) {
                    weight[r * KEYS + i] = weight[r * KEYS + i] * weighed.shrink;
                }
                weight[r * KEYS + j] = weighed.weight;
                visible[r * KEYS + j] = sees;
                together = together * weighed.shrink;
            }
            shrink[r] = together;
        }
        add_values(&sum, v_rows, weight, shrink, visible, lane);
    }

    // @unroll
    for (var r = 0u; r < ROWS; r++) {
        let own_query = first_query + r * LANES + lane;
        // A row that saw no key gives 0. (Not `total != 0.0`, which is false for NaN where comparisons are ordered.)
        let none = row[r].total == 0.0 || own_query >= item.q_len;
        let divisor = divisor_of(row[r]);
        // @unroll
        for (var d = 0u; d < FOURS; d++) {
            sum[r * FOURS + d] = select(sum[r * FOURS + d] / divisor, vec4<f32>(), none);
        }
        // Rows past the end of a packed sequence belong to others.
        if (own_query < item.rows) {
            store_lse(item, own_query, !none, row[r].highest, divisor);
        }
    }
    rows_out(block, &sum, lane);
}

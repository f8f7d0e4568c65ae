// attention_matrices: o_i = sum_j softmax_j(score_ij) v_j in one pass (online softmax) by matrix units, for GPUs that have them.
//
// One workgroup of 128 invocations covers 32 queries of one head of one batch item and walks over the keys 32 at a time, as attention_tiled does;
// q, k and v are f16. Both products are made by matrix units from tiles in workgroup memory (shared/matrices), in f32, and go through
// workgroup memory to the invocations that own them: of each query four neighbours own eight keys each, and later eight columns of each slice
// of 32. What lies between the products, and the sums, which shrink when a row's highest score rises, is f32 in private memory.
// What a pair scores and whether it is seen: shared/pair, shared/item, rules/.
//
// Weights are f16 in two parts, whole and remainder, so that the sums are as exact as those of f32: 22 bits of each. They are 2^15 times as
// large as they should be, so that small ones keep their bits too.
//
// A matrix unit multiplies what is hidden by 0, which is NaN where the value is none or is infinite. So values that are no numbers count as 0
// there, and where a block has some, each is added by itself to the rows that see it. (An infinity under a weight of less than 2^-39 makes NaN.)
//
// q, k: (B, T, H or Hkv, D), v: (B, Tk, Hkv, Dv), out: (B, Tq, H, Dv), lse: (B, H, Tq), all by strides; packed
// sequences have no B. Where params.parts > 1, out and lse have a leading axis of parts of the keys. tables: lengths, starts, slopes,
// sinks. Memory beyond the operands: none.
// Host: VALUE_DIM (Dv rounded up to a multiple of 32; channels past params.value_dim are computed and not stored), CHUNKS (of 64 channels of q and k), KV_TYPE (1),
// DOWN (fours of queries: 8), and how four channels of k and v are read (shared/fours_f16*).
//
// No stand-in for -infinity: a row carries a rank, and 0 where it has seen no key. No workgroup memory is read before
// it was written, so the driver need not clear it.
//
// Nothing ran on matrix units yet: what they compute is counted on in tests by a stand-in for shared/matrices in plain arithmetic, and a device's own are off until they
// have shown that they are right (`Gpu::qualify`).
enable f16;

@group(0) @binding(0)
var<storage, read> q: array<f16>;
@group(0) @binding(3)
var<storage, read_write> out: array<u32>;
@group(0) @binding(4)
var<storage, read_write> lse: array<u32>;
@group(0) @binding(5)
var<storage, read> tables: array<u32>;
@group(0) @binding(6)
var<uniform> params: AttentionParams;

const THREADS: u32 = 128u;
const BLOCK_Q: u32 = 4u * DOWN;
const BLOCK_K: u32 = 32u;
const CHUNK: u32 = 64u;
const SLICE: u32 = 32u;
const SLICES: u32 = VALUE_DIM / SLICE;
// Tiles of a product.
const TILES_ACROSS: u32 = 2u;
const TILES: u32 = 4u;
// Keys, and columns of a slice, of each invocation.
const OWN: u32 = 8u;
// Rows of tiles begin on 16 bytes, and on other banks than those beside them.
const TILE_STRIDE: u32 = CHUNK + 8u;
const WEIGHT_STRIDE: u32 = BLOCK_K + 8u;
const PRODUCT_STRIDE: u32 = BLOCK_K + 4u;
const K_START: u32 = BLOCK_Q * TILE_STRIDE;
const LOW_START: u32 = BLOCK_Q * WEIGHT_STRIDE;
const V_START: u32 = 2u * BLOCK_Q * WEIGHT_STRIDE;
// Fours of a chunk of q, of a chunk of k and of a slice of values that each invocation moves. (Those of values are two neighbouring keys'.)
const Q_MOVES: u32 = 4u;
const K_MOVES: u32 = 4u;
const V_MOVES: u32 = 2u;
const WEIGHT_FACTOR: f32 = 32768.0;

// Tiles of q and k; afterwards weights, their remainders, and a slice of values.
var<workgroup> staged: array<f16, (BLOCK_Q + BLOCK_K) * TILE_STRIDE>;
// A product, on its way to the invocations.
var<workgroup> products: array<f32, BLOCK_Q * PRODUCT_STRIDE>;
// What the invocations of a row tell each other: the ranks of their peaks, and at the end the totals, as bits.
var<workgroup> exchange: array<u32, THREADS>;
// A bit for each own key that is hidden from the query.
var<workgroup> hides: array<u32, THREADS>;
// Whether some value of the block is no finite number.
var<workgroup> unsound: atomic<u32>;

// A whole number that grows with the score, and can be 0 for none: a score of -infinity weighs nothing, and is none.
fn rank_of(score: f32) -> u32 {
    let bits = bitcast<u32>(score);
    let rank = select(bits | 0x80000000u, ~bits, (bits >> 31u) != 0u);
    // (The lowest one is of NaN, which is some score.)
    return select(max(rank, 1u), 0u, weighs_nothing(score));
}

fn score_of(rank: u32) -> f32 {
    return bitcast<f32>(select(~rank, rank & 0x7fffffffu, (rank >> 31u) != 0u));
}

// Four channels of q (channels past the head are anything).
fn q_four(start: u32, channel: u32) -> vec4<f16> {
    let last = params.head_dim - 1u;
    return vec4<f16>(
        q[start + min(channel, last)],
        q[start + min(channel + 1u, last)],
        q[start + min(channel + 2u, last)],
        q[start + min(channel + 3u, last)],
    );
}

// Channels past the head are 0.
fn within_head(four: vec4<f16>, channel: u32) -> vec4<f16> {
    let there = vec4<u32>(channel, channel + 1u, channel + 2u, channel + 3u) < vec4<u32>(params.head_dim);
    return select(vec4<f16>(), four, there);
}

// Told by bits, since compilers may take floats for finite.
fn are_finite(four: vec4<f16>) -> vec4<bool> {
    return (bitcast<vec4<u32>>(vec4<f32>(four)) & vec4<u32>(0x7f800000u)) < vec4<u32>(0x7f800000u);
}

fn stage(at: u32, four: vec4<f16>) {
    staged[at] = four.x;
    staged[at + 1u] = four.y;
    staged[at + 2u] = four.z;
    staged[at + 3u] = four.w;
}

@compute @workgroup_size(THREADS)
fn attention_matrices(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
    @builtin(subgroup_id) subgroup: u32,
    @builtin(num_subgroups) subgroups: u32,
) {
    let number = workgroup_number(group, groups);
    if (number >= params.groups) {
        return;
    }
    // Parts of the keys of the same queries are neighbours.
    let keys_part = number % params.parts;
    let tile_number = number / params.parts;
    // Under a causal mask the last queries see the most keys: what takes longest starts first.
    let tile = tile_number % params.q_tiles;
    let first_query = select(tile, params.q_tiles - 1u - tile, params.window_right >= 0) * BLOCK_Q;
    let head = (tile_number / params.q_tiles) % params.heads;
    let batch = tile_number / (params.q_tiles * params.heads);
    var item = item_at(batch, head);
    item.part = keys_part;
    // A sink counts in the first part alone.
    item.has_sink = item.has_sink && keys_part == 0u;
    // Queries of this workgroup that the item has; the others see no key. (At least one row is there to be read.)
    let end_query = min(first_query + BLOCK_Q, item.q_len);
    let last_query = max(end_query, 1u) - 1u;

    // Keys that some query of this workgroup may see, and those that every one of them may, by position.
    // Of them each part has an equal number of blocks (the last ones fewer).
    let keys_from = key_first(item, first_query);
    let keys_to = max(select(0u, key_limit(item, last_query), first_query < end_query), keys_from);
    let own_blocks = ((keys_to - keys_from + BLOCK_K - 1u) / BLOCK_K + params.parts - 1u) / params.parts;
    let seen_from = min(keys_from + keys_part * own_blocks * BLOCK_K, keys_to);
    let seen_to = min(seen_from + own_blocks * BLOCK_K, keys_to);
    let full_from = key_first(item, last_query);
    // (What rows past the item's own see is not stored.)
    let full_to = select(0u, key_limit(item, first_query), end_query >= min(first_query + BLOCK_Q, item.rows));

    let kv_head = head / params.group;
    let q_base = params.q_offset + batch * params.q_batch_stride + head * params.q_head_stride
        + item.q_start * params.q_token_stride;
    let k_base = params.k_offset + batch * params.k_batch_stride + kv_head * params.k_head_stride;
    let v_base = params.v_offset + batch * params.v_batch_stride + kv_head * params.v_head_stride;
    // This invocation's query, and which of its four this is.
    let own = thread / 4u;
    let part = thread % 4u;
    let query = first_query + own;

    // Of the highest score so far; 0: none.
    var highest = 0u;
    // The sum of this invocation's own weights; the others of the row are added at the end.
    var total = 0.0;
    var sum = array<f32, SLICES * OWN>();
    if (item.has_sink) {
        let sinks = query < item.q_len;
        highest = select(0u, rank_of(item.sink), sinks);
        total = select(0.0, 1.0, sinks && part == 0u);
    }

    // What this invocation stages of q, for all keys.
    let four_of_chunk = thread % 16u;
    var own_q = array<vec4<f16>, CHUNKS * Q_MOVES>();
    // @unroll
    for (var m = 0u; m < CHUNKS * Q_MOVES; m++) {
        let at = min(first_query + m % Q_MOVES * 8u + thread / 16u, last_query);
        let channel = m / Q_MOVES * CHUNK + four_of_chunk * 4u;
        own_q[m] = within_head(q_four(q_base + at * params.q_token_stride, channel), channel);
    }

    for (var first_key = seen_from; first_key < seen_to; first_key += BLOCK_K) {
        var score = array<f32, OWN>();
        // Where the rows of its keys begin.
        var start = array<u32, K_MOVES>();
        // @unroll
        for (var m = 0u; m < K_MOVES; m++) {
            // Past the end another key stands in, which no query sees there.
            let key = min(first_key + m * 8u + thread / 16u, seen_to - 1u);
            start[m] = k_base + key_row(item, key) * params.k_token_stride;
        }
        // @unroll
        for (var chunk = 0u; chunk < CHUNKS; chunk++) {
            var next = array<vec4<f16>, K_MOVES>();
            // @unroll
            for (var m = 0u; m < K_MOVES; m++) {
                let channel = chunk * CHUNK + four_of_chunk * 4u;
                next[m] = within_head(k_four_unmasked(start[m], channel), channel);
            }
            // Others may still read the weights of the block before, and `unsound`, where they add values by themselves.
            workgroupBarrier();
            // @unroll
            for (var m = 0u; m < Q_MOVES; m++) {
                stage((m * 8u + thread / 16u) * TILE_STRIDE + four_of_chunk * 4u, own_q[chunk * Q_MOVES + m]);
            }
            // @unroll
            for (var m = 0u; m < K_MOVES; m++) {
                stage(K_START + (m * 8u + thread / 16u) * TILE_STRIDE + four_of_chunk * 4u, next[m]);
            }
            if (thread == 0u) {
                atomicStore(&unsound, 0u);
            }
            // The tiles are read by invocations that did not write them.
            workgroupBarrier();
            multiply_queries_and_keys(subgroup, subgroups);
            // The products are read by invocations that did not write them.
            workgroupBarrier();
            // @unroll
            for (var c = 0u; c < OWN; c++) {
                score[c] += products[own * PRODUCT_STRIDE + part * OWN + c];
            }
        }

        // Uniform: whether some query of the workgroup may not see some key of the block.
        let hides_some = HIDES_SINGLE_KEYS || first_key < full_from || first_key + BLOCK_K > full_to;
        // A bit a key.
        var hidden = 0u;
        var peak = 0u;
        // @unroll
        for (var c = 0u; c < OWN; c++) {
            score[c] = score[c] * params.scale;
        }
        if (hides_some) {
            let from_key = key_first(item, query);
            let limit = key_limit(item, query);
            // Rules are asked about pairs that are there, whatever their answer counts for.
            let asked = min(query, last_query);
            // @unroll
            for (var c = 0u; c < OWN; c++) {
                let key = first_key + part * OWN + c;
                let pair = judge(item, score[c], asked, min(key, seen_to - 1u));
                let seen = pair.visible & (key >= from_key) & (key < limit);
                hidden |= select(1u << c, 0u, seen);
                score[c] = pair.score;
                peak = max(peak, select(0u, rank_of(pair.score), seen));
            }
        } else {
            // @unroll
            for (var c = 0u; c < OWN; c++) {
                peak = max(peak, rank_of(score[c]));
            }
        }
        // Nobody reads `exchange` of the block before since the barriers of the chunks.
        exchange[thread] = peak;
        hides[thread] = hidden;
        // The invocations of a row read each other's peaks.
        workgroupBarrier();

        var top = highest;
        // @unroll
        for (var i = 0u; i < 4u; i++) {
            top = max(top, exchange[own * 4u + i]);
        }
        // Before the first key the sums are 0 and stay 0 (and an exponent of 0 cannot overflow).
        let shrink = exp(select(0.0, score_of(highest) - score_of(top), highest != 0u));
        highest = top;
        total = total * shrink;
        // @unroll
        for (var c = 0u; c < SLICES * OWN; c++) {
            sum[c] = sum[c] * shrink;
        }
        // @unroll
        for (var c = 0u; c < OWN; c++) {
            let seen = (hidden & (1u << c)) == 0u;
            // What is hidden weighs 0, whatever its score is.
            let weight = select(0.0, exp(score[c] - score_of(top)), seen & !weighs_nothing(score[c]));
            total = total + weight;
            let high = f16(weight * WEIGHT_FACTOR);
            // (Nobody reads the tiles of q and k, which lay there, since the barrier after their product.)
            staged[own * WEIGHT_STRIDE + part * OWN + c] = high;
            staged[LOW_START + own * WEIGHT_STRIDE + part * OWN + c] = f16(weight * WEIGHT_FACTOR - f32(high));
        }

        // @unroll
        for (var s = 0u; s < SLICES; s++) {
            var values = array<vec4<f16>, V_MOVES>();
            // @unroll
            for (var m = 0u; m < V_MOVES; m++) {
                // Past the end another key stands in, which no query sees there.
                let key = min(first_key + thread / 8u * 2u + m, seen_to - 1u);
                values[m] = v_four(v_base + key_row(item, key) * params.v_token_stride, s * SLICE + thread % 8u * 4u);
            }
            // (Nobody reads values of the slice before, or the tiles before them, since the barrier after their product.)
            // @unroll
            for (var m = 0u; m < V_MOVES; m++) {
                let finite = are_finite(values[m]);
                if (!all(finite)) {
                    atomicOr(&unsound, 1u);
                }
                values[m] = select(vec4<f16>(), values[m], finite);
            }
            // Column by column, so that matrix units load neighbours.
            // @unroll
            for (var f = 0u; f < 4u; f++) {
                let at = V_START + (thread % 8u * 4u + f) * WEIGHT_STRIDE + thread / 8u * 2u;
                staged[at] = values[0u][f];
                staged[at + 1u] = values[1u][f];
            }
            // Weights and values are read by invocations that did not write them.
            workgroupBarrier();
            multiply_weights_and_values(subgroup, subgroups);
            // These products are read by invocations that did not write them.
            workgroupBarrier();
            // @unroll
            for (var c = 0u; c < OWN; c++) {
                sum[s * OWN + c] = fma(products[own * PRODUCT_STRIDE + part * OWN + c], 1.0 / WEIGHT_FACTOR, sum[s * OWN + c]);
            }
            // (Whoever is ahead may have set it for the next slice: then nothing is found here.)
            if (atomicLoad(&unsound) != 0u) {
                for (var j = 0u; j < BLOCK_K; j++) {
                    let key = first_key + j;
                    let seen = ((hides[own * 4u + j / OWN] >> (j % OWN)) & 1u) == 0u;
                    if (seen && key < seen_to) {
                        let at = own * WEIGHT_STRIDE + j;
                        let weight = (f32(staged[at]) + f32(staged[LOW_START + at])) / WEIGHT_FACTOR;
                        let from_row = v_base + key_row(item, key) * params.v_token_stride;
                        // @unroll
                        for (var f = 0u; f < OWN; f += 4u) {
                            let four = v_four(from_row, s * SLICE + part * OWN + f);
                            let finite = are_finite(four);
                            let wide = vec4<f32>(four);
                            // @unroll
                            for (var c = 0u; c < 4u; c++) {
                                if (!finite[c]) {
                                    sum[s * OWN + f + c] = fma(weight, wide[c], sum[s * OWN + f + c]);
                                }
                            }
                        }
                    }
                }
            }
        }
    }

    // (Nobody reads the peaks of the last block since the barriers of its values.)
    exchange[thread] = bitcast<u32>(total);
    // The invocations of a row add up each other's totals.
    workgroupBarrier();
    var row_total = 0.0;
    // @unroll
    for (var i = 0u; i < 4u; i++) {
        row_total += bitcast<f32>(exchange[own * 4u + i]);
    }
    let seen = highest != 0u;
    // Rows past the end of a packed sequence belong to others.
    if (query < item.rows) {
        let base = params.out_offset + keys_part * params.out_part_stride + batch * params.out_batch_stride
            + head * params.out_head_stride + (item.q_start + query) * params.out_token_stride;
        // @unroll
        for (var c = 0u; c < SLICES * OWN; c += 2u) {
            let channel = c / OWN * SLICE + part * OWN + c % OWN;
            if (channel < params.value_dim) {
                // A row that saw no key gives 0.
                store_pair(
                    base + channel,
                    select(0.0, sum[c] / row_total, seen),
                    select(0.0, sum[c + 1u] / row_total, seen),
                    channel + 1u < params.value_dim,
                );
            }
        }
        if (part == 0u) {
            store_lse(item, query, seen, score_of(highest), row_total);
        }
    }
}

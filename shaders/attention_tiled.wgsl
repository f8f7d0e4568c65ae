// attention_tiled: o_i = sum_j softmax_j(score_ij) v_j in one pass (online softmax), for GPUs.
//
// One workgroup of ACROSS x DOWN invocations covers BLOCK_Q queries of one head of one batch item and walks over the
// keys BLOCK_K at a time. Scores of a block are made from tiles of q and k in workgroup memory, CHUNK channels at a time,
// channel by channel; each invocation owns four queries by KEYS keys of them, and later the same four queries by
// VALUE_DIM / ACROSS channels of the output, four neighbours at a time. Weights go through workgroup memory key by key,
// the keys that each invocation has in one vector at a time (SLICE). Keys that no query of the workgroup may see are skipped, blocks
// that all of them see whole are not tested pair by pair, and where later queries see more keys they come first.
// What a pair scores and whether it is seen: shared/pair, shared/item, rules/.
//
// q, k: (B, T, H or Hkv, D), v: (B, Tk, Hkv, Dv), out: (B, Tq, H, Dv), lse: (B, H, Tq), all by strides; packed
// sequences have no B. Where params.parts > 1, out and lse have a leading axis of parts of the keys, which fill a GPU that a few
// queries of few heads would leave idle. tables: lengths, starts, slopes, sinks. Memory beyond the operands: none.
// Host: VALUE_DIM (Dv rounded up to a compiled size, a multiple of 4 * ACROSS; channels past params.value_dim are computed and
// not stored), KV_TYPE (of k and v: 0 f32, 1 f16, 2 bf16), ACROSS and DOWN (8 or more), KEYS (a multiple of 4), VALUE_KEYS (keys whose values fit `staged` at once; a multiple of 4 that divides SLICE, as many fours for each
// invocation), and how four
// channels of k and v are read (shared/fours_*), and what tiles and values are kept as (shared/tiles_*). D is free: the walk over its chunks is a loop.
//
// No stand-in for -infinity: a row carries a rank, and 0 where it has seen no key. No workgroup memory is read before
// it was written, so the driver need not clear it.
//
// Against the kernel before it (four by four pairs an invocation, from single words), by AMD's open compiler for RDNA2 and RDNA3, 64 channels:
// 10.7 multiply-adds for each access of workgroup memory in both products instead of 2.9 and 6.4; 97 and 99 % of the vector
// arithmetic of their loops instead of 99 and 84 %; between them the peaks of four rows by 8 reads instead of 64. With subgroups 9 of about 400
// accesses a block would go: not tried. Reading the next chunk (or the next values) ahead was tried: it takes 16 registers and spills
// at 128 channels.

@group(0) @binding(3)
var<storage, read_write> out: array<u32>;
@group(0) @binding(4)
var<storage, read_write> lse: array<u32>;
@group(0) @binding(5)
var<storage, read> tables: array<u32>;
@group(0) @binding(6)
var<uniform> params: AttentionParams;

const THREADS: u32 = ACROSS * DOWN;
const ROWS: u32 = 4u;
// Rows whose pairs are judged at once. Rules that do arithmetic or branch for each pair take one row after the other: written out for all
// pairs, they were what compilers take longest for (SwiftShader minutes and gigabytes).
const ROWS_JUDGED: u32 = 1u + 3u * PLAIN_SCORES * UNRULED;
const BLOCK_Q: u32 = DOWN * ROWS;
const BLOCK_K: u32 = ACROSS * KEYS;
const CHUNK: u32 = 16u;
const COLUMNS: u32 = VALUE_DIM / ACROSS;
const SLICE: u32 = 4u * ACROSS;
// In fours.
const CHUNK_FOURS: u32 = CHUNK / 4u;
const Q_FOURS: u32 = DOWN;
const K_FOURS: u32 = BLOCK_K / 4u;
const KEY_FOURS: u32 = KEYS / 4u;
const V_FOURS: u32 = VALUE_DIM / 4u;
const COLUMN_FOURS: u32 = COLUMNS / 4u;
const K_START: u32 = CHUNK * Q_FOURS;
// Blocks of four queries (or keys) by four channels, and how many of them each invocation moves at most; and fours of values.
const Q_BLOCKS: u32 = Q_FOURS * CHUNK_FOURS;
const BLOCKS: u32 = Q_BLOCKS + K_FOURS * CHUNK_FOURS;
const ROUNDED_UP: u32 = BLOCKS + THREADS - 1u;
const MOVES: u32 = ROUNDED_UP / THREADS;
const VALUE_MOVES: u32 = VALUE_KEYS * V_FOURS / THREADS;

// Tiles of q and k, channel by channel, four queries or keys each (see `place`); afterwards the values of VALUE_KEYS keys.
var<workgroup> staged: array<Four, max(K_START + CHUNK * K_FOURS, VALUE_KEYS * V_FOURS)>;
// What invocations tell each other of their four queries, as bits: the weights of a slice of keys, key by key (see `place`), negative
// where the query may not see the key; before them the ranks of the peaks, and at the end the totals.
var<workgroup> exchange: array<vec4<u32>, SLICE * Q_FOURS>;

// Where four neighbours lie within a channel (or a key): eight invocations that write blocks beside each other use
// different banks, and so do eight that read one channel. `turn` is the same for four channels (or keys).
fn place(four: u32, turn: u32) -> u32 {
    return four ^ (turn % 8u);
}

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

// Four channels of four queries (or keys), which begin there; channels past the head are anything.
fn block_at(of_q: bool, start: vec4<u32>, channel: u32) -> array<Four, 4> {
    if (!of_q) {
        return array<Four, 4>(
            k_four_unmasked(start.x, channel),
            k_four_unmasked(start.y, channel),
            k_four_unmasked(start.z, channel),
            k_four_unmasked(start.w, channel),
        );
    }
    return q_block(start, channel);
}

@compute @workgroup_size(ACROSS, DOWN)
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
    // Parts of the keys of the same queries are neighbours.
    let part = number % params.parts;
    let tile_number = number / params.parts;
    // Under a causal mask the last queries see the most keys: what takes longest starts first.
    let tile = tile_number % params.q_tiles;
    let first_query = select(tile, params.q_tiles - 1u - tile, params.window_right >= 0) * BLOCK_Q;
    let head = (tile_number / params.q_tiles) % params.heads;
    let batch = tile_number / (params.q_tiles * params.heads);
    var item = item_at(batch, head);
    item.part = part;
    // A sink counts in the first part alone.
    item.has_sink = item.has_sink && part == 0u;
    // Queries of this workgroup that the item has; the others see no key. (At least one row is there to be read.)
    let end_query = min(first_query + BLOCK_Q, item.q_len);
    let last_query = max(end_query, 1u) - 1u;

    // Keys that some query of this workgroup may see, and those that every one of them may, by position.
    // Of them each part has an equal number of blocks (the last ones fewer).
    let keys_from = key_first(item, first_query);
    let keys_to = max(select(0u, key_limit(item, last_query), first_query < end_query), keys_from);
    let own_blocks = ((keys_to - keys_from + BLOCK_K - 1u) / BLOCK_K + params.parts - 1u) / params.parts;
    let seen_from = min(keys_from + part * own_blocks * BLOCK_K, keys_to);
    let seen_to = min(seen_from + own_blocks * BLOCK_K, keys_to);
    let full_from = key_first(item, last_query);
    // (What rows past the item's own see is not stored.)
    let full_to = select(0u, key_limit(item, first_query), end_query >= min(first_query + BLOCK_Q, item.rows));

    let kv_head = head / params.group;
    let q_base = params.q_offset + batch * params.q_batch_stride + head * params.q_head_stride
        + item.q_start * params.q_token_stride;
    let k_base = params.k_offset + batch * params.k_batch_stride + kv_head * params.k_head_stride;
    let v_base = params.v_offset + batch * params.v_batch_stride + kv_head * params.v_head_stride;
    // This invocation's queries.
    let first_row = first_query + local.y * ROWS;

    // Of the highest score so far; 0: none.
    var highest = vec4<u32>();
    // The sum of this invocation's own weights; the others of the row are added at the end.
    var total = vec4<f32>();
    var sum = array<vec4<f32>, ROWS * COLUMN_FOURS>();
    if (item.has_sink) {
        // @unroll
        for (var r = 0u; r < ROWS; r++) {
            let sinks = first_row + r < item.q_len;
            highest[r] = select(0u, rank_of(item.sink), sinks);
            total[r] = select(0.0, 1.0, sinks && local.x == 0u);
        }
    }

    // What this invocation moves of q and k: its blocks' first channel.
    let channel = thread % CHUNK_FOURS * 4u;
    for (var first_key = seen_from; first_key < seen_to; first_key += BLOCK_K) {
        // Where its blocks' rows begin.
        var start = array<vec4<u32>, MOVES>();
        // @unroll
        for (var m = 0u; m < MOVES; m++) {
            let block = m * THREADS + thread;
            // @unroll
            for (var i = 0u; i < 4u; i++) {
                if (block < Q_BLOCKS) {
                    let row = min(first_query + block / CHUNK_FOURS * 4u + i, last_query);
                    start[m][i] = q_base + row * params.q_token_stride;
                } else {
                    // Past the end another key stands in, which no query sees there.
                    let key = min(first_key + (block - Q_BLOCKS) / CHUNK_FOURS * 4u + i, seen_to - 1u);
                    start[m][i] = k_base + key_row(item, key) * params.k_token_stride;
                }
            }
        }
        // Four neighbouring keys a vector.
        var score = array<vec4<f32>, ROWS * KEY_FOURS>();
        for (var chunk = 0u; chunk < params.head_dim; chunk += CHUNK) {
            // All of them are read before any is waited for.
            var next = array<array<Four, 4>, MOVES>();
            // @unroll
            for (var m = 0u; m < MOVES; m++) {
                next[m] = block_at(m * THREADS + thread < Q_BLOCKS, start[m], chunk + channel);
            }
            if (chunk + CHUNK > params.head_dim) {
                // Channels past the head are 0, whatever was read in their place.
                let there = vec4<u32>(channel, channel + 1u, channel + 2u, channel + 3u) < vec4<u32>(params.head_dim - chunk);
                // @unroll
                for (var m = 0u; m < MOVES; m++) {
                    // @unroll
                    for (var i = 0u; i < 4u; i++) {
                        next[m][i] = select(Four(), next[m][i], there);
                    }
                }
            }
            // Others may still read `staged`: values of the block before, or the chunk before.
            workgroupBarrier();
            // @unroll
            for (var m = 0u; m < MOVES; m++) {
                let block = m * THREADS + thread;
                let of_q = block < Q_BLOCKS;
                let four = select(block - Q_BLOCKS, block, of_q) / CHUNK_FOURS;
                let stride = select(K_FOURS, Q_FOURS, of_q);
                let to = select(K_START, 0u, of_q) + channel * stride + place(four, channel / 2u);
                if (block < BLOCKS) {
                    // @unroll
                    for (var i = 0u; i < 4u; i++) {
                        staged[to + i * stride] = staged_as(of_q, Four(next[m][0u][i], next[m][1u][i], next[m][2u][i], next[m][3u][i]));
                    }
                }
            }
            // The tiles are read by invocations that did not write them.
            workgroupBarrier();
            for (var channel = 0u; channel < CHUNK; channel += 4u) {
                let q_from = channel * Q_FOURS + place(local.y, channel / 2u);
                let k_from = K_START + channel * K_FOURS + place(local.x, channel / 2u);
                // @unroll
                for (var i = 0u; i < 4u; i++) {
                    let q_i = vec4<f32>(staged[q_from + i * Q_FOURS]);
                    // @unroll
                    for (var c = 0u; c < KEY_FOURS; c++) {
                        let k_i = vec4<f32>(staged[k_from + i * K_FOURS + c * ACROSS]);
                        // @unroll
                        for (var r = 0u; r < ROWS; r++) {
                            score[r * KEY_FOURS + c] = fma(vec4<f32>(q_i[r]), k_i, score[r * KEY_FOURS + c]);
                        }
                    }
                }
            }
        }

        if (SCALES_PRODUCTS) {
            // @unroll
            for (var s = 0u; s < ROWS * KEY_FOURS; s++) {
                score[s] = score[s] * params.scale;
            }
        }
        // Uniform: whether some query of the workgroup may not see some key of the block.
        let hides_some = HIDES_SINGLE_KEYS || first_key < full_from || first_key + BLOCK_K > full_to;
        // A bit a key of each query. (Four words, since SwiftShader does not come to an end with one of all 32 bits.)
        var hidden = array<u32, ROWS>();
        var peak = vec4<u32>();
        if (hides_some) {
            for (var turn = 0u; turn < ROWS; turn += ROWS_JUDGED) {
                // @unroll
                for (var r = 0u; r < ROWS_JUDGED; r++) {
                    let from_key = key_first(item, first_row + turn + r);
                    let limit = key_limit(item, first_row + turn + r);
                    // Rules are asked about pairs that are there, whatever their answer counts for.
                    let row = min(first_row + turn + r, last_query);
                    var of_row = 0u;
                    var peak_of_row = 0u;
                    // @unroll
                    for (var c = 0u; c < KEYS; c++) {
                        let key = first_key + (c / 4u * ACROSS + local.x) * 4u + c % 4u;
                        let pair = judge(item, score[r * KEY_FOURS + c / 4u][c % 4u], row, min(key, seen_to - 1u));
                        let seen = pair.visible & (key >= from_key) & (key < limit);
                        of_row |= select(1u << c, 0u, seen);
                        score[r * KEY_FOURS + c / 4u][c % 4u] = pair.score;
                        peak_of_row = max(peak_of_row, select(0u, rank_of(pair.score), seen));
                    }
                    hidden[r] = of_row;
                    peak[r] = peak_of_row;
                }
                // The next rows take the place of these: no index is known at run time alone. (After the last turn all are where they were.)
                let judged = score;
                // @unroll
                for (var s = 0u; s < ROWS * KEY_FOURS; s++) {
                    score[s] = judged[(s + ROWS_JUDGED * KEY_FOURS) % (ROWS * KEY_FOURS)];
                }
                let hidden_before = hidden;
                let peak_before = peak;
                // @unroll
                for (var r = 0u; r < ROWS; r++) {
                    hidden[r] = hidden_before[(r + ROWS_JUDGED) % ROWS];
                    peak[r] = peak_before[(r + ROWS_JUDGED) % ROWS];
                }
            }
        } else {
            // @unroll
            for (var r = 0u; r < ROWS; r++) {
                var four = score[r * KEY_FOURS];
                // @unroll
                for (var c = 1u; c < KEY_FOURS; c++) {
                    four = max(four, score[r * KEY_FOURS + c]);
                }
                peak[r] = rank_of(max(max(four.x, four.y), max(four.z, four.w)));
            }
        }
        // Nobody reads `exchange`, the weights of the block before, since the barriers of the chunks.
        exchange[local.x * Q_FOURS + local.y] = peak;
        // The invocations of a row read each other's peaks.
        workgroupBarrier();

        var top = highest;
        // @unroll
        for (var i = 0u; i < ACROSS; i++) {
            top = max(top, exchange[i * Q_FOURS + local.y]);
        }
        // @unroll
        for (var r = 0u; r < ROWS; r++) {
            // Before the first key the sums are 0 and stay 0 (and an exponent of 0 cannot overflow).
            let shrink = exp(select(0.0, score_of(highest[r]) - score_of(top[r]), highest[r] != 0u));
            total[r] = total[r] * shrink;
            // @unroll
            for (var c = 0u; c < COLUMN_FOURS; c++) {
                sum[r * COLUMN_FOURS + c] = sum[r * COLUMN_FOURS + c] * shrink;
            }
            // The weights take the scores' place.
            // @unroll
            for (var c = 0u; c < KEYS; c++) {
                let own = score[r * KEY_FOURS + c / 4u][c % 4u];
                score[r * KEY_FOURS + c / 4u][c % 4u] = select(exp(own - score_of(top[r])), 0.0, weighs_nothing(own));
            }
        }
        highest = top;
        if (hides_some) {
            // @unroll
            for (var r = 0u; r < ROWS; r++) {
                // @unroll
                for (var c = 0u; c < KEYS; c++) {
                    let weight = score[r * KEY_FOURS + c / 4u][c % 4u];
                    let seen = (hidden[r] & (1u << c)) == 0u;
                    total[r] = total[r] + select(0.0, weight, seen);
                    score[r * KEY_FOURS + c / 4u][c % 4u] = select(-1.0, weight, seen);
                }
            }
        } else {
            // @unroll
            for (var r = 0u; r < ROWS; r++) {
                // @unroll
                for (var c = 0u; c < KEYS; c++) {
                    total[r] = total[r] + score[r * KEY_FOURS + c / 4u][c % 4u];
                }
            }
        }

        // @unroll
        for (var s = 0u; s < KEY_FOURS; s++) {
            for (var first = 0u; first < SLICE; first += VALUE_KEYS) {
                var values = array<Four, VALUE_MOVES>();
                // @unroll
                for (var m = 0u; m < VALUE_MOVES; m++) {
                    // Past the end another key stands in, which no query sees there.
                    let key = min(first_key + s * SLICE + first + (m * THREADS + thread) / V_FOURS, seen_to - 1u);
                    values[m] = v_four(v_base + key_row(item, key) * params.v_token_stride, (m * THREADS + thread) % V_FOURS * 4u);
                }
                // Others may still read the peaks, or the weights and values before these.
                workgroupBarrier();
                if (first == 0u) {
                    // @unroll
                    for (var i = 0u; i < 4u; i++) {
                        exchange[(local.x * 4u + i) * Q_FOURS + place(local.y, local.x)] = bitcast<vec4<u32>>(vec4<f32>(
                            score[s][i],
                            score[KEY_FOURS + s][i],
                            score[2u * KEY_FOURS + s][i],
                            score[3u * KEY_FOURS + s][i],
                        ));
                    }
                }
                // @unroll
                for (var m = 0u; m < VALUE_MOVES; m++) {
                    staged[m * THREADS + thread] = values[m];
                }
                // Weights and values are read by invocations that did not write them.
                workgroupBarrier();
                for (var j = 0u; j < VALUE_KEYS; j += 4u) {
                    let w_from = (first + j) * Q_FOURS + place(local.y, (first + j) / 4u);
                    let v_from = j * V_FOURS + local.x;
                    var weights = array<vec4<u32>, 4>();
                    var signs = vec4<u32>();
                    // @unroll
                    for (var i = 0u; i < 4u; i++) {
                        weights[i] = exchange[w_from + i * Q_FOURS];
                        signs |= weights[i];
                    }
                    // Whether one of these queries may not see one of these keys. (By the sign, since a weight may be NaN.)
                    var skips = false;
                    if (hides_some) {
                        skips = ((signs.x | signs.y | signs.z | signs.w) >> 31u) != 0u;
                    }
                    if (skips) {
                        for (var i = 0u; i < 4u; i++) {
                            let four = bitcast<vec4<f32>>(exchange[w_from + i * Q_FOURS]);
                            // @unroll
                            for (var r = 0u; r < ROWS; r++) {
                                // Whatever lies in a value that a row may not see, NaN included, must not reach the row.
                                if (!(four[r] < 0.0)) {
                                    // @unroll
                                    for (var c = 0u; c < COLUMN_FOURS; c++) {
                                        sum[r * COLUMN_FOURS + c] = fma(
                                            vec4<f32>(four[r]),
                                            vec4<f32>(staged[v_from + i * V_FOURS + c * ACROSS]),
                                            sum[r * COLUMN_FOURS + c],
                                        );
                                    }
                                }
                            }
                        }
                    } else {
                        // @unroll
                        for (var i = 0u; i < 4u; i++) {
                            let four = bitcast<vec4<f32>>(weights[i]);
                            // @unroll
                            for (var c = 0u; c < COLUMN_FOURS; c++) {
                                let value = vec4<f32>(staged[v_from + i * V_FOURS + c * ACROSS]);
                                // @unroll
                                for (var r = 0u; r < ROWS; r++) {
                                    sum[r * COLUMN_FOURS + c] = fma(vec4<f32>(four[r]), value, sum[r * COLUMN_FOURS + c]);
                                }
                            }
                        }
                    }
                }
            }
        }
    }

    // Others may still read the weights of the last block.
    workgroupBarrier();
    exchange[thread] = bitcast<vec4<u32>>(total);
    // The invocations of a row add up each other's totals.
    workgroupBarrier();
    var row_total = vec4<f32>();
    // @unroll
    for (var i = 0u; i < ACROSS; i++) {
        row_total += bitcast<vec4<f32>>(exchange[local.y * ACROSS + i]);
    }
    // @unroll
    for (var r = 0u; r < ROWS; r++) {
        let row = first_row + r;
        let seen = highest[r] != 0u;
        // Rows past the end of a packed sequence belong to others.
        if (row < item.rows) {
            let base = params.out_offset + part * params.out_part_stride + batch * params.out_batch_stride
                + head * params.out_head_stride + (item.q_start + row) * params.out_token_stride;
            // @unroll
            for (var c = 0u; c < COLUMNS; c += 2u) {
                let channel = (c / 4u * ACROSS + local.x) * 4u + c % 4u;
                if (channel < params.value_dim) {
                    let four = sum[r * COLUMN_FOURS + c / 4u];
                    // A row that saw no key gives 0.
                    store_pair(
                        base + channel,
                        select(0.0, four[c % 4u] / row_total[r], seen),
                        select(0.0, four[c % 4u + 1u] / row_total[r], seen),
                        channel + 1u < params.value_dim,
                    );
                }
            }
            if (local.x == 0u) {
                store_lse(item, row, seen, score_of(highest[r]), row_total[r]);
            }
        }
    }
}

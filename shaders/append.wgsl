// append: puts new queries, keys and values where attention reads them: queries and keys turned by their position
// (rotary embedding, Su and others 2021, arXiv:2104.09864), keys and values in the type of a cache, each batch item's
// behind the tokens that it has. Any of the three may be left out; without a cache it is the rotary embedding alone.
//
// One invocation writes two neighbouring channels of one head of one token, so that a word of two 16-bit elements is
// written by one. Pair i of a head's turned channels is (i, i + R/2) or, interleaved, (2i, 2i + 1):
// (a, b) becomes (a cos - b sin, b cos + a sin).
//
// q: (B, T, H, D), k: (B, T, Hkv, D), v: (B, T, Hkv, Dv), q_out as q, k_cache and v_cache: (B, capacity, Hkv, D or Dv), or
// pages (P, page_size, Hkv, D or Dv), all by strides with a contiguous last axis. tables: lengths, counts, starts, block
// table. angles: (positions, R), cosines of the R/2 pairs and behind them their sines.

@group(0) @binding(0)
var<storage, read> q: array<u32>;
@group(0) @binding(1)
var<storage, read> k: array<u32>;
@group(0) @binding(2)
var<storage, read> v: array<u32>;
@group(0) @binding(3)
var<storage, read_write> q_out: array<u32>;
@group(0) @binding(4)
var<storage, read_write> k_cache: array<u32>;
@group(0) @binding(5)
var<storage, read_write> v_cache: array<u32>;
@group(0) @binding(6)
var<storage, read> tables: array<u32>;
@group(0) @binding(7)
var<storage, read> angles: array<f32>;
@group(0) @binding(8)
var<uniform> params: AppendParams;

// Where there is no such table.
const NONE: u32 = 0xffffffffu;

// What becomes of a channel: `value` is its own, `other` that of the one it is paired with.
fn turned(value: f32, other: f32, channel: u32, position: u32) -> f32 {
    let half = params.rotary_dims / 2u;
    let pair = select(channel % max(half, 1u), channel / 2u, params.interleaved != 0u);
    let at = params.angles_offset + min(position, params.positions - 1u) * params.rotary_dims + pair;
    let second = select(channel >= half, channel % 2u == 1u, params.interleaved != 0u);
    return value * angles[at] + select(-other, other, second) * angles[at + half];
}

// The channel that a turned channel is paired with.
fn partner(channel: u32) -> u32 {
    let half = params.rotary_dims / 2u;
    return select(select(channel + half, channel - half, channel >= half), channel ^ 1u, params.interleaved != 0u);
}

fn q_value(base: u32, channel: u32, position: u32) -> f32 {
    let at = base + channel;
    let value = value_of(q[word_of(at, params.q_type)], at, params.q_type);
    if (channel >= params.rotary_dims) {
        return value;
    }
    let other = base + partner(channel);
    return turned(value, value_of(q[word_of(other, params.q_type)], other, params.q_type), channel, position);
}

fn k_value(base: u32, channel: u32, position: u32) -> f32 {
    let at = base + channel;
    let value = value_of(k[word_of(at, params.kv_type)], at, params.kv_type);
    if (channel >= params.rotary_dims) {
        return value;
    }
    let other = base + partner(channel);
    return turned(value, value_of(k[word_of(other, params.kv_type)], other, params.kv_type), channel, position);
}

fn v_value(base: u32, channel: u32) -> f32 {
    let at = base + channel;
    return value_of(v[word_of(at, params.kv_type)], at, params.kv_type);
}

@compute @workgroup_size(64)
fn append(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let number = workgroup_number(group, groups);
    if (number >= params.groups) {
        return;
    }
    let invocation = number * 64u + thread;
    let head_pairs = (params.head_dim + 1u) / 2u;
    let value_pairs = (params.value_dim + 1u) / 2u;
    let q_pairs = params.heads * head_pairs;
    let k_pairs = params.k_heads * head_pairs;
    let all_pairs = q_pairs + k_pairs + params.v_heads * value_pairs;
    if (invocation >= params.pairs) {
        return;
    }
    let pair = invocation % all_pairs;
    let token = (invocation / all_pairs) % params.tokens;
    let batch = invocation / (all_pairs * params.tokens);

    var position = params.first_position + token;
    if (params.starts_at != NONE) {
        // Past the last position that there is an angle for it does not matter how far: nothing wraps around.
        position += min(tables[params.starts_at + batch], params.positions);
    }
    var place = CacheRow(false, 0u, 0u, 0u);
    if (params.lengths_at != NONE) {
        place = cache_row(batch, token);
        position = place.position;
        // A token that its batch item does not get, or that has no place.
        if (!place.written) {
            return;
        }
    }

    if (pair < q_pairs) {
        let head = pair / head_pairs;
        let channel = 2u * (pair % head_pairs);
        let both = channel + 1u < params.head_dim;
        let base = params.q_offset + batch * params.q_batch_stride + token * params.q_token_stride
            + head * params.q_head_stride;
        let to = params.q_out_offset + batch * params.q_out_batch_stride + token * params.q_out_token_stride
            + head * params.q_out_head_stride + channel;
        let first = q_value(base, channel, position);
        let second = q_value(base, channel + u32(both), position);
        if (params.q_out_type == F32) {
            q_out[to] = bitcast<u32>(first);
            if (both) {
                q_out[to + 1u] = bitcast<u32>(second);
            }
        } else {
            // The other half of a last word that is not full stays as it is.
            let high = select(q_out[to >> 1u] & 0xffff0000u, half_bits(second, params.q_out_type) << 16u, both);
            q_out[to >> 1u] = high | half_bits(first, params.q_out_type);
        }
        return;
    }

    if (pair < q_pairs + k_pairs) {
        let head = (pair - q_pairs) / head_pairs;
        let channel = 2u * ((pair - q_pairs) % head_pairs);
        let both = channel + 1u < params.head_dim;
        let base = params.k_offset + batch * params.k_batch_stride + token * params.k_token_stride
            + head * params.k_head_stride;
        let to = params.k_cache_offset + place.batch * params.k_cache_batch_stride + place.row * params.k_cache_token_stride
            + head * params.k_cache_head_stride + channel;
        let first = k_value(base, channel, position);
        let second = k_value(base, channel + u32(both), position);
        if (params.cache_type == F32) {
            k_cache[to] = bitcast<u32>(first);
            if (both) {
                k_cache[to + 1u] = bitcast<u32>(second);
            }
        } else {
            let high = select(k_cache[to >> 1u] & 0xffff0000u, half_bits(second, params.cache_type) << 16u, both);
            k_cache[to >> 1u] = high | half_bits(first, params.cache_type);
        }
    } else {
        let head = (pair - q_pairs - k_pairs) / value_pairs;
        let channel = 2u * ((pair - q_pairs - k_pairs) % value_pairs);
        let both = channel + 1u < params.value_dim;
        let base = params.v_offset + batch * params.v_batch_stride + token * params.v_token_stride
            + head * params.v_head_stride;
        let to = params.v_cache_offset + place.batch * params.v_cache_batch_stride + place.row * params.v_cache_token_stride
            + head * params.v_cache_head_stride + channel;
        let first = v_value(base, channel);
        let second = v_value(base, channel + u32(both));
        if (params.cache_type == F32) {
            v_cache[to] = bitcast<u32>(first);
            if (both) {
                v_cache[to + 1u] = bitcast<u32>(second);
            }
        } else {
            let high = select(v_cache[to >> 1u] & 0xffff0000u, half_bits(second, params.cache_type) << 16u, both);
            v_cache[to >> 1u] = high | half_bits(first, params.cache_type);
        }
    }
}

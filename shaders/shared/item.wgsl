// What one head of one batch item (or packed sequence) has of its own, and which keys a query of it may see
// by its position.

const NONE: u32 = 0xffffffffu;

struct Item {
    batch: u32,
    head: u32,
    // Where its tokens begin along the token axis of q and out, and of k and v: 0 unless packed.
    q_start: u32,
    k_start: u32,
    // Rows of the output that are its own, and are written.
    rows: u32,
    // Keys that are its own, seen or not.
    keys: u32,
    // Queries and keys that it has. Rows past its queries see no key.
    q_len: u32,
    kv_len: u32,
    // The own key of query i is i + own.
    own: i32,
    // ALiBi: what a key loses for each step between it and the query's own key.
    slope: f32,
    // The logit that stands in the denominator alone, and whether there is one.
    sink: f32,
    has_sink: bool,
    // Of the keys, whose results are written: 0 where they are not in parts side by side.
    part: u32,
}

fn item_at(batch: u32, head: u32) -> Item {
    var item = Item(batch, head, 0u, 0u, params.q_len, params.kv_len, params.q_len, params.kv_len, 0, 0.0, 0.0, false, 0u);
    // Starts and lengths are data: whatever stands there, nothing outside of the operands is touched.
    if (params.packed != 0u) {
        let q_start = min(tables[params.cu_seqlens_q_at + batch], params.q_total);
        let k_start = min(tables[params.cu_seqlens_k_at + batch], params.kv_total);
        let q_end = min(tables[params.cu_seqlens_q_at + batch + 1u], params.q_total);
        let k_end = min(tables[params.cu_seqlens_k_at + batch + 1u], params.kv_total);
        item.rows = min(item.rows, max(q_end, q_start) - q_start);
        item.q_len = item.rows;
        item.keys = min(item.keys, max(k_end, k_start) - k_start);
        item.kv_len = item.keys;
        // Where a sequence without queries or keys begins there may be nothing; its first row is read all the same.
        item.q_start = min(q_start, max(params.q_total, 1u) - 1u);
        item.k_start = min(k_start, max(params.kv_total, 1u) - 1u);
    }
    if (params.q_lens_at != NONE) {
        item.q_len = min(item.q_len, tables[params.q_lens_at + batch]);
    }
    if (params.kv_lens_at != NONE) {
        item.kv_len = min(item.kv_len, tables[params.kv_lens_at + batch]);
    }
    if (params.bottom_right != 0u) {
        item.own = i32(item.kv_len) - i32(item.q_len);
    }
    if (params.slopes_at != NONE) {
        item.slope = bitcast<f32>(tables[params.slopes_at + batch * params.slopes_batch_stride + head]);
    }
    if (params.sinks_at != NONE) {
        item.sink = bitcast<f32>(tables[params.sinks_at + head]);
        item.has_sink = !weighs_nothing(item.sink);
    }
    return item;
}

// Rules that hide keys by position alone leave each query one run of keys, [key_first, key_limit). Neither end
// shrinks from one query to the next, so the first and the last query of a tile bound it.
fn key_first(item: Item, query: u32) -> u32 {
    let own = i32(query) + item.own;
    let windowed = u32(max(own - params.window_left, 0));
    return max(params.key_begin, select(0u, windowed, params.window_left >= 0));
}

fn key_limit(item: Item, query: u32) -> u32 {
    let own = i32(query) + item.own;
    let all = min(item.kv_len, params.key_end);
    let windowed = u32(clamp(own + params.window_right + 1, 0, i32(all)));
    let limit = select(all, windowed, params.window_right >= 0);
    return select(0u, limit, query < item.q_len);
}

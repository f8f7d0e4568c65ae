// Rules that hide keys by position alone leave each query one run of keys, [0, key_limit).
// It never shrinks from one query to the next, so the first and the last query of a tile bound it.
fn key_limit(query: u32) -> u32 {
    if (params.causal == 0u) {
        return params.kv_len;
    }
    let limit = i32(query) + params.causal_offset + 1;
    return u32(clamp(limit, 0, i32(params.kv_len)));
}

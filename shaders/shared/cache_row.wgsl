// Where a KV cache keeps a new token. The lengths in `tables` count the new tokens too. Lengths, counts and block tables
// are data: whatever stands there, nothing outside of the cache is touched.

const NONE: u32 = 0xffffffffu;

// The position of a new token in its sequence; NONE for a token that the sequence does not get, or has no room for.
fn cache_position(batch: u32, token: u32) -> u32 {
    var count = params.tokens;
    if (params.counts_at != NONE) {
        count = min(count, tables[params.counts_at + batch]);
    }
    let length = tables[params.lengths_at + batch];
    let position = length - count + token;
    return select(NONE, position, token < count && count <= length && position < params.capacity);
}

// The row of a position along the token axis of the cache, all pages counted as one; NONE outside of it.
fn cache_row(batch: u32, position: u32) -> u32 {
    if (params.page_size == 0u) {
        return position;
    }
    let page = tables[params.block_table_at + batch * params.block_table_stride + position / params.page_size];
    return select(NONE, page * params.page_size + position % params.page_size, page < params.cache_rows / params.page_size);
}

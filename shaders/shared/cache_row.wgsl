// Where a new token's key and value go in a cache of keys and values. Of `params` it reads tokens, lengths_at, counts_at,
// capacity, page_size, block_table_at, block_table_stride and cache_rows; `tables` holds the small operands.

// Where all tokens of a batch item are new.
const ALL_TOKENS: u32 = 0xffffffffu;

struct CacheRow {
    // Whether it is one of the item's new tokens, and the cache has a place for it.
    written: bool,
    // What the batch strides of the cache count: 0 in pages.
    batch: u32,
    // The row along the token axis of the cache; in pages, of all pages together.
    row: u32,
    // Its place in the sequence.
    position: u32,
}

// Lengths, counts and block tables are data: whatever stands there, nothing outside of the cache is written.
fn cache_row(batch: u32, token: u32) -> CacheRow {
    var place = CacheRow(false, batch, 0u, 0u);
    // Tokens that the item holds, its new ones included; they are the last of them.
    let length = tables[params.lengths_at + batch];
    var count = params.tokens;
    if (params.counts_at != ALL_TOKENS) {
        count = tables[params.counts_at + batch];
    }
    // A length that does not even hold the new tokens places the first of them before the beginning.
    if (token < count && count - token <= length) {
        let position = length - (count - token);
        if (position < params.capacity) {
            place.row = position;
            place.position = position;
            place.written = true;
            if (params.page_size != 0u) {
                let page = tables[params.block_table_at + batch * params.block_table_stride + position / params.page_size];
                place.written = page < params.cache_rows / params.page_size;
                place.batch = 0u;
                place.row = page * params.page_size + position % params.page_size;
            }
        }
    }
    return place;
}

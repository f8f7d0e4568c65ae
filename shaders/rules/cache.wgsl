// Store of a projection to q | k | v: queries go to y, keys and values into a cache, rounded to its type.
//
// k_cache (B, capacity, Hkv, D) or pages (P, page_size, Hkv, D), v_cache the same of Dv, by their strides; tables: what
// `shared/cache_row` reads. Where the cache has elements of 16 bits the host sees to it that queries and heads have even
// numbers of columns and rows begin on whole words: two columns are one word then, of one head.

@group(0) @binding(5)
var<storage, read_write> k_cache: array<u32>;
@group(0) @binding(6)
var<storage, read_write> v_cache: array<u32>;
@group(0) @binding(7)
var<storage, read> tables: array<u32>;

// Where a row's outputs go.
struct StoreRow {
    y: u32,
    // Whether the cache has a place for it, and where.
    cached: bool,
    k: u32,
    v: u32,
}

fn store_row(row: u32) -> StoreRow {
    let place = cache_row(row / params.tokens, row % params.tokens);
    return StoreRow(
        params.y_offset + row_start(row, params.y_batch_stride, params.y_token_stride),
        place.written,
        params.k_offset + place.batch * params.k_batch_stride + place.row * params.k_token_stride,
        params.v_offset + place.batch * params.v_batch_stride + place.row * params.v_token_stride,
    );
}

// Two neighbouring columns, the first of them even. `both`: the second is there.
fn store_pair(row: StoreRow, column: u32, values: vec2<f32>, both: bool) {
    var words = bitcast<vec2<u32>>(values);
    if (params.cache_type != F32 && column >= params.q_columns) {
        words.x = half_bits(values.x, params.cache_type) | half_bits(values.y, params.cache_type) << 16u;
    }
    store_column(row, column, words.x);
    // The second half of a word went with the first.
    if (both && (params.cache_type == F32 || column < params.q_columns)) {
        store_column(row, column + 1u, words.y);
    }
}

fn store_column(row: StoreRow, column: u32, word: u32) {
    if (column < params.q_columns) {
        y[row.y + column * params.y_channel_stride] = bitcast<f32>(word);
    } else if (row.cached) {
        let key = column - params.q_columns;
        let keys = params.kv_heads * params.head_dim;
        if (key < keys) {
            let at = row.k + key / params.head_dim * params.k_head_stride + key % params.head_dim;
            k_cache[word_of(at, params.cache_type)] = word;
        } else {
            let value = key - keys;
            let at = row.v + value / params.value_dim * params.v_head_stride + value % params.value_dim;
            v_cache[word_of(at, params.cache_type)] = word;
        }
    }
}

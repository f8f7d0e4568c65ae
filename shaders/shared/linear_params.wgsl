// Twin of `LinearParams` in src/kernels/params.rs: same fields, same order (a test reflects both).
// Strides and offsets count elements.
struct LinearParams {
    // Rows of all batch items together: M = batch * tokens.
    rows: u32,
    tokens: u32,
    d_in: u32,
    d_out: u32,
    has_bias: u32,
    // Workgroups along d_out.
    column_tiles: u32,
    // One past the last workgroup of this dispatch, and the first one: a long dispatch is cut.
    groups: u32,
    first_group: u32,
    x_offset: u32,
    x_batch_stride: u32,
    x_token_stride: u32,
    x_channel_stride: u32,
    weight_offset: u32,
    weight_out_stride: u32,
    weight_in_stride: u32,
    bias_offset: u32,
    y_offset: u32,
    y_batch_stride: u32,
    y_token_stride: u32,
    y_channel_stride: u32,
    // What follows is of `rules/cache` alone. Columns that are queries; heads of the keys and values after them.
    q_columns: u32,
    kv_heads: u32,
    head_dim: u32,
    value_dim: u32,
    // 0: f32, 1: f16, 2: bf16.
    cache_type: u32,
    // The batch strides are 0 in pages.
    k_offset: u32,
    k_batch_stride: u32,
    k_token_stride: u32,
    k_head_stride: u32,
    v_offset: u32,
    v_batch_stride: u32,
    v_token_stride: u32,
    v_head_stride: u32,
    // Where the small operands begin in `tables`: lengths (B), counts (B) or 0xffffffff, block table (B, W).
    lengths_at: u32,
    counts_at: u32,
    // Tokens that a batch item may hold.
    capacity: u32,
    // Tokens of a page; 0: no pages.
    page_size: u32,
    block_table_at: u32,
    block_table_stride: u32,
    // Tokens of all pages together.
    cache_rows: u32,
}

// Where a row of all batch items together begins in a view of these strides.
fn row_start(row: u32, batch_stride: u32, token_stride: u32) -> u32 {
    return (row / params.tokens) * batch_stride + (row % params.tokens) * token_stride;
}

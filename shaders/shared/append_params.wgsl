// Twin of `AppendParams` in src/kernels/params.rs: same fields, same order (a test reflects both).
// Strides and offsets count elements.
struct AppendParams {
    // New tokens of a batch item, at most.
    tokens: u32,
    // Heads of q, k and v; 0 where a call does not move them.
    heads: u32,
    k_heads: u32,
    v_heads: u32,
    head_dim: u32,
    value_dim: u32,
    // Channels that are turned, 0: none; and whether neighbours are pairs (1) or halves are (0).
    rotary_dims: u32,
    interleaved: u32,
    // Positions that `angles` has, and where it begins.
    positions: u32,
    angles_offset: u32,
    // Invocations with work.
    pairs: u32,
    // One past the last workgroup of this dispatch, and the first one: a long dispatch is cut.
    groups: u32,
    first_group: u32,
    q_type: u32,
    kv_type: u32,
    q_out_type: u32,
    cache_type: u32,
    q_offset: u32,
    q_batch_stride: u32,
    q_token_stride: u32,
    q_head_stride: u32,
    k_offset: u32,
    k_batch_stride: u32,
    k_token_stride: u32,
    k_head_stride: u32,
    v_offset: u32,
    v_batch_stride: u32,
    v_token_stride: u32,
    v_head_stride: u32,
    q_out_offset: u32,
    q_out_batch_stride: u32,
    q_out_token_stride: u32,
    q_out_head_stride: u32,
    k_cache_offset: u32,
    k_cache_batch_stride: u32,
    k_cache_token_stride: u32,
    k_cache_head_stride: u32,
    v_cache_offset: u32,
    v_cache_batch_stride: u32,
    v_cache_token_stride: u32,
    v_cache_head_stride: u32,
    // The position of a batch item's first token is first_position + tables[starts_at + b], where lengths_at is NONE.
    first_position: u32,
    starts_at: u32,
    // See shared/cache_row.
    lengths_at: u32,
    counts_at: u32,
    capacity: u32,
    page_size: u32,
    block_table_at: u32,
    block_table_stride: u32,
    cache_rows: u32,
}

// Twin of `AttentionParams` in src/kernels/params.rs: same fields, same order (a test reflects both).
// Strides and offsets count elements (of the operand's own type); -1 and NONE say that a rule is off.
struct AttentionParams {
    // 1: sequences are packed one behind the other, and begin where the tables say.
    packed: u32,
    heads: u32,
    // Query heads that share a KV head.
    group: u32,
    // Of one item; of a packed problem the longest that may come.
    q_len: u32,
    kv_len: u32,
    // Tokens that q and k hold along their token axis.
    q_total: u32,
    kv_total: u32,
    head_dim: u32,
    value_dim: u32,
    scale: f32,
    // 0: no cap.
    softcap: f32,
    // 1: a query's own key is i + Lk - Lq, 0: it is i.
    bottom_right: u32,
    // Keys before and after the own one that may be seen; -1: all. Causal is window_right = 0.
    window_left: i32,
    window_right: i32,
    // Keys outside of this range are hidden, whatever the rules say.
    key_begin: u32,
    key_end: u32,
    // Of the elements: 0 f32, 1 f16, 2 bf16.
    q_type: u32,
    out_type: u32,
    // Workgroups along the queries of one head.
    q_tiles: u32,
    // One past the last workgroup of this dispatch, and the first one: a long dispatch is cut.
    groups: u32,
    first_group: u32,
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
    out_offset: u32,
    out_batch_stride: u32,
    out_token_stride: u32,
    out_head_stride: u32,
    // 1: the log-sum-exp, 2: highest and total side by side.
    has_lse: u32,
    lse_offset: u32,
    lse_batch_stride: u32,
    lse_token_stride: u32,
    lse_head_stride: u32,
    // In bytes: a mask is one byte a pair. A stride of 0 broadcasts.
    has_mask: u32,
    mask_offset: u32,
    mask_batch_stride: u32,
    mask_head_stride: u32,
    mask_query_stride: u32,
    mask_key_stride: u32,
    has_bias: u32,
    bias_offset: u32,
    bias_batch_stride: u32,
    bias_head_stride: u32,
    bias_query_stride: u32,
    bias_key_stride: u32,
    // Where each begins in `tables`; NONE: there is none.
    q_lens_at: u32,
    kv_lens_at: u32,
    cu_seqlens_q_at: u32,
    cu_seqlens_k_at: u32,
    slopes_at: u32,
    slopes_batch_stride: u32,
    sinks_at: u32,
    // Keys a page, where k and v lie in pages; 0: they do not.
    page_size: u32,
    block_table_at: u32,
    block_table_stride: u32,
    rule_data_offset: u32,
    // Of decode kernels and attention_tiled: parts of the keys inside of the one grid, and from one part's results to the next one's.
    parts: u32,
    out_part_stride: u32,
    lse_part_stride: u32,
    // attention_weights only. stage: 0 products, 1 capped, 2 masked, 3 weights.
    stage: u32,
    weights_key_stride: u32,
}

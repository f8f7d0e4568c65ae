// Twin of `AttentionParams` in src/kernels/params.rs: same fields, same order (a test reflects both).
// Strides and offsets count elements; the channel axis of every view is contiguous.
struct AttentionParams {
    heads: u32,
    q_len: u32,
    kv_len: u32,
    head_dim: u32,
    // 1: keys past the diagonal are hidden, 0: every key may be seen.
    causal: u32,
    // Row i sees keys 0..=i + causal_offset; negative where Tq > Tk under BottomRight.
    causal_offset: i32,
    scale: f32,
    // Workgroups along the queries of one head, and in all.
    q_tiles: u32,
    groups: u32,
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
    // In bytes: a mask is one byte a key.
    mask_offset: u32,
    mask_batch_stride: u32,
}

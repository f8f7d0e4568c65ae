// Twin of `MergeParams` in src/kernels/params.rs: same fields, same order (a test reflects both).
// Strides and offsets count elements.
struct MergeParams {
    parts: u32,
    heads: u32,
    q_len: u32,
    value_dim: u32,
    // One past the last workgroup of this dispatch, and the first one: a long dispatch is cut.
    groups: u32,
    first_group: u32,
    parts_offset: u32,
    parts_part_stride: u32,
    parts_batch_stride: u32,
    parts_token_stride: u32,
    parts_head_stride: u32,
    // 1: each log-sum-exp comes as highest and total, side by side.
    paired: u32,
    part_lse_offset: u32,
    part_lse_part_stride: u32,
    part_lse_batch_stride: u32,
    part_lse_head_stride: u32,
    part_lse_token_stride: u32,
    out_type: u32,
    out_offset: u32,
    out_batch_stride: u32,
    out_token_stride: u32,
    out_head_stride: u32,
    has_lse: u32,
    lse_offset: u32,
    lse_batch_stride: u32,
    lse_head_stride: u32,
    lse_token_stride: u32,
}

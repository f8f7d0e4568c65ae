// Twin of `CopyParams` in src/kernels/params.rs: same fields, same order (a test reflects both).
// Strides and offsets count elements; axis 4 is the last.
struct CopyParams {
    // Pairs of neighbours along the last axis, of all rows together.
    pairs: u32,
    // One past the last workgroup of this dispatch, and the first one: a long dispatch is cut.
    groups: u32,
    first_group: u32,
    size_1: u32,
    size_2: u32,
    size_3: u32,
    size_4: u32,
    from_type: u32,
    from_offset: u32,
    from_stride_0: u32,
    from_stride_1: u32,
    from_stride_2: u32,
    from_stride_3: u32,
    from_stride_4: u32,
    out_type: u32,
    to_offset: u32,
    to_stride_0: u32,
    to_stride_1: u32,
    to_stride_2: u32,
    to_stride_3: u32,
    // The last axis of a 16-bit destination is contiguous.
    to_stride_4: u32,
}

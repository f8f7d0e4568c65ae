// Twin of `PeakParams` in src/kernels/params.rs: same fields, same order (a test reflects both).
struct PeakParams {
    // One past the last workgroup of this dispatch, and the first one: a long dispatch is cut.
    groups: u32,
    first_group: u32,
}

//! Descriptor of `shaders/merge.wgsl`.

use super::*;

pub(super) static KERNEL: Kernel = Kernel {
    name: "merge",
    operation: Operation::Merge,
    form: Form::Tiled,
    summary: "attention over all keys from attention over parts of them, by their log-sum-exp",
    source: include_str!("../../shaders/merge.wgsl"),
    fragments: &[&GRID, &MERGE_PARAMS, &SCORES, &ELEMENTS, &STORE],
    bindings: &[
        read(0, "parts"),
        read(1, "part_lse"),
        write(2, "out"),
        write(3, "lse"),
        params(4),
    ],
    params: MergeParams::LAYOUT,
    configurations: || {
        vec![Configuration {
            consts: Vec::new(),
            rules: Vec::new(),
        }]
    },
    workgroup_bytes: |_| 0,
    invocations: |_| 64,
    loop_iterations: |_, parts, channels| {
        channels
            .div_ceil(128)
            .saturating_add(2)
            .saturating_mul(parts.saturating_add(2))
    },
    needs_cleared_memory: false,
};

//! Descriptor of `shaders/linear_lanes.wgsl`.

use super::*;

pub(super) static KERNEL: Kernel = Kernel {
    name: "linear_lanes",
    operation: Operation::Linear,
    form: Form::Lanes,
    summary: "y = x Wᵀ + b, a row per SIMD lane, weights read by all lanes at once",
    source: include_str!("../../shaders/linear_lanes.wgsl"),
    fragments: &[&GRID, &LINEAR_PARAMS],
    bindings: &[
        read(0, "x"),
        read(1, "weight"),
        read(2, "bias"),
        write(3, "y"),
        params(4),
    ],
    params: LinearParams::LAYOUT,
    configurations: || vec![configuration(1), configuration(8), configuration(16)],
    workgroup_bytes: |_| 0,
    invocations: |configuration| configuration.get("LANES"),
    loop_iterations: |_, channels, _| channels + 1,
    needs_cleared_memory: false,
};

fn configuration(rows: u32) -> Configuration {
    Configuration {
        consts: vec![("ROWS", rows), ("COLUMNS", 16), ("LANES", 8)],
        rules: Vec::new(),
    }
}

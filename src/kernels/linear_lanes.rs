//! Descriptor of `shaders/linear_lanes.wgsl`.

use super::*;

pub(super) static KERNEL: Kernel = Kernel {
    name: "linear_lanes",
    operation: Operation::Linear,
    form: Form::Lanes,
    summary: "y = x Wᵀ + b, a row per SIMD lane, weights read by all lanes at once",
    source: include_str!("../../shaders/linear_lanes.wgsl"),
    fragments: &[&GRID, &LINEAR_PARAMS, &BIAS_PAIR],
    bindings: &[
        read(0, "x"),
        read(1, "weight"),
        read(2, "bias"),
        write(3, "y"),
        params(4),
        CACHE_BINDINGS[0],
        CACHE_BINDINGS[1],
        CACHE_BINDINGS[2],
    ],
    params: LinearParams::LAYOUT,
    configurations,
    workgroup_bytes: |_| 0,
    invocations: |configuration| configuration.get("LANES"),
    loop_iterations: |_, channels, _| channels + 1,
    needs_cleared_memory: false,
};

fn configurations() -> Vec<Configuration> {
    let mut all = Vec::new();
    for rules in stores() {
        for rows in [1, 8, 16] {
            all.push(Configuration {
                consts: vec![("ROWS", rows), ("COLUMNS", 16), ("LANES", 8)],
                rules: rules.clone(),
            });
        }
    }
    all
}

//! Descriptor of `shaders/linear_tiled.wgsl`.

use super::*;

pub(super) static KERNEL: Kernel = Kernel {
    name: "linear_tiled",
    operation: Operation::Linear,
    form: Form::Tiled,
    summary: "y = x Wᵀ + b, tiles of x and W in workgroup memory",
    source: include_str!("../../shaders/linear_tiled.wgsl"),
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
    workgroup_bytes: |configuration| {
        let tile = |side: &str| 16 * configuration.get(side) + 1;
        u64::from(4 * 16 * (tile("ROWS") + tile("COLUMNS")))
    },
    invocations: |_| 256,
    loop_iterations: |configuration, channels, _| {
        let [rows, columns] = ["ROWS", "COLUMNS"].map(|name| u64::from(configuration.get(name)));
        channels
            .div_ceil(16)
            .saturating_mul(1 + (rows + 1) + (columns + 1) + 17)
            .saturating_add(1)
    },
    needs_cleared_memory: false,
};

fn configurations() -> Vec<Configuration> {
    let mut all = Vec::new();
    for rules in stores() {
        for side in [2, 4] {
            all.push(Configuration {
                consts: vec![("ROWS", side), ("COLUMNS", side)],
                rules: rules.clone(),
            });
        }
    }
    all
}

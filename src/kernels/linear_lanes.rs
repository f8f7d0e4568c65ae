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
    workgroup_bytes: |configuration| {
        let sizes = ["ROWS", "COLUMNS", "LANES"].map(|name| u64::from(configuration.get(name)));
        4 * (1 + looped(configuration) * sizes.iter().product::<u64>())
    },
    invocations: |configuration| configuration.get("LANES"),
    loop_iterations: |configuration, channels, _| {
        let [rows, columns] = ["ROWS", "COLUMNS"].map(|name| u64::from(configuration.get(name)));
        let stores = looped(configuration) * rows * (columns / 2 + 2);
        channels.saturating_add(stores + 2)
    },
    needs_cleared_memory: false,
};

/// 1 where sums are stored in a loop: what `STORE_IN_LOOPS` is.
fn looped(configuration: &Configuration) -> u64 {
    u64::from(configuration.rules.contains(&STORE_CACHE))
}

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

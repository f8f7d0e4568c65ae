//! Descriptor of `shaders/linear_few.wgsl`.

use super::*;

pub(super) static KERNEL: Kernel = Kernel {
    name: "linear_few",
    operation: Operation::LinearFew,
    // For all adapters: the planner takes as many lanes as suit.
    form: Form::Tiled,
    summary: "y = x Wᵀ + b for few rows, channels split over the lanes, each weight read once",
    source: include_str!("../../shaders/linear_few.wgsl"),
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
        ["ROWS", "COLUMNS", "LANES"]
            .map(|name| u64::from(configuration.get(name)))
            .iter()
            .product::<u64>()
            * 4
    },
    invocations: |configuration| configuration.get("LANES"),
    loop_iterations: |configuration, channels, _| {
        let [rows, columns, lanes] =
            ["ROWS", "COLUMNS", "LANES"].map(|name| u64::from(configuration.get(name).max(1)));
        let pairs = (rows * columns / 2).div_ceil(lanes);
        channels.div_ceil(lanes) + 1 + pairs * (lanes + 2) + 1
    },
    needs_cleared_memory: false,
};

/// Lanes for adapters that are a CPU, one SIMD vector there, and for GPUs.
pub(crate) const LANES: [u32; 2] = [8, 64];

/// Columns for each of them: fewer leave a GPU more workgroups to hide the latency of memory.
const COLUMNS: [u32; 2] = [16, 8];

fn configurations() -> Vec<Configuration> {
    let mut all = Vec::new();
    for rules in stores() {
        for (lanes, columns) in LANES.into_iter().zip(COLUMNS) {
            for rows in [1, 2, 4, 8] {
                all.push(Configuration {
                    consts: vec![("ROWS", rows), ("COLUMNS", columns), ("LANES", lanes)],
                    rules: rules.clone(),
                });
            }
        }
    }
    all
}

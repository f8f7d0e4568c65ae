//! Descriptor of `shaders/linear_lanes.wgsl`.

use super::*;

pub(super) static KERNEL: Kernel = Kernel {
    name: "linear_lanes",
    operation: Operation::Linear,
    form: Form::Lanes,
    summary: "y = x Wᵀ + b, a row per SIMD lane, weights loaded once for all lanes",
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
        4 * sizes.iter().product::<u64>()
    },
    invocations: |configuration| configuration.get("LANES"),
    loop_iterations: |configuration, channels, _| {
        let [rows, columns, lanes] =
            ["ROWS", "COLUMNS", "LANES"].map(|name| u64::from(configuration.get(name).max(1)));
        let stores = rows * (columns / 4 + 2);
        channels.div_ceil(lanes).saturating_add(stores + 2)
    },
    needs_cleared_memory: false,
};

/// Lanes of an adapter with subgroups of a known size, by that size; otherwise of any adapter.
pub(crate) const LANES: [(Option<u32>, u32, &Fragment); 3] = [
    (None, 8, &WEIGHTS_UNIFORM),
    (Some(8), 8, &WEIGHTS_SUBGROUP),
    (Some(4), 4, &WEIGHTS_SUBGROUP),
];

/// Rows and columns of an invocation, the smallest tile first.
const TILES: [(u32, u32); 3] = [(1, 16), (4, 32), (8, 32)];

fn configurations() -> Vec<Configuration> {
    let mut all = Vec::new();
    for rules in stores() {
        for (_, lanes, weights) in LANES {
            for x in [&X_FOURS, &X_ANY] {
                for (rows, columns) in TILES {
                    let mut rules = rules.clone();
                    rules.extend([x.clone(), weights.clone()]);
                    all.push(Configuration {
                        consts: vec![("ROWS", rows), ("COLUMNS", columns), ("LANES", lanes)],
                        rules,
                    });
                }
            }
        }
    }
    all
}

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
        match configuration.rules.contains(&ROWS_OUT_STAGED) {
            true => 4 * sizes.iter().product::<u64>(),
            false => 0,
        }
    },
    invocations: |configuration| configuration.get("LANES"),
    loop_iterations: |configuration, channels, _| {
        let [rows, columns, lanes] =
            ["ROWS", "COLUMNS", "LANES"].map(|name| u64::from(configuration.get(name).max(1)));
        let stores = (rows * columns / 4).max(lanes);
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

/// How x and the weight are read, the fewest loads first; each set by its first fragment. linear_tiled has the first fragments of some.
pub(crate) const READS: [&[&Fragment]; 4] = [
    &[&LINEAR_EIGHTS],
    &[&LINEAR_FOURS, &LINEAR_STEPS],
    &[&LINEAR_X_FOURS, &LINEAR_STEPS],
    &[&LINEAR_FOURS_ANY, &LINEAR_STEPS],
];

fn configurations() -> Vec<Configuration> {
    let mut all = Vec::new();
    for store in stores() {
        for (subgroup, lanes, weights) in LANES {
            // Only memory that has the rows of all lanes keeps the stores into a cache, which are long, to one place of the text.
            let rows_out = match subgroup.is_some() && store.contains(&STORE_ROWS) {
                true => &ROWS_OUT_SUBGROUP,
                false => &ROWS_OUT_STAGED,
            };
            for reads in READS {
                if reads.contains(&&LINEAR_EIGHTS) && subgroup != Some(8) {
                    continue;
                }
                for (rows, columns) in TILES {
                    let mut rules = store.clone();
                    rules.extend(reads.iter().map(|read| (*read).clone()));
                    rules.extend([weights.clone(), rows_out.clone()]);
                    all.push(Configuration {
                        consts: vec![
                            ("ROWS", rows),
                            ("COLUMNS", columns),
                            ("LANES", lanes),
                            ("SPREAD", lanes.min(columns / 4)),
                        ],
                        rules,
                    });
                }
            }
        }
    }
    all
}

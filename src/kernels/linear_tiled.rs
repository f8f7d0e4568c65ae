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
        let (tile_m, tile_n) = tile(configuration);
        u64::from(4 * DEPTH * (tile_m + tile_n))
    },
    invocations: |configuration| configuration.get("ACROSS") * configuration.get("DOWN"),
    loop_iterations: |_, channels, _| {
        // Of a tile: itself, and its channels four at a time.
        channels
            .div_ceil(u64::from(DEPTH))
            .saturating_mul(1 + u64::from(DEPTH / 4 + 1))
            .saturating_add(1)
    },
    needs_cleared_memory: false,
};

/// Channels of a tile.
const DEPTH: u32 = 16;

/// Rows and columns of y that one workgroup computes.
fn tile(configuration: &Configuration) -> (u32, u32) {
    let [rows, columns, across, down] =
        ["ROWS", "COLUMNS", "ACROSS", "DOWN"].map(|name| configuration.get(name));
    (down * rows, across * columns)
}

/// Outputs of an invocation along each side of its tile, and invocations along each side of a workgroup: tiles of 32 x 32,
/// 64 x 64 and 128 x 128.
const SIZES: [(u32, u32); 3] = [(4, 8), (8, 8), (8, 16)];

fn configurations() -> Vec<Configuration> {
    let mut all = Vec::new();
    for store in stores() {
        for fours in [&LINEAR_FOURS, &LINEAR_FOURS_ANY] {
            for (outputs, side) in SIZES {
                let mut rules = store.clone();
                rules.push(fours.clone());
                all.push(Configuration {
                    consts: vec![
                        ("ROWS", outputs),
                        ("COLUMNS", outputs),
                        ("ACROSS", side),
                        ("DOWN", side),
                    ],
                    rules,
                });
            }
        }
    }
    all
}

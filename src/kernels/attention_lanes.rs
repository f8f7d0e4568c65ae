//! Descriptor of `shaders/attention_lanes.wgsl`.

use super::*;

pub(super) static KERNEL: Kernel = Kernel {
    name: "attention_lanes",
    operation: Operation::Attention,
    form: Form::Lanes,
    summary: "one-pass attention, a query row per SIMD lane, keys and values read by all lanes at once",
    source: include_str!("../../shaders/attention_lanes.wgsl"),
    fragments: &[&GRID, &ATTENTION_PARAMS, &KEY_RANGE, &SCORES],
    bindings: &[
        read("q"),
        read("k"),
        read("v"),
        read("mask"),
        write("out"),
        PARAMS,
    ],
    params: AttentionParams::LAYOUT,
    configurations: || attention_configurations(configurations),
    workgroup_bytes: |_| 0,
    invocations: |configuration| configuration.get("LANES"),
    needs_cleared_memory: false,
};

/// Lanes are 8 wide on the adapters this is for. One row a lane compiles in a fraction of the time and suits
/// few queries; four rows share each key that is read.
///
/// Heads of more than 64 channels are left to the tiled form for the sake of the first call: written out, they
/// compile for 4 to 19 s on lavapipe. Once compiled they are no faster than tiles at 96 channels, but about twice
/// as fast at 128 (docs/performance.md).
fn configurations(head_dim: u32, rule: &'static Fragment) -> Vec<Configuration> {
    if head_dim > 64 {
        return Vec::new();
    }
    [1, 4]
        .into_iter()
        .map(|rows| Configuration {
            consts: vec![("HEAD_DIM", head_dim), ("ROWS", rows), ("LANES", 8)],
            rules: vec![rule],
        })
        .collect()
}

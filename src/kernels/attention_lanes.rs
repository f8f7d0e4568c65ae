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
/// few queries; more rows share each key that is read, as many as their registers allow for D.
fn configurations(head_dim: u32, rule: &'static Fragment) -> Vec<Configuration> {
    let most_rows = match head_dim {
        0..=64 => 4,
        65..=128 => 2,
        _ => 1,
    };
    let rows = if most_rows > 1 {
        vec![1, most_rows]
    } else {
        vec![1]
    };
    rows.into_iter()
        .map(|rows| Configuration {
            consts: vec![("HEAD_DIM", head_dim), ("ROWS", rows), ("LANES", 8)],
            rules: vec![rule],
        })
        .collect()
}

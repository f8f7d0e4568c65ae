//! Descriptor of `shaders/attention_tiled.wgsl`.

use super::*;

pub(super) static KERNEL: Kernel = Kernel {
    name: "attention_tiled",
    operation: Operation::Attention,
    form: Form::Tiled,
    summary: "one-pass attention, blocks of queries and keys in workgroup memory",
    source: include_str!("../../shaders/attention_tiled.wgsl"),
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
    workgroup_bytes: |configuration| {
        let (head_dim, block_q, block_k) = (
            configuration.get("HEAD_DIM"),
            8 * configuration.get("ROWS"),
            8 * configuration.get("KEYS"),
        );
        let tiles = head_dim.min(16) * (block_q + 1 + block_k + 1);
        let staged = tiles.max(configuration.get("VALUE_KEYS") * head_dim);
        u64::from(4 * (staged + block_q * block_k + 2 * block_q * 8))
    },
    invocations: |_| 64,
    needs_cleared_memory: false,
};

/// Fewer rows an invocation where D is large, so that its part of the output stays in registers; the values
/// of as many keys at once as 8 KiB hold.
fn configurations(head_dim: u32, rule: &'static Fragment) -> Vec<Configuration> {
    let rows = if head_dim <= 128 { 4 } else { 2 };
    let value_keys = match head_dim {
        0..=64 => 32,
        65..=128 => 16,
        _ => 8,
    };
    vec![Configuration {
        consts: vec![
            ("HEAD_DIM", head_dim),
            ("ROWS", rows),
            ("KEYS", 4),
            ("VALUE_KEYS", value_keys),
        ],
        rules: vec![rule],
    }]
}

//! Descriptor of `shaders/attention_tiled.wgsl`.

use super::*;

pub(super) static KERNEL: Kernel = Kernel {
    name: "attention_tiled",
    operation: Operation::Attention,
    form: Form::Tiled,
    summary: "one-pass attention, blocks of queries and keys in workgroup memory",
    source: include_str!("../../shaders/attention_tiled.wgsl"),
    fragments: &[
        &GRID,
        &ATTENTION_PARAMS,
        &SCORES,
        &ITEM,
        &ELEMENTS,
        &STORE,
        &STORE_LSE,
        &PAIR,
    ],
    bindings: &[
        read(0, "q"),
        read(1, "k"),
        read(2, "v"),
        write(3, "out"),
        write(4, "lse"),
        read(5, "tables"),
        params(6),
        RULE_BINDINGS[0],
        RULE_BINDINGS[1],
        RULE_BINDINGS[2],
    ],
    params: AttentionParams::LAYOUT,
    configurations,
    workgroup_bytes: |configuration| {
        let (value_dim, block_q, block_k) = (
            configuration.get("VALUE_DIM"),
            8 * configuration.get("ROWS"),
            8 * configuration.get("KEYS"),
        );
        let tiles = 16 * (block_q + 1 + block_k + 1);
        let staged = tiles.max(configuration.get("VALUE_KEYS") * value_dim);
        u64::from(4 * (staged + block_q * block_k + 2 * block_q * 8))
    },
    invocations: |_| 64,
    loop_iterations: |configuration, keys, channels| {
        let [value_dim, rows, key_columns, value_keys] =
            ["VALUE_DIM", "ROWS", "KEYS", "VALUE_KEYS"]
                .map(|name| u64::from(configuration.get(name)));
        let (block_q, block_k) = (8 * rows, (8 * key_columns).max(1));
        let chunk = 1 + (block_q / 4 + 1) + (block_k / 4 + 1) + 17;
        let values = 1 + (value_keys * value_dim / 64 + 1) + (value_keys + 1);
        let block =
            3 + channels.div_ceil(16) * chunk + 9 * rows + block_k / value_keys.max(1) * values;
        keys.div_ceil(block_k)
            .saturating_mul(block)
            .saturating_add(1 + 9 * rows)
    },
    needs_cleared_memory: false,
};

/// Value sizes that it is compiled for.
pub(crate) const VALUE_DIMS: [u32; 7] = [16, 32, 64, 96, 128, 192, 256];

/// Fewer rows an invocation where Dv is large, so that its part of the output stays in registers; the values
/// of as many keys at once as 8 KiB hold.
fn configurations() -> Vec<Configuration> {
    let mut all = Vec::new();
    for rules in rule_sets() {
        for value_dim in VALUE_DIMS {
            for kv_type in TYPES {
                let rows = if value_dim <= 128 { 4 } else { 2 };
                let value_keys = match value_dim {
                    0..=64 => 32,
                    65..=128 => 16,
                    _ => 8,
                };
                all.push(Configuration {
                    consts: vec![
                        ("VALUE_DIM", value_dim),
                        ("KV_TYPE", kv_type),
                        ("ROWS", rows),
                        ("KEYS", 4),
                        ("VALUE_KEYS", value_keys),
                    ],
                    rules: rules.clone(),
                });
            }
        }
    }
    all
}

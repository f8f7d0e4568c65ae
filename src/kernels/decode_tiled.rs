//! Descriptor of `shaders/decode_tiled.wgsl`.

use super::*;

pub(super) static KERNEL: Kernel = Kernel {
    name: "decode_tiled",
    operation: Operation::Decode,
    form: Form::Tiled,
    summary: "few queries over many keys, which it splits; blocks of keys through workgroup memory",
    source: include_str!("../../shaders/decode_tiled.wgsl"),
    fragments: &[
        &GRID,
        &ATTENTION_PARAMS,
        &SCORES,
        &ITEM,
        &ELEMENTS,
        &STORE,
        &STORE_LSE,
        &PAIR,
        &SHARE,
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
        let rows = configuration.get("ROWS");
        let staged = BLOCK * (CHUNK + 1);
        u64::from(4 * (staged + rows * CHUNK + rows * BLOCK + rows * PEAKS + BLOCK))
    },
    invocations: |_| BLOCK,
    loop_iterations: |configuration, keys, channels| {
        let rows = u64::from(configuration.get("ROWS"));
        let value_dim = u64::from(configuration.get("VALUE_DIM"));
        let [block_keys, chunk_channels, peaks] = [BLOCK, CHUNK, PEAKS].map(u64::from);
        let chunk = 1
            + (rows * chunk_channels / block_keys + 2)
            + (chunk_channels + 1)
            + (chunk_channels + 1);
        let reduce = (block_keys / peaks + 1) + rows * (peaks + 1);
        let block = 1 + 1 + channels.div_ceil(chunk_channels) * chunk + reduce + (block_keys + 1);
        let end = rows * (block_keys + 1 + value_dim / (2 * block_keys) + 2);
        keys.div_ceil(block_keys)
            .saturating_mul(block)
            .saturating_add(1 + end)
    },
    needs_cleared_memory: false,
};

const BLOCK: u32 = 64;
const CHUNK: u32 = 16;
const PEAKS: u32 = 8;

/// Value sizes that it is compiled for.
pub(crate) const VALUE_DIMS: [u32; 4] = [64, 128, 192, 256];

fn configurations() -> Vec<Configuration> {
    let mut all = Vec::new();
    for rules in rule_sets() {
        for value_dim in VALUE_DIMS {
            for kv_type in TYPES {
                for rows in [1, 2, 4, 8] {
                    all.push(Configuration {
                        consts: vec![
                            ("VALUE_DIM", value_dim),
                            ("KV_TYPE", kv_type),
                            ("ROWS", rows),
                        ],
                        rules: rules.clone(),
                    });
                }
            }
        }
    }
    all
}

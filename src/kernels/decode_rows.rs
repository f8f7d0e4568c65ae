//! Descriptor of `shaders/decode_rows.wgsl`.

use super::*;

pub(crate) static KERNEL: Kernel = Kernel {
    name: "decode_rows",
    operation: Operation::Decode,
    form: Form::Lanes,
    summary: "single queries over many keys, which it splits; keys, and a sum of all channels, per SIMD lane",
    source: include_str!("../../shaders/decode_rows.wgsl"),
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
        let head_dim = configuration.get("HEAD_DIM");
        u64::from(4 * head_dim + 4 * head_dim * LANES + 2 * 4 * LANES)
    },
    invocations: |_| LANES,
    loop_iterations: |configuration, keys, _| {
        let q = u64::from(configuration.get("HEAD_DIM") / 4 / LANES + 2);
        keys.div_ceil(u64::from(LANES)).saturating_add(1 + q)
    },
    needs_cleared_memory: false,
};

const LANES: u32 = 8;

/// Head sizes that it is compiled for. Every lane keeps a whole row: 128 channels compile for nearly twice as long as
/// decode_lanes does, to gain a quarter.
const HEAD_DIMS: [u32; 3] = [16, 32, 64];

fn configurations() -> Vec<Configuration> {
    let mut all = Vec::new();
    for rules in rule_sets() {
        for head_dim in HEAD_DIMS {
            for (kv_type, fours) in [
                (0, &FOURS_F32),
                (1, &FOURS_HALF),
                (2, &FOURS_HALF),
                (0, &FOURS_ANY),
                (1, &FOURS_ANY),
                (2, &FOURS_ANY),
            ] {
                let mut rules = rules.clone();
                rules.push(fours.clone());
                all.push(Configuration {
                    consts: vec![
                        ("HEAD_DIM", head_dim),
                        ("COLUMNS", head_dim.div_ceil(32)),
                        ("KV_TYPE", kv_type),
                        ("ROWS", 1),
                    ],
                    rules,
                });
            }
        }
    }
    all
}

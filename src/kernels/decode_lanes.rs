//! Descriptor of `shaders/decode_lanes.wgsl`.

use super::*;

pub(super) static KERNEL: Kernel = Kernel {
    name: "decode_lanes",
    operation: Operation::Decode,
    form: Form::Lanes,
    summary: "few queries over many keys, which it splits; a key per SIMD lane for scores, four channels for values",
    source: include_str!("../../shaders/decode_lanes.wgsl"),
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
        let (rows, head_dim) = (configuration.get("ROWS"), configuration.get("HEAD_DIM"));
        u64::from(4 * rows * head_dim + 4 * rows * LANES + 16 * rows * LANES + 16 * LANES)
    },
    invocations: |_| LANES,
    loop_iterations: |configuration, keys, _| {
        let (rows, head_dim) = (configuration.get("ROWS"), configuration.get("HEAD_DIM"));
        // A block: itself, the lane's four keys, the lanes whose keys are read.
        let block = 1 + 5 + u64::from(LANES + 1);
        let q = u64::from(rows * head_dim / 4 / LANES + 2);
        keys.div_ceil(BLOCK)
            .saturating_mul(block)
            .saturating_add(1 + q)
    },
    needs_cleared_memory: false,
};

const LANES: u32 = 8;

/// Keys of a block.
const BLOCK: u64 = 4 * LANES as u64;

/// Head sizes that it is compiled for, and the rows that share the keys that are read.
///
/// More rows compile for longer: 64 channels in 0.5 s for one row and 1.4 s for four, 128 channels in 0.9 s and 3.4 s.
pub(crate) const HEAD_DIMS: [(u32, &[u32]); 4] = [
    (16, &[1, 2, 4]),
    (32, &[1, 2, 4]),
    (64, &[1, 2, 4]),
    (128, &[1, 2]),
];

fn configurations() -> Vec<Configuration> {
    let mut all = Vec::new();
    for rules in rule_sets() {
        for (head_dim, row_counts) in HEAD_DIMS {
            for (kv_type, fours) in [
                (0, &FOURS_F32),
                (1, &FOURS_HALF),
                (2, &FOURS_HALF),
                (0, &FOURS_ANY),
                (1, &FOURS_ANY),
                (2, &FOURS_ANY),
            ] {
                for rows in row_counts {
                    let mut rules = rules.clone();
                    rules.push(fours.clone());
                    all.push(Configuration {
                        consts: vec![
                            ("HEAD_DIM", head_dim),
                            ("COLUMNS", head_dim.div_ceil(32)),
                            ("KV_TYPE", kv_type),
                            ("ROWS", *rows),
                        ],
                        rules,
                    });
                }
            }
        }
    }
    all
}

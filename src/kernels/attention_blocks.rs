//! Descriptor of `shaders/attention_blocks.wgsl`.

use super::attention_lanes::LANES;
use super::*;

pub(crate) static KERNEL: Kernel = Kernel {
    name: "attention_blocks",
    operation: Operation::Attention,
    form: Form::Lanes,
    summary: "one-pass attention for large heads, a query row per SIMD lane, keys in blocks, channels in loops",
    source: include_str!("../../shaders/attention_blocks.wgsl"),
    fragments: attention_lanes::KERNEL.fragments,
    bindings: attention_lanes::KERNEL.bindings,
    params: AttentionParams::LAYOUT,
    configurations,
    workgroup_bytes: |configuration| {
        let [rows, keys, head_dim, lanes] =
            ["ROWS", "KEYS", "HEAD_DIM", "LANES"].map(|name| u64::from(configuration.get(name)));
        let plain = |rule: &Fragment| configuration.rules.contains(rule);
        let looks_at_pairs = ![&ATTEND_ALL, &PLAIN_SCORES, &NO_RULE]
            .into_iter()
            .all(plain);
        4 * lanes * rows * (head_dim + u64::from(looks_at_pairs) * keys)
    },
    invocations: |configuration| configuration.get("LANES"),
    loop_iterations: |configuration, keys, channels| {
        let [rows, block, head_dim] =
            ["ROWS", "KEYS", "HEAD_DIM"].map(|name| u64::from(configuration.get(name)));
        // A block: itself, channels of q, those of the sums and the loop beside, pairs that rules look at, four a time.
        let q = channels.div_ceil(4) + 1;
        let sums = head_dim / 4 + 2;
        let pairs = block * rows / 4 + block / 32;
        let blocks = (keys.div_ceil(block) + 1).saturating_mul(1 + q + sums + pairs);
        // Sums are cleared and stored.
        blocks.saturating_add(2 * (rows * (head_dim / 4 + 1) + 1))
    },
    needs_cleared_memory: false,
};

/// Head sizes that it is compiled for, and the rows a lane and keys a block. Four rows of 32 keys are as much text as two of 64. Planning
/// takes as many rows as have room: where rules look at single pairs, or a device has the 16 KiB of workgroup memory that every one has,
/// fewer rows of the largest heads than in 32 KiB.
const HEAD_DIMS: [(u32, &[(u32, u32)]); 4] = [
    (96, &[(1, 64), (4, 32)]),
    (128, &[(1, 64), (2, 64), (4, 32)]),
    (192, &[(1, 64), (2, 64), (4, 32)]),
    (256, &[(1, 64), (2, 64), (4, 32)]),
];

/// Only with broadcasts. Sizes and rules as those of attention_lanes: all sizes come with the plainest rules, one of them with the others.
fn configurations() -> Vec<Configuration> {
    let mut all = Vec::new();
    for (number, rules) in rule_sets().into_iter().enumerate() {
        for (head_dim, blocks) in HEAD_DIMS {
            if number > 0 && head_dim != 96 {
                continue;
            }
            for (kv_type, fours) in [
                (0, &FOURS_F32),
                (1, &FOURS_HALF),
                (2, &FOURS_HALF),
                (0, &FOURS_ANY),
                (1, &FOURS_ANY),
                (2, &FOURS_ANY),
            ] {
                for (subgroup, lanes, spread) in LANES {
                    if subgroup.is_none() {
                        continue;
                    }
                    for (rows, keys) in blocks {
                        let mut rules = rules.clone();
                        rules.extend([fours.clone(), spread.clone()]);
                        rules.extend(q_out(fours).into_iter().cloned());
                        all.push(Configuration {
                            consts: vec![
                                ("HEAD_DIM", head_dim),
                                ("KV_TYPE", kv_type),
                                ("ROWS", *rows),
                                ("KEYS", *keys),
                                ("LANES", lanes),
                                ("SPREAD", lanes),
                            ],
                            rules,
                        });
                    }
                }
            }
        }
    }
    all
}

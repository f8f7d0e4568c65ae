//! Descriptor of `shaders/attention_matrices.wgsl`.

use super::*;

pub(crate) static KERNEL: Kernel = Kernel {
    name: "attention_matrices",
    operation: Operation::Attention,
    form: Form::Tiled,
    summary: "one-pass attention by matrix units, once they have qualified",
    source: include_str!("../../shaders/attention_matrices.wgsl"),
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
        let block_q = 4 * configuration.get("DOWN");
        let staged = 2 * (block_q + BLOCK_K) * (CHUNK + 8);
        let products = 4 * block_q * (BLOCK_K + 4);
        // And what invocations exchange, and a flag.
        u64::from(staged + products + 2 * 4 * THREADS + 4)
    },
    invocations: |_| THREADS,
    loop_iterations: |configuration, keys, _| {
        // Four tiles of a product for one subgroup at the most, and the exit.
        let product = 5;
        let chunks = u64::from(configuration.get("CHUNKS")) * product;
        // With values that are no numbers, each key by itself.
        let slices = u64::from(configuration.get("VALUE_DIM") / SLICE);
        let block = 1 + chunks + slices * (product + u64::from(BLOCK_K) + 1);
        keys.div_ceil(u64::from(BLOCK_K))
            .saturating_mul(block)
            .saturating_add(1)
    },
    needs_cleared_memory: false,
};

const THREADS: u32 = 128;
const BLOCK_K: u32 = 32;
/// Columns of values that are multiplied at once.
const SLICE: u32 = 32;
/// Channels of q and k that are multiplied at once.
const CHUNK: u32 = 64;

/// Value sizes that it is compiled for.
const VALUE_DIMS: [u32; 4] = [32, 64, 96, 128];

/// Chunks of q and k that hold a head; `None` for one that is too large.
pub(crate) fn chunks(head_dim: usize) -> Option<u32> {
    let chunks = u32::try_from(head_dim.div_ceil(CHUNK as usize)).ok()?;
    (1..=2).contains(&chunks).then_some(chunks)
}

fn configurations() -> Vec<Configuration> {
    let mut all = Vec::new();
    for rules in rule_sets() {
        for value_dim in VALUE_DIMS {
            for chunks in [1, 2] {
                for fours in [&FOURS_F16, &FOURS_F16_ANY] {
                    let mut rules = rules.clone();
                    rules.extend([fours.clone(), MATRICES.clone()]);
                    all.push(Configuration {
                        consts: vec![
                            ("VALUE_DIM", value_dim),
                            ("KV_TYPE", 1),
                            ("CHUNKS", chunks),
                            ("DOWN", 8),
                        ],
                        rules,
                    });
                }
            }
        }
    }
    all
}

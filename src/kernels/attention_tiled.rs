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
        let shape = Shape::of(configuration);
        let tiles = CHUNK * (shape.block_q + shape.block_k);
        let staged = tiles.max(shape.value_keys * shape.value_dim);
        let element = if configuration.rules.contains(&TILES_HALF) {
            2
        } else {
            4
        };
        u64::from(element * staged + 4 * shape.slice * shape.block_q)
    },
    invocations: |configuration| Shape::of(configuration).invocations,
    loop_iterations: |configuration, keys, channels| {
        let shape = Shape::of(configuration);
        // Each loop of an invocation ends with one more iteration, its exit.
        let loops = |turns: u32| u64::from(turns) + 1;
        let chunk = 1 + loops(CHUNK / 4);
        let turns = shape.value_keys / 4;
        // (Four keys of which some are hidden are a loop of their own.)
        let values = 1 + loops(turns) + u64::from(turns) * loops(4);
        let slice = 1 + u64::from(shape.slice / shape.value_keys.max(1)) * values;
        let slices = u64::from(shape.block_k / shape.slice.max(1));
        let chunks = channels.div_ceil(u64::from(CHUNK)).saturating_mul(chunk);
        // Where rules change scores, or there is a caller's own, one row after the other.
        let rules = &configuration.rules;
        let written_out = rules.contains(&PLAIN_SCORES) && rules.contains(&NO_RULE);
        let judged = loops(if written_out { 1 } else { 4 });
        let block = (2 + judged + slices * slice).saturating_add(chunks);
        keys.div_ceil(u64::from(shape.block_k.max(1)))
            .saturating_mul(block)
            .saturating_add(1)
    },
    needs_cleared_memory: false,
};

/// Channels of q and k that are staged at once.
const CHUNK: u32 = 16;

/// What a configuration says, in the words of the shader.
struct Shape {
    value_dim: u32,
    block_q: u32,
    block_k: u32,
    slice: u32,
    value_keys: u32,
    invocations: u32,
}

impl Shape {
    fn of(configuration: &Configuration) -> Self {
        let [value_dim, across, down, keys, value_keys] =
            ["VALUE_DIM", "ACROSS", "DOWN", "KEYS", "VALUE_KEYS"]
                .map(|name| configuration.get(name));
        Shape {
            value_dim,
            block_q: 4 * down,
            block_k: across * keys,
            slice: 4 * across,
            value_keys,
            invocations: across * down,
        }
    }
}

/// Value sizes that it is compiled for, and the shapes of each: invocations across and down a workgroup, keys an invocation,
/// and keys whose values are staged at once. From the smallest block of queries to the largest.
///
/// Each fits 16 KiB, the least that WebGPU promises; the larger block of queries fills them and leaves an AMD GPU four waves a SIMD.
/// Values of more than 128 channels have more invocations a row, so that sums stay in registers.
const SHAPES: [(u32, &[[u32; 4]]); 6] = [
    (32, &[[8, 8, 8, 32], [8, 16, 8, 32]]),
    (64, &[[8, 8, 8, 16], [8, 16, 8, 32]]),
    (96, &[[8, 8, 4, 16], [8, 16, 4, 16]]),
    (128, &[[8, 8, 4, 8], [8, 16, 4, 16]]),
    (192, &[[16, 8, 4, 8]]),
    (256, &[[16, 8, 4, 8]]),
];

fn configurations() -> Vec<Configuration> {
    let mut all = Vec::new();
    for rules in rule_sets() {
        for (value_dim, shapes) in SHAPES {
            for (kv_type, fours, tiles) in [
                (0, &FOURS_F32, &TILES_F32),
                (1, &FOURS_HALF, &TILES_F32),
                (2, &FOURS_HALF, &TILES_F32),
                (0, &FOURS_ANY, &TILES_F32),
                (1, &FOURS_ANY, &TILES_F32),
                (2, &FOURS_ANY, &TILES_F32),
                (1, &FOURS_F16, &TILES_HALF),
                (1, &FOURS_F16_ANY, &TILES_HALF),
            ] {
                for [across, down, keys, value_keys] in shapes.iter().copied() {
                    let mut rules = rules.clone();
                    // Rules that change scores take the registers of the other four keys.
                    let keys = match rules.contains(&SCORE_RULES) {
                        true => keys.min(4),
                        false => keys,
                    };
                    rules.push(fours.clone());
                    rules.push(tiles.clone());
                    all.push(Configuration {
                        consts: vec![
                            ("VALUE_DIM", value_dim),
                            ("KV_TYPE", kv_type),
                            ("ACROSS", across),
                            ("DOWN", down),
                            ("KEYS", keys),
                            ("VALUE_KEYS", value_keys),
                        ],
                        rules,
                    });
                }
            }
        }
    }
    all
}

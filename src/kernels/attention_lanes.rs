//! Descriptor of `shaders/attention_lanes.wgsl`.

use super::*;

pub(super) static KERNEL: Kernel = Kernel {
    name: "attention_lanes",
    operation: Operation::Attention,
    form: Form::Lanes,
    summary: "one-pass attention, a query row per SIMD lane, keys and values loaded once for all lanes",
    source: include_str!("../../shaders/attention_lanes.wgsl"),
    fragments: &[
        &GRID,
        &ATTENTION_PARAMS,
        &SCORES,
        &ITEM,
        &ELEMENTS,
        &STORE_LSE,
        &PAIR,
        &ONLINE,
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
        let sizes = ["ROWS", "HEAD_DIM", "LANES"].map(|name| u64::from(configuration.get(name)));
        match configuration.rules.contains(&ROWS_OUT_STAGED) {
            true => 4 * sizes.iter().product::<u64>(),
            false => 0,
        }
    },
    invocations: |configuration| configuration.get("LANES"),
    loop_iterations: |configuration, keys, _| {
        let fours = configuration.get("ROWS") * configuration.get("HEAD_DIM") / 4;
        let rows = u64::from(fours.max(configuration.get("LANES")));
        // Steps of two keys in two loops, q, and the output.
        (keys / 2 + 4).saturating_add(2 * (rows + 1))
    },
    needs_cleared_memory: false,
};

/// Head sizes that it is compiled for, and the rows a lane. Written out, a row of 64 channels is long: with 256 channels of all rows
/// together it compiles for about a second on lavapipe, and more do not fit the cache of a core. Larger heads than 64 are for attention_blocks,
/// but where that would make too many iterations.
const HEAD_DIMS: [(u32, &[u32]); 7] = [
    (8, &[1, 4]),
    (16, &[1, 4]),
    (32, &[1, 4]),
    (64, &[1, 4]),
    (96, &[1]),
    (128, &[1]),
    (256, &[1]),
];

/// Larger heads are left to the tiled form where every lane loads everything itself: they compile for 6 s and more there.
const LARGEST_UNIFORM: u32 = 64;

/// Largest head whose keys and values are read eight channels at once.
const LARGEST_BY_EIGHTS: u32 = 64;

/// Keys of a step.
const KEYS: u32 = 2;

/// Rows of k or v that the lanes load at once, where that many fours of a row are handed round together (TOGETHER and SPREAD).
pub(crate) fn rows_at_once(lanes: u32, spread: u32, eights: bool) -> u32 {
    let fours = if eights { 2 * lanes } else { lanes };
    (fours / spread.max(1)).clamp(1, KEYS)
}

/// Lanes of an adapter with subgroups of a known size, by that size; otherwise of any adapter.
pub(crate) const LANES: [(Option<u32>, u32, &Fragment); 3] = [
    (None, 8, &SPREAD_UNIFORM),
    (Some(8), 8, &SPREAD_SUBGROUP),
    (Some(4), 4, &SPREAD_SUBGROUP),
];

/// One row a lane compiles in a fraction of the time and suits few queries; several share each key that is read. Rules do not
/// depend on sizes: all sizes come with the plainest, two of them with the others.
fn configurations() -> Vec<Configuration> {
    let mut all = Vec::new();
    for (number, rules) in rule_sets().into_iter().enumerate() {
        for (head_dim, row_counts) in HEAD_DIMS {
            if number > 0 && ![16, 64].contains(&head_dim) {
                continue;
            }
            for (kv_type, reads) in [
                (0, &FOURS_F32),
                (1, &FOURS_HALF),
                (2, &FOURS_HALF),
                (0, &FOURS_ANY),
                (1, &FOURS_ANY),
                (2, &FOURS_ANY),
                (0, &EIGHTS_F32),
                (1, &EIGHTS_HALF),
                (2, &EIGHTS_HALF),
            ] {
                let eights = [&EIGHTS_F32, &EIGHTS_HALF].contains(&reads);
                for (subgroup, lanes, spread) in LANES {
                    if subgroup.is_none() && head_dim > LARGEST_UNIFORM {
                        continue;
                    }
                    // Larger heads are for attention_blocks, which reads by fours.
                    if eights && (subgroup != Some(8) || head_dim > LARGEST_BY_EIGHTS) {
                        continue;
                    }
                    let spread = if eights { &SPREAD_EIGHTS } else { spread };
                    let turned = match subgroup {
                        Some(_) => [&ROWS_IN_SUBGROUP, &ROWS_OUT_SUBGROUP],
                        None => [&ROWS_IN_STAGED, &ROWS_OUT_STAGED],
                    };
                    for rows in row_counts {
                        let mut rules = rules.clone();
                        rules.extend([reads.clone(), spread.clone()]);
                        rules.extend(q_out(reads).into_iter().chain(turned).cloned());
                        let at_once = lanes.min(head_dim / 4);
                        let together = subgroup.map_or(1, |_| rows_at_once(lanes, at_once, eights));
                        all.push(Configuration {
                            consts: vec![
                                ("HEAD_DIM", head_dim),
                                ("KV_TYPE", kv_type),
                                ("ROWS", *rows),
                                ("LANES", lanes),
                                ("SPREAD", at_once),
                                ("TOGETHER", together),
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

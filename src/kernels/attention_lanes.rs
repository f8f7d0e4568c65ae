//! Descriptor of `shaders/attention_lanes.wgsl`.

use super::*;

pub(super) static KERNEL: Kernel = Kernel {
    name: "attention_lanes",
    operation: Operation::Attention,
    form: Form::Lanes,
    summary: "one-pass attention, a query row per SIMD lane, keys and values read by all lanes at once",
    source: include_str!("../../shaders/attention_lanes.wgsl"),
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
    workgroup_bytes: |_| 0,
    invocations: |configuration| configuration.get("LANES"),
    loop_iterations: |_, keys, _| keys + 1,
    needs_cleared_memory: false,
};

/// Head sizes that it is compiled for.
///
/// Heads of more than 64 channels are left to the tiled form for the sake of the first call: written out, they
/// compile for 4 to 19 s on lavapipe. Once compiled they are no faster than tiles at 96 channels, but about twice
/// as fast at 128 (docs/performance.md).
pub(crate) const HEAD_DIMS: [u32; 4] = [8, 16, 32, 64];

/// Lanes are 8 wide on the adapters this is for. One row a lane compiles in a fraction of the time and suits
/// few queries; four rows share each key that is read.
fn configurations() -> Vec<Configuration> {
    let mut all = Vec::new();
    for rules in rule_sets() {
        for head_dim in HEAD_DIMS {
            // q in f32 beside smaller k and v is a cache; smaller q beside others is left to the tiled form.
            for (q_type, kv_type) in [(0, 0), (1, 1), (2, 2), (0, 1), (0, 2)] {
                for rows in [1, 4] {
                    all.push(Configuration {
                        consts: vec![
                            ("HEAD_DIM", head_dim),
                            ("Q_TYPE", q_type),
                            ("KV_TYPE", kv_type),
                            ("ROWS", rows),
                            ("LANES", 8),
                        ],
                        rules: rules.clone(),
                    });
                }
            }
        }
    }
    all
}

//! Descriptor of `shaders/attention_weights.wgsl`.

use super::*;

pub(super) static KERNEL: Kernel = Kernel {
    name: "attention_weights",
    operation: Operation::Weights,
    form: Form::Tiled,
    summary: "the attention weights themselves, or the scores before the softmax, a row a workgroup",
    source: include_str!("../../shaders/attention_weights.wgsl"),
    fragments: &[&GRID, &ATTENTION_PARAMS, &SCORES, &ITEM, &ELEMENTS, &PAIR],
    bindings: &[
        read(0, "q"),
        read(1, "k"),
        write(3, "weights"),
        read(5, "tables"),
        params(6),
        RULE_BINDINGS[0],
        RULE_BINDINGS[1],
        RULE_BINDINGS[2],
    ],
    params: AttentionParams::LAYOUT,
    configurations: || {
        let rules = rule_sets().into_iter();
        rules
            .flat_map(|rules| {
                TYPES.map(|kv_type| Configuration {
                    consts: vec![("KV_TYPE", kv_type)],
                    rules: rules.clone(),
                })
            })
            .collect()
    },
    workgroup_bytes: |_| 3 * 4 * 64,
    invocations: |_| 64,
    loop_iterations: |_, keys, channels| {
        let mine = keys.div_ceil(64);
        mine.saturating_mul(channels.saturating_add(4))
            .saturating_add(2 * 65 + 3)
    },
    needs_cleared_memory: false,
};

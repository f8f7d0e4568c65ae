// The buffer of a caller's own rule.
@group(0) @binding(9)
var<storage, read> rule_values: array<f32>;

fn rule_data(index: u32) -> f32 {
    return rule_values[params.rule_data_offset + index];
}

// The bias of two neighbouring columns of a projection; 0 where there is none. `both`: the second column is there.
fn bias_pair(column: u32, both: bool) -> vec2<f32> {
    var pair = vec2<f32>();
    if (params.has_bias != 0u) {
        pair.x = bias[params.bias_offset + column];
        if (both) {
            pair.y = bias[params.bias_offset + column + 1u];
        }
    }
    return pair;
}

// Eight neighbouring channels of a row of x or of the weight in one load of 32 bytes, as 64-bit integers: where lanes lie far apart
// llvmpipe loads them one by one, and takes less time over four wide values than over eight. d_in is a multiple of eight, channels
// lie one behind the other, rows begin on 32 bytes, and LANES is 8 (the host sees to all four).
@group(0) @binding(0)
var<storage, read> x: array<vec4<u64>>;
@group(0) @binding(1)
var<storage, read> weight: array<vec4<u64>>;

fn floats(pairs: vec2<u64>) -> vec4<f32> {
    let words = vec4<u32>(u32(pairs.x), u32(pairs.x >> 32u), u32(pairs.y), u32(pairs.y >> 32u));
    return bitcast<vec4<f32>>(words);
}

// LANES channels of a row of x from `first` on.
fn x_step(start: u32, first: u32) -> array<vec4<f32>, STEP> {
    let eight = x[(start + first) / 8u];
    return array<vec4<f32>, STEP>(floats(eight.xy), floats(eight.zw));
}

// LANES channels of a row of the weight from `first` on.
fn weight_step(start: u32, first: u32) -> array<vec4<f32>, STEP> {
    let eight = weight[(start + first) / 8u];
    return array<vec4<f32>, STEP>(floats(eight.xy), floats(eight.zw));
}

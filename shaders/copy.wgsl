// copy: to[i] = from[i] for every index of up to five axes, from any strides to any strides and from any float type
// to any: casts, gathers, and puts tensors one behind the other.
//
// One invocation moves two neighbours along the last axis, so that a word of two 16-bit elements is written by one.

@group(0) @binding(0)
var<storage, read> source: array<u32>;
@group(0) @binding(1)
var<storage, read_write> out: array<u32>;
@group(0) @binding(2)
var<uniform> params: CopyParams;

fn source_value(index: u32) -> f32 {
    return value_of(source[word_of(index, params.from_type)], index, params.from_type);
}

@compute @workgroup_size(64)
fn copy(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let number = workgroup_number(group, groups);
    if (number >= params.groups) {
        return;
    }
    let pair = number * 64u + thread;
    if (pair < params.pairs) {
        let pairs = (params.size_4 + 1u) / 2u;
        let i4 = 2u * (pair % pairs);
        let row = pair / pairs;
        let i3 = row % params.size_3;
        let i2 = row / params.size_3 % params.size_2;
        let i1 = row / (params.size_3 * params.size_2) % params.size_1;
        let i0 = row / (params.size_3 * params.size_2 * params.size_1);
        let from_at = params.from_offset + i0 * params.from_stride_0 + i1 * params.from_stride_1
            + i2 * params.from_stride_2 + i3 * params.from_stride_3 + i4 * params.from_stride_4;
        let to_at = params.to_offset + i0 * params.to_stride_0 + i1 * params.to_stride_1
            + i2 * params.to_stride_2 + i3 * params.to_stride_3 + i4 * params.to_stride_4;
        let both = i4 + 1u < params.size_4;
        let second_at = from_at + select(0u, params.from_stride_4, both);
        if (params.out_type == F32) {
            out[to_at] = bitcast<u32>(source_value(from_at));
            if (both) {
                out[to_at + params.to_stride_4] = bitcast<u32>(source_value(second_at));
            }
        } else {
            store_pair(to_at, source_value(from_at), source_value(second_at), both);
        }
    }
}

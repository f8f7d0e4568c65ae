// merge: attention over all keys, put together from attention over parts of them by their log-sum-exp:
// lse = log sum_p exp(lse_p), o = sum_p exp(lse_p - lse) o_p. Exact, since each part's softmax is.
//
// One workgroup of 64 invocations computes one row (a query of a head); an invocation owns every 64th pair of
// neighbouring channels. A part whose lse is -infinity adds nothing, whatever its output holds.
//
// parts: (P, B, Tq, H, Dv), part_lse: (P, B, H, Tq) or, where it comes as highest and total, (P, B, H, Tq, 2), out: (B, Tq, H, Dv), lse: (B, H, Tq), all by strides.

@group(0) @binding(0)
var<storage, read> parts: array<f32>;
@group(0) @binding(1)
var<storage, read> part_lse: array<f32>;
@group(0) @binding(2)
var<storage, read_write> out: array<u32>;
@group(0) @binding(3)
var<storage, read_write> lse: array<u32>;
@group(0) @binding(4)
var<uniform> params: MergeParams;

// What a part's exponentials add up to, if its highest score were 0.
fn part_total(at: u32) -> f32 {
    if (params.paired != 0u) {
        return part_lse[at + 1u];
    }
    return 1.0;
}

@compute @workgroup_size(64)
fn merge(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let number = workgroup_number(group, groups);
    if (number >= params.groups) {
        return;
    }
    let query = number % params.q_len;
    let head = (number / params.q_len) % params.heads;
    let batch = number / (params.q_len * params.heads);
    let lse_row = params.part_lse_offset + batch * params.part_lse_batch_stride + head * params.part_lse_head_stride
        + query * params.part_lse_token_stride;
    let parts_row = params.parts_offset + batch * params.parts_batch_stride + head * params.parts_head_stride
        + query * params.parts_token_stride;
    let out_row = params.out_offset + batch * params.out_batch_stride + head * params.out_head_stride
        + query * params.out_token_stride;

    // Lavapipe compiles a kernel anew at every dispatch where a loop's end is nothing but a parameter. (There is always
    // some workgroup.)
    let count = select(params.parts, 0u, groups.x == 0u);
    var highest = 0.0;
    var any = false;
    for (var p = 0u; p < count; p++) {
        let one = part_lse[lse_row + p * params.part_lse_part_stride];
        if (!weighs_nothing(one) && (!any || one > highest)) {
            highest = one;
            any = true;
        }
    }
    var total = 0.0;
    for (var p = 0u; p < count; p++) {
        let at = lse_row + p * params.part_lse_part_stride;
        if (!weighs_nothing(part_lse[at])) {
            total = fma(exp(part_lse[at] - highest), part_total(at), total);
        }
    }
    for (var channel = 2u * thread; channel < params.value_dim; channel += 128u) {
        let both = channel + 1u < params.value_dim;
        var first = 0.0;
        var second = 0.0;
        for (var p = 0u; p < count; p++) {
            let lse_at = lse_row + p * params.part_lse_part_stride;
            if (!weighs_nothing(part_lse[lse_at])) {
                let weight = exp(part_lse[lse_at] - highest) * part_total(lse_at) / total;
                let at = parts_row + p * params.parts_part_stride + channel;
                first = fma(weight, parts[at], first);
                second = fma(weight, parts[at + u32(both)], second);
            }
        }
        store_pair(out_row + channel, first, second, both);
    }
    if (thread == 0u && params.has_lse != 0u) {
        let index = params.lse_offset + batch * params.lse_batch_stride + head * params.lse_head_stride
            + query * params.lse_token_stride;
        lse[index] = select(0xff800000u, bitcast<u32>(highest + log(total)), any);
    }
}

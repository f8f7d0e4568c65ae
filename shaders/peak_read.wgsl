// peak_read: how fast an adapter reads memory: one number of each invocation is written, so that nothing is left out.
//
// One workgroup is 256 invocations, each of which reads EACH vectors of 16 bytes; neighbours read neighbours. All loads are
// under way before the first is used. source: (groups * 256 * EACH) vectors; out: (groups * 256) words.
// EACH: vectors an invocation.

@group(0) @binding(0)
var<storage, read> source: array<vec4<u32>>;
@group(0) @binding(1)
var<storage, read_write> out: array<u32>;
@group(0) @binding(2)
var<uniform> params: PeakParams;

@compute @workgroup_size(256)
fn peak_read(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let number = workgroup_number(group, groups);
    if (number >= params.groups) {
        return;
    }
    let first = number * 256u * EACH + thread;
    var all = vec4<u32>();
    // @unroll
    for (var i = 0u; i < EACH; i++) {
        all ^= source[first + i * 256u];
    }
    out[number * 256u + thread] = all.x ^ all.y ^ all.z ^ all.w;
}

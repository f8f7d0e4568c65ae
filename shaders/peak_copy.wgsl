// peak_copy: how fast an adapter moves memory where nothing else is in the way: out[i] = source[i].
//
// One workgroup is 256 invocations, each of which moves EACH vectors of 16 bytes; neighbours move neighbours. EACH loads are
// under way before the first is stored. source, out: (groups * 256 * EACH) vectors.
// EACH: vectors an invocation.

@group(0) @binding(0)
var<storage, read> source: array<vec4<u32>>;
@group(0) @binding(1)
var<storage, read_write> out: array<vec4<u32>>;
@group(0) @binding(2)
var<uniform> params: PeakParams;

@compute @workgroup_size(256)
fn peak_copy(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let number = workgroup_number(group, groups);
    if (number >= params.groups) {
        return;
    }
    let first = number * 256u * EACH + thread;
    var moved = array<vec4<u32>, EACH>();
    // @unroll
    for (var i = 0u; i < EACH; i++) {
        moved[i] = source[first + i * 256u];
    }
    // @unroll
    for (var i = 0u; i < EACH; i++) {
        out[first + i * 256u] = moved[i];
    }
}

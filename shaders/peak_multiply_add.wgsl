// peak_multiply_add: what an adapter reaches in multiply-adds of Number where nothing else is in the way.
//
//     sum = sum * scale + step      CHAINS vectors of four sums an invocation, ROUNDS * REPEATS times
//
// Each sum waits for itself alone, so that CHAINS * 4 multiply-adds are under way at once: as many as a GPU needs, and not so
// many that a CPU's 16 vector registers spill. `src/bench/peaks.rs` tries several CHAINS and takes the best. Nothing is read
// from memory, one number an invocation is written (all of what was computed goes into it).
//
// One workgroup is 64 invocations. out: (groups * 64) f32.
// CHAINS: vectors of sums. ROUNDS, REPEATS: how often; a loop of ROUNDS over REPEATS that are written out. One of
// shared/number_*: f32 or f16.

@group(0) @binding(0)
var<storage, read_write> out: array<f32>;
@group(0) @binding(1)
var<uniform> params: PeakParams;

@compute @workgroup_size(64)
fn peak_multiply_add(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let number = workgroup_number(group, groups);
    if (number >= params.groups) {
        return;
    }
    // Between 1/2 and 3/4, and different in each lane: the sums come to rest between 1/2 and 1, no compiler knows where.
    let scale = vec4<Number>(Number(0.5 + f32(thread) / 256.0));
    let step = vec4<Number>(0.25);
    var sums = array<vec4<Number>, CHAINS>();
    // @unroll
    for (var i = 0u; i < CHAINS; i++) {
        sums[i] = vec4<Number>(0.0, 1.0, 2.0, 3.0) + Number((number + i) & 63u);
    }
    for (var round = 0u; round < ROUNDS; round++) {
        // @unroll
        for (var repeat = 0u; repeat < REPEATS; repeat++) {
            // @unroll
            for (var i = 0u; i < CHAINS; i++) {
                sums[i] = fma(sums[i], scale, step);
            }
        }
    }
    var all = vec4<Number>();
    // @unroll
    for (var i = 0u; i < CHAINS; i++) {
        all += sums[i];
    }
    out[number * 64u + thread] = f32(all.x + all.y + all.z + all.w);
}

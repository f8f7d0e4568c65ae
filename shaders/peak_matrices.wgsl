// peak_matrices: what an adapter reaches in multiply-adds of tiles by its matrix units where nothing else is in the way.
//
//     sum = left * right + sum      16 x 16 by 16 x 16 of f16, sums in f32; three sums a tile, ROUNDS * REPEATS times
//
// One workgroup of 64 invocations computes TILES tiles, shared out among its subgroups, however many there are. left and right
// are loaded once. Nothing is read from memory, one number an invocation is written (all of what was computed goes into it).
// Sums are carried through the loop, which some drivers are said to do wrong: what comes out is not looked at.
//
// out: (groups * 64) f32. ROUNDS, REPEATS: how often; a loop of ROUNDS over REPEATS that are written out.
enable f16;
enable wgpu_cooperative_matrix;

@group(0) @binding(0)
var<storage, read_write> out: array<f32>;
@group(0) @binding(1)
var<uniform> params: PeakParams;

const TILES: u32 = 4u;
const ELEMENTS: u32 = 256u;

var<workgroup> staged: array<f16, 2u * ELEMENTS>;
var<workgroup> products: array<f32, 3u * TILES * ELEMENTS>;

// All lanes of a subgroup take the same way.
fn multiply_tiles(subgroup: u32, subgroups: u32) {
    for (var tile = subgroup; tile < TILES; tile += subgroups) {
        let left = coopLoadT<coop_mat16x16<f16, A>>(&staged[0], 16u);
        let right = coopLoad<coop_mat16x16<f16, B>>(&staged[ELEMENTS], 16u);
        var first = coop_mat16x16<f32, C>();
        var second = coop_mat16x16<f32, C>();
        var third = coop_mat16x16<f32, C>();
        for (var round = 0u; round < ROUNDS; round++) {
            // @unroll
            for (var repeat = 0u; repeat < REPEATS; repeat++) {
                first = coopMultiplyAdd(left, right, first);
                second = coopMultiplyAdd(left, right, second);
                third = coopMultiplyAdd(left, right, third);
            }
        }
        coopStoreT(first, &products[3u * tile * ELEMENTS], 16u);
        coopStoreT(second, &products[(3u * tile + 1u) * ELEMENTS], 16u);
        coopStoreT(third, &products[(3u * tile + 2u) * ELEMENTS], 16u);
    }
}

@compute @workgroup_size(64)
fn peak_matrices(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
    @builtin(subgroup_id) subgroup: u32,
    @builtin(num_subgroups) subgroups: u32,
) {
    let number = workgroup_number(group, groups);
    if (number >= params.groups) {
        return;
    }
    for (var i = thread; i < 2u * ELEMENTS; i += 64u) {
        staged[i] = f16(f32((number + i) & 7u) / 64.0);
    }
    // Every subgroup reads all of what was staged.
    workgroupBarrier();
    multiply_tiles(subgroup, subgroups);
    // What other subgroups stored is read.
    workgroupBarrier();
    var all = 0.0;
    for (var i = thread; i < 3u * TILES * ELEMENTS; i += 64u) {
        all += products[i];
    }
    out[number * 64u + thread] = all;
}

// matrix: a tile of 16 x 16 sums of f16 products by cooperative matrices, which shows that the report reads them.
//
// One workgroup, a wave, makes out = a * b for a (16, K), b (K, 16) in f16, sums in f32 over the whole of K, which is as
// long as `a` says. On RDNA 3 each turn of the loop is one v_wmma. It is no kernel of the crate.

enable f16;
enable wgpu_cooperative_matrix;

@group(0) @binding(0)
var<storage, read> a: array<f16>;
@group(0) @binding(1)
var<storage, read> b: array<f16>;
@group(0) @binding(2)
var<storage, read_write> out: array<f32>;

@compute @workgroup_size(64)
fn matrix() {
    let channels = arrayLength(&a) / 16u;
    var sum = coop_mat16x16<f32, C>();
    for (var first = 0u; first < channels; first += 16u) {
        let left = coopLoadT<coop_mat16x16<f16, A>>(&a[first], channels);
        let right = coopLoadT<coop_mat16x16<f16, B>>(&b[first * 16u], 16u);
        sum = coopMultiplyAdd(left, right, sum);
    }
    coopStoreT(sum, &out[0], 16u);
}

// Products of tiles in workgroup memory by matrix units, of 16 x 16 each: sums in f32, of f16. The tiles of a product are shared out among
// the subgroups, however many there are, and all lanes of a subgroup take the same way. Sums are not carried from one loop's turn to
// the next: some drivers are said to lose them.
enable f16;
enable wgpu_cooperative_matrix;

// The product of queries and keys over CHUNK channels, for each pair.
fn multiply_queries_and_keys(subgroup: u32, subgroups: u32) {
    for (var tile = subgroup; tile < TILES; tile += subgroups) {
        let of_q = tile / TILES_ACROSS * 16u;
        let of_k = tile % TILES_ACROSS * 16u;
        var sum = coop_mat16x16<f32, C>();
        // @unroll
        for (var c = 0u; c < CHUNK; c += 16u) {
            let left = coopLoadT<coop_mat16x16<f16, A>>(&staged[of_q * TILE_STRIDE + c], TILE_STRIDE);
            // Keys are columns: their channels lie one behind the other.
            let right = coopLoad<coop_mat16x16<f16, B>>(&staged[K_START + of_k * TILE_STRIDE + c], TILE_STRIDE);
            sum = coopMultiplyAdd(left, right, sum);
        }
        coopStoreT(sum, &products[of_q * PRODUCT_STRIDE + of_k], PRODUCT_STRIDE);
    }
}

// The product of weights, in two parts, and values, for each query and column of a slice.
fn multiply_weights_and_values(subgroup: u32, subgroups: u32) {
    for (var tile = subgroup; tile < TILES; tile += subgroups) {
        let of_q = tile / TILES_ACROSS * 16u;
        let of_v = tile % TILES_ACROSS * 16u;
        var sum = coop_mat16x16<f32, C>();
        // @unroll
        for (var j = 0u; j < BLOCK_K; j += 16u) {
            // Of each column the keys lie one behind the other.
            let right = coopLoad<coop_mat16x16<f16, B>>(&staged[V_START + of_v * WEIGHT_STRIDE + j], WEIGHT_STRIDE);
            let high = coopLoadT<coop_mat16x16<f16, A>>(&staged[of_q * WEIGHT_STRIDE + j], WEIGHT_STRIDE);
            sum = coopMultiplyAdd(high, right, sum);
            let low = coopLoadT<coop_mat16x16<f16, A>>(&staged[LOW_START + of_q * WEIGHT_STRIDE + j], WEIGHT_STRIDE);
            sum = coopMultiplyAdd(low, right, sum);
        }
        coopStoreT(sum, &products[of_q * PRODUCT_STRIDE + of_v], PRODUCT_STRIDE);
    }
}

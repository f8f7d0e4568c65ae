// The natural logarithm of the sum of exponentials of a row's scores: -infinity, by its bits, where there is none.
fn store_lse(item: Item, query: u32, any: bool, value: f32) {
    if (params.has_lse != 0u) {
        let index = params.lse_offset + item.batch * params.lse_batch_stride + item.head * params.lse_head_stride
            + (item.q_start + query) * params.lse_token_stride;
        lse[index] = select(0xff800000u, bitcast<u32>(value), any);
    }
}

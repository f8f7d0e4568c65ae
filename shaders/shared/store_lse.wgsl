// The natural logarithm of the sum of exponentials of a row's scores, highest + log(total): -infinity, by its bits,
// where there is none. For a merge of parts, highest and total by themselves: beside a highest of a million nothing
// would be left of the logarithm.
fn store_lse(item: Item, query: u32, any: bool, highest: f32, total: f32) {
    if (params.has_lse != 0u) {
        let index = params.lse_offset + item.batch * params.lse_batch_stride + item.head * params.lse_head_stride
            + (item.q_start + query) * params.lse_token_stride + item.part * params.lse_part_stride;
        let value = select(highest + log(total), highest, params.has_lse == 2u);
        lse[index] = select(0xff800000u, bitcast<u32>(value), any);
        if (params.has_lse == 2u) {
            lse[index + 1u] = bitcast<u32>(total);
        }
    }
}

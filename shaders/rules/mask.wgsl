// A mask (B, H, Tq, Tk), any axis broadcast: one byte a pair, 0 hides the key from the query.
const MASKED: bool = true;

@group(0) @binding(7)
var<storage, read> mask: array<u32>;

fn mask_allows(item: Item, query: u32, key: u32) -> bool {
    let byte = params.mask_offset + item.batch * params.mask_batch_stride + item.head * params.mask_head_stride
        + query * params.mask_query_stride + key * params.mask_key_stride;
    let allowed = ((mask[byte / 4u] >> (8u * (byte % 4u))) & 0xffu) != 0u;
    return allowed | (params.has_mask == 0u);
}

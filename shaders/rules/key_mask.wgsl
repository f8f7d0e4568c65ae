// A padding mask (B, Tk): one byte a key, 0 hides the key from every head and query of the batch item.
const HIDES_SINGLE_KEYS: bool = true;

fn may_attend(batch: u32, head: u32, query: u32, key: u32) -> bool {
    let byte = params.mask_offset + batch * params.mask_batch_stride + key;
    return ((mask[byte / 4u] >> (8u * (byte % 4u))) & 0xffu) != 0u;
}

// The keys of an item lie in pages, which its row of the block table names in order.
const PAGED: bool = true;

// The row of a key along the token axis of k and v. Whatever the table holds, it is one of them.
fn key_row(item: Item, key: u32) -> u32 {
    let size = params.page_size;
    let page = tables[params.block_table_at + item.batch * params.block_table_stride + key / size];
    return min(page, max(params.kv_total / size, 1u) - 1u) * size + key % size;
}

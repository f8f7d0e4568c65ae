// How the decode kernels share out work: a workgroup has one batch item, one KV head, ROWS rows and one part of the keys.
// Row R is query R / group of head kv_head * group + R % group: all rows read the same k and v.

struct Share {
    batch: u32,
    kv_head: u32,
    first_row: u32,
    part: u32,
}

fn share_of(number: u32) -> Share {
    let kv_heads = params.heads / params.group;
    let tile = number / kv_heads;
    let part = tile / params.q_tiles;
    return Share(part / params.parts, number % kv_heads, (tile % params.q_tiles) * ROWS, part % params.parts);
}

fn query_of(row: u32) -> u32 {
    return row / params.group;
}

fn head_of(share: Share, row: u32) -> u32 {
    return share.kv_head * params.group + row % params.group;
}

// What a row has of its own: the item of its head. A sink counts in the first part alone.
fn row_item(share: Share, row: u32) -> Item {
    var item = item_at(share.batch, head_of(share, row));
    item.has_sink = item.has_sink && share.part == 0u;
    item.part = share.part;
    return item;
}

// Keys that some row of the workgroup may see by position, [x, y), as far as they belong to its part. Of the whole run
// each part has an equal number of blocks of `block` keys (the last ones fewer), so that what a large cache does not
// hold yet takes no part's time.
fn keys_of(share: Share, item: Item, block: u32) -> vec2<u32> {
    let first = query_of(share.first_row);
    let end = min(query_of(share.first_row + ROWS - 1u) + 1u, item.q_len);
    let from_key = key_first(item, first);
    let to_key = select(0u, key_limit(item, max(end, 1u) - 1u), first < end);
    let keys = max(to_key, from_key) - from_key;
    let blocks = (keys + block - 1u) / block;
    let own = (blocks + params.parts - 1u) / params.parts * block;
    let start = from_key + min(share.part * own, keys);
    return vec2<u32>(start, min(start + own, from_key + keys));
}

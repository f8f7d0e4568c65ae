// The keys of an item lie one behind the other.
const PAGED: bool = false;

// The row of a key along the token axis of k and v.
fn key_row(item: Item, key: u32) -> u32 {
    return item.k_start + key;
}

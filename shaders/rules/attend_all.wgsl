// No mask.
const MASKED: bool = false;

fn mask_allows(item: Item, query: u32, key: u32) -> bool {
    return true;
}

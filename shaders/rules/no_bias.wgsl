// No bias.
fn bias_of(item: Item, query: u32, key: u32) -> f32 {
    return 0.0;
}

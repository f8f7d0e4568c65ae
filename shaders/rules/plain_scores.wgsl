// The score is scale * q.k.
const SCORED: bool = false;
const PLAIN_SCORES: u32 = 1u;

fn score_rules(item: Item, product: f32, query: u32, key: u32) -> Pair {
    return Pair(true, product);
}

fn capped(product: f32) -> f32 {
    return product;
}

// What the rules make of one pair of a query and a key that their positions allow: each rule is a function of
// a fragment in rules/.

struct Pair {
    visible: bool,
    score: f32,
}

// Whether some pair may be hidden that its position allows.
const HIDES_SINGLE_KEYS: bool = MASKED || SCORED || RULED;

// product: scale * q.k
fn judge(item: Item, product: f32, query: u32, key: u32) -> Pair {
    let scored = score_rules(item, product, query, key);
    let ruled = score(scored.score, item.batch, item.head, query, key);
    // A rule that makes the score -infinity hides the key.
    let hidden = RULED & weighs_nothing(ruled) & !weighs_nothing(scored.score);
    let visible = scored.visible & !hidden & mask_allows(item, query, key)
        & may_attend(item.batch, item.head, query, key);
    return Pair(visible, ruled);
}

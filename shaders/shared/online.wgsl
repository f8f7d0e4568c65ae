// The online softmax: what one more key does to a row (Milakov and Gimelshein, "Online normalizer calculation for
// softmax", 2018), without a stand-in for -infinity and without a branch.

// Of the keys that a row has met: the highest score, and the sum of exp(score - highest), which is 0 exactly until the
// first key that counts (or the sink). It is at least 1 afterwards (the highest key adds exp(0)) unless NaN.
struct Online {
    highest: f32,
    total: f32,
}

// What a key weighs, and what shrinks everything that was there.
struct Weighed {
    row: Online,
    weight: f32,
    shrink: f32,
}

// One of weight and shrink is 1, the other exp of the distance between the score and the highest before it; a key that
// does not count weighs 0 and shrinks nothing.
fn weigh(row: Online, score: f32, visible: bool) -> Weighed {
    // The first key is its own highest; a score of NaN or infinity still makes a NaN of the row.
    let before = select(row.highest, score, row.total == 0.0);
    let distance = score - before;
    let factor = select(exp(-abs(distance)), 1.0, distance == 0.0);
    let rises = score > before;
    let counts = visible & !weighs_nothing(score);
    let weight = select(0.0, select(factor, 1.0, rises), counts);
    let shrink = select(1.0, factor, rises & counts);
    let highest = select(row.highest, select(before, score, rises), counts);
    let total = select(row.total, fma(row.total, shrink, weight), counts);
    return Weighed(Online(highest, total), weight, shrink);
}

// What a row's sums are divided by: its total. A highest score of +infinity makes a NaN of the row, as inf - inf would;
// told by the exponent's bits and made by setting one more, since compilers may take floats for finite.
fn divisor_of(row: Online) -> f32 {
    let bits = bitcast<u32>(row.highest);
    return select(row.total, bitcast<f32>(bits | 0x400000u), ((bits >> 23u) & 0xffu) == 0xffu);
}

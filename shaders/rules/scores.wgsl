// softcap, then ALiBi and a bias. A bias of -infinity hides the key, whatever the product is; any other bias is a
// number.
const SCORED: bool = true;
const PLAIN_SCORES: u32 = 0u;

fn score_rules(item: Item, product: f32, query: u32, key: u32) -> Pair {
    let distance = abs(i32(query) + item.own - i32(key));
    let sloped = capped(product) - item.slope * f32(distance);
    let added = bias_of(item, query, key);
    return Pair(!weighs_nothing(added), sloped + added);
}

// softcap * tanh(product / softcap). The hyperbolic tangent is our own: built-in ones overflow on some drivers,
// and lose the digits of small arguments on others.
fn capped(product: f32) -> f32 {
    if (params.softcap == 0.0) {
        return product;
    }
    let x = product / params.softcap;
    let square = x * x;
    // Odd terms of the series up to x^9: exact to f32 below 0.25.
    let series = x * (1.0 + square * (-0.33333334 + square * (0.13333334 + square * (-0.053968254 + square * 0.021869488))));
    let shrunk = exp(-2.0 * abs(x));
    let ratio = (1.0 - shrunk) / (1.0 + shrunk);
    let large = select(ratio, -ratio, x < 0.0);
    return params.softcap * select(large, series, abs(x) < 0.25);
}

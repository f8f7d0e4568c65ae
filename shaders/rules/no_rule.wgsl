// No rule of the caller's own.
const RULED: bool = false;
const UNRULED: u32 = 1u;

fn may_attend(batch: u32, head: u32, query: u32, key: u32) -> bool {
    return true;
}

fn score(score: f32, batch: u32, head: u32, query: u32, key: u32) -> f32 {
    return score;
}

// A score of -infinity weighs nothing. Told by its bits, since compilers may take floats for finite.
fn weighs_nothing(score: f32) -> bool {
    return bitcast<u32>(score) == 0xff800000u;
}

// Writing the output, whatever its type. Rows of 16-bit outputs begin on whole words (the host sees to it), so
// that no two invocations write one word; a last channel that stands alone leaves the other half as it is.
fn store_pair(index: u32, first: f32, second: f32, both: bool) {
    if (params.out_type == F32) {
        out[index] = bitcast<u32>(first);
        if (both) {
            out[index + 1u] = bitcast<u32>(second);
        }
    } else {
        let low = half_bits(first, params.out_type);
        var high = half_bits(second, params.out_type) << 16u;
        if (!both) {
            high = out[index >> 1u] & 0xffff0000u;
        }
        out[index >> 1u] = high | low;
    }
}

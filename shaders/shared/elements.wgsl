// Elements of 16 bits, two in a word, by whole-number arithmetic, so that every adapter reads the same values (small
// ones too) and rounds to nearest even. The built-in unpack2x16float is not on every adapter, and pack2x16float may
// round as it likes.

const F32: u32 = 0u;
const F16: u32 = 1u;
const BF16: u32 = 2u;

// The word of a buffer that holds an element.
fn word_of(index: u32, element: u32) -> u32 {
    return select(index >> 1u, index, element == F32);
}

fn value_of(word: u32, index: u32, element: u32) -> f32 {
    let half = (word >> ((index & 1u) * 16u)) & 0xffffu;
    let small = select(f16_value_bits(half), half << 16u, element == BF16);
    return bitcast<f32>(select(small, word, element == F32));
}

// The bits of the f32 of the same value.
fn f16_value_bits(half: u32) -> u32 {
    let size = half & 0x7fffu;
    // The exponents are 15 and 127 off; below 2^-14 the fraction counts 2^-24; all ones are infinity and NaN.
    let normal = (size << 13u) + 0x38000000u;
    let subnormal = bitcast<u32>(f32(size) * 5.9604645e-8);
    let finite = select(normal, subnormal, size < 0x400u);
    let value = select(finite, (size << 13u) | 0x7f800000u, size >= 0x7c00u);
    return ((half & 0x8000u) << 16u) | value;
}

fn f16_bits(value: f32) -> u32 {
    let bits = bitcast<u32>(value);
    let sign = (bits >> 16u) & 0x8000u;
    let size = bits & 0x7fffffffu;
    // In [0.5, 1) neighbours are 2^-24 apart, as f16 are below 2^-14: the sum rounds as they do.
    let subnormal = bitcast<u32>(abs(value) + 0.5) - 0x3f000000u;
    let normal = (size + 0xfffu + ((size >> 13u) & 1u) - 0x38000000u) >> 13u;
    var half = select(normal, subnormal, size < 0x38800000u);
    // From 65520 on it is infinity.
    half = select(half, 0x7c00u, size >= 0x477ff000u);
    half = select(half, 0x7e00u, size > 0x7f800000u);
    return sign | half;
}

fn bf16_bits(value: f32) -> u32 {
    let bits = bitcast<u32>(value);
    let rounded = (bits + 0x7fffu + ((bits >> 16u) & 1u)) >> 16u;
    return select(rounded, (bits >> 16u) | 0x40u, (bits & 0x7fffffffu) > 0x7f800000u);
}

fn half_bits(value: f32, element: u32) -> u32 {
    return select(f16_bits(value), bf16_bits(value), element == BF16);
}

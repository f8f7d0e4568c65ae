// Tiles and values in workgroup memory as f32, and q of any type. (Queries are scaled as they are staged.)
@group(0) @binding(0)
var<storage, read> q: array<u32>;

alias Four = vec4<f32>;

const SCALES_PRODUCTS: bool = false;

fn staged_as(of_q: bool, four: Four) -> Four {
    return four * select(1.0, params.scale, of_q);
}

// Four channels of q (channels past the head are anything).
fn q_four_words(start: u32, channel: u32) -> vec4<f32> {
    let last = params.head_dim - 1u;
    return bitcast<vec4<f32>>(vec4<u32>(
        q[start + min(channel, last)],
        q[start + min(channel + 1u, last)],
        q[start + min(channel + 2u, last)],
        q[start + min(channel + 3u, last)],
    ));
}

fn q_half(start: u32, channel: u32) -> f32 {
    let at = start + min(channel, params.head_dim - 1u);
    return value_of(q[at >> 1u], at, params.q_type);
}

fn q_four_halves(start: u32, channel: u32) -> vec4<f32> {
    return vec4<f32>(
        q_half(start, channel),
        q_half(start, channel + 1u),
        q_half(start, channel + 2u),
        q_half(start, channel + 3u),
    );
}

// Four channels of four queries.
fn q_block(start: vec4<u32>, channel: u32) -> array<Four, 4> {
    if (params.q_type == F32) {
        return array<Four, 4>(
            q_four_words(start.x, channel),
            q_four_words(start.y, channel),
            q_four_words(start.z, channel),
            q_four_words(start.w, channel),
        );
    }
    return array<Four, 4>(
        q_four_halves(start.x, channel),
        q_four_halves(start.y, channel),
        q_four_halves(start.z, channel),
        q_four_halves(start.w, channel),
    );
}

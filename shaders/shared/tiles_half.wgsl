// Tiles and values in workgroup memory as they are stored, f16, and q of f16. Products of two f16 are exact in f32, and
// so the scale waits until they are added up: scaled queries would have to be rounded.
enable f16;

@group(0) @binding(0)
var<storage, read> q: array<f16>;

alias Four = vec4<f16>;

const SCALES_PRODUCTS: bool = true;

fn staged_as(of_q: bool, four: Four) -> Four {
    return four;
}

// Four channels of q (channels past the head are anything).
fn q_four(start: u32, channel: u32) -> Four {
    let last = params.head_dim - 1u;
    return Four(
        q[start + min(channel, last)],
        q[start + min(channel + 1u, last)],
        q[start + min(channel + 2u, last)],
        q[start + min(channel + 3u, last)],
    );
}

// Four channels of four queries.
fn q_block(start: vec4<u32>, channel: u32) -> array<Four, 4> {
    return array<Four, 4>(
        q_four(start.x, channel),
        q_four(start.y, channel),
        q_four(start.z, channel),
        q_four(start.w, channel),
    );
}

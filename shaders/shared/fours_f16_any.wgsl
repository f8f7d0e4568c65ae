// Four neighbouring channels of k or v, as f16, wherever they begin: four loads.
enable f16;

@group(0) @binding(1)
var<storage, read> k: array<f16>;
@group(0) @binding(2)
var<storage, read> v: array<f16>;

// Channels past the head are anything.
fn k_four_unmasked(row: u32, channel: u32) -> vec4<f16> {
    let last = params.head_dim - 1u;
    return vec4<f16>(
        k[row + min(channel, last)],
        k[row + min(channel + 1u, last)],
        k[row + min(channel + 2u, last)],
        k[row + min(channel + 3u, last)],
    );
}

// Channels past the head are anything.
fn v_four(row: u32, channel: u32) -> vec4<f16> {
    let last = params.value_dim - 1u;
    return vec4<f16>(
        v[row + min(channel, last)],
        v[row + min(channel + 1u, last)],
        v[row + min(channel + 2u, last)],
        v[row + min(channel + 3u, last)],
    );
}

// What `generate.rs` computes itself, between the attention layers and projections of the crate: the application's own
// kernels. Every entry point uses the bindings from 0 on, so that wgpu can read the layout of each off its code.

struct Params {
    // Channels of a row; for `argmax`, logits.
    width: u32,
    // layer_norm: the first row that is read. Results begin at row 0.
    first_row: u32,
    // embed: 1 where there are position embeddings. gelu: 1 for the approximation by tanh.
    option: u32,
    padding: u32,
}

@group(0) @binding(0) var<uniform> params: Params;

// ---- x[t] = wte[token t], and + wpe[position t]: an invocation a channel, a row of workgroups a token

// The position of the first token, then the tokens.
@group(0) @binding(1) var<storage, read> call: array<u32>;
@group(0) @binding(2) var<storage, read> token_embeddings: array<f32>;
@group(0) @binding(3) var<storage, read> position_embeddings: array<f32>;
@group(0) @binding(4) var<storage, read_write> embedded: array<f32>;

@compute @workgroup_size(64)
fn embed(@builtin(global_invocation_id) id: vec3<u32>) {
    let channel = id.x;
    let row = id.y;
    if channel >= params.width {
        return;
    }
    var value = token_embeddings[call[1u + row] * params.width + channel];
    if params.option == 1u {
        value += position_embeddings[(call[0] + row) * params.width + channel];
    }
    embedded[row * params.width + channel] = value;
}

// ---- layer norm: (x - mean) / deviation * weight + bias, a workgroup a row

@group(0) @binding(1) var<storage, read> norm_weight: array<f32>;
@group(0) @binding(2) var<storage, read> norm_bias: array<f32>;
@group(0) @binding(3) var<storage, read> norm_in: array<f32>;
@group(0) @binding(4) var<storage, read_write> norm_out: array<f32>;

const LANES = 64u;
const EPSILON = 1e-5;
var<workgroup> sums: array<f32, LANES>;

// The sum of every invocation's value, for all of them.
fn total(lane: u32, value: f32) -> f32 {
    // The total before has been read by all: only now may it be overwritten.
    workgroupBarrier();
    sums[lane] = value;
    for (var half = LANES / 2u; half > 0u; half /= 2u) {
        // The upper half of the last round, written by others, is read in this one.
        workgroupBarrier();
        if lane < half {
            sums[lane] += sums[lane + half];
        }
    }
    // The first invocation has written what all read.
    workgroupBarrier();
    return sums[0];
}

@compute @workgroup_size(64)
fn layer_norm(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let width = params.width;
    let first = (params.first_row + group.y) * width;
    var sum = 0.0;
    for (var channel = lane; channel < width; channel += LANES) {
        sum += norm_in[first + channel];
    }
    let mean = total(lane, sum) / f32(width);
    var squares = 0.0;
    for (var channel = lane; channel < width; channel += LANES) {
        let distance = norm_in[first + channel] - mean;
        squares += distance * distance;
    }
    let scale = inverseSqrt(total(lane, squares) / f32(width) + EPSILON);
    for (var channel = lane; channel < width; channel += LANES) {
        let value = (norm_in[first + channel] - mean) * scale;
        norm_out[group.y * width + channel] = value * norm_weight[channel] + norm_bias[channel];
    }
}

// ---- GELU, in place

@group(0) @binding(1) var<storage, read_write> hidden: array<f32>;

// WGSL has no error function: Abramowitz and Stegun 7.1.26, within 1.5e-7.
fn erf(x: f32) -> f32 {
    let t = 1.0 / (1.0 + 0.3275911 * abs(x));
    let polynomial = ((((1.061405429 * t - 1.453152027) * t + 1.421413741) * t - 0.284496736) * t + 0.254829592) * t;
    return sign(x) * (1.0 - polynomial * exp(-x * x));
}

@compute @workgroup_size(64)
fn gelu(@builtin(global_invocation_id) id: vec3<u32>) {
    if id.x >= params.width {
        return;
    }
    let at = id.y * params.width + id.x;
    let x = hidden[at];
    if params.option == 1u {
        // Some drivers' tanh overflows far out, where it has been 1 for long.
        let inner = clamp(0.7978845608 * (x + 0.044715 * x * x * x), -10.0, 10.0);
        hidden[at] = 0.5 * x * (1.0 + tanh(inner));
    } else {
        hidden[at] = 0.5 * x * (1.0 + erf(x * 0.7071067812));
    }
}

// ---- x += y: the residual

@group(0) @binding(1) var<storage, read> added: array<f32>;
@group(0) @binding(2) var<storage, read_write> residual: array<f32>;

@compute @workgroup_size(64)
fn add(@builtin(global_invocation_id) id: vec3<u32>) {
    if id.x < params.width {
        let at = id.y * params.width + id.x;
        residual[at] += added[at];
    }
}

// ---- the token with the highest logit, the first of equals: one workgroup

@group(0) @binding(1) var<storage, read> logits: array<f32>;
@group(0) @binding(2) var<storage, read_write> best_token: array<u32>;

var<workgroup> candidates: array<u32, LANES>;

@compute @workgroup_size(64)
fn argmax(@builtin(local_invocation_index) lane: u32) {
    var best = 0u;
    for (var token = lane; token < params.width; token += LANES) {
        if logits[token] > logits[best] {
            best = token;
        }
    }
    candidates[lane] = best;
    // The first invocation reads what all have found.
    workgroupBarrier();
    if lane == 0u {
        for (var other = 1u; other < LANES; other++) {
            let token = candidates[other];
            let more = logits[token] > logits[best];
            if more || (logits[token] == logits[best] && token < best) {
                best = token;
            }
        }
        best_token[0] = best;
    }
}

// An additive bias (B, H, Tq, Tk), any axis broadcast.
@group(0) @binding(8)
var<storage, read> bias: array<f32>;

fn bias_of(item: Item, query: u32, key: u32) -> f32 {
    let at = params.bias_offset + item.batch * params.bias_batch_stride + item.head * params.bias_head_stride
        + query * params.bias_query_stride + key * params.bias_key_stride;
    return select(0.0, bias[at], params.has_bias != 0u);
}

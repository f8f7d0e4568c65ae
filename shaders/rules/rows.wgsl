// Store of a projection: every column goes to y.

// Where a row's outputs go.
struct StoreRow {
    at: u32,
}

fn store_row(row: u32) -> StoreRow {
    return StoreRow(params.y_offset + row_start(row, params.y_batch_stride, params.y_token_stride));
}

// Two neighbouring columns, the first of them even. `both`: the second is there.
fn store_pair(row: StoreRow, column: u32, values: vec2<f32>, both: bool) {
    let at = row.at + column * params.y_channel_stride;
    y[at] = values.x;
    if (both) {
        y[at + params.y_channel_stride] = values.y;
    }
}

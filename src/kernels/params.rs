//! Parameter structs: what varies from call to call, in uniform buffers.
//!
//! Each has a WGSL twin in `shaders/shared/`, field by field; a test reflects the twin's offsets, and
//! another reads every field back on the GPU.

use super::{Field, ParamsLayout};
use bytemuck::{Pod, Zeroable};

macro_rules! params {
    ($(#[$meta:meta])* struct $name:ident { $($field:ident: $ty:ident,)* }) => {
        $(#[$meta])*
        #[repr(C)]
        #[derive(Clone, Copy, Debug, Default, PartialEq, Pod, Zeroable)]
        pub(crate) struct $name { $(pub(crate) $field: $ty,)* }

        impl $name {
            pub(crate) const LAYOUT: ParamsLayout = ParamsLayout {
                name: stringify!($name),
                size: size_of::<$name>(),
                fields: &[$(Field {
                    name: stringify!($field),
                    offset: std::mem::offset_of!($name, $field),
                    ty: stringify!($ty),
                },)*],
            };
        }
    };
}

params! {
    /// Twin of `shaders/shared/attention_params.wgsl`, which says what each field means.
    struct AttentionParams {
        heads: u32,
        q_len: u32,
        kv_len: u32,
        head_dim: u32,
        causal: u32,
        causal_offset: i32,
        scale: f32,
        q_tiles: u32,
        groups: u32,
        q_offset: u32,
        q_batch_stride: u32,
        q_token_stride: u32,
        q_head_stride: u32,
        k_offset: u32,
        k_batch_stride: u32,
        k_token_stride: u32,
        k_head_stride: u32,
        v_offset: u32,
        v_batch_stride: u32,
        v_token_stride: u32,
        v_head_stride: u32,
        out_offset: u32,
        out_batch_stride: u32,
        out_token_stride: u32,
        out_head_stride: u32,
        mask_offset: u32,
        mask_batch_stride: u32,
    }
}

params! {
    /// Twin of `shaders/shared/linear_params.wgsl`, which says what each field means.
    struct LinearParams {
        rows: u32,
        tokens: u32,
        d_in: u32,
        d_out: u32,
        has_bias: u32,
        column_tiles: u32,
        groups: u32,
        x_offset: u32,
        x_batch_stride: u32,
        x_token_stride: u32,
        x_channel_stride: u32,
        weight_offset: u32,
        weight_out_stride: u32,
        weight_in_stride: u32,
        bias_offset: u32,
        y_offset: u32,
        y_batch_stride: u32,
        y_token_stride: u32,
        y_channel_stride: u32,
        padding: u32,
    }
}

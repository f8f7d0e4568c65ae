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
        packed: u32,
        heads: u32,
        group: u32,
        q_len: u32,
        kv_len: u32,
        q_total: u32,
        kv_total: u32,
        head_dim: u32,
        value_dim: u32,
        scale: f32,
        softcap: f32,
        bottom_right: u32,
        window_left: i32,
        window_right: i32,
        key_begin: u32,
        key_end: u32,
        q_type: u32,
        out_type: u32,
        q_tiles: u32,
        groups: u32,
        first_group: u32,
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
        has_lse: u32,
        lse_offset: u32,
        lse_batch_stride: u32,
        lse_token_stride: u32,
        lse_head_stride: u32,
        has_mask: u32,
        mask_offset: u32,
        mask_batch_stride: u32,
        mask_head_stride: u32,
        mask_query_stride: u32,
        mask_key_stride: u32,
        has_bias: u32,
        bias_offset: u32,
        bias_batch_stride: u32,
        bias_head_stride: u32,
        bias_query_stride: u32,
        bias_key_stride: u32,
        q_lens_at: u32,
        kv_lens_at: u32,
        cu_seqlens_q_at: u32,
        cu_seqlens_k_at: u32,
        slopes_at: u32,
        slopes_batch_stride: u32,
        sinks_at: u32,
        page_size: u32,
        block_table_at: u32,
        block_table_stride: u32,
        rule_data_offset: u32,
        parts: u32,
        out_part_stride: u32,
        lse_part_stride: u32,
        stage: u32,
        weights_key_stride: u32,
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
        first_group: u32,
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
        q_columns: u32,
        kv_heads: u32,
        head_dim: u32,
        value_dim: u32,
        cache_type: u32,
        k_offset: u32,
        k_batch_stride: u32,
        k_token_stride: u32,
        k_head_stride: u32,
        v_offset: u32,
        v_batch_stride: u32,
        v_token_stride: u32,
        v_head_stride: u32,
        lengths_at: u32,
        counts_at: u32,
        capacity: u32,
        page_size: u32,
        block_table_at: u32,
        block_table_stride: u32,
        cache_rows: u32,
    }
}

params! {
    /// Twin of `shaders/shared/merge_params.wgsl`, which says what each field means.
    struct MergeParams {
        parts: u32,
        heads: u32,
        q_len: u32,
        value_dim: u32,
        groups: u32,
        first_group: u32,
        parts_offset: u32,
        parts_part_stride: u32,
        parts_batch_stride: u32,
        parts_token_stride: u32,
        parts_head_stride: u32,
        paired: u32,
        part_lse_offset: u32,
        part_lse_part_stride: u32,
        part_lse_batch_stride: u32,
        part_lse_head_stride: u32,
        part_lse_token_stride: u32,
        out_type: u32,
        out_offset: u32,
        out_batch_stride: u32,
        out_token_stride: u32,
        out_head_stride: u32,
        has_lse: u32,
        lse_offset: u32,
        lse_batch_stride: u32,
        lse_head_stride: u32,
        lse_token_stride: u32,
    }
}

params! {
    /// Twin of `shaders/shared/copy_params.wgsl`, which says what each field means.
    struct CopyParams {
        pairs: u32,
        groups: u32,
        first_group: u32,
        size_1: u32,
        size_2: u32,
        size_3: u32,
        size_4: u32,
        from_type: u32,
        from_offset: u32,
        from_stride_0: u32,
        from_stride_1: u32,
        from_stride_2: u32,
        from_stride_3: u32,
        from_stride_4: u32,
        out_type: u32,
        to_offset: u32,
        to_stride_0: u32,
        to_stride_1: u32,
        to_stride_2: u32,
        to_stride_3: u32,
        to_stride_4: u32,
    }
}

params! {
    /// Twin of `shaders/shared/append_params.wgsl`, which says what each field means.
    struct AppendParams {
        tokens: u32,
        heads: u32,
        k_heads: u32,
        v_heads: u32,
        head_dim: u32,
        value_dim: u32,
        rotary_dims: u32,
        interleaved: u32,
        positions: u32,
        angles_offset: u32,
        pairs: u32,
        groups: u32,
        first_group: u32,
        q_type: u32,
        kv_type: u32,
        q_out_type: u32,
        cache_type: u32,
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
        q_out_offset: u32,
        q_out_batch_stride: u32,
        q_out_token_stride: u32,
        q_out_head_stride: u32,
        k_cache_offset: u32,
        k_cache_batch_stride: u32,
        k_cache_token_stride: u32,
        k_cache_head_stride: u32,
        v_cache_offset: u32,
        v_cache_batch_stride: u32,
        v_cache_token_stride: u32,
        v_cache_head_stride: u32,
        first_position: u32,
        starts_at: u32,
        lengths_at: u32,
        counts_at: u32,
        capacity: u32,
        page_size: u32,
        block_table_at: u32,
        block_table_stride: u32,
        cache_rows: u32,
    }
}

params! {
    /// Twin of `shaders/shared/peak_params.wgsl`, which says what each field means.
    struct PeakParams {
        groups: u32,
        first_group: u32,
    }
}

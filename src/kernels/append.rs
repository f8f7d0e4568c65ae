//! Descriptor of `shaders/append.wgsl`.

use super::*;

pub(super) static KERNEL: Kernel = Kernel {
    name: "append",
    operation: Operation::Append,
    form: Form::Tiled,
    summary: "new keys and values into a cache, and rotary embedding",
    source: include_str!("../../shaders/append.wgsl"),
    fragments: &[&GRID, &APPEND_PARAMS, &ELEMENTS, &CACHE_ROW],
    bindings: &[
        read(0, "q"),
        read(1, "k"),
        read(2, "v"),
        write(3, "q_out"),
        write(4, "k_cache"),
        write(5, "v_cache"),
        read(6, "tables"),
        read(7, "angles"),
        params(8),
    ],
    params: AppendParams::LAYOUT,
    configurations: || {
        vec![Configuration {
            consts: Vec::new(),
            rules: Vec::new(),
        }]
    },
    workgroup_bytes: |_| 0,
    invocations: |_| 64,
    loop_iterations: |_, _, _| 0,
    needs_cleared_memory: false,
};

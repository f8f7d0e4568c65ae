//! Descriptor of `shaders/copy.wgsl`.

use super::*;

pub(super) static KERNEL: Kernel = Kernel {
    name: "copy",
    operation: Operation::Copy,
    form: Form::Tiled,
    summary: "a strided copy from any float type to any",
    source: include_str!("../../shaders/copy.wgsl"),
    fragments: &[&GRID, &COPY_PARAMS, &ELEMENTS, &STORE],
    bindings: &[read(0, "source"), write(1, "out"), params(2)],
    params: CopyParams::LAYOUT,
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

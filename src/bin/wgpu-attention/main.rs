//! The program `wgpu-attention`.
fn main() {}

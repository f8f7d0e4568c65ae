//! The weights of layers in safetensors checkpoints, by the names that people give them.

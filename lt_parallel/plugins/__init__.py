"""What plugs into Lightning and Megatron Core: precision, checkpoints, layer backends, the CPU runtime."""

"""Tensor operations that Megatron Core lacks."""

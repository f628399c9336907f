"""Callbacks that add one Megatron Core feature each, by `contribute(settings)`."""

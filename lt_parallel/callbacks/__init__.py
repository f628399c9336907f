"""Callbacks: what adds a Megatron Core feature, by `contribute(settings)`, and what watches a run."""

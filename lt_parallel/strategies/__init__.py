"""The Lightning strategy."""

from lt_parallel.strategies.megatron import MegatronParallelStrategy

__all__ = ["MegatronParallelStrategy"]

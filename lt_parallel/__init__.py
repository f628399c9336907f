"""Megatron Core's parallelism for PyTorch Lightning's Trainer."""

from lt_parallel.runtime import install_finder

install_finder()

"""Counting parameters that are spread over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn


def count_parameters(chunks: Sequence[nn.Module], groups: Any, device: torch.device) -> tuple[int, int]:
    """Counts each parameter of the whole model once.

    Collective over the tensor-parallel, pipeline and expert groups. Copies are left out: what tensor-parallel ranks
    hold alike, and the tied output layer that the last stage keeps of the first stage's embedding. Vocabulary padding
    is part of the weights and counts.

    Args:
        chunks: This rank's chunks, unwrapped.
        groups: The `ProcessGroupCollection`.
        device: For the exchange.

    Returns:
        (parameters of the model, parameters that this rank holds).
    """
    local = sum(parameter.numel() for chunk in chunks for parameter in chunk.parameters())
    dense = expert = 0
    for chunk in chunks:
        for parameter in chunk.parameters():
            cut = getattr(parameter, "tensor_model_parallel", False)
            if getattr(parameter, "shared", False):
                continue
            if not getattr(parameter, "allreduce", True):
                expert += parameter.numel() if cut or groups.expt_tp.rank() == 0 else 0
            elif cut or groups.tp.rank() == 0:
                dense += parameter.numel()
    counts = torch.tensor([dense, expert], dtype=torch.int64, device=device)
    torch.distributed.all_reduce(counts[:1], group=groups.mp)
    torch.distributed.all_reduce(counts[1:], group=groups.tp_ep_pp)
    return int(counts.sum()), local

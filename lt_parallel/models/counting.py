"""Counting parameters that are spread over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn


def is_routed(name: str) -> bool:
    """Whether a parameter of that name belongs to experts that tokens are sent to; shared experts don't."""
    return ".experts." in name


def active_parameters(total: int, routed: int, num_moe_experts: int, moe_router_topk: int) -> int:
    """Parameters that one token meets: all but those of the experts that it isn't sent to.

    What publications call active or activated parameters. Embedding and output layer are among them.

    Args:
        total: Parameters of the model.
        routed: Those of them that `is_routed` is true of.
        num_moe_experts: Experts of each layer that has some.
        moe_router_topk: Experts that a token visits there.
    """
    return total - routed * (num_moe_experts - moe_router_topk) // num_moe_experts


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
    return _count_once([parameter for chunk in chunks for parameter in chunk.parameters()], groups, device), local


def count_routed(chunks: Sequence[nn.Module], groups: Any, device: torch.device) -> int:
    """Counts each parameter of the experts that tokens are sent to once; collective as `count_parameters`.

    Args:
        chunks: This rank's chunks, unwrapped.
        groups: The `ProcessGroupCollection`.
        device: For the exchange.
    """
    named = [each for chunk in chunks for each in chunk.named_parameters()]
    return _count_once([parameter for name, parameter in named if is_routed(name)], groups, device)


def _count_once(parameters: Sequence[nn.Parameter], groups: Any, device: torch.device) -> int:
    dense = expert = 0
    for parameter in parameters:
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
    return int(counts.sum())

"""One matrix product per expert over tokens that are sorted by expert.

    y[t] = x[t] @ weight[e].T    for every token t of expert e

On GPU and CPU alike PyTorch's grouped matrix product does all experts in one call, forward and backward. It takes
float32, bfloat16 and float16 with rows of a multiple of 16 bytes; anything else runs expert by expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["grouped_linear", "weight_gradient"]

_GROUPED_MM: Any = getattr(F, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)
_GROUPED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_ROW_BYTES = 16


def grouped_linear(x: Tensor, weight: Tensor, tokens_per_expert: Sequence[int]) -> Tensor:
    """Applies each expert's matrix to its tokens; differentiable once.

    Args:
        x: `[tokens, inputs]`, the tokens of expert 0 first, then those of expert 1 and so on.
        weight: `[experts, outputs, inputs]`, of x's dtype.
        tokens_per_expert: `experts` counts that add up to `tokens`; any may be 0.

    Returns:
        `[tokens, outputs]`.

    Raises:
        ValueError: The counts don't fit the tensors.
    """
    if len(tokens_per_expert) != weight.size(0) or sum(tokens_per_expert) != x.size(0):
        raise ValueError(
            f"tokens_per_expert={list(tokens_per_expert)} must be {weight.size(0)} counts (weight is "
            f"{tuple(weight.shape)}) that add up to {x.size(0)} tokens"
        )
    result: Tensor = _GroupedLinear.apply(x, weight, tuple(tokens_per_expert))
    return result


def weight_gradient(grad: Tensor, x: Tensor, tokens_per_expert: Sequence[int]) -> Tensor:
    """The gradient of `grouped_linear`'s weight.

    Args:
        grad: `[tokens, outputs]`, of the result.
        x: `[tokens, inputs]`.
        tokens_per_expert: As in `grouped_linear`.

    Returns:
        `[experts, outputs, inputs]`; zeros for an expert without tokens.
    """
    if x.size(0) and _in_one_call(x, grad.size(1), x.size(1)):
        result: Tensor = _GROUPED_MM(grad.t(), x, offs=_ends(tokens_per_expert, x.device))
        return result
    sizes = list(tokens_per_expert)
    return torch.stack([of_y.t() @ of_x for of_y, of_x in zip(grad.split(sizes), x.split(sizes), strict=True)])


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, tokens_per_expert: tuple[int, ...]) -> Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x, weight)
        ctx.tokens_per_expert = tokens_per_expert
        return _products(x, weight.transpose(1, 2), tokens_per_expert)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        grad = grads[0].contiguous()
        of_x, of_weight, _ = ctx.needs_input_grad
        return (
            _products(grad, weight, ctx.tokens_per_expert) if of_x else None,
            weight_gradient(grad, x, ctx.tokens_per_expert) if of_weight else None,
            None,
        )


def _products(x: Tensor, matrices: Tensor, tokens_per_expert: Sequence[int]) -> Tensor:
    """`[tokens, outputs]` of x `[tokens, inputs]` and matrices `[experts, inputs, outputs]`."""
    if x.size(0) and _in_one_call(x, matrices.size(1), matrices.size(2)):
        result: Tensor = _GROUPED_MM(x, matrices, offs=_ends(tokens_per_expert, x.device))
        return result
    parts = x.split(list(tokens_per_expert))
    return torch.cat([part @ matrix for part, matrix in zip(parts, matrices.unbind(), strict=True)])


def _in_one_call(x: Tensor, *row_lengths: int) -> bool:
    aligned = all(length * x.element_size() % _ROW_BYTES == 0 for length in row_lengths)
    return _GROUPED_MM is not None and x.dtype in _GROUPED_DTYPES and aligned


def _ends(tokens_per_expert: Sequence[int], device: torch.device) -> Tensor:
    """Where each expert's tokens end."""
    return torch.tensor(tokens_per_expert).cumsum(0).to(device=device, dtype=torch.int32, non_blocking=True)

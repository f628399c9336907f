"""Attention to one block of keys, in a form that blocks can be put together from.

A softmax over keys that arrive block by block is exact if each block gives its output and the logarithm of its
normaliser (log-sum-exp): outputs are averaged with weights exp(lse_block - lse). In the backward pass a block's
gradients are exact if its kernel gets the *whole* output and log-sum-exp. (Dao et al. 2022, arXiv:2205.14135, section
3.1 and appendix B; Liu et al. 2023, arXiv:2310.01889, use both for sequences that are cut over devices.)

PyTorch's flash and cuDNN kernels return the log-sum-exp and their backward operators take it, so each block runs at
their speed.

Those kernels want as many channels in a value as in a key. Where they differ (multi-latent attention), the narrower
gets zeros here, block by block, so that what travels between ranks stays narrow; zeros change no score and no output.

Shapes: b batch, n query heads, g key/value heads (n a multiple of g), s_q queries, s_k keys, d channels of query and
key, e channels of value.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

_aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)


class Block(NamedTuple):
    """What a block gives: output ``[b, n, s_q, e]`` and log-sum-exp ``[b, n, s_q]`` (fp32, or fp64 for fp64 inputs)."""

    output: Tensor
    lse: Tensor


def attend_block(query: Tensor, key: Tensor, value: Tensor, *, causal: bool, scale: float) -> Block:
    """Softmax attention to one block.

    Args:
        query: ``[b, n, s_q, d]``.
        key: ``[b, g, s_k, d]``.
        value: ``[b, g, s_k, e]``.
        causal: Whether query i sees keys 0 to i only; needs s_q = s_k.
        scale: Factor on the scores.
    """
    channels = value.size(3)
    query, key, value = _equally_wide(query, key, value)
    output, lse = _attend(query, key, value, causal, scale)
    return Block(output[..., :channels], lse)


def _attend(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    if not query.is_cuda:
        output, lse = _aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal, scale=scale)
        return output, lse
    key, value = _expanded(query, key), _expanded(query, value)
    if query.dtype in _HALF:
        output, lse, *_ = _aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal, scale=scale)
    else:
        output, lse, *_ = _aten._scaled_dot_product_efficient_attention(
            query, key, value, None, True, 0.0, causal, scale=scale
        )
    return output, lse[..., : query.size(2)]  # kernels may pad it


def block_gradients(
    grad_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    whole: Block,
    *,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """One block's share of the gradients of query, key and value.

    Args:
        grad_output: Gradient of the whole output, ``[b, n, s_q, e]``.
        query: As in `attend_block`.
        key: As there.
        value: As there.
        whole: Output and log-sum-exp over all blocks.
        causal: As there.
        scale: As there.
    """
    widths = query.size(3), key.size(3), value.size(3)
    query, key, value, grad_output, output = _equally_wide(query, key, value, grad_output, whole.output)
    whole = Block(output, whole.lse)
    gradients = _block_gradients(grad_output, query, key, value, whole, causal, scale)
    of_query, of_key, of_value = (grad[..., :width] for grad, width in zip(gradients, widths, strict=True))
    return of_query, of_key, of_value


def _block_gradients(
    grad_output: Tensor, query: Tensor, key: Tensor, value: Tensor, whole: Block, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    if not query.is_cuda:
        result = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_output, query, key, value, whole.output, whole.lse, 0.0, causal, scale=scale
        )
        return result[0], result[1], result[2]
    groups = key.size(1)
    key, value = _expanded(query, key), _expanded(query, value)
    if query.dtype in _HALF:
        none = torch.empty(0, dtype=torch.uint64, device=query.device)  # random state: there's no dropout
        result = _aten._scaled_dot_product_flash_attention_backward(
            grad_output,
            query,
            key,
            value,
            whole.output,
            whole.lse.contiguous(),
            None,
            None,
            query.size(2),
            key.size(2),
            0.0,
            causal,
            none,
            none,
            scale=scale,
        )
    else:
        none = torch.empty((), dtype=torch.int64, device=query.device)
        result = _aten._scaled_dot_product_efficient_attention_backward(
            grad_output,
            query,
            key,
            value,
            None,
            whole.output,
            _padded(whole.lse),
            none,
            none,
            0.0,
            [True, True, True, False],
            causal,
            scale=scale,
        )
    return result[0], _folded(result[1], groups), _folded(result[2], groups)


def _equally_wide(*tensors: Tensor) -> list[Tensor]:
    """Tensors ``[b, n, s, channels]`` with zeros after the channels of the narrower ones."""
    width = max(tensor.size(3) for tensor in tensors)
    return [F.pad(tensor, (0, width - tensor.size(3))) if tensor.size(3) < width else tensor for tensor in tensors]


def _expanded(query: Tensor, grouped: Tensor) -> Tensor:
    """Key or value heads repeated for each query head of their group."""
    repeats = query.size(1) // grouped.size(1)
    return grouped if repeats == 1 else grouped.repeat_interleave(repeats, dim=1)


def _folded(gradient: Tensor, groups: int) -> Tensor:
    """The sum over the query heads of each group."""
    batch, heads, length, channels = gradient.shape
    if heads == groups:
        return gradient
    return gradient.view(batch, groups, heads // groups, length, channels).sum(2)


def _padded(lse: Tensor) -> Tensor:
    """The memory-efficient kernel wants the log-sum-exp's length as a multiple of 32."""
    rest = -lse.size(-1) % 32
    return lse.contiguous() if rest == 0 else F.pad(lse, (0, rest), value=float("inf"))


def accumulate(whole: Block | None, block: Block) -> Block:
    """The blocks so far and one more; outputs are kept in the log-sum-exp's dtype until the end.

    Args:
        whole: Of the earlier blocks, None before the first; changed in place, so that nothing of its size is made anew.
        block: The next one, for the same queries.
    """
    output = block.output.to(block.lse.dtype)
    if whole is None:
        return Block(output, block.lse)
    lse = torch.logaddexp(whole.lse, block.lse)
    before, now = (torch.exp(part - lse).unsqueeze(-1) for part in (whole.lse, block.lse))
    whole.output.mul_(before).addcmul_(output, now)
    whole.lse.copy_(lse)
    return whole

"""Core attention for the torch backend: PyTorch's ``scaled_dot_product_attention`` behind Megatron's interface.

Megatron Core keeps activations as ``[sequence, batch, heads, channels]``; PyTorch wants ``[batch, heads, sequence,
channels]``. Both are strided views of the same memory, and the flash and cuDNN kernels take any strides whose last is
1 and give their output the query's layout, so nothing is copied on the way in or, there, on the way out.

Shape legend: s sequence, b batch (micro batch), n query heads of this tensor-parallel rank, g key/value heads of this
rank (n / g queries share one), d channels of query and key, e channels of value.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.transformer.enums import AttnBackend, AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from lt_parallel.ops.context_parallel_attention import context_parallel_attention

if TYPE_CHECKING:
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.transformer_config import TransformerConfig

__all__ = ["TorchDotProductAttention", "band_mask"]

_UNLIMITED = -1

_CAUSAL = (AttnMaskType.causal, AttnMaskType.padding_causal, AttnMaskType.causal_bottom_right)
_NEEDS_MASK = (AttnMaskType.padding, AttnMaskType.padding_causal, AttnMaskType.arbitrary)

# Megatron's names of kernel families. `auto` is PyTorch's own choice: cuDNN on Hopper and Blackwell, else flash.
_KERNELS = {
    AttnBackend.auto: None,
    AttnBackend.flash: SDPBackend.FLASH_ATTENTION,
    AttnBackend.fused: SDPBackend.CUDNN_ATTENTION,
    AttnBackend.unfused: SDPBackend.MATH,
}


@lru_cache(maxsize=8)  # every layer of a model asks for the same few
def band_mask(q_len: int, k_len: int, left: int, right: int, device: torch.device) -> Tensor:
    """Which keys each query may see in a band around the diagonal that ends in the bottom right corner.

    Args:
        q_len: number of queries.
        k_len: number of keys.
        left: keys before the query's own position that it sees; -1 for all.
        right: keys after it; -1 for all.
        device: where the mask is to live.

    Returns:
        Boolean ``[q_len, k_len]``, True where a key takes part.
    """
    offset = k_len - q_len
    with torch.inference_mode(False):  # else a mask first made for inference couldn't be used in training
        mask = torch.ones(q_len, k_len, dtype=torch.bool, device=device)
        if left != _UNLIMITED:
            mask = mask.triu(offset - left)
        if right != _UNLIMITED:
            mask = mask.tril(offset + right)
        return mask


class TorchDotProductAttention(MegatronModule):
    """Softmax attention of one layer on one tensor-parallel rank.

    The softmax always runs in fp32 inside the kernel, so ``attention_softmax_in_fp32`` and
    ``apply_query_key_layer_scaling`` (a detour for fp16 softmax that changes no result) need nothing here.

    Args:
        config: Megatron's transformer configuration.
        layer_number: 1-based number of the layer in the whole model (decides whether a sliding window applies).
        attn_mask_type: mask used where ``forward`` is given none.
        attention_type: ``self`` or ``cross``; both are computed the same.
        attention_dropout: probability; None takes ``config.attention_dropout``.
        softmax_scale: factor on the scores; None takes 1 / sqrt(channels of the key).
        k_channels: channels per key head; None takes ``config.kv_channels``. Multi-latent attention sets it.
        v_channels: channels per value head, read from the tensors; accepted for multi-latent attention.
        cp_comm_type: how context parallel ranks exchange keys and values (`lt_parallel.ops`); None means a ring.
        pg_collection: process groups; ``cp`` and, for "a2a+p2p", ``hcp`` are used.

    Raises:
        ValueError: for options that this backend can't honour.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config=config)
        del attention_type, v_channels
        _refuse_unsupported(config)
        self.cp_comm_type = cp_comm_type or "p2p"
        self.pg_collection = pg_collection
        self.attn_mask_type = attn_mask_type
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        channels = config.kv_channels if k_channels is None else k_channels
        self.softmax_scale = 1.0 / math.sqrt(channels) if softmax_scale is None else softmax_scale
        self.window: tuple[int, int] | None = None
        if is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number):
            self.window = tuple(config.window_size)
        self.kernel = _KERNELS[config.attention_backend]

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        /,
        *,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Attend.

        Args:
            query: ``[s_q, b, n, d]``.
            key: ``[s_k, b, g, d]`` with n a multiple of g.
            value: ``[s_k, b, g, e]``.
            attention_mask: boolean, broadcastable to ``[b, n, s_q, s_k]``, True where a key is **hidden** (Megatron's
                convention). It adds to what ``attn_mask_type`` hides. For plain causal attention pass None: only then
                can the flash kernels skip the hidden half.
            attn_mask_type: overrides the layer's.
            attention_bias: not supported.
            packed_seq_params: not supported.

        Returns:
            ``[s_q, b, n * e]``, contiguous.

        Raises:
            ValueError: where the mask type and the arguments don't fit, or an unsupported argument is given.
        """
        if attention_bias is not None or packed_seq_params is not None:
            given = "attention_bias" if attention_bias is not None else "packed_seq_params"
            raise ValueError(
                f"layer_backend='torch' doesn't support {given}; pass None, or use layer_backend='transformer_engine'"
            )
        mask_type = self.attn_mask_type if attn_mask_type is None else attn_mask_type
        if self.config.context_parallel_size > 1:
            return self._across_ranks(query, key, value, attention_mask, mask_type)
        is_causal, mask = self._mask(query, key, attention_mask, mask_type)
        key, value = _expand_groups_if_needed(query, key, value, mask)
        dropout = self.dropout if self.training else 0.0
        with self._kernel_choice(query.device), self._rng_state(dropout):
            context = F.scaled_dot_product_attention(
                query.permute(1, 2, 0, 3),
                key.permute(1, 2, 0, 3),
                value.permute(1, 2, 0, 3),
                attn_mask=mask,
                dropout_p=dropout,
                is_causal=is_causal,
                scale=self.softmax_scale,
                enable_gqa=query.size(2) != key.size(2),
            )
        return context.permute(2, 0, 1, 3).contiguous().flatten(2)

    def _across_ranks(
        self, query: Tensor, key: Tensor, value: Tensor, hidden: Tensor | None, mask_type: AttnMaskType
    ) -> Tensor:
        """Attends to the keys of all context parallel ranks; shapes as in ``forward``, s a rank's part."""
        if hidden is not None or mask_type not in (AttnMaskType.causal, AttnMaskType.no_mask):
            raise ValueError(
                f"context parallelism on layer_backend='torch' attends causally or without a mask, not with "
                f"attn_mask_type={mask_type.name}{' and an attention_mask' if hidden is not None else ''}"
            )
        groups = self.pg_collection
        assert groups is not None, "Megatron Core's attention passes its groups"
        context = context_parallel_attention(
            query.permute(1, 2, 0, 3),
            key.permute(1, 2, 0, 3),
            value.permute(1, 2, 0, 3),
            self.cp_comm_type,
            groups.cp,
            groups.hcp if self.cp_comm_type == "a2a+p2p" else None,
            causal=mask_type is AttnMaskType.causal,
            scale=self.softmax_scale,
        )
        return context.permute(2, 0, 1, 3).contiguous().flatten(2)

    def _mask(
        self, query: Tensor, key: Tensor, hidden: Tensor | None, mask_type: AttnMaskType
    ) -> tuple[bool, Tensor | None]:
        """``is_causal`` and ``attn_mask`` (True where a key takes part) for PyTorch, of which at most one is set."""
        q_len, k_len = query.size(0), key.size(0)
        if hidden is None and mask_type in _NEEDS_MASK:
            raise ValueError(f"attn_mask_type={mask_type.name} needs an attention_mask, and None was given")
        if mask_type in (AttnMaskType.causal, AttnMaskType.padding_causal) and q_len != k_len:
            raise ValueError(
                f"attn_mask_type={mask_type.name} needs as many queries as keys, and was given {q_len} and {k_len}; "
                "use causal_bottom_right where the queries are the last positions"
            )
        left, right = self.window or (_UNLIMITED, _UNLIMITED)
        if mask_type in _CAUSAL:
            right = 0
        if hidden is None and (left, right) == (_UNLIMITED, _UNLIMITED):
            return False, None
        if hidden is None and (left, right) == (_UNLIMITED, 0) and q_len == k_len:
            return True, None
        visible = band_mask(q_len, k_len, left, right, query.device)
        return False, visible if hidden is None else visible & ~hidden

    def _kernel_choice(self, device: torch.device) -> AbstractContextManager[None]:
        if self.kernel is None or (self.kernel is SDPBackend.CUDNN_ATTENTION and device.type != "cuda"):
            return nullcontext()
        return sdpa_kernel(self.kernel)

    def _rng_state(self, dropout: float) -> AbstractContextManager[None]:
        # Heads are split over tensor-parallel ranks, so each rank needs its own stream. Under sequence parallelism
        # Megatron's transformer block has switched to it already.
        if dropout == 0.0 or self.config.sequence_parallel:
            return nullcontext()
        return tensor_parallel.get_cuda_rng_tracker().fork()


def _expand_groups_if_needed(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Repeat grouped key/value heads where PyTorch would otherwise fall to its unfused kernel.

    On CUDA only the flash and cuDNN kernels take grouped heads, and they need half precision and (flash) no mask;
    the memory-efficient kernel takes the rest once heads are repeated. The CPU kernel takes grouped heads always.
    """
    repeats = query.size(2) // key.size(2)
    half = query.dtype in (torch.float16, torch.bfloat16)
    if repeats == 1 or not query.is_cuda or (half and mask is None):
        return key, value
    return key.repeat_interleave(repeats, dim=2), value.repeat_interleave(repeats, dim=2)


def refuse_across_ranks(context_parallel_size: int, attention_dropout: float, window_size: object) -> None:
    """Checks what attention over a cut sequence can't do, for this backend.

    Args:
        context_parallel_size: Nothing is refused at 1.
        attention_dropout: Must be 0.
        window_size: Must be None.

    Raises:
        ValueError: One is given.
    """
    for name, value in (("attention_dropout", attention_dropout), ("window_size", window_size)):
        if value and context_parallel_size > 1:
            raise ValueError(
                f"{name}={value} with context_parallel_size={context_parallel_size}: layer_backend='torch' attends "
                f"across ranks without it; switch it off, set context_parallel_size=1, or use "
                "layer_backend='transformer_engine'"
            )


def _refuse_unsupported(config: TransformerConfig) -> None:
    te = "or use layer_backend='transformer_engine'"
    refuse_across_ranks(config.context_parallel_size, config.attention_dropout, config.window_size)
    if config.softmax_type != "vanilla":
        raise ValueError(
            f"layer_backend='torch' knows softmax_type='vanilla' only, not {config.softmax_type!r}; change it, {te}"
        )
    if config.attention_backend not in _KERNELS:
        names = ", ".join(kernel.name for kernel in _KERNELS)
        raise ValueError(
            f"attention_backend={config.attention_backend.name} isn't one of layer_backend='torch' ({names})"
        )
    for option in ("qk_clip", "log_max_attention_logit"):
        if getattr(config, option):
            raise ValueError(
                f"{option}=True needs the largest attention score, which fused kernels don't return; "
                f"set {option}=False, {te}"
            )

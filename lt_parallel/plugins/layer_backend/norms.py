"""LayerNorm and RMSNorm for the torch backend, aware of sequence parallelism.

Under sequence parallelism each tensor-parallel rank normalises its own slice of the sequence, so the gradient of a
norm's weight on one rank covers that slice only. Megatron Core sums those gradients over the tensor-parallel group for
parameters that carry the mark ``sequence_parallel``; PyTorch's modules don't set it, which is why Megatron's own
wrapper of them refuses sequence parallelism. The classes here set it.

Shapes: input and output ``[..., hidden_size]``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor, nn

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig

__all__ = ["SequenceParallelLayerNorm", "SequenceParallelNorm", "SequenceParallelRMSNorm"]


def _mark(module: nn.Module, config: TransformerConfig) -> None:
    for param in module.parameters(recurse=False):
        param.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


def _operands(x: Tensor, weight: Tensor, zero_centered: bool) -> tuple[Tensor, Tensor]:
    """Input and weight in one precision: the input's, or fp32 for a zero-centred weight, which bf16 would lose."""
    if zero_centered:
        return x.float(), weight.float() + 1.0
    return x, weight.to(x.dtype)


class SequenceParallelLayerNorm(nn.LayerNorm):
    """LayerNorm whose parameters are marked for Megatron's gradient reduction.

    With ``config.layernorm_zero_centered_gamma`` the weight is kept as its distance from one (and starts at zero), so
    that low precision and weight decay act on that distance; the norm is then computed in fp32. With
    ``config.fp32_residual_connection`` the input arrives in fp32: the norm is computed in the input's precision and
    returned in the parameters'.

    Args:
        config: read for ``sequence_parallel``, ``layernorm_zero_centered_gamma`` and ``params_dtype``.
        hidden_size: size of the last dimension.
        eps: added to the variance.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        self.zero_centered = config.layernorm_zero_centered_gamma
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        _mark(self, config)

    def reset_parameters(self) -> None:
        """Start as the identity."""
        super().reset_parameters()
        if self.zero_centered:
            nn.init.zeros_(self.weight)

    def forward(self, input: Tensor) -> Tensor:
        """Normalise over the last dimension."""
        x, weight = _operands(input, self.weight, self.zero_centered)
        output = F.layer_norm(x, self.normalized_shape, weight, self.bias.to(x.dtype), self.eps)
        return output.to(self.weight.dtype)


class SequenceParallelRMSNorm(nn.RMSNorm):
    """RMSNorm with the same marks and options as :class:`SequenceParallelLayerNorm`.

    Args:
        config: read for ``sequence_parallel``, ``layernorm_zero_centered_gamma`` and ``params_dtype``.
        hidden_size: size of the last dimension.
        eps: added to the mean square.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        self.zero_centered = config.layernorm_zero_centered_gamma
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        _mark(self, config)

    def reset_parameters(self) -> None:
        """Start as a pure division by the root mean square."""
        super().reset_parameters()
        if self.zero_centered:
            nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise over the last dimension."""
        x, weight = _operands(x, self.weight, self.zero_centered)
        return F.rms_norm(x, self.normalized_shape, weight, self.eps).to(self.weight.dtype)


class SequenceParallelNorm:
    """Builds the norm that ``config.normalization`` names.

    A class rather than a function because Megatron Core's ``build_module`` calls classes and hands functions on
    uncalled.
    """

    def __new__(cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> nn.Module:  # type: ignore[misc]
        """Build it.

        Args:
            config: read for ``normalization`` and what the norm reads.
            hidden_size: size of the last dimension.
            eps: added to the variance or mean square.

        Raises:
            ValueError: for another normalization, and for options that only Apex's kernels have.
        """
        for option in ("persist_layer_norm", "memory_efficient_layer_norm"):
            if getattr(config, option):
                raise ValueError(
                    f"{option}=True chooses a kernel of Apex or Transformer Engine, and layer_backend='torch' has "
                    f"neither; set {option}=False, or use layer_backend='transformer_engine'"
                )
        if config.normalization == "LayerNorm":
            return SequenceParallelLayerNorm(config, hidden_size, eps)
        if config.normalization == "RMSNorm":
            return SequenceParallelRMSNorm(config, hidden_size, eps)
        raise ValueError(
            f"normalization={config.normalization!r} is not known to layer_backend='torch'; "
            "use 'LayerNorm' or 'RMSNorm'"
        )

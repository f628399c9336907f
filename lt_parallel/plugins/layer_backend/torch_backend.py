"""The torch backend as Megatron Core's builders see it.

Linear layers, embeddings, fused activations and the sequential experts stay Megatron's own: they already run on any
device, and stay usable with every fusion and overlap that Megatron's configuration offers for them.
"""

from __future__ import annotations

from megatron.core.models.backends import LocalSpecProvider

from lt_parallel.plugins.layer_backend.attention import TorchDotProductAttention
from lt_parallel.plugins.layer_backend.norms import SequenceParallelNorm

__all__ = ["TorchSpecProvider"]


class TorchSpecProvider(LocalSpecProvider):
    """Megatron's local classes with PyTorch's norms and attention in place of Megatron's."""

    def layer_norm(
        self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False
    ) -> type[SequenceParallelNorm]:
        """One builder for every place; ``config.normalization`` decides the kind when it is called.

        Args:
            rms_norm: ignored, for the reason above.
            for_qk: ignored; query and key norms are built alike.
            has_residual: ignored; it enables a fusion of Transformer Engine's.
        """
        del rms_norm, for_qk, has_residual
        return SequenceParallelNorm

    def core_attention(self) -> type[TorchDotProductAttention]:
        """Attention by ``scaled_dot_product_attention``."""
        return TorchDotProductAttention

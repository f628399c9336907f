"""The torch backend as Megatron Core's builders see it.

Linear layers, embeddings, fused activations, the sequential experts and all of a grouped expert but its matrix products
stay Megatron's own: they already run on any device, and stay usable with every fusion and overlap that Megatron's
configuration offers for them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from megatron.core.models.backends import LocalSpecProvider

from lt_parallel.plugins.layer_backend.attention import TorchDotProductAttention
from lt_parallel.plugins.layer_backend.experts import grouped_experts
from lt_parallel.plugins.layer_backend.norms import SequenceParallelNorm

if TYPE_CHECKING:
    from megatron.core.transformer.moe.moe_layer import ExpertsBuilder

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

    def grouped_mlp_modules(self, moe_use_grouped_gemm: bool) -> ExpertsBuilder:
        """The experts of a layer: all in one matrix product, or one after the other.

        Args:
            moe_use_grouped_gemm: ``config.moe_grouped_gemm``.
        """
        if moe_use_grouped_gemm:
            return grouped_experts()
        return cast("ExpertsBuilder", super().grouped_mlp_modules(moe_use_grouped_gemm))

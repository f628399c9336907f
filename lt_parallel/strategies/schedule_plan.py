"""What the combined forward-backward schedule runs in place of a chunk's forward pass.

With `overlap_moe_expert_parallel_comm` Megatron Core doesn't call a chunk: it asks for a plan of the chunk's layers,
each cut into attention, sending tokens, experts, and returning tokens, and runs the plan of one micro batch beside the
backward pass of another, so that one computes while the other's tokens travel.

The module needn't know: during such a step its `active_chunk` is a `ChunkPlanner`, which is called like the chunk and
answers with the plan.
"""

from __future__ import annotations

from typing import Any, override

from megatron.core.models.common.model_chunk_schedule_plan import (
    TransformerLayerSchedulePlan,
    TransformerModelChunkSchedulePlan,
)
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer

__all__ = ["ChunkPlanner"]


class _LayerPlan(TransformerLayerSchedulePlan):
    """A layer's plan that keeps what recomputed experts will read."""

    @override
    def _build_callable_nodes(self, *args: Any, **options: Any) -> None:
        super()._build_callable_nodes(*args, **options)
        layer = self.layer.mtp_model_layer if isinstance(self.layer, MultiTokenPredictionLayer) else self.layer
        if getattr(layer.mlp, "keeps_dispatched_tokens", False):
            self.mlp.free_input = False


class _ChunkPlan(TransformerModelChunkSchedulePlan):
    LAYER_SCHEDULE_PLAN_CLASS = _LayerPlan


class ChunkPlanner:
    """Called like a chunk, answers with a plan of what the chunk would do.

    Args:
        chunk: Megatron Core's model, not wrapped.
    """

    def __init__(self, chunk: Any) -> None:
        self._chunk = chunk

    def __call__(self, *args: Any, **options: Any) -> _ChunkPlan:
        """The plan; arguments as the chunk's."""
        return _ChunkPlan(self._chunk, *args, **options)

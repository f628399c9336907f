"""Multi-latent attention for the torch backend: Megatron Core's, with the gradient of the shared key channels whole.

The channels of a key that carry the position are the same for all heads, so their gradient is a sum over heads, which
lie on different tensor-parallel ranks. With column-parallel down projections, the only ones without Transformer Engine,
Megatron Core 0.19.2 leaves that gradient at each rank's own heads (on two ranks the gradient norm of a small model was
off by 1e-3). Handed over as a replicated projection gives it, cut along the sequence, it goes through a gather
whose backward pass sums.
"""

from __future__ import annotations

from megatron.core.tensor_parallel.mappings import (
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from torch import Tensor

__all__ = ["TorchMLASelfAttention"]


class TorchMLASelfAttention(MLASelfAttention):
    """`MLASelfAttention` for column-parallel down projections under sequence parallelism."""

    def _qkv_down_projection(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """The small vectors of queries, and of keys and values.

        Args:
            hidden_states: ``[s / TP, b, h]``.

        Returns:
            ``[s / TP, b, q_lora_rank]`` (or the hidden states without q_lora_rank) and
            ``[s / TP, b, kv_lora_rank + qk_pos_emb_head_dim]``.
        """
        queries, keys_values = super()._qkv_down_projection(hidden_states)
        if self.config.sequence_parallel and self.tp_group.size() > 1:
            keys_values = gather_from_tensor_model_parallel_region(keys_values, group=self.tp_group)
            keys_values = scatter_to_sequence_parallel_region(keys_values, group=self.tp_group)
        return queries, keys_values

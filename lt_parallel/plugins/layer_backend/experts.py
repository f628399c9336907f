"""Grouped experts for the torch backend: the two matrices of all local experts of a layer, each one parameter.

Megatron Core's grouped experts (`TEGroupedMLP`) are a module of two linear layers and what lies between: the router's
weights, the activation, its recompute (`moe_act`), the offload points (`expert_fc1`, `moe_act`). Only its linear layers
are Transformer Engine's. So the torch backend builds the same module with the linear layers here.

The matrices of a rank's experts are one `[experts, outputs, inputs]` parameter, which PyTorch's grouped matrix product
takes as it is; separate ones would have to be copied together in each call. In checkpoints each expert has its own
tensor, cut by tensor and expert parallelism, under the names and shapes that Megatron Core's grouped and sequential
experts write: all three read each other's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.experts import GroupedMLPSubmodules, TEGroupedMLP
from torch import Tensor, nn

from lt_parallel.ops.grouped_linear import grouped_linear
from lt_parallel.runtime import device_type

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.moe.moe_layer import ExpertsBuilder
    from megatron.core.transformer.transformer_config import TransformerConfig

__all__ = ["ColumnParallelGroupedLinear", "RowParallelGroupedLinear", "grouped_experts"]


def grouped_experts() -> ExpertsBuilder:
    """Megatron Core's grouped experts on PyTorch's grouped matrix product."""
    return partial(
        TEGroupedMLP,
        submodules=GroupedMLPSubmodules(linear_fc1=ColumnParallelGroupedLinear, linear_fc2=RowParallelGroupedLinear),
    )


class _GroupedLinear(MegatronModule):
    """One matrix per local expert, cut over the experts' tensor-parallel ranks along `axis` of `[outputs, inputs]`.

    Args:
        num_local_experts: Experts of this rank.
        input_size: Inputs of an expert, before any cut.
        output_size: Outputs of an expert, before any cut; both halves of a gated one.
        config: Megatron's transformer configuration.
        init_method: Fills the weight.
        bias: Must be False.
        skip_bias_add: Without a bias it means nothing.
        is_expert: Must be True.
        tp_comm_buffer_name: Names a buffer of Transformer Engine's.
        pg_collection: Process groups; `ep`, `expt_tp` and `expt_dp` are used.
        name: The module's, for quantisation recipes.

    Raises:
        ValueError: A bias is asked for, or the ranks don't divide the side that they cut.
    """

    #: The side that is cut: 0 outputs, 1 inputs.
    axis: Literal[0, 1]

    def __init__(
        self,
        num_local_experts: int,
        input_size: int,
        output_size: int,
        /,
        *,
        config: TransformerConfig,
        init_method: Callable[[Tensor], Any],
        bias: bool,
        skip_bias_add: bool,
        is_expert: bool,
        tp_comm_buffer_name: str | None,
        pg_collection: ProcessGroupCollection,
        name: str | None = None,
    ) -> None:
        super().__init__(config=config)
        del skip_bias_add, tp_comm_buffer_name, name
        if bias or not is_expert:
            raise ValueError(f"grouped experts have no bias (add_bias_linear={bias}); use add_bias_linear=False")
        self.num_local_experts = num_local_experts
        self._groups = pg_collection
        #: Only quantised linear layers keep anything else than their input; Megatron Core's offload asks for it.
        self.save_original_input = True
        shape = [output_size, input_size]
        ranks = pg_collection.expt_tp.size()
        if shape[self.axis] % ranks:
            raise ValueError(
                f"an expert's {('outputs', 'inputs')[self.axis]}={shape[self.axis]} must be divisible by "
                f"expert_tensor_parallel_size={ranks}"
            )
        shape[self.axis] //= ranks
        weight = torch.empty(num_local_experts, *shape, device=device_type(), dtype=config.params_dtype)
        if config.perform_initialization:
            init_method(weight)
        self.weight = nn.Parameter(weight)
        self.weight.tensor_model_parallel = True  # type: ignore[attr-defined]
        self.weight.partition_dim = 1 + self.axis  # type: ignore[attr-defined]
        self.weight.partition_stride = 1  # type: ignore[attr-defined]
        # Experts with groups of their own are reduced over the expert data-parallel ranks.
        own_groups = config.expert_model_parallel_size > 1 or ranks != config.tensor_model_parallel_size
        self.weight.allreduce = not own_groups  # type: ignore[attr-defined]

    def forward(self, x: Tensor, tokens_per_expert: Sequence[int]) -> tuple[Tensor, None]:
        """Applies each expert to its tokens.

        Args:
            x: `[tokens, inputs]`, sorted by expert.
            tokens_per_expert: How many are each local expert's.

        Returns:
            `[tokens, outputs]`, of this rank's cut, and no bias.
        """
        return grouped_linear(x, self.weight.to(x.dtype), tokens_per_expert), None

    def backward_dw(self) -> None:
        """Megatron Core calls it where weight gradients may be delayed; here they come with the others."""

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """The weight as one tensor per expert and, of a gated expert's first matrix, per half.

        Args:
            prefix: Of names.
            sharded_offsets: Axes in front, as of layers.
            metadata: Of the checkpoint.
        """
        if (metadata or {}).get("singleton_local_shards"):
            raise ValueError("grouped experts are saved with their expert's number as an axis, not in their names")
        groups = self._groups
        halves = 2 if self.axis == 0 and self.config.gated_linear_unit else 1
        first, every = groups.ep.rank() * self.num_local_experts, groups.ep.size() * self.num_local_experts
        tp_rank, tp_size = groups.expt_tp.rank(), groups.expt_tp.size()
        prepended = len(sharded_offsets) + 1

        @torch.no_grad()
        def build(key: str, data: Tensor, replica_id: Any, flattened_range: slice | None) -> list[ShardedTensor]:
            assert flattened_range is None
            return [
                ShardedTensor.from_rank_offsets(
                    key,
                    part,
                    *sharded_offsets,
                    (prepended - 1, first + expert, every),
                    (prepended + self.axis, tp_rank + half * tp_size, halves * tp_size),
                    replica_id=replica_id,
                    prepend_axis_num=prepended,
                )
                for expert, matrix in enumerate(data.unbind())
                for half, part in enumerate(matrix.chunk(halves, dim=self.axis))
            ]

        @torch.no_grad()
        def merge(parts: list[Tensor]) -> Tensor:
            matrices = [torch.cat(parts[at : at + halves], dim=self.axis) for at in range(0, len(parts), halves)]
            return torch.stack(matrices)

        key = f"{prefix}weight"
        return {key: ShardedTensorFactory(key, self.weight, build, merge, (0, 0, groups.expt_dp.rank()))}


class ColumnParallelGroupedLinear(_GroupedLinear):
    """The first matrix of each expert; tensor-parallel ranks share its outputs."""

    axis = 0


class RowParallelGroupedLinear(_GroupedLinear):
    """The second matrix of each expert; tensor-parallel ranks share its inputs, the dispatcher adds their results."""

    axis = 1

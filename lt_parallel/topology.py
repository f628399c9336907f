"""Sizes of the parallel axes and which rank belongs to which group: pure arithmetic.

Everything here can be decided before a process group exists, so a wrong size is one clear `ValueError` on
every rank instead of a hang, and a layout for 1024 ranks can be checked on a laptop. Nothing here imports
torch.

Ranks are numbered in Megatron Core's order `tp-cp-ep-dp-pp`, the first axis varying fastest. One set of ranks
is read in two ways, because the dense layers and the experts are split differently; only the pipeline axis is
common:

    dense layers   rank = tp  + TP  * (cp + CP * (dp  + DP  * pp))     world_size = TP * CP * DP * PP
    experts        rank = etp + ETP * (ep + EP * (edp + EDP * pp))     world_size = ETP * EP * EDP * PP

| axis       | size                         | splits                              |
|------------|------------------------------|-------------------------------------|
| tp         | tensor_model_parallel_size   | matrices of the dense layers        |
| cp         | context_parallel_size        | the sequence                        |
| dp         | data_parallel_size           | the batch                           |
| pp         | pipeline_model_parallel_size | the stack of layers                 |
| ep         | expert_model_parallel_size   | the experts of a layer              |
| etp (tp)   | expert_tensor_parallel_size  | matrices of one expert              |
| edp (dp)   | expert_data_parallel_size    | copies of the same experts          |
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lt_parallel.pipeline_balance import LayerCosts, balance_layout
from lt_parallel.size_checks import (
    either,
    nearest_multiples,
    require_divisible,
    require_pipeline_for_chunks,
    require_positive_int,
)

__all__ = [
    "GROUP_ALIASES",
    "GROUP_NAMES",
    "ExpertCoordinates",
    "LayerCosts",
    "ParallelSizes",
    "RankCoordinates",
    "balance_layout",
    "padded_vocab_size",
    "require_divisible",
    "require_pipeline_for_chunks",
    "require_positive_int",
]

# Name of a group (as `ProcessGroupCollection` and `parallel_state` name it) -> the axes that vary inside it.
_DENSE_AXES: dict[str, tuple[str, ...]] = {
    "tp": ("tp",),
    "pp": ("pp",),
    "cp": ("cp",),
    "dp": ("dp",),
    "dp_cp": ("cp", "dp"),
    "mp": ("tp", "pp"),
    "tp_cp": ("tp", "cp"),
    "tp_dp": ("tp", "dp"),
    "tp_dp_cp": ("tp", "cp", "dp"),
    "intra_dist_opt": ("tp", "cp", "dp", "pp"),
}
_EXPERT_AXES: dict[str, tuple[str, ...]] = {
    "ep": ("ep",),
    "expt_tp": ("etp",),
    "expt_dp": ("edp",),
    "tp_ep": ("etp", "ep"),
    "tp_ep_pp": ("etp", "ep", "pp"),
}

GROUP_NAMES: tuple[str, ...] = (*_DENSE_AXES, *_EXPERT_AXES, "embd", "pos_embd")
"""Every distinct kind of group, one communicator each."""

GROUP_ALIASES: dict[str, str] = {
    "dp_cp_gtp_remat": "dp_cp",
    "intra_dp_cp": "dp_cp",
    "expt_dp_gtp_remat": "expt_dp",
    "intra_expt_dp": "expt_dp",
    "tp_ep_pp_with_egtp_remat": "tp_ep_pp",
}
"""Fields of `ProcessGroupCollection` that share another group's communicator here. What would make them
differ, several distributed-optimizer instances or weight rematerialisation over an axis of its own, isn't
offered."""


class RankCoordinates(NamedTuple):
    """Place of a rank on the axes of the dense layers."""

    tp: int
    cp: int
    dp: int
    pp: int


class ExpertCoordinates(NamedTuple):
    """Place of a rank on the axes of the experts: `etp` and `edp` are their own tensor and data axes."""

    etp: int
    ep: int
    edp: int
    pp: int


@dataclass(frozen=True, kw_only=True)
class ParallelSizes:
    """Sizes of all parallel axes, valid by construction, and the rank arithmetic that follows from them.

    Args:
        world_size: Number of processes.
        tensor_model_parallel_size: Ranks that share each matrix of the dense layers.
        pipeline_model_parallel_size: Ranks that share the stack of layers.
        virtual_pipeline_model_parallel_size: Model chunks per pipeline rank. None and 1 both mean one chunk
            and are stored as None: Megatron Core takes any number as a request for the interleaved schedule.
        context_parallel_size: Ranks that share each sequence.
        expert_model_parallel_size: Ranks that share the experts of a layer.
        expert_tensor_parallel_size: Ranks that share each expert's matrices; None = the dense layers' size.

    Raises:
        ValueError: A size isn't a positive integer, or the sizes don't divide `world_size`.
    """

    world_size: int
    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    virtual_pipeline_model_parallel_size: int | None = None
    context_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: int | None = None

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if value is not None or name not in _MAY_BE_NONE:
                require_positive_int(name, value)
        if self.virtual_pipeline_model_parallel_size == 1:
            object.__setattr__(self, "virtual_pipeline_model_parallel_size", None)
        require_pipeline_for_chunks(self.pipeline_model_parallel_size, self.num_model_chunks)
        self._check_product("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
        # Name the size that the user wrote: by default the experts' tensor axis is the dense layers'.
        given = self.expert_tensor_parallel_size is not None
        tensor = "expert_tensor_parallel_size" if given else "tensor_model_parallel_size"
        self._check_product(tensor, "expert_model_parallel_size", "pipeline_model_parallel_size")

    def _check_product(self, *names: str) -> None:
        """Raise unless the product of the sizes called `names` divides the world."""
        sizes = {name: getattr(self, name) for name in names}
        product = math.prod(sizes.values())
        if self.world_size % product == 0:
            return
        nearest = nearest_multiples(self.world_size, self._smallest_world_size())
        changes = [f"{name}={either(valid)}" for name in names if (valid := self._valid_sizes(name))]
        keep = f"; or keep world_size={self.world_size} with {', or '.join(changes)}" if changes else ""
        raise ValueError(
            f"world_size={self.world_size} must be divisible by "
            f"{' x '.join(f'{name}={size}' for name, size in sizes.items())} (= {product}); "
            f"nearest valid: world_size={either(nearest)}{keep}"
        )

    def _smallest_world_size(self, **changed: int) -> int:
        """The world size whose multiples, and no others, suit both the dense and the expert sizes."""
        size: dict[str, int] = {name: getattr(self, name) for name in self.__dataclass_fields__} | changed
        expert_tensor = size["expert_tensor_parallel_size"] or size["tensor_model_parallel_size"]
        dense = size["tensor_model_parallel_size"] * size["context_parallel_size"]
        expert = expert_tensor * size["expert_model_parallel_size"]
        return size["pipeline_model_parallel_size"] * math.lcm(dense, expert)

    def _valid_sizes(self, name: str) -> list[int]:
        """The values nearest to the present one, below and above, that alone would make the sizes valid."""
        present: int = getattr(self, name)
        smallest = 2 if name == "pipeline_model_parallel_size" and self.num_model_chunks > 1 else 1
        valid = [
            size
            for size in _divisors(self.world_size)
            if size >= smallest and self.world_size % self._smallest_world_size(**{name: size}) == 0
        ]
        return _nearest(present, valid)

    @property
    def effective_expert_tensor_parallel_size(self) -> int:
        """Tensor-parallel size of the experts, with the default filled in."""
        return self.expert_tensor_parallel_size or self.tensor_model_parallel_size

    @property
    def num_model_chunks(self) -> int:
        """Model chunks on each pipeline rank."""
        return self.virtual_pipeline_model_parallel_size or 1

    @property
    def model_parallel_size(self) -> int:
        """Ranks that hold one copy of the dense layers: TP x PP, the size of the group `mp`."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size

    @property
    def data_parallel_size(self) -> int:
        """Ranks that see different samples: world / (TP x PP x CP). Context-parallel ranks share a sample."""
        return self.world_size // (self.model_parallel_size * self.context_parallel_size)

    @property
    def expert_data_parallel_size(self) -> int:
        """Copies of each expert: world / (ETP x EP x PP)."""
        expert = self.effective_expert_tensor_parallel_size * self.expert_model_parallel_size
        return self.world_size // (expert * self.pipeline_model_parallel_size)

    @property
    def dense_axes(self) -> dict[str, int]:
        """Axis -> size for the dense layers, the fastest varying first."""
        return {
            "tp": self.tensor_model_parallel_size,
            "cp": self.context_parallel_size,
            "dp": self.data_parallel_size,
            "pp": self.pipeline_model_parallel_size,
        }

    @property
    def expert_axes(self) -> dict[str, int]:
        """Axis -> size for the experts, the fastest varying first."""
        return {
            "etp": self.effective_expert_tensor_parallel_size,
            "ep": self.expert_model_parallel_size,
            "edp": self.expert_data_parallel_size,
            "pp": self.pipeline_model_parallel_size,
        }

    def coordinates(self, rank: int) -> RankCoordinates:
        """Place of `rank` on the dense layers' axes. Raises ValueError for a rank outside the world."""
        self._check_rank(rank)
        return RankCoordinates(*_split(rank, self.dense_axes.values()))

    def expert_coordinates(self, rank: int) -> ExpertCoordinates:
        """Place of `rank` on the experts' axes. Raises ValueError for a rank outside the world."""
        self._check_rank(rank)
        return ExpertCoordinates(*_split(rank, self.expert_axes.values()))

    def rank_of(self, coordinates: RankCoordinates) -> int:
        """The rank there: the inverse of `coordinates(rank)`. Raises ValueError outside an axis."""
        rank, stride = 0, 1
        for (axis, size), place in zip(self.dense_axes.items(), coordinates, strict=True):
            if not 0 <= place < size:
                raise ValueError(f"{axis}={place} is not a place on an axis of size {size}; valid: 0 to {size - 1}")
            rank += stride * place
            stride *= size
        return rank

    def groups(self, name: str) -> list[list[int]]:
        """All groups called `name`: every rank in exactly one, in Megatron Core's order, ranks ascending.

        `embd` and `pos_embd` are the exception: only the ranks that hold an embedding are in one (see
        `embedding_groups` for a model that keeps its embedding on other stages than the first and last).

        Args:
            name: One of `GROUP_NAMES` or `GROUP_ALIASES`.

        Raises:
            ValueError: No group has that name.
        """
        name = GROUP_ALIASES.get(name, name)
        if name == "embd":
            return self.embedding_groups()
        if name == "pos_embd":
            return self.embedding_groups([0])
        if name in _DENSE_AXES:
            return _groups_along(_DENSE_AXES[name], self.dense_axes)
        if name in _EXPERT_AXES:
            return _groups_along(_EXPERT_AXES[name], self.expert_axes)
        raise ValueError(
            f"no process group is called {name!r}; valid: {', '.join(GROUP_NAMES)}, "
            f"and as other names for some of these {', '.join(GROUP_ALIASES)}"
        )

    def group_of(self, name: str, rank: int) -> list[int]:
        """The group called `name` that holds `rank`; empty for a rank without an embedding asked for `embd`.

        Raises:
            ValueError: No group has that name, or `rank` is outside the world.
        """
        self._check_rank(rank)
        return next((group for group in self.groups(name) if rank in group), [])

    def embedding_groups(self, pp_ranks: Sequence[int] | None = None) -> list[list[int]]:
        """Groups of the ranks that hold the word embedding or the output layer, one per pipeline.

        Args:
            pp_ranks: Places on the pipeline axis; None = first and last, Megatron Core's default. A model
                with multi-token prediction on another stage adds it (`PipelineLayout.embedding_pp_ranks`).

        Raises:
            ValueError: A place is outside the pipeline.
        """
        size = self.pipeline_model_parallel_size
        for place in pp_ranks or ():
            if not 0 <= place < size:
                raise ValueError(f"pp_ranks={list(pp_ranks or ())} must be in 0 to {size - 1}, got {place}")
        chosen = sorted({0, size - 1} if pp_ranks is None else set(pp_ranks))
        return [[pipeline[place] for place in chosen] for pipeline in self.groups("pp")]

    def hierarchical_context_groups(self, sizes: Sequence[int]) -> list[list[list[int]]]:
        """Sub-groups of each context-parallel group, level by level, as Megatron Core's `hcp` has them.

        Level 0 holds neighbours, each further level ranks further apart: sizes (2, 4) split a group of 8 into
        4 neighbouring pairs and 2 groups of every second rank.

        Args:
            sizes: `hierarchical_context_parallel_sizes`; their product is `context_parallel_size`.

        Raises:
            ValueError: A size isn't a positive integer, or the product is another one.
        """
        for level, size in enumerate(sizes):
            require_positive_int(f"hierarchical_context_parallel_sizes[{level}]", size)
        if not sizes or math.prod(sizes) != self.context_parallel_size:
            raise ValueError(
                f"hierarchical_context_parallel_sizes={list(sizes)} must multiply to context_parallel_size="
                f"{self.context_parallel_size}, got {math.prod(sizes)}; valid for example: "
                f"{_factor_pair(self.context_parallel_size)}"
            )
        axes = {f"level{level}": size for level, size in enumerate(sizes)}
        positions = [_groups_along((axis,), axes) for axis in axes]
        return [
            [[group[place] for place in sub] for group in self.groups("cp") for sub in level] for level in positions
        ]

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank={rank} is outside world_size={self.world_size}; valid: 0 to {self.world_size - 1}")


def padded_vocab_size(vocab_size: int, divisible_by: int = 128, tensor_model_parallel_size: int = 1) -> int:
    """The number of rows of the embedding: `vocab_size` rounded up to a multiple of `divisible_by`.

    Tensor parallelism has to divide the result but doesn't change it, else a model trained at one layout
    wouldn't have the shapes of another. (Megatron-LM's training script rounds up to `divisible_by` x TP.)

    Args:
        vocab_size: Number of tokens in the vocabulary.
        divisible_by: The multiple; 128 rows suit the matrix units of GPUs.
        tensor_model_parallel_size: Ranks that share the rows, which only has to divide the result.

    Raises:
        ValueError: A number isn't a positive integer, or the ranks don't divide the rows.
    """
    require_positive_int("vocab_size", vocab_size)
    require_positive_int("make_vocab_size_divisible_by", divisible_by)
    ranks = require_positive_int("tensor_model_parallel_size", tensor_model_parallel_size)
    padded = -(-vocab_size // divisible_by) * divisible_by
    if padded % ranks != 0:
        nearest = either(_nearest(ranks, _divisors(padded)))
        raise ValueError(
            f"the padded vocabulary of {padded} (vocab_size={vocab_size} rounded up to a multiple of "
            f"make_vocab_size_divisible_by={divisible_by}) must be divisible by "
            f"tensor_model_parallel_size={ranks}; nearest valid: tensor_model_parallel_size={nearest}, "
            f"or make_vocab_size_divisible_by={math.lcm(divisible_by, ranks)}"
        )
    return padded


def _groups_along(varying: tuple[str, ...], axes: dict[str, int]) -> list[list[int]]:
    """Ranks that agree on every axis but `varying` share a group; groups in the order of their first rank."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(math.prod(axes.values())):
        places = zip(axes, _split(rank, axes.values()), strict=True)
        fixed = tuple(place for axis, place in places if axis not in varying)
        groups.setdefault(fixed, []).append(rank)
    return list(groups.values())


def _split(rank: int, sizes: Iterable[int]) -> list[int]:
    """Digits of `rank` in the mixed radix `sizes`, the fastest varying first."""
    places = []
    for size in sizes:
        rank, place = divmod(rank, size)
        places.append(place)
    return places


def _divisors(number: int) -> list[int]:
    """All divisors of `number`, ascending."""
    small = [factor for factor in range(1, math.isqrt(number) + 1) if number % factor == 0]
    return sorted({*small, *(number // factor for factor in small)})


def _nearest(value: int, candidates: Sequence[int]) -> list[int]:
    """Of ascending candidates the two next to `value`, below and above, as far as there are any."""
    below = [candidate for candidate in candidates if candidate < value][-1:]
    above = [candidate for candidate in candidates if candidate > value][:1]
    return below + above


def _factor_pair(number: int) -> list[int]:
    """The two factors of `number` that are closest to each other, the smaller first."""
    small = max(factor for factor in _divisors(number) if factor * factor <= number)
    return [small, number // small]


_MAY_BE_NONE = frozenset({"virtual_pipeline_model_parallel_size", "expert_tensor_parallel_size"})

"""Moving experts between expert-parallel ranks, with everything that belongs to them.

A layer's experts can be numbered in any order: if an expert's weights, its row of the router, its bias there and what
the optimizer keeps of all these change places together, the layer computes the same (sums over a token's experts are
taken in another order) and so does every step after it. What results is an ordinary model: a checkpoint of it needs to
know nothing of the move.

Expert parameters are sent between the expert-parallel ranks that hold them; of the distributed optimizer's states, of
which a data-parallel rank has a range, the whole tensor is put together first, one at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

__all__ = ["ExpertPermutation"]


class ExpertPermutation:
    """Permutes the experts of this rank's layers. Making it is collective over all ranks.

    Args:
        core: Megatron Core's optimizer over the layers' parameters.
        groups: The `ProcessGroupCollection`.
    """

    def __init__(self, core: Any, groups: Any) -> None:
        self._optimizer, self._groups = _OptimizerTensors(core), groups

    def apply(self, layer: Any, order: Sequence[int]) -> None:
        """Puts expert `order[i]` into place i. Collective over the ranks that share this layer.

        Args:
            layer: Megatron's MoELayer, its parameters up to date.
            order: A permutation of all experts' places, equal on every rank.
        """
        num_experts, index = len(order), torch.tensor(order)
        with torch.no_grad():
            for parameters in _of_experts(layer):
                pieces = [self._optimizer.pieces(parameter) for parameter in parameters]
                for same in zip(*pieces, strict=True):
                    _permute_across_ranks(same, num_experts, order, self._groups.ep)
            router: nn.Module = layer.router
            for parameter in router.parameters():
                if parameter.size(0) == num_experts:
                    for piece in self._optimizer.pieces(parameter):
                        whole = piece.read()
                        piece.write(whole.view(num_experts, -1)[index.to(whole.device)].view(-1))
            for buffer in router.buffers():
                if buffer.ndim and buffer.size(0) == num_experts:
                    buffer.copy_(buffer[index.to(buffer.device)].clone())


def _of_experts(layer: Any) -> Iterator[list[nn.Parameter]]:
    """Parameters that together hold one matrix of every expert of this rank, in the experts' order.

    One parameter `[experts, out, in]` (the torch backend), or as many as experts: `weight0`, `weight1`, ... of
    Transformer Engine's grouped linear layer, or one of each sequential expert.
    """
    named = dict(layer.experts.named_parameters())
    count = layer.num_local_experts
    if hasattr(layer.experts, "local_experts"):
        names = [name for name, _ in layer.experts.local_experts[0].named_parameters()]
        for name in names:
            yield [named[f"local_experts.{expert}.{name}"] for expert in range(count)]
        return
    for name, parameter in named.items():
        if parameter.ndim == 3:
            yield [parameter]
        elif name.endswith("weight0"):
            yield [named[f"{name[:-1]}{expert}"] for expert in range(count)]


class _Piece(NamedTuple):
    """A tensor as long as a parameter, or this rank's range of one.

    Attributes:
        tensor: Of any shape; None where the range is empty.
        start: Of the range.
        numel: Of the whole.
        dtype: Of the whole.
        device: Of the whole.
        group: Ranks that have the other ranges; None where the tensor is whole.
    """

    tensor: Tensor | None
    start: int
    numel: int
    dtype: torch.dtype
    device: torch.device
    group: Any

    def read(self) -> Tensor:
        """The whole, flat. Collective over the group."""
        if self.group is None:
            assert self.tensor is not None
            return self.tensor.detach().reshape(-1).clone()
        whole = torch.zeros(self.numel, dtype=self.dtype, device=self.device)
        if self.tensor is not None:
            whole[self.start : self.start + self.tensor.numel()] = self.tensor.detach().reshape(-1)
        dist.all_reduce(whole, group=self.group)
        return whole

    def write(self, whole: Tensor) -> None:
        """Puts this rank's range back."""
        if self.tensor is not None:
            own = whole[self.start : self.start + self.tensor.numel()]
            self.tensor.detach().copy_(own.view_as(self.tensor))


class _OptimizerTensors:
    """Finds what Megatron Core's optimizers keep of a parameter.

    Args:
        core: Megatron Core's optimizer.
    """

    def __init__(self, core: Any) -> None:
        self._members = [each for each in getattr(core, "chained_optimizers", [core]) if each.optimizer is not None]
        names = {
            name
            for member in self._members
            for state in member.optimizer.state.values()
            for name, value in state.items()
            if isinstance(value, Tensor) and value.ndim > 0
        }
        # A rank whose range of everything is empty has no states to see the names in.
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, names)
        self._names = sorted(set().union(*every))

    def pieces(self, parameter: nn.Parameter) -> list[_Piece]:
        """The parameter, its main copy if it has one, and its states; the same kinds on every rank."""
        model = _Piece(parameter, 0, parameter.numel(), parameter.dtype, parameter.device, None)
        for member in self._members:
            if any(parameter in set(buffer.params) for buffer in getattr(member, "buffers", ())):
                return [model, *self._sharded(member, parameter)]
        return [model, *self._whole(parameter)]

    def _whole(self, parameter: nn.Parameter) -> Iterator[_Piece]:
        main = getattr(parameter, "main_param", None)
        key = parameter if main is None else main
        if main is not None:
            yield _Piece(main, 0, main.numel(), main.dtype, main.device, None)
        for member in self._members:
            state = member.optimizer.state.get(key, {})
            for name in self._names:
                if isinstance(state.get(name), Tensor):
                    value = state[name]
                    yield _Piece(value, 0, value.numel(), value.dtype, value.device, None)

    def _sharded(self, member: Any, parameter: nn.Parameter) -> Iterator[_Piece]:
        main, start = None, 0
        if parameter in member.model_param_group_index_map:
            group, place = member.model_param_group_index_map[parameter]
            main = member.optimizer.param_groups[group]["params"][place]
            start = member._get_model_param_range_map(parameter)["param"].start
        rest = (parameter.numel(), torch.float32, parameter.device, member.data_parallel_group)
        if parameter.dtype != torch.float32:  # else it is a view of the parameter itself
            yield _Piece(main, start, *rest)
        state = {} if main is None else member.optimizer.state.get(main, {})
        for name in self._names:
            yield _Piece(state.get(name), start, *rest)


def _permute_across_ranks(pieces: Sequence[_Piece], num_experts: int, order: Sequence[int], group: Any) -> None:
    """Exchanges the rows of this rank's experts.

    Args:
        pieces: One with all of them, or one for each.
        num_experts: On all ranks.
        order: Where each place's expert is now.
        group: The expert-parallel ranks.
    """
    size, rank = group.size(), group.rank()
    count = num_experts // size
    rows = torch.stack([piece.read() for piece in pieces]).view(count, -1)
    mine = range(rank * count, (rank + 1) * count)
    to_send = [
        [order[place] for place in range(to * count, (to + 1) * count) if order[place] in mine] for to in range(size)
    ]
    arriving = [[place for place in mine if order[place] // count == source] for source in range(size)]
    sent = rows[[expert - rank * count for each in to_send for expert in each]]
    received = torch.empty_like(rows)
    dist.all_to_all_single(
        received, sent, [len(each) for each in arriving], [len(each) for each in to_send], group=group
    )
    places = [place - rank * count for each in arriving for place in each]
    rows[places] = received
    for piece, whole in zip(pieces, rows.view(len(pieces), -1), strict=True):
        piece.write(whole)

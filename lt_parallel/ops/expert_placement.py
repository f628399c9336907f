"""Which GPU holds which expert, so that all of them get the same load.

Under expert parallelism a step lasts as long as its busiest GPU. Some experts get many more tokens than others, so
the ones that get the most may lie on GPUs by themselves, or more than once (replicas, which share their expert's load).
The policy and its results are those that DeepSeek publishes with EPLB (https://github.com/deepseek-ai/EPLB; section 3.4
of the DeepSeek-V3 report, arXiv:2412.19437, says what for), with one addition: a layer that would get worse keeps
its experts in order.

Replicas are for inference, or for training with weights that are kept equal. Without them (as many replicas as experts)
a placement is a permutation of each layer's experts.

Everything is computed on the CPU in float64, all layers at once. Ties go to the lower index, so equal loads give equal
placements on every rank.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from lt_parallel.size_checks import require_divisible, require_positive_int

__all__ = ["ExpertPlacement", "imbalance", "load_per_gpu", "rebalance_experts"]


class ExpertPlacement(NamedTuple):
    """Where the experts of every layer are; int64 on the CPU.

    Slots are numbered GPU by GPU: GPU g of P has the slots g x num_replicas / P up to those of GPU g + 1.

    Args:
        physical_to_logical: `[layers, num_replicas]`, the expert in each slot.
        logical_to_physical: `[layers, num_experts, most replicas of an expert]`, the slots of each expert, ascending,
            then -1.
        replica_count: `[layers, num_experts]`, at least 1.
    """

    physical_to_logical: Tensor
    logical_to_physical: Tensor
    replica_count: Tensor


def rebalance_experts(
    load: Tensor, num_replicas: int, num_groups: int, num_nodes: int, num_gpus: int
) -> ExpertPlacement:
    """Places experts, some of them several times, so that GPUs get loads as equal as a greedy choice makes them.

    If num_groups is a multiple of num_nodes, a group stays on one node (a router that chooses groups before experts
    then sends a token to few nodes): groups are packed onto nodes, each node replicates its own experts and packs the
    replicas onto its GPUs. Else groups and nodes play no part: experts are replicated and packed over all GPUs.

    Packing takes items from the largest load to the smallest, each to the least loaded pack that has room. A further
    replica goes to the expert with the most load per replica.

    Greedy packing can be worse than none, with replicas too. So if num_experts is a multiple of num_gpus, no layer's
    busiest GPU gets more load (rounding of replicas' shares apart) than it has without replicas and with the experts in
    order, num_experts / num_gpus neighbours on each GPU. A layer that packing makes worse stays in order, and the slots
    that are left hold more replicas of their own GPU's experts. Without replicas a layer also stays if packing is just
    as good, as moving experts has a cost. For other num_experts there is no such order to compare with.

    Args:
        load: `[layers, num_experts]`, tokens per expert or any other load, of any real dtype. Experts of a group are
            neighbours.
        num_replicas: Slots for experts on all GPUs together; num_experts for no replicas.
        num_groups: Of experts, all of one size.
        num_nodes: With equally many GPUs each.
        num_gpus: On all nodes together, with equally many slots each.

    Raises:
        ValueError: A size isn't a positive integer, doesn't divide what it must or leaves an expert without a slot;
            the load has another shape, or is negative or not finite.
    """
    load = _checked("load", load, "num_experts")
    num_experts = load.size(1)
    _check_sizes(num_experts, num_replicas, num_groups, num_nodes, num_gpus)
    if num_groups % num_nodes:
        num_groups = num_nodes = 1
    slots = _rebalanced(load, num_replicas, num_groups, num_nodes, num_gpus)
    if num_experts % num_gpus == 0:
        slots = _no_worse_than_in_order(slots, load, num_gpus)
    return _placement(slots, num_experts)


def load_per_gpu(placement: ExpertPlacement, load: Tensor, num_gpus: int) -> Tensor:
    """The load of every GPU, `[layers, num_gpus]` in float64; the replicas of an expert share its load equally.

    Args:
        placement: From `rebalance_experts`.
        load: `[layers, num_experts]`, the one that the placement was made for or a later one.
        num_gpus: Over which the slots are spread.

    Raises:
        ValueError: The load isn't one of the placement's experts, or is negative or not finite; the slots can't be
            spread over so many GPUs.
    """
    load = _checked("load", load, "num_experts")
    if load.shape != placement.replica_count.shape:
        raise ValueError(
            f"load has shape {tuple(load.shape)}, but the placement is of [layers, num_experts] = "
            f"{list(placement.replica_count.shape)}; pass a load of these layers and experts"
        )
    num_replicas = placement.physical_to_logical.size(1)
    require_positive_int("num_gpus", num_gpus)
    require_divisible("num_replicas", num_replicas, "num_gpus", num_gpus)
    per_slot = (load / placement.replica_count).gather(1, placement.physical_to_logical)
    return per_slot.unflatten(1, (num_gpus, -1)).sum(2)


def imbalance(load_per_rank: Tensor) -> Tensor:
    """How many times the mean load the busiest rank of every layer has, `[layers]` in float64.

    It is 1 for equal loads and for no load at all, and `ranks` if one rank has everything.

    Args:
        load_per_rank: `[layers, ranks]`, such as `load_per_gpu` gives.

    Raises:
        ValueError: It has another shape, or is negative or not finite.
    """
    load = _checked("load_per_rank", load_per_rank, "ranks")
    mean = load.mean(1)
    return torch.where(mean > 0, load.amax(1) / mean, 1.0)


def _checked(name: str, load: Tensor, columns: str) -> Tensor:
    """The load in float64 on the CPU, if it is one."""
    if load.ndim != 2 or load.numel() == 0 or load.is_complex():
        raise ValueError(
            f"{name} must be real numbers [layers, {columns}], at least one of each, got shape {tuple(load.shape)} of "
            f"{load.dtype}; a single layer is {name}[None]"
        )
    load = load.detach().to(device="cpu", dtype=torch.float64).contiguous()
    bad = (load < 0).any(1) | ~load.sum(1).isfinite()
    if bad.any():
        layer = int(bad.nonzero()[0])
        raise ValueError(
            f"{name} must be finite and not negative, and so must be each layer's sum, but {name}[{layer}] has a "
            f"smallest value of {float(load[layer].min())} and a sum of {float(load[layer].sum())}; correct or leave "
            "out what it was counted from"
        )
    return load


def _check_sizes(num_experts: int, num_replicas: int, num_groups: int, num_nodes: int, num_gpus: int) -> None:
    require_positive_int("num_replicas", num_replicas)
    require_positive_int("num_groups", num_groups)
    require_positive_int("num_nodes", num_nodes)
    require_positive_int("num_gpus", num_gpus)
    require_divisible("num_experts", num_experts, "num_groups", num_groups)
    require_divisible("num_gpus", num_gpus, "num_nodes", num_nodes)
    require_divisible("num_replicas", num_replicas, "num_gpus", num_gpus)
    if num_replicas < num_experts:
        raise ValueError(
            f"num_replicas={num_replicas} must be at least num_experts={num_experts}, a slot for each; nearest valid "
            f"with num_gpus={num_gpus}: {math.ceil(num_experts / num_gpus) * num_gpus}"
        )


def _rebalanced(load: Tensor, num_replicas: int, num_groups: int, num_nodes: int, num_gpus: int) -> Tensor:
    """The expert in each slot, `[layers, num_replicas]`, after EPLB's three steps."""
    layers, num_experts = load.shape
    groups = _packed(load.unflatten(1, (num_groups, -1)).sum(2), num_nodes)
    size = num_experts // num_groups
    experts = (groups[:, :, None] * size + torch.arange(size)).view(layers, num_experts)
    # From here on a row is a node of a layer, with experts numbered within it.
    node_load = load.gather(1, experts).view(layers * num_nodes, -1)
    expert, count = _replicated(node_load, num_replicas // num_nodes)
    order = _packed((node_load / count).gather(1, expert), num_gpus // num_nodes)
    return experts.view_as(node_load).gather(1, expert.gather(1, order)).view(layers, num_replicas)


def _no_worse_than_in_order(slots: Tensor, load: Tensor, num_gpus: int) -> Tensor:
    """The expert in each slot, `[layers, num_replicas]`: as given, or in order in layers that gain nothing."""
    num_replicas, num_experts = slots.size(1), load.size(1)
    in_order = _in_order(load, num_replicas, num_gpus)
    most, most_in_order = (
        load_per_gpu(_placement(each, num_experts), load, num_gpus).amax(1, keepdim=True) for each in (slots, in_order)
    )
    # Sums of the same loads in another order differ by less than the margins.
    if num_replicas == num_experts:
        gains = most < most_in_order * (1 - 1e-12)
    else:
        gains = most <= most_in_order * (1 + 1e-12)
    return torch.where(gains, slots, in_order)


def _in_order(load: Tensor, num_replicas: int, num_gpus: int) -> Tensor:
    """The expert in each slot, `[layers, num_replicas]`, without moving any: its own ones on each GPU, some again."""
    layers, num_experts = load.shape
    local, _ = _replicated(load.view(layers * num_gpus, -1), num_replicas // num_gpus)
    first = torch.arange(0, num_experts, num_experts // num_gpus)
    return (local.view(layers, num_gpus, -1) + first[:, None]).flatten(1)


def _packed(load: Tensor, num_packs: int) -> Tensor:
    """Distributes items over packs of one size, greedily.

    Args:
        load: `[rows, items]`, of each item.
        num_packs: Divides items.

    Returns:
        `[rows, items]`, the items of the first pack, of the second and so on; packs of a single item keep their order.
    """
    rows, items = load.shape
    size = items // num_packs
    if size == 1:
        return torch.arange(items).expand(rows, -1)
    packed = torch.empty(rows, items, dtype=torch.int64)
    pack_load = torch.zeros(rows, num_packs, dtype=load.dtype)
    held = torch.zeros(rows, num_packs, dtype=torch.int64)
    row = torch.arange(rows)
    for item in torch.argsort(load, dim=1, descending=True, stable=True).unbind(1):
        pack = pack_load.argmin(1)
        packed[row, pack * size + held[row, pack]] = item
        held[row, pack] += 1
        pack_load[row, pack] += load[row, item]
        pack_load.masked_fill_(held == size, math.inf)
    return packed


def _replicated(load: Tensor, num_replicas: int) -> tuple[Tensor, Tensor]:
    """Gives each replica beyond one per expert to the expert with the most load per replica so far.

    Args:
        load: `[rows, experts]`.
        num_replicas: At least as many as experts.

    Returns:
        The expert of each replica, `[rows, num_replicas]`, all experts first; and the replicas of each expert,
        `[rows, experts]`.
    """
    rows, experts = load.shape
    count = torch.ones(rows, experts, dtype=torch.int64)
    expert = torch.arange(num_replicas).repeat(rows, 1)
    row = torch.arange(rows)
    for replica in range(experts, num_replicas):
        busiest = (load / count).argmax(1)
        expert[:, replica] = busiest
        count[row, busiest] += 1
    return expert, count


def _placement(physical_to_logical: Tensor, num_experts: int) -> ExpertPlacement:
    """All three results from the first."""
    layers, num_replicas = physical_to_logical.shape
    count = torch.zeros(layers, num_experts, dtype=torch.int64)
    count.scatter_add_(1, physical_to_logical, torch.ones_like(physical_to_logical))
    most = int(count.max())
    # Slots sorted by expert: each one's place among those of its expert is its distance from the first of them.
    expert, slot = physical_to_logical.sort(dim=1, stable=True)
    nth = torch.arange(num_replicas) - (count.cumsum(1) - count).gather(1, expert)
    logical_to_physical = torch.full((layers, num_experts * most), -1)
    logical_to_physical.scatter_(1, expert * most + nth, slot)
    return ExpertPlacement(physical_to_logical, logical_to_physical.view(layers, num_experts, most), count)

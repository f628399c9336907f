"""Placements of experts: the published example, the policy in plain Python, and what must hold for all sizes."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lt_parallel.ops.expert_placement import ExpertPlacement, imbalance, load_per_gpu, rebalance_experts


@dataclass(frozen=True)
class Sizes:
    """Valid arguments after the load."""

    num_experts: int
    num_replicas: int
    num_groups: int
    num_nodes: int
    num_gpus: int

    @property
    def rest(self) -> tuple[int, int, int, int]:
        return self.num_replicas, self.num_groups, self.num_nodes, self.num_gpus

    @property
    def hierarchical(self) -> bool:
        return self.num_groups % self.num_nodes == 0

    @property
    def has_order(self) -> bool:
        """Whether experts in order fill all GPUs equally."""
        return self.num_experts % self.num_gpus == 0


@st.composite
def sizes(draw: st.DrawFn) -> Sizes:
    num_nodes, num_groups = draw(st.integers(1, 4)), draw(st.integers(1, 8))
    num_gpus = num_nodes * draw(st.integers(1, 4))
    num_experts = num_groups * draw(st.sampled_from([1, 2, 3, 4, 8]))
    slots_per_gpu = -(-num_experts // num_gpus) + draw(st.integers(0, 3))
    return Sizes(num_experts, num_gpus * slots_per_gpu, num_groups, num_nodes, num_gpus)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Sizes, Tensor]:
    """Sizes and the load of 12 layers: with many ties, with hardly any, without any, skewed. The last layer is idle."""
    found = draw(sizes())
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    shape = (12, found.num_experts)
    loads = {
        "ties": torch.randint(0, 5, shape, generator=generator),
        "tokens": torch.randint(0, 1000, shape, generator=generator),
        "fractions": torch.rand(shape, generator=generator),
        "skewed": torch.empty(shape).exponential_(generator=generator) ** 3,
    }
    load = loads[draw(st.sampled_from(sorted(loads)))]
    load[-1] = 0
    return found, load


def in_order(load: Tensor, num_gpus: int) -> Tensor:
    """`[layers, num_gpus]` with neighbouring experts on each GPU, none twice."""
    return load.double().unflatten(1, (num_gpus, -1)).sum(2)


# ---------------------------------------------------------------------------------------------------------------------
# The policy
# ---------------------------------------------------------------------------------------------------------------------


def test_the_published_example() -> None:
    """From EPLB's README, https://github.com/deepseek-ai/EPLB at d52c72d; counts and slots follow from its map."""
    load = torch.tensor(
        [
            [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
            [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
        ]
    )
    physical_to_logical, logical_to_physical, replica_count = rebalance_experts(
        load, num_replicas=16, num_groups=4, num_nodes=2, num_gpus=8
    )
    assert physical_to_logical.tolist() == [
        [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
        [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
    ]
    assert replica_count.tolist() == [
        [1, 2, 1, 1, 2, 2, 1, 1, 1, 1, 2, 1],
        [1, 2, 1, 1, 1, 2, 2, 1, 2, 1, 1, 1],
    ]
    first = [[12, -1], [13, 15], [11, -1], [6, -1], [5, 7], [0, 2], [1, -1], [3, -1], [4, -1], [9, -1], [8, 10]]
    assert logical_to_physical[0].tolist() == [*first, [14, -1]]


def test_a_full_gpu_takes_no_more() -> None:
    """20 | 6 5 1, then the first GPU again: the second has 12 and no room for the last two."""
    placement = rebalance_experts(torch.tensor([[20, 6, 5, 1, 1, 1]]), 6, 1, 1, 2)
    assert placement.physical_to_logical.tolist() == [[0, 4, 5, 1, 2, 3]]


def plain_pack(load: list[float], num_packs: int) -> list[list[int]]:
    """The items of each pack."""
    size = len(load) // num_packs
    if size == 1:
        return [[item] for item in range(num_packs)]
    packs: list[list[int]] = [[] for _ in range(num_packs)]
    totals = [0.0] * num_packs  # added one by one, as `sum` rounds otherwise and so breaks other ties
    for item in sorted(range(len(load)), key=lambda item: -load[item]):
        pack = min((pack for pack in range(num_packs) if len(packs[pack]) < size), key=totals.__getitem__)
        packs[pack].append(item)
        totals[pack] += load[item]
    return packs


def plain_policy(load: list[float], given: Sizes) -> list[int]:
    """The expert in each slot of one layer."""
    groups, nodes = (given.num_groups, given.num_nodes) if given.hierarchical else (1, 1)
    size = len(load) // groups
    slots = []
    for node in plain_pack([sum(load[group * size : (group + 1) * size]) for group in range(groups)], nodes):
        experts = [group * size + each for group in node for each in range(size)]
        replicas = list(experts)
        while len(replicas) < given.num_replicas // nodes:
            replicas.append(max(experts, key=lambda expert: load[expert] / replicas.count(expert)))
        per_replica = [load[expert] / replicas.count(expert) for expert in replicas]
        slots += [replicas[item] for gpu in plain_pack(per_replica, given.num_gpus // nodes) for item in gpu]
    return slots


@settings(deadline=None, max_examples=80)
@given(cases())
def test_it_is_the_policy_or_the_order(case: tuple[Sizes, Tensor]) -> None:
    given, load = case
    found = rebalance_experts(load, *given.rest)
    most = load_per_gpu(found, load, given.num_gpus).amax(1)
    for layer in range(len(load)):
        policy = plain_policy(load[layer].double().tolist(), given)
        if found.physical_to_logical[layer].tolist() == policy:
            continue
        assert given.has_order
        slots = found.physical_to_logical[layer].view(given.num_gpus, -1)
        neighbours = torch.arange(given.num_experts).view(given.num_gpus, -1)
        assert torch.equal(slots[:, : neighbours.size(1)], neighbours)
        assert all(set(own.tolist()) == set(some.tolist()) for own, some in zip(slots, neighbours, strict=True))
        counts = torch.tensor(policy).bincount(minlength=given.num_experts)
        per_slot = (load[layer].double() / counts)[policy]
        most_by_policy = per_slot.view(given.num_gpus, -1).sum(1).max()
        without_replicas = given.num_replicas == given.num_experts
        assert most_by_policy >= most[layer] * (1 - 2e-12) if without_replicas else most_by_policy > most[layer]


@pytest.mark.parametrize(("num_experts", "num_replicas", "num_gpus"), [(5, 6, 2), (5, 9, 3), (4, 9, 3), (3, 8, 2)])
def test_no_other_replicas_have_a_smaller_largest_one(num_experts: int, num_replicas: int, num_gpus: int) -> None:
    """By brute force over all counts, with sizes for which no layer stays in order."""
    load = torch.rand(20, num_experts, generator=torch.Generator().manual_seed(0))
    found = rebalance_experts(load, num_replicas, 1, 1, num_gpus)
    every = torch.tensor(
        [
            counts
            for counts in itertools.product(range(1, num_replicas), repeat=num_experts)
            if sum(counts) == num_replicas
        ]
    )
    smallest = (load[:, None] / every).amax(2).amin(1)
    torch.testing.assert_close((load / found.replica_count).amax(1), smallest)


# ---------------------------------------------------------------------------------------------------------------------
# What holds for all sizes
# ---------------------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=80)
@given(cases())
def test_the_three_results_agree(case: tuple[Sizes, Tensor]) -> None:
    given, load = case
    physical_to_logical, logical_to_physical, replica_count = rebalance_experts(load, *given.rest)
    layers = len(load)
    assert physical_to_logical.shape == (layers, given.num_replicas)
    assert replica_count.shape == (layers, given.num_experts)
    assert logical_to_physical.shape == (layers, given.num_experts, int(replica_count.max()))
    assert {result.dtype for result in (physical_to_logical, logical_to_physical, replica_count)} == {torch.int64}
    assert replica_count.min() >= 1
    assert replica_count.sum(1).tolist() == [given.num_replicas] * layers
    for layer, slots in enumerate(physical_to_logical.tolist()):
        for expert in range(given.num_experts):
            own = [slot for slot, held in enumerate(slots) if held == expert]
            assert replica_count[layer, expert] == len(own)
            padding = [-1] * (logical_to_physical.size(2) - len(own))
            assert logical_to_physical[layer, expert].tolist() == own + padding


@settings(deadline=None, max_examples=80)
@given(cases())
def test_a_group_stays_on_a_node(case: tuple[Sizes, Tensor]) -> None:
    given, load = case
    if not given.hierarchical:
        return
    group = rebalance_experts(load, *given.rest).physical_to_logical // (given.num_experts // given.num_groups)
    for nodes in group.unflatten(1, (given.num_nodes, -1)).tolist():
        held = [set(node) for node in nodes]
        assert [len(groups) for groups in held] == [given.num_groups // given.num_nodes] * given.num_nodes
        assert set.union(*held) == set(range(given.num_groups))  # so with these counts no group is on two


def test_without_equal_groups_per_node_groups_do_not_count() -> None:
    load = torch.rand(6, 12, generator=torch.Generator().manual_seed(0))
    whole = rebalance_experts(load, 16, 1, 1, 8)
    for num_groups, num_nodes in ((3, 2), (6, 4), (1, 8)):
        found = rebalance_experts(load, 16, num_groups, num_nodes, 8)
        assert torch.equal(found.physical_to_logical, whole.physical_to_logical)
    assert not torch.equal(rebalance_experts(load, 16, 4, 2, 8).physical_to_logical, whole.physical_to_logical)


@settings(deadline=None, max_examples=80)
@given(cases())
def test_layers_do_not_depend_on_each_other(case: tuple[Sizes, Tensor]) -> None:
    given, load = case
    together = rebalance_experts(load, *given.rest)
    for layer in (0, 5, 11):
        alone = rebalance_experts(load[layer : layer + 1], *given.rest)
        assert torch.equal(alone.physical_to_logical[0], together.physical_to_logical[layer])


@pytest.mark.parametrize("num_gpus", [4, 8])  # with 4 the order is looked at, too
@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.float16, torch.bfloat16, torch.float64])
def test_any_real_dtype_and_layout(dtype: torch.dtype, num_gpus: int) -> None:
    load = torch.randint(0, 200, (12, 3), generator=torch.Generator().manual_seed(0))  # exact in each of them
    found = rebalance_experts(load.to(dtype).t(), 16, 4, 2, num_gpus)
    wanted = rebalance_experts(load.t().contiguous(), 16, 4, 2, num_gpus)
    assert torch.equal(found.physical_to_logical, wanted.physical_to_logical)


# ---------------------------------------------------------------------------------------------------------------------
# Never worse than in order
# ---------------------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=200)
@given(cases())
def test_never_worse_than_in_order(case: tuple[Sizes, Tensor]) -> None:
    given, load = case
    if not given.has_order:
        return
    found = load_per_gpu(rebalance_experts(load, *given.rest), load, given.num_gpus)
    margin = 1 if given.num_replicas == given.num_experts else 1 + 1e-12  # a replica's part can't always be exact
    assert (found.amax(1) <= in_order(load, given.num_gpus).amax(1) * margin).all()
    assert (imbalance(found) <= imbalance(in_order(load, given.num_gpus)) * (1 + 1e-12)).all()


def test_a_layer_that_greedy_packing_makes_worse_stays_in_order() -> None:
    """Greedy: 4 2 1 and 2 2 1. The second layer shows that others are packed."""
    load = torch.tensor([[2, 2, 2, 4, 1, 1], [9, 8, 7, 1, 1, 1]])
    found = rebalance_experts(load, 6, 1, 1, 2)
    assert found.physical_to_logical.tolist() == [[0, 1, 2, 3, 4, 5], [0, 3, 4, 1, 2, 5]]
    assert load_per_gpu(found, load, 2).tolist() == [[6, 6], [11, 16]]


def test_with_replicas_it_stays_in_order_and_repeats_its_own() -> None:
    """Greedy: 3 3 1 and 3 2 0 halves, so 3.5 against 3 in order. GPUs repeat their own hottest: experts 0 and 2."""
    load = torch.tensor([[2, 1, 3, 0]])
    found = rebalance_experts(load, 6, 1, 1, 2)
    assert found.physical_to_logical.tolist() == [[0, 1, 0, 2, 3, 2]]
    assert load_per_gpu(found, load, 2).tolist() == [[3, 3]]


def test_equally_good_packing_moves_no_expert_without_replicas() -> None:
    """In the second layer both have 0.8 + 0.8 + 0.2, which is smaller by rounding in the order of the packing."""
    load = torch.tensor([[1, 1, 1, 1, 1, 1], [0.8, 0.8, 0.2, 0.6, 0.5, 0.8]], dtype=torch.float64)
    found = rebalance_experts(load, 6, 1, 1, 2)
    assert found.physical_to_logical.tolist() == [list(range(6))] * 2


def test_equally_good_packing_is_taken_with_replicas() -> None:
    """Both have 1 on each GPU, which is larger by rounding in the order of the packing."""
    load = torch.tensor([[0.3, 0.7, 0.7, 0.3]], dtype=torch.float64)
    assert rebalance_experts(load, 6, 1, 1, 2).physical_to_logical.tolist() == [[1, 1, 0, 2, 2, 3]]


# ---------------------------------------------------------------------------------------------------------------------
# Edges
# ---------------------------------------------------------------------------------------------------------------------


def test_no_load() -> None:
    found = rebalance_experts(torch.zeros(2, 6), 6, 3, 3, 3)
    assert found.physical_to_logical.tolist() == [list(range(6))] * 2
    replicated = rebalance_experts(torch.zeros(2, 6), 9, 3, 3, 3)
    assert replicated.replica_count.tolist() == [[2, 1] * 3] * 2
    assert imbalance(load_per_gpu(replicated, torch.zeros(2, 6), 3)).tolist() == [1, 1]


def test_one_gpu() -> None:
    load = torch.tensor([[1, 5, 2]])
    assert rebalance_experts(load, 3, 1, 1, 1).physical_to_logical.tolist() == [[0, 1, 2]]
    found = rebalance_experts(load, 5, 3, 1, 1)  # 5 is halved, then split in three: 2.5 is still the most
    assert found.replica_count.tolist() == [[1, 3, 1]]
    torch.testing.assert_close(load_per_gpu(found, load, 1), torch.tensor([[8.0]], dtype=torch.float64))


def test_one_expert() -> None:
    load = torch.tensor([[7.0], [0.0]])
    physical_to_logical, logical_to_physical, replica_count = rebalance_experts(load, 4, 1, 2, 4)
    assert physical_to_logical.tolist() == [[0] * 4] * 2
    assert logical_to_physical.tolist() == [[[0, 1, 2, 3]]] * 2
    assert replica_count.tolist() == [[4], [4]]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_groups": 5}, "num_experts=12 must be divisible by num_groups=5; nearest valid: 10 or 15"),
        ({"num_nodes": 3}, "num_gpus=8 must be divisible by num_nodes=3; nearest valid: 6 or 9"),
        ({"num_replicas": 20}, "num_replicas=20 must be divisible by num_gpus=8; nearest valid: 16 or 24"),
        ({"num_replicas": 8}, "num_replicas=8 must be at least num_experts=12, .* nearest valid with num_gpus=8: 16"),
        ({"num_replicas": 0}, "num_replicas must be an integer of at least 1, got 0"),
        ({"num_groups": -4}, "num_groups must be an integer of at least 1, got -4"),
        ({"num_nodes": 0}, "num_nodes must be an integer of at least 1, got 0"),
        ({"num_gpus": 8.0}, r"num_gpus must be an integer of at least 1, got 8\.0"),
    ],
)
def test_sizes_that_do_not_fit(changed: dict[str, int], message: str) -> None:
    valid = {"num_replicas": 16, "num_groups": 4, "num_nodes": 2, "num_gpus": 8}
    with pytest.raises(ValueError, match=message):
        rebalance_experts(torch.ones(2, 12), **(valid | changed))


@pytest.mark.parametrize(
    ("load", "message"),
    [
        (torch.ones(4), r"must be real numbers \[layers, num_experts\].* got shape \(4,\).* load\[None\]"),
        (torch.ones(1, 2, 4), r"got shape \(1, 2, 4\)"),
        (torch.ones(0, 4), r"got shape \(0, 4\)"),
        (torch.ones(2, 0), r"got shape \(2, 0\)"),
        (torch.ones(2, 4, dtype=torch.complex64), "complex64"),
        (torch.tensor([[1.0, 1], [1, -2]]), r"not negative.* load\[1\] has a smallest value of -2\.0"),
        (torch.tensor([[1.0, 1], [1, torch.nan]]), r"finite.* load\[1\] .* a sum of nan"),
        (torch.tensor([[torch.inf, 1], [1, 1]]), r"finite.* load\[0\] .* a sum of inf"),
        (torch.tensor([[1e308, 1e308]], dtype=torch.float64), r"each layer's sum.* a sum of inf"),
    ],
)
def test_bad_load(load: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rebalance_experts(load, 4, 1, 1, 2)


# ---------------------------------------------------------------------------------------------------------------------
# Load of GPUs
# ---------------------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=40)
@given(cases(), st.integers(0, 1000))
def test_load_per_gpu_adds_up_slots(case: tuple[Sizes, Tensor], seed: int) -> None:
    """With a later load than the one the placement was made for."""
    given, load = case
    placement = rebalance_experts(load, *given.rest)
    later = torch.rand(load.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    found = load_per_gpu(placement, later, given.num_gpus)
    per_gpu = given.num_replicas // given.num_gpus
    for layer, slots in enumerate(placement.physical_to_logical.tolist()):
        for gpu in range(given.num_gpus):
            held = slots[gpu * per_gpu : (gpu + 1) * per_gpu]
            wanted = sum(float(later[layer, expert]) / slots.count(expert) for expert in held)
            assert float(found[layer, gpu]) == pytest.approx(wanted)
    torch.testing.assert_close(found.sum(1), later.sum(1))


def a_placement() -> ExpertPlacement:
    return rebalance_experts(torch.tensor([[4, 2, 1]]), 6, 1, 1, 2)


@pytest.mark.parametrize(
    ("load", "num_gpus", "message"),
    [
        (torch.ones(2, 3), 2, r"load has shape \(2, 3\), .* \[layers, num_experts\] = \[1, 3\]"),
        (torch.ones(1, 4), 2, r"load has shape \(1, 4\)"),
        (torch.ones(1, 3), 4, "num_replicas=6 must be divisible by num_gpus=4; nearest valid: 4 or 8"),
        (torch.ones(1, 3), 0, "num_gpus must be an integer of at least 1, got 0"),
        (-torch.ones(1, 3), 2, "not negative"),
    ],
)
def test_load_per_gpu_refuses(load: Tensor, num_gpus: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_per_gpu(a_placement(), load, num_gpus)


def test_imbalance() -> None:
    load = torch.tensor([[3, 3, 3, 3], [0, 0, 0, 12], [1, 2, 3, 6], [0, 0, 0, 0]])
    assert imbalance(load).tolist() == [1, 4, 2, 1]
    with pytest.raises(ValueError, match=r"load_per_rank must be real numbers \[layers, ranks\]"):
        imbalance(load[0])

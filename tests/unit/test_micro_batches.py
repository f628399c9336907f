"""From a DataLoader to global steps: which samples, how many steps, and where a resumed epoch begins."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    SequentialSampler,
    TensorDataset,
)

from lt_parallel.strategies.micro_batches import (
    GlobalOrderSampler,
    MicroBatchLoader,
    num_samples,
    require_every_rank,
    with_global_order,
)

SEED = 5


class Numbered(Dataset[int]):
    """Sample i is i; remembers what was read."""

    def __init__(self, length: int) -> None:
        self.length, self.read = length, list[int]()

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        self.read.append(index)
        return index


class Stream(IterableDataset[int]):
    """Numbers with no length."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.length))


def injected(
    dataset: Any, batch_size: int, replicas: int, rank: int, *, shuffle: bool, **options: Any
) -> DataLoader[Any]:
    """What Lightning gives to `process_dataloader`: the user's loader with its distributed sampler."""
    sampler = DistributedSampler(dataset, replicas, rank, shuffle=shuffle, seed=SEED)
    return DataLoader(dataset, batch_size=batch_size, sampler=sampler, **options)


def loader(
    length: int,
    batch_size: int,
    count: int,
    replicas: int,
    rank: int,
    *,
    training: bool,
    shuffle: bool = True,
    **more: Any,
) -> MicroBatchLoader:
    ordered = with_global_order(
        injected(Numbered(length), batch_size, replicas, rank, shuffle=shuffle, **more), replicas, rank
    )
    return MicroBatchLoader(ordered, num_microbatches=count, num_replicas=replicas, complete_only=training)


def lists(steps: Any) -> list[list[list[int]]]:
    return [[micro_batch.tolist() for micro_batch in step] for step in steps]


def flat(step: list[list[int]]) -> list[int]:
    return [index for micro_batch in step for index in micro_batch]


def expected_order(length: int, epoch: int) -> list[int]:
    return torch.randperm(length, generator=torch.Generator().manual_seed(SEED + epoch)).tolist()


@pytest.mark.parametrize("epoch", [0, 3])
@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_the_global_batch_is_the_same_at_any_data_parallel_size(replicas: int, epoch: int) -> None:
    length, global_batch, batch_size = 83, 16, 2
    count = global_batch // batch_size // replicas
    ranks = [loader(length, batch_size, count, replicas, rank, training=True) for rank in range(replicas)]
    for each in ranks:
        each.sampler.set_epoch(epoch)
    steps = [lists(each) for each in ranks]
    order = expected_order(length, epoch)
    assert [len(each) for each in ranks] == [length // global_batch] * replicas
    for index in range(length // global_batch):
        of_ranks = [step for rank_steps in steps for step in [rank_steps[index]]]
        assert all([len(micro_batch) for micro_batch in step] == [batch_size] * count for step in of_ranks)
        seen = [sample for step in of_ranks for sample in flat(step)]
        assert sorted(seen) == sorted(order[index * global_batch : (index + 1) * global_batch])
    assert all(len(rank_steps) == length // global_batch for rank_steps in steps), "the incomplete tail is dropped"


def test_epochs_differ_and_come_back() -> None:
    each = loader(64, 4, 2, 1, 0, training=True)
    epochs = []
    for epoch in (0, 1, 0):
        each.sampler.set_epoch(epoch)
        epochs.append(lists(each))
    assert epochs[0] == epochs[2] != epochs[1]


@settings(max_examples=60, deadline=None)
@given(
    length=st.integers(1, 60),
    batch_size=st.integers(1, 5),
    count=st.integers(1, 3),
    replicas=st.sampled_from([1, 2, 3, 4]),
    shuffle=st.booleans(),
)
def test_evaluation_counts_each_sample_once_and_ranks_step_together(
    length: int, batch_size: int, count: int, replicas: int, shuffle: bool
) -> None:
    ranks = [
        loader(length, batch_size, count, replicas, rank, training=False, shuffle=shuffle) for rank in range(replicas)
    ]
    steps = [lists(each) for each in ranks]
    assert sorted(sample for rank_steps in steps for step in rank_steps for sample in flat(step)) == list(range(length))
    expected = -(-length // (batch_size * count * replicas))
    assert [len(rank_steps) for rank_steps in steps] == [len(each) for each in ranks] == [expected] * replicas


@settings(max_examples=40, deadline=None)
@given(length=st.integers(24, 80), done=st.integers(0, 8), replicas=st.sampled_from([1, 2]), iterable=st.booleans())
def test_a_resumed_epoch_has_exactly_the_steps_that_are_left(
    length: int, done: int, replicas: int, iterable: bool
) -> None:
    def make(rank: int) -> MicroBatchLoader:
        if iterable:
            stream = DataLoader(Stream(length), batch_size=3)
            return MicroBatchLoader(stream, num_microbatches=2, num_replicas=replicas, complete_only=True)
        return loader(length, 3, 2, replicas, rank, training=True)

    for rank in range(replicas):
        whole = lists(make(rank))
        done_here = min(done, len(whole))
        first, second = make(rank), make(rank)
        iterator = iter(first)
        for _ in range(done_here):
            next(iterator)
        if iterable and done_here:
            next(iterator, None)  # without a length Lightning fetches one step ahead of the one that it trains on
        second.load_state_dict(first.state_dict())
        if not iterable:
            assert len(second) == len(whole), "the length stays the epoch's"
        resumed = lists(second)
        # A whole epoch done is the end of one: the next iteration is the next epoch's, with nothing left out.
        finished = done_here == len(whole)
        assert resumed == (whole if finished else whole[done_here:])
        if not iterable:
            assert lists(second) == whole, "only the resumed epoch is shorter"


def test_what_was_consumed_is_not_even_read() -> None:
    each = loader(48, 2, 3, 1, 0, training=True)
    each.load_state_dict({"steps_done": 5})
    assert lists(each) == lists(loader(48, 2, 3, 1, 0, training=True))[5:]
    assert sorted(each.dataset.read) == sorted(expected_order(48, 0)[30:])


def test_a_resumed_loader_tells_its_position() -> None:
    each = loader(48, 2, 3, 1, 0, training=True)
    each.load_state_dict({"steps_done": 5})
    iterator = iter(each)
    next(iterator)
    assert each.state_dict() == {"steps_done": 6}


def test_a_custom_sampler_is_left_alone() -> None:
    for batch_size, options in (
        (2, {"sampler": SequentialSampler(Numbered(8))}),
        (1, {"batch_sampler": BatchSampler(SequentialSampler(Numbered(8)), 2, drop_last=False)}),
    ):
        given_loader: DataLoader[int] = DataLoader(Numbered(8), batch_size=batch_size, **options)
        assert with_global_order(given_loader, 2, 0) is given_loader
        each = MicroBatchLoader(given_loader, num_microbatches=2, num_replicas=1, complete_only=True)
        assert lists(each) == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
        assert each.batch_size == 2


def test_a_list_is_a_loader_too() -> None:
    batches = [torch.tensor([index]) for index in range(5)]
    training = MicroBatchLoader(batches, num_microbatches=2, num_replicas=1, complete_only=True)
    assert (len(training), lists(training)) == (2, [[[0], [1]], [[2], [3]]])
    evaluation = MicroBatchLoader(batches, num_microbatches=2, num_replicas=1, complete_only=False)
    assert (len(evaluation), lists(evaluation)) == (3, [[[0], [1]], [[2], [3]], [[4]]])


@pytest.mark.parametrize("complete_only", [True, False])
def test_an_iterable_dataset_has_no_length_and_ends(complete_only: bool) -> None:
    each = MicroBatchLoader(
        DataLoader(Stream(10), batch_size=2), num_microbatches=2, num_replicas=1, complete_only=complete_only
    )
    with pytest.raises(TypeError, match="no length"):
        len(each)
    tail = [] if complete_only else [[[8, 9]]]
    assert lists(each) == [[[0, 1], [2, 3]], [[4, 5], [6, 7]], *tail]
    assert lists(each) == [[[0, 1], [2, 3]], [[4, 5], [6, 7]], *tail], "and begins anew"


def test_the_loader_keeps_what_the_user_chose() -> None:
    def collate(samples: list[int]) -> list[int]:
        return [-sample for sample in samples]

    user = injected(
        Numbered(8), 2, 2, 1, shuffle=False, collate_fn=collate, drop_last=True, num_workers=1, prefetch_factor=3
    )
    ordered = with_global_order(user, 2, 1)
    assert (ordered.collate_fn, ordered.num_workers, ordered.prefetch_factor) == (collate, 1, 3)
    assert ordered.batch_sampler.drop_last is True and ordered.batch_sampler.batch_size == 2
    assert list(ordered.batch_sampler) == [[1, 3], [5, 7]]
    assert isinstance(ordered.batch_sampler.sampler, GlobalOrderSampler)


def test_workers_get_seeds_that_do_not_depend_on_the_global_generator() -> None:
    def seeds(global_seed: int, seed: int) -> list[float]:
        torch.manual_seed(global_seed)
        given_loader = DataLoader(Drawing(), batch_size=2, num_workers=1)
        each = MicroBatchLoader(given_loader, num_microbatches=1, num_replicas=1, complete_only=True, seed=seed)
        before = torch.get_rng_state()
        drawn = [float(step[0][0]) for step in each]
        assert torch.equal(before, torch.get_rng_state()), "the loader drew from the global generator"
        return drawn

    assert seeds(1, 3) == seeds(2, 3) != seeds(1, 4)


class Drawing(Dataset[float]):
    """Samples that a worker draws."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> float:
        return random.random()


# ---------------------------------------------------------------- data that don't fit


def test_training_data_must_fill_one_global_batch() -> None:
    with pytest.raises(ValueError, match=r"hold 15 samples, fewer than one global batch of 16 \(micro batch 2 x "):
        loader(15, 2, 4, 2, 0, training=True)
    assert len(loader(16, 2, 4, 2, 0, training=True)) == 1
    assert len(loader(1, 2, 4, 2, 1, training=False)) == 1
    with pytest.raises(ValueError, match="holds 3 micro batches, fewer than num_microbatches=4"):
        MicroBatchLoader([1, 2, 3], num_microbatches=4, num_replicas=1, complete_only=True)


def test_evaluation_data_of_plain_modules_must_reach_every_rank() -> None:
    ordered = with_global_order(injected(Numbered(3), 2, 4, 0, shuffle=False), 4, 0)
    with pytest.raises(ValueError, match="hold 3 samples, fewer than the data-parallel size 4"):
        require_every_rank(ordered, 4)
    require_every_rank(ordered, 3)
    require_every_rank(DataLoader(Stream(1), batch_size=2), 4)


@pytest.mark.parametrize(
    ("micro_batch", "count"),
    [
        (torch.zeros(3, 2), 3),
        (torch.tensor(1.0), 1),
        ({"tokens": torch.zeros(4, 8), "mask": torch.zeros(4)}, 4),
        ((torch.zeros(5, 1), torch.zeros(5)), 5),
        ([[torch.zeros(2)]], 2),
        ("text", 1),
        ({}, 1),
        (None, 1),
    ],
)
def test_num_samples(micro_batch: Any, count: int) -> None:
    assert num_samples(micro_batch) == count


def test_the_dataset_and_the_sampler_can_be_asked_for() -> None:
    data = TensorDataset(torch.arange(8))
    each = MicroBatchLoader(
        with_global_order(injected(data, 2, 1, 0, shuffle=True), 1, 0),
        num_microbatches=1,
        num_replicas=1,
        complete_only=True,
    )
    assert each.dataset is data
    each.sampler.set_epoch(4)  # what Lightning does
    assert [int(sample) for step in each for sample in step[0][0]] == expected_order(8, 4)

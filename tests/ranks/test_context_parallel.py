"""Attention over cut sequences, against a dense reference in float64, and what it moves and holds."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import lightning.pytorch as L
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from lt_parallel.models import GPTModule
from lt_parallel.ops.context_parallel_attention import context_parallel_attention
from lt_parallel.ops.zigzag import cut, join, place_of
from tests.ranks.parity_runs import (
    LLAMA,
    MICRO_BATCH,
    SEED,
    SEQ_LENGTH,
    VOCAB_SIZE,
    Sequences,
    StepNumbers,
    build_trainer,
)
from tests.support.ranks import init_gloo, run_ranks

KINDS = ("p2p", "all_gather", "a2a", "a2a+p2p")
BATCH, CHANNELS, SCALE = 2, 8, 0.3
NARROW, WIDE = 5, 12  # channels of values; of queries and keys there are CHANNELS


def dense(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
    """Written out, float64."""
    repeats = query.size(1) // key.size(1)
    key, value = (part.repeat_interleave(repeats, 1) for part in (key, value))
    scores = SCALE * query @ key.transpose(-1, -2)
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), float("-inf"))
    return scores.softmax(-1) @ value


def hierarchy(kind: str) -> list[Any] | None:
    """Groups of two neighbours, and the rings over them."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if kind != "a2a+p2p":
        return None
    pairs = [dist.new_group([first, first + 1]) for first in range(0, size, 2)]
    rings = [dist.new_group(list(range(first, size, 2))) for first in (0, 1)]
    return [pairs[rank // 2], rings[rank % 2]]


def errors(cases: list[tuple[str, bool, torch.dtype, int, int, int, int, int]]) -> list[float]:
    """Largest error of output and gradients, relative to the reference's largest value, for each case."""
    init_gloo()
    group: Any = dist.group.WORLD
    rank, size = group.rank(), group.size()
    hierarchies = {kind: hierarchy(kind) for kind in {case[0] for case in cases}}
    found = []
    for kind, causal, dtype, heads, groups, width, chunk, seed in cases:
        generator = torch.Generator().manual_seed(seed)
        length = 2 * size * chunk
        sizes = [(heads, CHANNELS), (groups, CHANNELS), (groups, width), (heads, width)]
        shapes = [(BATCH, count, length, channels) for count, channels in sizes]
        query, key, value, upstream = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
        whole = [part.to(dtype).double().requires_grad_() for part in (query, key, value)]
        expected = dense(*whole, causal)
        expected.backward(upstream.to(dtype).double())
        own = [cut(part.detach(), rank, size, 2).to(dtype).requires_grad_() for part in whole]
        output = context_parallel_attention(*own, kind, group, hierarchies[kind], causal=causal, scale=SCALE)
        output.backward(cut(upstream.to(dtype), rank, size, 2))
        pairs = [(output, expected), *((part.grad, reference.grad) for part, reference in zip(own, whole, strict=True))]
        found.append(
            max(
                float((mine.double() - cut(reference.detach(), rank, size, 2)).abs().max() / reference.abs().max())
                for mine, reference in pairs
                if mine is not None and reference is not None
            )
        )
    return found


LIMITS = {torch.float64: 1e-14, torch.float32: 3e-6, torch.bfloat16: 3e-2}


@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), size=st.sampled_from([2, 4]))
def test_equals_dense_attention(data: st.DataObject, size: int) -> None:
    """Several random shapes in one call of the ranks, since starting them costs most."""
    cases = data.draw(
        st.lists(
            st.tuples(
                st.sampled_from(KINDS),
                st.booleans(),
                st.sampled_from(list(LIMITS)),
                st.sampled_from([4, 8]),
                st.just(4),
                st.sampled_from([CHANNELS, NARROW, WIDE]),
                st.integers(1, 9),
                st.integers(0, 99),
            ),
            min_size=8,
            max_size=16,
        )
    )
    for rank in run_ranks(errors, size, cases):
        for case, error in zip(cases, rank, strict=True):
            assert error <= LIMITS[case[2]], (case, error)


def test_three_ranks_and_one_key_head() -> None:
    cases = [
        (kind, causal, torch.float64, 3, 1, CHANNELS, 5, 1)
        for kind in ("p2p", "all_gather")
        for causal in (True, False)
    ]
    for rank in run_ranks(errors, 3, cases):
        assert max(rank) <= LIMITS[torch.float64]


def test_values_with_fewer_and_with_more_channels_than_keys() -> None:
    cases = [
        (kind, causal, torch.float64, 8, 4, width, 3, 1)
        for kind in KINDS
        for causal in (True, False)
        for width in (NARROW, WIDE)
    ]
    for rank in run_ranks(errors, 4, cases):
        for case, error in zip(cases, rank, strict=True):
            assert error <= LIMITS[torch.float64], (case, error)


# ---------------------------------------------------------------- what is moved and held


def nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


class Counting(TorchDispatchMode):
    """Bytes that this rank hands to others in `size` ranks' exchanges, counted where they are handed over."""

    KINDS = ("c10d::send", "c10d::allgather_", "c10d::alltoall_base_", "c10d::reduce_scatter_")

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size = size
        self.sent = dict.fromkeys(self.KINDS, 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, size = func.name(), self._size
        if name == "c10d::send":
            self.sent[name] += sum(map(nbytes, args[0]))
        elif name == "c10d::allgather_":
            self.sent[name] += sum(map(nbytes, args[1])) * (size - 1)
        elif name in self.KINDS:
            exchange = name == "c10d::alltoall_base_"
            ranks = args[1].size(0) if exchange else size
            whole = nbytes(args[1]) if exchange else sum(map(nbytes, args[1][0]))
            self.sent[name] += whole * (ranks - 1) // ranks
        return func(*args, **(kwargs or {}))


def bytes_sent(kind: str, widths: list[int]) -> list[tuple[int, int]]:
    """Forward and backward, for each number of channels of a value."""
    init_gloo()
    group: Any = dist.group.WORLD
    hierarchical = hierarchy(kind)
    found = []
    for width in widths:
        sizes = [(8, CHANNELS), (4, CHANNELS), (4, width)]
        parts = [torch.randn(BATCH, heads, 8, channels, requires_grad=True) for heads, channels in sizes]
        with Counting(group.size()) as counting:
            output = context_parallel_attention(*parts, kind, group, hierarchical, causal=True, scale=SCALE)
            forward = sum(counting.sent.values())
            output.sum().backward()
        found.append((forward, sum(counting.sent.values()) - forward))
    return found


QUERY_BYTES, KEY_BYTES = BATCH * 8 * 8 * CHANNELS * 4, BATCH * 4 * 8 * CHANNELS * 4
CP = 4
#: Forward and backward; K + V is 2 key tensors, all four tensors of an exchange 2 query and 2 key tensors.
FORMULAS = {
    "p2p": ((CP - 1) * 2 * KEY_BYTES, (CP - 1) * 2 * KEY_BYTES + CP * 2 * KEY_BYTES),
    "all_gather": ((CP - 1) * 2 * KEY_BYTES, (CP - 1) * 2 * KEY_BYTES + (CP - 1) * 2 * KEY_BYTES),
    "a2a": ((2 * QUERY_BYTES + 2 * KEY_BYTES) * (CP - 1) // CP,) * 2,
    # Half is exchanged among 2 neighbours; then the ring of 2 has twice the keys of half the heads.
    "a2a+p2p": (
        (2 * QUERY_BYTES + 2 * KEY_BYTES) // 2 + 2 * KEY_BYTES,
        (2 * QUERY_BYTES + 2 * KEY_BYTES) // 2 + 2 * KEY_BYTES + 2 * 2 * KEY_BYTES,
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_sent_are_the_formula_s(kind: str) -> None:
    """As many values (outputs) as keys (queries) travel, so a value of half the channels saves a quarter."""
    for whole, narrow in run_ranks(bytes_sent, CP, kind, [CHANNELS, CHANNELS // 2]):
        assert whole == FORMULAS[kind]
        assert narrow == tuple(sent * 3 // 4 for sent in whole)


class CountedStep(StepNumbers):
    """Counts the first step."""

    def on_train_batch_start(self, *args: Any) -> None:
        self.counting = Counting(2)
        self.counting.__enter__()

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        super().on_train_batch_end(trainer, *args)
        self.counting.__exit__(None, None, None)


def bytes_of_a_step(comm_types: list[str]) -> dict[str, int]:
    L.seed_everything(SEED, verbose=False)
    step = CountedStep()
    strategy = {"context_parallel_size": 2, "cp_comm_type": comm_types, "num_microbatches": 1}
    trainer = build_trainer(step, strategy, devices=2, max_steps=1, limit_val_batches=0)
    trainer.fit(GPTModule(VOCAB_SIZE, SEQ_LENGTH, **LLAMA), DataLoader(Sequences(8), batch_size=MICRO_BATCH))
    return step.counting.sent


def test_each_layer_of_a_model_sends_what_its_own_way_costs() -> None:
    """Whole keys and values: MICRO_BATCH x 4 groups x SEQ_LENGTH x 8 channels in fp32; twice as many query heads."""
    keys_and_values = 2 * MICRO_BATCH * 4 * SEQ_LENGTH * 8 * 4
    ring = keys_and_values // 2  # (cp - 1) / cp of them, forward
    gather, scatter = 2 * ring, ring  # forward and backward; their gradients
    exchange = (2 * 2 + 2) * keys_and_values // 2 // 2 // 2  # q, k, v and the output: half of a half of each
    for sent in run_ranks(bytes_of_a_step, 2, ["p2p", "all_gather", "a2a", "p2p"]):
        assert sent == {
            "c10d::send": 2 * (ring + ring + 2 * ring),  # two layers: forward, backward, gradients to their home
            "c10d::allgather_": gather,
            "c10d::reduce_scatter_": scatter,
            "c10d::alltoall_base_": 2 * exchange,
        }


class Live(TorchDispatchMode):
    """Bytes of tensors that are alive, and their peak: what PyTorch's operators gave and nobody has dropped."""

    def __init__(self) -> None:
        super().__init__()
        self._held: set[int] = set()
        self._now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._hold(tensor.untyped_storage())
        return result

    def _hold(self, storage: Any) -> None:
        if storage._cdata not in self._held:
            self._held.add(storage._cdata)
            self._now += storage.nbytes()
            self.peak = max(self.peak, self._now)
            weakref.finalize(storage, self._drop, storage._cdata, storage.nbytes())

    def _drop(self, address: int, size: int) -> None:
        self._held.discard(address)
        self._now -= size


def peak_bytes(length: int) -> list[int]:
    """Of ring attention over a whole sequence of this length, causal and not, forward and backward, with its inputs."""
    init_gloo()
    group: Any = dist.group.WORLD
    peaks = []
    for causal in (True, False):
        with Live() as live:
            shapes = [(BATCH, heads, length // group.size(), CHANNELS) for heads in (8, 4, 4)]
            parts = [torch.randn(shape, requires_grad=True) for shape in shapes]
            output = context_parallel_attention(*parts, "p2p", group, None, causal=causal, scale=SCALE)
            output.backward(torch.ones_like(output))
        peaks.append(live.peak)
        del parts, output
    return peaks


def test_peak_memory_of_the_ring_falls_with_the_number_of_ranks() -> None:
    """At a fixed length. One rank has no block under way, two have no third one; from there on it's exactly 1 / cp."""
    every = [run_ranks(peak_bytes, size, 256) for size in (1, 2, 4, 8)]
    for ranks in zip(*(zip(*size, strict=True) for size in every), strict=True):  # causal, then not
        one, two, four, eight = map(set, ranks)
        assert four == {2 * peak for peak in eight}
        assert max(two) <= 0.66 * max(one)
        assert max(four) <= 0.56 * max(two)


def saved_bytes(kind: str, length: int) -> int:
    """Bytes that the backward pass of a whole sequence of this length keeps on this rank."""
    init_gloo()
    group: Any = dist.group.WORLD
    saved: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    parts = [torch.randn(BATCH, heads, length // group.size(), CHANNELS, requires_grad=True) for heads in (8, 4, 4)]
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = context_parallel_attention(*parts, kind, group, None, causal=True, scale=SCALE)
    assert output.requires_grad
    return sum(saved.values())


@pytest.mark.parametrize("kind", ["p2p", "all_gather", "a2a"])
def test_what_is_kept_falls_with_the_number_of_ranks(kind: str) -> None:
    one, two, four = (run_ranks(saved_bytes, size, kind, 256)[0] for size in (1, 2, 4))
    assert one == 2 * two == 4 * four > 0


# ---------------------------------------------------------------- the order of the sequence


@given(st.integers(1, 6), st.integers(1, 5))
def test_cut_and_join_are_inverse_and_positions_are_found(size: int, chunk: int) -> None:
    whole = torch.arange(2 * size * chunk)
    parts = [cut(whole, rank, size, 0) for rank in range(size)]
    assert torch.equal(join(parts, 0), whole)
    for position in whole.tolist():
        rank, place = place_of(position, len(whole), size)
        assert parts[rank][place] == position
    work = [sum(range(1, len(whole) + 1)[position] for position in part.tolist()) for part in parts]
    assert len(set(work)) == 1  # keys that a rank's queries see under a causal mask


# ---------------------------------------------------------------- in a model


def validate_and_generate(strategy: dict[str, Any], world_size: int) -> tuple[dict[str, float], list[list[int]]]:
    L.seed_everything(SEED, verbose=False)
    trainer = build_trainer(StepNumbers(), strategy, devices=world_size, limit_val_batches=1.0)
    module: Any = GPTModule(
        VOCAB_SIZE, SEQ_LENGTH, **LLAMA, init_method_std=0.3, validation_metrics=["perplexity", "token_accuracy"]
    )
    trainer.validate(module, DataLoader(Sequences(13), batch_size=MICRO_BATCH), verbose=False)
    values = {name: float(value) for name, value in trainer.callback_metrics.items()}
    prompts = torch.tensor([[5, 9, 13], [7, 3, 90]])
    return values, module.generate(prompts, 9, temperature=0.0).tolist()


@pytest.mark.parametrize(
    ("world_size", "strategy"),
    [
        (2, {"context_parallel_size": 2}),
        (4, {"context_parallel_size": 2, "tensor_model_parallel_size": 2, "sequence_parallel": True}),
        (4, {"context_parallel_size": 2, "pipeline_model_parallel_size": 2}),
    ],
)
def test_validation_metrics_and_generation(world_size: int, strategy: dict[str, Any]) -> None:
    ((expected, tokens),) = run_ranks(validate_and_generate, 1, {}, 1)
    for values, generated in run_ranks(validate_and_generate, world_size, strategy, world_size):
        assert generated == tokens
        assert values == pytest.approx(expected, rel=1e-5)


class Masked(Sequences):
    """Masks that leave the second rank's chunks of every sequence without a token that counts."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        item = super().__getitem__(index)
        quarter = SEQ_LENGTH // 4
        item["loss_mask"] = torch.cat([torch.ones(quarter), torch.zeros(2 * quarter), torch.ones(quarter)])
        return item


def train_masked(world_size: int, strategy: dict[str, Any]) -> dict[str, list[float]]:
    L.seed_everything(SEED, verbose=False)
    numbers = StepNumbers()
    trainer = build_trainer(numbers, strategy, devices=world_size, max_steps=4, limit_val_batches=0)
    trainer.fit(GPTModule(VOCAB_SIZE, SEQ_LENGTH, **LLAMA, lr=1e-3), DataLoader(Masked(), batch_size=MICRO_BATCH))
    return {"loss": numbers.losses, "grad_norm": numbers.grad_norms}


def test_a_mask_that_empties_a_rank_s_chunks() -> None:
    (expected,) = run_ranks(train_masked, 1, 1, {})
    for rank in run_ranks(partial(train_masked), 2, 2, {"context_parallel_size": 2}):
        assert rank["loss"] == pytest.approx(expected["loss"], abs=5e-6)
        assert rank["grad_norm"] == pytest.approx(expected["grad_norm"], rel=5e-5)

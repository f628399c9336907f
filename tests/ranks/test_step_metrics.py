"""Metrics of one step made equal on every rank: weights, ranks with no micro batch, names that differ."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

from lt_parallel.strategies.step_metrics import StepMetrics, StepMetricsReducer
from tests.support.ranks import init_gloo, run_ranks

CPU = torch.device("cpu")


def make_reducer(dp: int, pp: int) -> tuple[StepMetricsReducer, int, bool]:
    """The reducer of this rank in a grid with the data-parallel axis first, its place there, and if it has the loss."""
    init_gloo()
    rank = int(os.environ["RANK"])
    data = [dist.new_group([dp * stage + place for place in range(dp)]) for stage in range(pp)]
    pipelines = [dist.new_group([dp * stage + place for stage in range(pp)]) for place in range(dp)]
    stage, place = divmod(rank, dp)
    return StepMetricsReducer(data[stage], pipelines[place], CPU), place, stage == pp - 1


def measured(*micro_batches: tuple[float, int, dict[str, Any]]) -> StepMetrics:
    metrics = StepMetrics(CPU)
    for loss_sum, tokens, values in micro_batches:
        metrics.add(torch.tensor(loss_sum), tokens, values)
    return metrics


def plain(reduced: dict[str, Any]) -> dict[str, tuple[float, float]]:
    return {name: (float(value.mean), float(value.weight)) for name, value in reduced.items()}


def several_steps(dp: int, pp: int) -> list[dict[str, tuple[float, float]]]:
    reducer, place, has_loss = make_reducer(dp, pp)
    found = []
    for step in (
        # unequal token counts: 30 nats over 10 tokens, and 2 over 2
        [measured((10.0, 4, {"a": 1.0}), (20.0, 6, {"a": 2.0})), measured((2.0, 2, {"a": 7.0}))],
        # the same names again, already known
        [measured((1.0, 1, {"a": 0.0})), measured((3.0, 1, {"a": 4.0}))],
        # the second data-parallel rank has nothing, as at the end of an evaluation
        [measured((8.0, 4, {"b": (3.0, 2)})), measured()],
        # nobody has
        [measured(), measured()],
        # other names than before
        [measured((1.0, 1, {"c": 1.0, "b": 2.0})), measured((1.0, 1, {"c": 3.0, "b": 4.0}))],
    ):
        found.append(plain(reducer.reduce(step[place] if has_loss else None)))
    return found


def check_steps(every_rank: list[list[dict[str, tuple[float, float]]]]) -> None:
    for rank, found in enumerate(every_rank):
        assert found == [
            {"loss": (32 / 12, 12.0), "a": ((4 * 1 + 6 * 2 + 2 * 7) / 12, 12.0)} | found[0],
            {"loss": (2.0, 2.0), "a": (2.0, 2.0)},
            {"loss": (2.0, 4.0), "b": (1.5, 2.0)},
            {},
            {"loss": (1.0, 2.0), "c": (2.0, 2.0), "b": (3.0, 2.0)},
        ], rank
        assert abs(found[0]["loss"][0] - 32 / 12) < 1e-6 and found[0]["loss"][1] == 12.0
        assert abs(found[0]["a"][0] - 2.5) < 1e-6 and found[0]["a"][1] == 12.0
        assert found == every_rank[0], "bit for bit the same on every rank"


def test_data_parallel_ranks_with_unequal_tokens() -> None:
    check_steps(run_ranks(several_steps, 2, 2, 1))


def test_every_pipeline_stage_gets_the_same() -> None:
    check_steps(run_ranks(several_steps, 4, 2, 2))


def names_differ(names: list[list[str]]) -> str:
    reducer, place, _ = make_reducer(len(names), 1)
    reducer.reduce(measured((1.0, 1, {"agreed": 1.0})))
    try:
        reducer.reduce(measured((1.0, 1, dict.fromkeys(names[place], 1.0))))
    except ValueError as error:
        return str(error)
    return "no error"


def test_names_that_differ_raise_on_every_rank() -> None:
    for names in ([["a"], ["b"]], [["a"], ["a", "b"]], [["a", "b"], ["b", "a"]], [["a"], []]):
        messages = run_ranks(names_differ, 2, names, timeout_s=30)
        assert len(set(messages)) == 1, names
        assert "different metric names on different ranks: loss" in messages[0], names


def test_names_that_differ_on_one_of_three_ranks() -> None:
    messages = run_ranks(names_differ, 3, [["a"], ["b"], ["a"]], timeout_s=30)
    assert messages == ["loss_function returned different metric names on different ranks: loss, a; loss, b"] * 3

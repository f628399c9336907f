"""Sums and weights of one step on one rank; what needs several ranks is in `tests/ranks/test_step_metrics.py`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lt_parallel.strategies.step_metrics import StepMetrics, StepMetricsReducer

CPU = torch.device("cpu")


class Alone:
    """A process group of one rank, of which the reducer asks nothing but the size."""

    def size(self) -> int:
        return 1


def reduced(metrics: StepMetrics) -> dict[str, tuple[float, float]]:
    reducer = StepMetricsReducer(Alone(), Alone(), CPU)
    return {name: (float(value.mean), float(value.weight)) for name, value in reducer.reduce(metrics).items()}


def test_a_mean_is_weighted_by_tokens_and_a_pair_by_itself() -> None:
    metrics = StepMetrics(CPU)
    metrics.add(torch.tensor(6.0), torch.tensor(3), {"mean": 2.0, "pair": (torch.tensor(8.0), 2)})
    metrics.add(torch.tensor(1.0), 1, {"mean": torch.tensor(10.0), "pair": (1.0, torch.tensor(1))})
    assert metrics.names == ("loss", "mean", "pair")
    assert metrics.vector().tolist() == [7.0, 4.0, 16.0, 4.0, 9.0, 3.0]
    assert reduced(metrics) == {"loss": (1.75, 4.0), "mean": (4.0, 4.0), "pair": (3.0, 3.0)}


def test_sums_are_kept_in_float64_whatever_comes_in() -> None:
    metrics = StepMetrics(CPU)
    for _ in range(1000):
        metrics.add(torch.tensor(0.1, dtype=torch.float16), 1, {"bf16": torch.tensor(3.0, dtype=torch.bfloat16)})
    assert metrics.vector().dtype == torch.float64
    assert float(metrics.vector()[0]) == pytest.approx(1000 * float(torch.tensor(0.1, dtype=torch.float16)), rel=1e-12)
    values = StepMetricsReducer(Alone(), Alone(), CPU).reduce(metrics)
    assert values["bf16"].mean.dtype == torch.float32 and float(values["bf16"].mean) == 3.0


def test_a_metric_needs_no_gradient_and_any_scalar_shape_will_do() -> None:
    metrics = StepMetrics(CPU)
    metrics.add(torch.tensor([2.0], requires_grad=True) * 1, torch.tensor([4]), {"x": torch.tensor([[1.0]])})
    assert not metrics.vector().requires_grad
    assert reduced(metrics) == {"loss": (0.5, 4.0), "x": (1.0, 4.0)}
    with pytest.raises(RuntimeError):
        metrics.add(torch.zeros(2), 1, {})


def test_no_tokens_give_zero_and_not_nan() -> None:
    metrics = StepMetrics(CPU)
    metrics.add(torch.tensor(0.0), 0, {"x": (0.0, 0.0)})
    assert reduced(metrics) == {"loss": (0.0, 0.0), "x": (0.0, 0.0)}


def test_a_name_that_comes_later_counts_from_there() -> None:
    metrics = StepMetrics(CPU)
    metrics.add(torch.tensor(2.0), 2, {})
    metrics.add(torch.tensor(2.0), 2, {"late": 5.0})
    assert reduced(metrics) == {"loss": (1.0, 4.0), "late": (5.0, 2.0)}


def test_an_empty_step_has_no_names() -> None:
    assert reduced(StepMetrics(CPU)) == {}


@pytest.mark.parametrize("count", [253, 254, 255])
def test_as_many_metrics_as_the_vector_holds(count: int) -> None:
    metrics = StepMetrics(CPU)
    many: dict[str, Any] = {f"m{index}": float(index) for index in range(count)}
    metrics.add(torch.tensor(1.0), 1, many)
    if count <= 254:
        assert reduced(metrics)[f"m{count - 1}"] == (count - 1.0, 1.0)
    else:
        with pytest.raises(ValueError, match="returned 255 metrics; at most 254 fit"):
            reduced(metrics)

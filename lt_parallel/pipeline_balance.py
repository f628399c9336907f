"""Cutting a model into pipeline stages so that the slowest stage is as fast as it can be. Pure Python."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lt_parallel.size_checks import require_pipeline_for_chunks, require_positive_int

__all__ = ["LayerCosts", "balance_layout"]

#: Cost of (stage, first part, end of its parts).
_StageCost = Callable[[int, int, int], float]


@dataclass(frozen=True, kw_only=True)
class LayerCosts:
    """What each part of a model costs, in any unit: FLOPs, milliseconds, bytes.

    Args:
        decoder: Of each decoder layer, in order.
        embedding: Of the embedding, before the first of them.
        mtp: Of each multi-token prediction layer.
        loss: Of the output layer and the loss.

    Raises:
        ValueError: There is no decoder layer, or a cost is negative or not finite.
    """

    decoder: Sequence[float]
    embedding: float = 0.0
    mtp: Sequence[float] = ()
    loss: float = 0.0

    def __post_init__(self) -> None:
        if not self.decoder:
            raise ValueError("decoder=[] must hold the cost of at least one layer")
        for name, costs in (
            ("decoder", self.decoder),
            ("mtp", self.mtp),
            ("embedding", [self.embedding]),
            ("loss", [self.loss]),
        ):
            for cost in costs:
                if not math.isfinite(cost) or cost < 0:
                    raise ValueError(f"{name}: a cost of {cost} must be a number that isn't negative")


def balance_layout(costs: LayerCosts, pp: int, vpp: int = 1) -> list[str]:
    """The layout with the smallest bottleneck stage; exact, by dynamic programming over (stages, parts placed).

    Among the layouts whose slowest stage is equally fast it takes the one with the smallest sum of squared costs, which
    is the most even. All multi-token prediction layers stay together, in the last chunk of a rank and, with several
    chunks, not on rank 0, as `pipeline_model_parallel_layout` asks.

    Args:
        costs: Of the model's parts.
        pp: Pipeline ranks.
        vpp: Model chunks per rank.

    Returns:
        Symbols of each of the pp x vpp stages, for `pipeline_model_parallel_layout`, e.g. ["Ett", "ttt", "tL"].

    Raises:
        ValueError: A size isn't a positive integer, or vpp > 1 with pp = 1.
    """
    require_positive_int("pp", pp)
    require_positive_int("vpp", vpp)
    require_pipeline_for_chunks(pp, vpp)
    stages = pp * vpp
    # The embedding belongs to the first stage and the loss to the last, whatever else is there.
    parts = [("t", cost) for cost in costs.decoder]
    if costs.mtp:
        parts.append(("m" * len(costs.mtp), sum(costs.mtp)))
    before = [0.0]
    for _, cost in parts:
        before.append(before[-1] + cost)

    def cost_of(stage: int, first: int, end: int) -> float:
        """Of a stage with parts first to end - 1; infinite where it may not be."""
        holds_mtp = bool(costs.mtp) and first < len(parts) == end
        if holds_mtp and stage < (vpp - 1) * pp + (vpp > 1):
            return math.inf
        own = before[end] - before[first]
        return own + (costs.embedding if stage == 0 else 0.0) + (costs.loss if stage == stages - 1 else 0.0)

    bottleneck = _smallest_bottleneck(cost_of, stages, len(parts))
    ends = _most_even(cost_of, stages, len(parts), bottleneck)
    symbols = ["".join(symbol for symbol, _ in parts[first:end]) for first, end in zip([0, *ends], ends, strict=False)]
    symbols[0] = "E" + symbols[0]
    symbols[-1] += "L"
    return symbols


def _smallest_bottleneck(cost_of: _StageCost, stages: int, parts: int) -> float:
    """The least that the costliest stage can cost."""
    best = [cost_of(0, 0, end) for end in range(parts + 1)]
    for stage in range(1, stages):
        best = [
            min(max(best[first], cost_of(stage, first, end)) for first in range(end + 1)) for end in range(parts + 1)
        ]
    return best[parts]


def _most_even(cost_of: _StageCost, stages: int, parts: int, bottleneck: float) -> list[int]:
    """Where each stage ends: the least sum of squares among cuts whose stages cost at most the bottleneck."""
    limit = bottleneck * (1 + 1e-12)

    def squared(stage: int, first: int, end: int) -> float:
        cost = cost_of(stage, first, end)
        return cost * cost if cost <= limit else math.inf

    best = [squared(0, 0, end) for end in range(parts + 1)]
    choices: list[list[int]] = []
    for stage in range(1, stages):
        sums = [[best[first] + squared(stage, first, end) for first in range(end + 1)] for end in range(parts + 1)]
        choices.append([min(range(len(row)), key=row.__getitem__) for row in sums])
        best = [min(row) for row in sums]
    ends = [parts]
    for choice in reversed(choices):
        ends.append(choice[ends[-1]])
    return ends[::-1]

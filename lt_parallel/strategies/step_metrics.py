"""What one step measured, made equal on every rank.

The last pipeline stage sees the loss, one micro batch at a time, on one data-parallel rank. Everything that depends on
it (ModelCheckpoint, EarlyStopping, ReduceLROnPlateau, the logger on rank 0) must see the same number everywhere. So
each value is kept as (sum, weight), summed over micro batches and over the data and context parallel ranks, divided
once, and broadcast to the other stages.

Cost: one all-reduce of a 4 KiB float64 vector, and with pipelining one broadcast. Names travel once per new set of
names; the vector carries their fingerprint.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

#: A metric given by `loss_function`: a mean over the micro batch's tokens, or (sum, weight).
MetricValue = Tensor | float | tuple[Tensor | float, Tensor | float]

_HEADER = 2  # sum of the ranks' fingerprints, number of ranks that report
_CAPACITY = 512


class Reduced(NamedTuple):
    """A step's value: its mean (float32 scalar) and the weight it has over all ranks and micro batches."""

    mean: Tensor
    weight: Tensor


class StepMetrics:
    """Accumulates (sum, weight) pairs by name over the micro batches of one step."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sums: dict[str, list[Tensor]] = {}

    def add(self, loss_sum: Tensor, num_tokens: Tensor | int, metrics: Mapping[str, MetricValue]) -> None:
        """Adds one micro batch.

        Args:
            loss_sum: Scalar, the sum of the loss over the tokens that count.
            num_tokens: How many count.
            metrics: By name, a mean over those tokens, or a pair (sum, weight).
        """
        tokens = self._scalar(num_tokens)
        self._accumulate("loss", self._scalar(loss_sum), tokens)
        for name, value in metrics.items():
            if isinstance(value, tuple):
                self._accumulate(name, self._scalar(value[0]), self._scalar(value[1]))
            else:
                self._accumulate(name, self._scalar(value) * tokens, tokens)

    def _scalar(self, value: Tensor | float) -> Tensor:
        if isinstance(value, Tensor):
            return value.detach().to(device=self._device, dtype=torch.float64).reshape(())
        return torch.tensor(float(value), dtype=torch.float64, device=self._device)

    def _accumulate(self, name: str, total: Tensor, weight: Tensor) -> None:
        pair = self._sums.get(name)
        if pair is None:
            self._sums[name] = [total, weight]
        else:
            pair[0] = pair[0] + total
            pair[1] = pair[1] + weight

    @property
    def names(self) -> tuple[str, ...]:
        """Names in the order of their first appearance; `"loss"` first."""
        return tuple(self._sums)

    def vector(self) -> Tensor:
        """`[2 * len(names)]` float64: sum and weight of each name."""
        return torch.stack([part for pair in self._sums.values() for part in pair])


def _divided(names: tuple[str, ...], pairs: Tensor) -> dict[str, Reduced]:
    """Means and weights from `[2 * len(names)]` sums and weights."""
    sums, weights = pairs.view(-1, 2).unbind(dim=1)
    means = torch.where(weights > 0, sums / weights, 0.0).float()
    return dict(zip(names, map(Reduced, means.unbind(), weights.unbind()), strict=True))


def _fingerprint(names: tuple[str, ...]) -> float:
    """A number that identifies a tuple of names; small enough to be summed exactly over 2**20 ranks in float64."""
    return float(int.from_bytes(hashlib.blake2b("\0".join(names).encode(), digest_size=4).digest()) + 1)


class StepMetricsReducer:
    """Reduces `StepMetrics` over data and context parallel ranks and shares them with every pipeline stage.

    Args:
        dp_cp_group: Data and context parallel ranks of this stage.
        pp_group: The pipeline this rank is in.
        device: Where the vector lives.
    """

    def __init__(self, dp_cp_group: Any, pp_group: Any, device: torch.device) -> None:
        self._dp_cp, self._pp = dp_cp_group, pp_group
        self._device = device
        self._names: dict[float, tuple[str, ...]] = {}

    def reduce(self, metrics: StepMetrics | None) -> dict[str, Reduced]:
        """Collective over the data-parallel ranks and the pipeline.

        Args:
            metrics: This rank's step; None on stages that don't compute the loss. A rank of the last stage that had no
                micro batch passes an empty one.

        Returns:
            Mean and weight by name, equal on all ranks. A weight of zero gives a mean of 0.

        Raises:
            ValueError: Data-parallel ranks reported different names, or more than 254 besides the loss.
        """
        if metrics is not None and _HEADER + 2 * len(metrics.names) > _CAPACITY:  # also where nothing is exchanged
            count = len(metrics.names) - 1
            raise ValueError(f"loss_function returned {count} metrics; at most {_CAPACITY // 2 - 2} fit")
        if metrics is not None and metrics.names and self._dp_cp.size() == self._pp.size() == 1:
            return _divided(metrics.names, metrics.vector())  # nobody to share with
        vector = torch.zeros(_CAPACITY, dtype=torch.float64, device=self._device)
        names: tuple[str, ...] = ()
        if metrics is not None:
            names = self._sum_over_data(metrics, vector)
        if self._pp.size() > 1:
            names = self._share_with_stages(names, vector, has_loss=metrics is not None)
        return _divided(names, vector[_HEADER : _HEADER + 2 * len(names)])

    def _sum_over_data(self, metrics: StepMetrics, vector: Tensor) -> tuple[str, ...]:
        names = metrics.names
        if names:
            vector[0], vector[1] = _fingerprint(names), 1.0
            vector[_HEADER : _HEADER + 2 * len(names)] = metrics.vector()
        if self._dp_cp.size() > 1:
            torch.distributed.all_reduce(vector, group=self._dp_cp)
            names = self._agreed_names(names, vector)
        vector[0] = _fingerprint(names)
        return names

    def _agreed_names(self, names: tuple[str, ...], vector: Tensor) -> tuple[str, ...]:
        """Checks the summed fingerprints; a rank that had no micro batch takes the others' names."""
        fingerprints, reporting = vector[:_HEADER].tolist()
        if names and reporting == self._dp_cp.size() and fingerprints == _fingerprint(names) * reporting:
            return names
        every: list[Any] = [None] * self._dp_cp.size()
        torch.distributed.all_gather_object(every, names, group=self._dp_cp)
        found = sorted({tuple(each) for each in every if each})
        if len(found) > 1:
            shown = "; ".join(", ".join(each) for each in found)
            raise ValueError(f"loss_function returned different metric names on different ranks: {shown}")
        return found[0] if found else ()

    def _share_with_stages(self, names: tuple[str, ...], vector: Tensor, *, has_loss: bool) -> tuple[str, ...]:
        source = torch.distributed.get_global_rank(self._pp, self._pp.size() - 1)
        torch.distributed.broadcast(vector, src=source, group=self._pp)
        key = vector[0].item()
        if key not in self._names:  # the same on every stage, since all of them saw the same steps
            parcel = [names if has_loss else None]
            torch.distributed.broadcast_object_list(parcel, src=source, group=self._pp, device=self._device)
            assert parcel[0] is not None
            self._names[key] = parcel[0]
        return self._names[key]

"""Time spent in the parts of a step, measured without making the device wait.

Megatron Core's schedules and optimizer call `config.timers(name, log_level=...)` for an object with `start` and `stop`;
`StepTimers` is such a callable. On CUDA each start and stop records an event on the current stream, and the events are
read once per interval, so nothing waits while steps run. (Megatron Core's own `Timers` synchronises the device at every
start and stop.)
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

#: Megatron Core's names of the spans that are read here.
FORWARD_BACKWARD = "forward-backward"
COMPUTE = ("forward-compute", "backward-compute")
GRADIENT_SYNC = (
    "all-grads-sync",
    "conditional-embedder-grads-all-reduce",
    "non-tensor-parallel-grads-all-reduce",
    "embedding-grads-all-reduce",
)
#: The strategy's own.
OPTIMIZER, DATA_WAIT, SAVE_CHECKPOINT = "optimizer", "data-wait", "save-checkpoint"


class _HostSpan:
    """A span on the host's clock."""

    def __init__(self, timers: StepTimers) -> None:
        self._timers = timers
        self._started: float | None = None
        self._total_s = 0.0

    def start(self, barrier: bool = False) -> None:
        """Begins; `barrier` is part of Megatron Core's interface and would make ranks wait, so it's ignored."""
        self._started = None if self._timers.paused else time.perf_counter()

    def stop(self, barrier: bool = False) -> None:
        """Ends; counts only what began while the timers ran."""
        if self._started is not None:
            self._total_s += time.perf_counter() - self._started
            self._started = None

    def take(self) -> float:
        """Seconds since the last call."""
        total_s, self._total_s = self._total_s, 0.0
        return total_s


class _CudaSpan:
    """A span on the device's clock: pairs of events on the stream that is current at start and stop."""

    def __init__(self, timers: StepTimers) -> None:
        self._timers = timers
        self._started: Any = None
        self._pairs: list[tuple[Any, Any]] = []
        self._spare: list[Any] = []

    def _record(self) -> Any:
        event = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def start(self, barrier: bool = False) -> None:
        """As `_HostSpan.start`."""
        self._started = None if self._timers.paused else self._record()

    def stop(self, barrier: bool = False) -> None:
        """As `_HostSpan.stop`."""
        if self._started is not None:
            self._pairs.append((self._started, self._record()))
            self._started = None

    def take(self) -> float:
        """Seconds since the last call; the device must be synchronised. The events are used again."""
        total_s = sum(start.elapsed_time(stop) for start, stop in self._pairs) / 1000
        self._spare += [event for pair in self._pairs for event in pair]
        self._pairs = []
        return total_s


class StepTimers:
    """Named spans of this rank's steps; Megatron Core's `timers` interface.

    Args:
        device: Where the steps run; spans of the device are measured there.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._spans: dict[str, _HostSpan | _CudaSpan] = {}
        #: While true, spans that begin aren't counted (validation runs through the same schedule).
        self.paused = False

    def __call__(self, name: str, log_level: int | None = None) -> _HostSpan | _CudaSpan:
        """The span called `name`; `log_level` is part of Megatron Core's interface."""
        span = self._spans.get(name)
        if span is None:
            span = self._spans[name] = _CudaSpan(self) if self._device.type == "cuda" else _HostSpan(self)
        return span

    def __deepcopy__(self, memo: dict[int, Any]) -> StepTimers:
        return self  # configs are copied for parts of a model; their times belong together

    @contextmanager
    def span(self, name: str, *, host: bool = False) -> Iterator[None]:
        """Counts the time inside.

        Args:
            name: Of the span.
            host: Whether the host waits for it (data, files), not the device.
        """
        if host and name not in self._spans:
            self._spans[name] = _HostSpan(self)
        span = self(name)
        span.start()
        try:
            yield
        finally:
            span.stop()

    def take(self) -> dict[str, float]:
        """Seconds by name since the last call. Waits for the device: for the end of an interval, not of a step."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return {name: span.take() for name, span in self._spans.items()}


@contextmanager
def timed(timers: StepTimers | None, name: str, *, host: bool = False) -> Iterator[None]:
    """`timers.span(...)` where somebody measures, else nothing."""
    if timers is None:
        yield
    else:
        with timers.span(name, host=host):
            yield

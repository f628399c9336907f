"""`MemoryMonitor`: what each rank's memory holds, logged now and then and shown in a table at the end.

| figure          | bytes of this rank in                                                                      |
|-----------------|--------------------------------------------------------------------------------------------|
| parameters      | the model's weights; with "optim" Megatron Core's whole buffer of them, padding included   |
| gradients       | its gradient buffers, and what the main parameters' `grad` holds beside them               |
| optimizer state | the torch optimizers' state tensors, and main parameters that aren't the model's own       |
| activations     | what is left, see below: temporary buffers too, and whatever else isn't one of the three   |
| allocated, ...  | CUDA: PyTorch's caching allocator on this device; a peak is one interval's                 |
| resident, ...   | CPU: the process; its peak can't be reset, so it is that of the whole life of the process  |

A storage counts once, for the first of these kinds that uses it, and only if it lies on the run's device.

Activations on CUDA: the interval's peak of allocated memory less the first three. On the CPU: the peak of resident
memory less what was resident before the first step, less what the first three have grown by since. That is rough (an
allocator keeps what was freed, libraries load code late), and unknown while the peak lies before the first step.
"""

from __future__ import annotations

import dataclasses
import resource
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, override

import lightning.pytorch as L
import psutil
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lt_parallel.loggers import log_table
from lt_parallel.strategies.fully_sharded import is_fully_sharded
from lt_parallel.strategies.megatron import MegatronParallelStrategy, megatron_strategy
from lt_parallel.strategies.step_log import log_values
from lt_parallel.topology import ParallelSizes, require_positive_int

if TYPE_CHECKING:
    from rich.table import Table

_MIB, _GIB = 2**20, 2**30
_UNKNOWN = -1  # in the exchange of figures between ranks


@dataclasses.dataclass(frozen=True)
class HeldBytes:
    """What a rank holds from step to step.

    Attributes:
        parameters: Bytes of the model's weights.
        gradients: Bytes of their gradients.
        optimizer_state: Bytes of the optimizer's tensors that aren't among the two.
    """

    parameters: int
    gradients: int
    optimizer_state: int

    @property
    def total(self) -> int:
        """Bytes of all three."""
        return self.parameters + self.gradients + self.optimizer_state


@dataclasses.dataclass(frozen=True)
class RankMemory:
    """One rank's row of the table at the end.

    Attributes:
        rank: In the world.
        place: On the parallel axes, e.g. "dp0 pp1 tp0".
        held: As it was after the last step.
        activations: The highest of the run, in bytes; None where it isn't known.
        peak: The highest allocated (CUDA) or resident (CPU) memory of the run, in bytes.
    """

    rank: int
    place: str
    held: HeldBytes
    activations: int | None
    peak: int


class MemoryMonitor(L.Callback):
    """Logs what memory holds every few steps, as the maximum over ranks, and prints a table of all ranks after `fit`.

    Names, in GiB and equal on every rank: `memory/` `parameters_gib`, `gradients_gib`, `optimizer_state_gib`,
    `activations_gib` (left out while no rank knows it); on CUDA `allocated_gib`, `peak_allocated_gib`, `reserved_gib`,
    `peak_reserved_gib`; on the CPU `resident_gib`, `peak_resident_gib`. The module's docstring defines them.

    On CUDA it resets PyTorch's peak statistics after each interval. A step costs nothing, an interval one all-reduce.

    Args:
        every_n_steps: Global steps between two measurements; the last step of `fit` is measured too.

    Raises:
        ValueError: every_n_steps isn't a positive integer.
    """

    def __init__(self, every_n_steps: int = 50) -> None:
        self._every_n_steps = require_positive_int("every_n_steps", every_n_steps)
        self._report: list[RankMemory] = []
        self._held_before = HeldBytes(0, 0, 0)
        self._usage_before: dict[str, int] = {}
        self._last_step = 0
        self._activations: int | None = None
        self._peak = 0

    @property
    def report(self) -> list[RankMemory]:
        """All ranks in order, on rank 0 after `fit`; empty elsewhere."""
        return list(self._report)

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if not isinstance(trainer.strategy, MegatronParallelStrategy):
            raise TypeError(
                f"MemoryMonitor measures the ranks of MegatronParallelStrategy; this Trainer has "
                f"{type(trainer.strategy).__name__}: use lightning.pytorch.callbacks.DeviceStatsMonitor with it"
            )

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        strategy = megatron_strategy(trainer)
        self._report, self._activations, self._peak = [], None, 0
        self._last_step = trainer.global_step
        self._held_before = _held(strategy)
        _reset_peaks(strategy.root_device)
        self._usage_before = _usage(strategy.root_device)

    @override
    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step % self._every_n_steps == 0:
            self._measure(trainer)

    @override
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        strategy = megatron_strategy(trainer)
        if trainer.global_step != self._last_step:
            self._measure(trainer)
        own = RankMemory(
            strategy.global_rank,
            place_of(strategy.sizes, strategy.global_rank),
            _held(strategy),
            self._activations,
            self._peak,
        )
        rows: list[Any] = [None] * strategy.world_size
        torch.distributed.all_gather_object(rows, own)
        if trainer.is_global_zero:
            from rich.console import Console

            self._report = rows
            Console().print(memory_table(rows))
            log_table(trainer.loggers, "memory/ranks", _COLUMNS, _figures(rows), step=max(trainer.global_step - 1, 0))

    def _measure(self, trainer: L.Trainer) -> None:
        """Measures this rank and logs the maximum over ranks. Collective."""
        strategy = megatron_strategy(trainer)
        held, usage = _held(strategy), _usage(strategy.root_device)
        activations = self._activations_now(held, usage)
        _reset_peaks(strategy.root_device)
        if activations is not None:
            self._activations = max(activations, self._activations or 0)
        self._peak = max(self._peak, usage[_peak_name(usage)])
        self._last_step = trainer.global_step
        figures = dataclasses.asdict(held) | usage | {"activations": _UNKNOWN if activations is None else activations}
        highest = torch.tensor(list(figures.values()), dtype=torch.float64, device=strategy.root_device)
        torch.distributed.all_reduce(highest, op=torch.distributed.ReduceOp.MAX)
        known = zip(figures, highest.tolist(), strict=True)
        values = {f"memory/{name}_gib": size / _GIB for name, size in known if size != _UNKNOWN}
        log_values(trainer, values, step=trainer.global_step - 1)

    def _activations_now(self, held: HeldBytes, usage: dict[str, int]) -> int | None:
        """Activations by difference, in bytes; None where it can't be told."""
        name = _peak_name(usage)
        if name == "peak_allocated":
            return max(usage[name] - held.total, 0)
        if usage[name] <= self._usage_before[name]:
            return None
        grown = held.total - self._held_before.total
        return max(usage[name] - self._usage_before["resident"] - grown, 0)


def held_bytes(
    chunks: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer], device: torch.device
) -> HeldBytes:
    """Measures what is held from step to step; no storage is counted twice.

    Args:
        chunks: Model chunks, wrapped or not.
        optimizers: The torch optimizers that step them.
        device: Of the run; what lies elsewhere isn't counted.
    """
    seen: set[int] = set()
    parameters = [parameter for chunk in chunks for parameter in _parameters(chunk)]
    stepped = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    gradients = [getattr(p, name, None) for p in (*parameters, *stepped) for name in ("main_grad", "grad")]
    gradients += [group.main_grad_buffer.data for chunk in chunks for group in _buffers(chunk) if group.requires_grad]
    states = [value for optimizer in optimizers for state in optimizer.state.values() for value in state.values()]
    return HeldBytes(
        parameters=_new_bytes(parameters, device, seen),
        gradients=_new_bytes(gradients, device, seen),
        optimizer_state=_new_bytes([*stepped, *states], device, seen),
    )


def _parameters(chunk: nn.Module) -> Iterable[Tensor]:
    """A chunk's weights; of one in Megatron-FSDP this rank's share of them, and what is gathered."""
    if not is_fully_sharded(chunk):
        return chunk.parameters()
    return [*(group.model_weight_buffer.data for group in _buffers(chunk)), *chunk.module.raw_param.values()]


def _buffers(chunk: nn.Module) -> list[Any]:
    """Megatron-FSDP's buffers by group of parameters."""
    return list(chunk.param_and_grad_buffer.parameter_groups) if is_fully_sharded(chunk) else []


def _new_bytes(values: Iterable[Any], device: torch.device, seen: set[int]) -> int:
    """Bytes of the tensors' storages that haven't been seen; now they have."""
    total = 0
    for value in values:
        if isinstance(value, DTensor):
            value = value.to_local()
        if not isinstance(value, Tensor) or value.device.type != device.type:
            continue
        storage = value.untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            total += storage.nbytes()
    return total


def _held(strategy: MegatronParallelStrategy) -> HeldBytes:
    core = strategy.megatron_optimizer.core
    return held_bytes(strategy.wrapped_chunks, list(_torch_optimizers(core)), strategy.root_device)


def _torch_optimizers(core: Any) -> Iterator[torch.optim.Optimizer]:
    """The optimizers inside Megatron Core's; one whose shard is empty has none."""
    for member in getattr(core, "chained_optimizers", [core]):
        if member.optimizer is not None:
            yield member.optimizer


def _usage(device: torch.device) -> dict[str, int]:
    """Bytes now and at the peak, by the names that are logged."""
    if device.type == "cuda":
        return {
            "allocated": torch.cuda.memory_allocated(device),
            "peak_allocated": torch.cuda.max_memory_allocated(device),
            "reserved": torch.cuda.memory_reserved(device),
            "peak_reserved": torch.cuda.max_memory_reserved(device),
        }
    return {"resident": psutil.Process().memory_info().rss, "peak_resident": _peak_resident_bytes()}


def _peak_name(usage: dict[str, int]) -> str:
    return "peak_allocated" if "peak_allocated" in usage else "peak_resident"


def _reset_peaks(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def _peak_resident_bytes() -> int:
    """The process's highest resident memory so far.

    The kernel's figure for this address space where there is one (proc_pid_status(5), VmHWM): that of getrusage(2) is
    kept across execve, so a rank that Lightning's launcher started would begin with the launcher's.
    """
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def place_of(sizes: ParallelSizes, rank: int) -> str:
    """Where a rank is on the parallel axes, e.g. "dp0 pp1 tp0"; context and expert axes only where they cut.

    Args:
        sizes: The parallel sizes.
        rank: In the world.
    """
    at = sizes.coordinates(rank)
    axes = {"dp": at.dp, "pp": at.pp, "tp": at.tp}
    if sizes.context_parallel_size > 1:
        axes["cp"] = at.cp
    if sizes.expert_model_parallel_size > 1:
        axes["ep"] = sizes.expert_coordinates(rank).ep
    return " ".join(f"{axis}{place}" for axis, place in axes.items())


_HELD = tuple(field.name for field in dataclasses.fields(HeldBytes))
#: Of the table for loggers, in bytes, so that it can be computed with.
_COLUMNS = ("rank", "place", *(f"{name}_bytes" for name in (*_HELD, "activations", "peak")))


def _figures(rows: Sequence[RankMemory]) -> list[list[Any]]:
    return [[row.rank, row.place, *dataclasses.astuple(row.held), row.activations, row.peak] for row in rows]


def memory_table(rows: Sequence[RankMemory]) -> Table:
    """One row per rank, all in GiB, or in MiB where no rank's peak reaches a GiB.

    Args:
        rows: The ranks.
    """
    from rich import box
    from rich.table import Table

    size, unit = (_GIB, "GiB") if max(row.peak for row in rows) >= _GIB else (_MIB, "MiB")
    table = Table(title=f"memory per rank ({unit})", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("rank", "place"):
        table.add_column(name, no_wrap=True)
    for name in ("parameters", "gradients", "optimizer state", "activations", "peak"):
        table.add_column(name, justify="right")
    for row in rows:
        figures = (*dataclasses.astuple(row.held), row.activations, row.peak)
        cells = ["unknown" if figure is None else f"{figure / size:,.2f}" for figure in figures]
        table.add_row(str(row.rank), row.place, *cells)
    return table

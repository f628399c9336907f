"""What counts as held, how it is shown, and the figures on CUDA with its allocator's numbers made up."""

import io
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from rich.console import Console
from torch import nn

from lt_parallel.callbacks import memory
from lt_parallel.callbacks.memory import HeldBytes, MemoryMonitor, RankMemory, held_bytes, memory_table, place_of
from lt_parallel.topology import ParallelSizes

CPU = torch.device("cpu")


@pytest.mark.parametrize("steps", [0, -1, 2.0, True, None])
def test_interval_must_be_a_positive_integer(steps: Any) -> None:
    with pytest.raises(ValueError, match=f"every_n_steps must be an integer of at least 1, got {steps!r}"):
        MemoryMonitor(every_n_steps=steps)


def test_another_strategy_is_refused_with_what_to_use() -> None:
    trainer = L.Trainer(accelerator="cpu", devices=1, logger=False)
    with pytest.raises(TypeError, match=r"SingleDeviceStrategy: use lightning.pytorch.callbacks.DeviceStatsMonitor"):
        MemoryMonitor().setup(trainer, L.LightningModule(), "fit")


def test_a_storage_counts_once_for_the_first_kind_that_uses_it() -> None:
    buffer = torch.zeros(100)  # as Megatron Core's: padded, two parameters inside
    chunk = nn.ParameterList([nn.Parameter(buffer[:60]), nn.Parameter(buffer[60:96].view(6, 6))])
    chunk.append(chunk[0])
    gradients = torch.zeros(100)
    for parameter, start in ((chunk[0], 0), (chunk[1], 60)):
        parameter.main_grad = gradients[start : start + parameter.numel()].view_as(parameter)
    main = nn.Parameter(torch.zeros(36))
    main.grad = chunk[1].main_grad.view(-1)
    optimizer = torch.optim.AdamW([chunk[0], main])
    chunk[0].grad = chunk[0].main_grad
    optimizer.step()
    held = held_bytes([chunk], [optimizer], CPU)
    states = 2 * 4 * (60 + 36) + 2 * 4  # two moments each, and a step count each
    assert held == HeldBytes(parameters=400, gradients=400, optimizer_state=4 * 36 + states)
    assert held.total == 400 + 400 + 4 * 36 + states


def test_only_the_runs_device_counts() -> None:
    chunk = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(chunk.parameters(), lr=0.1)
    assert held_bytes([chunk], [optimizer], torch.device("cuda", 0)) == HeldBytes(0, 0, 0)
    assert held_bytes([nn.Linear(4, 4, device="meta")], [], CPU) == HeldBytes(0, 0, 0)


def test_cuda_activations_are_the_peak_less_what_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    counters = {
        "memory_allocated": 700,
        "max_memory_allocated": 900,
        "memory_reserved": 1000,
        "max_memory_reserved": 1100,
    }
    for name, size in counters.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, size=size: size)
    reset: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset.append)
    device = torch.device("cuda", 0)
    usage = memory._usage(device)
    assert usage == {"allocated": 700, "peak_allocated": 900, "reserved": 1000, "peak_reserved": 1100}
    monitor = MemoryMonitor()
    assert monitor._activations_now(HeldBytes(100, 200, 300), usage) == 300
    assert monitor._activations_now(HeldBytes(1000, 200, 300), usage) == 0
    memory._reset_peaks(device)
    memory._reset_peaks(CPU)
    assert reset == [device]


def test_cpu_activations_are_the_growth_of_the_peak_less_that_of_what_is_held() -> None:
    monitor = MemoryMonitor()
    monitor._usage_before, monitor._held_before = {"resident": 1000, "peak_resident": 1200}, HeldBytes(100, 100, 0)

    def activations(peak: int, optimizer_state: int) -> int | None:
        return monitor._activations_now(HeldBytes(100, 100, optimizer_state), {"resident": 1100, "peak_resident": peak})

    assert activations(1200, 0) is None, "the peak may be older than the steps"
    assert activations(1800, 0) == 800
    assert activations(1800, 200) == 600
    assert activations(1201, 500) == 0


def test_peak_of_the_process_is_at_least_what_is_resident() -> None:
    usage = memory._usage(CPU)
    assert 2**20 < usage["resident"] <= usage["peak_resident"] + 2**21  # the kernel's counters may lag by some pages


@pytest.mark.parametrize(
    ("sizes", "rank", "place"),
    [
        ({"world_size": 8, "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}, 7, "dp1 pp1 tp1"),
        ({"world_size": 8, "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}, 4, "dp0 pp1 tp0"),
        ({"world_size": 4, "context_parallel_size": 2}, 1, "dp0 pp0 tp0 cp1"),
        ({"world_size": 4, "expert_model_parallel_size": 2}, 3, "dp3 pp0 tp0 ep1"),
    ],
)
def test_place_names_the_axes(sizes: dict[str, int], rank: int, place: str) -> None:
    assert place_of(ParallelSizes(**sizes), rank) == place


@pytest.mark.parametrize(
    ("unit", "expected"),
    [(2**20, ["memory per rank (MiB)", "1.00", "2.50", "3.00", "unknown", "10.00"]), (2**30, ["GiB", "1.00", "10.00"])],
)
def test_table_has_one_unit(unit: int, expected: list[str]) -> None:
    row = RankMemory(1000, "dp15 pp3 tp7", HeldBytes(unit, unit * 5 // 2, 3 * unit), None, 10 * unit)
    console = Console(width=80, file=io.StringIO(), record=True)
    console.print(memory_table([row]))
    text = console.export_text()
    for cell in ["1000", "dp15 pp3 tp7", "parameters", "activations", *expected]:
        assert cell in text, text

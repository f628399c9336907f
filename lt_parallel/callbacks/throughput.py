"""`ThroughputMonitor`: tokens per second, FLOP/s, model FLOPs utilisation (MFU), and where a step's time goes.

Definitions. Throughput is counted over an interval of steps, whose wall time has validation and checkpoint saving taken
out; each token counts once, however many ranks cut its model. FLOPs are the model's own (`lt_parallel.metrics.flops`),
without recompute. MFU = FLOP/s per device / dense peak of the device (`lt_parallel.metrics.peaks`), as defined in
"PaLM: Scaling Language Modeling with Pathways", appendix B. Speedup = throughput / baseline throughput; efficiency =
speedup / (devices / baseline devices). The pipeline's bubble is the share of the schedule in which a stage computes
nothing; the formula's is (p - 1) / (v m + p - 1) for p stages, v chunks per stage and m micro batches, from "Efficient
Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", section 2.2, as a share of the whole.

Cost: timestamps in a step; at the end of an interval one wait for the device and two all-reduces of a short vector.
"""

from __future__ import annotations

import math
import os
import time
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple, override

import lightning.pytorch as L
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lt_parallel.metrics.baseline import Baseline, read_baseline
from lt_parallel.metrics.flops import ModelFlops
from lt_parallel.metrics.peaks import device_peak, require_device_peak
from lt_parallel.metrics.scaling import speedup_and_efficiency
from lt_parallel.metrics.timers import (
    COMPUTE,
    DATA_WAIT,
    FORWARD_BACKWARD,
    GRADIENT_SYNC,
    OPTIMIZER,
    SAVE_CHECKPOINT,
    StepTimers,
)
from lt_parallel.strategies.megatron import MegatronParallelStrategy
from lt_parallel.strategies.micro_batches import num_samples
from lt_parallel.strategies.model_chunks import is_chunked
from lt_parallel.strategies.step_log import log_values

_DEFAULT_INTERVAL = 50  # steps, where the Trainer has no loggers and so no interval of its own


class _Interval(NamedTuple):
    """Sums over one interval: this rank's, or the mean over ranks. Times in seconds."""

    tokens: float
    samples: float
    wall_s: float
    data_wait_s: float
    forward_backward_s: float
    compute_s: float
    gradient_sync_s: float
    optimizer_s: float
    validation_s: float
    checkpoint_s: float


class ThroughputMonitor(L.Callback):
    """Logs throughput, MFU and the parts of a step, averaged over `Trainer(log_every_n_steps=...)` steps.

    The first step of a run isn't measured (it allocates and compiles). Values are equal on every rank:

    * `train/device/` `batches_per_sec` (global steps), `samples_per_sec`, `tokens_per_sec`, `flops_per_sec`,
      `hardware_flops_per_sec` (with recompute), `mfu` (attention as executed, with the causal half only),
      `mfu_full_attention` (as in publications that count the whole square), `peak_flops_per_sec` (what it's divided by)
    * `train/` `samples_per_sec`, `tokens_per_sec`, `flops_per_sec` over all devices; `consumed_tokens`, `eta_s`
    * seconds per step, mean over ranks: `train/step_s` = `data_wait_s` + `forward_backward_s` + `optimizer_s` +
      `rest_s`; within forward and backward `compute_s` and `gradient_sync_s`; `slowest_compute_s` of the slowest rank
    * with a pipeline `train/pipeline_bubble` (measured) and `train/pipeline_bubble_formula`, as shares of the schedule
    * seconds in the interval, not counted above: `train/validation_s`, `train/checkpoint_s`
    * with `baseline`: `train/speedup` and `train/efficiency`

    Numbers that can't be known (MFU on an unknown device, tokens of a plain module) are left out.

    Args:
        baseline: Tokens/s on one device, or the file of an earlier run: its `metrics.csv`, or the `scaling.json` of
            `lt-parallel scaling`.
        peak_flops: Dense peak of one device in FLOP/s, or the name of a device in the table ("H100 SXM"), in place of
            what the driver's name for the device says.

    Raises:
        ValueError: An argument is not positive, the file holds no throughput, or the table has no such device; or the
            Trainer has a second ThroughputMonitor.
    """

    def __init__(self, baseline: float | str | None = None, peak_flops: float | str | None = None) -> None:
        self._baseline = _read_baseline(baseline)
        self._given_peak = _read_peak(peak_flops)
        self._peak: float | None = None
        self._strategy: MegatronParallelStrategy | None = None
        self._flops: ModelFlops | None = None
        self._consumed_tokens = 0.0  # up to the last interval's end, over all ranks
        self._reset()

    def _reset(self) -> None:
        self._began: float | None = None  # when the interval did; None before the first step's end
        self._steps = 0
        self._num_microbatches = 0
        self._tokens = self._samples = self._validation_s = self._validation_began = 0.0

    @property
    def _run(self) -> MegatronParallelStrategy:
        assert self._strategy is not None, "known from setup on"
        return self._strategy

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        strategy = trainer.strategy
        if not isinstance(strategy, MegatronParallelStrategy):
            raise TypeError(
                f"ThroughputMonitor measures runs of MegatronParallelStrategy; this Trainer has "
                f"{type(strategy).__name__}: use lightning.pytorch.callbacks.ThroughputMonitor with it"
            )
        if stage != "fit":
            return
        if any(isinstance(other, ThroughputMonitor) and other is not self for other in trainer.callbacks):  # type: ignore[attr-defined]
            raise ValueError("a Trainer measures with one ThroughputMonitor; it has several: remove the others")
        # A Trainer that fits again goes on counting, as its global step does, also what an exception cut off.
        self._consumed_tokens = self.state_dict()["consumed_tokens"] if self._strategy is strategy else 0.0
        self._reset()
        self._strategy = strategy
        strategy.timers = StepTimers(strategy.root_device)

    @override
    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if self._strategy is not None:
            self._strategy.timers = None

    @override
    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self.teardown(trainer, pl_module, "fit")  # which Lightning doesn't call then

    # ---------------------------------------------------------------- counting

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._reset()
        self._flops = _model_flops(pl_module)
        self._peak = _peak_flops(self._given_peak, self._run.root_device, trainer.precision)

    @override
    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._steps += 1
        self._num_microbatches = len(batch)
        if is_chunked(pl_module):
            shapes = [pl_module.micro_batch_shape(micro_batch) for micro_batch in batch]
            self._tokens += sum(seq_length * size for seq_length, size in shapes)
        self._samples += sum(map(num_samples, batch))
        if self._began is None:
            self._close(trainer, measured=False)
        elif trainer.global_step % (trainer.log_every_n_steps or _DEFAULT_INTERVAL) == 0:  # type: ignore[attr-defined]
            self._close(trainer, measured=True)

    @override
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._began is not None and self._steps:
            self._close(trainer, measured=True)

    @override
    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._run_timers is not None:
            self._run_timers.paused = True
        self._validation_began = time.perf_counter()

    @override
    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._run_timers is not None:
            self._run_timers.paused = False
        self._validation_s += time.perf_counter() - self._validation_began

    @property
    def _run_timers(self) -> StepTimers | None:
        return None if self._strategy is None else self._strategy.timers

    # ---------------------------------------------------------------- the end of an interval

    def _close(self, trainer: L.Trainer, *, measured: bool) -> None:
        """Ends the interval and begins the next one; collective over all ranks."""
        timers = self._run_timers
        assert timers is not None
        spans = timers.take()  # the device is idle now
        now = time.perf_counter()
        checkpoint_s = spans.get(SAVE_CHECKPOINT, 0.0)
        wall_s = 0.0 if self._began is None else now - self._began - self._validation_s - checkpoint_s
        own = _Interval(
            tokens=self._tokens,
            samples=self._samples,
            wall_s=wall_s,
            data_wait_s=spans.get(DATA_WAIT, 0.0),
            forward_backward_s=spans.get(FORWARD_BACKWARD, 0.0),
            compute_s=sum(spans.get(name, 0.0) for name in COMPUTE),
            gradient_sync_s=sum(spans.get(name, 0.0) for name in GRADIENT_SYNC),
            optimizer_s=spans.get(OPTIMIZER, 0.0),
            validation_s=self._validation_s,
            checkpoint_s=checkpoint_s,
        )
        mean, slowest = self._over_ranks(own)
        self._consumed_tokens += mean.tokens * self._run.sizes.data_parallel_size
        if measured:
            log_values(trainer, self._values(mean, slowest.compute_s, trainer), step=trainer.global_step - 1)
        self._reset()
        self._began = now  # what measuring costs belongs to the run, in the next interval

    def _over_ranks(self, own: _Interval) -> tuple[_Interval, _Interval]:
        """Mean and maximum over all ranks."""
        total = torch.tensor(own, dtype=torch.float64, device=self._run.root_device)
        highest = total.clone()
        torch.distributed.all_reduce(total)
        torch.distributed.all_reduce(highest, op=torch.distributed.ReduceOp.MAX)
        return _Interval(*(total / self._run.world_size).tolist()), _Interval(*highest.tolist())

    def _values(self, mean: _Interval, slowest_compute_s: float, trainer: L.Trainer) -> dict[str, float]:
        sizes = self._run.sizes
        devices, replicas = sizes.world_size, sizes.data_parallel_size
        rates = {"samples": mean.samples * replicas / mean.wall_s}
        if mean.tokens:
            rates["tokens"] = mean.tokens * replicas / mean.wall_s
        values = {"train/device/batches_per_sec": self._steps / mean.wall_s}
        if self._flops is not None and mean.tokens:
            sequences_per_s = rates["tokens"] / self._flops.seq_length
            rates["flops"] = sequences_per_s * self._flops.training
            rates["hardware_flops"] = sequences_per_s * self._flops.training_hardware
            values |= self._utilisation(sequences_per_s / devices)
        values |= {f"train/device/{name}_per_sec": rate / devices for name, rate in rates.items()}
        values |= {f"train/{name}_per_sec": rate for name, rate in rates.items()}
        values |= self._per_step(mean, slowest_compute_s, trainer)
        values |= {"train/validation_s": mean.validation_s, "train/checkpoint_s": mean.checkpoint_s}
        if mean.tokens:
            values["train/consumed_tokens"] = self._consumed_tokens
            if self._baseline is not None:
                gain = speedup_and_efficiency(rates["tokens"], devices, *self._baseline)
                values |= {"train/speedup": gain[0], "train/efficiency": gain[1]}
        return values

    def _utilisation(self, sequences_per_s: float) -> dict[str, float]:
        if self._flops is None or self._peak is None:
            return {}
        return {
            "train/device/mfu": sequences_per_s * self._flops.training / self._peak,
            "train/device/mfu_full_attention": (sequences_per_s * self._flops.training_full_attention / self._peak),
            "train/device/peak_flops_per_sec": self._peak,
        }

    def _per_step(self, mean: _Interval, slowest_compute_s: float, trainer: L.Trainer) -> dict[str, float]:
        parts = {
            "step_s": mean.wall_s,
            "data_wait_s": mean.data_wait_s,
            "forward_backward_s": mean.forward_backward_s,
            "optimizer_s": mean.optimizer_s,
            "rest_s": mean.wall_s - mean.data_wait_s - mean.forward_backward_s - mean.optimizer_s,
            "compute_s": mean.compute_s,
            "slowest_compute_s": slowest_compute_s,
            "gradient_sync_s": mean.gradient_sync_s,
        }
        values = {f"train/{name}": seconds / self._steps for name, seconds in parts.items()}
        remaining = trainer.estimated_stepping_batches - trainer.global_step
        if 0 <= remaining < float("inf"):
            values["train/eta_s"] = remaining * mean.wall_s / self._steps
        stages = self._run.sizes.pipeline_model_parallel_size
        if stages > 1:
            rounds = self._num_microbatches * self._run.sizes.num_model_chunks
            schedule_s = mean.forward_backward_s - mean.gradient_sync_s
            values["train/pipeline_bubble"] = 1 - mean.compute_s / schedule_s
            values["train/pipeline_bubble_formula"] = (stages - 1) / (rounds + stages - 1)
        return values

    # ---------------------------------------------------------------- resuming

    @override
    def state_dict(self) -> dict[str, Any]:
        replicas = self._run.sizes.data_parallel_size if self._strategy is not None else 1
        return {"consumed_tokens": self._consumed_tokens + self._tokens * replicas}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._consumed_tokens = float(state_dict["consumed_tokens"])


def _read_baseline(given: Any) -> Baseline | None:
    if given is None:
        return None
    if isinstance(given, str | os.PathLike):
        return read_baseline(Path(given))
    return Baseline(_number("baseline", given, "tokens/s, or a file of an earlier run")).check("baseline")


def _read_peak(given: Any) -> float | str | None:
    if isinstance(given, str):
        require_device_peak(given)
        return given
    if given is None:
        return None
    peak = _number("peak_flops", given, "FLOP/s, or the name of a device")
    if not 0 < peak < math.inf:
        raise ValueError(f"peak_flops={given!r} must be positive: the dense peak of one device in FLOP/s")
    return peak


def _number(name: str, given: Any, kinds: str) -> float:
    if isinstance(given, bool) or not isinstance(given, Real):
        raise ValueError(f"{name}={given!r} must be a number of {kinds}")
    return float(given)


def _model_flops(module: L.LightningModule) -> ModelFlops | None:
    """What the module says of itself; None where nothing is known, as of a plain one, which has no tokens either."""
    if not is_chunked(module) or not hasattr(module, "model_flops"):
        return None
    try:
        flops: ModelFlops | None = module.model_flops()
    except ValueError as error:
        rank_zero_warn(f"ThroughputMonitor logs no FLOP/s and no MFU: {error}")
        return None
    return flops


def _peak_flops(given: float | str | None, device: torch.device, precision: str) -> float | None:
    """Dense peak of the device in the run's compute dtype; None where it isn't known.

    Args:
        given: The user's figure or name; None: what the driver calls the device.
        device: Of this rank.
        precision: The Trainer's.
    """
    if isinstance(given, float):
        return given
    if given is not None:
        return require_device_peak(given).flops_per_sec(_compute_dtype(precision))
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    peak = device_peak(name)
    if peak is None:
        rank_zero_warn(
            f"ThroughputMonitor logs no MFU: the peak of {name!r} isn't known; give peak_flops=... from its data sheet "
            "(dense), or a name of lt_parallel.metrics.peaks"
        )
        return None
    return peak.flops_per_sec(_compute_dtype(precision))


def _compute_dtype(precision: str) -> str:
    if precision.startswith("32"):
        return "fp32" if torch.get_float32_matmul_precision() == "highest" else "tf32"
    return "bf16" if precision.startswith("bf16") else "fp16"

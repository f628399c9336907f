"""What third-party code says that a user of this package can do nothing about: two tables, and how they are muted.

`RUN_NOISE` is what a run of `MegatronParallelStrategy` causes; the strategy mutes it from the run's start to its end,
and afterwards all filters are as they were. `COMMAND_NOISE` is what Lightning and PyTorch say besides; only the command
line and the demo mute it, a script may call `install` as well. Each entry is as narrow as its message allows, so that
anything else still gets through. `LT_PARALLEL_DEBUG=1` mutes nothing.
"""

from __future__ import annotations

import logging
import os
import re
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Noise:
    """One message to mute.

    Args:
        pattern: Regular expression that the message starts with.
        why: Why nobody needs to read it.
        source: A warning category, or the name of the logger that it goes through.
        module: Regular expression of the module that warns; any by default.
        cpu_only: Muted in runs on the CPU only; on CUDA it says something.
    """

    pattern: str
    why: str
    source: type[Warning] | str
    module: str = ""
    cpu_only: bool = False


RUN_NOISE: tuple[Noise, ...] = (
    Noise(
        r"`torch\.distributed\.(all_gather_into_tensor|reduce_scatter_tensor)` is deprecated",
        "Megatron Core's calls, to be renamed there",
        FutureWarning,
    ),
    Noise(r"`isinstance\(treespec, LeafSpec\)` is deprecated", "Lightning's call, to be renamed there", FutureWarning),
    Noise(r"`isinstance\(treespec, LeafSpec\)` is deprecated", "as above, older torch", UserWarning),
    Noise("torch.distributed is disabled, unavailable or uninitialized", "a plan made without I/O", UserWarning),
    Noise("The argument order of load has been changed", "Megatron Core's call, by keyword", UserWarning),
    Noise("Please use DTensor instead and we are deprecating ShardedTensor", "what Megatron Core saves", FutureWarning),
    Noise(r"[\s\S]*invalid escape sequence", "in docstrings of Megatron Core", SyntaxWarning),
    Noise("MimoModelConfig is experimental", "imported by Megatron Core's checkpointing, not used here", UserWarning),
    Noise("full scope is deprecated", "a default inside Megatron Core's config", UserWarning),
    Noise(
        "When using (async grad allreduce|sequence parallelism) it is recommended to set",
        "about CUDA streams; said on the CPU too",
        UserWarning,
        cpu_only=True,
    ),
    Noise("Transformer Engine and Apex are not installed", "this package brings its own layers", UserWarning),
    Noise("Apex is not installed", "likewise", UserWarning),
    Noise(
        "There are still pending all-gather tasks",
        "layers gathered ahead that no pass used; Megatron-FSDP waits for them and goes on",
        UserWarning,
    ),
    Noise(
        "You have overridden `on_before_batch_transfer` in `LightningModule` but",
        "GPTModule checks batches there, whatever the data module",
        UserWarning,
    ),
    Noise(
        "The .grad attribute of a Tensor that is not a leaf Tensor is being accessed",
        "its optimizer looks whether shards have one",
        UserWarning,
        module=r"megatron\.core\.",
    ),
    Noise(
        "Using `DistributedSampler` with the dataloaders", "an evaluation counts every sample once here", UserWarning
    ),
    Noise("No CUDA runtime is found", "said on any machine with a CUDA folder and no GPU", "torch.utils.cpp_extension"),
    Noise("GPTModel IS DEPRECATED", "see docs/design.md", "megatron.core.models.gpt.gpt_model"),
    Noise("MCore's async save is deprecated", "not used here", "megatron.core.dist_checkpointing.strategies.torch"),
)

_RANK_ZERO_LOGGERS = ("lightning.pytorch.utilities.rank_zero", "lightning.fabric.utilities.rank_zero")

COMMAND_NOISE: tuple[Noise, ...] = (
    Noise(r"The '\w+_dataloader' does not have many workers", "samples are copied out of memory", UserWarning),
    *(Noise(r"💡 Tip:", "advertises other packages", name) for name in _RANK_ZERO_LOGGERS),
    *(Noise(r"TPU available: False", "no TPUs here", name) for name in _RANK_ZERO_LOGGERS),
    Noise(r"\[rank: \d+\] Seed set to", "said once before the ranks start", "lightning.fabric.utilities.seed"),
)

_CALLBACK_STATE = Noise("Be aware that when using `ckpt_path`", "callbacks matter when training goes on", UserWarning)


class _Mute(logging.Filter):
    """Drops the records of one table entry."""

    def __init__(self, noise: Noise) -> None:
        super().__init__()
        self._pattern = re.compile(noise.pattern)

    def filter(self, record: logging.LogRecord) -> bool:
        return not self._pattern.match(record.getMessage())


def debugging() -> bool:
    """Whether `LT_PARALLEL_DEBUG` asks for everything to be shown."""
    return os.environ.get("LT_PARALLEL_DEBUG", "0") not in ("", "0")


def install(*, resumes: bool = False) -> None:
    """Mutes both tables in this process, for good. Best before torch is imported; changes nothing else.

    Args:
        resumes: Whether a checkpoint is loaded to train on. If not, the state of its callbacks is of no use.
    """
    if debugging():
        return
    # torch's C++ side warns on every rank when another one ends; the job says why by itself.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    everywhere = [noise for noise in RUN_NOISE if not noise.cpu_only]
    for noise in (*everywhere, *COMMAND_NOISE, *(() if resumes else (_CALLBACK_STATE,))):
        _mute(noise)


@contextmanager
def muted_run(*, on_cpu: bool) -> Iterator[None]:
    """Mutes `RUN_NOISE` within; afterwards the filters of warnings and loggers are what they were before.

    It is entered once per run and not once per step: each change of the filters makes Python forget which of the
    user's own warnings it has shown already.

    Args:
        on_cpu: Whether the run is on the CPU.
    """
    if debugging():
        yield
        return
    with warnings.catch_warnings(), ExitStack() as stack:
        for noise in RUN_NOISE:
            if on_cpu or not noise.cpu_only:
                _mute(noise, stack)
        yield


def _mute(noise: Noise, stack: ExitStack | None = None) -> None:
    """Mutes one entry; a logger's until `stack` is left, a warning's until its `catch_warnings` is."""
    if not isinstance(noise.source, str):
        warnings.filterwarnings("ignore", message=noise.pattern, category=noise.source, module=noise.module)
        return
    logger, mute = logging.getLogger(noise.source), _Mute(noise)
    logger.addFilter(mute)
    if stack is not None:
        stack.callback(logger.removeFilter, mute)

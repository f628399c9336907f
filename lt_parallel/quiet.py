"""What third-party code says at start that a user of this package can do nothing about: one table, and how it is muted.

Only the command line and the demo install it; a script that imports the package keeps its own filters. Each entry is as
narrow as its message allows, so that anything else still gets through. `LT_PARALLEL_DEBUG=1` mutes nothing.
"""

from __future__ import annotations

import logging
import os
import re
import warnings
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Noise:
    """One message to mute.

    Args:
        pattern: Regular expression that the message starts with.
        why: Why nobody needs to read it.
        source: A warning category, or the name of the logger that it goes through.
        keep: "none", or "first": show it once.
    """

    pattern: str
    why: str
    source: type[Warning] | str
    keep: Literal["none", "first"] = "none"


_RANK_ZERO_LOGGERS = ("lightning.pytorch.utilities.rank_zero", "lightning.fabric.utilities.rank_zero")

NOISE: tuple[Noise, ...] = (
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
    Noise("When using async grad allreduce it is recommended", "about CUDA streams; said on the CPU too", UserWarning),
    Noise("Transformer Engine and Apex are not installed", "this package brings its own layers", UserWarning),
    Noise("Apex is not installed", "likewise", UserWarning),
    Noise(r"The '\w+_dataloader' does not have many workers", "samples are copied out of memory", UserWarning),
    Noise("No CUDA runtime is found", "said on any machine with a CUDA folder and no GPU", "torch.utils.cpp_extension"),
    Noise("GPTModel IS DEPRECATED", "said per model chunk", "megatron.core.models.gpt.gpt_model", keep="first"),
    Noise("MCore's async save is deprecated", "not used here", "megatron.core.dist_checkpointing.strategies.torch"),
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
        self._remaining = 1 if noise.keep == "first" else 0

    def filter(self, record: logging.LogRecord) -> bool:
        if not self._pattern.match(record.getMessage()):
            return True
        self._remaining -= 1
        return self._remaining >= 0


def debugging() -> bool:
    """Whether `LT_PARALLEL_DEBUG` asks for everything to be shown."""
    return os.environ.get("LT_PARALLEL_DEBUG", "0") not in ("", "0")


def install(*, resumes: bool = False) -> None:
    """Mutes the table's messages in this process. Best before torch is imported; changes nothing else.

    Args:
        resumes: Whether a checkpoint is loaded to train on. If not, the state of its callbacks is of no use.
    """
    if debugging():
        return
    # torch's C++ side warns on every rank when another one ends; the job says why by itself.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    for noise in NOISE if resumes else (*NOISE, _CALLBACK_STATE):
        if isinstance(noise.source, str):
            logging.getLogger(noise.source).addFilter(_Mute(noise))
        else:
            warnings.filterwarnings("ignore", message=noise.pattern, category=noise.source)

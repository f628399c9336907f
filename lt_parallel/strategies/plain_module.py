"""Any LightningModule as one Megatron model chunk.

With tensor and pipeline parallelism at 1 a chunk needs nothing of Megatron's: its `training_step` returns a scalar
loss, or `(loss_sum, num_tokens, metrics)`. The adapter gives it the few attributes that Megatron Core's schedules and
DDP ask of a chunk.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import ModelType
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule

    from lt_parallel.settings import Settings

#: What Megatron Core's schedules take from a loss function: loss sum, number of tokens, anything.
LossTriple = tuple[Tensor, Tensor, Mapping[str, Any]]


def plain_config(settings: Settings) -> TransformerConfig:
    """A config for a module that isn't a transformer: only its parallel and precision fields mean anything."""
    fields = {"num_layers": 1, "hidden_size": 1, "num_attention_heads": 1, **settings.fields("model")}
    return TransformerConfig(**fields)


class PlainModuleChunk(MegatronModule):
    """Adapter; its `forward` runs a step of the module.

    Args:
        config: From `plain_config`.
        module: The user's LightningModule; registered as the only child, under the name `module`.
    """

    def __init__(self, config: TransformerConfig, module: LightningModule) -> None:
        super().__init__(config=config)
        self.module = module
        self.model_type = ModelType.encoder_or_decoder

    def set_input_tensor(self, input_tensor: Any) -> None:
        """There is no earlier stage to take an input from."""

    def forward(self, method: str, *args: Any) -> Any:
        """Runs a step of the module inside the chunk's hooks.

        Args:
            method: "training_step", "validation_step" or another.
            args: Its arguments.

        Returns:
            (loss_sum, num_tokens, metrics) of a training step, otherwise what the method returned.
        """
        output = getattr(self.module, method)(*args)
        return loss_triple(output) if method == "training_step" else output


def loss_triple(output: Any) -> LossTriple:
    """Normalises what a plain `training_step` may return.

    Args:
        output: A scalar loss, a mapping with `"loss"`, or (loss_sum, num_tokens, metrics).

    Returns:
        (loss_sum, num_tokens, metrics); a scalar loss counts as one token, so micro batches weigh the same.

    Raises:
        TypeError: It's something else, e.g. None.
    """
    if isinstance(output, Mapping) and "loss" in output:
        output = output["loss"]
    if isinstance(output, tuple) and len(output) == 3:
        loss, num_tokens, metrics = output
        return loss, torch.as_tensor(num_tokens, device=loss.device), metrics
    if isinstance(output, Tensor) and output.numel() == 1:
        return output.reshape(()), torch.ones((), dtype=torch.int, device=output.device), {}
    raise TypeError(
        "training_step must return a scalar loss, a dict with 'loss', or (loss_sum, num_tokens, metrics) under "
        f"MegatronParallelStrategy; it returned {type(output).__name__}"
        + (f" of shape {tuple(output.shape)}" if isinstance(output, Tensor) else "")
    )

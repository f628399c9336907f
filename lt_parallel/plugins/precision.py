"""Precision the way Megatron Core does it: by the dtype of parameters and buffers, not by autocast."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, get_args, override

import torch
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from lt_parallel.settings import Settings

PrecisionName = Literal["32-true", "bf16-mixed", "bf16-true"]


class MegatronPrecision(Precision):
    """Precision plugin of `MegatronParallelStrategy`; `Trainer(precision=...)` alone makes one.

    ============  ==========================  =======================  ======================
    precision     parameters and activations  gradients, their sum      optimizer's parameters
    ============  ==========================  =======================  ======================
    `32-true`     fp32                        fp32                      the parameters
    `bf16-mixed`  bf16                        fp32                      fp32 main copy
    `bf16-true`   bf16                        bf16                      fp32 main copy
    ============  ==========================  =======================  ======================

    Args:
        precision: One of the names above.

    Raises:
        ValueError: Another name.
    """

    def __init__(self, precision: PrecisionName = "32-true") -> None:
        if precision not in get_args(PrecisionName):
            raise ValueError(f"precision={precision!r} is not one of {', '.join(get_args(PrecisionName))}")
        self.precision = precision

    @classmethod
    def from_lightning(cls, plugin: Precision | None) -> MegatronPrecision:
        """Converts what Lightning made from `Trainer(precision=...)`.

        Args:
            plugin: A Lightning plugin, one of ours (returned as it is), or None for the default.

        Raises:
            ValueError: A precision that has no Megatron counterpart here.
        """
        if plugin is None:
            return cls()
        if isinstance(plugin, cls):
            return plugin
        if type(plugin) in (Precision, MixedPrecision, HalfPrecision) and plugin.precision in get_args(PrecisionName):
            return cls(plugin.precision)  # type: ignore[arg-type]
        raise ValueError(
            f"MegatronParallelStrategy supports precision {', '.join(get_args(PrecisionName))}, "
            f"not {plugin.precision!r} ({type(plugin).__name__})"
        )

    @property
    def params_dtype(self) -> torch.dtype:
        """Dtype of parameters, activations and pipeline messages."""
        return torch.float32 if self.precision == "32-true" else torch.bfloat16

    def contribute(self, settings: Settings) -> None:
        """Adds the dtype fields of all three configs."""
        owner, bf16 = f"precision={self.precision!r}", self.params_dtype is torch.bfloat16
        settings.contribute(
            owner, "model", bf16=bf16, fp16=False, params_dtype=self.params_dtype, pipeline_dtype=self.params_dtype
        )
        settings.contribute(owner, "optimizer", bf16=bf16, fp16=False, params_dtype=self.params_dtype)
        settings.contribute(owner, "ddp", grad_reduce_in_fp32=self.precision == "bf16-mixed")

    def convert_chunks(self, chunks: list[nn.Module], config: Any) -> list[nn.Module]:
        """Model chunks with parameters in this precision, which take and give fp32 at the model's ends.

        Args:
            chunks: Megatron Core modules.
            config: Their Megatron config.
        """
        if self.params_dtype is torch.float32:
            return chunks
        from megatron.core.transformer.module import Float16Module

        return [Float16Module(config, chunk) for chunk in chunks]

    @override
    def convert_input(self, data: Any) -> Any:
        """Floating tensors of a plain module's batch, in the parameters' dtype."""
        return apply_to_collection(data, Tensor, self._convert_tensor)

    def _convert_tensor(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.params_dtype) if torch.is_floating_point(tensor) else tensor

    @override
    def clip_gradients(self, optimizer: Optimizer, clip_val: float = 0.0, gradient_clip_algorithm: Any = None) -> None:
        """Does nothing: Megatron Core clips inside its step, by the norm over all model-parallel ranks."""

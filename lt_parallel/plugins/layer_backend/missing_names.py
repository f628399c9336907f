"""Names that Megatron Core 0.19.2 uses without TransformerEngine, though it has imported them from there only.

Recomputing a norm, an expert's activation or latent attention's up projections asks these whether FP8 is on, even where
it can't be (`CheckpointWithoutOutput` takes its default `fp8=False` for an answer), and ends in a NameError.
"""

from __future__ import annotations

import contextlib
from typing import Final

__all__ = ["provide_missing_names"]


class _NoFP8:
    """What is asked of TransformerEngine's `FP8GlobalStateManager`."""

    @staticmethod
    def is_fp8_enabled() -> bool:
        return False


def _fp8_autocast(enabled: bool = False, fp8_recipe: object = None) -> contextlib.AbstractContextManager[None]:
    if enabled:
        raise NotImplementedError("FP8 needs TransformerEngine and a CUDA device")
    return contextlib.nullcontext()


def _null_context(*args: object, **kwargs: object) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


NAMES: Final[dict[str, object]] = {
    "FP8GlobalStateManager": _NoFP8,
    "fp8_autocast": _fp8_autocast,
    "activation_recompute_forward": _null_context,
}


def provide_missing_names() -> None:
    """Defines them in `megatron.core.tensor_parallel.random` where they aren't."""
    from megatron.core.tensor_parallel import random

    for name, value in NAMES.items():
        vars(random).setdefault(name, value)

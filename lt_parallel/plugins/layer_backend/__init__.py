"""Which classes Megatron Core's transformer layers are made of.

Megatron Core assembles a layer from a specification that names a class for each part. It has two sets: Transformer
Engine's CUDA modules, and its own, which can't do sequence parallelism (the norms refuse it) and hold the whole
matrix of attention scores. So lt_parallel adds a third, ``torch``: Megatron's parallel linear layers with norms and
attention from PyTorch, which run on CPU and GPU alike and use PyTorch's flash and cuDNN attention kernels.

This module only chooses. It imports neither torch nor Megatron Core, so that a strategy may import it at no cost.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, cast, get_args

if TYPE_CHECKING:
    from megatron.core.models.backends import BackendSpecProvider

__all__ = ["BackendName", "LayerBackend", "resolve_layer_backend"]

BackendName = Literal["torch", "transformer_engine"]

_TE_INSTALL_HINT = "install it with: pip install 'lt-parallel[te]'"


@dataclass(frozen=True)
class LayerBackend:
    """A resolved layer backend.

    Args:
        name: ``torch`` or ``transformer_engine``.
        provider: Megatron Core's interface through which specification builders ask for classes.
    """

    name: BackendName
    provider: BackendSpecProvider

    @property
    def config_fields(self) -> dict[str, str]:
        """``TransformerConfig`` fields that must agree with this backend."""
        return {"transformer_impl": "local" if self.name == "torch" else "transformer_engine"}


def resolve_layer_backend(name: str, device_type: str) -> LayerBackend:
    """Choose the layer backend.

    Args:
        name: ``auto`` (Transformer Engine where it is installed and the device is CUDA, else torch), ``torch`` or
            ``transformer_engine``.
        device_type: ``cpu`` or ``cuda``, where the model will run.

    Raises:
        ValueError: for an unknown name, and for Transformer Engine on another device than CUDA.
        ImportError: where Transformer Engine is needed but isn't installed, or is installed but broken. ``auto``
            raises in the latter case too: falling back would change the kernels that the user paid for unnoticed.
    """
    choices = ("auto", *get_args(BackendName))
    if name not in choices:
        raise ValueError(f"layer_backend={name!r} is not known; choose one of {', '.join(choices)}")
    if name == "auto":
        use_te = device_type == "cuda" and importlib.util.find_spec("transformer_engine") is not None
        name = "transformer_engine" if use_te else "torch"
    if name == "transformer_engine":
        return LayerBackend(cast(BackendName, name), _transformer_engine_provider(device_type))

    from lt_parallel.plugins.layer_backend.missing_names import provide_missing_names
    from lt_parallel.plugins.layer_backend.torch_backend import TorchSpecProvider

    provide_missing_names()
    return LayerBackend(cast(BackendName, name), TorchSpecProvider())


def _transformer_engine_provider(device_type: str) -> BackendSpecProvider:
    if device_type != "cuda":
        raise ValueError(
            f"layer_backend='transformer_engine' runs on CUDA devices only, and this run is on {device_type!r}; "
            "use layer_backend='torch' (or 'auto', which chooses it)"
        )
    if importlib.util.find_spec("transformer_engine") is None:
        raise ImportError(
            f"layer_backend='transformer_engine' needs Transformer Engine, which isn't installed; {_TE_INSTALL_HINT}, "
            "or use layer_backend='torch'"
        )
    from megatron.core.extensions.transformer_engine import HAVE_TE

    if not HAVE_TE:
        raise ImportError(
            "Transformer Engine is installed, but Megatron Core can't import it (`import transformer_engine.pytorch` "
            "shows why; often it was built for another torch or CUDA); "
            f"{_TE_INSTALL_HINT}, or use layer_backend='torch'"
        )
    from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider

    return cast("BackendSpecProvider", TESpecProvider())

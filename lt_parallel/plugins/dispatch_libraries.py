"""Whether the library behind Megatron Core's "flex" token dispatcher is there.

Megatron Core tries to import all three when its module is imported, and says what it found only when a layer is built,
after the process groups, with an address that leads to the wrong version. So its findings are asked for earlier.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from lt_parallel.expert_rules import flex_backend
from lt_parallel.runtime import device_type

if TYPE_CHECKING:
    from lt_parallel.settings import Settings

_SOURCES = "https://github.com/deepseek-ai/DeepEP"
_INSTALL_DEEP_EP = (
    "build it where the CUDA toolkit is, from the branch that has both parts: "
    f"git clone --branch hybrid-ep {_SOURCES} && pip install --no-build-isolation ./DeepEP (its README says what more "
    "several machines need; PyPI's deep-ep can't be built)"
)
_WRONG_DEEP_EP = (
    "deep_ep is installed, but Megatron Core can't import {name}, which it was written for, and takes it for absent: "
    "the second version of DeepEP, on its branch main, hasn't got it (if yours is the first, that import shows what is "
    "wrong). Uninstall it and "
)
_INSTALL_NCCL_EP = "build TransformerEngine from source with NVTE_BUILD_WITH_NCCL_EP=1; published packages may lack it"
_OTHERWISE = "or use ExpertDispatch('alltoall'), which needs no library and gives the same numbers"

#: backend: (the name of Megatron Core's finding, what it imports, what that is)
_BACKENDS = {
    "deepep": ("HAVE_DEEP_EP", "deep_ep.utils.EventOverlap", "DeepEP"),
    "hybridep": ("HAVE_HYBRIDEP", "deep_ep.HybridEPBuffer", "DeepEP's HybridEP"),
    "ncclep": ("HAVE_TE_EP", "transformer_engine.pytorch.ep", "NCCL's expert parallelism in TransformerEngine"),
}


def require_dispatch_library(settings: Settings) -> None:
    """Asks Megatron Core for the library of a run's token dispatcher, if it needs one.

    Args:
        settings: The run's, checked.

    Raises:
        ImportError: It isn't there; says why, what to install and how to do without.
    """
    backend = flex_backend(settings)
    if backend is None:
        return
    from megatron.core.transformer.moe import fused_a2a

    finding, name, library = _BACKENDS[backend]
    if getattr(fused_a2a, finding):
        return
    what = f"ExpertDispatch('flex', backend={backend!r}) needs {library}"
    if device_type() == "cpu":
        raise ImportError(f"{what}, which is for CUDA devices, and this run is on the CPU; {_OTHERWISE}")
    if backend == "ncclep":
        raise ImportError(f"{what}, which isn't there; {_INSTALL_NCCL_EP}, {_OTHERWISE}")
    if importlib.util.find_spec("deep_ep") is not None:
        raise ImportError(f"{what}. {_WRONG_DEEP_EP.format(name=name)}{_INSTALL_DEEP_EP}, {_OTHERWISE}")
    raise ImportError(f"{what}, which isn't installed; {_INSTALL_DEEP_EP}, {_OTHERWISE}")

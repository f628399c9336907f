"""Which device Megatron Core runs on, decided once, before it is imported.

Megatron Core is written for CUDA. On a CPU it runs through `lt_parallel.plugins.cpu_runtime`, which transforms its
modules as they are loaded; on CUDA it is left exactly as installed and that file is never even imported. The choice
must therefore be made before the first `import megatron.core`, so `import lt_parallel` puts a small finder in front
of Python's own. This module imports nothing outside the standard library: importing `lt_parallel` stays cheap.
"""

import importlib
import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Final, Literal, cast, override

DeviceType = Literal["cpu", "cuda"]

PACKAGE: Final = "megatron.core"
ENVIRONMENT_VARIABLE: Final = "LT_PARALLEL_DEVICE"
DEVICE_TYPES: Final = ("cpu", "cuda")

_CPU_RUNTIME: Final = "lt_parallel.plugins.cpu_runtime"
_selected: DeviceType | None = None


def select(device_type: DeviceType) -> None:
    """Chooses the device, over the environment variable and over what the machine has.

    Args:
        device_type: "cpu" or "cuda".

    Raises:
        ValueError: `device_type` is neither.
        RuntimeError: Megatron Core has already been imported for the other device.
    """
    global _selected
    wanted = _checked(device_type, "lt_parallel.runtime.select")
    loaded = loaded_device_type()
    if loaded not in (None, wanted):
        raise RuntimeError(_too_late(wanted))
    _selected = wanted


def device_type() -> DeviceType:
    """The device Megatron Core runs on: "cpu" or "cuda".

    What it was loaded for if it is loaded; else `select`, else the environment variable LT_PARALLEL_DEVICE, else
    whether PyTorch finds a CUDA device (which imports PyTorch).

    Raises:
        ValueError: LT_PARALLEL_DEVICE is set to something other than "cpu" or "cuda".
    """
    return loaded_device_type() or _wanted_device_type()


def loaded_device_type() -> DeviceType | None:
    """The device `megatron.core` was imported for in this process, or None before its import."""
    module = sys.modules.get(PACKAGE)
    if module is None:
        return None
    return "cpu" if _is_transformed(module) else "cuda"


def install_finder() -> None:
    """Puts the finder in front of Python's own; called by `import lt_parallel`, idempotent.

    Raises:
        RuntimeError: `megatron.core` was imported before `lt_parallel`, and the device is the CPU.
    """
    if not any(isinstance(finder, _MegatronFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _MegatronFinder())
    if loaded_device_type() == "cuda" and _wanted_device_type() == "cpu":
        raise RuntimeError(_too_late("cpu"))


class _MegatronFinder(importlib.abc.MetaPathFinder):
    """Hands `megatron.core` and its submodules to the CPU runtime when the device is the CPU; else finds nothing."""

    @override
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != PACKAGE and not fullname.startswith(PACKAGE + "."):
            return None
        if device_type() == "cuda":
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        # Compiled extensions and namespace packages hold no source to transform.
        if spec is not None and type(spec.loader) is importlib.machinery.SourceFileLoader:
            cpu_runtime = importlib.import_module(_CPU_RUNTIME)
            spec.loader = cpu_runtime.Loader(spec.loader.name, spec.loader.path)
        return spec


def _wanted_device_type() -> DeviceType:
    if _selected is not None:
        return _selected
    from_environment = os.environ.get(ENVIRONMENT_VARIABLE)
    if from_environment is not None:
        return _checked(from_environment, ENVIRONMENT_VARIABLE)
    # Here and not at the top: `import lt_parallel` must not pay for PyTorch.
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _is_transformed(module: ModuleType) -> bool:
    cpu_runtime = sys.modules.get(_CPU_RUNTIME)
    return cpu_runtime is not None and isinstance(getattr(module, "__loader__", None), cpu_runtime.Loader)


def _checked(value: str, source: str) -> DeviceType:
    if value not in DEVICE_TYPES:
        raise ValueError(f'{source}: device type {value!r} must be "cpu" or "cuda"')
    return cast(DeviceType, value)


def _too_late(wanted: DeviceType) -> str:
    other = "cuda" if wanted == "cpu" else "cpu"
    return (
        f"{PACKAGE} is already imported for {other!r}, so it can't run on {wanted!r} in this process. The device is "
        f"decided at its first import: import lt_parallel before megatron.core, and choose with "
        f"lt_parallel.runtime.select({wanted!r}) or {ENVIRONMENT_VARIABLE}={wanted} before that import"
    )

"""Megatron Core's parallelism for PyTorch Lightning's Trainer.

Importing the package costs next to nothing: PyTorch, Lightning and Megatron Core are imported when one of the names
below is first asked for, Megatron Core only when a run needs it. What must happen at once is the finder, which has to
be in place before `megatron.core` is imported by anybody.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from lt_parallel.runtime import install_finder

install_finder()

if TYPE_CHECKING:
    from lt_parallel.callbacks.experiment_record import ExperimentRecord
    from lt_parallel.callbacks.expert_dispatch import ExpertDispatch
    from lt_parallel.callbacks.expert_load import ExpertLoadMonitor
    from lt_parallel.callbacks.expert_rebalance import ExpertRebalance
    from lt_parallel.callbacks.memory import MemoryMonitor
    from lt_parallel.callbacks.overlap import CommunicationOverlap
    from lt_parallel.callbacks.recompute import ActivationRecompute
    from lt_parallel.callbacks.throughput import ThroughputMonitor
    from lt_parallel.data.indexed import IndexedDataModule
    from lt_parallel.data.text import TextDataModule
    from lt_parallel.models.gpt import GPTModule
    from lt_parallel.models.mixture_of_experts import MixtureOfExperts
    from lt_parallel.models.multi_latent_attention import MultiLatentAttention
    from lt_parallel.plugins.checkpoint_io import MegatronCheckpointIO
    from lt_parallel.plugins.precision import MegatronPrecision
    from lt_parallel.strategies.megatron import MegatronParallelStrategy

    __version__: str

__all__ = [
    "ActivationRecompute",
    "CommunicationOverlap",
    "ExperimentRecord",
    "ExpertDispatch",
    "ExpertLoadMonitor",
    "ExpertRebalance",
    "GPTModule",
    "IndexedDataModule",
    "MegatronCheckpointIO",
    "MegatronParallelStrategy",
    "MegatronPrecision",
    "MemoryMonitor",
    "MixtureOfExperts",
    "MultiLatentAttention",
    "TextDataModule",
    "ThroughputMonitor",
    "__version__",
]

_HOMES = {
    "ActivationRecompute": "callbacks.recompute",
    "CommunicationOverlap": "callbacks.overlap",
    "ExperimentRecord": "callbacks.experiment_record",
    "ExpertDispatch": "callbacks.expert_dispatch",
    "ExpertLoadMonitor": "callbacks.expert_load",
    "ExpertRebalance": "callbacks.expert_rebalance",
    "GPTModule": "models.gpt",
    "IndexedDataModule": "data.indexed",
    "MegatronCheckpointIO": "plugins.checkpoint_io",
    "MegatronParallelStrategy": "strategies.megatron",
    "MegatronPrecision": "plugins.precision",
    "MemoryMonitor": "callbacks.memory",
    "MixtureOfExperts": "models.mixture_of_experts",
    "MultiLatentAttention": "models.multi_latent_attention",
    "TextDataModule": "data.text",
    "ThroughputMonitor": "callbacks.throughput",
}


def __getattr__(name: str) -> object:
    value: object
    if name == "__version__":
        from importlib.metadata import version

        value = version("lt-parallel")
    elif name in _HOMES:
        value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value  # found directly from now on
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

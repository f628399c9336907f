"""What an import brings with it: the package alone nothing heavy, its parts no Megatron Core."""

import subprocess
import sys

import pytest

import lt_parallel

_REPORT = "; import sys; print(*sorted({name for name in %r if name in sys.modules}))"


def _loaded_by(statement: str, *names: str) -> set[str]:
    """Which of the modules a fresh interpreter holds after the statement."""
    command = [sys.executable, "-W", "ignore", "-c", statement + _REPORT % (names,)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_the_package_alone_imports_nothing_heavy() -> None:
    heavy = ("torch", "lightning", "lightning.pytorch", "megatron", "megatron.core", "numpy", "jsonargparse")
    assert _loaded_by("import lt_parallel", *heavy) == set()
    assert _loaded_by("import lt_parallel.cli", *heavy) == set()


def test_no_part_of_the_package_imports_megatron_core_by_itself() -> None:
    parts = (
        "from lt_parallel.strategies import MegatronParallelStrategy",
        "from lt_parallel.models import GPTModule",
        "from lt_parallel.data import IndexedDataModule, TextDataModule",
        "from lt_parallel import *",
        "import lt_parallel.lightning_cli",
    )
    # Lightning is among the names to show that the check sees what is there.
    loaded = _loaded_by("; ".join(parts), "lightning.pytorch", "megatron.core", "lt_parallel.plugins.cpu_runtime")
    assert loaded == {"lightning.pytorch"}


def test_public_names_are_the_classes_of_their_modules() -> None:
    from lt_parallel.callbacks.experiment_record import ExperimentRecord
    from lt_parallel.callbacks.expert_dispatch import ExpertDispatch
    from lt_parallel.callbacks.expert_load import ExpertLoadMonitor
    from lt_parallel.callbacks.expert_rebalance import ExpertRebalance
    from lt_parallel.callbacks.memory import MemoryMonitor
    from lt_parallel.callbacks.overlap import CommunicationOverlap
    from lt_parallel.callbacks.recompute import ActivationRecompute
    from lt_parallel.callbacks.throughput import ThroughputMonitor
    from lt_parallel.data import IndexedDataModule, TextDataModule
    from lt_parallel.models import GPTModule, MixtureOfExperts, MultiLatentAttention
    from lt_parallel.plugins.checkpoint_io import MegatronCheckpointIO
    from lt_parallel.plugins.precision import MegatronPrecision
    from lt_parallel.strategies import MegatronParallelStrategy

    classes = [
        ActivationRecompute,
        CommunicationOverlap,
        ExperimentRecord,
        ExpertDispatch,
        ExpertLoadMonitor,
        ExpertRebalance,
        GPTModule,
        IndexedDataModule,
        MegatronCheckpointIO,
        MegatronParallelStrategy,
        MegatronPrecision,
        MemoryMonitor,
        MixtureOfExperts,
        MultiLatentAttention,
        TextDataModule,
        ThroughputMonitor,
    ]
    assert [*(cls.__name__ for cls in classes), "__version__"] == lt_parallel.__all__
    for cls in classes:
        assert getattr(lt_parallel, cls.__name__) is cls
    assert set(lt_parallel.__all__) <= set(dir(lt_parallel))
    assert lt_parallel.__version__.split(".")[0].isdigit()


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'MegatronStrategy'"):
        lt_parallel.MegatronStrategy  # noqa: B018

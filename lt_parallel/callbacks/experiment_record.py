"""`ExperimentRecord`: tells the loggers how a run was configured and by which code, so that it can be made again.

Everything is under the one hyper-parameter `lt_parallel`, beside those that Lightning logs for module and data:

| section  | content                                                                                        |
|----------|------------------------------------------------------------------------------------------------|
| parallel | all sizes, pipeline layout, sharding strategy, layer backend                                   |
| batch    | micro batch of a rank, micro batches per step, samples per step over all ranks                 |
| settings | Megatron Core's config fields that strategy, callbacks, precision and module have set          |
| owners   | who set each of them                                                                           |
| run      | what was started (fit, validate, test), precision, devices of this node, command line          |
| software | versions; null for what isn't installed                                                        |
| code     | git revision of the working directory, and whether tracked files differ from it; null unknown  |

Environment variables and the host's name are left out, and so are values of arguments that look like secrets.

TensorBoard shows only the first hyper-parameters of a run and Lightning writes its `hparams.yaml` only once, in both
cases before a run's batch is known. So there the record goes to the Text tab, and the file is written again.
"""

from __future__ import annotations

import enum
import math
import platform
import re
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, override

import lightning.pytorch as L
import numpy
import torch
import yaml
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_only, rank_zero_warn

from lt_parallel.strategies.megatron import MegatronParallelStrategy
from lt_parallel.strategies.micro_batches import MicroBatchLoader

#: The hyper-parameter that holds the record.
KEY = "lt_parallel"
_PACKAGES = ("lt-parallel", "torch", "lightning", "megatron-core", "transformer-engine")
_GIT_TIMEOUT_S = 5.0
#: Keys, passwords and tokens; but not tokens of a vocabulary, such as `eos_token`.
_SECRET_NAME = (
    r"(?:(?:api|access|secret|private|account|wandb|openai|hf|auth)[_-]?keys?|passw(?:or)?d|passphrase|pwd|secrets?"
    r"|credentials?|bearer|authorization|(?<!eos_)(?<!bos_)(?<!pad_)(?<!unk_)(?<!sep_)(?<!cls_)(?<!mask_)(?<!new_)token)"
)
_SECRET_OPTION = re.compile(rf"--?(?:[\w.-]*[._-])?{_SECRET_NAME}", flags=re.IGNORECASE)
_SECRET_VALUE = re.compile(rf"({_SECRET_NAME}[\"']?\s*[=:]\s*)(?:\"[^\"]*\"|'[^']*'|[^\s\"',}}]+)", flags=re.IGNORECASE)
#: What some services' keys begin with, and the header that carries any.
_SECRET_BY_FORM = re.compile(
    r"\b(?:hf_\w{16,}|gh[a-z]_\w{16,}|github_pat_\w{16,}|sk-[\w-]{16,}|AKIA\w{12,}|xox[a-z]-[\w-]{8,})"
    r"|(?<=bearer )\S+",
    flags=re.IGNORECASE,
)
_SECRET_IN_URL = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_HIDDEN = "***"


class ExperimentRecord(L.Callback):
    """Gives every logger the resolved configuration, versions, git revision and command line when a run starts.

    Only rank 0 writes. Under another strategy than MegatronParallelStrategy what is said of layout and settings is
    left out. `MegatronCLI`, and so the command `lt-parallel`, adds this callback by itself.
    """

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        record_run(trainer, trainer.train_dataloader)

    @override
    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.state.fn == TrainerFn.VALIDATING:  # not within fit
            record_run(trainer, trainer.val_dataloaders)

    @override
    def on_test_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        record_run(trainer, trainer.test_dataloaders)


@rank_zero_only
def record_run(trainer: L.Trainer, dataloaders: Any) -> None:
    """Writes the record of a run that is starting to its loggers.

    Args:
        trainer: Of the run.
        dataloaders: As the Trainer holds them; the first one that groups micro batches says the batch.
    """
    if not trainer.loggers:
        return
    record = {KEY: plain(experiment_record(trainer, dataloaders))}
    for logger in trainer.loggers:
        if getattr(logger, "_log_model", False) and isinstance(trainer.strategy, MegatronParallelStrategy):
            rank_zero_warn(
                f"{type(logger).__name__}(log_model=...) uploads single files, and leaves out the folders that "
                "MegatronParallelStrategy's checkpoints are: upload them after the run"
            )
        if isinstance(logger, TensorBoardLogger):
            _write_to_tensorboard(logger, record)
        else:
            logger.log_hyperparams(record)
        logger.save()


def _write_to_tensorboard(logger: TensorBoardLogger, record: dict[str, Any]) -> None:
    logger.hparams.update(record)
    text = yaml.safe_dump(record, sort_keys=False)
    logger.experiment.add_text(KEY, f"```yaml\n{text}```", global_step=0)
    (Path(logger.log_dir) / logger.NAME_HPARAMS_FILE).unlink(missing_ok=True)  # save() writes no second one


def experiment_record(trainer: L.Trainer, dataloaders: Any = None) -> dict[str, Any]:
    """What the module's docstring lists, by section.

    Args:
        trainer: Of a run that has started.
        dataloaders: As the Trainer holds them.
    """
    strategy = trainer.strategy
    record: dict[str, Any] = {}
    if isinstance(strategy, MegatronParallelStrategy):
        record |= {"parallel": _parallel(strategy), "batch": _batch(strategy, dataloaders)}
        record |= {"settings": {}, "owners": {}}
        for target, name, contribution in strategy.settings:
            record["settings"].setdefault(target, {})[name] = contribution.value
            record["owners"].setdefault(target, {})[name] = contribution.owner
    devices = getattr(strategy, "parallel_devices", None) or [strategy.root_device]
    return record | {
        "run": {
            "function": trainer.state.fn.value if trainer.state.fn else None,
            "precision": trainer.precision,
            "devices": device_names(devices),
            "command": command_line(sys.argv),
        },
        "software": software_versions(),
        "code": git_state(),
    }


def _parallel(strategy: MegatronParallelStrategy) -> dict[str, Any]:
    sizes, arguments = strategy.sizes, strategy.arguments
    return {
        **asdict(sizes),
        "data_parallel_size": sizes.data_parallel_size,
        "expert_data_parallel_size": sizes.expert_data_parallel_size,
        "sequence_parallel": arguments.sequence_parallel,
        "pipeline_layout": None if strategy.layout is None else "|".join(strategy.layout.stages),
        "data_parallel_sharding_strategy": arguments.data_parallel_sharding_strategy,
        "layer_backend": None if strategy.backend is None else strategy.backend.name,
        "num_nodes": strategy.num_nodes,
    }


def _batch(strategy: MegatronParallelStrategy, dataloaders: Any) -> dict[str, Any]:
    """From the loader that groups micro batches; where there is none, what the user gave."""
    loaders = dataloaders if isinstance(dataloaders, list | tuple) else [dataloaders]
    loader = next((loader for loader in loaders if isinstance(loader, MicroBatchLoader)), None)
    given = strategy.arguments
    count = given.num_microbatches if loader is None else loader.num_microbatches
    micro_batch = None if loader is None else loader.batch_size
    samples = given.global_batch_size
    if count is not None and micro_batch is not None:
        samples = count * micro_batch * strategy.sizes.data_parallel_size
    return {"micro_batch_size": micro_batch, "num_microbatches": count, "global_batch_size": samples}


def device_names(devices: Iterable[torch.device]) -> list[str]:
    """Devices counted by name, e.g. ["8 x NVIDIA H200"]; a CPU is named by its machine type.

    Args:
        devices: Of one node.
    """
    names = Counter(
        torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device.type} ({platform.machine()})"
        for device in devices
    )
    return [f"{count} x {name}" for name, count in names.items()]


def software_versions() -> dict[str, str | None]:
    """Versions of Python, of the packages that compute, and of CUDA as PyTorch was built for; None: not there."""
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = None
    return versions | {"cuda": torch.version.cuda}


def command_line(arguments: Sequence[str]) -> str:
    """Arguments as a shell takes them, with `***` for values that look like keys, tokens or passwords.

    Args:
        arguments: E.g. `sys.argv`.
    """
    shown: list[str] = []
    for before, argument in zip(["", *arguments], arguments, strict=False):
        name, equals, _ = argument.partition("=")
        if _SECRET_OPTION.fullmatch(before) and not argument.startswith("--"):
            shown.append(_HIDDEN)
        elif equals and _SECRET_OPTION.fullmatch(name):
            shown.append(f"{name}={_HIDDEN}")
        else:
            for form in (_SECRET_BY_FORM, _SECRET_IN_URL):
                argument = form.sub(_HIDDEN, argument)
            shown.append(_SECRET_VALUE.sub(rf"\1{_HIDDEN}", argument))
    return shlex.join(shown)


def git_state(folder: Path | None = None) -> dict[str, Any]:
    """The revision that is checked out and whether tracked files differ from it; None where git can't tell.

    Args:
        folder: None: the working directory.
    """
    revision = _git(folder, "rev-parse", "HEAD")
    changes = None if revision is None else _git(folder, "status", "--porcelain", "--untracked-files=no")
    return {"revision": revision, "modified": None if changes is None else bool(changes)}


def _git(folder: Path | None, *arguments: str) -> str | None:
    """What git prints; None without git, without a repository or after 5 s. It starts no helper and takes no lock."""
    command = ["git", "--no-optional-locks", "-c", "core.fsmonitor=false", *arguments]
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_GIT_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def plain(value: Any) -> Any:
    """A value as JSON and YAML can hold it.

    Args:
        value: Functions and classes become their qualified names, enum members their names, other objects the names
            of their types.
    """
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or type(value) in (bool, int, float, str):
        return value
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return plain(kind(value))
    if isinstance(value, numpy.generic) or (isinstance(value, torch.Tensor) and value.dim() == 0):
        return plain(value.item())
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(map(str, map(plain, value)))
    return _name_of(value)


def _name_of(value: Any) -> str:
    if isinstance(value, torch.dtype | torch.device | Path):
        return str(value)
    if isinstance(value, partial):
        return f"partial({_name_of(value.func)})"
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"

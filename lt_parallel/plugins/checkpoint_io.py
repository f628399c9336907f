"""Checkpoints as directories: the tensors by rank, and one small file for the trainer's state.

Tensors are in Megatron Core's `torch_dist` format; those of Megatron-FSDP, which are DTensors, as
`torch.distributed.checkpoint` writes them (Megatron Core calls that `fsdp_dtensor`).

Every rank writes its shard of the parameters and optimizer states. What Lightning adds (loops, callbacks, schedulers,
hyper-parameters) is equal on all ranks and goes into `trainer.pt`, which is read back with `weights_only`, so nothing
in it can run code. A checkpoint is written beside its place and moved there when it is complete.
"""

from __future__ import annotations

import os
import queue
import shutil
from pathlib import Path
from typing import Any, override

import torch
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.plugins.io import CheckpointIO
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

TRAINER_FILE = "trainer.pt"
#: The two forms of the tensors; the trainer's file says which, under `sharded_format`.
TORCH_DIST, FSDP_DTENSOR = "torch_dist", "fsdp_dtensor"
#: Entries of Lightning's checkpoint dictionary that hold Megatron Core's sharded tensors.
_MODEL_PREFIX, _GROUPS = "state_dict.", "optimizer_groups"
SHARDED_KEYS = ("state_dict", "optimizer_states", "rng_state")


class MegatronCheckpointIO(CheckpointIO):
    """Writes and reads checkpoint directories; every rank takes part in each call but `remove_checkpoint`."""

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: _PATH, storage_options: Any = None) -> None:
        """Saves a checkpoint; collective.

        Args:
            checkpoint: Lightning's dictionary; its sharded entries hold Megatron Core's sharded tensors.
            path: The directory to become the checkpoint. What is there is replaced once the new one is complete.
            storage_options: Not supported.

        Raises:
            ValueError: `storage_options` given.
            FileExistsError: At `path` is a folder with something else in it.
        """
        if storage_options is not None:
            raise ValueError(f"storage_options={storage_options!r}: checkpoints are written to a file system path only")
        target = Path(path).absolute()
        _require_replaceable(target)
        partial = target.with_name(f".{target.name}.partial")
        if _rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        _barrier()
        sharded = {key: checkpoint[key] for key in SHARDED_KEYS if key in checkpoint}
        trainer = {key: checkpoint[key] for key in checkpoint if key not in SHARDED_KEYS}
        if checkpoint.get("sharded_format") == FSDP_DTENSOR:
            trainer |= _save_dtensors(sharded, partial)
        else:
            from megatron.core import dist_checkpointing

            _keep_results_in_this_process()
            dist_checkpointing.save(sharded, str(partial))
        if _rank() == 0:
            torch.save(trainer, partial / TRAINER_FILE)
            _publish(partial, target)
        _barrier()

    @override
    def load_checkpoint(
        self, path: _PATH, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Reads the trainer's part only; `load_sharded` reads the tensors.

        Args:
            path: A checkpoint directory.
            map_location: Ignored: what is read here is small and stays on the CPU.
            weights_only: Ignored: nothing else is ever allowed.

        Raises:
            FileNotFoundError: There is no checkpoint at `path`.
        """
        self.require_checkpoint(path)
        state: dict[str, Any] = torch.load(Path(path) / TRAINER_FILE, map_location="cpu", weights_only=True)
        return state

    def require_checkpoint(self, path: _PATH) -> None:
        """Looks whether there is a whole checkpoint; reads nothing.

        Args:
            path: A checkpoint directory.

        Raises:
            FileNotFoundError: There is none at `path`.
        """
        directory = Path(path)
        if not (directory / TRAINER_FILE).is_file():
            kind = "a file, not a directory" if directory.is_file() else "no such checkpoint"
            if directory.is_dir():
                kind = f"a directory without {TRAINER_FILE}: incomplete, or not written by lt_parallel"
            replaced = _replaced(directory)
            if not directory.exists() and replaced.is_dir():  # a save was killed between its last two renamings
                kind += f"; the one before it is {replaced}: move it to {directory.name}"
            raise FileNotFoundError(f"{directory}: {kind}")

    def tensor_shapes(self, path: _PATH, sharded_format: str) -> dict[str, tuple[int, ...]]:
        """Global shapes of the tensors in a checkpoint directory, by global name.

        Args:
            path: A checkpoint directory.
            sharded_format: Of its tensors.
        """
        if sharded_format == FSDP_DTENSOR:
            found = FileSystemReader(Path(path).absolute()).read_metadata().state_dict_metadata
            tensors = {name: value for name, value in found.items() if isinstance(value, TensorStorageMetadata)}
            model = {name: value for name, value in tensors.items() if name.startswith(_MODEL_PREFIX)}
            return {name.removeprefix(_MODEL_PREFIX): tuple(value.size) for name, value in model.items()}
        from megatron.core.dist_checkpointing.serialization import load_tensors_metadata

        described = load_tensors_metadata(str(Path(path).absolute()))
        return {entry.key: tuple(entry.global_shape) for entry in described.values()}

    def load_sharded(
        self, path: _PATH, template: dict[str, Any], sharded_format: str, *, strict: bool = True
    ) -> dict[str, Any]:
        """Reads this rank's shards; collective.

        Args:
            path: A checkpoint directory.
            template: Sharded tensors that say which part of which tensor goes where.
            sharded_format: Of the directory's tensors.
            strict: Whether all of the template has to be there.

        Returns:
            The template's structure with the tensors read; DTensors are read in place.
        """
        directory = Path(path).absolute()
        if sharded_format == FSDP_DTENSOR:
            return _load_dtensors(directory, template, strict=strict)
        from megatron.core import dist_checkpointing

        loaded: dict[str, Any] = dist_checkpointing.load(template, str(directory))
        return loaded

    @override
    def remove_checkpoint(self, path: _PATH) -> None:
        """Removes a checkpoint directory; called on one rank."""
        shutil.rmtree(path)


def _save_dtensors(sharded: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Writes the tensors; returns what of the optimizer isn't a tensor, for the trainer's file."""
    tensors, groups = _without_groups(sharded)
    torch.distributed.checkpoint.save(tensors, checkpoint_id=directory)
    return {} if groups is None else {_GROUPS: groups}


def _load_dtensors(directory: Path, template: dict[str, Any], *, strict: bool) -> dict[str, Any]:
    """Reads into the template's tensors."""
    tensors, groups = _without_groups(template)
    planner = DefaultLoadPlanner(allow_partial_load=not strict)
    torch.distributed.checkpoint.load(tensors, checkpoint_id=directory, planner=planner)
    loaded = dict(template)
    if groups is not None:
        trainer = torch.load(directory / TRAINER_FILE, map_location="cpu", weights_only=True)
        loaded["optimizer_states"] = [{**template["optimizer_states"][0], "groups": trainer[_GROUPS]}]
    return loaded


def _without_groups(sharded: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]] | None]:
    """What goes into the tensors' files, and the optimizer's groups, which are plain values."""
    if not sharded.get("optimizer_states"):
        return sharded, None
    (optimizer,) = sharded["optimizer_states"]
    return {**sharded, "optimizer_states": optimizer["state"]}, optimizer["groups"]


def _require_replaceable(target: Path) -> None:
    if target.is_dir() and not (target / TRAINER_FILE).is_file() and any(target.iterdir()):
        raise FileExistsError(
            f"{target} is a folder that holds other things than a checkpoint (no {TRAINER_FILE} in it), which saving "
            f"would replace; choose a path inside it, e.g. {target / 'last.ckpt'}"
        )


def _keep_results_in_this_process() -> None:
    """Gives Megatron Core's writer a plain queue for its results.

    By itself it starts a manager process on each rank, which runs the user's script once more to import it, and stays
    behind when the rank is killed. A save that isn't asynchronous writes with threads of this process only.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    if filesystem_async._results_queue is None:
        filesystem_async._results_queue = queue.Queue()


def _publish(partial: Path, target: Path) -> None:
    """Puts the complete directory in its place; whatever happens, one whole checkpoint is there."""
    if not target.exists():
        os.rename(partial, target)
        return
    replaced = _replaced(target)
    shutil.rmtree(replaced, ignore_errors=True)
    os.rename(target, replaced)
    os.rename(partial, target)
    shutil.rmtree(replaced) if replaced.is_dir() else replaced.unlink()


def _replaced(target: Path) -> Path:
    """Where the previous checkpoint is while the new one takes its place."""
    return target.with_name(f".{target.name}.replaced")


def _rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def _barrier() -> None:
    if torch.distributed.is_initialized():
        torch.distributed.barrier()

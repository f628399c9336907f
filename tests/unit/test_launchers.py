"""Who this rank is and where the ranks meet: from each launcher's environment to the default process group."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.fabric.plugins.environments import LightningEnvironment, SLURMEnvironment, TorchElasticEnvironment
from lightning.fabric.utilities.rank_zero import rank_zero_only

from lt_parallel.models import GPTModule
from lt_parallel.strategies import MegatronParallelStrategy

SLURM = {
    "SLURM_JOB_ID": "8123456",
    "SLURM_JOB_NAME": "train",
    "SLURM_NODELIST": "gpu[07-08]",
    "SLURM_NNODES": "2",
    "SLURM_NTASKS": "4",
    "SLURM_NTASKS_PER_NODE": "2",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "1",
    "SLURM_PROCID": "3",
}
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "RANK": "3",
    "LOCAL_RANK": "1",
    "GROUP_RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "head",
    "MASTER_PORT": "29511",
}
LIGHTNING = {
    "LOCAL_RANK": "1",
    "NODE_RANK": "1",
    "WORLD_SIZE": "4",
    "MASTER_ADDR": "10.0.0.7",
    "MASTER_PORT": "12910",
}
LAUNCHERS = {
    "slurm": (SLURM, SLURMEnvironment, "gpu07", 15000 + 3456),
    "torchrun": (TORCHRUN, TorchElasticEnvironment, "head", 29511),
    "lightning": (LIGHTNING, LightningEnvironment, "10.0.0.7", 12910),
}


class Reached(Exception):
    """The default process group would be made now."""


@pytest.fixture(autouse=True)
def boundary(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """What torch's `init_process_group` was asked for; the environment and Lightning's idea of rank 0 are put back."""
    asked: dict[str, Any] = {}

    def stop(**arguments: Any) -> None:
        asked.update(arguments, address=os.environ["MASTER_ADDR"], port=os.environ["MASTER_PORT"])
        raise Reached

    before = dict(os.environ)
    for name in list(os.environ):
        if name.startswith(("SLURM_", "TORCHELASTIC_", "MASTER_")) or name.endswith(("RANK", "WORLD_SIZE")):
            del os.environ[name]
    os.environ["PL_GLOBAL_SEED"] = "0"
    monkeypatch.setattr(torch.distributed, "init_process_group", stop)
    monkeypatch.setattr(rank_zero_only, "rank", 0)
    yield asked
    os.environ.clear()
    os.environ.update(before)


def make_trainer(devices: int, num_nodes: int, **strategy: Any) -> L.Trainer:
    return L.Trainer(
        accelerator="cpu",
        devices=devices,
        num_nodes=num_nodes,
        strategy=MegatronParallelStrategy(**strategy),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def module() -> GPTModule:
    return GPTModule(100, 32, num_layers=4, hidden_size=64, num_attention_heads=4)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_environment_reaches_the_default_group(launcher: str, boundary: dict[str, Any]) -> None:
    variables, kind, address, port = LAUNCHERS[launcher]
    os.environ.update(variables)
    trainer = make_trainer(2, 2, tensor_model_parallel_size=2, timeout_minutes=3.0)
    strategy = trainer.strategy
    assert type(strategy.cluster_environment) is kind
    with pytest.raises(Reached):
        trainer.fit(module(), [])
    assert (boundary["rank"], boundary["world_size"], boundary["backend"]) == (3, 4, "gloo")
    assert (boundary["address"], boundary["port"]) == (address, str(port))
    assert boundary["timeout"].total_seconds() == 180
    assert (strategy.global_rank, strategy.local_rank, strategy.node_rank) == (3, 1, 1)
    assert strategy.world_size == strategy.sizes.world_size == 4
    assert rank_zero_only.rank == 3
    assert strategy.launcher.procs == [], "processes that exist already are not started again"
    # Rank 3 of tp2 dp2 is the second tensor-parallel rank of the second replica.
    assert strategy.sizes.coordinates(3) == (1, 0, 1, 0)
    assert strategy.distributed_sampler_kwargs == {"num_replicas": 2, "rank": 1}


@pytest.mark.parametrize(
    ("launcher", "words"), [("slurm", "ntasks-per-node|NTASKS"), ("torchrun", "devices|processes")]
)
def test_a_process_count_that_is_not_the_launchers_is_refused(
    launcher: str, words: str, boundary: dict[str, Any]
) -> None:
    os.environ.update(LAUNCHERS[launcher][0])
    with pytest.raises(ValueError, match=words):
        make_trainer(4, 2).fit(module(), [])
    assert boundary == {}


def test_a_wrong_configuration_is_found_on_every_launched_rank(boundary: dict[str, Any]) -> None:
    os.environ.update(TORCHRUN)
    with pytest.raises(ValueError, match="ffn_hidden_size=131"):
        make_trainer(2, 2, tensor_model_parallel_size=2).fit(
            GPTModule(100, 32, num_layers=4, hidden_size=64, num_attention_heads=4, ffn_hidden_size=131), []
        )
    assert boundary == {}


def test_a_default_group_of_another_size_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    os.environ.update(TORCHRUN)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group=None: 2)
    trainer = make_trainer(2, 2)
    strategy = trainer.strategy
    strategy.connect(module())
    strategy.lightning_module.trainer = trainer
    with pytest.raises(RuntimeError, match="already initialised with world_size=2, but this Trainer has 4 devices"):
        strategy.setup_environment()

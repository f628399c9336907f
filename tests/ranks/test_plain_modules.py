"""Any LightningModule with TP=PP=1: a small classifier gives Lightning's own single-process numbers."""

from __future__ import annotations

from typing import Any, Literal

import lightning.pytorch as L
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from lt_parallel.strategies import MegatronParallelStrategy
from tests.support.ranks import RankError, run_ranks

SEED, GLOBAL_BATCH, STEPS = 3, 16, 12
Returns = Literal["loss", "dict", "tuple"]


class Classifier(L.LightningModule):
    """An MLP that knows nothing of Megatron."""

    def __init__(self, optimizer: str = "adamw", returns: Returns = "loss") -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.LayerNorm(32), nn.Linear(32, 4))
        self.train_accuracy = MulticlassAccuracy(num_classes=4, average="micro")
        self.val_accuracy = MulticlassAccuracy(num_classes=4, average="micro")
        self.optimizer, self.returns = optimizer, returns

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        x, y = batch
        logits = self.net(x).float()
        loss = nn.functional.cross_entropy(logits, y)
        self.train_accuracy(logits, y)
        self.log("train_loss", loss, sync_dist=True)
        self.log("train_accuracy", self.train_accuracy, on_step=False, on_epoch=True)
        if self.returns == "tuple":
            return loss * len(y), torch.tensor(len(y)), {"tuple_loss": loss}
        return {"loss": loss} if self.returns == "dict" else loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        x, y = batch
        logits = self.net(x).float()
        self.val_accuracy(logits, y)
        self.log("val_loss", nn.functional.cross_entropy(logits, y), sync_dist=True)
        self.log("val_accuracy", self.val_accuracy)

    def configure_optimizers(self) -> Any:
        if self.optimizer == "sgd":
            optimizer: torch.optim.Optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        else:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.01, weight_decay=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class History(L.Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []
        self.rates: list[float] = []

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self.losses.append(float(trainer.callback_metrics["train_loss"]))
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])


def data(length: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(length, 8, generator=generator)
    return TensorDataset(x, (x[:, :4] + 0.5 * x[:, 4:]).argmax(dim=1))


def train(
    world_size: int,
    strategy: dict[str, Any] | None,
    micro_batch: int,
    module: dict[str, Any],
    precision: str = "32-true",
) -> dict[str, Any]:
    L.seed_everything(SEED, verbose=False)
    history = History()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy="auto" if strategy is None else MegatronParallelStrategy(**strategy),
        max_steps=STEPS,
        precision=precision,
        gradient_clip_val=0.5,
        num_sanity_val_steps=0,
        callbacks=[history],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Classifier(**module)
    train_data = data(96, 1)
    # The order that Lightning gives a distributed run, also where it makes no distributed sampler itself.
    order = DistributedSampler(train_data, 1, 0, seed=SEED) if strategy is None else None
    trainer.fit(
        model,
        DataLoader(train_data, batch_size=micro_batch, sampler=order, shuffle=order is None),
        DataLoader(data(30, 2), batch_size=micro_batch),
    )
    return {
        "loss": history.losses,
        "lr": history.rates,
        "weights": [whole(parameter.detach()).float().clone() for parameter in model.parameters()],
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
    }


def whole(parameter: Tensor) -> Tensor:
    if not isinstance(parameter, DTensor):
        return parameter
    from megatron.core.distributed.fsdp.src.megatron_fsdp.uneven_dtensor import uneven_dtensor_to_full_tensor

    return uneven_dtensor_to_full_tensor(parameter)


def assert_equals_lightning(found: dict[str, Any], reference: dict[str, Any]) -> None:
    assert found["loss"] == pytest.approx(reference["loss"], abs=5e-6)
    assert found["lr"] == pytest.approx(reference["lr"])
    for weight, expected in zip(found["weights"], reference["weights"], strict=True):
        torch.testing.assert_close(weight, expected, atol=2e-6, rtol=1e-5)
    for name in ("val_loss", "val_accuracy", "train_accuracy"):
        assert found["metrics"][name] == pytest.approx(reference["metrics"][name], abs=1e-5), name


@pytest.mark.parametrize("returns", ["loss", "dict", "tuple"])
@pytest.mark.parametrize(
    ("world_size", "strategy", "optimizer"),
    [
        (1, {"num_microbatches": 1}, "adamw"),
        (1, {"num_microbatches": 4}, "adamw"),
        (2, {"global_batch_size": GLOBAL_BATCH}, "sgd"),
        (4, {"num_microbatches": 2}, "adamw"),
        (2, {"num_microbatches": 2, "data_parallel_sharding_strategy": "optim"}, "adamw"),
        (2, {"num_microbatches": 2, "data_parallel_sharding_strategy": "optim_grads"}, "adamw"),
        (4, {"num_microbatches": 2, "data_parallel_sharding_strategy": "optim_grads_params"}, "adamw"),
    ],
)
def test_equals_lightning(world_size: int, strategy: dict[str, Any], optimizer: str, returns: Returns) -> None:
    if returns != "loss" and world_size != 2:
        pytest.skip("what is returned doesn't depend on the layout")
    reference = run_ranks(train, 1, 1, None, GLOBAL_BATCH, {"optimizer": optimizer})[0]
    micro_batch = GLOBAL_BATCH // world_size // strategy.get("num_microbatches", 2)
    module = {"optimizer": optimizer, "returns": returns}
    every_rank = run_ranks(train, world_size, world_size, strategy, micro_batch, module)
    for found in every_rank:
        assert_equals_lightning(found, reference)
    if returns == "tuple":
        assert every_rank[0]["metrics"]["tuple_loss"] == pytest.approx(every_rank[0]["loss"][-1], abs=1e-5)


@pytest.mark.parametrize("strategy", [{}, {"data_parallel_sharding_strategy": "optim"}])
def test_bf16_mixed_keeps_fp32_main_parameters(strategy: dict[str, Any]) -> None:
    reference = run_ranks(train, 1, 1, None, GLOBAL_BATCH, {})[0]
    found = run_ranks(train, 2, 2, strategy, GLOBAL_BATCH // 2, {}, "bf16-mixed")[0]
    assert found["loss"] == pytest.approx(reference["loss"], rel=0.03)
    assert found["loss"] != reference["loss"]


def test_sharding_refuses_an_optimizer_it_cannot_shard() -> None:
    strategy = {"num_microbatches": 1, "data_parallel_sharding_strategy": "optim"}
    with pytest.raises(RankError, match="cuts the states of Adam and AdamW, not of SGD"):
        run_ranks(train, 2, 2, strategy, 8, {"optimizer": "sgd"})

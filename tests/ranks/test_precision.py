"""bf16 is what the table in `plugins/precision.py` says, and trains like fp32 as far as eight bits allow."""

from __future__ import annotations

from functools import cache
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch.utils.data import DataLoader

from lt_parallel.models import GPTModule
from tests.ranks.parity_runs import (
    MICRO_BATCH,
    OPTIMIZER,
    SEED,
    SEQ_LENGTH,
    SHAPES,
    VOCAB_SIZE,
    Sequences,
    StepNumbers,
    build_trainer,
)
from tests.support.ranks import run_ranks

STEPS = 6
FP32, BF16 = torch.float32, torch.bfloat16
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {}),
    "dp2": (2, {}),
    "dp2 optim": (2, {"data_parallel_sharding_strategy": "optim"}),
    "tp2 pp2 sp": (
        4,
        {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "sequence_parallel": True},
    ),
}
#: precision: dtype of parameters, of summed gradients, of the parameters that the optimizer steps
TABLE = {"32-true": (FP32, FP32, FP32), "bf16-mixed": (BF16, FP32, FP32), "bf16-true": (BF16, BF16, FP32)}


class OutputDtypes(L.Callback):
    """Dtypes of the hidden states inside a layer, and of what the chunk gives to the loss."""

    def __init__(self) -> None:
        self.inside: set[torch.dtype] = set()

    def on_fit_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        for name, layer in module.named_modules():
            if name.endswith(("linear_fc1", "linear_qkv")):
                layer.register_forward_hook(lambda layer, args, result: self.inside.add(result[0].dtype))


def train(world_size: int, strategy: dict[str, Any], precision: str | None) -> dict[str, Any]:
    L.seed_everything(SEED, verbose=False)
    numbers, outputs = StepNumbers(), OutputDtypes()
    options: dict[str, Any] = {} if precision is None else {"precision": precision}
    trainer = build_trainer(
        numbers, strategy, devices=world_size, max_steps=STEPS, val_check_interval=STEPS, callbacks=[outputs], **options
    )
    module = GPTModule(VOCAB_SIZE, SEQ_LENGTH, **SHAPES["llama"], **OPTIMIZER)
    trainer.fit(
        module,
        DataLoader(Sequences(), batch_size=MICRO_BATCH, shuffle=True),
        DataLoader(Sequences(45), batch_size=MICRO_BATCH),
    )
    optimizer: Any = trainer.optimizers[0]
    main = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    parameters = list(module.parameters())
    states = [
        value for state in optimizer.core.chained_optimizers[0].optimizer.state.values() for value in state.values()
    ]
    return {
        **numbers.numbers(),
        "parameters": {parameter.dtype for parameter in parameters},
        "gradients": {parameter.main_grad.dtype for parameter in parameters},
        "main": {parameter.dtype for parameter in main},
        "states": {value.dtype for value in states if torch.is_tensor(value) and value.dim() > 0},
        "inside": outputs.inside,
        # What bf16 can't hold: the main copy has more digits than the parameters made from it.
        "finer": sum(int((parameter.detach() != parameter.detach().bfloat16().float()).sum()) for parameter in main),
        "main_elements": sum(parameter.numel() for parameter in main),
    }


@cache
def at(layout: str, precision: str | None) -> list[dict[str, Any]]:
    world_size, strategy = LAYOUTS[layout]
    return run_ranks(train, world_size, world_size, strategy, precision)


CASES = [(layout, precision) for precision in ("bf16-mixed", "bf16-true") for layout in list(LAYOUTS)[1:]]


@pytest.mark.parametrize(("layout", "precision"), [*CASES, ("one process", "32-true")])
def test_dtypes_are_those_of_the_table(layout: str, precision: str) -> None:
    parameters, gradients, main = TABLE[precision]
    for found in at(layout, precision):
        assert found["parameters"] == found["inside"] == {parameters}
        assert found["gradients"] == {gradients}
        assert found["main"] == found["states"] == {main}
        assert found["finer"] > 0.9 * found["main_elements"], "the optimizer's copy is no rounded one"


@pytest.mark.parametrize(("layout", "precision"), CASES)
def test_losses_are_near_those_of_fp32(layout: str, precision: str) -> None:
    reference, every_rank = at("one process", None)[0], at(layout, precision)
    found = every_rank[0]
    # bf16 rounds to 2**-9 = 0.2 %. Errors of the single tokens' losses nearly cancel in the mean over hundreds of
    # tokens; a gradient norm adds up squares, so its errors do not, and its rounding grows with the path to the input.
    assert found["loss"] == pytest.approx(reference["loss"], rel=2**-9)
    assert found["val_loss"] == pytest.approx(reference["val_loss"], rel=2**-9)
    assert found["grad_norm"] == pytest.approx(reference["grad_norm"], rel=0.03)
    assert found["loss"] != reference["loss"], "it did run in bf16"
    assert reference["loss"][-1] < reference["loss"][0] * (1 - 8 * 2**-9), "the steps move more than the tolerance"
    for other in every_rank[1:]:
        assert all(other[name] == found[name] for name in ("loss", "grad_norm", "val_loss"))


def test_32_true_is_the_default_bit_for_bit() -> None:
    (default,), (named,) = at("one process", None), at("one process", "32-true")
    assert default == named

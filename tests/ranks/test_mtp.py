"""Multi-token prediction heads: their loss against one written out, and the same numbers at every layout."""

from __future__ import annotations

import types
from functools import cache
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from lt_parallel.models import GPTModule
from lt_parallel.strategies import MegatronParallelStrategy
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
    train_with_trainer,
)
from tests.ranks.test_parity import assert_close, assert_equals_single_process
from tests.support.ranks import run_ranks

SHAPE = "llama+mtp"
MTP = SHAPES[SHAPE]
DEPTHS, FACTOR = MTP["mtp_num_layers"], MTP["mtp_loss_scaling_factor"]
TIED = {"untie_embeddings_and_output_weights": False}


class Written(L.Callback):
    """Before the first step: the loss from its definition, over the global batch at once, and its gradient's norm."""

    def __init__(self) -> None:
        self.numbers: dict[str, float] = {}
        self.difference_to_core = 0.0

    def on_train_batch_start(self, trainer: Any, module: Any, batch: list[dict[str, Tensor]], batch_idx: int) -> None:
        chunk = module.model_chunks[0]
        whole = {name: torch.cat([part[name] for part in batch]) for name in batch[0]}
        of_heads_and_model: list[Tensor] = []

        def keep(layer: Any, args: Any, result: tuple[Tensor, Any]) -> None:
            of_heads_and_model.append(result[0].clone())  # Megatron Core's loss writes into the logits

        hook = chunk.output_layer.register_forward_hook(keep)
        chunk.mtp_weights = torch.zeros(DEPTHS)  # what the model adds by itself
        arguments = (whole["tokens"], whole["position_ids"], None)
        chunk(*arguments, labels=whole["labels"], loss_mask=whole["loss_mask"])
        hook.remove()
        *of_heads, of_model = of_heads_and_model

        def mean(logits: Tensor, depth: int) -> Tensor:
            """Position i against labels[i + depth], where that is and counts."""
            logits = logits.transpose(0, 1)[:, : SEQ_LENGTH - depth]
            losses = cross_entropy(logits.flatten(0, 1), whole["labels"][:, depth:].flatten(), reduction="none")
            mask = whole["loss_mask"][:, depth:].flatten()
            return (losses * mask).sum() / mask.sum()

        main = mean(of_model, 0)
        heads = [mean(logits, depth) for depth, logits in enumerate(of_heads, start=1)]
        total = main + FACTOR / DEPTHS * torch.stack(heads).sum()
        gradients = torch.autograd.grad(total, list(chunk.parameters()))
        self.numbers = {
            "loss": main.item(),
            **{f"mtp_{depth}_loss": loss.item() for depth, loss in enumerate(heads, start=1)},
            "grad_norm": float(torch.stack([gradient.square().sum() for gradient in gradients]).sum().sqrt()),
        }
        self.difference_to_core = self._difference_to_core(chunk, whole)

    def _difference_to_core(self, chunk: Any, whole: dict[str, Tensor]) -> float:
        """Largest difference of a gradient to that of Megatron Core's own loss where every token counts."""
        from megatron.core.models.gpt import GPTModel

        counts = SEQ_LENGTH - torch.arange(DEPTHS + 1)
        chunk.mtp_weights = counts[0] / counts[1:]
        arguments = (whole["tokens"], whole["position_ids"], None)
        ones = torch.ones_like(whole["loss_mask"])
        found = []
        for method in (None, types.MethodType(GPTModel._postprocess, chunk)):
            if method is not None:
                chunk._postprocess = method
            losses = chunk(*arguments, labels=whole["labels"], loss_mask=ones)
            found.append(torch.autograd.grad(losses.sum() / ones.sum(), list(chunk.parameters())))
        del chunk._postprocess
        return max(float((ours - core).abs().max()) for ours, core in zip(*found, strict=True))


def first_step() -> tuple[dict[str, float], dict[str, list[float]], float]:
    L.seed_everything(SEED, verbose=False)
    numbers, written = StepNumbers(), Written()
    trainer = build_trainer(numbers, {}, devices=1, max_steps=1, limit_val_batches=0, callbacks=[written])
    loader = DataLoader(Sequences(), batch_size=MICRO_BATCH, shuffle=True)
    trainer.fit(GPTModule(VOCAB_SIZE, SEQ_LENGTH, **MTP, **OPTIMIZER), loader)
    return written.numbers, numbers.numbers(), written.difference_to_core


def test_the_loss_is_the_one_written_out() -> None:
    ((written, found, difference_to_core),) = run_ranks(first_step, 1)
    assert {name: found[name][0] for name in written} == pytest.approx(written, rel=2e-6)
    assert difference_to_core < 1e-7
    assert abs(written["mtp_1_loss"] - written["mtp_2_loss"]) > 1e-4, "equal losses would prove nothing"


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "cp2 dp2 optim": (4, {"context_parallel_size": 2, "data_parallel_sharding_strategy": "optim"}),
    "pp3 heads alone": (3, {"pipeline_model_parallel_size": 3, "pipeline_model_parallel_layout": "Etttt|mm|L"}),
    "pp2 heads with the embedding": (
        2,
        {"pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": "Ettttmm|L"},
    ),
    "pp4 vpp2 heads alone": (
        4,
        {"pipeline_model_parallel_size": 4, "pipeline_model_parallel_layout": "Et|t|t|t|||mm|L"},
    ),
    "tp2 sp pp2 auto": (
        4,
        {
            "tensor_model_parallel_size": 2,
            "sequence_parallel": True,
            "pipeline_model_parallel_size": 2,
            "pipeline_model_parallel_layout": "auto",
        },
    ),
    "pp3 cp2 heads alone": (
        6,
        {
            "pipeline_model_parallel_size": 3,
            "pipeline_model_parallel_layout": ["Ett", "ttmm", "L"],
            "context_parallel_size": 2,
        },
    ),
}

QUICK = ("pp3 heads", "pp2 heads")


@pytest.mark.parametrize(
    "layout",
    [pytest.param(name, marks=[pytest.mark.slow] * (not name.startswith(QUICK))) for name in LAYOUTS],
)
def test_layout_equals_single_process(layout: str) -> None:
    assert_equals_single_process(SHAPE, *LAYOUTS[layout], f"{SHAPE} at {layout}")


@cache
def tied_single_process() -> dict[str, list[float]]:
    return run_ranks(train_with_trainer, 1, SHAPE, 1, {}, TIED)[0]


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["pp3 heads alone", "pp2 heads with the embedding", "pp4 vpp2 heads alone"])
def test_tied_embedding_on_three_stages(layout: str) -> None:
    world_size, strategy = LAYOUTS[layout]
    for rank in run_ranks(train_with_trainer, world_size, SHAPE, world_size, strategy, TIED):
        assert_close(rank, tied_single_process(), layout)


# ---------------------------------------------------------------- outside training


def evaluated(world_size: int, strategy: dict[str, Any], model: dict[str, Any], checkpoint: str) -> dict[str, Any]:
    """Trains two steps, or loads what was, then validates and generates; the heads must not run."""
    L.seed_everything(SEED, verbose=False)
    trainer = build_trainer(StepNumbers(), strategy, devices=world_size, max_steps=2, limit_val_batches=0)
    module: Any = GPTModule(VOCAB_SIZE, SEQ_LENGTH, **{**MTP, **model}, lr=1e-2, init_method_std=0.1)
    if not Path(checkpoint).exists():
        trainer.fit(module, DataLoader(Sequences(), batch_size=MICRO_BATCH, shuffle=True))
        trainer.save_checkpoint(checkpoint)
        load = {}
    else:
        load = {"ckpt_path": checkpoint}
    evaluation = build_trainer(StepNumbers(), strategy, devices=world_size, limit_val_batches=2)
    calls: list[Any] = []

    class Counting(L.Callback):
        def on_validation_start(self, trainer: Any, module: Any) -> None:
            for chunk in module.model_chunks:
                if hasattr(chunk, "mtp"):
                    chunk.mtp.register_forward_hook(lambda *args: calls.append(args))

    evaluation.callbacks.append(Counting())
    evaluation.validate(module, DataLoader(Sequences(9), batch_size=MICRO_BATCH), verbose=False, **load)
    prompts = torch.tensor([[5, 9, 13], [7, 3, 90]])
    return {
        "logged": {name: float(value) for name, value in evaluation.callback_metrics.items()},
        "tokens": module.generate(prompts, 6, temperature=0.0).tolist(),
        "heads ran": len(calls),
        "parameters": module.parameter_counts()["params_total"],
        "flops of heads": module.model_flops().mtp.total,
    }


def test_evaluation_generation_and_checkpoints(tmp_path: Path) -> None:
    """Written by three stages with the heads on their own one, read by one process."""
    path = str(tmp_path / "trained")
    ranks = run_ranks(evaluated, 3, 3, LAYOUTS["pp3 heads alone"][1], TIED, path)
    (single,) = run_ranks(evaluated, 1, 1, {}, TIED, path)
    for rank in ranks:
        assert rank["logged"] == pytest.approx(single["logged"], abs=5e-6)
        assert {**rank, "logged": None} == {**single, "logged": None}
    assert set(single["logged"]) == {"val_loss"}
    assert single["heads ran"] == 0
    assert single["flops of heads"] > 0
    hidden, vocabulary = MTP["hidden_size"], 128
    heads, group_size, ffn = MTP["num_attention_heads"], MTP["num_query_groups"], MTP["ffn_hidden_size"]
    attention = hidden * hidden * 2 + 2 * hidden * hidden * group_size // heads
    layer = attention + 3 * hidden * ffn + 2 * hidden
    head = layer + 2 * hidden * hidden + 3 * hidden  # projection of both inputs, their norms, the last norm
    assert single["parameters"] == vocabulary * hidden + MTP["num_layers"] * layer + hidden + DEPTHS * head


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mtp_num_layers": 0}, "mtp_num_layers must be an integer of at least 1, got 0"),
        ({"mtp_num_layers": -1}, "mtp_num_layers must be an integer of at least 1, got -1"),
        ({"mtp_num_layers": True}, "mtp_num_layers must be an integer of at least 1, got True"),
        ({"mtp_loss_scaling_factor": -0.1}, "mtp_loss_scaling_factor=-0.1 must be a number that isn't negative"),
        (
            {"position_embedding_type": "learned_absolute"},
            "mtp_num_layers=2 needs position_embedding_type='rope', not 'learned_absolute'",
        ),
        ({"mtp_num_layers": 32}, "mtp_num_layers=32 must be less than seq_length=32"),
    ],
)
def test_arguments_that_cannot_be(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GPTModule(VOCAB_SIZE, SEQ_LENGTH, **{**MTP, **arguments})


def resolved_layout(layout: Any, pp: int, vpp: int | None = None, **model: Any) -> list[str]:
    module = GPTModule(VOCAB_SIZE, SEQ_LENGTH, **{**MTP, **model})
    sizes = {"pipeline_model_parallel_size": pp, "virtual_pipeline_model_parallel_size": vpp}
    strategy = MegatronParallelStrategy(**sizes, pipeline_model_parallel_layout=layout)
    trainer = L.Trainer(accelerator="cpu", devices=pp, strategy=strategy, logger=False, enable_checkpointing=False)
    strategy.connect(module)
    strategy.resolve_settings(trainer)
    assert strategy.layout is not None
    return list(strategy.layout.stages)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("Ett|ttL", r"0 x m, but mtp_num_layers=2; add 2, or set mtp_num_layers=None. Stages: \[0\] Ett"),
        ("Ett|ttmL", "1 x m, but mtp_num_layers=2; add 1, or set mtp_num_layers=1"),
        ("Et|t|ttmm|L", "m can't be in a later chunk of pipeline rank 0"),
    ],
)
def test_layouts_that_cannot_be(layout: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolved_layout(layout, 2)


def test_auto_gives_the_heads_their_cost() -> None:
    """A head is a layer and its projection, and one more pass of the output layer, which here costs far less."""
    assert resolved_layout("auto", 2) == ["Ettt", "tmmL"]
    assert resolved_layout("auto", 3) == ["Ett", "tt", "mmL"]
    assert resolved_layout("auto", 2, mtp_num_layers=None) == ["Ett", "ttL"]
    # An output layer that costs 2.9 layers: alone it would go together with the heads, which make it run three times.
    costly = {"num_layers": 8, "make_vocab_size_divisible_by": 2048}
    assert resolved_layout("auto", 3, **costly) == ["Ettttt", "tttmm", "L"]

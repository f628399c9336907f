"""What a run would survive in silence is said once: parameters without a gradient, a loss that isn't finite."""

from __future__ import annotations

import os
import warnings
from typing import Any, override

import lightning.pytorch as L
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lt_parallel.callbacks.overlap import CommunicationOverlap
from lt_parallel.models import GPTModule
from tests.ranks.parity_runs import (
    GPT2,
    MICRO_BATCH,
    OPTIMIZER,
    SEED,
    SEQ_LENGTH,
    VOCAB_SIZE,
    Sequences,
    StepNumbers,
    build_trainer,
)
from tests.ranks.test_plain_modules import Classifier, data
from tests.support.ranks import RankError, init_gloo, run_ranks

PP2: dict[str, Any] = {"pipeline_model_parallel_size": 2}


class HooksLeft(L.Callback):
    """Whether parameters carry hooks of ours after each step."""

    def __init__(self) -> None:
        self.left: list[bool] = []

    @override
    def on_train_batch_end(self, trainer: L.Trainer, module: Any, *args: Any) -> None:
        self.left.append(any(parameter._backward_hooks for parameter in module.parameters()))


def fit(module: L.LightningModule, loader: DataLoader[Any], strategy: dict[str, Any], **options: Any) -> list[str]:
    """Trains two steps; returns what was warned of gradients and losses."""
    hooks = HooksLeft()
    callbacks = [hooks, *options.pop("callbacks", [])]
    trainer = build_trainer(
        StepNumbers(),
        strategy,
        devices=int(os.environ["WORLD_SIZE"]),
        max_steps=2,
        limit_val_batches=0,
        callbacks=callbacks,
        **options,
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, loader)
    assert hooks.left == [False, False]
    texts = [str(warning.message) for warning in caught]
    return [text for text in texts if "got no gradient" in text or "the loss of global step" in text]


# ---------------------------------------------------------------- models of chunks


class Skipping(GPTModule):
    """The MLP of the third layer adds nothing."""

    @override
    def build_chunk(self, config: Any, **place: Any) -> nn.Module:
        chunk: Any = super().build_chunk(config, **place)
        for layer in chunk.decoder.layers:
            if layer.layer_number == 3:
                layer.mlp.register_forward_hook(lambda module, args, result: (torch.zeros_like(result[0]), None))
        return chunk


def fit_gpt(module_class: type[GPTModule], strategy: dict[str, Any], model: dict[str, Any]) -> list[str]:
    L.seed_everything(SEED, verbose=False)
    module = module_class(VOCAB_SIZE, SEQ_LENGTH, **{**GPT2, **OPTIMIZER, **model})
    return fit(module, DataLoader(Sequences(), batch_size=MICRO_BATCH, shuffle=True), strategy)


def test_parameters_of_a_stage_that_take_no_part_are_named_once_as_in_the_whole_model() -> None:
    first, *others = run_ranks(fit_gpt, 2, Skipping, PP2, {"add_bias_linear": False})
    assert others == [[]]
    (text,) = first
    names = "decoder.layers.2.pre_mlp_layernorm.weight, decoder.layers.2.pre_mlp_layernorm.bias, "
    names += "decoder.layers.2.mlp.linear_fc1.weight, decoder.layers.2.mlp.linear_fc2.weight. "
    assert text.startswith(f"4 trained parameters got no gradient in the first step: {names}"), text
    assert "weight decay shrinks it" in text and "requires_grad=False" in text


def test_a_whole_model_with_tied_embeddings_on_a_stage_of_their_own_is_not_warned_of() -> None:
    strategy = {**PP2, "pipeline_model_parallel_layout": "E|tt|tt|L"}
    assert run_ranks(fit_gpt, 2, GPTModule, strategy, {}) == [[], []]


class OneExpert(GPTModule):
    """The router sends every token to the first expert, and the others' code isn't run."""

    @override
    def build_chunk(self, config: Any, **place: Any) -> nn.Module:
        chunk: Any = super().build_chunk(config, **place)
        for layer in chunk.decoder.layers:
            layer.mlp.router.register_forward_hook(self._to_the_first)
            for expert in layer.mlp.experts.local_experts[1:]:
                expert.register_forward_hook(lambda module, args, result: (args[0].detach(), None))
        return chunk

    @staticmethod
    def _to_the_first(module: nn.Module, args: Any, result: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        probabilities, routes = (torch.zeros_like(part) for part in result)
        probabilities[:, 0], routes[:, 0] = result[0].sum(-1), True
        return probabilities, routes


def test_experts_without_a_token_are_not_warned_of() -> None:
    experts = {"num_moe_experts": 4, "moe_router_topk": 1, "moe_router_pre_softmax": True}
    model = {"add_bias_linear": False, "swiglu": True}
    assert run_ranks(fit_gpt, 1, OneExpert, {"config_overrides": experts}, model) == [[]]


class Nothing(Sequences):
    """No token counts."""

    @override
    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {**super().__getitem__(index), "loss_mask": torch.zeros(SEQ_LENGTH)}


def fit_nothing() -> tuple[list[float], list[float], bool]:
    L.seed_everything(SEED, verbose=False)
    numbers = StepNumbers()
    trainer = build_trainer(numbers, PP2, devices=2, max_steps=2, limit_val_batches=0)
    module = GPTModule(VOCAB_SIZE, SEQ_LENGTH, **GPT2, **OPTIMIZER)
    trainer.fit(module, DataLoader(Nothing(), batch_size=MICRO_BATCH))
    return numbers.losses, numbers.grad_norms, all(bool(part.isfinite().all()) for part in module.parameters())


def test_a_step_in_which_no_token_counts_changes_nothing_for_the_worse() -> None:
    assert run_ranks(fit_nothing, 2) == [([0.0, 0.0], [0.0, 0.0], True)] * 2


# ---------------------------------------------------------------- plain modules


class TwoHeads(Classifier):
    """A head that only the second data-parallel rank uses, one that nobody uses, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.sometimes, self.never, self.frozen = nn.Linear(8, 4), nn.Linear(8, 4), nn.Linear(8, 4)
        self.frozen.requires_grad_(False)

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss + self.sometimes(batch[0]).mean() if dist.get_rank() else loss


def fit_plain(overlap: bool) -> tuple[list[str], list[float]]:
    L.seed_everything(SEED, verbose=False)
    module = TwoHeads()
    before = [module.never.weight.detach().clone(), module.frozen.weight.detach().clone()]
    callbacks = [CommunicationOverlap(grad_reduce=True)] if overlap else []
    loader = DataLoader(data(64, 1), batch_size=8, shuffle=True)
    texts = fit(module, loader, {"num_microbatches": 2}, callbacks=callbacks)
    after = [module.never.weight, module.frozen.weight]
    return texts, [float(new.norm() / old.norm()) for new, old in zip(after, before, strict=True)]


def test_a_plain_module_is_told_which_head_nobody_uses_and_what_becomes_of_it() -> None:
    (first, ratios), (second, _) = run_ranks(fit_plain, 2, False)
    assert not second
    (text,) = first
    assert text.startswith("2 trained parameters got no gradient in the first step: never.weight, never.bias. "), text
    # AdamW of rate 0.01 and decay 0.1, twice; the frozen one stays.
    assert ratios == [pytest.approx((1 - 0.001) ** 2, abs=1e-6), 1.0]


def test_an_overlapped_reduction_that_would_wait_in_vain_is_an_error() -> None:
    words = (
        r"ValueError: overlap_grad_reduce .* on some rank 4 .*: sometimes\.weight, .* never\.bias; .* leave grad_reduce"
    )
    with pytest.raises(RankError, match=words):
        run_ranks(fit_plain, 2, True, timeout_s=60)


# ---------------------------------------------------------------- label smoothing


class Smoothed(GPTModule):
    """A user's own loss, by Megatron Core's function, over the padded vocabulary."""

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch, labels=False)

    @override
    def loss_function(self, output: Tensor, batch: Any) -> Any:
        from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

        logits = output.transpose(0, 1).contiguous()
        losses = vocab_parallel_cross_entropy(logits, batch["labels"].t().contiguous(), 0.1)
        mask = batch["loss_mask"]
        total, count = (losses.t() * mask).sum(), mask.sum()
        return total, count, {"train_loss": (total, count)}


def test_label_smoothing_over_the_padding_is_no_number_and_said_once() -> None:
    (texts,) = run_ranks(fit_gpt, 1, Smoothed, {}, {})
    (text,) = texts
    assert text.startswith("the loss of global step 0 is nan, its gradient norm 1."), text
    assert "label smoothing" in text and "minus infinity" in text
    with pytest.raises(TypeError, match="label_smoothing"):
        GPTModule(VOCAB_SIZE, label_smoothing=0.1)  # type: ignore[call-arg]


def smoothed_by_megatron(smoothing: float) -> list[float]:
    """Losses of Megatron Core's function over a vocabulary of 12 without padding, cut over the ranks."""
    from megatron.core import parallel_state, tensor_parallel

    init_gloo()
    size, rank = dist.get_world_size(), dist.get_rank()
    parallel_state.initialize_model_parallel(size, create_gloo_process_groups=False)
    logits, labels = smoothing_inputs()
    part = logits.chunk(size, -1)[rank].contiguous().float()
    losses = tensor_parallel.vocab_parallel_cross_entropy(part, labels, smoothing)
    return losses.flatten().tolist()


def smoothing_inputs() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(SEED)
    logits = torch.randn(5, 1, 12, generator=generator, dtype=torch.float64)
    return logits, torch.randint(12, (5, 1), generator=generator)


def test_why_label_smoothing_is_not_offered() -> None:
    """Megatron Core averages over the rank's own columns only. When that is mended, it can be offered."""
    logits, labels = smoothing_inputs()

    def expected(smoothing: float) -> list[float]:
        shared = smoothing * 12 / 11  # Megatron Core spreads it over the other 11 columns, PyTorch over all 12
        return F.cross_entropy(logits[:, 0], labels[:, 0], label_smoothing=shared, reduction="none").tolist()

    assert run_ranks(smoothed_by_megatron, 1, 0.1)[0] == pytest.approx(expected(0.1), abs=1e-6)
    for losses in run_ranks(smoothed_by_megatron, 2, 0.0):
        assert losses == pytest.approx(expected(0.0), abs=1e-6)
    first, second = run_ranks(smoothed_by_megatron, 2, 0.1)
    assert max(abs(a - b) for a, b in zip(first, second, strict=True)) > 0.01, "ranks agree now"

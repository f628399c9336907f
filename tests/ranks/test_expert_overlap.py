"""Exchanging tokens of one micro batch beside another one's compute, and what is recomputed: the same, bit by bit."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch.utils.data import DataLoader

from lt_parallel import ActivationRecompute, CommunicationOverlap, ExpertDispatch, GPTModule
from tests.ranks import deepep_over_gloo
from tests.ranks.parity_runs import (
    MICRO_BATCH,
    MOE_SHAPES,
    OPTIMIZER,
    SEED,
    SEQ_LENGTH,
    VOCAB_SIZE,
    Sequences,
    StepNumbers,
    build_trainer,
)
from tests.support.ranks import run_ranks

EP2 = {"expert_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
INSIDE = ("a2a_overlap_attn", "a2a_overlap_post_attn", "a2a_overlap_mlp")

LAYOUTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "ep2": ("mixtral", 2, EP2),
    "ep2 by flex": ("mixtral", 2, EP2),
    "ep2 pp2 vpp2": ("mixtral", 4, {**EP2, **PP2, "virtual_pipeline_model_parallel_size": 2}),
    # A dense first layer, a shared expert, latent attention, and a head of multi-token prediction on the last stage.
    "ep2 pp2 Et|t|t|tmL": ("deepseek_v3", 4, {**EP2, **PP2, "pipeline_model_parallel_layout": "Et|t|t|tmL"}),
    "ep2 tp2 sp optim": (
        "qwen3_moe",
        4,
        {
            **EP2,
            "tensor_model_parallel_size": 2,
            "sequence_parallel": True,
            "expert_tensor_parallel_size": 2,
            "data_parallel_sharding_strategy": "optim",
        },
    ),
}
STEPS = 3


class Work(L.Callback):
    """Counts what this rank's layers and collectives did in training, and in which order experts ran."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.order = ""

    def on_train_start(self, trainer: Any, module: Any) -> None:
        from megatron.core.tensor_parallel import mappings

        layers = [layer for chunk in module.model_chunks for layer in chunk.decoder.layers]
        layers += [
            head.mtp_model_layer for chunk in module.model_chunks for head in getattr(chunk, "mtp", Empty).layers
        ]
        for layer in layers:
            self._watch("attention", layer.self_attention)
            if layer.is_moe_layer:
                self._watch("norm", layer.pre_mlp_layernorm)
                self._watch("router", layer.mlp.router)
                self._watch("experts", layer.mlp.experts)
                layer.mlp.experts.register_forward_hook(self._note_order)
        self._count_collective(torch.distributed, "all_to_all_single")
        self._count_collective(mappings, "dist_all_gather_func")  # the numbers of tokens that will be sent

    def _watch(self, name: str, module: Any) -> None:
        module.register_forward_hook(lambda *args: self.calls.update([name]))

    def _note_order(self, module: Any, args: Any, output: Any) -> None:
        self.order += "f"
        if output[0].requires_grad:
            output[0].register_hook(lambda grad: setattr(self, "order", self.order + "b"))

    def _count_collective(self, where: Any, name: str) -> None:
        real = getattr(where, name)

        def counted(*args: Any, **options: Any) -> Any:
            self.calls[name] += 1
            return real(*args, **options)

        setattr(where, name, counted)  # the process ends with the run


class Empty:
    layers = ()


class SavedBytes(L.Callback):
    """What autograd keeps of a step's forward pass, each storage once."""

    def __init__(self) -> None:
        self.total = 0

    def on_train_batch_start(self, trainer: Any, module: Any, *args: Any) -> None:
        forward = True

        def end_with_gradients(layer: Any, inputs: Any, output: Any) -> None:
            def end(gradient: torch.Tensor) -> None:
                nonlocal forward
                forward = False

            if output[0].requires_grad:
                output[0].register_hook(end)

        module.model_chunks[-1].output_layer.register_forward_hook(end_with_gradients)
        seen: set[int] = set()
        kept: list[torch.Tensor] = []

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if forward and storage.data_ptr() not in seen and not isinstance(tensor, torch.nn.Parameter):
                seen.add(storage.data_ptr())
                kept.append(tensor)  # else its address could be another tensor's later
                self.total += storage.nbytes()
            return tensor

        self._hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
        self._hooks.__enter__()

    def on_train_batch_end(self, *args: Any) -> None:
        self._hooks.__exit__(None, None, None)


def trained(
    layout: str, overlap: bool, modules: tuple[str, ...], saved_bytes: bool = False
) -> tuple[dict[str, list[float]], dict[str, int], str, int]:
    shape, world_size, strategy = LAYOUTS[layout]
    L.seed_everything(SEED, verbose=False)
    numbers, work, saved = StepNumbers(), Work(), SavedBytes()
    if flex := layout.endswith("flex"):
        deepep_over_gloo.install()
    callbacks: list[L.Callback] = [ExpertDispatch("flex" if flex else "alltoall"), saved if saved_bytes else work]
    if overlap:
        callbacks.append(CommunicationOverlap(moe_expert_parallel_comm=True))
    if modules:
        callbacks.append(ActivationRecompute(modules=modules))
    trainer = build_trainer(
        numbers,
        {**strategy, "num_microbatches": 1} if saved_bytes else strategy,
        devices=world_size,
        precision="bf16-mixed",
        max_steps=1 if saved_bytes else STEPS,
        limit_val_batches=1,
        callbacks=callbacks,
    )
    model = MOE_SHAPES[shape]
    model = {**model, "moe": {**model["moe"], "moe_router_dtype": "fp32" if flex else None}}
    module = GPTModule(VOCAB_SIZE, SEQ_LENGTH, **model, **OPTIMIZER)
    loaders = [DataLoader(Sequences(), batch_size=MICRO_BATCH, shuffle=shuffle) for shuffle in (True, False)]
    trainer.fit(module, *loaders)
    trainer.validate(module, loaders[1], verbose=False)  # not by the combined schedule
    return numbers.numbers(), dict(work.calls), work.order, saved.total


@cache
def plainly(layout: str) -> tuple[dict[str, list[float]], dict[str, int], str, int]:
    return run_ranks(trained, LAYOUTS[layout][1], layout, False, ())[0]


def _cases() -> list[Any]:
    """Overlap alone and with all three, everywhere; one by one, and outside of the overlap, at one layout."""
    quick = {("ep2", True, INSIDE), ("ep2 pp2 Et|t|t|tmL", True, INSIDE), ("ep2", False, ("routed_experts",))}
    cases = [(layout, True, modules) for layout in LAYOUTS for modules in ((), INSIDE)]
    cases += [("ep2", True, (module,)) for module in INSIDE]
    cases += [(layout, False, ("routed_experts",)) for layout in LAYOUTS]
    cases += [("ep2", True, ("routed_experts", "core_attn")), ("ep2", True, ("moe_act", "layernorm"))]
    return [
        pytest.param(
            *case, marks=[pytest.mark.slow] * (case not in quick), id=f"{case[0]} {case[1]} {' '.join(case[2])}"
        )
        for case in cases
    ]


@pytest.mark.parametrize(("layout", "overlap", "modules"), _cases())
def test_numbers_are_equal_bit_by_bit(layout: str, overlap: bool, modules: tuple[str, ...]) -> None:
    found, _, _, _ = run_ranks(trained, LAYOUTS[layout][1], layout, overlap, modules)[0]
    expected, _, _, _ = plainly(layout)
    assert len(expected["loss"]) == STEPS and expected["val_loss"]
    assert found == expected


#: What runs a second time, by module.
TWICE = {
    (): (),
    ("a2a_overlap_attn",): ("attention",),
    ("a2a_overlap_post_attn",): ("norm", "router"),
    ("a2a_overlap_mlp",): ("experts",),
    INSIDE: ("attention", "norm", "router", "experts"),
}


@pytest.mark.parametrize("modules", [pytest.param(each, marks=[pytest.mark.slow] * (each != INSIDE)) for each in TWICE])
def test_what_is_recomputed_runs_twice_and_nothing_is_sent_again(modules: tuple[str, ...]) -> None:
    _, found, order, _ = run_ranks(trained, 2, "ep2", True, modules)[0]
    _, once, order_before, _ = plainly("ep2")
    steps_of_layers = STEPS * 4 * 4  # micro batches of a rank, layers
    for name in ("attention", "norm", "router", "experts"):
        assert found[name] == once[name] + (steps_of_layers if name in TWICE[modules] else 0), name
    for collective in ("all_to_all_single", "dist_all_gather_func"):
        assert found[collective] == once[collective] > 0
    # Without the overlap four layers run forward and then four backward; with it, layers of two micro batches in turn.
    training = 2 * steps_of_layers
    assert order_before[:training] == "ffffbbbb" * (training // 8)
    if "experts" not in TWICE[modules]:
        assert order[: training // STEPS] == "ffff" + "bf" * 12 + "bbbb"


@pytest.mark.slow
def test_less_is_kept_for_the_backward_pass() -> None:
    kept = {modules: run_ranks(trained, 2, "ep2", True, modules, True)[0][3] for modules in TWICE}
    assert all(kept[modules] < kept[()] for modules in TWICE if modules)
    assert kept[INSIDE] == min(kept.values())
    tokens, hidden, experts_wide, layers = 2 * SEQ_LENGTH, 64, 96, 4
    # Of an expert's two projections at least the gated inner activations aren't kept: 3 x width for each token it gets.
    assert kept[()] - kept[("a2a_overlap_mlp",)] >= layers * tokens * 3 * experts_wide * 2
    # Of attention at least queries, keys, values and output, and the norm's result.
    assert kept[()] - kept[("a2a_overlap_attn",)] >= layers * tokens * 4 * hidden * 2


def returns_something_else() -> None:
    class Careless(GPTModule):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx), batch_idx

    callbacks = [ExpertDispatch("alltoall"), CommunicationOverlap(moe_expert_parallel_comm=True)]
    trainer = build_trainer(StepNumbers(), EP2, devices=2, precision="bf16-mixed", callbacks=callbacks)
    module = Careless(VOCAB_SIZE, SEQ_LENGTH, **MOE_SHAPES["mixtral"])
    trainer.fit(module, DataLoader(Sequences(), batch_size=MICRO_BATCH))


def test_a_step_must_return_what_the_chunk_returned() -> None:
    with pytest.raises(Exception, match=r"training_step must return what the active chunk returned.*returned tuple"):
        run_ranks(returns_something_else, 2)

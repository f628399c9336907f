"""`generate` and `predict_step`: the same tokens at every layout as a plain loop over full logits on one process."""

from __future__ import annotations

from functools import cache
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lt_parallel.models import GPTModule
from tests.ranks.parity_runs import GPT2, MICRO_BATCH, SEED, SHAPES, VOCAB_SIZE, Sequences, StepNumbers, build_trainer
from tests.support.ranks import run_ranks

SEQ_LENGTH = 32
NEW = 6
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {}),
    "dp2 optim": (2, {"data_parallel_sharding_strategy": "optim"}),
    "tp2 sp": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "pp2": (2, {"pipeline_model_parallel_size": 2}),
    "pp2 vpp2": (2, {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}),
    "tp2 pp2": (4, {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}),
}


def prompts(length: int) -> Tensor:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(0, VOCAB_SIZE, (3, length), generator=generator)


def trained(world_size: int, strategy: dict[str, Any], shape: str = "llama") -> tuple[L.Trainer, GPTModule]:
    """A model after a few steps at a high rate: its logits lie far apart, so rounding doesn't decide."""
    L.seed_everything(SEED, verbose=False)
    trainer = build_trainer(StepNumbers(), strategy, devices=world_size, max_steps=6, limit_val_batches=0)
    module = GPTModule(
        VOCAB_SIZE,
        SEQ_LENGTH,
        **SHAPES[shape],
        lr=1e-2,
        min_lr=1e-2,
        lr_decay_iters=50,
        max_new_tokens=4,
        temperature=0,
    )
    trainer.fit(module, DataLoader(Sequences(), batch_size=MICRO_BATCH, shuffle=True))
    return trainer, module


def generated(world_size: int, strategy: dict[str, Any]) -> dict[str, Any]:
    trainer, module = trained(world_size, strategy)
    result: dict[str, Any] = {"greedy": {}}
    for length in (1, 5, 8):  # odd lengths can't be cut evenly by sequence parallelism
        result["greedy"][length] = module.generate(prompts(length), NEW, temperature=0)
    assert module.training, "generation gives the mode back"
    result["sampled"] = module.generate(prompts(4), NEW, temperature=0.8, top_k=5, seed=11)
    result["again"] = module.generate(prompts(4), NEW, temperature=0.8, top_k=5, seed=11)
    result["other seed"] = module.generate(prompts(4), NEW, temperature=0.8, top_k=5, seed=12)
    loader = DataLoader([{"tokens": row} for row in prompts(7)], batch_size=2)
    result["predicted"] = trainer.predict(module, loader)
    return result


def reference() -> dict[str, Any]:
    """One process, Megatron Core's model called by itself, all of its logits, no padding hidden and no cache."""
    _, module = trained(1, {})
    assert module.model_chunks is not None
    (chunk,) = module.model_chunks
    chunk.eval()

    def logits_of(tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1]).expand_as(tokens)
        with torch.no_grad():
            return chunk(tokens, positions, None)

    def greedy(tokens: Tensor, count: int) -> Tensor:
        for _ in range(count):
            best = logits_of(tokens)[:, -1, :VOCAB_SIZE].argmax(dim=-1, keepdim=True)
            tokens = torch.cat([tokens, best], dim=1)
        return tokens

    tokens = greedy(prompts(8), NEW)
    top = logits_of(tokens)[..., :VOCAB_SIZE].topk(2).values
    return {
        "greedy": {length: greedy(prompts(length), NEW) for length in (1, 5, 8)},
        "predicted": greedy(prompts(7), 4)[:, 7:],
        "padding": logits_of(tokens)[..., VOCAB_SIZE:],
        "margin": float((top[..., 0] - top[..., 1]).min()),
        "top5": [set(row.tolist()) for row in logits_of(prompts(4))[:, -1, :VOCAB_SIZE].topk(5).indices],
    }


@cache
def expected() -> dict[str, Any]:
    return run_ranks(reference, 1)[0]


@cache
def at(layout: str) -> list[dict[str, Any]]:
    world_size, strategy = LAYOUTS[layout]
    return run_ranks(generated, world_size, world_size, strategy)


def test_the_reference_is_decided_and_its_padding_hidden() -> None:
    assert expected()["margin"] > 1e-3, "layouts differ by rounding, which must not decide"
    assert torch.isneginf(expected()["padding"]).all()
    assert expected()["padding"].shape[-1] == 28


@pytest.mark.parametrize("layout", LAYOUTS)
def test_greedy_equals_a_plain_loop(layout: str) -> None:
    for rank, found in enumerate(at(layout)):
        for length, tokens in expected()["greedy"].items():
            assert torch.equal(found["greedy"][length], tokens), (rank, length)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sampling_is_reproducible_and_equal_everywhere(layout: str) -> None:
    one_process = at("one process")[0]["sampled"]
    for rank, found in enumerate(at(layout)):
        assert torch.equal(found["sampled"], one_process), rank
        assert torch.equal(found["sampled"], found["again"]), rank
        assert not torch.equal(found["sampled"], found["other seed"]), rank


def test_top_k_samples_only_among_the_likeliest() -> None:
    for name in ("sampled", "other seed"):
        for row, allowed in zip(at("one process")[0][name], expected()["top5"], strict=True):
            assert int(row[4]) in allowed


@pytest.mark.parametrize("layout", LAYOUTS)
def test_predict_returns_the_continuations(layout: str) -> None:
    world_size, strategy = LAYOUTS[layout]
    replicas = (
        world_size // strategy.get("tensor_model_parallel_size", 1) // strategy.get("pipeline_model_parallel_size", 1)
    )
    shares = [torch.cat(found["predicted"]) for found in at(layout)]
    assert shares[0].shape[1] == 4
    if replicas == 1:
        for share in shares:
            assert torch.equal(share, expected()["predicted"])
    else:  # each replica continues every second prompt, and none is done twice
        for rank, share in enumerate(shares):
            assert torch.equal(share, expected()["predicted"][rank::2]), rank


def untrained(kind: str) -> Any:
    """Sampling from a model that knows nothing, and calls that are wrong."""
    L.seed_everything(SEED, verbose=False)
    trainer = build_trainer(
        StepNumbers(), {"tensor_model_parallel_size": 2}, devices=2, max_steps=1, limit_val_batches=0
    )
    module = GPTModule(VOCAB_SIZE, 16, **GPT2)
    loader = DataLoader([{"tokens": torch.zeros(3, dtype=torch.long)}])
    module.predict_step = lambda *args: None
    trainer.predict(module, loader)
    if kind == "sample":
        return module.generate(torch.zeros(64, 1, dtype=torch.long), 15, temperature=100.0)
    errors = {}
    for name, tokens, options in (
        ("token too large", torch.full((1, 2), VOCAB_SIZE), {"max_new_tokens": 1}),
        ("token negative", torch.full((1, 2), -1), {"max_new_tokens": 1}),
        ("too long", torch.zeros(1, 10, dtype=torch.long), {"max_new_tokens": 7}),
        ("no prompt", torch.zeros(1, 0, dtype=torch.long), {"max_new_tokens": 1}),
        ("one dimension", torch.zeros(3, dtype=torch.long), {"max_new_tokens": 1}),
        ("negative temperature", torch.zeros(1, 1, dtype=torch.long), {"max_new_tokens": 1, "temperature": -1.0}),
        ("negative top_k", torch.zeros(1, 1, dtype=torch.long), {"max_new_tokens": 1, "top_k": -1}),
        ("negative count", torch.zeros(1, 1, dtype=torch.long), {"max_new_tokens": -1}),
    ):
        try:
            module.generate(tokens, **options)
        except ValueError as error:
            errors[name] = str(error)
    return errors


def test_padded_ids_are_never_sampled() -> None:
    found, other = run_ranks(untrained, 2, "sample")
    assert torch.equal(found, other)
    assert found.shape == (64, 16)
    # At this temperature all ids are nearly equally likely: of 960 draws, 28/128 would be padding if it counted.
    assert int(found.max()) < VOCAB_SIZE
    assert len(found[:, 1:].unique()) > 90, "and the whole vocabulary is drawn from"


def test_wrong_calls_say_what_is_wrong() -> None:
    for errors in run_ranks(untrained, 2, "errors"):
        assert "[0, vocab_size=100); found 100 to 100" in errors["token too large"]
        assert "found -1 to -1" in errors["token negative"]
        assert "10 prompt tokens + max_new_tokens=7 = 17 exceed max_position_embeddings=16" in errors["too long"]
        assert "shape [b, s] with s > 0, not (1, 0)" in errors["no prompt"]
        assert "not (3,)" in errors["one dimension"]
        assert "temperature=-1.0" in errors["negative temperature"]
        assert "top_k=-1" in errors["negative top_k"]
        assert "max_new_tokens=-1" in errors["negative count"]

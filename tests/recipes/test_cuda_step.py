"""A training step of the tiny recipes on CUDA devices that aren't there: devices and dtypes, not numbers.

`Trainer.fit` runs on fake ranks (`tests/support/fake_world.py`), from the launcher's checks to the optimizer's step.
"""

from __future__ import annotations

import pytest

from tests.recipes.contents import SIBLINGS, arguments, rank_at, sizes
from tests.recipes.fake_recipes import FAULTS, Trained, train_step
from tests.support.fake_world import FakeRankError, FakeWorld

#: Attention and expert layers on each pipeline rank, heads for multi-token prediction among them.
WITH_EXPERTS = {
    "mixtral_8x7b_tiny": [(2, 2), (2, 2)],
    "qwen3_30b_a3b_tiny": [(4, 4)],
    "deepseek_v3_tiny": [(3, 2), (2, 2)],
}
#: Layers on 4 pipeline ranks, of which two are neither first nor last: as many for each virtual stage as in the recipe.
FOUR_STAGES = {"llama3_70b_tiny": 8, "gpt3_175b_tiny": 12}


def _marks(recipe: str) -> list[pytest.MarkDecorator]:
    return [] if recipe == "qwen3_30b_a3b_tiny" else [pytest.mark.slow]


def _step(world: FakeWorld, recipe: str, pp: int, stages: int | None = None, fault: str | None = None) -> Trained:
    of, longer = sizes(recipe), []
    if stages is not None:
        of = sizes(recipe, pipeline_model_parallel_size=stages, world_size=2 * of.world_size)
        longer = [
            "--trainer.num_nodes=2",
            f"--trainer.strategy.pipeline_model_parallel_size={stages}",
            f"--model.num_layers={FOUR_STAGES[recipe]}",
        ]
    result: Trained = world.run_rank(train_step, rank_at(of, pp, -1), of.world_size, recipe, fault, *longer)
    return result


def _check(result: Trained, recipe: str, is_last: bool, layers_per_rank: int, with_experts: int = 0) -> None:
    strategy, micro_batch = arguments(recipe, "strategy"), arguments(recipe, "data")["micro_batch_size"]
    num_microbatches = strategy["global_batch_size"] // (micro_batch * sizes(recipe).data_parallel_size)
    passes = layers_per_rank * num_microbatches
    in_a_ring = "context_parallel_size" in strategy
    assert result.steps == 1
    assert result.calls == {
        "forward": passes,
        **({"ring_attention": passes} if in_a_ring else {}),
        **({"loss_function": num_microbatches} if is_last else {}),
        "finish_grad_sync": strategy.get("virtual_pipeline_model_parallel_size", result.calls["finish_grad_sync"]),
        **({"grouped_linear": 2 * with_experts * num_microbatches} if with_experts else {}),
        "finalize_model_grads": 1,
        # Experts, which have other replicas, are stepped by an optimizer of their own.
        "step_with_ready_grads": 2 if with_experts else 1,
        "step": 2 if with_experts else 1,
    }
    assert result.places["parameters"] == {("cuda:0", "torch.bfloat16")}
    assert result.places["gradients"] == result.places["stepped"] == {("cuda:0", "torch.float32")}
    assert result.metrics >= {"train_loss", "grad_norm", "lr"}


def test_context_parallel_step(fake_world: FakeWorld) -> None:
    recipe = "llama3_8b_128k_tiny"
    _check(_step(fake_world, recipe, 0), recipe, is_last=True, layers_per_rank=2)


@pytest.mark.parametrize("pp", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_interleaved_pipeline_step(fake_world: FakeWorld, pp: int) -> None:
    recipe = "llama3_70b_tiny"
    _check(_step(fake_world, recipe, pp), recipe, is_last=pp == 1, layers_per_rank=2)


@pytest.mark.parametrize(
    ("recipe", "pp"),
    [
        pytest.param(recipe, pp, marks=_marks(recipe))
        for recipe, ranks in WITH_EXPERTS.items()
        for pp in range(len(ranks))
    ],
)
def test_expert_parallel_step(fake_world: FakeWorld, recipe: str, pp: int) -> None:
    """Every expert gets as many tokens: the host reads how many, and fake tensors don't say (`_evenly_routed`)."""
    layers, with_experts = WITH_EXPERTS[recipe][pp]
    is_last = pp == len(WITH_EXPERTS[recipe]) - 1
    _check(_step(fake_world, recipe, pp), recipe, is_last, layers, with_experts)


@pytest.mark.slow
@pytest.mark.parametrize("pp", [0, 1, 3])
@pytest.mark.parametrize("recipe", FOUR_STAGES)
def test_steps_of_the_first_a_middle_and_the_last_stage(fake_world: FakeWorld, recipe: str, pp: int) -> None:
    layers = FOUR_STAGES[recipe] // 4
    _check(_step(fake_world, recipe, pp, stages=4), recipe, is_last=pp == 3, layers_per_rank=layers)


def test_a_step_of_every_tiny_recipe_is_taken_somewhere_here() -> None:
    assert set(SIBLINGS.values()) == {"llama3_8b_128k_tiny", *FOUR_STAGES, *WITH_EXPERTS}


QUICK = ("CPU tensor in a layer", "CPU tensor in a backward")
EXPECTED = {
    "CPU tensor in a layer": ("FakeTensorDeviceMismatchError", "at least two devices"),
    "wrong dtype in a layer": ("RuntimeError", "same dtype"),
    "CPU tensor in a collective": ("RuntimeError", "no backend type associated with device type cpu"),
    "CPU tensor in a backward": ("RuntimeError", "expects a gradient on cuda:0, but got one on cpu"),
    "wrong dtype in experts": ("RuntimeError", "same dtype"),
}


@pytest.mark.parametrize(
    "fault", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in EXPECTED]
)
def test_a_mistake_is_seen(fake_world: FakeWorld, fault: str) -> None:
    type_name, message = EXPECTED[fault]
    with pytest.raises(FakeRankError, match=message) as error:
        _step(fake_world, "qwen3_30b_a3b_tiny" if "experts" in fault else "llama3_8b_128k_tiny", 0, fault=fault)
    assert error.value.type_name == type_name


def test_every_mistake_is_tried() -> None:
    assert set(EXPECTED) == set(FAULTS)

"""Every pipeline stage of every recipe is built at the recipe's own number of ranks, and all parameters are counted."""

from __future__ import annotations

import math

import pytest

from lt_parallel.models.counting import active_parameters, is_routed
from lt_parallel.topology import ParallelSizes, padded_vocab_size
from tests.recipes.contents import RECIPES, arguments, content, rank_at, sizes
from tests.recipes.fake_recipes import Stage, build_stage, build_stage_as_with_deepep
from tests.recipes.formula import Counts, counts, dimensions
from tests.support.fake_world import FakeRankError, FakeWorld

#: GPT-2: its released weights; Llama 3: the released weights; GPT-3: Brown et al. 2020, appendix D, in millions there;
#: Mixtral: Mistral AI's announcement, https://mistral.ai/news/mixtral-of-experts; Qwen3: the card of
#: Qwen/Qwen3-30B-A3B; DeepSeek-V3: README_WEIGHTS.md of deepseek-ai/DeepSeek-V3, without the head for the token after
#: next (the 685e9 on the hub have it, and its copies of the embedding and the output layer).
PUBLISHED = {
    "gpt2_124m": 124_439_808,
    "llama3_8b": 8_030_261_248,
    "llama3_8b_128k": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "gpt3_175b": 174_600_000_000,
    "mixtral_8x7b": 46_700_000_000,
    "qwen3_30b_a3b": 30_500_000_000,
    "deepseek_v3": 671_000_000_000,
}
#: What a token visits, from the same places, and the last digit that is published. Qwen and DeepSeek have dropped what
#: comes after it (3.35e9 and 37.6e9): that is more than 1% off, so these are compared to the digit.
PUBLISHED_ACTIVE = {
    "mixtral_8x7b": (12_900_000_000, 100_000_000),
    "qwen3_30b_a3b": (3_300_000_000, 100_000_000),
    "deepseek_v3": (37_000_000_000, 1_000_000_000),
}
#: Of multi-token prediction heads, without embedding and output layer: README_WEIGHTS.md again.
PUBLISHED_HEADS = {"deepseek_v3": 11_500_000_000}
#: The others are slow only in sum: a rank takes a second or two.
QUICK = ("gpt2_124m", "llama3_70b", "qwen3_30b_a3b")
VOCABULARY_MATRICES = ("embedding.word_embeddings.weight", "output_layer.weight")


def _counted(stages: list[Stage], vocab_size: int) -> Counts:
    """Parameters of the whole model: each name once, at its global shape, without the vocabulary's padding."""
    shapes = {each.key: each.global_shape for stage in stages for each in stage.parameters}
    numbers = {key: math.prod(shape) for key, shape in shapes.items()}
    padding = padded_vocab_size(vocab_size) - vocab_size
    heads = sum(number for key, number in numbers.items() if key.startswith("mtp."))
    return Counts(
        main=sum(numbers.values())
        - heads
        - sum(padding * shapes[name][1] for name in VOCABULARY_MATRICES if name in shapes),
        heads=heads,
        routed=sum(number for key, number in numbers.items() if is_routed(key) and not key.startswith("mtp.")),
    )


def _check_parts(stage: Stage, of: ParallelSizes) -> None:
    """What Megatron Core marks as cut is a tensor-parallel share, at this rank's place; the rest is whole.

    Of experts that tokens are sent to a rank has its share too, and the matrices of each are cut apart from the others.
    """
    local: dict[str, int] = {}
    for each in stage.parameters:
        local[each.key] = local.get(each.key, 0) + each.local
        offset, first = each.offset, stage.coordinates["tp"] == 0
        if is_routed(each.key):
            expert, *offset = each.offset
            assert expert // (each.global_shape[0] // of.expert_model_parallel_size) == stage.coordinates["ep"]
            first = stage.coordinates["etp"] == 0
        if not each.is_cut or (first and "linear_fc1" not in each.key):
            assert not any(offset), each
        elif not first:
            assert any(offset), each
    tp, etp, ep = (
        of.tensor_model_parallel_size,
        of.effective_expert_tensor_parallel_size,
        of.expert_model_parallel_size,
    )
    for each in stage.parameters:
        shares = ep * etp if is_routed(each.key) else tp if each.is_cut else 1
        assert local[each.key] * shares == math.prod(each.global_shape), each
    assert stage.numbers == sum(local.values())


def _build(world: FakeWorld, recipe: str, of: ParallelSizes) -> list[list[Stage]]:
    """By place in the pipeline: a rank that is first on the axes that cut a layer, then one that is last."""
    last_tp, has_experts = of.tensor_model_parallel_size - 1, "moe" in arguments(recipe, "model")
    places = [(0, 0 if has_experts else -1), (last_tp, -1)][: 2 if last_tp or has_experts else 1]
    stages = []
    for pp in range(of.pipeline_model_parallel_size):
        stages.append([])
        for tp, dp in places:
            rank = rank_at(of, pp, tp, dp)
            stage = world.run_rank(build_stage_as_with_deepep, rank, of.world_size, recipe)
            expert = of.expert_coordinates(rank)
            assert stage.coordinates == {"pp": pp, "tp": tp, "etp": expert.etp, "ep": expert.ep}
            stages[pp].append(stage)
    return stages


@pytest.mark.parametrize(
    "recipe", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in RECIPES]
)
def test_all_stages_together_are_the_model(recipe: str, fake_world: FakeWorld) -> None:
    of, half = sizes(recipe), content(recipe)["trainer"].get("precision", "32-true") != "32-true"
    stages = _build(fake_world, recipe, of)
    for stage in (each for ranks in stages for each in ranks):
        assert stage.devices == {"cuda:0"}
        assert stage.dtypes == {"torch.bfloat16" if half else "torch.float32"}
        _check_parts(stage, of)
    for ranks in stages:
        assert len({each.numbers for each in ranks}) == 1
    given = dimensions(recipe)
    named = [each.key for first, *_ in stages for each in {each.key: each for each in first.parameters}.values()]
    repeated = {name for name in named if named.count(name) > 1}
    shared = not given.get("untie_embeddings_and_output_weights") or given.get("mtp_num_layers")
    assert repeated == ({VOCABULARY_MATRICES[0]} if shared and len(stages) > 1 else set())
    found = _counted([each for ranks in stages for each in ranks], given["vocab_size"])
    assert found == counts(recipe)


@pytest.mark.parametrize("recipe", PUBLISHED)
def test_the_large_recipes_have_the_published_size(recipe: str) -> None:
    """By the numbers that the stages add up to (above)."""
    found = counts(recipe)
    assert found.main == pytest.approx(PUBLISHED[recipe], rel=0.01)
    assert found.heads == pytest.approx(PUBLISHED_HEADS.get(recipe, 0), rel=0.01)
    moe = arguments(recipe, "model").get("moe")
    assert (moe is not None) == (recipe in PUBLISHED_ACTIVE)
    if moe is not None:
        published, last_digit = PUBLISHED_ACTIVE[recipe]
        active = active_parameters(found.main, found.routed, moe["num_moe_experts"], moe["moe_router_topk"])
        assert abs(active - published) < last_digit


def test_the_large_recipes_have_a_published_size() -> None:
    assert set(PUBLISHED) == {recipe for recipe in RECIPES if not recipe.endswith("_tiny")}


def test_a_rank_that_cannot_be_built_says_why(fake_world: FakeWorld) -> None:
    with pytest.raises(FakeRankError, match=r"num_layers=81 must be divisible by .*\(= 20\)") as error:
        fake_world.run_rank(build_stage, 0, 256, "llama3_70b", "--model.num_layers=81")
    assert error.value.type_name == "ValueError"


def test_deepseek_v3_names_the_library_that_it_needs(fake_world: FakeWorld) -> None:
    with pytest.raises(FakeRankError, match="needs DeepEP, which isn't installed; build it") as error:
        fake_world.run_rank(build_stage, 0, 1024, "deepseek_v3")
    assert error.value.type_name == "ImportError"

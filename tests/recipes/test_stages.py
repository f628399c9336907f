"""Every pipeline stage of every recipe is built at the recipe's own number of ranks, and all parameters are counted."""

from __future__ import annotations

import math
from typing import Any

import pytest

from lt_parallel.topology import padded_vocab_size
from tests.recipes.contents import RECIPES, arguments, content, rank_at, sizes
from tests.recipes.fake_recipes import Stage, build_stage
from tests.support.fake_world import FakeRankError, FakeWorld

#: GPT-2: its released weights; Llama 3: the released weights; GPT-3: Brown et al. 2020, appendix D, in millions there.
PUBLISHED = {
    "gpt2_124m": 124_439_808,
    "llama3_8b": 8_030_261_248,
    "llama3_8b_128k": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "gpt3_175b": 174_600_000_000,
}
#: The others are slow only in sum: a rank takes a second.
QUICK = ("gpt2_124m", "llama3_70b")
BYTES = 257  # vocabulary of TextDataModule without a tokenizer
VOCABULARY_MATRICES = ("embedding.word_embeddings.weight", "output_layer.weight")


def _dimensions(recipe: str) -> dict[str, Any]:
    given = arguments(recipe, "model")
    given.setdefault("ffn_hidden_size", _ffn(given))
    given.setdefault("num_query_groups", given["num_attention_heads"])
    return {**given, "vocab_size": arguments(recipe, "data").get("vocab_size", BYTES)}


def _ffn(given: dict[str, Any]) -> int:
    hidden = given["hidden_size"]
    return 64 * math.ceil(8 * hidden / 3 / 64) if given.get("swiglu") else 4 * hidden


def _formula(recipe: str) -> int:
    """Parameters by the model's dimensions; the output layer has no bias."""
    of = _dimensions(recipe)
    hidden, ffn, layers = of["hidden_size"], of["ffn_hidden_size"], of["num_layers"]
    keys = hidden // of["num_attention_heads"] * of["num_query_groups"]
    biases = of.get("add_bias_linear", True)
    norm = hidden if of.get("normalization") == "RMSNorm" else 2 * hidden
    fc1 = 2 * ffn if of.get("swiglu") else ffn
    attention = hidden * (hidden + 2 * keys) + hidden * hidden + (2 * hidden + 2 * keys if biases else 0)
    mlp = hidden * fc1 + ffn * hidden + (fc1 + hidden if biases else 0)
    vocabulary = of["vocab_size"] * hidden * (2 if of.get("untie_embeddings_and_output_weights") else 1)
    positions = 0 if of.get("position_embedding_type") == "rope" else of["seq_length"] * hidden
    return layers * (attention + mlp + 2 * norm) + norm + vocabulary + positions


def _total(stages: list[Stage], vocab_size: int) -> int:
    """Parameters of the whole model: each name once, at its global shape, without the vocabulary's padding."""
    shapes = {each.key: each.global_shape for stage in stages for each in stage.parameters}
    total = sum(map(math.prod, shapes.values()))
    padding = padded_vocab_size(vocab_size) - vocab_size
    return total - sum(padding * shapes[name][1] for name in VOCABULARY_MATRICES if name in shapes)


def _check_parts(stage: Stage, tp_size: int) -> None:
    """What Megatron Core marks as cut is a tensor-parallel share, at this rank's place; the rest is whole."""
    local: dict[str, int] = {}
    for each in stage.parameters:
        local[each.key] = local.get(each.key, 0) + each.local
        first = stage.coordinates["tp"] == 0
        if not each.is_cut or (first and "linear_fc1" not in each.key):
            assert not any(each.offset), each
        elif not first:
            assert any(each.offset), each
    for each in stage.parameters:
        shares = tp_size if each.is_cut else 1
        assert local[each.key] * shares == math.prod(each.global_shape), each
    assert stage.numbers == sum(local.values())


@pytest.mark.parametrize(
    "recipe", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in RECIPES]
)
def test_all_stages_together_are_the_model(recipe: str, fake_world: FakeWorld) -> None:
    of, half = sizes(recipe), content(recipe)["trainer"].get("precision", "32-true") != "32-true"
    last_tp = of.tensor_model_parallel_size - 1
    places = [(pp, tp) for pp in range(of.pipeline_model_parallel_size) for tp in sorted({0, last_tp})]
    stages: dict[tuple[int, int], Stage] = {}
    for pp, tp in places:
        stage = fake_world.run_rank(build_stage, rank_at(of, pp, tp), of.world_size, recipe)
        assert stage.coordinates == {"pp": pp, "tp": tp}
        assert stage.devices == {"cuda:0"}
        assert stage.dtypes == {"torch.bfloat16" if half else "torch.float32"}
        _check_parts(stage, of.tensor_model_parallel_size)
        stages[pp, tp] = stage
    for pp in range(of.pipeline_model_parallel_size):
        assert stages[pp, 0].numbers == stages[pp, last_tp].numbers
    first_ranks = [stages[pp, 0] for pp in range(of.pipeline_model_parallel_size)]
    named = [each.key for stage in first_ranks for each in {each.key: each for each in stage.parameters}.values()]
    repeated = {name for name in named if named.count(name) > 1}
    tied = not arguments(recipe, "model").get("untie_embeddings_and_output_weights")
    assert repeated == ({VOCABULARY_MATRICES[0]} if tied and of.pipeline_model_parallel_size > 1 else set())
    total = _total(list(stages.values()), _dimensions(recipe)["vocab_size"])
    assert total == _formula(recipe)
    assert total == pytest.approx(PUBLISHED.get(recipe, _formula(recipe)), rel=0.01)


def test_the_large_recipes_have_a_published_size() -> None:
    assert set(PUBLISHED) == {recipe for recipe in RECIPES if not recipe.endswith("_tiny")}


def test_a_rank_that_cannot_be_built_says_why(fake_world: FakeWorld) -> None:
    with pytest.raises(FakeRankError, match=r"num_layers=81 must be divisible by .*\(= 20\)") as error:
        fake_world.run_rank(build_stage, 0, 256, "llama3_70b", "--model.num_layers=81")
    assert error.value.type_name == "ValueError"

"""Every recipe is parsed, and its rules are checked at the number of ranks it is meant for, without starting any.

Building its stages and training the tiny ones: `tests/recipes`.
"""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from lt_parallel.callbacks.throughput import ThroughputMonitor
from lt_parallel.lightning_cli import MegatronCLI
from lt_parallel.models import GPTModule
from lt_parallel.recipe_files import recipe_path
from lt_parallel.settings import Settings
from lt_parallel.strategies import MegatronParallelStrategy
from tests.recipes.contents import RECIPES, SIBLINGS, SIZES, arguments, content, sizes

#: Ranks, data-parallel size, micro batches per step.
MEANT_FOR = {
    "gpt_tiny": (1, 1, 8),
    "gpt2_124m": (8, 8, 5),
    "deepseek_v3": (1024, 64, 240),
    "deepseek_v3_tiny": (4, 2, 4),
    "gpt3_175b": (1024, 16, 96),
    "gpt3_175b_tiny": (8, 2, 4),
    "llama3_8b": (32, 4, 32),
    "llama3_8b_128k": (64, 2, 16),
    "llama3_8b_128k_tiny": (4, 1, 2),
    "llama3_70b": (256, 8, 64),
    "llama3_70b_tiny": (8, 2, 4),
    "mixtral_8x7b": (64, 16, 16),
    "mixtral_8x7b_tiny": (4, 2, 4),
    "qwen3_30b_a3b": (32, 16, 64),
    "qwen3_30b_a3b_tiny": (4, 2, 4),
}
#: What a tiny recipe has in other numbers, or besides: how long it runs and that it has no run to go on with.
OF_A_TINY_RUN = {"max_epochs", "num_sanity_val_steps", "enable_model_summary"}
#: What a tiny recipe has otherwise, and its head says why: (its own, the large one's).
OTHERWISE: dict[str, dict[str, tuple[Any, Any]]] = {
    "qwen3_30b_a3b": {"moe.moe_router_load_balancing_type": ("seq_aux_loss", "global_aux_loss")},
    "deepseek_v3": {
        "pipeline_model_parallel_layout": ("Et*2|(t|)*2,mL", "Et*3|(tt|)*29,m|L"),
        "lt_parallel.ExpertDispatch.dispatcher": ("alltoall", "flex"),
        "lt_parallel.ExpertDispatch.backend": (None, "deepep"),
    },
}


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")  # restored afterwards: recipes seed everything


def _parse(name: str, *overrides: str) -> MegatronCLI:
    return MegatronCLI("fit", ["--config", str(recipe_path(name)), "--trainer.accelerator=cpu", *overrides], run=False)


def _resolve(cli: MegatronCLI, deepep: bool = True) -> Settings:
    """The settings as where DeepEP is installed, or as here."""
    strategy = cli.trainer.strategy
    assert isinstance(strategy, MegatronParallelStrategy)
    strategy.connect(cli.model)
    with mock.patch("megatron.core.transformer.moe.fused_a2a.HAVE_DEEP_EP", deepep):
        return strategy.resolve_settings(cli.trainer)


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_fits_the_ranks_it_is_meant_for(name: str) -> None:
    cli = _parse(name)
    sizes = _resolve(cli).sizes
    world_size, dp, num_microbatches = MEANT_FOR[name]
    assert (sizes.world_size, sizes.data_parallel_size) == (world_size, dp)
    given: dict[str, Any] = cli.config.fit.trainer.strategy.init_args.as_dict()
    assert given["global_batch_size"] == num_microbatches * cli.datamodule.micro_batch_size * dp


@pytest.mark.parametrize("name", RECIPES)
def test_large_recipes_measure_their_throughput(name: str) -> None:
    monitors = [callback for callback in _parse(name).trainer.callbacks if isinstance(callback, ThroughputMonitor)]
    assert len(monitors) == (0 if name == "gpt_tiny" else 1)


def test_every_large_recipe_with_parallelism_of_several_kinds_has_a_tiny_sibling() -> None:
    assert set(SIBLINGS) == {
        "gpt3_175b",
        "llama3_8b_128k",
        "llama3_70b",
        "mixtral_8x7b",
        "qwen3_30b_a3b",
        "deepseek_v3",
    }


@pytest.mark.parametrize("large", SIBLINGS)
def test_a_tiny_recipe_has_the_options_of_its_large_one(large: str) -> None:
    tiny = SIBLINGS[large]
    ours, theirs = content(tiny)["trainer"], content(large)["trainer"]
    assert set(ours) - OF_A_TINY_RUN == set(theirs)
    assert ours["precision"] == theirs["precision"]
    assert [each["class_path"] for each in ours["callbacks"]] == [each["class_path"] for each in theirs["callbacks"]]
    mine, other = _all_options(tiny), _all_options(large)
    assert [name for name in other if name not in OTHERWISE.get(large, {})] == [
        name for name in mine if name not in OTHERWISE.get(large, {})
    ]
    found = {name: (mine.get(name), value) for name, value in other.items() if mine.get(name) != value}
    assert found == OTHERWISE.get(large, {})


def _all_options(recipe: str) -> dict[str, Any]:
    """Arguments of strategy, model and callbacks, in order, with "size" in place of numbers."""
    callbacks = {each["class_path"]: each.get("init_args", {}) for each in content(recipe)["trainer"]["callbacks"]}
    return _flat(arguments(recipe, "strategy")) | _flat(arguments(recipe, "model")) | _flat(callbacks)


def _flat(given: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in given.items():
        if isinstance(value, dict):
            found |= {f"{name}.{inner}": each for inner, each in _flat(value).items()}
        else:
            found[name] = "size" if _is_size(value) else value
    return found


def _is_size(value: object) -> bool:
    """Whether it is a number, or has one for each layer."""
    if isinstance(value, list):
        return all(map(_is_size, value))
    return isinstance(value, int | float) and not isinstance(value, bool)


@pytest.mark.parametrize("large", SIBLINGS)
def test_a_tiny_recipe_cuts_the_model_in_the_same_ways(large: str) -> None:
    big, small = sizes(large), sizes(SIBLINGS[large])
    assert [(getattr(small, kind) or 1) > 1 for kind in SIZES] == [(getattr(big, kind) or 1) > 1 for kind in SIZES]
    assert (small.expert_tensor_parallel_size is None) == (big.expert_tensor_parallel_size is None)
    settings = [_resolve(_parse(name)).sizes.virtual_pipeline_model_parallel_size for name in (large, SIBLINGS[large])]
    assert (settings[0] is None) == (settings[1] is None)
    assert small.world_size <= 8


@pytest.mark.parametrize("large", [name for name in SIBLINGS if "moe" in arguments(name, "model")])
def test_a_tiny_mixture_of_experts_is_comparable_at_every_layout(large: str) -> None:
    tiny = arguments(SIBLINGS[large], "model")
    assert (tiny["num_layers"], tiny["num_attention_heads"], tiny["moe"]["num_moe_experts"]) == (4, 4, 4)
    assert tiny["moe"]["moe_router_load_balancing_type"] == "seq_aux_loss"
    assert arguments(SIBLINGS[large], "data")["micro_batch_size"] == 2


def test_deepseek_v3_is_cut_as_its_layout_says() -> None:
    settings = _resolve(_parse("deepseek_v3"))
    assert settings.sizes.virtual_pipeline_model_parallel_size == 2
    stages = settings.get("model", "pipeline_model_parallel_layout").split("|")
    assert stages == ["Ettt", *["tt"] * 29, "m", "L"]


def test_deepseek_v3_needs_deepep() -> None:
    with pytest.raises(ImportError, match=r"ExpertDispatch\('flex', backend='deepep'\) needs DeepEP.* on the CPU"):
        _resolve(_parse("deepseek_v3"), deepep=False)


def test_llama_has_the_size_of_its_name() -> None:
    """Counted from the dimensions, so a wrong one shows."""
    hp = _parse("llama3_8b").model.hparams
    heads, groups, hidden, ffn = (
        hp[name] for name in ("num_attention_heads", "num_query_groups", "hidden_size", "ffn_hidden_size")
    )
    attention = 2 * hidden * hidden + 2 * hidden * (hidden // heads) * groups
    layer = attention + 3 * hidden * ffn + 2 * hidden
    total = hp["num_layers"] * layer + 2 * hp["vocab_size"] * hidden + hidden
    assert total == 8_030_261_248  # the number of parameters of the published Llama 3 8B weights


@pytest.mark.parametrize(
    "layout",
    [
        {"devices": 4, "tensor_model_parallel_size": 4, "sequence_parallel": True},
        {"devices": 4, "pipeline_model_parallel_size": 4},
        {"devices": 4, "data_parallel_sharding_strategy": "optim"},
        {"devices": 3},
        {"devices": 4, "pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
    ],
)
def test_tiny_recipe_takes_layouts_of_up_to_4_ranks(layout: dict[str, Any]) -> None:
    devices = layout.pop("devices")
    batch = ["--trainer.strategy.global_batch_size=18"] if devices == 3 else []
    options = [f"--trainer.strategy.{name}={str(value).lower()}" for name, value in layout.items()]
    settings = _resolve(_parse("gpt_tiny", f"--trainer.devices={devices}", *options, *batch))
    assert settings.sizes.world_size == devices


def test_tiny_recipe_has_what_the_demo_and_the_tests_rely_on() -> None:
    cli = _parse("gpt_tiny")
    model = cli.model
    assert isinstance(model, GPTModule)
    config = cli.config.fit
    assert config.seed_everything == 1234
    assert config.trainer.callbacks is None
    assert config.trainer.strategy.init_args.num_microbatches is None
    assert (model.hparams["num_layers"], model.hparams["num_attention_heads"]) == (4, 4)
    assert (model.hparams["hidden_dropout"], model.hparams["attention_dropout"]) == (0.0, 0.0)
    assert cli.datamodule.micro_batch_size == 2
    assert model.hparams["lr_warmup_iters"] > 0


def test_a_layout_that_does_not_fit_a_recipe_is_refused() -> None:
    with pytest.raises(ValueError, match="num_query_groups=8 must be divisible by tensor_model_parallel_size=16"):
        _resolve(
            _parse(
                "llama3_8b",
                "--trainer.strategy.tensor_model_parallel_size=16",
                "--trainer.strategy.pipeline_model_parallel_size=1",
            )
        )


def test_unknown_recipe_names_the_others() -> None:
    with pytest.raises(ValueError, match="no recipe 'gpt_tyni'; there are deepseek_v3, deepseek_v3_tiny, gpt2_124m"):
        recipe_path("gpt_tyni")

"""Every recipe is parsed, and its rules are checked at the number of ranks it is meant for, without starting any.

Building its stages and training the tiny ones: `tests/recipes`.
"""

from pathlib import Path
from typing import Any

import pytest

from lt_parallel.callbacks.throughput import ThroughputMonitor
from lt_parallel.lightning_cli import MegatronCLI
from lt_parallel.models import GPTModule
from lt_parallel.recipe_files import recipe_path
from lt_parallel.settings import Settings
from lt_parallel.strategies import MegatronParallelStrategy
from tests.recipes.contents import RECIPES, SIBLINGS, arguments, content, sizes

#: Ranks, data-parallel size, micro batches per step.
MEANT_FOR = {
    "gpt_tiny": (1, 1, 8),
    "gpt2_124m": (8, 8, 5),
    "gpt3_175b": (1024, 16, 96),
    "gpt3_175b_tiny": (8, 2, 4),
    "llama3_8b": (32, 4, 32),
    "llama3_8b_128k": (64, 2, 16),
    "llama3_8b_128k_tiny": (4, 1, 2),
    "llama3_70b": (256, 8, 64),
    "llama3_70b_tiny": (8, 2, 4),
}
#: What a tiny recipe has in other numbers, or besides: how long it runs and that it has no run to go on with.
OF_A_TINY_RUN = {"max_epochs", "num_sanity_val_steps", "enable_model_summary"}


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")  # restored afterwards: recipes seed everything


def _parse(name: str, *overrides: str) -> MegatronCLI:
    return MegatronCLI("fit", ["--config", str(recipe_path(name)), "--trainer.accelerator=cpu", *overrides], run=False)


def _resolve(cli: MegatronCLI) -> Settings:
    strategy = cli.trainer.strategy
    assert isinstance(strategy, MegatronParallelStrategy)
    strategy.connect(cli.model)
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
    assert set(SIBLINGS) == {"gpt3_175b", "llama3_8b_128k", "llama3_70b"}


@pytest.mark.parametrize("large", SIBLINGS)
def test_a_tiny_recipe_has_the_options_of_its_large_one(large: str) -> None:
    tiny = SIBLINGS[large]
    for part in ("strategy", "model"):
        ours, theirs = arguments(tiny, part), arguments(large, part)
        assert list(ours) == list(theirs)
        assert {k: v for k, v in ours.items() if not _is_size(v)} == {
            k: v for k, v in theirs.items() if not _is_size(v)
        }
    ours, theirs = content(tiny)["trainer"], content(large)["trainer"]
    assert set(ours) - OF_A_TINY_RUN == set(theirs)
    assert ours["precision"] == theirs["precision"]
    assert [_options(each) for each in ours["callbacks"]] == [_options(each) for each in theirs["callbacks"]]


def _is_size(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _options(callback: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Its class and arguments, without the numbers."""
    given = callback.get("init_args", {})
    return callback["class_path"], {name: None if _is_size(value) else value for name, value in given.items()}


@pytest.mark.parametrize("large", SIBLINGS)
def test_a_tiny_recipe_cuts_the_model_in_the_same_ways(large: str) -> None:
    kinds = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    big, small = sizes(large), sizes(SIBLINGS[large])
    assert [getattr(small, kind) > 1 for kind in kinds] == [getattr(big, kind) > 1 for kind in kinds]
    settings = [_resolve(_parse(name)).sizes.virtual_pipeline_model_parallel_size for name in (large, SIBLINGS[large])]
    assert (settings[0] is None) == (settings[1] is None)
    assert small.world_size <= 8


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
    with pytest.raises(ValueError, match="no recipe 'gpt_tyni'; there are gpt2_124m, gpt3_175b"):
        recipe_path("gpt_tyni")

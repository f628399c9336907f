"""What recipes say, read from their files."""

from __future__ import annotations

from typing import Any

import yaml

from lt_parallel.recipe_files import recipe_path
from lt_parallel.topology import ParallelSizes, RankCoordinates

RECIPES = sorted(path.stem for path in recipe_path("gpt_tiny").parent.glob("*.yaml"))
#: The strategy's arguments that cut a model.
SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)
#: Large recipes and what stands for them on a CPU.
SIBLINGS = {name.removesuffix("_tiny"): name for name in RECIPES if name.endswith("_tiny") and name != "gpt_tiny"}


def content(recipe: str) -> dict[str, Any]:
    """The file as a dictionary."""
    read: dict[str, Any] = yaml.safe_load(recipe_path(recipe).read_text())
    return read


def arguments(recipe: str, part: str) -> dict[str, Any]:
    """Arguments of the recipe's "strategy", "model" or "data"."""
    whole = content(recipe)
    given: dict[str, Any] = (whole["trainer"] if part == "strategy" else whole)[part]["init_args"]
    return given


def sizes(recipe: str, **changed: int) -> ParallelSizes:
    """The recipe's parallel sizes on its own number of devices.

    Args:
        recipe: Its name.
        **changed: Other sizes than the recipe's.
    """
    trainer, strategy = content(recipe)["trainer"], arguments(recipe, "strategy")
    given = {"world_size": trainer["devices"] * trainer.get("num_nodes", 1)}
    given |= {name: strategy[name] for name in SIZES if name in strategy}
    return ParallelSizes(**{**given, **changed})


def rank_at(of: ParallelSizes, pp: int, tp: int = 0, dp: int = -1) -> int:
    """The rank at a place of the pipeline, of the tensor-parallel group and of the replicas.

    Args:
        of: The sizes.
        pp: Place in the pipeline; negative from its end.
        tp: Place in the tensor-parallel group; likewise.
        dp: Which replica; likewise. Ranks that share experts are of different ones.
    """
    at = RankCoordinates(
        tp=tp % of.tensor_model_parallel_size,
        cp=of.context_parallel_size - 1,
        dp=dp % of.data_parallel_size,
        pp=pp % of.pipeline_model_parallel_size,
    )
    return of.rank_of(at)

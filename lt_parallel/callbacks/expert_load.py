"""`ExpertLoadMonitor`: how equally a mixture of experts is used."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning.pytorch as L
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor

from lt_parallel.loggers import log_image
from lt_parallel.ops.expert_placement import imbalance
from lt_parallel.strategies.expert_layers import ExpertLoad, expert_layers
from lt_parallel.strategies.step_log import log_values
from lt_parallel.topology import require_positive_int

if TYPE_CHECKING:
    from rich.table import Table

    from lt_parallel.settings import Settings
    from lt_parallel.strategies.megatron import MegatronParallelStrategy


class ExpertLoadMonitor(L.Callback):
    """Counts the tokens of every expert in training, and says how unequal they are. See `docs/measuring.md`.

    At the end of `fit` a table shows each layer.

    Args:
        every_n_steps: Global steps that one figure is over; None: the Trainer's log_every_n_steps.
        heat_map_every_n: Of these figures, how many there are to one heat map in the loggers that show pictures
            (Weights & Biases, TensorBoard); 0: none.

    Raises:
        ValueError: An argument is wrong, or (when the Trainer starts) the model has no experts.

    Attributes:
        tokens_per_expert: `[layers, experts]`, int64 on the CPU, of the last interval, over all ranks; a token counts
            once for each expert that it visits, and dense layers have zeros. None before.
        tokens_per_rank: The same by expert-parallel rank, `[layers, expert_model_parallel_size]`.
        dropped: `[layers]`, tokens that found their expert full.
    """

    def __init__(self, every_n_steps: int | None = None, heat_map_every_n: int = 10) -> None:
        if every_n_steps is not None:
            require_positive_int("every_n_steps", every_n_steps)
        if heat_map_every_n != 0:
            require_positive_int("heat_map_every_n", heat_map_every_n)
        self.every_n_steps, self.heat_map_every_n = every_n_steps, heat_map_every_n
        self.tokens_per_expert: Tensor | None = None
        self.tokens_per_rank: Tensor | None = None
        self.dropped: Tensor | None = None
        self._load: ExpertLoad | None = None
        self._interval, self._figures = 0, 0

    def contribute(self, settings: Settings) -> None:
        """Sets nothing; checks that there is something to count.

        Raises:
            ValueError: The model has no experts.
        """
        if settings.get("model", "num_moe_experts") is None:
            raise ValueError(
                "ExpertLoadMonitor counts the tokens of experts, and this model has none; leave it out, or use "
                "GPTModule(moe=...)"
            )

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Begins to count."""
        strategy: MegatronParallelStrategy = trainer.strategy  # type: ignore[assignment]
        config = strategy.model_config
        options: Any = trainer
        self._interval = self.every_n_steps or options.log_every_n_steps
        self._figures = 0
        self._load = ExpertLoad(expert_layers(strategy.wrapped_chunks, config.num_layers), config, strategy.root_device)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Adds up and logs. Collective over all ranks."""
        if self._load is None or not self._interval or trainer.global_step % self._interval:
            return
        strategy: MegatronParallelStrategy = trainer.strategy  # type: ignore[assignment]
        tokens, dropped = self._load.collect()
        self.tokens_per_expert, self.dropped = tokens, dropped
        self.tokens_per_rank = tokens.unflatten(1, (strategy.groups.ep.size(), -1)).sum(2)
        step = trainer.global_step - 1
        values = load_figures(tokens, self.tokens_per_rank, dropped)
        if not values:
            return
        log_values(trainer, values, step=step)
        self._figures += 1
        if self.heat_map_every_n and self._figures % self.heat_map_every_n == 1 % self.heat_map_every_n:
            self._log_heat_map(trainer, tokens, step)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Stops counting; the table."""
        if self._load is not None:
            self._load.close()
            self._load = None
        if self.tokens_per_expert is not None and self.tokens_per_rank is not None and self.dropped is not None:
            _print(load_table(self.tokens_per_expert, self.tokens_per_rank, self.dropped))

    @rank_zero_only
    def _log_heat_map(self, trainer: L.Trainer, tokens: Tensor, step: int) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "tokens_per_expert.png"
            draw_heat_map(tokens, path)
            log_image(trainer.loggers, "moe/tokens_per_expert", path, step=step)


def load_figures(tokens: Tensor, tokens_per_rank: Tensor, dropped: Tensor) -> dict[str, float]:
    """What is logged; empty where nothing was counted.

    Args:
        tokens: `[layers, experts]`.
        tokens_per_rank: `[layers, ranks]`.
        dropped: `[layers]`.
    """
    layers = _with_experts(tokens)
    if not layers:
        return {}
    of_experts, of_ranks = imbalance(tokens[layers]), imbalance(tokens_per_rank[layers])
    share = dropped[layers].double() / (tokens[layers].sum(1) + dropped[layers])
    figures = {
        "moe/expert_imbalance": float(of_experts.mean()),
        "moe/rank_imbalance": float(of_ranks.mean()),
        "moe/dropped_share": float(share.mean()),
        "moe/unused_experts": float((tokens[layers] == 0).sum()),
    }
    for place, layer in enumerate(layers):
        figures[f"moe/expert_imbalance_layer_{layer}"] = float(of_experts[place])
        figures[f"moe/rank_imbalance_layer_{layer}"] = float(of_ranks[place])
        figures[f"moe/dropped_share_layer_{layer}"] = float(share[place])
    return figures


def load_table(tokens: Tensor, tokens_per_rank: Tensor, dropped: Tensor) -> Table:
    """One row for each layer with experts; arguments as of `load_figures`."""
    from rich import box
    from rich.table import Table

    table = Table(title="tokens per expert, last interval", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("layer", "least", "mean", "most", "busiest", "most/mean", "ranks: most/mean", "dropped"):
        table.add_column(heading, justify="right", no_wrap=True)
    for layer in _with_experts(tokens):
        row = tokens[layer].double()
        table.add_row(
            str(layer),
            f"{int(row.min()):,}",
            f"{float(row.mean()):,.0f}",
            f"{int(row.max()):,}",
            f"expert {int(row.argmax())}",
            f"{float(imbalance(tokens[layer][None])):.2f}",
            f"{float(imbalance(tokens_per_rank[layer][None])):.2f}",
            f"{int(dropped[layer]):,}",
        )
    return table


def draw_heat_map(tokens: Tensor, path: Path | str) -> None:
    """Writes a picture of each expert's tokens over its layer's mean; 1 is an equal share.

    Args:
        tokens: `[layers, experts]`; layers without tokens are left out.
        path: Of the picture; its ending says the format.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    layers = _with_experts(tokens)
    counted = tokens[layers].double()
    relative = counted / counted.mean(1, keepdim=True)
    experts = counted.size(1)
    width, height = min(4 + 0.12 * experts, 16), min(2 + 0.22 * len(layers), 14)
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    most = max(float(relative.max()), 2.0)
    image = axes.imshow(relative.numpy(), aspect="auto", cmap="viridis", vmin=0, vmax=most, interpolation="nearest")
    axes.set_xlabel("expert")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylabel("layer")
    axes.set_yticks(range(len(layers)), [str(layer) for layer in layers])
    axes.set_title("tokens per expert over the layer's mean")
    figure.colorbar(image, ax=axes)
    figure.savefig(path, dpi=100)


def _with_experts(tokens: Tensor) -> list[int]:
    return [int(layer) for layer in (tokens.sum(1) > 0).nonzero().flatten()]


@rank_zero_only
def _print(table: Table) -> None:
    from rich.console import Console

    Console().print(table)

"""`ExpertRebalance`: moves experts between expert-parallel ranks so that these get equally many tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import lightning.pytorch as L
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor

from lt_parallel.ops.expert_placement import imbalance, rebalance_experts
from lt_parallel.strategies.data_parallel import whole_parameters
from lt_parallel.strategies.expert_layers import ExpertLoad, expert_layers
from lt_parallel.strategies.expert_permutation import ExpertPermutation
from lt_parallel.strategies.fully_sharded import FSDP_STRATEGIES
from lt_parallel.strategies.step_log import log_values
from lt_parallel.topology import require_positive_int

if TYPE_CHECKING:
    from lt_parallel.settings import Settings
    from lt_parallel.strategies.megatron import MegatronParallelStrategy


class ExpertRebalance(L.Callback):
    """Moves whole experts, and everything that belongs to them, where a layer's ranks get too unequal loads.

    A step lasts as long as its busiest rank. Every `every_n_steps` global steps the tokens of these steps are counted;
    in each layer whose busiest expert-parallel rank got more than `threshold` times the mean, experts change places by
    the greedy packing of `lt_parallel.ops.expert_placement`, if that gives a lower maximum. Weights, optimizer states,
    rows and biases of the router move together: training goes on with the same losses, and a checkpoint is an ordinary
    one, for any layout. Experts of a group that the router chooses together stay neighbours.

    Logged then: `moe/rebalanced_layers`, and the mean over layers of the busiest rank's load over the mean one,
    `moe/rank_imbalance_before` and `moe/rank_imbalance_after` (expected from the tokens counted).

    Args:
        every_n_steps: Global steps between two looks.
        threshold: Of the busiest rank's load over the mean one, above which experts are moved; at least 1.

    Raises:
        ValueError: An argument is wrong by itself; combinations with the rest of the run are checked when the Trainer
            starts.
    """

    def __init__(self, every_n_steps: int = 100, threshold: float = 1.2) -> None:
        require_positive_int("every_n_steps", every_n_steps)
        if isinstance(threshold, bool) or not isinstance(threshold, int | float) or not threshold >= 1:
            raise ValueError(
                f"threshold={threshold!r} must be a number of at least 1 (the busiest rank's load over the mean one)"
            )
        self.every_n_steps, self.threshold = every_n_steps, float(threshold)
        self._load: ExpertLoad | None = None
        self._layers: dict[int, Any] = {}

    def contribute(self, settings: Settings) -> None:
        """Sets nothing; checks that there are ranks to move experts between, and that they can be moved.

        Raises:
            ValueError: It isn't so.
        """
        experts, ep = settings.get("model", "num_moe_experts"), settings.sizes.expert_model_parallel_size
        if experts is None or ep == 1:
            raise ValueError(
                f"ExpertRebalance moves experts between ranks, and this run has num_moe_experts={experts} and "
                f"expert_model_parallel_size={ep}; use it with expert_model_parallel_size > 1, or leave it out"
            )
        sharding = settings.get("ddp", "data_parallel_sharding_strategy")
        if sharding in FSDP_STRATEGIES:
            raise ValueError(
                f"ExpertRebalance can't move what data_parallel_sharding_strategy={sharding!r} has cut; use 'optim' or "
                "'no_shard'"
            )
        groups = settings.get("model", "moe_router_num_groups")
        if groups is not None and groups % ep and ep % groups:
            raise ValueError(
                f"ExpertRebalance keeps a router's groups together, so moe_router_num_groups={groups} and "
                f"expert_model_parallel_size={ep} must divide one another; change one, or leave ExpertRebalance out"
            )

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Begins to count."""
        strategy: MegatronParallelStrategy = trainer.strategy  # type: ignore[assignment]
        config = strategy.model_config
        self._layers = expert_layers(strategy.wrapped_chunks, config.num_layers)
        self._load = ExpertLoad(self._layers, config, strategy.root_device)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Looks and moves. Collective over all ranks."""
        if trainer.global_step % self.every_n_steps or self._load is None:
            return
        strategy: MegatronParallelStrategy = trainer.strategy  # type: ignore[assignment]
        tokens, _ = self._load.collect()
        config, groups = strategy.model_config, strategy.groups
        orders = new_orders(tokens, config.moe_router_num_groups, groups.ep.size(), self.threshold)
        before = tokens.unflatten(1, (groups.ep.size(), -1)).sum(2)
        after = before.clone()
        for number, order in orders.items():
            after[number] = tokens[number, order].view(groups.ep.size(), -1).sum(1)
        if orders:
            permutation = ExpertPermutation(strategy.megatron_optimizer.core, groups)
            with whole_parameters(strategy.wrapped_chunks):
                for number, layer in self._layers.items():  # a stage has its own layers; a layer's ranks meet in it
                    if number in orders:
                        permutation.apply(layer, orders[number])
        with_tokens = before.sum(1) > 0
        if not with_tokens.any():
            return
        means = [float(imbalance(load[with_tokens]).mean()) for load in (before, after)]
        values = {"moe/rebalanced_layers": float(len(orders))}
        values |= {"moe/rank_imbalance_before": means[0], "moe/rank_imbalance_after": means[1]}
        log_values(trainer, values, step=trainer.global_step - 1)
        if orders:
            rank_zero_info(
                f"ExpertRebalance: moved experts in {len(orders)} of {int(with_tokens.sum())} layers; the busiest "
                f"rank's load over the mean one, mean over layers: {means[0]:.3f}, now {means[1]:.3f}"
            )

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Stops counting."""
        if self._load is not None:
            self._load.close()
            self._load, self._layers = None, {}


def new_orders(tokens: Tensor, num_groups: int | None, ep_size: int, threshold: float) -> dict[int, list[int]]:
    """The layers whose experts are to be moved, each with the expert that comes to each place.

    Args:
        tokens: `[layers, experts]`, by place, so that `experts / ep_size` neighbours are on one rank.
        num_groups: Of the router, which must stay neighbours; None: none.
        ep_size: Expert-parallel ranks; must divide num_groups or be divided by it.
        threshold: Of the busiest rank's load over the mean one.

    Returns:
        Layer number: order; only where the busiest rank's load gets less.
    """
    num_experts = tokens.size(1)
    groups = num_groups or 1
    # A node is what groups don't leave: a rank with whole groups, or the ranks that share one.
    nodes = min(groups, ep_size)
    placement = rebalance_experts(tokens, num_experts, groups, nodes, ep_size)
    # Within a rank by number, which keeps groups together and moves less.
    orders = placement.physical_to_logical.unflatten(1, (ep_size, -1)).sort(2).values.flatten(1)
    loads = [load.unflatten(1, (ep_size, -1)).sum(2) for load in (tokens, tokens.gather(1, orders))]
    too_unequal = (imbalance(loads[0]) > threshold) & (loads[1].amax(1) < loads[0].amax(1))
    return {int(layer): orders[layer].tolist() for layer in torch.nonzero(too_unequal).flatten()}

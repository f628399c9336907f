"""The losses that keep experts equally busy, of one step, for the loggers.

Megatron Core's routers add them to the gradients themselves, so they are no part of `train_loss`. Each router notes its
own, per layer, in a table on its rank. What a rank notes is a share that depends on the kind: of "aux_loss" and
"seq_aux_loss" the part of its own tokens (shares add up over tensor and context parallel ranks, and are averaged over
data-parallel ones), of "global_aux_loss" the part of its tokens in the sum over all ranks, of the z-loss the mean over
its own tokens. Each pipeline stage notes its layers only.

Cost: one all-reduce of (number of kinds) x (number of layers) float32 values over all ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
from torch import Tensor

__all__ = ["collect_router_losses"]

#: Megatron's kinds of load balancing: the name that routers note the loss under.
_NAMES = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
}
_Z_LOSS = "z_loss"


def collect_router_losses(config: Any, groups: Any, num_microbatches: int, device: torch.device) -> dict[str, Tensor]:
    """What the routers have noted since the last call, without coefficients. Collective over all ranks.

    Args:
        config: Megatron's config of the model.
        groups: The `ProcessGroupCollection`.
        num_microbatches: Micro batches that this rank has run since the last call.
        device: Where the routers run.

    Returns:
        Means over the global batch by Megatron's names: the mean over the layers with experts
        ("seq_load_balancing_loss", "z_loss") and each layer's own ("moe/z_loss_layer_3", 0-based; layers of multi-token
        prediction come after the model's).
    """
    shares = _shares(config, groups)
    if not shares:
        return {}
    tracker = get_moe_metrics_tracker()
    noted = torch.zeros(len(shares), config.num_layers + (config.mtp_num_layers or 0), device=device)
    for row, (name, share) in zip(noted, shares.items(), strict=True):
        if name in tracker.metrics:  # not on a stage without experts
            row += tracker.metrics[name].values * (share / num_microbatches)
    tracker.clear()
    if torch.distributed.get_world_size() > 1:
        torch.distributed.all_reduce(noted)
    with_experts = _layers_with_experts(config)
    found: dict[str, Tensor] = {}
    for name, row in zip(shares, noted, strict=True):
        found[name] = row[with_experts].mean()
        found.update({f"moe/{name}_layer_{layer}": row[layer] for layer in with_experts})
    return found


def _shares(config: Any, groups: Any) -> dict[str, float]:
    """What a rank's note of each loss counts for in the sum over all ranks."""
    tp, cp, dp = (group.size() for group in (groups.tp, groups.cp, groups.dp))
    shares = {_NAMES[kind]: 1.0 if kind == "global_aux_loss" else 1 / dp for kind in _kinds(config)}
    if config.moe_z_loss_coeff is not None:
        shares[_Z_LOSS] = 1 / (tp * cp * dp)
    return shares


def _kinds(config: Any) -> list[str]:
    """The kinds of load balancing that have a loss and a coefficient."""
    kinds, coefficients = config.moe_router_load_balancing_type, config.moe_aux_loss_coeff
    pairs = zip(kinds, coefficients, strict=True) if isinstance(kinds, list) else [(kinds, coefficients)]
    return [kind for kind, coefficient in pairs if kind in _NAMES and coefficient > 0]


def _layers_with_experts(config: Any) -> list[int]:
    """0-based numbers; the layers of multi-token prediction are like the model's last one."""
    freq = config.moe_layer_freq
    own = freq if isinstance(freq, list) else [int(layer % freq == 0) for layer in range(config.num_layers)]
    every = [*own, *[own[-1]] * (config.mtp_num_layers or 0)]
    return [layer for layer, has_experts in enumerate(every) if has_experts]

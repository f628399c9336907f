"""The layers of experts on this rank, and how many tokens their routers give to each expert."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["ExpertLoad", "expert_layers"]


def expert_layers(chunks: Iterable[nn.Module], num_layers: int) -> dict[int, Any]:
    """Megatron's MoELayers by their 0-based number in the whole model, ascending.

    Args:
        chunks: This rank's, wrapped or not.
        num_layers: Of the whole model; layers of multi-token prediction are numbered after them.
    """
    from megatron.core.transformer.moe.moe_layer import MoELayer

    found = {}
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, MoELayer):
                router: Any = module.router
                found[router.layer_number - 1 + (num_layers if router.is_mtp_layer else 0)] = module
    return dict(sorted(found.items()))


class ExpertLoad:
    """Counts tokens in training until it is asked; counting itself never waits for the device.

    Args:
        layers: From `expert_layers`.
        config: Megatron's config of the model.
        device: Where the routers run.
    """

    def __init__(self, layers: Mapping[int, Any], config: Any, device: torch.device) -> None:
        total = config.num_layers + (config.mtp_num_layers or 0)
        self._padded = bool(config.moe_pad_expert_input_to_capacity)
        self._topk = config.moe_router_topk
        self._tokens = torch.zeros(total, config.num_moe_experts, dtype=torch.int64, device=device)
        self._chosen = torch.zeros(total, dtype=torch.int64, device=device)
        self._handles = [layer.router.register_forward_hook(self._hook(number)) for number, layer in layers.items()]

    def _hook(self, number: int) -> Any:
        def count(router: nn.Module, args: Any, output: tuple[Tensor, Tensor]) -> None:
            # Under recompute a router runs twice, the first time without gradients.
            if not (router.training and torch.is_grad_enabled()):
                return
            probs, routing_map = output
            kept = routing_map & (probs > 0) if self._padded else routing_map  # what fills up has no weight
            self._tokens[number] += kept.sum(0)
            self._chosen[number] += routing_map.size(0) * self._topk

        return count

    def collect(self) -> tuple[Tensor, Tensor]:
        """What was counted since the last time, over all ranks. Collective.

        Returns:
            Tokens that each expert got, `[layers, experts]`, and tokens that were dropped, `[layers]`, int64 on the
            CPU. A token counts once for each expert that it visits; dense layers have zeros.
        """
        counted = torch.cat([self._tokens, self._chosen[:, None]], 1)
        if torch.distributed.get_world_size() > 1:
            torch.distributed.all_reduce(counted)
        self._tokens.zero_()
        self._chosen.zero_()
        counted = counted.cpu()
        tokens = counted[:, :-1].contiguous()
        return tokens, counted[:, -1] - tokens.sum(1)

    def close(self) -> None:
        """Stops counting."""
        for handle in self._handles:
            handle.remove()

"""Transformer and expert layers that recompute parts which Megatron Core's own options don't reach.

| part (of `ActivationRecompute`)   | computed again in the backward pass                                        |
|-----------------------------------|----------------------------------------------------------------------------|
| routed_experts, a2a_overlap_mlp   | the routed experts, and the sorting of tokens before and after them        |
| a2a_overlap_attn                  | all of attention: norm, projections, core, residual                        |
| a2a_overlap_post_attn             | the norm after attention, the router, and the packing of tokens to be sent |

Communication stays outside of what is recomputed: tokens that were sent aren't sent again, nor are their numbers.

A token dispatcher notes where a micro batch's tokens went in its own attributes, and other micro batches overwrite them
before the backward pass comes. So each recomputed part keeps the notes of its micro batch, puts them back while it
runs, and leaves the dispatcher as it was.

Only under expert tensor parallelism the sorting includes a gather over its ranks, which is then repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, override

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

__all__ = ["RecomputedMoELayer", "RecomputedTransformerLayer"]

_EXPERTS = ("routed_experts", "a2a_overlap_mlp")
_ATTENTION = "a2a_overlap_attn"
_POST_ATTENTION = "a2a_overlap_post_attn"


def _checkpointed(config: Any, tp_group: Any, function: Callable[..., Any], *args: Tensor) -> Any:
    """Runs `function` and keeps nothing of it but its arguments."""
    if config.fp8 or config.fp4:
        from megatron.core.extensions.transformer_engine import te_checkpoint

        return te_checkpoint(function, False, tensor_parallel.random.get_cuda_rng_tracker, tp_group, *args)
    return tensor_parallel.checkpoint(function, False, *args)


class RecomputedTransformerLayer(TransformerLayer):
    """Megatron's layer, recomputing attention or the norm after it.

    Args:
        recomputed: Which of the parts above.
        args: TransformerLayer's.
        options: TransformerLayer's.
    """

    def __init__(self, *args: Any, recomputed: tuple[str, ...], **options: Any) -> None:
        super().__init__(*args, **options)
        self._recomputes_attention = _ATTENTION in recomputed
        norm_follows = self.is_moe_layer and not isinstance(self.pre_mlp_layernorm, IdentityOp)
        if _POST_ATTENTION in recomputed and norm_follows:
            self.recompute_pre_mlp_layernorm = True  # Megatron's own way: the norm's output is dropped and made again
            if self.config.fp8 or self.config.fp4:
                self.mlp.set_for_recompute_pre_mlp_layernorm()

    @override
    def _forward_attention(self, hidden_states: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Any]:
        attend = super()._forward_attention
        if not (self._recomputes_attention and self.training and torch.is_grad_enabled()):
            return attend(hidden_states, *args, **options)
        output = _checkpointed(
            self.config, self.pg_collection.tp, lambda hidden: attend(hidden, *args, **options)[0], hidden_states
        )
        return output, None


class RecomputedMoELayer(MoELayer):
    """Megatron's layer of experts, recomputing what stands before or after the exchange of tokens.

    Args:
        recomputed: Which of the parts above.
        args: MoELayer's.
        options: MoELayer's.
    """

    def __init__(self, *args: Any, recomputed: tuple[str, ...], **options: Any) -> None:
        super().__init__(*args, **options)
        self._recomputes_experts = any(part in recomputed for part in _EXPERTS)
        self._recomputes_router = _POST_ATTENTION in recomputed

    @property
    def keeps_dispatched_tokens(self) -> bool:
        """Whether the backward pass reads the tokens as they arrived."""
        return self._recomputes_experts

    @property
    def _trains(self) -> bool:
        return bool(self.training and torch.is_grad_enabled())

    @override
    def route(self, hidden_states: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        route = super().route
        if not (self._recomputes_router and self._trains):
            return route(hidden_states, padding_mask)
        return self._checkpointed(lambda hidden: route(hidden, padding_mask), hidden_states)

    @override
    def preprocess(self, hidden_states: Tensor, probs: Tensor, routing_map: Tensor) -> tuple[Tensor, Tensor]:
        preprocess = super().preprocess
        if not (self._recomputes_router and self._trains):
            return preprocess(hidden_states, probs, routing_map)
        kept: list[_Notes] = []

        def pack(hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
            if not kept:
                packed = preprocess(hidden_states, probs, routing_map)
                kept.append(_Notes(self.token_dispatcher))
                return packed
            counts = kept[0].known("tokens_per_expert")
            with kept[0].put_back(preprocess=lambda routing_map: counts):  # the ranks have told each other
                return preprocess(hidden_states, probs, routing_map)

        return self._checkpointed(pack, hidden_states, probs)

    @override
    def routed_experts_compute(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        compute = super().routed_experts_compute
        if not (self._recomputes_experts and self._trains):
            return compute(hidden_states, probs)
        notes = _Notes(self.token_dispatcher)
        runs = 0

        def experts(hidden_states: Tensor, probs: Tensor) -> Tensor:
            nonlocal runs
            runs += 1
            if runs == 1:
                return compute(hidden_states, probs)[0]
            with notes.put_back():
                if manager := getattr(self.token_dispatcher, "_comm_manager", None):
                    manager.dispatched_probs = probs  # it reads its own, which have a history of their own
                return compute(hidden_states, probs)[0]

        return self._checkpointed(experts, hidden_states, probs), None

    def _checkpointed(self, function: Callable[..., Any], *args: Tensor) -> Any:
        return _checkpointed(self.config, self.tp_group, function, *args)


class _Notes:
    """What a token dispatcher knows of the micro batch that went through it last.

    Args:
        dispatcher: Megatron's.
    """

    def __init__(self, dispatcher: Any) -> None:
        self._dispatcher = dispatcher
        holders = [dispatcher, getattr(dispatcher, "_comm_manager", None)]
        self._kept = [(holder, dict(vars(holder))) for holder in holders if holder is not None]

    def known(self, name: str) -> Any:
        """One of the dispatcher's attributes, None if it has no such."""
        return self._kept[0][1].get(name)

    @contextmanager
    def put_back(self, **instead: Any) -> Iterator[None]:
        """Lets the dispatcher know it again for a while.

        Args:
            instead: Attributes to be different.
        """
        now = _Notes(self._dispatcher)
        self._write()
        vars(self._dispatcher).update(instead)
        try:
            yield
        finally:
            now._write()

    def _write(self) -> None:
        for holder, attributes in self._kept:
            vars(holder).clear()
            vars(holder).update(attributes)

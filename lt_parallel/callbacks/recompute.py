"""`ActivationRecompute`: activations that are computed again in the backward pass instead of being kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, get_args

import lightning.pytorch as L

from lt_parallel.topology import require_positive_int

if TYPE_CHECKING:
    from lt_parallel.settings import Settings

Granularity = Literal["selective", "full"]
Method = Literal["uniform", "block"]
#: What Megatron Core recomputes itself.
CoreModule = Literal["core_attn", "mlp", "moe", "moe_act", "shared_experts", "layernorm", "mla_up_proj"]
#: What `plugins/layer_backend/recomputed_layers.py` adds.
OwnModule = Literal["routed_experts", "a2a_overlap_attn", "a2a_overlap_post_attn", "a2a_overlap_mlp"]

_MODULES = (*get_args(CoreModule), *get_args(OwnModule))
#: What a module has in it; naming both would compute the inner one twice.
_INSIDE = {
    "moe": ("moe_act", "shared_experts", "routed_experts"),
    "routed_experts": ("moe_act",),
    "a2a_overlap_mlp": ("routed_experts", "moe_act"),
    "a2a_overlap_attn": ("core_attn", "mla_up_proj", "layernorm"),
}


class ActivationRecompute(L.Callback):
    """Trades compute for memory: parts of the model keep their input only and run again when gradients need the rest.

    Results stay the same, bit by bit.

    Args:
        granularity: "selective": parts of every layer, the ones in `modules`; "full": whole layers.
        method: Of "full": "uniform" keeps the input of every `num_layers` layers, "block" recomputes the first
            `num_layers` of each pipeline stage and keeps the rest.
        num_layers: Of "full", see there.
        modules: Of "selective", from least costly: "layernorm" (the two norms), "moe_act" (the activation between an
            expert's projections), "mla_up_proj" (keys, values and queries from their small vectors), "core_attn" (the
            attention scores; fused kernels do that by themselves), "mlp" (dense ones), "shared_experts",
            "routed_experts" (without sending their tokens again), "moe" (all of it, sending included). And beside
            CommunicationOverlap(moe_expert_parallel_comm=True): "a2a_overlap_attn" (all of attention),
            "a2a_overlap_post_attn" (the norm after it, the router, packing tokens), "a2a_overlap_mlp" (routed experts).

    Raises:
        ValueError: An argument is wrong by itself; combinations with the rest of the run are checked when the Trainer
            starts.
    """

    def __init__(
        self,
        granularity: Granularity = "selective",
        method: Method | None = None,
        num_layers: int | None = None,
        modules: Sequence[CoreModule | OwnModule] | None = None,
    ) -> None:
        if granularity not in get_args(Granularity):
            raise ValueError(f"granularity={granularity!r} is not one of {', '.join(get_args(Granularity))}")
        self.granularity, self.method, self.num_layers = granularity, method, num_layers
        if granularity == "full":
            self.modules: tuple[str, ...] = ()
            self._check_full(modules)
        else:
            self.modules = (
                ("core_attn",) if modules is None else tuple([modules] if isinstance(modules, str) else modules)
            )
            self._check_selective()

    def _check_full(self, modules: object) -> None:
        if modules is not None:
            raise ValueError(f"modules={modules!r} belongs to granularity='selective'; leave it out with 'full'")
        if self.method not in get_args(Method) or self.num_layers is None:
            raise ValueError(
                f"granularity='full' needs method='uniform' or 'block' and num_layers, and has method={self.method!r} "
                f"and num_layers={self.num_layers!r}; least memory: method='uniform', num_layers=1"
            )
        require_positive_int("num_layers", self.num_layers)

    def _check_selective(self) -> None:
        if self.method is not None or self.num_layers is not None:
            raise ValueError(
                f"method={self.method!r} and num_layers={self.num_layers!r} belong to granularity='full'; leave them "
                "out with 'selective'"
            )
        unknown = [name for name in self.modules if name not in _MODULES]
        if unknown or not self.modules or len(set(self.modules)) < len(self.modules):
            raise ValueError(
                f"modules={list(self.modules)!r} must be some of {', '.join(_MODULES)}, each once"
                + (f"; {', '.join(map(repr, unknown))} is none of them" if unknown else "")
            )
        for outer, inner in _INSIDE.items():
            both = [name for name in inner if name in self.modules]
            if outer in self.modules and both:
                raise ValueError(
                    f"modules={list(self.modules)!r}: {outer!r} recomputes {both[0]!r} too; name one of them"
                )

    def contribute(self, settings: Settings) -> None:
        """Adds the fields of Megatron Core's config, and the modules that only this package's layers know."""
        owner = type(self).__name__
        if self.granularity == "full":
            settings.contribute(
                owner,
                "model",
                recompute_granularity="full",
                recompute_method=self.method,
                recompute_num_layers=self.num_layers,
            )
            return
        core = [name for name in self.modules if name in get_args(CoreModule)]
        own = [name for name in self.modules if name in get_args(OwnModule)]
        if core:
            settings.contribute(owner, "model", recompute_granularity="selective", recompute_modules=core)
        if own:
            settings.contribute(owner, "layers", recompute_modules=tuple(own))

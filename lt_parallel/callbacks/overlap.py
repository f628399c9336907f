"""`CommunicationOverlap`: communication beside compute instead of after it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, get_args

import lightning.pytorch as L
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lt_parallel.topology import require_positive_int

if TYPE_CHECKING:
    from lt_parallel.settings import Settings

Preset = Literal["none", "auto"]


class CommunicationOverlap(L.Callback):
    """Says which communication runs while the model computes.

    Results stay the same. What isn't given follows the preset; what is given wins over it.

    Args:
        preset: "none" overlaps nothing by itself; "auto" chooses for the run's layout and says at the start what it
            chose and why.
        grad_reduce: Reduce gradients bucket by bucket while the backward pass goes on.
        param_gather: Gather sharded parameters just before the forward pass needs them. Needs grad_reduce and
            data_parallel_sharding_strategy="optim".
        p2p: Send and receive between pipeline stages while a stage computes; the interleaved schedule has work for that
            time, the other one has none. With virtual stages the strategy switches it on by itself.
        tp_comm: Overlap tensor-parallel collectives with the matrix products they belong to. Needs TransformerEngine
            and sequence_parallel.
        moe_expert_parallel_comm: Run the forward pass of one micro batch beside the backward pass of another, layer by
            layer, so that one computes while the other's tokens travel to experts and back. Needs
            expert_model_parallel_size > 1, ExpertDispatch("alltoall") or ("flex"), bf16 or fp16, and virtual stages
            where there is a pipeline.
        delay_wgrad_compute: Form the gradients of weights apart from those of activations, while tokens travel. Needs
            moe_expert_parallel_comm and TransformerEngine.
        bucket_size: Parameters per bucket; None: Megatron Core's choice. Needs grad_reduce.
        align_param_gather: All pipeline stages gather at the same time. Needs param_gather.

    Raises:
        ValueError: An argument is wrong by itself; combinations are checked with the rest when the Trainer starts.
    """

    def __init__(
        self,
        preset: Preset = "none",
        grad_reduce: bool | None = None,
        param_gather: bool | None = None,
        p2p: bool | None = None,
        tp_comm: bool | None = None,
        moe_expert_parallel_comm: bool | None = None,
        delay_wgrad_compute: bool | None = None,
        bucket_size: int | None = None,
        align_param_gather: bool | None = None,
    ) -> None:
        if preset not in get_args(Preset):
            raise ValueError(f"preset={preset!r} is not one of {', '.join(get_args(Preset))}")
        if bucket_size is not None:
            require_positive_int("bucket_size", bucket_size)
        self.preset = preset
        self._given = {
            "grad_reduce": grad_reduce,
            "param_gather": param_gather,
            "p2p": p2p,
            "tp_comm": tp_comm,
            "moe_expert_parallel_comm": moe_expert_parallel_comm,
            "delay_wgrad_compute": delay_wgrad_compute,
            "align_param_gather": align_param_gather,
        }
        for name, value in self._given.items():
            if value is not None and not isinstance(value, bool):
                raise ValueError(f"{name}={value!r} must be True, False or None")
        self._bucket_size = bucket_size
        #: What is overlapped and why, by argument; known once the run's settings are merged.
        self.choices: dict[str, tuple[bool, str]] = {}

    def contribute(self, settings: Settings) -> None:
        """Adds the fields of Megatron Core's configs that switch the overlaps."""
        self.choices = _automatic(settings) if self.preset == "auto" else {}
        self.choices |= {name: (value, "given") for name, value in self._given.items() if value is not None}
        chosen = {name: value for name, (value, _) in self.choices.items()}
        ddp = {
            "overlap_grad_reduce": chosen.get("grad_reduce"),
            "overlap_param_gather": chosen.get("param_gather"),
            "align_param_gather": chosen.get("align_param_gather"),
            "bucket_size": self._bucket_size,
            "delay_wgrad_compute": chosen.get("delay_wgrad_compute"),
        }
        model = {
            "tp_comm_overlap": chosen.get("tp_comm"),
            "overlap_moe_expert_parallel_comm": chosen.get("moe_expert_parallel_comm"),
            "delay_wgrad_compute": chosen.get("delay_wgrad_compute"),
        }
        if "p2p" in chosen:
            model |= {"overlap_p2p_comm": chosen["p2p"], "batch_p2p_comm": not chosen["p2p"]}
        owner = type(self).__name__
        settings.contribute(owner, "ddp", **_set(ddp))
        settings.contribute(owner, "optimizer", **_set({"overlap_param_gather": chosen.get("param_gather")}))
        settings.contribute(owner, "model", **_set(model))

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Says what the preset chose."""
        if self.preset == "auto":
            lines = [f"  {name}: {'on' if value else 'off'} ({why})" for name, (value, why) in self.choices.items()]
            rank_zero_info("\n".join(["CommunicationOverlap(preset='auto'):", *lines]))


def _set(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _automatic(settings: Settings) -> dict[str, tuple[bool, str]]:
    """What suits the layout, each with its reason."""
    sizes = settings.sizes
    replicas = sizes.data_parallel_size * sizes.context_parallel_size
    sharded = bool(settings.get("ddp", "use_distributed_optimizer"))
    interleaved = sizes.virtual_pipeline_model_parallel_size is not None
    reduces = replicas > 1
    gathers = reduces and sharded
    engine = settings.get("model", "transformer_impl") == "transformer_engine"
    tp_comm = engine and bool(settings.get("model", "sequence_parallel"))
    return {
        "grad_reduce": (reduces, f"{replicas} ranks reduce gradients" if reduces else "one rank has all gradients"),
        "param_gather": (gathers, "parameters are sharded" if gathers else "no parameters are gathered"),
        "p2p": (interleaved, "virtual stages" if interleaved else "no virtual stages"),
        "tp_comm": (
            tp_comm,
            "TransformerEngine with sequence_parallel" if tp_comm else "needs TransformerEngine and sequence_parallel",
        ),
        "align_param_gather": (
            gathers and interleaved,
            "stages begin together" if gathers and interleaved else "no virtual stages that gather",
        ),
    }

"""Rules that tie the options of mixtures of experts to the rest; part of `option_rules.RULES`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lt_parallel.topology import require_divisible

if TYPE_CHECKING:
    from lt_parallel.settings import Settings

OVERLAP = "CommunicationOverlap(moe_expert_parallel_comm=True)"


def experts_fit(settings: Settings) -> None:
    """How experts are spread over ranks, and what a layer of them asks of the dense sizes."""
    sizes, experts = settings.sizes, settings.get("model", "num_moe_experts")
    ep, tp = sizes.expert_model_parallel_size, sizes.tensor_model_parallel_size
    if experts is None:
        if ep > 1:
            raise ValueError(
                f"expert_model_parallel_size={ep} needs a model with experts, such as GPTModule(moe=...); use 1"
            )
        return
    require_divisible("num_moe_experts", experts, "expert_model_parallel_size", ep)
    if tp > 1 and not settings.get("model", "sequence_parallel"):
        raise ValueError(
            f"num_moe_experts={experts} with tensor_model_parallel_size={tp} needs sequence_parallel=True: else every "
            "tensor-parallel rank would send the same tokens to the experts; set it, or tensor_model_parallel_size=1"
        )
    width, shared = (settings.get("model", f"moe_{n}") for n in ("ffn_hidden_size", "shared_expert_intermediate_size"))
    if width is not None:
        etp = sizes.effective_expert_tensor_parallel_size
        require_divisible("moe_ffn_hidden_size", width, "expert_tensor_parallel_size", etp)
    if shared is not None:
        require_divisible("moe_shared_expert_intermediate_size", shared, "tensor_model_parallel_size", tp)


def dispatch_fits(settings: Settings) -> None:
    """What the way of sending tokens to experts asks of the run."""
    kind, owner = settings.get("model", "moe_token_dispatcher_type", "allgather"), "ExpertDispatch"
    if settings.get("model", "num_moe_experts") is None:
        if settings.owner("model", "moe_token_dispatcher_type") == owner:
            raise ValueError(
                f"{owner}(dispatcher={kind!r}) needs a model with experts, such as GPTModule(moe=...), and this one "
                "has none; leave it out"
            )
        return
    backend = settings.get("model", "transformer_impl")
    if settings.get("model", "moe_permute_fusion") and backend != "transformer_engine":
        raise ValueError(
            f"{owner}(permute_fusion=True) needs layer_backend='transformer_engine'; this run has layer_backend="
            f"{'torch' if backend == 'local' else backend!r}; set permute_fusion=False"
        )
    for field in ("variable_seq_lengths", "moe_shared_expert_overlap", "moe_router_padding_for_quantization"):
        if kind == "allgather" and settings.get("model", field):
            raise ValueError(
                f"{field}=True can't be combined with {owner}('allgather'), the default; use {owner}('alltoall')"
            )


def flex_dispatch_fits(settings: Settings) -> None:
    """What Megatron Core's dispatcher on top of a library asks of the layout and the model."""
    if (backend := flex_backend(settings)) is None:
        return
    sizes, what = settings.sizes, f"ExpertDispatch('flex', backend={backend!r})"
    etp, ep = sizes.effective_expert_tensor_parallel_size, sizes.expert_model_parallel_size
    if etp * ep == 1 and backend != "hybridep":
        raise ValueError(
            f"{what} needs ranks to send tokens to, but expert_tensor_parallel_size={etp} x expert_model_parallel_size="
            f"{ep} is 1; set e.g. expert_model_parallel_size=2, or use ExpertDispatch('alltoall')"
        )
    if backend == "deepep" and settings.get("model", "moe_pad_expert_input_to_capacity"):
        raise ValueError(
            f"{what} can't be combined with moe_pad_expert_input_to_capacity=True; set it to False, or use "
            "backend='hybridep' or ExpertDispatch('alltoall')"
        )
    if backend == "ncclep" and settings.get("model", "moe_expert_rank_capacity_factor") is None:
        raise ValueError(
            f"{what} needs config_overrides={{'moe_expert_rank_capacity_factor': ...}}: how many times its even share "
            "of tokens a rank can receive, more of them end the run; expert_tensor_parallel_size x "
            f"expert_model_parallel_size = {etp * ep} is always enough"
        )
    if settings.get("model", "bf16") and settings.get("model", "moe_router_dtype") is None:
        raise ValueError(
            f"{what} sends the weights of a token's experts in fp32, but moe_router_dtype=None computes them in bf16; "
            "set GPTModule(moe=MixtureOfExperts(moe_router_dtype='fp32', ...))"
        )


def flex_dispatch_is_in_bf16(settings: Settings) -> None:
    """DeepEP's kernels know no other type of tokens; NCCL's aren't known to refuse one."""
    backend, bf16 = flex_backend(settings), bool(settings.get("model", "bf16"))
    if backend in ("deepep", "hybridep") and not bf16:
        raise ValueError(
            f"ExpertDispatch('flex', backend={backend!r}) sends and adds tokens in bf16 only, and this run has "
            f"params_dtype={settings.get('model', 'params_dtype')}; use Trainer(precision='bf16-mixed'), or "
            "ExpertDispatch('alltoall')"
        )


def flex_backend(settings: Settings) -> str | None:
    """The library of the "flex" token dispatcher; None with another dispatcher, or without experts."""
    flex = settings.get("model", "moe_token_dispatcher_type") == "flex"
    experts = settings.get("model", "num_moe_experts") is not None
    return settings.get("model", "moe_flex_dispatcher_backend", "deepep") if flex and experts else None


def expert_overlap_fits(settings: Settings) -> None:
    """What running one micro batch's exchange of tokens beside another one's compute asks for.

    Raises:
        ValueError: It isn't so.
    """
    if settings.get("model", "delay_wgrad_compute"):
        _delayed_weight_gradients_fit(settings)
    if not settings.get("model", "overlap_moe_expert_parallel_comm"):
        return
    sizes, dispatcher = settings.sizes, settings.get("model", "moe_token_dispatcher_type", "allgather")
    pp, vpp = sizes.pipeline_model_parallel_size, sizes.virtual_pipeline_model_parallel_size
    recompute, modules = (settings.get("model", f"recompute_{name}") for name in ("granularity", "modules"))
    heads, frequency = settings.get("model", "mtp_num_layers"), settings.get("model", "moe_layer_freq", 1)
    last_is_dense = isinstance(frequency, list) and not frequency[-1]
    last_is_dense |= isinstance(frequency, int) and bool((settings.get("model", "num_layers", 1) - 1) % frequency)
    for is_wrong, found, needed in (
        (sizes.expert_model_parallel_size == 1, "expert_model_parallel_size=1", "expert_model_parallel_size > 1"),
        (dispatcher == "allgather", "ExpertDispatch('allgather')", "ExpertDispatch('alltoall') or ('flex')"),
        (
            not (settings.get("model", "bf16") or settings.get("model", "fp16")),
            f"params_dtype={settings.get('model', 'params_dtype')}",
            "Trainer(precision='bf16-mixed') or 'bf16-true'",
        ),
        (
            pp > 1 and vpp is None,
            f"pipeline_model_parallel_size={pp} without virtual stages",
            "virtual_pipeline_model_parallel_size > 1, as the schedule pairs chunks",
        ),
        (recompute == "full", "ActivationRecompute(granularity='full')", "granularity='selective'"),
        (
            recompute == "selective" and "moe" in (modules or ()),
            "ActivationRecompute(modules=['moe'])",
            "modules=['a2a_overlap_mlp'], which doesn't send the tokens again",
        ),
        (
            bool(settings.get("model", "moe_shared_expert_overlap")),
            "moe_shared_expert_overlap=True",
            "moe_shared_expert_overlap=False",
        ),
        ((heads or 0) > 1, f"mtp_num_layers={heads}", "at most 1 head"),
        (
            last_is_dense,
            f"moe_layer_freq={frequency!r}, whose last layer is dense",
            "experts in the last layer: Megatron Core leaves the last norm out after a dense one",
        ),
    ):
        if is_wrong:
            raise ValueError(f"{OVERLAP} needs {needed}; this run has {found}. Change it, or leave the overlap out")


def _delayed_weight_gradients_fit(settings: Settings) -> None:
    backend = settings.get("model", "transformer_impl")
    overlaps = bool(settings.get("model", "overlap_moe_expert_parallel_comm"))
    if not overlaps or backend != "transformer_engine":
        raise ValueError(
            "CommunicationOverlap(delay_wgrad_compute=True) needs moe_expert_parallel_comm=True and "
            f"layer_backend='transformer_engine'; this run has moe_expert_parallel_comm={overlaps} and layer_backend="
            f"{'torch' if backend == 'local' else backend!r}; set delay_wgrad_compute=False"
        )

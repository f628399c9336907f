"""The rules that tie options together, whoever brought them: one table, `RULES`.

Each rule reads the merged settings and raises ValueError with the values, the rule and a way out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lt_parallel.expert_rules import (
    OVERLAP,
    dispatch_fits,
    expert_overlap_fits,
    experts_fit,
    flex_dispatch_fits,
    flex_dispatch_is_in_bf16,
)
from lt_parallel.settings import Settings
from lt_parallel.topology import require_divisible


def _heads_divide(settings: Settings) -> None:
    tp = settings.sizes.tensor_model_parallel_size
    heads = settings.get("model", "num_attention_heads")
    if heads is not None:
        require_divisible("num_attention_heads", heads, "tensor_model_parallel_size", tp)


def _query_groups_divide(settings: Settings) -> None:
    tp = settings.sizes.tensor_model_parallel_size
    heads, groups = settings.get("model", "num_attention_heads"), settings.get("model", "num_query_groups")
    if heads is None or groups is None:
        return
    require_divisible("num_attention_heads", heads, "num_query_groups", groups)
    require_divisible("num_query_groups", groups, "tensor_model_parallel_size", tp)


def _ffn_divides(settings: Settings) -> None:
    tp = settings.sizes.tensor_model_parallel_size
    ffn = settings.get("model", "ffn_hidden_size")
    if ffn is not None:
        require_divisible("ffn_hidden_size", ffn, "tensor_model_parallel_size", tp)


def _hidden_divides(settings: Settings) -> None:
    hidden, heads = settings.get("model", "hidden_size"), settings.get("model", "num_attention_heads")
    if hidden is not None and heads is not None and settings.get("model", "kv_channels") is None:
        require_divisible("hidden_size", hidden, "num_attention_heads", heads)


def _sequence_parallel_needs_tp(settings: Settings) -> None:
    tp = settings.sizes.tensor_model_parallel_size
    if settings.get("model", "sequence_parallel") and tp == 1:
        raise ValueError(
            "sequence_parallel=True needs tensor_model_parallel_size > 1, but tensor_model_parallel_size=1; "
            "set sequence_parallel=False or e.g. tensor_model_parallel_size=2"
        )


def _sequence_divides(settings: Settings) -> None:
    tp, cp = settings.sizes.tensor_model_parallel_size, settings.sizes.context_parallel_size
    seq_length = settings.seq_length
    if seq_length is None:
        return
    if cp > 1:
        require_divisible("seq_length", seq_length, f"2 x context_parallel_size={cp}", 2 * cp)
    if settings.get("model", "sequence_parallel"):
        require_divisible(
            f"seq_length={seq_length} / context_parallel_size={cp}" if cp > 1 else "seq_length",
            seq_length // cp,
            "tensor_model_parallel_size (sequence_parallel=True)",
            tp,
        )


def _cp_comm_type_fits(settings: Settings) -> None:
    """What each way of exchanging keys and values asks of the model; nothing without context parallelism."""
    cp = settings.sizes.context_parallel_size
    if cp == 1:
        return
    given, num_layers = settings.get("model", "cp_comm_type"), settings.get("model", "num_layers")
    if isinstance(given, list) and num_layers is not None and len(given) != num_layers:
        raise ValueError(
            f"cp_comm_type={given!r} has {len(given)} entries, and num_layers={num_layers} needs one for each layer"
        )
    kinds = set(given) if isinstance(given, list) else {given}
    hierarchical = settings.get("model", "hierarchical_context_parallel_sizes")
    if ("a2a+p2p" in kinds) != (hierarchical is not None):
        raise ValueError(
            f"cp_comm_type={given!r} and hierarchical_context_parallel_sizes={hierarchical!r}: 'a2a+p2p' needs the "
            f"sizes of both levels, the others have none; e.g. cp_comm_type='a2a+p2p' with "
            f"hierarchical_context_parallel_sizes=[2, {max(cp // 2, 1)}]"
        )
    if hierarchical is not None and (len(hierarchical) != 2 or hierarchical[0] * hierarchical[1] != cp):
        raise ValueError(
            f"hierarchical_context_parallel_sizes={hierarchical!r} must be two sizes whose product is "
            f"context_parallel_size={cp}; e.g. [2, {max(cp // 2, 1)}]"
        )
    for kind, exchanging in (("a2a", cp), ("a2a+p2p", hierarchical[0] if hierarchical else 1)):
        if kind in kinds:
            _heads_exchange(settings, kind, exchanging)


def _heads_exchange(settings: Settings, kind: str, ranks: int) -> None:
    tp = settings.sizes.tensor_model_parallel_size
    heads = settings.get("model", "num_attention_heads")
    groups = settings.get("model", "num_query_groups") or heads
    for name, count in (("num_attention_heads", heads), ("num_query_groups", groups)):
        if count is not None and count // tp % ranks:
            raise ValueError(
                f"cp_comm_type={kind!r} hands each of {ranks} context-parallel ranks its share of the heads: {name}="
                f"{count} / tensor_model_parallel_size={tp} = {count // tp} must be divisible by {ranks}; use "
                "cp_comm_type='p2p' or 'all_gather', or other sizes"
            )


def _fully_sharded_fits(settings: Settings) -> None:
    """Megatron-FSDP makes its meshes of data- and tensor-parallel ranks alone."""
    strategy, pp = settings.get("ddp", "data_parallel_sharding_strategy"), settings.sizes.pipeline_model_parallel_size
    if settings.get("ddp", "use_megatron_fsdp") and pp > 1:
        raise ValueError(
            f"data_parallel_sharding_strategy={strategy!r} can't be combined with pipeline_model_parallel_size={pp}: "
            "Megatron-FSDP knows data and tensor parallelism only; use 'optim', or pipeline_model_parallel_size=1"
        )


def _latent_attention_fits(settings: Settings) -> None:
    """Multi-latent attention on the layer backend, and beside tensor parallelism."""
    tp, torch_layers = settings.sizes.tensor_model_parallel_size, settings.get("model", "transformer_impl") == "local"
    if not settings.get("model", "multi_latent_attention"):
        return
    if torch_layers and settings.get("model", "qk_layernorm") and settings.get("model", "q_lora_rank") is None:
        raise ValueError(
            "qk_layernorm=True normalises what queries are made from, and with MultiLatentAttention(q_lora_rank=None) "
            "that is the hidden state, which Megatron Core does with TransformerEngine only; give q_lora_rank, e.g. "
            "1536, or set qk_layernorm=False"
        )
    if tp == 1:
        return
    if not settings.get("model", "sequence_parallel"):
        raise ValueError(
            f"GPTModule(mla=...) with tensor_model_parallel_size={tp} needs sequence_parallel=True: Megatron Core sums "
            "the gradients of the key channels that all heads share only there; set it, or tensor_model_parallel_size=1"
        )
    if torch_layers:  # Transformer Engine's aren't cut
        ranks, position = settings.get("model", "q_lora_rank"), settings.get("model", "qk_pos_emb_head_dim")
        shared = settings.get("model", "kv_lora_rank") + position
        if ranks is not None:
            require_divisible("q_lora_rank", ranks, "tensor_model_parallel_size", tp)
        require_divisible("kv_lora_rank + qk_pos_emb_head_dim", shared, "tensor_model_parallel_size", tp)


def _overlaps_fit(settings: Settings) -> None:
    """What each overlap needs."""
    reduces, gathers = bool(settings.get("ddp", "overlap_grad_reduce")), settings.get("ddp", "overlap_param_gather")
    sharded = settings.get("ddp", "use_distributed_optimizer")
    if gathers and not (reduces and sharded):
        raise ValueError(
            f"CommunicationOverlap(param_gather=True) needs grad_reduce=True (it is {reduces}) and sharded parameters, "
            f"data_parallel_sharding_strategy='optim' (they are {'' if sharded else 'not '}sharded); set both, or "
            "param_gather=False"
        )
    for field, needed, present in (
        ("align_param_gather", "param_gather=True", gathers),
        ("bucket_size", "grad_reduce=True", reduces),
    ):
        value = settings.get("ddp", field)
        if value and not present and settings.owner("ddp", field) == "CommunicationOverlap":
            raise ValueError(
                f"CommunicationOverlap({field}={value}) means nothing without {needed}; set it, or leave {field} out"
            )


def _tp_comm_fits(settings: Settings) -> None:
    backend, sequence = settings.get("model", "transformer_impl"), settings.get("model", "sequence_parallel")
    if settings.get("model", "tp_comm_overlap") and not (backend == "transformer_engine" and sequence):
        raise ValueError(
            "CommunicationOverlap(tp_comm=True) needs layer_backend='transformer_engine' and sequence_parallel=True; "
            f"this run has layer_backend={'torch' if backend == 'local' else backend!r} and "
            f"sequence_parallel={bool(sequence)}; set tp_comm=False"
        )


def _p2p_fits(settings: Settings) -> None:
    sizes, overlapped = settings.sizes, settings.get("model", "overlap_p2p_comm")
    virtual_size = sizes.virtual_pipeline_model_parallel_size
    if overlapped and virtual_size is None:
        raise ValueError(
            "CommunicationOverlap(p2p=True) needs virtual pipeline stages, whose schedule has work while a transfer "
            "runs; set virtual_pipeline_model_parallel_size, or p2p=False"
        )
    if overlapped is False and virtual_size is not None and sizes.pipeline_model_parallel_size == 2:
        raise ValueError(
            f"CommunicationOverlap(p2p=False) with pipeline_model_parallel_size=2 and {virtual_size} virtual stages: "
            "two ranks exchange two tensors each way, and Megatron Core's batched transfers mix them up (wrong "
            "gradients, no error); leave p2p out, or use another pipeline size"
        )


#: What a module of `ActivationRecompute` needs: a field, and how a user would set it.
_PARTS = {
    "moe": ("num_moe_experts", "GPTModule(moe=...)"),
    "moe_act": ("num_moe_experts", "GPTModule(moe=...)"),
    "routed_experts": ("num_moe_experts", "GPTModule(moe=...)"),
    "shared_experts": (
        "moe_shared_expert_intermediate_size",
        "MixtureOfExperts(moe_shared_expert_intermediate_size=...)",
    ),
    "mla_up_proj": ("multi_latent_attention", "GPTModule(mla=...)"),
    "a2a_overlap_attn": ("overlap_moe_expert_parallel_comm", OVERLAP),
    "a2a_overlap_post_attn": ("overlap_moe_expert_parallel_comm", OVERLAP),
    "a2a_overlap_mlp": ("overlap_moe_expert_parallel_comm", OVERLAP),
}


def _recompute_fits(settings: Settings) -> None:
    """Whether the model has what is to be recomputed.

    Raises:
        ValueError: It hasn't, or Megatron Core can't recompute it.
    """
    core: Sequence[str] = settings.get("model", "recompute_modules") or ()
    own: Sequence[str] = settings.get("layers", "recompute_modules") or ()
    for name in (*core, *own):
        field, how = _PARTS.get(name, (None, ""))
        if field is not None and not settings.get("model", field):
            raise ValueError(
                f"ActivationRecompute(modules=[{name!r}]) needs {how}, and this run has none; leave it out"
            )
    if "moe_act" in core and not settings.get("model", "moe_grouped_gemm"):
        raise ValueError(
            "ActivationRecompute(modules=['moe_act']) needs grouped experts, MixtureOfExperts(moe_grouped_gemm=True); "
            "set it, or use modules=['routed_experts']"
        )
    if "mlp" in core and settings.get("model", "add_bias_linear"):
        raise ValueError(
            "ActivationRecompute(modules=['mlp']) with add_bias_linear=True never ends in Megatron Core: the bias it "
            "returns is recomputed by itself; use GPTModule(add_bias_linear=False), or granularity='full'"
        )


#: Every rule that ties options together; each raises ValueError by itself. Order: the most basic first.
RULES: tuple[Callable[[Settings], None], ...] = (
    _sequence_parallel_needs_tp,
    _hidden_divides,
    _heads_divide,
    _query_groups_divide,
    _ffn_divides,
    _sequence_divides,
    _cp_comm_type_fits,
    _fully_sharded_fits,
    _latent_attention_fits,
    experts_fit,
    dispatch_fits,
    flex_dispatch_fits,
    flex_dispatch_is_in_bf16,
    _overlaps_fit,
    expert_overlap_fits,
    _recompute_fits,
    _tp_comm_fits,
    _p2p_fits,
)


def check_rules(settings: Settings) -> None:
    """Applies every rule.

    Args:
        settings: Merged from all that contribute.

    Raises:
        ValueError: The first rule that is broken, with the values, the rule and a way out.
    """
    for rule in RULES:
        rule(settings)

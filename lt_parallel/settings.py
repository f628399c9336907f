"""One place where strategy, callbacks, precision and model meet before anything is built.

Each of them *contributes* Megatron Core config fields to one `Settings` object; none of them looks at another. A field
has one owner: two contributions that disagree raise and name both. When everything is in, `RULES` (one table) is
applied, and only then are process groups made and configs built. So a wrong combination is one error, early, with its
values, whoever brought them.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
from collections.abc import Callable, Iterator, Mapping
from types import NoneType, UnionType
from typing import Any, Literal, Protocol, Union, get_args, get_origin, get_type_hints, runtime_checkable

from lt_parallel.topology import ParallelSizes, padded_vocab_size, require_divisible

Target = Literal["model", "ddp", "optimizer"]
_SIMPLE = (bool, int, float, str, NoneType)
TARGETS: tuple[Target, ...] = ("model", "ddp", "optimizer")


@runtime_checkable
class Contributor(Protocol):
    """What the strategy looks for in `trainer.callbacks`, the precision plugin and the module."""

    def contribute(self, settings: Settings) -> None:
        """Adds its Megatron Core config fields by `settings.contribute(...)`."""


@dataclasses.dataclass(frozen=True)
class Contribution:
    """One config field, its value and who set it."""

    owner: str
    value: Any


class Settings:
    """Megatron Core config fields, each with its owner, for one run.

    Args:
        sizes: The parallel sizes of the run.
    """

    def __init__(self, sizes: ParallelSizes) -> None:
        self.sizes = sizes
        #: Tokens per training sequence before any cut; the module says it, None if it has no sequences.
        self.seq_length: int | None = None
        #: Whether the output layer uses the embedding's weight; the module says it.
        self.tied_embeddings = True
        self._fields: dict[Target, dict[str, Contribution]] = {target: {} for target in TARGETS}

    def contribute(self, owner: str, target: Target, **fields: Any) -> None:
        """Sets config fields on behalf of `owner`.

        Args:
            owner: What the user wrote, e.g. `"CommunicationOverlap(grad_reduce=...)"`; quoted in errors.
            target: `"model"` (TransformerConfig), `"ddp"` (DistributedDataParallelConfig) or `"optimizer"`
                (OptimizerConfig).
            fields: Megatron Core's field names and their values.

        Raises:
            ValueError: Another owner has set one of the fields to another value.
        """
        known = self._fields[target]
        for name, value in fields.items():
            earlier = known.get(name)
            if earlier is not None and earlier.owner != owner and earlier.value != value:
                raise ValueError(
                    f"{earlier.owner} sets {name}={earlier.value!r} but {owner} sets {name}={value!r}; "
                    f"remove one of the two or give them the same value"
                )
            known[name] = Contribution(owner, value)

    def suggest(self, owner: str, target: Target, **fields: Any) -> None:
        """Sets config fields that nobody has set, as `contribute`; what others set before stays.

        Args:
            owner: Who suggests.
            target: As in `contribute`.
            fields: As in `contribute`.
        """
        known = self._fields[target]
        self.contribute(owner, target, **{name: value for name, value in fields.items() if name not in known})

    def override(self, overrides: Mapping[str, Any], config_classes: Mapping[Target, type]) -> None:
        """Applies the user's `config_overrides` last: fields that have no argument anywhere else.

        Args:
            overrides: Megatron Core's field names and values.
            config_classes: The config dataclass of each target, to check the names against.

        Raises:
            ValueError: A name is in none of the configs, or is owned by the strategy, a callback, the precision
                plugin or the module; or a value is of another type than the field.
        """
        names = {target: {field.name for field in dataclasses.fields(cls)} for target, cls in config_classes.items()}
        for name, value in overrides.items():
            targets = [target for target in TARGETS if name in names.get(target, ())]
            if not targets:
                every_name = sorted(set().union(*names.values()))
                close = difflib.get_close_matches(name, every_name, n=3)
                hint = f"; did you mean {' or '.join(close)}?" if close else ""
                raise ValueError(f"config_overrides: {name!r} is no field of Megatron Core's configs{hint}")
            for target in targets:
                owned = self._fields[target].get(name)
                if owned is not None:
                    raise ValueError(
                        f"config_overrides: {name}={value!r} is already set by {owned.owner} "
                        f"(to {owned.value!r}); set it there instead"
                    )
            for target in targets:
                self.contribute("config_overrides", target, **{name: _typed(name, value, config_classes[target])})

    def get(self, target: Target, name: str, default: Any = None) -> Any:
        """The value of one field, or `default` when nobody set it."""
        contribution = self._fields[target].get(name)
        return default if contribution is None else contribution.value

    def owner(self, target: Target, name: str) -> str | None:
        """Who set a field, or None."""
        contribution = self._fields[target].get(name)
        return None if contribution is None else contribution.owner

    def fields(self, target: Target) -> dict[str, Any]:
        """All fields of a target, as keyword arguments for its config class."""
        return {name: contribution.value for name, contribution in self._fields[target].items()}

    def __iter__(self) -> Iterator[tuple[Target, str, Contribution]]:
        for target in TARGETS:
            for name, contribution in self._fields[target].items():
                yield target, name, contribution

    def validate(self) -> None:
        """Applies every cross-option rule.

        Raises:
            ValueError: The first rule that is broken, with the values, the rule and a way out.
        """
        for rule in RULES:
            rule(self)


def _typed(name: str, value: Any, config_class: type) -> Any:
    """The value of a field of a simple type: bool, int, float, str, an enum (by its name too), or None with these.

    Raises:
        ValueError: The field can't take it. Fields of other types take anything.
    """
    hint = get_type_hints(config_class)[name]
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    if not all(kind in _SIMPLE or isinstance(kind, enum.EnumType) for kind in kinds):
        return value
    if type(value) in kinds or (type(value) is int and float in kinds):
        return value
    members: dict[str, enum.Enum] = {}
    for kind in kinds:
        if isinstance(kind, enum.EnumType):
            members |= kind.__members__
    if value in members:
        return members[value]
    names = [*members, *("None" if kind is NoneType else kind.__name__ for kind in kinds if kind in _SIMPLE)]
    raise ValueError(f"config_overrides: {name}={value!r} must be {' or '.join(names)}, not {type(value).__name__}")


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


def _experts_fit(settings: Settings) -> None:
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


def _latent_attention_fits(settings: Settings) -> None:
    """Multi-latent attention beside tensor parallelism."""
    tp = settings.sizes.tensor_model_parallel_size
    if not settings.get("model", "multi_latent_attention") or tp == 1:
        return
    if not settings.get("model", "sequence_parallel"):
        raise ValueError(
            f"GPTModule(mla=...) with tensor_model_parallel_size={tp} needs sequence_parallel=True: Megatron Core sums "
            "the gradients of the key channels that all heads share only there; set it, or tensor_model_parallel_size=1"
        )
    if settings.get("model", "transformer_impl") == "local":  # Transformer Engine's aren't cut
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
    _experts_fit,
    _overlaps_fit,
    _tp_comm_fits,
    _p2p_fits,
)


def check_vocab(settings: Settings, vocab_size: int, divisible_by: int = 128) -> int:
    """The padded vocabulary size, checked against tensor parallelism.

    Args:
        settings: The merged settings.
        vocab_size: The tokenizer's number of ids.
        divisible_by: The padded size is the next multiple of this, at any layout.

    Raises:
        ValueError: `tensor_model_parallel_size` doesn't divide the padded size.
    """
    return padded_vocab_size(vocab_size, divisible_by, settings.sizes.tensor_model_parallel_size)

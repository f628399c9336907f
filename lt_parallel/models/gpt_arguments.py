"""What the arguments of `GPTModule` may be, by themselves."""

from __future__ import annotations

from typing import Any, Literal, get_args

from lt_parallel.size_checks import require_positive_int

LrDecayStyle = Literal["constant", "linear", "cosine", "inverse-square-root"]
Normalization = Literal["LayerNorm", "RMSNorm"]
PositionEmbedding = Literal["learned_absolute", "rope"]
ValidationMetric = Literal["perplexity", "token_accuracy"]
_CHOICES: dict[str, Any] = {
    "normalization": Normalization,
    "position_embedding_type": PositionEmbedding,
    "lr_decay_style": LrDecayStyle,
}
_POSITIVE = (
    "vocab_size",
    "seq_length",
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "ffn_hidden_size",
    "num_query_groups",
    "kv_channels",
    "max_position_embeddings",
    "make_vocab_size_divisible_by",
    "mtp_num_layers",
    "lr_decay_iters",
    "max_new_tokens",
)
_FLAGS = ("swiglu", "add_bias_linear", "add_qkv_bias", "qk_layernorm", "untie_embeddings_and_output_weights")
_NUMBERS = (
    "layernorm_epsilon",
    "rotary_base",
    "rotary_percent",
    "hidden_dropout",
    "attention_dropout",
    "init_method_std",
    "mtp_loss_scaling_factor",
    "lr",
    "weight_decay",
    "adam_beta1",
    "adam_beta2",
    "adam_eps",
    "lr_warmup_iters",
    "temperature",
    "top_k",
)


def check_gpt_arguments(hp: Any) -> None:
    """Checks what `GPTModule` was given; what depends on the layout is checked when the Trainer starts.

    Args:
        hp: All arguments, by attribute and by key.

    Raises:
        ValueError: The first that is wrong, with its value and the rule.
    """
    for name in _POSITIVE:
        if hp[name] is not None:
            require_positive_int(name, hp[name])
    _check_choices(hp)
    _check_types(hp)
    for name in ("hidden_dropout", "attention_dropout"):
        if not 0 <= hp[name] < 1:
            raise ValueError(f"{name}={hp[name]} must be at least 0 and less than 1")
    if not 0 < hp.rotary_percent <= 1:
        raise ValueError(f"rotary_percent={hp.rotary_percent} must be more than 0 and at most 1")
    if hp.position_embedding_type == "rope":
        _check_rotary(hp)
    if hp.mtp_num_layers is not None:
        _check_mtp(hp)
    if hp.mla is not None and hp.position_embedding_type != "rope":
        raise ValueError(f"mla needs position_embedding_type='rope', not {hp.position_embedding_type!r}")
    if hp.max_position_embeddings is not None and hp.max_position_embeddings < hp.seq_length:
        raise ValueError(
            f"max_position_embeddings={hp.max_position_embeddings} must be at least seq_length={hp.seq_length}"
        )
    _check_schedule(hp)


def _check_choices(hp: Any) -> None:
    chosen = [(name, hp[name], choices) for name, choices in _CHOICES.items()]
    chosen += [("validation_metrics", name, ValidationMetric) for name in hp["validation_metrics"] or ()]
    for name, value, choices in chosen:
        if value not in get_args(choices):
            raise ValueError(f"{name}={value!r} is not one of {', '.join(get_args(choices))}")


def _check_types(hp: Any) -> None:
    for name in _FLAGS:
        if not isinstance(hp[name], bool):
            raise ValueError(f"{name}={hp[name]!r} must be True or False")
    for name in _NUMBERS:
        if not isinstance(hp[name], int | float) or isinstance(hp[name], bool) or not hp[name] >= 0:
            raise ValueError(f"{name}={hp[name]!r} must be a number that isn't negative")
    for name in ("lr_warmup_iters", "top_k"):
        if not isinstance(hp[name], int):
            raise ValueError(f"{name}={hp[name]!r} must be an integer")


def _check_rotary(hp: Any) -> None:
    channels = hp.kv_channels or hp.hidden_size // hp.num_attention_heads
    rotated = int(channels * hp.rotary_percent)
    if rotated % 2 or rotated == 0:
        raise ValueError(
            f"rope turns pairs of channels: {channels} channels per head x rotary_percent={hp.rotary_percent} = "
            f"{rotated}, which must be even and at least 2; change kv_channels or rotary_percent"
        )
    if hp.rotary_base == 0:
        raise ValueError("rotary_base=0 must be positive; usual: 10000")


def _check_mtp(hp: Any) -> None:
    if hp.position_embedding_type != "rope":
        # Their stage would train a copy of the learned positions that nothing keeps equal to the first stage's.
        raise ValueError(
            f"mtp_num_layers={hp.mtp_num_layers} needs position_embedding_type='rope', not "
            f"{hp.position_embedding_type!r}"
        )
    if hp.mtp_num_layers >= hp.seq_length:
        raise ValueError(f"mtp_num_layers={hp.mtp_num_layers} must be less than seq_length={hp.seq_length}")


def _check_schedule(hp: Any) -> None:
    if hp.lr_warmup_iters >= hp.lr_decay_iters:
        raise ValueError(f"lr_warmup_iters={hp.lr_warmup_iters} must be less than lr_decay_iters={hp.lr_decay_iters}")
    if not 0 <= hp.min_lr <= hp.lr:
        raise ValueError(f"min_lr={hp.min_lr} must lie between 0 and lr={hp.lr}")

"""`MultiLatentAttention`: attention whose keys and values are made from one small vector per token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from lt_parallel.size_checks import require_positive_int

if TYPE_CHECKING:
    from lt_parallel.settings import Settings

__all__ = ["MultiLatentAttention"]

_OWNER = "GPTModule(mla=...)"


@dataclass(frozen=True, kw_only=True)
class MultiLatentAttention:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1). Names are Megatron's.

    Args:
        kv_lora_rank: Channels of the vector that a token's keys and values are made from.
        q_lora_rank: The same for queries; None: queries are made from the hidden state.
        qk_head_dim: Channels of a query or key that carry no position.
        qk_pos_emb_head_dim: Channels that are rotated; all heads of a key share them.
        v_head_dim: Channels of a value.
        rope_type: "rope", or "yarn" to go beyond `original_max_position_embeddings` (arXiv:2309.00071).
        rotary_scaling_factor: yarn: how many times longer.
        original_max_position_embeddings: yarn: the length that was trained before.
        beta_fast: yarn: turns within that length above which a channel isn't scaled.
        beta_slow: yarn: turns below which it is scaled whole.
        mscale: yarn: scales the softmax's temperature.
        mscale_all_dim: yarn: the same for the channels without position.

    Raises:
        ValueError: A size is wrong.
    """

    kv_lora_rank: int = 512
    q_lora_rank: int | None = None
    qk_head_dim: int = 128
    qk_pos_emb_head_dim: int = 64
    v_head_dim: int = 128
    rope_type: Literal["rope", "yarn"] = "rope"
    rotary_scaling_factor: float = 40.0
    original_max_position_embeddings: int = 4096
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0

    @classmethod
    def of(cls, given: MultiLatentAttention | Mapping[str, Any] | None) -> MultiLatentAttention | None:
        """What a module was given, which may come from a checkpoint's hyper-parameters as a dictionary."""
        return cls(**given) if isinstance(given, Mapping) else given

    def __post_init__(self) -> None:
        for name in ("kv_lora_rank", "q_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"):
            if getattr(self, name) is not None:
                require_positive_int(name, getattr(self, name))
        if self.qk_pos_emb_head_dim % 2:
            raise ValueError(
                f"qk_pos_emb_head_dim={self.qk_pos_emb_head_dim} must be even: rope turns pairs of channels"
            )
        if self.rope_type not in ("rope", "yarn"):
            raise ValueError(f"rope_type={self.rope_type!r} is not one of rope, yarn")

    def contribute(self, settings: Settings, *, rotary_base: float) -> None:
        """Adds the config fields. The dense fields are to be there already.

        Args:
            settings: The merged settings.
            rotary_base: Base of the rotary frequencies.

        Raises:
            ValueError: They don't fit.
        """
        groups, heads = (settings.get("model", name) for name in ("num_query_groups", "num_attention_heads"))
        if groups not in (None, heads):
            raise ValueError(
                f"GPTModule(mla=...) gives each head its own keys and values; leave num_query_groups={groups} out"
            )
        settings.contribute(
            _OWNER,
            "model",
            multi_latent_attention=True,
            rotary_base=rotary_base,
            **asdict(self),
        )

"""The models that are run, and how long."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

SEED, CLIP = 7, 1.0


@dataclass(frozen=True)
class Shape:
    """A Llama and its step."""

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    ffn_hidden_size: int
    vocab_size: int
    seq_length: int
    micro_batch_size: int
    num_microbatches: int
    warmup: int
    block: int
    blocks: int

    @property
    def tokens(self) -> int:
        """Of one step."""
        return self.seq_length * self.micro_batch_size * self.num_microbatches

    def model(self) -> dict[str, Any]:
        """GPTModule's arguments besides vocabulary and length; embeddings are tied, as in Llama 3.2 1B."""
        fields = ("num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "ffn_hidden_size")
        return {
            **{name: getattr(self, name) for name in fields},
            "normalization": "RMSNorm",
            "swiglu": True,
            "add_bias_linear": False,
            "position_embedding_type": "rope",
            "rotary_base": 500_000,
        }


TINY = Shape(2, 64, 4, 2, 128, 256, 64, 2, 2, warmup=1, block=2, blocks=2)
SHAPES = {"llama_1b": Shape(16, 2048, 32, 8, 8192, 128_256, 4096, 2, 4, warmup=3, block=3, blocks=4), "tiny": TINY}


def rounded(value: float, digits: int = 3) -> float:
    return float(f"{value:.{digits}g}")

"""Models made of Megatron Core chunks."""

from lt_parallel.models.base import MegatronLightningModule
from lt_parallel.models.gpt import GPTModule

__all__ = ["GPTModule", "MegatronLightningModule"]

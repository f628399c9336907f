"""Models made of Megatron Core chunks."""

from lt_parallel.models.base import MegatronLightningModule
from lt_parallel.models.gpt import GPTModule
from lt_parallel.models.mixture_of_experts import MixtureOfExperts
from lt_parallel.models.multi_latent_attention import MultiLatentAttention

__all__ = ["GPTModule", "MegatronLightningModule", "MixtureOfExperts", "MultiLatentAttention"]

"""Layer specifications of a GPT block on a layer backend.

Megatron Core's builders know which layer goes to which pipeline stage and which layers are mixtures of experts, but
accept only its own two backends. So for ``torch`` its local specification is built first and the backend's classes
are then put in their places; for Transformer Engine it is used as it comes.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_decoder_layer_specs,
    get_gpt_mtp_block_spec_for_backend,
    get_mlp_module_spec_for_backend,
)
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import L2Norm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from lt_parallel.plugins.layer_backend.latent_attention import TorchMLASelfAttention
from lt_parallel.plugins.layer_backend.recomputed_layers import RecomputedMoELayer, RecomputedTransformerLayer

if TYPE_CHECKING:
    from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlockSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig

    from lt_parallel.plugins.layer_backend import LayerBackend

__all__ = ["gpt_block_spec", "gpt_mtp_block_spec"]

_QK_NORMS = ("q_layernorm", "k_layernorm", "kv_layernorm")


def gpt_block_spec(
    config: TransformerConfig,
    backend: LayerBackend,
    vp_stage: int | None = None,
    pp_rank: int | None = None,
    recomputed: tuple[str, ...] = (),
) -> TransformerBlockSubmodules:
    """What ``GPTModel(transformer_layer_spec=...)`` needs for one model chunk.

    Args:
        config: Megatron's transformer configuration.
        backend: where the classes come from.
        vp_stage: virtual pipeline stage of the chunk; None without interleaving.
        pp_rank: pipeline rank of the chunk; None takes this process's from Megatron's globals.
        recomputed: parts that `recomputed_layers.py` knows and Megatron Core doesn't.

    Returns:
        The specifications of the chunk's layers, and the class of the final norm.
    """
    use_te = backend.name == "transformer_engine"
    block = get_gpt_decoder_block_spec(
        config,
        use_transformer_engine=use_te,
        normalization=config.normalization,
        qk_l2_norm=config.qk_l2_norm,
        vp_stage=vp_stage,
        pp_rank=pp_rank,
    )
    layers = block.layer_specs
    if not use_te:
        layers = [_with_backend_classes(spec, config, backend) for spec in layers]
        block = replace(block, layer_norm=backend.provider.layer_norm())
    return replace(block, layer_specs=[_recomputing(spec, recomputed) for spec in layers])


def gpt_mtp_block_spec(
    config: TransformerConfig,
    backend: LayerBackend,
    vp_stage: int | None = None,
    pp_rank: int | None = None,
    recomputed: tuple[str, ...] = (),
) -> MultiTokenPredictionBlockSubmodules | None:
    """What ``GPTModel(mtp_block_spec=...)`` needs for one model chunk, or None where no such layer lies in it.

    A multi-token prediction layer holds a transformer layer like the model's last.

    Args:
        config: Megatron's transformer configuration.
        backend: where the classes come from.
        vp_stage: virtual pipeline stage of the chunk; None without interleaving.
        pp_rank: pipeline rank of the chunk; None takes this process's from Megatron's globals.
        recomputed: as in `gpt_block_spec`.
    """
    if not config.mtp_num_layers:
        return None
    use_te = backend.name == "transformer_engine"
    last = get_gpt_decoder_layer_specs(
        config, use_transformer_engine=use_te, normalization=config.normalization, qk_l2_norm=config.qk_l2_norm
    )[-1]
    if not use_te:
        last = _with_backend_classes(last, config, backend)
    # As a block of one layer: by itself Megatron Core would take its own layer class only.
    block = TransformerBlockSubmodules(layer_specs=[_recomputing(last, recomputed)])
    return get_gpt_mtp_block_spec_for_backend(config, block, backend.provider, vp_stage=vp_stage, pp_rank=pp_rank)


def _with_backend_classes(spec: ModuleSpec, config: TransformerConfig, backend: LayerBackend) -> ModuleSpec:
    """One of Megatron's local layer specifications with the backend's norms, attention and expert layers."""
    provider, layer = backend.provider, spec.submodules
    attention = layer.self_attention
    qk_norms = {
        name: provider.layer_norm(for_qk=True)
        for name in _QK_NORMS
        if getattr(attention.submodules, name, None) not in (None, IdentityOp, L2Norm)
    }
    attention = replace(
        attention,
        module=TorchMLASelfAttention if attention.module is MLASelfAttention else attention.module,
        submodules=replace(attention.submodules, core_attention=provider.core_attention(), **qk_norms),
    )
    mlp = layer.mlp
    if isinstance(mlp, partial) and mlp.func is MoELayer:
        mlp = get_mlp_module_spec_for_backend(provider, config.num_moe_experts, config.moe_grouped_gemm)
    layer = replace(
        layer,
        input_layernorm=provider.layer_norm(has_residual=True),
        self_attention=attention,
        pre_mlp_layernorm=provider.layer_norm(has_residual=True),
        mlp=mlp,
    )
    return replace(spec, submodules=layer)


def _recomputing(spec: ModuleSpec, recomputed: tuple[str, ...]) -> ModuleSpec:
    """A layer specification with the classes that recompute these parts."""
    if not recomputed:
        return spec
    layer, options = spec.submodules, {"recomputed": recomputed}
    if isinstance(layer.mlp, partial) and layer.mlp.func is MoELayer:
        layer = replace(layer, mlp=partial(RecomputedMoELayer, **layer.mlp.keywords, **options))
    return replace(spec, module=RecomputedTransformerLayer, submodules=layer, params={**spec.params, **options})

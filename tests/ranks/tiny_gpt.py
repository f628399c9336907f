"""Tiny GPT models on the torch backend for tests that run in ranks, and their parameters by global name and place."""

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig

from lt_parallel.models.initialization import defer_initialization, initialize_chunks
from lt_parallel.plugins.layer_backend import resolve_layer_backend
from lt_parallel.plugins.layer_backend.specs import gpt_block_spec, gpt_mtp_block_spec
from tests.support.ranks import init_gloo

SEQUENCE = 16
PADDED_VOCABULARY = 384  # of 300 tokens; two row tiles of the initialisation, the second one partial

# More columns than one tile of the initialisation, so that tensor parallel cuts fall inside tiles and between them.
_COMMON = {"num_layers": 4, "hidden_size": 64, "ffn_hidden_size": 768, "hidden_dropout": 0.0, "attention_dropout": 0.0}
SHAPES: dict[str, dict[str, Any]] = {
    "gpt2": _COMMON | {"num_attention_heads": 4},
    "llama": _COMMON
    | {
        "num_attention_heads": 8,
        "num_query_groups": 4,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
    },
}
SHAPES["qk_norm"] = SHAPES["llama"] | {"qk_layernorm": True}
SHAPES["moe"] = SHAPES["llama"] | {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_layer_freq": [0, 1, 1, 1],
    "moe_aux_loss_coeff": 0.0,
    "moe_token_dispatcher_type": "alltoall",
    "moe_grouped_gemm": False,
}
SHAPES["mtp"] = SHAPES["llama"] | {"mtp_num_layers": 1}


@dataclass
class Layout:
    """Parallel sizes, and further fields of Megatron's configuration.

    Args:
        world_size: number of ranks.
        tp: tensor parallel size.
        pp: pipeline parallel size.
        vpp: virtual pipeline stages per rank; None without interleaving.
        ep: expert parallel size.
        etp: expert tensor parallel size.
        sequence_parallel: whether sequence parallelism is on.
        config: further fields.
    """

    world_size: int = 1
    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    ep: int = 1
    etp: int = 1
    sequence_parallel: bool = False
    config: dict[str, Any] = field(default_factory=dict)


def initialize_parallel(layout: Layout) -> None:
    """Process groups and random streams, as a strategy would make them."""
    if not dist.is_initialized():
        init_gloo()
    parallel_state.initialize_model_parallel(
        layout.tp, layout.pp, layout.vpp, expert_model_parallel_size=layout.ep, expert_tensor_parallel_size=layout.etp
    )
    model_parallel_cuda_manual_seed(1)


def make_config(shape: str, layout: Layout, **fields: Any) -> TransformerConfig:
    """Megatron's configuration of a shape at a layout."""
    backend = resolve_layer_backend("auto", "cpu")
    return TransformerConfig(
        **SHAPES[shape]
        | backend.config_fields
        | {
            "tensor_model_parallel_size": layout.tp,
            "pipeline_model_parallel_size": layout.pp,
            "virtual_pipeline_model_parallel_size": layout.vpp,
            "expert_model_parallel_size": layout.ep,
            "expert_tensor_parallel_size": layout.etp,
            "sequence_parallel": layout.sequence_parallel,
            "pipeline_dtype": torch.float32,
        }
        | layout.config
        | fields
    )


def build_chunks(
    shape: str, layout: Layout, seed: int | None = 1234, vocabulary: int = PADDED_VOCABULARY, **fields: Any
) -> list[GPTModel]:
    """This rank's model chunks, initialised unless the seed is None."""
    config = make_config(shape, layout, **fields)
    defer_initialization(config)
    backend = resolve_layer_backend("auto", "cpu")
    gpt2 = shape == "gpt2"
    chunks = []
    for vp_stage in [None] if layout.vpp is None else range(layout.vpp):
        where = {"ignore_virtual": vp_stage is None, "vp_stage": vp_stage}
        chunks.append(
            GPTModel(
                config,
                gpt_block_spec(config, backend, vp_stage),
                vocabulary,
                SEQUENCE,
                pre_process=parallel_state.is_pipeline_first_stage(**where),
                post_process=parallel_state.is_pipeline_last_stage(**where),
                share_embeddings_and_output_weights=gpt2,
                position_embedding_type="learned_absolute" if gpt2 else "rope",
                mtp_block_spec=gpt_mtp_block_spec(config, backend, vp_stage),
                vp_stage=vp_stage,
            )
        )
    if seed is not None:
        initialize_chunks(chunks, seed)
    return chunks


Shard = tuple[str, tuple[int, ...], tuple[int | slice, ...], torch.Tensor]


def shards_of(chunks: list[GPTModel], attribute: str | None = None) -> list[Shard]:
    """Every parameter (or an attribute of it, such as its gradient) as (name, global shape, place in it, values).

    Values are numpy-backed copies, to travel between processes.
    """
    shards: list[Shard] = []
    for chunk in chunks:
        entries = chunk.sharded_state_dict()
        parameters = dict(chunk.named_parameters())
        for name, param in parameters.items():
            values = param if attribute is None else getattr(param, attribute)
            entry = entries[name]
            if hasattr(entry, "build"):
                entry = type(entry)(entry.key, values, entry.build_fn, entry.merge_fn, entry.replica_id)
                built = {"halves": entry}
                apply_factories(built)
                pieces = built["halves"]
            else:
                pieces = [
                    ShardedTensor(
                        **{key: getattr(entry, key) for key in entry.__dataclass_fields__}
                        | {"data": values.detach(), "dtype": values.dtype}
                    )
                ]
            for piece in pieces:
                values_copy = piece.data.detach().clone()
                shards.append((piece.key, piece.global_shape, piece.global_slice(), values_copy))
    return shards


def assemble(shards_by_rank: list[list[Shard]]) -> dict[str, torch.Tensor]:
    """Whole parameters from the shards of all ranks. Copies must agree bit for bit, and nothing may be missing."""
    whole: dict[str, torch.Tensor] = {}
    for name, shape, place, values in (shard for shards in shards_by_rank for shard in shards):
        target = whole.setdefault(name, torch.full(shape, torch.nan))
        known = target[place]
        assert torch.equal(known[~known.isnan()], values[~known.isnan()]), f"copies of {name} differ"
        target[place] = values
    missing = [name for name, values in whole.items() if values.isnan().any()]
    assert not missing, f"parts of {missing} are on no rank"
    return whole

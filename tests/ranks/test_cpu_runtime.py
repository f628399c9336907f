"""Bare Megatron Core on the CPU runtime: its layouts, recompute and uneven collectives give the numbers they must."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import lt_parallel  # noqa: F401  (before megatron.core)
from tests.support.ranks import init_gloo, run_ranks

VOCABULARY, SEQUENCE, MICRO_BATCHES, GLOBAL_BATCH, STEPS = 64, 16, 4, 16, 3


class _Norm(torch.nn.LayerNorm):
    """Megatron's own local norm refuses sequence parallelism, whose gradients are summed by this mark."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **options: Any) -> None:
        super().__init__(hidden_size, eps=eps)
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


def _build_chunks(config: Any, tied: bool) -> list[torch.nn.Module]:
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import transformer_block

    spec = get_gpt_layer_local_spec(num_experts=config.num_moe_experts)
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = transformer_block.LayerNormImpl = _Norm
    chunks: list[torch.nn.Module] = []
    virtual = config.virtual_pipeline_model_parallel_size
    for stage in range(virtual) if virtual else [None]:
        place = {"ignore_virtual": virtual is None, "vp_stage": stage}
        chunk = GPTModel(
            config,
            spec,
            VOCABULARY,
            SEQUENCE,
            pre_process=parallel_state.is_pipeline_first_stage(**place),
            post_process=parallel_state.is_pipeline_last_stage(**place),
            share_embeddings_and_output_weights=tied,
            position_embedding_type="rope",
            vp_stage=stage,
        )
        _initialize(chunk)
        chunks.append(chunk)
    return chunks


def _initialize(chunk: Any) -> None:
    """The same values for the same part of the same parameter, at every layout."""
    for sharded in chunk.sharded_state_dict().values():
        data = getattr(sharded, "data", None)
        if isinstance(data, torch.Tensor) and data.is_floating_point():
            prepended = sharded.prepend_axis_num
            key = f"{sharded.key}{sharded.global_offset[:prepended]}"
            generator = torch.Generator().manual_seed(zlib.crc32(key.encode()))
            whole = torch.randn(sharded.global_shape[prepended:], generator=generator) * 0.05
            offsets = sharded.global_offset[prepended:]
            cut = tuple(slice(start, start + size) for start, size in zip(offsets, sharded.local_shape, strict=True))
            with torch.no_grad():
                data.copy_(whole[cut] + ("layernorm.weight" in sharded.key))


def _micro_batches(step: int, rank: int, size: int) -> Iterator[dict[str, torch.Tensor]]:
    tokens = torch.randint(0, VOCABULARY, (GLOBAL_BATCH, SEQUENCE + 1), generator=torch.Generator().manual_seed(step))
    for part in tokens[rank::size].chunk(MICRO_BATCHES):
        yield {"tokens": part[:, :-1].contiguous(), "labels": part[:, 1:].contiguous()}


def _forward_step(batches: Iterator[dict[str, torch.Tensor]], chunk: torch.nn.Module) -> Any:
    batch = next(batches)
    positions = torch.arange(SEQUENCE).expand_as(batch["tokens"])
    mask = torch.ones(1, 1, SEQUENCE, SEQUENCE).triu(1) > 0.5

    def loss(output: torch.Tensor) -> Any:
        total, count = output.sum(), torch.tensor(output.numel(), dtype=torch.int)
        return total, count, {"loss": torch.stack([total.detach(), count.float()])}

    return chunk(batch["tokens"], positions, mask, labels=batch["labels"]), loss


def train(parallel: dict[str, Any], fields: dict[str, Any], ddp: dict[str, Any], tied: bool) -> list[float]:
    """Loss and gradient norm of each step, the same on every rank."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig

    from lt_parallel.plugins.layer_backend.missing_names import provide_missing_names

    provide_missing_names()  # as the torch backend does
    init_gloo()
    parallel_state.initialize_model_parallel(**parallel)
    model_parallel_cuda_manual_seed(1)
    base = {
        "num_layers": 4,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "add_bias_linear": False,
        "gradient_accumulation_fusion": False,
        "calculate_per_token_loss": True,
        "pipeline_dtype": torch.float32,
        "batch_p2p_comm": False,
        "overlap_p2p_comm": "virtual_pipeline_model_parallel_size" in parallel,
        "moe_router_load_balancing_type": "none",
    }
    config = TransformerConfig(**(base | parallel | fields))
    ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, **ddp)
    chunks = [
        DistributedDataParallel(config, ddp_config, chunk, disable_bucketing=index > 0)
        for index, chunk in enumerate(_build_chunks(config, tied))
    ]
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            lr=1e-2,
            clip_grad=1.0,
            use_distributed_optimizer=ddp_config.use_distributed_optimizer,
            overlap_param_gather=ddp_config.overlap_param_gather,
        ),
        chunks,
    )
    config.finalize_model_grads_func, config.grad_scale_func = finalize_model_grads, optimizer.scale_loss
    if ddp_config.overlap_grad_reduce:
        config.no_sync_func = [chunk.no_sync for chunk in chunks] if len(chunks) > 1 else chunks[0].no_sync
    if ddp_config.overlap_param_gather:
        syncs = [chunk.start_param_sync for chunk in chunks]
        config.param_sync_func = syncs if len(chunks) > 1 else syncs[0]
    numbers: list[float] = []
    for step in range(STEPS):
        for chunk in chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        batches = partial(
            _micro_batches, step, parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
        )
        losses = get_forward_backward_func()(
            forward_step_func=_forward_step,
            data_iterator=[batches() for _ in chunks] if len(chunks) > 1 else batches(),
            model=chunks,
            num_microbatches=MICRO_BATCHES,
            seq_length=SEQUENCE,
            micro_batch_size=GLOBAL_BATCH // parallel_state.get_data_parallel_world_size() // MICRO_BATCHES,
            forward_only=False,
        )
        _, grad_norm, _ = optimizer.step()
        total = torch.stack([loss["loss"] for loss in losses]).sum(0) if losses else torch.zeros(2)
        dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
        last = parallel_state.get_pipeline_model_parallel_last_rank()
        dist.broadcast(total, last, group=parallel_state.get_pipeline_model_parallel_group())
        numbers += [float(total[0] / total[1]), float(grad_norm)]
    return numbers


TP, PP, VPP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"
EP, ETP = "expert_model_parallel_size", "expert_tensor_parallel_size"
OPTIM = {"use_distributed_optimizer": True}
OVERLAP = OPTIM | {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 4000}
SP = {"sequence_parallel": True}
MOE = {"num_moe_experts": 4}


def _check_against_one_process(
    world_size: int, parallel: dict[str, Any], fields: dict[str, Any], ddp: dict[str, Any], tied: bool = False
) -> None:
    kept = {key: value for key, value in fields.items() if key == "num_moe_experts"}
    expected = run_ranks(train, 1, {}, kept, {}, tied)[0]
    for numbers in run_ranks(train, world_size, parallel, fields, ddp, tied):
        assert numbers == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("parallel", "fields", "ddp", "tied"),
    [
        pytest.param({TP: 2, PP: 2}, SP, {}, False, id="tp2-pp2-sp"),
        pytest.param({TP: 2, PP: 2}, {}, OPTIM, True, id="tp2-pp2-optim-tied"),
        pytest.param({PP: 2, VPP: 2}, {}, OVERLAP, False, id="pp2-vpp2-dp2-optim-overlap"),
        pytest.param(
            {TP: 2, EP: 2, ETP: 2}, MOE | SP | {"moe_token_dispatcher_type": "alltoall"}, {}, False, id="etp2"
        ),
        pytest.param({EP: 2, ETP: 1}, MOE | {"moe_token_dispatcher_type": "allgather"}, {}, False, id="ep2-allgather"),
    ],
)
def test_layouts_equal_one_process(
    parallel: dict[str, Any], fields: dict[str, Any], ddp: dict[str, Any], tied: bool
) -> None:
    _check_against_one_process(4, parallel, fields, ddp, tied)


@pytest.mark.parametrize(
    "recompute",
    [
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "layernorm", "mlp"]},
    ],
    ids=["full", "selective"],
)
def test_recompute_draws_the_same_dropout(recompute: dict[str, Any]) -> None:
    """Attention dropout draws from the tensor-parallel stream, hidden dropout from the default one."""
    dropout = SP | {"attention_dropout": 0.2, "hidden_dropout": 0.2}
    expected = run_ranks(train, 2, {TP: 2}, dropout, {}, False)
    assert run_ranks(train, 2, {TP: 2}, dropout | recompute, {}, False) == [
        pytest.approx(n, rel=1e-6) for n in expected
    ]
    assert expected[0] != pytest.approx(run_ranks(train, 2, {TP: 2}, SP, {}, False)[0], rel=1e-3)


def uneven_collectives(sizes: list[int]) -> dict[str, Any]:
    """Gathers and scatters a different number of rows per rank through Megatron's autograd functions."""
    from megatron.core.tensor_parallel import mappings

    from lt_parallel.plugins import cpu_runtime

    init_gloo()
    rank, group = dist.get_rank(), dist.group.WORLD
    rows = torch.full((sizes[rank], 2), float(rank + 1), requires_grad=True)
    gathered = mappings.gather_from_sequence_parallel_region(rows, group=group, output_split_sizes=sizes)
    (gathered * torch.arange(1.0, 1 + len(gathered))[:, None]).sum().backward()
    outputs = [torch.empty(size, 2) for size in sizes]
    work = cpu_runtime._all_gather(outputs, rows.detach(), group=group, async_op=True)
    assert work is not None
    work.wait()
    return {
        "gathered": gathered[:, 0].tolist(),
        "grad": rows.grad[:, 0].tolist(),
        "async": torch.cat(outputs)[:, 0].tolist(),
    }


def test_uneven_gather_and_its_gradient() -> None:
    sizes = [2, 0, 3]
    results = run_ranks(uneven_collectives, 3, sizes)
    for rank, result in enumerate(results):
        assert result["gathered"] == result["async"] == [1, 1, 3, 3, 3]
        start = sum(sizes[:rank])
        assert result["grad"] == [3.0 * (row + 1) for row in range(start, start + sizes[rank])]


class Names(TorchDispatchMode):
    """The operators that went by."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.name())
        return func(*args, **(kwargs or {}))


def gathers_in_flight(count: int) -> tuple[set[str], bool]:
    """Gathers as Megatron's buffers begin them, all under way before the first is waited for; were all right?"""
    from lt_parallel.plugins import cpu_runtime

    init_gloo()
    rank, size = dist.get_rank(), dist.get_world_size()
    gathered = [[torch.zeros(size * 100 * (layer + 1)) for layer in range(3)] for _ in range(count)]
    managers = []
    with Names() as seen:
        for number, outputs in enumerate(gathered):
            with cpu_runtime._coalescing_manager(dist.group.WORLD, async_ops=True) as manager:
                for output in outputs:
                    own = torch.full((output.numel() // size,), float(number * size + rank))
                    dist.all_gather_into_tensor(output, own, group=dist.group.WORLD, async_op=True)
            managers.append(manager)
        for manager in managers:
            manager.wait()
    right = [
        output.view(size, -1)[source].eq(number * size + source).all().item()
        for number, outputs in enumerate(gathered)
        for output in outputs
        for source in range(size)
    ]
    return seen.names, all(right)


def test_gathers_are_not_coalesced() -> None:
    """Gloo's coalesced gathers overwrite memory that isn't theirs when several are under way."""
    for names, right in run_ranks(gathers_in_flight, 2, 20):
        assert right
        assert "c10d::_allgather_base_" in names
        assert "c10d::allgather_into_tensor_coalesced_" not in names


def tracker_streams() -> tuple[list[float], list[float], bool, list[str]]:
    """Draws inside the tensor-parallel stream and outside; whether the outer one stood still; what was logged."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random

    init_gloo()
    parallel_state.initialize_model_parallel(2)
    random.model_parallel_cuda_manual_seed(7)
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger(random.__name__).addHandler(handler)
    before = torch.get_rng_state()
    with random.get_cuda_rng_tracker().fork():
        inside = torch.rand(3).tolist()
    untouched = torch.equal(before, torch.get_rng_state())
    return inside, torch.rand(3).tolist(), untouched, logged


def test_tensor_parallel_streams_differ_and_the_default_stream_agrees() -> None:
    (inside_0, outside_0, *rest_0), (inside_1, outside_1, *rest_1) = run_ranks(tracker_streams, 2)
    assert inside_0 != inside_1
    assert outside_0 == outside_1
    assert rest_0 == rest_1 == [True, []]

"""What fake ranks do with a recipe: build their stage, or train a step. Runs inside `FakeWorld.run_rank`."""

from __future__ import annotations

import contextlib
import math
import pkgutil
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

from lt_parallel.recipe_files import recipe_path


class Parameter(NamedTuple):
    """One parameter of a rank, or a part of one where the checkpoint has parts (the gated MLP's two halves).

    Attributes:
        key: Its name in the whole model.
        global_shape: Of the whole parameter.
        offset: Where this rank's part begins.
        local: Numbers in this rank's part.
        is_cut: Whether tensor-parallel ranks hold different parts, as Megatron Core marks it.
    """

    key: str
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    local: int
    is_cut: bool


class Stage(NamedTuple):
    """What a fake rank has built."""

    parameters: list[Parameter]
    numbers: int
    devices: set[str]
    dtypes: set[str]
    coordinates: dict[str, int]


def parse(recipe: str, *overrides: str) -> Any:
    """The recipe's Trainer, model and data, as `lt-parallel fit` makes them."""
    from lt_parallel.lightning_cli import MegatronCLI

    options = ("--trainer.accelerator=cuda", "--trainer.logger=false", "--trainer.enable_progress_bar=false")
    return MegatronCLI("fit", ["--config", str(recipe_path(recipe)), *options, *overrides], run=False)


def build_stage(recipe: str, *overrides: str) -> Stage:
    """Goes the way of a run up to the model: settings, process groups, chunks, their device and precision."""
    cli = parse(recipe, *overrides)
    strategy, module = cli.trainer.strategy, cli.model
    strategy.connect(module)
    module.trainer = cli.trainer
    strategy.setup_environment()
    module.configure_model()
    strategy.model_to_device()
    strategy.precision_plugin.convert_chunks(list(module.model_chunks), strategy.model_config)
    parameters = []
    for chunk in module.model_chunks:
        # Layers by their numbers, so that a name stands for one parameter of the whole model.
        entries = chunk.sharded_state_dict(metadata={"non_homogeneous_layers": True})
        for name, parameter in chunk.named_parameters():
            parameters += _described(parameter, entries[name])
    dense, expert = (
        place(strategy.global_rank) for place in (strategy.sizes.coordinates, strategy.sizes.expert_coordinates)
    )
    held = list(module.model_chunks.parameters())
    return Stage(
        parameters,
        sum(parameter.numel() for parameter in held),
        {str(parameter.device) for parameter in held},
        {str(parameter.dtype) for parameter in held},
        {"tp": dense.tp, "pp": dense.pp, "etp": expert.etp, "ep": expert.ep},
    )


def build_stage_as_with_deepep(recipe: str, *overrides: str) -> Stage:
    """As `build_stage` where DeepEP is installed: a model that is only built calls nothing of it."""
    moe = "megatron.core.transformer.moe"
    names = ("fused_dispatch", "fused_combine", "set_deepep_num_sms")
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch(f"{moe}.fused_a2a.HAVE_DEEP_EP", True))
        for name in names:
            stack.enter_context(mock.patch(f"{moe}.token_dispatcher.{name}", mock.Mock(spec=())))
        return build_stage(recipe, *overrides)


def _described(parameter: Any, entry: Any) -> list[Parameter]:
    pieces = list(_pieces(entry))
    assert sum(math.prod(piece.local_shape) for piece in pieces) == parameter.numel()
    is_cut = bool(getattr(parameter, "tensor_model_parallel", False))
    return [
        Parameter(
            piece.key, tuple(piece.global_shape), tuple(piece.global_offset), math.prod(piece.local_shape), is_cut
        )
        for piece in pieces
    ]


def _pieces(entry: Any) -> Any:
    if hasattr(entry, "build"):
        entry = entry.build()
    if isinstance(entry, dict | list):
        for each in entry.values() if isinstance(entry, dict) else entry:
            yield from _pieces(each)
    else:
        yield entry


class Trained(NamedTuple):
    """What a fake rank's step has left.

    Attributes:
        steps: The Trainer's count.
        calls: How often each of `COUNTED` ran.
        places: (device, dtype) of parameters, gradient buffers, what the optimizer steps, and metrics.
        metrics: Names that callbacks see.
    """

    steps: int
    calls: dict[str, int]
    places: dict[str, set[tuple[str, str]]]
    metrics: set[str]


#: What must run in a step, by its dotted name.
COUNTED = (
    "lt_parallel.plugins.layer_backend.attention.TorchDotProductAttention.forward",
    "lt_parallel.ops.context_parallel_attention.ring_attention",
    "lt_parallel.plugins.layer_backend.experts.grouped_linear",
    "lt_parallel.models.gpt.GPTModule.loss_function",
    "megatron.core.distributed.DistributedDataParallel.finish_grad_sync",
    "megatron.core.distributed.finalize_model_grads",
    "megatron.core.optimizer.distrib_optimizer.DistributedOptimizer.step_with_ready_grads",
    "torch.optim.AdamW.step",
)


def train_step(recipe: str, fault: str | None = None, *overrides: str) -> Trained:
    """`Trainer.fit` of one global step, with the recipe's own callbacks, on tokens that aren't there.

    Args:
        recipe: Its name.
        fault: A mistake to make, one of `FAULTS`.
        *overrides: More arguments.
    """
    import torch
    from lightning.pytorch.callbacks import Checkpoint
    from torch.utils.data import DataLoader

    cli = parse(recipe, "--trainer.max_steps=1", "--trainer.limit_val_batches=0", *overrides)
    trainer, data = cli.trainer, cli.datamodule
    # There are no numbers that could be written.
    trainer.callbacks = [callback for callback in trainer.callbacks if not isinstance(callback, Checkpoint)]
    loader = DataLoader(_Tokens(data.seq_length, 1024), batch_size=data.micro_batch_size)
    calls: Counter[str] = Counter()
    with contextlib.ExitStack() as stack:
        for target in COUNTED:
            stack.enter_context(_counted(calls, target))
        for stand_in in (_evenly_routed, _recomputed_on_the_way_back):
            stack.enter_context(stand_in())
        if fault is not None:
            stack.enter_context(FAULTS[fault]())
        trainer.fit(cli.model, train_dataloaders=loader)
    wrapped, groups = trainer.strategy.wrapped_chunks, trainer.strategy.megatron_optimizer.param_groups
    tensors = {
        "parameters": [parameter for chunk in wrapped for parameter in chunk.parameters()],
        "gradients": [buffer.grad_data for chunk in wrapped for buffer in chunk.buffers],
        "stepped": [parameter for group in groups for parameter in group["params"]],
        "metrics": [value for value in trainer.callback_metrics.values() if isinstance(value, torch.Tensor)],
    }
    places = {name: {(str(each.device), str(each.dtype)) for each in found} for name, found in tensors.items()}
    return Trained(trainer.global_step, dict(calls), places, set(trainer.callback_metrics))


def _evenly_routed() -> Any:
    """Every expert gets as many tokens from every rank, where the host reads how many: fake tensors don't say.

    Arrays of numpy stand for the tensors that Megatron Core would have copied to the CPU, and for its two lists of
    indices, which are on the CPU all the time.
    """
    import numpy as np

    def around(original: Any, dispatcher: Any, point: str, tokens_per_expert: Any = None) -> Any:
        del original
        if point != dispatcher.cuda_dtoh_point:
            return tokens_per_expert
        ranks, local = dispatcher.ep_size * dispatcher.tp_size, dispatcher.num_local_experts
        each, rest = divmod(dispatcher.num_out_tokens, dispatcher.num_experts)
        assert rest == 0, "choose a number of tokens that the experts divide"
        counts = {
            "input_splits": np.full(dispatcher.ep_size, each * local),
            "output_splits": np.full(dispatcher.ep_size, each * local),
            "output_splits_tp": np.full(dispatcher.tp_size, each * local * dispatcher.ep_size),
            "num_global_tokens_per_local_expert": np.full((ranks, local), each),
        }
        for name, value in counts.items():
            on_device = getattr(dispatcher, name)
            assert (on_device.device.type, on_device.shape) == ("cuda", value.shape)
            setattr(dispatcher, name, value)
        chunks = np.arange(ranks * local)
        dispatcher.sort_input_by_local_experts = chunks.reshape(-1, local).T.ravel()
        dispatcher.restore_output_by_local_experts = chunks.reshape(local, -1).T.ravel()
        return np.full(local, each * ranks)

    target = "megatron.core.transformer.moe.token_dispatcher.MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize"
    return _wrapped(target, around)


@contextlib.contextmanager
def _recomputed_on_the_way_back() -> Iterator[None]:
    """Runs the hooks by which Megatron Core computes discarded outputs again, which `PythonEngine` doesn't see.

    The extension in C++ that gives an output the new one's memory would be compiled; without memory it has nothing to
    do but to find two tensors of the same kind.
    """
    hooks: dict[Any, list[Any]] = {}

    def register(original: Any, checkpoint: Any, hook_tensor: Any) -> None:
        original(checkpoint, hook_tensor)
        if hook_tensor.requires_grad:
            hooks.setdefault(hook_tensor.grad_fn, []).append(checkpoint._recompute)

    def call(original: Any, engine: Any, node: Any, grads: list[Any]) -> Any:
        for hook in hooks.pop(node, ()):
            hook(grads[0])
        return original(engine, node, grads)

    def share_storage(output: Any, again: Any) -> None:
        assert (output.shape, output.dtype, output.device) == (again.shape, again.dtype, again.device)

    module = "megatron.core.tensor_parallel.random"
    with (
        _wrapped(f"{module}.CheckpointWithoutOutput.discard_output_and_register_recompute", register),
        _wrapped("tests.support.fake_backward.PythonEngine._call", call),
        _wrapped(f"{module}._get_share_storage", lambda original: share_storage),
        _wrapped("torch.autograd._is_checkpoint_valid", lambda original: True),
    ):
        yield
    assert not hooks, "an output was discarded and never needed"


class _Tokens:
    """A data set of sequences on the CPU."""

    def __init__(self, seq_length: int, length: int) -> None:
        self.seq_length, self.length = seq_length, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        import torch

        ids = {name: torch.zeros(self.seq_length, dtype=torch.int64) for name in ("tokens", "labels", "position_ids")}
        return {**ids, "loss_mask": torch.ones(self.seq_length)}


def _counted(calls: Counter[str], target: str) -> Any:
    def around(original: Any, *args: Any, **kwargs: Any) -> Any:
        calls[target.rpartition(".")[2]] += 1
        return original(*args, **kwargs)

    return _wrapped(target, around)


@contextlib.contextmanager
def _wrapped(target: str, around: Any) -> Iterator[None]:
    """Calls `around(original, *args)` in the place of a function, given by its dotted name."""
    owner = pkgutil.resolve_name(target.rpartition(".")[0])
    name = target.rpartition(".")[2]
    original = getattr(owner, name)

    def replaced(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    with mock.patch.object(owner, name, replaced):
        yield


def _cpu_tensor_in_a_layer() -> Any:
    import torch

    def around(original: Any, module: Any, x: Any) -> Any:
        return original(module, x) * torch.ones(x.size(-1), dtype=x.dtype)

    return _wrapped("lt_parallel.plugins.layer_backend.norms.SequenceParallelRMSNorm.forward", around)


def _wrong_dtype_in_a_layer() -> Any:
    target = "lt_parallel.plugins.layer_backend.norms.SequenceParallelRMSNorm.forward"
    return _wrapped(target, lambda original, module, x: original(module, x).float())


def _cpu_tensor_in_a_collective() -> Any:
    import torch

    def around(original: Any, reducer: Any, dp_cp_group: Any, pp_group: Any, device: Any) -> None:
        original(reducer, dp_cp_group, pp_group, torch.device("cpu"))

    return _wrapped("lt_parallel.strategies.step_metrics.StepMetricsReducer.__init__", around)


def _cpu_tensor_in_a_backward() -> Any:
    target = "lt_parallel.ops.ring_attention._RingAttention.backward"
    return _wrapped(target, lambda original, *args: tuple(g if g is None else g.cpu() for g in original(*args)))


def _wrong_dtype_in_experts() -> Any:
    target = "lt_parallel.plugins.layer_backend.experts.grouped_linear"
    return _wrapped(target, lambda original, x, weight, counts: original(x, weight.float(), counts))


#: Mistakes that a step on a GPU doesn't survive, and that a CPU doesn't notice.
FAULTS = {
    "CPU tensor in a layer": _cpu_tensor_in_a_layer,
    "wrong dtype in a layer": _wrong_dtype_in_a_layer,
    "CPU tensor in a collective": _cpu_tensor_in_a_collective,
    "CPU tensor in a backward": _cpu_tensor_in_a_backward,
    "wrong dtype in experts": _wrong_dtype_in_experts,
}

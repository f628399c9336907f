"""Faults that a run survives in silence, said once: parameters without a gradient, and a loss that isn't finite.

Megatron Core's gradient buffers are there for every trained parameter, zeros where no gradient came. So a parameter
that takes no part in the loss is stepped like the others: AdamW's weight decay shrinks it, step by step. Lightning's
own DDP raises in that case. Here it's a warning with names, as a part that only some batches use looks the same. With
overlapped reductions it's an error: Megatron Core waits for every gradient of a bucket on every rank, and would fail in
the next step by an assertion without a text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn

_SHOWN = 10  # names
_LAYER = re.compile(r"(?:.*\.)?layers\.\d+")


class UnusedParameters:
    """Says which trained parameters of the model got no gradient in the first step; later steps cost nothing.

    Experts are left out: the router may send them no token. So are chunks that Megatron-FSDP wraps, whose parameters
    change places.

    Args:
        wrapped: This rank's wrapped chunks.
        device: This rank's, for the exchange.
    """

    def __init__(self, wrapped: Sequence[nn.Module], device: torch.device) -> None:
        self._wrapped, self._device = wrapped, device
        self._looked = False

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Around forward and backward of a step; the first time collective over all ranks.

        Raises:
            ValueError: Gradients are reduced while the backward pass runs, and some rank has none for a parameter.
        """
        if self._looked:
            yield
            return
        self._looked = True
        trained = {name: parameter for chunk in self._wrapped for name, parameter in _trained_parameters(chunk)}
        used: set[str] = set()
        handles = [parameter.register_hook(partial(_note, used, name)) for name, parameter in trained.items()]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        self._report([name for name in trained if name not in used], used)

    def _report(self, unused: list[str], used: set[str]) -> None:
        count = torch.tensor(len(unused), device=self._device)
        torch.distributed.all_reduce(count)
        if int(count) == 0:
            return
        suspects = list(dict.fromkeys(name for names in _from_every_rank(unused) for name in names))
        if any(_reduces_in_backward(chunk) for chunk in self._wrapped):
            raise ValueError(
                "overlap_grad_reduce (CommunicationOverlap(grad_reduce=True)) needs a gradient of each trained "
                f"parameter in each step on every rank, but on some rank {_listed(suspects)}; set requires_grad=False "
                "on what takes no part in the loss, let the loss of every step depend on the rest, or leave "
                "grad_reduce out"
            )
        # Data-parallel ranks may use different parts.
        used_somewhere = {name for names in _from_every_rank([n for n in suspects if n in used]) for name in names}
        unused_everywhere = [name for name in suspects if name not in used_somewhere]
        if unused_everywhere:
            rank_zero_warn(
                f"{_listed(unused_everywhere)}. What takes no part in the loss is stepped all the same: weight decay "
                "shrinks it. Set requires_grad=False on it before training, or let the loss depend on it; where only "
                "some batches use it, nothing is wrong"
            )


def _reduces_in_backward(wrapped: nn.Module) -> bool:
    return bool(getattr(getattr(wrapped, "ddp_config", None), "overlap_grad_reduce", False))


def _from_every_rank(names: list[str]) -> list[list[str]]:
    every: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(every, names)
    return every


def _note(used: set[str], name: str, gradient: Tensor | None) -> None:
    if gradient is not None:
        used.add(name)


def _trained_parameters(wrapped: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Global name and parameter of what a chunk trains, experts left out."""
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.transformer.module import Float16Module

    from lt_parallel.strategies.plain_module import PlainModuleChunk

    if not isinstance(wrapped, DistributedDataParallel):
        return
    module: Any = wrapped
    while isinstance(module, DistributedDataParallel | Float16Module | PlainModuleChunk):
        module = module.module
    layers = {
        f"{name}.": f"{name.rpartition('.')[0]}.{layer.layer_number - 1}."
        for name, layer in module.named_modules()
        if _LAYER.fullmatch(name) and hasattr(layer, "layer_number")
    }
    for name, parameter in module.named_parameters():
        is_expert = ".experts." in name or not getattr(parameter, "allreduce", True)
        if parameter.requires_grad and not is_expert:
            local = next((prefix for prefix in layers if name.startswith(prefix)), "")
            yield layers.get(local, "") + name.removeprefix(local), parameter


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
    return f"{len(names)} trained parameter{'s' if len(names) != 1 else ''} got no gradient in the first step: {shown}"


class FiniteLoss:
    """Says once that the loss of a step isn't finite."""

    def __init__(self) -> None:
        self._said = False

    def check(self, loss: Tensor, grad_norm: float | None, step: int) -> None:
        """Looks at a step's loss; after the optimizer's step, where the host has waited for the device already.

        Args:
            loss: Scalar, equal on every rank.
            grad_norm: Of the same step.
            step: 0-based index of the global step.
        """
        if self._said or bool(torch.isfinite(loss)):
            return
        self._said = True
        norm = "" if grad_norm is None else f", its gradient norm {grad_norm:g}"
        rank_zero_warn(
            f"the loss of global step {step} is {float(loss):g}{norm}. Weights that were stepped with gradients that "
            "aren't finite are lost: go on from a checkpoint. If only the loss isn't finite, look whether it averages "
            "over all columns of the logits (label smoothing does): those beyond vocab_size are minus infinity"
        )

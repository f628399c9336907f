"""Autograd's engine in Python, for fake CUDA tensors on a machine without a GPU.

PyTorch's own asks the driver for the streams of every device that takes part. This one walks the same graph of the same
nodes, one after another in this thread, and checks what they return as the real one does: shape and device must be the
input's, another floating type is converted.

Hooks that the graph keeps to itself can't be seen from Python. Megatron Core's DDP relies on one, run after a
parameter's gradient was added up, so it is told by `hook_after`; hooks on other tensors aren't run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


class PythonEngine:
    """Stands in for `torch.autograd.Variable._execution_engine`."""

    def __init__(self) -> None:
        self._after: dict[Tensor, list[Callable[..., Any]]] = {}

    def hook_after(self, parameter: Tensor, hook: Callable[..., Any]) -> None:
        """Runs `hook` whenever a gradient was added to the parameter's.

        Args:
            parameter: A leaf of the graph.
            hook: As registered on its `AccumulateGrad` node.
        """
        self._after.setdefault(parameter, []).append(hook)

    def run_backward(
        self,
        tensors: Sequence[Tensor],
        grad_tensors: Sequence[Tensor | None],
        keep_graph: bool,
        create_graph: bool,
        inputs: Sequence[Any] = (),
        allow_unreachable: bool = False,
        accumulate_grad: bool = False,
    ) -> None:
        """Adds the gradients of all leaves up, as `Tensor.backward` does; `torch.autograd.grad` isn't supported."""
        if inputs or create_graph or not accumulate_grad:
            raise NotImplementedError("fake ranks only run the backward of a loss")
        grads: dict[Any, list[Tensor | None]] = {}
        roots = []
        for tensor, grad in zip(tensors, grad_tensors, strict=True):
            if tensor.grad_fn is None:
                raise RuntimeError("element 0 of tensors does not require grad and does not have a grad_fn")
            roots.append(tensor.grad_fn)
            given = torch.ones_like(tensor) if grad is None else grad
            _add(grads, tensor.grad_fn, tensor.output_nr, _validated(given, tensor.grad_fn, tensor.output_nr))
        waiting = _incoming(roots)
        ready = [node for node in dict.fromkeys(roots) if not waiting[node]]
        with torch.no_grad():
            while ready:
                node = ready.pop()
                for (following, index), grad in self._call(node, grads.pop(node, [None])):
                    if grad is not None:
                        _add(grads, following, index, _validated(grad, following, index))
                    waiting[following] -= 1
                    if not waiting[following]:
                        ready.append(following)

    def _call(self, node: Any, grads: list[Tensor | None]) -> list[tuple[tuple[Any, int], Tensor | None]]:
        """The node's edges, each with the gradient that goes along it; a leaf's node adds up and has none."""
        edges = [edge for edge in node.next_functions if edge[0] is not None]
        if all(grad is None for grad in grads):
            return [(edge, None) for edge in edges]
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            # It answers for every argument of its forward, of which only tensors with a gradient have an edge.
            metas = node._input_metadata
            whole = [_zeros(meta) if grad is None else grad for grad, meta in zip(grads, metas, strict=True)]
            results = _tuple(node.apply(*whole))
            along = [result for result, needed in zip(results, node.needs_input_grad, strict=False) if needed]
        else:
            results = _tuple(node(*grads))
            every = [*results, *[None] * (len(node.next_functions) - len(results))]
            along = [result for result, edge in zip(every, node.next_functions, strict=True) if edge[0] is not None]
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            for hook in self._after.get(leaf, ()):
                hook()
        return list(zip(edges, along, strict=True))


def _tuple(result: Any) -> tuple[Tensor | None, ...]:
    return result if isinstance(result, tuple) else (result,)


def _incoming(roots: list[Any]) -> Counter[Any]:
    """How many edges lead to each node that can be reached."""
    edges: Counter[Any] = Counter()
    seen = set(roots)
    stack = list(seen)
    while stack:
        for following, _ in stack.pop().next_functions:
            if following is not None:
                edges[following] += 1
                if following not in seen:
                    seen.add(following)
                    stack.append(following)
    return edges


def _zeros(meta: Any) -> Tensor:
    return torch.zeros(meta.shape, dtype=meta.dtype, device=meta.device)


def _add(grads: dict[Any, list[Tensor | None]], node: Any, index: int, grad: Tensor) -> None:
    buffers = grads.setdefault(node, [None] * len(node._input_metadata))
    earlier = buffers[index]
    buffers[index] = grad if earlier is None else earlier + grad


def _validated(grad: Tensor, node: Any, index: int) -> Tensor:
    """The gradient as the node's forward left its output.

    Raises:
        RuntimeError: It lies on another device, or has a shape that isn't a broadcast of the output's.
    """
    meta = node._input_metadata[index]
    if grad.device != meta.device:
        raise RuntimeError(f"{node.name()} expects a gradient on {meta.device}, but got one on {grad.device}")
    if grad.shape != meta.shape:
        grad = grad.sum_to_size(tuple(meta.shape))
    return grad if grad.dtype == meta.dtype else grad.to(meta.dtype)

"""Megatron Core on a CPU over gloo, with PyTorch itself untouched.

Megatron Core names CUDA all over its source: `torch.cuda.current_device()`, `device="cuda"`, `.cuda()`, comparisons
with "torch.cuda.FloatTensor". Instead of patching PyTorch (which every other library in the process would see) or
copying Megatron's functions (which would go stale), its modules are loaded through one small syntax transform. Two
tables say what it replaces, each entry with its reason:

* `SUBSTITUTES`: dotted names under `torch`, replaced by objects of this file, `CUDA` above all;
* `RULES`: forms of syntax, replaced by other syntax.

It breaks loudly: a name under `torch.cuda` that has no stand-in raises and says so, and tests fail on table entries
that match nothing in the installed Megatron Core and on uses of `torch.cuda` that nobody has judged yet. Only
expressions inside a statement change, so the line numbers of tracebacks stay true. How modules are transformed is in
`source_transform.py`; which are, in `lt_parallel/runtime.py`.
"""

import ast
import contextlib
import re
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from types import ModuleType, SimpleNamespace
from typing import Any, Final, NoReturn, override

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from lt_parallel.plugins.source_transform import Rules, TransformingLoader

CPU: Final = torch.device("cpu")

# --- Stand-ins: what Megatron Core sees in place of PyTorch's objects ------------------------------------------------


class StandIn:
    """A namespace that holds exactly what it was given; any other attribute raises, naming it."""

    def __init__(self, name: str, **members: object) -> None:
        self.__dict__.update(members, _name=name)

    def __getattr__(self, attribute: str) -> NoReturn:
        raise AttributeError(
            f"Megatron Core uses {self._name}.{attribute}, which has no stand-in on CPU; "
            f"if it is needed there, add it to the tables in {__name__} with the reason"
        )


class Stream:
    """The CPU's only stream: work is finished when its call returns, so there is never anything to wait for."""

    def __init__(self, device: object = None, priority: int = 0) -> None:
        self.priority = priority

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """The lowest and the highest priority."""
        return 0, 0

    def wait_stream(self, stream: "Stream") -> None:
        """Returns at once."""

    def wait_event(self, event: "Event") -> None:
        """Returns at once."""

    def synchronize(self) -> None:
        """Returns at once."""

    def record_event(self, event: "Event | None" = None) -> "Event":
        """Records `event`, or a new one, and returns it."""
        event = event or Event()
        event.record(self)
        return event


class Event:
    """A moment on a `Stream`: always reached already, timed by the wall clock. The options mean nothing here."""

    def __init__(self, **options: bool) -> None:
        self._time_s: float | None = None

    def record(self, stream: Stream | None = None) -> None:
        """Sets the moment to now."""
        self._time_s = time.perf_counter()

    def wait(self, stream: Stream | None = None) -> None:
        """Returns at once."""

    def synchronize(self) -> None:
        """Returns at once."""

    def query(self) -> bool:
        """Whether the moment is reached."""
        return True

    def elapsed_time(self, end: "Event") -> float:
        """Milliseconds from this event to `end`.

        Raises:
            RuntimeError: One of the two was never recorded.
        """
        if self._time_s is None or end._time_s is None:
            raise RuntimeError("elapsed_time needs two recorded events")
        return (end._time_s - self._time_s) * 1e3


class _DefaultGenerators:
    """`torch.cuda.default_generators`: the CPU's generator, whichever device it is indexed by."""

    def __getitem__(self, device: object) -> torch.Generator:
        return torch.default_generator


class _Works:
    """Several collectives behind one handle."""

    def __init__(self, works: Iterable[dist.Work | None]) -> None:
        self._works = [work for work in works if work is not None]

    def wait(self) -> None:
        for work in self._works:
            work.wait()


def _nothing(*args: object, **kwargs: object) -> None:
    """For calls that only order, free or mark work on a GPU."""


def _null_context(*args: object, **kwargs: object) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


def _gpu_only(name: str) -> type:
    """A class that annotations may name and nobody may make."""

    def __init__(self: object, *args: object, **kwargs: object) -> None:
        raise NotImplementedError(f"{name} needs a CUDA device")

    return type(name, (), {"__init__": __init__})


def _get_rng_state(device: object = None) -> torch.Tensor:
    return torch.default_generator.get_state()


def _set_rng_state(state: torch.Tensor, device: object = None) -> None:
    torch.default_generator.set_state(state)


def _without_compiler(function: Any = None, **options: object) -> Any:
    """`torch.compile`, with and without parentheses, as a decorator that changes nothing."""
    return function if function is not None else lambda decorated: decorated


def _all_gather(
    tensor_list: list[torch.Tensor],
    tensor: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> dist.Work | _Works | None:
    """`torch.distributed.all_gather`, for unequal shapes too: those go as one broadcast from each rank."""
    if len({output.shape for output in tensor_list}) == 1:
        return dist.all_gather(tensor_list, tensor, group=group, async_op=async_op)
    tensor_list[dist.get_rank(group)].copy_(tensor)
    works = _Works(
        dist.broadcast(output, group=group, group_src=rank, async_op=True)
        for rank, output in enumerate(tensor_list)
        if output.numel() > 0
    )
    if async_op:
        return works
    works.wait()
    return None


@contextlib.contextmanager
def _coalescing_manager(
    group: dist.ProcessGroup | None = None, device: torch.device | None = None, async_ops: bool = False
) -> Iterator[Any]:
    """`torch.distributed._coalescing_manager`, with all-gathers going one by one."""
    group = c10d._group_or_default_group(group)
    with dist._coalescing_manager(group, device, async_ops) as manager:
        yield manager
        collected = c10d._world.pg_coalesce_state[group]
        gathers = [(each.dst_tensor, each.tensor) for each in collected if "all_gather" in each.op.__name__]
        collected[:] = [each for each in collected if "all_gather" not in each.op.__name__]
    for output, own in gathers:
        assert output is not None  # only a reduction has none
        manager.append(dist.all_gather_into_tensor(output, own, group=group, async_op=async_ops))


def _share_storage(dst: torch.Tensor, src: torch.Tensor) -> None:
    """Gives `dst`'s storage the bytes of `src`'s, below autograd's version counter as Megatron's extension does."""
    storage = dst.untyped_storage()
    storage.resize_(src.untyped_storage().nbytes())
    storage.copy_(src.untyped_storage())


def _load_inline(name: str, **options: object) -> SimpleNamespace:
    if name != "share_storage_ext":
        raise NotImplementedError(f"Megatron Core's extension {name!r} has no stand-in on CPU")
    return SimpleNamespace(share_storage=_share_storage)


# --- Table 1: names --------------------------------------------------------------------------------------------------

_STREAM: Final = Stream()

CUDA: Final = StandIn(
    "torch.cuda",
    # Devices. `current_device()` mostly goes to `device=`, so it answers with the device and not with an index.
    current_device=lambda: CPU,
    device_count=lambda: 1,
    device=_null_context,
    set_device=_nothing,
    is_available=lambda: False,  # asked before GPU kernels and Transformer Engine's tensors are chosen
    is_current_stream_capturing=lambda: False,
    _lazy_init=_nothing,
    _lazy_call=lambda function: function(),
    # The order of work: there is one thread and one stream.
    Stream=Stream,
    Event=Event,
    stream=_null_context,
    set_stream=_nothing,
    current_stream=lambda device=None: _STREAM,
    default_stream=lambda device=None: _STREAM,
    synchronize=_nothing,
    # Random numbers: what draws on a CPU is its default generator, so that is what Megatron's tracker must fork.
    default_generators=_DefaultGenerators(),
    get_rng_state=_get_rng_state,
    set_rng_state=_set_rng_state,
    manual_seed=torch.default_generator.manual_seed,
    random=StandIn("torch.cuda.random", get_rng_state=_get_rng_state),
    # Named in `isinstance`, `except` and annotations while modules are imported.
    FloatTensor=torch.FloatTensor,
    HalfTensor=torch.HalfTensor,
    BFloat16Tensor=torch.BFloat16Tensor,
    OutOfMemoryError=torch.OutOfMemoryError,
    CUDAGraph=_gpu_only("CUDAGraph"),
    ExternalStream=_gpu_only("ExternalStream"),
    MemPool=_gpu_only("MemPool"),
    # Memory and profiling.
    empty_cache=_nothing,
    nvtx=StandIn("torch.cuda.nvtx", range=_null_context, range_push=_nothing, range_pop=_nothing),
)

SUBSTITUTES: Final[Mapping[str, object]] = {
    "torch.cuda": CUDA,
    # gloo gathers equal shapes only; with expert tensor parallelism each rank has another number of tokens.
    "torch.distributed.all_gather": _all_gather,
    # gloo's coalesced all-gather (seen in torch 2.14.1) corrupts memory unless it is waited for at once.
    "torch.distributed._coalescing_manager": _coalescing_manager,
    # Fusing a few element-wise operations isn't worth a C++ compiler at run time and seconds in every process.
    "torch.compile": _without_compiler,
    # Selective recompute compiles an extension that lets one tensor take over another's bytes; a copy does here.
    "torch.utils.cpp_extension.load_inline": _load_inline,
}

TRACKER_SUBSTITUTES: Final[Mapping[str, object]] = {
    # While these modules fork the "CUDA" generator they check that the CPU's stands still; here the two are one.
    "torch.get_rng_state": lambda: torch.empty(0, dtype=torch.uint8),
    "torch.set_rng_state": _nothing,
}
TRACKERS: Final = ("megatron.core.tensor_parallel.random", "megatron.core.distributed.fsdp.src.megatron_fsdp.utils")

NOISE: Final = (
    # Warned of at import, about libraries that exist only for CUDA.
    "Apex is not installed",
    "Transformer Engine and Apex are not installed",
)


# --- Table 2: forms of syntax ----------------------------------------------------------------------------------------


def device_literal(node: ast.Constant) -> ast.expr | None:
    """`"cuda"`, `"cuda:0"` -> `"cpu"`: in factory calls, meshes, autocast, comparisons with `device.type`."""
    is_device = isinstance(node.value, str) and re.fullmatch(r"cuda(:\d+)?", node.value)
    return ast.Constant("cpu") if is_device else None


def indexed_device_literal(node: ast.JoinedStr) -> ast.expr | None:
    """`f"cuda:{index}"` -> `"cpu"`: there is one CPU."""
    match node.values:
        case [ast.Constant(value="cuda:"), ast.FormattedValue()]:
            return ast.Constant("cpu")
    return None


def indexed_device(node: ast.Call) -> ast.expr | None:
    """`torch.device("cuda", index)` -> `torch.device("cpu")`; the literal is "cpu" by now."""
    match node:
        case ast.Call(func=ast.Attribute(attr="device"), args=[ast.Constant(value="cpu") as device, _]):
            return ast.Call(node.func, [device], [])
    return None


def tensor_type_literal(node: ast.Constant) -> ast.expr | None:
    """`"torch.cuda.FloatTensor"` -> `"torch.FloatTensor"`: what `Tensor.type()` answers on a CPU."""
    if isinstance(node.value, str) and re.fullmatch(r"torch\.cuda\.\w+Tensor", node.value):
        return ast.Constant(node.value.replace(".cuda.", "."))
    return None


def cuda_method(node: ast.Call) -> ast.expr | None:
    """`x.cuda(...)` -> `x`: it is where it should be."""
    return _receiver(node, "cuda")


def pin_memory_method(node: ast.Call) -> ast.expr | None:
    """`x.pin_memory()` -> `x`: pinning speeds up copies to a GPU, and raises without one."""
    return _receiver(node, "pin_memory")


def record_stream_method(node: ast.Call) -> ast.expr | None:
    """`x.record_stream(s)` -> `x`: it tells CUDA's allocator about a second stream."""
    return _receiver(node, "record_stream")


def _receiver(node: ast.Call, method: str) -> ast.expr | None:
    if isinstance(node.func, ast.Attribute) and node.func.attr == method:
        return node.func.value
    return None


def pin_memory_argument(node: ast.keyword) -> ast.keyword | None:
    """`f(pin_memory=...)` -> `f(pin_memory=False)`: as `pin_memory_method`."""
    return ast.keyword("pin_memory", ast.Constant(False)) if node.arg == "pin_memory" else None


def backend_argument(node: ast.keyword) -> ast.keyword | None:
    """`f(backend="nccl")` -> `f(backend="gloo")`: NCCL moves CUDA tensors only."""
    match node:
        case ast.keyword(arg="backend", value=ast.Constant(value="nccl")):
            return ast.keyword("backend", ast.Constant("gloo"))
    return None


def is_cuda_attribute(node: ast.Attribute) -> ast.expr | None:
    """`x.is_cuda` -> `x.is_cpu`: it is asked as "is it on the device that computes"."""
    return ast.Attribute(node.value, "is_cpu", node.ctx) if node.attr == "is_cuda" else None


RULES: Final[Rules] = {
    ast.Constant: (device_literal, tensor_type_literal),
    ast.JoinedStr: (indexed_device_literal,),
    ast.Call: (indexed_device, cuda_method, pin_memory_method, record_stream_method),
    ast.keyword: (pin_memory_argument, backend_argument),
    ast.Attribute: (is_cuda_attribute,),
}


# --- The loader ------------------------------------------------------------------------------------------------------


class Loader(TransformingLoader):
    """Loads one Megatron Core module for the CPU."""

    rules = RULES
    tables_file = __file__

    @override
    def substitutes(self, module_name: str) -> Mapping[str, object]:
        return {**SUBSTITUTES, **TRACKER_SUBSTITUTES} if module_name in TRACKERS else SUBSTITUTES

    @override
    def exec_module(self, module: ModuleType) -> None:
        with warnings.catch_warnings():
            for message in NOISE:
                warnings.filterwarnings("ignore", message)
            super().exec_module(module)

"""One rank of a world of any size, on GPUs that aren't there: for what can be seen from shapes, dtypes and devices.

A fake rank is a process that believes to be rank r of n, started by torchrun, on a machine with CUDA devices. Its
tensors are PyTorch's fake ones (`FakeTensorMode`): they have shape, dtype and device and no memory, and every operation
checks these as the real one does. Its default process group is PyTorch's "fake" backend, whose collectives return at
once and leave what they should have written. So the package runs as on a GPU cluster (`runtime.select("cuda")`, the CPU
runtime never imported), and only numbers can't be looked at.

`FakeWorld` starts one process that imports everything once, and forks each fake rank from it: nothing of it stays in
the caller, and a rank takes as long as its own work.

    with FakeWorld() as world:
        report = world.run_rank(build, 1023, 1024, "deepseek_v3")     # build is a module-level function

What needs a driver is answered by `stand_ins`, and a number that the host reads by `fake_mode`, in that process only.
What fake tensors and groups let pass but a GPU doesn't is refused: CPU tensors and gaps in NCCL's collectives, products
of different dtypes. `torch.compile` does nothing, and backward runs in Python (`fake_backward.py`).
"""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import Pipe, connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

from tests.support.processes import die_with_parent

_REPOSITORY = Path(__file__).resolve().parents[2]
_PRELOADED = (
    "lt_parallel.lightning_cli",
    "lt_parallel.strategies.global_step",
    "lt_parallel.strategies.optimizer",
    "lt_parallel.plugins.layer_backend.specs",
    "lt_parallel.plugins.layer_backend.torch_backend",
    "megatron.core.models.gpt",
    "megatron.core.distributed",
    "megatron.core.optimizer",
    "megatron.core.pipeline_parallel.schedules",
    "torch._subclasses.fake_tensor",
    "torch.testing._internal.distributed.fake_pg",
)
_SINGLE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")


# --- The caller's side -----------------------------------------------------------------------------------------------


class FakeRankError(RuntimeError):
    """A fake rank raised, or ended without a result.

    Attributes:
        type_name: The exception's class; empty where the rank ended without one.
    """

    def __init__(self, type_name: str, text: str) -> None:
        self.type_name = type_name
        super().__init__(text)


class FakeWorld:
    """The process that fake ranks are forked from; a context manager.

    Args:
        timeout_s: Limit for each rank, in seconds; the first one waits for the imports too.
    """

    def __init__(self, timeout_s: float = 200.0) -> None:
        self._timeout_s = timeout_s

    def __enter__(self) -> FakeWorld:
        self._requests, theirs = Pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.fake_world", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            cwd=_REPOSITORY,
            # Compiling needs the GPU it compiles for: functions run as written. Read while modules are imported.
            env={**os.environ, **_SINGLE_THREAD, "LT_PARALLEL_DEVICE": "cuda", "TORCHDYNAMO_DISABLE": "1"},
            stdin=subprocess.DEVNULL,
        )
        theirs.close()
        return self

    def __exit__(self, *exception: object) -> None:
        self._requests.close()
        self._process.kill()
        self._process.wait()

    def run_rank(self, fn: Callable[..., Any], rank: int, world_size: int, *args: Any, devices: int = 8) -> Any:
        """Runs `fn(*args)` as a fake rank and returns its result.

        Args:
            fn: A module-level function, imported by name in the rank.
            rank: Which rank it believes to be.
            world_size: Of how many.
            *args: Picklable.
            devices: GPUs of a machine; with fewer ranks there is one for each.

        Raises:
            FakeRankError: It raised, or ended without a result; the text has its traceback and what it printed.
        """
        self._requests.send_bytes(pickle.dumps((fn, args, rank, world_size, min(devices, world_size))))
        if not self._requests.poll(self._timeout_s):
            raise FakeRankError("", f"fake rank {rank} of {world_size} took more than {self._timeout_s:g} s")
        try:
            kind, content, output = pickle.loads(self._requests.recv_bytes())
        except EOFError:
            raise FakeRankError("", "the process that fake ranks are forked from has ended") from None
        if kind == "result":
            return content
        type_name, text = content
        raise FakeRankError(type_name, f"fake rank {rank} of {world_size}:\n{text}{output}")


# --- The process that forks ------------------------------------------------------------------------------------------


def _serve(requests: connection.Connection) -> None:
    """Imports, then forks one rank per request, until the caller closes the connection."""
    die_with_parent()
    for name in _PRELOADED:
        __import__(name)
    while True:
        try:
            payload = requests.recv_bytes()
        except EOFError:
            return
        requests.send_bytes(_run_in_a_fork(payload))


def _run_in_a_fork(payload: bytes) -> bytes:
    reader, writer = Pipe(duplex=False)
    with tempfile.TemporaryFile() as output:
        pid = os.fork()
        if pid == 0:
            die_with_parent()
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            _be_a_rank(payload, writer)
        writer.close()
        try:
            kind, content = pickle.loads(reader.recv_bytes())
        except EOFError:
            kind, content = "error", ("", "it ended without a result\n")
        os.waitpid(pid, 0)
        output.seek(0)
        return pickle.dumps((kind, content, output.read()[-8000:].decode(errors="replace")))


def _be_a_rank(payload: bytes, writer: connection.Connection) -> None:
    """The body of a fake rank; never returns."""
    try:
        fn, args, rank, world_size, devices = pickle.loads(payload)
        with tempfile.TemporaryDirectory(prefix="lt_parallel_fake_") as folder, fake_rank(rank, world_size, devices):
            os.chdir(folder)
            message = pickle.dumps(("result", fn(*args)))
    except BaseException as error:  # noqa: BLE001  (whatever ends a rank is for the caller)
        message = pickle.dumps(("error", (type(error).__name__, traceback.format_exc())))
    sys.stdout.flush()
    sys.stderr.flush()
    writer.send_bytes(message)
    os._exit(0)  # threads that the run started in the background have no part in it


# --- What a fake rank sees -------------------------------------------------------------------------------------------


class _Stream:
    """A CUDA stream: nothing runs, so there is nothing to order."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        self.priority = 0

    def wait_stream(self, stream: object) -> None: ...
    def wait_event(self, event: object) -> None: ...
    def synchronize(self) -> None: ...
    def record_event(self, event: object = None) -> object:
        return event or _Event()


class _Event:
    """A CUDA event, always reached; a millisecond after any other."""

    def __init__(self, *args: object, **kwargs: object) -> None: ...
    def record(self, stream: object = None) -> None: ...
    def wait(self, stream: object = None) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True

    def elapsed_time(self, end: object) -> float:
        return 1.0


class _Generator:
    """A GPU's generator, whose state nobody draws from: drawing gives fake tensors."""

    def get_state(self) -> Any:
        import torch

        return torch.zeros(16, dtype=torch.uint8)

    def set_state(self, state: object) -> None: ...
    def manual_seed(self, seed: int) -> None: ...


class StandIn(NamedTuple):
    """What is answered in place of a name, and why it can't be asked."""

    value: Any
    reason: str


def _nothing(*args: object, **kwargs: object) -> None: ...


def _null_context(*args: object, **kwargs: object) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


def _tensor_factory(factory: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.tensor` without `pin_memory`, and with numbers where a list holds fake scalars."""

    def numbers(data: Any) -> Any:
        if isinstance(data, list | tuple):
            return [numbers(each) for each in data]
        return data.item() if hasattr(data, "item") else data

    return lambda data, pin_memory=False, **kwargs: factory(numbers(data), **kwargs)


def _gather_own(objects: list[Any], obj: Any, group: Any = None) -> None:
    objects[:] = [obj] * len(objects)


def _keep_own(objects: list[Any], *args: object, **kwargs: object) -> None:
    objects[:] = [METRIC_NAMES if obj is None else obj for obj in objects]


def _apply_in_place(module: Any, fn: Callable[[Any], Any], recurse: bool = True) -> Any:
    import torch

    for child in module.children() if recurse else ():
        child._apply(fn)
    with torch.no_grad():
        for parameter in (each for each in module._parameters.values() if each is not None):
            assert parameter.grad is None
            applied = fn(parameter)
            parameter.data = applied
            parameter.fake_device = applied.device  # kept beside the data
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else fn(buffer)
    return module


#: What a training step's last stage tells the others (`StepMetricsReducer`).
METRIC_NAMES = ("loss", "train_loss")
_PROPERTIES = SimpleNamespace(name="NVIDIA H100 80GB HBM3", major=9, minor=0, total_memory=80 * 2**30)


def stand_ins(devices: int) -> Mapping[str, StandIn]:
    """Names under `torch`, with what a fake rank gets for them.

    Args:
        devices: How many the machine has; a rank's own is the first.
    """
    import torch

    driver, order = "asks the driver", "orders work on a GPU"
    objects = "objects travel as bytes in tensors, and fake tensors have none"
    return {
        "cuda.is_available": StandIn(lambda: True, driver),
        "cuda.is_initialized": StandIn(lambda: True, driver),
        "cuda._lazy_init": StandIn(_nothing, driver),
        "cuda.device_count": StandIn(lambda: devices, driver),
        "cuda.set_device": StandIn(_nothing, driver),
        "cuda.current_device": StandIn(lambda: 0, driver),
        "cuda.random.current_device": StandIn(lambda: 0, driver),  # imported there by name
        "cuda.get_device_properties": StandIn(lambda device=None: _PROPERTIES, driver),
        "cuda.empty_cache": StandIn(_nothing, driver),
        "cuda.default_generators": StandIn([_Generator() for _ in range(devices)], "made by the driver's start"),
        "cuda.Stream": StandIn(_Stream, order),
        "cuda.Event": StandIn(_Event, order),
        "cuda.current_stream": StandIn(lambda device=None: _Stream(), order),
        "cuda.stream": StandIn(_null_context, order),
        "cuda.synchronize": StandIn(_nothing, order),
        "tensor": StandIn(_tensor_factory(torch.tensor), "pins memory and reads scalars past the dispatcher"),
        "distributed.all_gather_object": StandIn(_gather_own, objects),
        "distributed.broadcast_object_list": StandIn(_keep_own, objects),
        "nn.Module._apply": StandIn(
            _apply_in_place, "swaps fake parameters for new ones; real ones stay the same objects"
        ),
    }


def fake_mode() -> Any:
    """PyTorch's fake tensors, with an answer where the host reads a number: 1.0, 0 (as of votes to stop) or True.

    Real tensors made past PyTorch's dispatcher (states of the CPU's generator, numpy's arrays) count as fake ones on
    the CPU, where they are.
    """
    import torch
    from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
    from torch.distributed._meta_registrations import create_fakework

    class Mode(FakeTensorMode):
        avoid_device_init = True  # PyTorch's switch for "there is no device", which it sets by `cuda.is_available()`

        def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.namespace == "c10d" and "barrier" not in str(func):
                _check_as_nccl(func, args)
                if str(func).removeprefix("c10d.").removesuffix(".default") in _COALESCED:
                    return create_fakework(args, return_first_arg=False)
            if str(func).split(".")[1] in _SAME_DTYPE:
                _check_dtypes(func, args)
            try:
                return super().dispatch(func, types, args, kwargs or {})
            except DataDependentOutputException:
                if func is not torch.ops.aten._local_scalar_dense.default:
                    raise
                dtype = args[0].dtype
                return True if dtype is torch.bool else 1.0 if dtype.is_floating_point else 0

    return Mode(allow_non_fake_inputs=True)


#: Collectives that PyTorch's fake tensors don't know.
_COALESCED = ("allreduce_coalesced_", "allgather_into_tensor_coalesced_", "reduce_scatter_tensor_coalesced_")


def _check_as_nccl(func: Any, args: Any) -> None:
    """Refuses what NCCL refuses and the fake backend takes."""
    import torch
    from torch.utils._pytree import tree_leaves

    for tensor in tree_leaves(args):
        if isinstance(tensor, torch.Tensor):
            if tensor.device.type != "cuda":
                raise RuntimeError(f"{func}: no backend type associated with device type {tensor.device.type}")
            if not tensor.is_contiguous():
                raise ValueError(f"{func}: tensors must be contiguous")


#: Kernels that take tensors of one dtype only, which their fake versions don't check.
_SAME_DTYPE = frozenset(
    (
        "mm",
        "bmm",
        "addmm",
        "baddbmm",
        "_grouped_mm",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
    )
)


def _check_dtypes(func: Any, args: Any) -> None:
    import torch

    found = {arg.dtype for arg in args if isinstance(arg, torch.Tensor) and arg.is_floating_point()}
    if len(found) > 1:
        raise RuntimeError(f"{func}: expected tensors of the same dtype, got {', '.join(sorted(map(str, found)))}")


def _run_backward_in_python(stack: contextlib.ExitStack) -> None:
    """Puts `PythonEngine` in the place of PyTorch's, and tells it the hooks of Megatron Core's DDP."""
    from megatron.core.distributed import DistributedDataParallel

    from tests.support.fake_backward import PythonEngine

    engine, make_hook = PythonEngine(), DistributedDataParallel._make_backward_post_hook

    def made(wrapper: Any, parameter: Any) -> Any:
        hook = make_hook(wrapper, parameter)
        engine.hook_after(parameter, hook)
        return hook

    stack.enter_context(mock.patch("torch.autograd.Variable._execution_engine", engine))
    stack.enter_context(mock.patch.object(DistributedDataParallel, "_make_backward_post_hook", made))


@contextlib.contextmanager
def fake_rank(rank: int, world_size: int, devices: int) -> Iterator[Any]:
    """Makes this process a fake rank: its environment, `stand_ins`, process group and fake tensors.

    Args:
        rank: Which rank.
        world_size: Of how many.
        devices: GPUs of a machine.
    """
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # for the watch over failing ranks
    environment = {
        "RANK": rank,
        "LOCAL_RANK": 0,  # PyTorch's C++ code takes the first device where none is said, and can't be told otherwise
        "GROUP_RANK": rank // devices,
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": devices,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": store.port,
        "TORCHELASTIC_RUN_ID": "fake",
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_MAX_RESTARTS": 0,
    }
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, {name: str(value) for name, value in environment.items()}))
        for name, stand_in in stand_ins(devices).items():
            stack.enter_context(mock.patch(f"torch.{name}", stand_in.value))
        _run_backward_in_python(stack)
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
        yield stack.enter_context(fake_mode())
        assert "lt_parallel.plugins.cpu_runtime" not in sys.modules, "the CPU runtime has no place on the CUDA path"


if __name__ == "__main__":
    # Imported by its name, so that what it pickles is what the caller knows.
    from tests.support import fake_world

    fake_world._serve(connection.Connection(int(sys.argv[1])))

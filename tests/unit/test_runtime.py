"""The finder decides the device, CUDA is left alone, PyTorch is left alone, and the CPU tables fit Megatron Core."""

import ast
import importlib.util
import os
import subprocess
import sys
import textwrap
import traceback
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch

from lt_parallel import runtime
from lt_parallel.plugins import cpu_runtime, source_transform
from lt_parallel.plugins.layer_backend import missing_names
from lt_parallel.plugins.source_transform import TABLE, Transformer

REPOSITORY = Path(__file__).resolve().parents[2]

# Parts of Megatron Core that this project doesn't train with; left out to keep the audit to seconds.
NOT_AUDITED = ("inference", "resharding", "export", "post_training", "models/mimo", "models/audio", "models/multimodal")

# Names under torch.cuda that the audited part uses and that raise on a CPU, each because its feature needs a GPU.
GPU_ONLY = {
    "_sleep": "fault injection",
    "amp": "only for PyTorch older than 2.4",
    "clock_rate": "straggler detection",
    "get_device_capability": "choice of GPU kernels",
    "get_device_properties": "choice of GPU kernels, memory limits of Megatron-FSDP",
    "graph": "CUDA graphs",
    "graph_pool_handle": "CUDA graphs",
    "memory_allocated": "memory reports",
    "memory_reserved": "memory reports",
    "memory_stats": "memory reports",
    "power_draw": "straggler detection",
    "temperature": "straggler detection",
    "use_mem_pool": "NCCL's own memory",
    "utilization": "straggler detection",
}


class Audit(NamedTuple):
    """What the tables do to the installed Megatron Core."""

    matches: Counter[str]
    matches_of: dict[str, Counter[str]]
    cuda_attributes: set[str]
    sources: dict[str, str]


def megatron_sources() -> Iterator[tuple[str, str]]:
    """Pairs (module name, source)."""
    spec = importlib.util.find_spec("megatron.core")
    assert spec is not None and spec.submodule_search_locations
    root = Path(next(iter(spec.submodule_search_locations)))
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root).as_posix()
        if not relative.startswith(tuple(f"{folder}/" for folder in NOT_AUDITED)):
            name = "megatron.core." + relative.removesuffix(".py").replace("/", ".")
            yield name.removesuffix(".__init__"), path.read_text()


@cache
def audit() -> Audit:
    words = (
        "cuda",
        "nccl",
        "pin_memory",
        "record_stream",
        "all_gather",
        "compile",
        "load_inline",
        "rng_state",
        "coalescing",
    )
    result = Audit(Counter(), {}, set(), {})
    for name, source in megatron_sources():
        if any(word in source for word in words):
            transformer = Transformer(cpu_runtime.Loader(name, "").substitutes(name), cpu_runtime.RULES)
            tree = transformer.transform(ast.parse(source))
            result.matches.update(transformer.matches)
            result.matches_of[name] = transformer.matches
            result.cuda_attributes.update(_cuda_attributes(tree))
            result.sources[name] = source
    return result


def _cuda_attributes(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Subscript(value=ast.Name(id=name), slice=ast.Constant(value="torch.cuda"))):
                if name == TABLE:
                    yield node.attr


# --- The tables against the installed Megatron Core ------------------------------------------------------------------


@pytest.mark.parametrize(
    "entry", [*cpu_runtime.SUBSTITUTES, *(r.__name__ for rs in cpu_runtime.RULES.values() for r in rs)]
)
def test_every_table_entry_matches_something(entry: str) -> None:
    assert audit().matches[entry] > 0, f"{entry} matches nothing in megatron.core any more: remove or mend it"


@pytest.mark.parametrize("module", cpu_runtime.TRACKERS)
@pytest.mark.parametrize("entry", cpu_runtime.TRACKER_SUBSTITUTES)
def test_tracker_entries_match_in_one_of_the_trackers(module: str, entry: str) -> None:
    assert module in audit().matches_of
    assert any(audit().matches_of[tracker][entry] for tracker in cpu_runtime.TRACKERS)


def test_every_stand_in_under_torch_cuda_is_used() -> None:
    members = {name for name in vars(cpu_runtime.CUDA) if name != "_name"}
    outside_the_audit = {"ExternalStream"}  # in resharding, which only has to import
    assert members - outside_the_audit - audit().cuda_attributes == set()


def test_every_use_of_torch_cuda_is_judged() -> None:
    unjudged = audit().cuda_attributes - set(vars(cpu_runtime.CUDA)) - set(GPU_ONLY)
    assert unjudged == set(), "new uses of torch.cuda: give them a stand-in, or list them here as needing a GPU"


def test_no_gpu_only_name_is_listed_in_vain() -> None:
    assert set(GPU_ONLY) - audit().cuda_attributes == set()
    assert set(GPU_ONLY) & set(vars(cpu_runtime.CUDA)) == set()


def test_missing_names_are_used_and_come_from_transformer_engine() -> None:
    tree = ast.parse(audit().sources["megatron.core.tensor_parallel.random"])
    imported = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("transformer_engine")
        for alias in node.names
    }
    loaded = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    assert set(missing_names.NAMES) <= imported & loaded


def test_noise_is_what_megatron_warns_of() -> None:
    sources = "".join(source for _, source in megatron_sources())
    assert all(message in sources for message in cpu_runtime.NOISE)


# --- The transform, on small modules loaded for real -----------------------------------------------------------------


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def load_source(source: str, name: str = "megatron.core.example") -> ModuleType:
        path = tmp_path / "example.py"
        path.write_text(textwrap.dedent(source))
        loader = cpu_runtime.Loader(name, str(path))
        spec = importlib.util.spec_from_loader(name, loader)
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
        return module

    return load_source


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("torch.cuda.current_device()", torch.device("cpu")),
        ("torch.zeros(1, device='cuda').device", torch.device("cpu")),
        ("torch.device('cuda')", torch.device("cpu")),
        ("torch.device('cuda:1')", torch.device("cpu")),
        ("torch.device(f'cuda:{torch.cuda.current_device()}')", torch.device("cpu")),
        ("torch.device('cuda', torch.cuda.current_device())", torch.device("cpu")),
        ("x.cuda(torch.cuda.current_device(), non_blocking=True) is x", True),
        ("x.to('cuda').device.type == 'cuda'", True),
        ("x.pin_memory() is x", True),
        ("torch.empty(1, pin_memory=True).is_pinned()", False),
        ("x.is_cuda", True),
        ("x.type() == 'torch.cuda.FloatTensor'", True),
        ("x.bfloat16().type() in ['torch.cuda.HalfTensor', 'torch.cuda.BFloat16Tensor']", True),
        ("isinstance(x, torch.cuda.FloatTensor)", True),
        ("dict(backend='nccl')", {"backend": "gloo"}),
        ("torch.compile(len) is len and torch.compile(dynamic=True)(len) is len", True),
        ("renamed is torch.cuda.Stream", True),
        ("distributed.all_gather is torch.distributed.all_gather is not real_all_gather", True),
        ("torch.distributed.all_gather_object is real_all_gather_object", True),
        ("torch.cuda.default_generators[torch.cuda.current_device()] is torch.default_generator", True),
        ("hasattr(torch.cuda, 'caching_allocator_alloc')", False),
        ("'uses torch.cuda and cuda'", "uses torch.cuda and cuda"),
    ],
)
def test_expressions(load: Any, expression: str, expected: object) -> None:
    module = load(
        f"""
        import torch
        import torch.distributed as distributed
        from torch.cuda import Stream as renamed

        def value(x, real_all_gather, real_all_gather_object):
            return {expression}
        """
    )
    value = module.value(torch.ones(1), torch.distributed.all_gather, torch.distributed.all_gather_object)
    assert value == expected


def test_an_unknown_name_under_torch_cuda_raises_and_is_named(load: Any) -> None:
    module = load("import torch\ndef f(): return torch.cuda.memory_allocated()")
    with pytest.raises(AttributeError, match=r"torch\.cuda\.memory_allocated, which has no stand-in on CPU"):
        module.f()


def test_what_needs_a_gpu_can_be_named_but_not_made(load: Any) -> None:
    module = load("import torch\ndef f(graph: torch.cuda.CUDAGraph | None = None): return torch.cuda.CUDAGraph()")
    with pytest.raises(NotImplementedError, match="CUDAGraph needs a CUDA device"):
        module.f()


def test_streams_events_and_random_numbers(load: Any) -> None:
    module = load(
        """
        import torch
        from torch.cuda import _lazy_call

        def run():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            side = torch.cuda.Stream(device="cuda", priority=torch.cuda.Stream.priority_range()[1])
            side.wait_stream(torch.cuda.current_stream())
            start.record()
            with torch.cuda.stream(side):
                x = torch.ones(2, device="cuda")
                x.record_stream(side)
            side.record_event(end).wait()
            torch.cuda.synchronize()
            state = torch.cuda.get_rng_state()
            first = torch.rand(3)
            _lazy_call(lambda: torch.cuda.set_rng_state(state))
            return start.elapsed_time(end), torch.equal(first, torch.rand(3))
        """
    )
    elapsed_ms, same_draws = module.run()
    assert 0 < elapsed_ms < 1000
    assert same_draws
    with pytest.raises(RuntimeError, match="two recorded events"):
        cpu_runtime.Event().elapsed_time(cpu_runtime.Event())


def test_only_the_trackers_see_a_cpu_generator_that_stands_still(load: Any) -> None:
    source = "import torch\ndef f(): return torch.get_rng_state()"
    assert load(source).f().numel() == torch.get_rng_state().numel()
    assert load(source, cpu_runtime.TRACKERS[0]).f().numel() == 0


def test_share_storage_keeps_views_and_the_version_counter() -> None:
    source, target = torch.arange(6.0), torch.zeros(6)
    view = target.view(2, 3)
    target.untyped_storage().resize_(0)
    version = target._version
    cpu_runtime._share_storage(target, source)
    assert view.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert target._version == version


def test_line_numbers_and_docstrings_stay(load: Any) -> None:
    module = load(
        '"""cuda"""\nimport torch\n\n\ndef f():\n    x = torch.cuda.current_stream()\n    raise ValueError(x)\n'
    )
    try:
        module.f()
    except ValueError as error:
        assert traceback.extract_tb(error.__traceback__)[-1].lineno == 7


def test_the_cache_is_used_until_the_source_changes(load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    transformed: list[str] = []
    original = Transformer.transform

    def counted(self: Transformer, tree: ast.Module) -> ast.Module:
        transformed.append("")
        return original(self, tree)

    monkeypatch.setattr(source_transform.Transformer, "transform", counted)
    for source, expected_count in [("DEVICE = 'cuda'", 1), ("DEVICE = 'cuda'", 1), ("DEVICE = 'cuda'  # new", 2)]:
        assert load(source).DEVICE == "cpu"
        assert len(transformed) == expected_count
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/no/such/folder")
    assert load("DEVICE = 'cuda'").DEVICE == "cpu"


# --- The finder ------------------------------------------------------------------------------------------------------


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {key: value for key, value in os.environ.items() if key != runtime.ENVIRONMENT_VARIABLE}
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=inherited | {"OMP_NUM_THREADS": "1"} | environment,
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=150,
    )


def check_python(code: str, **environment: str) -> str:
    result = run_python(code, **environment)
    assert result.returncode == 0, result.stderr
    return result.stderr


def test_importing_the_package_imports_no_torch_and_installs_one_finder() -> None:
    check_python(
        """
        import sys, lt_parallel
        from lt_parallel import runtime
        runtime.install_finder()
        assert "torch" not in sys.modules and "lt_parallel.plugins.cpu_runtime" not in sys.modules
        assert sum(type(finder).__name__ == "_MegatronFinder" for finder in sys.meta_path) == 1
        assert runtime.loaded_device_type() is None
        """
    )


def test_select_goes_before_the_environment_variable() -> None:
    check_python(
        """
        import sys, lt_parallel
        from lt_parallel import runtime
        assert runtime.device_type() == "cuda"
        runtime.select("cpu")
        assert runtime.device_type() == "cpu"
        assert "torch" not in sys.modules
        """,
        LT_PARALLEL_DEVICE="cuda",
    )


def test_without_a_choice_pytorch_is_asked() -> None:
    check_python(
        """
        import lt_parallel, torch
        from lt_parallel import runtime
        assert runtime.device_type() == ("cuda" if torch.cuda.is_available() else "cpu")
        """
    )


def test_wrong_device_types_are_refused() -> None:
    with pytest.raises(ValueError, match='\'tpu\' must be "cpu" or "cuda"'):
        runtime.select("tpu")  # type: ignore[arg-type]
    result = run_python("from lt_parallel import runtime; runtime.device_type()", LT_PARALLEL_DEVICE="CPU")
    assert "LT_PARALLEL_DEVICE: device type 'CPU' must be" in result.stderr


def test_the_finder_leaves_other_packages_alone() -> None:
    finder = next(finder for finder in sys.meta_path if isinstance(finder, runtime._MegatronFinder))
    for name in ("megatron", "megatron.training", "megatron.corelike", "json"):
        assert finder.find_spec(name, None) is None


def test_cuda_leaves_megatron_core_as_installed_and_never_imports_the_cpu_runtime() -> None:
    check_python(
        """
        import importlib.machinery, sys
        import lt_parallel
        import megatron.core.tensor_parallel.random as random
        from lt_parallel import runtime
        assert runtime.device_type() == runtime.loaded_device_type() == "cuda"
        assert type(random.__loader__) is importlib.machinery.SourceFileLoader
        loaded = [name for name in sys.modules if name.startswith("lt_parallel.plugins.")]
        assert not {"lt_parallel.plugins.cpu_runtime", "lt_parallel.plugins.source_transform"} & set(loaded), loaded
        try:
            runtime.select("cpu")
        except RuntimeError as error:
            assert "import lt_parallel before megatron.core" in str(error)
        else:
            raise AssertionError("select('cpu') after an import for CUDA must raise")
        """,
        LT_PARALLEL_DEVICE="cuda",
    )


def test_megatron_core_imported_first_is_an_error_that_says_the_fix() -> None:
    result = run_python("import megatron.core, lt_parallel", LT_PARALLEL_DEVICE="cpu")
    assert result.returncode != 0
    assert "RuntimeError" in result.stderr
    assert "import lt_parallel before megatron.core" in result.stderr


def test_cpu_leaves_pytorch_untouched_and_is_silent_about_cuda_libraries() -> None:
    stderr = check_python(
        """
        import sys, types
        import torch, torch.distributed, torch.utils.cpp_extension, torch.distributed.fsdp
        import torch.distributed.checkpoint, torch.distributed.tensor
        watched = [torch, torch.cuda, torch.cuda.random, torch.distributed, torch.distributed.distributed_c10d,
                   torch.Tensor, torch.device, torch.Generator, torch.utils.cpp_extension, torch.autograd]
        before = [dict(vars(namespace)) for namespace in watched]

        import lt_parallel
        from lt_parallel import runtime
        import megatron.core.models.gpt.gpt_layer_specs, megatron.core.optimizer, megatron.core.distributed
        import megatron.core.pipeline_parallel.schedules, megatron.core.dist_checkpointing
        assert runtime.loaded_device_type() == "cpu"

        for namespace, old in zip(watched, before):
            new = dict(vars(namespace))
            changed = [name for name in old if name not in new or new[name] is not old[name]]
            added = [name for name in new if name not in old and not isinstance(new[name], types.ModuleType)]
            assert not changed and not added, (namespace, changed, added)
        """,
        LT_PARALLEL_DEVICE="cpu",
    )
    assert "Apex" not in stderr
    assert "SyntaxWarning" not in stderr

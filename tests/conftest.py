"""What holds for every test: one thread, the CPU, and no process left behind."""

import os

for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS"):
    os.environ[_name] = "1"  # before numpy and torch read them; tests run several processes on few cores
os.environ.setdefault("LT_PARALLEL_DEVICE", "cpu")
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

from collections.abc import Iterator  # noqa: E402

import pytest  # noqa: E402

import lt_parallel  # noqa: E402, F401  (before anything imports Megatron Core)
from tests.support import processes, ranks  # noqa: E402


def pytest_collection_finish(session: pytest.Session) -> None:
    """Starts the fork server's imports early, so that they run beside the tests that come before the first use."""
    if any("/ranks/" in item.nodeid for item in session.items) and not session.config.option.collectonly:
        ranks.start_fork_server()


@pytest.fixture(scope="session", autouse=True)
def no_process_left_behind() -> Iterator[None]:
    """Fails the session when a test left a process running, its parent's death notwithstanding."""
    processes.adopt_orphans()
    yield
    left = {pid: command for pid, command in processes.descendants().items() if not _is_ours(command)}
    for pid in left:
        processes.kill(pid)
    assert not left, f"processes left running by the tests: {left}"


def _is_ours(command: str) -> bool:
    """Whether this is one of the two helpers that `multiprocessing` keeps until the session ends."""
    return "multiprocessing.forkserver" in command or "multiprocessing.resource_tracker" in command

"""The multi-process test harness itself: results, failures, limits, and nothing left behind."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import lt_parallel  # noqa: F401  (must come before Megatron Core)
from tests.support.processes import descendants, is_running
from tests.support.ranks import RankError, init_gloo, run_ranks

_LOADED_BEFORE_THIS_MODULE = frozenset(sys.modules)


def _rank() -> int:
    return int(os.environ["RANK"])


def _sum_over_ranks(base: int) -> tuple[int, int, str | None]:
    import torch

    init_gloo()
    total = torch.tensor(base + _rank())
    torch.distributed.all_reduce(total)
    return _rank(), int(total), os.environ.get("LT_PARALLEL_TEST_VARIABLE")


def test_results_come_in_rank_order_and_ranks_can_communicate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LT_PARALLEL_TEST_VARIABLE", "seen")
    assert run_ranks(_sum_over_ranks, 4, 10) == [(rank, 46, "seen") for rank in range(4)]


def _make_groups_again_and_again() -> int:
    import torch

    rounds = 0
    for _ in range(30):
        init_gloo()
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
        rounds += 1
    return rounds


def test_process_group_can_be_made_again() -> None:
    assert run_ranks(_make_groups_again_and_again, 2, timeout_s=60) == [30, 30]


def _state_at_start() -> dict[str, object]:
    from tests.support import preload

    return {
        "loaded": {"torch", "lightning.pytorch", "megatron.core", "megatron.core.models.gpt"}
        <= _LOADED_BEFORE_THIS_MODULE,
        "errors": preload.PRELOAD_ERRORS,
        "threads": preload.THREADS_AFTER_PRELOAD,
        "session": os.getsid(0) == os.getpid(),
    }


def test_imports_are_paid_once_and_start_no_thread() -> None:
    assert run_ranks(_state_at_start, 1) == [{"loaded": True, "errors": {}, "threads": 1, "session": True}]


def _leave_state_behind() -> int:
    sys.modules.setdefault("left_behind", sys)
    return os.getpid()


def test_every_call_gets_fresh_processes() -> None:
    first, second = (run_ranks(_leave_state_behind, 1)[0] for _ in range(2))
    assert first != second
    assert run_ranks(_was_left_behind, 1) == [False]


def _was_left_behind() -> bool:
    return "left_behind" in sys.modules


def _draw() -> tuple[float, float]:
    import random

    import numpy

    return random.random(), float(numpy.random.random())


def test_ranks_do_not_share_unseeded_generators() -> None:
    (python0, numpy0), (python1, numpy1) = run_ranks(_draw, 2)
    assert python0 != python1
    assert numpy0 != numpy1


def _rank_one_raises() -> None:
    if _rank() == 1:
        print("rank one was here")
        raise ValueError("micro batch 7 is broken")
    time.sleep(60)


def test_failing_rank_is_named_with_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    start = time.monotonic()
    with pytest.raises(RankError, match="micro batch 7 is broken") as caught:
        run_ranks(_rank_one_raises, 3, timeout_s=50)
    assert time.monotonic() - start < 15
    assert caught.value.rank == 1
    assert "in _rank_one_raises" in caught.value.traceback_text
    assert "rank one was here" in capsys.readouterr().out


def _rank_one_crashes() -> None:
    if _rank() == 1:
        os.kill(os.getpid(), signal.SIGSEGV)
    time.sleep(60)


def test_crashed_rank_is_named_with_its_signal() -> None:
    with pytest.raises(RankError, match="SIGSEGV") as caught:
        run_ranks(_rank_one_crashes, 2, timeout_s=50)
    assert caught.value.rank == 1


def _exits() -> None:
    sys.exit(3)


def test_exit_is_a_failure() -> None:
    with pytest.raises(RankError, match="SystemExit: 3"):
        run_ranks(_exits, 1)


def _wait_for_a_message_that_never_comes() -> None:
    import torch

    init_gloo()
    if _rank() == 1:
        torch.distributed.recv(torch.zeros(1), src=0)
    time.sleep(60)


def test_time_limit_ends_all_ranks_and_shows_where_they_were(capsys: pytest.CaptureFixture[str]) -> None:
    start = time.monotonic()
    with pytest.raises(RankError, match=r"still running after 3 s"):
        run_ranks(_wait_for_a_message_that_never_comes, 2, timeout_s=3)
    assert time.monotonic() - start < 10
    assert "in _wait_for_a_message_that_never_comes" in capsys.readouterr().out


def _grow() -> None:
    if _rank() == 1:
        held = []
        while True:
            held.append(bytearray(b"x") * (16 * 2**20))
            time.sleep(0.01)
    time.sleep(60)


def test_memory_limit_ends_all_ranks() -> None:
    with pytest.raises(RankError, match=r"used [12]\.\d+ GiB of memory, more than its limit of 1.5") as caught:
        run_ranks(_grow, 2, timeout_s=50, memory_gib=1.5)
    assert caught.value.rank == 1


def _start_sleeper() -> int:
    return subprocess.Popen(["sleep", "60"]).pid


def test_no_process_outlives_a_call() -> None:
    before = descendants().keys()
    (sleeper,) = run_ranks(_start_sleeper, 1)
    for function, options in (
        (_rank_one_raises, {"timeout_s": 50}),
        (_wait_for_a_message_that_never_comes, {"timeout_s": 1}),
    ):
        with pytest.raises(RankError):
            run_ranks(function, 2, **options)
    assert descendants().keys() - before == set()
    assert not is_running(sleeper)


def _write_pid_and_sleep(folder: str) -> None:
    Path(folder, f"{_rank()}.pid").write_text(str(os.getpid()))
    time.sleep(60)


@pytest.fixture
def killed_session(tmp_path: Path) -> Iterator[list[int]]:
    """The process ids of two ranks whose test session was killed a moment ago."""
    code = f"from tests.ranks import test_rank_harness as t; t.run_ranks(t._write_pid_and_sleep, 2, {str(tmp_path)!r})"
    session = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "LT_PARALLEL_TEST_PRELOAD": "0"})
    files = [tmp_path / f"{rank}.pid" for rank in range(2)]
    try:
        _wait_until(lambda: all(file.exists() and file.stat().st_size for file in files), 200)
    finally:
        session.kill()
        session.wait()
    yield [int(file.read_text()) for file in files]


def _wait_until(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"still not so after {seconds} s"
        time.sleep(0.05)


def test_ranks_die_with_a_killed_session(killed_session: list[int]) -> None:
    _wait_until(lambda: not any(is_running(pid) for pid in killed_session), 10)

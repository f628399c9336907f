"""`FailureWatch` against a real key-value store, several watches in one process standing for the ranks."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch

from lt_parallel.strategies import failure
from lt_parallel.strategies.failure import Failure, FailureWatch


def new_store() -> Any:
    timeout = timedelta(seconds=20)
    return torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timeout)


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str, int]]:
    """What the watches announced before they ended their process, and the exit status; the thread ends instead."""
    announced: list[tuple[int, str]] = []
    found: list[tuple[int, str, int]] = []

    def leave(status: int) -> None:
        assert threading.current_thread() is not threading.main_thread()
        found.append((*announced[-1], status))

    monkeypatch.setattr(failure, "_POLL_S", 0.05)
    monkeypatch.setattr(failure, "_GRACE_S", 0.3)
    monkeypatch.setattr(failure, "_GRACE_OF_RANK_0_S", 0.1)
    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr(FailureWatch, "announce", staticmethod(lambda rank, reason: announced.append((rank, reason))))
    return found


@pytest.fixture
def watch(ends: Any) -> Iterator[Callable[..., FailureWatch]]:
    store, made = new_store(), []

    def make(rank: int, world_size: int = 3, attempt: str = "0") -> FailureWatch:
        made.append(FailureWatch("127.0.0.1", store.port, rank, world_size, attempt))
        return made[-1]

    yield make
    for each in made:
        each.stop()


def wait_until(condition: Callable[[], bool], timeout_s: float = 15.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def test_a_failure_ends_every_other_rank_with_its_message(watch: Any, ends: list[Any]) -> None:
    first, second, third = watch(0), watch(1), watch(2)
    assert second.root_cause() is None
    second.report(KeyError("the culprit"))
    assert wait_until(lambda: len(ends) == 2)
    time.sleep(0.5)  # the failing rank's own watch leaves it to its exception
    reason = "rank 1 failed with KeyError: 'the culprit'"
    assert sorted(ends) == [(0, reason, 1), (2, reason, 1)]
    assert ends[0][0] == 0, "rank 0 speaks for the job and goes first"
    expected = Failure(rank=1, kind="KeyError", message="'the culprit'")
    assert first.root_cause() == second.root_cause() == third.root_cause() == expected


def test_the_first_report_stays(watch: Any) -> None:
    first, second = watch(0), watch(1)
    first.report(ValueError("cause"))
    second.report(RuntimeError("connection closed by peer"))
    first.report(RuntimeError("teardown failed too"))
    assert str(second.root_cause()) == "rank 0 failed with ValueError: cause"


def test_a_rank_that_ends_by_itself_in_time_is_left_alone(watch: Any, ends: list[Any]) -> None:
    first, second = watch(0), watch(1)
    second.report(ValueError("cause"))
    first.stop()  # what teardown does once rank 0's own exception has come up
    time.sleep(0.6)
    assert ends == []
    assert str(first.root_cause()) == "rank 1 failed with ValueError: cause", "the cause can still be asked for"


def test_runs_one_after_another_do_not_see_each_others_failures(watch: Any, ends: list[Any]) -> None:
    watch(0, attempt="0.1").report(ValueError("of the first run"))
    second = watch(1, attempt="0.2")
    time.sleep(0.4)
    assert second.root_cause() is None and ends == []


def test_one_process_needs_no_store() -> None:
    alone = FailureWatch("127.0.0.1", 1, 0, 1)  # nobody listens on port 1
    alone.report(ValueError("nobody to tell"))
    assert alone.root_cause() is None
    alone.wait_for_rank_0()
    alone.stop()


def test_the_end_of_the_store_ends_the_ranks(ends: list[Any]) -> None:
    store = new_store()
    second = FailureWatch("127.0.0.1", store.port, 1, 3)
    del store  # its server ends with it, as it does when the process of rank 0 ends
    assert wait_until(lambda: len(ends) == 1)
    rank, reason, status = ends[0]
    assert (rank, status) == (1, 1) and "rank 0 has ended" in reason
    second.report(ValueError("too late"))  # never raises
    assert second.root_cause() is None
    start = time.monotonic()
    second.wait_for_rank_0()
    assert time.monotonic() - start < 5, "nothing left to wait for"
    second.stop()

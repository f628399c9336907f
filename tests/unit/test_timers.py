"""Spans of a step, and Megatron Core's way of asking for them."""

import copy
import time

import pytest
import torch

from lt_parallel.metrics.timers import StepTimers, timed

CPU = torch.device("cpu")


def test_spans_add_up_until_they_are_taken() -> None:
    timers = StepTimers(CPU)
    for _ in range(2):
        timers("forward-compute", log_level=2).start(barrier=True)  # as Megatron Core calls it
        time.sleep(0.02)
        timers("forward-compute").stop()
    with timers.span("optimizer"):
        time.sleep(0.01)
    taken = timers.take()
    assert 0.04 <= taken["forward-compute"] < 0.2 and 0.01 <= taken["optimizer"] < 0.1
    assert timers.take() == {"forward-compute": 0.0, "optimizer": 0.0}


def test_nothing_counts_while_paused() -> None:
    timers = StepTimers(CPU)
    timers.paused = True
    timers("forward-compute").start()
    timers.paused = False
    time.sleep(0.01)
    timers("forward-compute").stop()
    assert timers.take() == {"forward-compute": 0.0}


def test_an_exception_ends_the_span() -> None:
    timers = StepTimers(CPU)
    with pytest.raises(KeyError), timers.span("optimizer"):
        raise KeyError
    time.sleep(0.02)
    assert timers.take()["optimizer"] < 0.02


def test_a_copied_config_counts_into_the_same_spans() -> None:
    timers = StepTimers(CPU)
    with copy.deepcopy({"timers": timers})["timers"].span("optimizer"):
        time.sleep(0.01)
    assert timers.take()["optimizer"] >= 0.01


def test_timed_without_timers_runs_the_block() -> None:
    with timed(None, "optimizer"):
        ran = True
    assert ran


@pytest.mark.gpu
def test_device_spans_are_the_device_s_time() -> None:
    """The host returns at once from a long kernel; the span is the kernel's time."""
    timers = StepTimers(torch.device("cuda", 0))
    matrix = torch.randn(8192, 8192, device="cuda")
    torch.mm(matrix, matrix)
    torch.cuda.synchronize()
    began = time.perf_counter()
    with timers.span("forward-compute"):
        for _ in range(20):
            torch.mm(matrix, matrix)
    returned_s = time.perf_counter() - began
    torch.cuda.synchronize()
    whole_s = time.perf_counter() - began
    assert returned_s < whole_s / 2
    assert timers.take()["forward-compute"] == pytest.approx(whole_s, rel=0.2)
    assert timers.take()["forward-compute"] == 0.0

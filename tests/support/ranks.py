"""Runs a function in several fresh ranks, quickly, and never leaves one behind.

Importing torch, Lightning and Megatron Core takes several seconds; a distributed test takes less than one. So the
imports are paid once per test session, in a fork server (`tests/support/preload.py`), and each call forks its ranks
from it. Fresh processes keep tests apart and can always be killed, which a long-lived pool of ranks could not promise.

Beware: ranks of one call share one string hash seed, which ranks launched by torchrun do not; what depends on the order
of a set is only seen by tests that launch real commands.
"""

import faulthandler
import itertools
import os
import pickle
import random
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import connection, forkserver, get_context
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from tests.support.processes import die_with_parent

_REPOSITORY = Path(__file__).resolve().parents[2]
_PRELOAD_MODULE = "tests.support.preload"
_POLL_S = 0.1
_GRACE_S = 1.0  # between the first failure and the end of the other ranks
_STACK_DUMP_S = 0.5  # for ranks that are stuck to write where they are
_OUTPUT_LIMIT = 8000  # characters of a rank's output shown in an error
_SINGLE_THREAD = dict.fromkeys(
    ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS"), "1"
)

_groups_made = itertools.count()

_context = get_context("forkserver")
_context.set_forkserver_preload([_PRELOAD_MODULE])


class RankError(RuntimeError):
    """A rank raised, died, or went over its time or memory limit; every rank of the call has been ended.

    Attributes:
        rank: the rank that failed first.
        reason: one line that says what happened to it.
        traceback_text: its Python traceback; empty when it was killed or crashed.
    """

    def __init__(self, rank: int, reason: str, traceback_text: str, details: str) -> None:
        self.rank = rank
        self.reason = reason
        self.traceback_text = traceback_text
        super().__init__(f"rank {rank} {reason}\n{details}".rstrip())


@dataclass
class _Rank:
    """The parent's view of one rank."""

    index: int
    process: ForkServerProcess
    reader: connection.Connection
    output: Path
    reported: bool = False  # a result or a traceback has arrived, or never will
    value: Any = None


@dataclass
class _Failure:
    rank: int
    reason: str
    traceback_text: str = ""
    when: float = field(default_factory=time.monotonic)


def run_ranks(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 120.0, memory_gib: float = 3.0
) -> list[Any]:
    """Runs `fn(*args)` in `world_size` fresh processes and returns their results in rank order.

    The processes see the caller's environment and working directory plus torchrun's variables; the rendezvous store
    is held by the caller, as torchrun's agent holds it, so no port can be taken by another process in between.

    Args:
        fn: a module-level function, imported by name in each rank.
        world_size: number of processes.
        *args: picklable arguments, the same for every rank.
        timeout_s: limit in seconds for the whole call, from the start of the first rank to the end of the last.
        memory_gib: limit in GiB of resident memory for each rank together with the processes it started.

    Raises:
        RankError: a rank raised, ended without a result, or went over a limit.
    """
    if world_size < 1:
        raise ValueError(f"world_size={world_size} must be at least 1")
    payload = pickle.dumps((fn, args))
    start_fork_server()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))
    ranks: list[_Rank] = []
    with tempfile.TemporaryDirectory(prefix="lt_parallel_ranks_") as folder:
        try:
            for index in range(world_size):
                ranks.append(_start(index, world_size, store.port, payload, Path(folder)))
            failures = _supervise(ranks, time.monotonic() + timeout_s, timeout_s, memory_gib)
        finally:
            _end(ranks)
        _show_output(ranks, failures)
    if failures:
        raise _error(failures)
    return [rank.value for rank in ranks]


def init_gloo(timeout_s: float = 60.0) -> None:
    """Makes the default process group over gloo from the environment, for tests that need no Trainer.

    May be called again after `destroy_process_group()`. The agent's store outlives the group and would answer with the
    old group's addresses (as it does under torchrun, where a second group made from the environment hangs now and
    then), so each group made here has its own prefix in it.
    """
    timeout = timedelta(seconds=timeout_s)
    client = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=timeout)
    store = dist.PrefixStore(f"init_gloo_{next(_groups_made)}", client)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)


def start_fork_server() -> None:
    """Starts the fork server with its imports unless it runs already.

    The server is a new interpreter, so the repository has to be on its path, and thread counts and the device have to
    be in its environment, before it imports anything.
    """
    before = dict(os.environ)
    path = os.pathsep.join([str(_REPOSITORY), *filter(None, [before.get("PYTHONPATH")])])
    try:
        os.environ.update(_SINGLE_THREAD, PYTHONPATH=path)
        os.environ.setdefault("LT_PARALLEL_DEVICE", "cpu")
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)


def _start(index: int, world_size: int, port: int, payload: bytes, folder: Path) -> _Rank:
    """Forks one rank."""
    reader, writer = _context.Pipe(duplex=False)
    output = folder / f"rank{index}.txt"
    environment = {
        "GLOO_SOCKET_IFNAME": "lo",
        "LT_PARALLEL_DEVICE": "cpu",
        **os.environ,
        **_SINGLE_THREAD,
        "RANK": str(index),
        "LOCAL_RANK": str(index),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "rank-tests",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    process = _context.Process(
        target=_rank_main, args=(writer, payload, environment, os.getcwd(), str(output)), name=f"rank{index}"
    )
    process.start()
    writer.close()
    return _Rank(index, process, reader, output)


def _supervise(ranks: list[_Rank], deadline: float, timeout_s: float, memory_gib: float) -> list[_Failure]:
    """Waits until every rank has ended, one has failed and the others had their grace, or a limit is passed."""
    failures: list[_Failure] = []
    while running := [rank for rank in ranks if not rank.reported or rank.process.is_alive()]:
        waiting = [rank.reader for rank in running if not rank.reported] + [r.process.sentinel for r in running]
        connection.wait(waiting, timeout=_POLL_S)
        for rank in running:
            failures += _collect(rank)
        overrun = _memory_overrun(running, memory_gib)
        if overrun:
            failures.append(overrun)
            break
        if failures and time.monotonic() > min(failure.when for failure in failures) + _GRACE_S:
            break
        if time.monotonic() > deadline:
            if not failures:
                failures.append(_timeout(ranks, timeout_s))
            break
    return sorted(failures, key=lambda failure: failure.when)


def _collect(rank: _Rank) -> list[_Failure]:
    """Takes what the rank has sent, if anything; a rank that ended without a word is a failure."""
    if rank.reported:
        return []
    if not rank.reader.poll():
        if rank.process.is_alive() or rank.reader.poll():  # it may have sent and ended since the first look
            return []
        return [_died(rank)]
    try:
        kind, content, when = pickle.loads(rank.reader.recv_bytes())
    except EOFError:
        rank.process.join()
        return [_died(rank)]
    rank.reported = True
    if kind == "result":
        rank.value = content
        return []
    return [_Failure(rank.index, f"raised {content.strip().splitlines()[-1]}", content, when)]


def _died(rank: _Rank) -> _Failure:
    rank.reported = True
    code = rank.process.exitcode
    how = (
        f"was ended by {signal.Signals(-code).name}" if code is not None and code < 0 else f"exited with status {code}"
    )
    return _Failure(rank.index, f"{how} and returned no result")


def _memory_overrun(ranks: list[_Rank], memory_gib: float) -> _Failure | None:
    """The first rank whose processes hold more than the limit, if there is one."""
    leaders = {rank.process.pid: rank.index for rank in ranks}
    used = dict.fromkeys(leaders, 0)
    for process in psutil.process_iter():
        try:
            session = os.getsid(process.pid)
            if session in used:  # each rank leads a session, which its own children stay in
                used[session] += process.memory_info().rss
        except (ProcessLookupError, psutil.NoSuchProcess, PermissionError):
            continue
    for pid, rank in leaders.items():
        gib = used[pid] / 2**30
        if gib > memory_gib:
            return _Failure(rank, f"used {gib:.2f} GiB of memory, more than its limit of {memory_gib:g} GiB")
    return None


def _timeout(ranks: list[_Rank], timeout_s: float) -> _Failure:
    """Asks the ranks that still run to write their stacks, and names them."""
    running = [rank for rank in ranks if rank.process.is_alive()]
    for pid in filter(None, (rank.process.pid for rank in running)):
        os.kill(pid, signal.SIGUSR1)
    time.sleep(_STACK_DUMP_S)
    names = ", ".join(str(rank.index) for rank in running)
    late = [rank for rank in running if rank.reported]
    what = "did not end after returning its result" if late and len(late) == len(running) else "was still running"
    return _Failure(running[0].index if running else 0, f"{what} after {timeout_s:g} s (ranks that ran: {names})")


def _end(ranks: list[_Rank]) -> None:
    """Kills every rank together with the processes it started, and waits for them."""
    for rank in ranks:
        pid = rank.process.pid
        if pid is None:
            continue
        try:
            os.killpg(pid, signal.SIGKILL)  # also what outlived a rank that has ended
        except ProcessLookupError:
            rank.process.kill()  # it has ended, or has not made its own group yet
    for rank in ranks:
        rank.process.join(10.0)
        rank.reader.close()


def _show_output(ranks: list[_Rank], failures: list[_Failure]) -> None:
    """Prints what the ranks wrote, for pytest to show when the test fails, and adds it to the failures."""
    for rank in ranks:
        text = rank.output.read_text(errors="replace").strip() if rank.output.exists() else ""
        if not text:
            continue
        if len(text) > _OUTPUT_LIMIT:
            text = f"... {len(text) - _OUTPUT_LIMIT} characters left out ...\n{text[-_OUTPUT_LIMIT:]}"
        print(f"--- output of rank {rank.index} ---\n{text}")


def _error(failures: list[_Failure]) -> RankError:
    first, *others = failures
    parts = [first.traceback_text]
    parts += [f"then rank {other.rank} {other.reason}" for other in others]
    return RankError(first.rank, first.reason, first.traceback_text, "\n".join(filter(None, parts)))


def _rank_main(
    writer: connection.Connection, payload: bytes, environment: dict[str, str], folder: str, output: str
) -> None:
    """The body of a rank: sets its surroundings up, runs the function, sends its result or its traceback."""
    die_with_parent()
    os.setsid()
    _redirect_output(output)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    _forget_shared_state()
    try:
        fn, args = pickle.loads(payload)
        value = fn(*args)
        if dist.is_initialized():
            dist.destroy_process_group()
        message = pickle.dumps(("result", value, time.monotonic()))
    except BaseException:  # noqa: BLE001  (SystemExit too: whatever ends a rank is for the caller)
        message = pickle.dumps(("error", traceback.format_exc(), time.monotonic()))
    sys.stdout.flush()
    sys.stderr.flush()
    writer.send_bytes(message)
    writer.close()


def _redirect_output(path: str) -> None:
    """Sends both output streams, native code's too, to a file."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)


def _forget_shared_state() -> None:
    """Gives this rank what a new interpreter would have and a fork does not: its own unseeded generators."""
    import numpy

    random.seed()
    numpy.random.seed()
    torch.set_num_threads(1)

"""One rank fails, the job ends, and everybody says why.

A rank that raises leaves the others waiting in a collective: over NCCL for the whole timeout, over gloo until a
neighbour notices. So a failing rank leaves a note in the job's key-value store; every rank has a thread that looks for
one, prints it and ends its process. If the store itself goes away, rank 0 is gone and there is nothing left to wait
for.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch

_KEY = "lt_parallel/failure"
_POLL_S = 1.0
#: Time a rank has to end by its own exception, which tells more, before the thread ends it. Rank 0 speaks for the job,
#: and Lightning's launcher kills it when another process ends with an error: so rank 0 goes first.
_GRACE_OF_RANK_0_S = 5.0
_GRACE_S = 10.0
_EXIT_CODE = 1


@dataclass(frozen=True)
class Failure:
    """What the first failing rank reported."""

    rank: int
    kind: str
    message: str

    def __str__(self) -> str:
        return f"rank {self.rank} failed with {self.kind}: {self.message}"


def _print_reason(rank: int, reason: str) -> None:
    print(f"rank {rank} ends: {reason}", file=sys.stderr, flush=True)


class FailureWatch:
    """Reports this rank's failure to the others, and ends this rank when another one reports.

    Args:
        host: Host of the default process group's store.
        port: Its port.
        rank: This rank.
        world_size: Number of ranks; nothing is watched with one.
        attempt: Distinguishes several groups made one after another on the same store.
    """

    def __init__(self, host: str, port: int, rank: int, world_size: int, attempt: str = "0") -> None:
        self.rank = rank
        self._key = f"{_KEY}/{attempt}"
        self._stop = threading.Event()
        self._store: Any = None
        self._thread: threading.Thread | None = None
        if world_size == 1:
            return
        # Two connections of our own: a store answers one request at a time, and the group's is in use.
        self._store = self._connect(host, port)
        self._watched = self._connect(host, port)
        self._thread = threading.Thread(target=self._watch, name="lt_parallel-failure-watch", daemon=True)
        self._thread.start()

    @classmethod
    def for_default_group(cls) -> FailureWatch:
        """A watch over the ranks of torch's default process group. Collective: every rank makes its n-th watch."""
        cls._count += 1
        restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        cls.latest = cls(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            torch.distributed.get_rank(),
            torch.distributed.get_world_size(),
            attempt=f"{restarts}.{cls._count}",
        )
        return cls.latest

    _count = 0
    #: The watch of the run that is on, or was last.
    latest: FailureWatch | None = None
    #: Says why this rank ends: (rank, reason). The command line puts its own in.
    announce: Callable[[int, str], None] = staticmethod(_print_reason)

    @staticmethod
    def _connect(host: str, port: int) -> Any:
        return torch.distributed.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=30))

    def report(self, exception: BaseException) -> None:
        """Leaves a note for the other ranks; the first note stays. Never raises.

        Args:
            exception: What ended this rank.
        """
        if self._store is None:
            return
        failure = Failure(self.rank, type(exception).__name__, str(exception))
        with contextlib.suppress(RuntimeError):  # the store is gone: the others know already
            self._store.compare_set(self._key, "", json.dumps(asdict(failure)))

    def wait_for_rank_0(self, timeout_s: float = 20.0) -> None:
        """Keeps a rank that has failed alive until rank 0 has ended, which says why for all.

        Args:
            timeout_s: At most this long: the job's store may be held by someone else than rank 0 (torchrun).
        """
        deadline = time.monotonic() + timeout_s
        while self._store is not None and self.rank != 0 and time.monotonic() < deadline:
            try:
                self._store.check([self._key])
            except RuntimeError:
                return
            time.sleep(0.2)

    def root_cause(self) -> Failure | None:
        """The first reported failure, None if nobody reported or the store is gone."""
        return self._read(self._store) if self._store is not None else None

    def _read(self, store: Any) -> Failure | None:
        try:
            if not store.check([self._key]):
                return None
            return Failure(**json.loads(store.get(self._key)))
        except RuntimeError:
            return None

    def stop(self) -> None:
        """Ends the watching, without waiting for other ranks."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=2 * _POLL_S)

    def _watch(self) -> None:
        while not self._stop.wait(_POLL_S):
            try:
                failed = self._watched.check([self._key])
            except RuntimeError:
                self._end("rank 0 has ended and took the job's key-value store with it")
                return
            if failed:
                failure = self._read(self._watched)
                if failure is None or failure.rank != self.rank:
                    self._end(str(failure) if failure else "another rank failed")
                return

    def _end(self, reason: str) -> None:
        deadline = time.monotonic() + (_GRACE_S if self.rank else _GRACE_OF_RANK_0_S)
        while time.monotonic() < deadline:
            if self._stop.wait(0.1):
                return
        self.announce(self.rank, reason)
        os._exit(_EXIT_CODE)

"""Linux process control that the tests use so that nothing they start can outlive them."""

import ctypes
import os
import signal

import psutil

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def die_with_parent() -> None:
    """Lets the kernel kill this process when its parent ends, whatever way it ends."""
    parent = os.getppid()
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the request was in force
        os._exit(1)


def adopt_orphans() -> None:
    """Makes descendants whose own parent ended children of this process, where `descendants` sees them."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def is_running(pid: int) -> bool:
    """Whether the process exists and is not just waiting to be reaped."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def descendants() -> dict[int, str]:
    """Process id and command of every running process below this one."""
    found = {}
    for process in psutil.Process().children(recursive=True):
        try:
            if process.status() != psutil.STATUS_ZOMBIE:
                found[process.pid] = " ".join(process.cmdline()) or process.name()
        except psutil.NoSuchProcess:
            continue
    return found


def kill(pid: int) -> None:
    """Kills the process if it still runs."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))

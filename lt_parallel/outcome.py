"""How a command ends: quietly on success, with one short message of rank 0 on an error, and always completely.

All ranks run the same command, so each of them meets an error: its own, or a broken connection to the rank that failed.
Only rank 0 speaks, and it says what happened first, wherever that was. A rank that fails stays alive until rank 0 has
spoken, because Lightning's launcher kills rank 0 as soon as another process ends with an error. Nothing is left
running: rank 0 ends the processes that it started.

`LT_PARALLEL_DEBUG=1` shows every rank's traceback as well. Nothing heavy is imported here.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import sysconfig
import textwrap
import threading
import time
import traceback
from argparse import ArgumentError
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from lt_parallel.quiet import debugging

if TYPE_CHECKING:
    from lt_parallel.strategies.failure import FailureWatch

_MESSAGE_LINES = 12
_LINE_WIDTH = 400
#: Errors whose message says it all; for others the place in the code helps.
_SPEAKING = (ValueError, OSError)
#: What this package's extras install -> the extra.
_EXTRAS = {"wandb": "wandb", "transformer_engine": "te", "transformers": "hf", "safetensors": "hf"}
_MISSING = re.compile(r"(?:Requirement|[Nn]o module named|Module not found:) '(\w+)")


class CommandError(Exception):
    """A mistake in the command line; the message says it all."""


def run_command(command: Callable[[], int]) -> int:
    """Runs a command; turns its exception into a short message and an exit status.

    Args:
        command: Returns the exit status.

    Returns:
        The exit status: 2 for a mistake in the command line, 130 when interrupted, 1 for other errors. A process of a
        job of several ranks doesn't come back from an error, it ends.
    """
    _end_with_launcher()
    try:
        return command()
    except (CommandError, ArgumentError) as error:
        if debugging():
            traceback.print_exc()
        return _end(f"error: {getattr(error, 'message', None) or error}", status=2)
    except KeyboardInterrupt as interrupt:
        return _end(str(interrupt) or "Interrupted", status=130)
    except Exception as error:  # noqa: BLE001 - the one place where every error of a command ends
        if debugging():
            traceback.print_exc()
        return _end(f"error: {explain(error)}", status=1, hint=True)


def announce(failed_rank: int, reason: str) -> None:
    """Says why this rank is ended by the failure watch; for `FailureWatch.announce`.

    Args:
        failed_rank: This rank.
        reason: What the failing rank said.
    """
    if failed_rank == 0:
        _say(f"error: {reason}", hint=True)
        _end_children()
    _flush()


def end_on_sigterm() -> None:
    """Makes SIGTERM end the job; call it when the run has begun.

    Lightning's own handler begins a collective wherever the signal meets each rank, and so may wait for ever.
    """
    signal.signal(signal.SIGTERM, _on_sigterm)


def _on_sigterm(signum: int, frame: FrameType | None) -> None:
    if started_by_user():
        _say("error: ended by SIGTERM", hint=False)
        _end_children()
    _leave(128 + signum)


def _end_with_launcher() -> None:
    """Leaves the end of a process that Lightning's launcher started to the process that started it.

    It ends when that one is gone. Ctrl-C reaches all processes of a terminal, but only that one heeds it: the others
    would fail for lack of each other while it shuts the run down.
    """
    if started_by_user() or "RANK" in os.environ or "SLURM_PROCID" in os.environ:
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    when_parent_is_gone(lambda: os._exit(1))


def when_parent_is_gone(end: Callable[[], None]) -> None:
    """Calls `end`, from a thread of its own, within a second of the end of the process that started this one."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        end()

    threading.Thread(target=watch, name="lt_parallel-watch-parent", daemon=True).start()


def explain(error: Exception) -> str:
    """What went wrong, in a few lines.

    Args:
        error: This rank's exception; a failure that another rank reported earlier takes its place.
    """
    return with_extra(_reason(error))


def _reason(error: Exception) -> str:
    watch = _watch()
    failure = watch.root_cause() if watch else None
    if watch is not None and failure is not None:
        if failure.rank != watch.rank:
            return str(failure)
        killed = _killed_child()
        if killed:
            return f"{killed}; rank 0 then met {type(error).__name__}: {error}"
    if isinstance(error, _SPEAKING):
        return str(error)
    return f"{type(error).__name__}: {error}{place_of(error)}"


def with_extra(message: str) -> str:
    """A message that a library is missing, if it's one of this package's extras, with how to install that.

    Args:
        message: Python's, or Lightning's about a requirement that isn't met; any other is returned as it is.
    """
    missing = _MISSING.search(message)
    extra = _EXTRAS.get(missing[1]) if missing else None
    if missing is None or extra is None:
        return message
    return f'{message[: missing.start()]}{missing[1]} is missing or too old; run pip install "lt-parallel[{extra}]"'


def place_of(error: BaseException) -> str:
    """Where the error arose, as " (file:line in function)": the last line that is neither a library's nor ours."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return ""
    not_own = (str(Path(__file__).parent), sysconfig.get_path("stdlib"), "<")
    own = [f for f in frames if "site-packages" not in f.filename and not f.filename.startswith(not_own)]
    frame = (own or frames)[-1]
    return f" ({frame.filename}:{frame.lineno} in {frame.name})"


def shorten(message: str) -> str:
    """A message of at most 13 lines, each of at most 400 characters."""
    lines = [textwrap.shorten(line, _LINE_WIDTH) if len(line) > _LINE_WIDTH else line for line in message.splitlines()]
    left_out = len(lines) - _MESSAGE_LINES
    if left_out > 0:
        lines = [*lines[:_MESSAGE_LINES], f"... ({left_out} more lines)"]
    return "\n".join(lines)


def started_by_user() -> bool:
    """Whether this process is the job's first one, as far as the environment tells: rank 0, launched or not yet."""
    names = ("RANK", "SLURM_PROCID", "LOCAL_RANK", "NODE_RANK")
    given = [int(os.environ[name]) for name in names if os.environ.get(name)]
    if "RANK" in os.environ or "SLURM_PROCID" in os.environ:
        return given[0] == 0
    return not any(given)


def _watch() -> FailureWatch | None:
    """The failure watch of the run, None if there was none yet."""
    module = sys.modules.get("lt_parallel.strategies.failure")
    return module.FailureWatch.latest if module else None


def _end(message: str, *, status: int, hint: bool = False) -> int:
    watch = _watch()
    if started_by_user():
        _say(message, hint=hint)
        _end_children()
    elif watch is None:
        _say(f"in process {os.getpid()}, before it joined the job: {message}", hint=hint)
    else:
        watch.wait_for_rank_0()
    if watch is not None:
        _leave(status)
    return status


def _leave(status: int) -> NoReturn:
    # At once: the interpreter's own way out may wait for a rank that is gone.
    _flush()
    os._exit(status)


def _say(message: str, *, hint: bool) -> None:
    text = shorten(message)
    if hint and not debugging():
        text += "\n(LT_PARALLEL_DEBUG=1 shows the traceback)"
    # On a terminal, leave the line that a progress bar may have begun.
    print(f"\n{text}" if sys.stderr.isatty() else text, file=sys.stderr, flush=True)


def _killed_child() -> str | None:
    """Which child process was ended by a signal, in words."""
    import psutil

    for child in psutil.Process().children():
        try:
            code = child.wait(timeout=0) if child.status() == psutil.STATUS_ZOMBIE else None
        except psutil.Error:
            continue
        if code is not None and code < 0:
            name = signal.Signals(-code).name
            memory = ", perhaps for lack of memory" if name == "SIGKILL" else ""
            return f"process {child.pid} of the job was ended by {name}{memory}"
    return None


def _end_children() -> None:
    """Ends the processes that this one has started; they have nothing left to save."""
    import psutil

    children = psutil.Process().children(recursive=True)
    for child in children:
        try:
            child.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(children, timeout=5)


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()

"""Where caches live and how processes take turns in them.

The lock is ``flock``: the kernel drops it when its holder dies, however it dies, so there is no stale lock to detect.
Lock files stay behind; deleting one would let two processes hold "the same" lock on two different files.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lt_parallel.data.errors import DataError


def cache_root(cache_dir: str | None) -> Path:
    """``cache_dir``, or ``$XDG_CACHE_HOME/lt_parallel`` (by default ``~/.cache/lt_parallel``), made if it isn't there.

    Raises:
        DataError: If it can't be made or written.
    """
    if cache_dir is not None:
        root = Path(cache_dir).expanduser().absolute()
    else:
        root = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "lt_parallel"
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"can't make cache folder {str(root)!r}: {error.strerror}; give another one") from error
    if not os.access(root, os.W_OK | os.X_OK):
        raise DataError(f"cache folder {str(root)!r} isn't writable; give another one")
    return root


@contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Hold an exclusive lock between processes, waiting as long as another one holds it.

    Raises:
        DataError: If the file system has no locks.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError as error:
            raise DataError(
                f"the file system of {str(path.parent)!r} can't lock files ({error.strerror}); use another one"
            ) from error
        yield
    finally:
        os.close(descriptor)


def sync_file(path: Path) -> None:
    """Force a file's content (or a folder's names) to disk, so that a rename can't outrun it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""Writing files so that a reader sees the old content or the new one, never a part."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def write_atomically(path: Path, content: str | bytes) -> None:
    """Writes a whole file, over the one that may be there.

    Args:
        path: Of the file; its folder must exist.
        content: Text is written as UTF-8.

    Raises:
        OSError: It can't be written; what was there is left.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_bytes(content.encode() if isinstance(content, str) else content)
        partial.replace(path)
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)

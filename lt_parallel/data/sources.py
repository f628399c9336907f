"""Finding text files and reading them in bounded pieces.

Listing looks at names and sizes only, so that every rank can repeat it cheaply and get the same ordered list; contents
are read by the one process that tokenizes. A piece ends at a line end where there is one, because a tokenizer must not
see half a word or half a UTF-8 character, and a file may be larger than memory.
"""

import glob
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from lt_parallel.data.errors import DataError

PIECE_BYTES = 128 << 10  # small enough that a batch of pieces keeps many cores busy
_SNIFF_BYTES = 8192

#: In place of a path: text that is on every machine with a Python.
PYTHON_STDLIB = "python:stdlib"
_NOT_STDLIB = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}


@dataclass(frozen=True)
class SourceFile:
    """A file to read, with what identifies its content without reading it.

    Args:
        path: Absolute path.
        size_bytes: Size when listed.
        mtime_ns: Modification time when listed, in nanoseconds.
        only_if_text: Leave the file out if it looks binary (it was found in a folder, nobody named it).
    """

    path: Path
    size_bytes: int
    mtime_ns: int
    only_if_text: bool = False


@dataclass(frozen=True)
class Piece:
    """Part of one document.

    Args:
        data: Raw bytes, at most about twice PIECE_BYTES (a JSONL document: any number).
        source: Where they come from, for messages: a path, or ``path:line``.
        offset_bytes: Position of the first byte in the document.
        size_bytes: Bytes of input that this piece stands for (progress bars count them).
        last: The document ends here.
    """

    data: bytes
    source: str
    offset_bytes: int
    size_bytes: int
    last: bool


def list_files(paths: str | Sequence[str], pattern: str | None = None) -> list[SourceFile]:
    """List the files that ``paths`` names, each once, in a fixed order.

    Args:
        paths: Files, folders (searched recursively) and globs (``**`` allowed), one or several; "python:stdlib" names
            the .py files of the running Python's standard library, without its tests.
        pattern: Glob below each folder, such as ``**/*.py``. None: every file that isn't hidden and looks like text.

    Raises:
        DataError: If a path is missing, or a folder or glob holds no file.
    """
    given = list(paths) if isinstance(paths, Sequence) and not isinstance(paths, str) else [paths]
    if not given:
        raise DataError("paths=[] names no text; give at least one file, folder or glob")
    if not all(isinstance(text, str) and text for text in given):
        raise DataError(f"paths={paths!r} must name files, folders or globs, as text that isn't empty")
    found: dict[Path, SourceFile] = {}
    for text in given:
        for file in _expand(text, pattern):
            found.setdefault(file.path, file)
    return list(found.values())


def _expand(text: str, pattern: str | None) -> list[SourceFile]:
    """Files behind one entry of ``paths``."""
    if text == PYTHON_STDLIB:
        return _standard_library()
    path = Path(text).expanduser()
    if path.is_dir():
        return _folder_files(path, pattern)
    if path.exists():
        return [_describe(path)]
    if glob.has_magic(text):
        return _glob_files(text)
    parent = next(p for p in path.absolute().parents if p.exists())
    raise DataError(f"paths: {text!r} doesn't exist (the nearest folder that does is {str(parent)!r})")


def _standard_library() -> list[SourceFile]:
    root = Path(sysconfig.get_path("stdlib"))
    files = []
    for here, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in _NOT_STDLIB)
        files += [_describe(Path(here, name)) for name in sorted(names) if name.endswith(".py")]
    if not files:
        raise DataError(f"paths: {PYTHON_STDLIB!r} finds no .py file below {str(root)!r}; give a folder with text")
    return files


def _folder_files(folder: Path, pattern: str | None) -> list[SourceFile]:
    if pattern is None:
        files = [_describe(p, only_if_text=True) for p in _visible_files(folder)]
    else:
        files = [_describe(p) for p in sorted(_glob_below(folder, pattern)) if p.is_file()]
    if not files:
        wanted = "holds no file" if pattern is None else f"holds no file that matches pattern={pattern!r}"
        other = next(iter(_visible_files(folder)), None) if pattern else None
        hint = f" (it does hold {str(other.relative_to(folder))!r})" if other else ""
        raise DataError(f"paths: folder {str(folder)!r} {wanted}{hint}")
    return files


def _glob_below(folder: Path, pattern: str) -> Iterator[Path]:
    try:
        yield from folder.glob(pattern)
    except (ValueError, NotImplementedError) as error:
        raise DataError(
            f"pattern={pattern!r} isn't a glob relative to a folder, such as '**/*.txt': {error}"
        ) from error


def _glob_files(text: str) -> list[SourceFile]:
    matches = sorted(glob.glob(os.path.expanduser(text), recursive=True))
    files = [_describe(Path(m)) for m in matches if os.path.isfile(m)]
    if not files:
        what = f"matches {len(matches)} folders and no file" if matches else "matches nothing"
        raise DataError(f"paths: glob {text!r} {what}; relative globs start at {os.getcwd()!r}")
    return files


def _visible_files(folder: Path) -> Iterator[Path]:
    """Files below a folder in sorted order, hidden files and folders left out."""

    def fail(error: OSError) -> None:
        raise DataError(f"paths: can't list folder {error.filename!r}: {error.strerror}") from error

    for here, folders, names in os.walk(folder, onerror=fail):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            path = Path(here, name)
            if not name.startswith(".") and path.is_file():
                yield path


def _describe(path: Path, only_if_text: bool = False) -> SourceFile:
    try:
        status = path.stat()
    except OSError as error:
        raise DataError(f"paths: can't read {str(path)!r}: {error.strerror}") from error
    return SourceFile(path.absolute(), status.st_size, status.st_mtime_ns, only_if_text)


def changed_files(files: Sequence[SourceFile]) -> list[Path]:
    """Files whose size or time isn't what was listed."""
    return [f.path for f in files if _describe(f.path, f.only_if_text) != f]


def read_file(file: SourceFile) -> Iterator[Piece]:
    """Yield a file as pieces; nothing for an empty file, or for a binary one that nobody named.

    Raises:
        DataError: If the file can't be read.
    """
    try:
        with open(file.path, "rb") as stream:
            head = stream.read(_SNIFF_BYTES)
            if not head or (file.only_if_text and b"\0" in head):
                return
            stream.seek(0)
            offset, rest = 0, b""
            while block := stream.read(PIECE_BYTES):
                rest += block
                if len(block) == PIECE_BYTES:
                    cut = _cut(rest)
                    yield Piece(rest[:cut], str(file.path), offset, cut, last=False)
                    offset, rest = offset + cut, rest[cut:]
            yield Piece(rest, str(file.path), offset, len(rest), last=True)
    except OSError as error:
        raise DataError(f"paths: can't read {str(file.path)!r}: {error.strerror}") from error


def _cut(data: bytes) -> int:
    """Where to end a piece: after the last line end, else before the last UTF-8 character."""
    line_end = data.rfind(b"\n")
    if line_end >= 0:
        return line_end + 1
    for back in range(1, 5):
        if data[-back] < 0x80:
            break
        if data[-back] >= 0xC0:
            return len(data) - back
    return len(data)

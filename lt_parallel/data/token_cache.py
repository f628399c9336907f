"""The token cache: a corpus tokenized once, memory-mapped by every process that trains on it.

A cache is a folder named after what it was made from (files with sizes and times, tokenizer, format version), so it is
never updated, only made or found. It is written under a temporary name and renamed when complete: whoever sees the
folder sees all of it, and a process killed on the way leaves only a temporary folder that the next builder removes.

    tokens.bin     ids, uint16 or uint32, all documents one after the other, each followed by the end-of-document id
    offsets.npy    int64 [documents + 1], where each document starts in tokens.bin
    hashes.npy     uint64 [documents], hash of each document's bytes
    meta.json      written last: version, dtype, counts
"""

import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lt_parallel.data.errors import DataError
from lt_parallel.data.locking import file_lock, sync_file
from lt_parallel.data.progress import byte_progress
from lt_parallel.data.sources import Piece, SourceFile, changed_files, read_file
from lt_parallel.data.tokenizer import Tokenizer, Tokens, encode_stream, token_dtype
from lt_parallel.files import write_atomically

VERSION = 1
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TokenCache:
    """An opened cache.

    Args:
        folder: Where it is.
        dtype: Type of the ids in ``tokens.bin``.
        offsets: int64 [documents + 1], starts of the documents in tokens.
        hashes: uint64 [documents], equal for documents with equal bytes.
    """

    folder: Path
    dtype: str
    offsets: NDArray[np.int64]
    hashes: NDArray[np.uint64]

    @property
    def num_tokens(self) -> int:
        """Tokens in all documents, end-of-document ids included."""
        return int(self.offsets[-1])

    def tokens(self) -> Tokens:
        """Map ``tokens.bin`` into memory: [num_tokens]."""
        # A plain array on the same memory: slicing np.memmap itself costs several times as much.
        return np.memmap(self.folder / "tokens.bin", dtype=self.dtype, mode="r").view(np.ndarray)


def cache_key(files: Sequence[SourceFile], tokenizer: Tokenizer) -> str:
    """Name of the cache for these files and this tokenizer."""
    described = [[str(f.path), f.size_bytes, f.mtime_ns, f.only_if_text] for f in files]
    content = json.dumps([VERSION, tokenizer.fingerprint, tokenizer.vocab_size, tokenizer.eod, described])
    return hashlib.blake2b(content.encode("utf-8", errors="surrogateescape"), digest_size=12).hexdigest()


def open_or_build(files: Sequence[SourceFile], tokenizer: Tokenizer, root: Path) -> TokenCache:
    """Open the cache of these files, or make it; any number of processes may call this at once, one makes it.

    Args:
        files: What to tokenize, in order.
        tokenizer: How.
        root: Folder of all caches.

    Raises:
        DataError: If no file holds text, a file can't be read or decoded, or the cache can't be written.
    """
    key = cache_key(files, tokenizer)
    folder, failure = root / key, root / f"{key}.failed"
    found = _open(folder)
    if found is not None:
        return found
    try:
        with file_lock(root / f"{key}.lock"):
            found = _open(folder)
            if found is not None:
                return found
            # Files, sizes and times are in the key, so what failed once would fail again: the ranks that waited for
            # this lock end at once instead of tokenizing up to the fault one after the other.
            if failure.exists():
                raise DataError(failure.read_text(encoding="utf-8"))
            _remove_remains(root, key)
            return _build_and_publish(files, tokenizer, root, key)
    except OSError as error:
        raise DataError(f"can't write the token cache in {str(root)!r}: {error.strerror or error}") from error


def _open(folder: Path) -> TokenCache | None:
    """The cache, or None if it isn't there or was damaged from outside."""
    try:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        offsets, hashes = np.load(folder / "offsets.npy", mmap_mode="r"), np.load(folder / "hashes.npy", mmap_mode="r")
        size_bytes = (folder / "tokens.bin").stat().st_size
    except FileNotFoundError:
        return None
    except (ValueError, EOFError) as error:
        log.warning("token cache %s is damaged (%s) and will be made anew", folder, error)
        return None
    if size_bytes != int(offsets[-1]) * np.dtype(meta["dtype"]).itemsize or len(hashes) + 1 != len(offsets):
        log.warning("token cache %s is damaged (its sizes don't fit together) and will be made anew", folder)
        return None
    return TokenCache(folder, meta["dtype"], offsets, hashes)


def _remove_remains(root: Path, key: str) -> None:
    """Remove what killed builders left of this key; only the holder of the lock may."""
    for remains in [*root.glob(f".{key}.*"), root / key]:
        if remains.is_dir():
            shutil.rmtree(remains)
        else:
            remains.unlink(missing_ok=True)


def _build_and_publish(files: Sequence[SourceFile], tokenizer: Tokenizer, root: Path, key: str) -> TokenCache:
    temporary = root / f".{key}.{os.getpid()}"
    temporary.mkdir()
    start = time.monotonic()
    log.info("tokenizing %d files, %.1f MB", len(files), sum(f.size_bytes for f in files) / 1e6)
    try:
        offsets = _write_tokens(files, tokenizer, temporary)
        if changed := changed_files(files):
            raise DataError(f"{str(changed[0])!r} changed while it was tokenized; start again when it is complete")
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error.__cause__, UnicodeDecodeError):
            _record_failure(root / f"{key}.failed", str(error))
        raise
    for path in [*temporary.iterdir(), temporary]:
        sync_file(path)
    os.replace(temporary, root / key)
    sync_file(root)
    log.info(
        "tokenized %d documents into %d tokens in %.1f s (%s)",
        len(offsets) - 1,
        int(offsets[-1]),
        time.monotonic() - start,
        root / key,
    )
    built = _open(root / key)
    if built is None:
        raise DataError(
            f"token cache {str(root / key)!r} vanished as soon as it was made; is something cleaning it up?"
        )
    return built


def _record_failure(path: Path, message: str) -> None:
    """Leave the message of a failure that follows from the content to the processes that wait."""
    write_atomically(path, message.encode(errors="backslashreplace"))


def _write_tokens(files: Sequence[SourceFile], tokenizer: Tokenizer, folder: Path) -> NDArray[np.int64]:
    """Write all four files of a cache; returns the offsets."""
    dtype = token_dtype(tokenizer.vocab_size)
    eod = np.array([tokenizer.eod], dtype=dtype)
    position, offsets, hashes = 0, [0], []
    digest = hashlib.blake2b(digest_size=8)
    total_bytes = sum(f.size_bytes for f in files)
    with open(folder / "tokens.bin", "wb") as stream, byte_progress("Tokenizing text", total_bytes) as advance:
        for piece, tokens in encode_stream(tokenizer, _pieces(files)):
            stream.write(tokens.tobytes())
            position += len(tokens)
            digest.update(piece.data)
            if piece.last:
                stream.write(eod.tobytes())
                position += 1
                offsets.append(position)
                hashes.append(int.from_bytes(digest.digest(), "little"))
                digest = hashlib.blake2b(digest_size=8)
            advance(piece.size_bytes)
    if not hashes:
        raise DataError(_no_text(files))
    result = np.array(offsets, dtype=np.int64)
    np.save(folder / "offsets.npy", result)
    np.save(folder / "hashes.npy", np.array(hashes, dtype=np.uint64))
    meta = {"version": VERSION, "dtype": np.dtype(dtype).name, "vocab_size": tokenizer.vocab_size}
    meta |= {"documents": len(hashes), "tokens": position}
    (folder / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
    return result


def _pieces(files: Iterable[SourceFile]) -> Iterator[Piece]:
    for file in files:
        yield from read_file(file)


def _no_text(files: Sequence[SourceFile]) -> str:
    empty = sum(f.size_bytes == 0 for f in files)
    return (
        f"paths hold no text: of {len(files)} files {empty} are empty and {len(files) - empty} look binary "
        f"(the first is {str(files[0].path)!r})"
    )

"""Checks of a Megatron ``.bin/.idx`` pair before anything is read through it.

Megatron Core maps both files and trusts the index: with the wrong one it reads past the end or returns other text, and
an empty split makes its epoch count loop for ever. So sizes are compared first, on every rank, by arithmetic alone.

Layout of an ``.idx`` (little endian): magic, version u64, dtype code u8, sequences u64, document bounds u64, then
int32 [sequences] lengths in tokens, int64 [sequences] byte offsets, int64 [document bounds], and for multimodal data
int8 [sequences] modes.
"""

import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lt_parallel.data.errors import DataError

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")


@dataclass(frozen=True)
class IndexedPair:
    """A pair that passed the checks.

    Args:
        prefix: Path without ``.bin`` and ``.idx``.
        lengths: int32 [sequences], tokens in each sequence.
        documents: Documents in the pair.
        token_bytes: Bytes of one token in the ``.bin``.
    """

    prefix: str
    lengths: NDArray[np.int32]
    documents: int
    token_bytes: int

    @property
    def num_tokens(self) -> int:
        """Tokens in the pair."""
        return int(self.lengths.sum(dtype=np.int64))

    def fingerprint(self) -> list[str | int]:
        """What changes when the pair is written anew: path, sizes, times."""
        out: list[str | int] = [self.prefix]
        for suffix in (".bin", ".idx"):
            status = Path(self.prefix + suffix).stat()
            out += [status.st_size, status.st_mtime_ns]
        return out


def check_pair(path: str) -> IndexedPair:
    """Check that a pair is there, is Megatron's format, belongs together and holds text.

    Args:
        path: Path with or without ``.bin`` or ``.idx``.

    Raises:
        DataError: Saying what is wrong, with the sizes in bytes.
    """
    prefix = str(Path(path.removesuffix(".bin").removesuffix(".idx")).expanduser().absolute())
    bin_path, idx_path = Path(prefix + ".bin"), Path(prefix + ".idx")
    for file in (bin_path, idx_path):
        if not file.is_file():
            raise DataError(_missing(path, file))
    try:
        return _check_files(prefix, bin_path, idx_path)
    except OSError as error:
        raise DataError(f"data_path={path!r}: can't read {error.filename!r}: {error.strerror}") from error


def _missing(path: str, file: Path) -> str:
    neighbours = sorted(p.stem for p in file.parent.glob("*.idx")) if file.parent.is_dir() else []
    hint = f"; pairs in that folder: {', '.join(neighbours[:5])}" if neighbours else ""
    return (
        f"data_path={path!r} names the pair {file.stem}.bin and {file.stem}.idx, but {str(file)!r} doesn't exist"
        f"{hint}. `lt-parallel data` writes such a pair"
    )


def _check_files(prefix: str, bin_path: Path, idx_path: Path) -> IndexedPair:
    with open(idx_path, "rb") as stream:
        header = stream.read(_HEADER.size)
    if len(header) < _HEADER.size or not header.startswith(_MAGIC):
        raise DataError(
            f"{str(idx_path)!r} isn't a Megatron index: it starts with {header[:9]!r}, not {_MAGIC!r} "
            f"({idx_path.stat().st_size} bytes, the header alone has {_HEADER.size})"
        )
    _, version, code, sequences, bounds = _HEADER.unpack(header)
    if version != 1:
        raise DataError(f"{str(idx_path)!r} has format version {version}; Megatron Core reads version 1")
    token_bytes = _token_bytes(idx_path, code)
    idx_bytes, wanted = idx_path.stat().st_size, _HEADER.size + 12 * sequences + 8 * bounds
    if idx_bytes not in (wanted, wanted + sequences):
        raise DataError(
            f"{str(idx_path)!r} has {idx_bytes} bytes, but its {sequences} sequences and {bounds} document bounds take "
            f"{wanted}: it is cut short or damaged; write the pair again"
        )
    if sequences == 0 or bounds < 2:
        raise DataError(f"{str(idx_path)!r} holds no document; write the pair again from text that isn't empty")
    lengths: NDArray[np.int32] = np.memmap(idx_path, dtype="<i4", mode="r", offset=_HEADER.size, shape=(sequences,))
    tokens, bin_bytes = int(lengths.sum(dtype=np.int64)), bin_path.stat().st_size
    if tokens * token_bytes != bin_bytes:
        raise DataError(
            f"{str(idx_path)!r} doesn't match {str(bin_path)!r}: the index stands for {tokens} tokens of {token_bytes} "
            f"bytes = {tokens * token_bytes} bytes, the .bin has {bin_bytes} bytes; take both files from one run of "
            "`lt-parallel data` (or copy them again)"
        )
    return IndexedPair(prefix, lengths, bounds - 1, token_bytes)


def _token_bytes(idx_path: Path, code: int) -> int:
    from megatron.core.datasets.indexed_dataset import DType

    if code not in {int(kind.value) for kind in DType}:
        raise DataError(
            f"{str(idx_path)!r} has dtype code {code}, which Megatron Core doesn't know; write the pair again"
        )
    return int(DType.size(code))

"""Tokenizers: bytes, which need no file and fit any text, and files of the `tokenizers` library.

Both add what training needs and a raw tokenizer lacks: an end-of-document id, a vocabulary size that covers every id,
and a fingerprint of the content, which keys the token cache.
"""

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from lt_parallel.data.errors import DataError
from lt_parallel.data.sources import Piece

if TYPE_CHECKING:
    from tokenizers import Tokenizer as TokenizersTokenizer

Tokens = NDArray[np.uint16] | NDArray[np.uint32]

BYTES = "bytes"
# Names under which published tokenizers keep their end-of-document token, the most specific first.
EOD_NAMES = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
    "</s>",
    "<eos>",
    "[EOS]",
    "<EOS>",
)
_BATCH_BYTES = 8 << 20  # encodings take some 50 times the space of their text


class Tokenizer(Protocol):
    """What the data layer and generation need of a tokenizer.

    ``spec`` is what the user wrote, ``fingerprint`` identifies the content, ``vocab_size`` is one above the highest id,
    ``eod`` is the id after each document.
    """

    spec: str
    fingerprint: str
    vocab_size: int
    eod: int

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without any special token around it."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids; special ids give nothing, broken characters give U+FFFD."""
        ...

    def encode_pieces(self, pieces: Sequence[Piece]) -> list[Tokens]:
        """Ids of each piece in ``token_dtype``."""
        ...


def token_dtype(vocab_size: int) -> type[np.uint16] | type[np.uint32]:
    """The smallest unsigned type that holds every id."""
    return np.uint16 if vocab_size <= 1 << 16 else np.uint32


class ByteTokenizer:
    """The 256 byte values, and 256 as end of document."""

    spec = BYTES
    fingerprint = BYTES
    vocab_size = 257
    eod = 256

    def encode(self, text: str) -> list[int]:
        """UTF-8 bytes of a text."""
        return list(text.encode("utf-8", errors="surrogateescape"))

    def decode(self, ids: Sequence[int]) -> str:
        """Text of UTF-8 bytes; what isn't UTF-8 becomes U+FFFD, the end of document nothing."""
        return bytes(i for i in map(int, ids) if i < 256).decode("utf-8", errors="replace")

    def encode_pieces(self, pieces: Sequence[Piece]) -> list[Tokens]:
        """Bytes of each piece, unchecked: any file is fine."""
        return [np.frombuffer(piece.data, dtype=np.uint8).astype(np.uint16) for piece in pieces]


class FileTokenizer:
    """A tokenizer saved by the `tokenizers` library (a ``tokenizer.json``).

    Args:
        path: The JSON file.
        eod_token: Name of the end-of-document token. None: the first of ``EOD_NAMES`` that the vocabulary has, else a
            new id after the vocabulary, which grows by one.

    Raises:
        DataError: If the file or the token is missing, or the library can't read the file.
    """

    def __init__(self, path: str | Path, eod_token: str | None = None) -> None:
        self.spec = str(path)
        self._tokenizer = _load(Path(path).expanduser())
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise DataError(f"tokenizer={self.spec!r} has an empty vocabulary")
        self.eod = self._find_eod(vocabulary, eod_token)
        self.vocab_size = max(*vocabulary.values(), self.eod) + 1
        content = self._tokenizer.to_str() + f"|eod={self.eod}"
        self.fingerprint = hashlib.blake2b(content.encode(), digest_size=16).hexdigest()

    def _find_eod(self, vocabulary: dict[str, int], eod_token: str | None) -> int:
        if eod_token is not None:
            if eod_token not in vocabulary:
                known = [name for name in EOD_NAMES if name in vocabulary]
                raise DataError(
                    f"eod_token={eod_token!r} isn't in the {len(vocabulary)} tokens of tokenizer={self.spec!r}"
                    + (f"; it has {', '.join(map(repr, known))}" if known else "")
                )
            return vocabulary[eod_token]
        return next((vocabulary[name] for name in EOD_NAMES if name in vocabulary), max(vocabulary.values()) + 1)

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without the special tokens that the file's post-processor would add."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids, special tokens left out."""
        return str(self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=True))

    def encode_pieces(self, pieces: Sequence[Piece]) -> list[Tokens]:
        """Ids of each piece, on all cores.

        Raises:
            DataError: If a piece isn't UTF-8.
        """
        texts = [_decode_utf8(piece, self.spec) for piece in pieces]
        encodings: list[Any] = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        dtype = token_dtype(self.vocab_size)
        return [np.asarray(encoding.ids, dtype=dtype) for encoding in encodings]


def _load(path: Path) -> "TokenizersTokenizer":
    if not path.is_file():
        raise DataError(f"tokenizer={str(path)!r} is neither {BYTES!r} nor a file; give the path of a tokenizer.json")
    from tokenizers import Tokenizer as Loader

    try:
        loaded: TokenizersTokenizer = Loader.from_file(str(path))
    except Exception as error:
        raise DataError(f"tokenizer={str(path)!r} isn't a file of the tokenizers library: {error}") from error
    # A file may carry the truncation and padding of the fine-tuning it was saved from; text must come through whole.
    loaded.no_truncation()
    loaded.no_padding()
    return loaded


def _decode_utf8(piece: Piece, spec: str) -> str:
    try:
        return piece.data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{piece.source} isn't UTF-8 (byte {piece.data[error.start]:#04x} at offset "
            f"{piece.offset_bytes + error.start}), which tokenizer={spec!r} needs; "
            f"convert the file, leave it out with pattern, or use tokenizer={BYTES!r}"
        ) from error


def build_tokenizer(spec: str, eod_token: str | None = None) -> Tokenizer:
    """Make the tokenizer that ``spec`` names.

    Args:
        spec: ``"bytes"``, or the path of a `tokenizers` JSON file.
        eod_token: Name of the end-of-document token in that file, see FileTokenizer.

    Raises:
        DataError: If ``spec`` is neither, or ``eod_token`` isn't in the vocabulary.
    """
    if spec != BYTES:
        return FileTokenizer(spec, eod_token)
    if eod_token is not None:
        raise DataError(f"eod_token={eod_token!r}: tokenizer={BYTES!r} has its own end of document (256); leave it out")
    return ByteTokenizer()


def encode_stream(tokenizer: Tokenizer, pieces: Iterator[Piece]) -> Iterator[tuple[Piece, Tokens]]:
    """Tokenize pieces in batches, so that a library with threads has something to share out; the order stays."""
    batch: list[Piece] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece.data)
        if size >= _BATCH_BYTES:
            yield from zip(batch, tokenizer.encode_pieces(batch), strict=True)
            batch, size = [], 0
    if batch:
        yield from zip(batch, tokenizer.encode_pieces(batch), strict=True)

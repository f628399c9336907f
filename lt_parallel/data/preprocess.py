"""`lt-parallel data`: write a Megatron ``.bin/.idx`` pair from text or JSONL.

The pair comes into being at once: both files are written under hidden names and renamed when complete, the ``.idx``
last, because without it nobody takes the ``.bin`` for a data set.
"""

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from lt_parallel.data.errors import DataError
from lt_parallel.data.locking import file_lock, sync_file
from lt_parallel.data.progress import byte_progress
from lt_parallel.data.sources import Piece, SourceFile, list_files, read_file
from lt_parallel.data.tokenizer import BYTES, Tokenizer, Tokens, build_tokenizer, encode_stream

if TYPE_CHECKING:
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

_LONGEST_DOCUMENT = np.iinfo(np.int32).max  # the index keeps lengths in int32


@dataclass
class Summary:
    """What a run wrote.

    Args:
        documents: Documents in the pair.
        tokens: Tokens in the pair, end-of-document ids included.
        input_bytes: Bytes of text that they were made from (of whole lines, for JSONL).
        empty_documents: Documents left out because they hold no text.
    """

    documents: int = 0
    tokens: int = 0
    input_bytes: int = 0
    empty_documents: int = 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "input", nargs="+", help="text or JSONL files, folders (searched recursively) and globs, in the order to write"
    )
    parser.add_argument("--output-prefix", required=True, help="write PREFIX.bin and PREFIX.idx", metavar="PREFIX")
    parser.add_argument(
        "--tokenizer",
        default=BYTES,
        help='"bytes" (default; vocabulary of 257), or the path of a tokenizers library JSON file',
    )
    parser.add_argument(
        "--eod-token", help="name of the end-of-document token in that file (default: a common name, else a new id)"
    )
    parser.add_argument("--append-eod", action="store_true", help="put the end-of-document token after each document")
    parser.add_argument("--pattern", help='glob that files in folders must match, such as "**/*.py"')
    parser.add_argument(
        "--format",
        choices=("auto", "text", "jsonl"),
        default="auto",
        help="what the files are: one document each (text), or one JSON object per line (jsonl); auto goes by .jsonl",
    )
    parser.add_argument(
        "--json-key", default="text", help="field of a JSONL line that holds the document (default: text)"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace PREFIX.bin and PREFIX.idx if they exist")


def run(args: argparse.Namespace) -> int:
    """Run the command; returns its exit status.

    Raises:
        DataError: If the input can't be used or the output exists.
    """
    start = time.monotonic()
    tokenizer = build_tokenizer(args.tokenizer, args.eod_token)
    files = list_files(args.input, args.pattern)
    prefix = Path(args.output_prefix).expanduser().absolute()
    summary = write_pair(
        prefix,
        files,
        tokenizer,
        document_format=args.format,
        json_key=args.json_key,
        append_eod=args.append_eod,
        overwrite=args.overwrite,
    )
    _print_summary(prefix, summary, tokenizer, time.monotonic() - start)
    return 0


def write_pair(
    prefix: Path,
    files: Sequence[SourceFile],
    tokenizer: Tokenizer,
    document_format: str = "auto",
    json_key: str = "text",
    append_eod: bool = False,
    overwrite: bool = False,
) -> Summary:
    """Tokenize files into ``prefix.bin`` and ``prefix.idx``, each document as one sequence.

    Args:
        prefix: Output path without suffix.
        files: Input, in order.
        tokenizer: How to tokenize.
        document_format: "text", "jsonl", or "auto" (by the suffix .jsonl).
        json_key: Field of a JSONL line that holds the document.
        append_eod: Put the end-of-document id after each document.
        overwrite: Replace an existing pair.

    Raises:
        DataError: If the output exists, can't be written, or the input can't be read or holds no text.
    """
    try:
        prefix.parent.mkdir(parents=True, exist_ok=True)
        with file_lock(_beside(prefix, "lock")):
            _refuse_existing(prefix, overwrite)
            with _partial_files(prefix) as (partial_bin, partial_idx):
                summary = _write(partial_bin, partial_idx, files, tokenizer, document_format, json_key, append_eod)
                _publish(prefix, partial_bin, partial_idx)
    except OSError as error:
        raise DataError(f"can't write {str(prefix)!r}.bin and .idx: {error.strerror or error}") from error
    return summary


def _beside(prefix: Path, suffix: str) -> Path:
    return prefix.with_name(f".{prefix.name}.{suffix}")


def _outputs(prefix: Path) -> tuple[Path, Path]:
    return prefix.with_name(f"{prefix.name}.bin"), prefix.with_name(f"{prefix.name}.idx")


def _refuse_existing(prefix: Path, overwrite: bool) -> None:
    existing = [str(path) for path in _outputs(prefix) if path.exists()]
    if existing and not overwrite:
        raise DataError(f"{' and '.join(existing)} exist already; give another --output-prefix, or --overwrite")


@contextmanager
def _partial_files(prefix: Path) -> Iterator[tuple[Path, Path]]:
    """Hidden names for both files; what is left under them is removed (a killed run's remains are written over)."""
    partial = (_beside(prefix, "bin.partial"), _beside(prefix, "idx.partial"))
    try:
        yield partial
    finally:
        for path in partial:
            path.unlink(missing_ok=True)


def _publish(prefix: Path, partial_bin: Path, partial_idx: Path) -> None:
    final_bin, final_idx = _outputs(prefix)
    sync_file(partial_bin)
    sync_file(partial_idx)
    final_idx.unlink(missing_ok=True)  # an old index must not be seen beside the new .bin
    partial_bin.replace(final_bin)
    partial_idx.replace(final_idx)
    sync_file(prefix.parent)


def _write(
    bin_path: Path,
    idx_path: Path,
    files: Sequence[SourceFile],
    tokenizer: Tokenizer,
    document_format: str,
    json_key: str,
    append_eod: bool,
) -> Summary:
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(str(bin_path), dtype=DType.optimal_dtype(tokenizer.vocab_size))
    summary = Summary()
    end = np.array([tokenizer.eod], dtype=np.int32)
    parts: list[Tokens] = []
    total_bytes = sum(file.size_bytes for file in files)
    with byte_progress("Writing tokens", total_bytes) as advance:
        for piece, tokens in encode_stream(tokenizer, _pieces(files, document_format, json_key)):
            parts.append(tokens)
            summary.input_bytes += piece.size_bytes
            advance(piece.size_bytes)
            if piece.last:
                _add_document(builder, summary, parts, end if append_eod else end[:0], piece.source)
                parts = []
    if summary.documents == 0:
        raise DataError(f"the input holds no text: {len(files)} files, {summary.empty_documents} empty documents")
    builder.finalize(str(idx_path))
    return summary


def _add_document(
    builder: "IndexedDatasetBuilder", summary: Summary, parts: Sequence[Tokens], end: NDArray[np.int32], source: str
) -> None:
    tokens = np.concatenate(parts).astype(np.int32)
    if len(tokens) == 0:
        summary.empty_documents += 1
        return
    tokens = np.concatenate([tokens, end])
    if len(tokens) > _LONGEST_DOCUMENT:
        raise DataError(
            f"{source} is one document of {len(tokens)} tokens; the format holds at most {_LONGEST_DOCUMENT}: split it"
        )
    builder.add_item(torch.from_numpy(tokens))
    builder.end_document()
    summary.documents += 1
    summary.tokens += len(tokens)


def _pieces(files: Sequence[SourceFile], document_format: str, json_key: str) -> Iterator[Piece]:
    for file in files:
        is_jsonl = file.path.suffix == ".jsonl" if document_format == "auto" else document_format == "jsonl"
        yield from read_jsonl(file, json_key) if is_jsonl else read_file(file)


def read_jsonl(file: SourceFile, key: str) -> Iterator[Piece]:
    """Yield the document in each line of a JSONL file; blank lines are skipped.

    Args:
        file: The file.
        key: Field that holds the text.

    Raises:
        DataError: Naming file and line, if a line isn't a JSON object with a text under ``key``.
    """
    try:
        with open(file.path, "rb") as stream:
            for number, line in enumerate(stream, start=1):
                if line.strip():
                    where = f"{file.path}:{number}"
                    yield Piece(_document(line, key, where), where, 0, len(line), last=True)
    except OSError as error:
        raise DataError(f"can't read {str(file.path)!r}: {error.strerror}") from error


def _document(line: bytes, key: str, where: str) -> bytes:
    shown = line.decode("utf-8", errors="replace").strip()[:60]
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not JSON ({error}): {shown}") from error
    if not isinstance(record, dict):
        raise DataError(f"{where}: a JSON {type(record).__name__}, not an object with a field {key!r}: {shown}")
    if key not in record:
        raise DataError(f"{where}: no field {key!r}; it has {', '.join(map(repr, record)) or 'none'} (see --json-key)")
    text = record[key]
    if not isinstance(text, str):
        raise DataError(f"{where}: field {key!r} is a {type(text).__name__}, not a text: {shown}")
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where}: field {key!r} holds half a surrogate pair, which no UTF-8 text can: {shown}"
        ) from error


def _print_summary(prefix: Path, summary: Summary, tokenizer: Tokenizer, seconds: float) -> None:
    table = Table()
    table.add_column("what")
    table.add_column("value", justify="right")
    rows = {
        "documents": f"{summary.documents:,}",
        "empty documents left out": f"{summary.empty_documents:,}" if summary.empty_documents else "",
        "tokens": f"{summary.tokens:,}",
        "input bytes": f"{summary.input_bytes:,}",
        "bytes per token": f"{summary.input_bytes / summary.tokens:.2f}",
        "vocabulary size": f"{tokenizer.vocab_size:,}",
        "end-of-document id": f"{tokenizer.eod:,}",
        "output bytes": f"{sum(path.stat().st_size for path in _outputs(prefix)):,}",
        "time": f"{seconds:.1f} s",
    }
    for name, value in rows.items():
        if value:
            table.add_row(name, value)
    Console().print(table)
    print(f"Written: {prefix}.bin and {prefix.name}.idx")  # below the table, which is narrower than a path may be

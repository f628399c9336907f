"""`lt-parallel data`: the pair it writes, read back with numpy alone and with Megatron Core's reader; its errors."""

import argparse
import json
import multiprocessing
import struct
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from lt_parallel.data import DataError, preprocess
from lt_parallel.data import tokenizer as tokenizer_module
from lt_parallel.data.index_check import check_pair
from lt_parallel.data.sources import Piece, list_files
from lt_parallel.data.tokenizer import ByteTokenizer, Tokens


def run(*arguments: str | Path) -> int:
    parser = argparse.ArgumentParser(exit_on_error=False)
    preprocess.add_arguments(parser)
    return preprocess.run(parser.parse_args([str(a) for a in arguments]))


def read_pair(prefix: Path, dtype: str) -> list[list[int]]:
    """Documents of a pair, by the published layout of the format and nothing else."""
    raw = Path(f"{prefix}.idx").read_bytes()
    magic, version, _, sequences, bounds = struct.unpack("<9sQBQQ", raw[:34])
    assert (magic, version) == (b"MMIDIDX\0\0", 1)
    lengths = np.frombuffer(raw, "<i4", sequences, 34)
    starts = np.frombuffer(raw, "<i8", sequences, 34 + 4 * sequences)
    documents = np.frombuffer(raw, "<i8", bounds, 34 + 12 * sequences)
    assert documents.tolist() == list(range(sequences + 1)), "one sequence per document"
    tokens = np.fromfile(f"{prefix}.bin", dtype)
    size = np.dtype(dtype).itemsize
    return [tokens[a // size : a // size + n].tolist() for a, n in zip(starts, lengths, strict=True)]


def test_text_files_become_documents(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in").mkdir()
    for name, text in (("b.txt", "second"), ("a.txt", "Grüße"), ("c.txt", "")):
        (tmp_path / "in" / name).write_text(text)
    assert run(tmp_path / "in", "--output-prefix", tmp_path / "out" / "p", "--append-eod") == 0
    expected = [[*"Grüße".encode(), 256], [*b"second", 256]]
    assert read_pair(tmp_path / "out" / "p", "<u2") == expected
    shown = capsys.readouterr().out
    rows = {
        line.split("│")[1].strip(): line.split("│")[2].strip() for line in shown.splitlines() if line.count("│") == 3
    }
    assert rows["documents"] == "2" and rows["tokens"] == "15" and rows["input bytes"] == "13"
    assert rows["vocabulary size"] == "257"
    assert not [p for p in (tmp_path / "out").iterdir() if "partial" in p.name]


def test_both_files_are_named_on_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("text")
    prefix = tmp_path / ("long_" * 20) / "p"
    run(tmp_path / "a.txt", "--output-prefix", prefix)
    assert capsys.readouterr().out.splitlines()[-1] == f"Written: {prefix}.bin and p.idx"


def test_megatron_core_reads_the_same(tmp_path: Path) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    for index in range(3):
        (tmp_path / f"{index}.txt").write_text("word " * (index + 1))
    run(tmp_path / "*.txt", "--output-prefix", tmp_path / "p")
    dataset = IndexedDataset(str(tmp_path / "p"))
    assert [bytes(dataset[i].astype(np.uint8)).decode() for i in range(3)] == ["word " * (i + 1) for i in range(3)]


def test_jsonl_lines_become_documents(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [{"text": "one"}, {"text": ""}, {"text": "zwei ü", "id": 4}]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")
    (tmp_path / "b.txt").write_text('{"text": "a text file is one document"}')
    run(tmp_path / "a.jsonl", tmp_path / "b.txt", "--output-prefix", tmp_path / "p")
    documents = [bytes(d).decode() for d in read_pair(tmp_path / "p", "<u2")]
    assert documents == ["one", "zwei ü", '{"text": "a text file is one document"}']
    assert "empty documents left out" in capsys.readouterr().out
    run(tmp_path / "b.txt", "--format", "jsonl", "--output-prefix", tmp_path / "q")
    assert [bytes(d).decode() for d in read_pair(tmp_path / "q", "<u2")] == ["a text file is one document"]
    (tmp_path / "c.jsonl").write_text('{"body": "other key"}')
    run(tmp_path / "c.jsonl", "--json-key", "body", "--output-prefix", tmp_path / "r")
    assert [bytes(d).decode() for d in read_pair(tmp_path / "r", "<u2")] == ["other key"]


def test_tokenizer_file_and_large_vocabulary(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({"a": 1, "b": 70_000, "</s>": 2, "?": 0}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "t.json"))
    (tmp_path / "a.txt").write_text("b a b")
    run(tmp_path / "a.txt", "--tokenizer", tmp_path / "t.json", "--append-eod", "--output-prefix", tmp_path / "p")
    assert read_pair(tmp_path / "p", "<i4") == [[70_000, 1, 70_000, 2]]


def test_document_larger_than_a_piece_stays_one(tmp_path: Path) -> None:
    text = "".join(f"{i}\n" for i in range(400_000))
    (tmp_path / "a.txt").write_text(text)
    run(tmp_path / "a.txt", "--append-eod", "--output-prefix", tmp_path / "p")
    (document,) = read_pair(tmp_path / "p", "<u2")
    assert document[-1] == 256 and bytes(document[:-1]).decode() == text
    assert check_pair(str(tmp_path / "p")).num_tokens == len(text) + 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "cut', "a.jsonl:2: not JSON"),
        ("[" * 100_000, "a.jsonl:2: not JSON"),
        ('{"body": 1, "id": 2}', "a.jsonl:2: no field 'text'; it has 'body', 'id' (see --json-key)"),
        ("{}", "a.jsonl:2: no field 'text'; it has none"),
        ("[1, 2]", "a.jsonl:2: a JSON list, not an object with a field 'text'"),
        ('{"text": 5}', "a.jsonl:2: field 'text' is a int, not a text"),
        ('{"text": "\\ud800"}', "a.jsonl:2: field 'text' holds half a surrogate pair"),
    ],
)
def test_bad_jsonl_line_is_named_and_nothing_is_left(tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "good"}\n' + line + "\n")
    with pytest.raises(DataError) as caught:
        run(tmp_path / "a.jsonl", "--output-prefix", tmp_path / "p")
    assert message in str(caught.value) and len(str(caught.value)) < 400
    assert {p.name for p in tmp_path.iterdir()} == {"a.jsonl", ".p.lock"}


def test_existing_output_is_refused_without_overwrite(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("first")
    (tmp_path / "b.txt").write_text("second one")
    run(tmp_path / "a.txt", "--output-prefix", tmp_path / "p")
    with pytest.raises(DataError, match=r"p\.bin and .*p\.idx exist already.*--overwrite"):
        run(tmp_path / "b.txt", "--output-prefix", tmp_path / "p")
    assert read_pair(tmp_path / "p", "<u2") == [[*b"first"]]
    run(tmp_path / "b.txt", "--output-prefix", tmp_path / "p", "--overwrite")
    assert read_pair(tmp_path / "p", "<u2") == [[*b"second one"]]


def test_failed_overwrite_keeps_the_old_pair(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("first")
    run(tmp_path / "a.txt", "--output-prefix", tmp_path / "p")
    (tmp_path / "b.jsonl").write_text('{"text": "x"}\nbroken')
    with pytest.raises(DataError, match="not JSON"):
        run(tmp_path / "b.jsonl", "--output-prefix", tmp_path / "p", "--overwrite")
    assert read_pair(tmp_path / "p", "<u2") == [[*b"first"]]


def test_overwrite_cut_off_between_the_files_leaves_no_false_pair(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text("first")
    run(tmp_path / "a.txt", "--output-prefix", tmp_path / "p")
    replace = Path.replace

    def stop_before_the_index(self: Path, target: Path) -> Path:
        if target.suffix == ".idx":
            raise OSError(5, "the disk went away")
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", stop_before_the_index)
    with pytest.raises(DataError, match="the disk went away"):
        run(tmp_path / "a.txt", "--output-prefix", tmp_path / "p", "--overwrite")
    assert not (tmp_path / "p.idx").exists(), "the old index would stand beside the new .bin"


def test_no_text_and_missing_input(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n{"text": ""}\n')
    with pytest.raises(DataError, match="the input holds no text: 1 files, 2 empty documents"):
        run(tmp_path / "a.jsonl", "--output-prefix", tmp_path / "p")
    with pytest.raises(DataError, match="doesn't exist"):
        run(tmp_path / "nothing.txt", "--output-prefix", tmp_path / "p")
    (tmp_path / "file").write_text("x")
    with pytest.raises(DataError, match="can't write"):
        run(tmp_path / "file", "--output-prefix", tmp_path / "file" / "p")


class SlowTokenizer(ByteTokenizer):
    """Takes so long that a run can be killed at work."""

    def encode_pieces(self, pieces: Sequence[Piece]) -> list[Tokens]:
        time.sleep(0.3)
        return super().encode_pieces(pieces)


def write_slowly(source: str, prefix: Path) -> None:
    tokenizer_module._BATCH_BYTES = 1
    preprocess.write_pair(prefix, list_files(source), SlowTokenizer())


def test_killed_run_leaves_no_pair(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for index in range(50):
        (tmp_path / "in" / f"{index}.txt").write_text(f"text {index}")
    arguments = (str(tmp_path / "in"), tmp_path / "p")
    writer = multiprocessing.get_context("fork").Process(target=write_slowly, args=arguments)
    writer.start()
    try:
        deadline = time.monotonic() + 100
        while not (tmp_path / ".p.bin.partial").exists():
            assert time.monotonic() < deadline and writer.is_alive(), "the run never started to write"
            time.sleep(0.01)
    finally:
        writer.kill()
        writer.join()
    assert not (tmp_path / "p.bin").exists() and not (tmp_path / "p.idx").exists()
    run(tmp_path / "in", "--output-prefix", tmp_path / "p")
    assert len(read_pair(tmp_path / "p", "<u2")) == 50
    assert {p.name for p in tmp_path.iterdir()} == {"in", "p.bin", "p.idx", ".p.lock"}

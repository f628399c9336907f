"""IndexedDataModule: samples against the text they were written from, and every way in which a pair can be wrong."""

import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from lt_parallel.data import DataError, IndexedDataModule
from lt_parallel.data.preprocess import write_pair
from lt_parallel.data.sources import list_files
from lt_parallel.data.tokenizer import ByteTokenizer

SEQ = 16


def make_pair(folder: Path, name: str, texts: list[str]) -> str:
    """Write a pair from texts, one document each; returns its prefix."""
    source = folder / f"{name}-text"
    source.mkdir()
    for index, text in enumerate(texts):
        (source / f"{index:03}.txt").write_text(text)
    write_pair(folder / name, list_files(str(source)), ByteTokenizer(), append_eod=True)
    return str(folder / name)


@pytest.fixture
def pair(tmp_path: Path) -> str:
    return make_pair(tmp_path, "p", [f"document {i:02} " * 10 for i in range(40)])


@pytest.fixture
def options(tmp_path: Path) -> dict[str, Any]:
    return {
        "seq_length": SEQ,
        "micro_batch_size": 4,
        "split": "80,10,10",
        "tokenizer": "bytes",
        "path_to_cache": str(tmp_path / "cache"),
    }


def windows(dataset: Any) -> list[list[int]]:
    return [[*s["tokens"].tolist(), int(s["labels"][-1])] for s in (dataset[i] for i in range(len(dataset)))]


def test_samples_are_the_windows_of_the_text(tmp_path: Path, options: dict[str, Any]) -> None:
    text = "".join(f"{i} " for i in range(500))
    data = IndexedDataModule(make_pair(tmp_path, "one", [text]), **(options | {"split": "1"}))
    data.setup("fit")
    tokens = [*text.encode(), 256]
    expected = [tokens[i : i + SEQ + 1] for i in range(0, len(tokens) - SEQ, SEQ)]
    got = windows(data.train_dataset)
    assert got != expected and sorted(got) == sorted(expected)
    assert data.val_dataset is None and data.val_dataloader() == []
    assert data.vocab_size == 257


def test_batch_has_shapes_types_and_shifted_labels(pair: str, options: dict[str, Any]) -> None:
    data = IndexedDataModule(pair, **options)
    data.setup("fit")
    batch = next(iter(data.train_dataloader()))
    assert {k: (tuple(v.shape), v.dtype) for k, v in batch.items()} == {
        "tokens": ((4, SEQ), torch.int64),
        "labels": ((4, SEQ), torch.int64),
        "loss_mask": ((4, SEQ), torch.float32),
        "position_ids": ((4, SEQ), torch.int64),
    }
    assert torch.equal(batch["tokens"][:, 1:], batch["labels"][:, :-1])
    assert torch.equal(batch["position_ids"], torch.arange(SEQ).expand(4, SEQ))


def numbers(dataset: Any) -> set[bytes]:
    """Numbers of the documents that are whole within some window."""
    text = b" ".join(bytes(0 if i == 256 else i for i in w) for w in windows(dataset))
    return set(re.findall(rb"document (\d\d) ", text))


def test_splits_are_ranges_of_documents(pair: str, options: dict[str, Any]) -> None:
    data = IndexedDataModule(pair, **options)
    data.setup()
    train, val, test = (numbers(d) for d in (data.train_dataset, data.val_dataset, data.test_dataset))
    assert train <= {b"%02d" % i for i in range(32)} and len(train) >= 30
    assert val <= {b"%02d" % i for i in range(32, 36)} and test <= {b"%02d" % i for i in range(36, 40)}
    assert val and test


def test_number_of_samples_is_kept_and_repeats_the_text(pair: str, options: dict[str, Any]) -> None:
    epoch = IndexedDataModule(pair, **options)
    epoch.setup("fit")
    one = len(epoch.train_dataset)
    for wanted in (10, 3 * one + 5):
        data = IndexedDataModule(pair, **options, train_samples=wanted, valid_samples=7)
        data.setup("fit")
        assert len(data.train_dataset) == wanted and len(data.val_dataset) == 7
        assert len(windows(data.train_dataset)) == wanted


def test_order_comes_from_the_seed(pair: str, options: dict[str, Any]) -> None:
    def order(seed: int) -> list[list[int]]:
        data = IndexedDataModule(pair, **options, train_samples=50, random_seed=seed)
        data.setup("fit")
        return [[int(t) for t in row] for batch in data.train_dataloader() for row in batch["tokens"]]

    assert order(1) == order(1) != order(2)


def test_blend_follows_weights(tmp_path: Path, options: dict[str, Any]) -> None:
    paths = [make_pair(tmp_path, "a", ["a" * 400] * 20), make_pair(tmp_path, "b", ["b" * 400] * 20)]
    data = IndexedDataModule(paths, **options, weights=[3, 1], train_samples=200)
    data.setup("fit")
    first = [w.count(ord("a")) > w.count(ord("b")) for w in windows(data.train_dataset)]
    assert len(first) == 200 and sum(first) == 150
    assert next(iter(data.train_dataloader())).keys() == {"tokens", "labels", "loss_mask", "position_ids"}
    assert data.val_dataset is not None and len(data.val_dataset) > 40


def test_blend_without_weights_is_not_capped_at_an_epoch(tmp_path: Path, options: dict[str, Any]) -> None:
    paths = [make_pair(tmp_path, "a", ["a" * 300] * 20), make_pair(tmp_path, "b", ["b" * 100] * 20)]
    epoch = IndexedDataModule(paths, **options)
    epoch.setup("fit")
    one = len(epoch.train_dataset)
    data = IndexedDataModule(paths, **options, train_samples=2 * one)
    data.setup("fit")
    first = [w.count(ord("a")) > w.count(ord("b")) for w in windows(data.train_dataset)]
    assert len(first) == 2 * one and 0.7 < sum(first) / len(first) < 0.8


def test_end_of_document_is_masked_on_request(pair: str, options: dict[str, Any]) -> None:
    data = IndexedDataModule(pair, **options, eod_mask_loss=True)
    data.setup("fit")
    masked = 0
    for index in range(len(data.train_dataset)):
        sample = data.train_dataset[index]
        assert torch.equal(sample["loss_mask"] == 0, sample["tokens"] == 256)
        masked += int((sample["tokens"] == 256).sum())
    assert masked > 20


def test_vocabulary_size_comes_from_tokenizer_or_argument(pair: str) -> None:
    assert IndexedDataModule(pair, tokenizer="bytes").vocab_size == 257
    assert IndexedDataModule(pair, vocab_size=1000).vocab_size == 1000
    with pytest.raises(DataError, match="give tokenizer or vocab_size"):
        _ = IndexedDataModule(pair).vocab_size


def test_pair_written_anew_is_not_read_through_the_old_index(tmp_path: Path, options: dict[str, Any]) -> None:
    path = make_pair(tmp_path, "p", ["a" * 2000] * 3)
    IndexedDataModule(path, **(options | {"split": "1"})).setup("fit")
    shutil.rmtree(tmp_path / "p-text")
    for file in ("p.bin", "p.idx"):
        (tmp_path / file).unlink()
    make_pair(tmp_path, "p", ["b" * 100] * 3)
    data = IndexedDataModule(path, **(options | {"split": "1"}))
    data.setup("fit")
    assert len(data.train_dataset) == (3 * 101 - 1) // SEQ
    assert all(set(w) <= {ord("b"), 256} for w in windows(data.train_dataset))


@pytest.mark.parametrize("kept_bytes", [0, 60, 200])
def test_index_cache_cut_short_by_a_kill_is_made_anew(pair: str, options: dict[str, Any], kept_bytes: int) -> None:
    first = IndexedDataModule(pair, **options)
    first.setup("fit")
    shuffles = list(Path(options["path_to_cache"]).glob("*/*train*shuffle_index.npy"))
    assert len(shuffles) == 1
    os.truncate(shuffles[0], kept_bytes)
    again = IndexedDataModule(pair, **options)
    again.setup("fit")
    assert windows(again.train_dataset) == windows(first.train_dataset)


# ----------------------------------------------------------------------------------------------------------- errors


def raises(text: str, *args: Any, stage: str = "fit", **options: Any) -> None:
    with pytest.raises(DataError) as caught:
        IndexedDataModule(*args, **options).setup(stage)
    assert text in str(caught.value), str(caught.value)


def test_missing_files(tmp_path: Path, pair: str, options: dict[str, Any]) -> None:
    raises("pairs in that folder: p.", str(tmp_path / "q"), **options)
    (tmp_path / "p.bin").unlink()
    raises(f"{str(tmp_path / 'p.bin')!r} doesn't exist", pair, **options)
    raises("`lt-parallel data` writes such a pair", pair, **options)
    raises("doesn't exist", str(tmp_path / "no such folder" / "q"), **options)


def test_suffix_may_be_given(pair: str, options: dict[str, Any]) -> None:
    for suffix in (".bin", ".idx"):
        data = IndexedDataModule(pair + suffix, **options)
        data.setup("fit")
        assert len(data.train_dataset) > 0


def test_index_of_another_bin(tmp_path: Path, pair: str, options: dict[str, Any]) -> None:
    make_pair(tmp_path, "q", ["other text " * 30] * 7)
    shutil.copy(tmp_path / "q.idx", tmp_path / "p.idx")
    tokens = 7 * (len("other text " * 30) + 1)
    size = (tmp_path / "p.bin").stat().st_size
    raises(f"{tokens} tokens of 2 bytes = {2 * tokens} bytes, the .bin has {size} bytes", pair, **options)
    raises("doesn't match", pair, **options)


def test_bin_cut_short(pair: str, options: dict[str, Any]) -> None:
    size = Path(pair + ".bin").stat().st_size
    os.truncate(pair + ".bin", size - 1)
    raises(f"the .bin has {size - 1} bytes", pair, **options)


def test_index_that_is_damaged(pair: str, options: dict[str, Any]) -> None:
    index = Path(pair + ".idx")
    good = index.read_bytes()
    wrong = {
        b"": "isn't a Megatron index",
        good[:20]: "isn't a Megatron index",
        b"PK\3\4" + good[4:]: "it starts with b'PK",
        good[:9] + b"\2" + good[10:]: "has format version 2",
        good[:17] + b"\x63" + good[18:]: "has dtype code 99",
        good[:-5]: "it is cut short or damaged",
        good[:18] + b"\0" * 16: "holds no document",
        good[:18] + b"\xff" * 8 + good[26:]: "it is cut short or damaged",
    }
    for content, message in wrong.items():
        index.write_bytes(content)
        raises(message, pair, **options)
        raises(str(index), pair, **options)


def test_split_without_text(tmp_path: Path, options: dict[str, Any]) -> None:
    path = make_pair(tmp_path, "p", ["x" * 100] * 10)
    options = options | {"split": "96,4"}
    message = f"leaves 0 of 10 sequences with 0 of 1010 tokens to val, but one sample needs seq_length + 1 = {SEQ + 1}"
    raises(message, path, **options)
    raises("give val a larger share or 0", path, **options)
    IndexedDataModule(path, **(options | {"split": "80,20,0"})).setup("fit")
    # A test split that is too small is no reason to refuse to train, only to test.
    data = IndexedDataModule(path, **(options | {"split": "80,19,1"}))
    data.setup("fit")
    with pytest.raises(DataError, match="tokens to test"):
        data.setup("test")
    raises("`test` needs a share of the documents, but split='96,4' has none", path, stage="test", **options)


def test_text_shorter_than_one_sequence(tmp_path: Path, options: dict[str, Any]) -> None:
    path = make_pair(tmp_path, "p", ["x" * 99])
    raises("set seq_length to at most 99", path, **(options | {"split": "1", "seq_length": 100}))
    data = IndexedDataModule(path, **(options | {"split": "1", "seq_length": 99, "micro_batch_size": 1}))
    data.setup("fit")
    assert len(data.train_dataset) == 1
    raises("nearest valid: micro_batch_size=1", path, **(options | {"split": "1", "seq_length": 99}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"split": "a,b"}, "split='a,b' must be one to three numbers"),
        ({"split": "90,-5,5"}, "must be one to three numbers"),
        ({"split": "1,1,1,1"}, "must be one to three numbers"),
        ({"split": "0,0,0"}, "gives nothing to any split"),
        ({"weights": [1, 2]}, "has 2 entries for the 1 pairs"),
        ({"weights": [0]}, "must all be above 0"),
        ({"weights": [float("nan")]}, "must all be above 0"),
        ({"vocab_size": 5}, "leave out vocab_size=5 and eod_id=None"),
        ({"tokenizer": None, "eod_mask_loss": True}, "give tokenizer or eod_id"),
        ({"tokenizer": None, "eod_token": "</s>"}, "give tokenizer too, or eod_id instead"),
        ({"tokenizer": "no.json"}, "neither 'bytes' nor a file"),
        ({"train_samples": 0}, "train_samples=0 must be at least 1"),
        ({"seq_length": 0}, "seq_length=0 must be at least 1"),
        ({"data_path": []}, "names no pair"),
    ],
)
def test_bad_options(pair: str, options: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    raises(message, **({"data_path": pair} | options | changes))

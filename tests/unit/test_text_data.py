"""TextDataModule and what it stands on: listing, tokenizers, the token cache, splits, windows, errors."""

import ast
import itertools
import logging
import multiprocessing
import os
import pickle
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lt_parallel.data import DataError, TextDataModule
from lt_parallel.data import sources as sources_module
from lt_parallel.data import tokenizer as tokenizer_module
from lt_parallel.data.sources import Piece, list_files, read_file
from lt_parallel.data.splits import split_documents
from lt_parallel.data.token_cache import open_or_build
from lt_parallel.data.tokenizer import ByteTokenizer, FileTokenizer, Tokens, build_tokenizer, token_dtype

EOD = 256


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def document(index: int, lines: int = 20) -> str:
    return "".join(f"document {index} line {line}\n" for line in range(lines))


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Forty documents of about 400 bytes."""
    folder = tmp_path / "corpus"
    for index in range(40):
        write(folder / f"sub{index % 3}" / f"{index:02}.txt", document(index))
    return folder


@pytest.fixture
def cache_dir(tmp_path: Path) -> str:
    return str(tmp_path / "cache")


def joined(dataset: Any) -> list[int]:
    """The text that the windows of a data set tile, from inputs plus the very last label."""
    ids = [i for sample in (dataset[k] for k in range(len(dataset))) for i in sample["tokens"].tolist()]
    return [*ids, int(dataset[len(dataset) - 1]["labels"][-1])]


def documents_in(ids: Sequence[int]) -> set[bytes]:
    """Numbers of the documents of which a line is in the ids."""
    text = bytes(0 if i == EOD else i for i in ids)
    return {line.split()[1] for line in text.replace(b"\0", b"\n").split(b"\n") if line.count(b" ") == 3}


# ---------------------------------------------------------------------------------------------------------- content


def test_samples_are_the_text(tmp_path: Path, cache_dir: str) -> None:
    first, second = "Grüße aus der ersten Datei.\n" * 7, "and the second one\n" * 9
    write(tmp_path / "a.txt", first)
    write(tmp_path / "b.txt", second)
    data = TextDataModule(
        [str(tmp_path / "b.txt"), str(tmp_path / "a.txt")], seq_length=16, val_fraction=0, cache_dir=cache_dir
    )
    data.setup("fit")
    expected = [*second.encode(), EOD, *first.encode(), EOD]
    got = joined(data.train_dataset)
    assert got == expected[: len(got)]
    assert len(expected) - len(got) < 16
    assert data.vocab_size == 257


def test_batch_has_shapes_types_and_shifted_labels(corpus: Path, cache_dir: str) -> None:
    data = TextDataModule(str(corpus), seq_length=32, micro_batch_size=3, cache_dir=cache_dir)
    data.setup("fit")
    batch = next(iter(data.train_dataloader()))
    assert {k: (tuple(v.shape), v.dtype) for k, v in batch.items()} == {
        "tokens": ((3, 32), torch.int64),
        "labels": ((3, 32), torch.int64),
        "loss_mask": ((3, 32), torch.float32),
        "position_ids": ((3, 32), torch.int64),
    }
    assert torch.equal(batch["tokens"][:, 1:], batch["labels"][:, :-1])
    assert torch.equal(batch["position_ids"], torch.arange(32).expand(3, 32))
    assert batch["loss_mask"].min() == 1
    assert all(t.shape[0] == 3 for t in (b["tokens"] for b in data.train_dataloader()))


def test_val_documents_are_never_in_train(corpus: Path, cache_dir: str) -> None:
    data = TextDataModule(str(corpus), seq_length=8, val_fraction=0.2, test_fraction=0.1, cache_dir=cache_dir)
    data.setup()
    assert data.val_dataset is not None and data.test_dataset is not None
    train, val, test = (documents_in(joined(d)) for d in (data.train_dataset, data.val_dataset, data.test_dataset))
    assert not train & val and not train & test and not val & test
    assert len(train | val | test) == 40
    total = sum(d.num_tokens for d in (data.train_dataset, data.val_dataset, data.test_dataset))
    assert 0.17 < data.val_dataset.num_tokens / total <= 0.2
    assert 0.08 < data.test_dataset.num_tokens / total <= 0.1


def test_split_follows_content_not_names_or_order(tmp_path: Path, cache_dir: str) -> None:
    held_out = []
    for name, order in (("a", range(30)), ("b", reversed(range(30)))):
        for position, index in enumerate(order):
            write(tmp_path / name / f"{name}{position:02}", document(index))
        data = TextDataModule(str(tmp_path / name), seq_length=8, val_fraction=0.2, cache_dir=cache_dir)
        data.setup("validate")
        assert data.val_dataset is not None
        held_out.append(documents_in(joined(data.val_dataset)))
    assert held_out[0] == held_out[1] and len(held_out[0]) >= 5


def test_one_file_holds_out_its_end(tmp_path: Path, cache_dir: str) -> None:
    text = "".join(f"{i}\n" for i in range(2000))
    write(tmp_path / "a.txt", text)
    data = TextDataModule(str(tmp_path / "a.txt"), seq_length=32, val_fraction=0.1, cache_dir=cache_dir)
    data.setup("fit")
    assert data.val_dataset is not None
    tokens = len(text) + 1
    cut = tokens - int(0.1 * tokens)
    assert bytes(joined(data.train_dataset)) == text[:cut].encode()[: len(data.train_dataset) * 32 + 1]
    assert bytes(joined(data.val_dataset)) == text[cut:].encode()[: len(data.val_dataset) * 32 + 1]


@settings(deadline=None)
@given(
    sizes=st.lists(st.integers(1, 50), min_size=1, max_size=30),
    copies=st.lists(st.integers(0, 29), max_size=10),
    fractions=st.tuples(st.floats(0, 0.45), st.floats(0, 0.45)),
    seed=st.integers(0, 1000),
)
def test_splits_partition_the_corpus(
    sizes: list[int], copies: list[int], fractions: tuple[float, float], seed: int
) -> None:
    hashes = np.random.default_rng(seed).integers(0, 1 << 63, len(sizes)).astype(np.uint64)
    twins = [c % len(sizes) for c in copies]
    all_sizes = sizes + [sizes[t] for t in twins]
    all_hashes = np.concatenate([hashes, hashes[twins]]) if twins else hashes
    offsets = np.concatenate([[0], np.cumsum(all_sizes)]).astype(np.int64)
    ranges = split_documents(offsets, all_hashes, *fractions)
    owner = np.full(int(offsets[-1]), -1)
    for number, name in enumerate(("train", "val", "test")):
        for start, stop in ranges[name]:
            assert start < stop and (owner[start:stop] == -1).all()
            owner[start:stop] = number
        assert (ranges[name][1:, 0] > ranges[name][:-1, 1]).all(), "ranges that touch are one"
    assert (owner >= 0).all()
    for number, fraction in ((1, fractions[0]), (2, fractions[1])):
        budget = int(fraction * offsets[-1])
        assert budget * 0.5 - len(copies) <= (owner == number).sum() <= budget
    owners = [owner[a:b].tolist() for a, b in itertools.pairwise(offsets)]
    cut = {int(all_hashes[i]) for i, o in enumerate(owners) if len(set(o)) > 1}
    assert len(cut) <= 2  # at most one document, with its copies, is cut for each of val and test
    for index, twin in enumerate(twins, start=len(sizes)):
        assert owners[index] == owners[twin]


def test_shuffle_draws_every_sample_once_in_an_order_from_the_seed(corpus: Path, cache_dir: str) -> None:
    def epoch(shuffle: bool, seed: int) -> list[tuple[int, ...]]:
        data = TextDataModule(str(corpus), seq_length=32, shuffle=shuffle, cache_dir=cache_dir)
        data.setup("fit")
        L.seed_everything(seed, verbose=False)
        return [tuple(b["tokens"][0].tolist()) for b in data.train_dataloader()]

    plain, one, again, other = epoch(False, 1), epoch(True, 1), epoch(True, 1), epoch(True, 2)
    assert one == again != plain and other != one
    assert sorted(one) == sorted(plain) == sorted(other)


def test_worker_processes_give_the_same_batches(corpus: Path, cache_dir: str) -> None:
    batches = []
    for num_workers in (0, 1):
        data = TextDataModule(str(corpus), seq_length=64, shuffle=False, num_workers=num_workers, cache_dir=cache_dir)
        data.setup("fit")
        batches.append([batch["labels"].tolist() for batch in data.train_dataloader()])
    assert batches[0] == batches[1] and len(batches[0]) > 100


def test_prompts_keep_order_and_length(tmp_path: Path) -> None:
    prompts = ["def ", "import", "x"]
    data = TextDataModule(str(tmp_path / "not there"), seq_length=8, predict_prompts=prompts)
    data.setup("predict")
    batches = list(data.predict_dataloader())
    assert [tuple(b["tokens"].shape) for b in batches] == [(1, 4), (1, 6), (1, 1)]
    assert [data.tokenizer.decode(b["tokens"][0].tolist()) for b in batches] == prompts


class Counter(L.LightningModule):
    """Collects what each loop of a Trainer is given; needs no optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.seen: dict[str, int] = {}

    def configure_optimizers(self) -> None:
        return None

    def _count(self, name: str, batch: dict[str, torch.Tensor]) -> None:
        self.seen[name] = self.seen.get(name, 0) + batch["tokens"].shape[0]

    def training_step(self, batch: dict[str, torch.Tensor], _: int) -> None:
        self._count("train", batch)

    def validation_step(self, batch: dict[str, torch.Tensor], _: int) -> None:
        self._count("val", batch)

    def test_step(self, batch: dict[str, torch.Tensor], _: int) -> None:
        self._count("test", batch)

    def predict_step(self, batch: dict[str, torch.Tensor], _: int) -> None:
        self._count("predict", batch)


def quiet_trainer(tmp_path: Path) -> L.Trainer:
    return L.Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        default_root_dir=tmp_path,
    )


@pytest.mark.filterwarnings("ignore")
def test_lightning_runs_every_loop(corpus: Path, cache_dir: str, tmp_path: Path) -> None:
    data = TextDataModule(
        str(corpus),
        seq_length=32,
        micro_batch_size=4,
        val_fraction=0.1,
        test_fraction=0.1,
        cache_dir=cache_dir,
        predict_prompts=["a", "bc"],
    )
    module, trainer = Counter(), quiet_trainer(tmp_path)
    trainer.fit(module, datamodule=data)
    trainer.test(module, datamodule=data, verbose=False)
    trainer.predict(module, datamodule=data)
    assert data.val_dataset is not None and data.test_dataset is not None
    assert module.seen == {
        "train": len(data.train_dataset) // 4 * 4,
        "val": len(data.val_dataset),
        "test": len(data.test_dataset),
        "predict": 2,
    }


@pytest.mark.filterwarnings("ignore")
def test_no_validation_without_val_fraction(corpus: Path, cache_dir: str, tmp_path: Path) -> None:
    module = Counter()
    data = TextDataModule(str(corpus), seq_length=32, val_fraction=0, cache_dir=cache_dir)
    quiet_trainer(tmp_path).fit(module, datamodule=data)
    assert set(module.seen) == {"train"}


def test_dataset_pickles_small_and_reads_the_same(tmp_path: Path, cache_dir: str) -> None:
    write(tmp_path / "a.txt", os.urandom(400_000))
    data = TextDataModule(str(tmp_path / "a.txt"), seq_length=64, cache_dir=cache_dir)
    data.setup("fit")
    packed = pickle.dumps(data.train_dataset)
    assert len(packed) < 20_000
    copy = pickle.loads(packed)
    assert all(torch.equal(copy[9][k], v) for k, v in data.train_dataset[9].items())


# ------------------------------------------------------------------------------------------------------------ files


def test_listing_takes_files_folders_and_globs_once(tmp_path: Path) -> None:
    for name in ("d/a.py", "d/b.txt", "d/.hidden/c.py", "d/e/f.py", "g.md", "h.md"):
        write(tmp_path / name, "text\n")

    def names(paths: list[str], pattern: str | None = None) -> list[str]:
        return [str(f.path.relative_to(tmp_path)) for f in list_files([str(tmp_path / p) for p in paths], pattern)]

    assert names(["d"]) == ["d/a.py", "d/b.txt", "d/e/f.py"]
    assert names(["d"], "**/*.py") == ["d/.hidden/c.py", "d/a.py", "d/e/f.py"]
    assert names(["*.md", "d/a.py", "g.md"]) == ["g.md", "h.md", "d/a.py"]
    assert names(["**/*.py"]) == ["d/a.py", "d/e/f.py"]


def test_binary_and_empty_files_of_a_folder_are_left_out(tmp_path: Path, cache_dir: str) -> None:
    write(tmp_path / "d/a.txt", "some text here\n")
    write(tmp_path / "d/b.bin", b"\0\1\2" * 100)
    write(tmp_path / "d/c.txt", "")
    cache = open_or_build(list_files(str(tmp_path / "d")), ByteTokenizer(), Path(cache_dir_made(cache_dir)))
    assert bytes(cache.tokens()[:-1].astype(np.uint8)) == b"some text here\n" and len(cache.hashes) == 1
    named = open_or_build(list_files(str(tmp_path / "d/b.bin")), ByteTokenizer(), Path(cache_dir))
    assert named.num_tokens == 301  # a file that somebody names is taken as it is


def cache_dir_made(cache_dir: str) -> str:
    Path(cache_dir).mkdir(exist_ok=True)
    return cache_dir


@pytest.mark.parametrize(
    "content",
    [b"ab\ncd\nefgh\n" * 50, b"x" * 95, "ü€𝄞".encode() * 40, b"\x80" * 70, b"x" * 32, b"\n", b"a\n" + b"y" * 99],
)
def test_pieces_join_to_the_file_and_keep_characters_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    monkeypatch.setattr(sources_module, "PIECE_BYTES", 16)
    pieces = list(read_file(list_files(str(write(tmp_path / "f", content)))[0]))
    assert b"".join(p.data for p in pieces) == content
    assert [p.last for p in pieces] == [False] * (len(pieces) - 1) + [True]
    assert [p.offset_bytes for p in pieces] == np.cumsum([0, *(len(p.data) for p in pieces)])[:-1].tolist()
    assert sum(p.size_bytes for p in pieces) == len(content)
    if content.startswith(b"ab\n"):
        assert all(p.data.endswith(b"\n") for p in pieces)
    if content != b"\x80" * 70:
        for piece in pieces:
            piece.data.decode()  # raises if a character was cut


# ------------------------------------------------------------------------------------------------------- tokenizers


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A byte-level BPE with 288 tokens (the text has no more pairs to merge), truncation left on as in saved files."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator([document(i) for i in range(10)], trainer)
    bpe.enable_truncation(max_length=5)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    bpe.save(str(path))
    return str(path)


def test_byte_tokenizer_round_trip() -> None:
    tokenizer = build_tokenizer("bytes")
    assert tokenizer.decode(tokenizer.encode("Grüße €")) == "Grüße €"
    assert tokenizer.decode([0x47, EOD, 0xFF, 0x48]) == "G\ufffdH"
    assert (tokenizer.vocab_size, tokenizer.eod) == (257, 256)


def test_tokenizer_file_gives_the_text_back(corpus: Path, cache_dir: str, tokenizer_file: str) -> None:
    data = TextDataModule(str(corpus), tokenizer=tokenizer_file, seq_length=8, val_fraction=0, cache_dir=cache_dir)
    data.setup("fit")
    assert data.vocab_size == 288 and data.tokenizer.eod == 0
    ids = joined(data.train_dataset)
    texts = [path.read_text() for path in sorted(corpus.rglob("*.txt"))]
    assert data.tokenizer.decode(ids) == "".join(texts)[: len(data.tokenizer.decode(ids))]
    assert len(ids) < 0.6 * sum(map(len, texts))  # merges were used, and truncation was not
    assert ids.count(0) in (39, 40)


def test_tokenizer_without_end_of_document_gets_one_after_the_vocabulary(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({"a": 0, "b": 7, "?": 3}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "t.json"))
    tokenizer = FileTokenizer(tmp_path / "t.json")
    assert (tokenizer.eod, tokenizer.vocab_size) == (8, 9)
    assert tokenizer.decode([0, 8, 7]) == "a b"
    named = FileTokenizer(tmp_path / "t.json", eod_token="?")
    assert (named.eod, named.vocab_size) == (3, 8)
    assert named.fingerprint != tokenizer.fingerprint


def test_large_document_is_tokenized_in_pieces(
    tmp_path: Path, cache_dir: str, tokenizer_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "a.txt", document(3, lines=200) + "Ünïcödé " * 50)
    root = Path(cache_dir_made(cache_dir))
    tokenizer = build_tokenizer(tokenizer_file)
    monkeypatch.setattr(sources_module, "PIECE_BYTES", 256)
    cache = open_or_build(list_files(str(path)), tokenizer, root)
    assert len(cache.hashes) == 1
    assert tokenizer.decode(cache.tokens().tolist()) == path.read_text()


def test_token_dtype_holds_every_id() -> None:
    assert token_dtype(65536) is np.uint16
    assert token_dtype(65537) is np.uint32


# ------------------------------------------------------------------------------------------------------------ cache


def count_builds(barrier: Any, folder: str, cache_dir: str) -> tuple[int, int]:
    """Set a module up at the same moment as others; returns how often this process tokenized, and a checksum."""
    builds: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: builds.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("lt_parallel.data.token_cache")
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    data = TextDataModule(folder, seq_length=32, cache_dir=cache_dir)
    barrier.wait(timeout=60)
    data.setup("fit")
    return sum(b.startswith("tokenized") for b in builds), sum(joined(data.train_dataset))


def test_processes_that_start_together_build_once(corpus: Path, cache_dir: str) -> None:
    context = multiprocessing.get_context("fork")
    with context.Manager() as manager, context.Pool(6) as pool:
        barrier = manager.Barrier(6)
        results = pool.starmap(count_builds, [(barrier, str(corpus), cache_dir)] * 6, chunksize=1)
    assert sum(builds for builds, _ in results) == 1
    assert len({checksum for _, checksum in results}) == 1
    assert not [p for p in Path(cache_dir).iterdir() if p.name.startswith(".")]


class SlowTokenizer(ByteTokenizer):
    """Takes so long that a builder can be killed at work."""

    def encode_pieces(self, pieces: Sequence[Piece]) -> list[Tokens]:
        time.sleep(0.3)
        return super().encode_pieces(pieces)


def build_slowly(folder: str, root: Path) -> None:
    tokenizer_module._BATCH_BYTES = 1000
    open_or_build(list_files(folder), SlowTokenizer(), root)


def test_killed_builder_leaves_nothing_that_counts(corpus: Path, cache_dir: str) -> None:
    root = Path(cache_dir_made(cache_dir))
    builder = multiprocessing.get_context("fork").Process(target=build_slowly, args=(str(corpus), root))
    builder.start()
    try:
        deadline = time.monotonic() + 60
        while not any(p.stat().st_size >= 0 for p in root.glob(".*/tokens.bin")):
            assert time.monotonic() < deadline and builder.is_alive(), "the builder never started to write"
            time.sleep(0.01)
    finally:
        builder.kill()
        builder.join()
    remains = list(root.glob(".*/tokens.bin"))
    assert remains and not list(root.glob("*/meta.json"))
    files = list_files(str(corpus))
    cache = open_or_build(files, ByteTokenizer(), root)
    expected = b"".join(f.path.read_bytes() + b"\0" for f in files)
    assert bytes(np.where(cache.tokens() == EOD, 0, cache.tokens()).astype(np.uint8)) == expected
    assert not list(root.glob(".*")), "what the killed builder left is removed"


def test_cache_is_found_again_and_follows_content(corpus: Path, cache_dir: str) -> None:
    root = Path(cache_dir_made(cache_dir))

    def build() -> tuple[Path, int]:
        cache = open_or_build(list_files(str(corpus)), ByteTokenizer(), root)
        return cache.folder, (cache.folder / "tokens.bin").stat().st_ino

    first = build()
    assert build() == first
    path = corpus / "sub0" / "00.txt"
    path.write_text(document(7)[: path.stat().st_size].ljust(path.stat().st_size))
    os.utime(path, ns=(0, 1))  # the clock of the file system may be too coarse to tell the two writes apart
    second = build()
    assert second[0] != first[0]
    with open(path, "a") as stream:
        stream.write("more")
    os.utime(path, ns=(0, 1))
    assert build()[0] not in (first[0], second[0])


def test_full_disk_is_one_error_and_leaves_nothing(corpus: Path, cache_dir: str) -> None:
    root = Path(cache_dir_made(cache_dir))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        with pytest.raises(DataError, match=r"can't write the token cache in .*: File too large"):
            open_or_build(list_files(str(corpus)), ByteTokenizer(), root)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [p.suffix for p in root.iterdir()] == [".lock"]
    assert open_or_build(list_files(str(corpus)), ByteTokenizer(), root).num_tokens > 10_000


def test_damaged_cache_is_made_anew(corpus: Path, cache_dir: str, caplog: pytest.LogCaptureFixture) -> None:
    root = Path(cache_dir_made(cache_dir))
    files = list_files(str(corpus))
    good = np.array(open_or_build(files, ByteTokenizer(), root).tokens())
    folder = open_or_build(files, ByteTokenizer(), root).folder
    os.truncate(folder / "tokens.bin", 100)
    assert np.array_equal(open_or_build(files, ByteTokenizer(), root).tokens(), good)
    assert "damaged" in caplog.text
    (folder / "offsets.npy").write_bytes(b"")
    assert np.array_equal(open_or_build(files, ByteTokenizer(), root).tokens(), good)


class GrowingText(ByteTokenizer):
    """Appends to a file while it is tokenized, as a download that still runs would."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def encode_pieces(self, pieces: Sequence[Piece]) -> list[Tokens]:
        with open(self.path, "a") as stream:
            stream.write("late")
        return super().encode_pieces(pieces)


def test_text_that_changes_while_tokenized_is_refused(corpus: Path, cache_dir: str) -> None:
    root = Path(cache_dir_made(cache_dir))
    path = corpus / "sub0" / "00.txt"
    with pytest.raises(DataError, match="changed while it was tokenized"):
        open_or_build(list_files(str(corpus)), GrowingText(path), root)
    assert not list(root.glob("*/meta.json"))


# ----------------------------------------------------------------------------------------------------------- errors


def raises(text: str, **options: Any) -> None:
    with pytest.raises(DataError) as caught:
        TextDataModule(**options).setup("fit")
    assert text in str(caught.value), str(caught.value)


def test_missing_paths_are_named(tmp_path: Path, cache_dir: str) -> None:
    raises(f"{str(tmp_path / 'no/such')!r} doesn't exist", paths=str(tmp_path / "no/such"), cache_dir=cache_dir)
    raises(f"nearest folder that does is {str(tmp_path)!r}", paths=[str(tmp_path / "no/such")], cache_dir=cache_dir)
    raises("paths=[] names no text", paths=[], cache_dir=cache_dir)
    for empty in ("", ["a", ""]):  # the working directory isn't meant
        raises(f"paths={empty!r} must name files, folders or globs", paths=empty, cache_dir=cache_dir)
    write(tmp_path / "d/x.txt", "text")
    raises("matches pattern='**/*.py' (it does hold 'x.txt')", paths=str(tmp_path / "d"), pattern="**/*.py")
    raises("matches nothing", paths=str(tmp_path / "*.rst"), cache_dir=cache_dir)
    raises("matches 1 folders and no file", paths=str(tmp_path / "[d]*"), cache_dir=cache_dir)
    (tmp_path / "empty").mkdir()
    raises("holds no file", paths=str(tmp_path / "empty"), cache_dir=cache_dir)
    raises("isn't a glob relative to a folder", paths=str(tmp_path / "d"), pattern="/abs/*.py")


def test_text_without_content(tmp_path: Path, cache_dir: str) -> None:
    write(tmp_path / "d/a.txt", "")
    raises("of 1 files 1 are empty and 0 look binary", paths=str(tmp_path / "d/a.txt"), cache_dir=cache_dir)
    write(tmp_path / "d/b.bin", b"\0" * 9)
    raises("of 2 files 1 are empty and 1 look binary", paths=str(tmp_path / "d"), cache_dir=cache_dir)


def test_too_little_text_says_how_much(tmp_path: Path, cache_dir: str) -> None:
    path = str(write(tmp_path / "a.txt", "x" * 99))
    options: dict[str, Any] = {"paths": path, "cache_dir": cache_dir}
    raises("holds 100 tokens (1 documents), but one sequence needs seq_length + 1 = 101", seq_length=100, **options)
    raises("set seq_length to at most 99", seq_length=100, **options)
    raises("set seq_length to at most 99", seq_length=10**14, **options)  # said before anything that long is made
    raises("the train split holds 90 of the text's 100 tokens", seq_length=95, val_fraction=0.1, **options)
    raises("the val split holds 10 of the text's 100 tokens", seq_length=10, val_fraction=0.1, **options)
    raises(
        "set seq_length to at most 9, or set val_fraction to 0.22 or more", seq_length=10, val_fraction=0.1, **options
    )
    raises("nearest valid: micro_batch_size=9", seq_length=11, val_fraction=0, micro_batch_size=10, **options)
    fixed = TextDataModule(seq_length=10, val_fraction=0.22, **options)
    fixed.setup("fit")
    assert fixed.val_dataset is not None and len(fixed.val_dataset) == 2


def test_a_failed_setup_fails_again(tmp_path: Path, cache_dir: str) -> None:
    path = str(write(tmp_path / "a.txt", "x" * 99))
    data = TextDataModule(path, seq_length=100, val_fraction=0, cache_dir=cache_dir)
    for _ in range(2):
        with pytest.raises(DataError):
            data.setup("fit")


def test_prepare_data_leaves_errors_to_setup(tmp_path: Path, cache_dir: str) -> None:
    data = TextDataModule(str(tmp_path / "no"), cache_dir=cache_dir)
    data.prepare_data()
    with pytest.raises(DataError, match="doesn't exist"):
        data.setup("fit")


def test_bad_options(tmp_path: Path, cache_dir: str) -> None:
    raises("seq_length=0 must be at least 1", paths="x", seq_length=0)
    raises("micro_batch_size=2.5 must be a whole number", paths="x", micro_batch_size=2.5)
    raises("micro_batch_size=-1 must be at least 1", paths="x", micro_batch_size=-1)
    raises("num_workers=-2 must be at least 0", paths="x", num_workers=-2)
    raises("val_fraction=0.5 and test_fraction=0.5", paths="x", val_fraction=0.5, test_fraction=0.5)
    raises("val_fraction=-0.1", paths="x", val_fraction=-0.1)
    path = str(write(tmp_path / "a.txt", document(1)))
    with pytest.raises(DataError, match=r"`test` needs held-out text, but test_fraction=0"):
        TextDataModule(path, cache_dir=cache_dir).setup("test")
    (tmp_path / "file").write_text("")
    raises("can't make cache folder", paths=path, cache_dir=str(tmp_path / "file" / "cache"))


def test_bad_tokenizers(tmp_path: Path, cache_dir: str, tokenizer_file: str) -> None:
    path = str(write(tmp_path / "a.txt", document(1)))
    options: dict[str, Any] = {"paths": path, "cache_dir": cache_dir}
    raises("tokenizer='byte' is neither 'bytes' nor a file", tokenizer="byte", **options)
    write(tmp_path / "t.json", '{"no": "tokenizer"}')
    raises("isn't a file of the tokenizers library", tokenizer=str(tmp_path / "t.json"), **options)
    raises("eod_token='</s>' isn't in the 288 tokens", tokenizer=tokenizer_file, eod_token="</s>", **options)
    raises("it has '<|endoftext|>'", tokenizer=tokenizer_file, eod_token="</s>", **options)
    raises("has its own end of document (256)", eod_token="</s>", **options)


def test_undecodable_text_is_named_and_remembered(
    tmp_path: Path, cache_dir: str, tokenizer_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "latin1.txt", "abc Grüße".encode("latin-1"))
    message = f"{path} isn't UTF-8 (byte 0xfc at offset 6)"
    options: dict[str, Any] = {"paths": str(path), "cache_dir": cache_dir, "tokenizer": tokenizer_file, "seq_length": 4}
    raises(message, **options)
    assert not list(Path(cache_dir).glob(".*")), "a failed build cleans up"
    with monkeypatch.context() as patch:
        patch.delattr(FileTokenizer, "encode_pieces")  # the second process must not get as far as tokenizing
        raises(message, **options)
    write(path, "abc Grüße und mehr")
    TextDataModule(**options, val_fraction=0).setup("fit")


@pytest.mark.parametrize("prompts", [None, []])
def test_predict_without_prompts(tmp_path: Path, prompts: list[str] | None) -> None:
    with pytest.raises(DataError, match="predict_prompts"):
        TextDataModule(str(tmp_path), predict_prompts=prompts).predict_dataloader()


def test_predict_prompts_of_unusable_length(tmp_path: Path) -> None:
    for prompt, length in (("", 0), ("x" * 9, 9)):
        with pytest.raises(DataError, match=f"is {length} tokens; 1 to seq_length=8"):
            TextDataModule(str(tmp_path), seq_length=8, predict_prompts=[prompt]).predict_dataloader()


# ------------------------------------------------------------------------------------------------------ import, CLI


def test_package_import_is_light() -> None:
    code = (
        "import sys, lt_parallel.data\n"
        "heavy = {'torch', 'lightning', 'numpy', 'tokenizers', 'megatron'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_megatron_core_is_imported_only_where_it_is_used() -> None:
    for path in Path(sources_module.__file__).parent.glob("*.py"):
        for statement in ast.parse(path.read_text()).body:
            if isinstance(statement, ast.Import | ast.ImportFrom):
                assert "megatron" not in ast.unparse(statement), f"{path.name}: {ast.unparse(statement)}"


def test_command_line_accepts_paths_as_people_type_them() -> None:
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(TextDataModule, "data")
    for text, paths in (("[a.txt]", ["a.txt"]), ("a.txt", "a.txt"), ("[a.txt,b/*.py]", ["a.txt", "b/*.py"])):
        assert parser.parse_args([f"--data.paths={text}", "--data.seq_length=64"]).data.paths == paths
    help_text = parser.format_help()
    assert all(
        option in help_text for option in ("pattern", "Share of all tokens to hold out", "tokenizers library JSON")
    )

"""Data modules in several ranks at once: same data everywhere, one builder, and errors that end every rank."""

from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch

from lt_parallel.data import DataError, IndexedDataModule, TextDataModule
from lt_parallel.data.preprocess import write_pair
from lt_parallel.data.sources import list_files
from lt_parallel.data.tokenizer import ByteTokenizer
from tests.support.ranks import init_gloo, run_ranks


def write_corpus(folder: Path) -> None:
    folder.mkdir()
    for index in range(30):
        (folder / f"{index:02}.txt").write_text(f"document {index} says\n" * 20)


def checksum(dataset: Any) -> int:
    return sum((i + 1) * int((dataset[i]["tokens"] * torch.arange(1, 17)).sum()) for i in range(len(dataset)))


def indexed_setup(path: str, cache: str) -> list[str | int]:
    init_gloo()
    data = IndexedDataModule(path, seq_length=16, split="8,1,1", tokenizer="bytes", path_to_cache=cache)
    try:
        data.setup("fit")
        data.setup("test")
    except DataError as error:
        return [str(error)]
    return [checksum(data.train_dataset), checksum(data.val_dataset), checksum(data.test_dataset)]


def test_indexed_data_is_the_same_on_every_rank(tmp_path: Path) -> None:
    write_corpus(tmp_path / "in")
    write_pair(tmp_path / "p", list_files(str(tmp_path / "in")), ByteTokenizer(), append_eod=True)
    results = run_ranks(indexed_setup, 4, str(tmp_path / "p"), str(tmp_path / "cache"), timeout_s=60)
    alone = IndexedDataModule(
        str(tmp_path / "p"), seq_length=16, split="8,1,1", tokenizer="bytes", path_to_cache=str(tmp_path / "other")
    )
    alone.setup()
    expected = [checksum(alone.train_dataset), checksum(alone.val_dataset), checksum(alone.test_dataset)]
    assert results == [expected] * 4


def test_indexed_errors_are_raised_on_every_rank(tmp_path: Path) -> None:
    write_corpus(tmp_path / "in")
    write_pair(tmp_path / "p", list_files(str(tmp_path / "in")), ByteTokenizer())
    with open(tmp_path / "p.bin", "ab") as stream:
        stream.write(b"xx")
    results = run_ranks(indexed_setup, 3, str(tmp_path / "p"), str(tmp_path / "cache"), timeout_s=60)
    assert all(r == results[0] and "doesn't match" in r[0] for r in results)


class Idle(L.LightningModule):
    """Counts batches; trains nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.batches = 0

    def configure_optimizers(self) -> None:
        return None

    def training_step(self, batch: dict[str, torch.Tensor], _: int) -> None:
        self.batches += 1


def fit(data: L.LightningDataModule, world_size: int) -> str | int:
    module = Idle()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy="ddp",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
    )
    try:
        trainer.fit(module, datamodule=data)
    except DataError as error:
        return str(error)
    return module.batches


def fit_text(paths: str, cache: str, seq_length: int) -> str | int:
    return fit(TextDataModule(paths, seq_length=seq_length, val_fraction=0, cache_dir=cache), 2)


@pytest.mark.parametrize(
    ("below", "seq_length", "message"),
    [("", 16, None), ("missing", 16, "doesn't exist"), ("", 10**6, "one sequence needs seq_length + 1 = 1000001")],
)
def test_text_under_lightning_trains_or_ends_every_rank(
    tmp_path: Path, below: str, seq_length: int, message: str | None
) -> None:
    write_corpus(tmp_path / "in")
    results = run_ranks(fit_text, 2, str(tmp_path / "in" / below), str(tmp_path / "cache"), seq_length, timeout_s=60)
    if message is None:
        sizes = sum(len((tmp_path / "in" / f"{i:02}.txt").read_bytes()) + 1 for i in range(30))
        assert results == [((sizes - 1) // 16 + 1) // 2] * 2
    else:
        assert results[0] == results[1] and message in str(results[0])

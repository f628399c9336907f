"""Missing text, text that is too short, and a missing checkpoint: one error, before any process starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher

from lt_parallel.data import IndexedDataModule, TextDataModule
from lt_parallel.models import GPTModule
from lt_parallel.strategies import MegatronParallelStrategy


@pytest.fixture(autouse=True)
def _no_process_may_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise AssertionError(f"a process would start: {args}")

    monkeypatch.setattr(_SubprocessScriptLauncher, "_call_children_scripts", refuse)
    monkeypatch.setattr(torch.distributed, "init_process_group", refuse)
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("abc " * 100)
    (tmp_path / "short.txt").write_text("0123456789")


def error_of(entry: str, data: L.LightningDataModule, **options: Any) -> str:
    """What the Trainer's method says."""
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=MegatronParallelStrategy(tensor_model_parallel_size=2),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        max_steps=1,
    )
    module = GPTModule(257, 32, num_layers=1, hidden_size=16, num_attention_heads=2)
    with pytest.raises((ValueError, FileNotFoundError)) as caught:
        getattr(trainer, entry)(module, data, **options)
    return str(caught.value)


def text_data(**options: Any) -> TextDataModule:
    return TextDataModule(**{"paths": "text.txt", "seq_length": 32, **options})


@pytest.mark.parametrize(
    ("entry", "options", "message"),
    [
        ("fit", {"paths": "missing/"}, "'missing/' doesn't exist"),
        ("validate", {"paths": ["text.txt", "gone.txt"]}, "'gone.txt' doesn't exist"),
        ("validate", {"val_fraction": 0.0}, "`validate` needs held-out text, but val_fraction=0"),
        ("test", {}, "`test` needs held-out text, but test_fraction=0"),
        (
            "fit",
            {"paths": "short.txt"},
            "the text holds 11 tokens (1 documents), but one sequence needs seq_length + 1",
        ),
        ("predict", {}, "`predict` has no text to continue"),
        ("predict", {"predict_prompts": ["x" * 40]}, "is 40 tokens; 1 to seq_length=32 can be continued"),
    ],
)
def test_text_is_looked_at_before_processes_start(entry: str, options: dict[str, Any], message: str) -> None:
    assert message in error_of(entry, text_data(**options))


def test_pairs_are_looked_at_before_processes_start() -> None:
    data = IndexedDataModule("corpus", seq_length=32, vocab_size=257)
    assert "names the pair corpus.bin and corpus.idx" in error_of("fit", data)


@pytest.mark.parametrize("entry", ["fit", "validate", "predict"])
def test_a_missing_checkpoint_is_found_before_processes_start(entry: str) -> None:
    data = text_data(predict_prompts=["a"])
    assert error_of(entry, data, ckpt_path="runs/no.ckpt") == "runs/no.ckpt: no such checkpoint"


@pytest.mark.parametrize("named", ["best", "last"])
def test_checkpoints_that_lightning_finds_are_left_to_it(named: str) -> None:
    with pytest.raises(AssertionError, match="a process would start"):
        error_of("fit", text_data(), ckpt_path=named)


def test_usable_text_goes_on_to_the_launch() -> None:
    with pytest.raises(AssertionError, match="a process would start"):
        error_of("fit", text_data())
    text_data(tokenizer="bytes", test_fraction=0.2).check_source("test")


def test_the_early_count_of_tokens_is_the_real_one(tmp_path: Path) -> None:
    """Else text that is long enough might be refused."""
    (tmp_path / "empty.txt").write_text("")
    for seq_length in (10, 11):
        data = text_data(paths=["short.txt", "empty.txt"], seq_length=seq_length, val_fraction=0.0)
        if seq_length == 10:
            data.check_source("fit")
            data.setup("fit")
        else:
            with pytest.raises(ValueError, match="holds 11 tokens"):
                data.check_source("fit")
            with pytest.raises(ValueError, match="holds 11 tokens"):
                data.setup("fit")

"""What is said of the pipeline when a fit starts: by whom, how often, and in which words."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import lightning.pytorch as L
import pytest
from rich.console import Console
from torch.utils.data import DataLoader

from lt_parallel.models import GPTModule
from lt_parallel.pipeline_layout import PipelineLayout
from lt_parallel.strategies.layout_table import layout_table
from tests.ranks.parity_runs import (
    LLAMA,
    MICRO_BATCH,
    SEED,
    SEQ_LENGTH,
    VOCAB_SIZE,
    Sequences,
    StepNumbers,
    build_trainer,
)
from tests.support.ranks import run_ranks


def lines(text: str) -> list[str]:
    """Without rules and blanks at the ends; cells two and more blanks apart."""
    return [line.strip() for line in text.splitlines() if line.strip(" ─\n")]


def shown(layout: PipelineLayout, parameters: list[int]) -> list[list[str]]:
    console = Console(width=120, file=io.StringIO())
    console.print(layout_table(layout, parameters))
    return [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in lines(console.file.getvalue())]


def test_words() -> None:
    layout = PipelineLayout.parse("Et|tt|t||||mm|L", num_layers=4, mtp_num_layers=2, pipeline_model_parallel_size=4)
    assert shown(layout, [1_234_567, 20, 3, 4]) == [
        ["pipeline layout"],
        ["pipeline rank", "chunk 0", "chunk 1", "parameters"],
        ["0", "embedding, layer 1", "nothing", "1,234,567"],
        ["1", "layers 2-3", "nothing", "20"],
        ["2", "layer 4", "MTP layers 1-2", "3"],
        ["3", "nothing", "loss", "4"],
    ]
    assert shown(PipelineLayout.even(4, pipeline_model_parallel_size=2, mtp_num_layers=1), [5, 6])[1:] == [
        ["pipeline rank", "holds", "parameters"],
        ["0", "embedding, layers 1-2", "5"],
        ["1", "layers 3-4, MTP layer 1, loss", "6"],
    ]


def printed_by_two_fits(world_size: int, strategy: dict[str, Any], summary: bool) -> tuple[str, int]:
    L.seed_everything(SEED, verbose=False)
    trainer = build_trainer(
        StepNumbers(), strategy, devices=world_size, max_steps=1, limit_val_batches=0, enable_model_summary=summary
    )
    module = GPTModule(VOCAB_SIZE, SEQ_LENGTH, **LLAMA)
    loader = DataLoader(Sequences(), batch_size=MICRO_BATCH)
    with contextlib.redirect_stdout(io.StringIO()) as output:
        trainer.fit(module, loader)
        trainer.fit_loop.epoch_loop.max_steps = 2
        trainer.fit(module, loader)
    return output.getvalue(), module.parameter_counts()["params_this_rank"]


@pytest.mark.parametrize("summary", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_rank_zero_says_it_once_per_fit_unless_it_is_to_be_quiet(summary: bool) -> None:
    first, second = run_ranks(printed_by_two_fits, 2, 2, {"pipeline_model_parallel_size": 2}, summary)
    tables = first[0].split("pipeline layout")[1:]
    assert len(tables) == (2 if summary else 0)
    assert "pipeline layout" not in second[0]
    for table in tables:
        rows = [line.split() for line in lines(table)][1:3]
        assert [row[0] for row in rows] == ["0", "1"]
        assert [row[-1] for row in rows] == [f"{count:,}" for _, count in (first, second)]

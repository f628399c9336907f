"""Which pipeline rank holds what, as a table when a fit starts.

Printed once per fit by rank zero, where there is a pipeline. It is left out where Lightning's own overview of the model
is: with `Trainer(enable_model_summary=False)`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from lightning.pytorch.callbacks import ModelSummary

from lt_parallel.pipeline_layout import EMBEDDING, LOSS

if TYPE_CHECKING:
    import lightning.pytorch as L
    from rich.table import Table
    from torch import nn
    from torch.distributed import ProcessGroup

    from lt_parallel.pipeline_layout import PipelineLayout

__all__ = ["layout_table", "show_layout"]


def show_layout(
    trainer: L.Trainer,
    layout: PipelineLayout | None,
    chunks: Sequence[nn.Module],
    pp_group: ProcessGroup,
    device: torch.device,
) -> None:
    """Prints the table. Collective over each pipeline: its ranks exchange how many parameters they hold.

    Args:
        trainer: Which is about to fit.
        layout: What each stage holds; None: there is nothing to show.
        chunks: This rank's.
        pp_group: The pipeline of this rank.
        device: For the exchange.
    """
    if layout is None or pp_group.size() == 1:
        return
    own = torch.tensor(sum(p.numel() for chunk in chunks for p in chunk.parameters()), device=device)
    counts = [torch.empty_like(own) for _ in range(pp_group.size())]
    torch.distributed.all_gather(counts, own, group=pp_group)
    callbacks: list[object] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
    if trainer.is_global_zero and any(isinstance(callback, ModelSummary) for callback in callbacks):
        from rich.console import Console

        Console().print(layout_table(layout, [int(count) for count in counts]))


def layout_table(layout: PipelineLayout, parameters: Sequence[int]) -> Table:
    """One row per pipeline rank, one column per chunk; layers are counted from 1, as Megatron Core counts them.

    Args:
        layout: What each stage holds.
        parameters: That one rank at each place of the pipeline holds, with its tensor-parallel part of the matrices.
    """
    from rich import box
    from rich.table import Table

    table = Table(title="pipeline layout", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("pipeline rank", justify="right")
    chunks = range(layout.num_model_chunks)
    for chunk in chunks:
        table.add_column(f"chunk {chunk}" if len(chunks) > 1 else "holds")
    table.add_column("parameters", justify="right")
    for rank in range(layout.pipeline_model_parallel_size):
        held = [_contents(layout, rank, chunk) for chunk in chunks]
        table.add_row(str(rank), *held, f"{parameters[rank]:,}")
    return table


def _contents(layout: PipelineLayout, pp_rank: int, chunk: int) -> str:
    """In words, such as "embedding, layers 1-4"."""
    symbols = layout.stage(pp_rank, chunk)
    parts = ["embedding"] if EMBEDDING in symbols else []
    for name, indices in (
        ("layer", layout.stage_layers(pp_rank, chunk)),
        ("MTP layer", layout.stage_mtp_layers(pp_rank, chunk)),
    ):
        if len(indices) > 1:
            parts.append(f"{name}s {indices[0] + 1}-{indices[-1] + 1}")
        elif indices:
            parts.append(f"{name} {indices[0] + 1}")
    parts += ["loss"] if LOSS in symbols else []
    return ", ".join(parts) or "nothing"

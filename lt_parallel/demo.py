"""`python -m lt_parallel.demo`: train a small GPT on real text, cut over 4 processes of this machine, and look at it.

It runs what `lt-parallel fit --config recipes/gpt_tiny.yaml` runs, with the arguments in `ARGUMENTS`, then loads the
checkpoint into a new model, which must validate to the same loss, and lets that model write. Lightning's launcher
starts the other three processes by running this file again, so everything here runs on every rank unless it says
otherwise.
"""

from __future__ import annotations

import csv
import math
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lt_parallel import quiet
from lt_parallel.outcome import run_command, started_by_user

if TYPE_CHECKING:
    import lightning.pytorch as L

    from lt_parallel.lightning_cli import MegatronCLI

FOLDER = Path("runs/demo")
PREVIOUS = Path("runs/demo.previous")
CHECKPOINT = f"{FOLDER}/checkpoints/last.ckpt"
PROMPT = "def "
NEW_TOKENS = 200
#: After 200 steps the model is surest of spaces; at a lower temperature it writes little else.
TEMPERATURE, TOP_K = 1.0, 8

ARGUMENTS = (
    "--trainer.accelerator=cpu",
    "--trainer.devices=4",
    "--trainer.strategy.tensor_model_parallel_size=2",
    "--trainer.strategy.pipeline_model_parallel_size=2",
    # A smaller step than the recipe's, in fewer and larger micro batches: what 2 cores can do in 4 minutes.
    "--data.micro_batch_size=4",
    "--trainer.strategy.global_batch_size=8",
    "--data.val_fraction=0.005",  # whole files, about 50 kB of text, all of which is evaluated
    "--trainer.max_epochs=1",
    "--trainer.max_steps=200",
    "--model.lr_decay_iters=200",
    "--trainer.val_check_interval=50",
    "--trainer.limit_val_batches=null",
    f"--trainer.default_root_dir={FOLDER}",
    f"--trainer.logger.save_dir={FOLDER.parent}",
    f"--trainer.logger.name={FOLDER.name}",
    "--trainer.logger.version=",
    "--trainer.callbacks+=ModelCheckpoint",
    f"--trainer.callbacks.dirpath={FOLDER}/checkpoints",
    "--trainer.callbacks.filename=last",
    "--trainer.callbacks.every_n_train_steps=200",
    "--trainer.callbacks.enable_version_counter=false",
)


@dataclass
class Result:
    """What the table and the picture show.

    Args:
        steps: Global steps, those that logged a loss.
        losses: Training loss at each, in nats per token.
        val_steps: Global steps of the validations.
        val_losses: Their losses, in nats per token.
        reloaded_loss: The reloaded model's validation loss.
        tokens_per_s: While training, validations and checkpoints left out.
        parameters: Of each rank.
        total_parameters: Of the model.
        seconds: From start to end.
    """

    steps: list[int]
    losses: list[float]
    val_steps: list[int]
    val_losses: list[float]
    reloaded_loss: float
    tokens_per_s: float
    parameters: list[int]
    total_parameters: int
    seconds: float

    @property
    def bits_per_byte(self) -> float:
        """A token is a byte, so it is the loss in bits."""
        return self.val_losses[-1] / math.log(2)


def main() -> int:
    """Runs the demo; returns the exit status."""
    quiet.install()
    return run_command(run_demo)


def run_demo() -> int:
    """Trains, reloads, generates; rank 0 shows the results."""
    start = time.monotonic()
    if started_by_user():
        keep_previous()
        print("Training a GPT on Python's standard library: 4 processes, tensor parallel 2 x pipeline parallel 2.")
        print(f"Like `lt-parallel fit --config recipes/gpt_tiny.yaml` with {len(ARGUMENTS)} more arguments;", end=" ")
        print(f"all of them: {FOLDER}/config.yaml\n", flush=True)

    import torch

    from lt_parallel.lightning_cli import MegatronCLI, interrupts_of
    from lt_parallel.recipe_files import recipe_path

    clock = _step_clock()
    cli = MegatronCLI("fit", ["--config", str(recipe_path("gpt_tiny")), *ARGUMENTS], run=False, callbacks=[clock])
    with interrupts_of(cli):
        cli.trainer.fit(cli.model, datamodule=cli.datamodule)
    strategy: Any = cli.trainer.strategy

    reloaded_loss, sample = _reload_and_write(cli)
    counts: dict[str, int] = cli.model.parameter_counts()
    parameters: list[Any] = [None] * strategy.sizes.world_size
    torch.distributed.all_gather_object(parameters, counts["params_this_rank"])
    if not cli.trainer.is_global_zero:
        return 0
    steps, losses = _column("train_loss")
    val_steps, val_losses = _column("val_loss")
    tokens_per_step = cli.model.seq_length * strategy.consumed_samples / cli.trainer.global_step
    result = Result(
        steps=steps,
        losses=losses,
        val_steps=val_steps,
        val_losses=val_losses,
        reloaded_loss=reloaded_loss,
        tokens_per_s=tokens_per_step * len(clock.seconds) / sum(clock.seconds),
        parameters=parameters,
        total_parameters=counts["params_total"],
        seconds=time.monotonic() - start,
    )
    if not math.isclose(result.reloaded_loss, result.val_losses[-1], rel_tol=1e-5):
        raise RuntimeError(
            f"the reloaded checkpoint validates to {result.reloaded_loss}, the trained model to {result.val_losses[-1]}"
        )
    (FOLDER / "sample.txt").write_text(sample)
    draw(result, FOLDER / "loss.png")
    show(result, sample)
    return 0


def keep_previous() -> None:
    """Moves the results of an earlier demo aside, in the place of those before them."""
    if FOLDER.exists():
        shutil.rmtree(PREVIOUS, ignore_errors=True)
        FOLDER.rename(PREVIOUS)
        print(f"The results of the last demo are in {PREVIOUS}/ now.")


def _step_clock() -> Any:
    """A callback that keeps the seconds of each training step but the first ones, which warm up."""
    import lightning.pytorch as L

    class StepClock(L.Callback):
        def __init__(self) -> None:
            self.seconds: list[float] = []
            self._start = 0.0

        def on_train_batch_start(self, *args: Any) -> None:
            self._start = time.perf_counter()

        def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx >= 3:
                self.seconds.append(time.perf_counter() - self._start)

    return StepClock()


def _reload_and_write(cli: MegatronCLI) -> tuple[float, str]:
    """Loads the checkpoint into a new model under a new Trainer; returns its validation loss and a text it wrote."""
    import torch

    from lt_parallel.lightning_cli import MegatronCLI, interrupts_of

    arguments = ["--config", str(FOLDER / "config.yaml"), f"--ckpt_path={CHECKPOINT}", "--trainer.logger=false"]
    fresh = MegatronCLI("validate", [*arguments, "--trainer.callbacks=null"], run=False, save_config=False)
    with interrupts_of(fresh):
        fresh.trainer.validate(fresh.model, datamodule=fresh.datamodule, ckpt_path=CHECKPOINT, verbose=False)
    loss = float(fresh.trainer.callback_metrics["val_loss"])
    tokenizer = cli.datamodule.tokenizer
    prompt = torch.tensor([tokenizer.encode(PROMPT)])
    tokens = fresh.model.generate(prompt, NEW_TOKENS, temperature=TEMPERATURE, top_k=TOP_K)
    return loss, tokenizer.decode(tokens[0].tolist())


def _column(name: str) -> tuple[list[int], list[float]]:
    """Steps and values of one column of the run's metrics.csv, where it has a value."""
    with open(FOLDER / "metrics.csv", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row.get(name)]
    return [int(row["step"]) + 1 for row in rows], [float(row[name]) for row in rows]


def draw(result: Result, path: Path) -> None:
    """Draws the loss over the steps into a PNG."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    axes.plot(result.steps, result.losses, linewidth=1, color="tab:blue", label="training")
    axes.plot(result.val_steps, result.val_losses, "o-", color="tab:orange", label="validation (held-out files)")
    axes.axhline(math.log(256), color="grey", linewidth=0.8, linestyle="--", label="uniform bytes (8 bits)")
    axes.set_xlabel("global step")
    axes.set_ylabel("loss (nats per byte)")
    axes.set_ylim(bottom=0)
    axes.secondary_yaxis("right", functions=(_nats_to_bits, _bits_to_nats)).set_ylabel("bits per byte")
    axes.set_title("GPT on Python's standard library, tensor parallel 2 x pipeline parallel 2")
    axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _nats_to_bits(nats: Any) -> Any:
    return nats / math.log(2)


def _bits_to_nats(bits: Any) -> Any:
    return bits * math.log(2)


def show(result: Result, sample: str) -> None:
    """Prints the sample and the table."""
    from rich.console import Console
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    console = Console()
    console.print(Panel(Text(sample), title="what the reloaded model writes", width=min(console.width, 100)))
    table = Table(title="lt-parallel demo")
    table.add_column("what")
    table.add_column("value", justify="right")
    rows = {
        "steps": str(result.steps[-1]),
        "train loss, first -> last (nats/byte)": f"{result.losses[0]:.3f} -> {result.losses[-1]:.3f}",
        "validation loss (nats/byte)": f"{result.val_losses[-1]:.3f}",
        "validation bits/byte (uniform: 8)": f"{result.bits_per_byte:.3f}",
        "the same, checkpoint reloaded": f"{result.reloaded_loss:.3f}",
        "tokens/s": f"{result.tokens_per_s:,.0f}",
        "parameters per rank": _counts(result.parameters),
        "parameters in total": f"{result.total_parameters:,}",
        "time": f"{result.seconds:.0f} s",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    console.print(table)
    names = ("metrics.csv", "loss.png", "sample.txt", "config.yaml", "checkpoints/")
    print(f"Written to {FOLDER}/: {', '.join(names)}")


def _counts(parameters: Sequence[int]) -> str:
    return ", ".join(f"{count:,}" for count in parameters)


if __name__ == "__main__":
    sys.exit(main())

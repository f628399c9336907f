"""`lt-parallel`: the sub-commands, and nothing that takes time before one of them is chosen.

`fit`, `validate`, `test` and `predict` are LightningCLI's (`lt_parallel.lightning_cli`); `data` writes data sets;
`scaling` measures how throughput grows with the number of devices.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from typing import NoReturn

from lt_parallel.outcome import CommandError, run_command

TRAINER_COMMANDS = {
    "fit": "train a model, with validation",
    "validate": "one pass over the validation data",
    "test": "one pass over the test data",
    "predict": "continue the prompts of the data module",
}
COMMANDS = {
    **TRAINER_COMMANDS,
    "data": "write a Megatron .bin/.idx pair from text or JSONL",
    "scaling": "speedup and efficiency over the number of devices, and what limits them",
}

_EXAMPLE = """\
lt-parallel fit --config recipes/gpt_tiny.yaml
  lt-parallel fit --config recipes/gpt_tiny.yaml --trainer.devices=4 \\
      --trainer.strategy.tensor_model_parallel_size=2 --trainer.strategy.pipeline_model_parallel_size=2
  lt-parallel fit --help          every argument of the Trainer, the strategy, the model and the data"""


def main() -> int:
    """The console command; returns the exit status."""
    return run_command(_dispatch)


def _dispatch() -> int:
    command, *arguments = sys.argv[1:] or [""]
    if command in ("-h", "--help", ""):
        print(_help())
        return 0 if command else 2
    if command == "--version":
        from importlib.metadata import version

        print(f"lt-parallel {version('lt-parallel')}")
        return 0
    if command not in COMMANDS:
        close = difflib.get_close_matches(command, COMMANDS, n=1)
        hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(COMMANDS)}"
        raise CommandError(f"{command!r} is no sub-command; {hint}")

    from lt_parallel import quiet

    quiet.install(resumes=command == "fit")
    if command == "data":
        return _data(arguments)
    if command == "scaling":
        return _scaling(arguments)

    from lt_parallel.lightning_cli import run_trainer_command

    return run_trainer_command(command, arguments)


def _help() -> str:
    width = max(map(len, COMMANDS))
    commands = "\n".join(f"  {name:{width}}  {text}" for name, text in COMMANDS.items())
    return (
        "usage: lt-parallel COMMAND [arguments]\n\n"
        "Megatron Core's parallelism for PyTorch Lightning's Trainer.\n\n"
        f"commands:\n{commands}\n\n"
        f"examples:\n  {_EXAMPLE}\n\n"
        "A run ends with one line; an error with a short message (LT_PARALLEL_DEBUG=1 shows the traceback)."
    )


class _Parser(argparse.ArgumentParser):
    """Raises what is wrong, and shows texts as they are written."""

    def __init__(self, command: str, description: str, epilog: str = "") -> None:
        super().__init__(
            prog=f"lt-parallel {command}",
            description=description,
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        raise CommandError(f"{message} (see `{self.prog} --help`)")


def _data(arguments: list[str]) -> int:
    from lt_parallel.data import preprocess

    parser = _Parser("data", "Write a Megatron .bin/.idx pair from text or JSONL.")
    preprocess.add_arguments(parser)
    return preprocess.run(parser.parse_args(arguments))


def _scaling(arguments: list[str]) -> int:
    from lt_parallel.scaling import command

    parser = _Parser("scaling", command.DESCRIPTION, command.EXAMPLES)
    command.add_arguments(parser)
    return command.run(*parser.parse_known_args(arguments))


if __name__ == "__main__":
    sys.exit(main())

"""LightningCLI with this package's strategy, model and data as its defaults.

What is added to LightningCLI: one sub-command's parser is built, not four; the strategy's, model's and data's arguments
are explained in `--help`; a misspelt or wrong argument gives one message that names it; the configuration that was
run is saved without ever replacing a file, and loggers get a record of the run; a run ends with one line.
"""

from __future__ import annotations

import contextlib
import difflib
import inspect
import re
import textwrap
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, override

import lightning.pytorch as L
import torch
import yaml
from jsonargparse import ArgumentParser, Namespace
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

from lt_parallel import outcome
from lt_parallel.callbacks.experiment_record import ExperimentRecord
from lt_parallel.data.indexed import IndexedDataModule
from lt_parallel.data.text import TextDataModule
from lt_parallel.models import GPTModule
from lt_parallel.outcome import CommandError
from lt_parallel.recipe_files import recipe_files
from lt_parallel.strategies import MegatronParallelStrategy
from lt_parallel.strategies.failure import FailureWatch

#: What the command line uses where neither it nor a configuration names a class.
DEFAULT_CLASSES: dict[str, type] = {
    "trainer.strategy": MegatronParallelStrategy,
    "model": GPTModule,
    "data": TextDataModule,
}


def run_trainer_command(command: str, arguments: Sequence[str]) -> int:
    """Runs `fit`, `validate`, `test` or `predict`.

    Args:
        command: Which.
        arguments: What follows it on the command line.

    Returns:
        0; errors are raised.
    """
    cli = MegatronCLI(command, arguments)
    if cli.trainer.is_global_zero:
        print(cli.summary(), flush=True)
    return 0


class CommandParser(LightningArgumentParser):
    """Raises what is wrong with the arguments, and explains the default classes' arguments in `--help`."""

    explains_classes = False

    @override
    def error(self, message: str, ex: Exception | None = None) -> Any:
        text = tidy_message(message)
        if text.startswith("--config: File does not exist"):
            text += f"; there are {', '.join(map(str, recipe_files()))}"
        unknown = re.match(r"unrecognized arguments: (.*)", text, flags=re.DOTALL)
        raise CommandError(self._unknown_arguments(unknown[1].split()) if unknown else text) from ex

    def _unknown_arguments(self, arguments: list[str]) -> str:
        known = [f"--{key}" for key in self.get_defaults(skip_validation=True).keys(branches=True)]
        described = []
        for argument in arguments:
            close = difflib.get_close_matches(argument.split("=")[0], known, n=1, cutoff=0.7)
            described.append(f"{argument} (did you mean {close[0]}?)" if close else argument)
        return f"unknown argument: {', '.join(described)}"

    @override
    def format_help(self, *args: Any, **kwargs: Any) -> str:
        text: str = super().format_help(*args, **kwargs)
        return text + _explain_classes() if self.explains_classes else text


_SUB_CONFIG = re.compile(r"^  --\S+ CONFIG +Path to a configuration file\.\n", flags=re.MULTILINE)


def _explain_classes() -> str:
    """Help on the arguments of the strategy, the model and the data modules."""
    explained = [*DEFAULT_CLASSES.items(), ("data", IndexedDataModule)]
    parts = []
    for key, cls in explained:
        parser = ArgumentParser(usage="", add_help=False)
        # The vocabulary comes from the data.
        parser.add_class_arguments(cls, key, skip={"vocab_size"} if key == "model" else None)
        body = _SUB_CONFIG.sub("", parser.format_help()).split(":\n", 1)[-1]
        default = " (the default)" if DEFAULT_CLASSES[key] is cls else f", with --{key}={_class_path(cls)}"
        parts.append(f"\narguments of {cls.__name__}{default}:\n{body}")
    return "".join(parts)


def _class_path(cls: type) -> str:
    return f"{cls.__module__.rsplit('.', 1)[0]}.{cls.__name__}"


class SaveConfig(Callback):
    """Writes the resolved configuration beside what the run logs, on rank 0.

    Args:
        parser: Of the sub-command.
        config: What it parsed.

    Attributes:
        log_dir: Where the run logs; known once it has started.
    """

    def __init__(self, parser: LightningArgumentParser, config: Namespace, **_: Any) -> None:
        self.parser, self.config = parser, config
        self.log_dir: Path | None = None

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if self.log_dir is not None:
            return
        self.log_dir = Path(trainer.log_dir or trainer.default_root_dir)  # collective: every rank asks
        if trainer.is_global_zero:
            self.log_dir.mkdir(parents=True, exist_ok=True)
            text = self.parser.dump(self.config, skip_none=False)
            self._free_path().write_text(text)

    def _free_path(self) -> Path:
        """config.yaml, or config_1.yaml and so on where runs share a folder."""
        assert self.log_dir is not None
        path, count = self.log_dir / "config.yaml", 0
        while path.exists():
            count += 1
            path = self.log_dir / f"config_{count}.yaml"
        return path


class EndOnSigterm(Callback):
    """Lets SIGTERM end the job at once, except where SLURM sends it before it requeues the job."""

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._install(trainer)

    @override
    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._install(trainer)

    @override
    def on_test_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._install(trainer)

    @override
    def on_predict_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._install(trainer)

    @staticmethod
    def _install(trainer: L.Trainer) -> None:
        environment = getattr(trainer.strategy, "cluster_environment", None)
        if not getattr(environment, "auto_requeue", False):
            outcome.end_on_sigterm()


class MegatronCLI(LightningCLI):
    """One sub-command, parsed and run.

    Args:
        command: `fit`, `validate`, `test` or `predict`.
        arguments: What follows it on the command line.
        run: Whether to run it; False: parse and make the objects only.
        callbacks: For the Trainer, beside those of the configuration.
        save_config: Whether the run writes its configuration.
    """

    def __init__(
        self,
        command: str,
        arguments: Sequence[str],
        run: bool = True,
        callbacks: Sequence[Callback] = (),
        save_config: bool = True,
    ) -> None:
        self.command = command
        self._arguments = list(arguments)
        self._runs = run
        FailureWatch.announce = staticmethod(outcome.announce)
        self._predictions: list[Any] = []
        super().__init__(
            subclass_mode_model=True,
            subclass_mode_data=True,
            auto_configure_optimizers=False,
            parser_class=CommandParser,
            parser_kwargs={"prog": "lt-parallel", "allow_abbrev": False},
            save_config_callback=SaveConfig if save_config else None,  # type: ignore[arg-type]
            trainer_defaults={"callbacks": [EndOnSigterm(), ExperimentRecord(), *callbacks]},
            args=[command, *_with_help_classes(arguments)],
        )

    @override
    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]
        return {self.command: LightningCLI.subcommands()[self.command]}

    @override
    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        own: Any = self._subcommand_parsers[self.command]
        own.explains_classes = True
        try:
            self.config = parser.parse_args(args)
        except CommandError as error:
            if _configs(self._arguments) or "are required" not in str(error):
                raise
            example = f"lt-parallel {self.command} --config {_example_recipe()}"
            raise CommandError(f"--config is missing ({error}); start from a recipe: {example}") from error

    @override
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.link_arguments("data.vocab_size", "model.init_args.vocab_size", apply_on="instantiate")
        # Not where a class is named: jsonargparse would hand the default class's arguments on to it.
        parser.set_defaults(
            {
                key: {"class_path": _class_path(cls)}
                for key, cls in DEFAULT_CLASSES.items()
                if not _names_class(self._arguments, key)
            }
        )

    @override
    def instantiate_classes(self) -> None:
        try:
            super().instantiate_classes()
        except ValueError as error:
            raise ValueError(tidy_message(str(error))) from error

    @override
    def after_instantiate_classes(self) -> None:
        check_lengths(self.model, self.datamodule)

    @override
    def _run_subcommand(self, subcommand: str) -> None:
        if self._runs:
            with interrupts_of(self):
                super()._run_subcommand(subcommand)

    def predict(self, **kwargs: Any) -> None:
        """Runs the prediction and prints what it says, in the order of the prompts."""
        own = self.trainer.predict(**kwargs) or []
        self._predictions = gather_predictions(self.trainer, own)
        decode = getattr(getattr(self.datamodule, "tokenizer", None), "decode", None)
        if not self.trainer.is_global_zero or decode is None:
            return
        prompts = getattr(self.datamodule, "predict_prompts", None) or [""] * len(self._predictions)
        for prompt, tokens in zip(prompts, self._predictions, strict=False):
            print(f"--- {prompt!r} continues:\n{decode(tokens.reshape(-1).tolist())}")

    def summary(self) -> str:
        """The line that a run ends with."""
        trainer: Any = self.trainer
        facts = []
        if self.command == "fit":
            facts.append(f"{trainer.global_step} steps")
        if self.command == "predict":
            facts.append(f"{len(self._predictions)} continuations")
        metrics = {name: value for name, value in trainer.callback_metrics.items() if name.endswith("_loss")}
        facts += [f"{name} {float(value):.4g}" for name, value in metrics.items()]
        if self.command == "fit" and trainer.interrupted:
            facts.append(_checkpoint_left(trainer))
        saved = next((c.log_dir for c in trainer.callbacks if isinstance(c, SaveConfig)), None)
        where = f" -> {_short_path(saved)}" if saved is not None else ""
        verb = "Finished" if trainer.state.finished else f"Ended ({trainer.state.status.value})"
        return f"{'Interrupted' if trainer.interrupted else verb} {self.command}: {', '.join(facts)}{where}"


@contextlib.contextmanager
def interrupts_of(cli: MegatronCLI) -> Iterator[None]:
    """Within, an interrupted run ends in a KeyboardInterrupt that says how far it came; Lightning ends the process.

    Args:
        cli: Whose Trainer runs.

    Raises:
        KeyboardInterrupt: The run was interrupted.
    """
    try:
        yield
    except SystemExit as end:
        if not cli.trainer.interrupted:
            raise
        raise KeyboardInterrupt(cli.summary()) from end


def _checkpoint_left(trainer: L.Trainer) -> str:
    """The newest checkpoint that a run has to go on from, in words."""
    callbacks = [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]
    paths = {Path(path) for each in callbacks for path in (each.last_model_path, each.best_model_path) if path}
    written = sorted((path for path in paths if path.exists()), key=lambda path: path.stat().st_mtime)
    return f"last checkpoint {_short_path(written[-1])}" if written else "no checkpoint written"


def check_lengths(model: Any, data: Any) -> None:
    """Model and data each have a sequence length of their own; it must be the same one.

    Raises:
        ValueError: They differ.
    """
    of_model, of_data = getattr(model, "seq_length", None), getattr(data, "seq_length", None)
    if of_model is not None and of_data is not None and of_model != of_data:
        raise ValueError(
            f"model.seq_length={of_model} and data.seq_length={of_data} must be equal; give both, e.g. "
            f"--model.seq_length={of_data} --data.seq_length={of_data}"
        )


def gather_predictions(trainer: L.Trainer, own: Sequence[Any]) -> list[Any]:
    """All data-parallel ranks' predictions in the data's order. Collective.

    Args:
        trainer: Has predicted.
        own: What `trainer.predict` returned on this rank.
    """
    strategy = trainer.strategy
    if not isinstance(strategy, MegatronParallelStrategy) or strategy.sizes.data_parallel_size == 1:
        return list(own)
    found: list[Any] = [None] * strategy.sizes.world_size
    torch.distributed.all_gather_object(found, (strategy.data_parallel_rank, list(own)))
    shares = dict(found)
    rounds = max(len(share) for share in shares.values())
    return [shares[r][i] for i in range(rounds) for r in sorted(shares) if i < len(shares[r])]


def _names_class(arguments: Sequence[str], key: str) -> bool:
    """Whether the command line or one of its configuration files says what `key` is."""
    if any(argument == f"--{key}" or argument.startswith(f"--{key}=") for argument in arguments):
        return True
    return any(_has_key(Path(config), key.split(".")) for config in _configs(arguments))


def _configs(arguments: Sequence[str]) -> list[str]:
    """The configuration files that the command line names."""
    return [
        argument.partition("=")[2] or after
        for argument, after in zip_longest(arguments, arguments[1:], fillvalue="")
        if argument.partition("=")[0] in ("--config", "-c")
    ]


def _example_recipe() -> Path:
    return next(file for file in recipe_files() if file.stem == "gpt_tiny")


def _has_key(file: Path, keys: list[str]) -> bool:
    """Whether a YAML file has a nested key; a file that can't be read has none, and is reported by the parser."""
    try:
        content = yaml.safe_load(file.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return False
    for key in keys:
        content = content.get(key) if isinstance(content, dict) else None
    return content is not None


def _with_help_classes(arguments: Sequence[str]) -> list[str]:
    """`--model.help` explains the class that is the default, not the abstract one."""
    plain = {f"--{key}.help": f"--{key}.help={_class_path(cls)}" for key, cls in DEFAULT_CLASSES.items()}
    followed = [*arguments[1:], "--"]
    return [
        plain[argument] if argument in plain and after.startswith("-") else argument
        for argument, after in zip(arguments, followed, strict=False)
    ]


def _short_path(path: Path) -> str:
    with contextlib.suppress(ValueError):
        return str(path.resolve().relative_to(Path.cwd()))
    return str(path)


# ------------------------------------------------------------------ messages

#: What a union's other types say about a value that was not meant for them.
_NO_MATCH = re.compile(r"Expected a (<class '[\w.]+'>|path but)")


def tidy_message(message: str) -> str:
    """What jsonargparse reports on a union of types, reduced to what the user can act on.

    Args:
        message: As jsonargparse gives it, e.g. "Parser key "model": Does not validate against any of the Union ...".

    Returns:
        The reason within it, prefixed with the option; the message itself if it has another form.
    """
    message = _dedent(message)
    if key := re.match(r'Parser key "([\w.]+)":\s*', message):
        reason = _with_suggestion(tidy_message(message[key.end() :]), key[1])
        return f"--{key[1]}.{reason[2:]}" if re.match(r"--\w+: ", reason) else f"--{key[1]}: {reason}"
    if cls := re.match(r"Problem with given class_path '([\w.]+)':\s*", message):
        return f"{cls[1].rsplit('.', 1)[-1]}: {tidy_message(message[cls.end() :])}"
    if message.startswith("Does not validate against any of the Union subtypes"):
        errors = re.search(r"\nErrors:\n(.*?)\nGiven value type:", message, flags=re.DOTALL)
        return tidy_message(textwrap.dedent(errors[1])) if errors else message
    if not message.startswith("- "):
        return message
    reasons = re.split(r"^- ", message, flags=re.MULTILINE)[1:]
    telling = [reason for reason in reasons if not _NO_MATCH.match(reason)]
    return "; ".join(map(tidy_message, telling or reasons))


def _dedent(text: str) -> str:
    """Text whose first line has lost its indentation already, and the others not."""
    first, _, rest = text.strip().partition("\n")
    return f"{first}\n{textwrap.dedent(rest)}".strip()


def _with_suggestion(reason: str, key: str) -> str:
    """Adds the argument that was probably meant."""
    unknown = re.search(r"[Oo]ption '(\w+)' is not accepted", reason)
    cls = DEFAULT_CLASSES.get(key)
    if unknown is None or cls is None:
        return reason
    names = list(inspect.signature(cls).parameters)
    close = difflib.get_close_matches(unknown[1], names, n=1)
    return f"{reason}; did you mean --{key}.{close[0]}?" if close else reason

"""Arguments as people type them, what is said about wrong ones, and what `--help` explains."""

import inspect
import re
import subprocess
import sys
from pathlib import Path

import lightning.pytorch as L
import pytest
from lightning.pytorch.trainer.states import TrainerStatus

from lt_parallel import outcome
from lt_parallel.lightning_cli import DEFAULT_CLASSES, MegatronCLI, check_lengths, interrupts_of, tidy_message
from lt_parallel.outcome import CommandError, place_of, run_command, shorten
from lt_parallel.recipe_files import recipe_path
from lt_parallel.strategies import MegatronParallelStrategy

TINY = ("--config", str(recipe_path("gpt_tiny")), "--trainer.accelerator=cpu")


class PlainModule(L.LightningModule):
    """A module without a vocabulary, as a user may write it."""

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.width = width


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")


def _parse(*arguments: str, command: str = "fit") -> MegatronCLI:
    return MegatronCLI(command, arguments, run=False)


def test_short_overrides_reach_strategy_trainer_data_and_model() -> None:
    cli = _parse(
        *TINY,
        "--trainer.strategy.global_batch_size=24",
        "--trainer.strategy.tensor_model_parallel_size=2",
        "--trainer.devices=2",
        "--data.paths=[a.txt]",
        "--model.num_layers=2",
        "--trainer.logger.name=other",
    )
    strategy = cli.trainer.strategy
    assert isinstance(strategy, MegatronParallelStrategy)
    assert cli.trainer.num_devices == 2
    strategy.connect(cli.model)
    assert strategy.resolve_settings(cli.trainer).sizes.tensor_model_parallel_size == 2
    assert cli.config.fit.trainer.strategy.init_args.global_batch_size == 24
    assert cli.datamodule.paths == ["a.txt"]
    assert cli.model.hparams["num_layers"] == 2
    assert cli.model.hparams["vocab_size"] == cli.datamodule.vocab_size == 257
    assert cli.trainer.logger.name == "other"


def test_without_a_recipe_the_classes_are_ours() -> None:
    cli = _parse("--data.paths=[a.txt]", "--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.logger=false")
    assert [type(part) for part in (cli.trainer.strategy, cli.model, cli.datamodule)] == [*DEFAULT_CLASSES.values()]


def test_any_module_can_be_named() -> None:
    cli = _parse(*TINY, f"--model={__name__}.PlainModule", "--model.width=5")
    assert isinstance(cli.model, PlainModule)
    assert cli.model.width == 5


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--trainer.devces=2", "unknown argument: --trainer.devces=2 (did you mean --trainer.devices?)"),
        (
            "--trainer.strategy.tensor_modl_parallel_size=2",
            "--trainer.strategy: Option 'tensor_modl_parallel_size' is not accepted; "
            "did you mean --trainer.strategy.tensor_model_parallel_size?",
        ),
        ("--model.num_layers=abc", "--model.num_layers: Expected a <class 'int'>. Got value: abc"),
        ("--data.path=[a]", "--data: Option 'path' is not accepted; did you mean --data.paths?"),
        ("--trainer.logger=CSVLoger", "--trainer.logger: Expected a dot import path string: CSVLoger"),
    ],
)
def test_wrong_argument_is_named_in_one_line(argument: str, message: str) -> None:
    with pytest.raises(CommandError) as error:
        _parse(*TINY, argument)
    assert str(error.value) == message


def test_without_arguments_a_recipe_is_asked_for() -> None:
    for arguments in ([], ["--trainer.max_steps=2"]):
        with pytest.raises(CommandError) as error:
            _parse(*arguments)
        assert str(error.value).startswith("--config is missing (--data: the following arguments are required: paths)")
        assert re.search(r"lt-parallel fit --config \S*recipes/gpt_tiny.yaml$", str(error.value))


def test_a_wrong_recipe_is_told_which_there_are() -> None:
    with pytest.raises(
        CommandError, match=r"File does not exist: \S*gpt_tiny'; there are \S*deepseek_v3.yaml, .*tiny.yaml"
    ):
        _parse("--config", "gpt_tiny")


@pytest.mark.parametrize("arguments", [("--trainer.max_step=5",), ("--conf", "x.yaml"), ("--trainer.max_st", "5")])
def test_abbreviated_arguments_are_refused(arguments: tuple[str, ...]) -> None:
    with pytest.raises(CommandError, match=f"unknown argument: {arguments[0]}"):
        _parse(*TINY, *arguments)


def test_error_of_a_constructor_is_told_without_its_wrapping() -> None:
    with pytest.raises(ValueError) as error:
        _parse(*TINY, "--trainer.strategy.num_microbatches=2")
    assert str(error.value) == (
        "num_microbatches=2 and global_batch_size=16 are both given, but one follows from the other; give one of them"
    )


def test_messages_of_another_form_stay_as_they_are() -> None:
    assert tidy_message("  a plain\n  message\n") == "a plain\nmessage"
    assert tidy_message("Does not validate against any of the Union subtypes") == (
        "Does not validate against any of the Union subtypes"
    )


def test_lengths_of_model_and_data_must_agree() -> None:
    with pytest.raises(ValueError, match=r"model.seq_length=256 and data.seq_length=128 .* --model.seq_length=128"):
        _parse(*TINY, "--data.seq_length=128")
    check_lengths(PlainModule(), object())


def test_help_explains_every_strategy_argument(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        _parse("--help")
    assert end.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    documentation = inspect.getdoc(MegatronParallelStrategy)
    assert documentation is not None
    for name in inspect.signature(MegatronParallelStrategy).parameters:
        described = re.search(rf"^    {name}: (.*)$", documentation, flags=re.MULTILINE)
        assert described is not None, f"{name} has no description"
        option = text.find(f"--trainer.strategy.{name} ")
        assert option >= 0, f"--help lacks {name}"
        beginning = " ".join(described[1].split()[:6])
        assert beginning in text[option : option + 600], f"--help doesn't explain {name}"
    for option in ("--model.hidden_size", "--data.paths", "--data.data_path"):
        assert option in text


def test_help_of_a_class_is_the_default_one_s(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        _parse("--trainer.strategy.help")
    assert "--trainer.strategy.tensor_model_parallel_size" in capsys.readouterr().out


def test_top_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; sys.argv = ['lt-parallel', '--help']\n"
        "from lt_parallel.cli import main\n"
        "assert main() == 0\n"
        "heavy = {'torch', 'lightning', 'jsonargparse', 'megatron', 'numpy', 'rich'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    for command in ("fit", "validate", "test", "predict", "data"):
        assert re.search(rf"^  {command} ", done.stdout, flags=re.MULTILINE)


def test_long_messages_are_cut() -> None:
    short = shorten("\n".join(f"line {i}" for i in range(40)) + "\n" + "x" * 5000)
    assert len(short.splitlines()) == 13
    assert short.endswith("... (29 more lines)")


def test_place_is_the_users_own_line() -> None:
    try:
        subprocess.run(["/nonexistent/command"], check=False)
    except OSError as error:
        assert re.search(rf"\({re.escape(__file__)}:\d+ in test_place_is_the_users_own_line\)", place_of(error))


@pytest.mark.parametrize("saved", [False, True])
def test_an_interrupted_run_says_how_far_it_came(saved: bool, tmp_path: Path) -> None:
    cli = _parse(*TINY, "--trainer.logger=false")
    checkpoint = tmp_path / "runs" / "step=3.ckpt"
    cli.trainer.checkpoint_callback.best_model_path = str(checkpoint)
    if saved:
        checkpoint.mkdir(parents=True)
    left = "last checkpoint runs/step=3.ckpt" if saved else "no checkpoint written"
    with pytest.raises(KeyboardInterrupt) as end, interrupts_of(cli):
        cli.trainer.state.status = TrainerStatus.INTERRUPTED
        sys.exit(1)  # as Lightning does
    assert str(end.value) == f"Interrupted fit: 0 steps, {left}"


def test_another_exit_is_left_alone() -> None:
    with pytest.raises(SystemExit, match="3"), interrupts_of(_parse(*TINY, "--trainer.logger=false")):
        sys.exit(3)


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (KeyboardInterrupt(), 130, "Interrupted"),
        (KeyboardInterrupt("Interrupted fit: 3 steps"), 130, "Interrupted fit: 3 steps"),
        (CommandError("no such thing"), 2, "error: no such thing"),
    ],
)
def test_a_command_ends_with_one_line_and_a_status(
    error: BaseException, status: int, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> int:
        raise error

    monkeypatch.setattr(outcome, "_watch", lambda: None)
    monkeypatch.setattr(outcome, "_end_children", lambda: None)
    assert run_command(fail) == status
    assert capsys.readouterr().err.strip() == line

"""What the documentation says, where that can be checked: code, commands, links, logged names, the order of imports."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest

from lt_parallel import cli, quiet
from lt_parallel.callbacks import memory, throughput
from lt_parallel.lightning_cli import MegatronCLI
from lt_parallel.strategies import MegatronParallelStrategy

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
DESIGN = (ROOT / "docs" / "design.md").read_text()
MEASURING = (ROOT / "docs" / "measuring.md").read_text()


def blocks(text: str, language: str = "") -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def test_the_first_example_is_complete_and_fits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Run up to `fit`, which here only checks what the launcher checks."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    fitted: list[int] = []

    def check(trainer: L.Trainer, model: Any, data: Any) -> None:
        strategy = trainer.strategy
        assert isinstance(strategy, MegatronParallelStrategy)
        strategy.connect(model)
        fitted.append(strategy.resolve_settings(trainer).sizes.world_size)
        data.check_source("fit")
        assert model.seq_length == data.seq_length
        assert (trainer.max_epochs, trainer.max_steps) == (1, 100), "without max_epochs the bar shows Epoch 0/-2"

    monkeypatch.setattr(L.Trainer, "fit", check)
    example = blocks(README, "python")[0]
    exec(compile(example, "first.py", "exec"), {})
    assert fitted == [4]
    assert max(map(len, example.splitlines())) <= 120


def test_the_example_of_experts_fits_the_sentence_after_it() -> None:
    names: dict[str, Any] = {}
    exec(compile(blocks(README, "python")[1], "experts.py", "exec"), names)
    strategy = MegatronParallelStrategy(expert_model_parallel_size=2, num_microbatches=1)
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy=strategy, callbacks=names["callbacks"], logger=False)
    strategy.connect(names["model"])
    assert strategy.resolve_settings(trainer).get("model", "moe_token_dispatcher_type") == "alltoall"


def test_the_example_of_measuring_runs() -> None:
    names: dict[str, Any] = {}
    exec(compile(blocks(README, "python")[2], "measuring.py", "exec"), names)
    assert len(names["callbacks"]) == 3
    assert set(names["model"].validation_metrics) == {"perplexity", "token_accuracy"}


def test_the_first_command_is_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    (shell,) = [block for block in blocks(README, "sh") if "lt-parallel" in block]
    program, command, *arguments = shlex.split(shell.replace("\\\n", " "))
    assert program == ".venv/bin/lt-parallel"
    parsed = MegatronCLI(command, [*arguments, "--trainer.accelerator=cpu", "--trainer.logger=false"], run=False)
    assert parsed.trainer.num_devices == 4


def test_every_command_is_in_the_readme_and_no_other() -> None:
    table = README.partition("| command |")[2].partition("\n\n")[0]
    first_cells = re.findall(r"^\| (.*?) \|", table, flags=re.MULTILINE)
    told = {name.split()[0] for cell in first_cells for name in re.findall(r"`([^`]+)`", cell)}
    assert told == set(cli.COMMANDS)


@pytest.mark.parametrize(
    "page", sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")]), ids=lambda page: page.name
)
def test_links_lead_to_files(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / target).exists(), target


@pytest.mark.parametrize(("module", "prefix"), [(throughput, "train/"), (memory, "memory/")])
def test_logged_names_are_those_of_the_monitors(module: Any, prefix: str) -> None:
    """Those that the classes list for `help()`, which other tests compare with what is logged."""
    cls = module.ThroughputMonitor if prefix == "train/" else module.MemoryMonitor
    listed = cls.__doc__.partition("Numbers that can't")[0].partition("The module's docstring")[0]
    names = set(re.findall(r"`(?:train/)?(\w+_(?:s|gib|per_sec)|mfu\w*|pipeline_\w+|speedup)`", listed))
    assert len(names) > 5
    assert names <= {name.rpartition("/")[2] for name in re.findall(r"`([\w/]+)`", MEASURING)}
    documented = {name.rpartition("/")[2] for name in re.findall(rf"`{prefix}([\w/]+)`", MEASURING)}
    assert documented <= set(re.findall(r"\w+", listed))


def test_imports_go_the_way_the_design_says() -> None:
    (order,) = [block for block in blocks(DESIGN) if "strategies" in block]
    level = {name: line for line, names in enumerate(order.splitlines()) for name in names.split(", ")}
    for file in sorted((ROOT / "lt_parallel").rglob("*.py")):
        own = file.relative_to(ROOT / "lt_parallel").with_suffix("").parts[0]
        if own == "__init__":
            continue
        assert own in level, f"docs/design.md doesn't say where {own} stands"
        for name in _imported(file):
            assert name == own or level[name] < level[own], f"{file.name} imports {name}"


def _imported(file: Path) -> set[str]:
    """Modules and folders of the package that a file imports, those for type annotations left out."""
    tree = ast.parse(file.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            node.body = []
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "lt_parallel":
            below = str(node.module).split(".")[1:]
            found |= {below[0]} if below else {alias.name for alias in node.names}
    return found - {"__version__"}


def test_the_muted_deprecation_is_told() -> None:
    assert any(noise.pattern.startswith("GPTModel") for noise in quiet.RUN_NOISE)
    assert "**GPTModel.** Megatron Core marks it deprecated" in DESIGN

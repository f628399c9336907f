"""What the demo does around its run; the run itself is in tests/commands/test_demo.py."""

from pathlib import Path

import pytest

from lt_parallel import demo
from lt_parallel.lightning_cli import MegatronCLI
from lt_parallel.recipe_files import recipe_path


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")


def test_earlier_results_are_moved_aside_and_those_before_them_go(capsys: pytest.CaptureFixture[str]) -> None:
    demo.keep_previous()
    assert capsys.readouterr().out == ""
    for content in ("first", "second"):
        demo.FOLDER.mkdir(parents=True)
        (demo.FOLDER / f"{content}.txt").write_text(content)
        demo.keep_previous()
        assert capsys.readouterr().out == "The results of the last demo are in runs/demo.previous/ now.\n"
        assert not demo.FOLDER.exists()
        assert [file.name for file in demo.PREVIOUS.iterdir()] == [f"{content}.txt"]


def test_its_arguments_fit_the_recipe_and_its_prompt_the_model() -> None:
    cli = MegatronCLI("fit", ["--config", str(recipe_path("gpt_tiny")), *demo.ARGUMENTS], run=False)
    assert cli.trainer.num_devices == 4
    prompt = cli.datamodule.tokenizer.encode(demo.PROMPT)
    assert len(prompt) + demo.NEW_TOKENS <= cli.model.max_position_embeddings

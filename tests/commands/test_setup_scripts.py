"""The scripts behind `make`: choosing a Python, and installing exactly once."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
TOOLS = ("sh", "cat", "cksum", "dirname", "rm", "awk", "make")  # what the scripts call besides Python


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """A folder with the basic tools and no Python."""
    folder = tmp_path / "tools"
    folder.mkdir()
    for name in TOOLS:
        (folder / name).symlink_to(shutil.which(name) or pytest.skip(f"needs {name}"))
    return folder


def _executable(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def _python(path: Path) -> Path:
    """The interpreter that runs this test, under another name."""
    return _executable(path, f'#!/bin/sh\nexec {sys.executable} "$@"\n')


def _broken_shim(path: Path) -> Path:
    return _executable(path, "#!/bin/sh\necho 'command not found' >&2\nexit 127\n")


def _old(path: Path) -> Path:
    """Answers as this interpreter would if it were Python 3.9."""
    code = "import sys; sys.version_info = (3, 9, 1, 'final', 0); exec(sys.argv.pop(1))"
    return _executable(path, f'#!/bin/sh\n[ "$1" = -I ] && shift\nshift\nexec {sys.executable} -c "{code}" "$@"\n')


def _find(path: list[Path], home: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {"PATH": os.pathsep.join(map(str, path)), "HOME": str(home), **environment}
    command = ["sh", str(REPOSITORY / "scripts" / "find_python.sh")]
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=60, check=False)


def test_shims_and_old_versions_are_passed_over(tmp_path: Path, tools: Path) -> None:
    _broken_shim(tmp_path / "shims" / "python3.12")
    _old(tmp_path / "old" / "python3")
    good = _python(tmp_path / "good" / "python3.12")
    result = _find([tmp_path / "shims", tmp_path / "old", tmp_path / "good", tools], tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"{good}\n"
    assert "Found Python 3.1" in result.stderr


def test_plain_python3_will_do(tmp_path: Path, tools: Path) -> None:
    good = _python(tmp_path / "good folder" / "python3")
    assert _find([tmp_path / "good folder", tools], tmp_path).stdout == f"{good}\n"


def test_pyenv_versions_are_used_without_their_shims(tmp_path: Path, tools: Path) -> None:
    good = _python(tmp_path / ".pyenv" / "versions" / "3.13.9" / "bin" / "python3.13")
    assert _find([tools], tmp_path).stdout == f"{good}\n"


def test_uv_is_the_last_resort(tmp_path: Path, tools: Path) -> None:
    good = _python(tmp_path / "uv-pythons" / "python3.12")
    marker = tmp_path / "installed"
    _executable(
        tools / "uv",
        f"""#!/bin/sh
if [ "$2" = install ]; then : >{marker}; elif [ -f {marker} ]; then echo {good}; else exit 2; fi
""",
    )
    result = _find([tools], tmp_path)
    assert result.stdout == f"{good}\n", result.stderr
    assert "asking uv" in result.stderr


def test_nothing_found_says_what_was_tried_and_what_to_do(tmp_path: Path, tools: Path) -> None:
    _broken_shim(tmp_path / "shims" / "python3.12")
    _old(tmp_path / "old" / "python3")
    result = _find([tmp_path / "shims", tmp_path / "old", tools], tmp_path)
    assert result.returncode == 1
    assert result.stdout == ""
    assert f"{tmp_path}/shims/python3.12 does not start" in result.stderr
    assert f"{tmp_path}/old/python3 is Python 3.9.1" in result.stderr
    assert "PYTHON=/path/to/python3.12" in result.stderr


def test_named_python_is_the_only_one_considered(tmp_path: Path, tools: Path) -> None:
    good = _python(tmp_path / "good" / "python3.12")
    old = _old(tmp_path / "old" / "python3")
    assert _find([tools], tmp_path, PYTHON=str(good)).stdout == f"{good}\n"
    result = _find([tmp_path / "good", tools], tmp_path, PYTHON=str(old))
    assert result.returncode == 1
    assert f"PYTHON={old} cannot be used" in result.stderr


BACKEND = """
import zipfile

def get_requires_for_build_editable(config_settings=None):
    return []

def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    name = "tiny-0.1-py3-none-any.whl"
    with zipfile.ZipFile(f"{wheel_directory}/{name}", "w") as wheel:
        wheel.writestr("tiny.py", "")
        wheel.writestr("tiny-0.1.dist-info/METADATA", "Metadata-Version: 2.1\\nName: tiny\\nVersion: 0.1\\n"
                       "Provides-Extra: dev\\n" + open("requirement.txt").read())
        wheel.writestr("tiny-0.1.dist-info/WHEEL",
                       "Wheel-Version: 1.0\\nGenerator: t\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr("tiny-0.1.dist-info/RECORD", "")
    return name
"""
PROJECT = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
[project]
name = "tiny"
version = "0.1"
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A project with our Makefile and scripts that pip can install with no network."""
    folder = tmp_path / "checkout"
    shutil.copytree(REPOSITORY / "scripts", folder / "scripts")
    shutil.copy(REPOSITORY / "Makefile", folder)
    (folder / "pyproject.toml").write_text(PROJECT)
    (folder / "backend.py").write_text(BACKEND)
    (folder / "requirement.txt").write_text("")
    return folder


def _make_install(checkout: Path) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "MAKE", "MFLAGS"))}
    variables = {**inherited, "PYTHON": sys.executable, "PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull}
    command = ["make", "--no-print-directory", "install"]
    return subprocess.run(
        command, cwd=checkout, env=variables, capture_output=True, text=True, timeout=120, check=False
    )


def _break_environment(folder: Path) -> None:
    """An environment whose Python has been removed from the machine."""
    (folder / "bin").mkdir(parents=True)
    (folder / "pyvenv.cfg").write_text("home = /nowhere\n")
    (folder / "bin" / "python").symlink_to("/nowhere/python3")


def test_installation_repairs_resumes_and_then_does_nothing(checkout: Path) -> None:
    _break_environment(checkout / ".venv")
    (checkout / "requirement.txt").write_text("Requires-Dist: not-to-be-had\n")
    incomplete = _make_install(checkout)
    assert incomplete.returncode != 0
    assert "making it anew" in incomplete.stderr
    assert "not-to-be-had" in incomplete.stdout + incomplete.stderr

    (checkout / "requirement.txt").write_text("")
    complete = _make_install(checkout)
    assert complete.returncode == 0, complete.stderr
    assert "Making .venv" not in complete.stderr, "the environment was already there"
    installed = [str(checkout / ".venv" / "bin" / "python"), "-c", "import tiny"]
    assert subprocess.run(installed, timeout=30, check=False).returncode == 0

    again = _make_install(checkout)
    assert (again.returncode, again.stdout, again.stderr) == (0, "", "")

    with (checkout / "pyproject.toml").open("a") as file:
        file.write("# changed\n")
    assert "Installing" in _make_install(checkout).stderr


def test_folder_that_is_no_environment_is_left_alone(checkout: Path) -> None:
    (checkout / ".venv").mkdir()
    (checkout / ".venv" / "mine.txt").write_text("keep")
    result = _make_install(checkout)
    assert result.returncode != 0
    assert "not a virtual environment" in result.stderr
    assert (checkout / ".venv" / "mine.txt").read_text() == "keep"


def test_make_help_names_the_two_commands() -> None:
    command = ["make", "--no-print-directory", "-C", str(REPOSITORY), "help"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    assert "make demo " in result.stdout
    assert "make test " in result.stdout

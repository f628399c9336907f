"""Where the recipes are: beside the package in a checkout, inside it when installed."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).parent
_FOLDERS = (_PACKAGE.parent / "recipes", _PACKAGE / "recipes")


def recipe_path(name: str) -> Path:
    """The YAML file of a recipe.

    Args:
        name: Without suffix, e.g. "gpt_tiny".

    Raises:
        ValueError: There is none of this name.
    """
    files = _by_name()
    if name not in files:
        raise ValueError(f"there is no recipe {name!r}; there are {', '.join(files) or 'none'}")
    return files[name]


def recipe_files() -> list[Path]:
    """All recipes, by name; those in the working directory as paths from there."""
    here = Path.cwd()
    return [file.relative_to(here) if file.is_relative_to(here) else file for file in _by_name().values()]


def _by_name() -> dict[str, Path]:
    found = {file.stem: file for folder in reversed(_FOLDERS) for file in folder.glob("*.yaml")}
    return dict(sorted(found.items()))

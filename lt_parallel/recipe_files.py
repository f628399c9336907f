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
    files = {file.stem: file for folder in reversed(_FOLDERS) for file in sorted(folder.glob("*.yaml"))}
    if name not in files:
        raise ValueError(f"there is no recipe {name!r}; there are {', '.join(sorted(files)) or 'none'}")
    return files[name]

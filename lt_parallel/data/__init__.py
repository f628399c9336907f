"""Data modules: plain text, and Megatron's ``.bin/.idx`` pairs.

The names below are loaded on first use, so that importing the package costs nothing: Lightning is imported with a
data module, Megatron Core only when an indexed data set is opened.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lt_parallel.data.errors import DataError
    from lt_parallel.data.indexed import IndexedDataModule
    from lt_parallel.data.text import TextDataModule
    from lt_parallel.data.tokenizer import build_tokenizer

__all__ = ["DataError", "IndexedDataModule", "TextDataModule", "build_tokenizer"]

_HOMES = {
    "DataError": "errors",
    "IndexedDataModule": "indexed",
    "TextDataModule": "text",
    "build_tokenizer": "tokenizer",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)

"""Loads modules through a syntax transform: how, without what; `cpu_runtime.py` has the tables.

Python's import system is made for this: a loader that returns other code for the same source leaves the installed files
alone and reaches everything, `from`-imports and `except` clauses included, which patching objects afterwards can't.
"""

import ast
import contextlib
import functools
import hashlib
import importlib.machinery
import importlib.util
import marshal
import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, ClassVar, Final, override

Rules = Mapping[type[ast.AST], tuple[Callable[[Any], ast.AST | None], ...]]
"""For each kind of node the rules tried on it, in order; a rule returns the replacement, or None to leave the node."""

TABLE: Final = "__lt_parallel_substitutes__"
"""The global of a transformed module that holds its substitutes by dotted name."""

_PACKAGE: Final = "torch"
"""The package whose names are substituted."""


class Transformer(ast.NodeTransformer):
    """Replaces dotted names by look-ups in `TABLE`, and applies rules, in one module.

    Args:
        names: The dotted names to replace.
        rules: The rules; they see a node after its children.

    Attributes:
        matches: How often each dotted name and each rule (by its function's name) was applied.
    """

    def __init__(self, names: Iterable[str], rules: Rules) -> None:
        self.matches: Counter[str] = Counter()
        self._names = tuple(names)
        self._rules = rules
        self._imported: dict[str, str] = {}

    def transform(self, tree: ast.Module) -> ast.Module:
        """Changes `tree` in place, and returns it."""
        self._imported = dict(_imported_names(tree))
        self.visit(tree)
        return ast.fix_missing_locations(tree)

    @override
    def visit(self, node: ast.AST) -> Any:
        replacement: ast.AST | None = self._substitute(node)
        if replacement is None:
            node = self.generic_visit(node)
            replacement = self._apply_rules(node)
        return node if replacement is None else ast.copy_location(replacement, node)

    def _apply_rules(self, node: ast.AST) -> ast.AST | None:
        for rule in self._rules.get(type(node), ()):
            replacement = rule(node)
            if replacement is not None:
                self.matches[rule.__name__] += 1
                return replacement
        return None

    def _substitute(self, node: ast.AST) -> ast.expr | None:
        """`torch.cuda` -> `TABLE["torch.cuda"]`, and likewise a name that was imported from inside it."""
        dotted = self._dotted(node)
        found = next((name for name in self._names if f"{dotted}.".startswith(f"{name}.")), None)
        if found is None:
            return None
        self.matches[found] += 1
        value: ast.expr = ast.Subscript(ast.Name(TABLE, ast.Load()), ast.Constant(found), ast.Load())
        for attribute in dotted.removeprefix(found).split(".")[1:]:
            value = ast.Attribute(value, attribute, ast.Load())
        return value

    def _dotted(self, node: ast.AST) -> str:
        """`dist.all_gather` -> "torch.distributed.all_gather"; "" for what isn't such a chain."""
        match node:
            case ast.Name(id=name, ctx=ast.Load()):
                return self._imported.get(name, "")
            case ast.Attribute(value=value, attr=attribute) if parent := self._dotted(value):
                return f"{parent}.{attribute}"
        return ""


def _imported_names(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Pairs (name, dotted name) of what the module imports from `_PACKAGE`, in functions too."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=aliases):
                for alias in aliases:
                    if alias.name.split(".")[0] == _PACKAGE:
                        yield (alias.asname, alias.name) if alias.asname else (_PACKAGE, _PACKAGE)
            case ast.ImportFrom(module=str(module), names=aliases, level=0):
                if module.split(".")[0] == _PACKAGE:
                    yield from ((alias.asname or alias.name, f"{module}.{alias.name}") for alias in aliases)


class TransformingLoader(importlib.machinery.SourceFileLoader):
    """Loads one module, transformed.

    The transform takes seconds over all of Megatron Core that a training run imports, so its result is kept in the
    user's cache folder, one file a module, and used while the source, the tables, this file and the interpreter are
    the same. Python's own byte code of the module is neither read nor written.
    """

    rules: ClassVar[Rules]
    tables_file: ClassVar[str]

    def substitutes(self, module_name: str) -> Mapping[str, object]:
        """What replaces which dotted name in a module; a subclass has the table."""
        raise NotImplementedError

    @override
    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        source = self.get_data(path)
        cache_path = _cache_path(fullname, path)
        key = _cache_key(self.tables_file, path, source)
        return self._cached_code(cache_path, key) or self._new_code(fullname, path, source, cache_path, key)

    @override
    def exec_module(self, module: ModuleType) -> None:
        module.__dict__[TABLE] = self.substitutes(module.__name__)
        super().exec_module(module)

    def _cached_code(self, cache_path: str, key: bytes) -> CodeType | None:
        with contextlib.suppress(OSError):
            cached = self.get_data(cache_path)
            if cached.startswith(key):
                code: CodeType = marshal.loads(cached[len(key) :])
                return code
        return None

    def _new_code(self, fullname: str, path: str, source: bytes, cache_path: str, key: bytes) -> CodeType:
        with warnings.catch_warnings():
            # Python shows these only when it compiles a file for the first time; they aren't the user's to mend.
            warnings.simplefilter("ignore", SyntaxWarning)
            tree = Transformer(self.substitutes(fullname), self.rules).transform(ast.parse(source, path))
            code: CodeType = compile(tree, path, "exec", dont_inherit=True)
        if os.path.isabs(cache_path):  # it isn't where the user has no home folder
            # Renames a finished file into place, so processes may race; does nothing where it can't write.
            self.set_data(cache_path, key + marshal.dumps(code))
        return code


def _cache_path(module_name: str, path: str) -> str:
    root = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    installation = hashlib.sha256(path.encode()).hexdigest()[:8]
    return os.path.join(root, "lt_parallel", str(sys.implementation.cache_tag), f"{module_name}-{installation}.code")


def _cache_key(tables_file: str, path: str, source: bytes) -> bytes:
    interpreter = importlib.util.MAGIC_NUMBER + bytes([sys.flags.optimize])
    parts = (interpreter, path.encode(), _content(tables_file), _content(__file__), source)
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).digest()


@functools.cache
def _content(path: str) -> bytes:
    return Path(path).read_bytes()

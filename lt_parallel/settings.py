"""One place where strategy, callbacks, precision and model meet before anything is built.

Each of them *contributes* Megatron Core config fields to one `Settings` object; none of them looks at another. A field
has one owner: two contributions that disagree raise and name both. When everything is in, the rules of
`option_rules.py` are applied, and only then are process groups made and configs built. So a wrong combination is one
error, early, with its values, whoever brought them.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
from collections.abc import Iterator, Mapping
from types import NoneType, UnionType
from typing import Any, Literal, Protocol, Union, get_args, get_origin, get_type_hints, runtime_checkable

from lt_parallel.topology import ParallelSizes, padded_vocab_size

Target = Literal["model", "ddp", "optimizer", "layers"]
_SIMPLE = (bool, int, float, str, NoneType)
TARGETS: tuple[Target, ...] = ("model", "ddp", "optimizer", "layers")


@runtime_checkable
class Contributor(Protocol):
    """What the strategy looks for in `trainer.callbacks`, the precision plugin and the module."""

    def contribute(self, settings: Settings) -> None:
        """Adds its Megatron Core config fields by `settings.contribute(...)`."""


@dataclasses.dataclass(frozen=True)
class Contribution:
    """One config field, its value and who set it."""

    owner: str
    value: Any


class Settings:
    """Megatron Core config fields, each with its owner, for one run.

    Args:
        sizes: The parallel sizes of the run.
    """

    def __init__(self, sizes: ParallelSizes) -> None:
        self.sizes = sizes
        #: Tokens per training sequence before any cut; the module says it, None if it has no sequences.
        self.seq_length: int | None = None
        #: Whether the output layer uses the embedding's weight; the module says it.
        self.tied_embeddings = True
        self._fields: dict[Target, dict[str, Contribution]] = {target: {} for target in TARGETS}

    def contribute(self, owner: str, target: Target, **fields: Any) -> None:
        """Sets config fields on behalf of `owner`.

        Args:
            owner: What the user wrote, e.g. `"CommunicationOverlap(grad_reduce=...)"`; quoted in errors.
            target: `"model"` (TransformerConfig), `"ddp"` (DistributedDataParallelConfig), `"optimizer"`
                (OptimizerConfig) or `"layers"` (what this package's own layers read: `recompute_modules`).
            fields: Field names and their values.

        Raises:
            ValueError: Another owner has set one of the fields to another value.
        """
        known = self._fields[target]
        for name, value in fields.items():
            earlier = known.get(name)
            if earlier is not None and earlier.owner != owner and earlier.value != value:
                raise ValueError(
                    f"{earlier.owner} sets {name}={earlier.value!r} but {owner} sets {name}={value!r}; "
                    f"remove one of the two or give them the same value"
                )
            known[name] = Contribution(owner, value)

    def suggest(self, owner: str, target: Target, **fields: Any) -> None:
        """Sets config fields that nobody has set, as `contribute`; what others set before stays.

        Args:
            owner: Who suggests.
            target: As in `contribute`.
            fields: As in `contribute`.
        """
        known = self._fields[target]
        self.contribute(owner, target, **{name: value for name, value in fields.items() if name not in known})

    def override(self, overrides: Mapping[str, Any], config_classes: Mapping[Target, type]) -> None:
        """Applies the user's `config_overrides` last: fields that have no argument anywhere else.

        Args:
            overrides: Megatron Core's field names and values.
            config_classes: The config dataclass of each target, to check the names against.

        Raises:
            ValueError: A name is in none of the configs, or is owned by the strategy, a callback, the precision
                plugin or the module; or a value is of another type than the field.
        """
        names = {target: {field.name for field in dataclasses.fields(cls)} for target, cls in config_classes.items()}
        for name, value in overrides.items():
            targets = [target for target in TARGETS if name in names.get(target, ())]
            if not targets:
                every_name = sorted(set().union(*names.values()))
                close = difflib.get_close_matches(name, every_name, n=3)
                hint = f"; did you mean {' or '.join(close)}?" if close else ""
                raise ValueError(f"config_overrides: {name!r} is no field of Megatron Core's configs{hint}")
            for target in targets:
                owned = self._fields[target].get(name)
                if owned is not None:
                    raise ValueError(
                        f"config_overrides: {name}={value!r} is already set by {owned.owner} "
                        f"(to {owned.value!r}); set it there instead"
                    )
            for target in targets:
                self.contribute("config_overrides", target, **{name: _typed(name, value, config_classes[target])})

    def get(self, target: Target, name: str, default: Any = None) -> Any:
        """The value of one field, or `default` when nobody set it."""
        contribution = self._fields[target].get(name)
        return default if contribution is None else contribution.value

    def owner(self, target: Target, name: str) -> str | None:
        """Who set a field, or None."""
        contribution = self._fields[target].get(name)
        return None if contribution is None else contribution.owner

    def fields(self, target: Target) -> dict[str, Any]:
        """All fields of a target, as keyword arguments for its config class."""
        return {name: contribution.value for name, contribution in self._fields[target].items()}

    def __iter__(self) -> Iterator[tuple[Target, str, Contribution]]:
        for target in TARGETS:
            for name, contribution in self._fields[target].items():
                yield target, name, contribution


def _typed(name: str, value: Any, config_class: type) -> Any:
    """The value of a field of a simple type: bool, int, float, str, an enum (by its name too), or None with these.

    Raises:
        ValueError: The field can't take it. Fields of other types take anything.
    """
    hint = get_type_hints(config_class)[name]
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    if not all(kind in _SIMPLE or isinstance(kind, enum.EnumType) for kind in kinds):
        return value
    if type(value) in kinds or (type(value) is int and float in kinds):
        return value
    members: dict[str, enum.Enum] = {}
    for kind in kinds:
        if isinstance(kind, enum.EnumType):
            members |= kind.__members__
    if value in members:
        return members[value]
    names = [*members, *("None" if kind is NoneType else kind.__name__ for kind in kinds if kind in _SIMPLE)]
    raise ValueError(f"config_overrides: {name}={value!r} must be {' or '.join(names)}, not {type(value).__name__}")


def check_vocab(settings: Settings, vocab_size: int, divisible_by: int = 128) -> int:
    """The padded vocabulary size, checked against tensor parallelism.

    Args:
        settings: The merged settings.
        vocab_size: The tokenizer's number of ids.
        divisible_by: The padded size is the next multiple of this, at any layout.

    Raises:
        ValueError: `tensor_model_parallel_size` doesn't divide the padded size.
    """
    return padded_vocab_size(vocab_size, divisible_by, settings.sizes.tensor_model_parallel_size)

"""Which layers each pipeline stage holds, written as a layout such as `"Et*3|(tt|)*29,m|L"`.

    E embedding     t decoder layer     m multi-token prediction (MTP) layer     L output layer and loss
    |  next stage   x*n  the symbol x, n times   (...)*n  the group, n times     , and blanks: ignored

A pipeline rank holds one stage, or with interleaving one per model chunk: stage i is chunk i div PP of
pipeline rank i mod PP, so a sample passes all ranks once per chunk. "Et|tt|tt|tL" with PP=2 puts "Et" and the
second "tt" on rank 0.

Megatron Core expands a layout by textual substitution and checks it, after process groups exist, with
assertions that show neither the expanded stages nor a remedy. Here it is read by a grammar and checked before
that, and Megatron Core is handed the expanded form.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lt_parallel.topology import require_divisible, require_pipeline_for_chunks, require_positive_int

EMBEDDING, DECODER, MTP, LOSS = "E", "t", "m", "L"
_SYMBOL_OF_NAME = {"embedding": EMBEDDING, "decoder": DECODER, "mtp": MTP, "loss": LOSS}
_NAME_OF_SYMBOL = {symbol: name for name, symbol in _SYMBOL_OF_NAME.items()}
_VALID_NAMES = ", ".join(_SYMBOL_OF_NAME)
_KNOWN = "E (embedding), t (decoder layer), m (MTP layer), L (loss), | (next stage), x*n, (...)*n"

_ITEM = re.compile(r"(?P<item>.)(?P<star>\*(?P<number>[0-9]*))?")
_MAX_SYMBOLS = 100_000  # far above any model; keeps a slip such as t*1000000000 from filling the memory

LayoutSpec = str | Sequence[object]
"""A layout as a string, or as a list with one entry per stage: a string without `|`, or a list of symbols or
names (`embedding`, `decoder`, `mtp`, `loss`, also as members of Megatron Core's `LayerType`)."""


@dataclass(frozen=True)
class PipelineLayout:
    """Checked assignment of layers to stages; make one with `parse` or `even`.

    Attributes:
        stages: The symbols of each stage, in the order in which a sample passes them.
        pipeline_model_parallel_size: Pipeline ranks; the number of stages is a multiple of it.
        is_default: Whether this is the equal split that Megatron Core makes by itself.
    """

    stages: tuple[str, ...]
    pipeline_model_parallel_size: int
    is_default: bool = False

    @classmethod
    def parse(
        cls,
        layout: LayoutSpec,
        *,
        num_layers: int,
        pipeline_model_parallel_size: int,
        virtual_pipeline_model_parallel_size: int | None = None,
        mtp_num_layers: int | None = None,
    ) -> "PipelineLayout":
        """Read and check a layout that the user wrote.

        Args:
            layout: `pipeline_model_parallel_layout`, as a string or a list.
            num_layers: Decoder layers that the layout has to hold.
            pipeline_model_parallel_size: Pipeline ranks.
            virtual_pipeline_model_parallel_size: Model chunks per pipeline rank; None = what the layout has.
            mtp_num_layers: MTP layers that the layout has to hold; None = none.

        Raises:
            ValueError: The layout can't be read or breaks a rule. The message shows its expanded stages.
        """
        require_positive_int("num_layers", num_layers)
        require_positive_int("pipeline_model_parallel_size", pipeline_model_parallel_size)
        stages = tuple(_expand(layout))
        result = cls(stages, pipeline_model_parallel_size)
        mtp = _count_or("mtp_num_layers", mtp_num_layers or None, 0)
        if virtual_pipeline_model_parallel_size is not None:
            require_positive_int("virtual_pipeline_model_parallel_size", virtual_pipeline_model_parallel_size)
        problems = result._problems(num_layers, virtual_pipeline_model_parallel_size, mtp)
        if problems:
            raise ValueError(f"{_quote(layout)}: {'; '.join(problems)}. Stages: {_show_stages(stages)}")
        return result

    @classmethod
    def even(
        cls,
        num_layers: int,
        *,
        pipeline_model_parallel_size: int = 1,
        virtual_pipeline_model_parallel_size: int | None = None,
        mtp_num_layers: int | None = None,
    ) -> "PipelineLayout":
        """The split when no layout is given: as many decoder layers in each stage, MTP layers in the last.

        Args:
            num_layers: Decoder layers.
            pipeline_model_parallel_size: Pipeline ranks.
            virtual_pipeline_model_parallel_size: Model chunks per pipeline rank; None = 1.
            mtp_num_layers: MTP layers; None = none.

        Raises:
            ValueError: The layers don't divide; the message has the nearest numbers and a layout that does.
        """
        pp = require_positive_int("pipeline_model_parallel_size", pipeline_model_parallel_size)
        vpp = _count_or("virtual_pipeline_model_parallel_size", virtual_pipeline_model_parallel_size, 1)
        require_positive_int("num_layers", num_layers)
        require_pipeline_for_chunks(pp, vpp)
        mtp = MTP * _count_or("mtp_num_layers", mtp_num_layers or None, 0)
        divisor_name = "pipeline_model_parallel_size"
        if vpp > 1:
            divisor_name += f"={pp} x virtual_pipeline_model_parallel_size={vpp}"
        try:
            per_stage = [require_divisible("num_layers", num_layers, divisor_name, pp * vpp)] * (pp * vpp)
        except ValueError as error:
            hint = "; or use fewer stages"
            if num_layers >= pp * vpp - 2:  # the first and the last can do without a layer
                example = _write(_join_stages(_uneven_split(num_layers, pp * vpp), mtp))
                hint = f"; or split them unevenly: {_quote(example)}"
            raise ValueError(f"{error}{hint}") from None
        return cls(tuple(_join_stages(per_stage, mtp)), pp, is_default=True)

    @property
    def num_stages(self) -> int:
        """Stages of the whole pipeline: PP x model chunks per rank."""
        return len(self.stages)

    @property
    def num_model_chunks(self) -> int:
        """Stages on each pipeline rank."""
        return len(self.stages) // self.pipeline_model_parallel_size

    @property
    def virtual_pipeline_model_parallel_size(self) -> int | None:
        """As Megatron Core takes it: None without interleaving."""
        return self.num_model_chunks if self.num_model_chunks > 1 else None

    @property
    def num_layers(self) -> int:
        """Decoder layers in all stages."""
        return self._count(DECODER)

    @property
    def mtp_num_layers(self) -> int:
        """MTP layers in all stages."""
        return self._count(MTP)

    @property
    def mtp_pp_rank(self) -> int | None:
        """The pipeline rank that holds the MTP layers; None without any."""
        holders = [i for i, stage in enumerate(self.stages) if MTP in stage]
        return holders[0] % self.pipeline_model_parallel_size if holders else None

    def stage(self, pp_rank: int, vpp_rank: int = 0) -> str:
        """Symbols of the stage that is chunk `vpp_rank` of pipeline rank `pp_rank`, such as `"Ett"`."""
        return self.stages[self._index(pp_rank, vpp_rank)]

    def stage_layers(self, pp_rank: int, vpp_rank: int = 0) -> list[int]:
        """Indices of that stage's decoder layers in the whole model, from 0."""
        return self._indices(DECODER, pp_rank, vpp_rank)

    def stage_mtp_layers(self, pp_rank: int, vpp_rank: int = 0) -> list[int]:
        """Indices of that stage's MTP layers in the whole model, from 0."""
        return self._indices(MTP, pp_rank, vpp_rank)

    def embedding_pp_ranks(self, *, tied: bool) -> list[int]:
        """Pipeline ranks that hold the word embedding's weight: the first, the MTP layers', the last if tied.

        Args:
            tied: Whether the output layer uses the embedding's weight.
        """
        holders = {0}
        if tied:
            holders.add(self.pipeline_model_parallel_size - 1)
        if self.mtp_pp_rank is not None:
            holders.add(self.mtp_pp_rank)
        return sorted(holders)

    def describe(self) -> list[tuple[str, ...]]:
        """Rows of a table, header first: pipeline ranks down, chunks across, equal neighbours in one row."""
        chunks = range(self.num_model_chunks)
        columns = [f"chunk {chunk}" for chunk in chunks] if len(chunks) > 1 else ["layers"]
        cells = [
            tuple(_compress(self.stage(pp_rank, chunk)) for chunk in chunks)
            for pp_rank in range(self.pipeline_model_parallel_size)
        ]
        return [
            ("pipeline rank", *columns),
            *((_span(first, last), *row) for first, last, row in _runs(cells)),
        ]

    def to_megatron(self) -> str | None:
        """The value for `TransformerConfig.pipeline_model_parallel_layout`.

        None for the default split: Megatron Core then makes the same one, on its most travelled path.
        """
        return None if self.is_default else "|".join(self.stages)

    def _count(self, symbol: str) -> int:
        return sum(stage.count(symbol) for stage in self.stages)

    def _index(self, pp_rank: int, vpp_rank: int) -> int:
        pp, vpp = self.pipeline_model_parallel_size, self.num_model_chunks
        if not (0 <= pp_rank < pp and 0 <= vpp_rank < vpp):
            raise ValueError(
                f"no stage at pp_rank={pp_rank}, vpp_rank={vpp_rank}; valid: pp_rank 0 to {pp - 1}, "
                f"vpp_rank 0 to {vpp - 1}"
            )
        return vpp_rank * pp + pp_rank

    def _indices(self, symbol: str, pp_rank: int, vpp_rank: int) -> list[int]:
        index = self._index(pp_rank, vpp_rank)
        start = sum(stage.count(symbol) for stage in self.stages[:index])
        return list(range(start, start + self.stages[index].count(symbol)))

    def _problems(self, num_layers: int, virtual_size: int | None, mtp_num_layers: int) -> list[str]:
        """All that is wrong, the most fundamental first."""
        if not self.stages:
            return ["no stages; the smallest layout is 'EtL'"]
        problems = [
            *self._stage_count_problems(virtual_size),
            *self._end_problems(),
            *self._layer_count_problems(num_layers, mtp_num_layers),
        ]
        # Which chunk is a rank's last can't be told while the number of stages is wrong.
        return problems or list(self._mtp_problems())

    def _stage_count_problems(self, virtual_size: int | None) -> Iterator[str]:
        pp, stages = self.pipeline_model_parallel_size, self.num_stages
        if virtual_size is not None:
            if stages != pp * virtual_size:
                yield (
                    f"{_stage_count(stages)}, but pipeline_model_parallel_size={pp} x "
                    f"virtual_pipeline_model_parallel_size={virtual_size} (= {pp * virtual_size}) are needed"
                )
        elif stages % pp != 0:
            below = f"{stages - stages % pp} or " if stages > pp else ""
            yield (
                f"{_stage_count(stages)}, which must be divisible by pipeline_model_parallel_size={pp}; "
                f"nearest valid: {below}{stages - stages % pp + pp} stages"
            )
        if pp == 1 and stages > 1:
            yield f"{stages} stages need pipeline_model_parallel_size > 1; with 1, write no '|'"

    def _end_problems(self) -> Iterator[str]:
        for symbol, place, is_there in (
            (EMBEDDING, "first", self.stages[0].startswith(EMBEDDING)),
            (LOSS, "last", self.stages[-1].endswith(LOSS)),
        ):
            count = self._count(symbol)
            if count != 1:
                yield f"exactly one {symbol} is needed, {place} in the {place} stage, got {count}"
            elif not is_there:
                yield f"{symbol} must be {place} in the {place} stage"

    def _layer_count_problems(self, num_layers: int, mtp_num_layers: int) -> Iterator[str]:
        wanted = ((DECODER, "num_layers", num_layers), (MTP, "mtp_num_layers", mtp_num_layers))
        for symbol, name, needed in wanted:
            count = self._count(symbol)
            if count != needed:
                change = f"add {needed - count}" if count < needed else f"remove {count - needed}"
                instead = f", or set {name}={count or None}" if count or symbol == MTP else ""
                yield f"{count} x {symbol}, but {name}={needed}; {change}{instead}"

    def _mtp_problems(self) -> Iterator[str]:
        holders = [i for i, stage in enumerate(self.stages) if MTP in stage]
        if not holders:
            return
        if DECODER in "".join(self.stages).partition(MTP)[2]:
            yield "every m must come after every t"
        if len(holders) > 1:
            yield f"every m must be in the same stage, got stages {', '.join(map(str, holders))}"
        first_valid = self.num_stages - self.pipeline_model_parallel_size
        if holders[0] < first_valid:
            yield (
                "m must be in the last chunk of its pipeline rank, which is one of the last "
                f"pipeline_model_parallel_size={self.pipeline_model_parallel_size} stages "
                f"({_span(first_valid, self.num_stages - 1)}), got stage {holders[0]}"
            )
        elif holders[0] == first_valid > 0:
            # Megatron Core accepts it, and trains two copies of the embedding on one rank that nothing keeps equal.
            yield (
                f"m can't be in a later chunk of pipeline rank 0 (stage {first_valid}), whose first chunk has the "
                f"embedding already; put it into one of the stages {_span(first_valid + 1, self.num_stages - 1)}"
            )


def virtual_size_from_layers(
    num_layers: int, *, pipeline_model_parallel_size: int, num_layers_per_virtual_pipeline_stage: int
) -> int | None:
    """`virtual_pipeline_model_parallel_size` from the number of layers that each stage should hold.

    Args:
        num_layers: Decoder layers.
        pipeline_model_parallel_size: Pipeline ranks.
        num_layers_per_virtual_pipeline_stage: Decoder layers in each stage.

    Returns:
        Model chunks per pipeline rank; None for one.

    Raises:
        ValueError: The layers don't divide.
    """
    pp = require_positive_int("pipeline_model_parallel_size", pipeline_model_parallel_size)
    per_stage = require_positive_int("num_layers_per_virtual_pipeline_stage", num_layers_per_virtual_pipeline_stage)
    chunks = require_divisible(
        "num_layers",
        num_layers,
        f"pipeline_model_parallel_size={pp} x num_layers_per_virtual_pipeline_stage={per_stage}",
        pp * per_stage,
    )
    require_pipeline_for_chunks(pp, chunks)
    return chunks if chunks > 1 else None


def _count_or(name: str, value: int | None, default: int) -> int:
    return default if value is None else require_positive_int(name, value)


def _expand(layout: object) -> list[str]:
    if isinstance(layout, str):
        return _expand_string(layout)
    if isinstance(layout, Sequence):
        return _expand_list(layout)
    raise ValueError(f"{_quote(layout)} must be a string or a list, got {type(layout).__name__}")


def _expand_string(written: str) -> list[str]:
    """Stages of a layout string, each with its symbols spelt out."""
    parts = [""]  # expansion so far: of the whole layout, then of each group that is still open
    for match in _ITEM.finditer(re.sub(r"[,\s]", "", written)):
        item, count = match["item"], int(match["number"] or 1)
        problem = _item_problem(item, match["star"], match["number"], is_group_open=len(parts) > 1)
        if problem:
            raise ValueError(f"{_quote(written)}: {problem}")
        if item == "(":
            parts.append("")
            continue
        repeated = parts.pop() if item == ")" else item
        if not repeated:
            raise ValueError(f"{_quote(written)}: nothing between '(' and ')'")
        if len(repeated) * count > _MAX_SYMBOLS:
            raise ValueError(f"{_quote(written)}: '*{count}' makes more than {_MAX_SYMBOLS} symbols")
        parts[-1] += repeated * count
    if len(parts) > 1:
        raise ValueError(f"{_quote(written)}: '(' without ')'")
    return parts[0].split("|")


def _item_problem(item: str, star: str | None, number: str | None, *, is_group_open: bool) -> str | None:
    """What is wrong with an item and the count after it; None if nothing is."""
    if item not in _NAME_OF_SYMBOL and item not in "|(*)":
        return f"unknown symbol {item!r}; valid: {_KNOWN}"
    if item == "*" or (item == "(" and star):
        return "'*' must follow a symbol or ')'"
    if item == ")" and not is_group_open:
        return "')' without '('"
    if item == ")" and not star:
        return "')' needs a count, as in '(tt|)*3'"
    if star and not int(number or 0):
        return f"'*' after {item!r} needs a number of at least 1"
    return None


def _expand_list(layout: Sequence[object]) -> list[str]:
    """Stages of a layout list, each with its symbols spelt out."""
    stages = []
    for index, entry in enumerate(layout):
        items = entry if isinstance(entry, Sequence) and not isinstance(entry, str) else [entry]
        stage = "".join(_expand_entry(item) for item in items)
        if "|" in stage:
            raise ValueError(f"{_quote(layout)}: '|' in stage {index}; in a list each entry is one stage")
        stages.append(stage)
    return stages


def _expand_entry(item: object) -> str:
    name = item if isinstance(item, str) else getattr(item, "name", None)  # a LayerType has a name
    if not isinstance(name, str):
        raise ValueError(
            f"pipeline_model_parallel_layout: a list holds strings, or lists of strings or LayerType, got {item!r}"
        )
    lowered = name.strip().lower()
    if lowered == "encoder":
        raise ValueError(f"pipeline_model_parallel_layout: 'encoder' can't be laid out; valid: {_VALID_NAMES}")
    return _SYMBOL_OF_NAME.get(lowered) or "|".join(_expand_string(name))


def _quote(layout: object) -> str:
    return f"pipeline_model_parallel_layout={layout!r}"


def _uneven_split(num_layers: int, num_stages: int) -> list[int]:
    """As equal as possible; the surplus goes to the stages after the first, which also has the embedding."""
    quotient, surplus = divmod(num_layers, num_stages)
    return [quotient + ((index - 1) % num_stages < surplus) for index in range(num_stages)]


def _join_stages(layers_per_stage: Sequence[int], mtp: str) -> list[str]:
    stages = [DECODER * count for count in layers_per_stage]
    stages[0] = EMBEDDING + stages[0]
    stages[-1] += mtp + LOSS
    return stages


def _runs[T](items: Sequence[T]) -> Iterator[tuple[int, int, T]]:
    """(first index, last index, item) of each run of equal items."""
    first = 0
    for last, item in enumerate(items):
        if last + 1 == len(items) or items[last + 1] != item:
            yield first, last, item
            first = last + 1


def _stage_count(count: int) -> str:
    return "1 stage" if count == 1 else f"{count} stages"


def _span(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


def _compress(stage: str) -> str:
    """Four and more equal symbols as x*n."""
    return re.sub(r"(.)\1{3,}", lambda run: f"{run[1]}*{len(run[0])}", stage) or "(empty)"


def _show_stages(stages: Sequence[str]) -> str:
    shown = [f"[{_span(first, last)}] {_compress(stage)}" for first, last, stage in _runs(stages)]
    return "  ".join(shown) or "(none)"


def _write(stages: Sequence[str]) -> str:
    """The shortest usual way to write stages of which no two neighbours at the end are equal."""
    text = ""
    for first, last, stage in _runs(stages):
        count = last - first + 1
        text += f"({_compress(stage)}|)*{count}" if count > 2 else f"{_compress(stage)}|" * count
    return text.removesuffix("|")

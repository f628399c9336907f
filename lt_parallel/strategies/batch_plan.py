"""How many micro batches a global step has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lt_parallel.topology import ParallelSizes


@dataclass(frozen=True)
class BatchPlan:
    """`num_microbatches`, given or derived from `global_batch_size` once the loader's micro batch is known.

    Args:
        sizes: The parallel sizes.
        num_microbatches: As the user gave it.
        global_batch_size: As the user gave it; at most one of the two.

    Raises:
        ValueError: They can't be met at these sizes.
    """

    sizes: ParallelSizes
    num_microbatches: int | None = None
    global_batch_size: int | None = None

    def __post_init__(self) -> None:
        if self.global_batch_size is not None:
            data_parallel_size = self.sizes.data_parallel_size
            self._require_multiple(data_parallel_size, f"the data-parallel size {data_parallel_size}")
        if self.num_microbatches is not None:
            self._require_whole_rounds(self.num_microbatches)

    def num_microbatches_of(self, dataloader: Any) -> int:
        """Micro batches per step with this loader.

        Args:
            dataloader: Yields micro batches of `batch_size` samples.

        Raises:
            ValueError: `global_batch_size` isn't a multiple of micro batch x data-parallel size, or can't be divided
                because the loader tells no batch size.
        """
        if self.global_batch_size is None:
            return self.num_microbatches or 1
        micro_batch = getattr(dataloader, "batch_size", None)
        if micro_batch is None:
            raise ValueError(
                f"global_batch_size={self.global_batch_size} needs a DataLoader with a batch_size; this loader "
                f"({type(dataloader).__name__}) has none: give num_microbatches instead"
            )
        data_parallel_size = self.sizes.data_parallel_size
        per_microbatch: int = micro_batch * data_parallel_size
        self._require_multiple(
            per_microbatch, f"micro batch {micro_batch} x data-parallel size {data_parallel_size} (= {per_microbatch})"
        )
        count = self.global_batch_size // per_microbatch
        self._require_whole_rounds(count)
        return count

    def _require_multiple(self, divisor: int, description: str) -> None:
        size = self.global_batch_size
        assert size is not None
        if size % divisor:
            lower = size // divisor * divisor
            nearest = f"{lower} or {lower + divisor}" if lower else f"{divisor}"
            raise ValueError(f"global_batch_size={size} must be divisible by {description}; nearest valid: {nearest}")

    def _require_whole_rounds(self, count: int) -> None:
        """The interleaved schedule passes micro batches in rounds of as many as there are pipeline ranks."""
        pp, virtual_size = self.sizes.pipeline_model_parallel_size, self.sizes.virtual_pipeline_model_parallel_size
        if virtual_size is not None and count % pp:
            lower = count // pp * pp
            nearest = f"{lower} or {lower + pp}" if lower else f"{pp}"
            raise ValueError(
                f"num_microbatches={count} must be divisible by pipeline_model_parallel_size={pp} with {virtual_size} "
                f"virtual stages; nearest valid: {nearest}"
            )

"""From the user's DataLoader to global steps: sampling, grouping and exact resuming.

A `DataLoader(batch_size=b)` yields micro batches of one data-parallel rank. Lightning sees a loader that yields a
*list* of them, one list per global step, so all its counters count global steps.

Sampling is ours for ordinary map-style loaders, because three promises hang on it: the global batch holds the same
samples at any data-parallel size; an evaluation counts every sample exactly once (torch's DistributedSampler repeats
some); and a resumed epoch skips what was consumed without loading it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, Sampler

from lt_parallel.metrics.timers import DATA_WAIT, StepTimers, timed


class GlobalOrderSampler(Sampler[int]):
    """This rank's share of one global order of samples: every `num_replicas`-th, starting at `rank`.

    Args:
        dataset_length: Number of samples.
        num_replicas: Data-parallel size.
        rank: Data-parallel rank.
        shuffle: Whether the order is a permutation that depends on (seed, epoch) alone.
        seed: Seed of the permutation.
    """

    def __init__(self, dataset_length: int, num_replicas: int, rank: int, *, shuffle: bool, seed: int) -> None:
        self._length = dataset_length
        self._num_replicas, self._rank = num_replicas, rank
        self._shuffle, self._seed = shuffle, seed
        self.epoch = 0
        #: Samples of this rank to leave out at the start of the next iteration; used once.
        self.skip_samples = 0

    def set_epoch(self, epoch: int) -> None:
        """Lightning calls this when an epoch begins."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        start = self._rank + self.skip_samples * self._num_replicas
        self.skip_samples = 0
        if not self._shuffle:
            yield from range(start, self._length, self._num_replicas)
            return
        generator = torch.Generator().manual_seed(self._seed + self.epoch)
        yield from torch.randperm(self._length, generator=generator)[start :: self._num_replicas].tolist()

    def __len__(self) -> int:
        return len(range(self._rank, self._length, self._num_replicas))


def with_global_order(dataloader: Any, num_replicas: int, rank: int) -> Any:
    """Replaces the sampler that Lightning injected by a `GlobalOrderSampler`; other loaders are returned as they are.

    Args:
        dataloader: What Lightning gives to `process_dataloader`.
        num_replicas: Data-parallel size.
        rank: Data-parallel rank.
    """
    if not _is_ordinary(dataloader):
        return dataloader
    injected: DistributedSampler[Any] = dataloader.sampler
    sampler = GlobalOrderSampler(
        len(dataloader.dataset), num_replicas, rank, shuffle=injected.shuffle, seed=injected.seed
    )
    workers: dict[str, Any] = {}
    if dataloader.num_workers > 0:
        workers = {
            "prefetch_factor": dataloader.prefetch_factor,
            "persistent_workers": dataloader.persistent_workers,
            "multiprocessing_context": dataloader.multiprocessing_context,
        }
    return DataLoader(
        dataloader.dataset,
        batch_sampler=BatchSampler(sampler, dataloader.batch_size, drop_last=dataloader.drop_last),
        num_workers=dataloader.num_workers,
        collate_fn=dataloader.collate_fn,
        pin_memory=dataloader.pin_memory,
        timeout=dataloader.timeout,
        worker_init_fn=dataloader.worker_init_fn,
        generator=dataloader.generator,
        **workers,
    )


def _is_ordinary(dataloader: Any) -> bool:
    return (
        type(dataloader) is DataLoader
        and not isinstance(dataloader.dataset, IterableDataset)
        and type(dataloader.sampler) is DistributedSampler
        and type(dataloader.batch_sampler) is BatchSampler
    )


def require_every_rank(dataloader: Any, num_replicas: int) -> None:
    """Refuses evaluation data that leave a rank without a sample: it would miss in the collectives of `self.log`.

    Raises:
        ValueError: Fewer samples than data-parallel ranks.
    """
    sampler = getattr(getattr(dataloader, "batch_sampler", None), "sampler", None)
    if isinstance(sampler, GlobalOrderSampler) and len(dataloader.dataset) < num_replicas:
        raise ValueError(
            f"the evaluation data hold {len(dataloader.dataset)} samples, fewer than the data-parallel size "
            f"{num_replicas}; add samples or use fewer devices"
        )


def num_samples(micro_batch: Any) -> int:
    """Samples in a micro batch: the first dimension of the first tensor found; 1 if there is none."""
    if isinstance(micro_batch, Tensor):
        return len(micro_batch) if micro_batch.dim() else 1
    if isinstance(micro_batch, Mapping):
        micro_batch = list(micro_batch.values())
    if isinstance(micro_batch, Sequence) and not isinstance(micro_batch, str) and micro_batch:
        return num_samples(micro_batch[0])
    return 1


class MicroBatchLoader:
    """Yields lists of micro batches; what Lightning iterates over.

    Args:
        dataloader: Yields this rank's micro batches.
        num_microbatches: Micro batches per step.
        num_replicas: Data-parallel size.
        complete_only: Training: only steps whose global batch is complete. Otherwise the last list may be shorter, even
            empty on some ranks, so that every rank takes the same number of steps.
        epoch_steps: Steps that the Trainer makes of an epoch, in steps (int) or as a share (float).
        seed: For the seeds of the loader's workers. By itself a loader draws them from torch's global generator, which
            a resumed run would then find at another place.
        timers: Measures the waiting for data.

    Raises:
        ValueError: Training data that don't fill one global batch.
    """

    def __init__(
        self,
        dataloader: Any,
        *,
        num_microbatches: int,
        num_replicas: int,
        complete_only: bool,
        epoch_steps: int | float = 1.0,
        seed: int = 0,
        timers: StepTimers | None = None,
    ) -> None:
        self.dataloader = dataloader
        self._timers = timers
        self._epoch_steps = epoch_steps
        if isinstance(dataloader, DataLoader) and dataloader.generator is None:
            dataloader.generator = torch.Generator().manual_seed(seed)
        self.num_microbatches = num_microbatches
        self._num_replicas = num_replicas
        self._complete_only = complete_only
        self._steps_done = 0
        self._resume_at = 0
        if complete_only and self._known_steps() == 0:
            raise ValueError(self._too_few())

    @property
    def dataset(self) -> Any:
        """The dataset behind the loader (Lightning asks for it)."""
        return getattr(self.dataloader, "dataset", None)

    @property
    def sampler(self) -> Any:
        """What Lightning calls `set_epoch` on: the sampler that makes the order."""
        batch_sampler = getattr(self.dataloader, "batch_sampler", None)
        if isinstance(batch_sampler, BatchSampler):
            return batch_sampler.sampler
        return getattr(self.dataloader, "sampler", None)

    @property
    def batch_size(self) -> int | None:
        """Samples per micro batch, if the loader tells."""
        size: int | None = getattr(self.dataloader, "batch_size", None)
        if size is None:
            size = getattr(getattr(self.dataloader, "batch_sampler", None), "batch_size", None)
        return size

    def _known_steps(self) -> int | None:
        sampler = self.sampler
        if isinstance(sampler, GlobalOrderSampler) and self.batch_size is not None:
            # In samples of all ranks, so that every rank comes to the same number.
            available = len(self.dataset)
            per_step = self.batch_size * self.num_microbatches * self._num_replicas
        else:
            try:
                available, per_step = len(self.dataloader), self.num_microbatches  # in micro batches
            except TypeError:  # an iterable dataset without a length
                return None
            if self._complete_only and _ends_with_a_rest(self.dataloader):
                available -= 1
        whole, rest = divmod(available, per_step)
        return whole if self._complete_only or rest == 0 else whole + 1

    def _too_few(self) -> str:
        size = self.batch_size
        if isinstance(self.sampler, GlobalOrderSampler) and size is not None:
            return (
                f"the training data hold {len(self.dataset)} samples, fewer than one global batch of "
                f"{size * self.num_microbatches * self._num_replicas} (micro batch {size} x num_microbatches="
                f"{self.num_microbatches} x data-parallel size {self._num_replicas}); lower one of them or add data"
            )
        return (
            f"the training loader holds {len(self.dataloader)} micro batches, fewer than num_microbatches="
            f"{self.num_microbatches} of one step; lower num_microbatches or add data"
        )

    def __len__(self) -> int:
        """Steps in a whole epoch, also after a resume: Lightning's epoch end and progress depend on it."""
        steps = self._known_steps()
        if steps is None:
            raise TypeError("the loader has no length")
        return steps

    def __iter__(self) -> Iterator[list[Any]]:
        skip, self._resume_at = self._resume_at, 0
        self._steps_done = skip
        total = self._known_steps()
        micro_batches = self._skipping_iterator(skip)
        while total is None or self._steps_done < total:
            with timed(self._timers, DATA_WAIT, host=True):
                step = self._next_step(micro_batches)
            complete = len(step) == self.num_microbatches and num_samples(step[-1]) == num_samples(step[0])
            if total is None and (not step or (self._complete_only and not complete)):
                self._steps_done = 0
                return
            # Where Lightning doesn't know the number of steps it looks one step ahead: then what it asked for is
            # trained on only when it asks for the next one.
            looks_ahead = total is None and isinstance(self._epoch_steps, float)
            self._steps_done += 0 if looks_ahead else 1
            yield step
            self._steps_done += 1 if looks_ahead else 0

    def _skipping_iterator(self, skip: int) -> Iterator[Any]:
        sampler = self.sampler
        if skip and isinstance(sampler, GlobalOrderSampler):
            assert self.batch_size is not None
            sampler.skip_samples = skip * self.num_microbatches * self.batch_size
            return iter(self.dataloader)
        iterator = iter(self.dataloader)
        for _ in range(skip * self.num_microbatches):
            next(iterator, None)
        return iterator

    def _next_step(self, micro_batches: Iterator[Any]) -> list[Any]:
        step = []
        for _ in range(self.num_microbatches):
            try:
                step.append(next(micro_batches))
            except StopIteration:
                break
        return step

    def state_dict(self) -> dict[str, int]:
        """Position in the epoch, in steps."""
        return {"steps_done": self._steps_done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """The next iteration begins after the steps done; a whole epoch done means none are skipped."""
        done = int(state["steps_done"])
        total = self._known_steps()
        if isinstance(self._epoch_steps, int):
            total = self._epoch_steps if total is None else min(total, self._epoch_steps)
        elif total is not None:
            total = int(total * self._epoch_steps)
        self._resume_at = 0 if total is not None and done >= total else done


def _ends_with_a_rest(dataloader: Any) -> bool:
    """Whether the last micro batch is smaller than the others, which a pipeline couldn't pass on."""
    if not isinstance(dataloader, DataLoader) or isinstance(dataloader.dataset, IterableDataset):
        return False
    size = dataloader.batch_size
    return size is not None and not dataloader.drop_last and len(dataloader.sampler) % size > 0  # type: ignore[arg-type]

"""Train on Megatron's ``.bin/.idx`` pairs through Megatron Core's own data set classes.

Megatron Core builds sample indices on rank 0 while the other ranks wait in a barrier, so whatever can be wrong with the
files or the options is found before, on every rank alike (index_check, and the split arithmetic here). Its index cache
is named after paths and options, not contents, and is written in place; here it gets a folder per state of the files,
and what a killed run left half-written is removed.
"""

import hashlib
import json
import math
import re
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning.pytorch as L
import numpy as np
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lt_parallel.data.errors import DataError
from lt_parallel.data.index_check import IndexedPair, check_pair
from lt_parallel.data.locking import cache_root, file_lock
from lt_parallel.data.splits import SPLITS
from lt_parallel.data.text import SPLITS_OF_STAGE, check_sizes, make_loader
from lt_parallel.data.tokenizer import Tokenizer, build_tokenizer

if TYPE_CHECKING:
    from megatron.core.datasets.gpt_dataset import GPTDatasetConfig

_FIELDS = ("tokens", "labels", "loss_mask", "position_ids")
_SHARE = re.compile(r"\s*(\d+\.?\d*|\.\d+)\s*")

Bounds = tuple[float, float] | None


class IndexedDataModule(L.LightningDataModule):
    """Samples from Megatron ``.bin/.idx`` pairs, by Megatron Core's GPTDataset.

    A batch is a dict of tensors [micro_batch_size, seq_length]: ``tokens``, ``labels``, ``position_ids`` in int64,
    ``loss_mask`` in float32.

    Args:
        data_path: Pairs to read, as paths without .bin and .idx: one, or several to blend.
        seq_length: Tokens per sample.
        micro_batch_size: Samples per batch on one data-parallel rank.
        weights: Shares of the pairs in the blend, one per pair. None: in proportion to their tokens.
        split: Shares of train, validation and test, such as "969,30,1", as consecutive ranges of each pair's documents.
        train_samples: Training samples in total, over as many epochs of the text as they take, shuffled by Megatron
            Core with random_seed. None: one epoch of the text, shuffled anew for each of the Trainer's epochs.
        valid_samples: Validation samples. None: all.
        test_samples: Test samples. None: all.
        path_to_cache: Folder for sample indices, which all nodes must share. None: ~/.cache/lt_parallel.
        random_seed: Seed of Megatron Core's shuffling.
        tokenizer: "bytes" or the path of a tokenizers library JSON file: what the pairs were written with.
        eod_token: Name of the end-of-document token in the tokenizer file, if it was named when the pairs were written.
        vocab_size: Vocabulary size, instead of a tokenizer.
        eod_id: End-of-document id, instead of a tokenizer's; needed by eod_mask_loss only.
        eod_mask_loss: Leave the prediction that follows an end-of-document token out of the loss.
        num_workers: Processes that load batches; 0 loads in the training process.

    Raises:
        DataError: From the constructor for options that can't be right, from `setup` for pairs that can't be used.
    """

    def __init__(
        self,
        data_path: list[str] | str,
        seq_length: int = 1024,
        micro_batch_size: int = 1,
        weights: list[float] | None = None,
        split: str = "969,30,1",
        train_samples: int | None = None,
        valid_samples: int | None = None,
        test_samples: int | None = None,
        path_to_cache: str | None = None,
        random_seed: int = 1234,
        tokenizer: str | None = None,
        eod_token: str | None = None,
        vocab_size: int | None = None,
        eod_id: int | None = None,
        eod_mask_loss: bool = False,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        check_sizes(seq_length=seq_length, micro_batch_size=micro_batch_size, num_workers=num_workers)
        samples = {"train_samples": train_samples, "valid_samples": valid_samples, "test_samples": test_samples}
        check_sizes(**{name: value for name, value in samples.items() if value is not None})
        self.paths = [data_path] if isinstance(data_path, str) else list(data_path)
        if not self.paths:
            raise DataError("data_path=[] names no pair; give at least one path without .bin and .idx")
        _check_weights(weights, self.paths)
        if tokenizer is not None and (vocab_size is not None or eod_id is not None):
            raise DataError(
                f"tokenizer={tokenizer!r} gives vocab_size and eod_id itself; leave out vocab_size={vocab_size} and "
                f"eod_id={eod_id}, or the tokenizer"
            )
        if eod_token is not None and tokenizer is None:
            raise DataError(
                f"eod_token={eod_token!r} is a name in a tokenizer file: give tokenizer too, or eod_id instead"
            )
        if eod_mask_loss and tokenizer is None and eod_id is None:
            raise DataError("eod_mask_loss=True needs the end-of-document id: give tokenizer or eod_id")
        self.shares = _parse_split(split)
        self.seq_length = seq_length
        self.micro_batch_size = micro_batch_size
        self.weights = weights
        self.split = split
        self.samples = dict(zip(SPLITS, samples.values(), strict=True))
        self.path_to_cache = path_to_cache
        self.random_seed = random_seed
        self.tokenizer_spec = tokenizer
        self.eod_token = eod_token
        self.eod_mask_loss = eod_mask_loss
        self.num_workers = num_workers
        self._vocab_size = vocab_size
        self._eod_id = eod_id
        self._datasets: dict[str, Dataset[dict[str, Tensor]]] = {}

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer, loaded on first use; None if none was given."""
        return None if self.tokenizer_spec is None else build_tokenizer(self.tokenizer_spec, self.eod_token)

    @property
    def vocab_size(self) -> int:
        """One above the highest token id; known before `setup`.

        Raises:
            DataError: If neither a tokenizer nor ``vocab_size`` was given: a pair doesn't record it.
        """
        if self.tokenizer is not None:
            return self.tokenizer.vocab_size
        if self._vocab_size is None:
            raise DataError("a .bin/.idx pair doesn't say its vocabulary size; give tokenizer or vocab_size")
        return self._vocab_size

    def check_source(self, stage: str) -> None:
        """Raise what the pairs' indices tell; the strategy asks before other processes start.

        Args:
            stage: "fit", "validate", "test" or "predict".
        """
        wanted = self._wanted_splits(stage)
        pairs = [check_pair(path) for path in self.paths]
        for name in wanted:
            self._capacities(name, pairs)

    def _wanted_splits(self, stage: str | None) -> list[str]:
        wanted = [name for name in SPLITS_OF_STAGE[stage] if self.shares[SPLITS.index(name)] is not None]
        if not wanted and stage != "predict":
            raise DataError(f"`{stage}` needs a share of the documents, but split={self.split!r} has none for it")
        return wanted

    def setup(self, stage: str | None = None) -> None:
        """Check the pairs and build the data sets of a stage ("fit", "validate", "test", "predict"; None: all)."""
        wanted = self._wanted_splits(stage)
        if all(name in self._datasets for name in wanted):
            return
        pairs = [check_pair(path) for path in self.paths]
        capacities = {name: self._capacities(name, pairs) for name in wanted}
        built = self._build(wanted, pairs, capacities)
        for name in wanted:
            self._datasets[name] = built[name]

    def _capacities(self, name: str, pairs: Sequence[IndexedPair]) -> list[int]:
        """Samples in one epoch of a split, for each pair; raises where one pair has none."""
        bounds = self.shares[SPLITS.index(name)]
        assert bounds is not None
        capacities = []
        for pair in pairs:
            # Megatron Core's own rounding: a share of 3% of 10 sequences is none at all.
            count = len(pair.lengths)
            begin, end = (round(bound * float(count)) for bound in bounds)
            tokens = int(pair.lengths[begin:end].sum(dtype=np.int64))
            if tokens < self.seq_length + 1:
                raise DataError(
                    f"{pair.prefix}: split={self.split!r} leaves {end - begin} of {count} sequences with {tokens} of "
                    f"{pair.num_tokens} tokens to {name}, but one sample needs seq_length + 1 = {self.seq_length + 1}; "
                    f"give {name} a larger share or 0"
                    + (f", or set seq_length to at most {tokens - 1}" if tokens > 1 else "")
                )
            capacities.append((tokens - 1) // self.seq_length)
        total = self.samples[name] or sum(capacities)
        if name == "train" and total < self.micro_batch_size:
            raise DataError(
                f"{total} training samples are fewer than micro_batch_size={self.micro_batch_size}; "
                f"nearest valid: micro_batch_size={total}"
            )
        return capacities

    def _build(
        self, wanted: Sequence[str], pairs: Sequence[IndexedPair], capacities: dict[str, list[int]]
    ) -> dict[str, Dataset[dict[str, Tensor]]]:
        """Let Megatron Core build the splits; all ranks must call this."""
        from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
        from megatron.core.datasets.gpt_dataset import GPTDataset

        weights = self.weights
        if weights is None and len(pairs) > 1 and any(self.samples[name] is not None for name in wanted):
            # Without weights Megatron Core caps a blend at one epoch, whatever number of samples was asked for.
            weights = [float(pair.num_tokens) for pair in pairs]
        sizes: list[int | None] = []
        for name in SPLITS:
            size = self.samples[name] if name in wanted else 0
            sizes.append(sum(capacities[name]) if size is None and weights is not None else size)
        cache = self._index_cache(pairs)
        config = self._config(wanted, pairs, weights, cache)
        first = not dist.is_initialized() or dist.get_rank() == 0
        with file_lock(cache / "lock") if first else nullcontext():
            if first:
                _remove_broken_indices(cache)
            datasets = BlendedMegatronDatasetBuilder(GPTDataset, sizes, _on_every_rank, config).build()
        return {name: _Samples(datasets[SPLITS.index(name)], self.samples[name]) for name in wanted}

    def _index_cache(self, pairs: Sequence[IndexedPair]) -> Path:
        state = json.dumps([pair.fingerprint() for pair in pairs])
        name = f"indices-{hashlib.blake2b(state.encode(), digest_size=12).hexdigest()}"
        return cache_root(str(cache_root(self.path_to_cache) / name))

    def _config(
        self, wanted: Sequence[str], pairs: Sequence[IndexedPair], weights: list[float] | None, cache: Path
    ) -> "GPTDatasetConfig":
        from megatron.core.datasets.gpt_dataset import GPTDatasetConfig

        known = self.tokenizer
        special = _SpecialTokens(
            vocab_size=known.vocab_size if known else self._vocab_size, eod=known.eod if known else self._eod_id
        )
        config = GPTDatasetConfig(
            random_seed=self.random_seed,
            sequence_length=self.seq_length,
            blend=([pair.prefix for pair in pairs], weights),
            split=self.split,
            path_to_cache=str(cache),
            tokenizer=special,
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=self.eod_mask_loss,
            create_attention_mask=False,
        )
        # Build what the stage needs: a test split too small for one sample is no reason to refuse to train.
        config.split_matrix = [
            bounds if name in wanted else None for name, bounds in zip(SPLITS, self.shares, strict=True)
        ]
        return config

    @property
    def train_dataset(self) -> Dataset[dict[str, Tensor]]:
        """Training samples, after `setup`."""
        return self._datasets["train"]

    @property
    def val_dataset(self) -> Dataset[dict[str, Tensor]] | None:
        """Validation samples after `setup`; None if the split gives none."""
        return self._datasets.get("val")

    @property
    def test_dataset(self) -> Dataset[dict[str, Tensor]] | None:
        """Test samples after `setup`; None if the split gives none."""
        return self._datasets.get("test")

    def train_dataloader(self) -> DataLoader[Any]:
        """Training batches; a last batch that isn't full is left out.

        With ``train_samples`` the data set is in its final random order already, so the loader doesn't shuffle again.
        """
        shuffle = self.samples["train"] is None
        return make_loader(self.train_dataset, self.micro_batch_size, self.num_workers, shuffle=shuffle, drop_last=True)

    def val_dataloader(self) -> DataLoader[Any] | list[DataLoader[Any]]:
        """Validation batches, the last one perhaps smaller; no loader if the split gives none."""
        if self.val_dataset is None:
            return []
        return make_loader(self.val_dataset, self.micro_batch_size, self.num_workers)

    def test_dataloader(self) -> DataLoader[Any] | list[DataLoader[Any]]:
        """Test batches, the last one perhaps smaller; no loader if the split gives none."""
        if self.test_dataset is None:
            return []
        return make_loader(self.test_dataset, self.micro_batch_size, self.num_workers)


@dataclass
class _SpecialTokens:
    """The part of a tokenizer that GPTDatasetConfig asks for; it tokenizes nothing here."""

    vocab_size: int | None
    eod: int | None
    unique_identifiers: dict[str, int | None] = field(init=False)

    def __post_init__(self) -> None:
        # Part of the index cache's name: samples don't depend on the tokenizer, so it must not lead to a new cache.
        self.unique_identifiers = {}


class _Samples(Dataset[dict[str, Tensor]]):
    """The batch fields of a Megatron data set (a blend adds others), and no more samples than were asked for.

    Args:
        dataset: GPTDataset or BlendedDataset.
        limit: Samples asked for; Megatron Core treats the number as a minimum. None: all.
    """

    def __init__(self, dataset: Any, limit: int | None) -> None:
        self._dataset = dataset
        self._length = len(dataset) if limit is None else min(limit, len(dataset))

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < self._length:
            raise IndexError(f"sample {index} of {self._length}")
        sample = self._dataset[index]
        return {name: sample[name] for name in _FIELDS}


def _on_every_rank() -> bool:
    return True


def _parse_split(split: str) -> list[Bounds]:
    """Shares of train, val and test as ranges in [0, 1]; None for a share of 0."""
    parts = split.split(",")
    if not 1 <= len(parts) <= 3 or not all(_SHARE.fullmatch(part) for part in parts):
        raise DataError(f"split={split!r} must be one to three numbers for train, validation, test, such as '969,30,1'")
    shares = [float(part) for part in parts] + [0.0] * (3 - len(parts))
    if sum(shares) == 0:
        raise DataError(f"split={split!r} gives nothing to any split; usual: '969,30,1'")
    edges = np.concatenate([[0.0], np.cumsum(np.array(shares) / np.sum(shares))])
    return [(float(a), float(b)) if b > a else None for a, b in pairwise(edges)]


def _check_weights(weights: list[float] | None, paths: Sequence[str]) -> None:
    if weights is None:
        return
    if len(weights) != len(paths):
        raise DataError(
            f"weights={weights} has {len(weights)} entries for the {len(paths)} pairs of data_path; give one each"
        )
    if not all(math.isfinite(w) and w > 0 for w in weights):
        raise DataError(f"weights={weights} must all be above 0; leave out a pair that shouldn't be used")


def _remove_broken_indices(cache: Path) -> None:
    """Remove index files that a killed run left cut short; only the holder of the cache's lock may.

    Megatron Core takes an index for complete as soon as its files exist.
    """
    for path in cache.glob("*.npy"):
        try:
            np.load(path, mmap_mode="r")
        except (ValueError, EOFError):
            path.unlink()

"""Train on plain text: files, folders and globs in, batches of token windows out.

Every rank goes through the same steps in `setup` and so meets the same errors: list the files, open the token cache (or
make it, one process at a time), divide the documents, check that each split can give a batch. Nothing here talks to
other ranks, so nothing here can wait for a rank that has failed.
"""

from contextlib import suppress
from functools import cached_property
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lt_parallel.data.errors import DataError
from lt_parallel.data.locking import cache_root
from lt_parallel.data.sources import list_files
from lt_parallel.data.splits import SPLITS, split_documents
from lt_parallel.data.token_cache import TokenCache, open_or_build
from lt_parallel.data.tokenizer import BYTES, Tokenizer, build_tokenizer
from lt_parallel.data.windows import Prompts, TokenWindows

SPLITS_OF_STAGE = {"fit": ("train", "val"), "validate": ("val",), "test": ("test",), "predict": (), None: SPLITS}


class TextDataModule(L.LightningDataModule):
    """Token windows over text, with documents held out for validation and test.

    A batch is a dict of tensors [micro_batch_size, seq_length]: ``tokens``, ``labels`` (the next tokens) and
    ``position_ids`` in int64, ``loss_mask`` (ones) in float32. A file is a document; an end-of-document token follows
    each. The order of samples follows from ``seed_everything`` and the epoch.

    Args:
        paths: Text to read: files, folders (searched recursively, hidden files and binary files left out) and globs.
            "python:stdlib" is the standard library of the running Python, without its tests (about 10 MB).
        tokenizer: "bytes" (256 byte values and an end of document), or the path of a tokenizers library JSON file.
        seq_length: Tokens per sample.
        micro_batch_size: Samples per batch on one data-parallel rank.
        pattern: Glob that files in folders must match, such as "**/*.py". None: every file that looks like text.
        val_fraction: Share of all tokens to hold out for validation, as whole documents. 0: no validation.
        test_fraction: The same for test.
        shuffle: Draw training samples in random order.
        num_workers: Processes that load batches; 0 loads in the training process, which is quick as samples are only
            copied out of a memory map.
        cache_dir: Folder of token caches, best one that all nodes share. None: ~/.cache/lt_parallel.
        eod_token: Name of the end-of-document token in the tokenizer file. None: a common name such as
            <|endoftext|> if the vocabulary has one, else a new id after the vocabulary.
        predict_prompts: Texts to continue with `predict`; each is a batch of its own, {"tokens": [1, length]}.

    Raises:
        DataError: From the constructor for options that can't be right, from `setup` for text that can't be used.
    """

    def __init__(
        self,
        paths: list[str] | str,
        tokenizer: str = "bytes",
        seq_length: int = 1024,
        micro_batch_size: int = 1,
        pattern: str | None = None,
        val_fraction: float = 0.05,
        test_fraction: float = 0.0,
        shuffle: bool = True,
        num_workers: int = 0,
        cache_dir: str | None = None,
        eod_token: str | None = None,
        predict_prompts: list[str] | None = None,
    ) -> None:
        super().__init__()
        check_sizes(seq_length=seq_length, micro_batch_size=micro_batch_size, num_workers=num_workers)
        if not (val_fraction >= 0 and test_fraction >= 0 and val_fraction + test_fraction < 1):
            raise DataError(
                f"val_fraction={val_fraction} and test_fraction={test_fraction} must be at least 0 and together below "
                "1, so that something is left to train on; usual: val_fraction=0.05, test_fraction=0.0"
            )
        self.paths = paths
        self.tokenizer_spec = tokenizer
        self.seq_length = seq_length
        self.micro_batch_size = micro_batch_size
        self.pattern = pattern
        self.val_fraction = val_fraction
        self.test_fraction = test_fraction
        self.shuffle = shuffle
        self.num_workers = num_workers
        self.cache_dir = cache_dir
        self.eod_token = eod_token
        self.predict_prompts = predict_prompts
        self._datasets: dict[str, TokenWindows] = {}

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer, loaded on first use."""
        return build_tokenizer(self.tokenizer_spec, self.eod_token)

    @property
    def vocab_size(self) -> int:
        """One above the highest token id (before the padding that tensor parallelism wants); known before `setup`."""
        return self.tokenizer.vocab_size

    def check_source(self, stage: str) -> None:
        """Raise what can be told before any text is read; the strategy asks before other processes start.

        Args:
            stage: "fit", "validate", "test" or "predict".
        """
        if stage == "predict":
            self._encode_prompts()
            return
        self._wanted_splits(stage)
        files = list_files(self.paths, self.pattern)
        if self.tokenizer_spec == BYTES:  # a file of n bytes becomes n tokens and an end, an empty one nothing
            sizes = [file.size_bytes for file in files if file.size_bytes]
            self._check_length(sum(sizes) + len(sizes), len(sizes))

    def prepare_data(self) -> None:
        """Make the token cache on one rank while the others wait in Lightning's barrier, which has no time limit.

        A DataError isn't raised here: the other ranks would go on and wait for this one. `setup` meets it on every
        rank.
        """
        if self.trainer is not None and self.trainer.state.fn == TrainerFn.PREDICTING:
            return
        with suppress(DataError):
            self._open_cache()

    def setup(self, stage: str | None = None) -> None:
        """Open the corpus and make the data sets of a stage ("fit", "validate", "test", "predict"; None: all)."""
        wanted = self._wanted_splits(stage)
        if all(name in self._datasets for name in wanted):
            return
        cache = self._open_cache()
        self._check_length(cache.num_tokens, len(cache.hashes))
        segments = split_documents(cache.offsets, cache.hashes, self.val_fraction, self.test_fraction)
        for name in wanted:
            dataset = TokenWindows(cache, segments[name], self.seq_length)
            self._check_split(name, dataset, cache)
            self._datasets[name] = dataset

    def _wanted_splits(self, stage: str | None) -> list[str]:
        wanted = [name for name in SPLITS_OF_STAGE[stage] if self._fraction(name) > 0]
        if stage in ("validate", "test") and not wanted:
            option = "val_fraction" if stage == "validate" else "test_fraction"
            raise DataError(f"`{stage}` needs held-out text, but {option}=0; set for example {option}=0.05")
        return wanted

    def _open_cache(self) -> TokenCache:
        files = list_files(self.paths, self.pattern)
        return open_or_build(files, self.tokenizer, cache_root(self.cache_dir))

    def _fraction(self, split: str) -> float:
        held_out = {"val": self.val_fraction, "test": self.test_fraction}
        return held_out.get(split, 1 - self.val_fraction - self.test_fraction)

    def _check_length(self, total: int, documents: int) -> None:
        """Raise unless the text gives one sequence; before anything of a sequence's length is made."""
        needed = self.seq_length + 1
        if total < needed:
            raise DataError(
                f"the text holds {total} tokens ({documents} documents), but one sequence needs seq_length + 1 "
                f"= {needed}; add text, or set seq_length to at most {total - 1}"
            )

    def _check_split(self, name: str, dataset: TokenWindows, cache: TokenCache) -> None:
        """Raise unless a split gives one sequence, and the train split one batch."""
        total, needed = cache.num_tokens, self.seq_length + 1
        if len(dataset) == 0:
            fixes = ["add text"]
            if dataset.num_tokens > 1:
                fixes.append(f"set seq_length to at most {dataset.num_tokens - 1}")
            if name != "train":
                # A split may stay half empty where documents are large, hence twice the share.
                fixes.append(f"set {name}_fraction to {min(2 * needed / total, 0.5):.2g} or more")
            raise DataError(
                f"the {name} split holds {dataset.num_tokens} of the text's {total} tokens (share asked for: "
                f"{self._fraction(name):.4g}), but one sequence needs seq_length + 1 = {needed}; {', or '.join(fixes)}"
            )
        if name == "train" and len(dataset) < self.micro_batch_size:
            raise DataError(
                f"the train split gives {len(dataset)} sequences of seq_length={self.seq_length}, fewer than "
                f"micro_batch_size={self.micro_batch_size}; nearest valid: micro_batch_size={len(dataset)}"
            )

    @property
    def train_dataset(self) -> TokenWindows:
        """Training samples, after `setup`."""
        return self._datasets["train"]

    @property
    def val_dataset(self) -> TokenWindows | None:
        """Validation samples after `setup`; None if val_fraction is 0."""
        return self._datasets.get("val")

    @property
    def test_dataset(self) -> TokenWindows | None:
        """Test samples after `setup`; None if test_fraction is 0."""
        return self._datasets.get("test")

    def train_dataloader(self) -> DataLoader[Any]:
        """Training batches; a last batch that isn't full is left out."""
        return make_loader(
            self.train_dataset, self.micro_batch_size, self.num_workers, shuffle=self.shuffle, drop_last=True
        )

    def val_dataloader(self) -> DataLoader[Any] | list[DataLoader[Any]]:
        """Validation batches in order, the last one perhaps smaller; no loader if val_fraction is 0."""
        if self.val_dataset is None:
            return []
        return make_loader(self.val_dataset, self.micro_batch_size, self.num_workers)

    def test_dataloader(self) -> DataLoader[Any] | list[DataLoader[Any]]:
        """Test batches in order, the last one perhaps smaller; no loader if test_fraction is 0."""
        if self.test_dataset is None:
            return []
        return make_loader(self.test_dataset, self.micro_batch_size, self.num_workers)

    def predict_dataloader(self) -> DataLoader[Any]:
        """One batch per prompt, {"tokens": int64 [1, length]}, in the order given."""
        return make_loader(Prompts(self._encode_prompts()), 1, 0)

    def _encode_prompts(self) -> list[list[int]]:
        prompts = self.predict_prompts
        if not prompts:
            raise DataError('`predict` has no text to continue; set for example predict_prompts=["def "]')
        encoded = [self.tokenizer.encode(prompt) for prompt in prompts]
        for prompt, ids in zip(prompts, encoded, strict=True):
            if not 0 < len(ids) <= self.seq_length:
                raise DataError(
                    f"predict_prompts: {prompt[:40]!r} is {len(ids)} tokens; "
                    f"1 to seq_length={self.seq_length} can be continued"
                )
        return encoded


def check_sizes(**sizes: int) -> None:
    """Raise DataError unless each is a positive whole number (``num_workers`` may be 0)."""
    for name, value in sizes.items():
        least = 0 if name == "num_workers" else 1
        if not isinstance(value, int) or isinstance(value, bool):
            raise DataError(f"{name}={value!r} must be a whole number of at least {least}")
        if value < least:
            raise DataError(f"{name}={value} must be at least {least}; nearest valid: {name}={least}")


def make_loader(
    dataset: Dataset[Any], batch_size: int, num_workers: int, shuffle: bool = False, drop_last: bool = False
) -> DataLoader[Any]:
    """A DataLoader with PyTorch's own samplers, which strategies know how to replace by distributed ones."""
    return DataLoader(
        dataset,
        batch_size=batch_size,
        shuffle=shuffle,
        drop_last=drop_last,
        num_workers=num_workers,
        persistent_workers=num_workers > 0,
        pin_memory=torch.cuda.is_available(),
        collate_fn=_stack,
    )


def _stack(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Batch samples whose fields have equal shapes; a third of the general collate function's time."""
    return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}

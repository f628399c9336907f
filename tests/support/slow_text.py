"""A data module whose samples take their time."""

from __future__ import annotations

import time
from typing import Any

from torch.utils.data import DataLoader, Dataset

from lt_parallel.data import TextDataModule


class SlowTextDataModule(TextDataModule):
    """Sleeps before each training sample.

    Args:
        sample_s: Seconds per sample.
        options: As `TextDataModule`'s.
    """

    def __init__(self, sample_s: float = 0.0, **options: Any) -> None:
        super().__init__(**options)
        self.sample_s = sample_s

    def train_dataloader(self) -> DataLoader[Any]:
        loader = super().train_dataloader()
        return DataLoader(_Slow(loader.dataset, self.sample_s), batch_size=loader.batch_size, shuffle=True)


class _Slow(Dataset[Any]):
    def __init__(self, dataset: Any, sample_s: float) -> None:
        self._dataset, self._sample_s = dataset, sample_s

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        time.sleep(self._sample_s)
        return self._dataset[index]

"""Fixed-length training samples cut from a token cache."""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from lt_parallel.data.splits import Segments
from lt_parallel.data.token_cache import TokenCache
from lt_parallel.data.tokenizer import Tokens


class TokenWindows(Dataset[dict[str, Tensor]]):
    """Contiguous windows over some ranges of a corpus, read one after the other as if they were one text.

    Sample i is tokens [i * s, i * s + s] of that text (s = ``seq_length``): windows share one token, the last label of
    one being the first input of the next, so every token but the first is predicted once per epoch. What doesn't fill
    the last window is left out.

    Args:
        cache: The corpus.
        segments: Token ranges [start, stop), int64 [ranges, 2].
        seq_length: Tokens per sample.
    """

    def __init__(self, cache: TokenCache, segments: Segments, seq_length: int) -> None:
        self.seq_length = seq_length
        self._cache = cache
        self._starts = segments[:, 0]
        # _bounds[k] is where range k begins in the joined text; the last entry is its length.
        self._bounds = np.concatenate([[0], np.cumsum(segments[:, 1] - segments[:, 0])]).astype(np.int64)
        self._tokens: Tokens = cache.tokens()
        self._loss_mask = torch.ones(seq_length, dtype=torch.float32)
        self._position_ids = torch.arange(seq_length, dtype=torch.int64)

    def __len__(self) -> int:
        return max(0, (self.num_tokens - 1) // self.seq_length)

    @property
    def num_tokens(self) -> int:
        """Tokens in the ranges."""
        return int(self._bounds[-1])

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """The sample: tokens, labels, position_ids int64 [seq_length], loss_mask float32 [seq_length] (all ones)."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        begin = index * self.seq_length
        window = torch.from_numpy(self._read(begin, begin + self.seq_length + 1))
        return {
            "tokens": window[:-1],
            "labels": window[1:],
            "loss_mask": self._loss_mask,
            "position_ids": self._position_ids,
        }

    def _read(self, begin: int, end: int) -> "np.ndarray[Any, np.dtype[np.int64]]":
        """Tokens [begin, end) of the joined text."""
        out = np.empty(end - begin, dtype=np.int64)
        segment = int(np.searchsorted(self._bounds, begin, side="right")) - 1
        done = 0
        while done < len(out):
            within = begin + done - int(self._bounds[segment])
            take = min(len(out) - done, int(self._bounds[segment + 1]) - begin - done)
            first = int(self._starts[segment]) + within
            out[done : done + take] = self._tokens[first : first + take]
            done += take
            segment += 1
        return out

    def __getstate__(self) -> dict[str, Any]:
        # A memory map would be pickled as its whole content; a spawned DataLoader worker maps the file again instead.
        return {k: v for k, v in self.__dict__.items() if k != "_tokens"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._tokens = self._cache.tokens()


class Prompts(Dataset[dict[str, Tensor]]):
    """Encoded prompts; sample i is ``{"tokens": int64 [length of prompt i]}``.

    Args:
        ids: Token ids of each prompt.
    """

    def __init__(self, ids: list[list[int]]) -> None:
        self._ids = ids

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"tokens": torch.tensor(self._ids[index], dtype=torch.int64)}

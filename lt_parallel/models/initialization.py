"""Weights that depend on the seed and the model, and on nothing else.

Megatron Core draws each rank's shard from that rank's random stream, so the same seed gives other weights at another
tensor, pipeline or expert parallel size, and layouts can't be compared. Here a parameter is a slice of a global tensor,
and the global tensor is cut into tiles at places that depend on its shape only. A tile's numbers come from a
counter-based generator (Philox, 128-bit key) whose key is a hash of the seed, the parameter's global name and the
tile's position. A rank draws the tiles that its slice touches and keeps its part. So weights are equal, bit for bit, at
every layout and on every device; no rank ever holds a whole parameter; and the rows of a padded vocabulary don't move
when the padding does.

Which distribution a parameter has is Megatron Core's knowledge, spread over its modules. It is learnt by building the
model with initialisers that don't draw but fill the parameter with a code (``defer_initialization``); afterwards
``initialize_chunks`` reads the code and draws. A code in the values, unlike a mark on the Python object, survives what
happens to parameters in between: Transformer Engine wraps them anew, quantised ones are converted, a tied output layer
receives the embedding's values from the first stage. Global names and slices come from ``sharded_state_dict()``, the
same metadata by which checkpoints change layout.

    defer_initialization(config)            # before the model is built
    chunks = [GPTModel(config, ...), ...]
    initialize_chunks(chunks, seed)         # before Megatron's DDP or FSDP copies the parameters
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from megatron.core.dist_checkpointing.mapping import ShardedTensor
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.transformer_config import TransformerConfig

__all__ = ["DeferredNormal", "defer_initialization", "initialize_chunks"]

# Changing any of these changes the weights that a seed stands for.
_TILE_ROWS = 256
_TILE_COLUMNS = 512

# Small integers are exact in every parameter type, float8 included; 0 and 1 stay free for biases and norms.
_CODES = {"init_method": 2.0, "output_layer_init_method": 3.0, "embedding_init_method": 4.0}


@dataclass(frozen=True)
class DeferredNormal:
    """An initialiser that fills a tensor with a code, standing for a normal distribution to be drawn later.

    Args:
        code: the value to fill with.
        std: standard deviation of the distribution (its mean is 0).
    """

    code: float
    std: float

    def __call__(self, tensor: Tensor) -> Tensor:
        """Fill and return the tensor, as the functions of ``torch.nn.init`` do."""
        return nn.init.constant_(tensor, self.code)


def defer_initialization(config: TransformerConfig) -> None:
    """Replace a configuration's initialisers by deferred ones; call it before a model is built from it.

    Args:
        config: changed in place. Replacing twice is the same as once.

    Raises:
        ValueError: where an initialiser isn't Megatron Core's normal one (it can't be drawn in pieces), or where
            ``perform_initialization`` or ``use_cpu_initialization`` keep it from being called on the parameters.
    """
    if not config.perform_initialization or config.use_cpu_initialization:
        raise ValueError(
            f"perform_initialization={config.perform_initialization} and use_cpu_initialization="
            f"{config.use_cpu_initialization} don't go with initialisation that is equal at every layout (which needs "
            "no whole parameter in memory, and is the same on every device); leave them at True and False"
        )
    for field, code in _CODES.items():
        method = getattr(config, field)
        if not isinstance(method, DeferredNormal):
            setattr(config, field, DeferredNormal(code, _std_of(method, field)))


def initialize_chunks(chunks: Sequence[MegatronModule], seed: int) -> None:
    """Draw the parameters of this rank's model chunks.

    Biases, norms and whatever else was built with zeros or ones stay as they are. Time is about 20 ns per parameter
    and thread (``torch.get_num_threads()``); memory beyond the model's is a few MiB per thread.

    Args:
        chunks: Megatron Core modules with ``config`` and ``sharded_state_dict()``, built from a configuration that
            went through ``defer_initialization``, not yet wrapped for data parallelism.
        seed: any integer; the same one on every rank.

    Raises:
        ValueError: where a chunk's configuration wasn't prepared, or a parameter is neither drawn here nor constant,
            or isn't described by ``sharded_state_dict()``.
    """
    with torch.no_grad(), ThreadPoolExecutor(torch.get_num_threads()) as pool:
        for chunk in chunks:
            std_of_code = _std_of_code(chunk)
            # Layer numbers in the names, rather than as a leading axis, whether or not all layers are alike.
            entries = chunk.sharded_state_dict(metadata={"non_homogeneous_layers": True})
            for name, param in chunk.named_parameters():
                std = _std_of_parameter(name, param, std_of_code)
                if std is not None:
                    _draw_parameter(name, param, entries.get(name), std, seed, pool)


def _std_of(method: Any, field: str) -> float:
    keywords = getattr(method, "keywords", {})
    if getattr(method, "func", None) is not nn.init.normal_ or keywords.get("mean") != 0.0 or "std" not in keywords:
        raise ValueError(
            f"{field}={method!r} isn't Megatron Core's normal initialiser, so it can't be made equal at every layout; "
            "leave it unset and choose init_method_std (or embedding_init_method_std) instead"
        )
    return float(keywords["std"])


def _std_of_code(chunk: MegatronModule) -> dict[float, float]:
    methods = [getattr(chunk.config, field) for field in _CODES]
    if not all(isinstance(method, DeferredNormal) for method in methods):
        raise ValueError(
            f"{type(chunk).__name__} was built with initialisers that draw at once; "
            "call defer_initialization(config) before building it"
        )
    return {method.code: method.std for method in methods}


def _std_of_parameter(name: str, param: Tensor, std_of_code: dict[float, float]) -> float | None:
    """Standard deviation to draw with, or None for a parameter that is to stay as it is."""
    if param.numel() == 0:
        return None
    lowest, highest = (bound.item() for bound in torch.aminmax(param.float()))
    if lowest == highest and lowest in (0.0, 1.0):
        return None
    if lowest == highest and lowest in std_of_code:
        return std_of_code[lowest]
    raise ValueError(
        f"parameter {name} {tuple(param.shape)} holds values from {lowest} to {highest} that come from none of "
        f"{', '.join(_CODES)} and aren't all 0 or all 1, so its weights would depend on the parallel layout; "
        "its module must use one of config's initialisers"
    )


def _draw_parameter(name: str, param: Tensor, entry: Any, std: float, seed: int, pool: ThreadPoolExecutor) -> None:
    pieces = list(_sharded_tensors(entry))
    drawn = sum(piece.data.numel() for piece in pieces)
    storage = param.untyped_storage().data_ptr()
    if drawn != param.numel() or any(piece.data.untyped_storage().data_ptr() != storage for piece in pieces):
        raise ValueError(
            f"sharded_state_dict() describes {drawn} of the {param.numel()} values of parameter {name} in its own "
            "memory, so its place in the global tensor isn't known and it can't be initialised"
        )
    for piece in pieces:
        _draw_slice(piece, std, seed, pool)


def _sharded_tensors(entry: Any) -> Iterator[ShardedTensor]:
    """Leaves of a sharded state dict's entry. A gated fc1 is a factory that builds its two halves."""
    if hasattr(entry, "build"):
        entry = entry.build()
    if isinstance(entry, dict):
        entry = list(entry.values())
    if isinstance(entry, list):
        for item in entry:
            yield from _sharded_tensors(item)
    elif entry is not None:
        yield entry


def _draw_slice(piece: ShardedTensor, std: float, seed: int, pool: ThreadPoolExecutor) -> None:
    """Fill a local tensor with its slice of the global one, tile by tile."""
    leading = piece.prepend_axis_num  # e.g. the expert's number
    name = "/".join((piece.key, *map(str, piece.global_offset[:leading])))
    shape, start = piece.global_shape[leading:], piece.global_offset[leading:]
    local = piece.data
    if local.dim() == 1:
        shape, start, local = (*shape, 1), (*start, 0), local.unsqueeze(1)
    if local.dim() != 2:
        raise ValueError(f"parameter {piece.key} has {local.dim()} dimensions; only vectors and matrices can be drawn")
    (first_row, first_column), (rows, columns) = start, local.shape

    def draw(tile: tuple[int, int]) -> tuple[int, int, np.ndarray]:
        return *tile, _tile(f"{seed}/{name}", *tile, width=min(_TILE_COLUMNS, shape[1] - tile[1] * _TILE_COLUMNS))

    tiles = itertools.product(
        range(first_row // _TILE_ROWS, -(-(first_row + rows) // _TILE_ROWS)),
        range(first_column // _TILE_COLUMNS, -(-(first_column + columns) // _TILE_COLUMNS)),
    )
    # In batches, so that tiles which wait to be copied don't pile up.
    for batch in itertools.batched(tiles, 2 * torch.get_num_threads()):
        for tile_row, tile_column, values in pool.map(draw, batch):
            row, column = tile_row * _TILE_ROWS - first_row, tile_column * _TILE_COLUMNS - first_column
            target = local[max(row, 0) : row + _TILE_ROWS, max(column, 0) : column + _TILE_COLUMNS]
            row, column = max(-row, 0), max(-column, 0)
            source = torch.from_numpy(values)[row : row + target.size(0), column : column + target.size(1)]
            # Rounded before it travels, so that no device's rounding enters.
            target.copy_((source * std).to(target.dtype))


def _tile(name: str, tile_row: int, tile_column: int, width: int) -> np.ndarray:
    """Standard normal fp32 numbers of a tile, always at full height so that the global row count doesn't matter."""
    key = hashlib.blake2b(f"{name}/{tile_row}/{tile_column}".encode(), digest_size=16).digest()
    generator = np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little")))
    return generator.standard_normal((_TILE_ROWS, width), dtype=np.float32)

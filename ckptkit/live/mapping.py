"""Tensors that are views of a step's files."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ckptkit.checkpoint.places import data_prefix
from ckptkit.checkpoint.read.checkpoint import Checkpoint
from ckptkit.format.manifest import Manifest
from ckptkit.live.state.tensors import torch_dtype

_Bytes = npt.NDArray[np.uint8]


def mapped(checkpoint: Checkpoint, names: Sequence[str]) -> dict[str, torch.Tensor]:
    """Those of the tensors that lie in one piece of a local file, as views of it.

    That is a tensor of one chunk. At the usual chunk size it has less than half a MiB, as norms
    and biases have: a larger one is many chunks, with the headers of a zip file between them. It
    is not among those returned, nor is what lies where files cannot be mapped.

    A view is private: what is written to it stays in memory. It holds for as long as nobody cuts
    the file short, which ckptkit never does; the step may be replaced or removed meanwhile.
    """
    if checkpoint.store.location.scheme != "file":
        return {}
    manifest = checkpoint.manifest
    rows = _in_one_piece(manifest)
    found: dict[str, torch.Tensor] = {}
    packs: dict[int, _Bytes | None] = {}
    for name in names:
        info = checkpoint[name].info
        if info.name not in rows:
            continue
        row = rows[info.name]
        pack, offset = int(manifest.pack[row]), int(manifest.offset[row])
        if pack not in packs:
            packs[pack] = _map(checkpoint, pack)
        memory = packs[pack]
        if memory is not None and offset % info.dtype.itemsize == 0:
            count = math.prod(info.shape)
            dtype = torch_dtype(info.dtype)
            flat = torch.frombuffer(memory, dtype=dtype, count=count, offset=offset)
            found[name] = flat.reshape(info.shape)
    return found


def _in_one_piece(manifest: Manifest) -> dict[str, int]:
    """The rows of the chunks that are a whole array each, its elements one behind the other."""
    found = {}
    for row, info in zip(manifest.starts.tolist(), manifest.arrays, strict=False):
        grid = info.grid
        # What pads a chunk lies behind the elements only along the first dim.
        if grid.chunk_count == 1 and grid.stored_shape(grid.index(0))[1:] == info.shape[1:]:
            found[info.name] = row
    return found


def _map(checkpoint: Checkpoint, pack: int) -> _Bytes | None:
    """The bytes of a pack; None where the system does not map it."""
    manifest = checkpoint.manifest
    info = manifest.packs[pack]
    key = f"{data_prefix(checkpoint.prefix, manifest.save.save_id)}/{info.name}"
    # While it is open, its size is known to be what the manifest says: touching a page of a
    # mapping that has no file below it would kill the process.
    with checkpoint.packs.use(pack):
        try:
            storage: Any = torch.UntypedStorage.from_file(
                (checkpoint.store.location / key).path, shared=False, nbytes=info.size
            )
        except RuntimeError:
            return None
    whole: _Bytes = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
    return whole

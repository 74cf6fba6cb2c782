"""What Megatron's sharded tensors are of the parameters of a model: of each layer and expert, by
the names that steps have; and the folders of Megatron, in which its own small files are.
"""

from __future__ import annotations

import re
import shutil
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor

from ckptkit.errors import UsageError
from ckptkit.foreign.extents import Extent
from ckptkit.foreign.readers.megatron import HALF, OF_RANKS, parameters_of
from ckptkit.foreign.states import Path as Keys
from ckptkit.foreign.states import StateTensor
from ckptkit.live.state.tensors import dtype_of
from ckptkit.model import Box

BACKEND = "ckptkit"
"""What `metadata.json` says of a folder whose tensors are in a run of ours."""

OBJECT = "megatron"
"""The object of a step that has Megatron's `common.pt`, and its keys of tensors and objects."""

_NUMBERED = re.compile(r"(?:.*[^0-9])?(?:iter|step)[-_]?([0-9]{1,19})", re.ASCII)


class HeldPiece(NamedTuple):
    """What a rank holds of one array."""

    keys: Keys
    """Those that lead to it in the state dictionary of a job of torch."""
    shape: tuple[int, ...]
    """Of the whole array."""
    box: Box
    memory: torch.Tensor

    @property
    def fqn(self) -> str:
        """What DCP calls it."""
        return ".".join(map(str, self.keys))


def pieces_of(held: Any) -> Iterator[HeldPiece]:
    """The pieces that one of Megatron's sharded tensors is, as views of its memory."""
    data: torch.Tensor = held.data.detach()
    above = held.prepend_axis_num
    box = Box(tuple(held.global_offset), (1,) * above + tuple(data.shape))
    strides = (0,) * above + data.stride()
    dtype = dtype_of(held.key, data)
    whole = StateTensor(tuple(held.global_shape), dtype, (Extent(box, "", 0, strides),))
    if OF_RANKS.fullmatch(held.key):
        yield HeldPiece((held.key,), whole.shape, box, data)
        return
    for state, name, _, one in parameters_of(held.key, whole):
        for part in one.extents:
            assert part.strides is not None  # noqa: S101 — they were given
            start = data.storage_offset() + part.offset // dtype.itemsize
            memory = data.as_strided(part.box.shape, part.strides, start)
            parameter, shape, place = name, one.shape, part.box
            # The halves of a gated layer may have a key each: a parameter has both.
            if half := HALF.fullmatch(name):
                parameter, rows = half[1], shape[0]
                below = rows if half[2] == "v" else 0
                place = Box((place.offset[0] + below, *place.offset[1:]), place.shape)
                shape = (2 * rows, *shape[1:])
            keys: Keys = ("model", parameter)
            if state is not None:
                keys = ("optimizer", "state", parameter, state)
            yield HeldPiece(keys, shape, place, memory)


def leaves_of(state: Any) -> tuple[list[Any], list[Any]]:
    """The sharded tensors of a state dictionary, and its sharded objects."""
    leaves = list(nested_values(state))
    for leaf in leaves:
        if not isinstance(leaf, ShardedTensor | ShardedObject):
            raise UsageError("not of a sharded state dictionary", value=type(leaf).__name__)
    tensors = [leaf for leaf in leaves if isinstance(leaf, ShardedTensor)]
    return tensors, [leaf for leaf in leaves if isinstance(leaf, ShardedObject)]


def number_in(folder: Any) -> int:
    """The step that a folder is named after."""
    found = _NUMBERED.fullmatch(Path(folder).name)
    if found is None:
        raise UsageError(
            "the folder does not say which step this is",
            where=str(folder),
            hint="name it as Megatron does, such as iter_0000500, or take that of strategy.folder",
        )
    return int(found[1])


def temporary(owner: object) -> Path:
    """A folder that goes with its owner."""
    made = tempfile.mkdtemp(prefix="ckptkit-")
    weakref.finalize(owner, shutil.rmtree, made, ignore_errors=True)
    return Path(made)

"""Tensors made of others (`__tensor_flatten__`), such as quantised optimizer state: each is
saved as these, with a record of what they make. The record names a class, which nothing imports:
a load fills the parts of a tensor that is there, and compares the records.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ckptkit.errors import UnsupportedTypeError
from ckptkit.format.names import join, split
from ckptkit.live.adapters.adapter import Placements
from ckptkit.live.held import Held
from ckptkit.model import Placement, Shard, Strided

# Parts of torchao's optimizer state that are not cut as the whole is: one value for each block of
# consecutive elements, or a table that is the same on all ranks.
_BLOCKS, _TABLE = "blocks", "table"
_KNOWN: dict[str, dict[str, str]] = {
    "OptimState8bit": {"scale": _BLOCKS, "qmap": _TABLE},
    "OptimState4bit": {"codes": _BLOCKS, "scale": _BLOCKS, "qmap": _TABLE},
    "OptimStateFp8": {"scale": _BLOCKS},
}


def parts_of_tensor(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors that this rank's part is made of; nothing for one that has its own elements."""
    local: Any = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    if type(local) in (torch.Tensor, torch.nn.Parameter):
        return {}
    if not is_traceable_wrapper_subclass(local) or tensor.is_nested:
        return {}
    names, _ = local.__tensor_flatten__()
    return {name: getattr(local, name) for name in names}


def as_plain(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the shape and the cut of one that is made of others, with elements of its own."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    made = torch.empty(local.shape, dtype=local.dtype, device=local.device)
    if not isinstance(tensor, DTensor):
        return made
    mesh, cuts, shape, stride = tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride()
    return DTensor.from_local(made, mesh, cuts, run_check=False, shape=shape, stride=stride)


def part_name(name: str, part: str) -> str:
    """The name of the array of a part: one node, as that of the whole would be."""
    *above, last = split(name)
    return join(*above, f"{last}/{part}")


def record_of(tensor: torch.Tensor) -> dict[str, Any]:
    """What the parts make, in plain values that do not depend on how the tensor is cut."""
    local: Any = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    names, context = local.__tensor_flatten__()
    return {
        "type": f"{type(local).__module__}.{type(local).__qualname__}",
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        "inner": list(names),
        "context": _plain(context, tuple(local.shape)),
    }


def layout_of_part(
    name: str, key: str, part: torch.Tensor, whole: Held
) -> tuple[tuple[int, ...], dict[str, Placement]]:
    """The global shape of a part of a tensor and how the axes cut it."""
    shape, placements = whole.shape, whole.placements
    cuts = {a: p for a, p in placements.items() if isinstance(p, (Shard, Strided))}
    own, local = tuple(part.shape), tuple(whole.local.shape)
    kind: str = type(whole.local).__qualname__
    known = _KNOWN.get(kind, {}).get(key)
    if not cuts or own == local:
        return (shape if cuts else own), dict(placements)
    if known == _TABLE:
        return own, {axis: p for axis, p in placements.items() if axis not in cuts}
    along_rows = all(p.dim == 0 for p in cuts.values())
    if known is None and along_rows and own and own[0] == local[0]:
        # A part of another kind has as many rows only by chance, and not for other ranks.
        return (shape[0], *own[1:]), dict(placements)
    if known == _BLOCKS and along_rows and len(cuts) == 1 and part.numel():
        block, rest = divmod(math.prod(local), part.numel())
        of_row, within = divmod(math.prod(shape[1:]), block) if block else (0, 1)
        if not rest and not math.prod(shape) % block:
            ((axis, _),) = cuts.items()
            unit = 1 if within else max(of_row, 1)
            cut = dict(placements) | {axis: Shard(0, unit=unit)}
            return (math.prod(shape) // block,), cut
    raise UnsupportedTypeError(
        f"nothing says how this part of a {kind} is cut over ranks",
        where=name,
        value=own,
        hint='say it in rules={…}, such as {"*scale": {"fsdp": "shard(0)"}}, or "replicate" for '
        "what all ranks have alike",
    )


def always(placements: dict[str, Placement]) -> Placements:
    """These placements, as an entry of a model or an optimizer says them."""
    return lambda topology: placements  # noqa: ARG005 — asked for by all that say them


def _plain(value: Any, shape: tuple[int, ...]) -> Any:
    """A value of a context as one of the format; the rank's own shape is left out."""
    if isinstance(value, (tuple, list)):
        if shape and tuple(value) == shape:
            return "the shape"
        return [_plain(each, shape) for each in value]
    if isinstance(value, dict):
        return {str(key): _plain(each, shape) for key, each in value.items()}
    if value is None or type(value) in (bool, int, float, str):
        return value
    text = repr(value)
    return f"{type(value).__module__}.{type(value).__qualname__}" if " at 0x" in text else text

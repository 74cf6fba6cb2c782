"""A step as one plain document: what `ckpt show` prints, and what `--json` gives as it is."""

from __future__ import annotations

import re
from collections.abc import Iterable
from fnmatch import translate
from typing import TYPE_CHECKING, Any, TypeAlias

from ckptkit.cli.output import moment
from ckptkit.cli.values import as_json

from ckptkit.errors import NotFoundError

if TYPE_CHECKING:
    from ckptkit import Checkpoint, Strategy

Doc: TypeAlias = dict[str, Any]


def describe(checkpoint: Checkpoint, pattern: str | None = None, rank: int | None = None) -> Doc:
    """The whole document, with the arrays that match a pattern and what a rank holds of them."""
    arrays = _arrays(checkpoint, pattern, rank)
    return {
        "location": checkpoint.location,
        "step": checkpoint.step,
        "time": moment(checkpoint.time),
        "save_id": checkpoint.save_id,
        "writer": checkpoint.manifest.save.writer,
        "strategy": _strategy(checkpoint.strategy),
        "details": as_json(dict(checkpoint.details)),
        "packs": len(checkpoint.manifest.packs),
        "stored_bytes": stored_bytes(checkpoint),
        "bytes": sum(array["bytes"] for array in arrays if array["alias_of"] is None),
        "rank": None if rank is None else _rank(checkpoint.strategy, rank, arrays),
        "arrays": arrays,
        "objects": [
            {"name": item.name, "semantics": item.semantics, "value": as_json(item.value)}
            for item in checkpoint.manifest.objects
        ],
    }


def stored_bytes(checkpoint: Checkpoint) -> int:
    """The size of its packs."""
    return sum(pack.size for pack in checkpoint.manifest.packs)


def _arrays(checkpoint: Checkpoint, pattern: str | None, rank: int | None) -> list[Doc]:
    names: Iterable[str] = checkpoint.arrays
    if pattern is not None:
        matches = re.compile(translate(pattern)).match
        names = [name for name in names if matches(name)]
        if not names:
            raise NotFoundError(
                "no array of such a name",
                where=checkpoint.location,
                value=pattern,
                hint=f"`ckpt show {checkpoint.location}` lists them; * stands for any text",
            )
    cuts = _Cuts(rank)
    return [_array(checkpoint.arrays[name], cuts) for name in names]


class _Cuts:
    """How arrays lie on the ranks, worked out once for all that are alike."""

    def __init__(self, rank: int | None) -> None:
        self._rank = rank
        self._known: dict[Any, Doc] = {}

    def of(self, array: Any) -> Doc:
        """The fields that shape and placements decide."""
        info = array.info
        key = (info.shape, info.dtype.itemsize, info.placements)
        if key not in self._known:
            self._known[key] = self._worked_out(array)
        return self._known[key]

    def _worked_out(self, array: Any) -> Doc:
        layout = array.layout
        first = layout.part(layout.first_rank)
        axes = [axis.name for axis in layout.strategy.mesh.axes]
        return {
            "placements": dict(zip(axes, map(str, layout.placements), strict=True)),
            "parts": {
                "count": sum(1 for _ in layout.distinct_ranks()),
                "shape": first.shape,
                "boxes": len(first.boxes),
            },
            "part": None if self._rank is None else _part(array, self._rank),
        }


def _array(array: Any, cuts: _Cuts) -> Doc:
    info = array.info
    return {
        "name": array.name,
        "alias_of": array.alias_of,
        "shape": info.shape,
        "dtype": info.dtype.name,
        "role": info.role,
        "of": info.of,
        "bytes": info.nbytes,
        "chunks": info.grid.chunk_count,
        **cuts.of(array),
    }


def _part(array: Any, rank: int) -> Doc:
    part = array.part(rank)
    return {
        "shape": part.shape,
        "boxes": [{"offset": box.offset, "shape": box.shape} for box in part.boxes],
        "bytes": sum(box.size for box in part.boxes) * array.dtype.itemsize,
    }


def _strategy(strategy: Strategy) -> Doc:
    axes = [{"name": a.name, "kind": a.kind, "size": a.size} for a in strategy.mesh.axes]
    return {"text": str(strategy), "world_size": strategy.world_size, "axes": axes}


def _rank(strategy: Strategy, rank: int, arrays: list[Doc]) -> Doc:
    held = [array["part"]["bytes"] for array in arrays if array["alias_of"] is None]
    names = [axis.name for axis in strategy.mesh.axes]
    coords = dict(zip(names, strategy.mesh.coords(rank), strict=True))
    return {"rank": rank, "coords": coords, "bytes": sum(held)}

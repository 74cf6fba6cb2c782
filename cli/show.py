"""`ckpt show`: a step as one plain document, which `--json` gives as it is, and as lines: a head,
then its arrays as a tree, one line each.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from fnmatch import translate
from math import prod
from typing import Any, TypeAlias

import click
from ckptkit.cli.exits import CORRUPT
from ckptkit.cli.options import Options, command, location, storage
from ckptkit.cli.output import (
    aligned,
    answer,
    counted,
    in_short,
    json_value,
    keeping,
    moment,
    size_text,
    stored_bytes,
)

import ckptkit
from ckptkit.errors import NotFoundError, UsageError

Doc: TypeAlias = dict[str, Any]
Row: TypeAlias = tuple[str, ...]

_BOXES_SHOWN = 4
_SEMANTICS = {
    "replicated": "",
    "per_rank": ", by rank",
    "sum": ", to be summed",
    "split": ", to be shared out",
}


@command(
    "ckpt show runs/7b",
    "ckpt show runs/7b/step-0000001000 'model/*.wq.*' --rank 3",
    codes=[CORRUPT],
)
@location("step")
@click.argument("pattern", required=False)
@click.option("--rank", metavar="R", type=click.IntRange(min=0), help="Show what this rank holds.")
@click.option("--mapping", is_flag=True, help="Show what another program calls each array.")
@storage
def show(
    step: str,
    pattern: str | None,
    rank: int | None,
    *,
    mapping: bool,
    storage_options: Options | None,
    as_json: bool,
) -> None:
    """Show what is in STEP: strategy, arrays, objects.

    Each array has a line: name, dtype, shape, role, how many different parts it is cut into and the
    shape of the first, bytes. PATTERN, with * and ?, picks arrays by their whole name. With --rank
    the lines are of this rank alone: the shape of its part, and the boxes it is made of.

    STEP may be what another program wrote: its format is named then, and with --mapping each line
    is the name of an array here and there.
    """
    with keeping(), ckptkit.open(step, storage_options=storage_options) as checkpoint:
        if mapping and checkpoint.foreign is None:
            raise UsageError(
                "ckptkit wrote this step: its arrays have no other names",
                where=checkpoint.location,
                hint="leave --mapping out",
            )
        doc = describe(checkpoint, pattern, rank)
    lines: list[str] = []
    if not as_json:
        names = [(array["name"], array["theirs"]) for array in doc["arrays"]] if mapping else []
        with keeping():
            lines = aligned([("NAME", "IN ITS FILES"), *names]) if mapping else lines_of(doc)
    answer(doc, lines, as_json=as_json)


def describe(
    checkpoint: ckptkit.Checkpoint, pattern: str | None = None, rank: int | None = None
) -> Doc:
    """The whole document, with the arrays that match a pattern and what a rank holds of them."""
    arrays, strategy = _arrays(checkpoint, pattern, rank), checkpoint.strategy
    foreign, axes = checkpoint.foreign, strategy.mesh.axes
    packs = len(checkpoint.manifest.packs) if foreign is None else len(foreign.files)
    is_known = foreign is None or foreign.strategy is not None
    stored = [array for array in arrays if array["alias_of"] is None]
    held = None
    if rank is not None:
        names = [axis.name for axis in axes]
        coords = dict(zip(names, strategy.mesh.coords(rank), strict=True))
        nbytes = sum(array["part"]["bytes"] for array in stored)
        held = {"rank": rank, "coords": coords, "bytes": nbytes}
    return {
        "location": checkpoint.location,
        "step": checkpoint.step,
        "time": moment(checkpoint.time),
        "save_id": checkpoint.save_id,
        "writer": checkpoint.manifest.save.writer,
        "format": None if foreign is None else foreign.format,
        "strategy": {
            "text": str(strategy),
            "world_size": strategy.world_size,
            "axes": [{"name": a.name, "kind": a.kind, "size": a.size} for a in axes],
        }
        if is_known
        else None,
        "details": json_value(dict(checkpoint.details)),
        "packs": packs,
        "stored_bytes": stored_bytes(checkpoint),
        "bytes": sum(array["bytes"] for array in stored),
        "rank": held,
        "arrays": arrays,
        "objects": [
            {"name": item.name, "semantics": item.semantics, "value": json_value(item.value)}
            for item in checkpoint.manifest.objects
        ],
    }


def _arrays(checkpoint: ckptkit.Checkpoint, pattern: str | None, rank: int | None) -> list[Doc]:
    names: Iterable[str] = checkpoint.names
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
    is_foreign = checkpoint.foreign is not None
    theirs = {} if checkpoint.foreign is None else checkpoint.foreign.theirs
    known, found = dict[int, Doc](), list[Doc]()
    for name in names:
        info = checkpoint.info(name)
        # What is the same for all that are alike is worked out once.
        kind = id(info.kind)
        if kind not in known:
            known[kind] = _of_kind(checkpoint[name], rank)
        found.append(
            {
                "name": name,
                "theirs": theirs.get(name, name) if is_foreign else None,
                "alias_of": None if info.name == name else info.name,
                "of": info.of,
                **known[kind],
            }
        )
    return found


def _of_kind(array: Any, rank: int | None) -> Doc:
    """The fields that do not depend on names."""
    info, layout, held = array.info, array.layout, None
    first = layout.part(layout.first_rank)
    axes = [axis.name for axis in layout.strategy.mesh.axes]
    if rank is not None:
        part = array.part(rank)
        held = {
            "shape": part.shape,
            "boxes": [{"offset": box.offset, "shape": box.shape} for box in part.boxes],
            "bytes": sum(box.size for box in part.boxes) * array.dtype.itemsize,
        }
    return {
        "shape": info.shape,
        "dtype": info.dtype.name,
        "role": info.role,
        "bytes": info.nbytes,
        "chunks": info.grid.chunk_count,
        "placements": dict(zip(axes, map(str, layout.placements), strict=True)),
        "parts": {
            "count": sum(1 for _ in layout.distinct_ranks()),
            "shape": first.shape,
            "boxes": len(first.boxes),
        },
        "part": held,
    }


def lines_of(doc: Doc) -> list[str]:
    """The document for people."""
    by_rank = doc["rank"] is not None
    arrays = [a for a in doc["arrays"] if a["part"]["boxes"]] if by_rank else doc["arrays"]
    head = aligned(_head(doc, len(arrays)))
    return [*head, "", *aligned(_tree(arrays, by_rank=by_rank), right=[5])]


def _head(doc: Doc, shown: int) -> list[Row]:
    strategy, rank = doc["strategy"], doc["rank"]
    written_by = "unknown: the files do not say it"
    if strategy is not None:
        axes = []
        for axis in strategy["axes"]:
            kind = "" if axis["name"] == axis["kind"] else f" ({axis['kind']})"
            axes.append(f"{axis['name']}{kind} {axis['size']}")
        ranks = counted(strategy["world_size"], "rank") + (f": {' x '.join(axes)}" if axes else "")
        written_by = f"{strategy['text']} ({ranks})"
    what = "pack" if doc["format"] is None else "file"
    size = f"{size_text(doc['stored_bytes'])} in {counted(doc['packs'], what)}"
    rows: list[Row] = [("step", str(doc["step"])), ("where", doc["location"])]
    if doc["format"] is None:
        rows.append(("saved", f"{doc['time'] or 'at no date'} by {doc['writer']}"))
    else:
        rows.append(("format", f"{doc['format']}, which has no checksums"))
        rows.append(("saved", doc["time"] or "at no date"))
    rows += [("strategy", written_by), ("size", size)]
    if rank is not None:
        at = ", ".join(f"{axis} {coord}" for axis, coord in rank["coords"].items())
        held = f"holds {size_text(rank['bytes'])} of {counted(shown, 'array')}"
        rows.append(("rank", f"{rank['rank']} {f'({at}) ' if at else ''}{held}"))
    details = [f"{name} = {in_short(value)}" for name, value in doc["details"].items()]
    objects = [
        f"{item['name']}{_SEMANTICS[item['semantics']]} = {in_short(item['value'])}"
        for item in doc["objects"]
    ]
    for title, lines in (("details", details), ("objects", objects)):
        rows += [("" if number else title, line) for number, line in enumerate(lines)]
    return rows


def _tree(arrays: Sequence[Doc], *, by_rank: bool) -> list[Row]:
    # The bytes of every group; tied arrays count once, where they are stored.
    direct: Counter[str] = Counter()
    for array in arrays:
        if array["alias_of"] is None:
            nbytes = array["part"]["bytes"] if by_rank else array["bytes"]
            direct[array["name"].rpartition("/")[0]] += nbytes
    totals: Counter[str] = Counter()
    for group, nbytes in direct.items():
        while group:
            totals[group] += nbytes
            group = group.rpartition("/")[0]  # noqa: PLW2901 - upwards
    cells_of = _part_cells if by_rank else _whole_cells
    # Layers are alike: what has one shape, dtype and role, and the same cuts, has the same cells.
    known: dict[tuple[Any, ...], Row] = {}
    rows: list[Row] = []
    before, indent = "", ""
    groups: list[str] = []
    for array in arrays:
        group, _, leaf = array["name"].rpartition("/")
        if group != before:
            above, groups = groups, group.split("/") if group else []
            same = 0
            while same < min(len(groups), len(above)) and groups[same] == above[same]:
                same += 1
            for depth in range(same, len(groups)):
                size = size_text(totals["/".join(groups[: depth + 1])])
                rows.append(("  " * depth + f"{groups[depth]}/", "", "", "", "", size))
            before, indent = group, "  " * len(groups)
        kind = array["alias_of"], id(array["parts"])
        cells = known.get(kind)
        if cells is None:
            cells = known[kind] = cells_of(array)
        rows.append((indent + leaf, *cells))
    return rows


def _whole_cells(array: Doc) -> Row:
    shape, parts = array["shape"], array["parts"]
    size = size_text(array["bytes"])
    if array["alias_of"] is not None:
        cut, size = f"= {array['alias_of']}", ""
    elif not array["bytes"]:
        cut = "empty"
    elif parts["count"] == 1 and parts["shape"] == shape:
        cut = "whole"
    else:
        boxes = f" in {parts['boxes']} boxes" if parts["boxes"] > 1 else ""
        cut = f"{parts['count']} x {parts['shape']}{boxes}"
    return (array["dtype"], str(shape), array["role"], cut, size)


def _part_cells(array: Doc) -> Row:
    part = array["part"]
    boxes = []
    for box in part["boxes"][:_BOXES_SHOWN]:
        spans = zip(box["offset"], box["shape"], array["shape"], strict=True)
        boxes.append(
            f"[{', '.join(':' if n == whole else f'{a}:{a + n}' for a, n, whole in spans)}]"
        )
    if len(part["boxes"]) > _BOXES_SHOWN:
        boxes.append(f"+{len(part['boxes']) - _BOXES_SHOWN}")
    where = "whole" if prod(part["shape"]) == prod(array["shape"]) else " ".join(boxes)
    size = "" if array["alias_of"] else size_text(part["bytes"])
    return (array["dtype"], str(part["shape"]), array["role"], where, size)

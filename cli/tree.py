"""The document of a step as lines: a head, then its arrays as a tree, one line each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from math import prod
from typing import Any, TypeAlias

from ckptkit.cli.output import aligned, counted
from ckptkit.cli.quantity import size_text
from ckptkit.cli.values import in_short

Doc: TypeAlias = dict[str, Any]
Row: TypeAlias = tuple[str, ...]

_BOXES_SHOWN = 4
_SEMANTICS = {
    "replicated": "",
    "per_rank": ", by rank",
    "sum": ", to be summed",
    "split": ", to be shared out",
}


def lines_of(doc: Doc) -> list[str]:
    """All lines of the text."""
    by_rank = doc["rank"] is not None
    arrays = [a for a in doc["arrays"] if a["part"]["boxes"]] if by_rank else doc["arrays"]
    rows = _tree(arrays, "part" if by_rank else "whole")
    return [*aligned(_head(doc, len(arrays))), "", *aligned(rows, right=[5])]


def _head(doc: Doc, shown: int) -> list[Row]:
    strategy, rank = doc["strategy"], doc["rank"]
    size = f"{size_text(doc['stored_bytes'])} in {counted(doc['packs'], 'pack')}"
    rows: list[Row] = [
        ("step", str(doc["step"])),
        ("where", doc["location"]),
        ("saved", f"{doc['time'] or 'at no date'} by {doc['writer']}"),
        ("strategy", f"{strategy['text']} ({_axes(strategy)})"),
        ("size", size),
    ]
    if rank is not None:
        at = ", ".join(f"{axis} {coord}" for axis, coord in rank["coords"].items())
        held = f"holds {size_text(rank['bytes'])} of {counted(shown, 'array')}"
        rows.append(("rank", f"{rank['rank']} {f'({at}) ' if at else ''}{held}"))
    rows += _section("details", (f"{k} = {in_short(v)}" for k, v in doc["details"].items()))
    rows += _section("objects", map(_object, doc["objects"]))
    return rows


def _axes(strategy: Doc) -> str:
    ranks = counted(strategy["world_size"], "rank")
    axes = " x ".join(f"{_axis(axis)} {axis['size']}" for axis in strategy["axes"])
    return f"{ranks}: {axes}" if axes else ranks


def _axis(axis: Doc) -> str:
    return axis["name"] if axis["name"] == axis["kind"] else f"{axis['name']} ({axis['kind']})"


def _object(item: Doc) -> str:
    return f"{item['name']}{_SEMANTICS[item['semantics']]} = {in_short(item['value'])}"


def _section(title: str, lines: Iterable[str]) -> list[Row]:
    return [("" if number else title, line) for number, line in enumerate(lines)]


def _tree(arrays: Sequence[Doc], view: str) -> list[Row]:
    totals = _totals(arrays, view)
    rows: list[Row] = []
    above: list[str] = []
    for array in arrays:
        *groups, leaf = array["name"].split("/")
        if groups != above:
            rows += _group_rows(groups, above, totals)
            above = groups
        cells = _part_cells(array) if view == "part" else _whole_cells(array)
        rows.append(("  " * len(groups) + leaf, *cells))
    return rows


def _group_rows(groups: list[str], above: list[str], totals: Counter[str]) -> list[Row]:
    same = 0
    while same < min(len(groups), len(above)) and groups[same] == above[same]:
        same += 1
    return [
        (
            "  " * depth + f"{groups[depth]}/",
            "",
            "",
            "",
            "",
            size_text(totals["/".join(groups[: depth + 1])]),
        )
        for depth in range(same, len(groups))
    ]


def _totals(arrays: Sequence[Doc], view: str) -> Counter[str]:
    """The bytes of every group; tied arrays count once, where they are stored."""
    totals: Counter[str] = Counter()
    for array in arrays:
        if array["alias_of"] is None:
            nbytes = array["part"]["bytes"] if view == "part" else array["bytes"]
            group = array["name"].rpartition("/")[0]
            while group:
                totals[group] += nbytes
                group = group.rpartition("/")[0]
    return totals


def _whole_cells(array: Doc) -> Row:
    shape = str(array["shape"])
    if array["alias_of"] is not None:
        return (array["dtype"], shape, array["role"], f"= {array['alias_of']}", "")
    return (array["dtype"], shape, array["role"], _parts(array), size_text(array["bytes"]))


def _parts(array: Doc) -> str:
    parts = array["parts"]
    if not array["bytes"]:
        return "empty"
    if parts["count"] == 1 and parts["shape"] == array["shape"]:
        return "whole"
    boxes = f" in {parts['boxes']} boxes" if parts["boxes"] > 1 else ""
    return f"{parts['count']} x {parts['shape']}{boxes}"


def _part_cells(array: Doc) -> Row:
    part = array["part"]
    boxes = [_box(box, array["shape"]) for box in part["boxes"][:_BOXES_SHOWN]]
    if len(part["boxes"]) > _BOXES_SHOWN:
        boxes.append(f"+{len(part['boxes']) - _BOXES_SHOWN}")
    where = "whole" if prod(part["shape"]) == prod(array["shape"]) else " ".join(boxes)
    size = "" if array["alias_of"] else size_text(part["bytes"])
    return (array["dtype"], str(part["shape"]), array["role"], where, size)


def _box(box: Doc, shape: Sequence[int]) -> str:
    spans = zip(box["offset"], box["shape"], shape, strict=True)
    return f"[{', '.join(':' if n == whole else f'{a}:{a + n}' for a, n, whole in spans)}]"

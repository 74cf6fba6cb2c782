"""What people are shown: names in natural order, alike layers as one row; and in notebooks a card
of facts, tables, and small pictures of meshes, cuts and sizes.

What notebooks show is HTML that needs nothing else, in the colours of the notebook. Every text is
escaped: names come from files.
"""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import NamedTuple, TypeAlias

from ckptkit.model.document import size_text
from ckptkit.model.layout import Layout
from ckptkit.model.strategy import Strategy

_DIGITS = re.compile(r"[0-9]{2,}")
# A part of a name that is a number, as that of a layer is.
_NUMBER = re.compile(r"(?<![^./])([0-9]{1,6})(?![^./])")
_RUNS_SHOWN = 6

# At each place of a name that has a number: those of its row.
_Numbers: TypeAlias = tuple[tuple[str, ...], ...]


class Fold(NamedTuple):
    """A row of a folded list: one name, or several that differ only in their numbers."""

    name: str
    """Such as `model/layers.{0..31}.mlp.up_proj.weight`."""
    places: list[int]
    """Where the names of the row were in the list that was folded, in natural order."""


def natural_order(names: Iterable[str]) -> list[str]:
    """The names sorted, the numbers in them by value; those of a group stay together."""
    return sorted(names, key=_natural)


def _natural(name: str) -> str:
    """The text to sort by: a mark in front of each longer number says how long it is."""
    return _DIGITS.sub(lambda found: chr(min(56 + len(found[0]), 64)) + found[0], name)


def fold_names(names: Sequence[str], kinds: Iterable[Hashable]) -> list[Fold]:
    """The names in natural order; those of equal kind that differ only in numbers are one row.

    A kind is all that has to be equal besides the name. Where several numbers differ a row has
    every combination of what it shows.
    """
    alike: dict[tuple[Hashable, ...], list[tuple[list[str], int]]] = {}
    split = _NUMBER.split
    for place, (name, kind) in enumerate(zip(names, kinds, strict=True)):
        pieces = split(name)
        alike.setdefault((kind, *pieces[::2]), []).append((pieces[1::2], place))
    found: list[tuple[str, Fold]] = []
    for (_, *texts), members in alike.items():
        if len(members) == 1:
            ((_, place),) = members
            found.append((_natural(names[place]), Fold(names[place], [place])))
            continue
        for numbers, places in _rows(members):
            ends = [*map(_braced, numbers), ""]
            name = "".join(f"{text}{end}" for text, end in zip(texts, ends, strict=True))
            nodes = zip(names[places[0]].split("/"), name.split("/"), strict=True)
            # A row stands where its first name would, and one of its groups next to the others.
            key = "/".join(_natural(a) if a == b else f"{_natural(a)}\1{b}" for a, b in nodes)
            found.append((key, Fold(name, places)))
    found.sort(key=lambda row: row[0])
    return [fold for _, fold in found]


def _rows(members: list[tuple[list[str], int]]) -> Iterable[tuple[_Numbers, list[int]]]:
    """The rows of names that differ in numbers, each with its numbers at every position."""
    members.sort(key=lambda member: [*map(int, member[0])])
    columns = [
        tuple(dict.fromkeys(column)) for column in zip(*(m[0] for m in members), strict=True)
    ]
    if math.prod(map(len, columns)) == len(members):  # every combination, as nearly always
        return [(tuple(columns), [place for _, place in members])]
    # Of those that differ in one number only one row is made: number after number, from the last.
    rows: dict[_Numbers, list[int]] = {
        tuple((number,) for number in numbers): [place] for numbers, place in members
    }
    for position in reversed(range(len(columns))):
        merged: dict[_Numbers, tuple[list[str], list[int]]] = {}
        for numbers, places in rows.items():
            others = (*numbers[:position], *numbers[position + 1 :])
            here, all_places = merged.setdefault(others, ([], []))
            here += numbers[position]
            all_places += places
        rows = {
            (*others[:position], tuple(here), *others[position:]): places
            for others, (here, places) in merged.items()
        }
    return rows.items()


def _braced(numbers: tuple[str, ...]) -> str:
    """`{0..31}`, `{0,2,5..9}`; a number alone as it is."""
    if len(numbers) == 1:
        return numbers[0]
    runs = [[numbers[0], numbers[0]]]
    for before, number in pairwise(numbers):
        if int(number) == int(before) + 1 and str(int(number)).zfill(len(before)) == number:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    texts = [first if first == last else f"{first}..{last}" for first, last in runs]
    if len(texts) > _RUNS_SHOWN:
        texts[_RUNS_SHOWN - 2 : -1] = [".."]
    return f"{{{','.join(texts)}}}"


# In notebooks.

_ROWS, _COLUMNS = 8, 16  # of a mesh
_PARTS, _BARS, _RANKS = 64, 64, 1 << 16
_WIDTH, _HEIGHT = 240, 120
_CARD = (
    "border:1px solid #8886;border-radius:4px;padding:.5em .8em;display:inline-block;"
    "max-width:100%;overflow-x:auto"
)


def card(title: str, facts: Mapping[str, object], *parts: str) -> str:
    """A title, facts by their names, and what is HTML already."""
    rows = "".join(
        f'<tr><th style="text-align:left">{_text(name)}</th>'
        f'<td style="text-align:left">{_text(str(fact))}</td></tr>'
        for name, fact in facts.items()
    )
    inside = "".join(f'<div style="margin-top:.5em">{part}</div>' for part in parts if part)
    return f'<div style="{_CARD}"><b>{_text(title)}</b><table>{rows}</table>{inside}</div>'


def _text(text: str) -> str:
    """A text as HTML, with what would steer its reader escaped, such as marks of direction."""
    if not text.isprintable():
        text = "".join(
            c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text
        )
    from html import escape  # noqa: PLC0415 — no command needs it

    return escape(text)


@dataclass(frozen=True)
class Inline:
    """A whole page, which a notebook shows in a frame of its own."""

    page: str

    def __repr__(self) -> str:
        return f"Inline(a page of {size_text(len(self.page))}, for a notebook)"

    def _repr_html_(self) -> str:
        from html import escape  # noqa: PLC0415 — no command needs it

        style = "width:100%;height:640px;box-sizing:border-box;border:1px solid #8886"
        inside = f'sandbox="allow-scripts" srcdoc="{escape(self.page)}"'
        return f'<iframe style="{style}" {inside}></iframe>'


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; nothing where it has no rows."""
    cells = [[f"<td>{_text(text)}</td>" for text in row] for row in rows]
    names = "".join(f"<th>{_text(name)}</th>" for name in head)
    lines = "".join(f"<tr>{''.join(row)}</tr>" for row in cells)
    return f"<table><tr>{names}</tr>{lines}</table>" if cells else ""


def mesh_picture(strategy: Strategy) -> str:
    """The ranks of a strategy: the last axis from left to right, all others downwards."""
    *outer, last = strategy.mesh.sizes or (1,)
    rows, side, shapes = math.prod(outer), 24, []
    gap_after = outer[-1] if len(outer) > 1 else rows
    for row in range(min(rows, _ROWS)):
        for column in range(min(last, _COLUMNS)):
            rank = row * last + column
            coords = zip(strategy.mesh.axes, strategy.mesh.coords(rank), strict=True)
            title = ", ".join(f"{axis.name} {coord}" for axis, coord in coords)
            box = (column * side, row * side + row // gap_after * 4, side - 2, side - 2)
            title = f"rank {rank}: {title}" if title else "rank 0"
            shapes.append(_rect(box, column / last, str(rank), title))
    height = min(rows, _ROWS) * side + (min(rows, _ROWS) - 1) // gap_after * 4
    caption = " x ".join(f"{axis.name} {axis.size}" for axis in strategy.mesh.axes) or "one rank"
    if rows > _ROWS or last > _COLUMNS:
        caption += f", the first of {strategy.world_size} ranks"
    return _picture(shapes, min(last, _COLUMNS) * side, height, caption)


def cut_picture(layout: Layout) -> str:
    """The parts that ranks hold of a tensor, in two of its dims: those that are cut, or are the
    largest.
    """
    shape = layout.shape
    if not shape or 0 in shape or layout.strategy.world_size > _RANKS:
        return ""
    ranks = list(islice(layout.distinct_ranks(), _PARTS + 1))
    cut = [bool(edges) for edges in layout.edges]
    by_use = sorted(range(len(shape)), key=lambda dim: (not cut[dim], -shape[dim]))
    dims = sorted(by_use[:2])
    down, across = (shape[dims[0]], shape[dims[-1]]) if len(dims) > 1 else (1, shape[0])
    # A tensor of one long dim is a band, however long.
    height = min(_HEIGHT, max(20, round(_WIDTH * math.sqrt(down / across)))) if down > 1 else 20
    shapes = []
    for number, rank in enumerate(ranks[:_PARTS]):
        for box in layout.part(rank).boxes:
            x, width = box.offset[dims[-1]] / across, box.shape[dims[-1]] / across
            y, tall = (
                (0.0, 1.0)
                if len(dims) < 2
                else (box.offset[dims[0]] / down, box.shape[dims[0]] / down)
            )
            place = (x * _WIDTH, y * height, width * _WIDTH, tall * height)
            spans = ", ".join(
                ":" if length == whole else f"{start}:{start + length}"
                for start, length, whole in zip(box.offset, box.shape, shape, strict=True)
            )
            title = f"rank {rank}: [{spans}]"
            shapes.append(_rect(place, number / len(ranks), str(rank), title))
    names = " x ".join(f"dim {dim}" for dim in dims)
    caption = f"{names}: the lowest rank with each part"
    if len(ranks) > _PARTS:
        caption += f", the first {_PARTS}"
    return _picture(shapes, _WIDTH, height, caption)


def bytes_picture(sizes: Sequence[int]) -> str:
    """A bar for the bytes of each rank."""
    shown = sizes[:_BARS]
    most, width = max(shown, default=0) or 1, _WIDTH / max(1, len(shown))
    shapes = []
    for number, size in enumerate(shown):
        tall = size / most * 40
        place = (number * width, 40 - tall, max(1.0, width - 1), tall)
        shapes.append(_rect(place, number / len(shown), "", f"{number}: {size}"))
    more = f", the first {_BARS} of {len(sizes)}" if len(sizes) > _BARS else ""
    return _picture(shapes, _WIDTH, 40, f"bytes by rank{more}")


def _rect(box: tuple[float, float, float, float], turn: float, label: str, title: str) -> str:
    x, y, width, height = (round(number, 1) for number in box)
    rect = (
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" fill="hsl({turn * 360:.0f} 60% '
        f'70%)" stroke="#8888" stroke-width=".5"><title>{_text(title)}</title></rect>'
    )
    if not label or width < 7 * len(label) or height < 10:
        return rect
    middle = f'x="{x + width / 2:.1f}" y="{y + height / 2 + 3:.1f}"'
    text = f'<text {middle} text-anchor="middle" font-size="9" fill="#222">{_text(label)}</text>'
    return rect + text


def _picture(shapes: Sequence[str], width: float, height: float, caption: str) -> str:
    what = _text(caption)
    return (
        f'<svg width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'role="img" aria-label="{what}" font-family="sans-serif">{"".join(shapes)}</svg>'
        f"<div><small>{what}</small></div>"
    )

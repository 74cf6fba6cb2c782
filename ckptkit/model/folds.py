"""Names as people read them: `layers.2` before `layers.10`, and alike layers as one row."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Sequence
from itertools import pairwise
from math import prod
from typing import NamedTuple, TypeAlias

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
    if prod(map(len, columns)) == len(members):  # every combination, as nearly always
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

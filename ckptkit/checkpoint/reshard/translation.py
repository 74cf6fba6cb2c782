"""What another program calls the same tensors: tables of names, in which the rows of several may
make one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias

import numpy.typing as npt

from ckptkit.checkpoint.rules_file import document_in
from ckptkit.errors import FormatError, InvalidNameError, RulesError
from ckptkit.format.arrays import ArrayInfo
from ckptkit.format.names import inner_name, join, split
from ckptkit.model import Box, Grid, Placement, Shard, document
from ckptkit.model.rules import Expression, sizes_of

_OPTIONS = ("shares", "groups", "rows")


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """`count` rows of an array of the source that go over together."""

    number: int
    """The number of the array in the source's manifest."""
    source: ArrayInfo
    start: int
    """The first of them in the source."""
    at: int
    """The first of them in the target."""
    count: int


@dataclass(frozen=True, slots=True, eq=False)
class Chosen:
    """One array that goes over: its number in the source's manifest, and what it will be, here
    still cut as it was.
    """

    number: int
    source: ArrayInfo
    """What it is taken from; rows of several arrays as if these were one."""
    info: ArrayInfo
    rows: tuple[Rows, ...]
    """Where it is not one array of the source, whole: what it is made of."""
    equal: tuple[str, ...] = field(default=(), kw_only=True)
    """Names of scalars of the source that become one with it: their values have to be the same."""

    @property
    def name(self) -> str:
        return self.info.name

    @property
    def is_cast(self) -> bool:
        """Whether its values are converted."""
        return self.info.dtype != self.source.dtype

    @property
    def origins(self) -> list[tuple[int, ArrayInfo]]:
        """The arrays of the source that it is made of, with their numbers there."""
        if not self.rows:
            return [(self.number, self.source)]
        return list({rows.number: (rows.number, rows.source) for rows in self.rows}.values())

    def parts(
        self, box: Box, values: npt.NDArray[Any]
    ) -> Iterator[tuple[int, ArrayInfo, Box, npt.NDArray[Any]]]:
        """Boxes of arrays of the source that make a box of this one, and where in `values`."""
        if not self.rows:
            yield self.number, self.source, box, values
        first, *offset = box.offset if self.rows else (0,)
        for rows in self.rows:
            begin = max(first, rows.at)
            count = min(first + box.shape[0], rows.at + rows.count) - begin
            if count > 0:
                part = Box((begin - rows.at + rows.start, *offset), (count, *box.shape[1:]))
                yield rows.number, rows.source, part, values[begin - first :][:count]


@dataclass(frozen=True, slots=True)
class NameLine:
    """One tensor of both sides, or one whose rows are those of several of the other side.

    Such a tensor has `groups` equal parts, each with a share of the rows of each of the several.
    """

    sides: tuple[tuple[str, ...], tuple[str, ...]]
    """Names, in which a * stands for anything without a dot."""
    shares: tuple[Expression, ...]
    """How the rows divide among the several."""
    groups: Expression
    rows: Expression | None
    """How many rows count: more are padding."""


@dataclass(frozen=True, slots=True)
class Translation:
    """A table of names as two programs have them."""

    name: str
    lines: tuple[NameLine, ...]

    @classmethod
    def of(cls, what: TranslationLike) -> Translation:
        """A table itself, of a document, of those that come with ckptkit, or of a file."""
        if isinstance(what, Translation):
            return what
        if isinstance(what, Mapping):
            return _from_doc(what, "names")
        if what in translations():
            return translations()[str(what)]
        return _from_doc(document_in(what, [*translations()], "table"), Path(what).name)

    def applied(
        self, arrays: Sequence[Chosen], aliases: Mapping[str, str], sizes: Mapping[str, Any]
    ) -> tuple[list[Chosen], dict[str, tuple[str, ...]]]:
        """The arrays as the other side has them, and the new names of each; `aliases` are second
        names, with the first ones.
        """
        by_name = {chosen.name: chosen for chosen in arrays}
        by_name |= {name: by_name[first] for name, first in aliases.items()}
        inner = {name: inner_name(name, it.source.role) for name, it in by_name.items()}
        side = self._side_of(set(inner.values()))
        states = {name: _state(name, it.source.role) for name, it in by_name.items()}
        shapes = {
            inner[name]: it.source.shape
            for name, it in by_name.items()
            if it.source.role == "param"
        }
        known, made, new = sizes_of(sizes), list[Chosen](), dict[str, tuple[str, ...]]()
        told: set[tuple[str, ...]] = set()
        for line in self.lines:
            ours, theirs = line.sides[side], line.sides[1 - side]
            if ours in told:  # another spelling of the other side, of which the first is written
                continue
            told.add(ours)
            for names, text in _alike(ours, inner, states):
                inside = [_put_into(pattern, text) for pattern in theirs]
                role = by_name[names[0]].source.role
                targets = tuple(with_inner(names[0], role, it) for it in inside)
                if aliases.keys() & set(names) and len(ours) + len(theirs) > 2:
                    raise InvalidNameError("a tied tensor cannot be merged or cut", where=names[0])
                if twice := new.keys() & set(names):
                    raise InvalidNameError(
                        f"two lines of the table {self.name} have this array", where=min(twice)
                    )
                if line.rows is not None or len(ours) + len(theirs) > 2:
                    _check_states([by_name[name] for name in names], inner, shapes)
                new |= dict.fromkeys(names, targets)
                if names[0] not in aliases:
                    made += _made(line, [by_name[name] for name in names], targets, known)
        if missing := sorted(by_name.keys() - new.keys()):
            raise InvalidNameError(
                f"the table {self.name} does not say what {len(missing)} arrays are called",
                value=", ".join(missing[:3]),
                hint="--rename them first, leave them out with --exclude, or write a table",
            )
        return made, new

    def _side_of(self, names: set[str]) -> int:
        """The side whose names most of these are."""
        counts = []
        for side in (0, 1):
            patterns = [_compiled(pattern) for line in self.lines for pattern in line.sides[side]]
            counts.append(sum(any(p.fullmatch(name) for p in patterns) for name in names))
        if counts[0] == counts[1]:
            which = "as many names are of one side as of the other"
            raise InvalidNameError(
                f"{which if counts[0] else 'the names are of neither side'} of the table "
                f"{self.name}",
                value=", ".join(sorted(names)[:3]),
                hint="a * in a table stands for anything without a dot; --rename comes before it",
            )
        return 0 if counts[0] > counts[1] else 1


TranslationLike: TypeAlias = Translation | Mapping[str, Any] | str | os.PathLike[str]


def _alike(
    patterns: Sequence[str], inner: Mapping[str, str], states: Mapping[str, tuple[str, ...]]
) -> Iterator[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Names of arrays that the patterns of one side mean together, and what their * stand for."""
    groups: dict[tuple[Any, ...], dict[int, str]] = {}
    for number, pattern in enumerate(patterns):
        compiled = _compiled(pattern)
        for name, each in inner.items():
            if match := compiled.fullmatch(each):
                key = split(name)[0], states[name], match.groups()
                groups.setdefault(key, {})[number] = name
    for (_, _, text), found in groups.items():
        if len(found) < len(patterns):
            lost = next(p for number, p in enumerate(patterns) if number not in found)
            raise InvalidNameError(
                f"there is no {_put_into(lost, text)}, which makes one with it",
                where=next(iter(found.values())),
            )
        yield tuple(found[number] for number in range(len(patterns))), text


def _check_states(
    parts: Iterable[Chosen], inner: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Refuse state of an optimizer whose rows are not those of its parameter: of Adafactor one
    state is of the columns, and rows of it would be put together, or cut, where there are none.
    """
    for part in parts:
        shape = part.source.shape
        of = shapes.get(inner[part.name], shape)
        if part.source.role == "optimizer" and shape not in ((), of):
            raise InvalidNameError(
                f"state of the shape {shape}, of a parameter of {of}, cannot be merged or cut",
                where=part.name,
                hint="leave optimizer state out (--no-optimizer)",
            )


def _made(
    line: NameLine, parts: Sequence[Chosen], targets: Sequence[str], sizes: Mapping[str, int]
) -> Iterator[Chosen]:
    """The arrays of a line on the other side."""
    first = parts[0]
    if len(parts) == len(targets) == 1 and line.rows is None:
        yield replace(first, info=first.info._replace(name=targets[0]))
        return
    shapes = {part.info.shape[1:] for part in parts if part.info.shape}
    if not shapes and len(parts) == 1:
        # A number for each parameter: each part of it has the same.
        for name in targets:
            yield replace(first, info=first.info._replace(name=name))
        return
    kinds = {(part.info.dtype, part.source.dtype) for part in parts}
    if not any(part.info.shape for part in parts) and len(kinds) == 1:
        equal = tuple(part.source.name for part in parts[1:])
        yield replace(first, info=first.info._replace(name=targets[0]), equal=equal)
        return
    if len(shapes) != 1 or len(kinds) != 1 or not all(part.info.shape for part in parts):
        raise InvalidNameError(
            f"{len(parts)} arrays that are not alike cannot become one",
            where=first.name,
            value=[part.info.shape for part in parts],
            hint="leave optimizer state out (--no-optimizer), or cast them to one type",
        )
    try:
        yield from _merged_or_cut(line, parts, targets, sizes)
    except RulesError as error:
        error.where = error.where or first.name
        raise


def _merged_or_cut(
    line: NameLine, parts: Sequence[Chosen], targets: Sequence[str], sizes: Mapping[str, int]
) -> Iterator[Chosen]:
    """Several arrays as one, one as several, or one whose padding goes."""
    first, is_merge = parts[0], len(parts) > 1
    groups = line.groups.value(sizes)
    shares = [share.value(sizes) for share in line.shares]
    lengths = [part.info.shape[0] for part in parts]
    limit = None if line.rows is None else line.rows.value(sizes)
    if len(parts) == len(targets) == 1:
        # What is padding on one side is not there on the other.
        length = min(lengths[0], limit or lengths[0])
        rows = [Rows(first.number, first.source, 0, 0, length)]
        yield _of_rows(first, targets[0], rows, None)
        return
    unit, rest = divmod(sum(lengths), sum(shares))
    sought = [unit * share for share in shares]
    if rest or any(length % groups for length in sought) or (is_merge and sought != lengths):
        said = f"{sum(lengths)} rows do not divide as {shares}, in {groups} groups"
        if is_merge:
            said = f"rows {lengths} are not as {shares}, in {groups} groups"
        raise InvalidNameError(
            said, where=first.name, hint="pass the config.json of the model (--config, --set)"
        )
    made: list[list[Rows]] = [[] for _ in targets]
    # Through the one tensor, row by row: group by group, in each those of the several in order.
    row = 0
    for group in range(groups):
        for number, length in enumerate(sought):
            count = length // groups
            inside = group * count  # of the one of the several
            if is_merge:
                part = parts[number]
                made[0].append(Rows(part.number, part.source, inside, row, count))
            else:
                made[number].append(Rows(first.number, first.source, row, inside, count))
            row += count
    cut = Shard(0)
    if is_merge and all(sought):
        cut = Shard(0, tuple(sought)) if groups == 1 else Shard(0, None, sum(sought) // groups)
    for name, rows in zip(targets, made, strict=True):
        yield _of_rows(first, name, rows, cut)


def _of_rows(like: Chosen, name: str, rows: Iterable[Rows], cut: Shard | None) -> Chosen:
    """An array of rows of others: `cut` is how it is cut where these were, along their rows."""
    made = tuple(each for each in rows if each.count) or tuple(rows)[:1]
    shape = (sum(each.count for each in made), *like.info.shape[1:])
    grid = like.source.grid
    chunk_shape = grid.chunk_shape if grid.is_regular else grid.box(grid.index(0)).shape
    chunks = tuple(
        min(most, max(1, length)) for most, length in zip(chunk_shape, shape, strict=True)
    )
    placements: tuple[Placement, ...] = tuple(
        cut if cut is not None and isinstance(each, Shard) and each.dim == 0 else each
        for each in like.info.placements
    )
    new = Grid.regular(shape, chunks)
    origins = " + ".join(dict.fromkeys(each.source.name for each in made)) or like.source.name
    kind = replace(like.source.kind, shape=shape, grid=new, placements=placements)
    source = like.source._replace(name=origins, kind=kind)
    info = source._replace(name=name, kind=replace(kind, dtype=like.info.dtype))
    return Chosen(like.number, source, info, made)


def _state(name: str, role: str) -> tuple[str, ...]:
    """What of the name of an optimizer's array tells it from others of its parameter."""
    nodes = split(name)
    return nodes[-1:] if role == "optimizer" and len(nodes) > 2 else ()


def with_inner(name: str, role: str, inner: str) -> str:
    """The name of an array that is called otherwise inside of its group."""
    nodes = split(name)
    group, state = nodes[:1] if len(nodes) > 1 else (), _state(name, role)
    own, slashes = nodes[len(group) : len(nodes) - len(state)], inner.count("/")
    if slashes == "/".join(own).count("/"):
        # As many as before: one that was inside of a node, as of a part of a tensor, stays there.
        pieces = iter(inner.split("/"))
        new = ["/".join(islice(pieces, node.count("/") + 1)) for node in own]
    else:
        new = inner.split("/")
    try:
        return join(*group, *new, *state)
    except InvalidNameError as error:
        error.where = f"{name}, renamed"
        raise


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile("([^.]+)".join(map(re.escape, pattern.split("*"))))


def _put_into(pattern: str, text: Sequence[str]) -> str:
    first, *others = pattern.split("*")
    return first + "".join(map("".join, zip(text, others, strict=True)))


@cache
def translations() -> dict[str, Translation]:
    """The tables that come with ckptkit, by name."""
    folder = files("ckptkit") / "translations"
    paths = sorted(folder.iterdir(), key=lambda path: path.name)
    return {
        (name := path.name.removesuffix(".yaml")): _from_doc(document_in(Path(str(path))), name)
        for path in paths
    }


def _from_doc(doc: object, where: str) -> Translation:
    """The table that an untrusted document has; RulesError when it has none."""
    try:
        return Translation(where, tuple(_lines(doc, where)))
    except FormatError as error:
        refused = RulesError(f"no table of names: {error.what}", where=error.where)
        refused.has_value, refused.value = error.has_value, error.value
        raise refused from error


def _lines(doc: object, where: str) -> Iterator[NameLine]:
    lines = document.fields(doc, where, ("names",))["names"]
    if type(lines) is not list or not lines:
        raise FormatError("must be a list of lines", where=f"{where}.names", value=lines)
    sides: tuple[str, ...] = ()
    for number, line in enumerate(lines):
        at = f"{where}.names.{number}"
        if type(line) is not dict:
            raise FormatError("must be a map", where=at, value=line)
        sides = sides or tuple(key for key in line if key not in _OPTIONS)
        if len(sides) != 2:
            raise FormatError("must have the names of two sides", where=at, value=line)
        yield _line(document.fields(line, at, sides, _OPTIONS), sides, at)


def _line(doc: Mapping[str, Any], sides: Sequence[str], where: str) -> NameLine:
    first, second = (
        tuple(each) if type(each) is list else (each,) for each in (doc[side] for side in sides)
    )
    patterns = [document.text(pattern, where) for pattern in (*first, *second)]
    if not first or not second or min(len(first), len(second)) > 1:
        raise FormatError("must have one name on one side at least", where=where, value=dict(doc))
    if any(len(set(side)) < len(side) for side in (first, second)):
        raise FormatError("must have each name of a side once", where=where, value=dict(doc))
    if len({pattern.count("*") for pattern in patterns}) > 1:
        raise FormatError("must have as many * in each name", where=where, value=dict(doc))
    several = max(len(first), len(second))
    shares = doc.get("shares", [1] * several)
    if type(shares) is not list or len(shares) != several:
        raise FormatError(f"must have {several} shares", where=where, value=shares)
    rows = doc.get("rows")
    if rows is not None and several > 1:
        raise FormatError("counts rows of one tensor only", where=where, value=rows)
    return NameLine(
        (first, second),
        tuple(_expression(share, where) for share in shares),
        _expression(doc.get("groups", 1), where),
        None if rows is None else _expression(rows, where),
    )


def _expression(value: object, where: str) -> Expression:
    if type(value) is not int and type(value) is not str:
        raise FormatError("must be a number or arithmetic over sizes", where=where, value=value)
    return Expression(str(value))

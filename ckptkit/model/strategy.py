"""Over which ranks a job is spread: its mesh of axes, written `pp:2,tp:2,fsdp:2`. And how one axis
cuts one tensor: placements, as values, as text, and as part of a document.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, fields
from typing import Any, TypeAlias

from ckptkit.errors import FormatError, LayoutError, StrategyError, nearest
from ckptkit.model.box import MAX_COORDINATE
from ckptkit.model.document import Fields

_EXAMPLES = "fsdp:8, tp:4, ddp:2,fsdp:4, pp:2,tp:2,fsdp:2, hsdp:2x4 or single"
_AXIS_HINT = "an axis is <kind>:<size>, such as fsdp:8"
# Each of them cuts the optimizer over its own ranks; two would cut it twice.
_SHARDERS = ("fsdp", "zero1", "zero2", "zero3")


@dataclass(frozen=True, slots=True)
class Strategy:
    """How a job is spread over ranks, written `fsdp:8` or `pp:2,tp:2,fsdp:2`.

    An axis whose name is not its kind is written `name=kind:size`, so that str() can always be
    parsed back to the same strategy.
    """

    mesh: Mesh

    def __post_init__(self) -> None:
        found = [axis.kind for axis in self.mesh.axes if axis.kind in _SHARDERS]
        if len(found) > 1:
            raise StrategyError(
                f"at most one axis can be {', '.join(_SHARDERS)}",
                value=str(self),
                hint="replicas of sharded groups are written ddp:<n>,fsdp:<m>",
            )

    @classmethod
    def parse(cls, text: str) -> Strategy:
        """The strategy that a text such as `pp:2,tp:2,fsdp:2` names."""
        where = f"strategy {_shortened(text)}"
        if text != text.lower():
            hint = f"write {_shortened(text.lower())}"
            raise StrategyError("strategies are written in lower case", where=where, hint=hint)
        if not text.strip():
            hint = f"one rank alone is `single`; {_EXAMPLES}"
            raise StrategyError("the strategy is empty", where=where, hint=hint)
        items = [] if text.strip() == "single" else text.split(",")
        try:
            return cls(Mesh(tuple(axis for item in items for axis in _axes(item.strip()))))
        except StrategyError as error:
            error.where = where
            raise

    @classmethod
    def of(cls, what: str | Strategy) -> Strategy:
        if isinstance(what, Strategy):
            return what
        if not isinstance(what, str):
            raise StrategyError("a strategy is a text", value=what, hint=f"such as {_EXAMPLES}")
        return cls.parse(what)

    @property
    def world_size(self) -> int:
        return self.mesh.world_size

    def __repr__(self) -> str:
        return f"Strategy({str(self)!r})"

    def __str__(self) -> str:
        named = (("" if a.name == a.kind else f"{a.name}=", a) for a in self.mesh.axes)
        return ",".join(f"{name}{axis.kind}:{axis.size}" for name, axis in named) or "single"

    def to_doc(self) -> dict[str, object]:
        """The strategy as plain values, for a manifest."""
        axes = [{"name": a.name, "kind": a.kind, "size": a.size} for a in self.mesh.axes]
        return {"axes": axes, "rank_order": "row-major"}

    @classmethod
    def from_doc(cls, doc: object, *, where: str = "strategy") -> Strategy:
        """The strategy of an untrusted document; FormatError when it is not one."""
        entry = Fields(doc, where)
        order, axes = entry.text("rank_order"), entry.items("axes")
        entry.finish()
        if order != "row-major":
            raise FormatError("must be 'row-major'", where=entry.at("rank_order"), value=order)
        if len(axes) > MAX_AXES:
            raise FormatError(
                f"must be a list of at most {MAX_AXES} axes", where=entry.at("axes"), value=axes
            )
        read = []
        for i, axis in enumerate(axes):
            at = f"{where}.axes.{i}"
            entry = Fields(axis, at)
            name, kind = entry.text("name"), entry.text("kind")
            size = entry.integer("size", least=1, below=MAX_WORLD_SIZE + 1)
            entry.finish()
            try:
                read.append(Axis(name, kind, size))
            except StrategyError as error:
                raise FormatError(error.what, where=at, value=axis) from error
        try:
            return cls(Mesh(tuple(read)))
        except StrategyError as error:
            raise FormatError(error.what, where=where, value=doc) from error


def _axes(item: str) -> list[Axis]:
    if not item:
        raise StrategyError("an axis is missing between commas", hint=f"such as {_EXAMPLES}")
    if item == "single":
        raise StrategyError("single stands alone", hint="leave it out, or leave out the others")
    label, colon, size = (piece.strip() for piece in item.partition(":"))
    name, named, kind = (piece.strip() for piece in label.rpartition("="))
    if not colon:
        raise StrategyError(f"{_shortened(item)} has no size", hint=_AXIS_HINT)
    if kind != "hsdp" or named:
        return [_axis(name if named else kind, kind, size)]
    outer, times, inner = (piece.strip() for piece in size.partition("x"))
    if not times:
        raise StrategyError("hsdp takes two sizes", hint="replicas x shards, such as hsdp:2x4")
    return [_axis("ddp", "ddp", outer), _axis("fsdp", "fsdp", inner)]


def _axis(name: str, kind: str, size: str) -> Axis:
    # Eight digits hold every size a mesh may have, and int() of more could take long.
    if size and not re.fullmatch(r"[0-9]{1,8}", size):
        raise StrategyError(
            f"{_shortened(size)} is not a size", hint="sizes are whole numbers from 1 to 2**24"
        )
    if not size:
        raise StrategyError("an axis has no size", hint=_AXIS_HINT)
    return Axis(name, kind, int(size))


def _shortened(text: str) -> str:
    return repr(text if len(text) <= 80 else f"{text[:80]}…")


KINDS = ("ddp", "fsdp", "zero1", "zero2", "zero3", "tp", "pp", "ep")
MAX_WORLD_SIZE = 2**24
# Axes of size one cost nothing in ranks, so ranks alone would not bound a hostile mesh.
MAX_AXES = 32

_NAME = re.compile(r"[a-z_][a-z0-9_]{0,63}")


@dataclass(frozen=True, slots=True)
class Axis:
    """One direction of a mesh: what kind of parallelism runs along it, and over how many ranks."""

    name: str
    kind: str
    size: int

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise StrategyError(
                "not a name for a mesh axis",
                value=self.name,
                hint="lower-case letters, digits and _, at most 64",
            )
        if self.kind not in KINDS:
            guess = nearest(self.kind, KINDS)
            raise StrategyError(
                "unknown kind of axis",
                value=self.kind,
                hint=f"{guess}accepted are {', '.join(KINDS)}, hsdp:<n>x<m>, or single",
            )
        if type(self.size) is not int or not 1 <= self.size <= MAX_WORLD_SIZE:
            raise StrategyError(
                f"the size of axis {self.name} must be an integer from 1 to 2**24",
                value=self.size,
                hint=f"leave the axis out, or say how many ranks lie along it: {self.kind}:2",
            )


@dataclass(frozen=True, slots=True)
class Mesh:
    """Ranks in a grid, numbered row-major: the first axis is the slowest. No axes: one rank."""

    axes: tuple[Axis, ...] = ()

    def __post_init__(self) -> None:
        names = [axis.name for axis in self.axes]
        for i, name in enumerate(names):
            if name in names[:i]:
                raise StrategyError(
                    f"axis {name} appears twice", hint=f"give it one size: {name}:<n>"
                )
        if len(self.axes) > MAX_AXES:
            raise StrategyError(
                f"more than {MAX_AXES} axes",
                value=len(self.axes),
                hint="axes of size 1 can be left out",
            )
        if self.world_size > MAX_WORLD_SIZE:
            raise StrategyError(
                "a mesh of more than 2**24 ranks",
                value=self.world_size,
                hint="it has as many ranks as the product of the sizes of its axes",
            )

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(axis.size for axis in self.axes)

    @property
    def world_size(self) -> int:
        return math.prod(self.sizes)

    def coords(self, rank: int) -> tuple[int, ...]:
        """The coordinate of a rank on every axis."""
        if not 0 <= rank < self.world_size:
            raise StrategyError(f"no such rank on a mesh of {self.world_size} ranks", value=rank)
        coords = []
        for axis in reversed(self.axes):
            rank, coord = divmod(rank, axis.size)
            coords.append(coord)
        return tuple(reversed(coords))

    def rank(self, coords: tuple[int, ...]) -> int:
        if len(coords) != len(self.axes):
            raise StrategyError(f"a mesh of {len(self.axes)} axes needs as many", value=coords)
        rank = 0
        for axis, coord in zip(self.axes, coords, strict=True):
            if not 0 <= coord < axis.size:
                raise StrategyError(f"axis {axis.name} has {axis.size} ranks", value=coord)
            rank = rank * axis.size + coord
        return rank


_GRAMMAR = (
    "accepted are replicate, shard(0), shard(0, blocks=[4096,1024,1024], unit=128), "
    "strided(0), owner(3), stage(1)"
)


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every rank along the axis holds the same."""

    def __str__(self) -> str:
        return "replicate"


@dataclass(frozen=True, slots=True)
class Shard:
    """The ranks along the axis cut a dim as torch.chunk does; the last may get less or nothing.

    With blocks, each block of a fused dim is cut on its own. With a unit, cuts fall on multiples
    of it only, and where there are fewer units than ranks, consecutive ranks hold the same one.
    """

    dim: int
    blocks: tuple[int, ...] | None = None
    unit: int = 1

    def __post_init__(self) -> None:
        _check("dim", self.dim, 0)
        _check("unit", self.unit, 1)
        if self.blocks is None:
            return
        if not self.blocks:
            raise LayoutError("a list of blocks cannot be empty", hint="leave blocks out")
        for block in self.blocks:
            _check("block", block, 1)
        _check("sum of the blocks", sum(self.blocks), 1)

    def __str__(self) -> str:
        blocks = "" if self.blocks is None else f", blocks=[{','.join(map(str, self.blocks))}]"
        unit = "" if self.unit == 1 else f", unit={self.unit}"
        return f"shard({self.dim}{blocks}{unit})"


@dataclass(frozen=True, slots=True)
class Strided:
    """As Shard, but cut after the axes to the right that cut the same dim (FSDP over TP)."""

    dim: int
    unit: int = 1

    def __post_init__(self) -> None:
        _check("dim", self.dim, 0)
        _check("unit", self.unit, 1)

    def __str__(self) -> str:
        unit = "" if self.unit == 1 else f", unit={self.unit}"
        return f"strided({self.dim}{unit})"


@dataclass(frozen=True, slots=True)
class _OnOne:
    """Whole on one coordinate of the axis, nowhere else."""

    coord: int

    def __post_init__(self) -> None:
        _check("coord", self.coord, 0)

    def __str__(self) -> str:
        return f"{type(self).__name__.lower()}({self.coord})"


class Owner(_OnOne):
    """On one rank: ZeRO-1 assigns tensors to ranks."""

    __slots__ = ()


class Stage(_OnOne):
    """On one stage of a pipeline."""

    __slots__ = ()


Placement: TypeAlias = Replicate | Shard | Strided | Owner | Stage

# As texts and documents call them.
_PLACEMENTS: dict[str, type[Placement]] = {
    kind.__name__.lower(): kind for kind in (Replicate, Shard, Strided, Owner, Stage)
}

_CALL = re.compile(
    r"(?P<kind>shard|strided|owner|stage)\s*\(\s*(?P<number>\d{1,19})\s*"
    r"(?:,\s*blocks\s*=\s*\[(?P<blocks>[\d\s,]*)\]\s*)?(?:,\s*unit\s*=\s*(?P<unit>\d{1,19})\s*)?\)",
    re.ASCII,
)


def parse_placement(text: str) -> Placement:
    """The placement that a text such as `shard(0, unit=128)` names; str() gives the text back."""
    text = text.strip()
    if text == "replicate":
        return Replicate()
    match = _CALL.fullmatch(text)
    if match is None:
        raise LayoutError("not a placement", value=text, hint=_GRAMMAR)
    kind, number, unit = match["kind"], int(match["number"]), int(match["unit"] or 1)
    if kind == "shard":
        if match["blocks"] is None:
            return Shard(number, None, unit)
        blocks = [block.strip() for block in match["blocks"].split(",")]
        if not all(re.fullmatch(r"[0-9]{1,19}", block) for block in blocks):
            raise LayoutError("not a list of blocks", value=text, hint=_GRAMMAR)
        return Shard(number, tuple(map(int, blocks)), unit)
    if match["blocks"] is None and kind == "strided":
        return Strided(number, unit)
    if match["blocks"] is not None or match["unit"] is not None:
        raise LayoutError(f"{kind} takes no such option", value=text, hint=_GRAMMAR)
    return Owner(number) if kind == "owner" else Stage(number)


def placement_to_doc(placement: Placement) -> dict[str, object]:
    """The placement as plain values, defaults left out."""
    doc: dict[str, object] = {"kind": type(placement).__name__.lower()}
    for field in fields(placement):
        value = getattr(placement, field.name)
        if value != field.default:
            doc[field.name] = list(value) if isinstance(value, tuple) else value
    return doc


def placement_from_doc(doc: object, *, where: str = "placement") -> Placement:
    """The placement of an untrusted document; FormatError when it is not one."""
    entry = Fields(doc, where)
    kind = _PLACEMENTS.get(entry.form("kind"))
    if kind is None:
        raise FormatError("is no placement of a known kind", where=where, value=doc)
    names = {field.name for field in fields(kind)}
    said: dict[str, Any] = {each: entry.integer(each) for each in ("dim", "coord") if each in names}
    if "unit" in names and entry.has("unit"):
        said["unit"] = entry.integer("unit", least=1)
    if "blocks" in names and entry.has("blocks"):
        said["blocks"] = entry.integers("blocks", least=1)
    try:
        found = kind(**said)
    except LayoutError as error:  # no blocks, or more of them than fit a dim
        raise FormatError(error.what, where=where, value=doc) from error
    entry.finish()
    return found


def _check(what: str, value: int, least: int) -> None:
    if type(value) is not int or not least <= value <= MAX_COORDINATE:
        raise LayoutError(f"the {what} must be an integer from {least} to 2**62", value=value)

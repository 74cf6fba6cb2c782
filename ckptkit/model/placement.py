"""How one axis of a mesh cuts one tensor, as a value, as text, and as part of a document."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TypeAlias

from ckptkit.errors import FormatError, LayoutError
from ckptkit.model.box import MAX_COORDINATE
from ckptkit.model.document import Fields

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
        return f"shard({self.dim}{blocks}{_unit(self.unit)})"


@dataclass(frozen=True, slots=True)
class Strided:
    """As Shard, but cut after the axes to the right that cut the same dim (FSDP over TP)."""

    dim: int
    unit: int = 1

    def __post_init__(self) -> None:
        _check("dim", self.dim, 0)
        _check("unit", self.unit, 1)

    def __str__(self) -> str:
        return f"strided({self.dim}{_unit(self.unit)})"


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
    match placement:
        case Replicate():
            return {"kind": "replicate"}
        case Owner(coord):
            return {"kind": "owner", "coord": coord}
        case Stage(coord):
            return {"kind": "stage", "coord": coord}
    doc: dict[str, object] = {"kind": "strided", "dim": placement.dim}
    if isinstance(placement, Shard):
        doc["kind"] = "shard"
        if placement.blocks is not None:
            doc["blocks"] = list(placement.blocks)
    if placement.unit != 1:
        doc["unit"] = placement.unit
    return doc


def placement_from_doc(doc: object, *, where: str = "placement") -> Placement:
    """The placement of an untrusted document; FormatError when it is not one."""
    fields = Fields(doc, where)
    found: Placement | None = None
    kind = fields.form("kind")
    try:
        if kind == "replicate":
            found = Replicate()
        elif kind in ("owner", "stage"):
            coord = fields.integer("coord")
            found = Owner(coord) if kind == "owner" else Stage(coord)
        elif kind in ("shard", "strided"):
            dim = fields.integer("dim")
            unit = fields.integer("unit", least=1) if fields.has("unit") else 1
            if kind == "strided":
                found = Strided(dim, unit)
            else:
                blocks = fields.integers("blocks", least=1) if fields.has("blocks") else None
                found = Shard(dim, blocks, unit)
    except LayoutError as error:  # no blocks, or more of them than fit a dim
        raise FormatError(error.what, where=where, value=doc) from error
    if found is None:
        raise FormatError("is no placement of a known kind", where=where, value=doc)
    fields.finish()
    return found


def _unit(unit: int) -> str:
    return "" if unit == 1 else f", unit={unit}"


def _check(what: str, value: int, least: int) -> None:
    if type(value) is not int or not least <= value <= MAX_COORDINATE:
        raise LayoutError(f"the {what} must be an integer from {least} to 2**62", value=value)

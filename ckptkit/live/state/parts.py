"""The tensors of a job as one rank holds them: each with its global shape, how the axes cut it,
and this rank's part. Rules say so for those that were cut by hand.

A tensor made of others (`__tensor_flatten__`), such as quantised optimizer state, is saved as
these, with a record of what they make. The record names a class, which nothing imports: a load
fills the parts of a tensor that is there, and compares the records.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from os import PathLike
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.distributed.tensor import DTensor

from ckptkit.checkpoint.rules_file import RulesLike, load_rules
from ckptkit.errors import LayoutError, RulesError, UnsupportedTypeError
from ckptkit.format.names import OPTIMIZER, inner_name, join, split
from ckptkit.live.state.tensors import bytes_of, dtype_name
from ckptkit.live.state.topology import Topology
from ckptkit.model import Box, Owner, Part, Placement, Replicate, Shard, Strided, parse_placement
from ckptkit.model.document import located
from ckptkit.model.rules import Cut, Experts, Rule, Rules

HowCut: TypeAlias = Placement | Cut | Experts
Index: TypeAlias = tuple[slice, ...]


class LiveTensor(NamedTuple):
    """A named tensor: its global shape, how the axes cut it, and this rank's own part."""

    name: str
    shape: tuple[int, ...]
    placements: Mapping[str, Placement]
    """One object for those that are cut alike, mostly."""
    local: torch.Tensor
    role: str = "other"
    of: str | None = None
    alike_along: frozenset[str] = frozenset()
    """The axes along which all ranks are known to hold the same values."""
    of_first: frozenset[str] = frozenset()
    """The axes along which the first rank's values are about to become those of all."""

    own: Part | None = None
    """What this rank holds, where no placements say it: those here are what it is saved as."""
    tensor: DTensor | None = None
    """The tensor that holds it then."""

    @property
    def nbytes(self) -> int:
        """The bytes of the whole tensor."""
        return math.prod(self.shape) * self.local.element_size()

    def in_memory(self, local: torch.Tensor) -> LiveTensor:
        """The same tensor where this rank has other memory for it."""
        # Not `_replace`, which takes several times as long: a job may have 100,000.
        name, shape, placements, _, role, of, alike_along, of_first, own, tensor = self
        of_it = role, of, alike_along, of_first, own, tensor
        return LiveTensor(name, shape, placements, local, *of_it)

    def part(self, topology: Topology) -> Part:
        """What this rank holds of it."""
        if self.own is not None:
            return self.own
        return topology.part(self.name, self.shape, self.placements)

    def moved(self, topology: Topology) -> LiveTensor:
        """The tensor as its placements say. Where the rank holds something else this is a
        collective of the tensor's mesh, and a copy in host memory.
        """
        if self.own is None or self.tensor is None:
            return self
        whole = self.tensor.full_tensor().detach()
        # Torch knows strided pieces that differ in size by more than one way of counting.
        for there, here in indices(self.own, self.shape):
            # As bytes: NaNs and signs of zeros count too.
            if not torch.equal(bytes_of(whole[there]), bytes_of(self.local[here])):
                raise LayoutError(
                    "torch gathers this DTensor to something else than what its rank holds",
                    where=self.name,
                    value=str(self.tensor.placements),
                )
        part = topology.part(self.name, self.shape, self.placements)
        local = torch.empty(part.shape, dtype=whole.dtype, device="cpu")
        for there, here in indices(part, self.shape):
            local[here] = whole[there]
        return self._replace(local=local, own=None, tensor=None)

    def saved_placements(self, topology: Topology) -> tuple[Placement, ...]:
        """How each axis cuts what is saved. Ranks that hold the same share the writing; where they
        may differ, as buffers do, a mixture would be nobody's values: the first rank's are saved.
        """
        unsure = topology.unsure(self.alike_along)
        return tuple(
            self.placements.get(axis.name) or (Owner(0) if axis.name in unsure else Replicate())
            for axis in topology.strategy.mesh.axes
        )


@lru_cache(maxsize=1024)
def indices(part: Part, shape: tuple[int, ...]) -> tuple[tuple[Index, Index], ...]:
    """For each box of a part: the index of it in the whole tensor, and in what the rank holds."""
    whole, own = Box.whole(shape), Box.whole(part.shape)
    pairs = zip(part.boxes, part.places, strict=True)
    return tuple((box.within(whole), place.within(own)) for box, place in pairs)


@dataclass(frozen=True, slots=True)
class HandCuts:
    """What is said of tensors, by kind of axis; the first match counts."""

    said: tuple[tuple[Rule, Mapping[str, HowCut]], ...] = ()
    sizes: Mapping[str, int] = field(default_factory=dict)
    inside: bool = False
    """Whether patterns match names inside of their groups, as those of rules files do."""

    @classmethod
    def of(cls, what: RulesLike | None) -> HandCuts:
        """What rules say, the name of a preset or a file of such, or a document of either kind:
        rules as a file has them, or `{"*.wqkv.weight": {"tp": "shard(0)"}}`, which are placements
        by patterns of whole names.
        """
        if isinstance(what, Mapping) and isinstance(what.get("rules"), list | tuple):
            what = Rules.from_doc(what, where="rules=")
        elif isinstance(what, (str, PathLike)):
            if what == "auto":
                raise RulesError(
                    "cuts by hand are not guessed",
                    where="rules=",
                    value=what,
                    hint="name the preset that the model was cut by, such as llama",
                )
            what = load_rules(what)
        said: list[tuple[Rule, Mapping[str, HowCut]]] = []
        if isinstance(what, Rules):
            for rule in what.rules:
                cuts = {"tp": rule.tp, "ep": rule.ep}
                said.append((rule, {k: cut for k, cut in cuts.items() if cut is not None}))
            return cls(tuple(said), what.known, inside=True)
        for pattern, by_kind in (what or {}).items():
            if not isinstance(by_kind, Mapping):
                raise RulesError(
                    "not placements by kind of axis",
                    where=f"rules={{{pattern!r}: ...}}",
                    value=by_kind,
                    hint='write {"*.wqkv.weight": {"tp": "shard(0)"}}, or {"rules": [...]} as in a '
                    "file",
                )
            how = {k: parse_placement(p) if isinstance(p, str) else p for k, p in by_kind.items()}
            said.append((Rule((pattern,)), how))
        return cls(tuple(said))

    def find(
        self, name: str, shape: tuple[int, ...], *, of: str | None = None
    ) -> Mapping[str, HowCut]:
        """What is said of a tensor of this name, or with `of` of state that follows that one."""
        if self.inside and (not shape or (of is None and name.startswith(f"{OPTIMIZER}/"))):
            return {}  # 0-d, or in another shape than its parameter: replicated
        asked = inner_name(of or name, "param") if self.inside else of or name
        found = (by for rule, by in self.said if rule.fits(asked, shape, self.sizes))
        return next(found, {})

    def sliced(
        self, name: str, shape: tuple[int, ...], *, of: str | None = None
    ) -> set[int] | None:
        """The dims that it is cut along, where something is said of the tensor."""
        said = self.find(name, shape, of=of)
        cuts = (how.dim for how in said.values() if isinstance(how, Shard | Strided | Cut))
        return {dim for dim in cuts if dim is not None} if said else None

    def placement(
        self, name: str, how: HowCut, shape: tuple[int, ...], size: int
    ) -> tuple[Placement, tuple[int, ...]]:
        """How an axis of `size` ranks cuts a tensor, and the whole shape of one of which each of
        them holds an equal part.
        """
        if isinstance(how, Experts):
            raise RulesError(
                "experts that are tensors of their own are not told apart in a training job",
                where=name,
                value=how.expert,
                hint="stack them in one tensor, and cut that along the axis",
            )
        if isinstance(how, Cut):
            whole = shape
            if how.dim is not None and how.dim < len(shape):
                whole = (*shape[: how.dim], shape[how.dim] * size, *shape[how.dim + 1 :])
            with located(name):
                how = how.placement(whole, self.sizes)
        if not isinstance(how, Shard):
            return how, shape
        if how.dim >= len(shape):
            raise LayoutError(f"there is no dim {how.dim} in a tensor of {shape}", where=name)
        extent = shape[how.dim] * size
        if how.blocks is not None:
            extent = sum(how.blocks)
        return how, (*shape[: how.dim], extent, *shape[how.dim + 1 :])


def boxes_here(topology: Topology, held: LiveTensor) -> list[tuple[Box, tuple[Any, ...]]]:
    """The boxes of a tensor that this rank holds, and where each is in its memory: an index with an
    ellipsis, so that it also gives a view of what has no dims.
    """
    part, shape = held.part(topology), tuple(held.local.shape)
    if not part.boxes and 0 in shape:
        return []  # torch's empty parts have lost their other dims
    if part.shape != shape:
        raise LayoutError(
            f"this rank should hold {part.shape} of {held.shape}, but the tensor here has {shape}",
            where=held.name,
            hint="if it was cut by hand, say how with rules={…}",
        )
    pairs = zip(part.boxes, indices(part, held.shape), strict=True)
    return [(box, (*here, ...)) for box, (_, here) in pairs]


# Parts of torchao's optimizer state that are not cut as the whole is: one value for each block of
# consecutive elements, or a table that is the same on all ranks.
_BLOCKS, _TABLE = "blocks", "table"
_KNOWN: dict[str, dict[str, str]] = {
    "OptimState8bit": {"scale": _BLOCKS, "qmap": _TABLE},
    "OptimState4bit": {"codes": _BLOCKS, "scale": _BLOCKS, "qmap": _TABLE},
    "OptimStateFp8": {"scale": _BLOCKS},
}


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
        "dtype": dtype_name(tensor.dtype),
        "shape": list(tensor.shape),
        "inner": list(names),
        "context": _plain(context, tuple(local.shape)),
    }


def layout_of_part(
    name: str, key: str, part: torch.Tensor, whole: LiveTensor
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

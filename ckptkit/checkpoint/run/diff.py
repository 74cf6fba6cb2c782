"""Where the states in two steps differ, and how much, whatever their strategies: as records, lines
and a card. Their arrays are streamed side by side.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptkit.checkpoint.places import Place, stores_at
from ckptkit.checkpoint.read.checkpoint import Checkpoint, open_checkpoint
from ckptkit.checkpoint.read.stream import (
    STREAM_MEMORY,
    Band,
    Limits,
    Readable,
    stored_arrays,
    stream,
)
from ckptkit.checkpoint.run.verify import object_digest, state_objects
from ckptkit.checkpoint.workers import Progress, uncollected
from ckptkit.errors import UsageError
from ckptkit.format.names import check_used, inner_name, matches, pattern_list
from ckptkit.format.objects import whole
from ckptkit.model import DType
from ckptkit.model.display import card, fold_names, natural_order, table
from ckptkit.model.document import counted, parse_size, size_text
from ckptkit.storage import Options

# What the numbers of a block are converted to, a few times over.
_SPARE = 4 << 20
# So many elements at a time: what they are converted to stays in the cache, and small.
_BLOCK = 1 << 14
_LARGEST = float(2**64)
_SHOWN = 20

Array = npt.NDArray[Any]
_Pair = tuple[Readable | None, Readable | None]


@uncollected()
def diff(  # noqa: PLR0913 — one keyword for each decision, all with defaults
    a: Place,
    b: Place,
    *,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    atol: float = 0.0,
    rtol: float = 0.0,
    memory: int | str = STREAM_MEMORY,
    threads: int | None = None,
    progress: Progress | None = None,
    storage_options: Options | None = None,
    source_options: Options | None = None,
) -> Diff:
    """What differs between two steps (of runs: their newest ones), whose strategies may differ.

    Elements are the same if their bits are, and with `atol` or `rtol` if they are at most `atol`
    plus `rtol` times the size of `b`'s apart; NaNs are all the same then. Patterns, with * and ?,
    pick arrays and objects by their whole name or the one inside of their group. Every chunk is
    checked, and no more than `memory` is in use. `storage_options` reach both, unless
    `source_options` are those of `a`.
    """
    patterns = pattern_list(include, "include"), pattern_list(exclude, "exclude")
    tolerance = Tolerance(atol, rtol)
    stores = stores_at(a, b, storage_options, source_options)
    with ExitStack() as stack:
        sides = [stack.enter_context(open_checkpoint(store)) for store in stores]
        limits = Limits.of(parse_size(memory), threads, sides=2, spare=_SPARE, sources=sides)
        chosen = _chosen(sides, *patterns)
        stored = [stored_arrays(c, limits.chunk_bytes, limits.pace(c.store)) for c in sides]
        names = sorted(chosen.intersection({*stored[0], *stored[1]}))
        pairs = {name: (stored[0].get(name), stored[1].get(name)) for name in names}
        arrays, nbytes = _compare_arrays(pairs, tolerance, limits, progress)
        count, objects = _compare_objects(sides, chosen, tolerance)
        ours, theirs = (Compared(c.location, c.step, c.written_by) for c in sides)
        return Diff(ours, theirs, arrays, objects, len(pairs), count, nbytes)


def _kind(a: Readable | None, b: Readable | None) -> str:
    """What makes two arrays different, unless their values are all that can."""
    if a is None or b is None:
        return "only_b" if a is None else "only_a"
    if a.shape != b.shape:
        return "shape"
    return "values" if a.dtype == b.dtype else "dtype"


def _compare_arrays(
    pairs: Mapping[str, _Pair], tolerance: Tolerance, limits: Limits, progress: Progress | None
) -> tuple[tuple[ArrayDifference, ...], int]:
    """What of the arrays differs, by their names, and the bytes that were compared."""
    # Tied arrays are read, and counted, once.
    alike = [pair for pair in dict.fromkeys(pairs.values()) if _kind(*pair) == "values"]
    items = [[side for side in pair if side is not None] for pair in alike]
    found: dict[_Pair, Apart] = {}
    lock = threading.Lock()

    def compare(band: Band, values: Sequence[npt.NDArray[Any]]) -> None:
        pair, dtype = alike[band.item], items[band.item][0].dtype
        ours, theirs = (side.reshape(-1) for side in values)
        here = apart(dtype, ours, theirs, tolerance, band.start)
        if here is not None:
            with lock:
                found[pair] = here.joined(found[pair]) if pair in found else here

    stream(items, compare, limits, progress=progress)
    differences = []
    for name, pair in pairs.items():
        kind, values = _kind(*pair), None
        if kind == "values":
            array, here = pair[0], found.get(pair)
            if array is None or here is None:
                continue
            first = tuple(int(place) for place in np.unravel_index(here.first, array.shape))
            values = ValueDifference(here.count, array.size, here.most, first)
        a, b = (None if side is None else ArrayForm(side.shape, side.dtype.name) for side in pair)
        differences.append(ArrayDifference(name, kind, a, b, values))
    return tuple(differences), sum(item[0].nbytes for item in items)


def _compare_objects(
    sides: Sequence[Checkpoint], chosen: set[str], tolerance: Tolerance
) -> tuple[int, tuple[ObjectDifference, ...]]:
    """How many objects of both steps are wanted, and which of them differ."""
    ours, theirs = (
        {o.name: o for o in state_objects(side.manifest.objects, side.names)} for side in sides
    )
    names = sorted(chosen.intersection({*ours, *theirs}))
    found = []
    for name in names:
        a, b = ours.get(name), theirs.get(name)
        if a is not None and b is not None and a.semantics != b.semantics:
            found.append(ObjectDifference(name, "semantics", a.semantics, b.semantics))
            continue
        x, y = (None if item is None else whole(item) for item in (a, b))
        if a is None or b is None:
            found.append(ObjectDifference(name, "only_b" if a is None else "only_a", x, y))
        elif object_digest(a) != object_digest(b) and not is_near(x, y, tolerance):
            found.append(ObjectDifference(name, "value", x, y))
    return len(names), tuple(found)


def _chosen(
    sides: Sequence[Checkpoint], include: tuple[str, ...], exclude: tuple[str, ...]
) -> set[str]:
    """The names of arrays and objects of both steps that are wanted."""
    if not include and not exclude:
        every = (item.name for side in sides for item in side.manifest.objects)
        return {*sides[0].names, *sides[1].names, *every}
    # Each with its name inside of its group.
    names: list[tuple[str, str]] = []
    for side in sides:
        names += [(name, inner_name(name, side.info(name).role)) for name in side.names]
        objects = [item.name for item in side.manifest.objects]
        names += [(name, name.partition("/")[2] or name) for name in objects]
    # What means nothing must not make two steps the same.
    check_used((*include, *exclude), names, "nothing in either step has such a name")
    return {
        name
        for name, inner in names
        if (not include or matches(include, name, inner)) and not matches(exclude, name, inner)
    }


@dataclass(frozen=True, slots=True)
class ArrayForm:
    """What an array is, but for its values."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class ValueDifference:
    """How many elements of an array differ, and how much."""

    count: int
    of: int
    max_abs: int | float | None
    """The largest difference; None where none is a number, as between a number and a NaN."""
    first: tuple[int, ...]
    """The index of the first of them, in row-major order."""


@dataclass(frozen=True, slots=True)
class ArrayDifference:
    """An array that is not the same in both steps."""

    name: str
    kind: str
    """only_a, only_b, shape, dtype or values."""
    a: ArrayForm | None
    b: ArrayForm | None
    values: ValueDifference | None = None

    def __str__(self) -> str:
        a, b, values = self.a, self.b, self.values
        if a is None or b is None:
            return f"{self.name}: only in {'B' if a is None else 'A'}"
        if self.kind == "shape":
            return f"{self.name}: shape {a.shape} != {b.shape}"
        if values is None:
            return f"{self.name}: dtype {a.dtype} != {b.dtype}"
        most = "" if values.max_abs is None else f" by {values.max_abs:.6g} at most"
        first = f", first at {list(values.first)}" if values.first else ""
        return f"{self.name}: {values.count} of {counted(values.of, 'element')} differ{most}{first}"


@dataclass(frozen=True, slots=True)
class ObjectDifference:
    """An object that is not the same in both steps; sums by their total, splits by all items."""

    name: str
    kind: str
    """only_a, only_b, semantics or value."""
    a: Any
    b: Any


@dataclass(frozen=True, slots=True)
class Compared:
    """One of the two steps."""

    location: str
    step: int
    strategy: str


@dataclass(frozen=True, slots=True)
class Diff:
    """Two steps, what of them was compared, and what differs, sorted by name."""

    a: Compared
    b: Compared
    arrays: tuple[ArrayDifference, ...]
    objects: tuple[ObjectDifference, ...]
    array_count: int
    object_count: int
    nbytes: int
    """The bytes of the arrays that were compared, on one side."""

    @property
    def same(self) -> bool:
        """Whether they are the same state."""
        return not self.arrays and not self.objects

    def lines(self) -> list[str]:
        """A line for each array that differs, the largest difference first: other names, shapes and
        dtypes are larger than any, and alike layers share a line of these.
        """
        others = [each for each in self.arrays if each.values is None]
        kinds = [(each.kind, each.a, each.b) for each in others]
        found = []
        for name, places in fold_names([each.name for each in others], kinds):
            count = f", {len(places)} x" if len(places) > 1 else ""
            found.append(str(replace(others[places[0]], name=f"{name}{count}")))
        apart = {e.name: (e.values.max_abs, e) for e in self.arrays if e.values is not None}
        ordered = [apart[name] for name in natural_order(apart)]
        # Of a NaN there is no difference: it comes before all of them.
        ordered.sort(key=lambda pair: -math.inf if pair[0] is None else -pair[0])
        return [*found, *(str(each) for _, each in ordered)]

    def summary(self) -> str:
        """What came of it, on one line."""
        between = f"A {self.a.strategy}, B {self.b.strategy}"
        arrays, objects = counted(self.array_count, "array"), counted(self.object_count, "object")
        if self.same:
            return f"the same state: {arrays}, {objects}, {size_text(self.nbytes)} ({between})"
        differing = ((self.arrays, arrays), (self.objects, objects))
        parts = [f"{len(items)} of {every}" for items, every in differing if items]
        verb = "differs" if len(self.arrays) + len(self.objects) == 1 else "differ"
        return f"{' and '.join(parts)} {verb} ({between})"

    def __repr__(self) -> str:
        return f"Diff({self.summary()})"

    def _repr_html_(self) -> str:
        lines = [line.rpartition(": ") for line in self.lines()]
        rows = [(name, what) for name, _, what in lines[:_SHOWN]]
        if len(lines) > _SHOWN:
            rows.append((f"and {len(lines) - _SHOWN} more", ""))
        facts = {"A": self.a.location, "B": self.b.location, "": self.summary()}
        if self.objects:
            facts["objects"] = ", ".join(each.name for each in self.objects[:_SHOWN])
        return card("diff", facts, table(("array", "differs"), rows))


# How far apart two values are: elements of arrays, by their bits or within a tolerance, and what is
# no array.


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far apart two numbers may be: `atol`, and `rtol` times the second one."""

    atol: float = 0.0
    rtol: float = 0.0

    def __post_init__(self) -> None:
        for name, value in (("atol", self.atol), ("rtol", self.rtol)):
            if not 0 <= value < math.inf:
                raise UsageError("a tolerance is a number from 0 on", where=name, value=value)

    @property
    def is_exact(self) -> bool:
        """Whether only the same bits are the same."""
        return not self.atol and not self.rtol


@dataclass(frozen=True, slots=True)
class Apart:
    """Elements that differ: how many, the first of them, and how far apart any two are."""

    count: int
    first: int
    most: int | float | None
    """None where no difference is a number, as between a number and a NaN."""

    def joined(self, other: Apart) -> Apart:
        known = [most for most in (self.most, other.most) if most is not None]
        first = min(self.first, other.first)
        return Apart(self.count + other.count, first, max(known, default=None))


def apart(dtype: DType, a: Array, b: Array, tolerance: Tolerance, start: int = 0) -> Apart | None:
    """Where two flat arrays of raw elements (`dtype.bits`) differ, the first being the element
    `start`; None where they do not.
    """
    found: Apart | None = None
    for begin in range(0, len(a), _BLOCK):
        ours, theirs = a[begin : begin + _BLOCK], b[begin : begin + _BLOCK]
        word = np.uint64 if ours.nbytes % 8 == 0 else np.uint8
        if not (ours.view(word) != theirs.view(word)).any():
            continue
        here = _block(dtype, ours, theirs, tolerance)
        if here is not None:
            here = Apart(here.count, start + begin + here.first, here.most)
            found = here if found is None else found.joined(here)
    return found


def is_near(a: Any, b: Any, tolerance: Tolerance) -> bool:
    """Whether two values of objects that are not of the same bytes are near each other."""
    if tolerance.is_exact or type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(is_near(a[key], b[key], tolerance) for key in a)
    if isinstance(a, (list, tuple)):
        pairs = zip(a, b, strict=False)
        return len(a) == len(b) and all(is_near(x, y, tolerance) for x, y in pairs)
    if isinstance(a, (float, np.generic, np.ndarray)):
        x, y = np.asarray(a), np.asarray(b)
        if x.dtype != y.dtype or x.shape != y.shape:
            return False
        dtype = DType.of(x.dtype)
        ours, theirs = (np.ascontiguousarray(v).reshape(-1).view(dtype.bits) for v in (x, y))
        return apart(dtype, ours, theirs, tolerance) is None
    if isinstance(a, int) and not isinstance(a, bool):
        try:
            return bool(abs(a - b) <= tolerance.atol + tolerance.rtol * abs(b))
        except OverflowError:  # too large for a float
            allowed = Fraction(tolerance.atol) + Fraction(tolerance.rtol) * abs(b)
            return bool(abs(a - b) <= allowed)
    return bool(a == b)


def _block(dtype: DType, a: Array, b: Array, tolerance: Tolerance) -> Apart | None:
    x, y = numbers(dtype, a), numbers(dtype, b)
    are_integers = x.dtype.kind in "iu"
    distance: Array
    if are_integers:
        # Of 64 bits the difference may need 65, but its size does not, and wraps to the right one.
        unsigned = np.dtype(f"<u{x.itemsize}")
        high, low = np.maximum(x, y).view(unsigned), np.minimum(x, y).view(unsigned)
        distance = (high - low).astype(np.uint64)
    else:
        with np.errstate(all="ignore"):
            distance = np.abs(x - y)
    if tolerance.is_exact and a.itemsize <= 8:
        differs = a != b
    elif tolerance.is_exact:
        # Raw elements of 16 bytes are complex numbers, of which -0.0 and 0.0 are equal.
        words = a.view(np.uint64) != b.view(np.uint64)
        differs = words[::2] | words[1::2]
    elif are_integers:
        # Compared as integers: doubles do not tell large ones apart.
        allowed = np.floor(tolerance.atol + tolerance.rtol * np.abs(y.astype(np.float64)))
        limit = np.where(allowed < _LARGEST, allowed, 0).astype(np.uint64)
        differs = (distance > limit) & (allowed < _LARGEST)
    else:
        with np.errstate(all="ignore"):
            allowed = np.asarray(tolerance.atol)
            if tolerance.rtol:
                allowed = allowed + tolerance.rtol * np.abs(y)
            # Nothing else is near to infinity, however much of infinity is allowed.
            differs = ~((distance <= allowed) & (distance < np.inf))
        if differs.any():
            differs &= ~((x == y) | (np.isnan(x) & np.isnan(y)))
    count = int(np.count_nonzero(differs))
    if not count:
        return None
    # What is the same is 0 apart, or NaN: mostly there is no need to pick those that differ.
    most = np.fmax.reduce(distance).item() if tolerance.is_exact else 0
    if not most > 0:
        known = distance[differs]
        known = known[~np.isnan(known)]
        most = known.max().item() if len(known) else None
    return Apart(count, int(np.argmax(differs)), most)


def numbers(dtype: DType, raw: Array) -> Array:
    """The values of raw elements: integers as they are, everything else in double precision."""
    if dtype.name == "bool":
        return raw.view(np.uint8)
    if dtype.name == "bfloat16":
        # The upper half of a float32; ml_dtypes takes three times as long.
        return _doubled((raw.astype(np.uint32) << 16).view(np.float32))
    if dtype.itemsize == 1 and dtype.name.startswith("float8"):
        return np.take(_doubles(dtype), raw)
    halves = dtype.name == "complex_float16"
    values = raw.view("<f2") if halves else raw.view(dtype.numpy)
    if values.dtype.kind in "iu":
        return values
    wide = _doubled(values)
    return wide.view(np.complex128) if halves else wide


def _doubled(values: Array) -> Array:
    with np.errstate(invalid="ignore"):  # a NaN that signals
        return values.astype(np.complex128 if values.dtype.kind == "c" else np.float64)


@cache
def _doubles(dtype: DType) -> Array:
    """What each of the 256 bytes is."""
    return _doubled(np.arange(256, dtype=np.uint8).view(dtype.numpy))

"""What of a step goes over, what it is called there, and what it is stored as."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ckptkit.errors import InvalidNameError, UnsupportedTypeError, UsageError
from ckptkit.format.arrays import Alias, ArrayInfo
from ckptkit.format.names import (
    NAMES_HINT,
    ancestors,
    check_used,
    checked_path,
    inner_name,
    join,
    matches,
    pattern_list,
    split,
)
from ckptkit.model import DTYPES, DType

_SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}


@dataclass(frozen=True, slots=True)
class Selection:
    """Patterns of what to take and leave, and what to change of it on the way.

    A pattern, with * and ?, matches a whole name (`model/layers.0.*`) or the name inside of its
    group (`layers.0.*`, which optimizer state has too). `cast` is pairs of a pattern and a dtype,
    where an empty pattern means all parameters; `rename` pairs of a regular expression and its
    replacement, for names inside of their groups.
    """

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    optimizer: bool = True
    cast: tuple[tuple[str, str], ...] = ()
    rename: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        for keyword in ("include", "exclude"):
            object.__setattr__(self, keyword, pattern_list(getattr(self, keyword), keyword))
        for keyword in ("cast", "rename"):
            object.__setattr__(self, keyword, _pairs(getattr(self, keyword), keyword))
        for _, dtype in self.cast:
            _float(dtype)
        for pattern, replacement in self.rename:
            try:
                re.compile(pattern).sub(replacement, "")
            except (re.error, IndexError) as error:
                raise UsageError(
                    f"not a regular expression and its replacement: {error}",
                    value=f"{pattern}=>{replacement}",
                ) from error

    def takes(self, name: str, inner: str, role: str) -> bool:
        """Whether an array goes over."""
        if role == "optimizer" and not self.optimizer:
            return False
        wanted = not self.include or matches(self.include, name, inner)
        return wanted and not matches(self.exclude, name, inner)

    def dtype_of(self, array: ArrayInfo, tied: Sequence[str] = ()) -> DType:
        """What an array is stored as, which may have other names."""
        names = [array.name, *tied]
        for pattern, dtype in reversed(self.cast):
            named = any(matches((pattern,), n, inner_name(n, array.role)) for n in names)
            if named if pattern else array.role == "param" and _is_float(array.dtype):
                return self._cast(array, _float(dtype))
        return array.dtype

    def renamed(self, inner: str) -> str:
        """What is called so inside of its group, in the target."""
        for pattern, replacement in self.rename:
            inner = re.sub(pattern, replacement, inner)
        return inner

    def _cast(self, array: ArrayInfo, dtype: DType) -> DType:
        if not _is_float(array.dtype):
            raise UnsupportedTypeError(
                "only floating-point numbers are cast", where=array.name, value=array.dtype.name
            )
        return dtype


@dataclass(frozen=True, slots=True, eq=False)
class Chosen:
    """One array that goes over: its number in the source's manifest, and what it will be."""

    number: int
    source: ArrayInfo
    name: str
    dtype: DType
    of: str | None

    @property
    def inner(self) -> str:
        """The new name inside of its group: of optimizer state, its parameter's."""
        return inner_name(self.name, self.source.role)

    @property
    def is_cast(self) -> bool:
        """Whether its values are converted."""
        return self.dtype != self.source.dtype


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """All that goes over, sorted by name; `names` leads from the source's names to the target's."""

    arrays: tuple[Chosen, ...]
    aliases: tuple[Alias, ...]
    names: dict[str, str]
    leads: dict[str, str]
    """The same, and from names that are left out to that under which their array goes over."""
    left_out: frozenset[str]
    """Names of the source that do not go over."""

    @property
    def is_all_as_before(self) -> bool:
        """Whether every array goes over, under its own name."""
        return not self.left_out and all(old == new for old, new in self.names.items())

    @property
    def changed(self) -> frozenset[str]:
        """The names, in the source, of arrays whose values are converted."""
        return frozenset(chosen.source.name for chosen in self.arrays if chosen.is_cast)


def choose(every: Sequence[ArrayInfo], tied_names: Sequence[Alias], selection: Selection) -> Choice:
    """Apply a selection to what a step holds."""
    tied: dict[str, list[str]] = {}
    for alias in tied_names:
        tied.setdefault(alias.alias_of, []).append(alias.name)
    names: dict[str, str] = {}
    leads: dict[str, str] = {}
    arrays: list[Chosen] = []
    aliases: list[Alias] = []
    for number, array in enumerate(every):
        # The name of its own first: an alias steps in only where that is left out.
        called = [array.name, *tied.get(array.name, ())]
        role = array.role
        taken = [name for name in called if selection.takes(name, inner_name(name, role), role)]
        if not taken:
            continue
        first, *others = [_target_name(name, array, selection) for name in taken]
        names |= dict(zip(taken, [first, *others], strict=True))
        leads |= dict.fromkeys(called, first)
        dtype = selection.dtype_of(array, called[1:])
        arrays.append(Chosen(number, array, first, dtype, array.of))
        aliases += [Alias(other, first) for other in others]
    _check_unused({array.name: array for array in every}, tied_names, selection)
    if every and not arrays:
        raise UsageError("nothing is left of the step", value=selection, hint=NAMES_HINT)
    _check_names(arrays, aliases)
    leads |= names
    arrays = [replace(chosen, of=_parameter(chosen.of, leads, selection)) for chosen in arrays]
    arrays.sort(key=lambda chosen: chosen.name)
    aliases.sort(key=lambda alias: alias.name)
    there = {array.name for array in every} | {alias.name for alias in tied_names}
    return Choice(tuple(arrays), tuple(aliases), names, leads, frozenset(there - names.keys()))


def _target_name(name: str, array: ArrayInfo, selection: Selection) -> str:
    if not selection.rename:
        return name
    inner = inner_name(name, array.role)
    new = selection.renamed(inner)
    if new == inner:
        return name
    nodes = split(name)
    state = nodes[-1:] if array.role == "optimizer" and len(nodes) > 2 else ()
    group = nodes[:1] if len(nodes) > 1 else ()
    try:
        return join(*group, *new.split("/"), *state)
    except InvalidNameError as error:
        error.where = f"{name}, renamed"
        raise


def _parameter(name: str | None, leads: dict[str, str], selection: Selection) -> str | None:
    """What a parameter is called in the target, also where it does not go over itself."""
    if name is None or name in leads:
        return leads[name] if name is not None else None
    nodes = split(name)
    new = selection.renamed("/".join(nodes[1:]))
    return checked_path(join(nodes[0], *new.split("/"))) if len(nodes) > 1 else name


def _check_names(arrays: Sequence[Chosen], aliases: Sequence[Alias]) -> None:
    names: dict[str, str] = {}
    every = [(c.name, c.source.name) for c in arrays] + [(a.name, a.alias_of) for a in aliases]
    for name, source in every:
        if name in names:
            raise InvalidNameError(
                f"two arrays would have this name: {names[name]} and {source}",
                value=name,
                hint="make the replacement keep what tells them apart",
            )
        names[name] = source
    _check_nesting(names)


def _check_unused(
    known: Mapping[str, ArrayInfo], aliases: Sequence[Alias], selection: Selection
) -> None:
    every = [(name, array.role) for name, array in known.items()]
    every += [(alias.name, known[alias.alias_of].role) for alias in aliases]
    casts = (pattern for pattern, _ in selection.cast if pattern)
    patterns = (*selection.include, *selection.exclude, *casts)
    names = [(name, inner_name(name, role)) for name, role in every]
    check_used(patterns, names, "no array has such a name")


def _check_nesting(names: Iterable[str]) -> None:
    known = set(names)
    for name in known:
        clash = known.intersection(ancestors(name))
        if clash:
            raise InvalidNameError(
                "an array cannot have arrays below it", where=clash.pop(), value=name
            )


def _pairs(value: Any, keyword: str) -> tuple[tuple[str, str], ...]:
    pairs = () if isinstance(value, str) else tuple(value)
    if isinstance(value, str) or any(isinstance(pair, str) or len(pair) != 2 for pair in pairs):
        raise UsageError(
            f"{keyword} takes a tuple of pairs",
            value=value,
            hint=f'write {keyword}=(("first", "second"),)',
        )
    return tuple((first, second) for first, second in pairs)


def _is_float(dtype: DType) -> bool:
    return "float" in dtype.name and "complex" not in dtype.name


def _float(name: str) -> DType:
    known = _SHORT.get(name.lower(), name)
    if known not in DTYPES or not _is_float(DTYPES[known]):
        raise UnsupportedTypeError(
            "a cast is to floating-point numbers",
            value=name,
            hint=f"write {', '.join(_SHORT)}, or a name such as float8_e4m3fn",
        )
    return DTYPES[known]

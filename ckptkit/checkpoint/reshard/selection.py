"""What of a step goes over, what it is called there, and what it is stored as."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ckptkit.checkpoint.read.checkpoint import Checkpoint
from ckptkit.checkpoint.reshard.translation import Chosen, Translation, TranslationLike, with_inner
from ckptkit.checkpoint.workers import ask_all
from ckptkit.errors import InvalidNameError, UnsupportedTypeError, UsageError
from ckptkit.format.arrays import Alias, ArrayInfo, ArrayKind
from ckptkit.format.encoding import dumps
from ckptkit.format.manifest import Manifest
from ckptkit.format.names import (
    ALIKE,
    MODEL,
    NAMES_HINT,
    OPTIMIZER,
    OWN,
    REFERENCE,
    WRAPPED,
    ancestors,
    check_used,
    escape,
    in_group,
    inner_name,
    matches,
    pattern_list,
    split,
)
from ckptkit.format.objects import ObjectInfo, share_of, total
from ckptkit.model import DTYPES, DType

_SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}


@dataclass(frozen=True, slots=True)
class Selection:
    """Patterns of what to take and leave, and what to change of it on the way.

    A pattern, with * and ?, matches a whole name (`model/layers.0.*`) or the name inside of its
    group (`layers.0.*`, which optimizer state has too). `cast` is pairs of a pattern and a dtype,
    where an empty pattern means all parameters; `rename` pairs of a regular expression and its
    replacement, for names inside of their groups; `names` a table of names as two programs have
    them (its name, a file, or a document), in which rows of several arrays may make one.
    """

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    optimizer: bool = True
    cast: tuple[tuple[str, str], ...] = ()
    rename: tuple[tuple[str, str], ...] = ()
    names: TranslationLike | None = None

    def __post_init__(self) -> None:
        for keyword in ("include", "exclude"):
            object.__setattr__(self, keyword, pattern_list(getattr(self, keyword), keyword))
        for keyword in ("cast", "rename"):
            value: Any = getattr(self, keyword)
            pairs = () if isinstance(value, str) else tuple(value)
            if isinstance(value, str) or any(isinstance(p, str) or len(p) != 2 for p in pairs):
                raise UsageError(
                    f"{keyword} takes a tuple of pairs",
                    value=value,
                    hint=f'write {keyword}=(("first", "second"),)',
                )
            object.__setattr__(self, keyword, tuple((first, second) for first, second in pairs))
        if self.names is not None:
            object.__setattr__(self, "names", Translation.of(self.names))
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

    def takes(self, name: str, role: str) -> bool:
        if role == "optimizer" and not self.optimizer:
            return False
        if not (self.include or self.exclude):
            return True
        inner = inner_name(name, role)
        wanted = not self.include or matches(self.include, name, inner)
        return wanted and not matches(self.exclude, name, inner)

    def renamed(self, name: str, role: str) -> str:
        """What an array of this name in the source is called in the target."""
        if not self.rename:
            return name
        inner = inner_name(name, role)
        new = _replaced(inner, self.rename)
        return name if new == inner else with_inner(name, role, new)


def _replaced(inner: str, pairs: Sequence[tuple[str, str]]) -> str:
    for pattern, replacement in pairs:
        inner = re.sub(pattern, replacement, inner)
    return inner


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """All that goes over, sorted by name."""

    arrays: tuple[Chosen, ...]
    aliases: tuple[Alias, ...]
    objects: tuple[ObjectInfo, ...]
    names: dict[str, str]
    """The name in the target, by each name in the source that is taken; the first one of a cut."""
    targets: dict[str, tuple[str, ...]]
    """All names in the target, by each name in the source of an array that goes over. So references
    by a second name that is left out arrive, and those to an array that is cut find all its parts.
    """
    left_out: frozenset[str]
    """Names of the source that do not go over."""


def choose(
    manifest: Manifest, selection: Selection, sizes: Mapping[str, Any] | None = None
) -> Choice:
    """Apply a selection to what a step holds; no byte of any array is looked at. Tables of names
    refer to `sizes` of the model, besides those that the step has.
    """
    tied: dict[str, list[str]] = {}
    for alias in manifest.aliases:
        tied.setdefault(alias.alias_of, []).append(alias.name)
    casts = (pattern for pattern, _ in selection.cast if pattern)
    patterns = (*selection.include, *selection.exclude, *casts)
    names: dict[str, str] = {}
    targets: dict[str, tuple[str, ...]] = {}
    arrays: list[Chosen] = []
    aliases: list[Alias] = []
    inner: list[str] = []
    kinds: dict[tuple[int, DType], ArrayKind] = {}
    for number, array in enumerate(manifest.arrays):
        called = [array.name, *tied.get(array.name, ())]
        # The name of its own first: an alias steps in only where that is left out.
        taken = [name for name in called if selection.takes(name, array.role)]
        if not taken:
            continue
        for name in taken:
            names[name] = selection.renamed(name, array.role)
            if selection.rename:
                inner.append(inner_name(name, array.role))
        first = names[taken[0]]
        for name in called:
            targets[name] = (first,)
        arrays.append(Chosen(number, array, _changed(array, first, selection, called, kinds), ()))
        aliases += [Alias(names[name], first) for name in taken[1:]]
    if patterns:
        every = ((n, a.role) for a in manifest.arrays for n in (a.name, *tied.get(a.name, ())))
        both = [(name, inner_name(name, role)) for name, role in every]
        check_used(patterns, both, "no array has such a name")
    if manifest.arrays and not arrays:
        raise UsageError("nothing is left of the step", value=selection, hint=NAMES_HINT)
    for number, (pattern, replacement) in enumerate(selection.rename):
        before = (_replaced(name, selection.rename[:number]) for name in inner)
        if not any(re.search(pattern, name) for name in before):
            raise UsageError(
                "no array has a name to rename so",
                value=f"{pattern}=>{replacement}",
                hint="it is for names inside of their groups, which `ckpt show STEP` has",
            )
    targets |= {old: (new,) for old, new in names.items()}
    if isinstance(selection.names, Translation):
        seconds = {alias.name: alias.alias_of for alias in aliases}
        known = {**manifest.sizes, **(sizes or {})}
        arrays, new = selection.names.applied(arrays, seconds, known)
        aliases = [Alias(new[name][0], new[first][0]) for name, first in seconds.items()]
        names = {old: new[name][0] for old, name in names.items()}
        targets = {old: new[name] for old, (name,) in targets.items()}
    if selection.rename or selection.names:  # the source's own names fit together
        _check_names(arrays, aliases)
    for number, each in enumerate(arrays):
        of = each.info.of
        if of is None:
            continue
        # A parameter is called so in the target also where it does not go over itself.
        first, *others = targets.get(of) or (selection.renamed(of, "param"),)
        # Where it is cut, each part has its own state.
        own = with_inner(first, "param", inner_name(each.name, each.info.role)) if others else first
        new_of = own if own in others else first
        if new_of != of:
            arrays[number] = replace(each, info=each.info._replace(of=new_of))
    choice = Choice(
        tuple(sorted(arrays, key=lambda chosen: chosen.name)),
        tuple(sorted(aliases, key=lambda alias: alias.name)),
        (),
        names,
        targets,
        frozenset({*manifest.table.names, *(a.name for a in manifest.aliases)} - names.keys()),
    )
    return replace(choice, objects=_chosen_objects(manifest.objects, choice, selection))


def check_numbers(checkpoint: Checkpoint, choice: Choice) -> None:
    """Refuse numbers that become one, such as the steps that an optimizer counts for each
    parameter, and are not the same.
    """
    merged = [chosen for chosen in choice.arrays if chosen.equal]
    names = [name for chosen in merged for name in (chosen.source.name, *chosen.equal)]
    # Opened for itself: of a plan that is not run no file stays open.
    with Checkpoint(checkpoint.folder, checkpoint.manifest) as opened:
        values = dict(zip(names, ask_all(opened.store, opened.read, names), strict=True))
    for chosen in merged:
        first = values[chosen.source.name]
        for name in chosen.equal:
            if values[name].tobytes() != first.tobytes():
                raise InvalidNameError(
                    f"it becomes one with {chosen.source.name}, which is {first}",
                    where=name,
                    value=values[name].item(),
                    hint="leave optimizer state out (--no-optimizer), or only these "
                    f"(--exclude '*/{split(name)[-1]}')",
                )


def _changed(
    array: ArrayInfo,
    name: str,
    selection: Selection,
    called: Sequence[str],
    kinds: dict[tuple[int, DType], ArrayKind],
) -> ArrayInfo:
    """An array under its new name, and as what it is cast to: mostly the very same. Arrays that
    were alike still share their kind, one of `kinds`.
    """
    dtype = array.dtype
    for pattern, wanted in reversed(selection.cast):  # the last one that fits counts
        if pattern:
            fits = any(matches((pattern,), n, inner_name(n, array.role)) for n in called)
        else:
            fits = array.role == "param" and _is_float(array.dtype)
        if fits and not _is_float(array.dtype):
            raise UnsupportedTypeError(
                "only floating-point numbers are cast", where=array.name, value=array.dtype.name
            )
        if fits:
            dtype = _float(wanted)
            break
    if name == array.name and dtype == array.dtype:
        return array
    kind = array.kind
    if dtype != array.dtype:
        if (id(kind), dtype) not in kinds:
            kinds[id(kind), dtype] = replace(kind, dtype=dtype)
        kind = kinds[id(kind), dtype]
    return array._replace(name=name, kind=kind)


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
    for name in names:
        clash = names.keys() & set(ancestors(name))
        if clash:
            raise InvalidNameError(
                "an array cannot have arrays below it", where=clash.pop(), value=name
            )


def _is_float(dtype: DType) -> bool:
    return "float" in dtype.name and "complex" not in dtype.name


def _float(name: str) -> DType:
    known = _SHORT.get(str(name).lower(), str(name))
    if known not in DTYPES or not _is_float(DTYPES[known]):
        raise UnsupportedTypeError(
            "a cast is to floating-point numbers",
            value=name,
            hint=f"write {', '.join(_SHORT)}, or a name such as float8_e4m3fn",
        )
    return DTYPES[known]


def objects_of(objects: Sequence[ObjectInfo], rank: int, world_size: int) -> list[ObjectInfo]:
    """What one rank of the target says of the objects, so that together they say the same."""
    found = []
    for item in objects:
        value, count = item.value, None
        if item.semantics == "replicated":
            if rank:
                continue
        elif len(value) == world_size:
            value = value[rank]
        elif item.semantics == "per_rank":
            # They belong to ranks that do not exist here: kept whole, for a job of that size.
            if rank:
                continue
            count = len(value)
        elif item.semantics == "split":
            value = share_of(value, rank, world_size)
        else:
            # Not in equal shares, which need not add up to the same number again.
            value = total(value)
            if rank:
                is_array = isinstance(value, np.ndarray)
                value = np.zeros_like(value) if is_array else type(value)(0)
        found.append(ObjectInfo(item.name, item.semantics, value, count))
    return found


def _chosen_objects(
    objects: Sequence[ObjectInfo], choice: Choice, selection: Selection
) -> tuple[ObjectInfo, ...]:
    """The objects that go over, with the names that arrays have in the target."""
    # Of these the bytes are others.
    cast = {
        source.name
        for chosen in choice.arrays
        if chosen.is_cast or chosen.rows
        for _, source in chosen.origins
    }
    # What arrays make together goes over if they do, and other objects refer to it as to an array.
    records = in_group(WRAPPED, {item.name: item.value for item in objects})
    targets = dict(choice.targets)
    for name in records:
        parts = _parts_of(name, records)
        if cast.intersection(parts):
            raise UsageError(
                "a part of a tensor that is made of several cannot be cast or changed", where=name
            )
        pairs = [(new, part) for part in parts for new in choice.targets.get(part, ())]
        if pairs:
            called = {new.removesuffix(part.removeprefix(name)) for new, part in pairs}
            targets[name] = tuple(sorted(called))
    is_as_before = not choice.left_out and all(old == new for old, new in choice.names.items())
    found = []
    for item in objects:
        group, _, rest = item.name.partition("/")
        if group == OPTIMIZER and not rest and not selection.optimizer:
            continue
        # What some ranks have of their own lies in a map that says whose it is.
        is_own = group == OWN and isinstance(item.value, dict)
        told = item.value.get("value") if is_own else item.value
        if not is_as_before and _is_gone(told, targets):
            continue
        if group == ALIKE and rest in cast | choice.left_out:
            continue
        if group == WRAPPED:
            new = sorted(targets.get(rest, ()))
            found += [ObjectInfo(f"{WRAPPED}/{n}", item.semantics, item.value) for n in new]
            continue
        name = f"{group}/{choice.names.get(rest, rest)}" if group == ALIKE else item.name
        value = item.value
        if not is_as_before:
            if item.name == OPTIMIZER and item.semantics == "replicated":
                value = _optimizers(value, targets)
            # What optimizers keep besides refers to arrays too.
            value = _pointing(value, targets)
        found.append(ObjectInfo(name, item.semantics, value, item.ranks))
    return tuple(found)


def _parts_of(name: str, records: Mapping[str, Any]) -> list[str]:
    """The arrays that make the tensor of a record, whose parts may be made of several too."""
    value = records.get(name)
    inner = value.get("inner") if isinstance(value, dict) else None
    if not isinstance(inner, list):
        return [name]
    parts = [f"{name}%2F{escape(str(part))}" for part in dict.fromkeys(map(str, inner))]
    return [each for part in parts for each in _parts_of(part, records)]


def _optimizers(value: Any, targets: Mapping[str, Sequence[str]]) -> Any:
    """What optimizers say, of the parameters that are left and by their new names."""
    if not isinstance(value, list) or not all(isinstance(document, dict) for document in value):
        return value
    # They call parameters as the model does.
    names: dict[str, list[str]] = {}
    for name, new in targets.items():
        group, *nodes = split(name)
        if group == MODEL and nodes:
            names["/".join(nodes)] = ["/".join(split(each)[1:]) for each in new]
    found = []
    for document in value:
        changed, listed = dict(document), list[str]()
        changed["groups"] = []
        for group in document.get("groups", []):
            if not isinstance(group, dict) or not isinstance(group.get("params"), list):
                changed["groups"].append(group)
                continue
            params = dict.fromkeys(new for p in group["params"] for new in names.get(p, ()))
            changed["groups"].append({**group, "params": [*params]})
            listed += params
        if len(set(listed)) < len(listed):
            raise UsageError("parameters that become one are in several groups of the optimizer")
        if isinstance(document.get("values"), dict):
            values: dict[str, Any] = {}
            for name, own in document["values"].items():
                for new in names.get(name, ()):
                    if dumps(values.setdefault(new, own)) != dumps(own):
                        raise UsageError(
                            "parameters that become one differ in what the optimizer counts",
                            where=new,
                            value=(values[new], own),
                        )
            changed["values"] = values
        found.append(changed)
    return found


def _pointing(value: Any, names: Mapping[str, Sequence[str]]) -> Any:
    """A nested value whose references to arrays lead to those of the target; what leads to none
    goes.
    """
    if (name := _referred(value)) is not None:
        if len(names[name]) > 1:
            raise UsageError("an optimizer refers to an array that is to be cut", where=name)
        return {REFERENCE: names[name][0]}
    if isinstance(value, dict):
        return {key: _pointing(v, names) for key, v in value.items() if not _is_gone(v, names)}
    if isinstance(value, (list, tuple)):
        return type(value)(_pointing(each, names) for each in value)
    return value


def _is_gone(value: Any, names: Mapping[str, Sequence[str]]) -> bool:
    """Whether it leads to an array that does not go over. A list goes as a whole where an item
    does, for later ones would take its place; and so does what a mark makes of a list.
    """
    if isinstance(value, (list, tuple)):
        return any(_is_gone(each, names) for each in value)
    if (name := _referred(value)) is not None:
        return name not in names
    mark = str(next(iter(value))) if isinstance(value, dict) and len(value) == 1 else ""
    return mark.startswith("ckptkit.") and _is_gone(value[mark], names)


def _referred(value: Any) -> str | None:
    """The name of the array that a value is a reference to, if it is one."""
    name = value[REFERENCE] if isinstance(value, dict) and list(value) == [REFERENCE] else None
    return name if isinstance(name, str) else None

"""What differs between two steps, as it is shown."""

from __future__ import annotations

from typing import Any

from ckptkit.cli.output import counted
from ckptkit.cli.quantity import size_text
from ckptkit.cli.values import as_json, in_short

import ckptkit


def lines_of(found: ckptkit.Diff) -> list[str]:
    """What differs, for people: a line each, and one for all."""
    return [*map(_array_line, found.arrays), *map(_object_line, found.objects), _summary(found)]


def _array_line(found: ckptkit.ArrayDifference) -> str:
    a, b, values = found.a, found.b, found.values
    if a is None or b is None:
        return f"{found.name}: only in {'B' if a is None else 'A'}"
    if found.kind == "shape":
        return f"{found.name}: shape {a.shape} != {b.shape}"
    if values is None:
        return f"{found.name}: dtype {a.dtype} != {b.dtype}"
    most = "" if values.max_abs is None else f" by {values.max_abs:.6g} at most"
    first = f", first at {list(values.first)}" if values.first else ""
    return f"{found.name}: {values.count} of {counted(values.of, 'element')} differ{most}{first}"


def _object_line(found: ckptkit.ObjectDifference) -> str:
    if found.kind.startswith("only_"):
        return f"object {found.name}: only in {found.kind[-1].upper()}"
    what = "semantics " if found.kind == "semantics" else ""
    return f"object {found.name}: {what}{in_short(found.a, 40)} != {in_short(found.b, 40)}"


def _summary(found: ckptkit.Diff) -> str:
    between = f"A {found.a.strategy}, B {found.b.strategy}"
    arrays, objects = counted(found.array_count, "array"), counted(found.object_count, "object")
    if found.same:
        return f"the same state: {arrays}, {objects}, {size_text(found.nbytes)} ({between})"
    differing = ((found.arrays, arrays), (found.objects, objects))
    parts = [f"{len(items)} of {every}" for items, every in differing if items]
    verb = "differs" if len(found.arrays) + len(found.objects) == 1 else "differ"
    return f"{' and '.join(parts)} {verb} ({between})"


def document_of(found: ckptkit.Diff) -> dict[str, Any]:
    """What differs, for programs."""
    return {
        "same": found.same,
        **{
            side: {"location": each.location, "step": each.step, "strategy": each.strategy}
            for side, each in (("a", found.a), ("b", found.b))
        },
        "arrays": found.array_count,
        "objects": found.object_count,
        "bytes": found.nbytes,
        "array_differences": [
            {
                "name": each.name,
                "kind": each.kind,
                "a": _form(each.a),
                "b": _form(each.b),
                "values": _values(each.values),
            }
            for each in found.arrays
        ],
        "object_differences": [
            {"name": each.name, "kind": each.kind, "a": as_json(each.a), "b": as_json(each.b)}
            for each in found.objects
        ],
    }


def _form(form: Any) -> dict[str, Any] | None:
    return None if form is None else {"shape": list(form.shape), "dtype": form.dtype}


def _values(values: Any) -> dict[str, Any] | None:
    if values is None:
        return None
    return {
        "count": values.count,
        "of": values.of,
        "max_abs": as_json(values.max_abs),
        "first": list(values.first),
    }

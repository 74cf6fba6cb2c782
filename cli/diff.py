"""`ckpt diff`: are two steps the same state?"""

from __future__ import annotations

from typing import Any

import click
from ckptkit.cli.exits import CORRUPT, NO, OK
from ckptkit.cli.options import Options, command, location, source_storage, storage
from ckptkit.cli.output import (
    Bar,
    answer,
    counted,
    in_short,
    json_value,
    size_text,
    stored_bytes,
)

import ckptkit


@command(
    "ckpt diff runs/7b runs/7b-tp4",
    "ckpt diff runs/7b runs/7b-bf16 --include 'model/*' --rtol 1e-3",
    exits={OK: "the same state", NO: "something differs"},
    codes=[CORRUPT],
)
@location("a")
@location("b")
@click.option("--include", metavar="PATTERN", multiple=True, help="Compare only these.")
@click.option("--exclude", metavar="PATTERN", multiple=True, help="Leave these out.")
@click.option("--atol", type=float, default=0.0, help="Numbers may be this far apart.")
@click.option("--rtol", type=float, default=0.0, help="Or this many times the size of B's.")
@click.option(
    "--memory",
    metavar="SIZE",
    default="256MiB",
    show_default=True,
    help="At most this is in use.",
)
@click.option("--threads", type=click.IntRange(min=1), help="How many read; a few by default.")
@storage
@source_storage("A")
def diff(
    a: str,
    b: str,
    *,
    storage_options: Options | None,
    source_options: Options | None,
    as_json: bool,
    **given: Any,
) -> int:
    """Compare the steps A and B: names, shapes, dtypes, values, objects.

    How they are sharded is no difference. Elements have to be the same to the bit, unless --atol or
    --rtol is given: then NaNs are alike, and numbers that are at most ATOL + RTOL * |b| apart.
    PATTERN, with * and ?, picks by the whole name or by the one inside of the group. Every byte is
    checked on the way.
    """
    total = 0
    for place, own in ((a, source_options or storage_options), (b, storage_options)):
        with ckptkit.open(place, storage_options=own) as checkpoint:
            total += stored_bytes(checkpoint)
    stores: Any = {"storage_options": storage_options, "source_options": source_options}
    with Bar("diff", total) as bar:
        found = ckptkit.diff(a, b, progress=bar, **stores, **given)
    answer(_document(found), _lines(found), as_json=as_json)
    return OK if found.same else NO


def _lines(found: ckptkit.Diff) -> list[str]:
    """A line for each difference, and one for all."""
    lines = [*map(_array_line, found.arrays), *map(_object_line, found.objects)]
    between = f"A {found.a.strategy}, B {found.b.strategy}"
    arrays, objects = counted(found.array_count, "array"), counted(found.object_count, "object")
    if found.same:
        what = f"{arrays}, {objects}, {size_text(found.nbytes)}"
        return [*lines, f"the same state: {what} ({between})"]
    differing = ((found.arrays, arrays), (found.objects, objects))
    parts = [f"{len(items)} of {every}" for items, every in differing if items]
    verb = "differs" if len(found.arrays) + len(found.objects) == 1 else "differ"
    return [*lines, f"{' and '.join(parts)} {verb} ({between})"]


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


def _document(found: ckptkit.Diff) -> dict[str, Any]:
    sides = {"a": found.a, "b": found.b}
    return {
        "same": found.same,
        **{
            side: {"location": each.location, "step": each.step, "strategy": each.strategy}
            for side, each in sides.items()
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
            {"name": each.name, "kind": each.kind, "a": json_value(each.a), "b": json_value(each.b)}
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
        "max_abs": json_value(values.max_abs),
        "first": list(values.first),
    }

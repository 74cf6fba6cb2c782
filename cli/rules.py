"""`ckpt rules`: how a strategy would cut every tensor, and which rule says so."""

from __future__ import annotations

from typing import Any

import click
from ckptkit.cli.command import command, location
from ckptkit.cli.exits import CORRUPT, NO, OK
from ckptkit.cli.output import aligned, counted, emit, emit_json, remark
from ckptkit.cli.sizes import sizes_from
from ckptkit.cli.storage import Options, storage

import ckptkit


@command(
    "ckpt rules runs/7b --to tp:4",
    "ckpt rules runs/7b --to tp:4,pp:2 --rules llama --config config.json",
    exits={OK: "every tensor is known", NO: "no rule knows some tensors"},
    codes=[CORRUPT],
)
@location("src")
@click.option("--to", metavar="STRATEGY", required=True, help="Such as tp:4 or pp:2,fsdp:4.")
@click.option("--rules", metavar="RULES", help="A file, a preset, or auto (the default).")
@click.option("--config", metavar="FILE", help="A config.json with the sizes that rules refer to.")
@click.option("--set", "given", metavar="NAME=N", multiple=True, help="One such size.")
@click.option("--replicate-unknown", is_flag=True, help="Replicate what no rule knows.")
@storage
def rules(
    src: str,
    *,
    to: str,
    rules: str | None,
    config: str | None,
    given: tuple[str, ...],
    replicate_unknown: bool,
    storage_options: Options | None,
    as_json: bool,
) -> int:
    """Show how a strategy would cut each tensor of the step SRC.

    Each tensor has a line: name, shape, how each axis cuts it, the shape of the part of rank 0, and
    which rule says so. Without --rules a SRC that was trained with tensor or pipeline parallelism
    is cut as it was; else the preset that fits the names of the tensors is taken.
    """
    sizes = sizes_from(config, given)
    found = ckptkit.explain_rules(
        src,
        to=to,
        rules=rules,
        sizes=sizes,
        replicate_unknown=replicate_unknown,
        storage_options=storage_options,
    )
    unknown = [each.name for each in found if each.unknown]
    missing = sorted({size for each in found for size in each.unknown_sizes})
    if as_json:
        tensors = [_document(each) for each in found]
        emit_json({"to": to, "tensors": tensors, "unknown": unknown, "unknown_sizes": missing})
    else:
        emit(aligned([("NAME", "SHAPE", "CUTS", "PART", "WHY"), *map(_row, found)]))
        for line in _notes(unknown, missing):
            remark(line)
    return NO if unknown else OK


def _document(each: ckptkit.Explained) -> dict[str, Any]:
    return {
        "name": each.name,
        "shape": list(each.shape),
        "placements": [{"axis": axis, "placement": cut} for axis, cut in each.placements],
        "part": list(each.part),
        "why": each.why,
        "unknown": list(each.unknown),
        "unknown_sizes": list(each.unknown_sizes),
    }


def _row(each: ckptkit.Explained) -> tuple[str, ...]:
    cuts = [f"{axis} {cut}" for axis, cut in each.placements if cut != "replicate"]
    return (
        each.name,
        str(each.shape),
        "; ".join(cuts) or "replicate",
        str(each.part),
        each.why,
    )


def _notes(unknown: list[str], missing: list[str]) -> list[str]:
    notes = []
    if missing:
        are = "is" if len(missing) == 1 else "are"
        notes.append(
            f"{', '.join(missing)} {are} unknown: attention heads may be cut in two, which `ckpt"
            " reshard` refuses; pass --config config.json"
        )
    if unknown:
        notes.append(
            f"{counted(len(unknown), 'tensor')} of which no rule knows; give --rules, or"
            " --replicate-unknown"
        )
    return notes

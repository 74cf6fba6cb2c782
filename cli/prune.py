"""`ckpt prune`: free what retention does not keep, and what aborted saves left."""

from __future__ import annotations

from typing import Any

import click
from ckptkit.cli.command import command, location
from ckptkit.cli.output import aligned, counted, emit, emit_json
from ckptkit.cli.quantity import seconds_of, size_text
from ckptkit.cli.runs import open_run
from ckptkit.cli.storage import Options, storage

import ckptkit

_KINDS = {
    "step": "step",
    "orphan": "never committed, of step",
    "leftover": "unfinished file, of step",
}


@command(
    "ckpt prune runs/7b --keep-last 3 --keep-every 10000 --dry-run",
    "ckpt prune runs/7b --keep-last 3 --keep-every 10000",
)
@location("run")
@click.option(
    "--keep-last",
    metavar="N",
    type=click.IntRange(min=1),
    help="Keep the newest N committed steps: those with the highest numbers.",
)
@click.option(
    "--keep-every", metavar="K", type=click.IntRange(min=1), help="Keep the multiples of K."
)
@click.option(
    "--grace",
    metavar="TIME",
    type=seconds_of,
    default="1h",
    show_default=True,
    help="Leave what no manifest names alone until this old: it may be a save under way.",
)
@click.option("--dry-run", is_flag=True, help="Only say what would be deleted.")
@storage
def prune(
    run: str,
    keep_last: int | None,
    keep_every: int | None,
    grace: float,
    *,
    dry_run: bool,
    storage_options: Options | None,
    as_json: bool,
) -> None:
    """Delete old steps of RUN, and leftovers.

    Leftovers are what saves that were never committed left: their data, an empty manifest, files
    that were not finished. A step stays if it is among the newest N or a multiple of K, and the
    newest always does; without --keep-last and --keep-every all committed steps stay. Newest means
    the highest step number, whenever it was saved. A step's manifest goes first, so that a crash
    leaves no half of one. Nothing is deleted through a symbolic link: steps that are links stay,
    are listed, and do not count; of a link inside a step only the name goes.
    """
    found = ckptkit.Run(run, storage_options=storage_options)
    work = found.plan_prune if dry_run else found.prune
    removals = work(keep_last=keep_last, keep_every=keep_every, grace=grace)
    young = [] if removals or not grace else found.plan_prune(grace=0)
    if not removals and not young:
        open_run(run, storage_options)  # which says what is wrong with a place that is no run
    links = found.links()
    gone = {removal.step for removal in removals if removal.kind == "step"}
    doc = {
        "run": found.location,
        "dry_run": dry_run,
        "removed": [_removed(removal) for removal in removals],
        "bytes": sum(removal.nbytes for removal in removals),
        "young": len(young),
        "kept": [step for step in found.steps() if step not in gone and step not in links],
        "links": [{"step": step, "target": links[step]} for step in links],
    }
    if as_json:
        emit_json(doc)
    else:
        emit(_lines(doc))


def _removed(removal: Any) -> dict[str, Any]:
    return {
        "kind": removal.kind,
        "step": removal.step,
        "name": removal.name,
        "bytes": removal.nbytes,
        "files": len(removal.keys),
    }


def _lines(doc: dict[str, Any]) -> list[str]:
    rows = [(*_what(gone), size_text(gone["bytes"]), gone["name"]) for gone in doc["removed"]]
    verb = "would free" if doc["dry_run"] else "freed"
    total = f"{verb} {size_text(doc['bytes'])}; kept: {counted(len(doc['kept']), 'step')}"
    lines = [*aligned(rows, right=[1, 2]), total]
    if doc["young"]:
        lines.append(f"left alone, as younger than --grace: {counted(doc['young'], 'leftover')}")
    return lines + [
        f"left alone, as a symbolic link: step {link['step']} -> {link['target']}"
        for link in doc["links"]
    ]


def _what(gone: dict[str, Any]) -> tuple[str, str]:
    if gone["step"] is None:
        return ("unfinished file, of the run", "")
    return (_KINDS[gone["kind"]], str(gone["step"]))

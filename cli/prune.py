"""`ckpt prune`: free what retention does not keep, and what aborted saves left."""

from __future__ import annotations

import click
from ckptkit.cli.command import command, location
from ckptkit.cli.output import aligned, counted, emit, emit_json
from ckptkit.cli.quantity import seconds_of, size_text
from ckptkit.cli.runs import open_run


@command(
    "ckpt prune runs/7b --keep-last 3 --keep-every 10000 --dry-run",
    "ckpt prune runs/7b --keep-last 3 --keep-every 10000",
)
@location("run")
@click.option(
    "--keep-last",
    metavar="N",
    type=click.IntRange(min=1),
    help="Keep the newest N committed steps.",
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
    help="Leave data without a manifest alone until this old: it may be a save under way.",
)
@click.option("--dry-run", is_flag=True, help="Only say what would be deleted.")
def prune(
    run: str,
    keep_last: int | None,
    keep_every: int | None,
    grace: float,
    *,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Delete old steps of RUN, and leftovers.

    Leftovers are the data of saves that were never committed. A step stays if it is among the
    newest N or a multiple of K, and the newest always does; without --keep-last and --keep-every
    all committed steps stay. A step's manifest goes first, so that a crash leaves no half of one.
    """
    found = open_run(run)
    work = found.plan_prune if dry_run else found.prune
    removals = work(keep_last=keep_last, keep_every=keep_every, grace=grace)
    gone = {removal.step for removal in removals if removal.kind == "step"}
    kept = [step for step in found.steps() if step not in gone]
    nbytes = sum(removal.nbytes for removal in removals)
    if as_json:
        removed = [
            {
                "kind": r.kind,
                "step": r.step,
                "name": r.name,
                "bytes": r.nbytes,
                "files": len(r.keys),
            }
            for r in removals
        ]
        doc = {
            "run": found.location,
            "dry_run": dry_run,
            "removed": removed,
            "bytes": nbytes,
            "kept": kept,
        }
        emit_json(doc)
        return
    rows = [(_KINDS[r.kind], str(r.step), size_text(r.nbytes), r.name) for r in removals]
    verb = "would free" if dry_run else "freed"
    emit(aligned(rows, right=[1, 2]))
    emit([f"{verb} {size_text(nbytes)}; kept: {counted(len(kept), 'step')}"])


_KINDS = {"step": "step", "orphan": "never committed, of step"}
